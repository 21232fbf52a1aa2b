"""Who keeps the clock, and which processes no signal ends.

Sources of the rows: chronyc(1), tracking; ntpd's event and status words, refclock_local; munge(7);
systemd-timesyncd.service(8); timedatectl for the kernel's flag (phc2sys, ptp4l, openntpd).
"""

import re

import pytest

from nodeready.core.policy import Policy
from nodeready.subjects.host import mounts
from tests.builders.host import TRACKING, clock, judged, node, wrong
from tests.builders.sections import run_on
from tests.cases import cases, read_table

NTPQ = 'associd=0 status=0615 {},\nversion="ntpd 4.2.8", leap=00, stratum={}, refid={}, offset={}'


def tracking(changes: dict[str, str]) -> str:
    """chronyc's answer with other values of these names."""
    text = TRACKING
    for name, value in changes.items():
        text = re.sub(rf"(?m)^({name} *:).*", rf"\1 {value}", text)
    return clock("chronyc", text)


@pytest.mark.parametrize("case", cases(__file__, "data/host/clocks.json"))
def test_the_clock(case):
    text = case.get("text", "".join(clock(*printed) for printed in case.get("printed", ())))
    if "tracking" in case:
        text = tracking(case["tracking"])
    if "ntpq" in case:
        text = clock("ntpq", NTPQ.format(*case["ntpq"]))
    observed, status = node(clock_text=text), case["status"]
    assert wrong(observed) == ({} if status == "ok" else {"clock": status})
    assert wrong(observed, Policy(clock="any")) == {}
    assert observed.clock.source == case.get("source", observed.clock.source)
    assert observed.clock.offset_ms == case.get("offset_ms", observed.clock.offset_ms)
    actual = judged(observed)["clock"].actual
    assert actual == case.get("actual", actual)


def line(pid: int, name: str, state: str, parent: int = 1, cpu: int = 5) -> str:
    return f"{pid} ({name}) {state} {parent} 7 7 0 -1 4194304 96 0 0 0 {cpu} 0\n"


def looked(first: str, again: str = "", after: str = "") -> str:
    second = f"processes=2\n{again}{after}" if again else ""
    return f"processes=1\ncpu_42=3\n{first}{second}processes=end\n"


def owned(uid: int, wchan: str, waiting_s: int = 600, user: str = "ada") -> str:
    """A process in state D of this user, waiting in this function of the kernel."""
    after = f"user_{uid}={user}\n/proc/42/wchan:{wchan}\n\n{sched(waiting_s)}"
    return looked(f"uid_42={uid}\nunseen=0\n{STUCK}", STUCK, after)


def sched(waiting_s: int, pid: int = 42) -> str:
    now = 10000000
    ran = f"/proc/{pid}/sched:se.exec_start   :   {now - waiting_s * 1000}.5\n"
    return f"{ran}clock_2:   {now + 5000000}.7\nclock_3:   {now}.123\n"


STUCK = line(42, "python3 (D) x", "D")


#: What stat shows of process 42, by the names of the cases.
LINES = {
    "STUCK": STUCK, "MOVED": line(42, "python3 (D) x", "D", cpu=6),
    "ZOMBIE": line(42, "python3 (D) x", "Z"), "LONG": "(" * 90000 + "\n",
}  # fmt: skip


@pytest.mark.parametrize("case", cases(__file__, "data/host/stuck.json"))
def test_processes_that_no_signal_ends(case):
    first, again = (LINES.get(case[name], case[name]) for name in ("first", "again"))
    waited = "" if case["waited_s"] is None else sched(case["waited_s"])
    printed = looked(first, again, case["after"] + waited)
    result = judged(node(processes=printed.replace(*case.get("replace", ("", "")))))["stuck"]
    assert result.status == case["status"]
    assert case["actual"] in (None, result.actual)


@pytest.mark.parametrize(("wchan", "words"), read_table(__file__, "waits_of_any_user"))
def test_what_any_user_can_do_on_a_healthy_node_is_a_warning(wchan, words):
    for uid in (0, 4001):
        result = judged(node(processes=owned(uid, wchan)))["stuck"]
        assert result.status == "warn"
        assert result.actual == f"python3 (D) x (pid 42, user ada) in {wchan} {words} for 600 s"
        assert result.fix == "ask ada, or kill -KILL 42"


@pytest.mark.parametrize("case", cases(__file__, "data/host/waits.json"))
def test_a_persons_process_fails_the_node_only_where_the_node_is_waited_for(case):
    result = judged(node(processes=owned(case["uid"], case["wchan"])))["stuck"]
    assert result.status == case["status"]


def test_many_zombies_name_their_parent_and_what_is_too_much_is_counted():
    result = judged(node(processes=looked("unseen=700\nmore=200\nzombies=0\n")))["stuck"]
    assert (result.status, result.actual) == ("warn", "900 not looked at")
    printed = "zombies={}\nunseen=0\nreaps_7=40\nreaps_9=10\nparent_7=launcher\n"
    result = judged(node(processes=looked(printed.format(50))))["zombies"]
    assert result.status == "warn"
    assert result.actual == "50: 40 of launcher (pid 7); 10 of ? (pid 9)"
    assert judged(node(processes=looked(printed.format(49))))["zombies"].status == "ok"


def test_the_marks_of_both_scripts_agree():
    """An earlier look is recognised by the format that it gave to stat."""
    assert f"'{mounts.MARK}%S" in mounts.script(Policy())
    assert f"*'{mounts.MARK}'*' %n '*" in mounts.processes_script()


@pytest.mark.parametrize("shell", [["sh"], ["bash"]], ids=" ".join)
def test_without_awk_the_processes_are_not_looked_at(shell, tmp_path):
    """A killed awk, or more processes than the kernel takes arguments for, finds none."""
    files = {"bin/awk": "#!/bin/sh\nexit 126\n", "proc/self/status": "Uid:\t0\t0\t0\t0\n"}
    done = run_on(tmp_path, mounts.processes_script(), shell, files)
    assert not mounts.parse_processes(done.stdout).is_complete
