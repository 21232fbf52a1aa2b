"""The actions of an operation on a node, as plain data: they can be shown, compared and run.

Every action renders itself to one line of shell that calls a function of nodeready/sh/change.sh,
and describes itself for the plan. A file write has the old content, for the diff, and because a
file that changed since the snapshot is not overwritten.
"""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from nodeready.agent.asking import Request, lock_holder
from nodeready.core import shell
from nodeready.core.own_files import beatable, is_own
from nodeready.core.sysctl import BootSetting, sets
from nodeready.core.templates import render
from nodeready.core.text import sanitise
from nodeready.subjects.snapshot import Snapshot


class PlanError(Exception):
    """An operation cannot be planned on a node; the text says why and what to do, in one line."""


@lru_cache(maxsize=8)
def _packed(content: bytes) -> str:
    """The content, compressed, as base64 text. Cached: all nodes get the same py-spy."""
    return base64.encodebytes(gzip.compress(content, 6, mtime=0)).decode("ascii")


@dataclass(frozen=True)
class WriteFile:
    """The file at ``path`` becomes ``content``."""

    path: str
    content: bytes
    old: bytes | None  # its content in the snapshot; None: no such file
    mode: str = "0644"  # of a new file; an existing one keeps its mode and owner
    # write as this user to the file of this name in the user's home directory; "": as root
    user: str = ""
    # a command that gets the new file as its last argument and must succeed
    validator: tuple[str, ...] = ()
    # sent packed, by standard input instead of the command line; without a diff
    large: bool = False
    owned: bool = False  # nodeready's own file: written even when it changed since the snapshot

    def sh(self) -> str:
        data = "-" if self.large else base64.b64encode(self.content).decode("ascii")
        if self.large or self.owned:
            old = "*"
        else:
            old = "-" if self.old is None else hashlib.sha256(self.old).hexdigest()
        arguments = shell.join([self.mode, data, old, *self.validator])
        if not self.user:
            return f"nr_write {shell.quote(self.path)} {arguments}"
        # The home directory is that of the node's user database when the script runs.
        name = shell.quote(self.path.rpartition("/")[2])
        words = f'nr_write "$NR_HOME"/{name} {arguments}'
        keep = f"nr_keep user {shell.quote(self.user)}/{name} -"
        return f"{keep}\nnr_as {shell.quote(self.user)} {shell.quote(words)}"

    @property
    def kind(self) -> str:
        return "create" if self.old is None else "change"

    def describe(self) -> str:
        return f"{self.kind} {self.path}"

    def diff(self) -> str:
        """A unified diff, safe to show; "" for a large (binary) file.

        The lines around a change are shown only of nodeready's own file: /etc/environment can hold
        the password of a proxy.
        """
        if self.large:
            return ""
        old_name = "/dev/null" if self.old is None else self.path
        contents, context = (self.old or b"", self.content), 3 if self.owned else 0
        return _diff(*contents, old_name, self.path, context=context)

    def stdin(self) -> str:
        """The packed content of a large file; "" for a small one."""
        return _packed(self.content) if self.large else ""


#: Maximum of (old lines times new lines) for difflib, whose time grows with this product.
_MAX_LINE_PAIRS = 4_000_000


def _diff(before: bytes, after: bytes, old_name: str, new_name: str, context: int = 0) -> str:
    """A unified diff, safe to show; of two long files, only the removed and added lines."""
    old, new = (data.decode("utf-8", "replace").splitlines() for data in (before, after))
    if len(old) * len(new) <= _MAX_LINE_PAIRS:
        lines = difflib.unified_diff(old, new, old_name, new_name, n=context, lineterm="")
        return "\n".join(sanitise(line) for line in lines)
    old_lines, new_lines = {*old}, {*new}
    removed = [f"-{line}" for line in old if line not in new_lines]
    added = [f"+{line}" for line in new if line not in old_lines]
    head = (f"--- {old_name}", f"+++ {new_name}", f"@@ {len(old)} lines, then {len(new)} @@")
    return "\n".join(sanitise(line) for line in (*head, *removed, *added))


@dataclass(frozen=True)
class RemoveFile:
    """Remove a file that nodeready owns."""

    path: str
    old: bytes = b""
    kind: ClassVar = "remove"

    def sh(self) -> str:
        return shell.join(["nr_remove", self.path])

    def describe(self) -> str:
        return f"remove {self.path}"

    def diff(self) -> str:
        return _diff(self.old, b"", self.path, "/dev/null")


@dataclass(frozen=True)
class MakeDirectory:
    """The directory exists with this mode."""

    path: str
    mode: str
    kind: ClassVar = "directory"

    def sh(self) -> str:
        return shell.join(["nr_directory", self.path, self.mode])

    def describe(self) -> str:
        return f"directory {self.path} with mode {self.mode}"


