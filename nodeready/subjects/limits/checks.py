"""Judge whether jobs get the limits: at login, from services, and in what runs already."""

from __future__ import annotations

from dataclasses import replace

from nodeready.policy import Policy
from nodeready.subjects.limits.facts import NR_OPEN, PROBE, Limits
from nodeready.subjects.limits.pam import (
    ITEMS,
    KINDS,
    UNLIMITED,
    LimitEntry,
    PamLimits,
    covers_all_people,
    same_domain,
)
from nodeready.subjects.own_files import beatable
from nodeready.subjects.result import Result, Subject, check, fail, fixable, na, ok, some, warn

_LOGIN_FILES = ("/etc/security/limits.d/*nodeready.conf",)
_LOGIN_FIXES = (
    "rename HIGH: no file can be read after it",
    "remove the line WHERE",
    "sysctl fs.nr_open=`limit_nofile` here, or a lower limit_ITEM in the policy",
)


def shown(value: int, item: str) -> str:
    """A limit in the unit of limits.conf: KiB for core and memlock, or ``unlimited``."""
    return "unlimited" if value == UNLIMITED else str(value // ITEMS[item])


def requested(limit: int, item: str) -> str:
    """A wanted limit in words: more than it is as good, save that 0 means none."""
    if limit == UNLIMITED:
        return "unlimited"
    return f"at least {shown(limit, item)}" if limit else "exactly 0"


def enough(value: int, limit: int) -> bool:
    """Whether a limit is what was asked for."""
    return value >= limit if limit else value == 0


def _declared(policy: Policy, item: str) -> int:
    """The policy's limit in kernel units."""
    text = str(getattr(policy, f"limit_{item}"))
    return UNLIMITED if text == "unlimited" else min(int(text) * ITEMS[item], UNLIMITED)


def highest_possible(observed: Limits, item: str) -> int:
    """The highest limit that this node's kernel accepts, now and at the next boot."""
    limits = [observed.ceiling.get(item, UNLIMITED)]
    if item == "nofile":
        boot = observed.nr_open_boot.winner
        limits += [observed.nr_open] if observed.nr_open is not None else []
        limits += [int(boot.value)] if boot is not None and boot.value.isdigit() else []
    return min(limits)


def refused(observed: Limits, policy: Policy, item: str) -> str:
    """Why this node's kernel refuses the policy's limit, or "".

    pam_limits fails on a limit that cannot be set, and with it every login, root's too.
    """
    limit = _declared(policy, item)
    if limit > observed.ceiling.get(item, UNLIMITED):
        maximum = shown(observed.ceiling[item], item)
        return f"{maximum} is the most without CAP_SYS_RESOURCE, which this node's root lacks"
    if item != "nofile":
        return ""
    if observed.nr_open is not None and limit > observed.nr_open:
        return f"{NR_OPEN} is {observed.nr_open}"
    boot = observed.nr_open_boot.winner
    if boot is not None and boot.value.isdigit() and limit > int(boot.value):
        return f"{NR_OPEN} is {boot.value} from the next boot on ({boot.where})"
    return ""


def possible_limits(observed: Limits, policy: Policy) -> dict[str, int]:
    """Item -> the policy's limit in kernel units, without the limits that this kernel refuses."""
    return {item: _declared(policy, item) for item in ITEMS if not refused(observed, policy, item)}


def _unbeatable(path: str) -> bool:
    """Whether no nodeready file can be read after this file, which is in a .d directory."""
    directory, _, name = path.rpartition("/")
    return directory.endswith(".d") and not beatable(name)


def _kernel_refuses(item: str, reason: str, observed: Limits, policy: Policy) -> Result:
    """The result of a limit that the node's kernel refuses: such a line breaks every login."""
    check, limit = f"limits.{item}", _declared(policy, item)
    expected = f"{requested(limit, item)} for {', '.join(policy.limit_domains)}"
    for entry in observed.pam.entries:
        is_ours = "/zz" in entry.source and "nodeready" in entry.source
        if entry.item == item and is_ours and entry.value > highest_possible(observed, item):
            actual = f"{shown(entry.value, item)} breaks logins: {reason}"
            return fixable(check, "no limit that this node refuses", actual, entry.source)
    least = f"sysctl {NR_OPEN}={policy.limit_nofile} here, or " if NR_OPEN in reason else ""
    return fail(
        check, expected, f"not set: {reason}", "", f"{least}a lower limit_{item} in the policy"
    )


def _breaks(observed: Limits, entry: LimitEntry) -> bool:
    """Whether no login gets this limit: the kernel refuses it, and pam_limits the login.

    For files without a limit, pam_limits takes fs.nr_open.
    """
    return entry.value != UNLIMITED and entry.value > highest_possible(observed, entry.item)


def _line_problem(observed: Limits, entry: LimitEntry, limit: int) -> str:
    """What is wrong with a line's limit, or ""."""
    if _breaks(observed, entry):
        highest = shown(highest_possible(observed, entry.item), entry.item)
        return f"{shown(entry.value, entry.item)} (breaks logins: the most is {highest})"
    return "" if enough(entry.value, limit) else shown(entry.value, entry.item)


def _logins(item: str, observed: Limits, policy: Policy) -> Result:
    """One limit, soft and hard, for every domain of the policy."""
    check, limit = f"limits.{item}", _declared(policy, item)
    expected = f"{requested(limit, item)} for {', '.join(policy.limit_domains)}"
    reason = refused(observed, policy, item)
    if reason:
        return _kernel_refuses(item, reason, observed, policy)
    for domain in policy.limit_domains:
        for written, line in observed.pam.exempt:
            if same_domain(written, domain):
                actual = f"{written} is exempt from all limits"
                return fail(check, expected, actual, line, f"remove the line {line}")
    problems: dict[str, list[tuple[str, str]]] = {}
    source, high = "", ""
    for domain in policy.limit_domains:
        for kind in KINDS:
            entry = observed.pam.effective(domain, kind, item)
            value = "unset" if entry is None else _line_problem(observed, entry, limit)
            if value:
                problems.setdefault(value, []).append((domain, kind))
                line = entry.source if entry else ""
                source = source or line
                high = high or (line if _unbeatable(line.rpartition(":")[0]) else "")
    if high:
        fix = f"rename {high.rpartition(':')[0]}: no file can be read after it"
        return fail(check, expected, _by_value(problems), high, fix)
    if problems:
        return fixable(check, expected, _by_value(problems), source)
    return ok(check, expected, source=source)


def _by_value(problems: dict[str, list[tuple[str, str]]]) -> str:
    """``unset for *, root``: where soft and hard agree, the domain stands alone."""
    texts = []
    for value, places in problems.items():
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
    writes=lambda observed, policy: _LOGIN_FILES,
)
def core(observed: Limits, policy: Policy) -> Result:
    """New logins may write a whole core file: a limit of 0, the usual default, means none."""
    return _logins("core", observed, policy)


