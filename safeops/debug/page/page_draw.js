"use strict"; // The page's data, the heat map and its color scale. page_chart.js draws the chart of one module.
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const { rows, columns, span } = data;
const PHASES = ["forward", "backward"];
const LIMITS = [[65504, "65504"], [2 ** -14, "6.1e-5"], [2 ** -24, "6e-8"]]; // fp16's: largest, smallest normal, least
const DECADES = 3 * Math.log2(10); // between two marks of an axis
const QUANTITIES = {
  largest: "largest magnitude", subnormal: "loses digits in fp16", lost: "becomes 0 in fp16", nonfinite: "NaN or inf",
};
const STOPS = [ // [log2 of the largest magnitude, color]
  [-24, "cold"], [-14, "cool"], [-3, "plain"], [3, "plain"], [11, "warm"], [Math.log2(65504), "hot"],
];
const HEAD = 44, GAP = 34, ROW = 18, RIGHT = 20; // px
const planes = {};
let quantity = "largest", shown = rows.map((_, i) => i), at = { row: 0, phase: 0, column: 0 };

// ---- numbers

const digits = x => x === 0 ? "0" : x >= 1e-3 && x < 1e5 ? String(Number(x.toPrecision(3))) : x.toExponential(2);
const share = x => x === 0 ? "0" : `${Number((100 * x).toPrecision(2))}\u00a0%`;
const value = (name, phase, row, column) => planes[name][(phase * rows.length + row) * columns + column];
const first = column => column * span + 1, last = column => Math.min(data.steps, (column + 1) * span);
const stepName = c => first(c) === last(c) ? `step ${first(c)}` : `steps ${first(c)} to ${last(c)}`;

async function unpack(text) { // the inverse of pack in page.py
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const apart = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = apart.length / 4, bits = new Uint32Array(count);
  for (let i = 0; i < count; i++)
    bits[i] = apart[i] | apart[count + i] << 8 | apart[2 * count + i] << 16 | apart[3 * count + i] << 24;
  return new Float32Array(bits.buffer);
}

// ---- colours

const css = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
let palette;

function readColours() {
  const names = ["cold", "cool", "plain", "warm", "hot", "over", "bad"];
  palette = Object.fromEntries(names.map(name => [name, [1, 3, 5].map(i => parseInt(css(name).slice(i, i + 2), 16))]));
  palette.largest = Array.from({ length: 321 }, (_, i) => between(i / 8 - 24));
}

function between(log) {
  const next = STOPS.findIndex(stop => stop[0] >= log);
  if (next <= 0) return palette[STOPS[next && STOPS.length - 1][1]];
  const [[a, from], [b, to]] = [STOPS[next - 1], STOPS[next]], t = (log - a) / (b - a);
  return palette[from].map((x, i) => Math.round(x + t * (palette[to][i] - x)));
}

function colour(x, nonfinite) {
  if (quantity === "largest") {
    if (nonfinite > 0) return palette.bad;
    if (x === 0) return palette.plain;
    return x > 65504 ? palette.over : palette.largest[Math.max(0, Math.min(320, Math.floor(8 * (Math.log2(x) + 24))))];
  }
  if (x === 0) return palette.plain;
  const t = Math.max(0.15, 1 + Math.log10(x) / 6), to = quantity === "nonfinite" ? palette.bad : palette.cold;
  return palette.plain.map((from, i) => Math.round(from + t * (to[i] - from)));
}

// ---- the heat map: an image of the cells, drawn as large as there is room

function context(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const drawing = canvas.getContext("2d");
  drawing.setTransform(scale, 0, 0, scale, 0, 0);
  drawing.font = "12px system-ui, sans-serif";
  drawing.textBaseline = "middle";
  return drawing;
}

const layout = {};
let images = [];

function measure() {
  layout.width = Math.max(300, $("scroll").clientWidth);
  layout.labels = layout.width < 600 ? 150 : 230; // (narrower on a phone; the chart's legend has this width)
  layout.panel = (layout.width - layout.labels - GAP - RIGHT) / 2;
  const room = Math.floor(0.7 * innerHeight);
  layout.row = $("fit").checked ? Math.max(1, Math.min(ROW, (room - HEAD) / Math.max(1, shown.length))) : ROW;
  layout.height = Math.min(HEAD + layout.row * shown.length + 2, room);
}

const left = phase => layout.labels + phase * (layout.panel + GAP);

/** Paint each cell one pixel wide and layout.parts pixels high. If columns share a pixel, it shows the worst of them.
    With three parts, only the lowest third shows that the cell held NaN or inf. */
function paint() {
  const width = Math.max(1, Math.min(columns, Math.floor(layout.panel)));
  layout.parts = layout.row >= 6 && quantity === "largest" ? 3 : 1;
  images = PHASES.map((_, phase) => {
    const canvas = new OffscreenCanvas(width, Math.max(1, shown.length * layout.parts));
    const drawing = canvas.getContext("2d");
    const image = drawing.createImageData(canvas.width, canvas.height);
    shown.forEach((row, y) => {
      for (let x = 0; x < width; x++) {
        let worst = -1, nonfinite = 0;
        for (let c = Math.floor(x * columns / width); c < Math.floor((x + 1) * columns / width); c++) {
          worst = Math.max(worst, value(quantity, phase, row, c));
          nonfinite = Math.max(nonfinite, value("nonfinite", phase, row, c));
        }
        for (let part = 0; worst >= 0 && part < layout.parts; part++) {
          const seen = part === layout.parts - 1 || worst === 0 ? nonfinite : 0;
          image.data.set([...colour(worst, seen), 255], 4 * ((y * layout.parts + part) * width + x));
        }
      }
    });
    drawing.putImageData(image, 0, 0);
    return canvas;
  });
}

