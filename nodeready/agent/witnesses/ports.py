"""Network and RDMA ports: two samples of their counters show the traffic between them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nodeready.agent.proc import list_directory
from nodeready.agent.runtime import ForkedWorker
from nodeready.agent.stacks import processes


@dataclass(frozen=True)
class WitnessedPort:
    """One network or RDMA port between two samples."""

    name: str
    kind: str  # ``ethernet``, ``infiniband`` or ``roce``
    state: str  # ``up``, ``down``, ``gone`` or another state of the kernel
    received: int  # bytes between the samples
    sent: int  # likewise
    # counters that rose, and by how much: ((``symbol_error``, 3), ...)
    errors: tuple[tuple[str, int], ...] = ()
    gbps: float = 0.0  # the rate of the link, Gb/s; 0: unknown


@dataclass(frozen=True)
class Network:
    """All ports of the node. seconds: between the two samples. absent: why there are none."""

    absent: str = ""
    seconds: float = 0.0
    ports: tuple[WitnessedPort, ...] = ()


#: Seconds for reading all of them.
_COUNTERS_S = 3.0
_MAX_PORTS = 256
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count words of four bytes (IBTA, PortCounters)

#: Error counters of an interface in /sys/class/net/NAME/statistics: zero on a healthy link.
_NET_ERRORS = (
    "rx_errors", "tx_errors", "tx_dropped", "rx_crc_errors", "rx_missed_errors",
    "rx_fifo_errors", "tx_carrier_errors",
)  # fmt: skip
#: Errors of an RDMA port in counters (Linux' sysfs-class-infiniband), in its driver's hw_counters.
_PORT_ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
    "port_rcv_remote_physical_errors", "port_xmit_discards", "port_xmit_constraint_errors",
    "port_rcv_constraint_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors", "VL15_dropped",
)  # fmt: skip
_HW_ERRORS = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err",
    "implied_nak_seq_err", "out_of_buffer", "rx_icrc_encapsulated", "rx_drops",
    "retrans_timeout_events",
)  # fmt: skip
#: Byte counters in hw_counters of a device that has no others (EFA): received, sent.
_HW_RECEIVED = ("rx_bytes", "rdma_read_bytes", "rdma_write_recv_bytes")
_HW_SENT = ("tx_bytes", "rdma_read_resp_bytes", "rdma_write_bytes")

#: State of a port whose byte counters cannot be read, so that it does not pass for a quiet one.
UNREADABLE = "unreadable"


def counters(root: str = "/sys/class") -> dict[str, Any]:
    """Port -> kind, state, counters (see `network`); ``absent``: why not. root: of the classes"""
    until = time.monotonic() + _COUNTERS_S
    worker = ForkedWorker(lambda send: send({"ports": dict(_all_ports(root))}), _COUNTERS_S + 1.0)
    hangs = {"absent": "a counter of a network port hangs in the kernel"}
    try:
        for message in worker.messages(_COUNTERS_S, until):
            return hangs if message is None else dict(message)
    finally:
        worker.end()
    return {"absent": "the counters of the network ports cannot be read"}


def _all_ports(root: str) -> Iterator[tuple[str, dict[str, Any]]]:
    names = [name for name in list_directory(f"{root}/net") if name != "lo"][:_MAX_PORTS]
    physical = [name for name in names if os.path.exists(f"{root}/net/{name}/device")]
    # A container may have only the interfaces that its host created.
    for name in physical or names:
        yield name, _interface(f"{root}/net/{name}")
    for device in list_directory(f"{root}/infiniband")[:_MAX_PORTS]:
        for port in list_directory(f"{root}/infiniband/{device}/ports"):
            if port.isdecimal():
                yield f"{device}/{port}", _rdma(f"{root}/infiniband/{device}/ports/{port}")


def _values(directory: str, names: Iterable[str]) -> dict[str, int]:
    """The counters that exist and can be read; some drivers refuse to read one (EINVAL)."""
    values = {}
    for name in names:
        text = processes.contents(f"{directory}/{name}", 64).strip()
        if re.fullmatch(r"\d{1,20}", text):
            values[name] = int(text)
    return values


def _interface(path: str) -> dict[str, Any]:
    state = processes.contents(f"{path}/operstate").strip()
    if state not in ("up", "down") and processes.contents(f"{path}/carrier").strip() == "1":
        state = "up"
    values = _values(f"{path}/statistics", ("rx_bytes", "tx_bytes"))
    return {
        # ARPHRD_INFINIBAND of linux/if_arp.h: IP over InfiniBand.
        "kind": "infiniband" if processes.contents(f"{path}/type").strip() == "32" else "ethernet",
        "state": state[:20], "rdma": False, "received": values.get("rx_bytes"),
        "sent": values.get("tx_bytes"),
        "errors": {
            **_values(f"{path}/statistics", _NET_ERRORS),
            **_values(path, ("carrier_changes",)),
        },
        # Mb/s; -1, or an error, if the driver does not know it.
        "gbps": _values(path, ("speed",)).get("speed", 0) / 1000,
    }  # fmt: skip


def _rdma(path: str) -> dict[str, Any]:
    layer = processes.contents(f"{path}/link_layer").strip()
    state = processes.contents(f"{path}/state").partition(":")[2].strip().lower()
    rate = re.match(r"(\d{1,5}(?:\.\d{1,3})?) Gb/sec", processes.contents(f"{path}/rate", 64))
    values = _values(f"{path}/counters", ("port_rcv_data", "port_xmit_data"))
    received, sent = values.get("port_rcv_data"), values.get("port_xmit_data")
    words = received is not None or sent is not None
    if not words:
        many = _values(f"{path}/hw_counters", (*_HW_RECEIVED, *_HW_SENT))
        if "rx_bytes" in many and "tx_bytes" in many:
            received, sent = (
                sum(many.get(n, 0) for n in names) for names in (_HW_RECEIVED, _HW_SENT)
            )
    return {
        "kind": "roce" if layer == "Ethernet" else "infiniband",
        "state": "up" if state == "active" else state[:20] or "unknown", "rdma": True,
        "words": words, "received": received, "sent": sent,
        "errors": {
            **_values(f"{path}/counters", _PORT_ERRORS),
            **_values(f"{path}/hw_counters", _HW_ERRORS),
        },
        # ``400 Gb/sec (4X NDR)``
        "gbps": float(rate[1]) if rate else 0.0,
    }  # fmt: skip


def network(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Network:
    """The traffic between two samples (`counters`), without ports that are down both times; RDMA
    ports are listed even then. seconds: between the samples
    """
    for sample in (before, after):
        if "ports" not in sample:
            return Network(str(sample.get("absent", "the network ports were not sampled")))
    old, new = before["ports"], after["ports"]
    sampled = [_port(name, old[name], new[name]) for name in new if name in old]
    gone = (name for name in old if name not in new)
    sampled += [WitnessedPort(name, old[name]["kind"], "gone", 0, 0) for name in gone]
    ports = tuple(port for port in sampled if port is not None)
    return Network("" if ports else "no network port is up", round(seconds, 3), ports)


def _port(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> WitnessedPort | None:
    if not new["rdma"] and "up" not in (old["state"], new["state"]):
        return None
    received, sent = (_counter_increase(old[key], new[key]) for key in ("received", "sent"))
    unit = _WORD_BYTES if new.get("words") else 1
    errors = ((name, old["errors"].get(name), value) for name, value in new["errors"].items())
    increases = [(name, _counter_increase(*values, full=False)) for name, *values in errors]
    is_unreadable = new["state"] == "up" and (received is None or sent is None)
    return WitnessedPort(
        name, new["kind"], UNREADABLE if is_unreadable else new["state"], (received or 0) * unit,
        (sent or 0) * unit,
        tuple((counter, increase) for counter, increase in increases if increase), new["gbps"],
    )  # fmt: skip


def _counter_increase(old: int | None, new: int | None, *, full: bool = True) -> int | None:
    """The increase of a counter; None: unknown. full: where a counter of 32 bits stays"""
    if old is None or new is None or (full and old == new == 0xFFFFFFFF):
        return None
    if new >= old:
        return new - old
    # It restarted: after 32 bits, or because its driver was reloaded.
    wrapped = new + (1 << 32) - old
    return wrapped if old < 1 << 32 and wrapped < 1 << 31 else None
