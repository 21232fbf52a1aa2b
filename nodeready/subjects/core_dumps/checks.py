"""Judge whether a crash leaves a complete core file that its user can find."""

from __future__ import annotations

import re

from nodeready.core.policy import Policy
from nodeready.core.result import FactKinds, Result, Subject, check
from nodeready.core.severity import drifts, hides_cause
from nodeready.core.shell import quote
from nodeready.core.sysctl import contradicted
from nodeready.subjects.core_dumps.facts import KEY, PROBE, CoreDumps, core_directory

# systemd's sysctl.d/50-coredump.conf of all versions: only the specifiers differ (core(5)).
_PACKAGED = re.compile(r"\|(?:/usr)?/lib/systemd/systemd-coredump(?: %[A-Za-z]){1,16}")
#: The maximum sizes in coredump.conf (2 GB by default in systemd 252).
SIZE_LIMITS = ("ProcessSizeMax", "ExternalSizeMax")
_SETTINGS = ("core_handler", "core_pattern")
_INSTALL_FIX = "install the package systemd-coredump"
_OWN_STORE = "systemd-coredump has a store of its own"


def _expected_pattern(observed: CoreDumps, policy: Policy) -> str:
    """The policy's pattern; "" when the policy needs systemd-coredump, which is missing."""
    return policy.core_pattern if policy.core_handler == "path" else packaged(observed)


def packaged(observed: CoreDumps) -> str:
    """The pattern in systemd-coredump's file; "" without a file, and for another program.

    The kernel runs the program as root with every crash: only the package's program counts.
    """
    value = observed.packaged.value if observed.packaged else ""
    return value if _PACKAGED.fullmatch(value) else ""


def _is_right_at_boot(observed: CoreDumps, policy: Policy) -> bool:
    winner = observed.boot.winner
    return winner is not None and winner.value == _expected_pattern(observed, policy)


@check(
    "core_dumps.pattern",
    hides_cause("deploy", "configure", "install"),
    settings=_SETTINGS,
    fixed_by="core_dumps.pattern",
    fix=(
        _INSTALL_FIX,
        "remove the line SOURCE, then nodeready deploy INVENTORY --only core_dumps",
        "systemctl unmask systemd-sysctl.service, then nodeready deploy INVENTORY --only "
        "core_dumps",
    ),
    writes=lambda observed, policy: (
        ()
        if _is_right_at_boot(observed, policy)
        else ("/etc/sysctl.d/*nodeready-core_dumps.conf",)
    ),
)
def pattern(observed: CoreDumps, policy: Policy) -> Result:
    """kernel.core_pattern, live and at the next boot, is the policy's.

    Distributions send cores to apport or systemd-coredump, or to ``core`` in the working directory
    of the process (core(5)). A value set by hand is lost at the next boot.
    """
    expected = _expected_pattern(observed, policy)
    source, live = observed.boot.source, observed.live or "empty"
    if not expected:
        return pattern.fail(live, source, _INSTALL_FIX, expected="|systemd-coredump")
    is_right = _is_right_at_boot(observed, policy)
    if observed.live == expected and is_right:
        return pattern.ok(expected, source, expected=expected)
    actual, check = observed.boot.text(live), pattern.expecting(expected)
    if not is_right and observed.boot.remedy:
        return check.held(actual, source, observed.boot.remedy)
    return check.fixable(actual, source)


@check("core_dumps.sysctl_conf", hides_cause("configure"), settings=_SETTINGS,
       fix="remove the line WHERE")  # fmt: skip
def sysctl_conf(observed: CoreDumps, policy: Policy) -> Result:
    """No line of /etc/sysctl.conf contradicts: ``sysctl --system`` reads it after all others."""
    return contradicted(sysctl_conf, KEY, observed.boot, _expected_pattern(observed, policy))


_TMPFILES = "/etc/tmpfiles.d/00-nodeready-cores.conf"
_BLOCKED = {
    "link": ("a link of uid {}: not followed", "remove {}"),
    "nowhere": ("a link that leads nowhere", "remove {}, or make its target"),
    "nodir": ("no directory", "remove {}"),
    "fixed": (
        "nobody can write there: read-only, immutable, or NFS that trusts no root",
        "make {} writable (mount -o remount,rw; chattr -i), or another core_pattern",
    ),
}


def _rule_files(observed: CoreDumps, policy: Policy) -> tuple[str, ...]:
    rule = observed.retention
    is_right = rule is not None and rule.path == _TMPFILES and _same_rule(rule.text, policy)
    return () if is_right else (_TMPFILES,)


#: The uid that the kernel shows for a user whom it cannot map (fs.overflowuid).
_NOBODY = 65534


