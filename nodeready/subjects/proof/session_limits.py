"""Judge the resource limits of new sessions, for each kind of session."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from nodeready.core.base import Line
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, check, deploy
from nodeready.core.severity import loses_job
from nodeready.core.sysctl import BootSetting
from nodeready.subjects.limits import limit_files
from nodeready.subjects.limits.checks import item_text, possible_limits
from nodeready.subjects.limits.facts import Limits
from nodeready.subjects.limits.limit_files import PamLimits
from nodeready.subjects.proof import facts
from nodeready.subjects.proof.facts import Limit, Logins, Proved, Service, SessionLimits
from nodeready.subjects.proof.session import observation, pam_service


def _kernel_units(*limits: int) -> list[int]:
    return [limit_files.UNLIMITED if limit == -1 else limit for limit in limits]


def _lowest(limit: Limit) -> int:
    return min(_kernel_units(limit.soft, limit.hard))


def _possible(observed: SessionLimits, policy: Policy) -> dict[str, int]:
    """Item -> the policy's limit, without the limits that this node's kernel refuses."""
    ceiling = dict(zip(limit_files.ITEMS, _kernel_units(*observed.ceiling)))
    boot = BootSetting(None)
    node = Limits(PamLimits(), {}, (), ceiling, observed.nr_open, boot, systemd=False)
    return possible_limits(node, policy)


@dataclass(frozen=True)
class LowLimits:
    """The limits of one kind of session that are too low."""

    items: Mapping[str, str]  # item -> its value in words
    cause: str = ""  # in words; "": not known
    source: str = ""  # the line that decides
    fix: str = ""  # a person's act; "": a deploy may repair it


def limit_text(limit: Limit, item: str) -> str:
    values = _kernel_units(limit.soft, limit.hard)
    return "/".join(dict.fromkeys(item_text(value, item) for value in values))


def _limit_texts(session: SessionLimits, items: Iterable[str]) -> dict[str, str]:
    """Item -> the session's limit in words."""
    return {item: limit_text(getattr(session, item), item) for item in items}


def _items_text(values: Mapping[str, str]) -> str:
    return ", ".join(f"{item} {value}" for item, value in values.items())


def _openers_text(openers: Iterable[str]) -> str:
    return " and ".join(facts.SESSION_NAMES.get(opener, "this login") for opener in openers)


def _limits_by_opener(observed: Proved) -> dict[str, SessionLimits]:
    """Key of SESSION_NAMES -> the limits of that session; the first session's come first."""
    assert isinstance(observed.limits, SessionLimits)
    sessions = {observed.limits.opener: observed.limits}
    further = (observed.ssh, observed.shell, observed.login, observed.step)
    for opener, session in zip(("ssh", "shell", "login", "srun"), further):
        if isinstance(session, facts.SessionProof) and session.limits is not None:
            sessions.setdefault(opener, session.limits)
    logins = observed.logins
    if not isinstance(logins, Logins):
        return sessions
    # ssh's sessions have sshd's own limits where sshd does not ask PAM, or PAM sets none.
    service = pam_service(observed, "ssh")
    sets_none = service is not None and service.is_complete and not _pam_limits(service)
    without_pam = len(logins.sshd) == len(limit_files.ITEMS) and (
        logins.use_pam is False or sets_none
    )
    if "ssh" not in sessions and without_pam:
        sessions["ssh"] = _with_limits(observed.limits, logins.sshd, "ssh")
    raises_limits = bool(_pam_limits(pam_service(observed, "slurm")))
    if (
        len(logins.slurmd) == len(limit_files.ITEMS)
        and "srun" not in sessions
        and not raises_limits
    ):
        # A step's hard limits are slurmd's. Only a step shows its soft limits.
        hard = tuple(Limit(limit.hard, limit.hard) for limit in logins.slurmd)
        sessions["slurmd"] = _with_limits(observed.limits, hard, "slurmd")
    return sessions


def _with_limits(first: SessionLimits, limits: tuple[Limit, ...], opener: str) -> SessionLimits:
    core, memlock, nofile = limits
    first = replace(first, before=(), opener=opener, further=())
    return replace(first, core=core, memlock=memlock, nofile=nofile)


def _pam_limits(service: Service | None) -> list[facts.PamLine]:
    return [line for line in service.lines if line.module == "limits"] if service else []


