"""Judge the session in which the proofs ran: whose it is, and what a job can use in it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nodeready.core.base import Line, Unknown
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, check, deploy, join_first
from nodeready.core.severity import Cost, loses_job
from nodeready.core.shell import quote
from nodeready.core.sysctl import BootSetting
from nodeready.subjects.limits import limit_files
from nodeready.subjects.limits.checks import item_text, possible_limits
from nodeready.subjects.limits.facts import Limits
from nodeready.subjects.limits.limit_files import PamLimits
from nodeready.subjects.proof import facts
from nodeready.subjects.proof.facts import Proved

#: The command for a fix by another subject's deploy; the subject's name follows it.
DEPLOY_ONLY = "nodeready deploy INVENTORY --only"


def without_proof(check: Check, observed: Proved, field: str) -> Result | None:
    """The result of a check without the proof in this field of `Proved`; None: it is there."""
    if isinstance(observed.user, facts.User) and observed.user.error:
        return check.na("no session: see proof.user")
    value = getattr(observed, field)
    if isinstance(value, Unknown):
        return unknown_result(check, value)
    if isinstance(value, (facts.Diagnostic, facts.Bandwidth, facts.RdmaBandwidth)):
        if value.absent:
            return check.na(value.absent)
        return check.unknown(value.error) if value.error else None
    return check.na("not proved") if value is None else None


def unknown_result(check: Check, missing: Unknown) -> Result:
    """The result of a check whose observation is unknown: the reason, and its evidence."""
    evidence = f": {missing.evidence}" if missing.evidence else ""
    return check.unknown(f"{missing.reason}{evidence}")


def other_sessions(observed: Proved) -> Iterator[tuple[str, facts.SessionProof]]:
    """The user's further sessions that run a shell, each with its key of SESSION_NAMES."""
    for opener in ("ssh", "shell", "login"):
        session = getattr(observed, opener)
        if isinstance(session, facts.SessionProof):
            yield opener, session


def proof_check(
    id: str,
    cost: Cost,
    field: str,
    *,
    in_sessions: Callable[[Any], bool] | None = None,
    **declared: Any,
) -> Callable[[Callable[[Check, Any, Proved, Policy], Result]], Check]:
    """Make a Check, as `check` does, of a function that judges the proof in this field.

    The function gets the check, the proof, all observations of the node, and the policy.

    in_sessions: where the first session is ok, a further one fails the check if its proof does;
                 tells whether such a proof counts
    """

    def declare(judge: Callable[[Check, Any, Proved, Policy], Result]) -> Check:
        def judge_session(observed: Proved, policy: Policy) -> Result:
            missing = without_proof(new_check, observed, field)
            return missing or judge(new_check, getattr(observed, field), observed, policy)

        def judged(observed: Proved, policy: Policy) -> Result:
            result = judge_session(observed, policy)
            further = other_sessions(observed) if in_sessions and result.status == "ok" else ()
            for opener, session in further:
                proved = getattr(session, field)
                if in_sessions and proved is not None and in_sessions(proved):
                    other = judge_session(replace(observed, **{field: proved}), policy)
                    if other.status == "fail":
                        name = facts.SESSION_NAMES[opener]
                        return replace(other, actual=f"by {name}: {other.actual}")
            return result

        settings = {"proof": field, "meaning": judge.__doc__ or "", **declared}
        new_check = check(id, cost, **settings)(judged)
        return new_check

    return declare


def pam_service(observed: Proved, name: str) -> facts.Service | None:
    """The PAM stack of this kind of session; None: not seen."""
    services = observed.logins.services if isinstance(observed.logins, facts.Logins) else ()
    return next((service for service in services if service.name == name and service.path), None)


