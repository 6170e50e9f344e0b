"""`import safeops`: which modules it loads, and that the others load when they are asked for."""

import pickle
import subprocess
import sys

import pytest

import safeops

LATER = "debug", "nn", "safe", "integrations", "testing", "verify", "demo", "cli", "kernels"


def fresh(code):
    """Runs the code in a new Python process, and returns the words that it prints."""
    run = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_it_loads_the_ops_alone():
    """The import must not load modules that only some calls need: they took a third of the import's time."""
    loaded = fresh("import torch; before = {*sys.modules}; import safeops; print(*sorted({*sys.modules} - before))")
    others = [name for name in loaded if name.split(".")[0] not in (*sys.stdlib_module_names, "safeops")]
    assert [name for name in others if "_sysconfigdata" not in name] == []
    assert [name for name in loaded if name.startswith("safeops.") and name.split(".")[1] in LATER] == []
    assert {"safeops.core.op", "safeops.ops.classification.cross_entropy", "safeops.amp.warmup"} <= {*loaded}


def test_the_ops_are_registered():
    lacking = fresh("import torch, safeops; print(*(n for n in safeops.__all__ if not hasattr(torch.ops.safeops, n)))")
    assert set(lacking) == {
        *("apply_where", "clip_grad_norm_", "combine_losses", "ctc_loss", "debug", "distributed", "fp32_region"),
        *("grad_norm", "head_loss", "nn", "safe_mode", "to_device", "triplet_margin_with_distance_loss", "warmup"),
    }


@pytest.mark.parametrize(
    "code",
    [
        "import safeops; safeops.nn.MSELoss, safeops.debug.trace, safeops.safe_mode",
        "import safeops.nn, safeops.debug; safeops.nn.MSELoss, safeops.debug.trace",
        "from safeops import debug, nn, safe_mode; from safeops.nn import MSELoss; from safeops.debug import trace",
        "from safeops import *; nn.MSELoss, debug.trace, safe_mode",
        "import safeops.debug; from safeops import debug; assert debug.trace is safeops.debug.trace",
        "import safeops; assert {*safeops.__all__} <= {*dir(safeops)}; assert not hasattr(safeops, 'nonsense')",
        "import safeops, copy; copy.deepcopy(safeops.nn.MSELoss())",
    ],
)
def test_what_is_left_for_later_is_there(code):
    fresh(code)


def test_a_module_is_loaded_from_a_file_that_names_it():
    text = pickle.dumps(safeops.nn.HuberLoss(delta=2.0))
    assert fresh(f"import pickle; print(pickle.loads({text!r}).delta)") == ["2.0"]


@pytest.mark.slow
def test_a_trace_asks_first():
    """torch.compile must trace a call that reaches a module which is not loaded yet."""
    code = """if True:
        import torch, safeops
        @torch.compile(fullgraph=True, backend="eager")
        def step(x):
            denominator = safeops.distributed.global_count(x > 0)
            loss = safeops.nn.MSELoss(reduction="sum")(x, x * 2) + safeops.mse_loss(x, x, denominator=denominator)
            return loss if safeops.debug.trace and safeops.safe_mode else None
        print(step(torch.ones(4)).item())
    """
    assert fresh(code) == ["4.0"]


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'safeops' has no attribute 'mse'"):
        safeops.mse  # noqa: B018


@pytest.mark.parametrize("value, expected", [("0", "0"), ("", "0"), ("1", "1"), ("2", "SAFEOPS_SAFE must be 0 or 1")])
def test_the_environment_enters_safe_mode(value, expected, monkeypatch):
    monkeypatch.setenv("SAFEOPS_SAFE", value)
    code = "import safeops, torch; print(int(not torch.ones(1, 2).mul(-torch.inf).softmax(-1).isnan().any()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert expected in (run.stdout or run.stderr)
