"""Judge whether the proofs ran in a session of the job's user, opened as a login is."""

from __future__ import annotations

import re

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, fail, ok, warn
from nodeready.core.severity import loses_job
from nodeready.subjects.proof.facts import Proved, SessionProof
from nodeready.subjects.proof.preconditions import other_sessions, pam_service, unknown_result
from nodeready.subjects.proof.session_facts import Logins, SessionLimits, User

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


@check(
    "proof.user",
    loses_job("configure"),
    settings=("job_user",),
    fix=(
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
    ),
)
def user(observed: Proved, policy: Policy) -> Result:
    """The proofs ran in a new session of the job's user, opened as a login is.

    PAM opens it, and the user's own shell reads its start-up files: one that ends the shell, or
    breaks what the shell starts, ends every job. The shell is started as a login shell, and as
    sshd starts it for a command.

    What root can do says nothing about what a job's user can: Yama and file permissions stop
    users only. Where /etc/nologin or /run/nologin closes ssh to all users but root, no job can
    start, although su opens a session.
    """
    check, account = "proof.user", observed.user
    expected = "a session of " + (policy.job_user or "the job's user")
    if not isinstance(account, User):
        return unknown_result(check, account)
    if account.uid == -1:
        fix = f"create {account.name} on the node, or name another user"
        return fail(check, expected, account.error, "", fix)
    if account.error:
        if account.error.startswith("logged in as"):
            return fail(check, expected, account.error, "", "log in as root, or name no user")
        actual, source, fix = _refusal(account.error, account.name, observed)
        return fail(check, expected, actual, source, fix)
    if account.uid == 0 and not account.named:
        fix = "--user NAME proves it for the job's user"
        return warn(check, expected, "proved as root, whom Yama does not stop", "", fix)
    if account.uid and isinstance(observed.logins, Logins) and _closed(observed, observed.logins):
        words, fix = _nologin(observed.logins)
        actual = f"ssh is closed to {account.name}: {words}"
        return fail(check, expected, actual, observed.logins.nologin, fix)
    for name, session in other_sessions(observed):
        if session.ended:
            reason = f"{account.name}'s shell ends at its start: {session.error}"
            actual = f"no session by {name}: {reason}"
            fix = f"look at {account.name}'s ~/.bashrc, or at the start-up files of that shell"
            return fail(check, expected, actual, "", fix)
    return ok(check, f"a session of {account.name}")


def _closed(observed: Proved, logins: Logins) -> bool:
    """Whether a file closes sshd to all users but root, and no login of the user's disproves it.

    sshd heeds the file itself where it does not ask PAM (sshd(8), FILES).
    """
    failed = isinstance(observed.ssh, SessionProof) and bool(observed.ssh.error)
    closed = isinstance(observed.ssh, SessionProof) and observed.ssh.closed
    if not logins.nologin or not (failed or observed.ssh is None) or not (logins.sshd or closed):
        return False
    if isinstance(observed.limits, SessionLimits) and observed.limits.opener == "ssh":
        return False
    service = pam_service(observed, "ssh")
    if service is None or not service.is_complete or logins.use_pam is False:
        return True
    return any(line.module == "nologin" for line in service.lines)
