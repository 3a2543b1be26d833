// Timeline: who worked when, drawn from spans; and what a live run waits for now.
import { add, ask, fill, h, href, many, number, quoted, table, visible } from "./dom.js";
import { shownRuns, state } from "./state.js";

const OWN = { update: "#0072b2", produce: "#999999", "wait for rows": "#bbbbbb", publish: "#d55e00", evaluate: "#cc79a7", checkpoint: "#009e73", claim: "#e69f00", drain: "#f0e442", event: "#c00000" };
const OF_ROWS = { rollout: "#56b4e9", reward: "#cc79a7", score: "#009e73" };
const LANE = 22;
const wide = () => window.innerWidth > 760;
const part = (lane) => lane.split(" ")[0];  // a score's lane also names teacher and replica
const ofRows = (lane) => lane in OF_ROWS || lane.startsWith("score ");

// Chains of the wait graph (`doctor RUN`) as one tree: chains that begin alike share their boxes.
function waitTree(chains) {
  const root = new Map();
  for (const chain of chains) {
    let level = root;
    for (const part of chain.split(" <- ")) {
      if (!level.has(part)) level.set(part, new Map());
      level = level.get(part);
    }
  }
  const list = (level) => h("ul", { class: "waits" }, [...level].map(([text, below]) => h("li", {}, h("span", { class: "node" }, quoted(text)), below.size > 0 && list(below))));
  return list(root);
}

