"""`audit --watch` and `ready --wait`: several looks, and what is shown of them."""

import re
import time

from nodeready.core.policy import Policy
from nodeready.runs.ready import command as ready
from tests.fake import interrupts, one_by_one
from tests.unit.commands import AWAY, SOUND

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  "


def test_a_watch_prints_what_changes_and_ends_with_130(run, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    nodes = {"a": SOUND, "b": one_by_one(SOUND, SOUND, AWAY, AWAY, SOUND, interrupts)}
    done = run(nodes, "audit", "--only", "ptrace", "--watch", "5", policy=Policy(ptrace_scope=0))
    assert done.code == 130
    first, *lines = re.split(f"^(?={TIME})", done.out, flags=re.M)
    assert "2 nodes: " in first
    assert [re.sub(TIME, "", line) for line in lines] == [
        "unreachable  b  n: no answer in 15 s\n",
        "ok           answers again  b\n",
    ]


def test_ready_waits_until_enough_nodes_are_ready(run, monkeypatch):
    monkeypatch.setattr(ready, "_PAUSE_S", 0)
    words = ("ready", "--only", "gpus.present", "--wait", "60")
    done = run({"a": SOUND, "b": one_by_one(AWAY, AWAY, SOUND)}, *words)
    assert done.code == 0
    # Each look is asked for, but only what has changed is told.
    assert done.err.count("1 of 2 nodes ready, not b; probing again for ") == 1
    assert done.out.startswith("GO       a,b  2 nodes")


def test_ready_gives_the_last_look_when_the_wait_is_over(run):
    done = run({"a": SOUND, "b": AWAY}, "ready", "--only", "gpus.present", "--wait", "1")
    assert done.code == 4
    assert done.out.count("NO-GO") == 1
