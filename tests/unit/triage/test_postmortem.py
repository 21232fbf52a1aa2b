"""The first failure of dead jobs: each file in postmortem_cases is a job and its verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nodeready.agent.failures.events import FileFailures
from nodeready.agent.failures.log_file import read_error_file, read_lines
from nodeready.agent.failures.rules import CONSEQUENCE
from nodeready.agent.log_lines import utc_calendar
from nodeready.agent.postmortem import END_BYTES, HEAD_BYTES, JobNode, NodeFailures, file_failures
from nodeready.agent.witnesses.kernel_log import KernelLog, KernelMessage
from nodeready.reports import json_report
from nodeready.reports.registry import Options, find_format
from nodeready.runs.postmortem.clocks import NodeClock
from nodeready.runs.postmortem.collect import EvidenceBuilder, NodeEvidence, postmortem_of
from nodeready.runs.postmortem.directory import read_directory
from nodeready.runs.postmortem.document import KERNEL, LOG, Postmortem
from nodeready.runs.postmortem.evidence import JobEvidence, JobFile
from nodeready.runs.postmortem.slurm_records import log_patterns, parse_scontrol
from tests.cases import tomllib
from tests.paths import schema

VALIDATOR = jsonschema.Draft202012Validator(schema("postmortem"))
CASES = sorted((Path(__file__).parent / "postmortem_cases").glob("*.toml"))
HANDLED = tomllib.loads((Path(__file__).parent / "handled.toml").read_text())


def lay(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def document(directory: Path, rank_pattern: str = "") -> Postmortem:
    started = "2026-03-01T12:00:00Z"
    evidence = read_directory(directory, rank_pattern)
    return postmortem_of(evidence, started=started, source="DIR")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_first_failure_is_named_and_never_a_victim(path, tmp_path):
    case: dict[str, Any] = tomllib.loads(path.read_text())
    found = document(lay(tmp_path, case["files"]), case.get("rank_pattern", ""))
    cause = found.cause
    assert cause.kind == case["kind"], found
    if case["ranks"] or case.get("unnamed"):
        assert list(cause.ranks) == case["ranks"], found
    VALIDATOR.validate(json.loads("".join(json_report.render(found))))
    shown = "".join(find_format("postmortem", "table").render(found, Options(verbose=1)))
    assert case["text"].lower() in shown.lower(), found
    assert shown.startswith(case["kind"])
    assert "\x1b" not in shown


@pytest.mark.parametrize("name", HANDLED)
def test_an_error_that_the_job_handles_is_not_its_death(name, tmp_path):
    case = HANDLED[name]
    cause = document(lay(tmp_path, {"job.log": case["log"]})).cause
    assert cause.kind == case.get("kind", "unclear"), cause
    assert ("no failure" in cause.text) == ("kind" not in case), cause
    assert case.get("text", "") in cause.text, cause
    assert list(cause.ranks) == case.get("ranks", [*cause.ranks]), cause


def test_of_a_long_log_the_beginning_and_the_end_are_read(tmp_path):
    path = tmp_path / "rank_0.log"
    size = HEAD_BYTES + END_BYTES
    step = f"step {'.' * 1000}\n"
    middle = step * (size // 1000) + "KeyError: 'middle'\n" + step * (size // 1000)
    path.write_text(f"KeyError: 'first'\n{middle}KeyError: 'last'\n")
    with path.open("rb") as file:
        found = file_failures(file.fileno(), str(path), size)
    assert found is not None
    assert [event.text for event in found.events] == ["KeyError: 'first'", "KeyError: 'last'"]
    assert found.events[0].lines_after > found.events[1].lines_after == 0
    assert found.skipped == found.size_bytes - size


def test_the_numbers_of_lines_count_blank_ones(tmp_path):
    path = tmp_path / "job.log"
    error = "w-3 >> Traceback (most recent call last):\nw-3 >> KeyError: 'a'\n"
    path.write_text(f"step 1\n\n\n{error}\nAll 2 ranks done\n")
    with path.open("rb") as file:
        found = file_failures(file.fileno(), str(path), 1 << 20)
    assert found is not None
    assert (found.unknown_prefix, found.facts.finished) == (4, 7), found


def test_a_log_with_the_bytes_of_a_crash_is_read(tmp_path):
    text = b"\0\0step 1 \xff\xfe\nstep\0 2\nKeyError: 'x\xe9'\n"
    (tmp_path / "rank_0.log").write_bytes(text)
    assert document(tmp_path).cause.text == "rank 0: KeyError: 'x\ufffd'"


def test_a_dump_of_the_flight_recorder_names_the_rank_that_did_not_come(tmp_path):
    dumps = Path(__file__).parents[1] / "node/data/flight_recorder"
    for rank in (0, 1, 3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes((dumps / f"late_{rank}").read_bytes())
    cause = document(tmp_path).cause
    assert (cause.kind, cause.ranks) == ("timeout", (3,))


def test_an_error_file_has_the_exception_and_its_time():
    stack = 'Traceback (most recent call last):\n  File "/srv/train.py", line 9, in f\n    g()\n'
    message = {"py_callstack": f"{stack}KeyError: 'x'\n", "timestamp": "1772366400"}
    text = json.dumps({"message": {"message": "KeyError: 'x'", "extraInfo": message}})
    found = read_error_file(text, utc_calendar)
    assert found is not None
    (event,) = found.events
    assert (event.text, event.frame, event.time_s) == (
        "KeyError: 'x'",
        "train.py:9 in f",
        1772366400,
    )
    assert read_error_file('{"loss": 2.5}', utc_calendar) is None


def answer(node: str, path: str, text: str, offset_s: float, *, kernel: float | None = None):
    """One node's answer. kernel: seconds ago of a kill for memory; None: none."""
    found = read_lines(text.splitlines(), 2026, utc_calendar, path)
    messages = [
        KernelMessage("oom", int(kernel or 0), 7, "Out of memory: Killed process 7 (python3)")
    ]
    log = KernelLog("", tuple(messages) if kernel is not None else ())
    end_s = found.streams[0].last_s or 1772366405.0
    failures = FileFailures(path, 100, end_s, 0, found.events, found.streams)
    now = 1772366500.0 + offset_s
    everything = NodeFailures(node, now, now, (failures,), (), 0, 0, log, JobNode(), "")
    return NodeEvidence(everything, NodeClock(offset_s, 0.1))


