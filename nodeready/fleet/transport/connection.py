"""A connection to a node's sshd: its socket, its bounds, and why it fails.

A node's sshd is not trusted, before or after the login. All connections of a run share one thread
(gevent). paramiko reads as long as there is something to read, and trusts lengths and counts: an
sshd that never stops sending, or one packet with a large number in it, would block the connections
to all other nodes, and their deadlines. Here the connections take turns to read, and an sshd may
send only some bytes unasked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from typing import Any, cast

import gevent
from paramiko import Message, SSHException, Transport
from paramiko.channel import Channel
from paramiko.common import (
    MSG_CHANNEL_OPEN,
    MSG_EXT_INFO,
    MSG_KEXINIT,
    MSG_USERAUTH_INFO_REQUEST,
    byte_chr,
)
from paramiko.kex_gex import KexGexSHA256
from paramiko.packet import Packetizer
from paramiko.ssh_exception import AuthenticationException, NoValidConnectionsError

from nodeready.agent.asking import DEAD_AFTER_S, KEEPALIVE_S
from nodeready.agent.local import end_session
from nodeready.agent.proc import file_text, first_number
from nodeready.core import shell
from nodeready.fleet.transport import Note
from nodeready.fleet.transport.ssh_config import SshConfigError, SshSettings

# --- paramiko's connection, within bounds.

TURN_S = 0.005  # seconds that a connection with more to read may block its peers
_WAITED_S = 0.0002  # A read that takes longer has waited, and other connections ran meanwhile
#: Bytes that an sshd may say unasked: its banner, two key exchanges, a login.
UNASKED_BYTES = 1 << 20
_MIN_BYTES = 128  # bytes that a small read counts as, because it costs as much
#: Bytes that an agreement on new keys counts as. sshd asks for one after 1 GiB (RekeyLimit).
_KEYS_BYTES = 64 << 10
PACKET_BYTES = 256 << 10  # the largest packet; OpenSSH's limit as well (packet.c, PACKET_MAX_SIZE)
_COUNTED = (MSG_EXT_INFO, MSG_USERAUTH_INFO_REQUEST)
_MAX_COUNT = 64  # maximum items that a packet may announce: pairs, or questions at a login
#: Bits of our secret for a group that the sshd chooses: twice those of the longest key that is
#: made of it (RFC 4419, section 6.2). paramiko takes as many as the group has, seconds of work.
_SECRET_BITS = 512
ENDLESS = "sends without end"  # the error of a connection that exceeded its bytes


class _FairSocket:
    """A connection's socket for paramiko. It limits the bytes, and lets other connections run."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self.remaining_bytes: float = UNASKED_BYTES
        self._turn = time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def spend(self, count: int) -> None:
        """Count these bytes. Raises EOFError, which ends the connection, for too many."""
        self.remaining_bytes -= count
        if self.remaining_bytes < 0:
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
        self.spend(max(_MIN_BYTES, len(data)))
        return data


class _BoundedPacketizer(Packetizer):
    """paramiko's packets, with lengths and counts that a packet can have."""

    def __init__(self, sock: Any) -> None:
        self.bounds = _FairSocket(sock)
        #: The last line before the sshd's banner, which may say why sshd refuses us.
        self.before_banner = ""
        super().__init__(cast("Any", self.bounds))

    def read_all(self, n: int, check_rekey: bool = False) -> Any:
        if n > PACKET_BYTES:
            raise SSHException(f"a packet of {n} bytes")
        return super().read_all(n, check_rekey)

    def readline(self, timeout: float) -> Any:
        line = super().readline(timeout)
        if not line.startswith("SSH-"):
            self.before_banner = line.strip()[:200]
        return line

    def read_message(self) -> Any:
        kind, message = super().read_message()
        if kind == MSG_KEXINIT:
            self.bounds.spend(_KEYS_BYTES)
        elif kind in _COUNTED and _count(kind, message) > _MAX_COUNT:
            raise SSHException("a packet announces more than it has")
        return kind, message


