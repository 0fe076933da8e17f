// What the user does: zoom, pan, hover, pick a moment, filter, search. Changes `state` and asks for a new painting.

// ---------------------------------------------------------------- looking

const clampView = view => {
  const width = Math.min(timeLength, Math.max(view.right - view.left, Math.min(2, timeLength)));
  const tall = Math.min(byteLength, Math.max(view.top - view.bottom, Math.min(16, byteLength)));
  const from = Math.min(Math.max(0, view.left), timeLength - width);
  const floor = Math.min(Math.max(0, view.bottom), byteLength - tall);
  return { left: from, right: from + width, bottom: floor, top: floor + tall };
};
const look = view => { state.view = clampView(view); draw(DRAW_MAP); };
const zoom = (x, y, factorX, factorY) => {
  const t = timeAt(x), a = addressAt(y), v = state.view;
  look({
    left: t - (t - v.left) * factorX, right: t + (v.right - t) * factorX,
    bottom: a - (a - v.bottom) * factorY, top: a + (v.top - a) * factorY,
  });
};
const showTensor = i => {
  const width = Math.max(right[i] - left[i], timeLength / 2000), tall = Math.max(top_[i] - bottom[i], byteLength / 400);
  look({ left: left[i] - width * .6, right: right[i] + width * .6, bottom: bottom[i] - tall * 2, top: top_[i] + tall * 2 });
};

const inMap = (x, y) => x >= plot.x && x <= plot.x + plot.width && y >= plot.y && y <= plot.y + plot.height;
// A hit within a pixel counts for what is thinner than that.
const pick = (x, y) => {
  if (!inMap(x, y)) return -1;
  const t = timeAt(x), a = addressAt(y);
  const slackT = (state.view.right - state.view.left) / plot.width, slackA = (state.view.top - state.view.bottom) / plot.height;
  let near = -1;
  for (let i = 0; i < count; i++) {
    if (!isShown(i)) continue;
    if (t >= left[i] && t < right[i] && a >= bottom[i] && a < top_[i]) return i;
    if (near < 0 && t >= left[i] - slackT && t < right[i] + slackT && a >= bottom[i] - slackA && a < top_[i] + slackA) near = i;
  }
  return near;
};

const tip = element("tip");
const showTip = (x, y) => {
  const i = pick(x, y);
  if (i !== state.hover) { state.hover = i; draw(DRAW_OVER); }
  const rows = [];
  tip.replaceChildren();
  if (i >= 0) {
    tip.append(make("b", page.strings[tensor[i]] || "(unnamed)"));
    const length = exact.end[i] - exact.start[i];
    rows.push(["op", page.strings[op[i]]], ["layer", page.strings[layer[i]] || "—"]);
    rows.push(["role", page.roles[role[i]].name + (persistent[i] ? ", alive at every tick" : "")]);
    rows.push(["bytes", `${size(exact.bytes[i])}  (${grouped(exact.bytes[i])})`], ["offset", grouped(exact.offset[i])]);
    rows.push(["lifetime", `[${exact.start[i]}, ${exact.end[i]})  ${grouped(length)} tick${length === 1n ? "" : "s"}`]);
  } else if (x >= plot.x && x <= plot.x + plot.width && page.steps) {
    const time = Math.floor(timeAt(x)), live = stepLive[stepAt(time)];
    tip.append(make("b", inMap(x, y) ? "free" : `tick ${firstTick + BigInt(time)}`));
    if (inMap(x, y)) rows.push(["tick", firstTick + BigInt(time)]);
    rows.push(["live", size(live)], ["unused", size(byteLength - live)]);
    const names = marks.filter(m => time >= m.left && time < m.right).map(m => m.name);
    if (names.length) rows.push(["phase", names.join(", ")]);
  }
  tip.hidden = rows.length === 0;
  if (tip.hidden) return;
  const table = make("table");
  for (const [name, value] of rows) {
    const row = table.insertRow();
    row.append(make("td", name), make("td", String(value)));
  }
  tip.append(table);
  const { offsetWidth: w, offsetHeight: h } = tip;
  tip.style.left = `${x + 16 + w > plot.full ? Math.max(0, x - w - 12) : x + 16}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 14, plot.tall - h))}px`;
};

// ---------------------------------------------------------------- the moment that the table shows

