// The page: which runs are shown over what, the view that all charts share, theme and print.
"use strict";

class Page {
  constructor() {
    this.runs = [];
    this.charts = [];
    this.hidden = new Set();
    this.axis = "step";
    this.weight = 0;
    this.logX = false;
    this.range = null; // null: everything
    this.labels = { step: "step" };
  }

  async load(data) {
    const bytes = await decodeNumbers(data.blob);
    this.runs = readRuns(data, bytes);
    this.labels = { step: "step", ...data.axes };
    const known = this.charts.map((chart) => chart.spec.metric).join();
    if (known !== data.charts.map((spec) => spec.metric).join()) this.build(data.charts);
    this.fillAxes();
    this.fillRuns();
    document.querySelectorAll("[data-run]").forEach((each) => {
      each.style.background = colourOf(this.runs.findIndex((run) => run.name === each.dataset.run));
    });
    showTimes();
    this.drawAll();
    document.documentElement.dataset.ready = String(Number(document.documentElement.dataset.ready || 0) + 1);
  }

  build(specs) {
    const place = document.getElementById("charts");
    place.replaceChildren();
    this.charts.forEach((chart) => chart.destroy());
    this.charts = specs.map((spec) => new Chart(this, spec));
    let group = null, grid = null;
    for (const chart of this.charts) {
      if (chart.spec.group !== group) {
        group = chart.spec.group;
        grid = element("div", { class: "grid" });
        const block = element("details", { class: "group", open: !["Time by part", "Other"].includes(group) }, element("summary", {}, element("h2", {}, group)), grid);
        // Charts in a closed block have no width.
        block.addEventListener("toggle", () => { if (block.open) this.drawAll(); });
        place.append(block);
      }
      grid.append(chart.figure);
    }
  }

  fillAxes() {
    const select = document.getElementById("axis");
    select.replaceChildren(...Object.entries(this.labels).map(([name, label]) => element("option", { value: name, selected: name === this.axis }, label)));
  }

  fillRuns() {
    const list = document.getElementById("runs");
    list.replaceChildren(...this.runs.map((run, place) => {
      const box = element("input", { type: "checkbox", checked: !this.hidden.has(run.name), onchange: (event) => this.show(run.name, event.target.checked) });
      const more = run.reduced ? " (smallest and largest of each range of steps)" : "";
      return element("label", { "data-name": run.name.toLowerCase() }, box, swatch(place), ` ${run.name}${more}`);
    }));
    document.getElementById("run-choice").hidden = this.runs.length < 2;
  }

  axisLabel() {
    return this.labels[this.axis] ?? "step";
  }

  isShown(place) {
    return !this.hidden.has(this.runs[place].name);
  }

  show(name, on) {
    if (on) this.hidden.delete(name);
    else this.hidden.add(name);
    this.drawAll();
  }

  showAll(on) {
    const filter = document.getElementById("filter").value.toLowerCase();
    for (const run of this.runs) if (run.name.toLowerCase().includes(filter)) this.hidden[on ? "delete" : "add"](run.name);
    this.fillRuns();
    this.filter();
    this.drawAll();
  }

  filter() {
    const text = document.getElementById("filter").value.toLowerCase();
    document.querySelectorAll("#runs label").forEach((label) => { label.hidden = !label.dataset.name.includes(text); });
  }

  extent() {
    let low = Infinity, high = -Infinity;
    for (const chart of this.charts) {
      const [from, to] = chart.extent();
      low = Math.min(low, from);
      high = Math.max(high, to);
    }
    return low < high ? [low, high] : [Number.isFinite(low) ? low - 0.5 : 0, Number.isFinite(low) ? low + 0.5 : 1];
  }

  view() {
    const [low, high] = this.range ?? (this.whole ??= this.extent());
    if (!this.logX) return { low, high, log: false };
    return { low: low > 0 ? low : Math.min(1, high / 1000), high, log: true };
  }

