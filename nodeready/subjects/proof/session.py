"""Judge the session in which the proofs ran: whose it is, and what a job can use in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.core.result import Check, Result, check, join_first
from nodeready.core.severity import loses_job
from nodeready.core.shell import quote
from nodeready.subjects.proof import facts
from nodeready.subjects.proof.facts import SHM, Logins, Proved, SessionProof, User

_T = TypeVar("_T")

#: The command for a fix by another subject's deploy; the subject's name follows it.
DEPLOY_ONLY = "nodeready deploy INVENTORY --only"


def observation(check: Check, observed: Proved, field: str, kind: type[_T]) -> _T | Result:
    """The observation in this field of `Proved`, or the result of a check without it."""
    if isinstance(observed.user, User) and observed.user.error:
        return check.na("no session: see proof.user")
    value = getattr(observed, field)
    if isinstance(value, Unknown):
        return unknown_result(check, value)
    return value if isinstance(value, kind) else check.na("not proved")


def unknown_result(check: Check, missing: Unknown) -> Result:
    """The result of a check whose observation is unknown: the reason, and its evidence."""
    evidence = f": {missing.evidence}" if missing.evidence else ""
    return check.unknown(f"{missing.reason}{evidence}")


def other_sessions(observed: Proved) -> Iterator[tuple[str, SessionProof]]:
    """The user's further sessions that run a shell, each with its name in a result."""
    sessions = {"ssh": observed.ssh, "shell": observed.shell, "login": observed.login}
    for name, session in sessions.items():
        if isinstance(session, SessionProof):
            yield facts.SESSION_NAMES[name], session


def in_each_session(
    observed: Proved,
    field: str,
    judge: Callable[[Proved], Result],
    counts: Callable[[Any], bool] = bool,
) -> Result:
    """The result in the first session; the failure of a further one where that is ok.

    field:  of `Proved` and of `SessionProof`, with the observation
    counts: whether the observation of a further session is judged
    """
    result = judge(observed)
    for name, session in other_sessions(observed) if result.status == "ok" else ():
        proved = getattr(session, field)
        if proved is not None and counts(proved):
            further = judge(replace(observed, **{field: proved}))
            if further.status == "fail":
                return replace(further, actual=f"by {name}: {further.actual}")
    return result


def pam_service(observed: Proved, name: str) -> facts.Service | None:
    """The PAM stack of this kind of session; None: not seen."""
    services = observed.logins.services if isinstance(observed.logins, Logins) else ()
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


def _nologin(logins: Logins) -> tuple[str, str]:
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
    if isinstance(logins, Logins) and logins.nologin:
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
    account = observed.user
    expected = "a session of " + (policy.job_user or "the job's user")
    if not isinstance(account, User):
        return unknown_result(user, account)
    if account.uid == -1:
        fix = f"create {account.name} on the node, or name another user"
        return user.fail(account.error, "", fix, expected=expected)
    if account.error:
        if account.error.startswith("logged in as"):
            return user.fail(
                account.error, "", "log in as root, or name no user", expected=expected
            )
        actual, source, fix = _refusal(account.error, account.name, observed)
        return user.fail(actual, source, fix, expected=expected)
    if account.uid == 0 and not account.named:
        fix = "--user NAME proves it for the job's user"
        return user.warn("proved as root, whom Yama does not stop", "", fix, expected=expected)
    if account.uid and isinstance(observed.logins, Logins) and _closed(observed, observed.logins):
        words, fix = _nologin(observed.logins)
        actual = f"ssh is closed to {account.name}: {words}"
        return user.fail(actual, observed.logins.nologin, fix, expected=expected)
    for name, session in other_sessions(observed):
        if session.ended:
            reason = f"{account.name}'s shell ends at its start: {session.error}"
            actual = f"no session by {name}: {reason}"
            fix = f"look at {account.name}'s ~/.bashrc, or at the start-up files of that shell"
            return user.fail(actual, "", fix, expected=expected)
    return user.ok(expected=f"a session of {account.name}")


