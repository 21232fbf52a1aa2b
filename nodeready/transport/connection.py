"""paramiko's connection within bounds: a node's sshd is a stranger, before and after the login.

All connections of a run share one thread (gevent). paramiko reads for as long as there is
something to read, and believes lengths and counts: an sshd that never stops talking, or one packet
with a large number in it, would stop the connections to all other nodes, and no deadline would
come. Here a connection reads for a moment, then the others have their turn; and what is no answer
to a question of ours has an end.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, cast

import gevent
from paramiko import Message, SSHException, Transport
from paramiko.common import MSG_EXT_INFO, MSG_KEXINIT, MSG_USERAUTH_INFO_REQUEST
from paramiko.kex_gex import KexGex, KexGexSHA256
from paramiko.packet import Packetizer
from paramiko.ssh_exception import AuthenticationException

#: Seconds that a connection with more to read may keep the others waiting.
TURN_S = 0.005
#: Seconds of a read that had to wait: then the others have had their turn.
_WAITED_S = 0.0002
#: Bytes that an sshd may say unasked: its banner, two key exchanges, a login.
UNASKED_BYTES = 1 << 20
#: A read of few bytes counts as so many, because it costs as much as they do.
_LEAST_BYTES = 128
#: An agreement on new keys counts as so many bytes. sshd asks for one after 1 GiB (RekeyLimit).
_KEYS_BYTES = 64 << 10
#: The largest packet; OpenSSH's limit as well (packet.c, PACKET_MAX_SIZE).
PACKET_BYTES = 256 << 10
#: The most pairs, or questions at a login, that one packet may announce.
_MOST = 64
#: Bits of our secret for a group that the sshd chooses: twice those of the longest key that is
#: made of it (RFC 4419, section 6.2). paramiko takes as many as the group has, seconds of work.
_SECRET_BITS = 512
#: The words of a connection that was ended because the sshd never stopped.
ENDLESS = "sends without end"


class _Socket:
    """A connection's socket for paramiko: bounded, and fair to the other connections."""

    def __init__(self, sock: Any) -> None:
        self._sock, self.left = sock, UNASKED_BYTES
        self._turn = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def spend(self, count: int) -> None:
        """Count these bytes. Raises EOFError, which ends the connection, for too many."""
        self.left -= count
        if self.left < 0:
            raise EOFError(ENDLESS)

    def recv(self, count: int) -> bytes:
        before = time.monotonic()
        if before - self._turn > TURN_S:
            gevent.sleep(0)
            self._turn = before = time.monotonic()
        data: bytes = self._sock.recv(count)
        after = time.monotonic()
        if after - before > _WAITED_S:
            self._turn = after
        self.spend(max(_LEAST_BYTES, len(data)))
        return data


class _Packets(Packetizer):
    """paramiko's packets, with lengths and counts that a packet can have."""

    def __init__(self, sock: Any) -> None:
        self.bounds = _Socket(sock)
        super().__init__(cast("Any", self.bounds))

    def read_all(self, n: int, check_rekey: bool = False) -> Any:
        if n > PACKET_BYTES:
            raise SSHException(f"a packet of {n} bytes")
        return super().read_all(n, check_rekey)

    def read_message(self) -> Any:
        kind, message = super().read_message()
        if kind == MSG_KEXINIT:
            self.bounds.spend(_KEYS_BYTES)
        elif kind in (MSG_EXT_INFO, MSG_USERAUTH_INFO_REQUEST) and _count(kind, message) > _MOST:
            raise SSHException("a packet announces more than it has")
        return kind, message


def _count(kind: int, message: Message) -> int:
    """How many things the packet says will follow."""
    if kind == MSG_USERAUTH_INFO_REQUEST:
        # Name, instruction, language (RFC 4256, section 3.2).
        for _ in range(3):
            message.get_string()
    count: int = message.get_int()
    message.rewind()
    return count


class _Group(KexGex):
    """A group of the sshd's choice, with a secret of a sensible length."""

    def _generate_x(self) -> None:
        self.x = secrets.randbits(_SECRET_BITS) | 1 << (_SECRET_BITS - 1)


class _GroupSHA256(_Group, KexGexSHA256):
    """The same, with the other digest."""


class Bounded(Transport):
    """An SSH connection of paramiko's within bounds. `SSHClient.connect` takes it as its
    ``transport_factory``."""

    _kex_info = {
        **Transport._kex_info,  # type: ignore[attr-defined]
        **{one.name: one for one in (_Group, _GroupSHA256)},
    }

    def __init__(self, sock: Any, **how: Any) -> None:
        super().__init__(sock, packetizer_class=_Packets, **how)

    def auth_interactive_dumb(self, *how: Any, **more: Any) -> Any:
        """Raises AuthenticationException: paramiko would print what the sshd says, and send it
        what the user types."""
        raise AuthenticationException("authentication asks questions")


def allow(transport: Any, count: int) -> None:
    """From now on the sshd may say ``count`` bytes more: the answer to a question."""
    bounds = getattr(getattr(transport, "packetizer", None), "bounds", None)
    if bounds is not None:
        bounds.left = min(bounds.left + count, UNASKED_BYTES + 4 * count)


def endless(transport: Any) -> bool:
    """Whether the connection ended because the sshd never stopped."""
    bounds = getattr(getattr(transport, "packetizer", None), "bounds", None)
    return bounds is not None and bounds.left < 0


# --- Why there is no connection, in one line.


def connect_error(
    text: str, address: str, *, user: str, key: str, known_hosts: str, limit_s: int
) -> str:
    """Why a connection failed, from pyinfra's words: what, where, what to do.

    address: the host, or ``[host]:port`` as known_hosts files write it
    """
    lowered = text.lower()
    if "host key error" in lowered or "does not match" in lowered:
        return (
            f"host key of {address} changed; refused. If the node was re-imaged: "
            f"ssh-keygen -f {known_hosts} -R {address}"
        )
    if "no host key for" in lowered:
        return f"host key of {address} is not in {known_hosts}; refused (ssh-keyscan adds it)"
    for pattern, words in (
        (r"proxycommand|proxyjump", "the ProxyCommand of the ssh configuration here fails"),
        (r"too many authentication", "sshd hangs up before the right key: name it with --ssh-key"),
        (r"no acceptable|incompatible ssh peer", "no algorithm in common with its sshd"),
        (r"saw eof", "sshd closed the connection during the login: read its log there"),
    ):
        if re.search(pattern, lowered):
            return f"{address}: {words} ({text})"
    if "authentication" in lowered:
        return f"{address} refused user {user} with {key}"
    if "private key file" in lowered:
        if "is encrypted" in lowered:
            return f"{key} is encrypted: unlock it in an ssh agent"
        return f"{key}: no such key file" if "no such" in lowered else f"{key} is no private key"
    if "could not resolve" in lowered or "name or service not known" in lowered:
        return f"host name {address} does not resolve"
    for pattern, words in (
        (ENDLESS, ENDLESS),
        (r"banner", "accepts connections but sends no SSH banner"),
        (r"during the handshake", f"stopped during the SSH handshake, within {limit_s} s"),
        (r"connection refused", "connection refused: is sshd running?"),
        (r"no route to host|unreachable", "no route to the node"),
        (r"timed? ?out", f"no answer in {limit_s} s"),
        (r"reset by peer|eof", "the node closed the connection"),
    ):
        if re.search(pattern, lowered):
            return f"{address}: {words}"
    return f"{address}: {text}"
