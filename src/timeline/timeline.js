const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline");
const ranks = data.ranks.map((rank) => ({ ...rank, cells: rank.cells.split(" ") }));
const most = Math.max(1, ...ranks.flatMap((rank) => rank.live.map(([, live]) => live)));
const KINDS = {
  F: ["forward", "--c0"], B: ["backward", "--c1"], I: ["input gradient", "--c1"], W: ["weight gradient", "--c5"],
  other: ["update, sums, messages", "--c4"],
};
const [MARGIN, ROW, CURVE, SPACE, AXIS] = [58, 22, 16, 8, 26];
const state = { from: 0, to: Math.max(1, data.makespan), drag: null, at: null };
const height = ranks.length * (ROW + CURVE + SPACE) + AXIS;
let width = 0;
const x = (time) => MARGIN + ((time - state.from) / (state.to - state.from)) * (width - MARGIN - 4);
const timeAt = (at) => state.from + (Math.min(width - 4, Math.max(MARGIN, at)) - MARGIN) / (width - MARGIN - 4) * (state.to - state.from);
const top_ = (rank) => rank * (ROW + CURVE + SPACE);
const words = (time) => (data.unit === "ns" ? `${+(time / 1e6).toPrecision(5)} ms` : `${+time.toPrecision(6)}`);
const kindOf = (action) => (/^\d+([FBIW])\d+$/.exec(action) || [, "other"])[1];

// The index of the first span that ends after a time; spans are sorted.
function firstBehind(times, time) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle][1] <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function draw() {
  width = canvas.clientWidth;
  const ratio = devicePixelRatio;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const fills = Object.fromEntries(Object.entries(KINDS).map(([kind, [, name]]) => [kind, color(name)]));
  pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  pen.textBaseline = "middle";
  axis(pen, color);
  ranks.forEach((rank, index) => {
    pen.fillStyle = color("--text");
    pen.textAlign = "left";
    pen.fillText(`rank ${index}`, 0, top_(index) + ROW / 2);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN, top_(index), width - MARGIN - 4, ROW + CURVE);
    pen.clip();
    pen.fillStyle = color("--free");
    pen.fillRect(MARGIN, top_(index), width, ROW);
    boxes(pen, rank, top_(index), fills, color("--ground"));
    curve(pen, rank, top_(index) + ROW + CURVE, color("--quiet"));
    pen.restore();
  });
  over(pen, color);
}

function axis(pen, color) {
  pen.textAlign = "center";
  const scale = data.unit === "ns" ? 1e6 : 1;
  for (const tick of ticks(state.from / scale, state.to / scale, width / 110)) {
    pen.fillStyle = color("--line");
    pen.fillRect(x(tick * scale), 0, 1, height - AXIS + 4);
    pen.fillStyle = color("--quiet");
    pen.fillText(words(tick * scale), Math.min(x(tick * scale), width - 24), height - 10);
  }
}

function boxes(pen, rank, y, fills, ground) {
  pen.textAlign = "center";
  pen.font = pen.font.replace("11px", "10px");
  for (let n = firstBehind(rank.times, state.from); n < rank.cells.length && rank.times[n][0] < state.to; n++) {
    const [left, right] = rank.times[n].map(x);
    const wide = Math.max(0.5, right - left - (right - left > 3 ? 1 : 0));
    const actions = rank.cells[n].split("+");
    actions.forEach((action, part) => {
      const tall = (ROW - 1) / actions.length;
      pen.fillStyle = fills[kindOf(action)];
      pen.fillRect(left, y + part * tall, wide, tall);
    });
    if (wide < pen.measureText(rank.cells[n]).width + 1) continue;
    pen.fillStyle = ground;
    pen.fillText(rank.cells[n], left + wide / 2, y + ROW / 2);
  }
}

