"""On torch's own samples of its modules and functions, the mode changes exactly the results that are listed here.

The samples are those of torch's tests; torch's wheel has them, but not the tests (test_nn.py).
"""

import collections
import importlib

import pytest
import torch

import safeops
from safeops.core.private_torch import tree_leaves
from safeops.safe.rules import RULES

internal = pytest.importorskip("torch.testing._internal.common_modules", exc_type=ImportError)
methods = importlib.import_module("torch.testing._internal.common_methods_invocations")

DTYPES = torch.float64, torch.float32, torch.float16
WIDE = "fp32 in place of fp16"

# Differences: with half operands, losses are fp32, as are sums, means and norms of all elements.
LOSSES_OF_HALF = """binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
    gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
    multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    triplet_margin_with_distance_loss""".split()
DIFFERENCES = {(f"nn.functional.{name}", torch.float16): WIDE for name in LOSSES_OF_HALF}
DIFFERENCES |= {(name, torch.float16): WIDE for name in ("linalg.norm", "linalg.vector_norm", "mean", "norm", "sum")}
DIFFERENCES["nn.CrossEntropyLoss", torch.float16] = WIDE
# A target that requires a gradient gets zeros, where torch gives None.
DIFFERENCES |= {("nn.functional.hinge_embedding_loss", dtype): "zeros in place of None" for dtype in DTYPES}


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def outcome(call, inputs):
    """Returns (exception or None, results, gradients of the inputs)."""
    torch.manual_seed(0)
    try:
        results = tensors(call())
    except Exception as error:
        return error, [], []
    wanted = [x for x in inputs if x.requires_grad]
    outputs = [x for x in results if x.requires_grad and not x.is_complex()]
    try:
        total = sum(x.double().sum() for x in outputs if x.layout == torch.strided)
        grads = torch.autograd.grad(total, wanted, allow_unused=True) if outputs and wanted else []
    except Exception as error:
        return error, results, []
    return None, results, list(grads)


def difference(call, inputs, dtype):
    error, *torchs = outcome(call, inputs)
    with safeops.safe_mode():
        our_error, *ours = outcome(call, inputs)
    if type(error) is not type(our_error):
        return f"{our_error!r} in place of {error!r}"
    tolerance, text = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2}[dtype], ""
    for xs, ys in zip(ours, torchs):
        if len(xs) != len(ys):
            return f"{len(xs)} tensors in place of {len(ys)}"
        for x, y in zip(xs, ys):
            if x is None or y is None:
                if x is not y:
                    text = "zeros in place of None" if y is None and not x.any() else f"{x} in place of {y}"
            elif y.layout == torch.strided and y.isfinite().all():
                if x.dtype != y.dtype:
                    text = WIDE if (x.dtype, y.dtype) == (torch.float32, torch.float16) else f"{x.dtype}, {y.dtype}"
                if x.requires_grad != y.requires_grad or x.shape != y.shape:
                    return f"{x} in place of {y}"
                if y.numel() and (x.double() - y.double()).abs().max() > tolerance * (1 + y.double().abs().max()):
                    return f"{x} in place of {y}"
    return text


def of_modules(dtypes):
    """Yields (name, dtype, call, inputs) for each sample of torch's losses, norms, softmaxes and attention modules."""
    kinds = "Loss", "Softm", "softm", "Norm", "Transformer", "Attention", "Cosine", "Distance"
    for info in internal.module_db:
        if not any(kind in info.name for kind in kinds) or "LinearCross" in info.name:  # not its thousands of samples
            continue
        for dtype in dtypes:
            for training in (True, False):
                if dtype not in info.supported_dtypes("cpu"):
                    continue
                samples = info.module_inputs_func(info, "cpu", dtype, True, training)
                for sample in samples:
                    args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
                    torch.manual_seed(0)
                    module = info.module_cls(*args, **kwargs).to(dtype).train(training)
                    inputs, options = sample.forward_input.args, sample.forward_input.kwargs
                    call = lambda module=module, inputs=inputs, options=options: module(*inputs, **options)  # noqa: E731
                    yield info.name, dtype, call, [*tensors((inputs, options)), *module.parameters()]


def of_functions(dtypes):
    """Yields (name, dtype, call, inputs) for each sample of a loss, or of a function that the mode has a rule for (as
    a function or as a method)."""
    for info in methods.op_db:
        loss = info.name.startswith("nn.functional.") and info.name.endswith("loss")
        if not loss and info.op not in RULES and getattr(torch.Tensor, info.name, None) not in RULES:
            continue
        for dtype in dtypes:
            if dtype not in info.supported_dtypes("cpu"):
                continue
            for sample in info.sample_inputs(
                "cpu", dtype, requires_grad=dtype in info.supported_backward_dtypes("cpu")
            ):
                call = lambda s=sample, f=info.op: f(s.input, *s.args, **s.kwargs)  # noqa: E731
                yield info.name, dtype, call, tensors((sample.input, sample.args, sample.kwargs))


def differing(samples, most):
    result, counts = {}, collections.Counter()
    for name, dtype, call, inputs in samples:
        counts[name, dtype] += 1
        if counts[name, dtype] <= most and (text := difference(call, inputs, dtype)):
            result[name, dtype] = text
    return result, sum(counts.values())


LONG = pytest.param(DTYPES, 200, marks=[pytest.mark.slow, pytest.mark.exhaustive])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtypes, most", [((torch.float32,), 4), LONG])
def test_what_differs_is_what_is_said(dtypes, most):
    for samples in (of_modules, of_functions):
        result, count = differing(samples(dtypes), most)
        assert count > 500
        others = {key: text for key, text in result.items() if DIFFERENCES.get(key) != text}
        assert not others, "\n".join(f"{key}: {text}" for key, text in others.items())
        if dtypes == DTYPES:
            expected = {key for key in DIFFERENCES if key[0].startswith("nn.C") is (samples is of_modules)}
            assert result.keys() == expected, "a difference is gone: take it from the list"
