"""The node's part in the test of its RDMA ports: ib_write_bw, with the same port of a peer.

The program waits for requests on its standard input, and ends with it. It writes no file. A server
of ib_write_bw listens on a free port of the job's range, for one client.
"""

from __future__ import annotations

import glob
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from nodeready.agent.proc import all_listeners, file_text
from nodeready.agent.proofs.active import IdleTools, failure
from nodeready.agent.proofs.mesh import answer_requests, local_addresses, peer_address
from nodeready.agent.resolver import resolve
from nodeready.agent.runtime import ProcessSupervisor, hold_streams
from nodeready.core import wire
from nodeready.core.shell import find_program
from nodeready.subjects.proof.facts import ProofConfig, RdmaRate

_TOOL = "ib_write_bw"
#: It measures the second of three seconds: the duration must be more than two margins.
_WORDS = ("-D", "3", "-f", "1", "-s", "1048576", "-F", "--report_gbits")
#: Seconds for a server until it listens, and for a client: it connects, writes, and disconnects.
SERVE_S, MEASURE_S = 10.0, 12.0
_MAX_PORTS = 16  # maximum ports of a node


@dataclass(frozen=True)
class RdmaStart:
    """The program's first line."""

    absent: wire.Line = ""  # why the test does not apply to the node; "": it does
    error: wire.Line = ""  # why the node cannot be tested; "": it can
    links: tuple[RdmaRate, ...] = ()  # the rates of its active ports' links
    addresses: tuple[wire.Name, ...] = ()  # the node's own, of IPv4


@dataclass(frozen=True)
class RdmaServer:
    """A server that waits for its client."""

    tcp_port: wire.Port | None = None  # on which it listens; None: it does not
    error: wire.Line = ""  # why it does not listen


def active_links(directory: str = "/sys/class/infiniband") -> tuple[RdmaRate, ...]:
    """The links of active InfiniBand and RoCE ports. Devices that are no channel adapters (iWARP,
    EFA) do not connect by ib_write_bw's way.
    """
    links = []
    for path in sorted(glob.glob(f"{glob.escape(directory)}/*/ports/*")):
        device, _, number = path.rpartition("/ports/")
        is_adapter = file_text(f"{device}/node_type").startswith("1:")
        rate = re.match(r"\d{1,5}(\.\d{1,2})?", file_text(f"{path}/rate"))
        if is_adapter and rate and "ACTIVE" in file_text(f"{path}/state"):
            links.append(RdmaRate(f"{os.path.basename(device)}/{number}", float(rate[0])))
    return tuple(links[:_MAX_PORTS])


# 65536  4159603  0.00  363.47  0.693268
_ROW = re.compile(r"\s*\d{1,12}\s+\d{1,12}\s+\d{1,9}\.\d{1,9}\s+(\d{1,9}\.\d{1,9})(?:\s.*)?")


def read_rate(text: str) -> float | None:
    """The average in Gbit/s that ib_write_bw printed (perftest 4 to 25); None: no table."""
    _, header, table = text.partition("BW average[Gb/sec]")
    rates = [match[1] for row in table.splitlines() if header and (match := _ROW.fullmatch(row))]
    return float(rates[-1]) if rates else None


def _port_words(port: str, tcp_port: int) -> tuple[str, ...]:
    device, _, number = port.partition("/")
    return (*_WORDS, "-d", device, "-i", number, "-p", str(tcp_port))


def _is_listening(tcp_port: int) -> bool:
    """Whether a program listens on this port. To bind it would keep a server from it."""
    return any(listener.port == tcp_port for listener in all_listeners())


class _RdmaTester:
    def __init__(self, supervisor: ProcessSupervisor, tcp_ports: tuple[int, int]) -> None:
        self._supervisor, self._tcp_ports = supervisor, range(tcp_ports[0], tcp_ports[1] + 1)
        self._tools = IdleTools(supervisor)
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> RdmaStart:
        links = active_links()
        if not links:
            return RdmaStart("no active port of InfiniBand or RoCE")
        error = self._tools.missing(_TOOL)
        if not error and find_program("nvidia-smi"):
            error = self._tools.busy()
        return RdmaStart("", error, links, tuple(a for a in local_addresses() if "." in a))

    def serve(self, port: str) -> RdmaServer:
        if self._server is not None:
            self._supervisor.stop(self._server)
        tcp_port = next((port for port in self._tcp_ports if not _is_listening(port)), None)
        if tcp_port is None:
            return RdmaServer(error="every port of port_range is in use")
        words = (str(find_program(_TOOL)), *_port_words(port, tcp_port))
        server = self._server = self._supervisor.start(words, stderr=subprocess.STDOUT)
        assert server.stdout is not None
        until = time.monotonic() + SERVE_S
        while server.poll() is None and time.monotonic() < until:
            if _is_listening(tcp_port):
                return RdmaServer(tcp_port)
            time.sleep(0.05)
        text = server.stdout.read(300).decode("utf-8", "replace") if server.returncode else ""
        return RdmaServer(error=" ".join(text.split()) or f"does not listen in {SERVE_S:.0f} s")

    def measure(self, port: str, tcp_port: int, target: str, addresses: list[str]) -> RdmaRate:
        """Write to the server of the same port on the target."""
        resolved, error = resolve(target)
        address = peer_address(resolved, addresses, local_addresses())
        if not address:
            return RdmaRate(port, error=f"{target} has no address ({error or 'see proof.mesh'})")
        ended = self._tools.run(_TOOL, *_port_words(port, tcp_port), address, limit_s=MEASURE_S)
        gbps = read_rate(ended.out) if ended.rc == 0 else None
        return RdmaRate(port, gbps, "" if gbps is not None else failure(ended))


def main(config: ProofConfig, *, ports: tuple[int, int]) -> None:
    """Serve and measure, as the lines of the standard input say: JSON objects with the arguments
    of `_RdmaTester.serve` or, with tcp_port, of `_RdmaTester.measure`.
    ports: first and last TCP port of the job's range
    """
    hold_streams()
    signal.alarm(config.limit_s)
    supervisor = ProcessSupervisor(config.tag, config.limit_s)
    supervisor.end_on_signals()
    tester = _RdmaTester(supervisor, ports)

    def answer(words: dict[str, Any]) -> RdmaRate | RdmaServer:
        return tester.measure(**words) if "tcp_port" in words else tester.serve(**words)

    answer_requests(config.nonce, "rdma", tester.start, answer, supervisor.end)
