"""Which tests touch a source: what scripts/mutants.py runs for a mutant in it, stage by stage."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A family of sources, by their stems; what matches none is what everything is made of.
FAMILIES = {
    "statistics": r"moments|kept|powers|extreme|statistic|squares|fold|safe_norm"
    r"|masked_(var|std|amax|amin|norm|rms|logsumexp|count|sum_of)",
    "rows": r"^_?rows?|normalize|cosine|softmax|norms|turn|^exp$",
    "pointwise_losses": r"loss|pointwise",
    "selection": r"selec|compact|scatter|gather|pack|index|sorted",
    "unary_binary": r"safe_(?!div)|xlogy|unary|binary|math|apply_where|real|quotient",
    "reductions": r"reduc|lanes|lines|masked_(sum|mean)|terms|tickets|scaling|launch",
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
    "safeops/amp": ["tests/amp", "tests/contract/test_multi_tensor.py"],
    "safeops/nn": ["tests/contract/test_modules.py"],
    "safeops/(cli|__)": ["tests/test_cli.py"],
    "safeops/_(rout|libr|verif)": ["tests/test_routes.py", "tests/test_cli.py", "tests/contract/test_elementwise.py"],
    "safeops/_check": [f"tests/contract/test_{name}.py" for name in ("errors", "corners", "cases", "rows")],
}
SOME = " or ".join("masked_fill safe_div masked_mean mse_loss masked_softmax safe_log masked_compact".split())

ELSEWHERE = "composite opcheck gradgradcheck torch_func vmap compile export".split()  # where no kernel of the CPU runs


def contract(family, path):
    """The tests of the contract: quick ones first; not those that only compile again."""
    folder, op = "tests/contract/", Path(path).stem.removeprefix("_")
    if family == "lists":
        return [["tests/amp", folder + "test_multi_tensor.py", "tests/debug/test_trace.py"]]
    suffix = "" if family in ("reductions", "pointwise_losses", "elementwise") else "_" + family
    quick = [f"{folder}test_{part}{suffix}.py" for part in ("accuracy", "stand_ins", "cases")]
    one = any((ROOT / "safeops" / kind / f"{op}.py").exists() for kind in ("ops", "losses"))
    choice = f"({op if one else SOME if family == 'elementwise' else 'test'}) and not inductor"
    if path.startswith("csrc"):
        choice += "".join(f" and not {other}" for other in ELSEWHERE)
    drivers = [family, *("reductions rows unary_binary selection".split() if family == "elementwise" else ())]
    last = ["test_instruction_sets.py"] if path.startswith("csrc") else []
    return [
        [file for file in quick if (ROOT / file).exists()],
        ["-k", choice, *(f"{folder}test_{driver}.py" for driver in drivers)],
        [folder + file for file in (f"test_properties{suffix}.py", "test_corners.py", *last)],
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
    family = next(name for name, stems in FAMILIES.items() if re.search(stems, Path(path).stem))
    common = emulated("engine" if family == "elementwise" else family) if path.startswith("csrc/common/") else []
    return contract(family, path) + common


def emulated(family):
    return [[f"tests/kernels/test_cuda_emulated{part}.py"] for part in EMULATED.get(family, EMULATED["engine"])]