# A message of su or PAM about a refused session -> the fix: shadow's and util-linux's su,
# pam_unix(8), pam_limits(8), pam(3).
_REFUSALS = (
    (r"account (has )?expired|account expiration", "chage -E -1 {name}"),
    (r"required to change your password|password (has )?expired|token is no longer valid|"
     r"Authentication token expired", "give {name} a new password: passwd {name}, or chage -d"),
    (r"failed to execute|[Cc]annot execute", "install that shell, or give {name} another: chsh"),
    (r"[Tt]oo many logins", "raise maxlogins for {name} in limits.conf, or end old sessions"),
    (r"Module is unknown", "install the module that {path} names, or remove its line"),
)  # fmt: skip
_DENYING = ("access", "time", "listfile", "succeed_if")


def _nologin(logins: facts.Logins) -> tuple[str, str]:
    """The file that closes logins in words, and what opens them again (pam_nologin(8))."""
    notice = f" ({logins.notice})" if logins.notice else ""
    if logins.shutdown:
        return f"{logins.nologin} is there{notice}: a shutdown is pending", "shutdown -c, or wait"
    return f"{logins.nologin} is there{notice}", f"remove {logins.nologin}"


def _refusal(error: str, name: str, observed: Proved) -> tuple[str, str, str]:
    """Why ``su -`` opened no session: the words, the file that decides, the fix."""
    fix = f"`su - {name} -c id`, as root on the node, has to work"
    service = pam_service(observed, "su")
    path = service.path if service else "/etc/pam.d/su"
    for pattern, remedy in _REFUSALS:
        if re.search(pattern, error):
            return error, path if "{path}" in remedy else "", remedy.format(name=name, path=path)
    logins, lines = observed.logins, service.lines if service else ()
    if isinstance(logins, facts.Logins) and logins.nologin:
        asks_nologin = any(line.module == "nologin" for line in lines)
        if asks_nologin or (logins.notice and logins.notice in error):
            words, fix = _nologin(logins)
            return f"{error}: {words}", logins.nologin, fix
    denying = [line for line in lines if line.module in _DENYING]
    if denying and re.search("denied|[Ff]ailure", error):
        line = denying[0]
        words = f"{error}: pam_{line.module} may refuse {name} ({line.source})"
        default_file = "/etc/security/access.conf" if line.module == "access" else line.source
        named_file = re.search(r"\b(?:accessfile|file)=(\S+)", line.words)
        fix = f"let {name} in: {named_file[1] if named_file else default_file}"
        return words, line.source, fix
    return error, "", fix


@check("proof.user", loses_job("configure"), settings=("job_user",), fix=(
    "create NAME on the node, or name another user",
    "log in as root, or name no user",
    "`su - NAME -c id`, as root on the node, has to work",
    "chage -E -1 NAME",
    "give NAME a new password: passwd NAME, or chage -d",
    "install that shell, or give NAME another: chsh",
    "let NAME in: /etc/security/access.conf",
    "remove /run/nologin",
    "shutdown -c, or wait",
    "look at NAME's ~/.bashrc, or at the start-up files of that shell",
    "--user NAME proves it for the job's user",
))  # fmt: skip
def user(observed: Proved, policy: Policy) -> Result:
    """The proofs ran in a new session of the job's user, opened as a login is.

    PAM opens it, and the user's own shell reads its start-up files: one that ends the shell, or
    breaks what the shell starts, ends every job. The shell is started as a login shell, and as
    sshd starts it for a command.

    What root can do says nothing about what a job's user can: Yama and file permissions stop
    users only. Where /etc/nologin or /run/nologin closes ssh to all users but root, no job can
    start, although su opens a session.
    """
    account, logins = observed.user, observed.logins
    check = user.expecting("a session of " + (policy.job_user or "the job's user"))
    if not isinstance(account, facts.User):
        return unknown_result(check, account)
    if account.uid == -1:
        fix = f"create {account.name} on the node, or name another user"
        return check.fail(account.error, "", fix)
    if account.error.startswith("logged in as"):
        return check.fail(account.error, "", "log in as root, or name no user")
    if account.error:
        return check.fail(*_refusal(account.error, account.name, observed))
    if account.uid == 0 and not account.named:
        fix = "--user NAME proves it for the job's user"
        return check.warn("proved as root, whom Yama does not stop", "", fix)
    if account.uid and isinstance(logins, facts.Logins) and _closed(observed, logins):
        words, fix = _nologin(logins)
        return check.fail(f"ssh is closed to {account.name}: {words}", logins.nologin, fix)
    for opener, session in other_sessions(observed):
        if session.ended:
            reason = f"{account.name}'s shell ends at its start: {session.error}"
            fix = f"look at {account.name}'s ~/.bashrc, or at the start-up files of that shell"
            return check.fail(f"no session by {facts.SESSION_NAMES[opener]}: {reason}", "", fix)
    return check.ok(expected=f"a session of {account.name}")


