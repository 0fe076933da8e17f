// The data of the page: the buffers, unpacked into columns; the curve; the phases. Also formats numbers.

const element = id => document.getElementById(id);
const page = JSON.parse(element("data").textContent);
const firstTick = BigInt(page.first_tick), endTick = BigInt(page.end_tick);
const height = BigInt(page.height), bound = BigInt(page.lower_bound);
// For drawing, ticks count from the first one; numbers lose digits past 2^53, so what is printed stays BigInt.
const timeLength = Math.max(1, Number(endTick - firstTick)), byteLength = Math.max(1, Number(height));
const count = page.count;
const exact = { start: new BigUint64Array(count), end: new BigUint64Array(count), offset: new BigUint64Array(count), bytes: new BigUint64Array(count) };
const left = new Float64Array(count), right = new Float64Array(count);
const bottom = new Float64Array(count), top_ = new Float64Array(count);
const tensor = new Uint32Array(count), op = new Uint32Array(count), layer = new Uint32Array(count);
const role = new Uint8Array(count), persistent = new Uint8Array(count);
const stepTick = new Float64Array(page.steps + 1), stepLive = new Float64Array(page.steps);

{
  const packed = Uint8Array.from(atob(page.numbers), c => c.charCodeAt(0));
  let at = 0;
  // Seven bits a byte, lowest first. A BigInt only past 49 bits.
  const next = () => {
    let value = 0, scale = 1;
    for (let i = 0; i < 7; i++, scale *= 128) {
      const byte = packed[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
    for (let big = BigInt(value), shift = 49n; ; shift += 7n) {
      const byte = packed[at++];
      big |= BigInt(byte & 127) << shift;
      if (byte < 128) return big;
    }
  };
  for (let i = 0; i < count; i++) {
    const start = BigInt(next()), length = BigInt(next()), offset = BigInt(next()), bytes = BigInt(next());
    exact.start[i] = firstTick + start;
    exact.end[i] = firstTick + start + length;
    exact.offset[i] = offset;
    exact.bytes[i] = bytes;
    left[i] = Number(start);
    right[i] = Number(start + length);
    bottom[i] = Number(offset);
    top_[i] = Number(offset + bytes);
    tensor[i] = next();
    op[i] = next();
    layer[i] = next();
    role[i] = next();
    persistent[i] = exact.start[i] === firstTick && exact.end[i] === endTick ? 1 : 0;
  }
  let tick = 0n;
  for (let i = 0; i < page.steps; i++) {
    tick += BigInt(next());
    stepTick[i] = Number(tick);
    stepLive[i] = Number(next());
  }
  stepTick[page.steps] = timeLength;
}

const marks = page.marks.map(([start, end, name]) => ({
  start: BigInt(start), end: BigInt(end), name, left: Number(BigInt(start) - firstTick), right: Number(BigInt(end) - firstTick),
}));

// ---------------------------------------------------------------- words

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const size = bytes => {
  let value = Number(bytes), unit = 0;
  while (value >= 1024 && unit < 6) { value /= 1024; unit++; }
  return `${Number.isInteger(value) ? value : value.toFixed(2)}\u00a0${UNITS[unit]}`;
};
const grouped = integer => String(integer).replace(/\B(?=(\d{3})+$)/g, "\u2009");
const make = (tag, text, className) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
};