@check(
    "limits.memlock",
    settings=("limit_memlock", "limit_nofile", "limit_domains"),
    fixed_by="limits.logins",
    fix=_LOGIN_FIXES,
    writes=lambda observed, policy: _LOGIN_FILES,
)
def memlock(observed: Limits, policy: Policy) -> Result:
    """New logins may lock their memory: RDMA registers its buffers, the usual limit is 8 MiB."""
    return _logins("memlock", observed, policy)


@check(
    "limits.nofile",
    settings=("limit_nofile", "limit_domains"),
    fixed_by="limits.logins",
    fix=_LOGIN_FIXES,
    writes=lambda observed, policy: _LOGIN_FILES,
)
def nofile(observed: Limits, policy: Policy) -> Result:
    """New logins may open enough files: NCCL and data loaders use thousands of descriptors.

    More than fs.nr_open is refused by the kernel (setrlimit(2)); pam_limits then refuses the
    login, so such a value is not written, and is removed from nodeready's own file.
    """
    return _logins("nofile", observed, policy)


@check(
    "limits.exceptions",
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_domains", "limit_services"),
    fix=("raise or remove WHERE", "raise or remove WHERE, or leave it be"),
)
def exceptions(observed: Limits, policy: Policy) -> Result:
    """No line for a single user, group or range gives less than the policy gives to all.

    A line for a user or a range of uids beats a group's, which beats ``*`` (limits.conf(5)). One
    for a few people may be meant, so a person decides. One for all ids that people have
    (``1000:``) takes the limits from every job, and one beyond the kernel's own refuses logins:
    those fail.
    """
    check, limits = "limits.exceptions", possible_limits(observed, policy)
    lines: dict[str, list[str]] = {}
    fails: list[str] = []
    for entry in observed.pam.beyond(policy.limit_domains):
        limit = limits.get(entry.item)
        broken = _breaks(observed, entry)
        if broken or (limit is not None and entry.value < limit):
            text = f"{entry.domain} {entry.kind} {entry.item} {shown(entry.value, entry.item)}"
            lines.setdefault(entry.source, []).append(f"{text} breaks logins" if broken else text)
            fails += [entry.source] if broken or covers_all_people(entry.domain) else []
    for domain, source in observed.pam.exempt:
        if domain not in policy.limit_domains:
            lines.setdefault(source, []).append(f"{domain} is exempt from all limits")
            fails += [source] if covers_all_people(domain) else []
    if not lines:
        return ok(check, "none")
    actual = "; ".join(f"{', '.join(texts)} ({source})" for source, texts in lines.items())
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