export async function timeline(box, query) {
  const runs = shownRuns();
  const run = Number(query.run ?? runs[0]?.index ?? 0);
  let [from, to] = [query.from ? Number(query.from) : null, query.to ? Number(query.to) : null];
  let found = null;
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": "Timeline; plus and minus zoom, arrow keys move" });
  const tip = h("p", { class: "tip", "aria-live": "polite" }, "Point at a span; drag to zoom.");
  const list = h("div", {});
  const waits = h("div", {});
  const drawn = [];
  let LEFT = 96;

  const zoom = (factor) => { const middle = (from + to) / 2; const half = ((to - from) / 2) * factor; load(middle - half, middle + half); };
  const move = (share) => { const by = (to - from) * share; load(from + by, to + by); };
  add(box, [h("h2", {}, "Timeline"), waits, h("div", { class: "controls" },
    runs.length > 1 && h("label", {}, "run ", h("select", { onchange: (event) => { location.hash = href("timeline", { run: event.target.value }); } }, runs.map((one) => h("option", { value: one.index, selected: one.index === run }, one.name)))),
    [["zoom in", () => zoom(0.5)], ["zoom out", () => zoom(2)], ["earlier", () => move(-0.5)], ["later", () => move(0.5)], ["whole run", () => load(0, found.end)], ["latest", () => load(null, null)]].map(([name, act]) => h("button", { type: "button", onclick: act }, name))),
    h("div", { class: "canvas" }, canvas), tip, list]);

  async function load(first, last) {
    found = await ask("timeline", { run, from: first === null ? null : Math.max(0, first), to: last });
    [from, to] = [found.from, found.to];
    draw();
    const events = found.spans.filter((one) => one.name === "event");
    const longest = [...found.spans].sort((a, b) => b.end - b.start - (a.end - a.start)).slice(0, 15);
    fill(list, events.length > 0 && h("details", { open: true }, h("summary", {}, `${many(events.length, "event")} here: faults, restarts, decisions`),
      h("ul", {}, events.slice(-50).map((one) => h("li", {}, `${number(one.start)} s: `, quoted(one.about?.text ?? ""))))), found.spans.length ? h("details", {}, h("summary", {}, `${many(found.spans.length, "span")} from ${number(from)} s to ${number(to)} s; the longest as a table`),
      table(["span", "start, s", "seconds", "about"], longest.map((one) => [one.name, number(one.start), number(one.end - one.start), quoted(about(one))]), "Longest spans here")) : h("p", { class: "quiet" }, "No spans are recorded yet."));
  }

  const about = (one) => Object.entries(one.about ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");

  function draw() {
    const own = [...new Set(found.spans.filter((one) => !ofRows(one.name)).map((one) => one.name))].sort((a, b) => (a in OWN ? 0 : 1) - (b in OWN ? 0 : 1) || a.localeCompare(b));
    const single = {};
    for (const one of found.spans) if (ofRows(one.name)) (single[one.name] ??= []).push(one);
    const counts = Object.keys(found.counts);
    const packed = Object.fromEntries(Object.entries(single).map(([name, spans]) => [name, pack(spans)]));
    const rows = Object.values(packed).reduce((sum, lanes) => sum + Math.min(lanes.length, 12) * 7 + 12, 0);
    const height = (own.length + 1) * LANE + counts.length * 58 + rows + 24;
    const width = canvas.parentElement.clientWidth || 800;
    LEFT = wide() ? 170 : 96;
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const look = getComputedStyle(document.documentElement);
    const [ink, line] = [look.getPropertyValue("--ink"), look.getPropertyValue("--line")];
    const paper = canvas.getContext("2d");
    paper.scale(scale, scale);
    paper.font = "12px system-ui";
    const x = (moment) => LEFT + ((moment - from) / (to - from || 1)) * (width - LEFT - 6);
    drawn.length = 0;
    const bar = (one, top, tall, colour, least = 1) => {
      const [left, right] = [Math.max(LEFT, x(one.start)), Math.min(width, x(one.end))];
      paper.fillStyle = colour;
      paper.fillRect(left, top, Math.max(least, right - left), tall);
      drawn.push({ left, right: Math.max(left + least + 1, right), top, bottom: top + tall, one });
    };
    const label = (text, top) => { paper.fillStyle = ink; paper.fillText(visible(text).slice(0, wide() ? 27 : 15), 2, top); };
    let top = 4;
    for (const name of own) {
      label(name, top + 14);
      for (const one of found.spans) if (one.name === name) bar(one, top, LANE - 6, OWN[name] ?? "#7a6fac", name === "event" ? 3 : 1);
      top += LANE;
    }
    for (const name of counts) {
      const values = found.counts[name];
      const most = Math.max(1, ...values);
      label(name, top + 24);
      label(`up to ${most}`, top + 40);
      paper.fillStyle = OF_ROWS[part(name)];
      values.forEach((value, i) => { const left = LEFT + (i / values.length) * (width - LEFT - 6); const tall = (48 * value) / most; paper.fillRect(left, top + 50 - tall, (width - LEFT) / values.length + 0.5, tall); });
      top += 58;
    }
    for (const [name, lanes] of Object.entries(packed)) {
      label(name, top + 10);
      lanes.slice(0, 12).forEach((lane, i) => lane.forEach((one) => bar(one, top + i * 7, 6, OF_ROWS[part(one.name)])));
      top += Math.min(lanes.length, 12) * 7 + 12;
    }
    paper.strokeStyle = line;
    paper.fillStyle = ink;
    const ticks = wide() ? 5 : 2;
    for (let i = 0; i <= ticks; i += 1) {
      const moment = from + ((to - from) * i) / ticks;
      paper.beginPath();
      paper.moveTo(x(moment), 0);
      paper.lineTo(x(moment), height - 16);
      paper.stroke();
      const text = `${number(moment)} s`;
      paper.fillText(text, Math.min(x(moment), width - paper.measureText(text).width - 2), height - 3);
    }
    for (const launch of found.launches.slice(1)) if (launch >= from && launch <= to) { paper.fillStyle = "#d55e00"; paper.fillRect(x(launch), 0, 2, height - 16); paper.fillText("restart", x(launch) + 4, 12); }
  }

  function pack(spans) {  // spans of rows overlap: each goes to the first lane that is free
    const lanes = [];
    for (const one of [...spans].sort((a, b) => a.start - b.start)) {
      const free = lanes.find((lane) => lane.at(-1).end <= one.start);
      if (free) free.push(one); else lanes.push([one]);
    }
    return lanes;
  }

  let grabbed = null;
  const spot = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const moment = (left) => from + ((left - LEFT) / (canvas.clientWidth - LEFT - 6)) * (to - from);
  canvas.addEventListener("pointerdown", (event) => { [grabbed] = spot(event); });
  canvas.addEventListener("pointerup", (event) => {
    const [left] = spot(event);
    if (grabbed !== null && Math.abs(left - grabbed) > 6) load(...[moment(grabbed), moment(left)].sort((a, b) => a - b));
    grabbed = null;
  });
  canvas.addEventListener("pointermove", (event) => {
    const [left, top] = spot(event);
    const hit = drawn.findLast((one) => left >= one.left && left <= one.right && top >= one.top && top <= one.bottom);
    if (hit) fill(tip, `${hit.one.name}: ${number(hit.one.start)} s, ${number(1000 * (hit.one.end - hit.one.start))} ms `, quoted(about(hit.one)));
  });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  async function drawWaits() {
    const now = await ask("waits", { run });
    const alive = state.runs[run]?.status === "running";
    if (!alive || !now.chains?.length) return fill(waits);
    return fill(waits, h("h3", {}, "Waiting now"), h("p", { class: "quiet" }, "An arrow leads from what waits to what it waits for."), waitTree(now.chains.slice(0, 40)));
  }

  await load(from, to);
  await drawWaits();
  requestAnimationFrame(draw);
  return async () => {
    await drawWaits();
    if (!query.from && found && to >= found.end - 0.01) await load(null, null);
  };
}
