"""Lists the tests that scripts/mutants.py runs for a mutant in a source file, stage by stage."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

INTERPRETED = {  # a folder of kernels/ -> names of its tests, tests/kernels/interpreted/test_<name>.py
    "losses": ["pointwise_losses", "reductions"],
    "reductions": ["reductions", "statistics", "statistics_range"],
    "classification": ["rows", "classification"],
    "divergences": ["divergence"],
    "vectors": ["rows", "triplet_margin"],
    "engine": ["math", "pointwise_losses", "reductions", "statistics", "statistics_range", "rows", "execution"],
}
EXECUTED = {  # a folder of csrc/cuda/ -> suffixes of its tests, tests/kernels/test_cuda_executed<suffix>.py
    "elementwise": ["", "_functions"],
    "selection": ["_indexed", "_selection"],
    "lists": ["_multi_tensor"],
    "images": ["_images", "_total_variation", "_ms_ssim", "_volumes"],
    "engine": ["", "_functions", "_selection", "_indexed", "_multi_tensor"],
}
TOOLS = {
    "safeops/debug": ["tests/debug/test_trace.py", "tests/debug", "tests/docs/test_finding_it.py"],
    "safeops_lint": [
        *(f"tests/lint/test_{name}.py" for name in ("found", "silent", "scope", "fix", "examples")),
        "tests/lint",
    ],
    "safeops/amp": ["tests/amp", "tests/contract/lists/test_lists.py"],
    "safeops/integrations": ["tests/integrations"],
    "safeops/nn": ["tests/contract/losses/test_modules.py"],
    "safeops/(cli|__)": ["tests/test_cli.py"],
    "safeops/core/(op|rout|libr)": ["tests/test_routes.py", "tests/test_cli.py", "tests/contract/test_contract.py"],
    "safeops/core/check": [
        "tests/contract/test_bad_calls.py",
        "tests/contract/elementwise",
        "tests/contract/losses/test_losses.py",
    ],
}
# If the source belongs to no family, these ops are tested: one of each family and kind.
SOME = "masked_fill safe_div safe_log masked_compact masked_mean masked_var masked_norm masked_softmax mse_loss".split()
ELSEWHERE = "composite opcheck gradgradcheck torch_func vmap compile export".split()  # tests that run no CPU kernel

# If the source belongs to no family, these tests run: some of each family.
ELSE = ["elementwise/test_elementwise.py", "elementwise/test_stand_ins_division.py",
        "elementwise/test_stand_ins_unary.py", "losses/test_losses.py", "reductions/test_reductions.py"]  # fmt: skip


def ops(family):
    """Returns the names of a family's ops: each op has a file with its name."""
    return {file.stem for file in (ROOT / "safeops/ops" / family).glob("[a-z]*.py")}


def contract(family, path):
    """Returns the stages of contract tests, quick ones first. Tests that only compile with inductor are left out."""
    folder, op = "tests/contract/", Path(path).stem
    if family == "lists":
        return [["tests/amp", folder + "lists", "tests/debug/test_trace.py"]]
    tried = ops(family) if family else SOME
    choice = f"({op if op in tried else ' or '.join(sorted(tried))}) and not inductor"
    if path.startswith("csrc"):
        choice += "".join(f" and not {other}" for other in ELSEWHERE)
    folders = [family] if family else ELSE
    last = ["test_properties.py", "test_tracing.py", *(["test_instruction_sets.py"] * path.startswith("csrc"))]
    return [
        [folder + place for place in folders],
        ["-k", choice, f"{folder}test_contract.py"],
        [folder + file for file in last],
    ]


def stages(path):
    """Returns pytest's arguments for each stage, for a mutant in this file. The tests that most likely fail come
    first."""
    for pattern, tests in TOOLS.items():
        if re.match(pattern, path):
            return [tests]
    folder = Path(path).parent.name
    if path.startswith("kernels/"):
        return [
            [f"tests/kernels/interpreted/test_{part}.py" for part in INTERPRETED.get(folder, INTERPRETED["engine"])]
        ]
    if path.startswith("csrc/cuda/"):
        return executed(folder)
    tests = contract(folder if (ROOT / "tests/contract" / folder).is_dir() else None, path)
    return tests + executed(folder) if path.startswith("csrc/common/") else tests


def executed(family):
    return [[f"tests/kernels/test_cuda_executed{part}.py"] for part in EXECUTED.get(family, EXECUTED["engine"])]
