"""The ring and the pair over real sockets; faults of a network between network namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nodeready.node.proofs import mesh
from nodeready.node.smoke import orders, ring
from nodeready.node.smoke.orders import Collective, Pair, Paired, Peer, Rank
from nodeready.node.smoke.ring import Listeners, run_pair, run_ring
from nodeready.subjects import wire

LOOPBACK = "127.0.0.1"
MIB = 1 << 20


def peer(port: int, token: str, address: str = LOOPBACK, name: str = "") -> Peer:
    return Peer(name or address, (address,), port, token)


def collective(rank: int, peers: Sequence[Peer], **changed: Any) -> Collective:
    """The order of one rank in a ring of these, each named as the one before it sees it."""
    made = Collective(
        number=7,
        engine=orders.RING,
        backend="tcp",
        world=len(peers),
        first=rank,
        ranks=1,
        gpus=(),
        head=peers[0],
        next=peers[(rank + 1) % len(peers)] if len(peers) > 1 else None,
        small=4096,
        large=MIB,
        limit_s=20.0,
    )
    return dataclasses.replace(made, **changed)


# --- On loopback, in one process.


@pytest.fixture
def listen() -> Iterator[Callable[[], tuple[Listeners, int]]]:
    """Listeners of one free port, that serve."""
    made: list[Listeners] = []

    def begin() -> tuple[Listeners, int]:
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        listeners = Listeners([port])
        assert listeners.ports == (port,)
        threading.Thread(target=listeners.serve, daemon=True).start()
        made.append(listeners)
        return listeners, port

    yield begin
    for one in made:
        for port in one.ports:
            one.release(port)


class Party:
    """Nodes of one ring, each with its listeners, on loopback."""

    def __init__(self, listen: Callable[[], tuple[Listeners, int]], count: int) -> None:
        made = [listen() for _ in range(count)]
        self.listeners = [one for one, _ in made]
        self.peers = [peer(port, one.token) for one, port in made]
        self.stop = threading.Event()
        self.ranks: dict[int, Rank] = {}
        self.threads: dict[int, threading.Thread] = {}

    def begin(self, rank: int, **changed: Any) -> None:
        order = collective(rank, self.peers, **changed)

        def run() -> None:
            self.ranks[rank] = run_ring(order, self.listeners[rank], self.stop)

        self.threads[rank] = threading.Thread(target=run, daemon=True)
        self.threads[rank].start()

    def end(self) -> list[Rank]:
        for one in self.threads.values():
            one.join(60)
        return [self.ranks[rank] for rank in sorted(self.threads)]

    def run(self, **changed: Any) -> list[Rank]:
        for rank in range(len(self.peers)):
            self.begin(rank, **changed)
        return self.end()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_ring_that_is_well(listen, count):
    ranks = Party(listen, count).run()
    assert [one.rank for one in ranks] == [*range(count)]
    for one in ranks:
        assert one.ok, one
        assert one.ms > 0 < one.gbps
        assert one.waits_for == -1
        assert 0 <= one.retransmits < 50
        # As the control machine will read it.
        assert wire.decode(Rank, json.loads(json.dumps(dataclasses.asdict(one)))) == one


@pytest.mark.parametrize(
    ("small", "large"), [(0, 0), (8, 1), (4096, 65536 * 3), (4097, 65537 * 3), (40_000, 100_001)]
)
def test_sizes_that_do_not_divide(listen, small, large):
    assert all(one.ok for one in Party(listen, 3).run(small=small, large=large))


def test_tests_one_after_the_other_on_the_same_listeners(listen):
    party = Party(listen, 3)
    for number in range(4):
        assert all(one.ok for one in party.run(number=number))


def test_a_connection_that_comes_before_the_order(listen):
    party = Party(listen, 3)
    party.begin(0)
    time.sleep(0.4)
    party.begin(1)
    party.begin(2)
    assert all(one.ok for one in party.end())


def test_a_connection_that_is_too_late_is_closed(listen):
    """Its test is over: nobody will ever take it."""
    party = Party(listen, 2)
    assert all(one.ok for one in party.run())
    until = ring._Until(5, threading.Event())
    to = party.peers[0]
    _, made = ring._greet(to, (LOOPBACK, to.port), until, (7, 1, ring._RING))
    assert made
    assert mesh.ready(made, select.POLLIN, 5)
    with made, contextlib.suppress(ConnectionResetError):
        assert made.recv(1) == b""


def test_it_ends_when_it_is_told_to(listen):
    party = Party(listen, 3)
    party.begin(0, limit_s=60)
    party.begin(1, limit_s=60)
    time.sleep(0.5)
    began = time.monotonic()
    party.stop.set()
    zero, one = party.end()
    assert time.monotonic() - began < 20
    # The third has no order. The first has heard from nobody for whom the second waits.
    assert (zero.phase, zero.waits_for) == ("init", 2)
    assert zero.said.startswith("ended from outside in init after 0.")
    assert (one.phase, one.waits_for) == ("barrier", 2)


def test_it_ends_in_its_time_and_the_others_with_it(listen):
    party = Party(listen, 3)
    party.begin(0, limit_s=3)
    party.begin(1, limit_s=60)
    zero, one = party.end()
    assert re.fullmatch(r"rank 2 did not connect in (1\.[5-9]|2\.\d) s", zero.said)
    assert (zero.waits_for, zero.phase) == (2, "init")
    assert one.said == "rank 0 (127.0.0.1) closed the connection in barrier"
    # So it was told.
    assert one.waits_for == 2
    assert one.seconds < 20


def test_while_it_waits_it_does_nothing(listen):
    """64 of them on two processors would otherwise be enough to make each other wait."""
    party = Party(listen, 3)
    party.begin(0)
    party.begin(1)
    time.sleep(0.2)
    began = time.process_time()
    time.sleep(1)
    assert time.process_time() - began < 0.1
    party.stop.set()
    party.end()


def test_a_name_that_leads_elsewhere(listen):
    party = Party(listen, 2)
    party.peers[1] = dataclasses.replace(party.peers[1], name="localhost", addresses=("10.9.8.7",))
    party.begin(0)
    (one,) = party.end()
    first = socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)[0][4][0]
    assert one.said == f"localhost resolves to {first}, which is not localhost's"
    assert (one.phase, one.waits_for) == ("init", 1)


def test_a_name_that_leads_nowhere(listen, monkeypatch):
    def nowhere(*words, **more):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    party = Party(listen, 2)
    party.peers[1] = dataclasses.replace(party.peers[1], name="gpu03")
    party.begin(0)
    (one,) = party.end()
    assert one.said == "gpu03 does not resolve (Name or service not known)"
    assert (one.phase, one.waits_for) == ("init", 1)


def test_a_name_service_that_hangs_hangs_nobody(listen, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **more: hang.wait(20) and [])
    party = Party(listen, 2)
    party.peers[1] = dataclasses.replace(party.peers[1], name="gpu03")
    party.begin(0)
    time.sleep(0.3)
    party.stop.set()
    (one,) = party.end()
    assert one.seconds < 10
    assert one.said.startswith("ended from outside in init")
    hang.set()


@contextlib.contextmanager
def stranger(answer: bytes | None) -> Iterator[int]:
    """The port of another program: it says this to whoever connects, or nothing."""
    with socket.create_server((LOOPBACK, 0)) as server:
        kept = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = server.accept()
                    if answer is not None:
                        one.sendall(answer)
                    kept.append(one)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for one in kept:
            one.close()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "another program answers"),
        (None, "connected, then silence"),
    ],
)
def test_another_program_on_the_port(listen, answer, cause):
    party = Party(listen, 2)
    with stranger(answer) as port:
        party.peers[1] = dataclasses.replace(party.peers[1], port=port, name="127.0.0.1")
        party.begin(0)
        (one,) = party.end()
    assert one.said == f"no connection to 127.0.0.1 port {port}: {cause}"
    assert (one.phase, one.waits_for) == ("init", 1)


def test_a_port_on_which_nobody_listens(listen):
    party = Party(listen, 2)
    port = party.peers[1].port
    party.listeners[1].release(port)
    party.begin(0)
    (one,) = party.end()
    assert one.said == f"no connection to 127.0.0.1 port {port}: refused"
    assert one.seconds < 3


def test_the_token_of_another_run(listen):
    party = Party(listen, 2)
    party.peers[1] = dataclasses.replace(party.peers[1], token="0" * 16)
    party.begin(0)
    (one,) = party.end()
    assert one.said.endswith("another program answers")


def in_thread_of(party: Party, rank: int) -> bool:
    return threading.current_thread() is party.threads.get(rank)


@pytest.mark.parametrize(("factor", "how"), [(0, "is missing"), (2, "is there twice")])
def test_a_rank_that_does_not_count_once(listen, monkeypatch, factor, how):
    party = Party(listen, 4)
    plain = ring._number

    def number(rank, at):
        wrong = rank == 2 and in_thread_of(party, 2)
        return plain(rank, at) * (factor if wrong else 1)

    monkeypatch.setattr(ring, "_number", number)
    for one in party.run():
        assert one.phase == "done"
        assert not one.ok
        assert one.wrong.startswith("all_reduce: the sum at 0 is ")
        # The one that is wrong itself knows no better.
        assert one.rank == 2 or one.wrong.endswith(f"as if rank 2 {how}")


def test_what_comes_damaged_in_the_large_part(listen, monkeypatch):
    party = Party(listen, 3)
    plain = ring._random

    def bad(number):
        data = bytearray(plain(number))
        if in_thread_of(party, 1):
            data[70_000] ^= 4
        return bytes(data)

    monkeypatch.setattr(ring, "_random", bad)
    zero, one, two = party.run(large=8 * MIB)
    assert zero.ok
    # The one after it; itself it takes what is right for wrong.
    assert [rank.wrong[:14] for rank in (one, two)] == ["large: message"] * 2
    assert two.wrong.endswith("came damaged")


class Mute(ring._Ring):
    """A rank that is not well: it does not pass the barrier."""

    def _barrier(self, step=0):
        raise ring._Failed("its own reason", 99)


def test_who_gives_up_is_seen_at_once(listen, monkeypatch):
    party = Party(listen, 5)
    plain = ring._Ring

    def make(order, *more):
        return (Mute if order.first == 3 else plain)(order, *more)

    monkeypatch.setattr(ring, "_Ring", make)
    ranks = party.run()
    assert ranks[3].said == "its own reason"
    for one in ranks:
        assert one.seconds < 3
        if one.rank != 3:
            assert one.said.endswith(f"closed the connection in {one.phase}")
            # Whoever asks on gets to the one that gave up first.
            seen = [one.rank]
            while seen[-1] not in (3, 99):
                seen.append(ranks[seen[-1]].waits_for)
                assert len(seen) < 6, seen
            assert seen[-1] == 3


class Liar(ring._Ring):
    """A rank that sends what is none of its messages."""

    def _head(self, step, index, length, last=0):
        return super()._head(step + (self.phase == "all_gather"), index, length, last)


def test_a_rank_that_sends_something_else(listen, monkeypatch):
    party = Party(listen, 3)
    plain = ring._Ring
    monkeypatch.setattr(
        ring, "_Ring", lambda order, *more: (Liar if order.first == 1 else plain)(order, *more)
    )
    ranks = party.run()
    assert ranks[2].said == "rank 1 (127.0.0.1) sent something else than its all_gather"
    assert ranks[2].waits_for == 1


def test_a_rank_that_sends_numbers_that_are_too_large(listen, monkeypatch):
    party = Party(listen, 3)
    plain = ring._pack
    monkeypatch.setattr(
        ring,
        "_pack",
        lambda numbers: (
            b"\xff" * len(plain(numbers)) if in_thread_of(party, 1) else plain(numbers)
        ),
    )
    for one in party.run():
        assert one.phase == "done"
        assert one.wrong.startswith("all_reduce: the sum at ")


# --- What the listeners do with strangers.


def states(port: int) -> list[str]:
    """Of the connections with this port, as the kernel numbers them."""
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return [row[3] for row in rows if f":{port:04X}" in (row[1][-5:], row[2][-5:])]


def test_nothing_is_left_of_a_test(listen):
    party = Party(listen, 3)
    assert all(one.ok for one in party.run())
    before = len(os.listdir("/proc/self/fd"))
    assert all(one.ok for one in party.run(number=8))
    assert len(os.listdir("/proc/self/fd")) == before
    for one in party.peers:
        # It listens; there is no TIME_WAIT.
        assert states(one.port) == ["0A"]


def test_strangers_cost_nothing(listen):
    """Silent ones, garbage, another's greeting, ends; many at once, while a ring runs."""
    party = Party(listen, 3)
    port = party.peers[1].port
    strangers = []
    for say in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(200), None):
        for _ in range(100):
            one = socket.create_connection((LOOPBACK, port))
            strangers.append(one)
            if say is None:
                one.close()
            elif say:
                one.send(say)
    assert all(one.ok for one in party.run())
    for one in strangers:
        if one.fileno() >= 0:
            one.settimeout(mesh.OPEN_S + 2)
            with contextlib.suppress(ConnectionResetError):
                while one.recv(100):
                    pass
            one.close()
    assert party.listeners[1].came > 400
    # Its own end of a connection is another's to close.
    assert set(states(port)) <= {"0A", "06"}