// Draws the number of kept activations as a stepped line. All ranks share one scale, set by the highest peak.
function curve(pen, rank, bottom, color) {
  pen.beginPath();
  pen.moveTo(MARGIN, bottom);
  let before = 0;
  for (const [time, live] of rank.live) {
    pen.lineTo(x(time), bottom - (before / most) * (CURVE - 2));
    pen.lineTo(x(time), bottom - (live / most) * (CURVE - 2));
    before = live;
  }
  pen.lineTo(x(data.makespan), bottom - (before / most) * (CURVE - 2));
  pen.lineTo(x(data.makespan), bottom);
  pen.fillStyle = color;
  pen.globalAlpha = 0.45;
  pen.fill();
  pen.globalAlpha = 1;
}

// Draws the range that is being selected.
function over(pen, color) {
  if (state.drag === null || state.at === null) return;
  const [from, to] = [state.drag, state.at].sort((a, b) => a - b).map(x);
  pen.fillStyle = color("--accent");
  pen.globalAlpha = 0.2;
  pen.fillRect(from, 0, to - from, height - AXIS);
  pen.globalAlpha = 1;
}

function show(event) {
  const tip = document.getElementById("tip");
  const time = timeAt(event.offsetX);
  const index = Math.floor(event.offsetY / (ROW + CURVE + SPACE));
  const rank = ranks[index];
  tip.hidden = !rank;
  if (!rank) return;
  const n = firstBehind(rank.times, time);
  const isBusy = n < rank.times.length && rank.times[n][0] <= time;
  tip.replaceChildren();
  element(tip, "b", {}, `rank ${index}: ${isBusy ? rank.cells[n] : "idle"}`);
  if (isBusy) element(tip, "div", {}, `${words(rank.times[n][0])} to ${words(rank.times[n][1])}`);
  element(tip, "div", {}, `at ${words(data.unit === "ns" ? time : Math.floor(time))}: ${rank.live.findLast(([from]) => from <= time)?.[1] ?? 0} activations kept`);
  const across = event.pageX + 16 + tip.offsetWidth > document.documentElement.clientWidth ? event.pageX - tip.offsetWidth - 12 : event.pageX + 16;
  tip.style.left = `${Math.max(0, across)}px`;
  tip.style.top = `${event.pageY + 14}px`;
}

function zoom(from, to) {
  [state.from, state.to] = [from, to];
  draw();
}

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  state.drag = timeAt(event.offsetX);
});
canvas.addEventListener("pointermove", (event) => {
  show(event);
  state.at = timeAt(event.offsetX);
  if (state.drag !== null) draw();
});
canvas.addEventListener("pointerup", (event) => {
  const [from, to] = [state.drag ?? 0, timeAt(event.offsetX)].sort((a, b) => a - b);
  const isZoom = state.drag !== null && x(to) - x(from) > 4;
  state.drag = null;
  if (isZoom) zoom(from, to);
});
canvas.addEventListener("pointerleave", () => (document.getElementById("tip").hidden = true));
canvas.addEventListener("dblclick", () => zoom(0, Math.max(1, data.makespan)));
addEventListener("resize", () => requestAnimationFrame(draw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

const met = new Set(ranks.flatMap((rank) => rank.cells.filter(Boolean).flatMap((cell) => cell.split("+").map(kindOf))));
for (const [kind, [name, fill]] of Object.entries(KINDS)) {
  if (!met.has(kind)) continue;
  const entry = element(document.getElementById("legend"), "span");
  element(entry, "i", { style: `background:var(${fill})` });
  entry.append(kind === "other" ? name : `${kind} ${name}`);
}
const kept = element(document.getElementById("legend"), "span");
element(kept, "i", { style: "background:var(--quiet);opacity:.45" });
kept.append(`activations kept, at most ${most}`);
const figures = [
  ["ranks", ranks.length], ["makespan", words(data.makespan) + (data.unit === "ns" ? "" : ` ${data.unit}`)],
  ["bubble", `${(100 * data.bubble).toFixed(1)} %`], ["most idle rank", words(Math.max(...ranks.map((rank) => rank.idle)))],
];
for (const [name, value] of figures) {
  const pair = element(document.getElementById("figures"), "div");
  element(pair, "dt", {}, name);
  element(pair, "dd", {}, value);
}
element(document.body, "div", { id: "tip", hidden: "" });
draw();
