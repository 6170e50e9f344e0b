"""The page of trace(html=...) works in headless Chromium: no errors, values as text, keys, 1000 modules and steps."""

import html
import re

import pytest
import torch

from safeops.debug import trace
from safeops.debug.page import page as _page
from tests.debug.pages import FLAGS, look, needs_browser
from tests.debug.tracing import leaf

pytestmark = [pytest.mark.slow, needs_browser]

HELPERS = """
    const map = document.getElementById("map"), box = () => map.getBoundingClientRect();
    const read = () => say(document.getElementById("readout").textContent);
    const press = (...keys) => keys.forEach(key => map.dispatchEvent(new KeyboardEvent("keydown", { key })));
    const pointAt = (x, y) => map.dispatchEvent(new PointerEvent("pointermove",
      { clientX: box().left + x, clientY: box().top + y }));
    const pixel = (x, y) => {  // its colour, read from a copy: a browser warns if one canvas is read often
      const copy = new OffscreenCanvas(1, 1).getContext("2d"), scale = map.width / map.clientWidth;
      copy.drawImage(map, -x * scale, -y * scale);
      return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3).join();
    };
    const column = (phase, c) => left(phase) + layout.panel * (c + 0.5) / columns;
"""


class Times1000(torch.nn.Module):
    def forward(self, x):
        return x * 1000.0


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of eight steps whose values double; the last overflows in fp16. One module's name is markup, another
    module never runs."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    model = torch.nn.Sequential()
    model.add_module("<img src=x>", Times1000())
    model.add_module("idle", torch.nn.Linear(2, 2))
    with trace(model, action="record", html=file) as tracer:
        for i in range(8):
            model[0](leaf(2.0**i, 1e-8, dtype=torch.float16)).sum().backward()
            tracer.check()
    return file


def probed(dom):
    return html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1]).splitlines()


def test_values_are_text(page, tmp_path):
    dom, said = look(page, tmp_path, HELPERS + 'read(); press("Home"); read(); press("ArrowRight"); read();')
    assert said == []
    last, first, second = probed(dom)
    assert last == (
        "<img src=x> (Times1000), forward, step 8: largest magnitude 0. No value is too small for fp16. "
        "NaN or inf: 50\u00a0% of the values."
    )
    assert "step 1: largest magnitude 1000; fp16's limit, 65504, is 65.5 times as large" in first
    assert "No NaN, no inf." in first
    assert "step 2: largest magnitude 2000; fp16's limit, 65504, is 32.8 times as large" in second
    rows = [re.sub("<.*?>", "|", row) for row in re.findall("<tr>.*?</tr>", dom, re.DOTALL)]
    assert "overflows" in rows[1] and "&lt;img src=x&gt; (Times1000)" in rows[1] and "64000 | 1000" in rows[1]
    assert "forward: an inf of finite operands, first in step 8" in rows[1]
    assert "never ran" in rows[-1] and "idle (Linear)" in rows[-1] and "<img" not in dom
    assert "step 8: the loss is not finite: mul overflowed" in dom


def test_an_overflow_comes_by_colours(page, tmp_path):
    script = "const y = HEAD + ROW * 0.3; for (let c = 0; c < 8; c++) say(pixel(column(0, c), y));"
    script += "say(pixel(column(0, 7), HEAD + ROW * 0.8)); say(pixel(column(1, 7), y));"
    dom, said = look(page, tmp_path, HELPERS + 'press("ArrowDown");' + script)
    *colours, bad, backward = probed(dom)
    colours = [tuple(map(int, colour.split(","))) for colour in colours]
    greens = [green for _, green, _ in colours[:7]]
    assert said == [] and bad == "0,0,0" and colours[7] == (0, 0, 0)
    assert greens == sorted(greens, reverse=True) and greens[0] - greens[6] > 60  # the colors go from gray to orange
    assert backward == ",".join(map(str, colours[0]))  # a gradient of 1000 has the color of a value of 1000


def test_pointer_keys_filter_and_quantities(page, tmp_path):
    script = """
    pointAt(column(1, 2), HEAD + 5); read();
    press(" "); read();
    press("End", "ArrowRight"); read();
    press("ArrowDown", "ArrowLeft"); read();
    const filter = document.getElementById("filter");
    filter.value = "IMG"; filter.dispatchEvent(new Event("input")); say(shown.map(i => rows[i]).join());
    filter.value = "no such"; filter.dispatchEvent(new Event("input")); say(shown.length);
    document.querySelector("#table button").click(); say(filter.value === "" && document.activeElement === map);
    for (const input of document.querySelectorAll("#quantities input")) {
      input.click();
      say(`${quantity} ${pixel(column(0, 7), HEAD + 9)}`);
    }
    document.getElementById("fit").click(); say(layout.row <= ROW);
    """
    dom, said = look(page, tmp_path, HELPERS + script)
    result = probed(dom)
    assert said == []
    assert "(Times1000), backward, step 3:" in result[0] and "(Times1000), forward, step 3:" in result[1]
    assert "(Times1000), forward, step 8:" in result[2] and "(test_trace_browser.py), forward, step 7:" in result[3]
    assert result[4:7] == ["<img src=x> (Times1000)", "0", "true"]
    assert [line.split()[0] for line in result[7:11]] == ["largest", "subnormal", "lost", "nonfinite"]
    assert len({line.split()[1] for line in result[7:11]}) >= 3 and result[11] == "true"


