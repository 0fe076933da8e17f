const data = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const gib = (bytes) => (bytes / GIB < 1 ? (bytes / 2 ** 20).toFixed(1) + " MiB" : (bytes / GIB).toFixed(2) + " GiB");
const ms = (n) => (n >= 1000 ? (n / 1000).toFixed(2) + " s" : n.toFixed(n < 10 ? 2 : 1) + " ms");
const color = (index) => `var(--c${index % 8})`;
const shown = new Set(data.allocators.keys());
// The rows of the menu that is shown.
let menu, rows, planned, exact, replayed, everywhere;
function show(index) {
  menu = index;
  rows = data.rows.filter((row) => row.menus.includes(index));
  planned = rows.filter((row) => row.reserved[0] !== null);
  exact = rows.filter((row) => row.exact);
  replayed = exact.filter((row) => row.reserved.some((bytes) => bytes !== null));
  // The rows that were planned and replayed through every allocator. Only these are counted.
  everywhere = rows.filter((row) => row.reserved.every((bytes) => bytes !== null));
}
let chosen = null;
// Steps with the same number of tokens are compared by step time, others by time per token.
const perToken = new Set(data.rows.map((row) => Math.round(row.ms * row.tokens))).size > 1;
const time = (row) => (perToken ? 1e6 / row.tokens : row.ms);
const timeText = (row) => (perToken ? time(row).toFixed(2) + " µs per token" : ms(row.ms));
const faster = (best, row) => (!best || time(row) < time(best) ? row : best);
const percent = (part, digits = 2) => (100 * part).toFixed(digits) + " %";
// Bytes that an allocator has to hold. Index 0 is the plan, whose lifetimes may differ from those that the others
// replay.
const held = (row, index) => (index && index !== data.used ? row.allocated : row.live);
// Bytes of the arena that the step uses. The rest is reserved for rows of experts that the step does not have.
const used = (row) => row.reserved[data.used];

const extent = (numbers, part = 0.04) => {
  const [low, high] = numbers.length ? [Math.min(...numbers), Math.max(...numbers)] : [0, 1];
  const room = (high - low || high || 1) * part;
  return { from: Math.max(0, low - room), to: high + room };
};
// Adds links that save a plot. Each line of the CSV ends with the origin of the data.
const save = (box, at, name, head, lines) =>
  exports(box, at, name, [...head, "version", "commit", "sweep"], lines.map((line) => [...line, data.version, data.commit, data.sweep]));
// The dashes of line `index`: lines that share a color have different dashes.
const dashes = (index) => ["", "6 3", "2 3"][index % 3];
// The legend entries and the names of the allocators that are shown.
const allocators = () => [...shown].sort((a, b) => a - b).map((index) => [data.allocators[index], color(index), ""]);
const values = (row) => data.varied.map((key, index) => `${key} ${row.values[index] || "none"}`).join(", ");
const group = (list, by) => list.reduce((map, item) => map.set(by(item), [...(map.get(by(item)) || []), item]), new Map());

// The Pareto front: rows to which no other row is both smaller and faster.
function front(allocator) {
  const points = rows.filter((row) => row.reserved[allocator] !== null);
  points.sort((a, b) => a.reserved[allocator] - b.reserved[allocator] || time(a) - time(b));
  let best = Infinity;
  return points.filter((row) => time(row) < best && ((best = time(row)), true));
}

function figures() {
  const fits = rows.filter((row) => row.fits);
  const fastest = fits.reduce(faster, null);
  const gap = Math.max(...planned.map((row) => used(row) / row.live), 1);
  const all = [
    ["device", data.device], [data.is_least_capacity ? "memory, least of all meshes" : "memory", gib(data.capacity)], ["configurations", rows.length], ["fit", fits.length], ["planned", planned.length],
    ["fastest", fastest ? timeText(fastest) : "–"], ["largest gap of a plan", ((gap - 1) * 100).toFixed(3) + " %"],
  ];
  if (data.other_commits) all.push(["rows of other commits", data.other_commits]);
  const list = document.getElementById("figures");
  list.replaceChildren();
  for (const [name, value] of all) {
    const pair = element(list, "div");
    element(pair, "dt", {}, name);
    element(pair, "dd", {}, value);
  }
}

