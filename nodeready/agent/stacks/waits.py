"""What a thread waits for: its system call, and the file, pipe, socket, lock or child behind it.

All of it is read from /proc (proc(5)): ``syscall``, the link and the information of a descriptor,
the mounts, the locks, the sockets. No file that a process names is opened or examined. A read of
a process's memory, for a path or a set of descriptors, may hang: `probe_thread` runs in
`processes.probe_each`, which continues without a process that hangs.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready import knowledge
from nodeready.agent.proc import MountTable, parse_mounts, socket_inodes
from nodeready.agent.stacks.processes import HANGS, contents, owners, probe_each

# --- System calls by number: rows of knowledge/system_calls.toml.

_COLUMNS = {"x86_64": 0, "aarch64": 1}
#: Commands of fcntl(2) that wait for a lock: F_SETLKW and F_OFD_SETLKW.
_LOCKING = (7, 38)
#: openat(2): a path begins at the process's working directory.
_AT_FDCWD = -100
_P_PID = 1  # waitid(2)
#: States of /proc/net/tcp (include/net/tcp_states.h).
_ESTABLISHED, _SYN_SENT, _LISTEN = 1, 2, 10
_TCP = ("tcp", "tcp6")
#: Flag of a listener in /proc/net/unix (__SO_ACCEPTCON of linux/net.h).
_ACCEPTS = 1 << 16
#: Prefix of the inode of a Unix socket; of its name.
UNIX, _UNIX_SOCKET = "unix ", "the socket "
# Constants of linux/netlink.h, sock_diag.h, unix_diag.h, inet_diag.h.
_SOCK_DIAG, _BY_FAMILY, _DUMP, _PEER, _INFO = 4, 20, 0x301, 4, 2
_PIPED = re.compile(r"pipe_(read|write)")
_FUTEX_PRIVATE = 128  # futex(2): not shared between processes
#: A futex that is a lock which a thread of the same process must release.
OWN_LOCK = "a lock of its own process"
# glibc's mutex with waiters (lowlevellock.h); bytes of malloc's piece for a sem_t, with its head;
# maximum threads that wait for one semaphore.
_CONTENDED, _SEMAPHORE_BYTES, _MAX_WAITERS = 2, 48, 1 << 16
#: Maximum bytes of /proc/PID/net/tcp that are read (some 50,000 sockets), and of /proc/PID/maps.
_TABLE_BYTES, MAPS_BYTES = 8 << 20, 4 << 20

#: Kinds of calls with a set of descriptors -> the argument that limits their time.
_SETS = {"poll": 2, "ppoll": 2, "select": 4, "epoll": 3, "epoll2": 3}
# Maximum bytes of a path, and descriptors of a set, that are read of a process's memory.
_PATH_BYTES, _MAX_POLLED, _SELECT_BITS = 4096, 16, 1024
#: Maximum objects of a set, and processes at a pipe's other end, that are named.
_NAMED = 3
_WIDE = 240
#: Maximum seconds for the peers of all pipes; maximum links of a process that are read.
_ENDS_S, _MAX_LINKS = 1.0, 4096


def calls(machine: str) -> dict[int, tuple[str, str]]:
    """System calls of this machine (uname(2)): number -> (shown name, kind of its arguments)."""
    column = _COLUMNS.get(machine)
    if column is None:
        return {}
    rows = [row for row in knowledge.rows("system_calls")["calls"] if row[2 + column] >= 0]
    return {numbers[column]: (name, kind) for name, kind, *numbers in rows}


# --- One thread, in a fork.


@dataclass(frozen=True)
class WaitCall:
    """The system call in which one thread waits."""

    verb: str  # shown name of the system call; "": none
    # a phrase for each object that the call names; `phrase` replaces those of pipes
    objects: tuple[str, ...] = ()
    # (index into objects, inode, the awaited end: "r" or "w"); of a named pipe the index is -1,
    # and its path stands for the inode
    pipes: tuple[tuple[int, int | str, str], ...] = ()
    child: int = 0  # process that it waits for; -1: any; 0: none
    lock: bool = False  # it waits for a lock of a file
    # it may end by itself, after a time, as Python's wait for the interpreter's lock
    timed: bool = True
    # the connections among the objects: (own address, peer's)
    sockets: tuple[tuple[str, str], ...] = ()
    # the memory of a futex(2) that is shared with other processes; "": not shared
    shared: str = ""
    owner: int = 0  # the process of which a thread has that memory's mutex; 0: not known
    # processes that hold the lock or the awaited ends of the pipes, found by `observe`
    holders: tuple[int, ...] = ()


def probe_thread(pid: int, thread: int = 0) -> list[Any] | None:
    """The call of a thread, as the fields of `WaitCall`; None: it runs, or is not readable. It may
    hang with the process: call it in `processes.probe_each`. thread: 0: the main thread
    """
    task = f"/proc/{pid}/task/{thread or pid}"
    words = contents(f"{task}/syscall").split()
    if len(words) < 7 or not words[0].isdigit():
        return None
    verb, kind = calls(os.uname().machine).get(int(words[0]), ("", ""))
    if not verb:
        return None
    arguments = [int(word, 16) for word in words[1:7]]
    return _WaitingThread(pid, arguments, contents(f"{task}/wchan")).call(verb, kind)


def probe_descriptor(pid: int, call: int, descriptor: int) -> list[Any] | None:
    """What `probe_thread` returns of this call with this descriptor; None: another kind of call"""
    verb, kind = calls(os.uname().machine).get(call, ("", ""))
    return _WaitingThread(pid, [descriptor], "").call(verb, kind) if kind == "fd" else None


def probe_links(pid: int, verb: str, links: Sequence[tuple[int, str]]) -> list[Any]:
    """What `probe_thread` returns of a call with these descriptors, each with its link."""
    thread = _WaitingThread(pid, (), "")
    for number, link in links:
        if link == "anon_inode:[eventpoll]":
            thread.add_polled(number)
        else:
            thread.add_link(link, verb)
    return [verb, thread.objects, thread.pipes, 0, False, True, thread.sockets, "", 0]


def _c_int(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def _unix_sockets(pid: int) -> Iterator[tuple[int, bool, str]]:
    """Inode, whether it is a listener, and the name of each Unix socket (/proc/net/unix)."""
    for row in contents(f"/proc/{pid}/net/unix").splitlines()[1:]:
        words = row.split(None, 7)
        if len(words) > 6:
            name = words[7][:_WIDE] if len(words) > 7 else ""
            yield int(words[6]), bool(int(words[3], 16) & _ACCEPTS), name


class _WaitingThread:
    """The objects of a thread's system call. wait_channel: the kernel function where it waits"""

    def __init__(self, pid: int, arguments: Sequence[int], wait_channel: str) -> None:
        self.pid, self.arguments, self._wait_channel = pid, arguments, wait_channel
        self.objects: list[str] = []
        self.pipes: list[tuple[int, int | str, str]] = []
        self.sockets: list[tuple[str, str]] = []
        self._mounts: MountTable | None = None

    def call(self, verb: str, kind: str) -> list[Any]:
        first = _c_int(self.arguments[0])
        child, lock, shared, owner = 0, False, "", 0
        timed = self._is_timed(verb, kind)
        if kind == "fd":
            verb = self._descriptor(first, verb) or verb
        elif kind in ("path", "second"):
            self._path(_AT_FDCWD, self.arguments[1 if kind == "second" else 0])
        elif kind == "at":
            self._path(first, self.arguments[1])
        elif kind == "connect":
            self._connect(first)
        elif kind == "lock" or (kind == "fcntl" and self.arguments[1] in _LOCKING):
            verb, lock = "flock" if kind == "lock" else "lock", True
            self._descriptor(first, verb)
        elif kind == "child":
            child = first if first > 0 else -1
        elif kind == "waitid":
            child = self.arguments[1] if first == _P_PID else -1
        elif kind in _SETS:
            self._descriptor_set(verb)
        elif verb == "futex" and not self.arguments[1] & _FUTEX_PRIVATE:
            mappings = shared_maps(contents(f"/proc/{self.pid}/maps", MAPS_BYTES)).items()
            address = self.arguments[0]
            shared = next((n for n, (low, end) in mappings if low <= address < end), "")
            owner = self._mutex_owner(address, shared)
            self.objects += ["shared memory"] if shared else []
        elif verb == "futex" and self._is_own_lock(self.arguments[0]):
            self.objects.append(OWN_LOCK)
        objects = self.objects, self.pipes
        return [verb, *objects, child, lock, timed, self.sockets, shared, owner]

    def _is_timed(self, verb: str, kind: str) -> bool:
        """Whether the call may end by itself: a number of ms, or the address of a time."""
        if kind in ("poll", "epoll"):
            return _c_int(self.arguments[_SETS[kind]]) >= 0
        if kind in _SETS:
            return self.arguments[_SETS[kind]] != 0
        if verb == "futex":
            return self.arguments[3] != 0
        return kind not in ("fd", "lock", "fcntl", "child", "waitid")

    def _is_own_lock(self, address: int) -> bool:
        """Whether a futex(2) is surely a lock that a thread of the same process must release: a
        mutex of pthreads, which names its owner, or a lock of Python up to 3.12, which is a
        semaphore with waiters in a separate allocation (PyThread_allocate_lock).
        """
        if thread := self._mutex_thread(address):
            return os.path.exists(f"/proc/{self.pid}/task/{thread}")
        data = self._memory(address - 8, 24)
        if len(data) < 24 or address % 16:
            return False
        size, value, waiters, owner, _ = struct.unpack("=QiiiI", data)
        is_semaphore = not value and 0 < waiters <= _MAX_WAITERS and not owner
        return is_semaphore and size & ~7 == _SEMAPHORE_BYTES

    def _mutex_thread(self, address: int) -> int:
        """The thread that a mutex of pthreads names as its owner; 0: it is no such mutex."""
        data = self._memory(address, 12)
        if len(data) < 12 or address % 8:
            return 0
        value, _, owner = struct.unpack("=iii", data)
        return owner if value == _CONTENDED and owner > 0 else 0

    def _mutex_owner(self, address: int, shared: str) -> int:
        """The process of the thread that a mutex in shared memory names as its owner, if that
        process has the memory, too; 0: it is no such mutex, or of another PID namespace.
        """
        thread = self._mutex_thread(address) if shared else 0
        if not thread:
            return 0
        group = re.search(r"^Tgid:\s(\d+)$", contents(f"/proc/{thread}/status"), re.M)
        pid = int(group[1]) if group else 0
        return pid if shared in shared_maps(contents(f"/proc/{pid}/maps", MAPS_BYTES)) else 0

    def _text(self, address: int) -> str:
        """The text in its memory that ends with a zero, at most a path's length."""
        data, end = b"", address + _PATH_BYTES
        # Page by page: the page after the text may not be mapped, or not be readable in time.
        while address < end and b"\0" not in data:
            chunk = self._memory(address, min(end, (address | 4095) + 1) - address)
            if not chunk:
                break
            data, address = data + chunk, address + len(chunk)
        return data.partition(b"\0")[0].decode("utf-8", "replace")

    def _memory(self, address: int, max_bytes: int) -> bytes:
        """Bytes of its memory, up to the end of the mapping; b"": not readable."""
        with contextlib.suppress(OSError, OverflowError, ValueError):
            number = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.pread(number, max_bytes, address) if address else b""
            finally:
                os.close(number)
        return b""

    def _link(self, name: str) -> str:
        with contextlib.suppress(OSError):
            # A name may be any bytes; the answer is text.
            link = os.readlink(f"/proc/{self.pid}/{name}".encode())
            return link.decode("utf-8", "replace")
        return ""

    def _path(self, directory: int, address: int) -> None:
        path = self._text(address)
        if not path.startswith("/"):
            start = self._link("cwd" if directory == _AT_FDCWD else f"fd/{directory}")
            path = f"{start}/{path}" if path and start else start or path
        if path:
            self.objects.append(f"{path[-_WIDE:]}{self._type(path)}")

    def _type(self, path: str) -> str:
        """The type of the path's file system, as in `` (nfs4)``, from the mount points alone."""
        if self._mounts is None:
            self._mounts = MountTable(parse_mounts(contents(f"/proc/{self.pid}/mountinfo")))
        kind = self._mounts.mount_of(path).kind if path.startswith("/") else ""
        return f" ({kind[:40]})" if kind else ""

    def _descriptor(self, number: int, verb: str, end: str = "") -> str:
        """Add the object of a descriptor; a more exact verb, or ""."""
        link = self._link(f"fd/{number}")
        return self.add_link(link, verb, end) if link else ""

    def add_link(self, link: str, verb: str, end: str = "") -> str:
        """Add the object of a descriptor with this link; a more exact verb, or ""."""
        kind, _, inode = link.partition(":[")
        if kind == "pipe":
            if not end:
                end = "r" if verb in ("write", "splice") else "w"
            self.pipes.append((len(self.objects), int(inode.rstrip("]")), end))
            self.objects.append("a pipe")
        elif kind == "socket":
            verb, peer = self._socket(int(inode.rstrip("]")), verb)
            self.objects.append(peer)
            return verb
        elif link.startswith("anon_inode:"):
            self.objects.append(link[len("anon_inode:") :].strip("[]")[:_WIDE])
        elif link.startswith("/"):
            file_system = self._type(link) if not link.startswith("/dev/") else ""
            if _PIPED.search(self._wait_channel):
                # A named pipe; its phrase is its path.
                self.pipes.append((-1, link, end or ("r" if verb == "write" else "w")))
            self.objects.append(f"{link[-_WIDE:]}{file_system}")
        return ""

    def _socket(self, inode: int, verb: str) -> tuple[str, str]:
        verb = {"read": "recv", "write": "send"}.get(verb, verb)
        for name in ("tcp", "tcp6", "udp", "udp6"):
            table = contents(f"/proc/{self.pid}/net/{name}", _TABLE_BYTES)
            socket_row = tcp_row(table, inode)
            if socket_row:
                local_address, peer, state = socket_row
                if state == _LISTEN:
                    return verb, f"connections to {local_address}"
                if name in _TCP:
                    self.sockets.append((local_address, peer))
                return ("connect" if state == _SYN_SENT else verb), peer
        for number, listens, name in _unix_sockets(self.pid):
            if number == inode:
                if listens:
                    return verb, f"connections to {name}"
                self.sockets.append((f"{UNIX}{inode}", ""))
                return verb, f"{_UNIX_SOCKET}{name}" if name else "a socket of this machine"
        return verb, "a socket"

    def _connect(self, number: int) -> None:
        data = self._memory(self.arguments[1], min(self.arguments[2] & 0xFFFF, 128))
        peer = address(data)
        self._descriptor(number, "connect")
        if peer:
            self.objects[-1:] = [peer]
        if peer.startswith(_UNIX_SOCKET) and self.sockets:
            # The socket of a full listener is not yet connected.
            own_name, _ = self.sockets.pop()
            peers = [f"{UNIX}{number}" for number, listens, name in _unix_sockets(self.pid)
                     if listens and f"{_UNIX_SOCKET}{name.lstrip('@')}" == peer]  # fmt: skip
            self.sockets += [(own_name, listener) for listener in peers[:1]]

    def _descriptor_set(self, kind: str) -> None:
        descriptors: list[tuple[int, str]] = []
        if kind == "poll":
            count = min(self.arguments[1], _MAX_POLLED)
            data = self._memory(self.arguments[0], count * 8)
            for number, events, _ in struct.iter_unpack("=ihh", data[: len(data) // 8 * 8]):
                descriptors.append((number, _awaited_end(events)))
        elif kind == "select":
            count = min(max(_c_int(self.arguments[0]), 0), _SELECT_BITS)
            for place, end in ((1, "w"), (2, "r")):
                data = self._memory(self.arguments[place], (count + 63) // 64 * 8)
                bits = int.from_bytes(data, "little")
                descriptors += [(number, end) for number in range(count) if bits >> number & 1]
        else:
            self.add_polled(_c_int(self.arguments[0]))
        for number, end in descriptors[:_MAX_POLLED]:
            if number >= 0:
                self._descriptor(number, kind, end)

    def add_polled(self, descriptor: int) -> None:
        text = contents(f"/proc/{self.pid}/fdinfo/{descriptor}")
        rows = re.findall(r"^tfd:\s+(\d+) events:\s+([0-9a-f]+)", text, re.M)
        for number, mask in rows[:_MAX_POLLED]:
            self._descriptor(int(number), "epoll", _awaited_end(int(mask, 16)))


def _awaited_end(events: int) -> str:
    """The end of a pipe that poll(2) waits for: POLLOUT waits for a reader, POLLIN for data."""
    return "r" if events & select.POLLOUT and not events & select.POLLIN else "w"


def _host(text: str) -> str:
    """The address of ``0100007F:7378`` in /proc/net/tcp, each word in the machine's byte order."""
    words, _, port = text.partition(":")
    data = bytes.fromhex(words)
    data = b"".join(struct.pack(">I", value) for (value,) in struct.iter_unpack("=I", data))
    return _end(data, int(port, 16))


def _end(data: bytes, port: int) -> str:
    if len(data) == 4:
        name = socket.inet_ntop(socket.AF_INET, data)
    elif data[:12] == b"\0" * 10 + b"\xff\xff":
        name = socket.inet_ntop(socket.AF_INET, data[12:])
    else:
        name = f"[{socket.inet_ntop(socket.AF_INET6, data)}]"
    return f"{name}:{port}"


def tcp_row(text: str, inode: int) -> tuple[str, str, int] | None:
    """Own address, peer and state of a socket in /proc/net/tcp or the like; None: missing."""
    end = r"([0-9A-F]+:[0-9A-F]{4})"
    match = re.search(rf"^ *\d+: {end} {end} ([0-9A-F]{{2}}) .* {inode} \d+ ", text, re.M)
    if not match:
        return None
    try:
        return _host(match[1]), _host(match[2]), int(match[3], 16)
    except (ValueError, struct.error):
        return None


def sockets(pid: int, local: Mapping[str, str]) -> list[tuple[str, str]]:
    """(Own address, peer's) of each connection of a process; (own address, "") of a listener, or a
    datagram socket to which others are connected. local: Unix socket -> its peer (`unix_peers`)
    """
    inodes = socket_inodes(pid, _MAX_LINKS)
    names = (f"{UNIX}{inode}" for inode in inodes)
    peers = frozenset(local.values())
    connections = [(name, local.get(name, "")) for name in names if name in local or name in peers]
    for table in _TCP if inodes else ():
        for row in contents(f"/proc/{pid}/net/{table}", _TABLE_BYTES).splitlines()[1:]:
            words = row.split(None, 10)
            if len(words) > 9 and words[9] in inodes:
                with contextlib.suppress(ValueError, struct.error):
                    state = int(words[3], 16)
                    if state in (_ESTABLISHED, _LISTEN):
                        peer = "" if state == _LISTEN else _host(words[2])
                        connections.append((_host(words[1]), peer))
    return connections


def unix_peers() -> dict[str, str]:
    """Connected Unix socket (unix(7)) -> its other end, named as in `sockets`, by their inodes."""
    peers: dict[str, str] = {}
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _PEER, 0, 0)
    for message in _socket_rows(request):
        (inode,) = struct.unpack_from("=I", message, 4)
        # After the header come attributes: length, kind (2: UNIX_DIAG_PEER), value.
        if len(message) >= 24 and struct.unpack_from("=HH", message, 16) == (8, 2):
            (peer,) = struct.unpack_from("=I", message, 20)
            peers[f"{UNIX}{inode}"] = f"{UNIX}{peer}"
    return peers


def received_ages() -> dict[tuple[str, str], float]:
    """Own address and peer's of each TCP connection of this network -> seconds since data came."""
    ages: dict[tuple[str, str], float] = {}
    for message, width, info in _tcp_infos():
        own_port, peer_port = struct.unpack_from(">HH", message, 4)
        ends = message[8 : 8 + width], message[24 : 24 + width]
        pair = _end(ends[0], own_port), _end(ends[1], peer_port)
        # tcpi_last_data_recv, in milliseconds
        ages[pair] = struct.unpack_from("=I", info, 52)[0] / 1000
    return ages


def sent_data() -> dict[str, tuple[int, bool]]:
    """Inode of each TCP connection of this network namespace -> the bytes that its peer has
    acknowledged, and whether there is more on its way. A single segment proves nothing: its
    acknowledgment may be delayed by 40 ms. Data that is not sent may wait for room at the peer.
    """
    sent: dict[str, tuple[int, bool]] = {}
    for message, _, info in _tcp_infos():
        if len(info) >= 128:
            # tcpi_unacked, tcpi_bytes_acked
            segments, acked = struct.unpack_from("=I92xQ", info, 24)
            inode = str(struct.unpack_from("=I", message, 68)[0])
            sent[inode] = acked, segments > 1
    return sent


def _tcp_infos() -> Iterator[tuple[bytes, int, bytes]]:
    """The row of each TCP connection (inet_diag_msg), the bytes of an address in it, and its
    struct tcp_info (linux/tcp.h), 56 bytes at least.
    """
    for family, width in ((socket.AF_INET, 4), (socket.AF_INET6, 16)):
        # The bit of an attribute in a request is one less than its number.
        head = family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 1 << _ESTABLISHED
        for message in _socket_rows(struct.pack("=BBBBI48x", *head)):
            place = 72
            while place + 4 <= len(message):
                length, kind = struct.unpack_from("=HH", message, place)
                if kind == _INFO and length >= 60:
                    yield message, width, message[place + 4 : place + length]
                place += max(4, length + -length % 4)


def _socket_rows(request: bytes) -> Iterator[bytes]:
    """The kernel's answers to a request for all sockets of a kind (sock_diag(7))."""
    with (
        contextlib.suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel,
    ):
        kernel.settimeout(_ENDS_S)
        kernel.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data, offset = kernel.recv(1 << 16), 0
            while offset < len(data):
                length, kind = struct.unpack_from("=IH", data, offset)
                if kind != _BY_FAMILY:
                    return
                yield data[offset + 16 : offset + length]
                offset += length + -length % 4


def shared_maps(maps: str) -> dict[str, tuple[int, int]]:
    """Device and inode of shared memory that it may write -> begin and end, of the first."""
    mapping_by_file: dict[str, tuple[int, int]] = {}
    for low, end, device, inode in _SHARED.findall(maps):
        mapping_by_file.setdefault(f"{device} {inode}", (int(low, 16), int(end, 16)))
    return mapping_by_file


_SHARED = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .w.s \S+ (\S+) ([1-9]\d*)", re.M)


def address(data: bytes) -> str:
    """The address in a sockaddr (ip(7), ipv6(7), unix(7)); "": another family."""
    if len(data) < 3:
        return ""
    (family,) = struct.unpack_from("=H", data)
    if family == socket.AF_INET and len(data) >= 8:
        return f"{socket.inet_ntop(family, data[4:8])}:{int.from_bytes(data[2:4], 'big')}"
    if family == socket.AF_INET6 and len(data) >= 24:
        return f"[{socket.inet_ntop(family, data[8:24])}]:{int.from_bytes(data[2:4], 'big')}"
    if family == socket.AF_UNIX:
        name = data[2:].lstrip(b"\0").partition(b"\0")[0].decode("utf-8", "replace")
        return f"{_UNIX_SOCKET}{name[:_WIDE]}" if name else ""
    return ""


# --- The locks of files, and the ends of pipes.

_LOCK = re.compile(r"^(\d+): *(->)? *\w+ +\w+ +(\w+) (-?\d+) \S*:(\d+) ", re.M)


def lock_holder(text: str, pid: int) -> int:
    """The process that holds the lock that a process waits for, from /proc/locks (proc_locks(5));
    0: not listed. A waiting process is listed below the lock, with its number and an arrow.
    """
    holder: dict[str, int] = {}
    for number, waits, _, pid_text, _ in _LOCK.findall(text):
        if not waits:
            holder[number] = int(pid_text)
        elif int(pid_text) == pid:
            return max(0, holder.get(number, 0))
    return 0


def lockers(text: str, inode: int) -> set[int]:
    """The processes that have locked a file with this inode, from /proc/locks."""
    return {int(row[3]) for row in _LOCK.findall(text) if not row[1] and int(row[4]) == inode}


def write_locked(text: str) -> set[tuple[int, int]]:
    """(Inode, process) of each file that a process has locked for writing, from /proc/locks."""
    rows = _LOCK.findall(text)
    return {(int(row[4]), int(row[3])) for row in rows if not row[1] and row[2] == "WRITE"}


def _pipe_ends_of(pid: int, inodes: frozenset[int | str]) -> list[tuple[int | str, str]]:
    """The pipes among these that a process has open, with their ends, from its links alone."""
    pipe_ends: set[tuple[int | str, str]] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd")[:_MAX_LINKS]:
            with contextlib.suppress(OSError, ValueError):
                path = f"/proc/{pid}/fd/{name}"
                link = os.readlink(path)
                inode = int(link[6:-1]) if link.startswith("pipe:[") else link
                if inode in inodes:
                    # The permissions of the link show how the file was opened (proc_pid_fd(5)).
                    mode = os.lstat(path).st_mode
                    pipe_ends |= {(inode, "r")} if mode & stat.S_IRUSR else set()
                    pipe_ends |= {(inode, "w")} if mode & stat.S_IWUSR else set()
    return sorted(pipe_ends, key=str)


@dataclass
class PipeEnds:
    """Which processes hold which end of a pipe."""

    # (inode, end) -> processes, the nearest first
    pids: dict[tuple[int | str, str], list[int]] = field(default_factory=dict)
    is_complete: bool = True  # every process of the same users was probed


def find_pipe_ends(pipes: Iterable[int | str], pids: Sequence[int], deadline: float) -> PipeEnds:
    """Which of these processes hold an end of these pipes. pids: the likeliest first"""
    inodes = frozenset(pipes)
    pipe_ends = PipeEnds()
    if not inodes:
        return pipe_ends
    answers = probe_each(lambda pid: _pipe_ends_of(pid, inodes), pids, deadline)
    for pid in pids:
        rows = answers.get(pid, HANGS)
        if rows is HANGS:
            pipe_ends.is_complete = False
            continue
        for inode, end in rows:
            pipe_ends.pids.setdefault((inode, end), []).append(pid)
    return pipe_ends


# --- The phrase.


def observe(
    threads: Mapping[int, Sequence[int]], near: Mapping[int, Sequence[int]], deadline: float
) -> dict[tuple[int, int], tuple[WaitCall, str]]:
    """(Process, thread) -> its call, and the phrase for it; "": of a further thread. threads:
    process -> its threads to probe, the main thread first; 0: that of the process. near: process
    -> processes that may hold the awaited ends of its pipes, likeliest first
    """
    pids = list(threads)

    def probe(pid: int) -> list[Any]:
        return [(thread, probe_thread(pid, thread)) for thread in threads[pid]]

    rows = probe_each(probe, pids, deadline, owners(pids))
    calls = {
        (pid, thread): WaitCall(*row)
        for pid, answers in rows.items() if answers is not HANGS
        for thread, row in answers or () if row
    }  # fmt: skip
    inodes = {inode for call in calls.values() for _, inode, _ in call.pipes}
    likely_pids: dict[int, None] = {}
    for (pid, _), call in calls.items():
        if call.pipes:
            likely_pids.update(dict.fromkeys(near.get(pid, ())))
    deadline_of_ends = min(deadline, time.monotonic() + _ENDS_S)
    pipe_ends = find_pipe_ends(inodes, list(likely_pids), deadline_of_ends)
    locks = contents("/proc/locks") if any(call.lock for call in calls.values()) else ""
    return {
        key: (
            replace(call, holders=_holders(key[0], call, pipe_ends, locks)),
            phrase(key[0], call, pipe_ends, locks) if key[1] == threads[key[0]][0] else "",
        )
        for key, call in calls.items()
    }


def _holders(pid: int, call: WaitCall, pipe_ends: PipeEnds, locks: str) -> tuple[int, ...]:
    """The processes that hold a call's lock or awaited ends of pipes; (): not all were probed."""
    holder = lock_holder(locks, pid) if call.lock else 0
    if holder or call.owner:
        return (holder or call.owner,)
    if not pipe_ends.is_complete:
        return ()
    holders = [pipe_ends.pids.get((inode, end), []) for _, inode, end in call.pipes]
    return tuple(dict.fromkeys(pid for pids in holders for pid in pids))


_PREPOSITIONS = {"connect": "to", "write": "to", "send": "to", "recv": "from"}


def phrase(pid: int, call: WaitCall, pipe_ends: PipeEnds, locks: str) -> str:
    """What a process waits for, one line, as in ``read of /data/shard-5 (nfs4)``."""
    if call.child > 0:
        return f"wait for child {process_title(call.child)}"
    if call.child:
        return "wait for any child"
    if call.owner:
        return f"mutex of shared memory, held by pid {process_title(call.owner)}"
    text, names = call.verb, object_names(pid, call, pipe_ends)
    if names:
        text += f" {_PREPOSITIONS.get(call.verb, 'of')} {names}"
    if call.lock:
        holder = lock_holder(locks, pid)
        text += f", held by pid {process_title(holder)}" if holder else ""
    return text


def object_names(pid: int, call: WaitCall, pipe_ends: PipeEnds) -> str:
    """The objects of a call; "": it names none."""
    objects = list(call.objects)
    for index, inode, end in call.pipes:
        if index >= 0:
            objects[index] = _pipe(pid, inode, end, pipe_ends)
    names = list(dict.fromkeys(objects))
    suffix = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + suffix


def _pipe(pid: int, inode: int | str, end: str, pipe_ends: PipeEnds) -> str:
    verb = "writes" if end == "w" else "reads"
    holders = [holder for holder in pipe_ends.pids.get((inode, end), ()) if holder != pid]
    if not holders:
        # The kernel ends a wait for a pipe whose other end is closed (pipe(7)).
        is_holder = pid in pipe_ends.pids.get((inode, end), ())
        is_alone = is_holder and pipe_ends.is_complete
        return f"a pipe that only it {verb} itself" if is_alone else "a pipe"
    holder_text = f"pid {process_title(holders[0])}"
    if len(holders) > 1:
        holder_text = f"pids {', '.join(map(str, holders[:_NAMED]))}"
        holder_text += f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
        verb = verb.rstrip("s")
    return f"a pipe that {holder_text} {verb}"


def process_title(pid: int) -> str:
    """A process with its name, as in ``55 (gcc)``, and with its state if stopped or ended."""
    text = contents(f"/proc/{pid}/stat")
    name, _, fields = text.partition("(")[2].rpartition(")")
    if not fields:
        return f"{pid} (ended)"
    state = {"T": ", stopped", "t": ", traced", "Z": ", ended"}.get(fields.split()[0], "")
    return f"{pid} ({name[:40]}{state})"
