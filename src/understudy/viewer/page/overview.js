// Overview: advisories, curves of all shown runs, held-out accuracy, commands, differences of the recipes.
import { add, ask, copyButton, fill, h, number, percent, quoted, table } from "./dom.js";
import { Chart, redrawAll, settings } from "./charts.js";
import { COLOURS, shownRuns } from "./state.js";

// Title → metrics: a name, or a pattern with * for one part of it, or at its end for all that follows (data sources may hold
// slashes: openai/gsm8k). A dash sets a series apart beside its colour.
const CHARTS = [
  ["Loss", ["actor/loss"]],
  ["KL per teacher, nats a token", ["teacher/*/kl"]],
  ["Held-out accuracy (dashed: the teacher)", ["val/accuracy/*", "val/teacher_accuracy/*"]],
  ["Reward", ["critic/score/mean"]],
  ["Answer length, tokens", ["response_length/mean", "response_length/max"]],
  ["Share cut at max_new_tokens", ["response_length/clip_ratio"]],
  ["Student's entropy, nats", ["actor/entropy"]],
  ["Overlap: probability on the candidates", ["actor/distillation/student_mass", "actor/distillation/teacher_mass"]],
  ["Tokens per second", ["perf/tokens_per_second"]],
  ["Staleness, versions", ["async/staleness/mean", "async/staleness/max"]],
  ["Idle shares", ["async", "sync"].flatMap((mode) => ["trainer", "rollout", "teacher"].map((part) => `perf/${mode}/${part}_idle`))],
  ["Seconds a step", ["time/step", "time/produce", "time/update"]],
];
const added = [];

function matching(pattern, keys) {
  if (!pattern.includes("*")) return keys.includes(pattern) ? [pattern] : [];
  const [before, after] = pattern.split("*");
  return keys.filter((key) => key.startsWith(before) && key.endsWith(after) && !(after && key.slice(before.length, -after.length).includes("/")));
}

function curvesOf(runs, answers, wanted) {
  const curves = [];
  const names = [...new Set(wanted.flatMap((pattern) => runs.flatMap((run) => matching(pattern, run.keys))))];
  runs.forEach((run, place) => names.forEach((key, nth) => {
    const found = answers[place][key];
    if (!found) return;
    const ofTeacher = key.startsWith("val/teacher_accuracy/");
    const several = runs.length > 1;
    const partner = ofTeacher ? names.indexOf(key.replace("teacher_accuracy", "accuracy")) : nth;
    let [steps, values] = found;
    if (ofTeacher) {  // measured once: a line over the whole run
      steps = [0, Math.max(run.steps, 1)];
      values = [values[0], values[0]];
    }
    const label = several ? `${run.name} ${key}` : key;
    curves.push({ label, steps, values, colour: several ? run.colour : COLOURS[Math.max(partner, 0) % COLOURS.length],
      dash: ofTeacher ? 1 : several && names.length > 1 ? nth : 0 });
  }));
  return curves;
}

function advisoryList(runs, found) {
  const items = runs.flatMap((run, place) => found[place].map((one) => h("li", { class: `advisory ${one.level}` },
    h("strong", {}, one.level === "warning" ? "Warning: " : "Note: "), runs.length > 1 && `${run.name}: `, quoted(one.sentence), ". ",
    h("span", { class: "quiet" }, quoted(one.evidence), ". "), quoted(one.turn))));
  return h("section", { "aria-label": "Advisories" }, h("h2", {}, "Advisories"),
    items.length ? h("ul", { class: "advisories" }, items) : h("p", { class: "quiet" }, "None: no rule applies to the recorded metrics."));
}

function heldOut(runs, tables) {
  const rewards = tables.flatMap(({ table: entries }) => entries.flatMap((one) => [one.before, one.after, one.teacher]));
  const share = rewards.every((value) => value === null || (value >= 0 && value <= 1));
  const figure = share ? percent : number;
  const rows = runs.flatMap((run, place) => tables[place].table.map((one) => [
    ...(runs.length > 1 ? [run.name] : []), quoted(one.source), figure(one.before), figure(one.after), figure(one.teacher), percent(one.of_teacher)]));
  if (!rows.length) return h("p", { class: "quiet" }, "Nothing was evaluated: set data.eval and data.reward.");
  return table([...(runs.length > 1 ? ["run"] : []), "data source", "student before", "student now", "teacher", "now / teacher"], rows, share ? "Held-out accuracy" : "Held-out mean reward");
}

function answersTable(runs, tables) {
  const graded = (one) => one && h("span", { class: one.reward > 0 ? "right" : "wrong" }, one.reward > 0 ? "✓ " : "✗ ", h("code", {}, quoted(one.text)));
  const rows = runs.flatMap((run, place) => tables[place].answers.map((one) => [...(runs.length > 1 ? [run.name] : []),
    quoted(one.source), h("code", {}, quoted(one.prompt)), graded(one.before), graded(one.after), graded(one.teacher), one.answer !== null && h("code", {}, quoted(one.answer))]));
  if (!rows.length) return null;
  return table([...(runs.length > 1 ? ["run"] : []), "data source", "prompt", "before", "now", "teacher", "right answer"], rows, "Held-out answers before and now");
}

