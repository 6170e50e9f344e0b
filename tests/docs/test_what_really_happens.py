"""The code in docs/what-really-happens.md prints exactly the output that the page shows.

Each ```python block runs in a namespace of its own, with torch, F and safeops. The texts after `#> ` are its whole
output, in order. If the last one is `SomeError: message`, the block ends by raising this error. `...` stands for any
text. A section has a claim, a block that tries the claim, `**Verdict: word.**`, and a block with safeops.
"""

import contextlib
import doctest
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import safeops

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "what-really-happens.md"
VERDICTS = {"crash", "wrong value", "NaN", "slow", "nothing", "depends"}
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
CLAIM = re.compile(r"#> (.*\n)")
# Tokens of an output that the test changes one at a time: each wrong output must be noticed.
TOKEN = re.compile(r"(?<![\w.])(nan|inf|True|False|\w+Error|-?[\d.]+\d|\d+)(?![\w.])")
# {section whose outcome differs in a later torch than the pinned one: (the version, the reason)}
LATER = {"12. In-place clamp before log": ("2.14", "clamp's gradient compares with 1e-8, not with 1e-8 in fp16")}


class Block(NamedTuple):
    section: str
    code: str

    @property
    def claimed(self):
        return "".join(CLAIM.findall(self.code))


def sections(text):
    """Returns {title: body} of the numbered sections."""
    parts = re.split(r"^## (\d+\. .*)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def blocks(text):
    return [Block(title, code) for title, body in sections(text).items() for code in BLOCK.findall(body)]


def outcome(block):
    """Runs a block. Returns the text that it prints, with the error that ends it, if any."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            scope = {"torch": torch, "F": torch.nn.functional, "safeops": safeops}
            exec(compile(block.code, f"{DOCUMENT.name}, {block.section}", "exec"), scope)
    except Exception as error:
        printed.write(f"{type(error).__name__}: {str(error).strip()}\n")
    return printed.getvalue()


def agrees(claimed, happened):
    return doctest.OutputChecker().check_output(claimed, happened, doctest.ELLIPSIS)


TEXT = DOCUMENT.read_text()
BLOCKS = blocks(TEXT)


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[f"{b.section}-{i % 2}" for i, b in enumerate(BLOCKS)])
def test_the_claimed_outcome_is_the_outcome(number):
    block = BLOCKS[number]
    since, why = LATER.get(block.section, ("99", ""))
    if torch.__version__ >= since and "safeops" not in block.code:
        pytest.skip(f"torch {torch.__version__}: from {since} on, {why}")
    happened = outcome(block)
    assert agrees(block.claimed, happened), (
        f"{block.section}: on torch {torch.__version__}\n{block.code}prints\n{happened}"
    )
    tokens = list(TOKEN.finditer(block.claimed))
    assert tokens, f"{block.section}: the block claims nothing that could be wrong"
    for token in tokens:  # a change to any number, exception or truth value must be noticed
        start, end = token.span()
        other = "7.5" if token[0] in ("nan", "inf") else "nan"
        assert not agrees(block.claimed[:start] + other + block.claimed[end:], happened), token


@pytest.mark.parametrize(
    "before, after",
    [
        ("kept[kept > 2] = 0\n", "kept = kept.masked_fill(kept > 2, 0)\n"),  # no longer raises
        ("array[:] = 100", "array = array + 99"),  # no longer aliases
        ("safeops.masked_fill(kept, kept > 2, 0)", "safeops.masked_fill(kept, kept > 1, 0)"),
        ("eps=1e-3)", "eps=1.0)"),
    ],
)
def test_a_planted_edit_of_the_code_is_noticed(before, after):
    assert before in TEXT
    edited = [b for b, original in zip(blocks(TEXT.replace(before, after)), BLOCKS) if b != original]
    assert edited
    assert not any(agrees(block.claimed, outcome(block)) for block in edited)


def test_every_section_has_claim_trial_verdict_and_safeops_way():
    results = sections(TEXT)
    assert len(results) == 14
    rows = re.findall(r"^\| \[\d+ .*?\]\(#(.*?)\) \| .*? \((.*?)\) \| (.*?) \|", TEXT, re.MULTILINE)
    assert len(rows) == 14
    for (anchor, judgement, summary), (title, body) in zip(rows, results.items()):
        assert anchor == re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        assert body.lstrip().startswith("Claim: ")
        (verdict,) = re.findall(rf"^\*\*Verdict: ([\w ]+)\.\*\* The claim is {judgement}\b", body, re.MULTILINE)
        assert verdict in VERDICTS and summary.startswith(verdict), title
        trial, safe = [block for block in BLOCKS if block.section == title]
        assert body.index(trial.code) < body.index("**Verdict: ") < body.index(safe.code)
        assert "safeops." in safe.code and "safeops" not in trial.code
        assert "CUDA" not in body or re.search(r"\brun\s+on\s+(an\s+H100|a\s+GPU)\b", body), title


def test_no_python_block_escapes():
    assert TEXT.count("```") == 2 * len(BLOCKS) == 56


def test_links_are_defined():
    used = set(re.findall(r"\[([\w.-]+#\d+|article)\](?!:)", TEXT)) | {"article"}
    assert used == set(re.findall(r"^\[(.*?)\]: https://", TEXT, re.MULTILINE))


def test_the_torch_it_names_is_the_pinned_one():
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)[1]
    (on_a_gpu,) = re.findall(r"on an NVIDIA H100 80GB HBM3, with torch (\d+\.\d+)", " ".join(TEXT.split()))
    assert set(re.findall(r"torch (\d+\.\d+)", TEXT)) == {pinned, on_a_gpu}


def test_what_it_says_of_autocast_on_cuda():
    """Sections 4 to 7, 12 and 14 name ops that CUDA autocast runs in fp32; the header in torch's wheel lists these."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    fp32 = text[text.index("#define AT_FORALL_FP32(") : text.index("#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")]
    for op in ("sum", "pow, Tensor_Scalar", "reciprocal", "cdist", "pdist", "log"):
        assert f"_({op})" in fp32
    assert "_(div" not in text and "_(clamp" not in text
