"""ClusterShell as the carrier, without a node: words, frames, ways, what gateways are sent."""

from __future__ import annotations

import base64
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ClusterShell import Communication

from nodeready.transport.base import Failure, Reply, Request
from nodeready.transport.clush import carrier as clush_carrier
from nodeready.transport.clush.carrier import Clush, ClushError
from nodeready.transport.clush.command import Heard, command, framed
from nodeready.transport.clush.gateway import FLOOD, decoded, gateway_command
from nodeready.transport.clush.ways import Way, translated, way, without_own_keys

NONCE = "nodeready-0123456789abcdef"
WAY = Way("n1", "n1", user="root", key="/k")
SHELLS = [one for one in ("dash", "bash", "busybox") if shutil.which(one)]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("ssh: connect to host n1 port 22: Connection refused", "n1: connection refused: is sshd"),
        ("ssh: connect to host n1 port 22: No route to host", "n1: no route to the node"),
        ("ssh: connect to host n1 port 22: Connection timed out", "n1: no answer in 15 s"),
        ("ssh: Could not resolve hostname n1: Name or service not known", "host name n1 does not"),
        ("root@n1: Permission denied (publickey).", "n1 refused user root with /k"),
        (
            "Connection timed out during banner exchange",
            "n1: accepts connections but sends no SSH",
        ),
        ("kex_exchange_identification: read: Connection reset by peer", "n1: accepts connections"),
        (
            "Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures",
            "n1: sshd",
        ),
        ("Unable to negotiate with 1.2.3.4: no matching host key type found", "n1: no algorithm"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "host key of n1 changed; refused.",
        ),
        (
            "No ED25519 host key is known for n1 and you have requested strict checking.\n"
            "Host key verification failed.",
            "host key of n1 is not in ~/.ssh/known_hosts; refused",
        ),
        ("Connection closed by 1.2.3.4 port 22", "n1: sshd closed the connection"),
        ("Connection closed by UNKNOWN port 65535", "n1: the ProxyCommand of the ssh"),
        ("something \x1b[31mnew", "n1: something "),
    ],
)
def test_what_ssh_says_is_told_in_the_words_of_the_other_carrier(said: str, error: str) -> None:
    found = WAY.unreachable(said)
    assert found.kind == "unreachable"
    assert found.error.startswith(error)
    assert "\x1b" not in found.error


def test_a_gateways_ssh_is_named() -> None:
    assert WAY.words("Permission denied (publickey)", "gw1") == (
        "n1 refused user root with any key of gateway gw1"
    )
    assert translated("") == "timed out"


def run(shell: str, script: str, stdin: bytes = b"", limit_s: int = 9, most: int = 1000) -> Any:
    """What a node's login shell makes of a framed command: the lines, heard."""
    line, text = command(Request("n1", script, limit_s), "nodeready:abc", WAY)
    words = [shell, "sh"] if shell == "busybox" else [shell]
    done = subprocess.run(
        [*words, "-c", framed(line, NONCE, most)],
        input=text + stdin,
        capture_output=True,
        check=False,
        timeout=20,
    )
    heard = Heard(NONCE.encode())
    for row in done.stdout.splitlines():
        heard.out(row)
    for row in done.stderr.splitlines():
        heard.error(row)
    return heard.answer(Request("n1", script, limit_s, max_bytes=most), WAY, done.returncode, 1.0)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("script", "stdout", "stderr", "rc"),
    [
        ("echo well", "well\n", "", 0),
        (r"printf '\001\r\n\377'; echo two >&2; exit 3", "\x01\r\n\udcff", "two\n", 3),
        ("exit 255", "", "", 255),
        ("kill -9 $$", "", "", None),
        ("exec >&-; exit 4", "", "", 4),
    ],
)
def test_a_framed_command_tells_what_it_said(
    shell: str, script: str, stdout: str, stderr: str, rc: int | None
) -> None:
    found = run(shell, script)
    assert isinstance(found, Reply)
    assert (found.stdout, found.stderr, found.rc) == (stdout, stderr, rc)


