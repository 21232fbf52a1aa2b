"""Which drains are ended and which stay, what holds a node, and who is ended."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nodeready.agent import leftovers
from nodeready.agent.gate import drain, here, undrain
from nodeready.agent.gate.undrain import leftover_text, stay_reason
from nodeready.agent.leftovers import Leftover, NodeLeftovers, SlurmJob, judged
from nodeready.agent.stacks import processes
from nodeready.core import wire
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import UNREACHABLE, NodeGap
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.runs import undrain as run_undrain
from nodeready.runs.ready import command as ready
from nodeready.runs.undrain import OUTCOMES, DrainedNode, Undrain, slurm_nodes
from tests.cases import cases, read_data, with_table
from tests.fake import Does
from tests.unit.commands import AWAY, program
from tests.unit.healthcheck.test_drain import shown

STUCK = {"job": "17", "in_cgroup": True, "state": "D", "wait_channel": "nv_wait"}
ADA = {"kind": "process", "text": "python train.py", "uid": 2000, "user": "ada", "pid": 40}


@pytest.mark.parametrize("case", cases(__file__, "data/undrain_drains.toml"))
def test_only_a_drain_by_slurm_or_nodeready_is_ended(case):
    text = shown(case.get("state", "IDLE+DRAIN"), case["reason"])
    node = drain.parse(text.replace("[root@", f"[{case.get('author', 'root')}@"))
    if case["reason"]:
        assert node.author == case.get("author", "root")
    assert stay_reason(node, Policy().undrain_reasons, ("root", "slurm")) == case["says"]


@pytest.mark.parametrize("case", cases(__file__, "data/undrain_leftovers.toml"))
def test_what_is_of_no_running_job_holds_the_node(case):
    jobs = {number: SlurmJob(*fields) for number, fields in case.get("jobs", {}).items()}
    holding = judged([Leftover(**{**ADA, **case["row"]})], jobs)
    texts = [*([case["holds"]] if case["holds"] else []), *case.get("more", [])]
    assert [leftover_text(row) for row in holding] == texts
    assert any(row.can_end for row in holding) == case.get("ends", False)


def test_mounts_of_users_and_those_with_numbers_are_found_without_using_them():
    rows = leftovers.find_mounts(read_data(__file__, "mountinfo.txt"))
    assert [(row.text.split()[0], row.uid, row.numbers) for row in rows] == [
        ("/home/ada/m", 2000, ()),
        ("/run/user/2000/doc", 2000, ()),
        ("/local/job_4711/.ns", 0, ("4711",)),
        ("/tmp/ada.4712", 0, ("4712",)),
    ]


@pytest.fixture
def slurm(tmp_path: Path, stand_ins: Callable[..., Path]) -> Callable[..., Path]:
    """Slurm's tools print this; every call is a line of the file that is returned."""
    calls = tmp_path / "calls"

    def put(**scripts: str) -> Path:
        for name, script in scripts.items():
            stand_ins(**{name: f'echo "{name} $*" >>{calls}\n{script}'})
        return calls

    return put


def test_slurm_is_asked_for_the_jobs_of_the_node_then_for_those_that_are_missing(slurm):
    calls = slurm(
        squeue="case $* in *' -w '*) echo '17|RUNNING|2000';; *) echo '18|FAILED|2001';; esac",
        sacct="printf '19|CANCELLED by 0|2002\\n20|RUNNING|2000\\nx|y\\n'",
    )
    jobs = leftovers.jobs_on("n1", {"17", "18", "19", "21"}, time.monotonic() + 9)
    assert jobs == {
        "17": SlurmJob("RUNNING", 2000, True),
        "18": SlurmJob("FAILED", 2001, False),
        "19": SlurmJob("CANCELLED", 2002, False),
        "20": SlurmJob("RUNNING", 2000, False),
    }
    assert [row.rpartition(" ")[2] for row in calls.read_text().splitlines()] == [
        *("n1", "18,19,21", "19,21")
    ]
    # A job that nobody knows is unknown; a Slurm that does not answer for the node is an error.
    slurm(squeue="case $* in *' -w '*) ;; *) exit 1;; esac", sacct="exit 1")
    assert leftovers.jobs_on("n1", {"17"}, time.monotonic() + 9) == {}
    slurm(squeue="exit 1")
    with pytest.raises(drain.DrainError):
        leftovers.jobs_on("n1", {"17"}, time.monotonic() + 9)


