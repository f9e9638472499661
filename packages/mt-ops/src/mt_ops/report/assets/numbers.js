// The numbers of the page: the blob, axes, smoothing, and the points that a chart of some width needs.
"use strict";

async function decodeNumbers(text) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Bytes of the same significance stand together; `u` are differences, whose sums are given back as fp64.
function readArray(bytes, { at, n, kind }) {
  const plain = new Uint8Array(4 * n);
  for (let byte = 0; byte < 4; byte++) {
    for (let i = 0, from = at + byte * n; i < n; i++) plain[4 * i + byte] = bytes[from + i];
  }
  if (kind === "f") return new Float32Array(plain.buffer);
  const differences = new Uint32Array(plain.buffer), sums = new Float64Array(n);
  for (let i = 0, sum = 0; i < n; i++) sums[i] = sum += differences[i];
  return sums;
}

function readRuns(data, bytes) {
  const arrays = new Map();
  const read = (reference) => {
    const key = `${reference.kind}${reference.at}`;
    if (!arrays.has(key)) arrays.set(key, readArray(bytes, reference));
    return arrays.get(key);
  };
  const curve = ({ steps, values }) => ({ steps: read(steps), values: read(values) });
  const curves = (table) => Object.fromEntries(Object.entries(table).map(([name, each]) => [name, curve(each)]));
  return data.runs.map((run) => ({ ...run, series: curves(run.series), axes: curves(run.axes) }));
}

// The first index with xs[i] >= x.
function lowerBound(xs, x) {
  let low = 0, high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The value at x, on the line between its neighbours; the nearest one outside of all.
function interpolate(xs, ys, x) {
  const i = lowerBound(xs, x);
  if (i === 0) return ys[0];
  if (i === xs.length) return ys[i - 1];
  return ys[i - 1] + ((ys[i] - ys[i - 1]) * (x - xs[i - 1])) / (xs[i] - xs[i - 1]);
}

// Positions of a curve's points on an axis: its steps, or what the run says that these correspond to.
function positions(run, curve, axis) {
  if (axis === "step") return curve.steps;
  const of = run.axes[axis];
  if (!of || of.steps.length === 0) return null;
  curve.on ??= {};
  curve.on[axis] ??= of.steps === curve.steps ? of.values : curve.steps.map((step) => interpolate(of.steps, of.values, step));
  return curve.on[axis];
}

// The position of any step of a run on an axis; NaN where the run does not say it.
function positionOf(run, axis, step) {
  if (axis === "step") return step;
  const of = run.axes[axis];
  return of && of.steps.length ? interpolate(of.steps, of.values, step) : NaN;
}

// An exponential mean with the bias of its beginning taken out; values that are not finite have no weight.
function smoothed(curve, weight) {
  if (weight === 0) return curve.values;
  if (curve.weight !== weight) {
    const out = new Float32Array(curve.values.length);
    for (let i = 0, sum = 0, norm = 0; i < out.length; i++) {
      const value = curve.values[i];
      if (Number.isFinite(value)) {
        sum = weight * sum + (1 - weight) * value;
        norm = weight * norm + 1 - weight;
      }
      out[i] = Number.isFinite(value) ? sum / norm : NaN;
    }
    curve.weight = weight;
    curve.smooth = out;
  }
  return curve.smooth;
}

// -- points to draw: everything where there is little, else the smallest and the largest of each column of pixels

function alignedPoints(curves, view, width) {
  const spans = curves.map(({ xs }) => [Math.max(lowerBound(xs, view.low) - 1, 0), Math.min(lowerBound(xs, view.high) + 1, xs.length)]);
  const visible = spans.reduce((most, [begin, end]) => Math.max(most, end - begin), 0);
  return visible <= width ? exactPoints(curves, spans) : columnPoints(curves, spans, view, width);
}

function exactPoints(curves, spans) {
  const tables = curves.map(({ xs, ys }, i) => [xs.slice(...spans[i]), Array.from(ys.slice(...spans[i]), finiteOrNull)]);
  return tables.length === 1 ? tables[0] : uPlot.join(tables.map(([xs, ys]) => [xs, ys]));
}

function finiteOrNull(value) {
  return Number.isFinite(value) ? value : null;
}

function columnPoints(curves, spans, view, width) {
  const columns = Math.max(Math.floor(width), 2);
  const place = scaleOf(view);
  const xs = new Float64Array(2 * columns);
  for (let i = 0; i < 2 * columns; i++) xs[i] = place.value((Math.floor(i / 2) + (i % 2 ? 0.75 : 0.25)) / columns);
  return [xs, ...curves.map((curve, i) => columnsOf(curve, spans[i], columns, place))];
}

// Fraction of the chart's width at a value, and back.
function scaleOf(view) {
  if (!view.log) return { at: (x) => (x - view.low) / (view.high - view.low), value: (f) => view.low + f * (view.high - view.low) };
  const low = Math.log(view.low), range = Math.log(view.high) - low;
  return { at: (x) => (Math.log(x) - low) / range, value: (f) => Math.exp(low + f * range) };
}

function columnsOf({ xs, ys }, [begin, end], columns, place) {
  const out = new Array(2 * columns).fill(null);
  let column = -1, lowest = -1, highest = -1;
  const close = () => {
    if (column < 0 || column >= columns || lowest < 0) return;
    // In the order in which they come.
    out[2 * column] = ys[Math.min(lowest, highest)];
    out[2 * column + 1] = ys[Math.max(lowest, highest)];
  };
  for (let i = begin; i < end; i++) {
    const now = Math.floor(place.at(xs[i]) * columns);
    if (now !== column) {
      close();
      column = now;
      lowest = highest = -1;
    }
    if (!Number.isFinite(ys[i])) continue;
    if (lowest < 0 || ys[i] < ys[lowest]) lowest = i;
    if (highest < 0 || ys[i] > ys[highest]) highest = i;
  }
  close();
  return out;
}

// The point of a curve next to x; -1 without points.
function nearest(xs, x) {
  const i = lowerBound(xs, x);
  if (i === 0) return xs.length ? 0 : -1;
  if (i === xs.length) return i - 1;
  return x - xs[i - 1] <= xs[i] - x ? i - 1 : i;
}

function shownNumber(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e7 || size < 1e-3 ? value.toExponential(3) : Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 8 });
}
