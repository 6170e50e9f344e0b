"use strict";
const $ = id => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const { rows, columns, span } = data;
const PHASES = ["forward", "backward"];
const LIMITS = [[65504, "65504"], [2 ** -14, "6.1e-5"], [2 ** -24, "6e-8"]]; // of fp16: largest, smallest normal, smallest
const QUANTITIES = {
  largest: "largest magnitude", subnormal: "underflow in fp16", lost: "0 in fp16", nonfinite: "not finite",
};
const STOPS = [ // of log2 of the largest magnitude
  [-24, "cold"], [-14, "cool"], [-3, "plain"], [3, "plain"], [11, "warm"], [Math.log2(65504), "hot"],
];
const LABELS = 230, HEAD = 34, GAP = 34, ROW = 18, RIGHT = 20; // px
const planes = {};
let quantity = "largest", shown = rows.map((_, i) => i), at = { row: 0, phase: 0, column: 0 };

// ---- numbers

const digits = x => x === 0 ? "0" : x >= 1e-3 && x < 1e5 ? String(Number(x.toPrecision(3))) : x.toExponential(2);
const share = x => x === 0 ? "0" : `${Number((100 * x).toPrecision(2))} %`;
const value = (name, phase, row, column) => planes[name][(phase * rows.length + row) * columns + column];
const first = column => column * span + 1, last = column => Math.min(data.steps, (column + 1) * span);
const stepName = column => first(column) === last(column) ? `step ${first(column)}` : `steps ${first(column)} to ${last(column)}`;

async function unpack(text) { // what _page.pack made
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
  layout.width = Math.max(480, $("scroll").clientWidth);
  layout.panel = (layout.width - LABELS - GAP - RIGHT) / 2;
  layout.row = $("fit").checked ? Math.max(1, Math.min(ROW, (0.7 * innerHeight - HEAD) / Math.max(1, shown.length))) : ROW;
  layout.height = Math.min(HEAD + layout.row * shown.length + 2, Math.floor(0.7 * innerHeight));
}

const left = phase => LABELS + phase * (layout.panel + GAP);

/** A cell is one pixel wide (where there are more columns than pixels, the worst of those that share one), and as many
    high as it has parts: where there is room, the lowest third alone says that it held values that are not finite. */
function paint() {
  const width = Math.max(1, Math.min(columns, Math.floor(layout.panel)));
  layout.parts = layout.row >= 6 && quantity === "largest" ? 3 : 1;
  images = PHASES.map((_, phase) => {
    const canvas = new OffscreenCanvas(width, Math.max(1, shown.length * layout.parts)), drawing = canvas.getContext("2d");
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
    ticks(drawing, x, HEAD - 9);
    drawing.fillStyle = css("bad");
    for (const step of data.marks) drawing.fillText("▾", x + ((step - .5) / span / columns) * panel - 4, HEAD - 4);
  });
  if (row >= 10) for (let i = begin; i < end; i++) {
    drawing.fillStyle = css(shown[i] === at.row ? "accent" : "ink");
    drawing.fillText(shorten(drawing, rows[shown[i]], LABELS - 12), 6, y(i) + row / 2);
  }
  drawing.clearRect(0, 0, LABELS - 2, HEAD - 1);
  drawing.fillStyle = css("quiet");
  drawing.textAlign = "right";
  drawing.fillText("step", LABELS - 8, HEAD - 9);
  drawing.textAlign = "left";
  const place = shown.indexOf(at.row), cell = panel / columns;
  if (place >= 0 && y(place) >= HEAD - 1) {
    drawing.strokeStyle = css("accent");
    drawing.lineWidth = 2;
    drawing.strokeRect(left(at.phase) + at.column * cell - 1, y(place) - 1, Math.max(4, cell) + 1, Math.max(3, row) + 2);
  }
}

function ticks(drawing, x, y) {
  const nice = [1, 2, 5].flatMap(n => [0, 1, 2, 3, 4, 5, 6, 7].map(e => n * 10 ** e)).sort((a, b) => a - b);
  const step = nice.find(n => n >= data.steps / 6) || data.steps;
  drawing.fillStyle = css("quiet");
  drawing.textAlign = "center";
  for (let n = step; n <= data.steps; n += step) drawing.fillText(n, x + ((n - .5) / span / columns) * layout.panel, y);
  drawing.textAlign = "left";
}

function shorten(drawing, text, most) { // the end of a path says most
  if (drawing.measureText(text).width <= most) return text;
  let from = 1;
  while (from < text.length && drawing.measureText(`…${text.slice(from)}`).width > most) from++;
  return `…${text.slice(from)}`;
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
    drawing.fillText("not finite", bar + 44, 12);
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
    for (const [log, text] of words) drawing.fillText(text, x(log), 42);
  } else for (let e = -6; e <= 0; e++) drawing.fillText(share(10 ** e), x(e), 30);
  $("scale").setAttribute("aria-label", magnitudes
    ? "Colours of the largest magnitude: blue below 6.1e-5, grey around 1, orange up to 65504, brown beyond, and not finite"
    : "Colours of a share of the values, from none to all");
}

