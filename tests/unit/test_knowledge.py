"""The tables of nodeready/knowledge: each row is held against its own examples."""

from __future__ import annotations

import pytest

from nodeready import knowledge
from nodeready.agent import log_variables, payload
from nodeready.agent.witnesses import kernel_log, nccl_errors
from nodeready.subjects.environment_rules import RankEnvironment, judge
from nodeready.subjects.environment_table import BAD_VALUES, EnvironmentFacts, HcaPort
from nodeready.subjects.gpus import xids
from nodeready.subjects.ssh_client import login_failures
from tests.paths import PACKAGE


def _nccl_error(line):
    error = nccl_errors.meaning(line)
    return error and error.key


def _login_failure(messages):
    return login_failures.cause_of(messages)[0]


def _xid(line):
    for _, code in kernel_log.xids([(0.0, line)]):
        if xids.action_of(code, line) == xids.lookup(code).action:
            return str(code)
    return None


def _driver_message(line):
    rule = xids.find_rule(line)
    return rule and rule.key


def _environment_value(example):
    """example: ``NAME=VALUE`` of variables, and of what is known about the node"""
    words = dict(word.split("=", 1) for word in example.split())
    variables = {name: value for name, value in words.items() if name.isupper()}
    facts = {name: value for name, value in words.items() if name.islower()}
    ports = (HcaPort("mlx5_0", 1, facts.pop("port", "down")),)
    nccl = facts.pop("nccl", "")
    findings = judge(
        [RankEnvironment("gpu1", variables)],
        {"gpu1": EnvironmentFacts(hca_ports=ports, **facts)},
        nccl=nccl,
    )
    said = [(f.variable, f.problem, f.source) for f in findings if f.rule == "value"]
    keys = [v.key for v in BAD_VALUES if (v.variable, v.problem, v.source) in said]
    return ", ".join(keys)


def _job_end(line):
    ends = zip(knowledge.read("job_ends"), log_variables.ENDS, strict=True)
    return next((key for key, end in ends if log_variables.ends_well(line, [end])), None)


#: table -> what finds the key of the row that explains a line.
ENGINES = {
    "nccl_errors": _nccl_error,
    "login_failures": _login_failure,
    "xids": _xid,
    "job_ends": _job_end,
    "driver_messages": _driver_message,
    "environment_values": _environment_value,
}
#: Fields that find a row; a row without them is known by its key, and needs no examples.
WORDS = {"needles", "pattern", "values", "nccl", "cuda"}
#: Tables without examples; hints.json and wrong_environments.json have their cases.
OTHERS = {"hints", "environment_rules"}
ROWS = [
    pytest.param(table, key, row, id=f"{table}-{key}")
    for table in ENGINES
    for key, row in knowledge.read(table).items()
]


def test_every_table_has_an_engine():
    assert {path.stem for path in (PACKAGE / "knowledge").glob("*.toml")} == {*ENGINES, *OTHERS}


@pytest.mark.parametrize(("table", "key", "row"), ROWS)
def test_a_row_explains_its_examples_alone(table, key, row):
    assert row["source"]
    for examples in sorted(knowledge.EXAMPLES):
        assert row.get(examples) or not WORDS.intersection(row), f"the row has no {examples}"
    assert {ENGINES[table](line) for line in row.get("matches", ())} <= {key}
    assert key not in {ENGINES[table](line) for line in row.get("not_matches", ())}


def test_a_node_gets_the_tables_of_its_program_without_examples():
    sources = payload.closure(["nodeready.agent.witnesses.nccl_errors"])
    carried = {}
    exec(sources[knowledge.COMPILED], carried)
    assert carried["TABLES"] == {"nccl_errors": knowledge.rows("nccl_errors")}
    assert "matches" not in sources[knowledge.COMPILED]
    (without,) = (payload.closure(["nodeready.core.text"])[knowledge.COMPILED],)
    assert without.endswith("TABLES = {}\n")
