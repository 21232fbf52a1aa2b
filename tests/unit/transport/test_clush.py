"""ClusterShell as the transport, without a node: words, frames, options, messages of gateways."""

import base64
import os
import pickle
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from ClusterShell import Communication

from nodeready.agent.asking import Answer, Request
from nodeready.fleet.transport.clush.command import NodeOutput, framed, request_line
from nodeready.fleet.transport.clush.gateway import decoded
from nodeready.fleet.transport.clush.gateway_program import FLOOD, gateway_command
from nodeready.fleet.transport.clush.ssh_targets import (
    SshTarget,
    connect_error_words,
    ssh_target,
    without_own_keys,
)
from tests.cases import cases

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


def lines_of(out=(), error=()):
    lines = NodeOutput(NONCE.encode(), 1000)
    for row in out:
        lines.add_line(row)
    for row in error:
        lines.add_error_line(row)
    return lines


def run(script, most=1000, login=("sh",)):
    """The answer of a node whose login shell runs the framed command."""
    request = Request("n1", script, 9, max_bytes=most)
    line, text = request_line(request, "nodeready:abc", WAY)
    done = subprocess.run(
        [*login, "-c", framed(line, NONCE, most)], input=text, capture_output=True, check=False
    )
    lines = lines_of(done.stdout.splitlines(), done.stderr.splitlines())
    return lines.answer(request, WAY, done.returncode, 1.0)


@pytest.mark.parametrize(("script", "stdout", "stderr", "rc"), [
    ("echo well", "well\n", "", 0),
    (r"printf '\001\r\n\377'; echo two >&2; exit 3", "\x01\r\n\udcff", "two\n", 3),
    ("exit 255", "", "", 255),
    ("kill -9 $$", "", "", None),
    ("exec >&-; exit 4", "", "", 4),
])  # fmt: skip
def test_a_framed_command_brings_its_output_and_status(script, stdout, stderr, rc):
    assert run(script) == Answer(stdout, stderr, seconds=1.0, rc=rc)


def test_a_flood_is_cut_on_the_node_and_a_login_that_runs_nothing_answers_in_its_own_words():
    answer = run("yes flood", most=5000)
    first = ("flood\n" * 7)[:40]
    assert (answer.gap.kind, answer.gap.reason) == (
        "output",
        f"too much output, beginning with {first!r}",
    )
    words = "This account is currently not available."
    answer = lines_of([words.encode()]).answer(Request("n1", "true", 9), WAY, 1, 1.0)
    assert answer == Answer(f"{words}\n", seconds=1.0, rc=1)


def test_the_tag_is_in_no_command_line_but_the_commands_own():
    """An ssh's command line has the line: it runs on a machine that may be a node, too."""
    for to in (
        WAY,
        SshTarget("n1", "n1", sudo=True),
        SshTarget("n1", "n1", sudo=True, password="secret"),
    ):
        line, stdin = request_line(Request("n1", "true", 9), "nodeready:abc", to)
        assert "nodeready:abc" not in framed(line, NONCE, 9)
        assert shlex.split(line)[-1] == "nodeready:abc"
        assert "secret" not in line
        assert stdin.startswith(b"secret\n") == bool(to.password)


BEGIN, END = f"{NONCE} b".encode(), f"{NONCE} z 0".encode()
SPOILED = "the answer cannot be read: something else was written into it"


@pytest.mark.parametrize(("rows", "status", "kind", "error"), [
    ([b"welcome"], 255, "unreachable", "n1: no answer in 15 s"),
    ([b"welcome", BEGIN], 255, "lost", "connection lost"),
    ([FLOOD], 137, "output", "too much output, beginning with ''"),
    ([BEGIN, b"%%%", END], 0, "failed", SPOILED),
])  # fmt: skip
def test_an_incomplete_answer_is_a_failure(rows, status, kind, error):
    answer = lines_of(rows).answer(Request("n1", "true", 9), WAY, status, 1.0)
    assert answer.gap
    assert (answer.gap.kind, answer.gap.reason) == (kind, error)


def host(name="n1", **data):
    return SimpleNamespace(name=name, data=data)


def test_the_data_of_an_inventory_are_options_of_ssh():
    data = {"ssh_hostname": "10.0.0.1", "ssh_port": 2222, "ssh_user": "ops", "ssh_key": "/keys/id"}
    own = ssh_target(
        host(**data, ssh_known_hosts_file="/known", ssh_strict_host_key_checking="no")
    )
    assert (own.destination, own.display_address, own.direct_reason) == (
        "10.0.0.1",
        "[10.0.0.1]:2222",
        "a port of its own",
    )
    for word in ("Port=2222", "User=ops", "IdentityFile=/keys/id", "UserKnownHostsFile=/known"):
        assert f"-o{word}" in own.options
    # Never the word with which ssh takes a key that has changed.
    assert "-oStrictHostKeyChecking=accept-new" in own.options
    assert "-oBatchMode=yes" in own.options
    ways = [ssh_target(host(f"n{number}", ssh_key="/keys/all")) for number in range(3)]
    ways.append(ssh_target(host("n9", ssh_key="/keys/its own")))
    assert [item.direct_reason for item in without_own_keys(ways)] == [
        "",
        "",
        "",
        "a key of its own",
    ]


def test_data_that_only_pyinfra_can_use_are_refused():
    for name, data, why in (
        ("n1", {"ssh_password": "x"}, "ssh_password is for pyinfra's own ssh"),
        ("n1", {"_doas": True}, "_doas is pyinfra's"),
        ("@local", {}, "@local is a connector of pyinfra's"),
    ):
        assert ssh_target(host(name, **data)).refused == f"{why}: ask with --via ssh"
    assert ssh_target(host()).refused == ""


def test_a_message_of_a_gateway_runs_nothing_here(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "hostile"),)

    message = SimpleNamespace(data=base64.b64encode(pickle.dumps(b"well", 4)))
    assert decoded(message) == b"well"
    for sent in (Hostile(), "no bytes"):
        message = SimpleNamespace(data=base64.b64encode(pickle.dumps(sent, 4)))
        with pytest.raises(Communication.MessageProcessingError):
            decoded(message)
    assert not (tmp_path / "hostile").exists()


def test_a_gateway_with_another_clustershell_is_named(tmp_path):
    failing = "class RouteResolvingError(Exception): pass\n"
    for name, text in {
        "__init__": "__version__ = '1.2'\n",
        "Gateway": failing,
        "Propagation": failing,
        "Worker/__init__": "",
        "Worker/Tree": "TreeWorker = object\n",
    }.items():
        path = tmp_path / "ClusterShell" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {"CLUSTERSHELL_GW_PYTHON_EXECUTABLE": sys.executable, "HOME": "/secret"}
    line = gateway_command({**environment, "PYTHONPATH": str(tmp_path)})
    assert "/secret" not in line
    assert len(line) < 8000
    how = {"capture_output": True, "text": True, "input": ""}
    done = subprocess.run(["sh", "-c", line], check=False, **how)
    assert done.returncode == 3
    assert re.fullmatch(r"nodeready: ClusterShell 1\.2 there, [0-9.]+ here\n", done.stderr)
