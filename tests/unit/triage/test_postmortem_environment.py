"""The variables that a dead job's logs, script, live ranks and incident show, and what they
explain.
"""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from nodeready.agent.failures.log_file import read_lines
from nodeready.agent.log_lines import utc_calendar
from nodeready.agent.log_variables import script_variables
from nodeready.agent.postmortem import (
    GateRecord,
    JobCore,
    JobNode,
    NodeFailures,
    observe_environment,
)
from nodeready.agent.witnesses.kernel_log import KernelLog
from nodeready.runs.incident import DOCUMENT
from nodeready.runs.postmortem.clocks import NodeClock
from nodeready.runs.postmortem.collect import EvidenceBuilder, NodeEvidence, postmortem_of
from nodeready.runs.postmortem.directory import read_directory
from nodeready.subjects.environment_table import EnvironmentFacts, NodeInterface
from tests.builders.traces import document, process
from tests.builders.witnesses import variables
from tests.cases import read_table

NCCL = "gpu1:7:7 [0] NCCL INFO "


@pytest.mark.parametrize(
    ("line", "shown"),
    read_table(__file__, "lines_that_show_a_variable"),
)  # fmt: skip
def test_lines_that_show_a_variable(line, shown):
    lines = ["[rank0]: step", "[rank1]: step", line] if line.startswith("[rank") else [line]
    found = read_lines(lines, 2026).facts.variables
    assert " ".join(f"{one.name}={one.value}" for one in found) == shown


def test_a_script_sets_variables():
    text = """#!/bin/bash
#SBATCH --export=ALL,NCCL_SOCKET_IFNAME=lo,UCX_NET_DEVICES=mlx5_0:1
# export NCCL_ALGO=Ring
export MASTER_ADDR=$(scontrol show hostnames | head -n1) MASTER_PORT=29500
export GLOO_SOCKET_IFNAME="eth$N"; NCCL_NET='Socket' srun train
export NCCL_PROTO=LL; export NCCL_PROTO=Simple; echo $NCCL_DEBUG=x
mpirun -x NCCL_DEBUG=INFO -x NCCL_IB_HCA=mlx5_0,mlx5_1 train
"""
    assert script_variables(text) == {
        "NCCL_SOCKET_IFNAME": "lo", "UCX_NET_DEVICES": "mlx5_0:1", "MASTER_PORT": "29500",
        "NCCL_NET": "Socket", "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5_0,mlx5_1",
    }  # fmt: skip


LOST = "torch.distributed.DistBackendError: NCCL error: remote process exited or network error\n"


def test_the_traces_of_an_incident_have_the_environments(tmp_path):
    for name in ("stacks", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / DOCUMENT).write_text("{}")
    for rank, node in enumerate(("gpu1", "gpu2")):
        log = tmp_path / f"logs/{node}-rank{rank}-1.log"
        log.write_text(f"{node}:/l/rank_{rank}.log\n{LOST}")
        own = process(rank, None, witnesses=variables(NCCL_SOCKET_IFNAME="lo"))
        (tmp_path / f"stacks/trace-{node}.json").write_text(json.dumps(document(node, own)))
    cause = postmortem_of(read_directory(tmp_path), started="", source="").cause
    assert (cause.kind, cause.ranks, cause.nodes) == ("environment", (0, 1), ("gpu1", "gpu2"))
    assert "NCCL_SOCKET_IFNAME=lo" in cause.text


@pytest.mark.parametrize(
    ("value", "kind"),
    [("ib0", "environment"), ("eth0", "unclear")],
)
def test_the_facts_of_the_nodes_are_those_of_now(value, kind):
    builder = EvidenceBuilder()
    for rank, node in enumerate(("gpu1", "gpu2")):
        text = f"{NCCL}NCCL_SOCKET_IFNAME set by environment to {value}\n{LOST}"
        failures = read_lines(text.splitlines(), 2026, utc_calendar, f"/l/rank_{rank}.log")
        eth0 = NodeInterface("eth0", "up", ("10.0.0.1/24",))
        facts = EnvironmentFacts(interfaces=(NodeInterface("lo", "", ("127.0.0.1/8",)), eth0))
        logs, kernel = (failures,), KernelLog("no kernel log")
        answer = NodeFailures(node, 0, 0, logs, (), 0, 0, kernel, JobNode((), facts), "")
        builder.add(node, NodeEvidence(answer, NodeClock(0, 0)))
    cause = postmortem_of(builder.complete(), started="", source="").cause
    assert cause.kind == kind
    if kind == "environment":
        assert "names no interface of the node: it has lo, eth0" in cause.text


