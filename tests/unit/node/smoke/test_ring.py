"""The ring and the pair over real sockets, on the loopback of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nodeready.node.proofs import mesh
from nodeready.node.smoke import connections, orders, ring
from nodeready.node.smoke import listeners as smoke_listeners
from nodeready.node.smoke import pair as smoke_pair
from nodeready.node.smoke.listeners import SmokeListeners
from nodeready.node.smoke.orders import (
    CollectiveOrder,
    PairAnswer,
    PairOrder,
    RankResult,
    SmokePeer,
)
from nodeready.node.smoke.pair import run_pair
from nodeready.node.smoke.ring import run_ring
from nodeready.subjects import wire
from tests.command import wait_for

LOOPBACK = "127.0.0.1"
MIB = 1 << 20


def peer(port: int, token: str, address: str = LOOPBACK, name: str = "") -> SmokePeer:
    return SmokePeer(name or address, (address,), port, token)


def collective(rank: int, peers: Sequence[SmokePeer], **changed: Any) -> CollectiveOrder:
    """The order of one rank in a ring of these, each named as the rank before sees it."""
    following = peers[(rank + 1) % len(peers)] if len(peers) > 1 else None
    order = CollectiveOrder(
        7, orders.RING, "tcp", len(peers), rank, 1, (), peers[0], following, 4096, MIB, 20.0
    )
    return dataclasses.replace(order, **changed)


@pytest.fixture
def listen() -> Iterator[Callable[[], tuple[SmokeListeners, int]]]:
    """SmokeListeners of one free port, that serve."""
    every: list[SmokeListeners] = []

    def begin() -> tuple[SmokeListeners, int]:
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        listeners = SmokeListeners([port])
        assert listeners.ports == (port,)
        threading.Thread(target=listeners.serve, daemon=True).start()
        every.append(listeners)
        return listeners, port

    yield begin
    for listeners in every:
        for port in listeners.ports:
            listeners.lend(port, is_shared=False)


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Every wait is a tenth as long."""
    for module, name in (
        (ring, "SILENT_S"),
        (smoke_pair, "SILENT_S"),
        (ring, "LONG_S"),
        (mesh, "TOKEN_S"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)


class Party:
    """Nodes of one ring, each with its listeners."""

    def __init__(self, listen: Callable[[], tuple[SmokeListeners, int]], count: int) -> None:
        pairs = [listen() for _ in range(count)]
        self.listeners = [listeners for listeners, _ in pairs]
        self.peers = [peer(port, listeners.token) for listeners, port in pairs]
        self.stop = threading.Event()
        self.ranks: dict[int, RankResult] = {}
        self.threads: dict[int, threading.Thread] = {}

    def begin(self, rank: int, **changed: Any) -> None:
        order = collective(rank, self.peers, **changed)

        def run() -> None:
            self.ranks[rank] = run_ring(order, self.listeners[rank], self.stop)

        self.threads[rank] = threading.Thread(target=run, daemon=True)
        self.threads[rank].start()

    def end(self) -> list[RankResult]:
        for thread in self.threads.values():
            thread.join(60)
        return [self.ranks[rank] for rank in sorted(self.threads)]

    def run(self, **changed: Any) -> list[RankResult]:
        for rank in range(len(self.peers)):
            self.begin(rank, **changed)
        return self.end()

    def alone(self, **changed: Any) -> RankResult:
        """The first rank, when the second is not as the first was told."""
        self.peers[1] = dataclasses.replace(self.peers[1], **changed)
        self.begin(0)
        return self.end()[0]

    def runs_here(self, rank: int) -> bool:
        return threading.current_thread() is self.threads.get(rank)


SIZES = [(0, 0), (8, 1), (4096, 65536 * 3), (4097, 65537 * 3), (40_000, 100_001)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_ring_passes_one_test_after_the_other(listen, count):
    party = Party(listen, count)
    for number, (small, large) in enumerate([(4096, MIB), *SIZES * (count == 3)]):
        ranks = party.run(number=number, small=small, large=large)
        assert [rank.rank for rank in ranks] == [*range(count)]
        for rank in ranks:
            assert rank.ok, (small, large, rank)
            assert (rank.ms > 0 < rank.gbps) or not large
            assert (rank.waits_for, rank.mismatch, rank.error) == (-1, "", "")
            # As the control machine will read it.
            assert (
                wire.decode(RankResult, json.loads(json.dumps(dataclasses.asdict(rank)))) == rank
            )


def test_a_connection_may_come_before_the_order_and_is_closed_after_its_test(listen):
    party = Party(listen, 3)
    party.begin(0)
    wait_for(lambda: bool(party.listeners[1]._early))
    party.begin(1)
    party.begin(2)
    assert all(rank.ok for rank in party.end())
    until, head = connections.Deadline(5, threading.Event()), party.peers[0]
    _, late = connections.greet(head, (LOOPBACK, head.port), until, (7, 2, smoke_listeners.RING))
    assert mesh.ready(late, select.POLLIN, 5)
    with late, contextlib.suppress(ConnectionResetError):
        assert late.recv(1) == b""


def test_a_connection_for_which_no_order_comes_is_closed(listen, monkeypatch):
    monkeypatch.setattr(smoke_listeners, "_EARLY_S", 0.3)
    party, until = Party(listen, 2), connections.Deadline(5, threading.Event())
    head = party.peers[0]
    _, early = connections.greet(head, (LOOPBACK, head.port), until, (7, 1, smoke_listeners.RING))
    assert mesh.ready(early, select.POLLIN, 5)
    with early, contextlib.suppress(ConnectionResetError):
        assert early.recv(1) == b""
    assert all(rank.ok for rank in party.run())


def test_it_ends_when_it_is_told_to_and_until_then_does_nothing(listen):
    party = Party(listen, 3)
    party.begin(0, limit_s=60)
    party.begin(1, limit_s=60)
    wait_for(lambda: bool(party.listeners[2]._early))
    began = time.process_time()
    time.sleep(0.4)
    # 64 of them on two processors would otherwise be enough to make each other wait.
    assert time.process_time() - began < 0.1
    party.stop.set()
    first, second = party.end()
    # The third has no order. The first has not been told for whom the second waits.
    assert (first.phase, first.waits_for) == ("init", 2)
    assert first.error.startswith("ended from outside in init after ")
    assert (second.phase, second.waits_for) == ("barrier", 2)


def test_it_ends_in_its_time_and_the_others_with_it(listen):
    party = Party(listen, 3)
    party.begin(0, limit_s=1)
    party.begin(1, limit_s=60)
    first, second = party.end()
    assert re.fullmatch(r"rank 2 did not connect in \d\.\d s", first.error)
    assert (first.waits_for, first.phase) == (2, "init")
    assert second.error == "rank 0 (127.0.0.1) closed the connection in barrier"
    # So it was told by the first.
    assert second.waits_for == 2
    assert second.seconds < 20


@pytest.mark.parametrize(("name", "resolve", "error"), [
    ("localhost", None, r"localhost resolves to \S+, which is not localhost's"),
    ("gpu03", socket.gaierror(-2, "Name or service not known"), r".* \(Name or service not.*"),
    ("gpu03", lambda *_, **__: time.sleep(2) or [], "gpu03 does not resolve .*"),
])  # fmt: skip
def test_a_name_that_does_not_lead_to_the_next_node(listen, monkeypatch, name, resolve, error):
    monkeypatch.setattr(mesh, "RESOLVE_S", 0.3)
    look = Mock(wraps=socket.getaddrinfo, side_effect=resolve)
    monkeypatch.setattr(socket, "getaddrinfo", look)
    rank = Party(listen, 2).alone(name=name, addresses=("10.9.8.7",))
    assert re.fullmatch(error, rank.error)
    assert (rank.phase, rank.waits_for) == ("init", 1)


@contextlib.contextmanager
def stranger(answer: bytes | None) -> Iterator[int]:
    """The port of another program: it sends this to whoever connects, or nothing."""
    with socket.create_server((LOOPBACK, 0)) as server:
        kept = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if answer is not None:
                        connection.sendall(answer)
                    kept.append(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("answer", "cause"), [
    (b"SSH-2.0-OpenSSH_9.6\r\n", "another program answers"),
    (None, "connected, then silence"),
])  # fmt: skip
def test_another_program_on_the_port(listen, answer, cause):
    with stranger(answer) as port:
        rank = Party(listen, 2).alone(port=port, name="127.0.0.1")
    assert rank.error == f"no connection to 127.0.0.1 port {port}: {cause}"
    assert (rank.phase, rank.waits_for) == ("init", 1)


def test_a_port_on_which_no_program_listens_and_the_token_of_another_run(listen):
    party = Party(listen, 2)
    assert party.alone(token="0" * 16).error.endswith("another program answers")
    port = party.peers[1].port
    party.listeners[1].lend(port, is_shared=False)
    rank = party.alone(name="localhost", addresses=("127.0.0.1", "::1"))
    error = rf"no connection to localhost \((127\.0\.0\.1|::1)\) port {port}: refused"
    assert re.fullmatch(error, rank.error)
    assert rank.seconds < 3


def test_what_comes_damaged_in_the_large_part(listen, monkeypatch):
    party, plain = Party(listen, 3), ring.random_blocks

    def damaged(number: int) -> bytes:
        data = bytearray(plain(number))
        data[70_000] ^= 4 * party.runs_here(1)
        return bytes(data)

    monkeypatch.setattr(ring, "random_blocks", damaged)
    first, second, third = party.run(large=8 * MIB)
    assert first.ok
    # The rank after it; itself it takes what is right for wrong.
    assert [rank.mismatch[:14] for rank in (second, third)] == ["large: message"] * 2
    assert third.mismatch.endswith("came damaged")


class Mute(ring.RingRank):
    """A rank that does not pass the barrier."""

    def _barrier(self, step=0):
        raise ring.RingFailure("its own reason", 99)


class Liar(ring.RingRank):
    """A rank that sends what is none of its messages."""

    def _head(self, step, index, length):
        return super()._head(step + (self.phase == "send_recv"), index, length)


@pytest.fixture
def with_rank(monkeypatch) -> Callable[[int, type[ring.RingRank]], None]:
    """Let a rank be of this kind."""
    kinds: dict[int, type[ring.RingRank]] = {}
    kind_of = functools.partial(lambda plain, rank: kinds.get(rank, plain), ring.RingRank)
    monkeypatch.setattr(ring, "RingRank", lambda order, *more: kind_of(order.first)(order, *more))
    return kinds.__setitem__


def test_a_rank_that_gives_up_ends_all_at_once(listen, with_rank):
    with_rank(3, Mute)
    ranks = Party(listen, 5).run()
    assert ranks[3].error == "its own reason"
    for rank in ranks:
        assert rank.seconds < 3
        if rank.rank != 3:
            assert rank.error.endswith(f"closed the connection in {rank.phase}")
            # From rank to rank, all waits lead to the rank that gave up first.
            path = [rank.rank]
            while path[-1] not in (3, 99):
                path.append(ranks[path[-1]].waits_for)
                assert len(path) < 6, path
            assert path[-1] == 3


def test_a_rank_that_sends_something_else(listen, with_rank):
    with_rank(1, Liar)
    rank = Party(listen, 3).run()[2]
    error = "rank 1 (127.0.0.1) sent something else than its send_recv"
    assert (rank.error, rank.waits_for) == (error, 1)


def states(port: int) -> list[str]:
    """Of the connections with this port, as the kernel numbers them."""
    text = "".join(Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for row in text.splitlines()]
    return [row[3] for row in rows if f":{port:04X}" in (row[1][-5:], row[2][-5:])]


def test_nothing_is_left_of_a_test(listen):
    party = Party(listen, 3)
    assert all(rank.ok for rank in party.run())
    before = len(os.listdir("/proc/self/fd"))
    assert all(rank.ok for rank in party.run(number=8))
    assert len(os.listdir("/proc/self/fd")) == before
    for peer in party.peers:
        # It listens; there is no TIME_WAIT.
        assert states(peer.port) == ["0A"]


def test_strangers_cost_nothing(listen, monkeypatch):
    """Silent ones, garbage, another's greeting, ends; many at once, while a ring runs."""
    monkeypatch.setattr(mesh, "OPEN_S", 0.5)
    party = Party(listen, 3)
    port = party.peers[1].port
    strangers = []
    for text in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(200), None):
        for _ in range(100):
            connection = socket.create_connection((LOOPBACK, port))
            strangers.append(connection)
            if text is None:
                connection.close()
            elif text:
                connection.send(text)
    assert all(rank.ok for rank in party.run())
    for connection in strangers:
        if connection.fileno() >= 0:
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(100):
                    pass
            connection.close()
    assert party.listeners[1].accepted_count > 400
    # Its own end of a connection is another's to close.
    assert {*states(port)} <= {"0A", "06"}


def test_who_knows_the_form_but_not_the_token(listen):
    """It gets a number, and can do nothing with that of another connection either."""
    listeners, port = listen()
    with listeners.expected(7, 1) as expected:
        welcomes = []
        for token in ("guessed", "guessed", listeners.token):
            with socket.create_connection((LOOPBACK, port)) as connection:
                welcomes.append(connection.recv(100))
                connection.send(
                    smoke_listeners.greeting(token, welcomes[0][16:], 7, 1, smoke_listeners.RING)
                )
                # The first number is that of the first connection alone.
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(100) == b""
        assert expected.take() is None
    assert listeners.token.encode() not in welcomes[0]


def test_a_port_that_is_lent_is_never_free(listen):
    listeners, port = listen()
    with socket.socket(fileno=os.dup(listeners.descriptors()[port])) as borrower:
        listeners.lend(port)
        with pytest.raises(OSError, match="in use"), socket.create_server(("", port)):
            pass
        with socket.create_connection((LOOPBACK, port), 2) as guest:
            borrower.setblocking(True)
            borrower.accept()[0].sendall(b"store")
            assert guest.recv(9) == b"store"
    assert (listeners.ports, listeners.take(port), listeners.ports) == ((), True, (port,))
    found, connection = mesh.connect_to_listener(
        LOOPBACK, port, smoke_listeners.listener_mark(listeners.token)
    )
    assert (found.outcome, connection is not None) == ("ok", True)
    connection.close()


def test_a_port_is_released_and_taken_again(listen):
    listeners, port = listen()
    listeners.lend(port, is_shared=False)
    assert listeners.ports == ()
    with socket.create_server(("", port)):
        assert not listeners.take(port)
        assert listeners.ports == ()
    assert listeners.take(port)
    assert listeners.take(port)
    assert listeners.ports == (port,)
    found, connection = mesh.connect_to_listener(
        LOOPBACK, port, smoke_listeners.listener_mark(listeners.token)
    )
    assert found.outcome == "ok"
    assert connection
    connection.close()
    # A port that it never had, and one that another program has.
    listeners.lend(1, is_shared=False)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        listeners = SmokeListeners([port])
    errors = [(busy.port, busy.error) for busy in listeners.busy]
    assert (listeners.ports, errors) == ((), [(port, os.strerror(errno.EADDRINUSE))])
    # It does not serve yet.
    assert listeners.take(port)
    listeners.lend(port, is_shared=False)


@pytest.fixture
def pair(listen) -> Callable[..., tuple[Callable[..., PairAnswer], PairOrder, SmokeListeners]]:
    """``pair(large=1)``: what runs it, its order, the target's listeners."""

    def make(
        ports=(), **changed: Any
    ) -> tuple[Callable[..., PairAnswer], PairOrder, SmokeListeners]:
        (source, _), (target, port) = listen(), listen()
        order = PairOrder(3, peer(port, target.token), (*ports, port), 4096, MIB, 20.0)
        order = dataclasses.replace(order, **changed)

        def run(own: tuple[str, ...] = (), stop: threading.Event | None = None) -> PairAnswer:
            return run_pair(order, own, source, stop or threading.Event())

        return run, order, target

    return make


def test_a_pair_passes_at_any_size_and_many_do_at_once(pair):
    run, order, target = pair()
    answer = run()
    tries = [attempt.outcome for attempt in answer.tries]
    assert (answer.outcome, answer.address, answer.resolved) == ("ok", LOOPBACK, (LOOPBACK,))
    assert answer.ms > 0 < answer.gbps
    assert 0 <= answer.retransmits < 50
    assert (tries, answer.accepted_count, target.accepted_count) == (["ok"], 0, 2)
    assert wire.decode(PairAnswer, json.loads(json.dumps(dataclasses.asdict(answer)))) == answer
    wait_for(lambda: states(order.target.port) == ["0A"])
    for large in (0, 1, 65537, 3_000_001):
        assert pair(small=8, large=large)[0]().outcome == "ok", large
    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(lambda _: run(), range(16))]
    assert [answer.outcome for answer in answers] == ["ok"] * 16


