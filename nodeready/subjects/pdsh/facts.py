"""How pdsh reaches other nodes from a node, and the ~/.pdshrc of the policy's users."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nodeready.core import shell
from nodeready.core.base import Line, Output, Probe, ProbeError, Section, decode_base64, number
from nodeready.core.policy import Policy
from nodeready.subjects.access import ACCESS, Access, parse_access

VARIABLE = "PDSH_RCMD_TYPE"
RCMD_DEFAULT = "/etc/pdsh/rcmd_default"
ENVIRONMENT = "/etc/environment"
PROFILE_D = "/etc/profile.d"
#: Files that shells read at their start, beside profile.d. pam_env.conf comes before
#: /etc/environment and loses to it, /etc/default/locale comes after it on Debian.
_SHELL_FILES = (
    "/etc/profile", "/etc/profile.local", "/etc/bash.bashrc", "/etc/bash.bashrc.local",
    "/etc/bashrc", "/etc/zshenv", "/etc/zsh/zshenv", "/etc/zprofile", "/etc/zsh/zprofile",
    "/etc/zshrc", "/etc/zsh/zshrc", "/etc/csh.cshrc", "/etc/csh.login", "/etc/default/locale",
)  # fmt: skip


def _script(policy: Policy) -> str:
    searched = " ".join(f"'{name}:*'" for name in (*_SHELL_FILES, f"{PROFILE_D}/*"))
    return shell.script(
        "pdsh", PROFILE_D=PROFILE_D, FOUND=searched,
        RCMD_DEFAULT=RCMD_DEFAULT, ENVIRONMENT=ENVIRONMENT,
    )  # fmt: skip


def _seeks(policy: Policy) -> str:
    return f"nr_seek {VARIABLE} {' '.join(_SHELL_FILES)} {PROFILE_D}/*.sh {PROFILE_D}/*.csh"


# --- The ~/.pdshrc of the policy's users: sh/pdshrc.sh reads them.

#: Seconds that a home directory has to answer.
ANSWER_S = 3
#: Bytes of a ~/.pdshrc: in base64 they fit into a pipe (64 KiB), which is emptied when all users
#: have been asked. With many users it is less, so that all together cannot fill the answer.
MOST_BYTES = 32768
_ALL_BYTES = 1024 * 1024
_END = b"\nnodeready: end"


def most_bytes(policy: Policy) -> int:
    """Bytes of a ~/.pdshrc that are read under this policy."""
    return max(4096, min(MOST_BYTES, _ALL_BYTES // max(1, len(policy.pdshrc_users))))


def _users_script(policy: Policy) -> str:
    if not policy.pdshrc_users:
        return ":"
    maximum_bytes = most_bytes(policy)
    return shell.script(
        "pdshrc", NAMES=shell.join(policy.pdshrc_users), ANSWER_S=ANSWER_S, LATEST_S=ANSWER_S + 1,
        AS_USER=shell.quote(shell.library("pdshrc_as_user")), READ_BYTES=maximum_bytes + 1,
        # Whole lines of base64, enough to show that a file exceeds ``maximum_bytes``.
        PRINTED_BYTES=((maximum_bytes + 64) // 57 + 1) * 77,
    )  # fmt: skip


_FIRST_PERSON = 1000


@dataclass(frozen=True)
class PdshUser:
    """One of the policy's users."""

    name: str  # of the user
    home: str = ""  # home directory; "" when the node has no such user
    trouble: str = ""  # why the user can have no ~/.pdshrc, in words, or ""
    pdshrc: bytes | None = None  # the content of ~/.pdshrc; None: no such file
    uid: int | None = None  # the user's number; None: unknown

    @property
    def path(self) -> str:
        return f"{self.home.rstrip('/')}/.pdshrc"

    @property
    def person(self) -> bool:
        """Whether it is a person's account, not root's or a service's (login.defs(5), UID_MIN)."""
        return self.uid is not None and self.uid >= _FIRST_PERSON


@dataclass(frozen=True)
class Pdsh:
    """pdsh on a node."""

    installed: bool  # the command exists
    module: str = ""  # the file of pdsh's ssh module, or ""
    debian: bool = False  # pdsh is Debian's wrapper, which reads /etc/pdsh/rcmd_default
    csh: bool = False  # the node has start-up files of csh: csh may be a user's login shell
    rcmd_default: bytes | None = None  # content of /etc/pdsh/rcmd_default; None: no such file
    environment: bytes | None = None  # content of /etc/environment; None: no such file
    settings: tuple[Line, ...] = ()  # the lines of shell start-up files that name the variable
    users: tuple[PdshUser, ...] = ()  # the policy's users
    users_unknown: str = ""  # why the users could not be observed; "": they were
    access: Access = field(default_factory=Access)  # of pdsh and of the files that it reads