function menus() {
  const nav = document.getElementById("menus");
  nav.hidden = data.menus.length < 2;
  const buttons = data.menus.map((name, index) => {
    const button = element(nav, "button", { "aria-pressed": index === menu }, `menu: ${name}`);
    button.onclick = () => {
      show(index);
      buttons.forEach((other, at) => other.setAttribute("aria-pressed", at === index));
      figures();
      draw();
    };
    return button;
  });
}

function toggles() {
  const nav = document.getElementById("allocators");
  data.allocators.forEach((name, index) => {
    const button = element(nav, "button", { "aria-pressed": "true" });
    element(button, "i", { style: `background:${color(index)}` });
    button.append(name);
    button.onclick = () => {
      if (!shown.delete(index)) shown.add(index);
      button.setAttribute("aria-pressed", shown.has(index));
      draw();
    };
  });
}

function memoryTime() {
  const box = document.querySelector("#memory-time .plot");
  const bytes = replayed.flatMap((row) => row.reserved.filter((n, index) => n !== null && (shown.has(index) || !index)));
  // Rows far beyond the device's capacity are not shown.
  const most = Math.max(data.capacity * 1.05, ...planned.map((row) => row.reserved[0]));
  const at = plot(box, {
    x: { ...extent(bytes.map((n) => Math.min(n, most) / GIB)), name: "GiB of the fullest rank" },
    y: { ...extent(replayed.map(time)), name: perToken ? "µs per token" : "step, ms" },
    height: 460,
  });
  dots(at, planned.map((row) => [row.reserved[0] / GIB, time(row)]), "var(--quiet)", 3, 0.4);
  const here = [...shown].sort((a, b) => a - b);
  here.toReversed().forEach((index) => {
    const points = front(index).filter((row) => row.reserved[index] <= most).map((row) => [row.reserved[index] / GIB, time(row)]);
    steps(at, points, color(index));
    dots(at, points, color(index), 5, 1);
  });
  legend(at, [["all plans", "var(--quiet)"], ...allocators()]);
  const fronts = here.flatMap((index) => front(index).map((row) => [data.allocators[index], row.reserved[index], time(row), values(row)]));
  save(box, at, "memory-time", ["front", "bytes", perToken ? "us_per_token" : "step_ms", "configuration"], [
    ...fronts, ...planned.map((row) => ["all plans", row.reserved[0], time(row), values(row)]),
  ]);
  const limit = data.capacity / GIB;
  if (at.x(limit) < at.right && at.x(limit) > at.left) {
    element(at.svg, "path", { class: "limit", d: `M${at.x(limit)} ${at.top}V${at.bottom}` });
  }
  if (chosen && chosen.reserved[0] !== null) {
    element(at.svg, "circle", { class: "chosen", cx: at.x(chosen.reserved[0] / GIB), cy: at.y(time(chosen)), r: 7 });
  }
  at.svg.onclick = (event) => {
    const frame = at.svg.getBoundingClientRect();
    const [x, y] = [((event.clientX - frame.left) / frame.width) * at.width, ((event.clientY - frame.top) / frame.height) * at.height];
    const away = (row) => Math.hypot(at.x(row.reserved[0] / GIB) - x, at.y(time(row)) - y);
    const nearest = planned.reduce((best, row) => (!best || away(row) < away(best) ? row : best), null);
    if (nearest && away(nearest) < 30) choose(nearest);
  };
}

function bubble() {
  const most = (data.capacity / GIB) * 1.05;
  const schedules = [...group(rows, (row) => row.schedule)];
  const at = plot(document.querySelector("#bubble .plot"), {
    x: { ...extent(rows.map((row) => row.live / GIB).filter((n) => n <= most)), name: "limit, GiB" },
    y: { from: 0, to: Math.max(...rows.map((row) => row.bubble * 100), 1) * 1.04, name: "bubble, %" },
  });
  const [named, lines] = [[], []];
  schedules.forEach(([name, list], index) => {
    let best = Infinity;
    const sorted = [...list].sort((a, b) => a.live - b.live || a.bubble - b.bubble);
    const points = sorted.filter((row) => row.live / GIB <= most && row.bubble < best && ((best = row.bubble), true));
    const dash = dashes(Math.floor(index / 8));
    steps(at, points.map((row) => [row.live / GIB, row.bubble * 100]), color(index), dash);
    if (points.length) named.push([`${name} ${(best * 100).toFixed(1)} %`, color(index), dash, best]);
    lines.push(...points.map((row) => [name, row.live, row.exact ? "exact" : "lower bound", row.bubble, values(row)]));
  });
  legend(at, named.sort((a, b) => a[3] - b[3]));
  save(document.querySelector("#bubble .plot"), at, "bubble", ["schedule", "live_bytes", "bytes_are", "bubble", "configuration"], lines);
}

