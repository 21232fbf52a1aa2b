"""`nodeready stacks --attach`: find one rank, and hold a debugger's session with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gevent

from nodeready.agent import debugger
from nodeready.agent.asking import NodeChannel, Transport, request
from nodeready.agent.debugger import DebuggerConfig, DebuggerOutput
from nodeready.agent.stacks.ranks import CLAIMS
from nodeready.core.exit_codes import FAILED, Refused
from nodeready.core.outcome import gaps_code, node_gaps
from nodeready.fleet.transport.channels import Channels
from nodeready.runs.stacks.collect import Captured

#: What the user types, b"" at its end; and what shows the rank's text to the user.
Terminal = tuple[Callable[[], bytes], Callable[[str], None]]
#: Maximum processes and gaps in a message; seconds of a session, and of output after its input.
_MAX_NAMED, _SESSION_S, _LAST_S = 3, 12 * 3600, 5.0


def find_rank(captured: Captured, rank: int) -> tuple[str, int]:
    """The node and the process of a rank. Raises Refused."""
    rows = [(trace.node, process) for trace in captured.traces() for process in trace.processes]
    rows = [row for row in rows if row[1].rank == rank and not row[1].note.startswith(CLAIMS)]
    rows = rows if captured.complete else []
    if len(rows) == 1:
        return rows[0][0], rows[0][1].pid
    if rows:
        names = ", ".join(f"process {row.pid} on {node}" for node, row in rows[:_MAX_NAMED])
        raise Refused(f"--attach {rank}: several jobs have it ({names}): add --job or --pid")
    gaps = node_gaps(captured.gaps)
    reasons = [f"{gap.node}: {gap.reason}" for gap in gaps[:_MAX_NAMED]]
    code = gaps_code(gaps, complete=captured.complete, usage=not gaps)
    raise Refused("\n".join([f"--attach {rank}: no process has this rank", *reasons]), code)


def hold_session(transport: Transport, node: str, pid: int, rank: int, terminal: Terminal) -> None:
    """Connect the user with the rank's debugger. Raises Refused, also for a lost connection."""
    channels = Channels(transport, time.monotonic() + _SESSION_S)
    config = DebuggerConfig(channels.nonce, transport.tag, rank, pid, _SESSION_S)
    channels.start(request(node, debugger.__name__, config, mark=config.nonce, stdin=True))
    typing = gevent.spawn(_send_input, channels.open[node], terminal[0], gevent.getcurrent())
    try:
        while output := channels.read(node, "debugger", DebuggerOutput, _SESSION_S):
            if output.is_last:
                break
            terminal[1](output.text)
    except gevent.GreenletExit:
        return
    finally:
        typing.kill()
        channels.close()
    if reason := output.text if output else channels.lost[node].reason:
        raise Refused(f"--attach {rank}: {reason}", FAILED)


def _send_input(channel: NodeChannel, read: Callable[[], bytes], session: Any) -> None:
    unsent = b""
    while data := read():
        *lines, unsent = (unsent + data).split(b"\n")
        for line in lines:
            channel.send_line(line.decode("utf-8", "surrogateescape"))
    channel.send_line("q")
    gevent.sleep(_LAST_S)
    gevent.kill(session)