def test_who_knows_the_form_but_not_the_token(listen):
    """It gets a number, and can do nothing with that of another connection either."""
    listeners, port = listen()
    with listeners.expected(7, 1) as expected:
        said = []
        for _ in range(2):
            one = socket.create_connection((LOOPBACK, port))
            said.append(one.recv(100))
            one.send(ring._greeting("guessed", said[0][16:], 7, 1, ring._RING))
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(100) == b""
            one.close()
        right = ring._greeting(listeners.token, said[0][16:], 7, 1, ring._RING)
        with socket.create_connection((LOOPBACK, port)) as one:
            one.recv(100)
            one.send(right)
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(100) == b""
        assert expected.take() is None
    assert listeners.token.encode() not in said[0]


FLOOD = """
import socket, struct, sys
while True:
    one = socket.socket()
    try:
        one.connect(("127.0.0.1", int(sys.argv[1])))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
    except OSError:
        pass
"""


def test_somebody_who_connects_in_a_loop(listen):
    party = Party(listen, 3)
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, str(party.peers[1].port)])
    try:
        time.sleep(0.5)
        for number in range(3):
            ranks = party.run(number=number)
            assert all(one.ok for one in ranks), ranks
            assert max(one.seconds for one in ranks) < 8
    finally:
        flood.kill()
        flood.wait()


