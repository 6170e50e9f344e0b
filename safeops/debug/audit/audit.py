"""Audit: watch a step at Python level and list the unsafe patterns as they happen, with line, count, dtypes, values."""

import dataclasses
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from safeops.core import PACKAGE, check, private_torch
from safeops.debug.audit import patterns
from safeops.debug.audit.means import Means, unequal
from safeops.debug.audit.saved import SavedTensors
from safeops.debug.common import ranks
from safeops.debug.common.source import Line, line, user_frames, user_lines

_OPTIMIZERS = os.path.join(os.path.dirname(torch.optim.__file__), "")
# Files that read values in ways a user cannot avoid: the scaler's flag, a sampler's seed.
_READERS = (torch.amp.grad_scaler.__file__, os.path.join(os.path.dirname(torch.utils.data.__file__), ""))


@dataclasses.dataclass
class Finding:
    """One pattern at one line: its first occurrence, its count, and the ranks that saw it if several audit together."""

    code: str
    line: Line | None
    detail: str
    count: int = 1
    ranks: tuple = ()

    @property
    def what(self):
        return patterns.PATTERNS[self.code][0]

    @property
    def instead(self):
        return patterns.instead(self.code, self.detail)

    @property
    def waits(self):
        """True for a pattern that only costs time: a wait for a device, a copy."""
        return self.code in patterns.WAITS

    def __str__(self):
        times = f" ({self.count} times)" if self.count > 1 else ""
        if self.ranks:
            times += f" on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        where = f"\n    at {self.line}".replace("\n    ", "\n        ") if self.line else ""
        return f"{self.code}: {self.what}{times}\n    {self.detail}{where}\n    instead: {self.instead}"


