"""The program on the node: become the job's user, run the canaries, print what they saw.

Started by root, it opens a session for the user (``su -``, through PAM as every login) and runs
there once more; what only root can tell, it tells beside that. Started by the user, it runs as it
is. From there it goes by ssh to the node itself, where what is quick is proved once more. Each
observation is a line (`nodeready.subjects.wire`) as soon as it is there: a hang costs the
observations behind it, and nothing else.
"""

from __future__ import annotations

import os
import pwd
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nodeready.node import payload
from nodeready.node.payload import Program
from nodeready.node.proofs import attach, core, peers, resources, session
from nodeready.node.runtime import ProcessSupervisor, hold_streams, mistake
from nodeready.subjects import wire
from nodeready.subjects.proof.facts import BY_WAYS, OTHER_WAYS, Config, User, Way

_PROVE: dict[str, Callable[[ProcessSupervisor, Config], Any]] = {
    "limits": session.prove,
    "attach": attach.prove,
    "tracers": attach.prove_tracers,
    "core": core.prove,
    "resources": resources.prove,
    "peers": peers.prove,
}

#: A login that takes longer hangs: with less time than this, nobody can tell.
_LOGIN_S = 5

_printing = threading.Lock()


def _say(config: Config, name: str, seen: Any) -> None:
    with _printing:
        print(wire.line(config.nonce, name, seen), flush=True)


def _observe(config: Config, name: str, look: Callable[[], Any]) -> None:
    """Make and print one observation. An exception is one, too: it costs no other canary."""
    try:
        seen = look()
    except Exception as problem:  # noqa: BLE001
        seen = session.Broken(mistake(problem))
    _say(config, name, seen)


def _beside(config: Config, name: str, look: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=_observe, args=(config, name, look), daemon=True)
    thread.start()
    return thread


def _proofs(
    supervisor: ProcessSupervisor, config: Config, more: Mapping[str, Callable[[], Any]]
) -> None:
    """All wanted proofs side by side: the slowest, py-spy's native unwinding, takes seconds."""
    looks = {**more} | {name: partial(_PROVE[name], supervisor, config) for name in config.wanted}
    for thread in [_beside(config, name, look) for name, look in looks.items()]:
        # A little longer: a proof that the end of the time cuts off says so itself.
        thread.join(supervisor.left_s + 0.5)


def _end_with_parent(supervisor: ProcessSupervisor) -> None:
    """End everything when whoever started us is gone: our standard input is a pipe of theirs."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        supervisor.end()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(config: Config, *, inside: bool = False) -> None:
    """inside: this is the session that root opened for the user."""
    hold_streams()
    supervisor = ProcessSupervisor(config.tag, config.limit_s)

    def leave(number: int, frame: object) -> None:
        # From here on nothing is printed: a killed tool's last words are no observation. The lock
        # may be held by this very thread.
        _printing.acquire(blocking=False)
        supervisor.end()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    with supervisor:
        if inside:
            _end_with_parent(supervisor)
            _here(supervisor, config, inside=True)
        elif os.geteuid() == 0 and config.user not in ("", "root"):
            _as_user(supervisor, config)
        else:
            control = os.geteuid() == 0 and "attach" in config.wanted
            _here(supervisor, config, control=control)
        _printing.acquire()


def _here(
    supervisor: ProcessSupervisor, config: Config, *, control: bool = False, inside: bool = False
) -> None:
    """The proofs in this session.

    control: we are root, and try what only root can tell
    inside:  another program of ours opened the session, and tells how the node opens them
    """
    here, uid = session.name_of(os.geteuid()), os.geteuid()
    if config.user and here != config.user:
        why = session.cannot_become(here, config.user)
        _say(config, "user", User(config.user, uid, True, why))
        return
    if config.here and session.identity() != config.here:
        _say(config, "user", User(here, uid, True, f"{os.uname().nodename} answers"))
        return
    _say(config, "user", User(here, uid, bool(config.user), ""))
    beside: dict[str, Callable[[], Any]] = {}
    if control:
        beside["control"] = partial(attach.control, supervisor, config)
    if not inside and _by_ways(config):
        beside["logins"] = partial(session.logins, supervisor, here)
    if not config.here and _by_ways(config):
        beside |= _other_ways(supervisor, config)
    _proofs(supervisor, config, beside)


def _by_ways(config: Config) -> bool:
    """Whether something is proved that can be another in another way in."""
    return not {*BY_WAYS}.isdisjoint(config.wanted)


def _other_ways(supervisor: ProcessSupervisor, config: Config) -> dict[str, Callable[[], Any]]:
    """The other ways in from this session, which is one of them itself."""
    ways: dict[str, Callable[[], Any]] = {}
    opened_by, name = session.opened_by()[0], session.name_of(os.geteuid())
    if opened_by != "ssh":
        ways["ssh"] = partial(session.by_ssh, supervisor, config)
    elif session.shell_of(name):
        ways["login"] = partial(session.by_shell, supervisor, config, name, "login")
    slurmd = (
        session.limits_of_daemon("slurmd") if config.step and "limits" in config.wanted else ()
    )
    if session.step_matters(slurmd):
        ways["step"] = partial(session.by_srun, supervisor, config)
    return ways


def _as_user(supervisor: ProcessSupervisor, config: Config) -> None:
    """The user's session, and root's control beside it."""
    try:
        uid = pwd.getpwnam(config.user).pw_uid
    except KeyError:
        _say(config, "user", User(config.user, -1, True, f"no such user: {config.user}"))
        return
    control = partial(attach.control, supervisor, config, uid)
    beside = []
    if "attach" in config.wanted:
        beside.append(_beside(config, "control", control))
    beside.append(_beside(config, "logins", partial(session.logins, supervisor, config.user)))
    inner = replace(
        config,
        limit_s=max(1, int(supervisor.left_s) - 2),
        # In a job of Slurm's own, another one may have no room.
        step=config.step and "SLURM_JOB_ID" not in os.environ,
    )
    begun = by_shell = False

    def line(text: str) -> None:
        # The session is the user's, who can learn the nonce there and print what is asked of the
        # session. What root tells is none of that.
        nonlocal begun, by_shell
        try:
            rows = dict(wire.lines(text, config.nonce))
            way = wire.decode(Way, rows["ssh"]) if "ssh" in rows else Way("")
        except wire.DecodeError:
            return
        if not rows or not {*rows} <= {"user", *inner.wanted, *OTHER_WAYS}:
            return
        begun = begun or "user" in rows
        if way.error and not way.ended and not by_shell:
            by_shell = True
            look = partial(session.by_shell, supervisor, config, config.user, "shell")
            beside.append(_beside(config, "shell", look))
        # A profile's noise may stand in front of it.
        with _printing:
            print(text[text.index(f"{config.nonce} ") :], flush=True)

    def made(descriptor: int) -> Program:
        how = {"stdin": True, "first": sys.executable, "descriptor": descriptor}
        return payload.program(__name__, inner, inside=True, **how)  # type: ignore[arg-type]

    ended = session.run(supervisor, config.user, made, line)
    if not begun and not (ended.rc is None and config.limit_s < _LOGIN_S):
        why = session.no_session(ended, config.user)
        _say(config, "user", User(config.user, uid, True, why))
    for thread in beside:
        thread.join(supervisor.left_s)