def _conf_option(service: Service | None) -> tuple[str, str]:
    """The file of pam_limits' option conf= (pam_limits(8)) and the option's line.

    "": pam_limits reads limits.conf and limits.d.
    """
    for line in _pam_limits(service):
        other = re.search(r"\bconf=(\S+)", line.words)
        if other and other[1] != "/etc/security/limits.conf":
            return other[1], line.source
    return "", ""


def _conf_fix(file: str, source: str) -> str:
    return f"take conf={file} off {source}, or set these limits in {file}"


def _user_lines(logins: Logins) -> Iterator[tuple[str, str, str, int, str]]:
    """(domain, kind, item, value, line) of the limits for the user's own names; the last counts.

    A user's line beats a group's (limits.conf(5)).
    """
    lines = (Line(line.path, line.number, line.text) for line in logins.lines)
    pam = limit_files.parse_pam_limits(lines)
    domains = {*logins.domains}

    def applies(domain: str) -> bool:
        ids = limit_files.span(domain)
        if ids is None:
            return domain in domains
        pattern = rf"{'@' * domain.startswith('@')}:(\d+)"
        matches = filter(None, (re.fullmatch(pattern, name) for name in domains))
        return any(ids[0] <= int(match[1]) <= ids[1] for match in matches)

    for is_group in (True, False):
        for entry in pam.entries:
            if entry.domain.startswith("@") == is_group and applies(entry.domain):
                yield entry.domain, entry.kind, entry.item, entry.value, entry.source
    for domain, source in pam.exempt:
        if applies(domain):
            yield from (
                (domain, kind, item, -1, source)
                for kind in limit_files.KINDS
                for item in limit_files.ITEMS
            )


#: The settings on which a core depends.
CORE_SETTINGS = ("core_handler", "core_pattern", "limit_core")
_SLURMD_FIX = "nodeready deploy INVENTORY --only limits, then systemctl restart slurmd, when idle"
_SUBMIT_FIX = "PropagateResourceLimitsExcept in slurm.conf, or the limits of who submits"
_USE_PAM_FIX = "UsePAM yes in /etc/ssh/sshd_config, then systemctl reload ssh (RHEL, SLES: sshd)"
_RAISE_FIX = (
    "raise or remove it in limits.conf, limits.d, the start-up files of the user's shell, or the "
    "unit of sshd or slurmd"
)


def low_limits(
    opener: str,
    low: Mapping[str, str],
    session: SessionLimits,
    possible: Mapping[str, int],
    observed: Proved,
) -> LowLimits:
    """The cause of too low limits of one kind of session.

    low:      item -> the session's limit in words
    possible: item -> the lowest sufficient limit
    """
    name = observed.user_name
    if opener in ("srun", "slurmd"):
        slurmd = observed.logins.slurmd if isinstance(observed.logins, Logins) else ()
        slurmd_limits = dict(zip(limit_files.ITEMS, slurmd))
        if opener == "srun" and all(
            _lowest(slurmd_limits[item]) >= possible[item] for item in low if item in slurmd_limits
        ):
            return LowLimits(low, "slurmd itself has more", "", _SUBMIT_FIX)
        return LowLimits(low, "slurmd's own limits, which its jobs inherit", "", _SLURMD_FIX)
    before = dict(zip(limit_files.ITEMS, session.before))
    items = ", ".join(i for i in low if i in before and _lowest(before[i]) >= possible[i])
    if items:
        files, lowering = f"{name}'s profile, or /etc/profile", "the profile"
        if opener in ("ssh", "shell"):
            files = f"{name}'s ~/.bashrc or ~/.ssh/rc, or /etc/bash.bashrc"
            lowering = "the shell's start-up"
        fix = f"remove the ulimit of {items} from {files}"
        return LowLimits(low, f"{lowering} lowers {items}", "", fix)
    # root starts that shell through su, and a login shell is in ssh's session.
    opener = {"shell": "su", "login": "ssh"}.get(opener, opener)
    logins, service = observed.logins, pam_service(observed, opener)
    if not isinstance(logins, Logins):
        return LowLimits(low)
    if opener == "ssh" and logins.use_pam is False:
        cause = "sshd does not ask PAM: UsePAM no"
        return LowLimits(low, cause, "/etc/ssh/sshd_config", _USE_PAM_FIX)
    if service and service.is_complete and not _pam_limits(service):
        fix = f"add `session required pam_limits.so` to {service.path}"
        return LowLimits(low, f"no pam_limits in {service.path}", service.path, fix)
    other, source = _conf_option(service)
    if other:
        cause = f"pam_limits reads {other} by {source}"
        return LowLimits(low, cause, source, _conf_fix(other, source))
    deciding = {
        (kind, item): (value, domain, source)
        for domain, kind, item, value, source in _user_lines(logins)
    }
    for item in low:
        for kind in limit_files.KINDS:
            value, domain, source = deciding.get((kind, item), (limit_files.UNLIMITED, "", ""))
            if value < possible[item]:
                has = "is exempt from all limits" if value == -1 else "has limits of its own"
                words = f"{domain} {has} ({source})"
                return LowLimits(low, words, source, f"raise or remove the line {source}")
    return LowLimits(low)


