"""ssh and pdsh from this node to others, in the user's own session: raw facts, no judgement."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from nodeready.proofs.config import Config
from nodeready.proofs.own import Ended, Own

#: Seconds for a connection, up to the other sshd's banner.
CONNECT_S = 5
# What a login may take after that: a slow home directory, PAM, a name service.
_LIMIT_S = 15
#: Handshakes at a time: each costs about 100 ms of CPU at either end.
AT_ONCE = 4
# Not `hostname`, which prints the same: minimal images lack it.
_ASKED = "uname -n"
_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}")
# pdsh reads brackets, commas, colons and a leading - / ^ @ as more than a name.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_KEPT = 2000


@dataclass(frozen=True)
class SshTry:
    """One login by ssh.

    name:   the peer, as the inventory names it
    rc:     exit status of ssh: 255 for trouble of its own; None: ended by its time limit
    answer: last line of what came back: the peer's host name when all is well, whatever a login
            prints before it
    said:   the end of what ssh complained about; "" when it exited with 0
    """

    name: str
    rc: int | None
    answer: str
    said: str


@dataclass(frozen=True)
class Answer:
    """One line of pdsh's output, ``LABEL: text``."""

    label: str
    text: str


@dataclass(frozen=True)
class PdshRun:
    """One run of pdsh over the peers that ssh reaches: for the others, ssh's reason is pdsh's.

    asked:   the names that it was given
    answers: what came back
    rc:      its exit status, which says little (0 for a refused connection); None: ended by its
             time limit
    said:    the end of what it complained about
    """

    asked: tuple[str, ...]
    answers: tuple[Answer, ...]
    rc: int | None
    said: str


@dataclass(frozen=True)
class Peers:
    """ssh and pdsh from this node to its peers.

    host:           what this node calls itself
    ssh_installed:  the user's PATH has ssh
    ssh:            the logins, in the order of the names
    pdsh_installed: the user's PATH has pdsh
    pdsh:           None: not tried, for there was no peer to ask or no pdsh
    """

    host: str
    ssh_installed: bool
    ssh: tuple[SshTry, ...]
    pdsh_installed: bool
    pdsh: PdshRun | None


def prove(own: Own, config: Config) -> Peers:
    """Log in to every peer as a person would: the user's configuration, keys and known hosts
    count, and nothing is answered for the user."""
    has_ssh, has_pdsh = bool(shutil.which("ssh")), bool(shutil.which("pdsh"))
    tries = _all(own, config.peers) if has_ssh else ()
    reached = tuple(
        one.name for one in tries if one.rc == 0 and one.answer and _PLAIN_NAME.fullmatch(one.name)
    )
    pdsh = _pdsh(own, reached) if reached and has_pdsh else None
    return Peers(os.uname().nodename, has_ssh, tries, has_pdsh, pdsh)


def _all(own: Own, names: Iterable[str]) -> tuple[SshTry, ...]:
    """AT_ONCE side by side, so that a peer that hangs costs only itself."""
    found: dict[int, SshTry] = {}
    waiting = list(enumerate(names))[::-1]

    def work() -> None:
        while waiting:
            try:
                number, name = waiting.pop()
            except IndexError:
                return
            found[number] = _login(own, name)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return tuple(found[number] for number in sorted(found))


def _login(own: Own, name: str) -> SshTry:
    options = [word for option in _OPTIONS for word in ("-o", option)]
    try:
        ended = own.run(["ssh", *options, "-n", "--", name, _ASKED], _LIMIT_S)
    except OSError as problem:
        return SshTry(name, 127, "", f"ssh: {problem.strerror}")
    return SshTry(name, ended.rc, _last(ended.out), _said(ended) if ended.rc != 0 else "")


def _last(text: str) -> str:
    rows = [row.strip() for row in text.splitlines() if row.strip()]
    return rows[-1][:200] if rows else ""


def _said(ended: Ended) -> str:
    return ended.err.strip()[-_KEPT:]


def _pdsh(own: Own, names: tuple[str, ...]) -> PdshRun:
    more = " ".join(f"-o{option}" for option in _OPTIONS)
    append = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {more}".strip()
    argv = ["pdsh", "-S", "-R", "ssh", "-f", str(AT_ONCE), "-w", ",".join(names), _ASKED]
    try:
        ended = own.run(argv, _LIMIT_S, env={**os.environ, "PDSH_SSH_ARGS_APPEND": append})
    except OSError as problem:
        return PdshRun(names, (), 127, f"pdsh: {problem.strerror}")
    parts = (row.partition(": ") for row in ended.out.splitlines())
    answers = tuple(Answer(label[:200], text[:200]) for label, colon, text in parts if colon)
    return PdshRun(names, answers, ended.rc, _said(ended))
