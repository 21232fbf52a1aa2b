"""How far the clocks of a job's nodes were ahead at a moment, and how sure that is. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Seconds that a clock may drift in a second before its measurement: a quartz has up to 50 ppm.
_DRIFT = 5e-5
#: Uncertainty of a clock that was not measured, in seconds: NTP holds most clocks closer.
_UNMEASURED_S = 0.5
#: A step of the clock in the log of chronyd (reference.c), ntpd or ntpdate.
_STEP = re.compile(
    r"chronyd\S* System clock was stepped by (-?\d{1,12}(?:\.\d{1,9})?) seconds"
    r"|ntp(?:d|date)\S* (?:time reset|step time server .{1,80} offset) "
    r"([+-]?\d{1,12}(?:\.\d{1,9})?) s"
)


class NodeClock(NamedTuple):
    """A node's clock beside this machine's."""

    offset_s: float  # seconds that it is ahead
    uncertainty_s: float  # of the offset, half of the measured round trip
    measured_s: float = 0.0  # when, by this machine's clock; 0: at the time of the failure


class ClockStep(NamedTuple):
    """A step of a node's clock. time_s: by this clock, after it; None: not known"""

    time_s: float | None
    seconds: float


def clock_step(line: str) -> float | None:
    """The seconds by which a line of a node's log says that its clock was set forward."""
    match = _STEP.search(line[:1000])
    return float(match[1] or match[2]) if match else None


class JobClocks:
    """The clocks of a job's nodes.

    measured: node -> its clock; steps: node -> its steps
    ends:     node -> the last times in its logs, by its own clock
    """

    def __init__(
        self, measured: Mapping[str, NodeClock], steps: Mapping[str, Sequence[ClockStep]],
        ends: Mapping[str, Sequence[float]],
    ) -> None:  # fmt: skip
        self.measured, self.steps = measured, steps
        # The ranks of a job end nearly at once, so nodes whose logs end at other times may have
        # another clock: the difference is an uncertainty.
        medians = {
            node: statistics.median(times)
            for node, times in ends.items()
            if times and node not in measured
        }
        middle = statistics.median_low(medians.values()) if medians else 0.0
        self.differences_s = {node: abs(end_s - middle) for node, end_s in medians.items()}

    def at(self, node: str, moment: float | None) -> tuple[float, float]:
        """The seconds that a node's clock was ahead when it showed this moment, and how sure that
        is. moment: None: not known
        """
        steps = [
            step.seconds
            for step in self.steps.get(node, ())
            if moment is None or step.time_s is None or step.time_s > moment
        ]
        clock = self.measured.get(node)
        if clock is None:
            uncertainty_s = self.differences_s.get(node, 0.0) + sum(map(abs, steps))
            return 0.0, _UNMEASURED_S + uncertainty_s
        offset_s = clock.offset_s - sum(steps)
        age_s = clock.measured_s - (moment - offset_s) if clock.measured_s and moment else 0.0
        return offset_s, clock.uncertainty_s + _DRIFT * max(0.0, age_s)