def _closed(observed: Proved, logins: facts.Logins) -> bool:
    """Whether a file closes sshd to all users but root, and no login of the user's disproves it.

    sshd heeds the file itself where it does not ask PAM (sshd(8), FILES).
    """
    failed = isinstance(observed.ssh, facts.SessionProof) and bool(observed.ssh.error)
    closed = isinstance(observed.ssh, facts.SessionProof) and observed.ssh.closed
    if not logins.nologin or not (failed or observed.ssh is None) or not (logins.sshd or closed):
        return False
    if isinstance(observed.limits, facts.SessionLimits) and observed.limits.opener == "ssh":
        return False
    service = pam_service(observed, "ssh")
    if service is None or not service.is_complete or logins.use_pam is False:
        return True
    return any(line.module == "nologin" for line in service.lines)


def _unusable(place: facts.JobDirectory, home: str) -> str:
    """What is wrong with a directory that only costs caches and compiled code; "": nothing."""
    if place.error:
        return f"{place.path}: {place.error}" if place.path == home else ""
    if place.exec_error and place.path != facts.SHM:
        return f"no code can be run from {place.path} ({place.exec_error}: noexec?)"
    return ""


_SHM_FIX = "free or enlarge /dev/shm: `df -h /dev/shm`, host.shm"
# Shared memory uses memory, even in a file system with a larger size.
_MEMORY_FIX = "see what takes the memory: `free -m`, and memory.max of the user's slice"
_CACHE_FIX = (
    "TMPDIR, XDG_CACHE_HOME, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR elsewhere, or "
    "remount it with exec, for writing or with room"
)


@proof_check("proof.resources", loses_job("clean_up", "configure"), "resources",
             settings=("shm_min_mb",), expects="usable for the job's user", fix=(
    "chmod 1777 PATH, or see what is full or read-only there",
    _SHM_FIX,
    _MEMORY_FIX,
    "add NAME to the file's group, or open it with a rule of udev (NVIDIA: "
    "NVreg_DeviceFileMode=0666)",
    _CACHE_FIX,
))  # fmt: skip
def resources(check: Check, usable: facts.Resources, observed: Proved, policy: Policy) -> Result:
    """The job's user can use what a job uses: /tmp, shared memory, the home, the device files.

    1 MiB is written and mapped in each directory: a failed write breaks jobs (NCCL and data
    loaders share memory, sockets lie in /tmp). shm_min_mb is not allocated, which could cost a
    running job its memory: the check reads the free space of /dev/shm, and the free memory and
    swap, within memory.max of the session's cgroups (v2). Where no code can be run, or the home
    takes no file, PyTorch and Triton need another place for compiled code: a warning. A device
    file of a GPU or of RDMA fails where its mode excludes this user. Not judged: quotas of a
    tmpfs, the cgroup that Slurm gives to a job, devices that a cgroup withholds from a session.
    """
    if closed := [f"{device.path} ({device.mode})" for device in usable.devices]:
        name = observed.user_name
        fix = f"add {name} to the file's group, or open it with a rule of udev (NVIDIA: "
        actual = f"{name} cannot open {join_first(closed)}"
        return check.fail(actual, "/dev", f"{fix}NVreg_DeviceFileMode=0666)")
    if broken := [place for place in usable.places if place.error and place.path != usable.home]:
        actual = "; ".join(f"{place.path}: {place.error}" for place in broken)
        fix = f"chmod 1777 {quote(broken[0].path)}, or see what is full or read-only there"
        return check.fail(actual, broken[0].path, fix)
    free_mb = min(place.free_bytes >> 20 for place in usable.places if place.path == facts.SHM)
    if free_mb < policy.shm_min_mb:
        actual = f"{free_mb} MiB of shared memory are free, {policy.shm_min_mb} wanted"
        return check.warn(actual, facts.SHM, _SHM_FIX)
    if usable.memory_bytes is not None and usable.memory_bytes >> 20 < policy.shm_min_mb:
        free_mb = usable.memory_bytes >> 20
        actual = f"shared memory can grow by {free_mb} MiB of memory, {policy.shm_min_mb} wanted"
        return check.warn(actual, facts.SHM, _MEMORY_FIX)
    costly = [words for place in usable.places if (words := _unusable(place, usable.home))]
    return check.warn("; ".join(costly), "", _CACHE_FIX) if costly else check.ok()


