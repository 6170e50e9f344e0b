"""The harness itself: every check finds its planted defect, and a sound op passes all checks."""

import pytest
import torch

from safeops.testing import CHECKS, Sample, check_contract, run_check
from tests.ops import definitions
from tests.testing import toy
from tests.testing.broken import DEFECTS
from tests.testing.broken.masks import multiplies_by_the_mask
from tests.testing.broken.values import RATIO

SOUND = toy.subject(
    skip={
        "finite": "not a safe_ function: the sound one is below",
        "partial_gradients": "one differentiable operand: the sound one is below",
    }
)
SOUND_TOO = {
    "finite": toy.subject(
        lambda a, b: definitions.safe_div(a, b, out_dtype=torch.promote_types(a.dtype, b.dtype)),
        RATIO, reference=definitions.safe_div, dtype_rule="elementwise", data=None, finite=True),
    "partial_gradients": toy.subject(toy.definition, [Sample((toy.X, toy.KEEP), {"weight": toy.WEIGHT}, mask=1)]),
}  # fmt: skip


def marks(check):
    return pytest.mark.slow if check == "inductor" else ()  # slow: it calls the C++ compiler


def test_every_check_has_a_planted_defect():
    assert set(DEFECTS) == set(CHECKS)


@pytest.mark.parametrize(
    "check, subject, words",
    [
        pytest.param(check, s, words, id=f"{check}-{what}", marks=marks(check))
        for check, planted in DEFECTS.items()
        for what, s, words in planted
    ],
)
def test_planted_defect_is_found(check, subject, words):
    if subject.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with pytest.raises(AssertionError) as failure:
        run_check(subject, check)
    message = str(failure.value)
    assert message.startswith(subject.name) and f"check {check}" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("check", [pytest.param(check, marks=marks(check)) for check in CHECKS])
def test_sound_op_passes(check):
    run_check(SOUND_TOO.get(check, SOUND), check)
    run_check(SOUND, check)


def test_check_contract_lists_everything_that_is_broken():
    broken = toy.subject(multiplies_by_the_mask, toy.SAMPLES[:1])
    with pytest.raises(AssertionError) as failure:
        check_contract(broken, only=["dtypes", "masked_garbage", "weight_zero"])
    lines = str(failure.value).splitlines()
    assert "breaks 2 of 3 checks" in lines[0]
    assert "check masked_garbage" in lines[1] and "check weight_zero" in lines[2]


def test_check_contract_counts_the_samples_of_each_check():
    counts = check_contract(SOUND, only=["value", "weight_zero", "finite"])
    assert counts == {"value": 3, "weight_zero": 1, "finite": 0}


def test_a_check_that_applies_to_nothing_fails():
    with pytest.raises(AssertionError, match="applies to no sample .no weight.: add one, or skip it with a reason"):
        run_check(toy.subject(samples=[Sample((toy.X, toy.KEEP), mask=1)]), "weight_zero")


def test_a_skip_needs_a_known_check_and_a_reason():
    with pytest.raises(ValueError, match="no such check: wieght_zero"):
        check_contract(toy.subject(skip={"wieght_zero": "no weight"}))
    with pytest.raises(ValueError, match="skip needs a reason for weight_zero"):
        check_contract(toy.subject(skip={"weight_zero": " "}))
