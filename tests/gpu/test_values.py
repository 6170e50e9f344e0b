"""Values on the GPU are rounded right to fp16 and bf16 and agree with fp64 and the CPU, for mixed devices too; and
calls allocate no memory but the output's."""

import pytest
import torch

import safeops
from safeops.core.op import registry
from safeops.ops.losses._pointwise import PointwiseLoss
from tests.gpu.cases import DTYPES, OPS, numbers, same
from tests.ops import RECORDS

HALVES = (torch.float16, torch.bfloat16)
LOSSES = [name for name in RECORDS if isinstance(registry.get(name), PointwiseLoss)]


def every_bit_pattern(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).cuda()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_passes_masked_fill_unchanged(dtype):
    x = every_bit_pattern(dtype)
    out = safeops.masked_fill(x, torch.zeros(x.shape, dtype=torch.bool, device="cuda"), 1.0)
    assert torch.equal(out.view(torch.int16), x.view(torch.int16))


def saturated(quotient, numerator):
    over = quotient.isinf() & numerator.isfinite()
    return torch.where(over, quotient.sign() * torch.finfo(quotient.dtype).max, quotient)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_safe_div_rounds_to_nearest_even(dtype):
    """A quotient in fp16 or bf16 is the fp32 quotient, rounded as by the CPU, for every dividend over many divisors,
    and for exact ties."""
    x = every_bit_pattern(dtype)
    for divisor in (1.0, 3.0, 7.0, 1.0078125, 0.3, 1e-3, 300.0):
        y = torch.full_like(x, divisor)
        wide = safeops.safe_div(x, y, dtype=torch.float32).cpu()
        a = x.cpu().float()
        same(wide, saturated(a / y.cpu().float(), a))
        rounded = saturated(wide.to(dtype), a)
        same(safeops.safe_div(x, y).cpu(), rounded)


def others(name, x):
    """Returns the loss's tensor operands after the first one: x for each."""
    options = {"mask", "weight", "pos_weight", "denominator"}
    tensors = [key for key, value in RECORDS[name].call.items() if isinstance(value, torch.Tensor)]
    return (x,) * (len(set(tensors) - options) - 1)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradients_round_to_nearest_even(name, dtype):
    """The gradient of an fp16 or bf16 leaf is the gradient of an fp32 leaf, rounded once as by the CPU."""
    x, y = numbers(100_003, dtype, 0), numbers(100_003, dtype, 1)
    upstream = numbers(100_003, torch.float32, 2)
    parameters = {key: value for key, value in RECORDS[name].call.items() if not isinstance(value, torch.Tensor)}
    gradients = []
    for leaf in (x.clone(), x.float()):
        leaf.requires_grad_()
        value = getattr(safeops, name)(leaf, *others(name, y), reduction="none", **parameters)
        gradients.append(torch.autograd.grad(value, leaf, upstream.to(value.dtype))[0])
    same(gradients[0].cpu(), gradients[1].cpu().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 1024), (63, 1021), (5, 3, 256, 2)], ids=str)