@dataclass(frozen=True)
class RunCommand:
    """A command. ``purpose`` names it in an error; "": the error has the command itself."""

    argv: tuple[str, ...]
    purpose: str = ""
    kind: ClassVar = "run"

    def sh(self) -> str:
        return shell.join(["nr_do", self.purpose or " ".join(self.argv), *self.argv])

    def describe(self) -> str:
        return f"run {' '.join(self.argv)}"


@dataclass(frozen=True)
class Script:
    """A shell library (a file of nodeready/sh) and a call of one of its functions."""

    library: str
    argv: tuple[str, ...]
    description: str
    kind: ClassVar = "script"

    def sh(self) -> str:
        return f"{shell.library(self.library)}{shell.join(self.argv)}"

    def describe(self) -> str:
        return self.description


Action = WriteFile | RemoveFile | MakeDirectory | RunCommand | Script


@dataclass(frozen=True)
class StepChange:
    """The actions of one operation on one node."""

    step: str  # the operation, ``subject.noun``
    fixes: tuple[str, ...]  # the ids of the failing checks that it repairs
    actions: tuple[Action, ...]  # in order
    touches: tuple[str, ...] = ()  # the subjects whose observation it makes stale
    timeout_s: int = 60

    def script(self, run: str, holder: str, wait_s: int) -> str:
        """The shell text: lock the node, then run the actions until one fails."""
        lib = shell.library("answer") + shell.library("change")
        lock = shell.join(["nr_lock", run, holder, str(wait_s)])
        if not self.step.startswith("gate."):  # a deploy with `gate = False` takes it back
            lock += f"\n{shell.join(['nr_begin', self.step])}"
        body = "\n".join(action.sh() for action in self.actions)
        if any(isinstance(action, WriteFile) and action.user for action in self.actions):
            # The shell that runs as the user reads the library from this variable.
            lib += f"NR_LIB={shell.quote(lib)}\n{shell.library('as_user')}"
            body += "\nnr_as_done"
        return f"{lib}{lock}\n{body}\n"

    def request(self, node: str, run: str, wait_s: int) -> Request:
        """The request of this change. run: the word for this run in the node's lock"""
        script = self.script(run, lock_holder(), wait_s)
        return Request(node, script, self.timeout_s + wait_s, self.stdin() or None)

    def stdin(self) -> str:
        return "".join(action.stdin() for action in self.actions if isinstance(action, WriteFile))

    def diff(self) -> str:
        files = (a for a in self.actions if isinstance(a, WriteFile | RemoveFile))
        return "\n".join(filter(None, (action.diff() for action in files)))


# --- Actions on files that nodeready owns, for several steps.


def name_after(default: str, other: str) -> str:
    """A file name that sorts after ``other``: ``default``, or a name that begins with z's.

    For directories in which the last file wins (sysctl.d, limits.d, grub.d). Raises PlanError if
    no name can sort after ``other`` (`core.own_files.beatable`).
    """
    if not beatable(other):
        raise PlanError(f"{other[:100]!r}: no file can be read after it: rename it")
    name, zs = default, 0
    while other and name <= other:
        zs += 1
        name = "z" * zs + "-" + default[default.index("nodeready") :]
    return name


def own_file(
    snapshot: Snapshot,
    path: str,
    content: bytes,
    *,
    validator: tuple[str, ...] = (),
    instead_of: str = "",
) -> Iterator[Action]:
    """Write a file that only nodeready writes, unless it has this content already.

    instead_of: the file's usual name. Files under other forms of that name in its directory are
                removed after the write, so that a lost connection leaves the setting in place
    """
    old = snapshot.files.get(path)
    if old != content:
        yield WriteFile(path, content, old, validator=validator, owned=True)
    variants = own_variants(snapshot, path.rpartition("/")[0], instead_of) if instead_of else ()
    for variant, before in variants:
        if variant != path:
            yield RemoveFile(variant, before)


def own_variants(snapshot: Snapshot, directory: str, default: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of nodeready's files in this directory under a form of this name."""
    for path, content in snapshot.files.items():
        folder, _, name = path.rpartition("/")
        if folder == directory and is_own(name, default):
            yield path, content


SYSCTL_D = "/etc/sysctl.d"


def sysctl_name(subject: str) -> str:
    """The usual name of our sysctl.d file for a subject."""
    return f"99-zz-nodeready-{subject}.conf"


def sysctl_dropin(
    snapshot: Snapshot, subject: str, key: str, value: str, boot: BootSetting, *comment: str
) -> Iterator[Action]:
    """Our sysctl.d file for one key, named so that it wins at boot over every other file.

    key:     with a dash before it where a kernel may have no such key
    comment: lines of the file that say what the value does
    """
    if (boot.winner is not None and sets(boot.winner.value, value)) or not boot.beatable:
        return
    default = sysctl_name(subject)
    path = f"{SYSCTL_D}/{name_after(default, boot.last_name)}"
    content = render("sysctl.conf.j2", key=key, value=value, comment=comment)
    yield from own_file(snapshot, path, content, instead_of=default)
