"""Raw traces are taken when they are whole and sensible; anything else is one line."""

from __future__ import annotations

import json
import os

import jsonschema
import pytest

from nodeready.triage.stacks import group as grouping
from nodeready.triage.stacks import trace as traces
from nodeready.triage.stacks.trace import TraceError
from tests.builders.traces import LOAD, REDUCE, process, trace
from tests.paths import schema

SCHEMA = schema("trace")
VALID = jsonschema.Draft202012Validator(SCHEMA)


def good():
    """A trace with all that one can have."""
    threads = {"Thread-1 (loader)": LOAD}
    rows = [
        process(0, REDUCE, LOAD, threads_at=threads, native_at=REDUCE, kernel_stack=["futex"]),
        process(None, None, start_s=7),
    ]
    worker = {
        "pid": 77, "parent": 4, "kind": "loader worker", "command": "python", "state": "S",
        "wait_channel": "do_wait", "cpu_s": [0.5, 0.5], "waits_on": "wait for child 78 (gcc)",
        "main": 0, "error": "",
    }  # fmt: skip
    rows[0] |= {"below": [worker, {**worker, "main": None, "error": "not Python"}]}
    rows[0] |= {
        "switches": [7, 2**40],
        "calls": [7, 2**40],
        "main_cpu_s": [0.5, 1],
        "waits_on": "futex",
    }
    rows[0] |= {"locals": ["step: number = 7"], "witnesses": {"logs": {"absent": "no log"}}}
    return trace("gpu003", *rows, instead=["python3 x.py (pid 7, user bob)"])


def set_at(*path, to):
    def spoil(doc):
        for key in path[:-1]:
            doc = doc[key]
        if to is DROP:
            del doc[path[-1]]
        else:
            doc[path[-1]] = to

    return spoil


