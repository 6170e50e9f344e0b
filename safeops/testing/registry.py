"""The table of checks, and the two ways to run it: one check at a time, or the whole contract."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass

from .sample import NotApplicable, Sample
from .subject import Subject


@dataclass(frozen=True)
class Check:
    """One clause of the contract. `run(subject, sample)` raises AssertionError where it is broken."""

    name: str
    run: Callable[[Subject, Sample], None]
    proves: str
    slow: bool = False
    once: bool = False
    cuda: bool = False

    def __call__(self, subject: Subject, sample: Sample) -> None:
        self.run(subject, sample)


CHECKS: dict[str, Check] = {}


def check(proves: str, *, slow: bool = False, once: bool = False, cuda: bool = False):
    """Register `check_<name>`. slow: run it on the samples marked slow, or on the first. once: on one sample. cuda: on
    CUDA only."""

    def register(function):
        name = function.__name__.removeprefix("check_")
        CHECKS[name] = Check(name, function, proves, slow, once, cuda)
        return function

    return register


def run_check(subject: Subject, check: str | Check) -> int:
    """Run one check, or the one of that name in `CHECKS`, on the samples of `subject`. Returns how many it applied to.

    A check that applies to none of them fails, unless `subject.skip` gives the reason: nothing is left out silently.
    """
    item = CHECKS[check] if isinstance(check, str) else check
    name = item.name
    if name in subject.skip or (item.cuda and not str(subject.device).startswith("cuda")):
        return 0
    samples = list(subject.samples)
    if item.slow and any(s.slow for s in samples):
        samples = [s for s in samples if s.slow]
    ran, why = 0, set()
    for i, sample in enumerate(samples):
        try:
            item(subject, sample.to(subject.device))
        except NotApplicable as reason:
            why.add(str(reason))
            continue
        except AssertionError as error:
            raise AssertionError(f"{subject.name}, sample {sample.name or i}: check {name}: {error}") from error
        except Exception as error:
            raise AssertionError(
                f"{subject.name}, sample {sample.name or i}: check {name}: raised {type(error).__name__}: {error}"
            ) from error
        ran += 1
        if item.once or (item.slow and not sample.slow):
            break
    if not ran:
        reasons = "; ".join(sorted(why)) or "there are no samples"
        raise AssertionError(
            f"{subject.name}: check {name} applies to no sample ({reasons}): add one, or skip it with a reason"
        )
    return ran


def check_contract(op, reference=None, samples=(), *, only=None, **describe) -> dict[str, int]:
    """Check every clause of the contract; raise one AssertionError that lists what is broken.

    Args:
        op: the public function, or a ready `Subject`.
        reference: its definition in plain differentiable torch, called with float64 operands.
        samples: `Sample`s. Between them: a mask, a weight, a reduction, broadcast operands, four dimensions.
        only: names of checks; default all of `CHECKS`.
        describe: further fields of `Subject`: torch_equivalent, direct, routes, dtype_rule, device, skip, ...

    Returns:
        {check: number of samples it ran on}; 0 where it was skipped.

    Example:
        >>> from safeops.testing import Sample, check_contract
        >>> def half_square(x, mask):
        ...     return torch.where(mask, x, 0).square() / 2
        >>> x, mask = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4) > 0.5
        >>> check_contract(half_square, half_square, [Sample((x, mask), mask=1)], only=["gradcheck", "masked_garbage"])
        {'gradcheck': 1, 'masked_garbage': 1}
    """
    subject = op if isinstance(op, Subject) else Subject(op, reference, tuple(samples), **describe)
    unknown = [n for n in (*(only or ()), *subject.skip) if n not in CHECKS]
    if unknown:
        raise ValueError(f"check_contract: no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    without_reason = [n for n, reason in subject.skip.items() if not str(reason).strip()]
    if without_reason:
        raise ValueError(f"check_contract: skip needs a reason for {', '.join(without_reason)}")
    counts, failures = {}, []
    for name in only or CHECKS:
        try:
            counts[name] = run_check(subject, name)
        except AssertionError as error:
            line = traceback.extract_tb((error.__cause__ or error).__traceback__)[-1]
            failures.append(f"- {error} [{line.name}:{line.lineno}]")
    if failures:
        raise AssertionError(
            f"{subject.name} breaks {len(failures)} of {len(counts) + len(failures)} checks:\n" + "\n".join(failures)
        )
    return counts
