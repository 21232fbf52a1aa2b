"""The stacks as a profile for speedscope (https://www.speedscope.app)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nodeready.reports import rank_groups
from nodeready.reports.json_report import dump
from nodeready.reports.registry import PLAIN, Options
from nodeready.triage.stacks.document import Frame, Stacks

#: The format of a profile.
_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"


def speedscope(stacks: Stacks, options: Options = PLAIN) -> Iterator[str]:
    """A flame graph of the job in speedscope's own format.

    One profile has a sample per group with a stack, root to leaf. The sample's weight is the
    number of processes in the stack: a wide stack is common, a thin one is rare.
    """
    indexes: dict[Frame, int] = {}
    samples: list[list[int]] = []
    weights: list[int] = []
    for group in stacks.groups:
        if group.frames:
            path = [indexes.setdefault(frame, len(indexes)) for frame in group.frames]
            # The format has no place for the ranks, so they are a call at the end of their stack.
            label = Frame(f"[{rank_groups.word(group)}: {rank_groups.members(group, 60)}]", "", 0)
            samples.append([*path, indexes.setdefault(label, len(indexes))])
            weights.append(max(group.processes, 1))
    name = rank_groups.headline(stacks)
    profile = {
        "type": "sampled",
        "name": name,
        "unit": "none",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
    document = {
        "$schema": _SPEEDSCOPE,
        "exporter": "nodeready",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in indexes]},
        "profiles": [profile],
    }
    yield dump(document) + "\n"


def _frame(frame: Frame) -> dict[str, Any]:
    """A frame in the format, which has no empty file and no line 0."""
    fields = {"name": frame.function, "file": frame.file, "line": frame.line}
    return {key: value for key, value in fields.items() if key == "name" or value}
