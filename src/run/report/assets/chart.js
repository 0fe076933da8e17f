// Curves over steps. All charts share the visible range of steps, the smoothing and the crosshair.

// Decodes a curve of the data into steps and values.
function unpack({ steps, values }) {
  const text = atob(values);
  const bytes = new Uint8Array(text.length);
  for (let n = 0; n < bytes.length; n++) bytes[n] = text.charCodeAt(n);
  const y = new Float32Array(bytes.buffer);
  const x = new Float64Array(y.length);
  let at = 0;
  for (const [first, distance, count] of steps) for (let n = 0; n < count; n++) x[at++] = first + n * distance;
  return { x, y };
}

// Smooths a curve by a mean over both sides, weighted by e^(−distance ÷ steps). Because it is symmetric, it does not
// lag.
function smooth(curve, steps) {
  if (!steps) return curve.y;
  if (curve.smoothed?.steps === steps) return curve.smoothed.y;
  const { x, y } = curve;
  const [sums, weights] = [new Float64Array(y.length), new Float64Array(y.length)];
  const pass = (first, direction) => {
    let [sum, weight] = [0, 0];
    for (let n = first; n >= 0 && n < y.length; n += direction) {
      const before = n - direction;
      if (before >= 0 && before < y.length) {
        const kept = Math.exp(-Math.abs(x[n] - x[before]) / steps);
        [sum, weight] = [sum * kept, weight * kept];
      }
      sums[n] += sum;
      weights[n] += weight;
      if (Number.isFinite(y[n])) [sum, weight] = [sum + y[n], weight + 1];
    }
  };
  pass(0, 1);
  pass(y.length - 1, -1);
  curve.smoothed = { steps, y: y.map((value, n) => (Number.isFinite(value) ? (sums[n] + value) / (weights[n] + 1) : NaN)) };
  return curve.smoothed.y;
}

// The first index whose step is at least `step`.
function lowerBound(x, step) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(curve, step) {
  const at = lowerBound(curve.x, step);
  if (at === curve.x.length) return at - 1;
  return at && step - curve.x[at - 1] < curve.x[at] - step ? at - 1 : at;
}

// Indices of the points to draw: all if there are few, otherwise the first, lowest, highest and last in each column of
// pixels.
function thinned(x, y, view, columns) {
  const from = Math.max(0, lowerBound(x, view.from) - 1);
  const to = Math.min(x.length, lowerBound(x, view.to + 1) + 1);
  const all = [];
  if (to - from <= columns * 4) {
    for (let n = from; n < to; n++) all.push(n);
    return all;
  }
  const column = (n) => Math.floor(((x[n] - view.from) / (view.to - view.from)) * columns);
  for (let n = from; n < to; ) {
    const here = column(n);
    let [first, least, most, lost] = [n, n, n, -1];
    for (; n < to && column(n) === here; n++) {
      if (Number.isNaN(y[n])) lost = n;
      else {
        if (!(y[least] <= y[n])) least = n;
        if (!(y[most] >= y[n])) most = n;
      }
    }
    all.push(...[...new Set([first, least, most, ...(lost < 0 ? [] : [lost]), n - 1])].sort((a, b) => a - b));
  }
  return all;
}

function path(at, x, y, points) {
  let [d, pen] = ["", "M"];
  for (const n of points) {
    const [across, up] = [at.x(x[n]), at.y(y[n])];
    if (!Number.isFinite(up)) pen = "M";
    else {
      d += `${pen}${across.toFixed(1)} ${up.toFixed(1)}`;
      pen = "L";
    }
  }
  return d;
}

const logOf = (name) => state.log && LOGARITHMIC.test(name);

// The lowest and highest of the drawn values, with some margin.
function range(lines, log) {
  let [low, high] = [Infinity, -Infinity];
  for (const { y, points } of lines) {
    for (const n of points) {
      if (!Number.isFinite(y[n]) || (log && y[n] <= 0)) continue;
      low = Math.min(low, y[n]);
      high = Math.max(high, y[n]);
    }
  }
  if (low > high) return { from: log ? 0.1 : 0, to: 1 };
  if (log) return { from: low / 1.05, to: Math.max(high, low * 1.05) * 1.05 };
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return { from: low >= 0 ? Math.max(0, low - room) : low - room, to: high + room };
}