def test_a_port_is_released_and_taken_again(listen):
    listeners, port = listen()
    listeners.release(port)
    assert listeners.ports == ()
    with socket.create_server(("", port)):
        assert not listeners.take(port)
        assert listeners.ports == ()
    assert listeners.take(port)
    assert listeners.take(port)
    assert listeners.ports == (port,)
    found, made = mesh.meet(LOOPBACK, port, ring._mark(listeners.token))
    assert found.outcome == "ok"
    assert made
    made.close()
    # One that it never had.
    listeners.release(1)


def test_a_port_that_another_program_has_is_busy():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        listeners = Listeners([port])
    assert listeners.ports == ()
    assert [(one.port, one.error) for one in listeners.busy] == [
        (port, os.strerror(errno.EADDRINUSE))
    ]
    # Nobody serves yet.
    assert listeners.take(port)
    listeners.release(port)


# --- A pair.


def pair(listen, ports=(), **changed: Any) -> tuple[Pair, Listeners, Listeners]:
    """The order, the listeners of the source and of the target."""
    (source, _), (target, port) = listen(), listen()
    made = Pair(3, peer(port, target.token), (*ports, port), 4096, MIB, 20.0)
    return dataclasses.replace(made, **changed), source, target


def test_a_pair_that_is_well(listen):
    order, source, target = pair(listen)
    seen = run_pair(order, (), source, threading.Event())
    assert [one.outcome for one in seen.tries] == ["ok"]
    assert (seen.outcome, seen.address, seen.resolved) == ("ok", LOOPBACK, (LOOPBACK,))
    assert seen.ms > 0 < seen.gbps
    assert 0 <= seen.retransmits < 50
    assert (source.came, target.came) == (0, 2)
    assert wire.decode(Paired, json.loads(json.dumps(dataclasses.asdict(seen)))) == seen
    time.sleep(0.1)
    assert states(order.target.port) == ["0A"]


