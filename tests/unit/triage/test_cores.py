"""Cores: gdb's backtraces as gdb 13 prints them, names, places and groups. Without any node."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from nodeready.agent.cores.core_pattern import CorePlace
from nodeready.agent.cores.gcore import core_bytes
from nodeready.agent.cores.program import CoreFile, CoreSummary, Listing, listing
from nodeready.core.outcome import UNREACHABLE, NodeGap
from nodeready.reports import json_report, triage_tables
from nodeready.reports.registry import Options
from nodeready.runs import cores as backtraces
from nodeready.runs.cores import (
    CoreFrame,
    Cores,
    Crash,
    CrashFile,
    deduplicate,
    group_crashes,
    with_file_names,
)
from tests.cases import cases, read_table


@pytest.mark.parametrize("case", cases(__file__, "cores.json", "frame"))
def test_a_frame_is_what_does_not_change_from_crash_to_crash(case):
    frame = CoreFrame(*case["frame"]) if "frame" in case else None
    assert backtraces.parse_frame(case["row"]) == frame


DATA = Path(__file__).with_name("data")
TEXT = (DATA / "gdb_of_a_core.txt").read_text()


def test_all_of_gdbs_words_become_threads_and_pythons_lines():
    parsed = backtraces.parse(TEXT)
    functions = ["__pthread_kill_implementation", "__GI_abort", "??", "g"]
    assert [frame.function for frame in parsed.crashed] == functions
    threads = [(thread.number, thread.lwp, len(thread.frames)) for thread in parsed.threads]
    assert threads == [(2, 22592, 1), (1, 22591, 1)]
    assert parsed.python == tuple(TEXT.splitlines()[-2:])
    top = backtraces.headline(parsed.crashed)
    assert top == CoreFrame("g", "a.cc", 6)
    assert not backtraces.crashed_in(parsed.crashed, top)
    assert backtraces.crashed_in((*parsed.crashed[:2], top), top)
    assert backtraces.parse("") == backtraces.Backtrace()
    assert backtraces.headline(()) is None


def crash_key(cpu: str, address: str, argument: int) -> tuple[CoreFrame, ...]:
    text = f"""== the thread of the signal
#0 __strlen_{cpu} () at ../sysdeps/x86_64/multiarch/strlen-{cpu}.S:79
#1 {address} in ?? ()
#2 0x00007f0758a44472 in g (x={argument}) at a.cc:6"""
    return backtraces.crash_key(backtraces.parse(text).crashed)


def test_the_same_crash_elsewhere_has_other_addresses_arguments_and_cpus():
    here = crash_key("evex", "0x00005613e6f0a4a9", 3)
    assert crash_key("avx2", "0x00007f1111f0a4a9", 4) == here
    assert crash_key("avx2", "0x00007f1111f0a4b0", 4) != here
    # A careless pattern tries as many ways as a number of 150 digits tells.
    name = "f" + 500 * "_sse" + "X"
    for function, known in ((name, name), ("memcpy_avx_unaligned_erms", "memcpy")):
        assert backtraces.crash_key((CoreFrame(function),))[0].function == known


@pytest.mark.parametrize("case", cases(__file__, "cores.json", "pattern"))
def test_a_name_is_read_by_the_pattern(tmp_path, case):
    path = tmp_path / case["file"]
    path.touch()
    files = list(CorePlace(f"{tmp_path}/{case['pattern']}", case.get("uses_pid", False)).find())
    assert [file.path for file in files] == ([] if case["values"] is None else [str(path)])
    assert all(case["values"].items() <= file.values.items() for file in files)
    assert all(file.compressed == case.get("compressed", "") for file in files)


def test_a_directory_of_the_pattern_is_entered_and_no_link_in_it(tmp_path):
    for path in ("gpu1/17", "gpu2/18", "gpu2/deep/19"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "link").symlink_to(tmp_path / "gpu1")
    place = CorePlace(f"{tmp_path}/%h/%P")
    assert sorted(file.values["h"] for file in place.find()) == ["gpu1", "gpu2"]
    assert place.directory == ""
    assert CorePlace("/cores/core.%e").directory == "/cores"
    assert CorePlace("core.%e").directory == ""
    assert list(CorePlace("core").find()) == []


def test_only_regular_files_are_listed_the_newest_first(tmp_path):
    for number, age in ((1, 50), (2, 10), (3, 4000)):
        file = tmp_path / f"core.x.{number}.h.5"
        file.write_text("x")
        when = datetime.now().timestamp() - age
        os.utime(file, (when, when))
    os.mkfifo(tmp_path / "core.x.4.h.5")
    (tmp_path / "core.x.5.h.5").symlink_to("/etc/shadow")
    pattern = f"{tmp_path}/core.%e.%P.%h.%t"
    files = listing([pattern, pattern], since_s=3600).files
    assert [file.pid for file in files if file.path.startswith(str(tmp_path))] == [2, 1]
    missing = listing([f"{tmp_path}/none/core"])
    assert f"{tmp_path}/none: No such file or directory" in missing.notes


