"""Prove that ssh and pdsh work from this node to others, in the user's own session."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time

from nodeready.node.runtime import Ended, Supervisor
from nodeready.subjects.proof.facts import Answer, Config, PdshRun, Peers, SshTry

#: Seconds for a connection, up to the other sshd's banner.
CONNECT_S = 5
#: Seconds for a login and its command: PAM, a name service, a home directory on the network.
_COMMAND_S = 10
#: Handshakes at a time: each costs about 100 ms of CPU at either end.
AT_ONCE = 4
# Not `hostname`, which prints the same: minimal images lack it.
_ASKED = "uname -n"
# A connection that is shared proves nothing about the next one, and its master would stay.
_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "ControlPath=none")
# pdsh takes brackets, commas, colons and a leading - / ^ @ for more than a name.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_KEPT = 2000


def prove(supervisor: Supervisor, config: Config) -> Peers:
    """Log in to every peer as a person would: the user's configuration, keys and known hosts
    count, and nothing is answered for the user."""
    has_ssh, has_pdsh = bool(shutil.which("ssh")), bool(shutil.which("pdsh"))
    tries = _logins(supervisor, config.peers) if has_ssh else ()
    reached = tuple(
        one.name for one in tries if one.rc == 0 and one.answer and _PLAIN_NAME.fullmatch(one.name)
    )
    pdsh = _pdsh(supervisor, reached) if reached and has_pdsh else None
    return Peers(os.uname().nodename, has_ssh, tries, has_pdsh, pdsh)


def _logins(supervisor: Supervisor, names: tuple[str, ...]) -> tuple[SshTry, ...]:
    """Log in to the peers, AT_ONCE side by side: a peer that hangs costs only itself. Peers for
    which there is no time left are not tried."""
    found: dict[str, SshTry] = {}
    waiting = list(reversed(names))

    def work() -> None:
        with contextlib.suppress(IndexError):
            while time.monotonic() < supervisor.deadline:
                name = waiting.pop()
                found[name] = _login(supervisor, name)

    workers = [threading.Thread(target=work, daemon=True) for _ in names[:AT_ONCE]]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return tuple(found[name] for name in names if name in found)


def _login(supervisor: Supervisor, name: str) -> SshTry:
    options = [word for option in _OPTIONS for word in ("-o", option)]
    try:
        ended = supervisor.run(["ssh", *options, "-n", "--", name, _ASKED], CONNECT_S + _COMMAND_S)
    except OSError as problem:
        return SshTry(name, 255, "", f"ssh: {problem.strerror}")
    rows = [row.strip() for row in ended.out.splitlines() if row.strip()]
    return SshTry(name, ended.rc, rows[-1][:200] if rows else "", _said(ended))


def _said(ended: Ended) -> str:
    return ended.err.strip()[-_KEPT:] if ended.rc != 0 else ""


def _pdsh(supervisor: Supervisor, names: tuple[str, ...]) -> PdshRun:
    """Ask all peers in one run of pdsh, whatever its default remote command is.

    -S appends ``;echo …$?`` to the command, which fish and the BSD csh refuse: when nothing comes
    back, it is left out.
    """
    # ConnectTimeout is -t; with -u, pdsh ends what it started itself.
    limits = ["-t", str(CONNECT_S), "-u", str(_COMMAND_S), "-f", str(AT_ONCE)]
    mine = " ".join(f"-o{option}" for option in _OPTIONS)
    append = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {mine}".strip()
    environment = {**os.environ, "PDSH_SSH_ARGS_APPEND": append}
    run = PdshRun(names, (), None, "")
    for status in (["-S"], []):
        argv = ["pdsh", *status, "-R", "ssh", *limits, "-w", ",".join(names), _ASKED]
        try:
            ended = supervisor.run(argv, CONNECT_S + _COMMAND_S, env=environment)
        except OSError as problem:
            return PdshRun(names, (), 127, f"pdsh: {problem.strerror}")
        parts = (row.partition(": ") for row in ended.out.splitlines())
        responds = tuple(Answer(label[:200], text[:200]) for label, colon, text in parts if colon)
        # Not _said: pdsh exits with 0 whatever happened.
        run = PdshRun(names, responds, ended.rc, ended.err.strip()[-_KEPT:])
        if responds or ended.rc is None or "command timeout" in ended.err:
            break
    return run