// Draws a chart of {name, box, lines}; a line is {curve, color, dash, label}.
function drawChart(chart) {
  const view = shownSteps();
  const width = Math.max(200, chart.box.clientWidth - 72);
  const log = logOf(chart.name);
  const drawn = [];
  for (const line of chart.lines) {
    const { curve } = line;
    const strength = STEADY.has(chart.name) ? 0 : smoothing();
    const raw = { ...line, y: curve.y, points: thinned(curve.x, curve.y, view, width), kind: strength ? "curve raw" : "curve" };
    drawn.push(raw);
    if (strength) {
      const y = smooth(curve, strength);
      drawn.push({ ...line, y, points: thinned(curve.x, y, view, width), kind: "curve" });
    }
  }
  const at = plot(chart.box, { x: { ...view, name: "step" }, y: { ...range(drawn, log), log, name: "" }, height: chart.height });
  chart.at = at;
  // Clips at the edges of the plot.
  const inside = element(at.svg, "svg", { x: at.left, y: at.top, width: at.right - at.left, height: at.bottom - at.top });
  inside.setAttribute("viewBox", `${at.left} ${at.top} ${at.right - at.left} ${at.bottom - at.top}`);
  for (const { curve, y, points, color, dash, kind } of drawn.sort((a, b) => (a.kind < b.kind) - (a.kind > b.kind))) {
    element(inside, "path", { class: kind, d: path(at, curve.x, y, points), stroke: color, "stroke-dasharray": dash });
    if (kind === "curve" && points.length <= 60) dots({ ...at, svg: inside }, points.filter((n) => Number.isFinite(at.y(y[n]))).map((n) => [curve.x[n], y[n]]), color, 4, 1);
    if (y !== curve.y || chart.name === "val_loss") continue;
    const lost = points.filter((n) => Number.isNaN(y[n]) && curve.x[n] >= view.from && curve.x[n] <= view.to);
    if (lost.length) element(inside, "path", { class: "lost", d: lost.map((n) => `M${at.x(curve.x[n]).toFixed(1)} ${at.bottom}v-9`).join("") });
  }
  chart.cross = element(at.svg, "path", { class: "cross", d: "" });
  chart.selection = element(at.svg, "rect", { class: "chosen-steps", y: at.top, height: at.bottom - at.top, width: 0, visibility: "hidden" });
}

// The step under the pointer.
function stepAt(chart, event) {
  const frame = chart.at.svg.getBoundingClientRect();
  const part = (((event.clientX - frame.left) / frame.width) * chart.at.width - chart.at.left) / (chart.at.right - chart.at.left);
  const view = shownSteps();
  return view.from + Math.min(1, Math.max(0, part)) * (view.to - view.from);
}

function crosshair(step) {
  for (const { at, cross } of charts) cross.setAttribute("d", step === null ? "" : `M${at.x(step).toFixed(1)} ${at.top}V${at.bottom}`);
}

// Shows the values of all runs at a step.
function showTip(chart, event, step) {
  const tip = document.getElementById("tip");
  tip.replaceChildren();
  element(tip, "b", {}, `step ${Math.round(step).toLocaleString("en")}`);
  const body = element(element(tip, "table"), "tbody");
  const strength = STEADY.has(chart.name) ? 0 : smoothing();
  for (const { curve, color, label } of chart.lines) {
    const n = nearest(curve, step);
    if (n < 0) continue;
    const row = element(body, "tr");
    const name = element(element(row, "td"), "span", { class: "run" });
    element(name, "i", { style: `background:${color}` });
    name.append(label);
    const isFar = Math.abs(curve.x[n] - step) > 1;
    element(row, "td", { class: "number" }, figure(curve.y[n]));
    if (strength) element(row, "td", { class: "number" }, `≈ ${figure(smooth(curve, strength)[n])}`);
    if (isFar) element(row, "td", { class: "absent" }, `at ${curve.x[n].toLocaleString("en")}`);
  }
  tip.hidden = false;
  const across = event.pageX + 16 + tip.offsetWidth > document.documentElement.clientWidth ? event.pageX - tip.offsetWidth - 12 : event.pageX + 16;
  tip.style.left = `${Math.max(0, across)}px`;
  tip.style.top = `${event.pageY + 14}px`;
}

const figure = (n) => (Number.isNaN(n) ? "not finite" : Math.abs(n) >= 1e4 ? Math.round(n).toLocaleString("en") : `${+n.toPrecision(5)}`);

// Dragging zooms into a range of steps, a double click shows all of them, and hovering shows values.
function listen(chart) {
  let start = null;
  const { box } = chart;
  const leave = () => {
    document.getElementById("tip").hidden = true;
    crosshair(null);
  };
  box.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    start = { step: stepAt(chart, event), x: event.clientX };
    box.setPointerCapture?.(event.pointerId);
  });
  box.addEventListener("pointermove", (event) => {
    const step = stepAt(chart, event);
    crosshair(step);
    showTip(chart, event, step);
    if (!start) return;
    const [from, to] = [start.step, step].sort((a, b) => a - b).map(chart.at.x);
    chart.selection.setAttribute("x", from);
    chart.selection.setAttribute("width", to - from);
    chart.selection.setAttribute("visibility", "visible");
  });
  const end = (event) => {
    if (!start) return;
    const [from, to] = [start.step, stepAt(chart, event)].sort((a, b) => a - b);
    const isZoom = Math.abs(event.clientX - start.x) > 4 && to - from >= 1e-9;
    start = null;
    chart.selection.setAttribute("visibility", "hidden");
    if (isZoom) zoom({ from: Math.floor(from), to: Math.max(Math.ceil(to), Math.floor(from) + 1) });
  };
  box.addEventListener("pointerup", end);
  box.addEventListener("pointercancel", () => ((start = null), chart.selection.setAttribute("visibility", "hidden"), leave()));
  box.addEventListener("pointerleave", leave);
  box.addEventListener("dblclick", () => zoom(null));
}