function estimate() {
  const box = document.querySelector("#estimate .plot");
  const all = exact.flatMap((row) => [row.live, row.formula, row.megatron]).map((n) => n / GIB);
  const [low, high] = [Math.min(...all) * 0.9, Math.max(...all) * 1.1];
  const axis = (name) => ({ from: low, to: high, log: true, name });
  const at = plot(box, { x: axis("peak live bytes, GiB"), y: axis("formula, GiB") });
  element(at.svg, "path", { class: "limit", d: `M${at.x(low)} ${at.y(low)}L${at.x(high)} ${at.y(high)}` });
  const series = [["per parameter", "formula", 0], ["Megatron-LM", "megatron", 1]];
  const named = series.map(([name, key, index]) => {
    dots(at, exact.map((row) => [row.live / GIB, row[key] / GIB]), color(index), 3.5, 0.6);
    const ratios = exact.map((row) => row[key] / row.live).sort((a, b) => a - b);
    const [least, median, most] = [0, 0.5, 1].map((part) => ratios[Math.round((ratios.length - 1) * part)] ?? 0);
    return [`${name}: ${median.toFixed(2)} × (${least.toFixed(2)} to ${most.toFixed(2)})`, color(index)];
  });
  legend(at, named);
  const lines = exact.map((row) => [row.live, row.formula, row.megatron, values(row)]);
  save(box, at, "estimate", ["live_bytes", "formula_bytes", "megatron_bytes", "configuration"], lines);
}

// Means and ranges of live ÷ reserved bytes, grouped by a property.
function efficiency(id, name, by, order) {
  const groups = [...group(everywhere, by)].sort(order);
  const part = (row, index) => (100 * held(row, index)) / row.reserved[index];
  const here = [...shown].sort((a, b) => a - b);
  const all = everywhere.flatMap((row) => here.map((index) => part(row, index)));
  const low = Math.floor(Math.min(...all, 99) / 5) * 5;
  const at = plot(document.querySelector(`#${id} .plot`), {
    x: { from: 0, to: groups.length || 1, name },
    y: { from: low, to: 100 + (100 - low) * 0.03, name: "live ÷ reserved, %" },
    names: groups.map(([key]) => `${key}`),
  });
  const lines = [];
  groups.forEach(([key, list], slot) => {
    here.forEach((index, place) => {
      const found = list.map((row) => part(row, index));
      const x = at.x(slot + 0.15 + (0.7 * (place + 0.5)) / here.length);
      const [least, most, mean] = [Math.min(...found), Math.max(...found), found.reduce((a, b) => a + b) / found.length];
      element(at.svg, "path", { d: `M${x} ${at.y(least)}V${at.y(most)}`, stroke: color(index), "stroke-width": 2, "stroke-opacity": 0.5 });
      const dot = element(at.svg, "circle", { cx: x, cy: at.y(mean), r: 4, fill: color(index) });
      element(dot, "title", {}, `${data.allocators[index]}: ${mean.toFixed(2)} % (${least.toFixed(2)} to ${most.toFixed(2)}), ${found.length} configurations`);
      lines.push([key, data.allocators[index], found.length, mean, least, most]);
    });
  });
  legend(at, here.map((index) => [data.allocators[index], color(index)]));
  const head = [name || "technique", "allocator", "configurations", "mean_percent", "least_percent", "most_percent"];
  save(document.querySelector(`#${id} .plot`), at, id, head, lines);
}

