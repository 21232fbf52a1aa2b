"""One way to ask nodes: every question gets one answer, whatever the node or the user does."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from nodeready.agent.asking import Request, collect
from nodeready.agent.local import Local
from nodeready.core import shell
from nodeready.core.outcome import FAILED, HUNG, INTERRUPTED, LATE, LOST, OUTPUT, TIMEOUT
from tests.command import wait_for
from tests.fake import Fake, fails, hangs, interrupts, one_by_one, says


def twice(node):
    first = yield Request(node, "first", 5)
    if first.gap:
        return first.gap.kind
    second = yield Request(node, f"second after {first.stdout}", 5)
    return second.stdout or (second.gap.kind if second.gap else "")


def values(outcomes):
    return {name: outcome.value for name, outcome in outcomes.items()}


def test_a_conversation_goes_on_with_the_nodes_own_answer():
    transport = Fake({"a": one_by_one(says("1"), says("2")), "b": fails(LOST, "gone"), "c": hangs})
    answers = values(collect(transport, {name: twice(name) for name in "abc"}))
    assert answers == {"a": "2", "b": LOST, "c": HUNG}
    scripts = [request.script for request in transport.asked]
    assert scripts == ["first", "second after 1", "first", "first"]
    answers = values(collect(Fake({"a": hangs}), {"a": twice("a")}, deadline=time.monotonic()))
    assert answers == {"a": LATE}


def test_a_mistake_of_ours_costs_one_node():
    def broken(node):
        yield Request(node, "x", 5)
        raise RuntimeError("oh")

    answers = collect(Fake({"a": says(""), "b": says("")}), {"a": broken("a"), "b": twice("b")})
    assert answers["a"].gap.kind == FAILED
    assert "internal error at test_ask.py:" in answers["a"].gap.reason
    assert answers["b"].value == ""


def test_an_interrupt_is_an_answer_to_every_conversation_whenever_it_comes():
    def handle(key, value):
        if key == "a":
            raise KeyboardInterrupt

    class Begins(Fake):
        def converse(self, conversations, deadline=None):
            yield from ()
            raise KeyboardInterrupt

    transport = Fake({"a": says("1"), "b": says("1")})
    answers = collect(transport, {name: twice(name) for name in "ab"}, handle)
    assert (answers["a"].value, answers["b"].gap.kind, transport.ended) == ("1", INTERRUPTED, 1)
    # In the middle: the third was never asked.
    transport = Fake({"a": says("1"), "b": interrupts, "c": says("1")})
    answers = collect(transport, {name: twice(name) for name in "abc"})
    assert (answers["a"].value, answers["b"].value) == ("1", INTERRUPTED)
    assert answers["c"].gap.kind == INTERRUPTED
    assert (transport.interrupted, transport.ended) == (True, 1)
    transport = Begins({"a": says("1")})
    assert collect(transport, {"a": twice("a")})["a"].gap.kind == INTERRUPTED
    # The command ends as interrupted, and not as if the node had failed.
    assert transport.interrupted


@pytest.mark.parametrize("payload", [None, "", "payload\n", "x" * 200_000 + "\n"], ids=range(4))
def test_a_script_and_what_follows_it_arrive_whole(payload):
    """Whatever is in it; and the command line has none of it."""
    script = "printf '%s|' \"a 'b' \\\\\" é; cat" + ("" if payload is None else " <&3; cat <&3")
    line, stdin = shell.command(script, 30, "nodeready:test", payload)
    assert "printf" not in line
    assert len(line) < 150
    more = "" if payload is None else "and more\n"
    done = subprocess.run(
        ["sh", "-c", line], input=(stdin + more).encode(), capture_output=True, check=True
    )
    assert done.stdout.decode() == f"a 'b' \\|é|{payload or ''}{more}"


@pytest.mark.parametrize("payload", [None, "payload"])
def test_nothing_of_a_script_is_run_that_is_cut_off(tmp_path, payload):
    script = "\n".join(f"touch {tmp_path}/{number}" for number in range(4))
    line, stdin = shell.command(script, 30, "nodeready:test", payload)
    whole = (stdin if payload is None else stdin[: -len(payload) - 1]).encode()
    for length in (*range(0, len(whole) - 12, 67), len(whole) - 13):
        subprocess.run(["sh", "-c", line], input=whole[:length], capture_output=True, check=False)
        assert list(tmp_path.iterdir()) == []


def ask(script: str, limit_s: int = 60, **how):
    ((node, answer),) = Local().ask([Request(os.uname().nodename, script, limit_s, **how)])
    assert node == os.uname().nodename
    return answer


def runs(file: Path) -> bool:
    """Whether the process whose number is in this file is there, and no zombie."""
    try:
        words = Path(f"/proc/{file.read_text().strip()}/stat").read_text().rpartition(")")[2]
    except FileNotFoundError:
        return False
    return words.split()[0] not in "ZX"


def test_this_machine_answers():
    """tests/unit/transport/test_local.py has what a command says, and its end."""
    assert ask("cat <&3", payload="y" * 300_000).stdout == "y" * 300_000
    assert ask("yes", max_bytes=1 << 16).gap.kind == OUTPUT


def test_a_script_that_hangs_here_is_ended_with_its_children(tmp_path):
    answer = ask(f"echo began; sleep 600 & echo $! >{tmp_path}/pid; sleep 600", 1)
    assert answer.gap
    assert (answer.gap.kind, answer.gap.reason) == (TIMEOUT, "ended after 1 s")
    assert answer.stdout == "began\n"
    wait_for(lambda: not runs(tmp_path / "pid"))


def test_an_interrupt_here_ends_the_script(tmp_path):
    def interrupt():
        wait_for((tmp_path / "pid").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        answer = ask(f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 600")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert answer.gap.kind == INTERRUPTED
    wait_for(lambda: not runs(tmp_path / "pid"))