const LARGEST = 40;
const tickAt = time => firstTick + BigInt(Math.max(0, Math.min(timeLength - 1, Math.floor(time))));
const showMoment = tick => {
  state.moment = tick;
  const live = [];
  for (let i = 0; i < count; i++) if (exact.start[i] <= tick && tick < exact.end[i]) live.push(i);
  live.sort((a, b) => (exact.bytes[b] > exact.bytes[a] ? 1 : exact.bytes[b] < exact.bytes[a] ? -1 : a - b));
  const byRole = page.roles.map(() => 0n);
  let total = 0n;
  for (const i of live) { byRole[role[i]] += exact.bytes[i]; total += exact.bytes[i]; }
  const isPeak = tick === peak;
  element("moment").textContent = count ? `Tick ${tick}${isPeak ? ", the peak" : ""}` : "Nothing is alive";
  const phase = marks.filter(m => tick >= m.start && tick < m.end).map(m => m.name).join(", ");
  element("moment-text").textContent =
    `${phase ? phase + " · " : ""}${grouped(live.length)} tensors · ${size(total)} live · ${size(height > total ? height - total : 0n)}\u00a0unused`;
  element("peak").hidden = isPeak;
  const shares = element("shares");
  shares.replaceChildren();
  byRole.forEach((bytes, i) => {
    if (bytes === 0n) return;
    const row = make("div", undefined, "share"), bar = make("div", undefined, "bar"), part = make("i");
    part.style.width = `${100 * Number(bytes) / byteLength}%`;
    part.style.background = colour(i);
    bar.append(part);
    row.append(make("span", page.roles[i].name), bar, make("span", size(bytes)));
    shares.append(row);
  });
  const body = element("largest");
  body.replaceChildren();
  for (const i of live.slice(0, LARGEST)) {
    const row = body.insertRow(), name = make("td"), dot = make("i");
    dot.style.background = colour(role[i]);
    dot.title = page.roles[role[i]].name;
    const origin = [page.strings[op[i]], page.strings[layer[i]]].filter(Boolean).join(" in ");
    name.append(dot, make("span", page.strings[tensor[i]] || "(unnamed)"), make("small", origin));
    row.append(name, make("td", size(exact.bytes[i]), "number"));
    row.title = "Click to mark it, double click to go there";
    row.classList.toggle("chosen", i === state.chosen);
    row.addEventListener("click", () => { state.chosen = state.chosen === i ? -1 : i; showMoment(state.moment); });
    row.addEventListener("dblclick", () => { state.chosen = i; showTensor(i); });
  }
  draw(DRAW_OVER);
};

// ---------------------------------------------------------------- controls

const figures = () => {
  const gap = bound === 0n ? 1 : byteLength / Number(bound);
  const above = height > bound ? height - bound : 0n;
  let area = 0;
  for (let i = 0; i < page.steps; i++) area += (stepTick[i + 1] - stepTick[i]) * (byteLength - stepLive[i]) / timeLength;
  const entries = [
    ["height", size(height), `${grouped(height)} bytes`], ["lower bound", size(bound), `${grouped(bound)} bytes`],
    ["gap", gap.toFixed(4), `height ÷ lower bound; ${grouped(above)} bytes above the bound`],
    ["unused on average", count ? `${(100 * area / byteLength).toFixed(1)} %` : "—", "bytes below the height that no tensor holds, averaged over ticks"],
    ["tensors", grouped(count), ""], ["ticks", grouped(endTick - firstTick), `[${firstTick}, ${endTick})`],
  ];
  for (const [name, value, title] of entries) {
    const group = make("div");
    group.title = title;
    group.append(make("dt", name), make("dd", value));
    element("figures").append(group);
  }
};

const roleButtons = () => {
  const group = element("roles"), counts = page.roles.map(() => 0);
  for (let i = 0; i < count; i++) counts[role[i]]++;
  group.replaceChildren();
  page.roles.forEach((r, i) => {
    if (!counts[i]) return;
    const button = make("button"), dot = make("i");
    dot.style.background = colour(i);
    button.append(dot, r.name, make("small", grouped(counts[i])));
    button.title = `Show or hide; double click: ${r.name} alone, or all again`;
    button.setAttribute("aria-pressed", state.shown[i]);
    button.addEventListener("click", () => { state.shown[i] = !state.shown[i]; pressed(); });
    button.addEventListener("dblclick", () => {
      const isAlone = state.shown.every((shown, j) => shown === (j === i) || !counts[j]);
      state.shown = state.shown.map((_, j) => isAlone || j === i);
      pressed();
    });
    button.dataset.role = i;
    group.append(button);
  });
  const pressed = () => {
    for (const button of group.children) button.setAttribute("aria-pressed", state.shown[button.dataset.role]);
    draw(DRAW_MAP);
  };
};

