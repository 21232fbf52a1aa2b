"""What is wrong with a job's environment, case by case: two ranks on each of two nodes."""

import dataclasses
from typing import Any

import pytest

from nodeready.subjects import environment_table as table
from nodeready.subjects.environment_rules import RankEnvironment, judge
from nodeready.subjects.environment_table import EnvironmentFacts, HcaPort, NodeInterface
from tests.cases import cases

USUAL = {"MASTER_ADDR": "gpu1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "8"}


def facts_of(number: int, case: dict[str, Any], address: str) -> EnvironmentFacts | None:
    name = f"gpu{number}"
    changes = case.get("facts", {}).get(name, {})
    if changes is None:
        return None
    changes = {
        key: tuple(table.NcclFile(path, tuple(map(tuple, rows))) for path, rows in value)
        if key == "nccl_conf"
        else value
        for key, value in changes.items()
    }
    for key, kind in (("interfaces", NodeInterface), ("hca_ports", HcaPort)):
        if key in changes:
            rows = (tuple(tuple(v) if isinstance(v, list) else v for v in r) for r in changes[key])
            changes[key] = tuple(kind(*row) for row in rows)
    answer = case.get("rendezvous", {}).get(name, ["10.0.0.1"])
    resolved, error = (answer, "") if isinstance(answer, list) else ((), answer)
    listener = case.get("listener", {"gpu1": table.JOB}).get(name, "")
    rendezvous = table.Rendezvous(
        address, "29500", tuple(resolved), error, listener, case.get("is_users", False)
    )
    facts = EnvironmentFacts(
        interfaces=(
            NodeInterface("lo", "unknown", ("127.0.0.1/8",)),
            NodeInterface("eth0", "up", (f"10.0.0.{number}/24",)),
            NodeInterface("eth1", "up", (f"10.1.0.{number}/24",)),
        ),
        hca_ports=(HcaPort("mlx5_0", 1, "active"), HcaPort("mlx5_1", 1, "active")),
        rendezvous=(rendezvous,),
        own_addresses=(f"10.0.0.{number}",),
        gpus=4,
        cpus=32,
        machine="x86_64",
    )
    return dataclasses.replace(facts, **changes)


@pytest.mark.parametrize("case", cases(__file__, "wrong_environments.json"))
def test_each_environment(case):
    per_node = case.get("per_node", 2)
    ranks, facts = [], {}
    for number in range(1, case.get("nodes", 2) + 1):
        for local in range(per_node):
            rank = (number - 1) * per_node + local
            own = case.get("ranks", {}).get(str(rank), {})
            variables = {**USUAL, **case.get("every", {}), **own}
            variables = {name: value for name, value in variables.items() if value is not None}
            numbers = (rank, local) if case.get("numbered", True) else (None, None)
            ranks.append(RankEnvironment(f"gpu{number}", variables, *numbers, cpus=32))
        node_facts = facts_of(number, case, ranks[-1].variables["MASTER_ADDR"])
        facts |= {f"gpu{number}": node_facts} if node_facts else {}
    findings = judge(ranks, facts, nccl=case.get("nccl", ""))
    rows = [
        f"{finding.weight} {finding.rule} {finding.variable} {','.join(finding.nodes)} "
        + ",".join(map(str, finding.ranks))
        for finding in findings
    ]
    assert sorted(rows) == sorted(case["findings"])
    assert case.get("words", "") in "\n".join(finding.text for finding in findings)
    assert all(finding.advice and finding.source for finding in findings)


def test_every_rule_has_a_case():
    rows = [row for case in cases(__file__, "wrong_environments.json")
            for row in case.values[0]["findings"]]  # fmt: skip
    assert {row.split()[1] for row in rows} >= {rule.name for rule in table.RULES}
