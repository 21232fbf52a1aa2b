"""What the questions, the sessions and the gateways use of ClusterShell's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from nodeready.transport.clush.ssh_targets import SshTarget


class ClushEngine(Protocol):
    """ClusterShell's process, as its parts see it (`child.ClushProcess`).

    task:     ClusterShell's event loop
    invoke:   the line that runs the program of a gateway
    jobs:     the batches that run
    sessions: number -> a command that is spoken with
    gateways: name -> the connection to a gateway
    reached:  nodes on which something of this run may run
    """

    task: Any
    tag: str
    invoke: str
    batches: set[Any]
    sessions: dict[int, Any]
    gateways: dict[str, Any]
    reached: set[str]

    def gateway_fanout(self) -> int: ...
    def gateway_target(self, name: str) -> SshTarget: ...
    def say(self, *frame: Any) -> None: ...
    def later(
        self, seconds: float, action: Callable[[], object], interval: float = -1.0
    ) -> None: ...
    def gateway_judged(self) -> None: ...
    def gateway_closed(self, gateway: Any, fit: bool) -> None: ...