def _with_fix(opener: str, low: LowLimits, observed: Proved) -> LowLimits:
    """The limits with a fix for a session with lower limits than another, if no cause is known."""
    if low.fix or low.cause or not isinstance(observed.logins, Logins):
        return low
    if opener == "ssh":
        sshd = dict(zip(limit_files.ITEMS, observed.logins.sshd))
        if sshd and all(limit_text(sshd[item], item) == low.items[item] for item in low.items):
            fix = "journalctl -t sshd tells why pam_limits sets none; or restart sshd"
            return replace(low, cause="these are sshd's own", fix=fix)
    files = " and ".join(service.path for service in observed.logins.services[:2] if service.path)
    return replace(low, fix=f"compare {files}" if files else "compare the files of pam.d")


@check("proof.limits", loses_job("deploy", "configure"), proof="limits",
       settings=(*CORE_SETTINGS, "limit_memlock", "limit_nofile", "waivers"), fix=(
    deploy("nodeready deploy INVENTORY --only limits"),
    "remove the ulimit of ITEMS from the user's profile, or /etc/profile",
    "remove the ulimit of ITEMS from the user's ~/.bashrc or ~/.ssh/rc, or /etc/bash.bashrc",
    _conf_fix("FILE", "WHERE"),
    "add `session required pam_limits.so` to FILE",
    _USE_PAM_FIX,
    "raise or remove the line WHERE",
    _SLURMD_FIX,
    _SUBMIT_FIX,
    "compare FILES",
    _RAISE_FIX,
))  # fmt: skip
def limits(observed: Proved, policy: Policy) -> Result:
    """A new session of the job's user has the policy's limits, after PAM and after its profile.

    limit_core, limit_memlock and limit_nofile of the policy, or more; soft and hard. Each kind of
    session is tried: ``su -``, ssh from the node to itself where the user's key opens one, else
    the user's shell as sshd starts it, and slurmd's limits, which its jobs inherit. A login can
    miss the limits of the files: by a pam.d file without pam_limits or with another ``conf=``, a
    ulimit in a profile, an sshd that does not ask PAM. Sessions that differ are a warning where
    all have enough. Limits that no policy names fail below what a job needs: as, data, fsize, cpu,
    stack, nproc, rttime. The subject limits reports a limit that this node's kernel refuses;
    proof.core, unless waived, a core limit that cost a core. Neither is repeated here.
    """
    first = observation(limits, observed, "limits", SessionLimits)
    if isinstance(first, Result):
        return first
    possible = _possible(first, policy)
    waived = any(waiver.check == "proof.core" for waiver in policy.waivers)
    if (
        isinstance(observed.core, facts.ProvedCore)
        and observed.core.is_cut_by_limit
        and not waived
    ):
        possible.pop("core", None)
    if not possible:
        return limits.na("none of the policy's limits can be had here, or proof.core tells")
    expected = _items_text({item: item_text(limit, item) for item, limit in possible.items()})
    sessions = _limits_by_opener(observed)
    findings: dict[str, LowLimits] = {}
    for opener, has in sessions.items():
        low = _limit_texts(
            has, (item for item, limit in possible.items() if _lowest(getattr(has, item)) < limit)
        )
        if low:
            findings[opener] = low_limits(opener, low, has, possible, observed)
    if not findings:
        doubt = next(_doubts(limits, expected, sessions, possible, observed), None)
        return doubt or limits.ok(_with_unproved(expected, observed), expected=expected)
    logins = [opener for opener in sessions if opener not in ("srun", "slurmd")]
    if len(logins) > 1 and len([opener for opener in logins if opener in findings]) == 1:
        findings = {opener: _with_fix(opener, low, observed) for opener, low in findings.items()}
    return _too_low(limits, expected, sessions, findings)