function runFacts(runs) {
  return runs.map((run) => h("dl", { class: "facts" }, Object.entries(run.facts).map(([name, value]) =>
    h("div", {}, h("dt", {}, runs.length > 1 ? `${run.name}: ${name}` : name), h("dd", {}, typeof value === "number" ? number(value) : quoted(value))))));
}

function commands(runs) {
  return runs.map((run) => h("div", { class: "commands" }, runs.length > 1 && h("h3", {}, h("bdi", {}, run.name)),
    Object.entries(run.commands).map(([what, command]) => h("p", {}, h("span", { class: "quiet" }, `${what}: `), h("code", {}, command), " ", copyButton(command)))));
}

async function recipes(runs) {
  if (runs.length < 2) {
    const recipe = await ask("recipe", { run: runs[0]?.index ?? 0 });
    return h("details", {}, h("summary", {}, "every key of this run"), h("pre", { tabindex: 0 }, JSON.stringify(recipe, null, 1)));
  }
  const found = await ask("recipes");
  const text = (value) => (value === null ? "not set" : typeof value === "string" ? value : JSON.stringify(value));
  if (!found.length) return h("p", { class: "quiet" }, "The recipes are the same.");
  return table(["key", ...runs.map((run) => run.name)], found.map((one) => [h("code", {}, one.key), ...runs.map((run) => quoted(text(one.values[run.index])))]), "Recipe keys that differ");
}

export async function overview(box) {
  const charts = [...CHARTS, ...added.map((key) => [key, [key]])].map(([title, wanted]) => new Chart(title, wanted));
  const [advice, grid, tableBox, commandBox, recipeBox] = [0, 0, 0, 0, 0].map(() => h("div", {}));
  grid.className = "grid";
  const list = h("datalist", { id: "metrics" });
  const note = h("div", {});

  async function refresh() {
    const runs = shownRuns();
    if (!runs.length) return;
    const [keys, advisories, tables] = await Promise.all(["keys", "advisories", "held-out"].map((name) => Promise.all(runs.map((run) => ask(name, { run: run.index })))));
    runs.forEach((run, place) => { run.keys = keys[place]; });
    const wanted = runs.map((run) => charts.flatMap((chart) => chart.metrics.flatMap((pattern) => matching(pattern, run.keys))));
    const answers = await Promise.all(runs.map((run, place) => (wanted[place].length ? ask("curves", { run: run.index, key: [...new Set(wanted[place])], points: 600 }) : {})));
    charts.forEach((chart) => chart.set(curvesOf(runs, answers, chart.metrics)));
    fill(advice, advisoryList(runs, advisories));
    fill(tableBox, heldOut(runs, tables), answersTable(runs, tables), runFacts(runs));
    fill(commandBox, commands(runs));
    fill(note, [...new Set(runs.map((run) => run.note).filter(Boolean))].map((text) => h("p", { class: "note" }, quoted(text))),
      runs.filter((run) => run.detail).map((run) => h("p", { class: "problem" }, quoted(run.detail))));
    fill(list, [...new Set(keys.flat())].map((key) => h("option", { value: key })));
  }

  const find = h("input", { type: "search", list: "metrics", placeholder: "Find a metric by name", "aria-label": "Find a metric by name", onchange: async () => {
    const key = find.value;
    if (!list.querySelector(`option[value="${CSS.escape(key)}"]`)) return;
    find.value = "";
    if (added.includes(key)) return;
    added.push(key);
    const chart = new Chart(key, [key]);
    charts.push(chart);
    grid.prepend(chart.element);
    await refresh();
  } });
  const smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: settings.smooth, "aria-label": "Smoothing", oninput: () => { settings.smooth = Number(smooth.value); redrawAll(); } });
  const log = h("input", { type: "checkbox", checked: settings.log, onchange: () => { settings.log = log.checked; redrawAll(); } });
  add(box, [advice, note, h("h2", {}, "Curves"),
    h("div", { class: "controls" }, find, list, h("label", {}, "smoothing ", smooth), h("label", {}, log, " log axis"),
      h("button", { type: "button", onclick: () => { settings.zoom = null; redrawAll(); } }, "whole run"),
      h("span", { class: "quiet" }, "drag in a chart to zoom")),
    grid, h("h2", {}, "Held-out accuracy"), tableBox, h("h2", {}, "Commands"), commandBox, h("h2", {}, "Recipe"), recipeBox]);
  add(grid, charts.map((chart) => chart.element));
  await refresh();
  recipes(shownRuns()).then((drawn) => fill(recipeBox, drawn));
  requestAnimationFrame(() => redrawAll());
  return refresh;
}

