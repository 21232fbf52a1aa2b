"""What the text of a packet filter says of the policy's ports.

data/ports/firewalld2.nft and the files of iptables-save are recorded on machines.
"""

import subprocess
from pathlib import Path

import pytest

from nodeready.core.base import Output
from nodeready.core.policy import Policy
from nodeready.core.result import Result
from nodeready.subjects.ports import checks, facts
from nodeready.subjects.ports.facts import Firewall
from tests.builders.job_env import ports
from tests.builders.judging import by_id
from tests.cases import cases

POLICY = Policy()
DATA = Path(__file__).parent / "data" / "ports"


@pytest.fixture
def awk() -> list[str]:
    """The command; tests/lab/test_units_busybox.py asks the same of busybox."""
    return ["awk"]


def printed(listing: str, tool: str, awk: list[str]) -> str:
    variables = [("mark", "@n"), ("first", 29500), ("last", 29510)]
    options = [word for name, value in variables for word in ("-v", f"{name}={value}")]
    text = f"@n list {tool}\n{listing}\n\n@n status 0\n"
    program = facts.firewall_script(POLICY).split(" '\n")[1].partition("'\n")[0]
    command = [*awk, *options, program]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=True)
    assert not done.stderr
    return done.stdout


def judged(observed: Firewall) -> Result:
    return by_id(checks, ports(firewall=observed))["ports.firewall"]


@pytest.mark.parametrize("case", cases(__file__, "data/ports/filters.json"))
def test_what_the_text_says(case, awk):
    tool = case.get("tool", "nft")
    if "file" in case:
        listing = (DATA / case["file"]).read_text()
    else:
        start = ["table inet t {", "\tchain c {"] if tool == "nft" else []
        listing = "\n".join([*start, *(f"\t{rule}" for rule in case["rules"])])
    observed = facts.parse_firewall(Output(printed(listing, tool, awk), 0), POLICY)
    assert (observed.verdict, observed.ports) == (case["verdict"], case.get("ports", ""))
    assert observed.manager == case.get("manager", "")
    assert observed.drop.startswith(case.get("drop", ""))
    result = judged(observed)
    assert result.status == case["status"]
    assert case.get("actual", "") in result.actual


@pytest.mark.parametrize("case", cases(__file__, "data/ports/unseen.json"))
def test_rules_that_cannot_be_listed(case):
    result = judged(facts.parse_firewall(Output(case["output"], case.get("rc", 0)), POLICY))
    assert (result.status, case["words"] in result.actual) == (case["status"], True), result


def test_thousands_of_rules_print_a_few_lines(awk):
    rule = f"tcp dport 29500 ip saddr 10.0.0.1 drop comment {'x' * 999}\n"
    lines = printed(f"table inet t {{\nchain c {{\n{rule * 250}", "nft", awk)
    observed = facts.parse_firewall(Output(lines, 0), POLICY)
    assert (len(observed.rules), observed.verdict) == (facts._MOST_RULES, "not known")
    assert len(lines) < 22 * 500


def test_a_program_that_fails_is_named_with_its_first_words(awk):
    failures = "Error: no\nmore\n@n status 1\n@n list iptables-save\nsh: not found\n@n status 127"
    lines = printed(f"\n{failures}\n@n list ip6tables-save", "nft", awk)
    assert lines == "failed=nft: Error: no\nmissing=iptables-save\n"
