// One row: its conversation, and the token microscope: what the teacher would have written at each place.
import { add, ask, fill, h, href, number, pictures, quoted, say, visible } from "./dom.js";
import { shownRuns } from "./state.js";

const STEPS = 9;  // shades of the scale; style.css has one class for each
const DIVERGING = new Set(["gap", "advantage"]);
let chosen = "";

function shade(name, value, bounds) {
  if (value === null || value === undefined) return "none";
  if (name === "ratio") value = Math.log(Math.max(value, 1e-6));
  const [low, high] = name === "ratio" ? bounds.map((v) => Math.log(Math.max(v, 1e-6))) : bounds;
  if (DIVERGING.has(name) || name === "ratio") {
    const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const level = Math.min(STEPS, Math.round((STEPS * Math.abs(value)) / most));
    return `${value < 0 ? "below" : "above"}${level}`;
  }
  return `above${high > low ? Math.round((STEPS * (value - low)) / (high - low)) : 0}`;
}

const chance = (value) => (value === null || value === undefined ? "–" : value >= 0.001 || value === 0 ? value.toFixed(3) : value.toExponential(1));

function candidateTable(found, token) {
  const bar = (value, kind) => {
    const box = h("span", { class: `meter ${kind}`, "aria-hidden": "true" });
    box.style.width = `${Math.round(60 * (value ?? 0))}px`;
    return box;
  };
  const cell = (value, kind) => h("td", { class: "number" }, bar(value, kind), chance(value));
  const rows = found.teacher.map((one) => h("tr", { class: one.id === token ? "written" : null },
    h("td", {}, h("code", {}, quoted(one.text)), one.id === token && h("span", { class: "quiet" }, " ← written")), cell(one.p, "p"), cell(one.q, "q")));
  const own = found.student.filter((one) => !found.teacher.some((other) => other.id === one.id)).map((one) => h("tr", { class: one.id === token ? "written" : null },
    h("td", {}, h("code", {}, quoted(one.text)), h("span", { class: "quiet" }, one.id === token ? " ← written" : " student's")), cell(null, "p"), cell(one.q, "q")));
  return h("table", { class: "candidates" }, h("caption", {}, "Candidates"),
    h("thead", {}, h("tr", {}, ["token", "teacher p", "student q"].map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, rows, own, h("tr", { class: "quiet" }, h("td", {}, "all others (tail)"), cell(found.tail, "p"), cell(found.own_tail, "q"))));
}

// The loss of a token, the weights that wrote it, the replica that scored it.
function origin(row, place) {
  const { loss, version } = row.measures;
  const { teacher, replica, teacher_version: scoredWith } = row.facts;
  return [loss && `loss ${number(loss[place])}, `, version && `written by weights ${number(version[place])}, `,
    teacher ? ["scored by ", quoted(teacher), replica && [", replica ", quoted(replica)], scoredWith >= 0 && `, weights ${scoredWith}`] : "not scored by a teacher"];
}

// The tokens of one row with a panel beside them; `at` focuses one written token.
function microscope(run, row, at) {
  const names = Object.keys(row.measures);
  const panel = h("aside", { class: "panel", "aria-live": "polite", "aria-label": "The chosen token" }, h("p", { class: "quiet" }, "Point at a token, or move with the arrow keys."));
  const cache = new Map();
  const spans = [];
  const text = h("div", { class: "tokens", role: "group", "aria-label": "Tokens; left and right arrow keys move" });
  const written = row.written.filter((place) => place >= 0);
  const start = written.length ? written[0] : 0;

  async function candidates(place) {
    if (!row.has_candidates) return null;
    const block = Math.floor(place / 32) * 32;
    if (!cache.has(block)) cache.set(block, ask("candidates", { run, id: row.id, from: block, to: block + 32 }));
    return (await cache.get(block)).find((one) => one.place === place);
  }

  let shown = -1;
  async function focus(index, move) {
    const span = spans[index];
    if (!span) return;
    for (const one of text.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
    span.tabIndex = 0;
    if (move) {
      span.focus({ preventScroll: true });
      span.scrollIntoView({ block: "nearest" });
    }
    const place = row.written[index];
    shown = index;
    const measures = names.map((name) => [name, row.measures[name][place - start]]);
    const found = place >= 0 ? await candidates(place).catch(() => null) : null;
    if (shown !== index) return;
    const best = found?.teacher[0];
    fill(panel, h("h3", {}, "token ", h("code", {}, quoted(row.pieces[index] || "…")), h("span", { class: "quiet" }, ` id ${row.tokens[index]}, place ${row.first + index}`)),
      place < 0 ? h("p", { class: "quiet" }, "not written by the student: no loss, no score") : [
        best && h("p", {}, best.id === row.tokens[index] ? "The teacher agrees: " : "The teacher wanted ", h("code", {}, quoted(best.text)), ` with ${best.p.toFixed(3)}`),
        h("p", { class: "origin" }, origin(row, place - start)),
        found && candidateTable(found, row.tokens[index]),
        h("dl", {}, measures.map(([name, value]) => [h("dt", {}, row.described[name]), h("dd", {}, number(value))]))]);
    span.setAttribute("aria-label", `${visible(row.pieces[index])}${place >= 0 && best ? `, teacher wanted ${visible(best.text)} ${best.p.toFixed(2)}` : ""}`);
  }

  let { turn } = row;
  const begins = row.written.findIndex((place) => place >= 0);
  row.tokens.forEach((token, index) => {
    const place = row.written[index];
    const kind = place >= 0 ? "student" : row.turn === 0 && start === 0 && (begins < 0 || index < begins) ? "prompt" : "environment";
    const before = spans.at(-1)?.dataset.kind;
    if (before !== kind) {
      if (kind === "student") turn += 1;
      text.append(h("h3", { class: "who" }, kind === "student" && row.turns > 1 ? `student, turn ${turn}` : kind));
    }
    const span = h("span", { class: "token", tabindex: -1, role: "button" }, visible(row.pieces[index]).replace(/\n/g, "⏎\n"));
    span.dataset.kind = kind;
    span.dataset.index = index;
    spans.push(span);
    text.append(span);
  });

  text.addEventListener("pointermove", (event) => {
    const span = event.target.closest(".token");
    const moved = event.movementX || event.movementY;  // not where the page moved under a pointer at rest
    if (span && moved && Number(span.dataset.index) !== shown) focus(Number(span.dataset.index), false);
  });
  text.addEventListener("click", (event) => { const span = event.target.closest(".token"); if (span) focus(Number(span.dataset.index), true); });
  text.addEventListener("focusin", (event) => { const span = event.target.closest(".token"); if (span && Number(span.dataset.index) !== shown) focus(Number(span.dataset.index), false); });
  text.addEventListener("keydown", (event) => {
    const now = Number(document.activeElement?.dataset?.index ?? -1);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: spans.length - 1, n: worse(now) }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    focus(Math.max(0, Math.min(spans.length - 1, next)), true);
  });

  function worse(now) {  // the next token that is shaded most
    const level = (index) => Number(/(?:above|below)(\d)/.exec(spans[index].className)?.[1] ?? 0);
    for (let index = now + 1; index < spans.length; index += 1) if (level(index) >= 6) return index;
    return now;
  }

  const legend = h("p", { class: "legend" });
  function paint() {
    const values = row.measures[chosen] ?? [];
    const bounds = row.bounds[chosen] ?? [0, 0];
    spans.forEach((span, index) => {
      const place = row.written[index];
      span.className = `token ${place >= 0 ? `written ${shade(chosen, values[place - start], bounds)}` : "given"}`;
    });
    const signed = DIVERGING.has(chosen) || chosen === "ratio";
    fill(legend, chosen ? [`${row.described[chosen]}: ${number(bounds[0])} to ${number(bounds[1])} `,
      signed ? [9, 6, 3].map((level) => h("span", { class: `token key below${level}` }, "−")) : null,
      [0, 3, 6, 9].map((level) => h("span", { class: `token key above${level}` }, signed ? "+" : "▪")), signed ? "" : " low to high"] : "");
  }

  if (!names.includes(chosen)) chosen = names.includes("kl") ? "kl" : names.includes("gap") ? "gap" : names[0] ?? "";
  const select = h("select", { "aria-label": "Shade tokens by", onchange: () => { chosen = select.value; paint(); say(row.described[chosen]); } },
    names.map((name) => h("option", { value: name, selected: name === chosen }, row.described[name])));
  const before = row.first > 0 && h("a", { href: href("row", { run, id: row.id, first: Math.max(0, row.first - row.page) }) }, "the tokens before");
  const more = row.first + row.tokens.length < row.length && (row.cut ? h("p", { class: "quiet" }, "The report holds the first tokens of this row.") : h("a", { href: href("row", { run, id: row.id, first: row.first + row.tokens.length }) }, "the next tokens"));
  paint();
  if (spans.length) spans[0].tabIndex = 0;
  const element = h("div", { class: "scope" }, h("div", {}, h("div", { class: "controls" }, h("label", {}, "shade by ", select), legend), before, text, more),
    panel);
  if (!row.has_tokenizer) element.prepend(h("p", { class: "note" }, "No tokenizer was found (recipe student.model): tokens are shown as ids."));
  if (at !== undefined) setTimeout(() => focus(row.written.indexOf(Number(at)), true), 0);
  return element;
}

function facts(row) {
  const shown = [["step", row.step], ["source", row.source], ["teacher", row.teacher], ["reward", row.reward], ["advantage", row.advantage], ["tokens written", row.line?.tokens ?? row.written?.filter((p) => p >= 0).length],
    ["mean log q − log p", row.kl], ["stop", row.stop_reason], ["written by", row.origin], ["turns", row.turns], ["weights", row.oldest === row.newest ? row.newest : `${row.oldest}–${row.newest}`], ["age", row.age], ["from", row.kind], ["right answer", row.line?.answer]];
  return h("dl", { class: "facts" }, shown.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : quoted(value)))));
}

