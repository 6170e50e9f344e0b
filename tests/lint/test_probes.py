"""163 losses run in fp16 on the CPU: each goes wrong, and the rules name the line that makes it so; by default most."""

import inspect
import re

import pytest
import torch

from safeops.lint.check import lint_source
from tests.lint.corpus import forms, habits, probes
from tests.lint.programs import DEFAULT

FILES = (probes, habits)
PROBES = [p for file in FILES for p in vars(file).values() if getattr(p, "__module__", "") == file.__name__]
FORMS = [getattr(forms, name) for name in forms.ON]
UNNAMED = {"giou_loss", "evidential_regularizer"}  # areas of boxes, and lgamma: only their values tell
UNNAMED |= {
    "tanh_gaussian_log_prob",
    "VAELoss",
    "min_snr_loss",
    "nig_nll",
    "crps_gaussian",
    "midas_align",
    "linear_attention",
}
UNNAMED |= {"vicreg_covariance", "SSIM", "UncertaintyWeighting", "pair_log_survival", "adain_loss"}


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
    "SupConLoss": (torch.nn.functional.normalize(normal(3, 4)), t(0, 0, 1)),
    "SILogLoss": (torch.ones(4), torch.ones(4), t(True, True, True, False)),
    "ScaleInvariantRatioLoss": (t(0.0, 1.0), t(0.0, 2.0)),
    "bbox_ciou": (t([0.0, 0.0, 2.0, 2.0]), t([0.0, 0.0, 2.0, 2.0])),
    "ppo_policy_loss": (t(-1.0, -1.0), t(-14.0, -1.0), t(-1.0, 1.0)),
    "normalised_advantage_loss": (t(-1.0, -2.0), t(1.0, 1.0), t(0.0, 0.0)),
    "policy_entropy_bonus": (t([30.0, 0.0, 1.0]),),
    "tanh_gaussian_log_prob": (t([8.0, 0.0]), t([0.0, 0.0]), t([1.0, 0.0])),
    "dpo_loss": (t(-60.0, -1.0), t(-1.0, -2.0), t(0.0, -1.0), t(0.0, -1.0)),
    "explained_variance": (t(1.0, 2.0, 3.0), t(5.0, 5.0, 5.0)),
    "VAELoss": (normal(2, 3), normal(2, 3), normal(2, 4), 12 * torch.ones(2, 4)),
    "VectorQuantizer": (t([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),),
    "codebook_commitment_loss": (torch.full((2, 64), 40.0), torch.full((3, 64), 40.0)),
    "min_snr_loss": (normal(3, 2), normal(3, 2), t(0.5, 0.1, 0.0), t(0, 1, 2)),
    "discretized_gaussian_nll": (t(1.0, 0.0), t(0.0, 0.0), t(-4.0, 0.0)),
    "r1_penalty": (torch.full((2, 3), 300.0),),
    "path_length_penalty": (torch.zeros(2, 3, 4), t(1.0)),
    "DistillationLoss": (t([60.0, 0.0]), t([1.0, 1.0])),
    "LabelSmoothingByHand": (t([30.0, 0.0, 1.0]), t(0)),
    "nig_nll": (t(400.0, 1.0), t(0.0, 0.0), t(1.0, 1.0), t(2.0, 2.0), t(1.0, 1.0)),
    "crps_gaussian": (t(0.0, 0.0), t(0.0, 1.0), t(1.0, 1.0)),
    "FocalTverskyLoss": (torch.ones(4), torch.ones(4)),
    "LogCoshDiceLoss": (torch.full((70000,), 1.0), torch.full((70000,), 1.0)),
    "midas_align": (torch.ones(8),),
    "scale_and_shift_loss": (300 * torch.ones(1, 4, 4) + normal(1, 4, 4), torch.ones(1, 4, 4), torch.ones(1, 4, 4)),
    "BertSelfAttention": (normal(1, 2, 4), normal(1, 2, 4), normal(1, 2, 4), t([[0.0, 0.0]])),
    "linear_attention": (torch.zeros(1, 2, 3), normal(1, 2, 3).abs(), normal(1, 2, 3)),
    "raft_sequence_loss": (normal(2, 2, 3), normal(2, 2, 3)),
    "limb_angle_loss": (t([0.0, 0.0, 0.0], [1.0, 0.0, 0.0]), t([1.0, 0.0, 0.0], [1.0, 0.0, 0.0])),
    "rotation_6d_loss": (t([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]), torch.zeros(1, 2, 3)),
    "so3_log_loss": (torch.eye(3)[None], torch.ones(1, 3)),
    "log_mel_loss": (t(0.0, 0.0), t(1.0, 1.0)),
    "stft_magnitude_loss": (t(0.0, 1.0), t(0.0, 1.0), t(1.0, 1.0)),
    "nt_xent": (torch.nn.functional.normalize(normal(2, 4)), torch.nn.functional.normalize(normal(2, 4) + 0.1)),
    "hard_triplet_loss": (torch.ones(3, 4),),
    "CircleLoss": (t(0.1, 0.2), t(0.9, 0.95)),
    "KoLeoLoss": (torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),),
    "vicreg_covariance": (300 * normal(4, 3),),
    "mixmatch_sharpen_loss": (normal(1, 8), torch.full((1, 8), 0.125)),
    "advent_entropy_loss": (t([1.0, 0.0, 0.0], [0.5, 0.5, 0.0]),),
    "class_balanced_loss": (normal(2, 2), t(0, 1), t(100.0, 10.0)),
    "inverse_frequency_loss": (normal(2, 3), t(0, 1)),
    "MDNLoss": (
        t([0.5, 0.5]),
        t([0.05, 0.05]),
        t([0.0, 0.0]),
        t(
            2.0,
        ),
    ),
    "SSIM": (torch.zeros(2, 4), torch.zeros(2, 4)),
    "gumbel_softmax_loss": (t([1.0, 0.0]), t([1.0, 0.5]), t([1.0, 0.0])),
    "UncertaintyWeighting": (t(1.0, 1.0), t(1e-4, 1.0)),
    "sparse_autoencoder_kl": (t([-20.0, 0.0], [-20.0, 0.0]),),
    "concordance_loss": (torch.ones(4), torch.ones(4)),
    "log_iou_loss": (torch.zeros(4), torch.ones(4)),
    "nerf_disparity_loss": (t([0.0, 0.0], [0.5, 0.5]), t([1.0, 2.0], [1.0, 2.0]), t(1.0, 1.0)),
    "mse2psnr": (t(1.0, 1.0), t(1.0, 1.0)),
    "RankNetLoss": (t(0.0, 1.0), t(15.0, 0.0)),
    "tweedie_loss": (t(0.0, 1.0), t(1.0, 1.0)),
    "smape": (t(0.0, 1.0), t(0.0, 1.0)),
    "RMSELoss": (t(1.0, 2.0), t(1.0, 2.0)),
    "masked_image_loss": (normal(300, 300), normal(300, 300) + 1, torch.ones(300, 300)),
    "pair_log_survival": (t(1.0, 0.5),),
}


