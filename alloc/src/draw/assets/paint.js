// What the page shows and how it is painted. Reads data.js and `state`; changes nothing but pixels.

// ---------------------------------------------------------------- state

const mapCanvas = element("map"), overCanvas = element("over");
const map = mapCanvas.getContext("2d"), over = overCanvas.getContext("2d");
const whole = () => ({ left: 0, right: timeLength, bottom: 0, top: byteLength });
const peak = page.peak_tick === null ? firstTick : BigInt(page.peak_tick);
const state = { view: whole(), shown: page.roles.map(() => true), query: "", hits: null, moment: peak, chosen: -1, hover: -1, box: null };
let plot = null; // where things lie, in CSS pixels
const AXIS = 72, PHASES = 22, CURVE = 92, BETWEEN = 12, TICKS = 22;

const isDark = () => {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const colour = index => isDark() ? page.roles[index].dark : page.roles[index].light;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const xOf = time => plot.x + (time - state.view.left) / (state.view.right - state.view.left) * plot.width;
const yOf = address => plot.y + plot.height - (address - state.view.bottom) / (state.view.top - state.view.bottom) * plot.height;
const timeAt = x => state.view.left + (x - plot.x) / plot.width * (state.view.right - state.view.left);
const addressAt = y => state.view.bottom + (plot.y + plot.height - y) / plot.height * (state.view.top - state.view.bottom);
const isShown = i => state.shown[role[i]];
const isLit = i => state.hits === null || state.hits[i] === 1;

// ---------------------------------------------------------------- drawing

let pending = 0;
const DRAW_MAP = 1, DRAW_OVER = 2;
const draw = what => {
  if (!pending) requestAnimationFrame(() => {
    const now = pending;
    pending = 0;
    if (now & DRAW_MAP) drawMap();
    drawOver();
  });
  pending |= what;
};

const resize = () => {
  const { width, height } = mapCanvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
  for (const canvas of [mapCanvas, overCanvas]) {
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.max(1, Math.round(height * ratio));
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
  const strip = marks.length ? PHASES : 6;
  plot = {
    ratio, x: AXIS, y: strip, width: Math.max(20, width - AXIS - 2), full: width, tall: height,
    height: Math.max(20, height - strip - BETWEEN - CURVE - TICKS),
  };
  plot.curveTop = plot.y + plot.height + BETWEEN;
  plot.curveBottom = plot.curveTop + CURVE;
  draw(DRAW_MAP);
};

const drawMap = () => {
  map.clearRect(0, 0, plot.full, plot.tall);
  rasterize();
  drawNames();
  drawPhases();
  drawAxes();
  drawCurve();
};

// Pixels as the canvas stores them: little-endian ABGR.
const pixel = hex => {
  const value = parseInt(hex.slice(1), 16);
  return (255 << 24 | (value & 255) << 16 | (value & 0xff00) | value >> 16) >>> 0;
};
const mix = (a, b, share) => {
  let out = 0;
  for (let shift = 0; shift < 32; shift += 8) {
    out |= Math.round((a >>> shift & 255) * (1 - share) + (b >>> shift & 255) * share) << shift;
  }
  return out >>> 0;
};

// Fills device pixels directly: no anti-aliased seams between neighbours, and no canvas call per rectangle.
const rasterize = () => {
  const { ratio } = plot, { view } = state;
  const x0 = Math.round(plot.x * ratio), y0 = Math.round(plot.y * ratio);
  const wide = Math.max(1, Math.round(plot.width * ratio)), tall = Math.max(1, Math.round(plot.height * ratio));
  const image = map.createImageData(wide, tall), pixels = new Uint32Array(image.data.buffer);
  const free = pixel(css("--free")), ground = pixel(css("--ground"));
  pixels.fill(free);
  // By role, then dimmed or lit: the surface, the hatch of what is persistent, the border.
  const shades = page.roles.map((_, i) => {
    const full = pixel(colour(i)), dim = mix(full, free, .82);
    return [[dim, mix(dim, ground, .2), mix(dim, ground, .7)], [full, mix(full, ground, .38), mix(full, ground, .7)]];
  });
  const period = Math.round(7 * ratio), line = Math.max(1, Math.round(1.4 * ratio));
  const scaleX = wide / (view.right - view.left), scaleY = tall / (view.top - view.bottom);
  const paint = (i, xa, ya, xb, yb) => {
    const [base, hatch, edge] = shades[role[i]][isLit(i) ? 1 : 0], hatched = persistent[i] === 1;
    const bordered = xb - xa >= 4 && yb - ya >= 4;
    for (let y = Math.max(0, ya); y < Math.min(tall, yb); y++) {
      const row = y * wide, from = Math.max(0, xa), to = Math.min(wide, xb);
      if (bordered && y === ya) { pixels.fill(edge, row + from, row + to); continue; }
      // Most of a large plan is a few pixels wide, for which the call costs more than the pixels.
      if (to - from < 16) for (let x = from; x < to; x++) pixels[row + x] = base;
      else pixels.fill(base, row + from, row + to);
      if (hatched) {
        for (let x = from - (from + y) % period; x < to; x += period) {
          if (x + line > from) pixels.fill(hatch, row + Math.max(from, x), row + Math.min(to, x + line));
        }
      }
      if (bordered && xa >= 0) pixels[row + xa] = edge;
    }
  };
  // What is thinner than a pixel is widened to one and drawn first, so that it shows where space is free.
  // Then the others: hits of a search last.
  for (const pass of [0, 1, 2]) {
    if (pass === 2 && state.hits === null) break;
    for (let i = 0; i < count; i++) {
      if (right[i] <= view.left || left[i] >= view.right || top_[i] <= view.bottom || bottom[i] >= view.top) continue;
      if (!isShown(i) || (pass === 2 && !isLit(i))) continue;
      let xa = Math.round((left[i] - view.left) * scaleX), xb = Math.round((right[i] - view.left) * scaleX);
      let ya = tall - Math.round((top_[i] - view.bottom) * scaleY), yb = tall - Math.round((bottom[i] - view.bottom) * scaleY);
      const thin = xa === xb || ya === yb;
      if (pass < 2 && thin !== (pass === 0)) continue;
      if (thin) { xb = Math.max(xb, xa + 1); yb = Math.max(yb, ya + 1); }
      paint(i, xa, ya, xb, yb);
    }
  }
  map.putImageData(image, x0, y0);
};

const drawNames = () => {
  map.font = "11px ui-sans-serif, system-ui, sans-serif";
  map.textBaseline = "middle";
  map.textAlign = "left";
  map.fillStyle = "#0d1014";
  const { view } = state, perTime = plot.width / (view.right - view.left), perByte = plot.height / (view.top - view.bottom);
  for (let i = 0; i < count; i++) {
    if ((right[i] - left[i]) * perTime < 30 || (top_[i] - bottom[i]) * perByte < 13 || !isShown(i) || !isLit(i)) continue;
    const xa = Math.max(plot.x, xOf(left[i])), xb = Math.min(plot.x + plot.width, xOf(right[i]));
    const ya = Math.max(plot.y, yOf(top_[i])), yb = Math.min(plot.y + plot.height, yOf(bottom[i]));
    const name = page.strings[tensor[i]];
    if (xb - xa < 30 || yb - ya < 13) continue;
    const text = fit(name, xb - xa - 8), wide = map.measureText(text).width;
    if (!text) continue;
    if (persistent[i]) { // a plate that keeps the hatch off the letters
      map.globalAlpha = .8;
      map.fillStyle = colour(role[i]);
      map.fillRect(xa + 2, (ya + yb) / 2 - 6.5, wide + 5, 13);
      map.globalAlpha = 1;
      map.fillStyle = "#0d1014";
    }
    map.fillText(text, xa + 5, (ya + yb) / 2 + .5);
  }
};

// As much of a name as fits; nothing if that would be less than three letters.
const fit = (text, width) => {
  if (text.length > 400) text = text.slice(0, 400);
  if (map.measureText(text).width <= width) return text;
  const letters = Math.floor(width / 6.2) - 1;
  return letters < 3 ? "" : text.slice(0, letters) + "…";
};

const drawPhases = () => {
  map.font = "11px ui-sans-serif, system-ui, sans-serif";
  map.textBaseline = "middle";
  map.textAlign = "left";
  marks.forEach((mark, i) => {
    const xa = Math.max(plot.x, xOf(mark.left)), xb = Math.min(plot.x + plot.width, xOf(mark.right));
    if (xb - xa < .5) return;
    map.fillStyle = css(i % 2 ? "--panel" : "--line");
    map.fillRect(xa, 1, xb - xa, PHASES - 5);
    map.fillStyle = css("--text");
    const text = fit(mark.name, xb - xa - 8);
    if (text) map.fillText(text, xa + 5, 1 + (PHASES - 5) / 2);
    if (xb - xa > 24) {
      map.strokeStyle = css("--quiet");
      map.globalAlpha = .35;
      map.beginPath();
      map.moveTo(Math.round(xa) + .5, 1);
      map.lineTo(Math.round(xa) + .5, plot.curveBottom);
      map.stroke();
      map.globalAlpha = 1;
    }
  });
};

const drawAxes = () => {
  const { view } = state;
  map.font = "11px ui-sans-serif, system-ui, sans-serif";
  map.fillStyle = css("--quiet");
  map.strokeStyle = css("--quiet");
  map.textBaseline = "middle";
  map.textAlign = "right";
  const byteStep = Math.max(1, 2 ** Math.ceil(Math.log2((view.top - view.bottom) / Math.max(2, plot.height / 60))));
  for (let address = Math.ceil(view.bottom / byteStep) * byteStep; address <= view.top; address += byteStep) {
    map.fillRect(plot.x - 5, yOf(address), 4, 1);
    map.fillText(size(address), plot.x - 9, Math.max(7, yOf(address)));
    if (address + byteStep === address) break;
  }
  map.textAlign = "center";
  const apart = Math.max(90, map.measureText(String(endTick)).width + 24);
  const rough = (view.right - view.left) / Math.max(2, plot.width / apart), power = 10 ** Math.floor(Math.log10(rough));
  const timeStep = Math.max(1, [1, 2, 5, 10].map(n => n * power).find(n => n >= rough));
  // Round ticks as the caller counts them, not as the page does.
  const origin = Number(firstTick);
  for (let tick = Math.ceil((view.left + origin) / timeStep) * timeStep; tick - origin <= view.right; tick += timeStep) {
    const x = xOf(tick - origin);
    map.fillRect(x, plot.curveBottom, 1, 4);
    const label = String(tick);
    map.fillText(label, Math.min(x, plot.full - map.measureText(label).width / 2 - 2), plot.curveBottom + 12);
    if (tick + timeStep === tick) break;
  }
  map.textAlign = "right";
  map.fillText("tick", plot.x - 9, plot.curveBottom + 12);
};

// Index of the step that holds at a time.
const stepAt = time => {
  let low = 0, high = page.steps;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (stepTick[middle] <= time) low = middle + 1; else high = middle;
  }
  return Math.max(0, low - 1);
};

// Live bytes against the height of the arena; under each pixel, the most that is alive there.
const drawCurve = () => {
  const y = bytes => plot.curveBottom - bytes / byteLength * (CURVE - 6);
  map.fillStyle = css("--free");
  map.fillRect(plot.x, plot.curveTop, plot.width, CURVE);
  if (page.steps) {
    const columns = Math.round(plot.width);
    map.beginPath();
    map.moveTo(plot.x, plot.curveBottom);
    for (let column = 0; column < columns; column++) {
      const from = timeAt(plot.x + column), to = timeAt(plot.x + column + 1);
      if (to <= 0 || from >= timeLength) { map.lineTo(plot.x + column, plot.curveBottom); continue; }
      let most = 0;
      for (let i = stepAt(Math.max(0, from)); i < page.steps && (stepTick[i] < to || i === 0); i++) most = Math.max(most, stepLive[i]);
      map.lineTo(plot.x + column, y(most));
      map.lineTo(plot.x + column + 1, y(most));
    }
    map.lineTo(plot.x + plot.width, plot.curveBottom);
    map.closePath();
    map.fillStyle = css("--accent");
    map.globalAlpha = .28;
    map.fill();
    map.globalAlpha = 1;
  }
  const rule = (bytes, name, dash) => {
    map.strokeStyle = css(name);
    map.setLineDash(dash);
    map.beginPath();
    map.moveTo(plot.x, Math.round(y(bytes)) + .5);
    map.lineTo(plot.x + plot.width, Math.round(y(bytes)) + .5);
    map.stroke();
    map.setLineDash([]);
  };
  rule(byteLength, "--quiet", [5, 4]);
  rule(Number(bound), "--bound", []);
  map.font = "11px ui-sans-serif, system-ui, sans-serif";
  map.textAlign = "right";
  map.textBaseline = "middle";
  map.fillStyle = css("--quiet");
  map.fillText("live bytes", plot.x - 9, plot.curveTop + CURVE / 2);
  if (y(Number(bound)) - y(byteLength) > 12) map.fillText("height", plot.x - 9, y(byteLength));
  map.fillStyle = css("--bound");
  map.fillText("bound", plot.x - 9, y(Number(bound)));
};

const outline = (i, name, width) => {
  const xa = Math.max(plot.x, xOf(left[i])), xb = Math.min(plot.x + plot.width, xOf(right[i]));
  const ya = Math.max(plot.y, yOf(top_[i])), yb = Math.min(plot.y + plot.height, yOf(bottom[i]));
  if (xb < xa || yb < ya) return;
  const [w, h] = [Math.max(2, xb - xa), Math.max(2, yb - ya)];
  over.lineWidth = width + 2;
  over.strokeStyle = css("--ground");
  over.strokeRect(xa, ya, w, h);
  over.lineWidth = width;
  over.strokeStyle = css(name);
  over.strokeRect(xa, ya, w, h);
};

const drawOver = () => {
  over.clearRect(0, 0, plot.full, plot.tall);
  const x = xOf(Number(state.moment - firstTick));
  if (count && x >= plot.x && x <= plot.x + plot.width) {
    over.strokeStyle = css("--text");
    over.lineWidth = 1;
    over.setLineDash([3, 3]);
    over.beginPath();
    over.moveTo(Math.round(x) + .5, plot.y);
    over.lineTo(Math.round(x) + .5, plot.curveBottom);
    over.stroke();
    over.setLineDash([]);
  }
  if (state.chosen >= 0) outline(state.chosen, "--bound", 2);
  if (state.hover >= 0) outline(state.hover, "--text", 1.5);
  if (state.box) {
    const { x0, y0, x1, y1 } = state.box;
    over.fillStyle = css("--accent");
    over.globalAlpha = .22;
    over.fillRect(Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0));
    over.globalAlpha = 1;
  }
};
