"""Pairs and their listeners over real sockets, on the loopback of this process."""

import contextlib
import dataclasses
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nodeready.agent import resolver
from nodeready.agent.proofs import mesh
from nodeready.agent.smoke import pair as smoke_pair
from nodeready.agent.smoke.orders import PairAnswer, PairOrder, SmokePeer
from nodeready.agent.smoke.pair import SmokeListeners, run_pair
from nodeready.core import wire
from tests.command import wait_for

LOOPBACK = "127.0.0.1"
MIB = 1 << 20


def peer(port: int, token: str, address: str = LOOPBACK, name: str = "") -> SmokePeer:
    return SmokePeer(name or address, (address,), port, token)


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
            listeners.lend(port)


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


def states(port: int) -> list[str]:
    """Of the connections with this port, as the kernel numbers them."""
    text = "".join(Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for row in text.splitlines()]
    return [row[3] for row in rows if f":{port:04X}" in (row[1][-5:], row[2][-5:])]


@pytest.fixture
def pair(listen) -> Callable[..., tuple[Callable[..., PairAnswer], PairOrder, SmokeListeners]]:
    """``pair(large=1)``: what runs it, its order, the target's listeners."""

    def make(
        ports=(), **changed: Any
    ) -> tuple[Callable[..., PairAnswer], PairOrder, SmokeListeners]:
        target, port = listen()
        order = PairOrder(3, peer(port, target.token), (*ports, port), 4096, MIB, 20.0)
        order = dataclasses.replace(order, **changed)

        def run(own: tuple[str, ...] = (), stop: threading.Event | None = None) -> PairAnswer:
            return run_pair(order, own, stop or threading.Event())

        return run, order, target

    return make


def test_nothing_is_left_of_a_test(pair):
    run, order, _ = pair()
    assert run().outcome == "ok"
    # It listens; there is no TIME_WAIT.
    wait_for(lambda: states(order.target.port) == ["0A"])
    before = len(os.listdir("/proc/self/fd"))
    assert run().outcome == "ok"
    # What earlier tests have left may be closed meanwhile.
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_strangers_cost_nothing(pair, monkeypatch):
    """Silent ones, garbage, another's greeting, ends; many at once, while a pair runs."""
    monkeypatch.setattr(mesh, "OPEN_S", 0.5)
    run, order, target = pair()
    strangers = []
    for text in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(200), None):
        for _ in range(100):
            connection = socket.create_connection((LOOPBACK, order.target.port))
            strangers.append(connection)
            if text is None:
                connection.close()
            elif text:
                connection.send(text)
    assert run().outcome == "ok"
    for connection in strangers:
        if connection.fileno() >= 0:
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(100):
                    pass
            connection.close()
    assert target.accepted_count > 400
    # Its own end of a connection is another's to close.
    assert {*states(order.target.port)} <= {"0A", "06"}


def test_who_does_not_know_the_token(listen):
    listeners, port = listen()
    with socket.create_connection((LOOPBACK, port)) as connection:
        mark = connection.recv(100)
        connection.send(mark)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    assert listeners.token.encode() not in mark


def test_the_token_of_another_run(pair):
    run, order, _ = pair()
    answer = pair(
        ports=(order.target.port,), target=dataclasses.replace(order.target, token="0" * 16)
    )[0]()
    assert [attempt.outcome for attempt in answer.tries] == ["foreign", "foreign"]
    assert (answer.outcome, run().outcome) == ("", "ok")


@pytest.mark.parametrize(("name", "resolve", "error"), [
    ("localhost", None, ""),
    ("gpu03", socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    ("gpu03", lambda *_, **__: time.sleep(2) or [], "no answer"),
])  # fmt: skip
def test_a_name_that_does_not_lead_to_the_target(pair, monkeypatch, name, resolve, error):
    monkeypatch.setattr(resolver, "RESOLVE_S", 0.3)
    look = Mock(wraps=socket.getaddrinfo, side_effect=resolve)
    monkeypatch.setattr(socket, "getaddrinfo", look)
    answer = pair(target=SmokePeer(name, ("10.9.8.7",), 1, "token"))[0]()
    assert (answer.address, answer.tries, answer.outcome) == ("", (), "")
    assert bool(answer.resolved) == (not error)
    assert error in answer.error


def test_a_port_is_released_and_taken_again(listen):
    listeners, port = listen()
    listeners.lend(port)
    assert listeners.ports == ()
    with socket.create_server(("", port)):
        assert not listeners.take(port)
        assert listeners.ports == ()
    assert listeners.take(port)
    assert listeners.take(port)
    assert listeners.ports == (port,)
    found, connection = mesh.connect_to_listener(
        LOOPBACK, port, smoke_pair.listener_mark(listeners.token)
    )
    assert found.outcome == "ok"
    assert connection
    connection.close()
    # A port that it never had, and one that another program has.
    listeners.lend(1)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        listeners = SmokeListeners([port])
    errors = [(busy.port, busy.error) for busy in listeners.busy]
    assert (listeners.ports, errors) == ((), [(port, os.strerror(errno.EADDRINUSE))])
    # It does not serve yet.
    assert listeners.take(port)
    listeners.lend(port)


def test_a_pair_passes_at_any_size_and_many_do_at_once(pair):
    run, order, target = pair()
    answer = run()
    tries = [attempt.outcome for attempt in answer.tries]
    assert (answer.outcome, answer.address, answer.resolved) == ("ok", LOOPBACK, (LOOPBACK,))
    assert answer.ms > 0 < answer.gbps
    assert 0 <= answer.retransmits < 50
    assert (tries, target.accepted_count) == (["ok"], 2)
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

    def damage(connection, guest):
        with contextlib.suppress(BlockingIOError):
            guest.unsent = guest.unsent or connection.recv(100_000)
            if len(guest.unsent) >= least:
                guest.unsent = b"?" + guest.unsent[1:]
        plain(connection, guest)

    target._echo = damage
    assert run().outcome == outcome


def test_a_target_that_stops_to_answer(pair, monkeypatch):
    monkeypatch.setattr(smoke_pair, "SILENT_S", smoke_pair.SILENT_S / 10)
    run, _, target = pair(limit_s=60)
    target._echo = lambda *_: time.sleep(0.02)
    began = time.monotonic()
    answer = run()
    assert (answer.outcome, answer.ms, answer.gbps) == ("small", 0.0, 0.0)
    assert smoke_pair.SILENT_S <= time.monotonic() - began < 20


def test_a_pair_ends_when_it_is_told_to_or_cannot_end_in_time(pair, monkeypatch):
    run, _, target = pair(limit_s=60, large=1 << 40)
    stop = threading.Event()
    plain = target._echo
    target._echo = lambda *words: (target.accepted_count > 1 and stop.set(), plain(*words))
    answer = run(stop=stop)
    assert answer.outcome in ("small", "large")
    assert len(answer.tries) == 1
    # It has a figure all the same.
    monkeypatch.setattr(smoke_pair, "SLOW_S", 0.1)
    answer = pair(limit_s=1.5, large=1 << 40)[0]()
    assert (answer.outcome, answer.gbps > 0) == ("slow", True)