@check("core_dumps.directory", hides_cause("deploy", "configure"), settings=_SETTINGS,
       fixed_by="core_dumps.directory", writes=_rule_files, fix=(
    "remove PATH",
    "remove PATH, or make its target",
    "make PATH writable (mount -o remount,rw; chattr -i), or another core_pattern",
    "chmod o+x PATH",
    "chmod 1777 PATH, as its owner",
    "chown root PATH",
))  # fmt: skip
def directory(observed: CoreDumps, policy: Policy) -> Result:
    """The core directory exists and every user may write to it, but not remove others' files.

    The kernel writes the core with the rights of the crashing process. Without a directory, or
    where the job's user cannot write to it, there is no core and no message (core(5)). So all
    users must be able to enter it (x on every parent), and its file system must be writable. Mode
    1733, in which users cannot list the cores, works as well. Without the sticky bit users can
    remove each other's cores, and the directory's owner always can: a warning. Access lists and
    quotas are not checked.
    """
    path = core_directory(policy)
    check = directory.expecting(f"{path} with mode 1777")
    if policy.core_handler != "path":
        return directory.na(_OWN_STORE)
    mode, (blocked_path, kind, uid) = observed.directory_mode, observed.blocked
    actual = "no such directory" if mode is None else f"mode {mode:o}"
    if kind:
        reason, remedy = _BLOCKED[kind]
        actual, fix = f"{blocked_path}: {reason.format(uid)}", remedy.format(quote(blocked_path))
        return check.fail(actual, blocked_path, fix)
    if observed.closed:
        names, quoted = " ".join(observed.closed), " ".join(map(quote, observed.closed))
        return check.fail(f"users cannot enter {names}", names, f"chmod o+x {quoted}")
    # Creating a file needs w and x; r, to list the directory, is not needed.
    if mode is None or mode & 0o1333 != 0o1333:
        if mode is not None and observed.directory_owner:
            actual = f"{actual}, of uid {observed.directory_owner}"
            return check.fail(actual, path, f"chmod 1777 {quote(path)}, as its owner")
        only_sticky = mode is not None and mode & 0o333 == 0o333
        return check.fixable(actual, path, status="warn" if only_sticky else "fail")
    # A server of NFS that squashes root shows it so.
    if observed.directory_owner not in (0, _NOBODY):
        actual = f"{actual}, of uid {observed.directory_owner}, who can remove all cores"
        return check.warn(actual, path, f"chown root {quote(path)}")
    return check.ok(actual, path)


def retention_rule(policy: Policy) -> str:
    """The tmpfiles.d line that makes the directory at boot and removes old cores."""
    age = f"{policy.core_retention_days}d" if policy.core_retention_days else "-"
    return f"d {core_directory(policy)} 1777 root root {age}"


def _same_rule(text: str, policy: Policy) -> bool:
    words = ["1777" if word == "1733" else word for word in text.split()]
    return words == retention_rule(policy).split()


@check("core_dumps.retention", drifts("deploy", "configure"),
       settings=(*_SETTINGS, "core_retention_days"), fixed_by="core_dumps.directory",
       writes=_rule_files, fix="remove the line WHERE")  # fmt: skip
def retention(observed: CoreDumps, policy: Policy) -> Result:
    """A tmpfiles.d rule makes the directory at boot and removes cores after the policy's days."""
    check = retention.expecting(retention_rule(policy))
    if policy.core_handler != "path":
        return retention.na(_OWN_STORE)
    if (rule := observed.retention) is None:
        return check.fixable("no rule")
    if _same_rule(rule.text, policy):
        return check.ok(source=rule.source)
    if rule.path.rpartition("/")[2] < "00-nodeready-cores.conf":
        return check.fail(rule.text, rule.source, f"remove the line {rule.source}")
    return check.fixable(rule.text, rule.source)


@check("core_dumps.rewriters", hides_cause("deploy", "configure"), fixed_by="core_dumps.rewriters",
       writes=lambda observed, policy: (), expects="none",
       fix="remove UNIT, then systemctl mask NAME")  # fmt: skip
def rewriters(observed: CoreDumps, policy: Policy) -> Result:
    """No service overwrites core_pattern at its start (apport, abrt), which is after sysctl.d.

    `systemctl mask` refuses where /etc/systemd/system has a unit file or a link of that name.
    """
    if not observed.rewriters:
        return rewriters.ok()
    actual = f"{', '.join(observed.rewriters)} not masked"
    for unit in observed.in_place:
        name = unit.rpartition("/")[2]
        if name in observed.rewriters:
            fix = f"remove {quote(unit)}, then systemctl mask {quote(name)}"
            return rewriters.fail(f"{actual}; {unit} is in the way of a mask", unit, fix)
    return rewriters.fixable(actual)


@check("core_dumps.size", hides_cause("deploy"), settings=("core_handler",),
       fixed_by="core_dumps.size",
       writes=lambda observed, policy: ("/etc/systemd/coredump.conf.d/zz-nodeready.conf",),
       expects="infinity, Storage=external")  # fmt: skip
def size(observed: CoreDumps, policy: Policy) -> Result:
    """systemd-coredump stores a core of any size, in a file.

    Its defaults cut a core off at 2 GB (systemd 252, coredump.conf(5)): a trainer with a GPU
    leaves a truncated core, or none. ``Storage=none`` stores no core, and ``journal`` no core
    above JournalSizeMax.
    """
    if policy.core_handler != "systemd-coredump":
        return size.na("cores are written by path")
    differences, source = [], ""
    for name in SIZE_LIMITS:
        setting = observed.coredump.get(name)
        if setting is None or setting.value != "infinity":
            differences.append(f"{name}={setting.value if setting else 'default'}")
            source = source or (setting.source if setting else "")
    storage = observed.coredump.get("Storage")
    if storage is not None and storage.value != "external":
        differences.append(f"Storage={storage.value}")
        source = source or storage.source
    if differences:
        return size.fixable(", ".join(differences), source)
    return size.ok()


SUBJECT = Subject(
    "core_dumps", __doc__, checks=(pattern, sysctl_conf, directory, retention, rewriters, size),
    probe=PROBE,
    files=(
        "/etc/sysctl.d/*nodeready*.conf", "/etc/tmpfiles.d/*nodeready*.conf",
        "/etc/systemd/coredump.conf.d/*nodeready*.conf",
    ),
    kinds=FactKinds(volatile="where number last_name", elements={"coredump": ""}),
)  # fmt: skip
