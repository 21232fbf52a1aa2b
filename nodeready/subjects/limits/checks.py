"""Judge whether jobs get the limits: at login, from services, and in running processes."""

from __future__ import annotations

from dataclasses import replace

from nodeready.core.own_files import beatable
from nodeready.core.policy import Policy
from nodeready.core.result import Check, FactKinds, Result, Subject, check, join_names
from nodeready.core.severity import Cost, hides_cause, loses_job
from nodeready.subjects.limits import limit_files
from nodeready.subjects.limits.facts import NR_OPEN, PROBE, Limits
from nodeready.subjects.limits.limit_files import LimitEntry, PamLimits

_LOGIN_FIXES = (
    "rename HIGH: no file can be read after it",
    "remove the line WHERE",
    "sysctl fs.nr_open=`limit_nofile` here, or a lower limit_ITEM in the policy",
)


def item_text(value: int, item: str) -> str:
    """A limit in the unit of limits.conf: KiB for core and memlock, or ``unlimited``."""
    return "unlimited" if value == limit_files.UNLIMITED else str(value // limit_files.ITEMS[item])


def requested(limit: int, item: str) -> str:
    """The policy's limit in words: a minimum, but exactly 0 for 0."""
    if limit == limit_files.UNLIMITED:
        return "unlimited"
    return f"at least {item_text(limit, item)}" if limit else "exactly 0"


def _is_enough(value: int, limit: int) -> bool:
    return value >= limit if limit else value == 0


def _policy_limit(policy: Policy, item: str) -> int:
    text, unlimited = str(getattr(policy, f"limit_{item}")), limit_files.UNLIMITED
    return (
        unlimited if text == "unlimited" else min(int(text) * limit_files.ITEMS[item], unlimited)
    )


def highest_possible(observed: Limits, item: str) -> int:
    """The highest limit that this node's kernel accepts, now and at the next boot."""
    limits = [observed.ceiling.get(item, limit_files.UNLIMITED)]
    if item == "nofile":
        boot = observed.nr_open_boot.winner
        limits += [observed.nr_open] if observed.nr_open is not None else []
        limits += [int(boot.value)] if boot is not None and boot.value.isdigit() else []
    return min(limits)


def refused(observed: Limits, policy: Policy, item: str) -> str:
    """Why this node's kernel refuses the policy's limit, or "".

    pam_limits fails on a limit that it cannot set, and then every login fails, also root's.
    """
    limit = _policy_limit(policy, item)
    if limit > observed.ceiling.get(item, limit_files.UNLIMITED):
        maximum = item_text(observed.ceiling[item], item)
        return f"{maximum} is the most without CAP_SYS_RESOURCE, which this node's root lacks"
    if item != "nofile":
        return ""
    if observed.nr_open is not None and limit > observed.nr_open:
        return f"{NR_OPEN} is {observed.nr_open}"
    boot = observed.nr_open_boot.winner
    if boot is not None and boot.value.isdigit() and limit > int(boot.value):
        return f"{NR_OPEN} is {boot.value} from the next boot on ({boot.source})"
    return ""


def possible_limits(observed: Limits, policy: Policy) -> dict[str, int]:
    """Item -> the policy's limit in kernel units, without the limits that this kernel refuses."""
    return {
        item: _policy_limit(policy, item)
        for item in limit_files.ITEMS
        if not refused(observed, policy, item)
    }


def _cannot_be_overridden(path: str) -> bool:
    directory, _, name = path.rpartition("/")
    return directory.endswith(".d") and not beatable(name)


def _kernel_refuses(
    check: Check, expected: str, reason: str, observed: Limits, policy: Policy
) -> Result:
    """The result for a limit that the node's kernel refuses: its line breaks every login."""
    item = check.id.partition(".")[2]
    for entry in observed.pam.entries:
        is_ours = "/zz" in entry.source and "nodeready" in entry.source
        if entry.item == item and is_ours and entry.value > highest_possible(observed, item):
            actual = f"{item_text(entry.value, item)} breaks logins: {reason}"
            return check.fixable(actual, entry.source, expected="no limit that this node refuses")
    raise_first = f"sysctl {NR_OPEN}={policy.limit_nofile} here, or " if NR_OPEN in reason else ""
    fix = f"{raise_first}a lower limit_{item} in the policy"
    return check.fail(f"not set: {reason}", "", fix, expected=expected)


def _breaks_logins(observed: Limits, entry: LimitEntry) -> bool:
    """Whether the kernel refuses this limit, so that pam_limits refuses the login.

    For "unlimited" files, pam_limits sets fs.nr_open.
    """
    highest = highest_possible(observed, entry.item)
    return entry.value != limit_files.UNLIMITED and entry.value > highest


def _line_problem(observed: Limits, entry: LimitEntry, limit: int) -> str:
    if _breaks_logins(observed, entry):
        highest = item_text(highest_possible(observed, entry.item), entry.item)
        return f"{item_text(entry.value, entry.item)} (breaks logins: the most is {highest})"
    return "" if _is_enough(entry.value, limit) else item_text(entry.value, entry.item)


def _login_check(item: str, cost: Cost, meaning: str) -> Check:
    @check(f"limits.{item}", cost,
           settings=tuple(dict.fromkeys((f"limit_{item}", "limit_nofile", "limit_domains"))),
           fixed_by="limits.logins",
           writes=lambda observed, policy: ("/etc/security/limits.d/*nodeready.conf",),
           meaning=meaning, fix=_LOGIN_FIXES)  # fmt: skip
    def login(observed: Limits, policy: Policy) -> Result:
        limit = _policy_limit(policy, item)
        expected = f"{requested(limit, item)} for {', '.join(policy.limit_domains)}"
        if reason := refused(observed, policy, item):
            return _kernel_refuses(login, expected, reason, observed, policy)
        for domain in policy.limit_domains:
            for written, line in observed.pam.exempt:
                if limit_files.applies_to(written, domain):
                    actual = f"{written} is exempt from all limits"
                    return login.fail(actual, line, f"remove the line {line}", expected=expected)
        # Value -> domain -> the kinds of limits with that value.
        problems: dict[str, dict[str, list[str]]] = {}
        source, unbeatable = "", ""
        for domain in policy.limit_domains:
            for kind in limit_files.KINDS:
                entry = observed.pam.effective(domain, kind, item)
                if value := "unset" if entry is None else _line_problem(observed, entry, limit):
                    problems.setdefault(value, {}).setdefault(domain, []).append(kind)
                    line = entry.source if entry else ""
                    source = source or line
                    is_last = _cannot_be_overridden(line.rpartition(":")[0])
                    unbeatable = unbeatable or (line if is_last else "")
        texts = []
        for value, kinds in problems.items():
            # One entry for a domain whose soft and hard limits are equal.
            names = [domain if len(k) > 1 else f"{domain} {k[0]}" for domain, k in kinds.items()]
            texts.append(f"{value} for {', '.join(names)}")
        actual = "; ".join(texts)
        if unbeatable:
            fix = f"rename {unbeatable.rpartition(':')[0]}: no file can be read after it"
            return login.fail(actual, unbeatable, fix, expected=expected)
        if problems:
            return login.fixable(actual, source, expected=expected)
        return login.ok(source=source, expected=expected)

    return login


core = _login_check(
    "core", hides_cause("deploy", "configure"),
    "New logins may write a complete core file: 0, the usual default, allows no core file.",
)  # fmt: skip
memlock = _login_check(
    "memlock", loses_job("deploy", "configure"),
    "New logins may lock their memory: RDMA registers its buffers; the usual limit is 8 MiB.",
)  # fmt: skip
nofile = _login_check(
    "nofile", loses_job("deploy", "configure"),
    """New logins may open enough files: NCCL and data loaders use thousands of descriptors.

    The kernel refuses more than fs.nr_open (setrlimit(2)), and pam_limits then refuses the login.
    So a deploy does not write such a value, and removes it from nodeready's file.
    """,
)  # fmt: skip


@check("limits.exceptions", loses_job("configure"),
       settings=("limit_core", "limit_memlock", "limit_nofile", "limit_domains", "limit_services"),
       expects="none",
       fix=("raise or remove WHERE", "raise or remove WHERE, or leave it be"))  # fmt: skip
def exceptions(observed: Limits, policy: Policy) -> Result:
    """No line for a single user, group or range gives less than the policy gives to all.

    A line for a user or a range of uids beats a group's, and a group's beats ``*``
    (limits.conf(5)). A line for a few people may be intended: a warning. A line for the ids of all
    people (``1000:``) takes the limits from every job, and a line above the kernel's maximum
    breaks logins: a failure.
    """
    limits = possible_limits(observed, policy)
    lines: dict[str, list[str]] = {}
    fails: list[str] = []
    for entry in observed.pam.beyond(policy.limit_domains):
        limit = limits.get(entry.item)
        broken = _breaks_logins(observed, entry)
        if broken or (limit is not None and entry.value < limit):
            text = f"{entry.domain} {entry.kind} {entry.item} {item_text(entry.value, entry.item)}"
            lines.setdefault(entry.source, []).append(f"{text} breaks logins" if broken else text)
            if broken or limit_files.covers_all_people(entry.domain):
                fails.append(entry.source)
    for domain, source in observed.pam.exempt:
        if domain not in policy.limit_domains:
            lines.setdefault(source, []).append(f"{domain} is exempt from all limits")
            fails += [source] if limit_files.covers_all_people(domain) else []
    if not lines:
        return exceptions.ok()
    actual = "; ".join(f"{', '.join(texts)} ({source})" for source, texts in lines.items())
    if fails:
        names = ", ".join(dict.fromkeys(fails))
        return exceptions.fail(actual, fails[0], f"raise or remove {names}")
    names = join_names(lines)
    fix = f"raise or remove {names}, or leave {'it' if len(lines) == 1 else 'them'} be"
    return exceptions.warn(actual, next(iter(lines)), fix)


def _shortfall(observed: Limits, policy: Policy, limits_of_file: PamLimits) -> str:
    shortfalls = []
    for item, limit in possible_limits(observed, policy).items():
        for domain in policy.limit_domains:
            values = [limits_of_file.effective(domain, kind, item) for kind in limit_files.KINDS]
            if low := [v for v in values if v is None or not _is_enough(v.value, limit)]:
                value = next((item_text(v.value, item) for v in low if v), "unset")
                shortfalls.append(f"{item} {value} for {domain}")
    return join_names(shortfalls)


@check("limits.pam", loses_job("configure", "restart_service"),
       settings=("limit_core", "limit_memlock", "limit_nofile", "limit_domains"),
       expects="pam_limits for ssh and su, with the system's files", fix=(
    "UsePAM yes in FILE, then restart sshd",
    "session required pam_limits.so in FILE",
    "remove conf= from WHERE, or give CONF these limits",
))  # fmt: skip
def pam(observed: Limits, policy: Policy) -> Result:
    """Sessions of ssh and su get the limits of limits.conf and limits.d.

    pam_limits sets the limits (pam_limits(8)), so it must be in the service's session stack. With
    its option ``conf=`` it reads only one other file. Without UsePAM, every session has sshd's own
    limits (sshd_config(5)). A failure for ssh, by which jobs log in; a warning for su.
    """
    if observed.no_pam is not None and "sshd" in observed.stacks:
        source = observed.no_pam if isinstance(observed.no_pam, str) else observed.no_pam.source
        path = source if isinstance(observed.no_pam, str) else observed.no_pam.path
        actual = "sshd does not use PAM: sessions have sshd's own limits"
        return pam.fail(actual, source, f"UsePAM yes in {path}, then restart sshd")
    findings: list[Result] = []
    for name, stack in observed.stacks.items():
        judged = pam.fail if name == "sshd" else pam.warn
        if not stack.limits:
            if stack.is_complete:
                actual = f"{name} calls no pam_limits: its sessions keep the limits they come with"
                fix = f"session required pam_limits.so in {stack.path}"
                findings.append(judged(actual, stack.path, fix))
            continue
        if not stack.conf:
            continue
        source = stack.limits[-1].source
        fix = f"remove conf= from {source}, or give {stack.conf} these limits"
        if (limits_of_file := observed.confs.get(stack.conf)) is None:
            judged, shortfall = pam.warn, "which is not read"
        else:
            shortfall = _shortfall(observed, policy, limits_of_file)
        if shortfall:
            actual = f"{name} reads {stack.conf} alone: {shortfall}"
            findings.append(judged(actual, source, fix))
    if not observed.stacks:
        return pam.na("no PAM stack of ssh or su here")
    if not findings:
        return pam.ok()
    first = next((finding for finding in findings if finding.status == "fail"), findings[0])
    return replace(first, actual="; ".join(finding.actual for finding in findings))


def _services_text(policy: Policy, limits: dict[str, int]) -> tuple[str, str]:
    expected = ", ".join(f"{item} {requested(limit, item)}" for item, limit in limits.items())
    return ", ".join(policy.limit_services) or "the services", expected


def unit_value(limit: int, item: str) -> str:
    """A limit in a unit file: ``infinity``, KiB with a K, or a plain number."""
    if limit == limit_files.UNLIMITED:
        return "infinity"
    return f"{limit // 1024}K" if limit_files.ITEMS[item] == 1024 else str(limit)


@check(
    "limits.services",
    loses_job("deploy", "configure"),
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_services"),
    fixed_by="limits.services",
    fix="rename HIGH: no drop-in can be read after it",
    writes=lambda observed, policy: tuple(
        f"/etc/systemd/system/{name}.service.d/*nodeready.conf" for name in observed.units
    ),
)
def services(observed: Limits, policy: Policy) -> Result:
    """The policy's services have the limits in their unit files.

    PAM limits never apply to a service (limits.conf(5) is for logins). The processes of slurmd
    have slurmd's limits, which systemd sets (systemd.exec(5)).
    """
    limits = possible_limits(observed, policy)
    names, expected = _services_text(policy, limits)
    if not observed.units:
        return services.na(f"none of {names} is installed")
    low, source, unbeatable = [], "", ""
    for service, unit in observed.units.items():
        for item, limit in limits.items():
            if (unit_limit := unit.limits.get(item, observed.defaults.get(item))) is None:
                low.append(f"{service} {item} unset")
                continue
            bounds = unit_limit.soft, unit_limit.hard
            if all(_is_enough(bound, limit) for bound in bounds):
                continue
            value = "/".join(dict.fromkeys(item_text(bound, item) for bound in bounds))
            low.append(f"{service} {item} {value}")
            source = source or unit_limit.source
            path = unit_limit.source.rpartition(":")[0]
            unbeatable = unbeatable or (path if _cannot_be_overridden(path) else "")
    if unbeatable:
        fix = f"rename {unbeatable}: no drop-in can be read after it"
        return services.fail(", ".join(low), source, fix, expected=expected)
    if low:
        return services.fixable(", ".join(low), source, expected=expected)
    return services.ok(expected=expected)


def _low_processes(observed: Limits, limits: dict[str, int]) -> dict[str, str]:
    """Service -> its processes with a lower limit, in words."""
    findings: dict[str, list[str]] = {}
    for process in observed.running:
        short = [
            f"{item} {item_text(min(process.limits[item]), item)}"
            for item, limit in limits.items()
            if item in process.limits and min(process.limits[item]) < limit
        ]
        if short:
            text = f"pid {process.pid}: {', '.join(short)}"
            findings.setdefault(process.service, []).append(text)
    return {service: "; ".join(texts) for service, texts in findings.items()}


def restarts(observed: Limits, policy: Policy) -> list[str]:
    """The running services with too low limits that the policy allows to restart."""
    if not observed.systemd:
        return []
    low_processes = _low_processes(observed, possible_limits(observed, policy))
    restartable = observed.units.keys() & policy.restart_services
    return [name for name in low_processes if name in restartable]


@check(
    "limits.running",
    loses_job("deploy", "restart_service"),
    settings=("limit_core", "limit_memlock", "limit_nofile", "limit_services", "restart_services"),
    fixed_by="limits.restart",
    fix="systemctl restart NAMES, when idle",
    writes=lambda observed, policy: (),
)
def running(observed: Limits, policy: Policy) -> Result:
    """Running services have the limits, too: only a restart gives a service new limits.

    A restart can end jobs, so a person decides, unless the policy lists the service in
    restart_services.
    """
    limits = possible_limits(observed, policy)
    names, expected = _services_text(policy, limits)
    if not observed.running:
        return running.na(f"none of {names} is running")
    if not (low_processes := _low_processes(observed, limits)):
        return running.ok(expected=expected)
    actual = "; ".join(f"restart of {service} ({text})" for service, text in low_processes.items())
    low_pid = next(p.pid for p in observed.running if p.service in low_processes)
    source = f"/proc/{low_pid}/limits"
    if restarts(observed, policy):
        return running.fixable(f"pending: {actual}", source, expected=expected)
    fix = f"systemctl restart {' '.join(low_processes)}, when idle"
    return running.warn(f"pending: {actual}", source, fix, expected=expected)


_ELEMENTS = {
    "units": "", "units.limits": "", "running": "service", "running.limits": "", "ceiling": "",
    "defaults": "", "stacks": "", "confs": "",
}  # fmt: skip
SUBJECT = Subject(
    "limits", __doc__, checks=(core, memlock, nofile, exceptions, pam, services, running),
    probe=PROBE,
    files=(
        "/etc/security/limits.d/*nodeready*.conf",
        "/etc/systemd/system/*.service.d/*nodeready*.conf",
    ),
    kinds=FactKinds(
        volatile="where number pid last last_name",
        elements=_ELEMENTS,
    ),
)  # fmt: skip
