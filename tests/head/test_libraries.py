"""head_loss of heads that libraries make: adapters of peft, weights of torchao. With the rivals (`make test-slow`)."""

import pytest
import torch
from torch import nn

import safeops
from tests.head.steps import ROWS, STEPS, C, D, InChunks, Whole, close, gradients

pytestmark = pytest.mark.slow


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(D, C)


ADAPTERS = {
    "lora": {},
    "rslora, two layers": {"use_rslora": True, "r": 3},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "frozen": {"inference_mode": True},
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters_of_peft(adapter, step):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False, **{"r": 4, **ADAPTERS[adapter]})
    head = peft.get_peft_model(Model().double(), config).base_model.model.lm_head
    assert type(head) is not nn.Linear and any(p.requires_grad for p in head.parameters()) == (adapter != "frozen")
    hidden = torch.randn(ROWS, D, dtype=torch.float64)
    results = [gradients(losses, STEPS[step], head, hidden) for losses in (InChunks(), Whole())]
    close(*results, 1e-12)
    with torch.no_grad():
        base = STEPS[step](InChunks(), head.base_layer, hidden)
    assert (base - results[0][0]).abs() > 1e-3  # (the adapter is seen)


@pytest.mark.parametrize("step", STEPS)
def test_a_trained_copy_of_peft(step):
    """modules_to_save: a trained copy of the layer inside a wrapper."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.trunk, model.lm_head = nn.Linear(D, D), nn.Linear(D, C)
    config = peft.LoraConfig(target_modules=["trunk"], modules_to_save=["lm_head"])
    head = peft.get_peft_model(model, config).base_model.model.lm_head
    hidden = torch.randn(ROWS, D)
    results = [gradients(losses, STEPS[step], head, hidden) for losses in (InChunks(), Whole())]
    assert len(results[0]) == 4
    close(*results, 1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_int8_weights_of_torchao(step):
    """The weight is a subclass of Tensor inside a plain nn.Linear: it must not be read as if it were dense."""
    quantization = pytest.importorskip("torchao.quantization")
    head = nn.Sequential(nn.Linear(D, C).requires_grad_(False))
    quantization.quantize_(head, quantization.Int8WeightOnlyConfig())
    assert type(head[0]) is nn.Linear and type(head[0].weight.data) is not torch.Tensor
    for module in (head, head[0]):
        results = [gradients(losses, STEPS[step], module, torch.ones(ROWS, D).cumsum(0) / ROWS)
                   for losses in (InChunks(), Whole())]  # fmt: skip
        close(*results, 1e-5)
        safeops.head_loss(module, torch.randn(ROWS, D), torch.zeros(ROWS, dtype=torch.long), check=True)
