"""On the site that `make docs` has built each function has a page, no link is dead, and pages fit on a phone."""

import html
import inspect
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import tomllib

import safeops
from safeops.core.op import registry
from safeops.ops.elementwise._binary import Binary
from safeops.ops.elementwise._unary import Unary
from safeops.ops.losses._pointwise import PointwiseLoss
from tests.debug.pages import FLAGS, look, needs_browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
STYLE = ROOT / "docs" / "style.css"
NAMES = [name for name in safeops.__all__ if not inspect.ismodule(getattr(safeops, name))]
# Functions without a formula, since they only move or select elements, or switch something.
NO_FORMULA = {
    *("fp32_region", "masked_compact", "masked_scatter", "masked_select", "safe_gather", "safe_index_select"),
    *("safe_mode", "to_device", "warmup"),
}
# Elementwise functions must have a picture; others may have one.
CURVES = {op.name for op in registry.values() if isinstance(op, (Unary, Binary, PointwiseLoss))}

# {query of the search: a page that must be among the first three answers}
QUESTIONS = {
    **{"focal_loss": "functions/sigmoid_focal_loss", "CrossEntropyLoss": "functions/cross_entropy"},
    **{"BCEWithLogitsLoss": "functions/binary_cross_entropy_with_logits", "BCELoss": "functions/binary_cross_entropy"},
    **{"masked mean": "functions/masked_mean", "masked_mean": "functions/masked_mean", "MSELoss": "functions/mse_loss"},
    **{"GaussianNLLLoss": "functions/gaussian_nll_loss", "SmoothL1Loss": "functions/smooth_l1_loss"},
    **{"F.cross_entropy": "functions/cross_entropy", "safeops.nn.KLDivLoss": "functions/kl_div"},
    **{"softmax": "functions/masked_softmax", "safe_div": "functions/safe_div", "install": "install"},
    **{"clip_grad_norm_": "functions/clip_grad_norm_", "global_count": "functions/distributed.global_count"},
    **{"safe mode": "safe-mode", "trace": "finding-it", "NaN gradient": "symptoms", "SO101": "lint"},
    **{"division by zero": "what-really-happens", "Hugging Face Trainer": "recipes", "Lightning": "recipes"},
    **{"vocabulary parallel": "distributed", "DTensor": "distributed", "speed": "speed", "self-test GPU": "gpu"},
}


def test_every_function_has_its_formula():
    formulas = tomllib.loads((ROOT / "scripts" / "docs_formulas.toml").read_text())
    assert set(NAMES) - NO_FORMULA == set(formulas)


def test_the_lettering_of_the_demo_can_be_read_on_a_phone():
    """The picture's letters have 10 points, 13.9 pixels. Scaled to the width in the style sheet they must have at least
    9 pixels; the page scrolls the picture."""
    (rem,) = re.findall(r'p > img\[src\$="\.png"\] \{ max-width: none; width: (\d+)rem; \}', STYLE.read_text())
    width = int.from_bytes((ROOT / "docs" / "demo.png").read_bytes()[16:20], "big")
    assert 13.9 * 20 * int(rem) / width > 9
    assert 'p:has(> img[src$=".png"]) { overflow-x: auto; }' in STYLE.read_text()