def _closed(observed: Proved, logins: Logins) -> bool:
    """Whether a file closes sshd to all users but root, and no login of the user's disproves it.

    sshd heeds the file itself where it does not ask PAM (sshd(8), FILES).
    """
    failed = isinstance(observed.ssh, SessionProof) and bool(observed.ssh.error)
    closed = isinstance(observed.ssh, SessionProof) and observed.ssh.closed
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
    if place.exec_error and place.path != SHM:
        return f"no code can be run from {place.path} ({place.exec_error}: noexec?)"
    return ""


_SHM_FIX = "free or enlarge /dev/shm: `df -h /dev/shm`, host.shm"
# Shared memory uses memory, even in a file system with a larger size.
_MEMORY_FIX = "see what takes the memory: `free -m`, and memory.max of the user's slice"
_CACHE_FIX = (
    "TMPDIR, XDG_CACHE_HOME, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR elsewhere, or "
    "remount it with exec, for writing or with room"
)


@check("proof.resources", loses_job("clean_up", "configure"), proof="resources",
       settings=("shm_min_mb",), expects="usable for the job's user", fix=(
    "chmod 1777 PATH, or see what is full or read-only there",
    _SHM_FIX,
    _MEMORY_FIX,
    "add NAME to the file's group, or open it with a rule of udev (NVIDIA: "
    "NVreg_DeviceFileMode=0666)",
    _CACHE_FIX,
))  # fmt: skip
def resources(observed: Proved, policy: Policy) -> Result:
    """The job's user can use what a job uses: /tmp, shared memory, the home, the device files.

    1 MiB is written and mapped in each directory: a failed write breaks jobs (NCCL and data
    loaders share memory, sockets lie in /tmp). shm_min_mb is not allocated, which could cost a
    running job its memory: the check reads the free space of /dev/shm, and the free memory and
    swap, within memory.max of the session's cgroups (v2). Where no code can be run, or the home
    takes no file, PyTorch and Triton need another place for compiled code: a warning. A device
    file of a GPU or of RDMA fails where its mode excludes this user. Not judged: quotas of a
    tmpfs, the cgroup that Slurm gives to a job, devices that a cgroup withholds from a session.
    """
    usable = observation(resources, observed, "resources", facts.Resources)
    if isinstance(usable, Result):
        return usable
    name = observed.user_name
    closed = [f"{device.path} ({device.mode})" for device in usable.devices]
    if closed:
        fix = f"add {name} to the file's group, or open it with a rule of udev (NVIDIA: "
        actual = f"{name} cannot open {join_first(closed)}"
        return resources.fail(actual, "/dev", f"{fix}NVreg_DeviceFileMode=0666)")
    broken = [place for place in usable.places if place.error and place.path != usable.home]
    if broken:
        actual = "; ".join(f"{place.path}: {place.error}" for place in broken)
        fix = f"chmod 1777 {quote(broken[0].path)}, or see what is full or read-only there"
        return resources.fail(actual, broken[0].path, fix)
    free_mb = min(place.free_bytes >> 20 for place in usable.places if place.path == SHM)
    if free_mb < policy.shm_min_mb:
        actual = f"{free_mb} MiB of shared memory are free, {policy.shm_min_mb} wanted"
        return resources.warn(actual, SHM, _SHM_FIX)
    if usable.memory_bytes is not None and usable.memory_bytes >> 20 < policy.shm_min_mb:
        free_mb = usable.memory_bytes >> 20
        actual = f"shared memory can grow by {free_mb} MiB of memory, {policy.shm_min_mb} wanted"
        return resources.warn(actual, SHM, _MEMORY_FIX)
    costly = [words for place in usable.places if (words := _unusable(place, usable.home))]
    if costly:
        return resources.warn("; ".join(costly), "", _CACHE_FIX)
    return resources.ok()
