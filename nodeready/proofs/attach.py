"""Prove that the job's user can see the stack of a process: py-spy in its three modes.

The target is a sibling of py-spy, as a rank is one of the shell of whoever looks: Yama's scope 1
lets a parent attach, and proves nothing.
"""

from __future__ import annotations

import json
import os
import shutil

from nodeready.proofs.attempt import attempt, complaint, guards
from nodeready.proofs.config import Config
from nodeready.proofs.own import FRAME, Ended, Own
from nodeready.proofs.seen import Attach, Attempt, Control

# The most seconds of each mode. Unwinding native frames reads the symbols of all libraries: up to
# 14 s cold on a torch process.
_LIMITS_S = {"blocking": 10, "nonblocking": 10, "native": 25}
_OPTIONS = {"blocking": [], "nonblocking": ["--nonblocking"], "native": ["--native"]}


def _py_spy(config: Config) -> str:
    if config.py_spy:
        return config.py_spy if os.path.exists(config.py_spy) else ""
    return shutil.which("py-spy") or ""


def _wrong(ended: Ended) -> str:
    """Why this is no stack of a canary; "": it is one."""
    if ended.rc != 0:
        return complaint(ended)
    try:
        threads = json.loads(ended.out)
        frames = [str(frame["name"]) for thread in threads for frame in thread["frames"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "its output is no JSON of stacks"
    return "" if FRAME in frames else "its stacks lack the target's function"


def _dump(own: Own, config: Config, mode: str, pid: int) -> list[str]:
    return [_py_spy(config), "dump", "--json", *_OPTIONS[mode], "--pid", str(pid)]


def prove(own: Own, config: Config) -> Attach:
    """The three modes one after the other: two blocking dumps of one process collide."""
    found: dict[str, Attempt] = {}
    if not _py_spy(config):
        return Attach(guards(), "", *[Attempt("")] * 3)
    canary = None
    try:
        for mode, limit_s in _LIMITS_S.items():
            if own.left_s < 1:
                break
            canary = canary or own.canary()
            argv = _dump(own, config, mode, canary.pid)
            found[mode] = attempt(own, canary, argv, limit_s, wrong=_wrong)
            if not found[mode].answers or found[mode].tracer:
                # What this one left is not the next one's fault.
                own.stop(canary)
                canary = None
    except OSError as problem:
        return Attach(guards(), str(problem), *map(found.get, _LIMITS_S))
    finally:
        if canary is not None:
            own.stop(canary)
    return Attach(guards(), "", *map(found.get, _LIMITS_S))


def control(own: Own, config: Config, uid: int | None = None) -> Control:
    """As root, on a canary of this user; None: of root."""
    if not _py_spy(config):
        return Control(guards(), "", Attempt(""))
    try:
        canary = own.canary(uid)
    except OSError as problem:
        return Control(guards(), str(problem), None)
    try:
        argv = _dump(own, config, "nonblocking", canary.pid)
        tried = attempt(own, canary, argv, _LIMITS_S["nonblocking"], wrong=_wrong)
    finally:
        own.stop(canary)
    return Control(guards(), "", tried)
