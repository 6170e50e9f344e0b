"""Which tests touch a source: what scripts/mutants.py runs for a mutant in it, stage by stage."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

INTERPRETED = {  # a folder of kernels/: its files of tests/kernels/interpreted
    "losses": ["pointwise_losses", "reductions"],
    "reductions": ["reductions", "statistics", "statistics_range"],
    "rows": ["rows"],
    "engine": ["math", "pointwise_losses", "reductions", "statistics", "statistics_range", "rows", "execution"],
}
EMULATED = {  # a folder of csrc/cuda/: its files tests/kernels/test_cuda_emulated*.py
    "elementwise": ["", "_functions"],
    "selection": ["_indexed", "_selection"],
    "lists": ["_multi_tensor"],
    "engine": ["", "_functions", "_selection", "_indexed", "_multi_tensor"],
}
TOOLS = {
    "safeops/debug": ["tests/debug/test_trace.py", "tests/debug", "tests/docs/test_finding_it.py"],
    "safeops/lint": [*(f"tests/lint/test_{name}.py" for name in ("rules", "fix", "examples", "sources")), "tests/lint"],
    "safeops/amp": ["tests/amp", "tests/contract/test_lists.py"],
    "safeops/nn": ["tests/contract/test_losses.py"],
    "safeops/(cli|__)": ["tests/test_cli.py"],
    "safeops/_(op|rout|libr|verif)": ["tests/test_routes.py", "tests/test_cli.py", "tests/contract/test_contract.py"],
    "safeops/_check": [f"tests/contract/test_{name}.py" for name in ("bad_calls", "elementwise", "losses")],
}
# One op of each family and kind: what is tried where the source belongs to no family.
SOME = "masked_fill safe_div safe_log masked_compact masked_mean masked_var masked_norm masked_softmax mse_loss".split()
ELSEWHERE = "composite opcheck gradgradcheck torch_func vmap compile export".split()  # where no kernel of the CPU runs

# A family, which is the name of its folder: its files of tests/contract, and the end of the name of its property tests.
OWN = {
    "elementwise": (["stand_ins_unary", "stand_ins_binary", "stand_ins_division", "elementwise", "functions"],
                    "_elementwise"),
    "selection": (["selection", "selection_layouts"], "_selection"),
    "reductions": (["reductions", "moments", "norms"], ""),
    "rows": (["rows"], ""),
    "losses": (["losses"], ""),
    None: (["stand_ins_division", "stand_ins_unary", "elementwise", "losses", "reductions"], "_elementwise"),
}  # fmt: skip


def ops(family):
    """The ops of a family, each a file of its name."""
    return {file.stem for file in (ROOT / "safeops/ops" / family).glob("[a-z]*.py")}


def contract(family, path):
    """The tests of the contract: quick ones first; not those that only compile again."""
    folder, op = "tests/contract/", Path(path).stem
    if family == "lists":
        return [["tests/amp", folder + "test_lists.py", "tests/debug/test_trace.py"]]
    quick, properties = OWN[family]
    tried = ops(family) if family else SOME
    choice = f"({op if op in tried else ' or '.join(sorted(tried))}) and not inductor"
    if path.startswith("csrc"):
        choice += "".join(f" and not {other}" for other in ELSEWHERE)
    last = ["test_instruction_sets.py"] if path.startswith("csrc") else []
    return [
        [f"{folder}test_{name}.py" for name in quick],
        ["-k", choice, f"{folder}test_contract.py"],
        [folder + file for file in (f"test_properties{properties}.py", "test_tracing.py", *last)],
    ]


def stages(path):
    """What to run for a mutant in this file, likely killers first: pytest's arguments."""
    for pattern, tests in TOOLS.items():
        if re.match(pattern, path):
            return [tests]
    folder = Path(path).parent.name
    if path.startswith("kernels/"):
        return [
            [f"tests/kernels/interpreted/test_{part}.py" for part in INTERPRETED.get(folder, INTERPRETED["engine"])]
        ]
    if path.startswith("csrc/cuda/"):
        return emulated(folder)
    tests = contract(folder if folder in (*OWN, "lists") else None, path)
    return tests + emulated(folder) if path.startswith("csrc/common/") else tests


def emulated(family):
    return [[f"tests/kernels/test_cuda_emulated{part}.py"] for part in EMULATED.get(family, EMULATED["engine"])]
