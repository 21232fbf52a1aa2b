"""The program of a smoke test, run by whoever logs in."""

import socket
from dataclasses import replace

import pytest

from nodeready.agent.smoke import orders, program
from nodeready.agent.smoke.orders import EndOrder, Hello
from tests.cases import with_table
from tests.unit.node.smoke.running_program import HERE, pair, port, start, stubborn, torch

__all__ = ["port", "start"]


def test_from_hello_to_the_end(start, port):
    node = start()
    hello = node.answer()
    assert hello == Hello(
        "token", (port,), hello.addresses, hello.engines, "", hello.variables, hello.facts
    )
    assert [interface.name for interface in hello.facts.interfaces][:1] == ["lo"]
    assert hello.engines[0].name == "torch"
    node.order(pair(1))
    assert (node.answer().number, node.printed[-1].count("192.0.2.1")) == (1, 0)
    node.order(torch(2, first=2))
    assert [rank.rank for rank in node.answer().ranks] == [2, 3]
    node.order(pair(3, replace(HERE, addresses=hello.addresses)))
    assert "own" in node.answer().error or not hello.addresses
    # What breaks costs its test.
    node.order(pair(4, small=13))
    assert node.answer().error.endswith(": OSError: the pair is broken")
    # An end is for its own test.
    node.order(pair(5, small=90_000))
    node.order(pair(6, small=90_000))
    for number in (7, 5):
        node.order(EndOrder(number))
    answer = node.answer()
    assert (answer.number, answer.error) == (5, "ended")
    node.order(EndOrder(6))
    assert (node.answer().number, node.printed[-1].count("ended")) == (6, 1)
    # A line that is cut off is no order.
    node.write(orders.line(pair(8)))
    assert node.close() == (0, "")
    assert node.answer() is None
    assert node.is_gone()


@pytest.mark.parametrize("line", [
    "{}", "x", "[]", "1", '"pair"', "null", '{"what":"collective"}', '{"what":"end"}',
    '{"what":"end","number":"1"}', '{"what":[],"number":1}', "[" * 100_000,
    *(orders.line(pair(1, limit_s=float(limit_s))) for limit_s in (-1, 0, 86401, "nan", "inf")),
    "",
])  # fmt: skip
def test_a_line_that_is_no_order(line):
    with pytest.raises(ValueError, match=r"no order: [^\n]*$"):
        program._order(line)


def test_a_line_that_is_no_order_ends_the_program(start):
    node = start()
    node.answer()
    node.order(torch(1, "sleep 300"))
    node.wait_for_ranks()
    node.write("{}\n")
    status, error = node.wait()
    assert (status, error) == (1, "no order: KeyError: 'kind'\n")
    assert node.is_gone()


def test_the_rendezvous_has_its_port(start, port):
    """While rank 0 is on this node, our listener is not; afterwards it is."""
    node = start()
    node.answer()
    head = replace(HERE, port=port)
    for number, words, limit_s in ((1, "sleep 0.1", 10), (2, "sleep 9", 0.3)):
        node.order(torch(number, words, limit_s, head=head, small=29))
        assert len(node.answer().ranks) == 2
        socket.create_connection(("127.0.0.1", port), 2).close()
    # Of another node's rendezvous, the number alone is the same.
    node.order(torch(3, "sleep 309", first=2, head=head))
    node.wait_for_ranks("sleep 309")
    socket.create_connection(("127.0.0.1", port), 2).close()


def test_no_port_is_free(start):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        node = start(ports=(port,))
        hello = node.answer()
        assert hello.ports == ()
        assert hello.reason == f"no port of {port} is free ({port}: Address already in use)"
        assert node.answer() is None
        assert node.wait() == (0, "")
    assert node.is_gone()


@with_table("config, why")
def test_a_node_that_cannot_take_part(start, config, why):
    node = start(**config)
    assert node.answer().reason.startswith(why)
    assert node.answer() is None
    assert node.is_gone()


@pytest.mark.parametrize("how", ["stdin", "TERM", "INT", "HUP", "alarm", "KILL"])
def test_everything_ends_in_the_middle_of_a_test(start, port, how):
    node = start(limit_s=4 if how == "alarm" else 60)
    node.answer()
    node.order(torch(1, stubborn(), 50))
    node.wait_for_ranks("sleep", 2)
    node.end(how)
    assert node.answer() is None
    assert node.is_gone()
    socket.create_server(("", port)).close()