// ---- the chosen module over the steps

function drawChart() {
  const width = layout.width, height = 220, drawing = context($("chart"), width, height);
  const series = PHASES.map((_, phase) => Array.from({ length: columns }, (_, c) => value("largest", phase, at.row, c)));
  const logs = series.flat().filter(x => x > 0).map(Math.log2), [from, to] = [LABELS, width - RIGHT];
  const low = Math.min(-26, ...logs) - 1, high = Math.max(18, ...logs) + 1;
  const x = c => from + (to - from) * (c + .5) / columns, y = log => 8 + (height - 30) * (high - log) / (high - low);
  drawing.fillStyle = css("ink");
  drawing.fillText(shorten(drawing, rows[at.row] || "", LABELS - 60), 6, 16);
  for (const [limit, text] of LIMITS) {
    drawing.strokeStyle = drawing.fillStyle = css(limit > 1 ? "hot" : "cold");
    line(drawing, [[from, y(Math.log2(limit))], [to, y(Math.log2(limit))]], [6, 4]);
    drawing.textAlign = "right";
    drawing.fillText(text, from - 6, y(Math.log2(limit)));
    drawing.textAlign = "left";
  }
  series.forEach((values, phase) => {
    drawing.strokeStyle = drawing.fillStyle = css(phase ? "quiet" : "ink");
    const dash = phase ? [3, 3] : [];
    let points = [];
    values.forEach((v, c) => {
      if (v > 0) points.push([x(c), y(Math.log2(v))]);
      if ((v <= 0 || c === columns - 1) && points.length) {
        line(drawing, points, dash);
        if (points.length === 1) drawing.fillRect(points[0][0] - 2, points[0][1] - 2, 4, 4);
        points = [];
      }
      if (value("nonfinite", phase, at.row, c) > 0) drawing.fillText("×", x(c) - 4, phase ? 18 : 8);
    });
    line(drawing, [[6, 50 + 18 * phase], [30, 50 + 18 * phase]], dash);
    drawing.fillText(PHASES[phase], 36, 50 + 18 * phase);
  });
  drawing.fillText("×  not finite", 12, 86);
  drawing.strokeStyle = css("accent");
  line(drawing, [[x(at.column), 8], [x(at.column), height - 22]], [2, 2]);
  drawing.fillStyle = css("quiet");
  drawing.textAlign = "center";
  drawing.fillText(stepName(at.column), Math.min(Math.max(x(at.column), from + 30), to - 40), height - 10);
  $("chart").setAttribute("aria-label", `Largest magnitude of ${rows[at.row]} over the steps, with fp16's limits`);
}

function line(drawing, points, dash) {
  drawing.setLineDash(dash);
  drawing.lineWidth = 1.5;
  drawing.beginPath();
  points.forEach(([x, y], i) => i ? drawing.lineTo(x, y) : drawing.moveTo(x, y));
  drawing.stroke();
  drawing.setLineDash([]);
}

// ---- what a cell says

function say() {
  const { row, phase, column } = at, largest = value("largest", phase, row, column);
  let text = `${rows[row]}, ${PHASES[phase]}, ${stepName(column)}: `;
  if (largest < 0) text += "wrote nothing";
  else {
    const [subnormal, lost, nonfinite] = ["subnormal", "lost", "nonfinite"].map(name => value(name, phase, row, column));
    const room = largest > 65504 ? "beyond fp16's 65504" : largest ? `fp16 ends ${digits(65504 / largest)} times higher` : "";
    text += `largest magnitude ${digits(largest)}${room && ` (${room})`}; underflow in fp16 ${share(subnormal)}`
      + `, of it 0 in fp16 ${share(lost)}; not finite ${share(nonfinite)}`;
  }
  $("readout").textContent = text;
}

function choose(row, phase, column, scroll) {
  at = { row, phase, column };
  const y = shown.indexOf(row) * layout.row, box = $("scroll"), visible = layout.height - HEAD;
  if (scroll && y < box.scrollTop) box.scrollTop = y;
  if (scroll && y + layout.row > box.scrollTop + visible) box.scrollTop = y + layout.row - visible;
  say();
  drawMap();
  drawChart();
}

function point(event) {
  const box = $("map").getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const phase = x < left(1) - GAP / 2 ? 0 : 1, column = Math.floor((x - left(phase)) / layout.panel * columns);
  const place = Math.floor((y - HEAD + $("scroll").scrollTop) / layout.row);
  if (y < HEAD || place >= shown.length) return;
  choose(shown[place], phase, Math.max(0, Math.min(columns - 1, column)));
}

function key(event) {
  const place = shown.indexOf(at.row), page = Math.max(1, Math.floor((layout.height - HEAD) / layout.row));
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-page, 0], PageDown: [page, 0], ArrowLeft: [0, -1],
    ArrowRight: [0, 1], Home: [0, -columns], End: [0, columns] };
  let phase = at.phase;
  if (event.key === " ") phase = 1 - phase;
  else if (!moves[event.key]) return;
  event.preventDefault();
  const [down, right] = moves[event.key] || [0, 0], within = (x, n) => Math.max(0, Math.min(n - 1, x));
  choose(shown[within(place + down, shown.length)], phase, within(at.column + right, columns), true);
}

