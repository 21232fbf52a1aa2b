"""Actions on files that nodeready owns, for several steps."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.own_files import beatable, is_own
from nodeready.core.sysctl import BootSetting, sets
from nodeready.core.templates import render
from nodeready.runs.deploy.actions import Action, PlanError, RemoveFile, WriteFile
from nodeready.subjects.snapshot import Snapshot


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
    if instead_of:
        for other, before in own_variants(snapshot, path.rpartition("/")[0], instead_of):
            if other != path:
                yield RemoveFile(other, before)


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
