"""ClusterShell as the transport, without a node: words, frames, options, messages of gateways."""

import base64
import shlex
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import gevent
import pytest

from nodeready.agent.asking import Answer, Request
from nodeready.fleet.transport.clush.gateway import (
    Gateway,
    SshTarget,
    connect_error_words,
    gateway_command,
    ssh_target,
    without_own_keys,
)
from nodeready.fleet.transport.clush.transport import FramedOutput, framed, request_line
from nodeready.fleet.transport.connectors import OutputTooLarge, PipedProgram, reply_of
from tests.cases import cases, read_table

NONCE = "nodeready-0123456789abcdef"
WAY = SshTarget("n1", "n1", user="root", key="/k")


@pytest.mark.parametrize("case", cases(__file__, "data/ssh_errors.json"))
def test_an_error_of_ssh_has_the_words_of_the_other_carrier(case):
    error = WAY.failure_text(case["said"])
    assert error.startswith(case["error"])
    assert "\x1b" not in error
    words = "n1 refused user root with any key of gateway gw1"
    assert WAY.failure_text("Permission denied (publickey)", "gw1") == words
    assert connect_error_words("") == "timed out"


def answer_of(output, status, stderr=""):
    """The answer of a node that printed this, and whose ssh ended with this status."""
    framed_output = FramedOutput(NONCE, Request("n1", "true", 9))
    framed_output.add(output)
    return framed_output.answer(Answer(stderr=stderr, seconds=1.0, rc=status), WAY)


def run(script, most=1000, login=("sh",)):
    """The answer of a node whose login shell runs the framed command."""
    request = Request("n1", script, 9, max_bytes=most)
    line, text = request_line(request, "nodeready:abc", WAY)
    output = FramedOutput(NONCE, request)
    program = PipedProgram([*login, "-c", framed(line, NONCE)], separate_errors=True)
    try:
        reply = reply_of(program, text.encode(), output)
    except OutputTooLarge as problem:
        return Answer(seconds=1.0, gap=output.flood_gap(problem.data))
    finally:
        program.close()
    return output.answer(replace(reply, seconds=1.0), WAY)


@pytest.mark.parametrize(("script", "stdout", "stderr", "rc"), [
    ("echo well", "well\n", "", 0),
    (r"printf '\001\r\n\377'; echo two >&2; exit 3", "\x01\r\n\udcff", "two\n", 3),
    ("exit 255", "", "", 255),
    ("kill -9 $$", "", "", None),
    ("exec >&-; exit 4", "", "", 4),
])  # fmt: skip
def test_a_framed_command_brings_its_output_and_status(script, stdout, stderr, rc):
    assert run(script) == Answer(stdout, stderr, seconds=1.0, rc=rc)


def test_a_flood_is_cut_and_a_login_that_runs_nothing_answers_in_its_own_words():
    gap, first = run("yes flood", most=5000).gap, ("flood\n" * 7)[:40]
    assert (gap.kind, gap.reason) == ("output", f"too much output, beginning with {first!r}")
    words = "This account is currently not available."
    answer = answer_of(f"{words}\n".encode(), 1)
    assert answer == Answer(f"{words}\n", seconds=1.0, rc=1)


def test_the_tag_is_in_no_command_line_but_the_commands_own():
    """An ssh's command line has the line: it runs on a machine that may be a node, too."""
    asks = SshTarget("n1", "n1", sudo=True)
    for to in (WAY, asks, replace(asks, password="secret")):
        line, stdin = request_line(Request("n1", "true", 9), "nodeready:abc", to)
        assert "nodeready:abc" not in framed(line, NONCE)
        assert shlex.split(line)[-1] == "nodeready:abc"
        assert "secret" not in line
        assert stdin.startswith("secret\n") == bool(to.password)


@pytest.mark.parametrize(("output", "status", "kind", "error"), [
    ("welcome\n", 255, "unreachable", "n1: no answer in 15 s"),
    (f"welcome\n{NONCE} b\nhalf an ans", 255, "lost", "connection lost"),
])  # fmt: skip
def test_an_incomplete_answer_is_a_failure(output, status, kind, error):
    answer = answer_of(output.encode(), status)
    assert answer.gap
    assert (answer.gap.kind, answer.gap.reason) == (kind, error)


def host(name="n1", **data):
    return SimpleNamespace(name=name, data=data)