def test_the_data_goes_over_the_first_port_that_works(pair):
    with stranger(b"220 mail\r\n") as foreign, socket.create_server((LOOPBACK, 0)) as free:
        closed = free.getsockname()[1]
        free.close()
        answer = pair(ports=(closed, foreign))[0]()
    assert [attempt.outcome for attempt in answer.tries] == ["refused", "foreign", "ok"]
    assert answer.outcome == "ok"


def test_an_address_that_is_our_own_is_not_the_targets(pair):
    run, _, target = pair()
    answer = run(own=(LOOPBACK,))
    assert (answer.address, answer.tries, answer.outcome) == ("", (), "")
    assert (answer.resolved, target.accepted_count) == ((LOOPBACK,), 0)


@pytest.mark.parametrize(("least", "outcome"), [(1, "small"), (2000, "large")])
def test_what_comes_back_damaged_is_named(pair, least, outcome):
    run, _, target = pair()
    plain = target._echo

    def damage(connection):
        guest = target._guests[connection]
        with contextlib.suppress(BlockingIOError):
            guest.unsent = guest.unsent or connection.recv(100_000)
            if len(guest.unsent) >= least:
                guest.unsent = b"?" + guest.unsent[1:]
        plain(connection)

    target._echo = damage
    assert run().outcome == outcome


@pytest.mark.usefixtures("impatient")
def test_a_target_that_stops_to_answer(pair):
    run, _, target = pair(limit_s=60)
    target._echo = lambda connection: time.sleep(0.02)
    began = time.monotonic()
    answer = run()
    assert (answer.outcome, answer.ms, answer.gbps) == ("small", 0.0, 0.0)
    assert smoke_pair.SILENT_S <= time.monotonic() - began < 20


def test_a_pair_ends_when_it_is_told_to_or_cannot_end_in_time(pair, monkeypatch):
    run, _, target = pair(limit_s=60, large=1 << 40)
    stop = threading.Event()
    plain = target._echo
    target._echo = lambda connection: (target.accepted_count > 1 and stop.set(), plain(connection))
    answer = run(stop=stop)
    assert answer.outcome in ("small", "large")
    assert len(answer.tries) == 1
    # It has a figure all the same.
    monkeypatch.setattr(smoke_pair, "SLOW_S", 0.1)
    answer = pair(limit_s=1.5, large=1 << 40)[0]()
    assert (answer.outcome, answer.gbps > 0) == ("large", True)