# --- The resource limits of new sessions, for each kind of session.


def _kernel_units(*limits: int) -> list[int]:
    return [limit_files.UNLIMITED if limit == -1 else limit for limit in limits]


def _lowest(limit: facts.Limit) -> int:
    return min(_kernel_units(limit.soft, limit.hard))


def _by_item(limits: Iterable[facts.Limit]) -> dict[str, facts.Limit]:
    return dict(zip(limit_files.ITEMS, limits))


class LowLimits(NamedTuple):
    """The limits of one kind of session that are too low."""

    items: Mapping[str, str]  # item -> its value in words
    cause: str = ""  # in words; "": not known
    source: str = ""  # the line that decides
    fix: str = ""  # a person's act; "": a deploy may repair it


def limit_text(limit: facts.Limit, item: str) -> str:
    values = _kernel_units(limit.soft, limit.hard)
    return "/".join(dict.fromkeys(item_text(value, item) for value in values))


def _limit_texts(session: facts.SessionLimits, items: Iterable[str]) -> dict[str, str]:
    """Item -> the session's limit in words."""
    return {item: limit_text(getattr(session, item), item) for item in items}


def _items_text(values: Mapping[str, str]) -> str:
    return ", ".join(f"{item} {value}" for item, value in values.items())


def _openers_text(openers: Iterable[str]) -> str:
    return " and ".join(facts.SESSION_NAMES.get(opener, "this login") for opener in openers)


def _limits_by_opener(
    first: facts.SessionLimits, observed: Proved
) -> dict[str, facts.SessionLimits]:
    """Key of SESSION_NAMES -> the limits of that session; the first session's come first."""
    sessions = {first.opener: first}
    further = [*other_sessions(observed), ("srun", observed.step)]
    for opener, session in further:
        if isinstance(session, facts.SessionProof) and session.limits is not None:
            sessions.setdefault(opener, session.limits)
    logins = observed.logins
    if not isinstance(logins, facts.Logins):
        return sessions

    def add(opener: str, limits: Iterable[facts.Limit]) -> None:
        by_item = _by_item(limits)
        if len(by_item) == len(limit_files.ITEMS):
            values: dict[str, Any] = {**by_item, "before": (), "opener": opener, "further": ()}
            sessions.setdefault(opener, replace(first, **values))

    # ssh's sessions have sshd's own limits where sshd does not ask PAM, or PAM sets none.
    service = pam_service(observed, "ssh")
    sets_none = service is not None and service.is_complete and not _pam_limits(service)
    if logins.use_pam is False or sets_none:
        add("ssh", logins.sshd)
    if "srun" not in sessions and not _pam_limits(pam_service(observed, "slurm")):
        # A step's hard limits are slurmd's. Only a step shows its soft limits.
        add("slurmd", [facts.Limit(limit.hard, limit.hard) for limit in logins.slurmd])
    return sessions


