let data = JSON.parse(document.getElementById("data").textContent);
let runs = [];
let charts = [];
const state = { view: null, hidden: new Set(), smoothing: null, log: false, map: null };

const TITLES = {
  loss: "Loss", val_loss: "Validation loss", lr: "Learning rate", gradient_norm: "Gradient norm", tokens_per_second: "Tokens per second", seconds: "Time by part",
  rewards: "Rewards of pairs", val_rewards: "Validation rewards of pairs",
};
const NOTES = { seconds: "in seconds, of a step or an evaluation", tokens_per_second: "mean since the run started or resumed", gradient_norm: "before clipping" };
// Curves that are not smoothed: settings, and values that are means already.
const STEADY = new Set(["lr", "val_loss", "val_rewards", "tokens_per_second"]);
const LOGARITHMIC = /loss|norm/;
const DASHES = ["", "7 3", "2 3"];
const color = (index) => `var(--c${index % 8})`;
const dash = (index) => DASHES[Math.floor(index / 8) % 3];
const byId = (id) => document.getElementById(id);
const bytes = (n) => {
  const unit = Math.max(0, Math.min(4, Math.floor(Math.log2(n || 1) / 10)));
  return `${+(n / 2 ** (10 * unit)).toPrecision(4)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};

// Formats a value of the summary.
function words(key, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return typeof value === "string" ? value : JSON.stringify(value);
  if (key.endsWith("_bytes")) return bytes(value);
  if (key === "gap") return value.toFixed(4);
  if (key.endsWith("_ms")) return `${+value.toPrecision(4)} ms`;
  return Number.isInteger(value) || value >= 1e4 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(5)}`;
}

function take(fresh) {
  data = fresh;
  runs = data.runs.map((run, index) => ({
    ...run, index, curves: Object.fromEntries(Object.entries(run.curves).map(([name, curve]) => [name, unpack(curve)])),
  }));
}

const shownRuns = () => runs.filter((run) => !state.hidden.has(run.index));

// The first and last step of all runs.
function allSteps() {
  let [from, to] = [Infinity, -Infinity];
  for (const run of runs) {
    for (const { x } of Object.values(run.curves)) {
      if (!x.length) continue;
      from = Math.min(from, x[0]);
      to = Math.max(to, x[x.length - 1]);
    }
  }
  return from > to ? { from: 0, to: 1 } : { from, to: Math.max(to, from + 1) };
}

const shownSteps = () => state.view || allSteps();

// The choices for smoothing: 0, 1, 2, 5, 10, … up to a fifth of all steps.
function strengths() {
  const { from, to } = allSteps();
  const all = [0];
  for (let power = 1; power <= (to - from) / 5; power *= 10) all.push(...[1, 2, 5].map((n) => n * power).filter((n) => n <= (to - from) / 5));
  return all;
}

function smoothing() {
  const all = strengths();
  // The default is a hundredth of the steps, if there are at least 200.
  const { from, to } = allSteps();
  const usual = to - from >= 200 ? all.findLastIndex((n) => n <= (to - from) / 100) : 0;
  return all[Math.min(state.smoothing ?? usual, all.length - 1)];
}

function zoom(view) {
  state.view = view;
  drawCharts();
}

// ---------------------------------------------------------------- charts

// Names of the charts. The values of one list or table share a chart.
function chartNames() {
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves).map((name) => name.split(".")[0])));
  const known = Object.keys(TITLES);
  const place = (name) => (known.includes(name) ? known.indexOf(name) : known.length);
  return [...names].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

function linesOf(name) {
  const several = runs.length > 1;
  return shownRuns().flatMap((run) => {
    const found = Object.entries(run.curves).filter(([key]) => key === name || key.startsWith(name + "."));
    return found.map(([key, curve], part) => {
      const member = key.slice(name.length + 1);
      const index = several || !member ? run.index : part;
      return { curve, color: color(index), dash: dash(index), label: [several || !member ? run.name : "", member].filter(Boolean).join(" · ") };
    });
  });
}

