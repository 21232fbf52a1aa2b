"""The directory and the archive of an incident: part by part, whatever becomes of each."""

from __future__ import annotations

import itertools
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from nodeready.reports.registry import find
from nodeready.triage import incident as kept
from nodeready.triage.incident import (
    ForeignDirectory,
    Incident,
    Interrupted,
    Part,
    incident_code,
    prepare,
    take,
)
from nodeready.triage.stacks.document import Suspect, Verdict

STARTED = "2026-11-21T03:00:00Z"
SECRET = "hf_abcdefghijABCDEFGHIJ0123"
VERDICT = Verdict(
    "late",
    "rank 3 has not called ALLREDUCE 41, in load_batch: look at the storage of gpu001",
    (Suspect((3,), ("gpu001",), ("it waits for no rank",), ("its port moves",)),),
)


def incident(*parts: Part, **given: object) -> Incident:
    made = Incident(
        *(STARTED, STARTED, "4711", "ada", "somebody asked for it", True, VERDICT, (), parts),
        archive="/tmp/hang.tar.gz",
    )
    return replace(made, **given)


def forms() -> dict[str, object]:
    return {
        kept.README: lambda one: find("incident", "table").render(one),
        kept.DOCUMENT: lambda one: find("incident", "json").render(one),
    }


def takes(name: str, text: str = "x\n", **part: object):
    """A part that writes one file."""

    def taking(directory: kept.Directory) -> Part:
        directory.part(name)
        directory.write(f"{name}/one.txt", [text])
        return Part(name, "kept", "one file", **part)

    return taking


def fails(problem: BaseException):
    def taking(directory: kept.Directory) -> Part:
        raise problem

    return taking


def clock():
    return itertools.count().__next__


def test_a_part_that_fails_is_named_and_costs_no_other(tmp_path):
    directory = prepare(tmp_path / "hang")
    parts, complete = take(
        directory,
        {
            "stacks": fails(ValueError("a mistake of ours")),
            "logs": fails(OSError(28, "No space left on device", "/x/logs")),
            "cores": takes("cores"),
            "audit": takes("audit"),
        },
        clock(),
    )
    assert complete
    assert [(one.name, one.status, one.files) for one in parts] == [
        ("stacks", "missing", ()),
        ("logs", "missing", ()),
        ("cores", "kept", ("cores/one.txt",)),
        ("audit", "kept", ("audit/one.txt",)),
    ]
    assert "ValueError: a mistake of ours" in parts[0].why
    assert parts[1].why == "No space left on device: /x/logs"
    assert [one.seconds for one in parts] == [1, 1, 1, 1]
    assert incident_code(incident(*parts)) == 1


def test_an_interrupt_keeps_what_there_is(tmp_path):
    directory = prepare(tmp_path / "hang")
    half = Part("logs", "partial", "some", "interrupted")
    parts, complete = take(
        directory,
        {"stacks": takes("stacks"), "logs": fails(Interrupted(half)), "cores": takes("cores")},
        clock(),
    )
    assert not complete
    assert [(one.status, one.why) for one in parts] == [
        ("kept", ""), ("partial", "interrupted"), ("missing", "interrupted"),
    ]  # fmt: skip
    found, problem = kept.finish(directory, incident(*parts, complete=complete), forms())
    assert problem == ""
    assert incident_code(found) == 130
    assert "PARTIAL" in (directory.path / kept.README).read_text()
    with tarfile.open(found.archive) as tar:
        assert "hang/stacks/one.txt" in tar.getnames()


def test_ctrl_c_in_the_middle_of_a_part_keeps_its_files(tmp_path):
    directory = prepare(tmp_path / "hang")

    def taking(where: kept.Directory) -> Part:
        takes("stacks")(where)
        raise KeyboardInterrupt

    parts, complete = take(directory, {"stacks": taking, "cores": takes("cores")}, clock())
    assert not complete
    assert (parts[0].status, parts[0].files) == ("partial", ("stacks/one.txt",))


def test_the_same_evidence_makes_the_same_archive(tmp_path):
    made = []
    for place in ("a", "b"):
        directory = prepare(
            tmp_path / place / "hang" if (tmp_path / place).mkdir() is None else ""
        )
        take(directory, {"stacks": takes("stacks"), "audit": takes("audit")}, clock())
        os.utime(directory.path / "stacks/one.txt", (1, 1))
        kept.pack(directory, STARTED, directory.files())
        made.append(directory.archive.read_bytes())
    assert made[0] == made[1]