def _pam_limits(service: facts.Service | None) -> list[facts.PamLine]:
    return [line for line in service.lines if line.module == "limits"] if service else []


def _conf_option(service: facts.Service | None) -> tuple[str, str]:
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


def _user_limits(logins: facts.Logins) -> dict[tuple[str, str], tuple[int, str, str]]:
    """(kind, item) -> the value, the domain and the line of the limit for the user's own names.

    The last one counts, and a user's line beats a group's (limits.conf(5)).
    """
    lines = (Line(line.path, line.number, line.text) for line in logins.lines)
    pam = limit_files.parse_pam_limits(lines)
    domains = {*logins.domains}

    def applies(domain: str) -> bool:
        if (ids := limit_files.span(domain)) is None:
            return domain in domains
        pattern = rf"{'@' * domain.startswith('@')}:(\d+)"
        matches = filter(None, (re.fullmatch(pattern, name) for name in domains))
        return any(ids[0] <= int(match[1]) <= ids[1] for match in matches)

    entries = sorted(pam.entries, key=lambda entry: not entry.domain.startswith("@"))
    limits = {
        (entry.kind, entry.item): (entry.value, entry.domain, entry.source)
        for entry in entries
        if applies(entry.domain)
    }
    for domain, source in pam.exempt:
        if applies(domain):
            every = itertools.product(limit_files.KINDS, limit_files.ITEMS)
            limits |= dict.fromkeys(every, (-1, domain, source))
    return limits


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
    session: facts.SessionLimits,
    possible: Mapping[str, int],
    observed: Proved,
) -> LowLimits:
    """The cause of too low limits of one kind of session.

    low:      item -> the session's limit in words
    possible: item -> the lowest sufficient limit
    """

    def enough(limits: Iterable[facts.Limit]) -> list[str]:
        """The items of ``low`` for which these limits suffice."""
        by_item = _by_item(limits)
        return [i for i in low if i in by_item and _lowest(by_item[i]) >= possible[i]]

    name, logins = observed.user_name, observed.logins
    ulimits = {
        item: line
        for item, line in zip(limit_files.ITEMS, session.ulimits)
        if line and item in low
    }
    if opener in ("srun", "slurmd"):
        slurmd = logins.slurmd if isinstance(logins, facts.Logins) else ()
        if opener == "srun" and (not slurmd or len(enough(slurmd)) == len(low)):
            return LowLimits(low, "slurmd itself has more", "", _SUBMIT_FIX)
        return LowLimits(low, "slurmd's own limits, which its jobs inherit", "", _SLURMD_FIX)
    if lowered := ", ".join(dict.fromkeys([*enough(session.before), *ulimits])):
        files, lowering = f"{name}'s profile, or /etc/profile", "the profile"
        if opener in ("ssh", "shell"):
            files = f"{name}'s ~/.bashrc or ~/.ssh/rc, or /etc/bash.bashrc"
            lowering = "the shell's start-up"
        cause = f"{lowering} lowers {lowered}"
        if line := " and ".join(dict.fromkeys(ulimits.values())):
            files, cause = line, f"{cause} ({line})"
        return LowLimits(low, cause, line, f"remove the ulimit of {lowered} from {files}")
    # root starts that shell through su, and a login shell is in ssh's session.
    opener = {"shell": "su", "login": "ssh"}.get(opener, opener)
    service = pam_service(observed, opener)
    if not isinstance(logins, facts.Logins):
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
    deciding = _user_limits(logins)
    for item, kind in itertools.product(low, limit_files.KINDS):
        value, domain, source = deciding.get((kind, item), (limit_files.UNLIMITED, "", ""))
        if value < possible[item]:
            has = "is exempt from all limits" if value == -1 else "has limits of its own"
            fix = f"raise or remove the line {source}"
            return LowLimits(low, f"{domain} {has} ({source})", source, fix)
    return LowLimits(low)


