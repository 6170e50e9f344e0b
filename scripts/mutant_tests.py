"""Which tests touch a source: what scripts/mutants.py runs for a mutant in it, stage by stage."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A family of sources, by their stems; what matches none is what everything is made of.
FAMILIES = {
    "statistics": r"moments|welford|powers|extreme|statistic|squares|fold|safe_norm"
    r"|masked_(var|std|amax|amin|norm|rms|logsumexp|count|sum_of)",
    "rows": r"^_?rows?(?!_(sums|copy))|normalize|cosine|softmax|norms|transpose|^exp$",
    "pointwise_losses": r"loss|pointwise",
    "selection": r"selec|patterns|row_copy|compact|scatter|gather|pack|index|sorted",
    "unary_binary": r"safe_(?!div)|xlogy|unary|binary|math|^pow$|apply_where|real|quotient",
    "reductions": r"reduc|(row|column)_sums|vectors|weighted_sum|masked_(sum|mean)|tickets|scaling|launch",
    "lists": r"multi_tensor|grad|health|clip|tensor_table",
    "elementwise": r"",
}
INTERPRETED = {  # a folder of kernels/: its files of tests/kernels/interpreted
    "losses": ["pointwise_losses", "reductions"],
    "reductions": ["reductions", "statistics"],
    "rows": ["rows"],
    "engine": ["pointwise_losses", "reductions", "statistics", "rows", "execution"],
}
EMULATED = {  # a folder of csrc/cuda/, or a family of csrc/common: its files tests/kernels/test_cuda_emulated*.py
    "elementwise": [""],
    "selection": ["_indexed", "_selection"],
    "lists": ["_multi_tensor"],
    "engine": ["", "_selection", "_indexed", "_multi_tensor"],
}
TOOLS = {
    "safeops/debug": ["tests/debug/test_trace.py", "tests/debug", "tests/docs/test_finding_it.py"],
    "safeops/lint": [*(f"tests/lint/test_{name}.py" for name in ("rules", "fix", "examples", "sources")), "tests/lint"],
    "safeops/amp": ["tests/amp", "tests/contract/test_lists.py"],
    "safeops/nn": ["tests/contract/test_modules.py"],
    "safeops/(cli|__)": ["tests/test_cli.py"],
    "safeops/_(op|rout|libr|verif)": ["tests/test_routes.py", "tests/test_cli.py", "tests/contract/test_contract.py"],
    "safeops/_check": [f"tests/contract/test_{name}.py" for name in ("bad_calls", "elementwise", "losses")],
}
SOME = " or ".join("masked_fill safe_div masked_mean mse_loss masked_softmax safe_log masked_compact".split())

ELSEWHERE = "composite opcheck gradgradcheck torch_func vmap compile export".split()  # where no kernel of the CPU runs


# A family: its files of tests/contract, and the end of the name of its property tests.
OWN = {
    "statistics": (["moments", "norms"], ""),
    "rows": (["rows"], ""),
    "pointwise_losses": (["losses"], ""),
    "selection": (["selection", "selection_layouts"], "_selection"),
    "unary_binary": (["stand_ins_unary", "stand_ins_binary", "functions"], "_elementwise"),
    "reductions": (["reductions"], ""),
    "elementwise": (["stand_ins_division", "elementwise", "losses", "reductions"], "_elementwise"),
}


def family_of(stem):
    return next(name for name, stems in FAMILIES.items() if re.search(stems, stem))


def ops():
    """The ops, each a file of its name."""
    return {file.stem for file in (ROOT / "safeops/ops").rglob("[a-z]*.py")}


def contract(family, path):
    """The tests of the contract: quick ones first; not those that only compile again."""
    folder, op = "tests/contract/", Path(path).stem.removeprefix("_")
    if family == "lists":
        return [["tests/amp", folder + "test_lists.py", "tests/debug/test_trace.py"]]
    quick, properties = OWN[family]
    relatives = " or ".join(sorted(name for name in ops() if family_of(name) == family))
    choice = f"({op if op in ops() else SOME if family == 'elementwise' else relatives}) and not inductor"
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
    family = family_of(Path(path).stem)
    common = emulated("engine" if family == "elementwise" else family) if path.startswith("csrc/common/") else []
    return contract(family, path) + common


def emulated(family):
    return [[f"tests/kernels/test_cuda_emulated{part}.py"] for part in EMULATED.get(family, EMULATED["engine"])]
