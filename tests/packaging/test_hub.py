"""The `kernels` package loads the Hugging Face kernel that `make hub` writes, from its folder and offline."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, run

LOADER = Path(sys.prefix) / "hub-loader"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LOADER.exists(), reason="no `kernels` package: make test-slow installs it"),
]
spec = importlib.util.spec_from_file_location("hub", ROOT / "scripts" / "hub.py")
hub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub)

VALUES = """
import importlib, sys
from pathlib import Path
import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping
from kernels import use_kernel_forward_from_hub

folder = Path(sys.argv[1])
ours = get_local_kernel(folder, backend=sys.argv[2])
assert "safeops" not in sys.modules and ours.__name__.startswith("_safeops_")
x = torch.tensor([[2.0, 0.0], [0.0, torch.nan]], requires_grad=True)
loss = ours.cross_entropy(x, torch.tensor([0, -100]))
loss.backward()
assert loss.isfinite() and (x.grad[1] == 0).all()
assert torch.equal(getattr(torch.ops, ours.__name__).cross_entropy(x, torch.tensor([0, -100])), loss)
for path in Path(ours.__file__).parent.glob("kernels/**/*.py"):  # Triton's, which the first call on a GPU imports
    inside = path.relative_to(Path(ours.__file__).parent).with_suffix("")
    importlib.import_module(".".join((ours.__name__, *inside.parts)).removesuffix(".__init__"))
import safeops  # beside it
torch.testing.assert_close(safeops.cross_entropy(x, torch.tensor([0, -100])), loss)

rows, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
p = rows.softmax(-1)
calls = {
    "BCEWithLogitsLoss": ((rows, p), {"pos_weight": torch.rand(3)}),
    "CrossEntropyLoss": ((rows, labels), {"weight": torch.rand(3), "ignore_index": 2, "label_smoothing": 0.1}),
    "HuberLoss": ((rows, p), {"delta": 0.1}),
    "KLDivLoss": ((rows.log_softmax(-1), p), {"reduction": "sum"}),
    "L1Loss": ((rows, p), {"reduction": "none"}),
    "MSELoss": ((rows, p), {}),
    "NLLLoss": ((rows.log_softmax(-1), labels), {"ignore_index": 1}),
    "SmoothL1Loss": ((rows, p), {"beta": 0.3}),
}
layers = {name for name, x in vars(ours.layers).items() if isinstance(x, type)}
assert layers == set(calls), layers
for name, (operands, options) in calls.items():
    kind = getattr(torch.nn, name)
    layer = use_kernel_forward_from_hub(name)(type(name, (kind,), {"forward": kind.forward}))(**options)
    with use_kernel_mapping({name: {"cpu": LocalLayerRepository(folder, layer_name=name)}}):
        replaced = kernelize(layer, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")
    assert replaced.forward.__func__.__module__ == f"{ours.__name__}.layers"
    torch.testing.assert_close(replaced(*operands), kind(**options)(*operands))
print("ok")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    hub.build(folder)
    return folder


def test_it_loads_beside_an_install_and_replaces_layers(folder, tmp_path):
    path = os.pathsep.join((str(LOADER), str(ROOT)))
    (tmp_path / "values.py").write_text(VALUES)
    command = [sys.executable, tmp_path / "values.py", folder, "cpu"]
    assert run(command, cwd=tmp_path, PYTHONPATH=path, HF_HUB_OFFLINE="1").stdout.split() == ["ok"]


def test_the_variant_for_gpus_is_the_same_package(folder):
    cpu, cuda = (
        {str(path.relative_to(variant)): path.read_text() for path in variant.rglob("*.*") if path.suffix != ".pyc"}
        for variant in (folder / "build" / "torch-cpu", folder / "build" / "torch-cuda")
    )
    assert '"type": "cuda"' in cuda.pop("metadata.json") and '"type": "cpu"' in cpu.pop("metadata.json")
    assert cpu == cuda and "kernels/classification/cross_entropy.py" in cpu


def test_imports_of_others_are_found():
    assert hub.foreign_imports("import os, numpy\nfrom safeops.core import op\nfrom . import x") == [
        "numpy",
        "safeops.core",
    ]
    assert hub.relative("    from safeops.core import op\n", 2) == "    from ...core import op\n"
