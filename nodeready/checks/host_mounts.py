"""Judge the mounts of a node: whether they are there, answer, can be written and have room."""

from __future__ import annotations

from collections.abc import Sequence

from nodeready.checks.declare import check
from nodeready.policy import Policy
from nodeready.probes.fstab import FSTAB
from nodeready.probes.host import Host
from nodeready.probes.mounts import TABLE, Mount, is_network
from nodeready.results import Result, fail, na, ok, unknown, warn
from nodeready.shell import quote

_SHOWN = 4


def named(words: Sequence[str]) -> str:
    """Some of them by name, the others counted."""
    more = len(words) - _SHOWN
    return "; ".join(words[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


@check(
    "host.mounts",
    settings=("mounts",),
    fix=("mount QUOTE, and see why it was not", "mount QUOTE, or remove the line"),
)
def mounts(seen: Host, want: Policy) -> Result:
    """What the policy names is mounted (a failure), and what fstab mounts at boot (a warning).

    An unmounted /scratch is an empty directory on the root disk: jobs fill that instead.
    Whether a mount answers is the business of dead_mounts.
    """
    check = "host.mounts"
    there = {mount.path for mount in seen.mounts}
    missing = [path for path in want.mounts if path not in there]
    late = [e for e in seen.fstab if e.at_boot and not e.mounted and e.path not in want.mounts]
    expected = named(list(want.mounts)) or f"what {FSTAB} mounts at boot"
    if missing:
        actual = f"not mounted: {named(missing)}"
        return fail(
            check, expected, actual, TABLE, f"mount {quote(missing[0])}, and see why it was not"
        )
    if late:
        actual = f"not mounted: {named([entry.path for entry in late])}"
        fix = f"mount {quote(late[0].path)}, or remove the line"
        return warn(check, f"what {FSTAB} mounts at boot", actual, late[0].where, fix)
    return ok(check, expected, "all mounted", TABLE)


@check("host.dead_mounts", fix=("see dmesg for errors of DEVICE",))
def dead_mounts(seen: Host, want: Policy) -> Result:
    """Every mount answers: one whose server is gone hangs each process that looks into it.

    Each network mount has 3 seconds for statfs(2), which a healthy server answers within
    milliseconds. ESTALE and ENOTCONN are the answers of a mount that will not come back.
    """
    check = "host.dead_mounts"
    if seen.looked:
        return unknown(check, seen.looked)
    if not seen.mounts:
        return na(check, "nothing is mounted that could be asked")
    dead = [m for m in seen.mounts if m.state in ("hung", "stale", "failed")]
    refused = [m for m in dead if m.detail in ("Permission denied", "Operation not permitted")]
    dead = [mount for mount in dead if mount not in refused]
    if dead:
        actual = named([_words(mount) for mount in dead])
        first = dead[0]
        fix = f"bring back {first.device}, or umount -f -l {quote(first.path)} and mount it again"
        if not first.network:
            fix = f"see dmesg for errors of {first.device}"
        return fail(check, "every mount answers", actual, first.path, fix)
    waiting = [m for m in seen.mounts if m.state == "not asked" and m.fstype != "autofs"]
    if refused or waiting:
        return unknown(check, named([_words(mount) for mount in (*refused, *waiting)]))
    return ok(check, "every mount answers", f"{len(seen.mounts)} answer")


def _words(mount: Mount) -> str:
    return f"{mount.path} ({mount.device}, {mount.fstype}): {mount.state}, {mount.detail}"


@check("host.read_only", fix=("see dmesg for errors of NEXT; check or replace the disk",))
def read_only(seen: Host, want: Policy) -> Result:
    """No local file system has become read-only: the kernel does that after an error of the disk.

    Only what fstab mounts for writing can tell that it was not meant, or the kernel's own mark
    (emergency_ro and shutdown among the options). An image that is read-only by design is left
    alone.
    """
    check = "host.read_only"
    broken = {
        entry.path: entry.device
        for entry in seen.fstab
        if entry.read_only and "ro" not in entry.options and not is_network(entry.fstype)
    }
    for mount in seen.mounts:
        if not mount.network and {"emergency_ro", "shutdown"} & set(mount.options.split(",")):
            broken.setdefault(mount.path, mount.device)
    if not broken:
        return ok(check, "none", source=TABLE)
    actual = named([f"{path} ({device}) is read-only" for path, device in broken.items()])
    fix = f"see dmesg for errors of {next(iter(broken.values()))}; check or replace the disk"
    return fail(check, "none", actual, TABLE, fix)


def _local(seen: Host) -> list[Mount]:
    """The file systems of the node that somebody may fill."""
    others = [mount for mount in seen.mounts if mount.network or mount.fstype == "autofs"]
    return [mount for mount in seen.mounts if not mount.read_only and mount not in others]


def _free(check: str, seen: Host, least: int, what: str, field: str) -> Result:
    if seen.looked:
        return unknown(check, seen.looked)
    shares = {mount.path: getattr(mount, field) for mount in _local(seen)}
    known = {path: share for path, share in shares.items() if share is not None}
    scarce = sorted(known, key=lambda path: (known[path], path))
    full = [f"{path}: {known[path]:g} % free" for path in scarce if known[path] < least]
    expected = f"at least {least} % of {what} free"
    if full:
        path = scarce[0]
        fix = f"du -xh{'' if field == 'free_percent' else ' --inodes'} {quote(path)} | sort -h"
        return fail(check, expected, named(full), path, fix)
    silent = [mount.path for mount in _local(seen) if mount.state != "ok"]
    if silent:
        return unknown(check, f"no answer: {named(silent)}")
    if not known:
        return na(check, f"no local file system that counts {what}")
    return ok(check, expected, f"{known[scarce[0]]:g} % on {scarce[0]}", scarce[0])


@check("host.space", settings=("disk_free_percent",), fix=("du -xhFIELD QUOTE | sort -h",))
def space(seen: Host, want: Policy) -> Result:
    """Local file systems, tmpfs included, have room: as much as disk_free_percent says."""
    return _free("host.space", seen, want.disk_free_percent, "space", "free_percent")


@check("host.inodes", settings=("disk_free_percent",), fix=("du -xhFIELD QUOTE | sort -h",))
def inodes(seen: Host, want: Policy) -> Result:
    """Local file systems have inodes left: without one no file is made, however much is free."""
    least = want.disk_free_percent
    return _free("host.inodes", seen, least, "inodes", "inodes_free_percent")


@check(
    "host.shm",
    settings=("shm_min_mb",),
    fix=(
        "mount -t tmpfs tmpfs /dev/shm",
        "mount -o remount,size=`shm_min_mb`m /dev/shm, and in /etc/fstab",
    ),
)
def shm(seen: Host, want: Policy) -> Result:
    """/dev/shm is a tmpfs, and as large as the policy says.

    PyTorch's data loaders and NCCL pass memory between processes through it; without it, or when
    it is too small, they die with a bus error.
    """
    check, found = "host.shm", seen.shm
    if seen.looked:
        return unknown(check, seen.looked)
    if found is None or found.fstype != "tmpfs":
        actual = "not mounted" if found is None else f"a {found.fstype}"
        return fail(check, "a tmpfs", actual, "/dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    if found.size_mb is None:
        return unknown(check, f"/dev/shm: {found.detail or 'no size'}")
    if found.size_mb < want.shm_min_mb:
        expected, actual = f"at least {want.shm_min_mb} MiB", f"{found.size_mb} MiB"
        fix = f"mount -o remount,size={want.shm_min_mb}m /dev/shm, and in {FSTAB}"
        return fail(check, expected, actual, "/dev/shm", fix)
    expected = f"at least {want.shm_min_mb} MiB" if want.shm_min_mb else "a tmpfs"
    return ok(check, expected, f"{found.size_mb} MiB", "/dev/shm")


CHECKS = (mounts, dead_mounts, read_only, space, inodes, shm)