@pytest.mark.parametrize("large", [0, 1, 65537, 3_000_001])
def test_a_pair_of_any_size(listen, large):
    order, source, _ = pair(listen, small=8, large=large)
    assert run_pair(order, (), source, threading.Event()).outcome == "ok"


def test_the_data_goes_over_the_first_port_that_works(listen):
    with stranger(b"220 mail\r\n") as foreign, socket.create_server((LOOPBACK, 0)) as free:
        closed = free.getsockname()[1]
        free.close()
        order, source, _ = pair(listen, ports=(closed, foreign))
        seen = run_pair(order, (), source, threading.Event())
    assert [one.outcome for one in seen.tries] == ["refused", "foreign", "ok"]
    assert seen.outcome == "ok"


def test_an_address_that_is_our_own_is_not_the_targets(listen):
    order, source, target = pair(listen)
    seen = run_pair(order, (LOOPBACK,), source, threading.Event())
    assert (seen.address, seen.tries, seen.outcome) == ("", (), "")
    assert seen.resolved == (LOOPBACK,)
    assert target.came == 0


@pytest.mark.parametrize(("least", "outcome"), [(1, "small"), (2000, "large")])
def test_what_comes_back_damaged_is_named(listen, least, outcome):
    order, source, target = pair(listen)
    plain = target._echo

    def damage(one):
        guest = target._guests[one]
        with contextlib.suppress(BlockingIOError):
            guest.left = guest.left or one.recv(100_000)
            if len(guest.left) >= least:
                guest.left = b"?" + guest.left[1:]
        plain(one)

    target._echo = damage
    assert run_pair(order, (), source, threading.Event()).outcome == outcome


