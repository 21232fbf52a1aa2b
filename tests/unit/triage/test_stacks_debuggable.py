"""Whether a running job can be debugged: each item, from what a process has."""

from __future__ import annotations

from typing import Any

import pytest

from nodeready.triage.stacks import debuggable
from nodeready.triage.stacks.debuggable import Debuggable, Finding, code, judge
from tests.builders.traces import LOAD, REDUCE, process, trace

GOOD: dict[str, Any] = {
    "torch": "2.15.0+cu132",
    "nccl": "2.30.7",
    "cuda": True,
    "core_bytes": -1,
    "core_place": "/var/crash/core.%p",
    "core_wrong": "",
    "dump_place": "/home/ada/.cache/torch/comm_lib_trace_rank_",
    "dump_wrong": "",
    "variables": [
        ["PYTHONFAULTHANDLER", "1"],
        ["CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "1"],
        ["NCCL_DEBUG", "WARN"],
    ],
}
LOG = {"absent": "", "path": "/home/ada/job.log"}


def rank(
    number: int | None = 0, *, log: Any = None, main: str | None = REDUCE, **more: Any
) -> Any:
    """A rank with these settings; ``variables`` are added to the good ones."""
    variables = [*GOOD["variables"], *map(list, more.pop("variables", {}).items())]
    settings = {**GOOD, "variables": variables, **more}
    witnesses = {"logs": LOG if log is None else log, "settings": settings}
    return process(number, main, witnesses=witnesses, error="ptrace is not permitted")


def judged(*ranks: Any) -> Debuggable:
    return judge([trace("gpu1", *ranks)], {})


def of(item: str, found: Debuggable) -> Finding:
    (one,) = [one for one in found.findings if one.item == item]
    return one


def test_a_job_that_has_everything():
    found = judged(rank(0), rank(1))
    assert {one.result for one in found.findings} == {"ok"}
    assert [one.item for one in found.findings] == list(debuggable.ITEMS)
    assert {one.ranks for one in found.findings} == {(0, 1)}
    assert (found.job, code(found)) == ("88", 0)


@pytest.mark.parametrize(
    ("item", "result", "words", "how"),
    [
        ("stack", "fail", "ptrace is not permitted", {"main": None}),
        ("log", "fail", "a terminal", {"log": {"absent": "a terminal", "path": ""}}),
        ("log", "fail", "in no file", {"log": {}}),
        # Torch 2.7 has the recorder off by default; 2.8 has another name for its variable.
        ("recorder", "fail", "TORCH_NCCL_TRACE_BUFFER_SIZE is not set", {"torch": "2.7.1"}),
        ("recorder", "fail", "TORCH_FR_BUFFER_SIZE is not set", {"torch": "2.8.0"}),
        (
            "recorder", "fail", "dumps nothing",
            {"torch": "2.6.0", "variables": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}},
        ),
        (
            "recorder", "ok", "on",
            {
                "torch": "2.6.0",
                "variables": {
                    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
                    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                },
            },
        ),
        ("recorder", "warn", "has none", {"torch": "1.13.1"}),
        ("recorder", "fail", "BUFFER_SIZE=0", {"variables": {"TORCH_FR_BUFFER_SIZE": "0"}}),
        ("recorder", "fail", "off: ", {"variables": {"TORCH_NCCL_TRACE_BUFFER_SIZE": " x"}}),
        ("recorder", "fail", "dumps nothing", {"variables": {"TORCH_NCCL_DUMP_ON_TIMEOUT": "no"}}),
        ("recorder", "fail", "is not set", {"torch": "mine"}),
        ("recorder", "ok", "no PyTorch", {"torch": ""}),
        ("recorder", "ok", "no NCCL", {"nccl": None}),
        ("dump", "fail", "no directory /x", {"dump_wrong": "there is no directory /x"}),
        ("dump", "unknown", "rank is not known", {"dump_place": ""}),
        ("ras", "warn", "crashed jobs", {"nccl": "2.29.1"}),
        ("ras", "warn", "crashed jobs", {"nccl": "2.27.3"}),
        ("ras", "warn", "no RAS port", {"nccl": "2.21.5"}),
        ("ras", "warn", "NCCL_RAS_ENABLE=0", {"variables": {"NCCL_RAS_ENABLE": "0"}}),
        ("ras", "unknown", "version", {"nccl": ""}),
        ("ras", "ok", "no NCCL", {"nccl": None}),
        ("core", "fail", "limit of its cores is 0", {"core_bytes": 0}),
        ("core", "ok", "apport", {"core_bytes": 0, "core_place": "|/usr/share/apport/apport %p"}),
        (
            "core", "fail", "limit of its cores is 0",
            {"core_bytes": 0, "core_place": "|/lib/systemd/systemd-coredump %P"},
        ),
        ("core", "fail", "no directory", {"core_wrong": "there is no directory /var/crash"}),
        ("core", "warn", "4 MiB", {"core_bytes": 4 << 20}),
        ("core", "unknown", "could not be seen", {"core_bytes": None}),
        ("core", "ok", "in its working directory", {"core_place": "core"}),
        ("faulthandler", "warn", "PYTHONFAULTHANDLER", {"variables": {"PYTHONFAULTHANDLER": ""}}),
        ("gpu-core", "ok", "no CUDA", {"cuda": False, "variables": {}}),
        ("nccl-log", "ok", "no NCCL", {"nccl": None}),
    ],
)  # fmt: skip
def test_each_item(item, result, words, how):
    one = of(item, judged(rank(0, **how)))
    assert (one.result, words in one.found) == (result, True), one
    assert bool(one.fix) == (result != "ok") or one.result == "unknown"


def test_without_a_variable_the_option_is_a_warning():
    bare = rank(0)
    bare["witnesses"]["settings"]["variables"] = []
    found = judged(bare)
    assert {one.item: one.result for one in found.findings if one.result != "ok"} == {
        "faulthandler": "warn",
        "gpu-core": "warn",
        "nccl-log": "warn",
    }
    assert code(found) == 0


def test_ranks_that_differ_are_named_and_the_worst_is_first():
    found = judged(rank(0), rank(1, main=None), rank(2), rank(None, main=LOAD))
    stacks = [one for one in found.findings if one.item == "stack"]
    assert [(one.result, one.ranks, one.processes) for one in stacks] == [
        ("fail", (1,), 1),
        ("ok", (0, 2), 3),
    ]
    assert code(found) == 3


@pytest.mark.parametrize(
    "settings", [{}, {**GOOD, "variables": 3}, {**GOOD, "nccl": 9, "torch": []}]
)
def test_settings_that_make_no_sense_are_unknown(settings):
    one = process(0, REDUCE, witnesses={"logs": LOG, "settings": settings})
    found = judged(one)
    assert of("recorder", found).result == "unknown"
    assert code(found) == 3


def test_a_node_without_an_answer_is_no_good_news():
    found = judge([trace("gpu1", rank(0))], {"gpu2": "no answer"})
    assert code(found) == 3
    assert code(found, unreachable=True) == 4
    assert code(judge([], {})) == 2


def test_what_nobody_looked_at_is_unknown():
    found = judged(process(0, REDUCE))
    assert {one.item for one in found.findings if one.result == "unknown"} == (
        set(debuggable.ITEMS) - {"stack"}
    )
