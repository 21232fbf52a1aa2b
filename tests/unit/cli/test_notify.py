"""`--notify`: who is notified of what, and what a server that misbehaves costs."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nodeready.cli import notify
from nodeready.cli.options import Refused
from nodeready.policy import Policy
from tests.fake import one_by_one
from tests.unit.commands import AWAY, SOUND

WORDS = ("audit", "--only", "ptrace", "--notify")
GOOD, STRICT = Policy(ptrace_scope=0), Policy(ptrace_scope=2)


@pytest.fixture
def server():
    """A real web server; `answers` are its next (status, headers), `seen` the requests' bodies."""

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            state.seen.append((self.path, self.headers.get("Authorization"), json.loads(body)))
            status, headers = state.answers.pop(0) if state.answers else (204, {})
            if status == 0:
                state.released.wait(20)
                return
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    state = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    state.seen, state.answers, state.released = [], [], threading.Event()
    state.host = f"127.0.0.1:{state.server_port}"
    threading.Thread(target=state.serve_forever, args=(0.01,), daemon=True).start()
    yield state
    state.released.set()
    state.shutdown()
    state.server_close()


def test_a_change_is_sent_once_with_its_nodes_and_findings(run, server):
    url = f"http://{server.host}/hook/s3cret?token=t0k"
    nodes = {"a": SOUND, "b": one_by_one(AWAY, AWAY, SOUND)}
    for _ in range(3):
        done = run(nodes, *WORDS, url, policy=GOOD)
        assert "s3cret" not in done.out + done.err
    (path, _, away), (_, _, back) = server.seen
    assert path == "/hook/s3cret?token=t0k"
    assert away["text"] == "nodeready audit: b: ok -> unreachable"
    row = {"before": "ok", "after": "unreachable", "nodes": "b", "count": 1}
    assert (away["changes"], away["summary"]["nodes"]["ok"]) == ([row], 1)
    assert [(row["status"], row["nodes"]) for row in away["findings"]] == [("unreachable", "b")]
    assert (back["text"], back["findings"]) == ("nodeready audit: b: unreachable -> ok", [])


def test_a_look_by_ssh_leaves_the_process_able_to_send(server, tmp_path):
    """gevent, by which pyinfra asks the nodes, needs the files of its event loop."""
    code = (
        "from gevent import monkey, sleep; monkey.patch_all(); sleep(0.001)\n"
        "from nodeready.cli.notify import Screen, Webhook\n"
        "from tests.builders.fleets import SCOPE, NodeReport, audit\n"
        "look = audit(NodeReport.of('a', [SCOPE]))\n"
        f"Webhook('http://{server.host}/', '', 'it', 'key').notify(look, 'audit', 'x', Screen())\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "XDG_STATE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert [body["text"] for _, _, body in server.seen] == ["nodeready audit: a: ok -> fail"]


def test_what_is_compared_is_the_same_look(run, server):
    """Another selection of checks, another command, another address: each has its own state."""
    url = f"http://{server.host}/"
    for _ in range(2):
        for words in (WORDS, ("audit", "--only", "ptrace.scope", "--notify")):
            assert run({"a": SOUND}, *words, url, policy=STRICT).code == 3
    assert [body["findings"][0]["check"] for _, _, body in server.seen] == ["ptrace.scope"] * 2


#: status and headers of the answer -> the end of the line
FAILURES = [
    ((500, {}), "HTTP 500"),
    ((302, {"Location": "ftp://else.where/s3cret?t0k"}), "leads to ftp://else.where: name that"),
    ((0, {}), "no answer within 0.5 s"),
]


@pytest.mark.parametrize(("answer", "problem"), FAILURES)
def test_a_failure_is_one_line_and_is_tried_again(answer, problem, run, server, monkeypatch):
    monkeypatch.setattr(notify, "LIMIT_S", 0.5)
    server.answers.append(answer)
    url = f"http://{server.host}/s3cret"
    failed = run({"a": AWAY, "b": SOUND}, *WORDS, url, policy=GOOD)
    (line,) = [line for line in failed.err.splitlines() if "--notify" in line]
    assert line.startswith(f"nodeready: --notify: http://{server.host}: {problem}")
    assert "s3cret" not in line
    assert failed.code == run({"a": AWAY, "b": SOUND}, *WORDS, url, policy=GOOD).code == 4
    assert len(server.seen) == 2


def test_the_addresss_user_is_sent_and_never_shown(run, server, monkeypatch):
    server.answers.append((401, {}))
    monkeypatch.setenv("NODEREADY_NOTIFY", f"http://ada:s3cret@{server.host}/")
    done = run({"a": AWAY, "b": SOUND}, *WORDS[:-1], policy=GOOD)
    assert server.seen[0][1] == "Basic YWRhOnMzY3JldA=="
    assert "HTTP 401" in done.err
    assert "s3cret" not in done.err


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/x",
        "ftp://h/",
        "x",
        "http://",
        "http://a b/",
        "http://ada:s3cret@h/",
        "HTTP://ada:s3cret@h/",
    ],
)
def test_a_wrong_address_is_refused_before_any_node_is_asked(url, run):
    with pytest.raises(Refused, match="--notify: ") as refused:
        run({"a": SOUND}, *WORDS, url)
    assert "s3cret" not in str(refused.value)


def test_a_state_file_that_makes_no_sense_is_replaced(run, server, tmp_path):
    url = f"http://{server.host}/"
    run({"a": AWAY, "b": SOUND}, *WORDS, url, policy=GOOD)
    (file,) = Path(tmp_path, "state/nodeready/notified").iterdir()
    assert (file.stat().st_mode & 0o777, json.loads(file.read_text())) == (
        0o600,
        {"a": "unreachable"},
    )
    file.write_text('{"a": "bad", "b": []}')
    run({"a": AWAY, "b": SOUND}, *WORDS, url, policy=GOOD)
    file.unlink()
    os.mkfifo(file)
    done = run({"a": AWAY, "b": SOUND}, *WORDS, url, policy=GOOD)
    assert f"{file}; the next look sends it again" in done.err
    assert len(server.seen) == 3
