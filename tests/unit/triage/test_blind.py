"""Jobs of strangers, after public threads: the answers were written before the first run.

Each file of blind/ is a draw: its ``jobs`` by name, each with its thread, the answer and its files
as lines, and ``first_run``: the names that were not right on the first run, each with its outcome.
``wrong`` has those that still are; a job that is mended leaves it, and none may come into it.
Draws before the last `LATEST` are left to the nightly tests: each takes as long as a unit's tests.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nodeready.runs.postmortem.collect import postmortem_of
from nodeready.runs.postmortem.directory import read_directory
from nodeready.runs.postmortem.document import FirstFailure

DRAWS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "blind").glob("*.json"))
}
LATEST = 8


def marks_of(draw: str) -> tuple[pytest.MarkDecorator, ...]:
    is_latest = int(draw.rpartition("-")[2]) > len(DRAWS) - LATEST
    return () if is_latest else (pytest.mark.nightly,)


def cause_of(job: dict[str, Any], directory: Path) -> FirstFailure:
    for name, lines in job["files"].items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes("\n".join(lines).encode())
    evidence = read_directory(directory, "")
    return postmortem_of(evidence, started="2026-03-01T12:00:00Z", source="DIR").cause


def outcome(job: dict[str, Any], cause: FirstFailure) -> str:
    """``right``, ``innocent`` (a rank is named that is known not to be first), ``death`` (of a job
    that is well), ``wrong``.
    """
    is_undecided = cause.kind == "unclear"
    if job.get("healthy"):
        is_quiet = is_undecided and not cause.ranks and "no failure" in cause.text
        return "right" if is_quiet else "death"
    if not is_undecided and set(cause.ranks) & set(job.get("never", ())):
        return "innocent"
    answers = job.get("ranks_any") or [job.get("ranks")]
    is_rank = None in answers or list(cause.ranks) in answers
    # As the first line shows it.
    is_text = re.search(job.get("text", ""), f"{cause.kind}: {cause.text}", re.I) is not None
    is_right = cause.kind in job["kinds"] and is_rank and is_text
    return "right" if is_right else "wrong"


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        pytest.param(draw, name, marks=marks_of(draw))
        for draw, data in DRAWS.items()
        for name in data["jobs"]
    ],
)
def test_a_job_of_a_stranger_is_judged_as_an_expert_does(draw, name, tmp_path):
    job = DRAWS[draw]["jobs"][name]
    cause = cause_of(job, tmp_path)
    assert outcome(job, cause) == DRAWS[draw]["wrong"].get(name, "right"), (job, cause)
