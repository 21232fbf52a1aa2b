"""`nvhcd`: the node's verdict for NVRx (NVIDIA Resiliency Extension), over one connection.

NVRx's launcher asks a node's health check before its workers meet: the gRPC method
`nvhcd.HealthCheckService/RunHealthCheck` on a Unix socket
(nvidia_resiliency_ext/shared_utils/proto/nvhcd.proto). systemd listens on that socket and starts
this command for each connection, with the connection as its standard input.

gRPC is HTTP/2 (RFC 9113) with a length before each message. A server with one method need not
understand a request: the answer is the same for all of them, so headers are never decoded.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import NamedTuple

from nodeready import exit_codes
from nodeready.audit.document import STOPPING
from nodeready.audit.verdict import NodeVerdict
from nodeready.healthcheck import gate
from nodeready.policy import Policy

# Http2Frame types, flags and the client's first bytes: RFC 9113, sections 3.4 and 6.
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY = 0, 1, 4, 6, 7
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
#: The largest frame that a peer may send without having asked (SETTINGS_MAX_FRAME_SIZE).
_MAX_FRAME_BYTES = 16384
#: Maximum bytes of each of the two texts: the answer fits into one frame and its window.
_MAX_TEXT_BYTES = 6000
#: Maximum failed checks by name: an id has at most 161 characters, and JSON that is cut is none.
_MAX_CHECKS = 35
#: Header fields as literals (RFC 7541, section 6.2.2); 0x88 is `:status: 200`, 0x0f10 the name
#: `content-type` in the static table.
_RESPONSE = b"\x88\x0f\x10\x10application/grpc"
_TRAILER = b"\x00\x0bgrpc-status\x010"
#: Seconds in which a client must send something: it closes the connection after its answer.
_IDLE_S = 30.0


class Http2Frame(NamedTuple):
    """One frame of HTTP/2."""

    kind: int
    flags: int
    stream: int
    payload: bytes = b""

    def packed(self) -> bytes:
        size = struct.pack(">I", len(self.payload))[1:]
        return size + struct.pack(">BBI", self.kind, self.flags, self.stream) + self.payload


def message(verdict: NodeVerdict) -> bytes:
    """The HealthCheckResponse (protobuf): success, exit_code, output, error.

    output: JSON with `fail_count` and `failed_checks`; versions of NVRx read the one or the other
    """
    failed: list[str] = []
    if not verdict.go:
        failed = [row["check"] for row in verdict.results if row["status"] in STOPPING]
        failed = failed or ["nodeready"]
    output = json.dumps({"fail_count": len(failed), "failed_checks": failed[:_MAX_CHECKS]})
    fields = b"" if verdict.go else b"\x10" + bytes([exit_codes.CHECK])
    texts = (0x1A, output), (0x22, "; ".join(verdict.costed_reasons))
    for tag, text in texts:
        data = text.encode("ascii", "replace")[:_MAX_TEXT_BYTES]
        if data:
            fields += bytes([tag, len(data) & 0x7F | 0x80, len(data) >> 7]) + data
    return (b"\x08\x01" if verdict.go else b"") + fields


def answer(stream: int, body: bytes) -> bytes:
    """The frames that answer the request on this stream."""
    data = b"\x00" + struct.pack(">I", len(body)) + body
    frames = (
        Http2Frame(_HEADERS, _END_HEADERS, stream, _RESPONSE),
        Http2Frame(_DATA, 0, stream, data),
        Http2Frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, _TRAILER),
    )
    return b"".join(frame.packed() for frame in frames)


def _read(connection: socket.socket, size: int) -> bytes:
    """``size`` bytes; fewer at the end of the connection."""
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


def _frames(connection: socket.socket) -> Iterator[Http2Frame]:
    """The client's frames, until it closes the connection or sends what is no HTTP/2."""
    if _read(connection, len(_PREFACE)) != _PREFACE:
        return
    while len(head := _read(connection, 9)) == 9:
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        if size > _MAX_FRAME_BYTES or len(payload := _read(connection, size)) < size:
            return
        yield Http2Frame(kind, flags, stream & 0x7FFFFFFF, payload)


def serve(connection: socket.socket, policy: Policy) -> None:
    """Answer each request with the verdict of that moment. Raises OSError."""
    connection.settimeout(_IDLE_S)
    connection.sendall(Http2Frame(_SETTINGS, 0, 0).packed())
    for frame in _frames(connection):
        if frame.kind in (_SETTINGS, _PING) and not frame.flags & _ACK:
            payload = frame.payload if frame.kind == _PING else b""
            connection.sendall(Http2Frame(frame.kind, _ACK, 0, payload).packed())
        elif frame.kind in (_HEADERS, _DATA) and frame.flags & _END_STREAM:
            verdict, _ = gate.current(policy, time.monotonic())
            connection.sendall(answer(frame.stream, message(verdict)))
        elif frame.kind == _GOAWAY:
            return


def run(policy: Policy, arguments: Namespace) -> int:
    """`nvhcd`: serve the connection on standard input. Returns the exit code. Raises OSError."""
    try:
        connection = socket.socket(fileno=os.dup(0))
    except OSError as error:
        problem = "standard input is no connection: nvhcd.socket of systemd starts this command"
        raise OSError(error.errno, problem) from None
    with connection:
        serve(connection, policy)
    return exit_codes.OK