// Draws a table of text.
function table(box, head, lines) {
  box.replaceChildren();
  const made = element(box, "table");
  const top = element(element(made, "thead"), "tr");
  head.forEach((name) => element(top, "th", {}, name));
  const body = element(made, "tbody");
  for (const line of lines) {
    const row = element(body, "tr");
    line.forEach((text) => element(row, "td", {}, text));
  }
}

function fragmentation() {
  const head = ["allocator", "configurations", "mean", "maximum", "plans, mean", "wasted, in all", "plans, in all", "reduction"];
  const line = (of) => [
    of.allocator, of.configurations, percent(of.mean), percent(of.most), percent(of.planned, 3), gib(of.wasted_bytes), gib(of.planned_wasted_bytes),
    percent(of.reduction, 1),
  ];
  document.querySelector("#fragmentation .eager").hidden = !data.is_eager;
  table(document.querySelector("#fragmentation .table"), head, data.fragmentation.map(line));
  const above = planned.filter((row) => data.above.includes(row.key)).sort((a, b) => used(b) / b.live - used(a) / a.live);
  const list = document.querySelector("#fragmentation details");
  list.hidden = !above.length;
  list.firstElementChild.textContent = `${above.length} of ${planned.length} plans exceed the peak live bytes, their lower bound, by 0.05 % or more`;
  const facts = (row) => [values(row), gib(used(row)), gib(row.live), percent(1 - row.live / used(row), 3)];
  table(list.lastElementChild, ["configuration", "arena", "bound", "above"], above.map(facts));
}

function throughput() {
  const found = data.throughput.flatMap((of) => of.tokens_per_second.flat()).filter((n) => n !== null);
  const at = plot(document.querySelector("#throughput .plot"), {
    x: { ...extent(data.throughput.map((of) => of.budget / GIB), 0), name: "budget, GiB" },
    y: { ...extent(found), name: "tokens per second" },
  });
  data.menus.forEach((_, which) => {
    for (const index of [...shown].sort((a, b) => b - a)) {
      const points = data.throughput.map((of) => [of.budget / GIB, of.tokens_per_second[which][index]]).filter(([, n]) => n !== null);
      steps(at, points, color(index), dashes(which));
    }
  });
  legend(at, [...allocators(), ...data.menus.map((name, which) => [`menu ${name}`, "var(--quiet)", dashes(which)])]);
  const budgets = data.throughput.flatMap((of) => data.menus.map((name, which) => [of.budget, name, ...of.tokens_per_second[which]]));
  save(document.querySelector("#throughput .plot"), at, "throughput", ["budget_bytes", "menu", ...data.allocators], budgets);
  const head = [
    "allocator", "menu", "budgets", "of these without a gain", "budgets where only plans fit", "budgets where only the allocator fits", "gain, mean", "gain, maximum",
    ...(data.used ? ["budgets with the reserve", "gain with the reserve, mean"] : []),
  ];
  const withReserve = (of) => [of.budgets_with_reserve, of.mean_with_reserve === null ? "–" : percent(of.mean_with_reserve, 1)];
  const line = (of) => [
    of.allocator, of.menu, of.budgets, of.without, of.only_planned, of.only_allocator,
    percent(of.mean, 1), percent(of.most, 1) + (of.most > 0 ? ` at ${gib(of.most_at)}` : ""), ...(data.used ? withReserve(of) : []),
  ];
  document.querySelector("#throughput .reserve").hidden = !data.used;
  table(document.querySelector("#throughput .table"), head, data.gains.map(line));
}

