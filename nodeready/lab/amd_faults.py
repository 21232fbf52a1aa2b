"""What can be wrong with GPUs."""

from __future__ import annotations

from nodeready.lab.fault import Fault

FAULTS: tuple[Fault, ...] = ()