@pytest.mark.parametrize("name", ["masked_fill", "safe_div"])
def test_elementwise_layouts_equal_the_cpu(name, shape, dtype):
    """The flat, row-broadcast and general kernels give the bits of the CPU, forward and backward."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    seconds = [torch.randn(shape), torch.randn(shape[-1:]), torch.randn((*shape[:-1], 1)), torch.randn(())]
    for second in seconds:
        for layout in (lambda t: t, lambda t: t.transpose(0, -1)):
            results = []
            for device in ("cpu", "cuda"):
                a = x.to(device).detach().requires_grad_()
                if name == "masked_fill":
                    b = (second > 0).to(device).expand(shape)
                    value = safeops.masked_fill(layout(a), layout(b), -2.5)
                else:
                    b = torch.where(second.abs() < 0.3, 0, second).to(dtype).to(device).expand(shape)
                    value = safeops.safe_div(layout(a), layout(b))
                upstream = torch.linspace(-2, 2, value.numel(), dtype=torch.float64).view(value.shape)
                gradient = torch.autograd.grad(value, a, upstream.to(device, value.dtype))[0]
                results.append((value.detach().cpu(), gradient.cpu()))
            same(*results)


@pytest.mark.parametrize("name", OPS)
def test_agrees_with_fp64(name):
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
        case = OPS[name](1_000_003, dtype, 5)
        # An upstream gradient of 256 keeps a mean's gradients out of fp16's subnormals.
        upstream = torch.full_like(case.call(*case.leaves), 256.0)
        if upstream.dim():
            upstream[::2] *= -1  # for a constant upstream gradient a softmax has gradient 0
        got, gradients = case.forward_backward(upstream)
        wide = type(case)(case.call, tuple(x.double() for x in case.leaves))
        truth, wide_gradients = wide.forward_backward(upstream.double())
        for a, b in zip((got, *gradients), (truth, *wide_gradients)):
            finite = b.isfinite()  # a masked element's log probability is -inf
            assert torch.equal(a[~finite].double(), b[~finite])
            error = (a.double() - b)[finite].norm() / b[finite].norm().clamp(min=1e-300)
            assert error < tolerance, f"{dtype}: {error}"


def layouts_of_indices():
    """Yields (op, input, dim, index). The index has all dims for safe_gather, and one dim for safe_index_select."""
    x = torch.randn(300, 129, generator=torch.Generator().manual_seed(0))
    for kind in (torch.int32, torch.int64):
        at = lambda *shape, size: torch.randint(-2, size + 2, shape).to(kind)  # noqa: B023, E731
        torch.manual_seed(1)
        for name, what, leaf, dim, index in (
            ("safe_gather", "one a row", x, 1, at(300, 1, size=129)),
            ("safe_gather", "lines", x, 1, at(300, 500, size=129)),
            ("safe_gather", "across", x, 0, at(700, 129, size=300)),
            ("safe_gather", "expanded", x[:, :128], 0, at(7000, 1, size=300).expand(7000, 128)),
            ("safe_gather", "transposed", x.t(), 0, at(300, 129, size=129).t()),
            ("safe_index_select", "rows", x[:, :128].contiguous(), 0, at(5000, size=300)),
            ("safe_index_select", "odd rows", x, 0, at(5000, size=300)),
            ("safe_index_select", "columns", x, 1, at(5000, size=129)),
            ("safe_index_select", "padding", x, 0, torch.full((100_000,), 7, dtype=kind)),
            ("safe_index_select", "none", x, 0, torch.full((1000,), -100, dtype=kind)),
            ("safe_index_select", "0-dim", x, 0, at(size=300)),
        ):
            yield pytest.param(name, leaf, dim, index, id=f"{name}-{what}-{kind}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name, x, dim, index", list(layouts_of_indices()))
def test_what_an_index_names_equals_the_cpu(name, x, dim, index, dtype):
    """safe_gather and safe_index_select have the CPU's bits; their gradients agree within the rounding of the sums."""
    results = []
    for device in ("cpu", "cuda"):
        leaf = x.to(device, dtype).detach().requires_grad_()
        value = getattr(safeops, name)(leaf, dim, index.to(device), fill_value=-2.5)
        upstream = torch.linspace(-1, 1, value.numel(), dtype=torch.float64).view(value.shape).to(device, dtype)
        for grad in (upstream, torch.ones((), dtype=dtype, device=device).expand(value.shape)):
            results.append((value.detach().cpu(), torch.autograd.grad(value, leaf, grad, retain_graph=True)[0].cpu()))
    for (value, gradient), (got, got_gradient) in zip(results[:2], results[2:]):
        same(got, value)
        if dtype == torch.float16:  # sums may overflow fp16, whose largest number is 65504
            got_gradient, gradient = (g.clamp(-6e4, 6e4) for g in (got_gradient, gradient))
        most = index.clamp(min=0).flatten().bincount().max()  # the most summands of one element; each is at most 1
        room = torch.finfo(dtype).eps * gradient.double().abs() + 1e-6 * most
        assert ((got_gradient.double() - gradient.double()).abs() <= room).all()


@pytest.mark.parametrize("shape", [(1_000_003,), (301, 4096), (4096, 300)], ids=str)
def test_masked_count(shape):
    mask = torch.rand(shape, device="cuda") < 0.7
    weight = torch.where(torch.rand(shape[-1], device="cuda") < 0.5, 0.0, 2.0)
    x = torch.empty(shape, dtype=torch.int8, device="cuda")  # never read
    for dim in (None, 0, -1):
        same(safeops.masked_count(x, mask, dim), mask.sum(dim))
        same(safeops.masked_count(x, mask, dim, weight=weight), (mask & (weight != 0)).sum(dim))
        same(safeops.masked_count(x, None, dim), torch.ones_like(mask).sum(dim))
        same(safeops.masked_count(mask, None, dim), mask.sum(dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 181, 200), (1, 1, 1500, 1600)], ids=str)  # more tiles than a block adds up