  zoom(low, high) {
    this.range = low < high ? [low, high] : null;
    this.drawAll();
  }

  scaleView(factor, around) {
    const { low, high, log } = this.view();
    const at = around ?? (log ? Math.sqrt(low * high) : (low + high) / 2);
    if (log) this.zoom(at * (low / at) ** factor, at * (high / at) ** factor);
    else this.zoom(at - (at - low) * factor, at + (high - at) * factor);
  }

  pan(part) {
    const { low, high, log } = this.view();
    if (log) this.zoom(low * (high / low) ** part, high * (high / low) ** part);
    else this.zoom(low + part * (high - low), high + part * (high - low));
  }

  reset() {
    this.range = null;
    this.drawAll();
  }

  setAxis(axis) {
    this.axis = axis;
    this.reset();
  }

  drawAll() {
    this.whole = undefined;
    for (const chart of this.charts) if (chart.figure.offsetParent !== null) chart.draw();
  }
}

function showTimes() {
  document.querySelectorAll("time[data-seconds]").forEach((each) => {
    const moment = new Date(1000 * Number(each.dataset.seconds));
    each.dateTime = moment.toISOString();
    each.textContent = moment.toLocaleString();
  });
}

function connectControls(page) {
  const at = (id) => document.getElementById(id);
  at("axis").addEventListener("change", (event) => page.setAxis(event.target.value));
  at("smoothing").addEventListener("input", (event) => {
    // Even steps of the slider are even factors of the number of points that count.
    page.weight = event.target.value === "0" ? 0 : 1 - 10 ** (-3 * event.target.value / 100);
    at("smoothing-value").textContent = page.weight ? `${Math.round(1 / (1 - page.weight))} points` : "none";
    page.drawAll();
  });
  at("log-x").addEventListener("change", (event) => { page.logX = event.target.checked; page.drawAll(); });
  at("zoom-in").addEventListener("click", () => page.scaleView(0.5));
  at("zoom-out").addEventListener("click", () => page.scaleView(2));
  at("pan-left").addEventListener("click", () => page.pan(-0.25));
  at("pan-right").addEventListener("click", () => page.pan(0.25));
  at("reset").addEventListener("click", () => page.reset());
  at("all").addEventListener("click", () => page.showAll(true));
  at("none").addEventListener("click", () => page.showAll(false));
  at("filter").addEventListener("input", () => page.filter());
  at("charts").addEventListener("dblclick", () => page.reset());
  at("theme").addEventListener("click", () => switchTheme(page));
  watchSize(page);
}

function switchTheme(page) {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  page.drawAll();
}

function watchSize(page) {
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => page.drawAll(), 100);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page.drawAll());
  let theme;
  addEventListener("beforeprint", () => {
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
    page.drawAll();
  });
  addEventListener("afterprint", () => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    page.drawAll();
  });
}

// -- a page that is served asks for what is new; the state of details stays

const SECONDS_BETWEEN = 3;

async function follow(page) {
  const address = `data${location.search}`;
  let tag = "";
  for (;;) {
    try {
      const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        const data = await answer.json();
        replaceHtml("top", data.top);
        replaceHtml("sections", data.sections);
        await page.load(data);
      }
      document.getElementById("connection").textContent = "";
    } catch (error) {
      document.getElementById("connection").textContent = "No connection to mt watch; trying again.";
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * SECONDS_BETWEEN));
  }
}

function replaceHtml(id, html) {
  const place = document.getElementById(id);
  const open = new Map([...place.querySelectorAll("details")].map((each) => [each.querySelector("summary").textContent, each.open]));
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((each) => {
    const was = open.get(each.querySelector("summary").textContent);
    if (was !== undefined) each.open = was;
  });
}

const page = new Page();
connectControls(page);
const carried = document.getElementById("data").textContent.trim();
if (carried) page.load(JSON.parse(carried));
else follow(page);