class Page(HTMLParser):
    """Collects the ids of a page, the targets of its links, and the files that it loads."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.html = file.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes.get("id"), attributes.get("name")}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        elif tag in ("img", "script", "link", "iframe"):
            self.loads += filter(None, (attributes.get("src"), attributes.get("href")))

    @property
    def text(self):
        return html.unescape(re.sub(r"<[^>]*>", "", self.html))


@pytest.fixture(scope="module")
def pages():
    assert (SITE / "index.html").exists(), "`make docs` builds the site"
    files = [file for file in SITE.rglob("*.html") if file.name != "404.html"]  # not 404.html: its links need a server
    return {file: Page(file) for file in files}


@pytest.mark.slow
def test_every_function_has_its_page(pages):
    pictured = set()
    for name in NAMES:
        page = pages[SITE / "functions" / f"{name}.html"]
        assert f"safeops.{name}" in page.ids and "&gt;&gt;&gt;" in page.html, name
        assert "Parameters:" in page.text and "Raises:" in page.text, name
        assert ("<math" in page.html) == (name not in NO_FORMULA), name
        drawings = page.html.count('role="img"')
        assert drawings in (0, 2), name
        pictured |= {name} if drawings else set()
        module = getattr(registry.get(name), "module", None)
        assert not module or f"safeops.nn.{module}(" in page.text, f"{name}: {module}"
    assert CURVES <= pictured and not NO_FORMULA & pictured


@pytest.mark.slow
def test_a_page_holds_every_line_of_the_docstring(pages):
    """No part of a docstring may be taken for markup: `<x, y>` is no tag, and `*` and `_` must stay."""

    def letters(text):
        return re.sub(r"[\s`]", "", text)

    for name in NAMES:
        text = letters(pages[SITE / "functions" / f"{name}.html"].text)
        for line in inspect.getdoc(getattr(safeops, name)).splitlines():
            if line not in ("Args:", "Example:"):  # the page calls them Parameters and Examples
                line = re.sub(r"^    \w+: ", "", line)
                assert letters(line) in text, f"{name}: {line}"


@pytest.mark.slow
def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(pages):
    for file, page in pages.items():
        for link in (*page.links, *page.loads):
            url = urlsplit(link)
            if url.scheme:
                assert url.scheme in ("http", "https") and link in page.links, f"{file.name} loads {link}"
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{file.name}: {link}"
            if url.fragment and target.suffix == ".html":
                assert unquote(url.fragment) in pages[target].ids, f"{file.name}: {link}"
        assert not re.search(r"@import|url\((?!data:)[\"']?http", page.html), file.name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_search_answers():
    command = ["node", Path(__file__).with_name("search.js"), SITE, *QUESTIONS]
    answers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    firsts = {query: [re.sub(r"\.html.*", "", page) for page in pages[:3]] for query, pages in answers.items()}
    assert {query: pages for query, pages in firsts.items() if QUESTIONS[query] not in pages} == {}
    assert len(QUESTIONS) >= 20 and not any("benchmarks/" in page for pages in answers.values() for page in pages)


@pytest.mark.slow
@needs_browser
def test_it_fits_a_phone_and_the_search_finds(tmp_path, monkeypatch):
    """Opened as files with a width of 390 pixels, pages must not print to the console or reach beyond the edge, and the
    search must find a function."""
    names = ("index", "overview", "symptoms", "functions", "functions/cross_entropy", "functions/normalize", "speed",
             "what-really-happens", "gpu-model", "distributed")  # fmt: skip
    script = f"""
    const open = async url => {{
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.width = 390; frame.height = 844; frame.src = url;
      await new Promise(resolve => frame.onload = resolve);
      await new Promise(resolve => setTimeout(resolve, 300));
      return frame.contentDocument;
    }};
    for (const name of {list(names)}) {{
      const root = (await open(`{SITE.as_uri()}/${{name}}.html`)).documentElement;
      say(`${{name}} ${{root.scrollWidth}} ${{root.querySelector("h1").textContent.length > 0}}`);
    }}
    const page = await open("{SITE.as_uri()}/index.html");
    const query = page.querySelector("[data-md-component=search-query]"), link = ".md-search-result__link";
    query.focus(); query.value = "huber_loss"; query.dispatchEvent(new Event("keyup"));
    for (let i = 0; i < 100 && !page.querySelector(link); i++) await new Promise(resolve => setTimeout(resolve, 50));
    say(page.querySelector(link).href);
    """
    (wrapper := tmp_path / "wrapper.html").write_text('<html><body data-ready="yes"></body></html>')
    monkeypatch.setattr("tests.debug.pages.FLAGS", f"{FLAGS} --allow-file-access-from-files")
    dom, said = look(wrapper, tmp_path, script)
    *widths, found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1].splitlines()
    assert said == []
    assert widths == [f"{name} 390 true" for name in names]
    assert "functions/huber_loss.html" in found