@pytest.mark.parametrize("name", ["ssim", "ssim_loss", "ms_ssim"])
def test_similarity_equals_the_cpu(name, shape, dtype):
    """SSIM's values and both gradients equal the CPU's, masked and not, for the window size that the kernel has as a
    constant and for others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    y = (x + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    mask = torch.rand(shape, generator=generator) < 0.8
    for options in ({}, {"mask": mask}, {"padding": "same", "win_size": 5}, {"mask": mask, "win_size": 7}):
        equal_the_cpu(getattr(safeops, name), [x.to(dtype), y], options)


def equal_the_cpu(function, leaves, options):
    """Assert that values and gradients on the GPU agree with those on the CPU."""
    results, dtype = [], leaves[0].dtype
    for device in ("cpu", "cuda"):
        moved = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in options.items()}
        there = [t.to(device).detach().requires_grad_() for t in leaves]
        value = function(*there, **moved)
        results.append([t.detach().cpu().double() for t in (value, *torch.autograd.grad(value.sum() * 1e4, there))])
    tolerance = max(torch.finfo(dtype).eps, 1e-10 if dtype == torch.float64 else 1e-4)
    for want, got in zip(*results):
        assert torch.equal(got.isnan(), want.isnan())
        assert (got - want).nan_to_num(0).abs().max() <= tolerance * want.nan_to_num(0).abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sides", [(11, 12, 13), (70, 40, 75)], ids=str)
def test_the_similarity_of_volumes_equals_the_cpu(sides, dtype):
    """SSIM of volumes equals the CPU's, with an offset, masked and not, for the window size that the kernel has as a
    constant and for others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((2, 2, *sides), generator=generator, dtype=torch.float64)
    y = (x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(dtype)
    mask = torch.rand(x.shape, generator=generator) < 0.8
    for options in ({}, {"mask": mask}, {"padding": "same", "win_size": 5}, {"mask": mask, "win_size": 7}):
        equal_the_cpu(safeops.ssim_loss, [x.to(dtype), y], options)
        equal_the_cpu(safeops.ssim, [x.to(dtype), y], options | {"reduction": "none"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 65, 512), (2, 3, 33, 301), (2, 2, 17, 30, 64)], ids=str)
def test_total_variation_equals_the_cpu(shape, dtype):
    x, mask = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype), torch.rand(shape) < 0.8
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    for keep in (None, mask, mask[:, :1], mask[:, :, :1]):
        for layout in (x, x.contiguous(memory_format=last), x.mT.contiguous().mT):
            equal_the_cpu(safeops.total_variation, [layout], {"mask": keep})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 7), (64, 1000), (3, 100_000), (2, 50, 60, 21)], ids=str)
def test_multi_margin_loss_equals_the_cpu(shape, dtype):
    """multi_margin_loss equals the CPU's, with classes along memory and across it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    target, weight = torch.randint(shape[-1], shape[:-1]), torch.rand(shape[-1])
    for options in ({"p": 2}, {"margin": 0.5, "weight": weight, "mask": torch.rand(shape[:-1]) < 0.8}):
        for layout in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
            equal_the_cpu(safeops.multi_margin_loss, [layout], {"target": target} | options)


def test_mixed_devices_are_named():
    gpu, cpu = torch.ones(4, 4, device="cuda"), torch.ones(4, 4)
    calls = {
        "masked_fill": lambda: safeops.masked_fill(gpu, cpu > 0, 0.0),
        "safe_div": lambda: safeops.safe_div(gpu, cpu),
        "masked_sum": lambda: safeops.masked_sum(gpu, cpu > 0),
        "masked_mean": lambda: safeops.masked_mean(gpu, cpu > 0),
        **{name: lambda name=name: getattr(safeops, name)(gpu, *others(name, cpu)) for name in LOSSES},
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name}.*(cuda|cpu)"):
            call()


@pytest.mark.parametrize("name", OPS)
def test_peak_memory_is_the_output(name):
    """A call's peak memory is its output (no upcast copy), and that of its backward is the gradients. Each may add the
    workspace that the record states, and 2 MiB."""
    case = OPS[name](8_000_000, torch.bfloat16, 0)
    leaves = [x.detach().requires_grad_() for x in case.leaves]
    upstream = torch.ones_like(case.call(*leaves))

    def peak(function):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = function()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    size = lambda tensors: sum(t.untyped_storage().nbytes() for t in tensors)  # noqa: E731
    slack = 2 * 2**20 + RECORDS[name].workspace * 8_000_000
    value, used = peak(lambda: case.call(*leaves))
    assert used <= size([value]) + slack, f"forward: {used} bytes for an output of {size([value])}"
    gradients, used = peak(lambda: torch.autograd.grad(value, leaves, upstream))
    assert used <= size(gradients) + slack, f"backward: {used} bytes for gradients of {size(gradients)}"