def test_a_flood_is_cut_on_the_node() -> None:
    found = run("sh", "yes flood", most=5000)
    first = ("flood\n" * 7)[:40]
    assert (found.kind, found.error) == ("output", f"too much output, beginning with {first!r}")


def test_the_tag_is_in_no_command_line_but_the_commands_own() -> None:
    """An ssh's command line has the line: it runs on a machine that may be a node, too."""
    for to in (WAY, Way("n1", "n1", sudo=True), Way("n1", "n1", sudo=True, password="secret")):
        line, stdin = command(Request("n1", "true", 9), "nodeready:abc", to)
        assert "nodeready:abc" not in framed(line, NONCE, 9)
        assert shlex.split(line)[-1] == "nodeready:abc"
        assert "secret" not in line
        assert stdin.startswith(b"secret\n") == bool(to.password)


@pytest.mark.parametrize(
    ("rows", "status", "kind", "error"),
    [
        ([b"welcome"], 255, "unreachable", "n1: no answer in 15 s"),
        ([b"welcome", f"{NONCE} b".encode()], 255, "lost", "connection lost"),
        ([FLOOD], 137, "output", "too much output, beginning with ''"),
        (
            [f"{NONCE} b".encode(), b"%%%", f"{NONCE} z 0".encode()],
            0,
            "failed",
            "the answer cannot be read: something else was written into it",
        ),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(
    rows: list[bytes], status: int, kind: str, error: str
) -> None:
    heard = Heard(NONCE.encode())
    for row in rows:
        heard.out(row)
    found = heard.answer(Request("n1", "true", 9), WAY, status, 1.0)
    assert isinstance(found, Failure)
    assert (found.kind, found.error) == (kind, error)


def test_a_login_that_runs_nothing_answers_in_its_own_words() -> None:
    heard = Heard(NONCE.encode())
    heard.out(b"This account is currently not available.")
    found = heard.answer(Request("n1", "true", 9), WAY, 1, 1.0)
    assert isinstance(found, Reply)
    assert (found.rc, found.stdout) == (1, "This account is currently not available.\n")


def host(name: str = "n1", **data: Any) -> Any:
    return SimpleNamespace(name=name, data=data)


def test_an_inventorys_data_are_words_of_sshs() -> None:
    found = way(
        host(
            ssh_hostname="10.0.0.1",
            ssh_port=2222,
            ssh_user="ops",
            ssh_key="/keys/id",
            ssh_known_hosts_file="/known",
            ssh_strict_host_key_checking="no",
        )
    )
    assert found.to == "10.0.0.1"
    assert found.shown == "[10.0.0.1]:2222"
    assert found.alone == "a port of its own"
    for word in ("Port=2222", "User=ops", "IdentityFile=/keys/id", "UserKnownHostsFile=/known"):
        assert f"-o{word}" in found.options
    # Never the word with which ssh takes a key that has changed.
    assert "-oStrictHostKeyChecking=accept-new" in found.options
    assert "-oBatchMode=yes" in found.options


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"ssh_password": "x"}, "ssh_password is for pyinfra's own ssh: ask with --via ssh"),
        ({"_doas": True}, "_doas is pyinfra's: ask with --via ssh"),
        ({}, ""),
    ],
)
def test_what_only_pyinfra_can_do_is_refused(data: dict[str, Any], why: str) -> None:
    assert way(host(**data)).refused == why
    assert way(host("@local")).refused == "@local is a connector of pyinfra's: ask with --via ssh"


def test_a_node_with_a_key_of_its_own_is_asked_directly() -> None:
    ways = [way(host(f"n{at}", ssh_key="/keys/all")) for at in range(3)]
    ways.append(way(host("n9", ssh_key="/keys/its own")))
    assert [one.alone for one in without_own_keys(ways)] == ["", "", "", "a key of its own"]


