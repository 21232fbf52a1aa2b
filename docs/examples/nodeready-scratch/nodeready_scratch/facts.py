"""The directory /scratch: its mode, and how full its file system is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.policy import Policy
from nodeready.subjects.base import Output, Probe, ProbeError, Section, number

DIRECTORY = "/scratch"


def _mode(policy: Policy) -> str:
    return f"""
    if [ -d {DIRECTORY} ]; then printf 'mode=%s\\n' "$(stat -c %a {DIRECTORY})"; fi
    """


def _usage(policy: Policy) -> str:
    return f"""
    if [ -d {DIRECTORY} ]; then df -P {DIRECTORY}; fi
    """


@dataclass(frozen=True)
class Scratch:
    """The directory for temporary data of jobs.

    mode:     its permissions in octal (``1777``); "": there is no such directory
    used_pct: per cent of its file system in use; None: no such directory
    """

    mode: str
    used_pct: int | None


def parse(outputs: Mapping[str, Output], policy: Policy) -> Scratch:
    """The observation. Raises ProbeError for output of df that makes no sense."""
    mode = outputs["scratch"].values().get("mode", "")
    lines = outputs["scratch_usage"].require().splitlines()
    if not lines:
        return Scratch(mode, None)
    # Of POSIX df -P: file system, blocks, used, available, capacity, mount point.
    words = lines[-1].split()
    if len(words) < 6:
        raise ProbeError(f"df -P {DIRECTORY} prints no capacity", lines[-1])
    return Scratch(mode, number(words[4].removesuffix("%"), "the capacity"))


PROBE = Probe(
    "scratch",
    # df can hang on a network mount, so it runs in parallel.
    (Section("scratch", _mode), Section("scratch_usage", _usage, parallel=True, quick=True)),
    parse,
)
