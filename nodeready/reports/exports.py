"""What other programs take: lines for a shell to evaluate, and profiles for speedscope.

In the shell's lines, what a node said stands in comments, one line each, and in quoted values,
nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from nodeready import shell
from nodeready.ready.job_env import Environment, JobVariable
from nodeready.reports import stacks_table
from nodeready.reports.json_report import dump
from nodeready.reports.registry import PLAIN, Options, nodes, reasons
from nodeready.text import counted, sanitise
from nodeready.triage.stacks.document import Frame, Stacks

# --- Lines for a shell.

#: Columns of the comments.
WIDTH = 80
#: The word for no value.
_NONE = "nothing"


def _comment(text: str, indent: str = "# ") -> list[str]:
    # A sanitised text is one line, so that nothing in it can end the comment.
    return wrap(
        sanitise(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )


def _differing(found: JobVariable) -> list[str]:
    """Which nodes would have which value, and what to do about the difference."""
    width = max(len(value or _NONE) for value, _ in found.nodes_by_value)
    lines = []
    for value, names in found.nodes_by_value:
        lines += _comment(f"{value or _NONE:<{width}}  {nodes(names)}", "#   ")
    (_, most), (_, more), *_ = found.nodes_by_value
    if len(most) > len(more):
        fewer = nodes(name for _, names in found.nodes_by_value[1:] for name in names)
        lines += _comment(f"mend {fewer}, or give each node its own value in a file there")
    else:
        lines += _comment("give each node its own value in a file there")
    return lines


def _shown(found: JobVariable) -> Iterator[str]:
    yield from _comment(
        found.reason if found.value is not None else f"{found.name} is not set: {found.reason}"
    )
    if found.value is None and len(found.nodes_by_value) > 1:
        yield from _differing(found)
    for note in found.notes:
        yield from _comment(note)
    for why, names in found.unknown:
        yield from _comment(f"unknown on {nodes(names)}: {why}")
    if found.value is not None:
        yield f"export {found.name}={shell.quote(found.value)}"


def shell_lines(found: Environment, options: Options = PLAIN) -> Iterator[str]:
    """The text for `eval`, in pieces: POSIX sh, for bash, dash, ksh and zsh."""
    lines = _comment(
        f"nodeready env, {found.taken}: {nodes(found.nodes)} ({counted(len(found.nodes), 'node')})"
    )
    for error, names in found.missing:
        lines += _comment(f"not among them: {nodes(names)}: {error}")
    for one in found.variables:
        lines += ["", *_shown(one)]
    return (f"{line}\n" for line in lines)


def troubles(found: Environment) -> Iterator[str]:
    """A line for each variable that somebody has to look at: `eval` hides the comments."""
    for one in found.variables:
        if one.value is None and not one.settled:
            shares = "; ".join(
                f"{v or _NONE} on {nodes(n, 40)}" for v, n in one.nodes_by_value[:3]
            )
            yield f"{one.name} is not set: {one.reason}" + (f": {shares}" if shares else "")
        lost = ((name, why) for why, names in one.unknown for name in names)
        for why, names in reasons(lost):
            yield f"{one.name} is unknown on {nodes(names)}: {why}"


# --- Profiles for speedscope.

#: The format of a profile.
_SPEEDSCOPE = "https://www.speedscope.app/file-format-schema.json"


def speedscope(stacks: Stacks, options: Options = PLAIN) -> Iterator[str]:
    """The stacks for speedscope (https://www.speedscope.app), a flame graph of a job.

    The format is speedscope's own. One profile has a sample per stack, root to leaf, of all groups
    that have one. The sample's weight is the number of processes in the stack: a wide stack is
    common, a thin one stands apart.
    """
    indexes: dict[Frame, int] = {}
    samples: list[list[int]] = []
    weights: list[int] = []
    for group in stacks.groups:
        if group.frames:
            path = [indexes.setdefault(frame, len(indexes)) for frame in group.frames]
            # The ranks stand as a call on top of their stack: the format has no other place.
            label = Frame(f"[{stacks_table.word(group)}: {stacks_table.who(group, 60)}]", "", 0)
            samples.append([*path, indexes.setdefault(label, len(indexes))])
            weights.append(max(group.processes, 1))
    name = stacks_table.headline(stacks)
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
    known = {"name": frame.function, "file": frame.file, "line": frame.line}
    return {key: value for key, value in known.items() if key == "name" or value}