def _low(observed: Limits, policy: Policy, limits_of_file: PamLimits) -> str:
    """What the lines of one file give less than the policy, in words."""
    shortfalls = []
    for item, limit in possible_limits(observed, policy).items():
        for domain in policy.limit_domains:
            values = [limits_of_file.effective(domain, kind, item) for kind in KINDS]
            short = [entry for entry in values if entry is None or not enough(entry.value, limit)]
            if short:
                value = next((shown(entry.value, item) for entry in short if entry), "unset")
                shortfalls.append(f"{item} {value} for {domain}")
    return some(shortfalls, ", ")


@check(
    "limits.pam",
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_domains"),
    fix=_PAM_FIXES,
)
def pam(observed: Limits, policy: Policy) -> Result:
    """What comes in by ssh or su gets the limits of limits.conf and limits.d.

    pam_limits gives the limits (pam_limits(8)), so it must be in the service's session stack, and
    its option ``conf=`` makes it read one other file alone. Without UsePAM, sshd gives its own
    limits to every session (sshd_config(5)). Jobs come in by ssh: there it fails; for su it warns.
    """
    check, expected = "limits.pam", "pam_limits for ssh and su, with the system's files"
    if observed.no_pam is not None and "sshd" in observed.stacks:
        source = observed.no_pam if isinstance(observed.no_pam, str) else observed.no_pam.source
        path = source if isinstance(observed.no_pam, str) else observed.no_pam.path
        actual = "sshd does not use PAM: sessions have sshd's own limits"
        return fail(check, expected, actual, source, f"UsePAM yes in {path}, then restart sshd")
    findings: list[Result] = []
    for name, stack in observed.stacks.items():
        judged = fail if name == "sshd" else warn
        if not stack.limits:
            if stack.is_complete:
                actual = f"{name} calls no pam_limits: its sessions keep the limits they come with"
                fix = f"session required pam_limits.so in {stack.path}"
                findings.append(judged(check, expected, actual, stack.path, fix))
            continue
        if not stack.conf:
            continue
        source = stack.limits[-1].source
        fix = f"remove conf= from {source}, or give {stack.conf} these limits"
        limits_of_file = observed.confs.get(stack.conf)
        short = (
            _low(observed, policy, limits_of_file)
            if limits_of_file is not None
            else "which is not looked at"
        )
        if short:
            judged = judged if limits_of_file is not None else warn
            actual = f"{name} reads {stack.conf} alone: {short}"
            findings.append(judged(check, expected, actual, source, fix))
    if not findings:
        return (
            ok(check, expected) if observed.stacks else na(check, "no PAM stack of ssh or su here")
        )
    first = next((finding for finding in findings if finding.status == "fail"), findings[0])
    return replace(first, actual="; ".join(finding.actual for finding in findings))


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
    writes=lambda observed, policy: tuple(
        f"/etc/systemd/system/{name}.service.d/*nodeready.conf" for name in observed.units
    ),
)
def services(observed: Limits, policy: Policy) -> Result:
    """The policy's services have the limits in their unit files.

    PAM limits never reach a service (limits.conf(5) is for logins): what slurmd starts has
    slurmd's limits, which systemd sets (systemd.exec(5)).
    """
    check, limits = "limits.services", possible_limits(observed, policy)
    if not observed.units:
        return na(
            check, f"none of {', '.join(policy.limit_services) or 'the services'} is installed"
        )
    expected = ", ".join(f"{item} {requested(limit, item)}" for item, limit in limits.items())
    low, source, high = [], "", ""
    for service, unit in observed.units.items():
        for item, limit in limits.items():
            unit_limit = unit.limits.get(item, observed.defaults.get(item))
            if unit_limit is not None and all(
                enough(bound, limit) for bound in (unit_limit.soft, unit_limit.hard)
            ):
                continue
            value = "unset"
            if unit_limit is not None:
                value = "/".join(
                    dict.fromkeys(shown(v, item) for v in (unit_limit.soft, unit_limit.hard))
                )
                source = source or unit_limit.source
                path = unit_limit.source.rpartition(":")[0]
                high = high or (path if _unbeatable(path) else "")
            low.append(f"{service} {item} {value}")
    if high:
        fix = f"rename {high}: no drop-in can be read after it"
        return fail(check, expected, ", ".join(low), source, fix)
    if low:
        return fixable(check, expected, ", ".join(low), source)
    return ok(check, expected)