function fits() {
  const box = document.querySelector("#fits .table");
  box.replaceChildren();
  const sizes = planned.map((row) => row.reserved[0]).sort((a, b) => a - b);
  const wanted = [8, 16, 24, 32, 40, 48, 64, 80, 96, 141, 180].map((n) => n * GIB).concat(data.capacity);
  let budgets = [...new Set(wanted)].filter((n) => n >= sizes[0] && n <= Math.max(data.capacity, sizes.at(-1) ?? 0)).sort((a, b) => a - b);
  // For small models, some of their own sizes serve as budgets.
  if (budgets.length < 3) budgets = [0.1, 0.25, 0.5, 0.75, 1].map((part) => sizes[Math.floor((sizes.length - 1) * part)]).filter((n) => n);
  const here = [...shown].sort((a, b) => a - b);
  const table = element(box, "table");
  const head = element(element(table, "thead"), "tr");
  element(head, "th", {}, "budget");
  here.forEach((index) => element(head, "th", {}, data.allocators[index]));
  const body = element(table, "tbody");
  for (const budget of budgets) {
    const line = element(body, "tr");
    element(line, "td", {}, gib(budget));
    for (const index of here) {
      const fitting = (list, index) => list.filter((row) => row.reserved[index] !== null && row.reserved[index] <= budget);
      const inside = fitting(rows, index);
      const cell = element(line, "td", inside.length ? {} : { class: "none" });
      if (!inside.length) {
        cell.textContent = "nothing fits";
        continue;
      }
      const best = inside.reduce(faster, null);
      const link = element(cell, "a", { tabindex: 0, role: "button", title: values(best) }, timeText(best));
      link.onclick = () => choose(best);
      link.onkeydown = (event) => event.key === "Enter" && choose(best);
      const counted = fitting(everywhere, index);
      const largest = counted.length ? `, micro-batch ${Math.max(...counted.map((row) => row.micro_batch))}` : "";
      element(cell, "small", {}, `${counted.length} of ${everywhere.length} fit${largest}`);
      if (index) {
        const only = fitting(everywhere, 0).filter((row) => row.reserved[index] > budget).length;
        const slower = (time(best) / time(fitting(rows, 0).reduce(faster, best)) - 1) * 100;
        element(cell, "small", {}, `${only} only planned` + (slower >= 0.05 ? `, ${slower.toFixed(1)} % slower` : ""));
      }
    }
  }
}

function choose(row) {
  chosen = row;
  const box = document.getElementById("detail");
  box.hidden = false;
  box.replaceChildren();
  element(box, "h2", {}, values(row));
  location.hash = row.key;
  const facts = element(box, "dl", { class: "facts" });
  const all = [
    ["step", ms(row.ms)], ["tokens per second", Math.round(row.tokens).toLocaleString("en")], ["bubble", (row.bubble * 100).toFixed(1) + " %"],
    ["recomputed", (row.overhead * 100).toFixed(1) + " %"], ["micro-batch", row.micro_batch], [row.exact ? "peak live bytes" : "peak live bytes, at least", gib(row.live)],
  ];
  for (const [name, value] of all) {
    const pair = element(facts, "div");
    element(pair, "dt", {}, name);
    element(pair, "dd", {}, value);
  }
  gantt(element(box, "div", { class: "timeline" }), row);
  const columns = element(box, "div", { class: "columns" });
  bars(element(columns, "table"), "reserved", data.allocators.map((name, index) => [name, row.reserved[index], color(index)]));
  bars(element(columns, "table"), "at the fullest rank's peak", Object.entries(row.roles).map(([name, bytes]) => [name, bytes, "var(--accent)"]));
  if (row.map.length) {
    element(box, "p", { style: "margin-top:10px" }, "Memory map of the rank with most live bytes:");
    memoryMap(element(box, "div", { class: "plot" }), row);
  }
  element(box, "p", { style: "margin-top:10px" }, "The command for the exact memory maps of all ranks:");
  element(box, "code", {}, row.command);
  memoryTime();
  box.scrollIntoView({ block: "nearest" });
}

// The coarse memory map of the plan of the rank with most live bytes: time across, the arena from bottom to top.
function memoryMap(box, row) {
  // Rows of earlier builds do not have the arena of the map.
  const arena = row.map_bytes || row.reserved[0];
  const at = plot(box, {
    x: { from: 0, to: row.map.length, name: "time of the step" },
    y: { from: 0, to: arena / GIB, name: "offset, GiB" },
    names: [],
  });
  const [seen, lines] = [new Map(), []];
  row.map.forEach((column, index) => {
    const runs = [...column.matchAll(/(\d+)(.)/g)].map(([, count, letter]) => [+count, letter]);
    const cells = runs.reduce((sum, [count]) => sum + count, 0);
    let from = 0;
    for (const [count, letter] of runs) {
      const to = from + count;
      if (letter !== ".") {
        const role = letter.charCodeAt(0) - 97;
        const [top, bottom] = [to, from].map((cell) => at.y(((cell / cells) * arena) / GIB));
        seen.set(role, (seen.get(role) ?? "") + `M${at.x(index).toFixed(1)} ${bottom.toFixed(1)}V${top.toFixed(1)}H${at.x(index + 1).toFixed(1)}V${bottom.toFixed(1)}z`);
        lines.push([index, Math.round((from / cells) * arena), Math.round((to / cells) * arena), data.roles[role]]);
      }
      from = to;
    }
  });
  const roles = [...seen].sort((a, b) => a[0] - b[0]);
  for (const [role, d] of roles) element(at.svg, "path", { d, fill: color(role) });
  legend(at, roles.map(([role]) => [data.roles[role], color(role)]));
  save(box, at, "memory-map", ["column", "from_byte", "to_byte", "role"], lines);
}

