"""What /etc/fstab mounts at boot (fstab(5)), and whether it is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nodeready.probes.base import Line
from nodeready.probes.mounts import is_network, unescaped

FSTAB = "/etc/fstab"


@dataclass(frozen=True)
class Entry:
    """A line that mounts something at a directory.

    mounted:   something is mounted there now
    read_only: and that is read-only
    """

    path: str
    device: str
    fstype: str
    options: tuple[str, ...]
    where: str
    mounted: bool
    read_only: bool = False

    @property
    def at_boot(self) -> bool:
        """Whether it is to be there without anybody asking for it.

        A local disk with ``nofail`` may be missing by right (a cloud's temporary disk); a server
        that was down at boot is no reason to work without its mount.
        """
        late = {"noauto", "x-systemd.automount", *(() if is_network(self.fstype) else ("nofail",))}
        return not late & set(self.options)


def parse(lines: Iterable[Line], table: Iterable[Line]) -> tuple[Entry, ...]:
    """The lines of fstab, told by the kernel's table of mounts what is there."""
    options_now = {
        unescaped(words[1]): words[3].split(",")
        for words in (line.text.split(" ") for line in table)
        if len(words) > 3
    }
    found = []
    for line in lines:
        words = line.text.split()
        if len(words) < 3 or words[0].startswith("#") or not words[1].startswith("/"):
            continue
        path = unescaped(words[1]).rstrip("/") or "/"
        options = tuple(words[3].split(",")) if len(words) > 3 else ()
        device = unescaped(words[0])
        mounted, read_only = path in options_now, "ro" in options_now.get(path, ())
        found.append(Entry(path, device, words[2], options, line.where, mounted, read_only))
    return tuple(found)
