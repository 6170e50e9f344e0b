"""Tensors that do not hold one number per element: every tensor argument refuses them by name."""

import re
import warnings

import pytest
import torch

import safeops
from tests.callers.calls import TENSORS, call, tensors
from tests.contract.common import case

KINDS = {
    "MaskedTensor": lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "a nested": lambda x: torch.nested.nested_tensor([x.reshape(-1), x.reshape(-1)], layout=torch.jagged),
    "layout torch.sparse_coo": lambda x: x.to_sparse(),
    "layout torch.sparse_csr": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "torch.float8_e4m3fn": lambda x: x.to(torch.float8_e4m3fn),
    "torch.float8_e5m2": lambda x: x.to(torch.float8_e5m2),
}


def strange(kind, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of prototypes
        return KINDS[kind](x)


def exists(kind, name, key):
    x = tensors(name)[key]
    if kind.startswith("torch.float8"):
        return x.dtype != torch.bool
    return x.dim() > 1 or not kind.endswith("csr")


@pytest.mark.parametrize("name, key", TENSORS)
def test_refused_by_name(name, key):
    for kind in filter(lambda kind: exists(kind, name, key), KINDS):
        with case(kind), pytest.raises(TypeError, match=rf"^{name}: {key} must be .*{re.escape(kind)}"):
            call(name, **{key: strange(kind, tensors(name)[key])})


@pytest.mark.parametrize("kind", ["layout torch.sparse_coo", "torch.float8_e5m2"])
@pytest.mark.parametrize("function", [safeops.grad_norm, lambda p: safeops.clip_grad_norm_(p, 1.0)])
def test_gradients_are_refused_by_name(function, kind):
    parameter = strange(kind, torch.ones(3)).requires_grad_()
    parameter.grad = strange(kind, torch.ones(3))
    with pytest.raises(TypeError, match=r"clip_grad_norm_|grad_norm: the gradient of parameters\[0\] must be"):
        function([parameter])
