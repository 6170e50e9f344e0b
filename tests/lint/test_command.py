"""The command `safeops lint`: its exit codes, formats, configuration, noqa, bad input, and how it writes files."""

import json
import os
import pathlib
import re
import stat
import subprocess
import sys

import pytest

import safeops
from safeops import cli
from safeops_lint.rules import RULES

ROOT = pathlib.Path(__file__).parents[2]
BAD = "import torch\n\n\ndef loss(x):\n    return torch.log(x).mean()\n"
FIXED = "import torch\nimport safeops\n\n\ndef loss(x):\n    return safeops.safe_log(x).mean()\n"
CLEAN = "import torch\n\n\ndef loss(x):\n    return x.mean()\n"


@pytest.fixture
def lint(tmp_path, capsys, monkeypatch):
    """Returns a function: it writes files, runs the command in their folder, returns (exit code, stdout, stderr)."""
    from safeops_lint import config

    monkeypatch.chdir(tmp_path)
    config._of_folder.cache_clear()

    def run(*argv, **files):
        for name, text in files.items():
            name = name.replace("__", ".")
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            code = cli.main(["lint", *argv])
        except SystemExit as leaving:
            code = leaving.code
        return (code, *capsys.readouterr())

    return run


def codes(out):
    return [f["code"] for f in json.loads(out)["findings"]]


# ---- exit codes and formats


def test_findings_exit_1(lint):
    code, out, err = lint("a.py", a__py=BAD)
    assert code == 1
    assert out == "a.py:5:12: SO204 [*] nothing keeps the argument of log inside its domain; use safeops.safe_log\n"
    assert err == "safeops lint: 1 finding in 1 file; 1 [*] can be rewritten by --fix\n"


def test_what_is_possible_is_marked(lint):
    text = BAD.replace("torch.log(x)", "(x**2)")
    assert lint("a.py", a__py=text)[0] == 0
    code, out, err = lint("a.py", "--select", "SO201")
    assert code == 1 and out.startswith("a.py:5:12: SO201 [?] squares")
    assert err == "safeops lint: 1 finding in 1 file; 1 [?] are possible, and not told without --select\n"
    assert [f["likely"] for f in json.loads(lint("a.py", "--select", "SO2", "--format", "json")[1])["findings"]] == [
        False
    ]
    assert lint("a.py", "--select", "SO201", "--format", "github")[1].startswith("::notice ")
    sarif = json.loads(lint("a.py", "--select", "SO201", "--format", "sarif")[1])
    assert [r["level"] for r in sarif["runs"][0]["results"]] == ["note"]


def test_clean_exits_0(lint):
    assert lint("a.py", a__py=CLEAN) == (0, "", "safeops lint: 1 file, no findings\n")


@pytest.mark.parametrize("text", ["import numpy as np\ndef loss(x):\n    return np.log(x)[x > 0]\n", "x = 1\n", ""])
def test_without_torch_there_are_no_findings(lint, text):
    assert lint("a.py", a__py=text)[0] == 0


@pytest.mark.parametrize(
    "argv",
    [(), ("a.py", "--format", "xml"), ("a.py", "--select", ","), ("a.py", "--fix", "--diff"), ("a.py", "--jobs", "x")],
)
def test_bad_arguments_exit_2(lint, argv):
    code, _, err = lint(*argv, a__py=BAD)
    assert code == 2 and "usage: safeops lint" in err


@pytest.mark.parametrize("argv, said", [
    (("--select", "SO9"), "--select: no rule has the code 'SO9'"),
    (("--ignore", "E501"), "--ignore: no rule has the code 'E501'"),
    (("--jobs", "-1"), "--jobs must be at least 0, got -1"),
])  # fmt: skip
def test_wrong_values_exit_2_and_are_named(lint, argv, said):
    code, out, err = lint("a.py", *argv, a__py=BAD)
    assert (code, out) == (2, "") and said in err


