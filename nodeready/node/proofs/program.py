"""The program on the node: become the job's user, run the canaries, print what they saw.

Started by root, it opens a session for the user (``su -``, through PAM as every login) and runs
there once more; what only root can tell, it tells beside that. Started by the user, it runs as it
is. Each observation is a line (`wire.py`) as soon as it is there: what a hang cuts off is missing,
and nothing else.
"""

from __future__ import annotations

import os
import pwd
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nodeready.node.payload import Program
from nodeready.node.proofs import attach, core, peers
from nodeready.node.proofs import config as source
from nodeready.node.proofs import session as limits
from nodeready.node.proofs.config import Config
from nodeready.node.runtime import Own
from nodeready.subjects import wire
from nodeready.subjects.proof.facts import User

_PROVE: dict[str, Callable[[Own, Config], Any]] = {
    "limits": limits.prove,
    "attach": attach.prove,
    "tracers": attach.prove_tracers,
    "core": core.prove,
    "peers": peers.prove,
}

#: A login that takes longer hangs: with less time than this, nobody can tell.
_LOGIN_S = 5

_printing = threading.Lock()


def _say(config: Config, name: str, seen: Any) -> None:
    with _printing:
        print(wire.line(config.nonce, name, seen), flush=True)


def _observe(config: Config, name: str, look: Callable[[], Any]) -> None:
    """One canary's trouble is not another's: an exception is an observation like others."""
    try:
        seen = look()
    except Exception as problem:  # noqa: BLE001
        place = traceback.extract_tb(problem.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        seen = limits.Broken(f"{type(problem).__name__}: {problem} ({where})"[:300])
    _say(config, name, seen)


def _beside(config: Config, name: str, look: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=_observe, args=(config, name, look), daemon=True)
    thread.start()
    return thread


def _proofs(own: Own, config: Config, more: Mapping[str, Callable[[], Any]]) -> None:
    """All wanted proofs side by side: the slowest, py-spy's native unwinding, takes seconds."""
    looks = {**more} | {name: partial(_PROVE[name], own, config) for name in config.wanted}
    for thread in [_beside(config, name, look) for name, look in looks.items()]:
        # A little longer: what is cut off by the end of the time shall say so itself.
        thread.join(own.left_s + 0.5)


def _end_with_parent(own: Own) -> None:
    """End everything when whoever started us is gone: our standard input is a pipe of its.

    Unless the user's profile put something else there: then only the time ends us.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        own.end()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(config: Config, *, inside: bool = False) -> None:
    """inside: this is the session that root opened for the user."""
    # A profile may have closed one: its number would be given to a file of ours.
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    own = Own(config.tag, config.limit_s)

    def leave(number: int, frame: object) -> None:
        # What is not said by now is missing: no word of a tool that we kill. We may be saying it.
        _printing.acquire(blocking=False)
        own.end()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    with own:
        if inside:
            _end_with_parent(own)
            _here(own, config)
        elif os.geteuid() == 0 and config.user not in ("", "root"):
            _as_user(own, config)
        else:
            control = os.geteuid() == 0 and "attach" in config.wanted
            _here(own, config, control=control)
        _printing.acquire()


def _here(own: Own, config: Config, *, control: bool = False) -> None:
    """The proofs in this session; control: we are root, and try what only root can tell."""
    here, uid = _name(os.geteuid()), os.geteuid()
    if config.user and here != config.user:
        why = f"logged in as {here}, who cannot become {config.user}: log in as root"
        _say(config, "user", User(config.user, uid, True, why))
        return
    _say(config, "user", User(here, uid, bool(config.user), ""))
    beside = {"control": partial(attach.control, own, config)} if control else {}
    _proofs(own, config, beside)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _as_user(own: Own, config: Config) -> None:
    """The user's session, and root's control beside it."""
    try:
        uid = pwd.getpwnam(config.user).pw_uid
    except KeyError:
        _say(config, "user", User(config.user, -1, True, f"no such user: {config.user}"))
        return
    control = partial(attach.control, own, config, uid)
    beside = _beside(config, "control", control) if "attach" in config.wanted else None
    inner = replace(config, limit_s=max(1, int(own.left_s) - 2))
    begun = False

    def line(text: str) -> None:
        nonlocal begun
        for name, _ in wire.lines(text, config.nonce):
            begun = begun or name == "user"
            # A profile's noise may stand in front of it.
            with _printing:
                print(text[text.index(f"{config.nonce} ") :], flush=True)

    def made(descriptor: int) -> Program:
        return source.program(inner, first=sys.executable, descriptor=descriptor, inside=True)

    ended = limits.run(own, config.user, made, line)
    if not begun and not (ended.rc is None and config.limit_s < _LOGIN_S):
        why = ended.first or f"exit status {ended.rc}"
        if source.NO_PYTHON in why:
            why = f"{source.NO_PYTHON} that {config.user} may run"
        elif ended.rc is None:
            why = f"timed out; it said: {ended.first}" if ended.first else "timed out"
        _say(config, "user", User(config.user, uid, True, f"no session: {why}"))
    if beside is not None:
        beside.join(own.left_s)