def core_file(path: str, inode: int = 1, when: int = 10, host: str = "") -> CoreFile:
    return CoreFile(path, inode, when * 10**9, 100, 0, 1.0, host=host, pid=7)


def test_a_core_that_several_nodes_see_is_read_once_where_it_was_written():
    shared = [core_file(f"/nfs/core.{n}", n, host=f"gpu{n}.example.org") for n in (1, 2)]
    anywhere = [core_file(f"/nfs/core.{n}", n) for n in (3, 4, 5)]
    supervisor = core_file("/nfs/core.1", 9)
    elsewhere = core_file("/nfs/core.6", 6, host="elsewhere")
    both, third = (*shared, *anywhere), (supervisor, elsewhere)
    seen = {"gpu1": both, "gpu2": both, "gpu3": third}
    found = deduplicate({node: Listing(("/nfs/core.*",), files) for node, files in seen.items()})
    cores = {core.file.inode: core for core in found}
    assert len(found) == len(cores) == 7
    assert [cores[inode].reader for inode in (1, 2, 9)] == ["gpu1", "gpu2", "gpu3"]
    assert (cores[2].nodes, cores[6].host) == (("gpu1", "gpu2"), "elsewhere")
    assert {cores[inode].reader for inode in (3, 4, 5)} == {"gpu1", "gpu2"}


def crash(node: str, when: int, frames: str = "", **core: object) -> Crash:
    text = f"== the thread of the signal\n{frames}" if frames else ""
    values = {"signal": 11, "program": "/usr/bin/python3", **core}
    file = core_file(f"/var/crash/{node}.{when}", when=when, host=node)
    return Crash(CrashFile(file, node, (node,), node), CoreSummary(0, **values), text)  # type: ignore[arg-type]


NCCL = "#0 0x1 in abort () from /lib/libc.so.6\n#1 0x2 in watchdog (a=1) at nccl.cc:5"
FIRST = "#0 0x1 in fwd (x=0) at ops.cc:9"
CRASHES = (
    crash("gpu1", 103, NCCL, signal=6, rank=0, job="88"),
    crash("gpu2", 104, NCCL.replace("a=1", "a=9"), signal=6, rank=1, job="88"),
    crash("gpu3", 102, FIRST, rank=2, job="88", warning="it is cut off at 100 of 200 bytes"),
    crash("gpu4", 105, unread="gdb is not installed (nodeready deploy installs it)"),
)


FULL = Cores(
    *("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"),
    nodes=("gpu1", "gpu2", "gpu3", "gpu4", "gpu5"),
    crashes=CRASHES,
    gaps=(NodeGap("gpu5", UNREACHABLE, "no route to the node"),),
    notes={"gpu1": ("core_pattern is core",)},
    unlisted={"gpu1": 3},
)


def test_the_table_says_what_crashed_first_and_where_and_what_could_not_be_read():
    assert [crash.node for crash in group_crashes(CRASHES[:3])[1].crashes] == ["gpu1", "gpu2"]
    text = "\n".join(line.plain for line in triage_tables.cores_lines(FULL))
    for words in read_table(__file__, "table_words"):
        assert words in text, text
    assert text.index("fwd") < text.index("watchdog")


def test_escapes_that_a_core_has_are_shown():
    frame = "#0 0x1 in \x1b[31m\u202eevil (x=1) at \x1b]0;t\x07.c:1"
    texts = {"command": "\x1b[2J", "user": "\udcff", "job": "[bold]x", "program": "/tmp/\x1b[1m"}
    cores = Cores("", "", nodes=("gpu1",), crashes=(crash("gpu1", 5, frame, **texts),))
    text = "".join(json_report.render(cores))
    table = "\n".join(line.plain for line in triage_tables.cores_lines(cores, Options(verbose=1)))
    assert text.isascii()
    assert not {"\x1b", "\x07", "\u202e", "\udcff"} & {*text, *table}


def test_every_text_has_a_name_of_its_own_in_the_directory():
    odd = crash("@docker/x y/../..", 5, NCCL)
    files = [crash.text_file for crash in with_file_names([CRASHES[0], CRASHES[0], odd])]
    assert files == ["gpu1-7.txt", "gpu1-7-2.txt", "_docker_x_y_.._..-7.txt"]


@pytest.mark.parametrize(("text", "size"), [
    ((DATA / "smaps.txt").read_text(), 0x45000 + 0x3FDF000 + 0x1000 + 0x1000),
    ("", 0),
    ("nonsense\nVmFlags:\nVmFlags: rd\n", 0),
    ("x-y rw-p 0 0:0 0\nffff rw-p\n\x1b-\n", 0),
])  # fmt: skip
def test_a_core_of_a_live_process_is_as_large_as_what_gdb_copies(text, size):
    assert core_bytes(text.splitlines()) == size
