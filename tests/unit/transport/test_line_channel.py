"""A command that is spoken with line by line: its lines, its end, and its process."""

import os
from unittest.mock import Mock

import pytest
from pyinfra.api import Config, Inventory, State

from nodeready.agent.asking import Request
from nodeready.agent.local import LineChannel, Local
from nodeready.fleet.transport.ssh import ConnectedHosts
from tests.cases import with_table
from tests.command import wait_for

MARK = "mark-4711"


@pytest.fixture
def host():
    inventory = Inventory((["@local"], {}))
    State(inventory, Config())
    host = inventory.get_host("@local")
    host.connect()
    return host


@pytest.fixture(params=["local", "ssh"])
def begin(request, host):
    transport = Local() if request.param == "local" else ConnectedHosts([host])
    channels = []

    def start(script, limit_s=60):
        (node,) = transport.nodes
        channels.append(transport.open(Request(node, f"exec <&3\n{script}", limit_s, "", MARK)))
        return channels[-1]

    yield start
    for channel in channels:
        channel.close()


def test_lines_go_both_ways_and_noise_is_passed_over(begin):
    channel = begin(
        f'echo "{MARK} $$"; while read -r line; do '
        f'printf "a motd\\n\\377\\nprompt> {MARK} got $line\\n"; done'
    )
    process = f"/proc/{channel.read_line(10).split()[1]}"
    for word in ("one", "two $x '\""):
        channel.send_line(word)
        assert channel.read_line(10) == f"{MARK} got {word}"
    assert channel.error == ""
    channel.close()
    wait_for(lambda: not os.path.exists(process))


def test_a_silent_command_is_waited_for_and_then_ended(begin):
    channel = begin(f"echo {MARK} $$; exec cat")
    process = f"/proc/{channel.read_line(10).split()[1]}"
    assert (channel.read_line(0.1), channel.error, os.path.exists(process)) == (None, "", True)
    channel.close()
    wait_for(lambda: not os.path.exists(process))
    assert channel.read_line(1) is None
    # Even when it does not heed the end of its input: at the latest by its own limit.
    channel = begin(f"echo {MARK} $$; exec sleep 600", limit_s=1)
    process = f"/proc/{channel.read_line(10).split()[1]}"
    channel.close()
    wait_for(lambda: not os.path.exists(process))


@with_table("command, error")
def test_why_there_is_no_answer(begin, command, error):
    channel = begin(command)
    assert channel.read_line(30) is None
    assert channel.error == error
    # A line that cannot be sent any more is no error of its own.
    channel.send_line("hello")
    assert channel.error == error


def test_a_connector_without_a_channel_is_an_error(host):
    for problem, error in (
        (TimeoutError(), "no channel in 15 s"),
        (ValueError("why"), "why"),
        (EOFError(), "connection lost (EOFError)"),
    ):
        assert LineChannel(Mock(side_effect=problem), "", MARK).error == error
    transport = ConnectedHosts([host])
    host.connector = object()
    assert transport.open(Request("@local", "true", 60, "", MARK)).error == "needs ssh"