def test_select_and_ignore(lint):
    text = BAD + "\n\ndef square_loss(a):\n    return (a**2).mean()\n"
    every = lint("a.py", "--select", "ALL", "--format", "json", a__py=text)[1]
    assert codes(every) == ["SO204", "SO201"], "squares are possible alone"
    assert codes(lint("a.py", "--format", "json")[1]) == ["SO204"]
    assert codes(lint("a.py", "--select", "SO201,so1", "--format", "json")[1]) == ["SO201"]
    assert codes(lint("a.py", "--select", "SO2", "--ignore", "SO204", "--format", "json")[1]) == ["SO201"]


def test_json(lint):
    code, out, err = lint("a.py", "gone.py", "--format", "json", a__py=BAD)
    report = json.loads(out)
    assert code == 2 and err == ""
    (finding,) = report["findings"]
    assert finding["path"] == "a.py" and finding["name"] == "unguarded-domain" and finding["fixable"] is True
    assert [finding[k] for k in ("line", "column", "end_line", "end_column")] == [5, 12, 5, 24]
    assert report["problems"] == [{"path": "gone.py", "line": None, "column": None, "message": "does not exist"}]
    assert (report["version"], report["files"], report["fixed"]) == (safeops.__version__, 1, 0)


def test_github_escapes_what_its_commands_cannot_hold(lint):
    name = "50%,a:b.py"
    pathlib.Path(name).write_text(BAD.replace("x)", "(x\n)[x > 0])") + "def (:\n")
    pathlib.Path("ok,1.py").write_text(BAD)
    code, out, _ = lint(name, "ok,1.py", "--format", "github")
    error, warning = sorted(out.splitlines())
    assert error.startswith("::error file=50%25%2Ca%3Ab.py,line=") and "does not parse" in error
    assert warning == (
        "::warning file=ok%2C1.py,line=5,endLine=5,col=12,endColumn=24,title=SO204 unguarded-domain"
        "::nothing keeps the argument of log inside its domain; use safeops.safe_log"
    )


