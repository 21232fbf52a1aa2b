"""The verdict for NVRx, to the recorded bytes of gRPC's own client (grpcio 1.85.3)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from nodeready.audit.verdict import NodeVerdict
from nodeready.healthcheck import gate, nvhcd
from nodeready.policy import Policy

CLIENT = bytes.fromhex(Path(__file__).with_name("data").joinpath("nvhcd_client.hex").read_text())
GO = NodeVerdict(1.0, "boot", "digest", True)
ROWS = ({"check": "gpus.xid", "status": "fail"}, {"check": "nics.mtu", "status": "warn"})
LONGEST = {"check": f"{'x' * 80}.{'y' * 80}", "status": "fail"}
NO_GO = NodeVerdict(1.0, "boot", "digest", False, ("gpus.xid: 79 é",), results=ROWS)
FULL = NodeVerdict(1.0, "boot", "digest", False, ("x" * 99999,), results=(LONGEST,) * 999)


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, flags, stream, payload) of each frame of HTTP/2."""
    rows = []
    while data:
        size = int.from_bytes(data[:3], "big")
        rows.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return rows


def fields(message: bytes) -> dict[int, Any]:
    """The fields of a protobuf message by their numbers."""
    found: dict[int, Any] = {}

    def number() -> int:
        nonlocal message
        value = shift = 0
        while True:
            byte, message = message[0], message[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while message:
        tag = number()
        value = number()
        if tag & 7 == 2:
            found[tag >> 3], message = message[:value].decode(), message[value:]
        else:
            found[tag >> 3] = value
    return found


def answer_to(sent: bytes, monkeypatch, verdicts=(GO,)) -> bytes:
    """The answer to a client that sends this and then closes."""
    left = [*verdicts]
    monkeypatch.setattr(gate, "current", lambda *given: (left.pop(0), None))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with ours:
            nvhcd.serve(ours, Policy())
        theirs.settimeout(10)
        answered = b""
        # What the server has not read resets the connection.
        with contextlib.suppress(ConnectionResetError):
            while data := theirs.recv(1 << 16):
                answered += data
        return answered


def test_grpcs_client_gets_the_verdict_of_each_call(monkeypatch):
    rows = frames(answer_to(CLIENT, monkeypatch, (GO, NO_GO, FULL)))
    # The settings come first; the client's settings and pings are confirmed.
    assert rows[0] == (4, 0, 0, b"")
    assert (4, 1, 0, b"") in rows
    assert {len(payload) for kind, flags, _, payload in rows if kind == 6 and flags == 1} == {8}
    answers = []
    for stream in (1, 3, 5):
        head, data, tail = (row for row in rows if row[2] == stream)
        assert head[:2] == (1, 4)
        assert tail == (1, 5, stream, b"\x00\x0bgrpc-status\x010")
        assert data[3][:5] == b"\0" + (len(data[3]) - 5).to_bytes(4, "big")
        assert len(data[3]) <= 16384
        answers.append(fields(data[3][5:]))
    go, no_go, full = answers
    assert go == {1: 1, 3: '{"fail_count": 0, "failed_checks": []}'}
    assert no_go == {
        2: 3, 3: '{"fail_count": 1, "failed_checks": ["gpus.xid"]}', 4: "gpus.xid: 79 ?"
    }  # fmt: skip
    assert (json.loads(full[3])["fail_count"], len(full[4])) == (999, 6000)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", CLIENT[:20], CLIENT[:40], CLIENT[:24] + b"\xff" * 40],
)
def test_what_is_no_http_2_gets_no_verdict(sent, monkeypatch):
    assert [row[0] for row in frames(answer_to(sent, monkeypatch, ())) if row[0] != 4] == []


def test_a_client_that_says_nothing_is_left(monkeypatch):
    monkeypatch.setattr(nvhcd, "_IDLE_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(CLIENT[:100])
        with pytest.raises(TimeoutError):
            nvhcd.serve(ours, Policy())


def test_a_start_by_hand_names_what_starts_it(monkeypatch):
    monkeypatch.setattr(nvhcd.os, "dup", lambda number: os.open(os.devnull, os.O_RDONLY))
    with pytest.raises(OSError, match="standard input is no connection"):
        nvhcd.run(Policy(), Namespace())