def _too_low(
    check: Check,
    expected: str,
    sessions: Mapping[str, SessionLimits],
    findings: Mapping[str, LowLimits],
) -> Result:
    kinds: list[LowLimits] = []
    for low in findings.values():
        if low not in kinds:
            kinds.append(low)
    # Where all sessions have the same limits for the same cause, the result names no session.
    is_everywhere = len(kinds) == 1 and len(findings) == len(sessions)
    texts = []
    for low in kinds:
        names = _openers_text(opener for opener, other in findings.items() if other == low)
        by = "" if is_everywhere else f" by {names}"
        texts.append(f"{_items_text(low.items)}{by}" + (f": {low.cause}" if low.cause else ""))
    enough = [opener for opener in sessions if opener not in findings and opener in ("su", "ssh")]
    for other in enough[:1]:
        items = dict.fromkeys(item for low in kinds for item in low.items)
        has = _limit_texts(sessions[other], items)
        texts.append(f"{_items_text(has)} by {facts.SESSION_NAMES[other]}")
    actual = "; ".join(texts)
    first = next((low for low in kinds if low.fix), None)
    if first is None:
        return check.fixable(
            actual, "", "nodeready deploy INVENTORY --only limits", expected=expected
        )
    return check.fail(actual, first.source, first.fix, expected=expected)


#: The least of the limits that no policy names, in kernel units; -1: none may be set. as, data:
#: CUDA reserves more addresses than the node has memory; fsize: a checkpoint, and a core; cpu:
#: seconds of all threads together, which a long job has at some time; stack: what glibc gives to
#: a thread by itself; nproc: a rank with its loaders and OpenMP has hundreds of threads; rttime:
#: microseconds without a wait, which a real-time thread that polls has at some time (UCX, DPDK).
_LEAST = {
    "as": 1 << 40, "data": 1 << 40, "fsize": 1 << 40, "cpu": -1, "stack": 2 << 20, "nproc": 1024,
    "rttime": -1,
}  # fmt: skip


def _doubts(
    check: Check,
    expected: str,
    sessions: Mapping[str, SessionLimits],
    possible: Mapping[str, int],
    observed: Proved,
) -> Iterator[Result]:
    # A limit that the policy does not name, and that ends a job.
    low: dict[str, list[str]] = {}
    for opener, has in sessions.items():
        values = dict(zip(facts.OTHER_ITEMS, has.further))
        words = ", ".join(
            f"{item} {value}"
            for item, value in values.items()
            if value != -1 and (_LEAST[item] == -1 or value < _LEAST[item])
        )
        if words:
            low.setdefault(words, []).append(opener)
    if low:
        actual = "; ".join(f"{words} by {_openers_text(names)}" for words, names in low.items())
        yield check.fail(f"too little for a job: {actual}", "", _RAISE_FIX, expected=expected)
    # Sessions with different limits; one that the policy does not ask for may differ.
    logins = {opener: has for opener, has in sessions.items() if opener not in ("srun", "slurmd")}
    differing = [
        item
        for item, limit in possible.items()
        if limit and len({limit_text(getattr(has, item), item) for has in logins.values()}) > 1
    ]
    if differing:
        actual = "; ".join(
            f"{_items_text(_limit_texts(has, differing))} by {_openers_text([opener])}"
            for opener, has in logins.items()
        )
        fix = "compare /etc/pam.d/sshd and /etc/pam.d/su, and what the user's shells run"
        yield check.warn(actual, "", fix, expected=expected)
    # ssh's sessions have other limits, and no key of the user's opens one.
    other, source = _conf_option(pam_service(observed, "ssh"))
    if other and "ssh" not in sessions and other != _conf_option(pam_service(observed, "su"))[0]:
        actual = f"not seen by ssh, where pam_limits reads {other}"
        yield check.warn(actual, source, _conf_fix(other, source), expected=expected)


def _with_unproved(expected: str, observed: Proved) -> str:
    texts = [expected]
    for opener, session in (("ssh", observed.ssh), ("srun", observed.step)):
        if isinstance(session, facts.SessionProof) and session.error:
            # Without the names of user and host, nodes share one result.
            texts.append(f"not proved by {opener}: {re.sub(r'^[^ ]+@[^ ]+: ', '', session.error)}")
    return "; ".join(texts)
