"""Files of ours, from their templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nodeready.actions import Action, RemoveFile, WriteFile
from nodeready.operations.step import name_after
from nodeready.probes.sysctl import Boot
from nodeready.rendering import render
from nodeready.snapshot import Snapshot

__all__ = ["own_file", "render", "sysctl_dropin"]


def own_file(
    seen: Snapshot,
    path: str,
    content: bytes,
    *,
    validator: tuple[str, ...] = (),
    instead_of: Callable[[str], bool] = lambda path: False,
) -> Iterator[Action]:
    """Write a file that we own outright, when it is not so already.

    instead_of: tells which other files of ours this one replaces: they go, after it is there, so
                that a connection that dies in between leaves the setting in place
    """
    old = seen.files.get(path)
    if old != content:
        yield WriteFile(path, content, old, validator=validator, owned=True)
    for other, before in seen.files.items():
        if other != path and instead_of(other):
            yield RemoveFile(other, before)


def sysctl_dropin(
    seen: Snapshot, subject: str, key: str, value: str, boot: Boot
) -> Iterator[Action]:
    """Our sysctl.d file for one key, named so that it wins at boot over every other file."""
    if (boot.winner is not None and boot.winner.value == value) or not boot.beatable:
        return
    stem = f"nodeready-{subject}.conf"
    path = f"/etc/sysctl.d/{name_after(f'99-zz-{stem}', boot.last_name)}"
    content = render(f"{subject}/sysctl.conf.j2", key=key, value=value)

    def same_setting(other: str) -> bool:
        return other.startswith("/etc/sysctl.d/") and other.endswith(stem)

    yield from own_file(seen, path, content, instead_of=same_setting)
