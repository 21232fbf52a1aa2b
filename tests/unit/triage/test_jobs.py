"""What runs where: the processes of all nodes as jobs, and the table of them."""

import pytest

from nodeready.agent.stacks import program as stacks
from nodeready.agent.stacks.ranks import LAUNCHER, claim_note
from nodeready.core.exit_codes import Refused
from nodeready.core.outcome import NO_PYTHON, NodeGap
from nodeready.reports.registry import Options, find_format
from nodeready.runs.jobs import Jobs, jobs_code, running_jobs
from tests.builders.traces import document as traced
from tests.builders.traces import process, trace
from tests.cases import read_data
from tests.fake import Does
from tests.unit.commands import AWAY, program

MINUTE = {"uptime_s": 1060.0, "started": "2026-01-02T03:04:05Z"}


def found(number: int | None, **more: object) -> dict[str, object]:
    """A process as it is found without its stack."""
    return process(number, **{"world_size": 4, "start_s": 1000.0, **more})


def document() -> Jobs:
    traces = [
        trace("gpu2", found(2), found(3, job="88"), found(None, job="", user="eve"), **MINUTE),
        trace("gpu10", found(7, user="eve", note=claim_note("88", False)), **MINUTE),
        trace(
            "gpu1",
            found(1, start_s=940.0, command="python \x1b[2Jtrain.py --rank 1"),
            found(None, job="gpu1:29500", world_size=None, note=LAUNCHER, command="torchrun"),
            **MINUTE,
        ),
        trace("gpu3", found(0, job="9", user="bob", world_size=1)),
    ]
    gaps = tuple(NodeGap(name, NO_PYTHON, "no Python 3.9 or newer") for name in ("gpu4", "gpu5"))
    nodes = "gpu1", "gpu2", "gpu3", "gpu10"
    moments = "2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z"
    return Jobs(*moments, nodes, running_jobs(traces), gaps)


TABLE = read_data(__file__, "jobs.txt")


def test_a_job_is_a_line_with_its_user_ranks_and_nodes():
    assert "".join(find_format("jobs", "table").render(document())) == TABLE
    verbose = "".join(find_format("jobs", "table").render(document(), Options(verbose=1)))
    # The command of the lowest rank, and nothing that a terminal obeys.
    assert "    ranks 1-3: python \\x1b[2Jtrain.py --rank 1\n" in verbose


def test_nodes_without_a_rank_are_no_finding():
    idle = Jobs("2026-01-02T03:04:05Z", "2026-01-02T03:04:06Z", ("gpu1", "gpu2"), (), {})
    assert "".join(find_format("jobs", "table").render(idle)) == "no ranks on gpu[1-2]\n"
    assert (jobs_code(idle), jobs_code(document())) == (0, 3)


NO_CORE = '{"places": ["/c/*"], "files": [], "unlisted_count": 0, "notes": []}'


def node(number: int, job: str) -> Does:
    """A node with a rank of this job, which it gives to the jobs' look and to whoever names it."""
    rank = traced("itself", {**found(number), "job": job})

    def answer(nonce: str, asked: str) -> str:
        wanted = asked.partition("'job': '")[2].partition("'")[0]
        packed = stacks.pack(rank if wanted in ("", job) else traced("itself"))
        return f"{nonce} {packed}\n{nonce} listing {NO_CORE}\n"

    return lambda request: program(lambda nonce: answer(nonce, request.payload or ""))(request)


@pytest.mark.parametrize("words", [("stacks",), ("stacks", "--check"), ("incident", "-o", "kept")])
def test_a_job_that_does_not_run_is_answered_with_those_that_do(words, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = ["4711", "4711", *map(str, range(8100, 8106))]
    nodes = {f"n{number}": node(number, job) for number, job in enumerate(jobs)}
    with pytest.raises(Refused) as refused:
        run(nodes, *words, "--job", "99")
    first, *lines = str(refused.value).splitlines()
    assert first.startswith("no ranks ")
    assert lines[0] == "running: job 4711 of ada: 2 of 4 ranks on n[0-1]"
    assert len(lines) == 7
    assert lines[-2] == "running: 2 more jobs: nodeready jobs"
    assert "nodeready postmortem" in lines[-1]


def test_a_node_that_is_away_does_not_hide_the_jobs(run):
    done = run({"n0": node(0, "4711"), "n1": AWAY}, "jobs")
    assert done.code == 4
    assert "4711  ada   1 of 4" in done.out
    done = run({"n0": node(0, "4711"), "n1": AWAY}, "stacks", "--job", "99")
    assert (done.code, "running: job 4711 of ada: 1 of 4 ranks on n0" in done.err) == (4, True)
