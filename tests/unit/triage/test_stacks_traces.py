"""Raw traces are taken when they are whole and sensible; anything else is one line.

They come from the nodes, from a directory of `stacks -o`, or from texts of `py-spy dump`: dumps/
holds what py-spy 0.4.3 printed.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import node_gaps, reasons_of
from nodeready.runs.stacks import group as grouping
from nodeready.runs.stacks import trace as traces
from nodeready.runs.stacks.trace import TraceError, empty_trace, file_name, parse_dump
from tests.builders.traces import LOAD, REDUCE, document, process
from tests.cases import cases
from tests.paths import schema

VALID = jsonschema.Draft202012Validator(schema("trace"))


def good() -> dict[str, Any]:
    """A trace with all that one can have, as JSON gives it."""
    worker = {
        "pid": 77, "parent": 4, "kind": "loader worker", "command": "python", "state": "S",
        "wait_channel": "do_wait", "cpu_s": [0.5, 0.5], "waits_on": "wait for child 78 (gcc)",
        "main": 0, "error": "",
    }  # fmt: skip
    rank = process(
        0, REDUCE, LOAD, threads_at={"Thread-1 (loader)": LOAD}, native_at=REDUCE,
        kernel_stack=["futex"], below=[worker, {**worker, "main": None, "error": "not Python"}],
        switches=[7, 2**40], calls=[7, 2**40], main_cpu_s=[0.5, 1], waits_on="futex",
        locals=["step: number = 7"], witnesses={"logs": {"absent": "no log"}},
        received=["MainThread"], untimed=True, thread_rows=[[0, 2]],
    )  # fmt: skip
    waits = [{"name": "nccl", "state": "S", "number": 8, "kernel_stack": ["futex"]}]
    more = {"instead": ["python3 x.py (pid 7, user bob)"], "thread_waits": waits}
    whole = document("gpu003", rank, process(None, None, start_s=7), **more)
    return json.loads(json.dumps(whole))


def value_of(text: str) -> Any:
    """`5000 * "x"` or JSON."""
    count, _, piece = text.partition(" * ")
    return int(count) * json.loads(piece) if piece else json.loads(text)


def spoiled(words: str) -> dict[str, Any]:
    """The good trace with `path = value`; DROP: without it."""
    path, value = words.split(" = ")
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    data = owner = good()
    for key in keys:
        owner = owner[key]
    if value == "DROP":
        del owner[last]
    else:
        owner[last] = value_of(value)
    return data


@pytest.mark.parametrize("case", cases(__file__, "traces.json"))
def test_what_makes_no_sense_is_one_line(case):
    data, why = spoiled(case["name"]), case["why"]
    with pytest.raises(TraceError) as caught:
        traces.parse(json.dumps(data), "trace-gpu003.json")
    begin, _, words = (message := str(caught.value)).partition(": ")
    assert (begin, why in words, message.isprintable()) == ("trace-gpu003.json", True, True)
    assert len(message) < 200
    is_only_ours = any(word in why for word in ("index outside", "NaN", "characters", "1.0"))
    assert is_only_ours or not VALID.is_valid(data)


ALLOWED = 'node = 253 * "n"|processes.0.locals = 200 * ["x"]|processes.0.below = 64 * []'
ALLOWED += "|processes.0.pid = 0|frames.0.2 = 0|interval_s = 0|later = 1|processes.0.later = 1"


@pytest.mark.parametrize("words", ALLOWED.split("|"))
def test_what_is_at_a_limit_and_unknown_fields_are_read(words):
    assert traces.read(spoiled(words), "x").processes


@pytest.mark.parametrize(("text", "why"), [
    ("", "it is empty"),
    (" \n", "it is empty"),
    ("[]", "no trace of nodeready"),
    ("null", "no trace of nodeready"),
    ("[" * 200_000, "no trace of nodeready"),
    ('{"schema": "other/1"}', "no trace of nodeready"),
    ("hello", "it is no JSON"),
    (b"\x1f\x8b\x08\x00", "no trace of nodeready: no UTF-8"),
    ('{"schema": "nodeready.trace/1", "node": \xff}', "it is no JSON"),
    ('{"schema": "nodeready.trace/1", "pid": ' + "1" * 5000 + "}", "a number is too large"),
])  # fmt: skip
def test_what_is_no_trace_is_one_line(text, why):
    with pytest.raises(TraceError, match=why):
        traces.parse(text, "x")


def test_wherever_a_file_is_cut_off_it_is_an_error():
    text = json.dumps(good())
    for end in range(1, len(text), 13):
        with pytest.raises(TraceError, match=r"cut off|no JSON") as caught:
            traces.parse(text[:end], "x")
    assert "cut off (half-written?)" in str(caught.value)


def test_a_sample_that_is_equal_is_checked_too():
    """1.0, True and None equal what is right, or nothing."""
    data = good()
    samples = data["processes"][0]["samples"]
    samples[:] = [samples[0], {**samples[0], "main": float(samples[0]["main"])}]
    made = grouping.group([traces.parse(json.dumps(data), "x")], {})
    assert made.groups[-1].frames
    samples.append(None)
    with pytest.raises(TraceError):
        traces.parse(json.dumps(data), "x")


def test_the_schema_takes_what_is_read_and_no_more():
    VALID.validate(good())
    for at in ("", "processes.0.", "processes.0.samples.0."):
        assert not VALID.is_valid(spoiled(f"{at}more = 1"))
    assert not VALID.is_valid(spoiled('started = "yesterday"'))


def write(directory: Path, *names: str) -> None:
    for name in names:
        text = json.dumps(document(name, process(0, REDUCE)))
        (directory / f"trace-{name}.json").write_text(text)


def test_a_directory_is_read_in_natural_order_and_a_broken_file_costs_itself(tmp_path):
    write(tmp_path, "n10", "n9", "n2", "n1")
    whole = (tmp_path / "trace-n9.json").read_text()
    (tmp_path / "trace-n9.json").write_text(whole[:300])
    (tmp_path / "trace-n11.json").write_text(whole.replace('"n9"', '"n1"'))
    (tmp_path / "trace-n13.json").write_text(traces.to_json(empty_trace("n13", "no route", "")))
    (tmp_path / "trace-n12.json").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    found, errors = traces.read_directory(tmp_path)
    made = grouping.group(found, errors)
    assert reasons_of(made.gaps) == reasons_of(node_gaps(errors)) == {
        "n9": "trace-n9.json: it is cut off (half-written?)",
        "n11": "trace-n11.json: it is of 'n1', as trace-n1.json is",
        "n12": "trace-n12.json: Is a directory",
        "n13": "no route",
    }  # fmt: skip
    assert [group.kind for group in made.groups] == [*["no-data"] * 4, "stack"]
    assert made.groups[-1].nodes == ("n1", "n2", "n10")


def test_a_directory_without_traces_is_one_line(tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/stacks.json").touch()
    words = {"": "no trace-NODE.json of -o", "nowhere": "nowhere: No such file or directory"}
    words |= {"ours": "there is no trace-NODE.json: was it written by -o?"}
    for name, why in words.items():
        with pytest.raises(TraceError, match=re.escape(why)):
            list(traces.read_directory(tmp_path / name)[0])


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path, monkeypatch):
    write(tmp_path, "n1", "n2")
    monkeypatch.setattr(traces, "MAX_BYTES", 1 << 20)
    os.truncate(tmp_path / "trace-n2.json", 1 << 40)
    found, errors = traces.read_directory(tmp_path)
    assert [trace.node for trace in found] == ["n1"]
    assert reasons_of(node_gaps(errors)) == {"n2": "trace-n2.json: it is larger than 1 MiB"}


NAMES = (
    "gpu001", "gpu001.hall-2", "../../etc/passwd", "/etc/passwd", "..", "", "a/b", "a_b", "a b",
    "fe80::1%eth0", "@docker/x:2", "-rf", "x" * 253, "x" * 252, "knoten-ä", "a\n", "\x1b[1m",
)  # fmt: skip


def test_a_nodes_name_is_never_a_path_and_no_two_share_a_file(tmp_path):
    files = [file_name(name) for name in NAMES]
    assert len(set(files)) == len(NAMES)
    assert file_name("gpu001") == "trace-gpu001.json"
    assert all(len(file) < 255 and file.isascii() and file.isprintable() for file in files)
    assert not any("/" in file for file in files)
    traces.prepare(str(tmp_path / "new"))
    for name in filter(None, NAMES):
        list(traces.keep_traces(tmp_path / "new", [empty_trace(name, "away", "")]))


def test_only_a_directory_of_ours_is_written_to_again(tmp_path):
    new = traces.prepare(str(tmp_path / "new"))
    for name in ("trace-gpu1.json", "stacks.json", "stacks.html"):
        (new / name).touch()
    traces.prepare(str(new))
    (new / "thesis.tex").touch()
    with pytest.raises(Refused, match=r"holds other files \(thesis.tex\)"):
        traces.prepare(str(new))
    with pytest.raises(Refused, match="No such file or directory"):
        traces.prepare(str(tmp_path / "no" / "such"))


def test_texts_of_py_spy_are_read_one_node_each_and_a_bad_text_is_named(tmp_path):
    text = 'Process 7: python train.py\n\nThread 7 (idle): "MainThread"\n    wait (a.py:3)\n'
    for name in ("gpu1.txt", "gpu2.out"):
        (tmp_path / name).write_text(text)
    (tmp_path / "gpu3.txt").write_text("Segmentation fault\n")
    (tmp_path / "empty").mkdir()
    found, errors = traces.read_directory(tmp_path)
    nodes = [(trace.node, trace.frames) for trace in found]
    assert nodes == [(name, (("wait", "a.py", 3),)) for name in ("gpu1", "gpu2")]
    assert list(errors) == ["gpu3"]
    assert len(list(traces.read_directory(tmp_path / "gpu1.txt")[0])) == 1
    for name, words in (
        ("gpu3.txt", "gpu3"),
        ("nosuch", "No such file"),
        ("nosuch.txt", "No such file"),
        ("empty", "no text of py-spy dump"),
    ):
        with pytest.raises(TraceError, match=words):
            list(traces.read_directory(tmp_path / name)[0])


DUMPS = {path.stem: path.read_text() for path in Path(__file__).with_name("dumps").iterdir()}
FIRST, SECOND = (f"Process {part}" for part in DUMPS["several"].split("Process ")[1:])


def labelled(label: str, text: str) -> list[str]:
    """As pdsh or srun prints it."""
    return [f"{label}: {line}\n" for line in text.splitlines()]


# Lines of different nodes are mixed.
_MIXED = zip(labelled("gpu001", FIRST), labelled("gpu002", SECOND), strict=False)
_FAILED = labelled("gpu003", "Error: Failed to get process executable name. Check that\n\nCaused")
_SSH = "pdsh@login1: gpu003: ssh exited with exit code 1\n"
_SSH += "pdsh@login1: gpu004: mcmd: connect failed: No route to host\n"
DUMPS["pdsh"] = "".join([*(line for pair in _MIXED for line in pair), *_FAILED, _SSH])
_TASKS = {"2": FIRST.replace("9339", "9341"), "0": FIRST, "1": SECOND}
DUMPS["srun"] = "".join(line for task in _TASKS.items() for line in labelled(*task))
DUMPS["srun"] += "srun: error: gpu003: task 5: Exited with exit code 1\n"
MAIN = ["<module>", "main", "all_reduce"]


def read(name: str, text: str = "") -> list[traces.Trace]:
    """The traces of a text; what is written can be read."""
    dumped = parse_dump(text or DUMPS[name], name)
    assert dumped == [traces.parse(traces.to_json(trace), name) for trace in dumped]
    return dumped


def functions(trace: traces.Trace, stack: int) -> list[str]:
    return [trace.frames[frame][0] for frame in trace.stacks[stack]]


@pytest.mark.parametrize(("name", "nodes", "pids", "ranks"), [
    ("pdsh", ["gpu001", "gpu002", "gpu003", "gpu004"], [9339, 9340], [None, None]),
    ("srun", ["task2", "task0", "task1"], [9341, 9339, 9340], [2, 0, 1]),
    ("several", ["several"], [9339, 9340], [None, None]),
    ("locals", ["locals"], [9339], [None]),
    ("native", ["native"], [9339], [None]),
])  # fmt: skip
def test_every_process_is_there_with_its_node_and_path(name, nodes, pids, ranks):
    dumped = read(name)
    rows = [(trace, process) for trace in dumped for process in trace.processes]
    assert [trace.node for trace in dumped] == nodes
    assert [(row.pid, row.rank) for _, row in rows] == list(zip(pids, ranks, strict=True))
    for owner, row in rows:
        (sample,) = row.samples
        assert functions(owner, sample.main) == MAIN
        names = [name for name, _ in sample.threads]
        assert names == ["Thread-1 (loader)", 'evil "x": (idle)', ""]
        assert {functions(owner, stack)[-1] for _, stack in sample.threads} == {"worker"}


def test_a_node_where_py_spy_failed_says_why():
    silent = {trace.node: trace.error for trace in read("pdsh") if trace.error}
    assert silent["gpu003"].startswith("Failed to get process executable name")
    assert silent["gpu004"] == "mcmd: connect failed: No route to host"
    dumped = parse_dump("gpu1: Error: Permission Denied\ngpu2: Error: No such\n", "all")
    errors = [(trace.node, trace.error) for trace in dumped]
    assert errors == [("gpu1", "Permission Denied"), ("gpu2", "No such")]
    (alone,) = parse_dump("Error: Permission Denied: try sudo\n", "gpu9")
    assert alone.error.startswith("Permission")


def test_native_frames_stand_beside_those_of_python_and_addresses_nowhere():
    (trace,) = read("native")
    (process,) = trace.processes
    assert functions(trace, process.native) == [*MAIN, "time_sleep", "clock_nanosleep"]
    assert not [frame for frame in trace.frames if frame[0].startswith("0x")]
    assert read("locals")[0].processes[0].native is None


def test_a_command_of_several_lines_is_no_frame_and_children_are_processes():
    (trace,) = read("subprocesses")
    assert len(trace.processes) == 2
    assert trace.frames == (("<module>", "<string>", 3), ("<module>", "<string>", 1))


def test_a_task_with_several_processes_tells_no_rank_and_one_without_a_thread_no_stack():
    text = "0: Process 5: python a\n0: Process 6: python b\n1: Process 7: python c\n"
    rows = [row for trace in parse_dump(text, "x") for row in trace.processes]
    assert [row.rank for row in rows] == [None, None, None]
    (sample,) = rows[0].samples
    assert (sample.main, sample.error) == (None, "py-spy printed no stack of it")


@pytest.mark.parametrize(("text", "why"), [
    ("", "it is empty"),
    ("\n \n", "it is empty"),
    ('[{"pid": 3}]', "it begins with '[{\"pid\": 3}]'"),
    ("\x1b[2J\x9bx\n", "it begins with '\\\\x1b[2J\\\\x9bx'"),
    ("Process 99999999999: python\n", "it begins with 'Process 99999999999: python'"),
    ("Process: x\nThread 3 (idle)\n    f (x.py:3)\n", "it begins with 'Process: x'"),
])  # fmt: skip
def test_what_py_spy_did_not_print_is_refused_in_one_line(text, why):
    with pytest.raises(TraceError) as error:
        parse_dump(text, "a.txt")
    assert str(error.value) == f"a.txt: not what py-spy dump prints: {why}"


def test_hostile_lines_are_names_and_nothing_else():
    text = (
        "\x1b[1;33mProcess 7\x1b[0m: \x1b]0;x\x07\n"  # a title, which is no colour
        'Process 7: python\nThread 7 (idle): "x" (idle): "y"\n'
        "    " + "f" * 100_000 + " (a (b) c.py:999999999)\n"
        "    \x1b[2Jg (</script>:1)\n    h (x.py:99999999999999999999)\n     i (x.py:1)\n"
        "    j" + " (" * 100_000 + "\n"  # would take minutes if it were tried in all ways
        "Thread 0x7F00 (active+gil)\n    worker (x.py)\n"
    )
    (dumped,) = read("gpu1", text)
    names = {frame[0][:9] for frame in dumped.frames}
    assert names == {"h", "\x1b[2Jg", "f" * 9, "worker"}
    assert [row.pid for row in dumped.processes] == [7, 7]