def cast(argument, dtype):
    """Its floating tensors as leaves in a dtype, also those in lists and dicts."""
    if isinstance(argument, dict):
        return {key: cast(value, dtype) for key, value in argument.items()}
    if isinstance(argument, (list, tuple)):
        return [cast(value, dtype) for value in argument]
    return argument.to(dtype).requires_grad_() if argument.is_floating_point() else argument.clone()


def leaves(argument):
    if isinstance(argument, torch.Tensor):
        return [argument]
    return [x for value in (argument.values() if isinstance(argument, dict) else argument) for x in leaves(value)]


def run(probe, dtype):
    """The value and the gradients."""
    function = probe() if isinstance(probe, type) else probe
    function = getattr(function, "loss", getattr(function, "perplexity", function))
    given = ARGUMENTS[probe.__name__] if probe.__name__ in ARGUMENTS else forms.ON[probe.__name__][1]
    arguments = cast(given, dtype)
    value = function(*arguments)
    value.sum().backward()
    return value, [a.grad for a in leaves(arguments) if a.grad is not None]


@pytest.mark.parametrize("probe", PROBES + FORMS, ids=lambda p: p.__name__)
def test_the_probe_goes_wrong_in_half(probe):
    try:
        value, gradients = run(probe, torch.float16)
    except RuntimeError as error:
        assert "without overflow" in str(error) and probe.__name__ == "pointer_loss"
        return
    assert not all(x.isfinite().all() for x in (value, *gradients))


@pytest.fixture(scope="module")
def found():
    files = (*FILES, forms)
    return {
        (file.__name__, f.line, f.code + "?" * (not f.likely))
        for file in files
        for f in lint_source(inspect.getsource(file), rules=DEFAULT)
    }


@pytest.mark.parametrize("probe", PROBES + FORMS, ids=lambda p: p.__name__)
def test_the_line_is_named(probe, found):
    text, start = inspect.getsourcelines(probe)
    marked = [
        (n, re.findall(r"SO\d+\??", line.partition("  # ")[2])) for n, line in enumerate(text, start) if "  # " in line
    ]
    assert any(codes for _, codes in marked) == (probe.__name__ not in UNNAMED)
    assert {(probe.__module__, n, code) for n, codes in marked for code in codes} <= found


def test_how_many_a_default_run_names():
    named = 0
    for file in (*FILES, forms):
        found = {f.line for f in lint_source(inspect.getsource(file))}
        for probe in (p for p in PROBES + FORMS if p.__module__ == file.__name__ and p.__name__ not in UNNAMED):
            text, start = inspect.getsourcelines(probe)
            named += any("  # SO" in line and n in found for n, line in enumerate(text, start))
    assert named == 72  # of 148