def test_a_target_that_stops_to_answer(listen):
    order, source, target = pair(listen, limit_s=60)
    target._echo = lambda one: time.sleep(0.05)
    began = time.monotonic()
    seen = run_pair(order, (), source, threading.Event())
    assert (seen.outcome, seen.ms, seen.gbps) == ("small", 0.0, 0.0)
    assert ring.SILENT_S <= time.monotonic() - began < ring.SILENT_S + 2


def test_a_pair_ends_when_it_is_told_to(listen):
    order, source, _ = pair(listen, limit_s=60, large=1 << 40)
    stop = threading.Event()
    threading.Timer(1, stop.set).start()
    began = time.monotonic()
    seen = run_pair(order, (), source, stop)
    assert time.monotonic() - began < 20
    assert seen.outcome == "large"
    assert seen.gbps > 0


def test_64_pairs_at_once(listen):
    target, port = listen()
    source, _ = listen()
    order = Pair(3, peer(port, target.token), (port,), 4096, 256 * 1024, 30.0)
    found: list[Paired] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(run_pair(order, (), source, threading.Event()))
        )
        for _ in range(64)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [one.outcome for one in found] == ["ok"] * 64


# --- On nodes of their own network, with its faults.

_PORT = 29500
GONE = ("STOP", "KILL")
_ADDRESS = "10.0.0.{}".format


def _sh(pid: int, script: str) -> None:
    words = ["nsenter", "-t", str(pid), "-n", "sh", "-ec", script]
    subprocess.run(words, check=True, capture_output=True, text=True)


def node() -> None:
    """One node: its listeners, and the orders of its standard input, one after the other."""
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    listeners = Listeners([_PORT, _PORT + 1, _PORT + 2, _PORT + 3])
    threading.Thread(target=listeners.serve, daemon=True).start()
    print(listeners.token, flush=True)
    for line in sys.stdin:
        order = orders.read(line)
        stop = threading.Event()
        if isinstance(order, Collective):
            seen = dataclasses.asdict(run_ring(order, listeners, stop))
        else:
            assert isinstance(order, Pair)
            seen = dataclasses.asdict(run_pair(order, (), listeners, stop))
        print(json.dumps(seen), flush=True)
    os._exit(0)