LINE = "2026-03-01 12:0{}:05 ERROR stops\nTraceback (most recent call last):\n{}: 'x'\n"


def test_times_are_compared_by_the_measured_clocks():
    """By the nodes' own clocks, the other rank would be the first."""
    builder = EvidenceBuilder()
    builder.add("gpu1", answer("gpu1", "/log/rank_0.log", LINE.format(0, "KeyError"), 0))
    builder.add("gpu2", answer("gpu2", "/log/rank_1.log", LINE.format(1, "IndexError"), 90))
    cause = postmortem_of(builder.complete(), started="", source="").cause
    assert (cause.ranks, cause.nodes) == ((1,), ("gpu2",))


def test_a_file_of_a_shared_file_system_counts_once():
    builder = EvidenceBuilder()
    for node in ("gpu1", "gpu2"):
        builder.add(node, answer(node, "/shared/slurm-7.out", LINE.format(0, "KeyError"), 0))
    found = postmortem_of(builder.complete(), started="", source="")
    assert (found.logs, [group.count for group in found.failures]) == (1, [1])
    assert found.sources["logs"] == "1 file on 2 nodes"


@pytest.mark.parametrize(("ago_s", "kind"), [(100, "oom"), (3 * 3600, "unclear")])
def test_a_kill_for_memory_counts_only_near_the_end_of_the_logs(ago_s, kind):
    builder = EvidenceBuilder()
    builder.add("gpu1", answer("gpu1", "/log/rank_0.log", "step 1\n", 0, kernel=ago_s))
    cause = postmortem_of(builder.complete(), started="", source="").cause
    assert cause.kind == kind


#: pdsh's output, which names gpu1.
ECC = (
    "".join(f"gpu{1 + step % 2}: step {step}\n" for step in range(12))
    + """\
gpu1: Traceback (most recent call last):
gpu1:   File "/srv/train.py", line 3, in <module>
gpu1:     step()
gpu1: RuntimeError: CUDA error: uncorrectable ECC error encountered
"""
)
XID = "NVRM: Xid (PCI:0000:1b:00): {}, pid=7, name=python3"


@pytest.mark.parametrize(("places", "xid_node", "xid", "witnesses"), [
    pytest.param(["gpu1"], "", 0, {"gpu1": LOG}, id="a user's log alone"),
    pytest.param(["gpu1"], "gpu1", 79, {"gpu1": KERNEL}, id="the node's kernel"),
    pytest.param(["gpu1"], "gpu2", 79, {"gpu1": LOG}, id="another node's kernel"),
    pytest.param(["gpu1"], "gpu1", 13, {"gpu1": LOG}, id="an Xid that any program causes"),
    pytest.param(["gpu2"], "", 0, {}, id="another node's log"),
    pytest.param(["gpu1", "gpu2"], "", 0, {}, id="a log that other nodes can write, too"),
])  # fmt: skip
def test_who_saw_the_fault_on_the_node_itself(places, xid_node, xid, witnesses):
    now, builder = 1772366500.0, EvidenceBuilder()
    for node in ("gpu1", "gpu2"):
        path, text = ("/log/out", ECC) if node in places else ("/log/own", "step 1\n")
        found = read_lines(text.splitlines(), 2026, utc_calendar, path)
        file = FileFailures(path, 100, now, 0, found.events, found.streams)
        messages = [KernelMessage("xid", 10, 7, XID.format(xid))] if node == xid_node else []
        everything = (file,), (), 0, 0, KernelLog("", tuple(messages)), JobNode(), ""
        failures = NodeFailures(node, now, now, *everything)
        builder.add(node, NodeEvidence(failures, NodeClock(0, 0.1)))
    document = postmortem_of(builder.complete(), started="", source="")
    assert (document.cause.kind, document.cause.nodes) == ("gpu", ("gpu1",))
    assert document.witnesses == witnesses


