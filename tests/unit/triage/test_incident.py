"""The directory and the archive of an incident: part by part, whatever becomes of each."""

import itertools
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodeready.agent.tail import LogTail, NodeTail, UnreadFile
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import LATE, LOST, NodeGap, Outcome
from nodeready.reports.registry import find_format
from nodeready.runs import incident as incidents
from nodeready.runs.collector import EvidenceCollector, LogWriter, own_files
from nodeready.runs.incident import Part
from nodeready.runs.stacks.document import Suspect, Verdict
from nodeready.runs.tell import Tell
from tests.cases import with_table

STARTED = "2026-11-21T03:00:00Z"
SECRET = "hf_abcdefghijABCDEFGHIJ0123"
VERDICT = Verdict(
    "late",
    "rank 3 has not called ALLREDUCE 41, in load_batch: look at the storage of gpu001",
    (Suspect((3,), ("gpu001",), ("it waits for no rank",), ("its port moves",)),),
)
FORMS = {
    incidents.README: find_format("incident", "table").render,
    incidents.DOCUMENT: find_format("incident", "json").render,
}


def incident(*parts: Part, **given: object) -> incidents.Incident:
    whole = incidents.Incident(
        *(STARTED, STARTED, "4711", "ada", "taken on request", True, VERDICT, (), parts),
        archive="/tmp/hang.tar.gz",
    )
    return replace(whole, **given)


def writes(name: str, problem: BaseException | None = None, **part: object):
    """A part that writes one file, and then raises the problem."""

    def write(directory: incidents.Directory) -> Part:
        directory.make_part(name)
        directory.write(f"{name}/one.txt", ["x\n"])
        if problem:
            raise problem
        return Part(name, "kept", "one file", **part)

    return write


def fails(problem: BaseException):
    def write(directory: incidents.Directory) -> Part:
        raise problem

    return write


def take_all(directory: incidents.Directory, **parts) -> tuple[tuple[Part, ...], bool]:
    return incidents.take(directory, parts, itertools.count().__next__)


def test_a_part_that_fails_is_named_and_costs_no_other(tmp_path):
    parts, is_complete = take_all(
        incidents.prepare(tmp_path / "hang"),
        stacks=fails(ValueError("a mistake of ours")),
        logs=fails(OSError(28, "No space left on device", "/x/logs")),
        cores=writes("cores"),
        audit=writes("audit", KeyboardInterrupt()),
    )
    assert not is_complete
    assert [(part.name, part.status, part.files, part.seconds) for part in parts] == [
        ("stacks", "missing", (), 1),
        ("logs", "missing", (), 1),
        ("cores", "kept", ("cores/one.txt",), 1),
        # Ctrl-C in the middle of a part keeps its files.
        ("audit", "partial", ("audit/one.txt",), 1),
    ]
    assert "ValueError: a mistake of ours" in parts[0].reason
    assert parts[1].reason == "No space left on device: /x/logs"
    assert incidents.incident_code(incident(*parts)) == 1


def test_an_interrupt_keeps_what_there_is(tmp_path):
    directory = incidents.prepare(tmp_path / "hang")
    half = fails(incidents.Interrupted(Part("logs", "partial", "some", "interrupted")))
    every = {"stacks": writes("stacks"), "logs": half, "cores": writes("cores")}
    parts, is_complete = take_all(directory, **every)
    assert not is_complete
    rows = [(part.status, part.reason) for part in parts]
    assert rows == [("kept", ""), ("partial", "interrupted"), ("missing", "interrupted")]
    whole, problem = incidents.finish(directory, incident(*parts, complete=False), FORMS)
    assert problem == ""
    assert incidents.incident_code(whole) == 130
    assert "PARTIAL" in (directory.path / incidents.README).read_text()
    with tarfile.open(whole.archive) as tar:
        assert "hang/stacks/one.txt" in tar.getnames()


def test_the_same_evidence_makes_the_same_archive(tmp_path):
    archives = set()
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        directory = incidents.prepare(tmp_path / place / "hang")
        take_all(directory, stacks=writes("stacks"), audit=writes("audit"))
        os.utime(directory.path / "stacks/one.txt", (1, ord(place)))
        incidents.pack(directory, STARTED, directory.files())
        archives.add(directory.archive.read_bytes())
    assert len(archives) == 1


def test_only_its_owner_can_read_it(tmp_path):
    directory = incidents.prepare(tmp_path / "hang")
    before = os.umask(0)
    try:
        parts, _ = take_all(directory, stacks=writes("stacks"))
        whole, _ = incidents.finish(directory, incident(*parts), FORMS)
    finally:
        os.umask(before)
    files = [directory.path / name for name in directory.files()]
    assert {path.stat().st_mode & 0o777 for path in [*files, Path(whole.archive)]} == {0o600}
    assert directory.path.stat().st_mode & 0o777 == 0o700
    with tarfile.open(whole.archive) as tar:
        rows = [(file.name, file.mode, file.uid, file.uname, file.mtime) for file in tar]
    names = "README.txt", "incident.json", "stacks/one.txt"
    assert rows == [(f"hang/{name}", 0o600, 0, "", 1795230000) for name in names]


