"""A probability outside [0, 1]: on the CPU an error that names it, if it reaches the loss; never a wait for a GPU."""

import pytest
import torch

import safeops
from safeops.testing import no_synchronisation
from tests.contract.common import DEVICE, each_route, on

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a device nobody may wait to look")
LOGITS, TARGET = torch.tensor([0.5, -3.0, 0.25, 2.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
INSIDE = torch.tensor([True, False, True, False])
WORDS = r"^binary_cross_entropy: all elements of input should be between 0 and 1, got -3: say torch\.sigmoid\(input\), "


@each_route
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_are_refused(route, reduction, dtype):
    loss = on(route, "binary_cross_entropy")
    for x in (LOGITS.to(dtype), LOGITS.to(dtype).requires_grad_()):
        for options in ({}, {"weight": torch.ones(4)}, {"mask": ~INSIDE}):
            with pytest.raises(
                ValueError, match=WORDS + r"or of logits binary_cross_entropy_with_logits\(input, target\)$"
            ):
                loss(x, TARGET.to(dtype), reduction=reduction, **options)
    for value in (-1e-6, 1.001, 30.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            loss(torch.tensor([0.5, value]).to(torch.float64), torch.ones(2), reduction=reduction)


def test_a_module_refuses_them():
    with pytest.raises(ValueError, match=WORDS):
        safeops.nn.BCELoss()(LOGITS, TARGET)


@each_route
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_they_are_taken_where_they_do_not_count(route, reduction):
    loss = on(route, "binary_cross_entropy")
    want = loss(LOGITS[INSIDE], TARGET[INSIDE], reduction="sum")
    if reduction == "mean":
        want = want / 2
    torch.testing.assert_close(loss(LOGITS, TARGET, mask=INSIDE, reduction=reduction), want)
    got = loss(LOGITS, TARGET, INSIDE.float(), reduction="sum")
    torch.testing.assert_close(got, loss(LOGITS[INSIDE], TARGET[INSIDE], reduction="sum"))


@each_route
def test_what_is_nan_for_another_reason_stays_nan(route):
    loss, nan = on(route, "binary_cross_entropy"), torch.tensor([0.5, float("nan")])
    assert loss(torch.tensor([0.5, float("inf")]), torch.ones(2)).isnan()
    assert loss(nan, torch.ones(2)).isnan() and loss(torch.tensor([0.0, 1.0]), nan).isnan()
    assert loss(torch.tensor([0.5, 0.5]), torch.ones(2), nan).isnan()
    assert loss(LOGITS, TARGET, mask=torch.zeros(4, dtype=torch.bool), empty="nan").isnan()
    assert loss(LOGITS, TARGET, reduction="none").isnan().tolist() == (~INSIDE).tolist()


def test_nobody_looks_inside_traces_and_transforms():
    def loss(x):
        return safeops.binary_cross_entropy(x, TARGET)

    torch._dynamo.reset()
    assert torch.compile(loss, backend="aot_eager", fullgraph=True)(LOGITS).isnan()
    assert torch.func.vmap(loss)(LOGITS.expand(2, 4)).isnan().all()
    assert torch.func.grad(loss)(LOGITS).shape == (4,)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(LOGITS)
        assert safeops.binary_cross_entropy(fake, fake).shape == ()
    assert safeops.binary_cross_entropy(LOGITS.to("meta"), TARGET.to("meta")).is_meta


def test_a_good_call_reads_nothing_that_counts_as_a_wait():
    p = torch.rand(4, requires_grad=True)
    with no_synchronisation(), safeops.debug.no_sync(cpu=True):
        safeops.binary_cross_entropy(p, TARGET).backward()
