const data = JSON.parse(document.getElementById('data').textContent);

// One picture: columns of [reserved, allocated, runs of rows in use and idle in turn], in rows of data.rows.
function draw(canvas, columns, colour) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio; canvas.height = height * ratio;
  const pen = canvas.getContext('2d');
  pen.scale(ratio, ratio);
  const x = index => Math.round(index * width * ratio / columns.length) / ratio, y = rows => height * (1 - rows / data.rows);
  const fill = (name, index, from, to) => {
    if (to <= from) return;
    pen.fillStyle = colour(name);
    pen.fillRect(x(index), y(to), x(index + 1) - x(index), y(from) - y(to));
  };
  columns.forEach(([reserved, , runs], index) => {
    fill('--idle', index, 0, Math.min(reserved, data.live));
    fill('--lost', index, data.live, reserved);
    let from = 0;
    runs.forEach((rows, run) => { if (run % 2 === 0) fill('--held', index, from, from + rows); from += rows; });
  });
  const line = (name, dashes, rows) => {
    pen.strokeStyle = colour(name); pen.lineWidth = 1.5; pen.setLineDash(dashes); pen.beginPath();
    columns.forEach((column, index) => { pen.lineTo(x(index), y(rows(column))); pen.lineTo(x(index + 1), y(rows(column))); });
    pen.stroke();
  };
  line('--bound', [], column => Math.min(column[0], data.rows));
  line('--text', [], column => column[1]);
  line('--quiet', [6, 4], () => data.live);
}

function all() {
  const style = getComputedStyle(document.documentElement);
  const names = ['--held', '--idle', '--lost', '--bound', '--text', '--quiet'];
  const colours = Object.fromEntries(names.map(name => [name, style.getPropertyValue(name).trim()]));
  document.querySelectorAll('canvas').forEach((canvas, index) => draw(canvas, data.pictures[index], name => colours[name]));
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', all);
addEventListener('resize', all);
all();
