// Where teacher and student disagree most, of a step or of the run, grouped by what the teacher wanted instead.
import { add, ask, fill, h, href, number, quoted } from "./dom.js";
import { shownRuns } from "./state.js";

const LISTED = 20;  // tokens of a group

export async function disagreements(box, query) {
  const list = h("div", {});
  const step = h("input", { type: "number", class: "short", min: 0, value: query.step ?? "", placeholder: "all", "aria-label": "Step", onchange: () => { location.hash = href("disagreements", { step: step.value }); } });
  add(box, [h("h2", {}, "Where they disagree most"),
    h("p", { class: "quiet" }, "Tokens that the student finds likely and the teacher does not, by log q(y) − log p(y), in rows whose token columns are recorded."),
    h("div", { class: "controls" }, h("label", {}, "step ", step)), list]);

  async function refresh() {
    if (list.contains(document.activeElement)) return;
    const runs = shownRuns();
    const groups = await Promise.all(runs.map((run) => ask("worst", { run: run.index, step: query.step })));
    fill(list, runs.map((run, place) => h("section", {}, runs.length > 1 && h("h3", {}, h("bdi", {}, run.name)),
      groups[place].length ? groups[place].slice(0, 30).map((group) => h("details", { open: groups[place].indexOf(group) < 3 },
        h("summary", {}, "the teacher wanted ", h("code", {}, quoted(group.wanted)), ` in ${group.tokens.length} of the worst tokens`),
        h("ul", { class: "worst" }, group.tokens.slice(0, LISTED).map((one) => h("li", {}, h("a", { href: href("row", { run: run.index, id: one.row, at: one.place }) },
          h("code", {}, quoted(one.text)), ` ${number(one.gap)} nats, step ${one.step}, `, h("bdi", {}, one.key)))),
          group.tokens.length > LISTED && h("li", { class: "quiet" }, `${group.tokens.length - LISTED} more`)))) : h("p", { class: "quiet" }, "No row with token columns is recorded here: run.keep_rows keeps them."))));
  }
  await refresh();
  return refresh;
}