function makeCharts() {
  const names = chartNames();
  if (names.join() === charts.map((chart) => chart.name).join()) return;
  byId("charts").replaceChildren();
  charts = names.map((name, index) => {
    const section = element(byId("charts"), "section", { id: `chart-${name}`, class: index === 0 ? "first" : index === 1 ? "second" : "" });
    const title = element(section, "h2", {}, TITLES[name] || name.replaceAll("_", " "));
    if (NOTES[name]) element(title, "small", {}, NOTES[name]);
    const legend = element(title, "span", { class: "legend" });
    const chart = { name, legend, box: element(section, "div", { class: "plot" }), lines: [] };
    listen(chart);
    return chart;
  });
}

function drawCharts() {
  makeCharts();
  for (const chart of charts) {
    chart.lines = linesOf(chart.name);
    chart.height = chart.box.clientWidth > 760 ? 340 : 250;
    drawChart(chart);
    // The legend of a single run names its lines. With several runs, the buttons above name the runs.
    const named = runs.length === 1 && chart.lines.length > 1 && chart.lines.length <= 8 ? chart.lines : [];
    chart.legend.replaceChildren();
    for (const { color, label } of named) element(element(chart.legend, "span", {}, label), "i", { style: `background:${color}` });
  }
  const strength = smoothing();
  byId("smoothed").textContent = strength ? `${strength.toLocaleString("en")} steps` : "off";
  byId("smoothing").max = strengths().length - 1;
  byId("smoothing").value = strengths().indexOf(strength);
  byId("whole").hidden = !state.view;
}

// ---------------------------------------------------------------- below the curves

function named(parent, tag, run, note) {
  const line = element(parent, tag, { class: "run" });
  element(line, "i", { style: `background:${color(run.index)}` });
  line.append(run.name);
  if (note) element(line, "small", {}, note);
}

function figures() {
  const last = (run, name) => run.curves[name] && run.curves[name].y.at(-1);
  const steps = (run) => Math.max(0, ...Object.values(run.curves).map(({ x }) => (x.length ? x.at(-1) + 1 : 0)));
  let all = [["runs", runs.length], ["steps", Math.max(...runs.map(steps)).toLocaleString("en")]];
  if (runs.length === 1) {
    const [run] = runs;
    const planned = +run.config.steps;
    all = [["steps", steps(run).toLocaleString("en") + (planned > steps(run) ? ` of ${planned.toLocaleString("en")}` : "")]];
    for (const name of ["loss", "val_loss", "tokens_per_second"]) if (last(run, name) !== undefined) all.push([TITLES[name].toLowerCase(), figure(+last(run, name).toPrecision(4))]);
    for (const key of ["arena_bytes", "gap"]) if (run.summary?.[key] !== undefined) all.push([key === "gap" ? "gap" : "arena", words(key, run.summary[key])]);
  } else {
    for (const name of ["loss", "val_loss"]) {
      const known = runs.filter((run) => Number.isFinite(last(run, name)));
      if (!known.length) continue;
      const best = known.reduce((a, b) => (last(b, name) < last(a, name) ? b : a));
      all.push([`lowest ${TITLES[name].toLowerCase()} at the end`, `${figure(+last(best, name).toPrecision(4))} · ${best.name}`]);
    }
  }
  byId("figures").replaceChildren();
  for (const [name, value] of all) {
    const pair = element(byId("figures"), "div");
    element(pair, "dt", {}, name);
    element(pair, "dd", {}, value);
  }
}

function toggles() {
  byId("runs").replaceChildren();
  if (runs.length < 2) return;
  for (const run of runs) {
    const button = element(byId("runs"), "button", { "aria-pressed": !state.hidden.has(run.index) });
    element(button, "i", { style: `background:${color(run.index)}` });
    button.append(run.name);
    button.onclick = () => {
      if (!state.hidden.delete(run.index)) state.hidden.add(run.index);
      button.setAttribute("aria-pressed", !state.hidden.has(run.index));
      drawCharts();
    };
  }
}

// Draws a table with a row per key and a column per run; if asked for, only the keys that differ.
function table(box, tables, format, differing) {
  const keys = [...new Set(tables.flatMap((entries) => Object.keys(entries || {})))];
  const text = (entries, key) => (entries && key in entries ? format(key, entries[key]) : null);
  const shown = differing ? keys.filter((key) => new Set(tables.map((entries) => text(entries, key))).size > 1) : keys;
  const made = element(box, "table");
  if (runs.length > 1) {
    const head = element(element(made, "thead"), "tr");
    element(head, "th");
    for (const run of runs) named(element(head, "th"), "span", run);
  }
  const body = element(made, "tbody");
  for (const key of shown) {
    const line = element(body, "tr");
    element(line, "td", {}, key);
    for (const entries of tables) {
      const value = text(entries, key);
      element(line, "td", value === null ? { class: "absent" } : {}, value ?? "–");
    }
  }
  return shown.length;
}