function conversation(row) {
  return h("div", { class: "conversation" }, h("h3", { class: "who" }, "prompt"), h("pre", { tabindex: 0 }, quoted(row.prompt)),
    h("h3", { class: "who" }, "answer"), h("pre", { tabindex: 0 }, quoted(row.completion)));
}

// What a teacher read in place of the student's prompt (teachers.NAME.prompt), where it has one of its own.
function teacherPrompts(row) {
  return Object.entries(row.line?.teacher_prompts ?? {}).map(([name, text]) => h("details", { class: "own-prompt" },
    h("summary", {}, "Teacher ", quoted(name), " read another prompt"), h("pre", { tabindex: 0 }, quoted(text))));
}

async function oneRow(run, id, first, at) {
  const row = await ask("row", { run, id, first: first ?? 0, at });
  return { row, element: h("article", {}, h("h2", {}, "Row ", h("bdi", {}, row.key)), facts(row), pictures(run, row.media), teacherPrompts(row), row.pieces ? microscope(run, row, at) : conversation(row)) };
}

export async function tokens(box, query) {
  const run = Number(query.run ?? 0);
  const mine = await oneRow(run, query.id, query.first, query.at);
  const other = query.vs ? await oneRow(Number(query.vs_run ?? run), query.vs) : null;
  add(box, [h("p", {}, h("a", { href: href("rollouts", { run }) }, "← rollouts")), h("div", { class: other ? "pair" : "single" }, mine.element, other?.element)]);
  const life = h("div", {});
  const same = h("div", {});
  add(box, [h("h2", {}, "Its life"), life, h("h2", {}, "The same prompt elsewhere"), same]);
  ask("life", { run, key: mine.row.key }).then((spans) => {
    if (!spans.length) return fill(life, h("p", { class: "quiet" }, "No spans name this row."));
    const [from, to] = [Math.min(...spans.map((one) => one.start)), Math.max(...spans.map((one) => one.end))];
    return fill(life, h("ul", { class: "life" }, spans.map((one) => {
      const bar = h("span", { class: "bar-span", "aria-hidden": "true" });
      bar.style.marginLeft = `${(100 * (one.start - from)) / (to - from || 1)}%`;
      bar.style.width = `${Math.max(0.5, (100 * (one.end - one.start)) / (to - from || 1))}%`;
      const about = Object.entries(one.about ?? {}).filter(([name]) => name !== "key").map(([name, value]) => `${name} ${value}`).join(", ");
      return h("li", {}, h("span", {}, `${one.name}${about ? ` (${visible(about)})` : ""}: ${number(one.start)} s, ${number((one.end - one.start) * 1000)} ms`), h("span", { class: "track" }, bar));
    })), h("p", {}, h("a", { href: href("timeline", { run, from: from - 0.2, to: to + 0.2 }) }, "on the timeline")));
  });
  Promise.all(shownRuns().map(async (one) => (await ask("same", { run: one.index, sum: mine.row.prompt_sum })).map((row) => ({ ...row, run: one })))).then((lists) => {
    const found = lists.flat().filter((row) => !(row.run.index === run && row.id === mine.row.id));
    fill(same, found.length ? h("ul", {}, found.slice(0, 40).map((row) => h("li", {}, h("a", { href: href("row", { run, id: mine.row.id, vs_run: row.run.index, vs: row.id }) }, "beside this: ", h("bdi", {}, row.run.name), ` step ${row.step ?? 0}, ${row.kind}${row.teacher && row.kind === "held-out" ? `, ${visible(row.teacher)}` : ""}, reward ${number(row.reward)}: `, quoted(row.completion))))) : h("p", { class: "quiet" }, "none"));
  });
  return null;
}
