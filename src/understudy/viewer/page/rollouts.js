// Rollouts: the table of rows, sorted, filtered and searched by the server.
import { add, ask, fill, h, href, many, number, pictures, quoted, say, visible } from "./dom.js";
import { shownRuns } from "./state.js";

const COLUMNS = [
  ["step", "step"], ["source", "source"], ["teacher", "teacher"], ["reward", "reward"], ["advantage", "advantage"], ["tokens", "length"],
  ["kl", "log q − log p"], ["stop_reason", "stop"], ["turns", "turns"], ["newest", "weights"], ["age", "age"], ["kind", "from"],
];
const SORTED = ["step", "reward", "advantage", "tokens", "kl", "turns", "newest", "age"];
const LABELS = [["kind", "from"], ["source", "source"], ["teacher", "teacher"], ["stop_reason", "stop reason"], ["origin", "written by"]];
const PAGE = 50;
const LISTED = 2;  // pictures of a row in the table

function oneLine(text) { return visible(text.replace(/\s*\n\s*/g, " ⏎ ")); }

export async function rollouts(box, query) {
  const runs = shownRuns();
  const run = Number(query.run ?? runs[0]?.index ?? 0);
  const asked = { sort: "step", desc: "1", offset: 0, ...query, run };
  const list = h("div", {});
  const go = (changes) => { location.hash = href("rollouts", { ...asked, offset: 0, ...changes }); };

  const search = h("input", { type: "search", value: asked.q ?? "", placeholder: "Search the text (press /)", "aria-label": "Search the text of rows", onchange: () => go({ q: search.value }) });
  const range = (name, label) => h("label", {}, `${label} `,
    ["min", "max"].map((end) => h("input", { class: "short", type: "number", step: "any", value: asked[`${name}_${end}`] ?? "", "aria-label": `${label}, ${end}`, placeholder: end, onchange: (event) => go({ [`${name}_${end}`]: event.target.value }) })));
  const choices = h("span", {});
  add(box, [h("h2", {}, "Rollouts"), h("div", { class: "controls" },
    runs.length > 1 && h("label", {}, "run ", h("select", { onchange: (event) => go({ run: event.target.value }) },
      runs.map((one) => h("option", { value: one.index, selected: one.index === run }, one.name)))),
    search, choices, range("step", "step"), range("kl", "log q − log p"), range("reward", "reward")), list]);

  async function refresh() {
    if (list.contains(document.activeElement) || choices.contains(document.activeElement)) return;
    const began = performance.now();
    const found = await ask("rows", { ...asked, limit: PAGE });
    fill(choices, LABELS.map(([name, label]) => found.choices[name].length > 1 && h("label", {}, `${label} `,
      h("select", { onchange: (event) => go({ [name]: event.target.value }) }, h("option", { value: "" }, "all"),
        found.choices[name].map((word) => h("option", { value: word, selected: asked[name] === word }, visible(word)))))));
    const head = COLUMNS.map(([name, title]) => {
      if (!SORTED.includes(name)) return h("th", { scope: "col" }, title);
      const now = asked.sort === name;
      return h("th", { scope: "col", class: "number", "aria-sort": now ? (asked.desc === "1" ? "descending" : "ascending") : "none" },
        h("button", { type: "button", class: "plain", onclick: () => go({ sort: name, desc: now && asked.desc === "1" ? "0" : "1" }) }, title, now ? (asked.desc === "1" ? " ↓" : " ↑") : ""));
    });
    const rows = found.rows.map((row) => {
      const cells = COLUMNS.map(([name, title]) => {
        if (name === "newest" && row.oldest !== row.newest) return h("td", { "data-label": title, class: "number" }, `${number(row.oldest)}–${number(row.newest)}`);
        return h("td", { "data-label": title, class: SORTED.includes(name) ? "number" : null }, typeof row[name] === "string" ? quoted(row[name]) : number(row[name]));
      });
      const link = h("a", { href: href("row", { run, id: row.id }) }, quoted(oneLine(row.prompt) || row.key, { class: "prompt" }), " ", quoted(oneLine(row.completion), { class: "answer" }));
      return h("tr", {}, cells, h("td", { class: "text", "data-label": "row" }, pictures(run, row.media?.slice(0, LISTED), { class: "pictures small" }), link));
    });
    const first = Number(asked.offset);
    const pages = h("p", { class: "pages" },
      h("button", { type: "button", disabled: first === 0, onclick: () => go({ offset: Math.max(0, first - PAGE) }) }, "previous page"),
      ` rows ${found.total ? first + 1 : 0} to ${Math.min(first + PAGE, found.total)} of ${number(found.total)} `,
      h("button", { type: "button", disabled: first + PAGE >= found.total, onclick: () => go({ offset: first + PAGE }) }, "next page"),
      !found.complete && h("span", { class: "quiet" }, " reading …"));
    fill(list, pages, found.rows.length
      ? h("div", { class: "scroll", role: "region", "aria-label": "Rows", tabindex: 0 }, h("table", { class: "rows" }, h("thead", {}, h("tr", {}, head, h("th", { scope: "col" }, "prompt and answer"))), h("tbody", {}, rows)))
      : h("p", { class: "quiet" }, found.of ? "No row passes these filters." : "No rows are recorded: run.keep_rows and run.rollout_dump_every keep them; the journal holds those in flight."));
    if (asked.q) say(`${many(found.total, "row")} in ${Math.round(performance.now() - began)} ms`);
  }

  box.addEventListener("keydown", (event) => {
    if (!["ArrowDown", "ArrowUp", "j", "k"].includes(event.key) || event.target.closest("input, select")) return;
    const links = [...list.querySelectorAll("td.text a")];
    const at = links.indexOf(document.activeElement);
    const next = links[Math.max(0, Math.min(links.length - 1, at + (["ArrowDown", "j"].includes(event.key) ? 1 : -1)))];
    if (next) { event.preventDefault(); next.focus(); }
  });
  await refresh();
  return refresh;
}