def in_environment(content: bytes) -> tuple[str | None, int]:
    """The value that pam_env takes for the variable from /etc/environment, and the line's number.

    The last assignment wins; ``export`` and one pair of quotes are allowed, ``#`` ends a value
    (pam_env.c). (None, 0) when no line assigns the variable.
    """
    value, number = None, 0
    for count, raw in enumerate(content.split(b"\n"), 1):
        text = raw.decode("utf-8", "surrogateescape").partition("#")[0].lstrip(" \t")
        text = text[7:] if text.startswith("export ") else text
        name, equals, assigned_text = text.partition("=")
        if name == VARIABLE and equals:
            quoted = assigned_text[:1] in ("'", '"')
            value = assigned_text[1:].rstrip("'\"") if quoted else assigned_text
            number = count
    return value, number


#: The trouble of a user whose ~/.pdshrc was not read to its end.
UNSEEN = "could not be looked at"
_BASE64 = re.compile(r"[A-Za-z0-9+/]{1,76}={0,2}")
_STATES = {
    "none": "has no home directory on the node", "file": "", "nofile": "",
    "file readonly": "may not write to the own home directory",
    "nofile readonly": "may not write to the own home directory",
    "nofile unreadable": "has a ~/.pdshrc that is no readable file",
}  # fmt: skip


def _read(output: Output) -> dict[str, bytes]:
    """User -> the output of the user's process."""
    lines: dict[str, list[str]] = {}
    into: list[str] = []
    for line in output.require().splitlines():
        if line.startswith("read="):
            into = lines.setdefault(line[5:], [])
        elif _BASE64.fullmatch(line):
            into.append(line)
    texts = {user: "".join(parts) for user, parts in lines.items()}
    # A base64 that was ended by its limit may have ended anywhere.
    return {user: decode_base64(text[: len(text) // 4 * 4]) for user, text in texts.items()}


def _user(name: str, home: str, read: bytes | None, maximum_bytes: int) -> PdshUser:
    if read is None:
        return PdshUser(name, home, UNSEEN)
    too_large = f"has a ~/.pdshrc of more than {maximum_bytes} bytes"
    if not read.endswith(_END) or len(read) > maximum_bytes + 64:
        is_large = len(read) > maximum_bytes
        return PdshUser(name, home, too_large if is_large else f"{UNSEEN} within {ANSWER_S} s")
    first, _, content = read[: -len(_END)].partition(b"\n")
    state = first.decode("ascii", "replace").strip()
    if len(content) > maximum_bytes:
        return PdshUser(name, home, too_large)
    if state not in _STATES:
        return PdshUser(name, home, UNSEEN)
    return PdshUser(name, home, _STATES[state], content if state.startswith("file") else None)


def _users(output: Output, policy: Policy) -> tuple[PdshUser, ...]:
    homes = dict(text.partition(" ")[::2] for text in output.all("user"))
    uids = dict(text.partition(" ")[::2] for text in output.all("uid"))
    read = _read(output)
    users = []
    for name in policy.pdshrc_users:
        if not (home := homes.get(name, "")):
            users.append(PdshUser(name, trouble="is no user of the node"))
            continue
        if not re.fullmatch(r"/[^\x00-\x1f]*", home):
            raise ProbeError(f"the home directory of {name} is no path", home)
        user = _user(name, home, read.get(name), most_bytes(policy))
        uid = uids.get(name, "")
        users.append(replace(user, uid=number(uid, "a user's number")) if uid else user)
    return tuple(users)


def parse(outputs: Mapping[str, Output], policy: Policy) -> Pdsh:
    """The observation. Raises ProbeError when the section ``pdsh`` failed."""
    output = outputs["pdsh"]
    files = output.files()
    users: tuple[PdshUser, ...] = ()
    reason, marks = "", output.require().splitlines()
    try:
        users = _users(outputs["pdshrc"], policy)
    except ProbeError as error:
        reason = error.reason
    return Pdsh(
        installed="pdsh" in output.all("have"),
        module=output.values().get("module", ""),
        debian="debian=1" in marks,
        csh="csh=1" in marks,
        rcmd_default=files.get(RCMD_DEFAULT),
        environment=files.get(ENVIRONMENT),
        # The lines about the variable that are no comment.
        settings=tuple(
            line
            for line in output.lines()
            if VARIABLE in line.text and not line.text.lstrip().startswith("#")
        ),
        users=users,
        users_unknown=reason,
        access=parse_access(outputs),
    )


#: A home directory may be slow.
USERS = Section(
    "pdshrc", _users_script, timeout_s=ANSWER_S + 4, cap_bytes=_ALL_BYTES + _ALL_BYTES // 2
)
PROBE = Probe("pdsh", (Section("pdsh", _script, seeks=_seeks), USERS, ACCESS), parse)
