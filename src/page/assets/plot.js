// Axes and marks that all plots share.
const SVG = "http://www.w3.org/2000/svg";

function element(parent, name, attributes = {}, text) {
  const made = document.createElementNS(parent instanceof SVGElement || name === "svg" ? SVG : "http://www.w3.org/1999/xhtml", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

// About `count` round numbers between two values.
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const all = [];
  for (let at = Math.ceil(from / step) * step; at <= to * (1 + 1e-9); at += step) all.push(at);
  return all;
}

function powers(from, to) {
  if (to / from < 3) return ticks(from, to, 6);
  const all = [];
  for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power++) {
    for (const n of to / from > 20 ? [1, 2, 5] : [1, 1.5, 2, 3, 5, 7]) if (n * 10 ** power >= from && n * 10 ** power <= to) all.push(n * 10 ** power);
  }
  return all;
}

const short = (n) => (n >= 1e4 ? (n / 1e3).toLocaleString("en") + "k" : +n.toPrecision(4) + "");

// Draws the axes of a plot in a box and returns {x, y}, which map values to pixels. The arguments x and y are {from,
// to, log, name, format}; names replaces x's ticks by words.
function plot(box, { x, y, height = 320, names }) {
  box.replaceChildren();
  const width = Math.max(320, box.clientWidth);
  const svg = element(box, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const [left, right, top, bottom] = [58, 14, 10, 38];
  const scale = (axis, low, high) => {
    const map = axis.log ? Math.log : (n) => n;
    const [from, to] = [map(axis.from), map(axis.to)];
    return (n) => low + ((map(n) - from) / (to - from || 1)) * (high - low);
  };
  const at = { svg, width, height, left, right: width - right, top, bottom: height - bottom };
  at.x = scale(x, left, at.right);
  at.y = scale(y, at.bottom, top);
  const marks = (axis, count) => (axis.log ? powers(axis.from, axis.to) : ticks(axis.from, axis.to, count));
  for (const n of marks(y, height / 50)) {
    element(svg, "path", { class: "grid", d: `M${left} ${at.y(n)}H${at.right}` });
    element(svg, "text", { x: left - 6, y: at.y(n) + 4, "text-anchor": "end" }, (y.format || short)(n));
  }
  const across = names ? names.map((_, index) => index + 0.5) : marks(x, width / 90);
  for (const n of across) {
    if (!names) element(svg, "path", { class: "grid", d: `M${at.x(n)} ${top}V${at.bottom}` });
    const text = names ? names[Math.floor(n)] : (x.format || short)(n);
    element(svg, "text", { x: at.x(n), y: at.bottom + 15, "text-anchor": "middle" }, text);
  }
  element(svg, "text", { x: at.right, y: height - 6, "text-anchor": "end", class: "label" }, x.name);
  const name = element(svg, "text", { x: 12, y: top, "text-anchor": "end", class: "label" }, y.name);
  name.setAttribute("transform", `rotate(-90 12 ${top})`);
  return at;
}

// Draws small squares as one path, so that ten thousand of them are a single element.
function dots(at, points, color, size = 3, opacity = 0.55) {
  const square = ([x, y]) => `M${(at.x(x) - size / 2).toFixed(1)} ${(at.y(y) - size / 2).toFixed(1)}h${size}v${size}h-${size}z`;
  return element(at.svg, "path", { d: points.map(square).join(""), fill: color, "fill-opacity": opacity });
}

// Draws a stepped line through points: first across, then down.
function steps(at, points, color, dash = "") {
  if (!points.length) return;
  const [first, ...rest] = points.map(([x, y]) => [at.x(x).toFixed(1), at.y(y).toFixed(1)]);
  const d = `M${first.join(" ")}` + rest.map(([x, y]) => `H${x}V${y}`).join("") + `H${at.right}`;
  return element(at.svg, "path", { class: "front", d, stroke: color, "stroke-dasharray": dash });
}

// Draws the legend of a plot below it, inside the picture. Entries are [name, color, line], where line is the dashes of a
// line, or undefined for a square.
function legend(at, entries) {
  const line = 18;
  let [x, y] = [at.left, at.height + 12];
  for (const [name, color, dash] of entries) {
    const width = 34 + 6.6 * name.length;
    if (x + width > at.width && x > at.left) [x, y] = [at.left, y + line];
    if (dash === undefined) element(at.svg, "rect", { x, y: y - 9, width: 11, height: 11, rx: 3, fill: color });
    else element(at.svg, "path", { class: "front", d: `M${x} ${y - 4}H${x + 18}`, stroke: color, "stroke-dasharray": dash });
    element(at.svg, "text", { x: x + 24, y, class: "label" }, name);
    x += width;
  }
  at.height = y + 6;
  at.svg.setAttribute("viewBox", `0 0 ${at.width} ${at.height}`);
}

// The picture as a file: with the colors and fonts that are shown, because a file has no style sheet.
function picture(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [svg, copy].map((root) => [root, ...root.querySelectorAll("*")]);
  const kept = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font-family", "font-size", "text-anchor"];
  to.forEach((node, index) => {
    const style = getComputedStyle(from[index]);
    for (const name of kept) node.setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("style", `background:${getComputedStyle(svg.closest("section")).backgroundColor}`);
  return new XMLSerializer().serializeToString(copy);
}

// Adds links below a plot that save it as SVG, and its points as CSV.
function exports(box, at, name, head, lines) {
  const quoted = (value) => (/[",\n]/.test(`${value}`) ? `"${`${value}`.replaceAll('"', '""')}"` : `${value ?? ""}`);
  const csv = () => [head, ...lines].map((line) => line.map(quoted).join(",") + "\n").join("");
  const line = element(box, "p", { class: "exports" });
  const link = (type, media, text) => {
    const made = element(line, "a", { href: "#", download: `${name}.${type}` }, type.toUpperCase());
    // The contents are made when they are wanted.
    made.onclick = () => made.setAttribute("href", `data:${media};charset=utf-8,${encodeURIComponent(text())}`);
  };
  link("svg", "image/svg+xml", () => picture(at.svg));
  link("csv", "text/csv", csv);
}
