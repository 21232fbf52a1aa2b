"""Judge whether jobs get the limits: at login, from services, and in what runs already."""

from __future__ import annotations

from dataclasses import replace

from nodeready.policy import Policy
from nodeready.subjects.limits.facts import (
    ITEMS,
    NR_OPEN,
    PROBE,
    UNLIMITED,
    Entry,
    Limits,
    PamLimits,
    everybody,
    same_domain,
)
from nodeready.subjects.own_files import beatable
from nodeready.subjects.result import Result, Subject, check, fail, fixable, na, ok, some, warn

KINDS = ("soft", "hard")
_LOGIN_FILES = ("/etc/security/limits.d/*nodeready.conf",)
_LOGIN_FIXES = (
    "rename HIGH: no file can be read after it",
    "remove the line WHERE",
    "sysctl fs.nr_open=`limit_nofile` here, or a lower limit_ITEM in the policy",
)


def shown(value: int, item: str) -> str:
    """A limit in the unit of limits.conf: KiB for core and memlock, or ``unlimited``."""
    return "unlimited" if value == UNLIMITED else str(value // ITEMS[item])


def asked(limit: int, item: str) -> str:
    """A wanted limit in words: more than it is as good, save that 0 means none."""
    if limit == UNLIMITED:
        return "unlimited"
    return f"at least {shown(limit, item)}" if limit else "exactly 0"


def enough(value: int, limit: int) -> bool:
    """Whether a limit is what was asked for."""
    return value >= limit if limit else value == 0


def _declared(want: Policy, item: str) -> int:
    """The policy's limit in kernel units."""
    text = str(getattr(want, f"limit_{item}"))
    return UNLIMITED if text == "unlimited" else min(int(text) * ITEMS[item], UNLIMITED)


def most(seen: Limits, item: str) -> int:
    """The highest limit that this node's kernel accepts, now and at the next boot."""
    limits = [seen.ceiling.get(item, UNLIMITED)]
    if item == "nofile":
        boot = seen.nr_open_boot.winner
        limits += [seen.nr_open] if seen.nr_open is not None else []
        limits += [int(boot.value)] if boot is not None and boot.value.isdigit() else []
    return min(limits)


def refused(seen: Limits, want: Policy, item: str) -> str:
    """Why this node's kernel refuses the policy's limit, or "".

    pam_limits fails on a limit that cannot be set, and with it every login, root's too.
    """
    limit = _declared(want, item)
    if limit > seen.ceiling.get(item, UNLIMITED):
        most = shown(seen.ceiling[item], item)
        return f"{most} is the most without CAP_SYS_RESOURCE, which this node's root lacks"
    if item != "nofile":
        return ""
    if seen.nr_open is not None and limit > seen.nr_open:
        return f"{NR_OPEN} is {seen.nr_open}"
    boot = seen.nr_open_boot.winner
    if boot is not None and boot.value.isdigit() and limit > int(boot.value):
        return f"{NR_OPEN} is {boot.value} from the next boot on ({boot.where})"
    return ""


def wanted(seen: Limits, want: Policy) -> dict[str, int]:
    """Item -> the policy's limit in kernel units, without the limits that this kernel refuses."""
    return {item: _declared(want, item) for item in ITEMS if not refused(seen, want, item)}


def _unbeatable(path: str) -> bool:
    """Whether no file of ours can be read after this one. A file outside of a .d is beaten."""
    directory, _, name = path.rpartition("/")
    return directory.endswith(".d") and not beatable(name)


def _refused(item: str, why: str, seen: Limits, want: Policy) -> Result:
    """The node's kernel refuses this limit: a line of ours that sets it breaks every login."""
    check, limit = f"limits.{item}", _declared(want, item)
    expected = f"{asked(limit, item)} for {', '.join(want.limit_domains)}"
    for entry in seen.pam.entries:
        ours = "/zz" in entry.where and "nodeready" in entry.where
        if entry.item == item and ours and entry.value > most(seen, item):
            actual = f"{shown(entry.value, item)} breaks logins: {why}"
            return fixable(check, "no limit that this node refuses", actual, entry.where)
    least = f"sysctl {NR_OPEN}={want.limit_nofile} here, or " if NR_OPEN in why else ""
    return fail(
        check, expected, f"not set: {why}", "", f"{least}a lower limit_{item} in the policy"
    )


def _breaks(seen: Limits, entry: Entry) -> bool:
    """Whether no login gets this limit: the kernel refuses it, and pam_limits the login.

    For files without a limit, pam_limits takes fs.nr_open.
    """
    return entry.value != UNLIMITED and entry.value > most(seen, entry.item)


def _wrong(seen: Limits, entry: Entry, limit: int) -> str:
    """What is wrong with a line's limit, or ""."""
    if _breaks(seen, entry):
        highest = shown(most(seen, entry.item), entry.item)
        return f"{shown(entry.value, entry.item)} (breaks logins: the most is {highest})"
    return "" if enough(entry.value, limit) else shown(entry.value, entry.item)


def _logins(item: str, seen: Limits, want: Policy) -> Result:
    """One limit, soft and hard, for every domain of the policy."""
    check, limit = f"limits.{item}", _declared(want, item)
    expected = f"{asked(limit, item)} for {', '.join(want.limit_domains)}"
    why = refused(seen, want, item)
    if why:
        return _refused(item, why, seen, want)
    for domain in want.limit_domains:
        for written, where in seen.pam.exempt:
            if same_domain(written, domain):
                actual = f"{written} is exempt from all limits"
                return fail(check, expected, actual, where, f"remove the line {where}")
    wrong: dict[str, list[tuple[str, str]]] = {}
    source, high = "", ""
    for domain in want.limit_domains:
        for kind in KINDS:
            entry = seen.pam.effective(domain, kind, item)
            value = "unset" if entry is None else _wrong(seen, entry, limit)
            if value:
                wrong.setdefault(value, []).append((domain, kind))
                where = entry.where if entry else ""
                source = source or where
                high = high or (where if _unbeatable(where.rpartition(":")[0]) else "")
    if high:
        fix = f"rename {high.rpartition(':')[0]}: no file can be read after it"
        return fail(check, expected, _by_value(wrong), high, fix)
    if wrong:
        return fixable(check, expected, _by_value(wrong), source)
    return ok(check, expected, source=source)


def _by_value(wrong: dict[str, list[tuple[str, str]]]) -> str:
    """``unset for *, root``: where soft and hard agree, the domain stands alone."""
    texts = []
    for value, places in wrong.items():
        kinds: dict[str, list[str]] = {}
        for domain, kind in places:
            kinds.setdefault(domain, []).append(kind)
        names = [f"{d} {k[0]}" if len(k) == 1 else d for d, k in kinds.items()]
        texts.append(f"{value} for {', '.join(names)}")
    return "; ".join(texts)


@check(
    "limits.core",
    settings=("limit_core", "limit_nofile", "limit_domains"),
    fixed_by="limits.logins",
    fix=_LOGIN_FIXES,
    writes=lambda seen, want: _LOGIN_FILES,
)
def core(seen: Limits, want: Policy) -> Result:
    """New logins may write a whole core file: a limit of 0, the usual default, means none."""
    return _logins("core", seen, want)


@check(
    "limits.memlock",
    settings=("limit_memlock", "limit_nofile", "limit_domains"),
    fixed_by="limits.logins",
    fix=_LOGIN_FIXES,
    writes=lambda seen, want: _LOGIN_FILES,
)
def memlock(seen: Limits, want: Policy) -> Result:
    """New logins may lock their memory: RDMA registers its buffers, the usual limit is 8 MiB."""
    return _logins("memlock", seen, want)


@check(
    "limits.nofile",
    settings=("limit_nofile", "limit_domains"),
    fixed_by="limits.logins",
    fix=_LOGIN_FIXES,
    writes=lambda seen, want: _LOGIN_FILES,
)
def nofile(seen: Limits, want: Policy) -> Result:
    """New logins may open enough files: NCCL and data loaders use thousands of descriptors.

    More than fs.nr_open is refused by the kernel (setrlimit(2)); pam_limits then refuses the
    login, so such a value is not written, and one of ours is taken back.
    """
    return _logins("nofile", seen, want)


@check(
    "limits.exceptions",
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_domains", "limit_services"),
    fix=("raise or remove WHERE", "raise or remove WHERE, or leave it be"),
)
def exceptions(seen: Limits, want: Policy) -> Result:
    """No user, group or range of its own gets less than the policy gives to all.

    A line for a user or a range of uids beats a group's, which beats ``*`` (limits.conf(5)). One
    for a few people may be meant, so a person decides. One for all ids that people have
    (``1000:``) takes the limits from every job, and one beyond the kernel's own refuses logins:
    those fail.
    """
    check, limits = "limits.exceptions", wanted(seen, want)
    lines: dict[str, list[str]] = {}
    fails: list[str] = []
    for entry in seen.pam.beyond(want.limit_domains):
        limit = limits.get(entry.item)
        broken = _breaks(seen, entry)
        if broken or (limit is not None and entry.value < limit):
            text = f"{entry.domain} {entry.kind} {entry.item} {shown(entry.value, entry.item)}"
            lines.setdefault(entry.where, []).append(f"{text} breaks logins" if broken else text)
            fails += [entry.where] if broken or everybody(entry.domain) else []
    for domain, where in seen.pam.exempt:
        if domain not in want.limit_domains:
            lines.setdefault(where, []).append(f"{domain} is exempt from all limits")
            fails += [where] if everybody(domain) else []
    if not lines:
        return ok(check, "none")
    actual = "; ".join(f"{', '.join(texts)} ({where})" for where, texts in lines.items())
    if fails:
        names = ", ".join(dict.fromkeys(fails))
        return fail(check, "none", actual, fails[0], f"raise or remove {names}")
    names = some(lines, ", ")
    fix = f"raise or remove {names}, or leave {'it' if len(lines) == 1 else 'them'} be"
    return warn(check, "none", actual, next(iter(lines)), fix)


_PAM_FIXES = (
    "UsePAM yes in FILE, then restart sshd",
    "session required pam_limits.so in FILE",
    "remove conf= from WHERE, or give CONF these limits",
)


def _low(seen: Limits, want: Policy, given: PamLimits) -> str:
    """What the lines of one file give less than the policy, in words."""
    found = []
    for item, limit in wanted(seen, want).items():
        for domain in want.limit_domains:
            values = [given.effective(domain, kind, item) for kind in KINDS]
            low = [one for one in values if one is None or not enough(one.value, limit)]
            if low:
                value = next((shown(one.value, item) for one in low if one), "unset")
                found.append(f"{item} {value} for {domain}")
    return some(found, ", ")


@check(
    "limits.pam",
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_domains"),
    fix=_PAM_FIXES,
)
def pam(seen: Limits, want: Policy) -> Result:
    """What comes in by ssh or su gets the limits of limits.conf and limits.d.

    pam_limits gives the limits (pam_limits(8)), so it must be in the service's session stack, and
    its option ``conf=`` makes it read one other file alone. Without UsePAM, sshd gives its own
    limits to every session (sshd_config(5)). Jobs come in by ssh: there it fails; for su it warns.
    """
    check, expected = "limits.pam", "pam_limits for ssh and su, with the system's files"
    if seen.no_pam is not None and "sshd" in seen.stacks:
        where = seen.no_pam if isinstance(seen.no_pam, str) else seen.no_pam.source
        path = where if isinstance(seen.no_pam, str) else seen.no_pam.path
        actual = "sshd does not use PAM: sessions have sshd's own limits"
        return fail(check, expected, actual, where, f"UsePAM yes in {path}, then restart sshd")
    found: list[Result] = []
    for name, stack in seen.stacks.items():
        judged = fail if name == "sshd" else warn
        if not stack.limits:
            if stack.whole:
                actual = f"{name} calls no pam_limits: its sessions keep the limits they come with"
                fix = f"session required pam_limits.so in {stack.path}"
                found.append(judged(check, expected, actual, stack.path, fix))
            continue
        if not stack.conf:
            continue
        where = stack.limits[-1].source
        fix = f"remove conf= from {where}, or give {stack.conf} these limits"
        given = seen.confs.get(stack.conf)
        low = _low(seen, want, given) if given is not None else "which is not looked at"
        if low:
            judged = judged if given is not None else warn
            actual = f"{name} reads {stack.conf} alone: {low}"
            found.append(judged(check, expected, actual, where, fix))
    if not found:
        return ok(check, expected) if seen.stacks else na(check, "no PAM stack of ssh or su here")
    first = next((one for one in found if one.status == "fail"), found[0])
    return replace(first, actual="; ".join(one.actual for one in found))


def unit_value(limit: int, item: str) -> str:
    """A limit as a unit file spells it: ``infinity``, KiB with their K, a plain number."""
    if limit == UNLIMITED:
        return "infinity"
    return f"{limit // 1024}K" if ITEMS[item] == 1024 else str(limit)


@check(
    "limits.services",
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_services"),
    fixed_by="limits.services",
    fix=("rename HIGH: no drop-in can be read after it",),
    writes=lambda seen, want: tuple(
        f"/etc/systemd/system/{name}.service.d/*nodeready.conf" for name in seen.units
    ),
)
def services(seen: Limits, want: Policy) -> Result:
    """The policy's services have the limits in their unit files.

    PAM limits never reach a service (limits.conf(5) is for logins): what slurmd starts has
    slurmd's limits, which systemd sets (systemd.exec(5)).
    """
    check, limits = "limits.services", wanted(seen, want)
    if not seen.units:
        return na(
            check, f"none of {', '.join(want.limit_services) or 'the services'} is installed"
        )
    expected = ", ".join(f"{item} {asked(limit, item)}" for item, limit in limits.items())
    wrong, source, high = [], "", ""
    for service, unit in seen.units.items():
        for item, limit in limits.items():
            found = unit.limits.get(item, seen.defaults.get(item))
            if found is not None and all(enough(one, limit) for one in (found.soft, found.hard)):
                continue
            value = "unset"
            if found is not None:
                value = "/".join(dict.fromkeys(shown(v, item) for v in (found.soft, found.hard)))
                source = source or found.where
                path = found.where.rpartition(":")[0]
                high = high or (path if _unbeatable(path) else "")
            wrong.append(f"{service} {item} {value}")
    if high:
        fix = f"rename {high}: no drop-in can be read after it"
        return fail(check, expected, ", ".join(wrong), source, fix)
    if wrong:
        return fixable(check, expected, ", ".join(wrong), source)
    return ok(check, expected)


def _below(seen: Limits, limits: dict[str, int]) -> dict[str, str]:
    """Service -> its processes with a lower limit, in words."""
    found: dict[str, list[str]] = {}
    for process in seen.running:
        low = [
            f"{item} {shown(min(process.limits[item]), item)}"
            for item, limit in limits.items()
            if item in process.limits and min(process.limits[item]) < limit
        ]
        if low:
            found.setdefault(process.service, []).append(f"pid {process.pid}: {', '.join(low)}")
    return {service: "; ".join(texts) for service, texts in found.items()}


def restarts(seen: Limits, want: Policy) -> list[str]:
    """The running services with too low limits that the policy lets us restart."""
    if not seen.systemd:
        return []
    below = _below(seen, wanted(seen, want))
    return [name for name in below if name in want.restart_services and name in seen.units]


@check(
    "limits.running",
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_services", "restart_services"),
    fixed_by="limits.restart",
    fix=("systemctl restart NAMES, when idle",),
    writes=lambda seen, want: (),
)
def running(seen: Limits, want: Policy) -> Result:
    """What runs already has the limits too: a new limit reaches a service only by its restart.

    A restart can end jobs, so it waits for a person unless the policy lists the service in
    restart_services.
    """
    check, limits = "limits.running", wanted(seen, want)
    if not seen.running:
        return na(check, f"none of {', '.join(want.limit_services) or 'the services'} is running")
    expected = ", ".join(f"{item} {asked(limit, item)}" for item, limit in limits.items())
    below = _below(seen, limits)
    if not below:
        return ok(check, expected)
    actual = "; ".join(f"restart of {service} ({text})" for service, text in below.items())
    source: str | None = next(
        (f"/proc/{process.pid}/limits" for process in seen.running if process.service in below), ""
    )
    if restarts(seen, want):
        return fixable(check, expected, f"pending: {actual}", source or "")
    names = " ".join(below)
    return warn(
        check,
        expected,
        f"pending: {actual}",
        source or "",
        f"systemctl restart {names}, when idle",
    )


SUBJECT = Subject(
    "limits",
    __doc__,
    checks=(core, memlock, nofile, exceptions, pam, services, running),
    probe=PROBE,
    files=(
        "/etc/security/limits.d/*nodeready*.conf",
        "/etc/systemd/system/*.service.d/*nodeready*.conf",
    ),
)
