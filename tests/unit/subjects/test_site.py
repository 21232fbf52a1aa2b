"""Checks of a site's own: what they print in a real shell, and how it is judged."""

import base64
import os
import re
import subprocess
from pathlib import Path

import pytest

from nodeready.core import shell
from nodeready.core.policy import Policy, SiteCheck, parse
from nodeready.core.probe_script import make_script
from nodeready.core.result import Result
from nodeready.subjects import snapshot
from nodeready.subjects.snapshot import judge
from tests.cases import cases, read, tomllib
from tests.paths import ROOT

NONCE = "0123456789abcdef"
PROBES = snapshot.probes(["site"])
DATA = "data/site.toml"


def make(
    checks: list[SiteCheck], sh: list[str], programs: Path | None = None
) -> dict[str, Result]:
    """The results of these checks, made on this machine, by their names.

    programs: directory of the only programs; None: the system's
    """
    policy = Policy(site_checks=tuple(checks))
    script = make_script(snapshot.sections(PROBES), policy, NONCE)
    text, stdin = shell.command(script, 60, "nodeready:test")
    if programs is not None:
        # The constant line starts `timeout`, and puts the system's programs first.
        text, stdin = script, ""
    env = {**os.environ, "LC_ALL": "C", **({"PATH": str(programs)} if programs else {})}
    done = subprocess.run(
        [*sh, "-c", text], input=stdin.encode(), stdout=subprocess.PIPE, check=True, env=env
    )
    observed = snapshot.read(done.stdout.decode(), PROBES, policy, NONCE)
    return {result.check.partition(".")[2]: result for result in judge(observed, policy)}


def make_rows(sh: list[str], programs: Path | None = None) -> dict[str, Result]:
    """The results of all rows, which are made at once as on a node."""
    rows = read(ROOT / "tests/unit/subjects" / DATA)
    checks = [parse({"id": f"c{n}", **row["check"]}) for n, row in enumerate(rows)]
    made = make(checks, sh, programs)
    assert list(made) == [check.name for check in checks]
    return {row["name"]: made[check.name] for row, check in zip(rows, checks, strict=True)}


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return make_rows(["sh"])


@pytest.mark.parametrize("case", cases(__file__, DATA))
def test_a_check_says_what_its_command_shows(case, results):
    result = results[case["name"]]
    assert (result.status, case["words"] in result.actual) == (case["status"], True), result
    assert bool(result.owner) == (result.status in ("fail", "warn"))


def test_a_finding_has_the_reason_the_fix_and_the_place(results):
    result = results["another line"]
    assert (result.expected, result.fix) == ("matches ^b (it must be b)", "repair it")
    assert results["no file"].source == "/nosuch/it's"


def test_the_examples_of_the_page_are_as_they_should_be():
    page = (ROOT / "docs/site-checks.md").read_text()
    blocks = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    checks = [parse(table) for block in blocks for table in tomllib.loads(block)["check"]]
    assert len(checks) == 4
    made = make(checks, ["sh"])
    # Whether a disk is full is not the page's.
    assert {result.status for name, result in made.items() if name != "scratch"} == {"ok"}
    assert made["scratch"].status in ("ok", "fail")


@pytest.mark.parametrize(
    "answer", ["", "0 r x\n", "0 o !!!!\n0 r 0\n", "0 o YQ\n0 r 0\n", "9 r 0\n", "no sh here\n"]
)
def test_an_answer_that_makes_no_sense_is_unknown(answer):
    policy = Policy(site_checks=(parse({"id": "a", "run": "echo", "equals": ""}),))
    text = f"\n@{NONCE} begin site\n{answer}\n@{NONCE} rc 0\n\n@{NONCE} end\n"
    packed = base64.b64encode(text.encode()).decode()
    answer = f"nodeready/1 {NONCE} plain\n{packed}\nnodeready/1 {NONCE} end\n"
    observed = snapshot.read(answer, PROBES, policy, NONCE)
    assert [result.status for result in judge(observed, policy)] == ["unknown"]


def test_two_hundred_checks_are_made():
    checks = [
        parse({"id": f"c{n}", "run": f"echo {n}", "equals": n, "timeout_s": 30})
        for n in range(200)
    ]
    assert {result.status for result in make(checks, ["sh"]).values()} == {"ok"}