def test_a_process_is_ended_by_term_then_by_kill_and_never_another_one(monkeypatch):
    monkeypatch.setattr(leftovers, "_TERM_S", 0.3)
    ignores = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); "
        "print(1, flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", ignores]
    pair = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        starts = []
        for process in pair:
            assert process.stdout is not None
            process.stdout.readline()
            stat = processes.stat(processes.contents(f"/proc/{process.pid}/stat"))
            assert stat is not None
            starts.append(stat.start_s)
        # The second one has another start: its pid was used again.
        leftovers.end(((pair[0].pid, starts[0]), (pair[1].pid, starts[1] - 1)))
        assert pair[0].wait(5) == -signal.SIGKILL
        assert pair[1].poll() is None
    finally:
        for process in pair:
            process.kill()


def test_a_reason_that_a_person_writes_in_between_is_not_overwritten(slurm):
    before = drain.parse(shown("IDLE+DRAIN", "Kill task failed"))
    for now, says in (
        (shown("IDLE+DRAIN", "disk swap"), "its drain has changed: disk swap"),
        (
            shown("IDLE+DRAIN", "Kill task failed").replace("01:00", "02:00"),
            "its drain has changed: Kill task failed",
        ),
        (shown("IDLE"), "its drain has changed: no reason"),
        (shown("IDLE+DRAIN", "Kill task failed"), ""),
    ):
        calls = slurm(scontrol=f"cat <<'END'\n{now}END")
        calls.unlink(missing_ok=True)
        assert undrain.undrain("n1", before, time.monotonic() + 9) == says
        update = "scontrol update nodename=n1 state=undrain"
        assert calls.read_text().splitlines()[1:] == ([] if says else [update])


def test_a_node_of_slurm_is_found_by_its_name_host_name_or_address():
    text = shown("IDLE+DRAIN", "x").replace(
        "CoresPer", "\n   NodeAddr=10.0.0.1 NodeHostName=host1 C"
    )
    nodes = {"n1": drain.parse(text), "n2": drain.parse(shown("IDLE").replace("=n1", "=n2"))}
    for name in ("n1", "N1.site", "host1", "host1.site", "10.0.0.1"):
        assert slurm_nodes([name, "n3", "10.0.0.2"], nodes) == {name: nodes["n1"]}


@with_table("reason, rows, statuses, says")
def test_the_gate_returns_its_own_node(slurm, monkeypatch, *, reason, rows, statuses, says):
    """says: None: the drain is not the gate's business"""
    calls = tools(slurm, one=shown("IDLE+DRAIN", reason))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(undrain.syslog, "syslog", lambda *words: None)
    answer = NodeLeftovers(tuple(Leftover(**{**ADA, **row}) for row in rows), "")
    monkeypatch.setattr(leftovers, "find", lambda deadline: answer)
    results = [Result("host.shm", status, "", "x") for status in statuses]
    audit = SimpleNamespace(nodes=[SimpleNamespace(results=results)])
    monkeypatch.setattr(here, "ready", lambda *words: SimpleNamespace(audit=audit))
    problem = undrain.undrain_own(Policy(), time.monotonic() + 60)
    assert problem.startswith(says or "")
    assert (bool(problem), "update" in calls.read_text()) == (bool(says), says == "")


# --- The command.


def document() -> Undrain:
    """A document with every outcome."""
    row = Leftover(**{**ADA, **STUCK, "job_state": "FAILED", "kernel_stack": ("nv_wait",)})
    base = ("n1", "host1", "Kill task failed", "2026-11-21T01:00:00", "root")
    nodes = [DrainedNode(*base, outcome) for outcome in OUTCOMES]
    held = replace(nodes[2], leftovers=(row,), incident="/var/lib/x", must_reboot=True)
    gaps = (NodeGap("n9", UNREACHABLE, "no answer in 15 s"),)
    moments = ("2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z")
    return Undrain(*moments, (*nodes, held, nodes[2].stays("a reason")), gaps)


def nodes_text(**reasons: str) -> str:
    """``scontrol show node`` of nodes that are drained with these reasons; "": not drained."""
    return "\n".join(
        shown(f"IDLE{'+DRAIN' if reason else ''}", reason).replace("=n1", f"={name}")
        for name, reason in reasons.items()
    )


def has(*rows: dict[str, object], error: str = "") -> Does:
    """A node that answers with these leftovers; to an order to end some, with none."""

    def answer(nonce: str) -> str:
        found = tuple(Leftover(**{**ADA, **row}) for row in rows)
        return wire.packed_line(nonce, "leftovers", NodeLeftovers(found, error)) + "\n"

    return program(answer)