def _with_fix(opener: str, low: LowLimits, observed: Proved) -> LowLimits:
    """The limits with a fix for a session with lower limits than another, if no cause is known."""
    if low.fix or low.cause or not isinstance(observed.logins, facts.Logins):
        return low
    if opener == "ssh":
        sshd = _by_item(observed.logins.sshd)
        if sshd and all(limit_text(sshd[item], item) == low.items[item] for item in low.items):
            fix = "journalctl -t sshd tells why pam_limits sets none; or restart sshd"
            return low._replace(cause="these are sshd's own", fix=fix)
    files = " and ".join(service.path for service in observed.logins.services[:2] if service.path)
    return low._replace(fix=f"compare {files}" if files else "compare the files of pam.d")


@proof_check("proof.limits", loses_job("deploy", "configure"), "limits",
             settings=(*CORE_SETTINGS, "limit_memlock", "limit_nofile", "waivers"), fix=(
    deploy("nodeready deploy INVENTORY --only limits"),
    "remove the ulimit of ITEMS from FILE:LINE",
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
def limits(check: Check, first: facts.SessionLimits, observed: Proved, policy: Policy) -> Result:
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
    ceiling = dict(zip(limit_files.ITEMS, _kernel_units(*first.ceiling)))
    boot = BootSetting(None)
    node = Limits(PamLimits(), {}, (), ceiling, first.nr_open, boot, systemd=False)
    possible = possible_limits(node, policy)
    core = observed.core
    waived = any(waiver.check == "proof.core" for waiver in policy.waivers)
    if isinstance(core, facts.ProvedCore) and core.is_cut_by_limit and not waived:
        possible.pop("core", None)
    if not possible:
        return check.na("none of the policy's limits can be had here, or proof.core tells")
    expected = _items_text({item: item_text(limit, item) for item, limit in possible.items()})
    check = check.expecting(expected)
    sessions = _limits_by_opener(first, observed)
    findings: dict[str, LowLimits] = {}
    for opener, has in sessions.items():
        items = [item for item, limit in possible.items() if _lowest(getattr(has, item)) < limit]
        if items:
            low = _limit_texts(has, items)
            findings[opener] = low_limits(opener, low, has, possible, observed)
    if not findings:
        doubt = next(_doubts(check, sessions, possible, observed), None)
        return doubt or check.ok(_with_unproved(expected, observed))
    logins = [opener for opener in sessions if opener not in ("srun", "slurmd")]
    if len(logins) > 1 and len([opener for opener in logins if opener in findings]) == 1:
        findings = {opener: _with_fix(opener, low, observed) for opener, low in findings.items()}
    return _too_low(check, sessions, findings)


def _too_low(
    check: Check, sessions: Mapping[str, facts.SessionLimits], findings: Mapping[str, LowLimits]
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
    if (first := next((low for low in kinds if low.fix), None)) is None:
        return check.fixable(actual, "", f"{DEPLOY_ONLY} limits")
    return check.fail(actual, first.source, first.fix)


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
    sessions: Mapping[str, facts.SessionLimits],
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
        yield check.fail(f"too little for a job: {actual}", "", _RAISE_FIX)
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
        yield check.warn(actual, "", fix)
    # ssh's sessions have other limits, and no key of the user's opens one.
    other, source = _conf_option(pam_service(observed, "ssh"))
    if other and "ssh" not in sessions and other != _conf_option(pam_service(observed, "su"))[0]:
        actual = f"not seen by ssh, where pam_limits reads {other}"
        yield check.warn(actual, source, _conf_fix(other, source))


def _with_unproved(expected: str, observed: Proved) -> str:
    texts = [expected]
    for opener, session in (("ssh", observed.ssh), ("srun", observed.step)):
        if isinstance(session, facts.SessionProof) and session.error:
            # Without the names of user and host, nodes share one result.
            texts.append(f"not proved by {opener}: {re.sub(r'^[^ ]+@[^ ]+: ', '', session.error)}")
    return "; ".join(texts)