def stage(play: dict[str, Any]) -> None:
    """Nodes on one switch, with the faults of the play; prints what each answers."""
    count = play["nodes"]
    script = "ip link add br0 type bridge && ip link set br0 up"
    subprocess.run(["sh", "-ec", script], check=True)
    words = ["unshare", "-n", sys.executable, __file__, "node"]
    nodes = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    pids = [int(one.stdout.readline()) for one in nodes]
    for at, pid in enumerate(pids):
        script = f"""
            ip link add v{at} type veth peer name eth0 netns {pid}
            ip link set v{at} master br0 up
        """
        subprocess.run(["sh", "-ec", script], check=True)
        script = (
            f"ip link set lo up; ip addr add {_ADDRESS(at + 1)}/24 dev eth0; ip link set eth0 up"
        )
        _sh(pid, script)
        if str(at) in play.get("before", {}):
            _sh(pid, play["before"][str(at)])
    peers = []
    for at, one in enumerate(nodes):
        print("go", file=one.stdin, flush=True)
        token = one.stdout.readline().strip()
        peers.append(peer(_PORT, token, _ADDRESS(at + 1)))
    began = time.monotonic()
    if "pair" in play:
        order = Pair(3, peers[1], tuple(range(_PORT, _PORT + 4)), **play["pair"])
        print(orders.line(order), file=nodes[0].stdin, flush=True)
        asked = nodes[:1]
    else:
        for at, one in enumerate(nodes):
            order = collective(at, peers, **play.get("order", {}))
            print(orders.line(order), file=one.stdin, flush=True)
        asked = nodes
    later = play.get("later", [])
    for after_s, at, what in later:
        time.sleep(max(0, began + after_s - time.monotonic()))
        if what in ("STOP", "CONT", "KILL"):
            os.kill(pids[at], getattr(signal, f"SIG{what}"))
        else:
            _sh(pids[at], what)
    frozen = {at for at, what in {at: what for _, at, what in later}.items() if what in GONE}
    for at, one in enumerate(asked):
        answer = "null" if at in frozen else one.stdout.readline().strip()
        print(answer, round(time.monotonic() - began, 2), sep="\t", flush=True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


UNSHARE = ["unshare", "-Urnpmf", "--mount-proc", "--kill-child"]


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where no network of our own can be had."""
    probe = (
        "ip link add v0 type veth peer name v1 && iptables -L -n && ip link add br0 type bridge"
    )
    words = [*UNSHARE, "sh", "-ec", probe]
    if shutil.which("unshare") is None or subprocess.run(words, check=False).returncode:
        pytest.skip("no network namespace with veth, a bridge and iptables")


def perform(**play: Any) -> tuple[list[Any], float]:
    """What each node answers (None: it was frozen or killed), and the seconds until the last."""
    words = [*UNSHARE, sys.executable, __file__, "stage", json.dumps(play)]
    root = str(Path(ring.__file__).parents[3])
    done = subprocess.run(
        words,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    rows = [row.split("\t") for row in done.stdout.splitlines()]
    kind = Paired if "pair" in play else Rank
    answers = [json.loads(row[0]) for row in rows]
    return [one and wire.decode(kind, one) for one in answers], float(rows[-1][1])


def root(ranks: Sequence[Rank | None]) -> set[int]:
    """To whom the ranks that failed lead, each by whom it waits for: the last, or the last two."""
    found = set()
    for first in ranks:
        if first is None:
            continue
        way = [first.rank]
        while True:
            here = ranks[way[-1]]
            if here is None or here.waits_for < 0:
                found.add(frozenset(way[-1:]))
                break
            if here.waits_for in way:
                found.add(frozenset(way[way.index(here.waits_for) :]))
                break
            way.append(here.waits_for)
    assert len(found) == 1, (found, ranks)
    return set(found.pop())


LARGE = {"large": 1 << 33, "limit_s": 60.0}
ALL = "iptables -A INPUT -j DROP; iptables -A OUTPUT -j DROP"
BLACK_HOLE = "iptables -A INPUT -m length --length 1400: -j DROP"
ONE_WAY = "iptables -A INPUT -s 10.0.0.2 -j DROP"
SMALL_PASSES = r"to 10\.0\.0\.3 small messages pass, 64 KiB do not: MTU\?"
SLOW = "tc qdisc add dev eth0 root tbf rate 1mbit burst 16kb latency 400ms"

#: A fault among four nodes; to whom the ranks lead; what a rank says, and in which phase.
FAULTS: dict[str, tuple[dict[str, Any], set[int] | None, tuple[int, str, str]]] = {
    "one direction": (
        {"before": {"2": ONE_WAY}},
        {1, 2},
        (1, "init", r"no connection to 10\.0\.0\.3 port 29500: timed out"),
    ),
    "one port": (
        {"before": {"2": "iptables -A INPUT -p tcp --dport 29500 -j DROP"}},
        {1, 2},
        (2, "init", r"rank 1 did not connect in 3\.[5-9] s"),
    ),
    "MTU, inbound": (
        {"before": {"2": BLACK_HOLE}},
        {1, 2},
        (1, "large", SMALL_PASSES),
    ),
    "MTU, outbound": (
        {"before": {"1": BLACK_HOLE.replace("INPUT", "OUTPUT")}},
        {1, 2},
        (1, "large", SMALL_PASSES),
    ),
    "1 Mbit/s": (
        {"before": {"1": SLOW}, "order": {"large": 8 * MIB, "limit_s": 10.0}},
        # All go on, slowly: for whom the others wait is that of the moment when the test ends.
        None,
        (
            2,
            "large",
            r"(0\.9|1\.\d) Mbit/s from rank 1 \(10\.0\.0\.2\) after [2-4]\.\d s of large",
        ),
    ),
    "freezes": (
        {"order": LARGE, "later": [(1, 2, "STOP")]},
        {2},
        (3, "large", r"rank 2 \(10\.0\.0\.3\) sent nothing for 3\.\d s in large"),
    ),
    "dies": (
        {"order": LARGE, "later": [(1, 2, "KILL")]},
        {2},
        (1, "large", r"10\.0\.0\.3 closed the connection in large"),
    ),
    "is cut off later": (
        {"order": LARGE, "later": [(1, 2, ONE_WAY)]},
        {1, 2},
        (1, "large", r"10\.0\.0\.3 acknowledged nothing for 2\.\d s in large"),
    ),
    "stands still": (
        {"order": LARGE, "later": [(1, 1, "STOP"), (5, 1, "CONT")]},
        {1},
        (1, "large", r"this node stood still for [34]\.\d s; .*"),
    ),
}


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_for_what_it_is(fault):
    play, culprits, (rank, phase, said) = FAULTS[fault]
    ranks, seconds = perform(nodes=4, **play)
    if culprits is None:
        assert ranks[rank].waits_for == rank - 1
    else:
        assert root(ranks) == culprits
    assert ranks[rank].phase == phase
    assert re.fullmatch(said, ranks[rank].said), ranks
    assert not any(one.ok or one.wrong for one in ranks if one)
    assert seconds < 15
    if "Mbit" in said:
        assert 0.0009 < ranks[rank].gbps < 0.0015
        assert [one.gbps for one in ranks if one.rank != rank] == [0.0] * 3


@pytest.mark.usefixtures("namespaces")
def test_all_that_a_node_cannot_hear_or_say():
    """Its neighbours name it, and it names one of them: it is on nobody else's way."""
    ranks, seconds = perform(nodes=4, order=LARGE, later=[(1, 2, ALL)])
    assert ranks[1].waits_for == ranks[3].waits_for == 2
    assert seconds < 15


@pytest.mark.usefixtures("namespaces")
def test_loss_costs_time_and_is_counted_where_it_is():
    lossy = "iptables -A INPUT -m statistic --mode random --probability 0.05 -j DROP"
    ranks, seconds = perform(nodes=4, before={"1": lossy})
    assert all(one.ok for one in ranks)
    # Rank 0 sends to rank 1, which does not hear all of it.
    assert ranks[0].retransmits >= 5
    assert max(one.retransmits for one in ranks[1:]) < ranks[0].retransmits / 2
    assert seconds < 15


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("fault", "tries", "outcome"),
    [
        ("true", ["ok"] * 4, "ok"),
        ("iptables -A INPUT -p tcp --dport 29501 -j DROP", ["ok", "timeout", "ok", "ok"], "ok"),
        ("iptables -A INPUT -j DROP", ["timeout"] * 3 + ["skipped"], ""),
        (BLACK_HOLE, ["ok"] * 4, "large"),
        (BLACK_HOLE.replace("INPUT", "OUTPUT"), ["ok"] * 4, "large"),
    ],
)
def test_a_pair_and_its_faults(fault, tries, outcome):
    order = {"small": 4096, "large": MIB, "limit_s": 20.0}
    (seen,), seconds = perform(nodes=2, before={"1": fault}, pair=order)
    assert [one.outcome for one in seen.tries] == tries
    assert seen.outcome == outcome
    assert (seen.gbps > 0.02) == (outcome == "ok")
    assert seconds < 15


@pytest.mark.usefixtures("namespaces")
def test_a_pair_over_a_slow_link_has_a_figure():
    order = {"small": 4096, "large": 8 * MIB, "limit_s": 10.0}
    (seen,), seconds = perform(nodes=2, before={"1": SLOW}, pair=order)
    assert seen.outcome == "large"
    assert 0.0005 < seen.gbps < 0.0015
    assert seconds < 15


if __name__ == "__main__":
    if sys.argv[1] == "node":
        node()
    else:
        stage(json.loads(sys.argv[2]))
