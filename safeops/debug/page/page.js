// The page's texts, and its handlers of keys and pointers. page_draw.js draws.

// ---- what a cell says

function say() {
  const { row, phase, column } = at, largest = value("largest", phase, row, column);
  let text = `${rows[row]}, ${PHASES[phase]}, ${stepName(column)}: `;
  if (largest < 0) text += "wrote nothing";
  else {
    const shareOf = name => share(value(name, phase, row, column));
    const small = shareOf("subnormal"), lost = shareOf("lost"), bad = shareOf("nonfinite");
    text += `largest magnitude ${digits(largest)}`;
    if (largest > 65504) text += ", beyond fp16's limit of 65504";
    else if (largest) text += `; fp16's limit, 65504, is ${digits(65504 / largest)} times as large`;
    text += small === "0" ? ". No value is too small for fp16" : `. Too small for fp16: ${small} of the values`;
    if (small !== "0") text += lost === "0" ? " lose digits, none becomes 0" : ` lose digits, ${lost} become 0`;
    text += bad === "0" ? ". No NaN, no inf." : `. NaN or inf: ${bad} of the values.`;
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
  const judged = data.modules.filter(module => module.verdict !== "stays in float32"); // an optimizer is no module
  const count = verdict => judged.filter(module => module.verdict === verdict).length;
  const seen = ["overflows", "not finite", "underflows", "runs in half", "could run in half", "never ran"]
    .filter(count).map(verdict => `${verdict}: ${count(verdict)}`).join("; ");
  const shared = span > 1 ? ` A column is of ${span} steps: the largest, and the shares of all their values.` : "";
  const steps = `${data.steps} step${data.steps === 1 ? "" : "s"}`;
  $("summary").textContent = rows.length
    ? `${steps}; ${judged.length} modules and functions. ${seen}.${shared}`
    : "No step was recorded.";
  const listed = data.findings.length, many = listed > 4 ? element($("rest-of-findings"), "details") : null;
  const cut = data.found > listed ? `, the first ${listed - 3}:` : "";
  if (many) element(many, "summary", `${data.found - 3} more${cut}`);
  data.findings.forEach((finding, i) => {
    const details = element(many && i > 2 ? many : $("findings"), "details");
    element(details, "summary", finding.text.split("\n")[0]);
    element(details, "pre", finding.text);
  });
}

function table() {
  const body = element($("table"), "table"), head = element(element(body, "thead"), "tr");
  const lines = element(body, "tbody");
  const numbers = { largest: digits, subnormal: share, lost: share, nonfinite: share };
  for (const text of ["verdict", "module", "why"]) element(head, "th", text);
  for (const name of Object.keys(numbers)) element(head, "th", QUANTITIES[name], { class: "number" });
  for (const module of data.modules) {
    const tr = element(lines, "tr"), row = rows.indexOf(module.name);
    element(tr, "td", module.verdict, { class: `verdict ${module.verdict}` });
    const cell = element(tr, "td");
    element(tr, "td", module.why, { class: "why" });
    for (const [name, format] of Object.entries(numbers)) {
      const pair = module[name].map((x, phase) => wrote(row, phase) ? format(x) : "–");
      element(tr, "td", pair.join(" | "), { class: "number" });
    }
    const name = element(cell, row < 0 ? "span" : "button", module.name);
    element(cell, "div", module.dtypes.join(", "), { class: "quiet" });
    if (row >= 0) name.addEventListener("click", () => {
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
function opening() {
  const [finding] = data.findings, row = finding ? rows.indexOf(finding.module) : -1;
  if (row >= 0) return { row, phase: PHASES.indexOf(finding.phase), column: Math.floor((finding.step - 1) / span) };
  return worst(Math.max(0, rows.indexOf(data.modules[0].name)));
}

/** The first cell of a row that is not finite; if none, the cell of the largest magnitude. */
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
  const keys = "Arrow keys choose a cell, space forward or backward.";
  $("map").setAttribute("aria-label", `Heat map of modules and steps. ${keys}`);
  for (const event of ["pointermove", "pointerdown"]) $("map").addEventListener(event, point);
  $("map").addEventListener("keydown", key);
  $("scroll").addEventListener("scroll", drawMap);
  $("filter").addEventListener("input", update);
  $("fit").addEventListener("change", update);
  addEventListener("resize", update);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  at = opening();
  update();
  choose(at.row, at.phase, at.column, true);
}

if (typeof DecompressionStream === "undefined") $("summary").textContent = "This page needs a browser of 2023 or later";
else start().then(() => { document.body.dataset.ready = "yes"; }); // for tests