def test_ranks_that_still_run_have_their_environment():
    job = f"99{os.getpid()}"
    environment = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3",
                   "NCCL_NET": "Socket", "HF_TOKEN": "x"}  # fmt: skip
    # An orphan: processes below this one are nodeready's own.
    argv = ["/bin/sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]
    pid = int(subprocess.run(argv, env=environment, capture_output=True, check=True).stdout)
    try:
        live, facts = observe_environment(job, os.getuid(), {}, (), time.monotonic() + 20)
    finally:
        os.kill(pid, signal.SIGKILL)
    (rank,) = live
    assert (rank.pid, rank.rank) == (pid, 3)
    assert rank.variables.variables == (("NCCL_NET", "Socket"),)
    assert facts.interfaces[0].name == "lo"
    assert observe_environment("", -1, {}, (), time.monotonic() + 5)[0] == ()


END_S = 1772366405.0


@pytest.mark.parametrize(
    ("log", "core", "kind", "ranks"),
    [
        # The process of the core is that of a launcher's report.
        ("", JobCore("/var/crash/core.77", END_S, 77, 11, 1, "python3"), "segfault", (1,)),
        # A rank that lost a peer, and then was aborted, is a victim.
        (LOST, JobCore("/var/crash/core.77", END_S, 77, 6, 1, "python3"), "unclear", ()),
        # A core of an earlier job, and one whose rank is not known, name no rank.
        (LOST, JobCore("/var/crash/core.5", END_S - 9000, 5, 11, 1, "python3"), "unclear", ()),
        (LOST, JobCore("/var/crash/core.5", END_S, 5, 11, None, "python3"), "unclear", ()),
    ],
)  # fmt: skip
def test_cores_of_the_jobs_time_are_evidence(log, core, kind, ranks):
    builder = EvidenceBuilder()
    for rank, node in enumerate(("gpu1", "gpu2")):
        text = f"2026-03-01 12:00:05 step 1\n{log if rank else LOST}"
        failures = read_lines(text.splitlines(), 2026, utc_calendar, f"/l/rank_{rank}.log")
        logs = (replace(failures, size_bytes=100, mtime_s=END_S),)
        gate = GateRecord(END_S - 60, ("gpus.xid: Xid 79",), False)
        late = GateRecord(END_S + 7200, ("nics.link: down",), True)
        job_node = JobNode(cores=(core,), gate=(gate, late)) if rank else JobNode()
        answer = NodeFailures(node, END_S, END_S, logs, (), 0, 0, KernelLog("none"), job_node, "")
        builder.add(node, NodeEvidence(answer, NodeClock(0, 0)))
    found = postmortem_of(builder.complete(), started="", source="")
    assert (found.cause.kind, found.cause.ranks) == (kind, ranks), found
    shown = [(event.node, event.kind, event.text) for event in found.nodes]
    is_shown = core.written_s == END_S
    name = {11: "SIGSEGV", 6: "SIGABRT"}[core.signal]
    text = f"python3 (pid {core.pid}) ended by {name}: {core.path}"
    assert shown == [("gpu2", "core", text)] * is_shown + [
        ("gpu2", "gate", "no-go: gpus.xid: Xid 79")
    ]
    if kind == "segfault":
        assert found.cause.suspects[0].for_[-2:] == (
            f"core of gpu2: {text}", "gate of gpu2: no-go: gpus.xid: Xid 79"
        )  # fmt: skip


def test_a_core_is_no_failure_that_its_rank_has_survived():
    """No log says anything of it."""
    failures = read_lines(["2026-03-01 12:00:05 step 1"], 2026, utc_calendar, "/l/rank_3.log")
    core = JobCore("/var/crash/core.77", END_S, 77, 11, 3, "python3")
    logs = (replace(failures, size_bytes=100, mtime_s=END_S),)
    answer = NodeFailures(
        *("gpu1", END_S, END_S, logs, (), 0, 0, KernelLog("none"), JobNode(cores=(core,)), "")
    )
    builder = EvidenceBuilder()
    builder.add("gpu1", NodeEvidence(answer, NodeClock(0, 0)))
    cause = postmortem_of(builder.complete(), started="", source="").cause
    assert (cause.kind, cause.ranks) == ("segfault", (3,)), cause
