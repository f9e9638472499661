// A chart: a frame around uPlot with the points of the view, a readout, keys, and a table of its values.
"use strict";

const COLOURS = ["#3b7dd8", "#d9731a", "#2f9e63", "#a557c4", "#c9a21b", "#1aa3a3", "#d64b6a", "#7a8794", "#7a5cff", "#8f6b3a"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const HEIGHT = 260;
const ROWS_OF_TABLE = 40;
const MOST_READ = 12;

function colourOf(place) {
  return COLOURS[place % COLOURS.length];
}

function dashOf(place) {
  return DASHES[Math.floor(place / COLOURS.length) % DASHES.length];
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

class Chart {
  constructor(page, spec) {
    this.page = page;
    this.spec = spec;
    this.log = false;
    this.plot = null;
    this.canvas = element("div", { class: "canvas", tabindex: "0", role: "img", onkeydown: (event) => this.onKey(event) });
    this.readout = element("p", { class: "readout" });
    this.status = element("p", { class: "visually-hidden", role: "status" });
    this.table = element("div", { class: "scroll", hidden: true, tabindex: "0" });
    this.figure = element("figure", { class: "chart", "data-metric": spec.metric },
      element("figcaption", {},
        element("h3", {}, spec.title + (spec.unit ? ` (${spec.unit})` : "")),
        this.toggle("log y", (on) => { this.log = on; this.draw(); }),
        this.toggle("table", (on) => { this.table.hidden = !on; this.fillTable(); })),
      this.canvas, this.readout, this.status, this.table);
  }

  toggle(label, change) {
    const button = element("button", { type: "button", "aria-pressed": "false", "aria-label": `${label}: ${this.spec.title}` }, label);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      change(on);
    });
    return button;
  }

  // Curves of the runs that are shown: {run, place, curve, xs}.
  curves() {
    const found = [];
    this.page.runs.forEach((run, place) => {
      const curve = run.series[this.spec.metric];
      const xs = curve && this.page.isShown(place) ? positions(run, curve, this.page.axis) : null;
      if (xs && xs.length) found.push({ run, place, curve, xs });
    });
    return found;
  }

  extent() {
    let low = Infinity, high = -Infinity;
    for (const { xs } of this.curves()) {
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
    return [low, high];
  }

  draw() {
    const curves = this.curves();
    const empty = curves.length === 0;
    this.figure.classList.toggle("empty", empty);
    this.destroy();
    if (empty) {
      this.canvas.textContent = `No values of the chosen runs over ${this.page.axisLabel()}.`;
      return;
    }
    this.canvas.textContent = "";
    const width = Math.max(this.canvas.clientWidth, 200);
    this.drawn = this.layers(curves);
    const view = this.page.view();
    const points = alignedPoints(this.drawn, view, width - 70);
    this.plot = new uPlot(this.options(width, view), this.log ? withoutNegative(points) : points, this.canvas);
    this.canvas.setAttribute("aria-label", this.description(curves));
    this.readout.textContent = "";
    if (!this.table.hidden) this.fillTable();
  }

  destroy() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }

  // Raw values stay visible behind smoothed ones.
  layers(curves) {
    const weight = this.page.weight;
    const raw = curves.map((each) => ({ ...each, ys: each.curve.values, faint: weight > 0 }));
    return weight > 0 ? [...raw, ...curves.map((each) => ({ ...each, ys: smoothed(each.curve, weight), faint: false }))] : raw;
  }

  options(width, view) {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--muted").trim(), grid = style.getPropertyValue("--line").trim();
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
    return {
      width,
      height: HEIGHT,
      legend: { show: false },
      scales: {
        x: { time: false, distr: view.log ? 3 : 1, range: () => [view.low, view.high] },
        y: this.log ? { distr: 3 } : { range: (plot, low, high) => paddedRange(low, high) },
      },
      axes: [
        { ...axis, size: 30, values: (plot, values) => values.map((value) => (value === null ? "" : shortNumber(value))) },
        { ...axis, size: 62, values: (plot, values) => values.map((value) => (value === null ? "" : shortNumber(value))) },
      ],
      series: [{}, ...this.drawn.map((each) => this.line(each))],
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false } },
      hooks: {
        setSelect: [(plot) => this.onSelect(plot)],
        setCursor: [(plot) => this.onCursor(plot)],
        draw: [(plot) => this.drawResumes(plot)],
      },
    };
  }

  line({ place, faint, xs }) {
    const colour = colourOf(place);
    return {
      stroke: faint ? `${colour}55` : colour,
      width: faint ? 1 : 1.75,
      dash: dashOf(place),
      spanGaps: true,
      points: { show: !faint && xs.length <= 60, size: 5 },
    };
  }

  drawResumes(plot) {
    const ctx = plot.ctx, { left, top, width, height } = plot.bbox;
    ctx.save();
    ctx.setLineDash([4, 4]);
    ctx.lineWidth = 1;
    for (const { run, place } of this.curves().slice(0, 8)) {
      ctx.strokeStyle = colourOf(place);
      for (const step of run.resumes) {
        const x = plot.valToPos(positionOf(run, this.page.axis, step), "x", true);
        if (!(x >= left && x <= left + width)) continue;
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
      }
    }
    ctx.restore();
  }

  onSelect(plot) {
    if (plot.select.width < 4) return;
    const low = plot.posToVal(plot.select.left, "x"), high = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.page.zoom(low, high);
  }

  onCursor(plot) {
    if (plot.cursor.left < 0 || plot.cursor.left === null || plot.cursor.left === undefined) return;
    this.read(plot.posToVal(plot.cursor.left, "x"));
  }

  // Values of the point next to x of each run.
  read(x) {
    const found = this.curves().map(({ run, place, curve, xs }) => {
      const i = nearest(xs, x);
      return { name: run.name, place, x: xs[i], step: curve.steps[i], value: curve.values[i] };
    });
    if (!found.length) return "";
    const next = found.reduce((best, each) => (Math.abs(each.x - x) < Math.abs(best.x - x) ? each : best));
    const head = `${this.page.axisLabel()} ${shownNumber(next.x)}${this.page.axis === "step" ? "" : `, step ${shownNumber(next.step)}`}`;
    const items = found.slice(0, MOST_READ).map((each) =>
      element("span", {}, swatch(each.place), ` ${found.length > 1 ? `${each.name} ` : ""}${shownNumber(each.value)}`));
    this.readout.replaceChildren(element("b", {}, head), ...items, found.length > MOST_READ ? ` and ${found.length - MOST_READ} more` : "");
    return this.readout.textContent;
  }

  onKey(event) {
    if (!this.plot) return;
    const width = this.plot.bbox.width / devicePixelRatio, step = width / (event.ctrlKey ? 100 : 20);
    const at = this.plot.cursor.left >= 0 ? this.plot.cursor.left : width / 2;
    const moves = { ArrowLeft: at - step, ArrowRight: at + step, Home: 0, End: width };
    if (event.key in moves && !event.shiftKey) {
      const left = Math.min(Math.max(moves[event.key], 0), width);
      this.plot.setCursor({ left, top: 10 });
      this.status.textContent = this.read(this.plot.posToVal(left, "x"));
    } else if (event.shiftKey && event.key.startsWith("Arrow")) {
      this.page.pan(event.key === "ArrowRight" ? 0.25 : -0.25);
    } else if (["+", "=", "-", "0"].includes(event.key)) {
      if (event.key === "0") this.page.reset();
      else this.page.scaleView(event.key === "-" ? 2 : 0.5, this.plot.posToVal(at, "x"));
    } else return;
    event.preventDefault();
  }

  description(curves) {
    const shown = curves.slice(0, MOST_READ).map(({ run, curve }) => {
      const last = lastFinite(curve.values);
      return `${run.name} from ${shownNumber(curve.values[0])} to ${shownNumber(last)} at step ${shownNumber(curve.steps[curve.steps.length - 1])}`;
    });
    return `${this.spec.title} over ${this.page.axisLabel()}, ${curves.length} ${curves.length === 1 ? "run" : "runs"}: ${shown.join("; ")}. ` +
      "Arrow keys move the cursor, with Shift the view; + and - zoom, 0 shows everything.";
  }

  fillTable() {
    if (this.table.hidden) return;
    const curves = this.curves().slice(0, MOST_READ), { low, high } = this.page.view();
    const head = element("tr", {}, ...[this.page.axisLabel(), ...curves.map(({ run }) => run.name)].map((name) => element("th", { scope: "col" }, name)));
    const rows = tablePositions(curves, low, high).map((x) =>
      element("tr", {}, element("th", { scope: "row" }, shownNumber(x)),
        ...curves.map(({ curve, xs }) => element("td", { class: "number" }, shownNumber(curve.values[nearest(xs, x)])))));
    this.table.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  }
}

// Positions of points of the longest curve, evenly over the view.
function tablePositions(curves, low, high) {
  const longest = curves.reduce((best, each) => (best && best.xs.length >= each.xs.length ? best : each), null);
  if (!longest) return [];
  const begin = lowerBound(longest.xs, low), end = lowerBound(longest.xs, high + 1e-9), count = Math.max(Math.min(end - begin, ROWS_OF_TABLE), 1);
  return Array.from({ length: count }, (_, i) => longest.xs[begin + Math.floor((i * (end - 1 - begin)) / Math.max(count - 1, 1))]);
}

function lastFinite(values) {
  for (let i = values.length - 1; i >= 0; i--) if (Number.isFinite(values[i])) return values[i];
  return null;
}

function withoutNegative([xs, ...rows]) {
  return [xs, ...rows.map((row) => Array.from(row, (value) => (value > 0 ? value : value === undefined ? undefined : null)))];
}

function paddedRange(low, high) {
  if (low === null || high === null) return [0, 1];
  const space = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
  return [low - space, high + space];
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(1).replace("e+", "e");
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(4))}${letter}`;
  }
  return String(Number(value.toPrecision(6)));
}

function swatch(place) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = colourOf(place);
  return made;
}