def test_sarif_has_what_2_1_0_requires(lint):
    code, out, _ = lint("a b.py", "gone.py", "--format", "sarif", **{"a b__py": BAD})
    report = json.loads(out)
    assert code == 2 and report["version"] == "2.1.0" and report["$schema"].endswith("sarif-2.1.0.json")
    (run,) = report["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] and [r["id"] for r in driver["rules"]] == list(RULES)
    for rule in driver["rules"]:
        assert all(rule[key]["text"] for key in ("shortDescription", "fullDescription", "help"))
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    (result,) = run["results"]
    assert result["ruleId"] == driver["rules"][result["ruleIndex"]]["id"] and result["message"]["text"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20b.py", "a URI reference"
    assert place["region"] == {"startLine": 5, "startColumn": 12, "endLine": 5, "endColumn": 24}
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["toolExecutionNotifications"][0]["message"]["text"] == "does not exist"


def test_columns_count_characters(lint):
    _, out, _ = lint("a.py", a__py="import torch\ndef loss(x):\n    é = '€𝄞'; return torch.log(x)\n")
    assert out.startswith("a.py:3:22: SO204")


# ---- noqa and configuration


@pytest.mark.parametrize("comment, silent", [
    ("# noqa", True), ("# NOQA", True), ("#noqa: SO204", True), ("# noqa: SO101, SO204", True),
    ("# noqa:E501,SO204", True),
    ("# noqa: SO2", True), ("# why # noqa: SO204 because", True), ("# noqa: SO205", False), ("# noqa: E501", False),
    ("# no qa", False),
])  # fmt: skip
def test_noqa(lint, comment, silent):
    text = BAD.replace(".mean()", f".mean()  {comment}")
    assert lint("a.py", a__py=text)[0] == (0 if silent else 1)
    assert (lint("a.py", "--diff")[1] == "") == silent, "what is silenced is not rewritten either"


def test_noqa_at_the_end_of_a_long_expression(lint):
    text = BAD.replace("torch.log(x)", "torch.log(\n        x\n    )").replace(".mean()", ".mean()  # noqa: SO204")
    assert lint("a.py", a__py=text)[0] == 0


TABLE = "[tool.safeops.lint]\n"


def test_configuration(lint, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text(BAD)
    (tmp_path / "gen").mkdir()
    (tmp_path / "gen" / "c.py").write_text(BAD)
    table = TABLE + 'ignore = ["SO1"]\nexclude = ["gen"]\nper-file-ignores = {"sub/*" = ["SO204"]}\n'
    code, out, _ = lint(".", "--format", "json", a__py=BAD, pyproject__toml=table)
    assert [os.path.normpath(f["path"]) for f in json.loads(out)["findings"]] == ["a.py"]
    assert json.loads(out)["files"] == 2, "gen is excluded"


def test_select_of_the_command_line_replaces_that_of_the_file(lint):
    assert lint("a.py", a__py=BAD, pyproject__toml=TABLE + 'select = ["SO101"]\n')[0] == 0
    assert lint("a.py", "--select", "SO204")[0] == 1


def test_the_nearest_table_counts(lint, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text(BAD)
    (tmp_path / "sub" / "pyproject.toml").write_text(TABLE + 'ignore = ["SO204"]\n')
    assert lint("sub", pyproject__toml=TABLE + 'select = ["SO204"]\n')[0] == 0


@pytest.mark.parametrize("table, said", [
    ('selct = ["SO1"]', "selct: no such option (there are select, ignore, exclude, per-file-ignores)"),
    ('select = "SO1"', "select: 'SO1' is no list of strings"),
    ("select = [1]", "select: 1 is no string"),
    ('ignore = ["X1"]', "ignore: no rule has the code 'X1'"),
    ('per-file-ignores = {a = ["SO7"]}', "per-file-ignores: no rule has the code 'SO7'"),
    ("select = [", "pyproject.toml: "),
])  # fmt: skip
def test_bad_configuration_is_named(lint, table, said):
    code, out, err = lint("a.py", a__py=BAD, pyproject__toml=f"{TABLE}{table}\n")
    assert (code, out) == (2, "") and said in err and "Traceback" not in err


def test_python_3_10_without_tomli(lint, monkeypatch):
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    code, _, err = lint("a.py", a__py=BAD, pyproject__toml=TABLE)
    assert code == 2 and "pip install tomli" in err


# ---- bad input: an error names it, and the other files are still linted


@pytest.mark.parametrize("name, content, said", [
    ("bad.py", b"import torch\ndef (:\n", "bad.py:2:5: error: does not parse: "),
    ("old.py", b"print 'x'\n", "old.py:1:1: error: does not parse: "),
    ("nul.py", b"import torch\0\n", "nul.py: error: does not parse: "),
    ("latin.py", "import torch  # é\n".encode("latin-1"), "latin.py: error: cannot be decoded"),
    ("cookie.py", b"# -*- coding: klingon -*-\n", "cookie.py: error: cannot be decoded: unknown encoding"),
    ("deep.py", b"import torch\nx = " + b"(" * 300 + b"1" + b")" * 300 + b"\n", "deep.py:2:"),
    ("annotated.py", b"import torch\n(x): int\n", "error: is Python that libcst cannot read"),
    ("notes.txt", b"import torch\n", "notes.txt: error: is neither Python nor a notebook"),
    ("broken.ipynb", b"{", "broken.ipynb: error: is no notebook of format 4"),
    ("list.ipynb", b"[]", "list.ipynb: error: is no notebook of format 4"),
])  # fmt: skip
def test_bad_files_exit_2(lint, tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    code, out, err = lint(name, "a.py", a__py=BAD)
    assert code == 2 and said in out and "a.py:5:12: SO204" in out and "1 could not be linted" in err


def test_paths_that_cannot_be_read(lint):
    code, out, _ = lint("nowhere", "a.py", a__py=CLEAN)
    assert code == 2 and out == "nowhere: error: does not exist\n"


def test_an_internal_error_does_not_stop_the_others(lint, monkeypatch):
    from safeops_lint.rules.domains import UnguardedDomain

    def fail(self, op, walk):
        raise KeyError("planted")

    monkeypatch.setattr(UnguardedDomain, "operation", fail)
    code, out, _ = lint("a.py", "b.py", a__py=BAD, b__py="import torch\ndef loss(x):\n    return x[x > 0].sum()\n")
    assert code == 2 and "internal error, please report: KeyError: 'planted'" in out and "b.py:3:12: SO101" in out


def test_very_long_sums_are_no_crash(lint):
    code, out, _ = lint("a.py", a__py=BAD + "x = " + " + ".join("a" * 1) + " + a" * 1500 + "\n")
    assert code in (1, 2) and ("SO204" in out or "nested too deeply" in out)


def test_encodings_are_those_the_file_declares(lint, tmp_path):
    latin = "# -*- coding: latin-1 -*-\n# é\n" + BAD
    (tmp_path / "latin.py").write_bytes(latin.encode("latin-1"))
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbf" + BAD.encode())
    assert lint("latin.py", "bom.py", "--fix")[0] == 0
    assert (tmp_path / "latin.py").read_bytes() == ("# -*- coding: latin-1 -*-\n# é\n" + FIXED).encode("latin-1")
    assert (tmp_path / "bom.py").read_bytes() == b"\xef\xbb\xbf" + FIXED.encode()


NOTEBOOK = {
    "nbformat": 4,
    "metadata": {"kernelspec": {"language": "python"}},
    "cells": [
        {"cell_type": "markdown", "source": ["# log(x)"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch"]},
        {"cell_type": "code", "source": "%%bash\nls ("},
        {"cell_type": "code", "source": "def loss(x):\n    !ls\n    return torch.log(x)\n"},
    ],
}


def test_notebook_cells_are_one_program(lint):
    code, out, _ = lint("n.ipynb", n__ipynb=json.dumps(NOTEBOOK))
    assert code == 1
    assert (
        out == "n.ipynb:cell 4:3:12: SO204 nothing keeps the argument of log inside its domain; use safeops.safe_log\n"
    )
    before = pathlib.Path("n.ipynb").read_bytes()
    assert lint("n.ipynb", "--fix")[0] == 1 and pathlib.Path("n.ipynb").read_bytes() == before, "never rewritten"
    assert "file=n.ipynb,title=" in lint("n.ipynb", "--format", "github")[1]
    assert json.loads(lint("n.ipynb", "--format", "json")[1])["findings"][0]["cell"] == 4


def test_a_cell_that_does_not_parse_is_named(lint):
    broken = {**NOTEBOOK, "cells": [*NOTEBOOK["cells"], {"cell_type": "code", "source": "def ("}]}
    code, out, _ = lint("n.ipynb", n__ipynb=json.dumps(broken))
    assert code == 2 and "cell 5 does not parse" in out and "cell 4:3:12: SO204" in out


def test_notebooks_of_other_languages_are_left_alone(lint):
    assert lint("n.ipynb", n__ipynb=json.dumps({**NOTEBOOK, "metadata": {"kernelspec": {"language": "R"}}}))[0] == 0


# ---- writing files


def test_fix_writes_and_leaves_nothing_else_behind(lint, tmp_path):
    (tmp_path / "run").write_text("#!/usr/bin/env python\n" + BAD)
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "link.py").symlink_to("a.py")
    clean = tmp_path / "clean.py"
    clean.write_text(CLEAN)
    os.utime(clean, (1, 1))
    code, out, err = lint("link.py", "run", "clean.py", "--fix", a__py=BAD)
    assert (code, out) == (
        0,
        "",
    ) and err == "safeops lint: 2 rewritten in 2 files, 0 left as they are; 3 files, no findings\n"
    assert (tmp_path / "a.py").read_text() == FIXED and (tmp_path / "link.py").is_symlink()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755
    assert clean.stat().st_mtime == 1, "what does not change is not written"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.py", "clean.py", "link.py", "run"]


def test_fix_reports_what_is_left(lint):
    text = BAD.replace("torch.log(x)", "(torch.log(x) + x[x > 0].sum())")
    code, out, _ = lint("a.py", "--fix", a__py=text)
    assert code == 1 and "SO101" in out and "SO204" not in out


def test_diff_writes_nothing(lint):
    code, out, _ = lint("a.py", "--diff", a__py=BAD)
    assert code == 1 and pathlib.Path("a.py").read_text() == BAD
    assert lint("./a.py", "--diff")[1] == out
    assert out.startswith("--- a/a.py\n+++ b/a.py\n") and "\n+    return safeops.safe_log(x).mean()\n" in out
    patched = subprocess.run(["patch", "-p1"], input=out, text=True, capture_output=True)
    assert patched.returncode == 0 and pathlib.Path("a.py").read_text() == FIXED


@pytest.mark.parametrize("text", [BAD, BAD.replace("    ", "\t"), BAD.rstrip("\n"), BAD.replace("(x)", "( x,  )")])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_and_tabs_are_kept(lint, text, newline):
    data = text.replace("\n", newline).encode()
    assert lint("a.py", "--fix", a__py=data)[0] == 0
    new = pathlib.Path("a.py").read_bytes()
    expected = text.replace("torch.log(x)", "safeops.safe_log(x)").replace("torch.log( x,  )", "safeops.safe_log(x)")
    assert new == expected.replace("import torch\n", "import torch\nimport safeops\n").replace("\n", newline).encode()


def test_processes_find_what_one_finds(lint, tmp_path):
    for i in range(40):
        (tmp_path / f"f{i}.py").write_text(BAD)
    one = lint(".", "--jobs", "1", "--format", "json")
    two = lint(".", "--jobs", "2", "--format", "json")
    assert one == two and len(codes(one[1])) == 40


def test_folders_are_searched_but_not_those_of_tools(lint, tmp_path):
    for folder in (".venv", "build", "src/.git", "env/Lib/site-packages", "src/pkg"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(BAD)
    out = lint(".", "--format", "json")[1]
    assert [f["path"] for f in json.loads(out)["findings"]] == [os.path.join(".", "src", "pkg", "a.py")]
    assert lint(".venv")[0] == 1, "who names one wants it linted"


# ---- what the command imports


def test_without_libcst_it_says_what_to_install():
    code = "import sys; sys.modules['libcst'] = None; from safeops import cli; sys.exit(cli.main(['lint', 'x.py']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr == "safeops lint needs libcst: pip install libcst\n"


LOADED = "import sys, safeops_lint.{0}; sys.exit(any(name in sys.modules for name in {1}))"


@pytest.mark.parametrize("module, others", [
    ("command", ["torch", "safeops", "libcst"]),  # importing these would slow down the command's start
    ("run, safeops_lint.output, safeops_lint.flake8", ["torch", "safeops"]),
])  # fmt: skip
def test_it_loads_neither_torch_nor_safeops(module, others):
    code = LOADED.format(module, others)
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_safeops_lint_loads_no_torch(tmp_path):
    """The installed entry point must lint without importing torch or safeops, which would take seconds."""
    (tmp_path / "a.py").write_text(BAD)
    module, function = re.search(
        r'^safeops = "(.+):(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    ).groups()
    code = f"import sys, {module} as entry; sys.argv = ['safeops', 'lint', 'a.py']; code = entry.{function}()\n"
    code += "sys.exit('torch loaded' if 'torch' in sys.modules or 'safeops' in sys.modules else code)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "SO204" in done.stdout and "torch loaded" not in done.stderr


def test_it_is_a_command_of_its_own(tmp_path):
    (tmp_path / "a.py").write_text(BAD)
    program = [sys.executable, "-m", "safeops_lint", "a.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "SO204" in done.stdout


def test_import_safeops_does_not_load_libcst():
    code = "import sys, safeops, safeops.cli; sys.exit('libcst' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_repository_is_clean_under_its_own_linter(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["lint", "safeops", "safeops_lint", "benchmarks", "scripts"]) == 0, capsys.readouterr().out
