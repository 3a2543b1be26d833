// One chart of several series over steps, by uPlot: drag to zoom, double click to see all again.
import uPlot from "./uplot.js";
import { fill, h, number } from "./dom.js";

export const settings = { smooth: 0, log: false, zoom: null };
const drawn = new Set();
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

function smoothed(values, amount) {
  if (!amount) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = mean === null ? value : amount * mean + (1 - amount) * value;
    return mean;
  });
}

// curves: [{label, steps, values, colour, dash}]
export class Chart {
  constructor(title, metrics) {
    this.metrics = metrics;
    this.body = h("div", { class: "plot" });
    this.values = h("div", {});
    this.element = h("figure", { class: "chart" }, h("figcaption", {}, title), this.body,
      h("details", {}, h("summary", {}, "values"), this.values));
    this.title = title;
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: 170 }));
    this.observer.observe(this.body);
    drawn.add(this);
  }

  width() { return Math.max(220, this.body.clientWidth || 320); }

  set(curves) {
    this.curves = curves;
    this.draw();
  }

  draw() {
    const curves = this.curves ?? [];
    const known = curves.filter((curve) => curve.steps.length);
    this.element.hidden = !known.length;
    if (!known.length) return;
    const tables = known.map((curve) => [curve.steps, smoothed(curve.values, settings.smooth).map((v) => (settings.log && v <= 0 ? null : v))]);
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const look = getComputedStyle(document.documentElement);
    const [ink, grid] = [look.getPropertyValue("--ink"), look.getPropertyValue("--line")];
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid }, font: "11px system-ui" };
    const options = {
      width: this.width(), height: 170, cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: settings.zoom ? () => settings.zoom : undefined }, y: { distr: settings.log ? 3 : 1 } },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 56, values: (_, ticks) => ticks.map((v) => (v === null ? "" : number(v, 2))) }],
      series: [{ label: "step" }, ...known.map((curve) => ({
        label: curve.label, stroke: curve.colour, width: 1.6, dash: DASHES[(curve.dash ?? 0) % DASHES.length], spanGaps: true,
        points: { show: curve.steps.length < 40, size: 4, stroke: curve.colour }, value: (_, v) => number(v),
      }))],
      hooks: { setSelect: [(plot) => {
        if (plot.select.width < 4) return;
        settings.zoom = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
        redrawAll();
      }] },
    };
    this.plot?.destroy();
    fill(this.body);
    this.plot = new uPlot(options, data, this.body);
    this.plot.over.addEventListener("dblclick", () => { settings.zoom = null; redrawAll(); });
    const last = known.map((curve) => `${curve.label} ${number(curve.values.at(-1))} at step ${curve.steps.at(-1)}`);
    this.body.setAttribute("role", "img");
    this.body.setAttribute("aria-label", `${this.title}: ${last.join("; ")}`);
    fill(this.values, h("ul", {}, known.map((curve) => h("li", {}, `${curve.label}: first ${number(curve.values[0])}, last ${number(curve.values.at(-1))}, `,
      `lowest ${number(Math.min(...curve.values))}, highest ${number(Math.max(...curve.values))}`))));
  }

  close() {
    this.plot?.destroy();
    this.observer.disconnect();
    drawn.delete(this);
  }
}

export function redrawAll() {
  for (const chart of drawn) {
    if (chart.element.isConnected) chart.draw(); else chart.close();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