class audit(TorchFunctionMode):
    """List the patterns that break mixed precision, where and as they happen.

    with safeops.debug.audit() as audit:
        train_step()
    print(audit)

    It finds: results that overflow, sums in half that lose what is added, NaN made from operands without NaN, NaN times
    a mask, divisors below the smallest normal number, logarithms and roots outside their domain, an eps that is 0 in
    half, reads that wait for the device, boolean indices, indices out of range, scalar losses in half, copies between
    devices, and in-place writes into tensors that autograd saved. It reads every value, so an audited step is slow; it
    changes nothing.
    "sync-read" lists reads of CPU tensors too: what would wait on a GPU.

    Args:
        select: a list of the codes to look for; all by default (`safeops.debug.audit.CODES`).
        group: a process group whose ranks all audit and give one report. At the end of the context they merge their
            findings, each with its `ranks`, in the order of first appearance. Printed, the first rank shows the report
            and the others one line. With a group, "rank-means" is looked for as well: a mean that gradients come from,
            with different counts on different ranks. None: this rank reports alone.

    Raises:
        TypeError: `select` is a str. ValueError: it has an unknown code; `group` is no group, or lacks this rank.
        RuntimeError: a rank of the group does not answer within the group's timeout.

    Attributes:
        findings: list of `Finding` (code, line, detail, count, what, instead, waits), in the order of their first
            appearance. Printed, those that only cost time (`waits`) come last.

    Sees the calls of torch functions and tensor methods made from Python in this thread. It sees no op inside them, no
    call under a functorch transform or in compiled code, and not the backward pass (`trace` sees that).

    Example:
        >>> x = torch.tensor([4e4, 4e4], dtype=torch.float16)
        >>> with safeops.debug.audit() as found:
        ...     y = x.sum() / (x.min() + 1e-8)
        >>> [finding.code for finding in found.findings]
        ['half-overflow', 'eps-is-zero']
    """

    CODES = tuple(patterns.PATTERNS)

    def __init__(self, select: Iterable[str] | None = None, *, group: Any = None):
        super().__init__()
        if isinstance(select, str):
            raise TypeError(f"audit: select must be a list of codes, got the str {select!r}")
        unknown = sorted(set(select or ()) - set(self.CODES))
        if unknown:
            raise ValueError(f"audit: unknown code {unknown[0]!r} in select=; the codes are {', '.join(self.CODES)}")
        self.select = frozenset(self.CODES if select is None else select)
        ranks.check("audit", group)
        self.by_place, self.saved, self.group, self.told_by = {}, SavedTensors(), group, None
        self.makers = WeakTensorKeyDictionary()  # a result -> the names of the calls that made it, the last first
        self.means = Means() if "rank-means" in self.select else None
        self._everyone = False  # True: all ranks give one report, if the script has a process group
        self._rank = None  # this process's rank, set when the ranks merge

    @property
    def findings(self) -> list[Finding]:
        return list(self.by_place.values())

    def __enter__(self) -> "audit":
        # After a step its graph is freed: no backward needs its saved tensors any more.
        self.hook = register_optimizer_step_post_hook(lambda *_: self._forget())
        check.watchers.append(self._left_out)
        self.shown, warnings.showwarning = warnings.showwarning, self._show_warning
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        check.watchers.remove(self._left_out)
        if warnings.showwarning == self._show_warning:  # else the user has replaced it in the meantime
            warnings.showwarning = self.shown
        self.hook.remove()
        self._forget()
        if error[0] is None or error[0] is SystemExit and not error[1].code:
            self._put_together()  # (after an exception the other ranks may not merge)

    def _restart(self):
        """Forget the findings: called in a forked process."""
        self.by_place = {}
        self._forget()

    def _answering(self):
        """The group whose ranks give one report, or None."""
        return ranks.everyone() if self._everyone else self.group

    def _forget(self):
        self.saved.clear()
        if self.means is not None:
            self.means.clear()

    def _put_together(self):
        """Merge the findings of all ranks, on every rank."""
        group = self._answering()
        if group is None or self.told_by is not None:
            return
        counts = {} if self.means is None else self.means.counts
        of_ranks = ranks.gather("audit", (self.findings, counts), group)
        self._rank, self.told_by, merged = ranks.rank(), min(of_ranks), {}
        places = [(i, rank, x) for rank, (findings, _) in of_ranks.items() for i, x in enumerate(findings)]
        for _, rank, x in sorted(places, key=lambda place: place[:2]):
            earlier = merged.setdefault((x.code, x.line), dataclasses.replace(x, count=0))
            earlier.count += x.count
            earlier.ranks = tuple(sorted((*earlier.ranks, rank)))
        for place, detail in unequal({rank: counts for rank, (_, counts) in of_ranks.items()}):
            finding = merged.setdefault(("rank-means", place), Finding("rank-means", place, detail, 0))
            finding.count += 1
        self.by_place = merged

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # compiled code is not audited
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        # Not audited: reads of an attribute (.grad, .shape, .data), calls inside torch's optimizers, and calls under a
        # functorch transform, where tensors have no values to read.
        if name == "__get__" or private_torch.transforms_active() or _OPTIMIZERS in sys._getframe(1).f_code.co_filename:
            return func(*args, **kwargs)
        with torch.no_grad(), private_torch.disable_modes():  # no_sync, say, must not see the audit's own reads
            seen = list(patterns.before(name, args, kwargs, self.makers))
        caller = sys._getframe(1).f_code
        if caller.co_filename.startswith(_READERS) and caller.co_name != "get_scale":
            seen = [(code, detail) for code, detail in seen if code != "sync-read"]
        if caller.co_filename.startswith(PACKAGE) and "refuse" in caller.co_name:  # safeops reads values for its error
            seen = [(code, detail) for code, detail in seen if code not in patterns.WAITS]
        self._note(seen)
        if args and isinstance(args[0], torch.Tensor) and patterns.is_in_place(name):
            self._note(self.saved.written(args[0]))
        means = self.means if self._answering() is not None else None
        if means is not None and name == "backward" and args and isinstance(args[0], torch.Tensor):
            means.reached(args[0])
        result = func(*args, **kwargs)
        explained = any(code in ("domain", "small-divisor", "times-mask") for code, _ in seen)
        with torch.no_grad(), private_torch.disable_modes():
            results = [] if explained else list(patterns.behind(name, args, kwargs, result))
            if means is not None:
                means.note(func, name, args, kwargs, result)
        self._note(results)
        self.saved.note(result)
        if isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            self.makers[result] = (name, *self.makers.get(args[0], ()))[:4]
        return result

    def _show_warning(self, message, category, file, number, *rest):
        """Show a warning at the user's line: torch names the line that called it, which is in this file."""
        lines = user_lines(2, most=1) if file == __file__ else []
        self.shown(message, category, *((lines[0].file, lines[0].number) if lines else (file, number)), *rest)

    def _left_out(self, index, size, which):
        """Called by losses that skip class indices out of range instead of raising. which: bool, True for those."""
        with torch.no_grad(), private_torch.disable_modes():
            self._note(list(patterns.missing(index, size, which)))

    def _note(self, patterns):
        for code, detail in patterns:
            if code not in self.select:
                continue
            frames = user_frames(3)[0]
            place = frames[0] if frames else None
            finding = self.by_place.get((code, place))
            if finding is None:
                self.by_place[code, place] = Finding(code, line(place) if place else None, detail)
            else:
                finding.count += 1

    def __str__(self):
        if self.told_by != self._rank:
            return f"audit: {len(self.by_place)} findings of all ranks, told by rank {self.told_by}"
        if not self.by_place:
            return "audit: none of the patterns happened"
        entries = {}  # one for each pattern and line, even if several calls in the line have it
        for x in self.findings:
            key = x.code, x.line and (x.line.file, x.line.number)
            first = entries.setdefault(key, dataclasses.replace(x, count=0))
            first.count += x.count
            first.ranks = tuple(sorted({*first.ranks, *x.ranks}))
        waits = [finding for finding in entries.values() if finding.waits]
        wrong = [finding for finding in entries.values() if not finding.waits]
        return "\n".join(["audit:", *(f"  {finding}" for finding in (*wrong, *waits))])