def _low_processes(observed: Limits, limits: dict[str, int]) -> dict[str, str]:
    """Service -> its processes with a lower limit, in words."""
    findings: dict[str, list[str]] = {}
    for process in observed.running:
        short = [
            f"{item} {shown(min(process.limits[item]), item)}"
            for item, limit in limits.items()
            if item in process.limits and min(process.limits[item]) < limit
        ]
        if short:
            findings.setdefault(process.service, []).append(
                f"pid {process.pid}: {', '.join(short)}"
            )
    return {service: "; ".join(texts) for service, texts in findings.items()}


def restarts(observed: Limits, policy: Policy) -> list[str]:
    """The running services with too low limits that the policy lets us restart."""
    if not observed.systemd:
        return []
    low_processes = _low_processes(observed, possible_limits(observed, policy))
    return [
        name
        for name in low_processes
        if name in policy.restart_services and name in observed.units
    ]


@check(
    "limits.running",
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_services", "restart_services"),
    fixed_by="limits.restart",
    fix=("systemctl restart NAMES, when idle",),
    writes=lambda observed, policy: (),
)
def running(observed: Limits, policy: Policy) -> Result:
    """What runs already has the limits too: a new limit reaches a service only by its restart.

    A restart can end jobs, so it waits for a person unless the policy lists the service in
    restart_services.
    """
    check, limits = "limits.running", possible_limits(observed, policy)
    if not observed.running:
        return na(
            check, f"none of {', '.join(policy.limit_services) or 'the services'} is running"
        )
    expected = ", ".join(f"{item} {requested(limit, item)}" for item, limit in limits.items())
    low_processes = _low_processes(observed, limits)
    if not low_processes:
        return ok(check, expected)
    actual = "; ".join(f"restart of {service} ({text})" for service, text in low_processes.items())
    source: str | None = next(
        (
            f"/proc/{process.pid}/limits"
            for process in observed.running
            if process.service in low_processes
        ),
        "",
    )
    if restarts(observed, policy):
        return fixable(check, expected, f"pending: {actual}", source or "")
    names = " ".join(low_processes)
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
