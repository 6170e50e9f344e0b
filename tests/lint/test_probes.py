"""35 losses run in fp16 on the CPU: each goes wrong, and the default rules name the line that makes it so."""

import inspect
import re

import pytest
import torch

from safeops.lint.check import lint_source
from tests.lint.corpus import probes

SOURCE = inspect.getsource(probes)
LINES = SOURCE.splitlines()
PROBES = [p for p in vars(probes).values() if getattr(p, "__module__", "") == probes.__name__]
UNNAMED = {"giou_loss", "evidential_regularizer"}  # areas of boxes, and lgamma: only their values tell


def t(*values):
    return torch.tensor(values)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


SAME = torch.ones(3, 2)
ARGUMENTS = {
    "BarlowTwins": (torch.cat([torch.ones(8, 1), normal(8, 3)], 1), normal(8, 4)),  # a feature that is constant
    "swapped_assignment_loss": (torch.full((8, 4), 0.9), normal(8, 4)),
    "ArcMarginLoss": (t([1.0, 0.2], [0.3, 0.5]), t(0, 1)),
    "AMSoftmaxLoss": (t([0.9, 0.2], [0.3, 0.8]), t(0, 1)),
    "AsymmetricLoss": (t([-20.0, 3.0], [2.0, 1.0]), t([0.0, 1.0], [1.0, 0.0])),
    "GeneralizedCrossEntropy": (t([-20.0, 3.0], [2.0, 1.0]), t(0, 1)),
    "sinkhorn_loss": (normal(3, 3).abs(), t(0.0, 0.5, 0.5), torch.full((3,), 0.33)),
    "gradient_penalty": (torch.zeros(2, 3),),
    "mmd_loss": (SAME, SAME),
    "cka_distance_loss": (torch.zeros(3, 2), normal(3, 2)),
    "InfoNCE": (normal(4, 8), normal(4, 8)),
    "si_snr_loss": (torch.zeros(2, 8), torch.zeros(2, 8)),
    "SpectralConvergenceLoss": (torch.zeros(2, 4), torch.zeros(2, 4)),
    "LogMagnitudeLoss": (torch.zeros(4), torch.zeros(4), torch.ones(4)),
    "uniformity_loss": (10 * normal(6, 4),),
    "CharbonnierLoss": (torch.ones(4), t(1.0, 2.0, 3.0, 4.0)),
    "geodesic_loss": (torch.eye(3)[None], torch.eye(3)[None]),
    "soft_dtw_step_loss": (torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(4)),
    "heteroscedastic_loss": (t(400.0, 1.0), t(8.0, 0.0), t(0.0, 2.0)),
    "giou_loss": (t([0.0, 0.0, 400.0, 400.0]), t([20.0, 20.0, 420.0, 420.0])),
    "cox_partial_loss": (t(12.0, 3.0, 1.0), t(1.0, 0.0, 1.0)),
    "jensen_shannon_loss": (t([0.0, 1.0]), t([0.5, 0.5])),
    "kurtosis_penalty": (t(20.0, -20.0, 1.0, 0.0),),
    "focal_frequency_loss": (torch.ones(4), torch.ones(4)),
    "adversarial_d_loss": (t(1.0, 2.0), t(9.0, 20.0)),
    "sentence_loss": (normal(2, 3, 4), t([1.0, 1.0, 0.0], [0.0, 0.0, 0.0]), normal(2, 4)),
    "CenterLoss": (torch.full((2, 64), 40.0), torch.full((3, 64), 40.0)),
    "spectral_angle_loss": (torch.full((2, 8), 100.0), torch.full((2, 8), 100.0)),
    "evidential_regularizer": (t([20000.0, 3.0]), t(0)),
    "weighted_mse_loss": (t(300.0, 1.0), t(0.0, 2.0), t(0.01, 1.0)),
    "list_mle_loss": (t([30.0, 1.0, 0.0]), t([2.0, 1.0, 0.0])),
    "poisson_deviance_loss": (t(1.0, 2.0), t(0.0, 2.0)),
    "attention_transfer_loss": (torch.full((2, 8, 3, 3), 300.0), normal(2, 8, 3, 3)),
    "relational_distance_loss": (SAME, normal(3, 2)),
    "normalised_cross_correlation_loss": (torch.ones(8), normal(8)),
}


def run(probe, dtype):
    """The value and the gradients."""
    function = probe() if isinstance(probe, type) else probe
    function = getattr(function, "loss", function)
    arguments = [
        a.to(dtype).requires_grad_() if a.is_floating_point() else a.clone() for a in ARGUMENTS[probe.__name__]
    ]
    value = function(*arguments)
    value.backward()
    return value, [a.grad for a in arguments if a.grad is not None]


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.__name__)
def test_the_probe_goes_wrong_in_half(probe):
    value, gradients = run(probe, torch.float16)
    assert not all(x.isfinite().all() for x in (value, *gradients))


@pytest.fixture(scope="module")
def found():
    return {(f.line, f.code) for f in lint_source(SOURCE)}


@pytest.mark.parametrize("probe", PROBES, ids=lambda p: p.__name__)
def test_the_line_is_named(probe, found):
    text, start = inspect.getsourcelines(probe)
    marked = [
        (n, re.findall(r"SO\d+", line.partition("  # ")[2])) for n, line in enumerate(text, start) if "  # " in line
    ]
    assert any(codes for _, codes in marked) == (probe.__name__ not in UNNAMED)
    assert {(n, code) for n, codes in marked for code in codes} <= found
