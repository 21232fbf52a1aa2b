"""How pdsh reaches other nodes from a node, and the ~/.pdshrc of the policy's users."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.base import Line, Output, Probe, ProbeError, Section, file_lines

VARIABLE = "PDSH_RCMD_TYPE"
RCMD_DEFAULT = "/etc/pdsh/rcmd_default"
ENVIRONMENT = "/etc/environment"
PROFILE_D = "/etc/profile.d"
#: Files that shells read at their start, beside profile.d. pam_env.conf comes before
#: /etc/environment and loses to it, /etc/default/locale comes after it on Debian.
_SHELL_FILES = (
    "/etc/profile",
    "/etc/profile.local",
    "/etc/bash.bashrc",
    "/etc/bash.bashrc.local",
    "/etc/bashrc",
    "/etc/zshenv",
    "/etc/zsh/zshenv",
    "/etc/zprofile",
    "/etc/zsh/zprofile",
    "/etc/zshrc",
    "/etc/zsh/zshrc",
    "/etc/csh.cshrc",
    "/etc/csh.login",
    "/etc/default/locale",
)

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib/*", "/usr/local/lib", "/usr/local/lib64")


def _script(policy: Policy) -> str:
    modules = " ".join(f"{parent}/pdsh/sshcmd.so" for parent in _LIBRARIES)
    return rf"""
    nr_have pdsh
    if [ -e /etc/debian_version ] || [ -d /etc/pdsh ]; then printf 'debian=1\n'; fi
    for nr_file in /etc/csh.* {PROFILE_D}/*.csh; do
        if [ -e "$nr_file" ]; then printf 'csh=1\n'; break; fi
    done
    for nr_file in {modules}; do
        if [ -e "$nr_file" ]; then printf 'module=%s\n' "$nr_file"; fi
    done
    nr_exact {RCMD_DEFAULT} {ENVIRONMENT}
    grep -asHn {VARIABLE} {" ".join(_SHELL_FILES)} {PROFILE_D}/*.sh {PROFILE_D}/*.csh /dev/null
    :
    """


# This runs with the user's rights: a link in a home directory then shows nothing that the user
# could not read, and a home on NFS that is closed to root can be read. The state comes first.
_AS_USER = r"""
    if [ ! -d "$1" ]; then echo none; exit; fi
    nr_state=
    if [ ! -w "$1" ]; then nr_state=readonly; fi
    if [ -f "$1/.pdshrc" ] && [ -r "$1/.pdshrc" ]; then
        echo "file $nr_state"
        exec head -c 1048576 "$1/.pdshrc"
    fi
    if [ -e "$1/.pdshrc" ]; then nr_state=unreadable; fi
    echo "nofile $nr_state"
"""


def _users_script(policy: Policy) -> str:
    if not policy.pdshrc_users:
        return ":"
    names = " ".join(shell.quote(name) for name in policy.pdshrc_users)
    text = shell.quote(shell.minify(_AS_USER))
    # NR marks the lines that are ours: the user's process must not know it.
    return rf"""
    if command -v getent >/dev/null 2>&1; then nr_passwd=$(getent passwd {names})
    else nr_passwd=$(cat /etc/passwd); fi
    nr_me=$(id -u)
    for nr_user in {names}; do
        nr_home=
        while IFS=: read -r nr_name nr_x nr_uid nr_gid nr_gecos nr_dir nr_shell; do
            if [ "$nr_name" = "$nr_user" ] && [ -z "$nr_home" ]; then nr_home=$nr_dir; fi
        done <<NODEREADY
$nr_passwd
NODEREADY
        if [ -z "$nr_home" ]; then continue; fi
        printf 'user=%s %s\n\n@%s file %s\n' "$nr_user" "$nr_home" "$NR" "${{nr_home%/}}/.pdshrc"
        if [ "$nr_me" != 0 ]; then NR= sh -c {text} sh "$nr_home"
        elif command -v runuser >/dev/null 2>&1; then
            NR= runuser -u "$nr_user" -- sh -c {text} sh "$nr_home"
        else NR= su -s /bin/sh "$nr_user" -c {text} sh "$nr_home"; fi 2>/dev/null
        printf '\n@%s eof\n' "$NR"
    done
    :
    """


@dataclass(frozen=True)
class User:
    """One of the policy's users.

    home:    home directory; "" when the node has no such user
    trouble: why the user can have no ~/.pdshrc, in words, or ""
    pdshrc:  the content of ~/.pdshrc; None: no such file
    """

    name: str
    home: str = ""
    trouble: str = ""
    pdshrc: bytes | None = None

    @property
    def path(self) -> str:
        return f"{self.home.rstrip('/')}/.pdshrc"


@dataclass(frozen=True)
class Pdsh:
    """pdsh on a node.

    installed:    the command is there
    module:       the file of pdsh's ssh module, or ""
    debian:       pdsh is Debian's wrapper, which reads /etc/pdsh/rcmd_default
    csh:          the node has start-up files of csh: csh may be somebody's login shell
    rcmd_default: content of /etc/pdsh/rcmd_default; None: no such file
    environment:  content of /etc/environment; None: no such file
    settings:     the lines of shell start-up files that name the variable
    users:        the policy's users
    users_unknown: why the users could not be looked at; "": they were
    """

    installed: bool
    module: str = ""
    debian: bool = False
    csh: bool = False
    rcmd_default: bytes | None = None
    environment: bytes | None = None
    settings: tuple[Line, ...] = ()
    users: tuple[User, ...] = field(default_factory=tuple)
    users_unknown: str = ""


def in_environment(content: bytes) -> tuple[str | None, int]:
    """The value that pam_env takes for the variable from /etc/environment, and the line's number.

    The last assignment wins; ``export`` and one pair of quotes are allowed, ``#`` ends a value
    (pam_env.c). (None, 0) when no line assigns the variable.
    """
    value, number = None, 0
    for count, raw in enumerate(content.split(b"\n"), 1):
        text = raw.decode("utf-8", "surrogateescape").partition("#")[0].lstrip(" \t")
        text = text[7:] if text.startswith("export ") else text
        name, equals, rest = text.partition("=")
        if name == VARIABLE and equals:
            quoted = rest[:1] in ("'", '"')
            value = rest[1:].rstrip("'\"") if quoted else rest
            number = count
    return value, number


_STATES = {
    "": "could not be looked at",
    "none": "has no home directory on the node",
    "file": "",
    "nofile": "",
    "file readonly": "may not write to the own home directory",
    "nofile readonly": "may not write to the own home directory",
    "nofile unreadable": "has a ~/.pdshrc that is no readable file",
}


def _users(output: Output, policy: Policy) -> tuple[User, ...]:
    homes = dict(text.partition(" ")[::2] for text in output.all("user"))
    files = output.files()
    found = []
    for name in policy.pdshrc_users:
        home = homes.get(name, "")
        if not home:
            found.append(User(name, trouble="is no user of the node"))
            continue
        if not re.fullmatch(r"/[^\x00-\x1f]*", home):
            raise ProbeError(f"the home directory of {name} is no path", home)
        user = User(name, home)
        first, _, content = files.get(user.path, b"").partition(b"\n")
        state = first.decode("ascii", "replace").strip()
        trouble = _STATES.get(state, _STATES[""])
        found.append(User(name, home, trouble, content if state.startswith("file") else None))
    return tuple(found)


def parse(outputs: Mapping[str, Output], policy: Policy) -> Pdsh:
    """The observation. Raises ProbeError when the section failed; the users may fail alone."""
    output = outputs["pdsh"]
    files = output.files()
    users: tuple[User, ...] = ()
    why = ""
    try:
        users = _users(outputs["pdshrc"], policy)
    except ProbeError as error:
        why = error.reason
    return Pdsh(
        installed="pdsh" in output.all("have"),
        module=output.values().get("module", ""),
        debian="debian=1" in output.require().splitlines(),
        csh="csh=1" in output.require().splitlines(),
        rcmd_default=files.get(RCMD_DEFAULT),
        environment=files.get(ENVIRONMENT),
        settings=tuple(_settings(file_lines(output.require()))),
        users=users,
        users_unknown=why,
    )


def _settings(lines: Iterable[Line]) -> Iterable[Line]:
    """The lines that are no comment."""
    return (line for line in lines if not line.text.lstrip().startswith("#"))


PROBE = Probe("pdsh", (Section("pdsh", _script), Section("pdshrc", _users_script)), parse)