DROP = object()
P = "processes"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (set_at("schema", to="nodeready.trace/2"), "only nodeready.trace/1 can be read"),
        (set_at("schema", to=1), "no trace of nodeready"),
        (set_at("schema", to=DROP), "no trace of nodeready"),
        (set_at("node", to=""), "node cannot be ''"),
        (set_at("node", to="n" * 300), "node cannot be 'nnn"),
        (set_at("node", to=["a"]), "node cannot be a list"),
        (set_at("error", to=DROP), "error is missing"),
        (set_at("interval_s", to=float("nan")), "NaN is no number"),
        (set_at("interval_s", to=float("inf")), "Infinity is no number"),
        (set_at("instead", to=[1]), "instead holds what is no text"),
        (set_at("instead", to=["x" * 5000]), "instead has a text that is too long"),
        (set_at("frames", 0, to=["x" * 5000, "y", 1]), "frames has a text that is too long"),
        (set_at(P, 0, "job", to="x" * 5000), "processes[0] has a text that is too long"),
        (set_at(P, 0, "samples", 0, "gil", to="x" * 5000), "has a text that is too long"),
        (set_at("frames", to=None), "frames cannot be None"),
        (set_at("frames", 0, to=["f", "x.py"]), "frames holds what is no [function"),
        (set_at("frames", 0, to=["f", "x.py", 1.5]), "frames holds what is no [function"),
        (set_at("frames", 0, to=["f", None, 1]), "frames holds what is no [function"),
        (set_at("frames", 0, to="fxy"), "frames holds what is no [function"),
        (set_at("frames", 0, 2, to=-1), "a line that no file has"),
        (set_at("frames", 0, 2, to=2**40), "a line that no file has"),
        (set_at("stacks", 0, to="ab"), "stacks[0] is 'ab', not a list"),
        (set_at("stacks", 0, to=[999]), "stacks[0] is an index outside"),
        (set_at("stacks", 0, to=[-1]), "stacks[0] is an index outside"),
        (set_at("stacks", 0, to=[True]), "stacks[0] is an index outside"),
        (set_at(P, 0, to=7), "processes[0] is 7, not an object"),
        (set_at(P, 1, "pid", to="7"), "processes[1].pid cannot be '7'"),
        (set_at(P, 1, "pid", to=DROP), "processes[1].pid is missing"),
        (set_at(P, 0, "pid", to=-7), "processes[0] has a number below 0"),
        (set_at(P, 0, "rank", to=True), "processes[0].rank cannot be True"),
        (set_at(P, 0, "rank", to=2**70), "a number is too large"),
        (set_at(P, 0, "world_size", to=1.5), "processes[0].world_size cannot be"),
        (set_at(P, 0, "cpu_s", 0, to=float("nan")), "NaN is no number"),
        (set_at(P, 0, "cpu_s", 0, to="1"), "a time of processes[0] cannot be '1'"),
        (set_at(P, 0, "start_s", to=1e300), "a time of processes[0] cannot be 1e+300"),
        (set_at(P, 0, "kernel_stack", to=[{}]), "processes[0].kernel_stack holds"),
        (set_at(P, 0, "switches", to=[-1]), "processes[0].switches cannot be"),
        (set_at(P, 0, "switches", to=[1.5]), "processes[0].switches cannot be"),
        (set_at(P, 0, "calls", to=[7, None]), "processes[0].calls cannot be"),
        (set_at(P, 0, "switches", to=None), "processes[0].switches cannot be None"),
        (set_at(P, 0, "main_cpu_s", to=["1"]), "a time of processes[0] cannot be '1'"),
        (set_at(P, 0, "main_cpu_s", to=[-1]), "a time of processes[0] cannot be -1"),
        (set_at(P, 0, "waits_on", to=7), "processes[0].waits_on cannot be 7"),
        (set_at(P, 0, "waits_on", to="x" * 5000), "has a text that is too long"),
        (set_at(P, 0, "locals", to=[7]), "processes[0].locals holds what is no text"),
        (set_at(P, 0, "locals", to=["x"] * 201), "processes[0].locals cannot be 201, only 200"),
        (set_at(P, 0, "witnesses", to=[]), "processes[0].witnesses cannot be a list"),
        (set_at(P, 0, "witnesses", "logs", to=7), "processes[0].witnesses['logs'] cannot be 7"),
        (set_at("witnesses", to={"gpus": []}), "witnesses['gpus'] cannot be a list"),
        (set_at(P, 0, "below", to=[{}] * 65), "processes[0].below cannot be 65, only 64"),
        (set_at(P, 0, "below", 0, to=None), "processes[0].below[0] is None, not an object"),
        (set_at(P, 0, "below", 0, "pid", to=-1), "processes[0].below[0].pid cannot be -1"),
        (set_at(P, 0, "below", 0, "parent", to=True), "below[0].parent cannot be True"),
        (set_at(P, 0, "below", 0, "kind", to=DROP), "processes[0].below[0].kind is missing"),
        (set_at(P, 0, "below", 0, "state", to="x" * 5000), "has a text that is too long"),
        (set_at(P, 0, "below", 0, "cpu_s", to=[None]), "a time of processes[0].below[0]"),
        (set_at(P, 0, "below", 0, "main", to=99), "a sample's stack is an index outside"),
        (set_at(P, 0, "below", 1, "main", to=1.5), "below[1].main cannot be 1.5"),
        (set_at(P, 0, "native", to=99), "a sample's stack is an index outside"),
        (set_at(P, 0, "samples", 0, to=None), "processes[0].samples[0] is None"),
        (set_at(P, 1, "samples", 0, to=3), "processes[1].samples[0] is 3"),
        (set_at(P, 0, "samples", 1, "main", to=99), "a sample's stack is an index outside"),
        (set_at(P, 0, "samples", 1, "main", to=1.0), "a sample's stack is an index outside"),
        (set_at(P, 0, "samples", 1, "gil", to=None), "samples[1].gil cannot be None"),
        (set_at(P, 0, "samples", 0, "threads", to=None), "samples[0].threads cannot be None"),
        (set_at(P, 0, "samples", 0, "threads", to=["ab"]), "a sample's stack is an index"),
        (set_at(P, 0, "samples", 0, "threads", to=[["a"]]), "holds what is no [name, stack]"),
        (set_at(P, 0, "samples", 0, "threads", to=[["a", 0, 0]]), "no [name, stack]"),
        (set_at(P, 0, "samples", 0, "threads", to=[[1, 0]]), "holds what is no [name, stack]"),
        (set_at(P, 0, "samples", 0, "threads", to=[["a", 99]]), "is an index outside"),
    ],
)
def test_what_makes_no_sense_is_one_line(spoil, why):
    doc = json.loads(json.dumps(good()))
    spoil(doc)
    with pytest.raises(TraceError) as caught:
        traces.parse(json.dumps(doc), "trace-gpu003.json")
    message = str(caught.value)
    assert message.startswith("trace-gpu003.json: ")
    assert why in message
    assert message.isprintable()
    assert len(message) < 200
    assert not VALID.is_valid(doc) or "index outside" in why or "NaN" in why or "too long" in why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        (" \n", "it is empty"),
        ("[]", "no trace of nodeready"),
        ("null", "no trace of nodeready"),
        ("[" * 200_000, "no trace of nodeready"),
        ('{"schema": "other/1"}', "no trace of nodeready"),
        ("hello", "it is no JSON"),
        (b"\x1f\x8b\x08\x00", "no trace of nodeready: no UTF-8"),
        ('{"schema": "nodeready.trace/1", "node": \xff}', "it is no JSON"),
        (
            json.dumps({"schema": "nodeready.trace/1", "pid": 0})[:-2] + "1" * 5000 + "}",
            "a number is too large",
        ),
    ],
)
def test_what_is_no_trace_is_one_line(text, why):
    with pytest.raises(TraceError, match=why):
        traces.parse(text, "x")