def _count(kind: int, message: Message) -> int:
    """The number of items that the packet announces."""
    if kind == MSG_USERAUTH_INFO_REQUEST:
        # Name, instruction, language (RFC 4256, section 3.2).
        for _ in range(3):
            message.get_string()
    count: int = message.get_int()
    message.rewind()
    return count


class _DhGroup(KexGexSHA256):
    """A group of the sshd's choice, with a secret of _SECRET_BITS."""

    def _generate_x(self) -> None:
        self.x = secrets.randbits(_SECRET_BITS) | 1 << (_SECRET_BITS - 1)


#: Algorithms with SHA-1. ssh does not use them by default (OpenSSH 8.8), and paramiko 5 lacks
#: them; paramiko 4 accepts their signatures (CVE-2026-44405).
_SHA1 = re.compile(r"ssh-rsa|.*-sha1")


def _without_sha1(algorithms: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(algorithm for algorithm in algorithms if not _SHA1.fullmatch(algorithm))


class JumpRefusal(Exception):
    """A jump host's sshd refused a forward. code: RFC 4254, section 5.1; text: its words"""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class BoundedTransport(Transport):
    """An SSH connection of paramiko's within bounds, and without SHA-1. `SSHClient.connect` takes
    it as its ``transport_factory``.
    """

    _kex_info = {**Transport._kex_info, _DhGroup.name: _DhGroup}  # type: ignore[attr-defined]
    _preferred_kex = _without_sha1(Transport._preferred_kex)  # type: ignore[attr-defined]
    _preferred_keys = _without_sha1(Transport._preferred_keys)  # type: ignore[attr-defined]
    _preferred_pubkeys = _without_sha1(Transport._preferred_pubkeys)  # type: ignore[attr-defined]

    def __init__(self, sock: Any, **how: Any) -> None:
        super().__init__(sock, packetizer_class=_BoundedPacketizer, **how)
        #: Algorithms of the sshd's host key, best first; () for paramiko's own order.
        self.host_key_order: tuple[str, ...] = ()
        self._refused: dict[int, tuple[int, str]] = {}

    @property
    def preferred_keys(self) -> Any:
        return self.host_key_order or super().preferred_keys

    def open_forward(self, host: str, port: int, limit_s: float) -> Channel:
        """A connection from the sshd's machine to ``host``.

        paramiko's `open_channel` confuses the refusals of several forwards that open at once.
        Raises JumpRefusal with the sshd's words, TimeoutError, EOFError, SSHException.
        """
        private: Any = self
        with self.lock:
            number = private._next_channel()
            message = Message()
            message.add_byte(byte_chr(MSG_CHANNEL_OPEN))
            message.add_string("direct-tcpip")
            message.add_int(number)
            message.add_int(self.default_window_size)
            message.add_int(self.default_max_packet_size)
            for address, port_number in ((host, port), ("127.0.0.1", 0)):
                message.add_string(address)
                message.add_int(port_number)
            channel: Any = Channel(number)
            private._channels.put(number, channel)
            reply_event = self.channel_events[number] = threading.Event()
            self.channels_seen[number] = True
            channel._set_transport(self)
            channel._set_window(self.default_window_size, self.default_max_packet_size)
        private._send_user_message(message)
        until = time.monotonic() + limit_s
        while not reply_event.wait(0.2):
            if not self.active:
                raise EOFError("connection lost")
            if time.monotonic() > until:
                raise TimeoutError("timed out")
        if number in self._refused:
            raise JumpRefusal(*self._refused.pop(number))
        if not self.active:
            raise EOFError("connection lost")
        return cast("Channel", channel)

    def _check_banner(self) -> None:
        private: Any = self
        try:
            super()._check_banner()  # type: ignore[misc]
        except SSHException as problem:
            # paramiko appends its read error, except if the sshd closed the connection.
            if re.search(r"protocol banner($|.*reset by peer)", str(problem), re.I):
                raise SSHException(f"{HUNG_UP}: {private.packetizer.before_banner}") from None
            raise

    def _verify_key(self, host_key: bytes, signature: bytes) -> None:
        # An sshd can sign with an algorithm other than the negotiated one.
        if _SHA1.fullmatch(Message(signature).get_text()):
            raise SSHException("Signature verification failed: SHA-1")
        super()._verify_key(host_key, signature)  # type: ignore[misc]

    def _parse_channel_open_failure(self, message: Message) -> Any:
        number, code, text = message.get_int(), message.get_int(), message.get_text()
        if number in self.channel_events:
            self._refused[number] = code, text[:200]
        message.rewind()
        return super()._parse_channel_open_failure(message)  # type: ignore[misc]

    def auth_interactive_dumb(self, *how: Any, **named: Any) -> Any:
        """Raises AuthenticationException: paramiko would print what the sshd says, and send it
        what the user types.
        """
        raise AuthenticationException("authentication asks questions")


def allow_bytes(transport: Any, count: int) -> None:
    """Allow the sshd ``count`` more bytes: the answer to a question."""
    bounds = getattr(getattr(transport, "packetizer", None), "bounds", None)
    if bounds is not None:
        bounds.remaining_bytes = min(bounds.remaining_bytes + count, UNASKED_BYTES + 4 * count)


def sent_without_end(transport: Any) -> bool:
    """Whether the connection ended because the sshd sent too much."""
    bounds = getattr(getattr(transport, "packetizer", None), "bounds", None)
    return bounds is not None and bounds.remaining_bytes < 0


#: ssh_config's keyword -> paramiko's list of algorithms.
_KEYS = {"ciphers": "ciphers", "macs": "macs", "kexalgorithms": "kex", "hostkeyalgorithms": "keys"}


def restrict_algorithms(transport: Any, settings: SshSettings) -> None:
    """Use only the algorithms of ssh_config, in its order. Raises SshConfigError for none."""
    for key, name in _KEYS.items():
        if key in settings.changed_keys:
            supported = getattr(transport, f"_preferred_{name}")
            allowed = settings.value(key).split(",")
            # paramiko has only the older name of the same algorithm (RFC 8731).
            if "curve25519-sha256" in allowed:
                allowed.append("curve25519-sha256@libssh.org")
            common = tuple(algorithm for algorithm in allowed if algorithm in supported)
            if not common:
                text = f"nodeready has none of the {key} that the ssh configuration here allows"
                raise SshConfigError(f"{settings.name}: {text}")
            setattr(transport, f"_preferred_{name}", common)


def set_keepalive(transport: Any) -> None:
    """End the connection when the node has died, also by unacknowledged data (tcp(7))."""
    transport.set_keepalive(KEEPALIVE_S)
    sock = getattr(transport, "sock", None)
    if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


# --- What a connection runs over: TCP, a ProxyCommand, or ssh's own connection.


def open_tcp(
    addresses: list[tuple[int, Any]], settings: SshSettings, limit_s: float
) -> socket.socket:
    """A TCP connection to the first address that accepts one. Raises OSError."""
    timeout = settings.value("connecttimeout")
    limit_s = min(limit_s, float(timeout)) if timeout.isdigit() and int(timeout) else limit_s
    problem: OSError = OSError("no address")
    for family, address in addresses:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(limit_s)
            if source_address := settings.value("bindaddress"):
                sock.bind((source_address, 0))
            if interface := settings.value("bindinterface"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            sock.connect(address)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            problem = error
    raise problem


class Proxy:
    """A ProxyCommand, and the socket to it. error: the beginning of its `failure_text`"""

    def __init__(self, command: str, error: str) -> None:
        self.error = error
        self.sock, child_end = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        user_shell = os.environ.get("SHELL") or "/bin/sh"
        environment = {**os.environ, "PATH": shell.search_path()}
        try:
            self._process = subprocess.Popen(
                [user_shell, "-c", f"exec {command}"],
                stdin=child_end.fileno(),
                stdout=child_end.fileno(),
                stderr=self._stderr.fileno(),
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        except BaseException:
            self.sock.close()
            self._stderr.close()
            raise
        finally:
            child_end.close()

    def failure_text(self) -> str:
        """The error, with the last line of standard error."""
        last_line = ""
        with contextlib.suppress(OSError, ValueError):
            self._stderr.seek(0)
            rows = self._stderr.read(64 << 10).decode("utf-8", "replace").split("\n")
            last_line = next((row.strip() for row in reversed(rows) if row.strip()), "")
        return f"{self.error} ({last_line[:200]})" if last_line else self.error

    def close(self) -> None:
        self.sock.close()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGTERM)
        end_session(self._process)
        self._stderr.close()


def master_socket(settings: SshSettings) -> str:
    """The socket of ssh's own live connection to the node (ControlMaster); "": none."""
    path = settings.paths("controlpath")[0] if settings.value("controlpath") else ""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and is_listening(path):
            return path
    return ""


def master_argv(settings: SshSettings, path: str) -> list[str]:
    """The command line of an ssh over the master's connection; it never connects by itself."""
    argv = [shell.find_program("ssh") or "ssh", "-F", "/dev/null", "-T", "-a", "-x"]
    for option in ("ControlMaster=no", "BatchMode=yes", "ProxyCommand=false"):
        argv += ["-o", option]
    argv += ["-S", path.replace("%", "%%"), "-l", settings.user, "-p", str(settings.port)]
    return argv


def is_listening(path: str) -> bool:
    """Whether a process listens at this socket."""
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2)
            sock.connect(path)
    except (OSError, ValueError):
        return False
    return True


# --- This machine's neighbour table.


class Neighbours:
    """The nodes on this machine's networks, each a row in the neighbour table."""

    def __init__(self, notify: Note) -> None:
        self._notify, self._addresses = notify, set[str]()
        self._limit = first_number("/proc/sys/net/ipv4/neigh/default/gc_thresh3") or 0
        self._networks: list[tuple[ipaddress.IPv4Network, bool]] = []
        with contextlib.suppress(ValueError):
            self._networks = routes(file_text("/proc/net/route"))

    def add(self, address: str) -> None:
        """Count an address to connect to; warn once, near the limit of the table."""
        if not self._limit or address in self._addresses or not on_link(self._networks, address):
            return
        self._addresses.add(address)
        if len(self._addresses) > 0.8 * self._limit:
            self._notify(
                f"{len(self._addresses)} nodes and more are on this machine's own networks, and "
                f"its neighbour table holds {self._limit}: raise "
                "net.ipv4.neigh.default.gc_thresh3 "
                f"(sysctl -w net.ipv4.neigh.default.gc_thresh3={4 * self._limit}) before "
                "connections fail"
            )
            self._limit = 0


def routes(text: str) -> list[tuple[ipaddress.IPv4Network, bool]]:
    """/proc/net/route: each network, and whether its nodes are reached without a gateway."""
    networks = []
    for row in text.splitlines()[1:]:
        words = row.split()
        network_address, gateway, mask = (
            socket.inet_ntoa(struct.pack("=L", int(words[column], 16))) for column in (1, 2, 7)
        )
        networks.append((ipaddress.IPv4Network((network_address, mask)), gateway == "0.0.0.0"))
    return sorted(networks, key=lambda network: -network[0].prefixlen)


def on_link(networks: list[tuple[ipaddress.IPv4Network, bool]], address: str) -> bool:
    """Whether packets to the address go straight to its machine."""
    try:
        ip = ipaddress.IPv4Address(address)
    except ValueError:
        return False
    if ip.is_loopback:
        return False
    return next((is_direct for network, is_direct in networks if ip in network), False)


# --- Why there is no connection, in one line.

#: How far a connection came before it failed.
CONNECTING, BANNER, TALKING = "timed out", "banner", "stopped during the handshake"
#: The end of a connection whose sshd closed it instead of sending its banner.
HUNG_UP = "hung up before its banner"
_CLOSED = "{address}: its sshd closed the connection before the login"
ASKING = "asking ssh"  # before the connection: `ssh -G` runs


def error_text(error: BaseException) -> str:
    """The error's text; if no address accepted the connection, the reason of the last one."""
    cause = error.__context__ or error
    if isinstance(cause, NoValidConnectionsError):
        return str(list(cause.errors.values())[-1])
    return str(error) or type(error).__name__


#: A pattern of an error -> its message, which may have a part of the error. The first match is it.
_MESSAGES = (
    (r"host key error|does not match", "host key of {address} changed; refused. If the node was "
     "re-imaged: ssh-keygen -f {known_hosts} -R {address}"),
    (r"\(revoked\)", "host key of {address} is revoked in {known_hosts}; refused"),
    (r"\((certificate .*)\)", "host key of {address} is refused: its {part}"),
    (r"no host key for", "host key of {address} is not in {known_hosts}; refused (ssh-keyscan "
     "adds it)"),
    (r"proxycommand|proxyjump", "{address}: the ProxyCommand of the ssh configuration here fails "
     "({text})"),
    (r"too many authentication", "{address}: sshd hangs up before the right key: name it with "
     "--ssh-key ({text})"),
    (r"no acceptable|incompatible ssh peer", "{address}: no algorithm in common with its sshd "
     "({text})"),
    (r"saw eof", "{address}: sshd closed the connection during the login: read its log there "
     "({text})"),
    (r"authentication.*?(; nodeready has no [^)]*)", "{address} refused user {user} with {key}"
     "{part}"),
    (r"authentication", "{address} refused user {user} with {key}"),
    (r"private key file.*is encrypted", "{key} is encrypted: unlock it in an ssh agent"),
    (r"no such private key file", "{key}: no such key file"),
    (r"private key file", "{key} is no private key"),
    (r"could not resolve|name or service not known", "host name {address} does not resolve"),
    (ENDLESS, f"{{address}}: {ENDLESS}"),
    (r"exceeded maxstartups", f"{_CLOSED} (Exceeded MaxStartups): try again, or raise it"),
    (r"not allowed at this time", f"{_CLOSED} (PerSourcePenalties): it does so for a while"),
    (HUNG_UP, f"{_CLOSED}: MaxStartups, PerSourcePenalties or hosts.deny; read its log there"),
    (r"banner", "{address}: accepts connections but sends no SSH banner"),
    (r"during the handshake", "{address}: stopped during the SSH handshake, within {limit_s} s"),
    (r"connection refused", "{address}: connection refused: is sshd running?"),
    (r"no route to host|unreachable", "{address}: no route to the node"),
    (r"too many open files", "{address}: too many open files here: raise the limit (ulimit -n)"),
    (r"no buffer space|errno 22", "{address}: is the neighbour table here full? See gc_thresh3"),
    (ASKING, "{address}: ssh -G does not end: look at Match exec in the ssh configuration here"),
    (r"assign requested address", "{address}: the BindAddress of ssh is not this machine's"),
    (r"timed? ?out", "{address}: no answer in {limit_s} s"),
    (r"reset by peer|eof", "{address}: the node closed the connection"),
    (r"", "{address}: {text}"),
)  # fmt: skip


def connect_error(text: str, address: str, **values: Any) -> str:
    """Why a connection failed, from pyinfra's words: what, where, what to do.

    address: the host, or ``[host]:port`` as known_hosts files write it
    values:  user, key, known_hosts, limit_s: for the message
    """
    matches = ((re.search(row[0], text, re.I | re.S), row[1]) for row in _MESSAGES)
    match, message = next((match, message) for match, message in matches if match)
    part = match[1] if match.lastindex else ""
    return message.format(text=text, address=address, part=part, **values)
