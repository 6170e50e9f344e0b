"""From answers to findings: which steps were not finite, which of them are replayed, and what is told."""

import dataclasses
import shutil

from safeops.debug.recorder.health import Flag
from safeops.debug.recorder.replay import Replay
from safeops.debug.recorder.state import Slot, loss_scale

MOST_FINDINGS = 16  # of a run that are replayed and written; later ones are counted
MOST_OVERFLOWS = 16  # of GradScaler's skips in a run that are looked into


@dataclasses.dataclass
class Scan:
    """One scan of losses and gradients. update: the number of the update that it came before, 0 at a step's end."""

    slot: Slot
    step: int
    flag: Flag
    update: int


class Findings:
    """The findings of a recorder.

    reports, overflows: as the recorder has them. found: how many steps were not finite, without overflows.
    """

    def __init__(self, recorder):
        self.recorder = recorder
        self.reports, self.overflows, self.found = [], [], 0
        self.waiting = []  # scans whose answers nobody has looked at, the oldest first
        self.skips = 0  # steps that were not finite, one after the other
        self.told = 0  # the last step that was looked into
        self.is_spoiled = False  # True if its gradients, which are not finite, wait for an update

    def seen(self, flag, update):
        """Keep a scan of the current step."""
        recorder = self.recorder
        if not recorder._is_open:  # updates that no step follows: their answers must not pile up
            del self.waiting[: -2 * len(recorder._slots) - 64]
        slot = recorder._slots[recorder.number % len(recorder._slots)]
        self.waiting.append(Scan(slot, recorder.number, flag, update))

    def has_scan(self):
        """True if the current step was scanned, and nobody has looked at the answer."""
        return any(scan.step == self.recorder.number for scan in self.waiting)

    def wait(self):
        for scan in self.waiting:
            scan.flag.ask(wait=True)

    def look(self, last):
        """Look at the answers that have come. Returns the report to act on, or None. last: the recording ends."""
        number, exchange = self.recorder.number, self.recorder._exchange
        while self.waiting:
            scan = self.waiting[0]
            # The ranks must come to the same answer at the same step, so a rank waits for one that is a step old.
            bad = scan.flag.ask(wait=exchange is not None and scan.step < number)
            if bad is None:
                return None
            self.waiting.pop(0)
            if bad:
                return self._handle(scan)
            self.skips, self.is_spoiled = 0, False
        report = exchange and exchange.news(number, last)
        if report:
            self.found += 1
            self.reports.append(report)
        return report

    def _handle(self, scan):
        """The report of a scan that found NaN or inf, or None where there is nothing to act on."""
        recorder, slot, step, update = self.recorder, scan.slot, scan.step, scan.update
        late = [pair for other in (scan, *self.waiting) for pair in other.flag.late]
        for tensor, old in reversed(late):
            tensor.copy_(old)
        self.waiting.clear()
        recorder._guard.pending = None
        if step == self.told:  # an update after the block, whose gradients a clipping has changed
            self.is_spoiled = self.is_spoiled and not update
            return None
        was_spoiled, self.is_spoiled = self.is_spoiled, not update and scan.flag.in_grads
        self.skips += 1
        scaled = loss_scale(recorder._scaler) is not None
        # Without a replay a skip that only lowers the scale and a fault look the same, until the scale has no effect.
        is_blind = slot.number != step or slot.body is None or slot.why_not is not None
        if scaled and (is_blind or len(self.overflows) >= MOST_OVERFLOWS) and self.skips < 3:
            return None
        if len(self.reports) >= MOST_FINDINGS:
            self.found += 1
            return None
        if slot.number != step:
            slot = Slot()
            slot.number = step
            slot.why_not = f"its answer came after {len(recorder._slots)} more steps: give steps= more"
        recorder._replays = True
        try:
            report = Replay(recorder, slot, update).report(scan.flag)
        finally:
            recorder._replays = False
        if report is None:
            return None
        if was_spoiled and report.is_unknown and recorder._exchange is None:
            shutil.rmtree(report.folder, ignore_errors=True)  # an earlier micro-batch has spoiled the gradients
            return None
        self.told = step
        if not report.bug:
            self.overflows.append(report)
            return None
        self.found += 1
        self.reports.append(report)
        if recorder._protect:
            recorder._buffers.set(slot.buffers)  # BatchNorm's statistics hold the step's numbers
        return report