function bars(table, title, entries) {
  const known = entries.filter(([, bytes]) => bytes !== null);
  const most = Math.max(...known.map(([, bytes]) => bytes));
  element(element(element(table, "thead"), "tr"), "th", { colspan: 3 }, title);
  const body = element(table, "tbody");
  for (const [name, bytes, fill] of known.sort((a, b) => b[1] - a[1])) {
    const line = element(body, "tr");
    element(line, "td", {}, name);
    element(line, "td", { style: "text-align:right;white-space:nowrap" }, gib(bytes));
    const bar = element(element(line, "td", { style: "width:60%" }), "div", { class: "bar" });
    element(bar, "b", { style: `width:${(100 * bytes) / most}%;background:${fill}` });
  }
}

// Colors: forward; whole backward or input gradient; weight gradient.
const CELLS = { F: "var(--c0)", B: "var(--c1)", I: "var(--c1)", W: "var(--c5)" };

function gantt(box, row) {
  const spans = simulate(data.tables[row.table], row.stages, row.updates);
  const end = Math.max(...spans.flat().map((span) => span.end));
  const [width, line] = [Math.max(700, box.clientWidth), 26];
  const svg = element(box, "svg", { viewBox: `0 0 ${width} ${spans.length * line + 20}`, role: "img", "aria-label": "timeline" });
  const x = (time) => 54 + (time / end) * (width - 60);
  spans.forEach((list, rank) => {
    element(svg, "text", { x: 0, y: rank * line + 17 }, `rank ${rank}`);
    for (const span of list) {
      const name = span.cell ? span.cell.map(({ stage, kind, batch }) => `${stage}${kind}${batch}`).join("+") : "update";
      const fill = span.cell ? CELLS[span.cell.at(-1).kind] : "var(--c3)";
      const wide = Math.max(0.5, x(span.end) - x(span.start) - 0.6);
      const box = element(svg, "rect", { x: x(span.start), y: rank * line + 3, width: wide, height: line - 6, rx: 2, fill });
      element(box, "title", {}, `${name}: ${ms(span.start / 1e6)} to ${ms(span.end / 1e6)}`);
      if (wide > name.length * 7) {
        const style = "fill:var(--ground);pointer-events:none";
        element(svg, "text", { x: x(span.start) + wide / 2, y: rank * line + 17, "text-anchor": "middle", style }, name);
      }
    }
  });
  for (const time of ticks(0, end / 1e6, width / 120)) {
    element(svg, "text", { x: x(time * 1e6), y: spans.length * line + 15, "text-anchor": "middle" }, ms(time));
  }
}

function draw() {
  if (!planned.length) {
    document.querySelector("main").textContent = "No configuration fits: there is nothing to draw. results.csv says why.";
    return;
  }
  memoryTime();
  bubble();
  estimate();
  const classes = (a, b) => (b[0] === "plain") - (a[0] === "plain") || a[0].length - b[0].length || (a[0] < b[0] ? -1 : 1);
  efficiency("classes", "", (row) => row.class, classes);
  efficiency("sizes", "sequences per micro-batch", (row) => row.micro_batch, (a, b) => a[0] - b[0]);
  fragmentation();
  throughput();
  fits();
}

show(0);
figures();
menus();
toggles();
draw();
const linked = rows.find((row) => "#" + row.key === location.hash);
if (linked) choose(linked);
let waiting = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => {
    draw();
    if (chosen) choose(chosen);
  });
});
