"""What `deploy --undo` asks a node (nodeready/sh/undo.sh), and what the node answers.

Each change of a node keeps there how it was before (nodeready/sh/change.sh, `nr_begin`). The gate
keeps nothing: a deploy with ``gate = False`` takes it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from nodeready.agent.asking import lock_holder
from nodeready.core import shell
from nodeready.core.result import ADMIN, Result
from nodeready.core.severity import DRIFTS
from nodeready.core.text import sanitise
from nodeready.runs.deploy.actions import SYSCTL_D, sysctl_name
from nodeready.runs.deploy.document import PlannedAction, PlannedChange
from nodeready.subjects.debug_tools.facts import PY_SPY_NOTE, RUN
from nodeready.subjects.iommu.facts import DEFAULT_GRUB
from nodeready.subjects.pdsh.facts import ENVIRONMENT
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.ssh_client.config import MAIN
from nodeready.subjects.ssh_client.facts import KNOWN_HOSTS

#: Seconds on a node: GRUB's tool is slow on a busy disk.
TIMEOUT_S = 300
#: What an earlier release has written, which kept nothing: files with nodeready's name beside
#: those of `Subject.files`, and files with a block.
_OWN = {"debug_tools": (RUN, PY_SPY_NOTE)}
_BLOCKS = {"pdsh": (ENVIRONMENT,), "ssh_client": (KNOWN_HOSTS, MAIN), "iommu": (DEFAULT_GRUB,)}

#: A word of the node -> the kind of the action, and its text.
_ACTIONS = {
    "remove": ("remove", "remove {}"),
    "restore": ("change", "restore {}"),
    "block": ("change", "remove nodeready's block from {}"),
    "mode": ("change", "restore {}"),
    "rmdir": ("remove", "remove the directory {} if it is empty"),
    "sysctl": ("run", "set {}"),
    "unit": ("run", "restore the service {}"),
    "run": ("run", "run {}"),
}
_LINE = re.compile(r"([a-z0-9_]+\.[a-z0-9_]+) ([a-z]+) (.*)")


@dataclass(frozen=True)
class Undo:
    """What is to be taken back on a node, or was: the changes, what fails, what stays."""

    changes: tuple[PlannedChange, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)  # step -> the reason, one line
    changed_since: tuple[Result, ...] = ()  # files that a person has changed after the deploy


def script(run: str, subjects: Iterable[str], wait_s: int, *, only_look: bool) -> str:
    """The shell text that takes these subjects back, or prints what it would do."""
    chosen = [subject for subject in subjects if subject != "gate"]
    old = []
    for subject in chosen:
        # Two subjects have files in sysctl.d.
        files = (
            path.replace("d/*nodeready*", f"d/*{sysctl_name(subject)[6:-5]}")
            if path.startswith(SYSCTL_D)
            else path
            for path in SUBJECTS[subject].files
        )
        old += [f"{subject}.files own {path} -" for path in (*files, *_OWN.get(subject, ()))]
        old += [f"{subject}.files file {path} =" for path in _BLOCKS.get(subject, ())]
    lib = "".join(map(shell.library, ("answer", "change", "undo")))
    lib += f"NR_LIB={shell.quote(lib)}\n{shell.library('as_user')}"
    lock = "" if only_look else shell.join(["nr_lock", run, lock_holder(), str(wait_s)])
    words = ["nr_undo", "1" if only_look else "", ",".join(chosen), "\n".join(old)]
    return f"{lib}{lock}\n{shell.join(words)}\n"


def parse(answer: str) -> Undo:
    """The node's answer; other lines are left out."""
    actions: dict[str, list[PlannedAction]] = {}
    diffs: dict[str, list[str]] = {}
    failed: dict[str, str] = {}
    changed: list[Result] = []
    for line in answer.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        step, word, text = match[1], match[2], sanitise(match[3])
        if word == "failed":
            failed[step] = text
        elif word == "diff":
            diffs.setdefault(step, []).append(text)
        elif word == "changed":
            changed.append(_changed_since(step, text))
        elif word in _ACTIONS:
            kind, words = _ACTIONS[word]
            path = text if word in ("remove", "restore", "block", "rmdir") else ""
            action = PlannedAction(kind, words.format(text), path)
            actions.setdefault(step, []).append(action)
    changes = (
        PlannedChange(step, (), tuple(planned), tuple(diffs.get(step, ())))
        for step, planned in actions.items()
    )
    return Undo(tuple(changes), failed, tuple(changed))


def _changed_since(step: str, path: str) -> Result:
    fix = f"keep {path}, or remove it, by hand"
    words = "changed after the deploy: it stays"
    return Result(step, "fail", "", words, path, fix, ADMIN, DRIFTS, ("configure",))