SCONTROL = """JobId=4711 ArrayJobId=4700 ArrayTaskId=3 JobName=train me
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   NodeList=gpu[1-2]
   WorkDir=/scratch/ada
   StdOut=/scratch/ada/%x-%A_%a.%N.out
"""


@pytest.mark.parametrize(("name", "pattern"), [
    ("/logs/slurm-%j.out", "/logs/slurm-4711.out"),
    ("%x-%A_%a.%4t.out", "/scratch/ada/train me-4700_3.*.out"),
    ("logs/%N-%s-%%.err", "/scratch/ada/logs/*-*-%.err"),
    ("/logs/[1]?*.out", "/logs/[[]1][?][*].out"),
    ("/logs/%J.out", "/logs/*.out"),
])  # fmt: skip
def test_names_of_slurms_files_become_patterns(name, pattern):
    record = parse_scontrol(SCONTROL)
    assert record["UserId"] == "ada(1000)"
    # The user chooses the job's name.
    forged = SCONTROL.replace("train me", "x StdOut=/etc/shadow UserId=root(0)")
    assert parse_scontrol(forged) == {**record, "JobName": "x StdOut=/etc/shadow UserId=root(0)"}
    forged = SCONTROL.replace("train me", "x\n   StdOut=/etc/shadow")
    assert "StdOut" not in parse_scontrol(forged)
    assert log_patterns(name, "4711", record) == pattern


@pytest.mark.parametrize(("after_s", "ranks"), [(8, (3,)), (1, ())])
def test_a_rank_that_loses_its_peers_after_their_timeout_was_late(after_s, ranks):
    builder = EvidenceBuilder()
    for rank in range(4):
        words = (
            "Connection closed by peer"
            if rank == 3
            else "Timed out waiting 9ms for recv operation"
        )
        text = f"RuntimeError: [gloo/transport/tcp/pair.cc:553] {words}"
        found = read_lines([text], 2026, utc_calendar, f"/log/rank_{rank}.log")
        end_s = 1772366400.0 + (after_s if rank == 3 else 0)
        logs = (replace(found, size_bytes=100, mtime_s=end_s),)
        node = NodeFailures("gpu1", end_s, end_s, logs, (), 0, 0, KernelLog("none"), JobNode(), "")
        builder.add(f"gpu{rank}", NodeEvidence(node, NodeClock(0, 0.1)))
    cause = postmortem_of(builder.complete(), started="", source="").cause
    assert (cause.kind, cause.ranks) == ("timeout", ranks)


DIED = (
    "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
)


@pytest.mark.parametrize(("texts", "kind", "ranks", "text"), [
    pytest.param([DIED, ""], "unclear", (), f"rank 0: {DIED}: the cause is elsewhere", id="alone"),
    pytest.param([DIED, "KeyError: 'x'"], "exception", (1,), "rank 1: KeyError: 'x'", id="error"),
    pytest.param([f"{DIED}\n\nstep\nValueError: no result", ""], "unclear", (),
                 f"rank 0: {DIED}: the cause is elsewhere", id="its error follows"),
    pytest.param([DIED, "RuntimeError: Connection closed by peer"], "unclear", (),
                 f"rank 0: {DIED}: the cause is elsewhere", id="lost peer"),
])  # fmt: skip
def test_a_consequence_is_named_only_where_nothing_else_is(texts, kind, ranks, text):
    evidence = JobEvidence()
    for rank, words in enumerate(texts):
        lines = [f"step {number}" for number in range(4)] + words.split("\n")
        found = read_lines(lines, 2026, utc_calendar, f"rank_{rank}.log")
        events = tuple(
            replace(event, role=CONSEQUENCE) if event.text.startswith(DIED[:15]) else event
            for event in found.events
        )
        evidence.files.append(JobFile("", replace(found, events=events)))
    cause = postmortem_of(evidence, started="", source="").cause
    assert (cause.kind, cause.ranks, cause.text) == (kind, ranks, text)