def test_the_data_of_an_inventory_are_options_of_ssh():
    data = {"ssh_hostname": "10.0.0.1", "ssh_port": 2222, "ssh_user": "ops", "ssh_key": "/keys/id"}
    data |= {"ssh_known_hosts_file": "/known", "ssh_strict_host_key_checking": "no"}
    own = ssh_target(host(**data))
    words = own.destination, own.display_address, own.direct_reason
    assert words == ("10.0.0.1", "[10.0.0.1]:2222", "a port of its own")
    for word in ("Port=2222", "User=ops", "IdentityFile=/keys/id", "UserKnownHostsFile=/known"):
        assert f"-o{word}" in own.options
    # Never the word with which ssh takes a key that has changed.
    assert "-oStrictHostKeyChecking=accept-new" in own.options
    assert "-oBatchMode=yes" in own.options
    ways = [ssh_target(host(f"n{number}", ssh_key="/keys/all")) for number in range(3)]
    ways.append(ssh_target(host("n9", ssh_key="/keys/its own")))
    reasons = [target.direct_reason for target in without_own_keys(ways)]
    assert reasons == ["", "", "", "a key of its own"]


def test_data_that_only_pyinfra_can_use_are_refused():
    for name, data, why in read_table(__file__, "data_that_only_pyinfra_can_use_are_refused"):
        assert ssh_target(host(name, **data)).refused == f"{why}: ask with --via ssh"
    assert ssh_target(host()).refused == ""


class Lines:
    """A gateway's program that prints these lines after its first one."""

    def __init__(self, gateway, *lines):
        self.pieces = [b"welcome\n" + gateway.hello + b"\n", *lines, b""]

    def read_output(self):
        return self.pieces.pop(0)

    def read_errors(self):
        return b""

    def write(self, data, limit_s):
        return

    def status(self, errors):
        return 0

    def close(self):
        return


def test_a_line_of_a_gateway_is_the_data_of_its_command_or_ends_the_connection():
    def served(*lines):
        gateway = Gateway(WAY, 1, lambda gateway, was_fit: None)
        command = gateway.start(["ssh"], b"", 99, True)
        gateway.serve(lambda: Lines(gateway, *lines))
        return gateway.unfit_reason, command

    _, command = served(b"1 out d2", b"VsbA==\n1 err d2VsbA==\n9 out d2VsbA==\n1 end Nw==\n")
    assert (command.read_output(), command.read_errors()) == (b"well", b"well")
    assert (command.read_output(), command.status("")) == (b"", 7)
    sense = "its answer makes no sense: "
    for lines, reason in (
        ([b"1 out d2VsbA==\n"], "connection lost"),
        ([b"1 out %%%\n"], sense),
        ([b"1 more d2VsbA==\n"], f"{sense}a line of no kind"),
        ([b"\n"], sense),
        ([b"A" * (1 << 20), b"A" * 9], f"{sense}a line without an end"),
        ([b"7 out \n" * 100_001], f"{sense}answers of other commands"),
    ):
        found, command = served(*lines)
        assert found.startswith(reason)
        with pytest.raises(EOFError, match="gateway n1: "):
            list(iter(command.read_output, b""))
    _, command = served(b"1 out " + base64.b64encode(bytes(200)) + b"\n1 end MA==\n")
    with pytest.raises(OutputTooLarge):
        command.read_output()


def test_the_program_of_a_gateway_runs_commands_and_ends_them():
    environment = {"CLUSTERSHELL_GW_PYTHON_EXECUTABLE": sys.executable, "HOME": "/secret"}
    gateway = Gateway(WAY, 1, lambda gateway, was_fit: None)
    line = gateway_command(environment, gateway.hello)
    assert "/secret" not in line
    assert len(line) < 8000
    job = gevent.spawn(
        gateway.serve, lambda: PipedProgram(["sh", "-c", line], separate_errors=True)
    )
    answer = gateway.start(["sh", "-c", "cat; echo two >&2; exit 7"], b"one", 99, True)
    script = "read -r line; echo $line; exec sleep 977"
    session = gateway.start(["sh", "-c", script], None, 99, False)
    missing = gateway.start(["/nowhere/ssh"], b"one", 99, True)
    assert (answer.read_output(), answer.read_errors(), answer.status("")) == (b"one", b"two\n", 7)
    assert b"No such file" in missing.read_errors()
    assert missing.status("") == 127
    session.write(b"hello\n", 9)
    assert session.read(9) == b"hello\n"
    with pytest.raises(TimeoutError):
        session.read(0.01)
    session.close()
    assert (gateway.is_fit, gateway.commands) == (True, {})
    gateway.start(["sleep", "978"], None, 99, False)
    job.kill()
    gevent.sleep(0.2)
    assert subprocess.run(["pgrep", "-f", "^sleep 97[78]"], check=False).returncode
