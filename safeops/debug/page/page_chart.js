// The chart of the chosen module over the steps, with fp16's limits. page_draw.js defines the numbers and colors.

function drawChart() {
  const width = layout.width, height = 240, bottom = height - 40, drawing = context($("chart"), width, height);
  const steps = Array.from({ length: columns }, (_, c) => c);
  const series = PHASES.map((_, phase) => steps.map(c => value("largest", phase, at.row, c)));
  const logs = series.flat().filter(x => x > 0).map(Math.log2), [from, to] = [layout.labels, width - 3 * RIGHT];
  const low = Math.min(-26, ...logs) - 1, high = Math.max(18, ...logs) + 1;
  const x = c => from + (to - from) * (c + .5) / columns, y = log => 8 + (bottom - 8) * (high - log) / (high - low);
  drawing.fillStyle = css("ink");
  drawing.fillText(shorten(drawing, rows[at.row] || "", layout.labels - 60), 6, 16);
  drawing.textAlign = "right";
  for (let e = Math.ceil(low / DECADES) * 3; e <= high / DECADES * 3; e += 3) {
    const at = y(e / 3 * DECADES);
    drawing.fillStyle = css("quiet");
    drawing.fillText(Math.abs(e) > 3 ? `1e${e}` : 10 ** e, from - 8, at);
    drawing.fillRect(from - 5, at, 5, 1);
  }
  drawing.textAlign = "left";
  for (const [limit, text] of LIMITS) {
    drawing.strokeStyle = drawing.fillStyle = css(limit > 1 ? "hot" : "cold");
    line(drawing, [[from, y(Math.log2(limit))], [to, y(Math.log2(limit))]], [1, 3]);
    drawing.fillText(text, to + 6, y(Math.log2(limit)));
    line(drawing, [[6, 104], [30, 104]], [1, 3]);
  }
  drawing.strokeStyle = css("line");
  line(drawing, [[from, 8], [from, bottom], [to, bottom]], []);
  ticks(drawing, from, to - from, bottom + 11);
  series.forEach((values, phase) => {
    drawing.strokeStyle = drawing.fillStyle = css(phase ? "quiet" : "ink");
    const dash = phase ? [9, 4] : [];
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
  drawing.fillText("×  NaN or inf", 14, 86);
  drawing.fillText("limits of fp16", 36, 104);
  drawing.strokeStyle = drawing.fillStyle = css("accent");
  line(drawing, [[x(at.column), 8], [x(at.column), bottom]], []);
  drawing.textAlign = "center";
  drawing.fillText(stepName(at.column), Math.min(Math.max(x(at.column), from + 30), to - 40), height - 9);
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