@with_table("name, problem")
def test_nothing_that_is_there_is_written_over(tmp_path, name, problem):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(Refused) as error:
        incidents.prepare(tmp_path / "hang")
    assert problem in str(error.value)
    assert path.read_text() == "mine"


def test_the_index_has_no_secret(tmp_path):
    directory = incidents.prepare(tmp_path / "hang")
    gaps = (NodeGap("gpu001", LATE, f"no answer: --token {SECRET}"),)
    parts, _ = take_all(directory, cores=writes("cores", gaps=gaps, reason=f"HF_TOKEN={SECRET}"))
    whole = incident(*parts, advice=(f"look at https://ada:{SECRET}@gpu001/",))
    incidents.finish(directory, whole, FORMS)
    for name in FORMS:
        text = (directory.path / name).read_text()
        assert SECRET not in text
        assert "(left out)" in text


def test_the_index_begins_with_the_verdict():
    part = Part("cores", "empty", "no core of the job")
    rows = "".join(find_format("incident", "table").render(incident(part))).splitlines()
    assert rows[:3] == [
        "job 4711 of ada, 2026-11-21T03:00:00Z: taken on request",
        f"late: {VERDICT.text}",
        "          suspect: rank 3 on gpu001: it waits for no rank",
    ]
    assert rows[-1] == "archive of all files: /tmp/hang.tar.gz"


@pytest.mark.parametrize(("parts", "given", "code"), [
    ((Part("stacks", "kept"), Part("cores", "empty")), {}, 0),
    ((Part("stacks", "partial"),), {}, 3),
    ((Part("stacks", "missing"),), {}, 3),
    ((Part("stacks", "partial", gaps=(NodeGap("gpu001", LOST, "gone"),)),), {}, 4),
    ((Part("stacks", "missing", failed=True),), {}, 1),
    ((Part("stacks", "kept"),), {"archive": ""}, 1),
    ((Part("stacks", "kept"),), {"complete": False}, 130),
])  # fmt: skip
def test_the_exit_code(parts, given, code):
    assert incidents.incident_code(incident(*parts, **given)) == code


def test_neither_a_job_nor_a_log_makes_a_path():
    names = {"4711": "4711", "gpu001:29500": "gpu001_29500", "../../etc": "_.._etc", "..": "job"}
    for job, name in names.items():
        assert incidents.directory_name(job, STARTED) == f"{name}-20261121T030000Z"
    assert incidents.log_name("gpu001", [3], 1) == "gpu001-rank3-1.log"
    assert incidents.log_name("gpu001", [0, 1, 7], 1) == "gpu001-ranks0-7-1.log"
    assert incidents.log_name("../x", [], 1) == "_x-1.log"


def test_a_log_that_cannot_be_read_costs_no_other_log(tmp_path, monkeypatch):
    unread = NodeTail("gpu1", (), (UnreadFile("/a.log", "is no text", True),), 0, 0, "")
    answers = {"gpu1": Outcome("gpu1", [("/a.log", Outcome("gpu1", unread))])}
    monkeypatch.setattr("nodeready.runs.collector.converse", lambda *given: answers)
    nodes = SimpleNamespace(transport=SimpleNamespace(interrupted=False))
    collector = EvidenceCollector(nodes, Tell(), "4711", "", 30, None, None)
    collector.stacks = SimpleNamespace()
    collector.logs["gpu1"] = {"/a.log": [LogWriter(1, 1.0, 0, ("step 1",))]}
    collector.logs["gpu1"]["/b.log"] = [LogWriter(2, 1.0, 1, ("step 2",))]
    directory = incidents.prepare(tmp_path / "incident")
    part = collector.take_logs(directory)
    gap = NodeGap("gpu1", "incomplete", "/a.log: is no text")
    assert (part.status, part.gaps) == ("partial", (gap,))
    texts = [(directory.path / name).read_text() for name in directory.files("logs")]
    assert sorted(texts) == ["gpu1:/a.log (ranks 0)\nstep 1\n", "gpu1:/b.log (ranks 1)\nstep 2\n"]


def test_of_a_mixed_log_each_rank_of_the_node_is_a_file():
    def log(rank, host="", is_mixed=True):
        own = LogTail("/a.log", 1, 0.0, 0.0, (f"of {rank}",), None, pids=(1, 2))
        return replace(own, rank=rank, host=host, is_mixed=is_mixed)

    writers = [LogWriter(pid, 1.0, rank, ()) for pid, rank in ((1, 4), (2, 5), (3, 6))]
    logs = [*map(log, (None, 3, 4, 5, 6)), log(None, "gpu2"), log(None, is_mixed=False)]
    kept = own_files(NodeTail("gpu1.cluster", tuple(logs), (), 0, 0, ""), writers)
    firsts = [(ranks, lines[0]) for _, ranks, lines in kept]
    assert firsts == [([], "of None"), ([4], "of 4"), ([5], "of 5"), ([4, 5], "of None")]
