// The simulation of gapless-parallel, for one row: each cell starts as soon as its rank is free and its inputs are
// available.
function simulate(table, stages, updates) {
  const ranks = table.map((row) => row.split(" ").map((cell) => cell.split("+").map(read)));
  const last = Math.max(...ranks.flat(2).map((action) => action.stage));
  const ends = new Map();
  const spans = ranks.map(() => []);
  const time = ({ kind, stage }) => stages[stage][{ F: 0, I: 1, B: 1, W: 2 }[kind]];
  const needs = ({ kind, stage, batch }) => {
    if (kind === "W") return [["I", stage, batch]];
    if (kind === "F") return stage ? [["F", stage - 1, batch]] : [];
    return [["F", stage, batch]].concat(stage < last ? [["I", stage + 1, batch]] : []);
  };
  const ready = (rank, action) =>
    needs(action).reduce((at, need) => {
      const known = ends.get(need.join());
      return known === undefined ? Infinity : Math.max(at, known.end + (known.rank === rank ? 0 : stages[need[1]][3]));
    }, 0);
  for (let moved = true; moved; ) {
    moved = false;
    ranks.forEach((row, rank) => {
      while (spans[rank].length < row.length) {
        const cell = row[spans[rank].length];
        const start = Math.max(spans[rank].at(-1)?.end ?? 0, ...cell.map((action) => ready(rank, action)));
        if (start === Infinity) break;
        const end = start + cell.reduce((sum, action) => sum + time(action), 0);
        cell.forEach(({ kind, stage, batch }) => ends.set([kind === "B" ? "I" : kind, stage, batch].join(), { end, rank }));
        spans[rank].push({ cell, start, end });
        moved = true;
      }
    });
  }
  spans.forEach((row, rank) => {
    const start = row.at(-1)?.end ?? 0;
    row.push({ cell: null, start, end: start + updates[rank] });
  });
  return spans;
}

function read(text) {
  const [, stage, kind, batch] = /^(\d+)([FBIW])(\d+)$/.exec(text);
  return { stage: +stage, kind, batch: +batch };
}