// ---- text around it

function element(parent, tag, text = "", attributes = {}) {
  const made = parent.appendChild(document.createElement(tag));
  made.textContent = text;
  for (const [name, x] of Object.entries(attributes)) made.setAttribute(name, x);
  return made;
}

function summary() {
  const count = verdict => data.modules.filter(module => module.verdict === verdict).length;
  const seen = ["overflows", "makes NaN", "underflows", "could run in half", "never ran"]
    .filter(count).map(verdict => `${verdict}: ${count(verdict)}`).join("; ");
  const shared = span > 1 ? ` A column stands for ${span} steps: the largest of them, and the shares of all their values.` : "";
  $("summary").textContent = rows.length
    ? `${data.steps} step${data.steps === 1 ? "" : "s"}; ${data.modules.length} modules and functions. ${seen}.${shared}`
    : "No step was recorded.";
  const many = data.findings.length > 4 ? element($("rest-of-findings"), "details") : null;
  if (many) element(many, "summary", `${data.marks.length - 3} more`);
  data.findings.forEach((finding, i) => {
    const details = element(many && i > 2 ? many : $("findings"), "details");
    element(details, "summary", finding.text.split("\n")[0]);
    element(details, "pre", finding.text);
  });
}

function table() {
  const body = element($("table"), "table"), head = element(element(body, "thead"), "tr"), lines = element(body, "tbody");
  const numbers = { largest: digits, subnormal: share, lost: share, nonfinite: share };
  for (const text of ["verdict", "module", "why"]) element(head, "th", text);
  for (const name of Object.keys(numbers)) element(head, "th", QUANTITIES[name], { class: "number" });
  element(head, "th", "dtypes");
  for (const module of data.modules) {
    const tr = element(lines, "tr"), row = rows.indexOf(module.name);
    element(tr, "td", module.verdict, { class: `verdict ${module.verdict}` });
    const cell = element(tr, "td");
    element(tr, "td", module.why, { class: "why" });
    for (const [name, format] of Object.entries(numbers)) {
      const pair = module[name].map((x, phase) => wrote(row, phase) ? format(x) : "–");
      element(tr, "td", pair.join(" | "), { class: "number" });
    }
    element(tr, "td", module.dtypes.join(", "));
    if (row < 0) cell.textContent = module.name;
    else element(cell, "button", module.name).addEventListener("click", () => {
      if (!shown.includes(row)) {
        $("filter").value = "";
        update();
      }
      const { phase, column } = worst(row);
      choose(row, phase, column, true);
      $("map").focus();
    });
  }
}

function wrote(row, phase) {
  for (let c = 0; row >= 0 && c < columns; c++) if (value("largest", phase, row, c) >= 0) return true;
  return false;
}

/** The first finding, or else the worst cell of the worst module. */
function begin() {
  const [finding] = data.findings, row = finding ? rows.indexOf(finding.module) : -1;
  if (row >= 0) return { row, phase: PHASES.indexOf(finding.phase), column: Math.floor((finding.step - 1) / span) };
  return worst(Math.max(0, rows.indexOf(data.modules[0].name)));
}

/** Where a row is not finite for the first time, or largest. */
function worst(row) {
  let found = { row, phase: 0, column: 0 }, most = -1;
  for (let column = 0; column < columns; column++) for (let phase = 0; phase < 2; phase++) {
    const x = value("nonfinite", phase, row, column) > 0 ? Infinity : value("largest", phase, row, column);
    if (x > most) [found, most] = [{ row, phase, column }, x];
  }
  return found;
}

function update() {
  const part = $("filter").value.toLowerCase();
  shown = rows.map((_, i) => i).filter(i => rows[i].toLowerCase().includes(part));
  if (shown.length && !shown.includes(at.row)) at.row = shown[0];
  readColours();
  measure();
  paint();
  drawMap();
  drawScale();
  drawChart();
  say();
}

async function start() {
  summary();
  if (!rows.length) return;
  for (const [name, text] of Object.entries(data.planes)) planes[name] = await unpack(text);
  table();
  for (const [name, text] of Object.entries(QUANTITIES)) {
    const label = element($("quantities"), "label");
    const input = element(label, "input", "", { type: "radio", name: "quantity", value: name });
    label.append(` ${text}`);
    input.checked = name === quantity;
    input.addEventListener("change", () => { quantity = name; update(); });
  }
  $("map").setAttribute("aria-label", "Heat map of modules and steps. Arrow keys choose a cell, space forward or backward.");
  $("map").addEventListener("pointermove", point);
  $("map").addEventListener("keydown", key);
  $("scroll").addEventListener("scroll", drawMap);
  $("filter").addEventListener("input", update);
  $("fit").addEventListener("change", update);
  addEventListener("resize", update);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  at = begin();
  update();
  choose(at.row, at.phase, at.column, true);
}

if (typeof DecompressionStream === "undefined") $("summary").textContent = "This page needs a browser of 2023 or newer.";
else start().then(() => { document.body.dataset.ready = "yes"; }); // for tests