@pytest.mark.parametrize("width", [800, 1180])
def test_the_table_fits(page, tmp_path, width):
    text = page.read_text(encoding="utf-8").replace("<img src=x>", "cross_attention_decoder.layers.10.feed_forward")
    (wide := tmp_path / "wide.html").write_text(text, encoding="utf-8")
    script = 'const table = $("table"); say(table.scrollWidth - table.clientWidth);'
    script += 'say(shorten(context(map, 9, 9), "decoder.layers.10.feed_forward.linear", 120));'
    result = probed(look(wide, tmp_path, HELPERS + script, size=f"{width},900")[0])
    assert result[0] == "0" and re.fullmatch(r"decoder.*….*linear", result[1]), result


def test_it_fits_a_phone(page, tmp_path, monkeypatch):
    """With a width of 390 pixels nothing may reach beyond the edge, and both panels must be drawn."""
    (wrapper := tmp_path / "wrapper.html").write_text('<html><body data-ready="yes"></body></html>')
    monkeypatch.setattr("tests.debug.pages.FLAGS", f"{FLAGS} --allow-file-access-from-files")
    script = f"""
    const frame = document.body.appendChild(document.createElement("iframe"));
    frame.width = 390; frame.height = 844; frame.style.border = 0; frame.src = "{page.as_uri()}";
    await new Promise(resolve => frame.onload = resolve);
    const inside = frame.contentDocument;
    while (!inside.body.dataset.ready) await new Promise(resolve => setTimeout(resolve, 20));
    say(inside.documentElement.scrollWidth);
    for (const name of ["map", "chart", "scale"]) say(inside.getElementById(name).clientWidth <= 390 - 25);
    """
    dom, said = look(wrapper, tmp_path, script)
    assert said == [] and probed(dom) == ["390", "true", "true", "true"]


def test_a_marker_lies_below_the_number_of_its_step(page, tmp_path):
    """In a page of eight columns, marker and number are in the middle of one column, and must not overlap."""
    script = """
    const drawn = {}, prototype = CanvasRenderingContext2D.prototype, fill = prototype.fillText;
    prototype.fillText = function (text, x, y) { drawn[text] = y; fill.call(this, text, x, y); };
    drawMap(); say(drawn["▾"] - drawn["8"]);
    """
    dom, said = look(page, tmp_path, HELPERS + script)
    assert said == [] and float(probed(dom)[0]) >= 12


def test_a_dark_scheme_has_other_colours(page, tmp_path, monkeypatch):
    say = 'say(pixel(column(0, 0), HEAD + 5)); say(css("page"));'
    light = probed(look(page, tmp_path, HELPERS + say)[0])
    monkeypatch.setattr("tests.debug.pages.FLAGS", f"{FLAGS} --blink-settings=preferredColorScheme=0")
    dark = probed(look(page, tmp_path, HELPERS + say)[0])
    assert light[1] == "#ffffff" and dark[1] == "#15181b" and light[0] != dark[0]


def test_a_run_without_a_step(tmp_path):
    with trace(html=tmp_path / "page.html"):
        pass
    dom, said = look(tmp_path / "page.html", tmp_path)
    assert said == [] and "No step was recorded." in dom


@pytest.mark.exhaustive
def test_a_thousand_modules_and_steps(tmp_path):
    file, n = tmp_path / "page.html", 1000
    tracer = trace(html=file)
    history = tracer._history
    for i in range(n):
        history._place(f"layers.{i} (Linear)")
        history.dtypes[i].add(torch.float32)
    for _ in range(n):
        column = torch.rand(n, 2, 6)  # random values, which compress worst
        column[..., 5] = 1e6
        history._append(column)
    history.columns[500][700, 0, 4] = 1e6  # a cell without a finite value
    _page.write(file, tracer)
    assert file.stat().st_size < 32e6
    script = """
    say(rows.length); say(columns);
    choose(999, 1, 999, true); read(); say(document.getElementById("scroll").scrollTop > 10000);
    say(document.querySelectorAll("#table tbody tr").length);
    document.getElementById("fit").click(); document.querySelector("#quantities [value=nonfinite]").click();
    let bad = [], image = images[0].getContext("2d").getImageData(0, 0, images[0].width, 1000).data;
    for (let i = 0; i < image.length; i += 4)
      if (image[i] + image[i + 1] + image[i + 2] === 0) bad.push(Math.floor(i / 4 / images[0].width));
    say(bad.join());
    """
    dom, said = look(file, tmp_path, HELPERS + script)
    result = probed(dom)
    assert said == [] and result[:2] == ["1000", "1000"]
    assert result[2].startswith("layers.999 (Linear), backward, step 1000: largest magnitude ")
    assert result[3:5] == ["true", "1000"]
    assert result[5] == "700"  # the single bad cell is drawn although there are fewer pixels than steps