let nextHit = 0;
const search = () => {
  const query = element("search").value.trim().toLowerCase();
  state.query = query;
  nextHit = 0;
  if (!query) {
    state.hits = null;
    element("found").textContent = "";
  } else {
    const matches = page.strings.map(text => text.toLowerCase().includes(query));
    state.hits = new Uint8Array(count);
    let found = 0, bytes = 0n;
    for (let i = 0; i < count; i++) {
      if (!matches[tensor[i]] && !matches[op[i]] && !matches[layer[i]]) continue;
      state.hits[i] = 1;
      found++;
      bytes += exact.bytes[i];
    }
    element("found").textContent = found ? `${grouped(found)} found · ${size(bytes)}` : "none found";
  }
  draw(DRAW_MAP);
};
const goToNextHit = () => {
  for (let n = 0; state.hits && n < count; n++) {
    const i = (nextHit + n) % count;
    if (!state.hits[i] || !isShown(i)) continue;
    nextHit = i + 1;
    state.chosen = i;
    showTensor(i);
    showMoment(exact.start[i]);
    return;
  }
};

const repaint = () => { roleButtons(); showMoment(state.moment); draw(DRAW_MAP); };

let drag = null;
mapCanvas.addEventListener("pointerdown", event => {
  mapCanvas.setPointerCapture(event.pointerId);
  drag = { x: event.offsetX, y: event.offsetY, view: state.view, moved: false, box: event.altKey };
  mapCanvas.focus({ preventScroll: true });
});
mapCanvas.addEventListener("pointermove", event => {
  const { offsetX: x, offsetY: y } = event;
  if (!drag) { showTip(x, y); return; }
  drag.moved ||= Math.hypot(x - drag.x, y - drag.y) > 3;
  if (!drag.moved) return;
  tip.hidden = true;
  if (drag.box) { state.box = { x0: drag.x, y0: drag.y, x1: x, y1: y }; draw(DRAW_OVER); return; }
  mapCanvas.classList.add("dragging");
  const v = drag.view, dt = (x - drag.x) / plot.width * (v.right - v.left), da = (y - drag.y) / plot.height * (v.top - v.bottom);
  look({ left: v.left - dt, right: v.right - dt, bottom: v.bottom + da, top: v.top + da });
});
mapCanvas.addEventListener("pointerup", event => {
  mapCanvas.classList.remove("dragging");
  if (drag && drag.box && drag.moved) {
    const { x0, y0, x1, y1 } = state.box;
    state.box = null;
    look({
      left: timeAt(Math.min(x0, x1)), right: timeAt(Math.max(x0, x1)),
      bottom: addressAt(Math.max(y0, y1)), top: addressAt(Math.min(y0, y1)),
    });
  } else if (drag && !drag.moved && event.offsetX >= plot.x) {
    state.chosen = pick(event.offsetX, event.offsetY);
    showMoment(tickAt(timeAt(event.offsetX)));
  }
  drag = null;
});
mapCanvas.addEventListener("pointercancel", () => { drag = null; state.box = null; draw(DRAW_OVER); });
mapCanvas.addEventListener("pointerleave", () => { tip.hidden = true; state.hover = -1; draw(DRAW_OVER); });
mapCanvas.addEventListener("dblclick", () => look(whole()));
mapCanvas.addEventListener("wheel", event => {
  event.preventDefault();
  const amount = event.deltaY || event.deltaX, factor = Math.exp(Math.max(-200, Math.min(200, amount)) * .0022);
  const both = event.ctrlKey || event.metaKey;
  zoom(event.offsetX, event.offsetY, both || !event.shiftKey ? factor : 1, both || event.shiftKey ? factor : 1);
  showTip(event.offsetX, event.offsetY);
}, { passive: false });

document.addEventListener("keydown", event => {
  if (event.target === element("search")) {
    if (event.key === "Enter") goToNextHit();
    if (event.key === "Escape") { element("search").value = ""; search(); mapCanvas.focus(); }
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const v = state.view, dt = (v.right - v.left) * .1, da = (v.top - v.bottom) * .1;
  const pan = (t, a) => look({ left: v.left + t, right: v.right + t, bottom: v.bottom + a, top: v.top + a });
  const middle = [plot.x + plot.width / 2, plot.y + plot.height / 2];
  const action = {
    "/": () => element("search").focus(), "0": () => look(whole()), "+": () => zoom(...middle, .8, .8), "=": () => zoom(...middle, .8, .8),
    "-": () => zoom(...middle, 1.25, 1.25), ArrowLeft: () => pan(-dt, 0), ArrowRight: () => pan(dt, 0), ArrowUp: () => pan(0, da), ArrowDown: () => pan(0, -da),
  }[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
element("search").addEventListener("input", search);
element("reset").addEventListener("click", () => look(whole()));
element("peak").addEventListener("click", () => showMoment(peak));
element("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  repaint();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

figures();
roleButtons();
new ResizeObserver(resize).observe(element("plot"));
resize();
showMoment(peak);
