"""A program of ours on a node: the request that runs it, and its answer as rows.

A program is a module with ``main(config)`` and a dataclass ``Config``, which has at least a
``nonce``, a ``tag`` and ``limit_s``; see `nodeready.node.payload`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nodeready.node import payload
from nodeready.subjects import wire
from nodeready.transport.base import Answer, Request

#: Seconds that a command has on a node beyond the program's own limit.
MARGIN_S = 2


def new_nonce() -> str:
    """A random word with which each line of a program's answer begins."""
    return f"nodeready-{os.urandom(8).hex()}"


def request(
    node: str, main: str, config: Any, *, margin_s: int = MARGIN_S, mark: str = "", **how: Any
) -> Request:
    """What runs the module ``main`` with this config on a node.

    how: as for `payload.program`
    """
    made = payload.program(main, config, **how)
    return Request(node, made.script, config.limit_s + margin_s, made.text, mark)


def rows(
    answer: Answer,
    config: Any,
    kinds: Mapping[str, type[Any]],
    refused: list[str] | None = None,
) -> list[Any]:
    """What a node's program printed, as these dataclasses.

    refused: gets the reason of each row that makes no sense, which then costs itself alone
    Raises DecodeError: without ``refused`` for any such row, else for an answer that is too large.
    """
    found = []
    for name, data in wire.lines(answer.stdout, config.nonce):
        try:
            if name in kinds:
                found.append(wire.decode(kinds[name], data))
        except wire.DecodeError as problem:
            if refused is None:
                raise
            refused.append(problem.reason)
    return found


def no_answer_reason(answer: Answer, config: Any, what: str) -> str:
    """Why a node's program printed no row that we know.

    what: what is not done without a Python, such as "cores cannot be looked at"
    """
    if f"{config.nonce} {payload.NO_PYTHON}" in answer.stdout:
        return f"{payload.NO_PYTHON}: {what}"
    return answer.error or "no answer from the node's Python"