function summary() {
  const box = document.querySelector("#summary .table");
  box.replaceChildren();
  table(box, runs.map((run) => run.summary), words, false);
  for (const run of runs.filter((run) => run.summary?.error)) element(box, "p", { class: "absent" }, `${run.name} failed: ${run.summary.error}`);
  for (const run of runs.filter((run) => run.missing.length)) element(box, "p", { class: "absent" }, `${runs.length > 1 ? run.name + ": " : ""}${run.missing.join(", ")}`);
}

function configuration() {
  const box = document.querySelector("#config .table");
  box.replaceChildren();
  const known = runs.filter((run) => run.toml !== null);
  if (runs.length > 1) {
    const differing = table(box, runs.map((run) => run.config), (_, value) => value, true);
    if (!differing) box.replaceChildren(known.length ? "No key differs." : "No run has a run.toml.");
  }
  for (const run of known) {
    if (runs.length === 1) element(box, "pre", {}, run.toml);
    else {
      const more = element(box, "details");
      element(more, "summary", {}, `run.toml of ${run.name}`);
      element(more, "pre", {}, run.toml);
    }
  }
  if (!known.length && runs.length === 1) box.textContent = "There is no run.toml.";
}

function samples() {
  const box = document.querySelector("#samples .columns");
  box.replaceChildren();
  const known = runs.filter((run) => run.samples.length);
  byId("samples").hidden = !known.length;
  for (const run of known) {
    const column = element(box, "div");
    const [last, ...earlier] = [...run.samples].reverse();
    named(column, "h3", run, `after ${last[0].toLocaleString("en")} steps`);
    element(column, "pre", {}, last[1]);
    if (!earlier.length) continue;
    const more = element(column, "details");
    element(more, "summary", {}, `${earlier.length} earlier`);
    for (const [steps, text] of earlier) {
      element(more, "h3", {}, `after ${steps.toLocaleString("en")} steps`);
      element(more, "pre", {}, text);
    }
  }
}

// Memory maps are complete pages, so each is opened only when it becomes visible.
function memory() {
  const known = runs.filter((run) => byId(`memory-${run.index}`));
  byId("memory").hidden = !known.length;
  if (!known.length) return;
  const [box, frame] = [document.querySelector("#memory .choice"), document.querySelector("#memory iframe")];
  const open = (run) => {
    state.map = run.index;
    frame.srcdoc = JSON.parse(byId(`memory-${run.index}`).textContent);
    box.childNodes.forEach((button, index) => button.setAttribute("aria-pressed", known[index] === run));
  };
  if (known.length > 1) {
    for (const run of known) {
      const button = element(box, "button", { "aria-pressed": "false" });
      element(button, "i", { style: `background:${color(run.index)}` });
      button.append(run.name);
      button.onclick = () => open(run);
    }
  }
  const seen = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    seen.disconnect();
    open(known[0]);
  }, { rootMargin: "200px" });
  seen.observe(frame);
}

function draw() {
  figures();
  toggles();
  drawCharts();
  samples();
  summary();
  configuration();
}

// If the page is served, updates it while the runs go on.
function watch() {
  let last = "";
  setInterval(async () => {
    try {
      const text = await (await fetch("data.json")).text();
      if (text !== last && last) {
        take(JSON.parse(text));
        draw();
      }
      last = text;
      byId("state").textContent = `read at ${new Date().toLocaleTimeString()}`;
    } catch {
      byId("state").textContent = "gapless report has ended: these are its last data";
    }
  }, 2000);
}

element(document.body, "div", { id: "tip", hidden: "" });
take(data);
draw();
memory();
if (data.is_served) watch();
byId("smoothing").oninput = () => {
  state.smoothing = +byId("smoothing").value;
  drawCharts();
};
byId("log").onclick = () => {
  state.log = !state.log;
  byId("log").setAttribute("aria-pressed", state.log);
  drawCharts();
};
byId("whole").onclick = () => zoom(null);
addEventListener("keydown", (event) => event.key === "Escape" && zoom(null));
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawCharts);
});
