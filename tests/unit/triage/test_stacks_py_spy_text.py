"""What `py-spy dump` prints becomes traces: dumps/ holds what py-spy 0.4.3 printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodeready.triage.stacks import trace as traces
from nodeready.triage.stacks.archive import parse_dump

DUMPS = Path(__file__).parent / "dumps"
MAIN = ["<module>", "main", "all_reduce"]
OTHERS = ["Thread-1 (loader)", 'evil "x": (idle)', ""]


def read(name: str) -> list[dict]:
    found = parse_dump((DUMPS / f"{name}.txt").read_text(), name)
    return [traces.read(trace, name) for trace in found]


def names(trace: dict, stack: int) -> list[str]:
    return [trace["frames"][frame][0] for frame in trace["stacks"][stack]]


def paths(trace: dict) -> list[list[str]]:
    """The main thread's path of every process."""
    return [names(trace, process["samples"][0]["main"]) for process in trace["processes"]]


@pytest.mark.parametrize(
    ("name", "nodes", "pids", "ranks"),
    [
        ("pdsh", ["gpu001", "gpu002", "gpu003", "gpu004"], [9339, 9340], [None, None]),
        ("srun", ["task2", "task0", "task1"], [9341, 9339, 9340], [2, 0, 1]),
        ("several", ["several"], [9339, 9340], [None, None]),
        ("locals", ["locals"], [9339], [None]),
        ("native", ["native"], [9339], [None]),
    ],
)
def test_every_process_is_there_with_its_node_and_path(name, nodes, pids, ranks):
    found = read(name)
    processes = [process for trace in found for process in trace["processes"]]
    assert [trace["node"] for trace in found] == nodes
    assert [process["pid"] for process in processes] == pids
    assert [process["rank"] for process in processes] == ranks
    assert [path for trace in found for path in paths(trace)] == [MAIN] * len(pids)
    for trace in found:
        for process in trace["processes"]:
            threads = process["samples"][0]["threads"]
            assert [name for name, _ in threads] == OTHERS
            assert {names(trace, stack)[-1] for _, stack in threads} == {"worker"}


def test_a_node_where_py_spy_failed_says_why():
    silent = {trace["node"]: trace["error"] for trace in read("pdsh") if trace["error"]}
    assert silent["gpu003"].startswith("Failed to get process executable name")
    assert silent["gpu004"] == "mcmd: connect failed: No route to host"
    one, two = parse_dump("gpu1: Error: Permission Denied\ngpu2: Error: No such\n", "all")
    assert (one["node"], one["error"], two["error"]) == ("gpu1", "Permission Denied", "No such")
    assert parse_dump("Error: Permission Denied: try sudo\n", "gpu9")[0]["error"].startswith(
        "Perm"
    )


def test_native_frames_stand_beside_those_of_python_and_addresses_nowhere():
    (trace,) = read("native")
    (process,) = trace["processes"]
    assert names(trace, process["native"]) == [*MAIN, "time_sleep", "clock_nanosleep"]
    assert not [frame for frame in trace["frames"] if frame[0].startswith("0x")]
    assert read("locals")[0]["processes"][0]["native"] is None


def test_a_command_of_several_lines_is_no_frame_and_children_are_processes():
    (trace,) = read("subprocesses")
    assert paths(trace) == [["<module>"], ["<module>"]]
    assert trace["frames"] == [["<module>", "<string>", 3], ["<module>", "<string>", 1]]


def test_a_task_with_several_processes_tells_no_rank():
    text = "0: Process 5: python a\n0: Process 6: python b\n1: Process 7: python c\n"
    ranks = [p["rank"] for trace in parse_dump(text, "x") for p in trace["processes"]]
    assert ranks == [None, None, None]


def test_a_process_without_a_thread_says_so():
    (trace,) = parse_dump("Process 5: python a\nPython v3.10.4 (/usr/bin/python3)\n", "gpu1")
    (sample,) = trace["processes"][0]["samples"]
    assert (sample["main"], sample["error"]) == (None, "py-spy printed no stack of it")


@pytest.mark.parametrize("name", ["pdsh", "srun", "locals", "subprocesses"])
def test_a_text_that_ends_anywhere_is_a_trace_or_refused(name):
    text = (DUMPS / f"{name}.txt").read_text()
    for end in range(30, len(text), 7):
        for trace in parse_dump(text[:end], "gpu1"):
            traces.read(trace, "gpu1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("\n \n", "it is empty"),
        ('[{"pid": 3}]', "it begins with '[{\"pid\": 3}]'"),
        ("\x1b[2J\x9bx\n", "it begins with '\\\\x1b[2J\\\\x9bx'"),
        ("Process 99999999999: python\n", "it begins with 'Process 99999999999: python'"),
        ("Process: x\nThread 3 (idle)\n    f (x.py:3)\n", "it begins with 'Process: x'"),
    ],
)
def test_what_py_spy_did_not_print_is_refused_in_one_line(text, said):
    with pytest.raises(traces.TraceError) as error:
        parse_dump(text, "a.txt")
    assert str(error.value) == f"a.txt: not what py-spy dump prints: {said}"


def test_hostile_lines_are_names_and_nothing_else():
    text = (
        "\x1b[1;33mProcess 7\x1b[0m: \x1b]0;x\x07\n"  # a title, which is no colour
        "Process 7: python\n"
        'Thread 7 (idle): "x" (idle): "y"\n'
        "    " + "f" * 100_000 + " (a (b) c.py:999999999)\n"
        "    \x1b[2Jg (</script>:1)\n"
        "    h (x.py:99999999999999999999)\n"
        "     i (x.py:1)\n"
        "    j" + " (" * 100_000 + "\n"  # would take minutes if it were tried in all ways
        "Thread 0x7F00 (active+gil)\n"
        "    worker (x.py)\n"
    )
    (trace,) = [traces.read(one, "x") for one in parse_dump(text, "gpu1")]
    functions = {frame[0][:9] for frame in trace["frames"]}
    assert functions == {"h", "\x1b[2Jg", "f" * 9, "worker"}
    assert [process["pid"] for process in trace["processes"]] == [7, 7]