def test_what_a_gateway_sends_runs_nothing_here() -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, ("touch /tmp/hostile",)

    for sent, fine in ((b"well", True), (Hostile(), False), ("no bytes", False)):
        message = SimpleNamespace(data=base64.b64encode(pickle.dumps(sent, 4)))
        if fine:
            assert decoded(message) == sent
        else:
            with pytest.raises(Communication.MessageProcessingError):
                decoded(message)


def test_a_gateway_without_the_same_clustershell_says_so(tmp_path: Any) -> None:
    (tmp_path / "ClusterShell").mkdir()
    (tmp_path / "ClusterShell" / "__init__.py").write_text("__version__ = '1.2'\n")
    for name in ("Gateway", "Propagation"):
        text = "class RouteResolvingError(Exception): pass\n"
        (tmp_path / "ClusterShell" / f"{name}.py").write_text(text)
    (tmp_path / "ClusterShell" / "Worker").mkdir()
    (tmp_path / "ClusterShell" / "Worker" / "Tree.py").write_text("TreeWorker = object\n")
    environ = {
        "CLUSTERSHELL_GW_PYTHON_EXECUTABLE": sys.executable,
        "PYTHONPATH": str(tmp_path),
        "HOME": "/secret",
    }
    line = gateway_command(environ)
    assert "/secret" not in line
    done = subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 3
    assert re.fullmatch(r"nodeready: ClusterShell 1\.2 there, [0-9.]+ here\n", done.stderr)
    assert len(line) < 8000


def closed(*names: str) -> list[Any]:
    """Hosts at a port of this machine at which nobody listens."""
    return [host(name, ssh_hostname="127.0.0.1", ssh_port=1) for name in names]


def test_every_node_is_named_once_with_its_cause() -> None:
    with Clush([*closed("n1", "n2"), host("@local")], topology="") as carrier:
        rows = list(carrier.ask([Request(name, "true", 9) for name in carrier.nodes]))
        channel = carrier.open(Request("n1", "cat <&3", 9, payload="", mark="mark"))
        assert channel.read_line(20) is None
    assert sorted((name, answer.kind, answer.error) for name, answer in rows) == [
        ("@local", "refused", "@local is a connector of pyinfra's: ask with --via ssh"),
        ("n1", "unreachable", "[127.0.0.1]:1: connection refused: is sshd running?"),
        ("n2", "unreachable", "[127.0.0.1]:1: connection refused: is sshd running?"),
    ]
    assert channel.error == "[127.0.0.1]:1: connection refused: is sshd running?"


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clush_carrier, "_SILENT_S", 3.0)
    with Clush(closed("n1", "n2"), topology="") as carrier:
        os.kill(carrier._peers[0].pid, signal.SIGSTOP)
        rows = dict(carrier.ask([Request(name, "true", 90) for name in carrier.nodes]))
    assert {name: answer.error for name, answer in rows.items()} == dict.fromkeys(
        ("n1", "n2"), "ClusterShell's process gave no sign for 3 s, and was ended"
    )


def test_a_topology_that_is_no_tree_is_told_and_done_without(tmp_path: Any) -> None:
    path = tmp_path / "topology.conf"
    path.write_text("[routes]\nsomebody_else: gw[1-2]\ngw[1-2]: n[1-9]\n")
    told: list[str] = []
    with Clush(closed("n1"), topology=str(path), tell=told.append) as carrier:
        ((_, answer),) = carrier.ask([Request("n1", "true", 9)])
    assert answer.kind == "unreachable"
    (line,) = told
    assert re.fullmatch(rf"{path}: .*is not a valid root node!: asking every node directly", line)
    with pytest.raises(ClushError, match="nowhere: No such file or directory"):
        Clush(closed("n1"), topology=f"{tmp_path}/nowhere")