def test_only_its_owner_can_read_it(tmp_path):
    directory = prepare(tmp_path / "hang")
    before = os.umask(0)
    try:
        parts, _ = take(directory, {"stacks": takes("stacks")}, clock())
        found, _ = kept.finish(directory, incident(*parts), forms())
    finally:
        os.umask(before)
    files = [directory.path / name for name in directory.files()]
    assert {path.stat().st_mode & 0o777 for path in [*files, Path(found.archive)]} == {0o600}
    assert directory.path.stat().st_mode & 0o777 == 0o700
    with tarfile.open(found.archive) as tar:
        rows = [(one.name, one.mode, one.uid, one.uname, one.mtime) for one in tar]
    assert rows == [
        (f"hang/{name}", 0o600, 0, "", 1795230000)
        for name in ("README.txt", "incident.json", "stacks/one.txt")
    ]


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ("notes.txt", "holds other files (notes.txt) already: name a new directory"),
        ("incident.json", "holds an incident already: name a new directory"),
    ],
)
def test_nothing_that_is_there_is_written_over(tmp_path, there, words):
    place = tmp_path / "hang"
    place.mkdir()
    (place / there).write_text("mine")
    with pytest.raises(ForeignDirectory) as said:
        prepare(place)
    assert str(said.value) == f"{place}: {words}"
    assert (place / there).read_text() == "mine"


def test_an_archive_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "hang.tar.gz").write_text("mine")
    with pytest.raises(ForeignDirectory, match="is there already"):
        prepare(tmp_path / "hang")
    (tmp_path / "file").write_text("")
    with pytest.raises(ForeignDirectory, match="is no directory"):
        prepare(tmp_path / "file")


def test_the_index_has_no_secret(tmp_path):
    directory = prepare(tmp_path / "hang")
    errors = {"gpu001": f"no answer: --token {SECRET}"}
    parts, _ = take(
        directory, {"cores": takes("cores", errors=errors, why=f"HF_TOKEN={SECRET}")}, clock()
    )
    told = incident(*parts, advice=(f"look at https://ada:{SECRET}@gpu001/",))
    kept.finish(directory, told, forms())
    for name in (kept.README, kept.DOCUMENT):
        text = (directory.path / name).read_text()
        assert SECRET not in text
        assert "(left out)" in text


def test_the_index_begins_with_the_verdict():
    part = Part("cores", "empty", "no core of the job")
    rows = "".join(find("incident", "table").render(incident(part))).splitlines()
    assert rows[:3] == [
        "job 4711 of ada, 2026-11-21T03:00:00Z: somebody asked for it",
        f"late: {VERDICT.text}",
        "          suspect: rank 3 on gpu001: it waits for no rank",
    ]
    assert rows[-1] == "all of it: /tmp/hang.tar.gz"


#: What became of the parts, and of the whole -> the exit code.
CODES = {
    "all is there": ((Part("stacks", "kept"), Part("cores", "empty")), {}, 0),
    "a part is not whole": ((Part("stacks", "partial"),), {}, 3),
    "a part is missing": ((Part("stacks", "missing"),), {}, 3),
    "a node is away": ((Part("stacks", "partial", unreached=("gpu001",)),), {}, 4),
    "a mistake of ours": ((Part("stacks", "missing", failed=True),), {}, 1),
    "no archive": ((Part("stacks", "kept"),), {"archive": ""}, 1),
    "interrupted": ((Part("stacks", "kept"),), {"complete": False}, 130),
}


@pytest.mark.parametrize(("parts", "given", "code"), CODES.values(), ids=CODES)
def test_how_it_ends(parts, given, code):
    assert incident_code(incident(*parts, **given)) == code


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("4711", "4711-20261121T030000Z"),
        ("gpu001:29500", "gpu001_29500-20261121T030000Z"),
        ("../../etc", "_.._etc-20261121T030000Z"),
        ("..", "job-20261121T030000Z"),
    ],
)
def test_a_job_makes_no_path(job, name):
    assert kept.directory_name(job, STARTED) == name
    assert Path(name).name == name


@pytest.mark.parametrize(
    ("node", "ranks", "name"),
    [
        ("gpu001", [3], "gpu001-rank3-1.log"),
        ("gpu001", [0, 1, 7], "gpu001-ranks0-7-1.log"),
        ("../x", [], "_x-1.log"),
    ],
)
def test_a_log_makes_no_path(node, ranks, name):
    assert kept.log_name(node, ranks, 1) == name