def test_wherever_a_file_is_cut_off_it_is_said():
    text = json.dumps(good())
    for end in range(1, len(text), 7):
        with pytest.raises(TraceError, match=r"cut off|no JSON") as caught:
            traces.parse(text[:end], "x")
    assert "cut off (half-written?)" in str(caught.value)


def test_a_sample_that_says_the_same_is_checked_too():
    """1.0, True and None equal what is right, or nothing."""
    for bad in (None, {**good()[P][1]["samples"][0]}):
        doc = json.loads(json.dumps(good()))
        samples = doc[P][0]["samples"]
        samples[:] = [samples[0], json.loads(json.dumps(samples[0])), bad]
        samples[1]["main"] = float(samples[0]["main"])
        if bad is None:
            with pytest.raises(TraceError):
                traces.parse(json.dumps(doc), "x")
        else:
            made = grouping.group([traces.parse(json.dumps(doc), "x")], {})
            assert made.groups[-1].frames


def test_more_fields_than_are_known_do_no_harm():
    doc = good()
    doc["later"] = doc[P][0]["later"] = 1
    assert traces.read(doc, "x") is doc


def test_the_schema_takes_what_is_read_and_no_more():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    VALID.validate(good())
    for spoil in (
        set_at("more", to=1),
        set_at("started", to="yesterday"),
        set_at(P, 0, "more", to=1),
        set_at(P, 0, "samples", 0, "more", to=1),
    ):
        doc = json.loads(json.dumps(good()))
        spoil(doc)
        assert not VALID.is_valid(doc)


def write(directory, *names):
    for name in names:
        text = json.dumps(trace(name, process(0, REDUCE)))
        (directory / f"trace-{name}.json").write_text(text)


def test_a_directory_is_read_in_natural_order_and_a_broken_file_costs_itself(tmp_path):
    write(tmp_path, "n10", "n9", "n2", "n1")
    whole = (tmp_path / "trace-n9.json").read_text()
    (tmp_path / "trace-n9.json").write_text(whole[:300])
    (tmp_path / "trace-n11.json").write_text(whole.replace('"n9"', '"n1"'))
    (tmp_path / "trace-n12.json").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    found, errors = traces.load(tmp_path)
    assert [one["node"] for one in found] == ["n1", "n2", "n10"]
    assert errors == {
        "n9": "trace-n9.json: it is cut off (half-written?)",
        "n11": "trace-n11.json: it is of 'n1', as trace-n1.json is",
        "n12": "trace-n12.json: Is a directory",
    }


def test_errors_of_files_reach_the_groups(tmp_path):
    write(tmp_path, "n1", "n2")
    (tmp_path / "trace-n2.json").write_text("{")
    made = grouping.group(*traces.load(tmp_path))
    assert [(one.kind, one.nodes) for one in made.groups] == [
        ("no-data", ("n2",)),
        ("stack", ("n1",)),
    ]


def test_a_directory_without_traces_is_one_line(tmp_path):
    with pytest.raises(TraceError, match=r"there is no trace-NODE\.json: was it written by -o\?"):
        traces.load(tmp_path)
    with pytest.raises(TraceError, match="nowhere: No such file or directory"):
        traces.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match="file: Not a directory"):
        traces.load(tmp_path / "file")


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path, monkeypatch):
    write(tmp_path, "n1", "n2")
    monkeypatch.setattr(traces, "MAX_BYTES", 1 << 20)
    os.truncate(tmp_path / "trace-n2.json", 1 << 40)
    found, errors = traces.load(tmp_path)
    assert [one["node"] for one in found] == ["n1"]
    assert errors == {"n2": "trace-n2.json: it is larger than 1 MiB"}
