// The page: which view is shown, which runs, and when to ask again.
import { answerWith, ask, fill, h, picturesFrom, say } from "./dom.js";
import { COLOURS, state } from "./state.js";
import { frozenAnswers } from "./frozen.js";
import { overview } from "./overview.js";
import { rollouts } from "./rollouts.js";
import { tokens } from "./tokens.js";
import { disagreements } from "./disagreements.js";
import { timeline } from "./timeline.js";

const VIEWS = { overview, rollouts, disagreements, timeline, row: tokens };
const TABS = [["overview", "Overview"], ["rollouts", "Rollouts"], ["disagreements", "Disagreements"], ["timeline", "Timeline"]];

function place() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: VIEWS[view] ? view : "overview", query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function drawHead() {
  const { view } = place();
  fill(document.getElementById("tabs"), TABS.map(([name, title]) =>
    h("a", { href: `#/${name}`, "aria-current": (view === name || (view === "row" && name === "rollouts")) ? "page" : null }, title)));
  const boxes = state.runs.map((run, index) => {
    const steps = run.of_steps ? `${run.steps}/${run.of_steps}` : run.steps;
    const swatch = h("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = COLOURS[index % COLOURS.length];
    return h("label", { class: "run", title: run.path },
      state.runs.length > 1 && h("input", { type: "checkbox", checked: !state.off.has(index), onchange: (event) => {
        if (event.target.checked) state.off.delete(index); else state.off.add(index);
        show();
      } }), swatch, h("bdi", {}, run.name), " ", h("span", { class: `status ${run.status}` }, run.status), ` step ${steps}`,
      !run.complete && h("span", { class: "quiet" }, " reading …"));
  });
  const box = document.getElementById("runs");
  if (!box.contains(document.activeElement)) fill(box, boxes);
}

async function show() {
  const { view, query } = place();
  drawHead();
  const main = document.getElementById("main");
  if (state.view !== location.hash) window.scrollTo(0, 0);
  state.view = location.hash;
  const drawn = h("div", { class: `view ${view}` });
  try {
    state.refresh = await VIEWS[view](drawn, query);
  } catch (error) {
    fill(drawn, h("p", { class: "problem" }, error.message));
    state.refresh = null;
  }
  fill(main, drawn);
  document.title = `Understudy: ${TABS.find(([name]) => name === view)?.[1] ?? "a row"}`;
}

async function tick() {
  try {
    const before = JSON.stringify(state.runs);
    state.runs = await ask("runs");
    const waits = place().view === "timeline" && state.runs.some((run) => run.status === "running");  // a run that stalls changes nothing else
    if (waits || JSON.stringify(state.runs) !== before) {
      drawHead();
      await state.refresh?.();
    }
  } catch { say("the server does not answer"); }
  setTimeout(tick, state.runs.every((run) => run.complete) ? 2000 : 400);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const index = "1234".indexOf(event.key);
  if (index >= 0) location.hash = `#/${TABS[index][0]}`;
  if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (search) { event.preventDefault(); search.focus(); }
  }
});

const frozen = document.getElementById("frozen");  // a report: its answers are in the page
if (frozen) {
  const data = JSON.parse(frozen.textContent);
  answerWith(frozenAnswers(data));
  picturesFrom((run, hash) => data.pictures[hash]);
}
window.addEventListener("hashchange", show);
state.runs = await ask("runs");
await show();
if (!frozen) setTimeout(tick, 300);