function drawMap() {
  const drawing = context($("map"), layout.width, layout.height), top = $("scroll").scrollTop, { panel, row } = layout;
  $("rest").style.height = `${Math.max(0, HEAD + row * shown.length + 2 - layout.height)}px`;
  drawing.imageSmoothingEnabled = false;
  const begin = Math.floor(top / row), end = Math.min(shown.length, Math.ceil((top + layout.height - HEAD) / row));
  const y = i => HEAD + i * row - top;
  PHASES.forEach((word, phase) => {
    const x = left(phase), source = images[phase];
    if (end > begin)
      drawing.drawImage(source, 0, begin * layout.parts, source.width, (end - begin) * layout.parts,
        x, y(begin), panel, (end - begin) * row);
    drawing.strokeStyle = css("line");
    drawing.strokeRect(x - .5, HEAD - .5, panel + 1, Math.min(layout.height - HEAD, row * shown.length) + 1);
    drawing.clearRect(x - 2, 0, panel + 4, HEAD - 1);
    drawing.fillStyle = css("ink");
    drawing.fillText(word, x, 9);
    ticks(drawing, x, panel, 24);
    drawing.fillStyle = css("bad");
    for (const c of data.marks) drawing.fillText("▾", x + (c + .5) / columns * panel - 4, HEAD - 7);
  });
  if (row >= 10) for (let i = begin; i < end; i++) {
    drawing.fillStyle = css(shown[i] === at.row ? "accent" : "ink");
    drawing.fillText(shorten(drawing, rows[shown[i]], layout.labels - 12), 6, y(i) + row / 2);
  }
  drawing.clearRect(0, 0, layout.labels - 2, HEAD - 1);
  drawing.fillStyle = css("quiet");
  drawing.textAlign = "right";
  drawing.fillText("step", layout.labels - 8, 24);
  drawing.textAlign = "left";
  const place = shown.indexOf(at.row), cell = panel / columns;
  if (place >= 0 && y(place) >= HEAD - 1) {
    drawing.strokeStyle = css("accent");
    drawing.lineWidth = 2;
    const x = left(at.phase) + at.column * cell;
    drawing.strokeRect(x - 1, y(place) - 1, Math.max(4, cell) + 1, Math.max(3, row) + 2);
  }
}

function ticks(drawing, x, width, y) {
  const nice = [1, 2, 5].flatMap(n => [0, 1, 2, 3, 4, 5, 6, 7].map(e => n * 10 ** e)).sort((a, b) => a - b);
  const step = nice.find(n => n >= data.steps / Math.min(6, width / 32)) || data.steps;
  drawing.fillStyle = css("quiet");
  drawing.textAlign = "center";
  for (let n = step; n <= data.steps; n += step) drawing.fillText(n, x + ((n - .5) / span / columns) * width, y);
  drawing.textAlign = "left";
}

function shorten(drawing, text, most) { // cut the middle: both the beginning and the end of a path identify a module
  let kept = text.length, short = text;
  while (kept > 2 && drawing.measureText(short).width > most) {
    kept--;
    short = `${text.slice(0, kept >> 1)}…${text.slice(text.length - kept + (kept >> 1))}`;
  }
  return short;
}

// ---- the scale of colours, with fp16's limits

function drawScale() {
  const width = Math.min(860, layout.width), drawing = context($("scale"), width, 50), bar = width - 120;
  const magnitudes = quantity === "largest", [low, high] = magnitudes ? [-28, 20] : [-6, 0];
  const x = log => 10 + bar * (log - low) / (high - low);
  for (let i = 0; i < bar; i++) {
    const log = low + (high - low) * i / bar;
    drawing.fillStyle = `rgb(${colour((magnitudes ? 2 : 10) ** log, 0)})`;
    drawing.fillRect(10 + i, 4, 1.5, 14);
  }
  drawing.fillStyle = css("ink");
  if (magnitudes) {
    drawing.fillText("NaN or inf", bar + 44, 12);
    drawing.fillStyle = css("bad");
    drawing.fillRect(bar + 24, 4, 14, 14);
    drawing.fillStyle = css("ink");
    drawing.textAlign = "center";
    for (const [limit, text] of [...LIMITS, [1, "1"]]) {
      drawing.fillRect(x(Math.log2(limit)) - .75, limit === 1 ? 16 : 0, 1.5, limit === 1 ? 4 : 22);
      drawing.fillText(text, x(Math.log2(limit)), 30);
    }
    const words = [[-26, "0 in fp16"], [-19, "subnormal"], [18, "inf in fp16"]];
    drawing.fillStyle = css("quiet");
    for (const [log, text] of words.slice(width < 600 ? 1 : 0)) drawing.fillText(text, x(log), 42);
  } else for (let e = -6; e <= 0; e++) drawing.fillText(share(10 ** e), x(e), 30);
  $("scale").setAttribute("aria-label", magnitudes
    ? "Colours of the largest magnitude: blue below 6.1e-5, grey around 1, orange up to 65504, brown beyond"
    : "Colours of a share of the values, from none to all");
}