@pytest.fixture
def proves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`ready` finds every node but `bad` ready; the --limit of each call."""
    limits: list[str] = []

    def run(inventory: object, options: ready.ReadyOptions, tell: object) -> Any:
        limits.append(str(options.limit))
        look = SimpleNamespace(complete=True, gaps=(), nodes=())
        look.document = look.audit = look
        look.go = tuple(name for name in limits[-1].split(",") if name != "bad")
        look.no_go = {"bad": ("proof.gdb: no gdb", "host.shm: 1 MiB")}
        return nullcontext(look)

    monkeypatch.setattr(run_undrain.ready, "run", run)
    return limits


NODES: dict[str, Does] = {
    "n1": has(),
    "n2": has(STUCK),
    "n3": has(),
    "bad": has(),
    "n5": has({"job": "17", "in_cgroup": True, "pid": 41}),
}
REASONS = dict.fromkeys(NODES, "Kill task failed") | {"n3": "disk swap", "n9": "x"}
TABLE = read_data(__file__, "undrain.txt")
SCONTROL = """
case $* in
update*) ;;
*config) echo 'SlurmUser               = slurm(64030)' ;;
*'show node '?*) cat <<END
{one}END
;;
*) cat <<END
{all}END
esac"""


def tools(slurm: Callable[..., Path], one: str = shown("IDLE+DRAIN", "Kill task failed")) -> Path:
    return slurm(
        scontrol=SCONTROL.format(one=one, all=nodes_text(**REASONS)),
        squeue="case $* in *' -w '*) ;; *) echo '17|FAILED|2000' ;; esac",
        sacct="exit 1",
    )


def test_without_yes_nothing_changes_and_every_node_says_why(slurm, run, proves):
    calls = tools(slurm)
    done = run(NODES, "undrain")
    assert (done.code, done.out) == (3, TABLE)
    assert done.err == "nodeready: drained in Slurm, and not in nodes: n9\n"
    assert proves == ["n1,bad"]
    assert "update" not in calls.read_text()
    # A person's drain is never looked at, and nobody was told to end a process.
    asked = {request.node: request.payload or "" for request in done.transport.asked}
    assert sorted(asked) == ["bad", "n1", "n2", "n5"]
    assert all("'end': ()" in text for text in asked.values())


def test_yes_returns_what_nothing_holds_and_reads_the_reason_again(slurm, run, proves):
    calls = tools(slurm)
    done = run(NODES, "undrain", "--yes", "--format", "json")
    outcomes = {node["name"]: node["outcome"] for node in json.loads(done.out)["nodes"]}
    assert outcomes == {"n1": "returned", **dict.fromkeys(("n2", "n3", "bad", "n5"), "stays")}
    updates = [row for row in calls.read_text().splitlines() if "update" in row]
    assert (done.code, updates) == (3, ["scontrol update nodename=n1 state=undrain"])
    calls = tools(slurm, one=shown("IDLE+DRAIN", "disk swap"))
    calls.unlink()
    done = run({"n1": has()}, "undrain", "--yes")
    assert (done.code, "update" in calls.read_text()) == (3, False)
    assert "    its drain has changed: disk swap\n" in done.out


def test_only_processes_of_ended_jobs_are_ended(slurm, run, proves):
    tools(slurm)
    done = run(NODES, "undrain", "--end-leftovers")
    orders = [(r.node, r.payload or "") for r in done.transport.asked]
    ends = {node: text for node, text in orders if "'end': ()" not in text}
    assert [*ends] == ["n2", "n5"]
    assert "'end': ((40, 0.0),)" in ends["n2"]
    assert "'end': ((41, 0.0),)" in ends["n5"]
    assert "ending 2 processes of ended jobs on n[2,5]" in done.err


def test_what_was_not_seen_or_reached_does_not_return(slurm, run, proves):
    tools(slurm)
    done = run({"n1": has(error="only root sees"), "n2": AWAY}, "undrain", "--yes")
    assert (done.code, proves) == (4, [])
    assert "    not all was seen: only root sees\n" in done.out
    assert "unreachable" in done.out


def test_without_a_drain_or_without_slurm_there_is_nothing_to_do(slurm, run, monkeypatch):
    slurm(scontrol=f"cat <<'END'\n{nodes_text(n1='')}END")
    done = run({"n1": has()}, "undrain")
    assert (done.code, done.out) == (0, "no node is drained\n")
    slurm(scontrol="echo 'slurm_load_node error: no controller' >&2; exit 1")
    with pytest.raises(Refused) as refused:
        run({"n1": has()}, "undrain")
    assert refused.value.message == "Slurm: scontrol show: slurm_load_node error: no controller"
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(Refused, match="scontrol is not installed"):
        run({"n1": has()}, "undrain")
