"""Whether a running job can be debugged: each item, from what a process has."""

from typing import Any

import pytest

from nodeready.core.outcome import LATE, UNREACHABLE, Gap
from nodeready.core.wire import plain
from nodeready.runs.stacks import debuggable
from nodeready.runs.stacks.debuggable import DebugFinding, Debuggable, debuggable_code, judge
from nodeready.subjects.environment_table import RankVariables
from tests.builders.traces import LOAD, REDUCE, process, trace
from tests.cases import cases

GOOD: dict[str, Any] = {
    **{"torch": "2.15.0+cu132", "nccl": "2.30.7", "cuda": True, "core_bytes": -1},
    **{"core_place": "/var/crash/core.%p", "core_wrong": "", "dump_wrong": ""},
    "dump_place": "/home/ada/.cache/torch/comm_lib_trace_rank_",
    "variables": [
        ["PYTHONFAULTHANDLER", "1"],
        ["CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "1"],
        ["NCCL_DEBUG", "WARN"],
    ],
}
LOG = {"absent": "", "path": "/home/ada/job.log"}


def rank(number: int | None = 0, *, log: Any = LOG, main: str | None = REDUCE, **more: Any) -> Any:
    """A rank with these settings; ``variables`` are added to the good ones."""
    variables = [*GOOD["variables"], *map(list, more.pop("variables", {}).items())]
    environment = plain(RankVariables("", (("MASTER_ADDR", "gpu1"), *more.pop("environment", ()))))
    settings = {**GOOD, "variables": variables, **more}
    witnesses = {"logs": log, "settings": settings, "variables": environment}
    return process(number, main, witnesses=witnesses, error="ptrace is not permitted")


def judged(*ranks: Any) -> Debuggable:
    return judge([trace("gpu1", *ranks)], {})


def of(item: str, report: Debuggable) -> DebugFinding:
    (finding,) = [finding for finding in report.findings if finding.item == item]
    return finding


def test_a_job_that_has_everything():
    report = judged(rank(0), rank(1))
    assert {finding.result for finding in report.findings} == {"ok"}
    assert [finding.item for finding in report.findings] == list(debuggable.ITEMS)
    assert {finding.ranks for finding in report.findings} == {(0, 1)}
    assert (report.job, debuggable_code(report)) == ("88", 0)
    # A node without an answer is no good news.
    silent, away = (
        judge([trace("gpu1", rank(0))], {"gpu2": Gap(kind, "no answer")})
        for kind in (LATE, UNREACHABLE)
    )
    codes = tuple(map(debuggable_code, (silent, away, judge([], {}))))
    assert codes == (3, 4, 2)


@pytest.mark.parametrize("case", cases(__file__, "debuggable.json"))
def test_each_item(case):
    finding = of(case["item"], judged(rank(0, **case["rank"])))
    assert finding.result == case["result"]
    assert case["words"] in finding.observation
    assert bool(finding.fix) == (finding.result != "ok") or finding.result == "unknown"


def test_ranks_that_differ_are_named_and_the_worst_is_first():
    report = judged(rank(0), rank(1, main=None), rank(2), rank(None, main=LOAD))
    stacks = [finding for finding in report.findings if finding.item == "stack"]
    rows = [(finding.result, finding.ranks, finding.processes) for finding in stacks]
    assert rows == [("fail", (1,), 1), ("ok", (0, 2), 3)]
    assert debuggable_code(report) == 3


def test_without_a_variable_the_option_is_a_warning():
    bare = rank(0)
    bare["witnesses"]["settings"]["variables"] = []
    report = judged(bare)
    warned = {finding.item for finding in report.findings if finding.result == "warn"}
    assert (warned, debuggable_code(report)) == ({"faulthandler", "gpu-core", "nccl-log"}, 0)


@pytest.mark.parametrize(
    "settings", [{}, {**GOOD, "variables": 3}, {**GOOD, "nccl": 9, "torch": []}]
)
def test_settings_that_make_no_sense_are_unknown(settings):
    report = judged(process(0, REDUCE, witnesses={"logs": LOG, "settings": settings}))
    assert of("recorder", report).result == "unknown"
    assert debuggable_code(report) == 3
    # As what nobody has looked at.
    findings = judged(process(0, REDUCE)).findings
    unknown = {finding.item for finding in findings if finding.result == "unknown"}
    assert unknown == set(debuggable.ITEMS) - {"stack"}


def test_a_variable_that_keeps_ranks_apart_fails_for_the_ranks_that_have_it():
    over_loopback = rank(1, environment=(("GLOO_SOCKET_IFNAME", "lo"),))
    report = judge([trace("gpu1", rank(0)), trace("gpu2", over_loopback)], {})
    rows = [finding for finding in report.findings if finding.item == "environment"]
    assert [(row.result, row.ranks, row.nodes) for row in rows] == [
        ("fail", (1,), ("gpu2",)),
        ("ok", (0,), ("gpu1",)),
    ]
    assert "GLOO_SOCKET_IFNAME=lo leads to the node itself" in rows[0].observation
    assert debuggable_code(report) == 3
