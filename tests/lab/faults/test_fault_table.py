"""Each fault of the lab shows in exactly the checks that it should, and in no other.

A healthy node has nothing to complain of: a check that fails there is a false alarm, and one that
stays ok on a broken node a false pass. The proofs of `ready` are judged beside the checks, and its
verdict on the node and on its healthy peers.

A row of data/faults.json has the faults that show alike:

checks   what they change: check -> its status
proofs   what they change of the proofs
policy   by which their node is judged; all checks of a healthy node are ok by it
untold   whose tool is silent: what only that tool can tell is unknown
faults   fault -> words of the result of the first check or proof
"""

import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nodeready.lab import Lab
from nodeready.lab.faults import FAULTS
from nodeready.lab.profiles import PROFILES
from nodeready.subjects.registry import SUBJECTS
from tests.command import POLICY, WAIVERS, Tool
from tests.conftest import _lab_name, started_lab

#: What only a GPU's tool can tell: it is unknown of a device that the tool does not show.
_UNTOLD = (
    "present", "model", "vbios", "recovery", "ecc_mode", "ecc_errors", "remapped_rows",
    "retired_pages", "pcie", "throttle", "temperature", "persistence", "nvlink",
)  # fmt: skip
UNTOLD = {"": (), "nvidia": (*_UNTOLD, "fabric_manager"), "amd": (*_UNTOLD, "xgmi_errors")}

_SYSTEM = platform.freedesktop_os_release()
HERE = {
    "{kernel}": os.uname().release,
    "{system}": f"{_SYSTEM['ID']} {_SYSTEM.get('VERSION_ID', '')}".strip(),
}

#: The proofs that start debuggers: only these groups of faults can touch them.
DEBUGGERS = "proof.attach,proof.attach_nonblocking,proof.attach_native,proof.gdb,proof.strace"
TOUCHED = ("session", "tools")
#: Faults that no session and no packet of a job meets: the checks alone stop the node.
BY_CHECK = ("nvidia", "amd", "rdma", "host", "ptrace", "cores", "iommu", "gate")

#: The maximum of faults in one `ready`, beside healthy partners.
BATCH, PARTNERS = 12, 3

#: One fault of each mechanism, in the lab's tier; `make test-all` tries all.
SOME = ["nvidia-smi-fails", "firewall", "limits-core-zero", "keys-refused", "gate-no-timer"]


#: What every node of the bench is deployed with.
DEPLOYED = {**POLICY, "gate": True, "job_user": "ml", "waivers": WAIVERS}


class Report(NamedTuple):
    """What `ready` reports of one node: check -> result; `go`: may it have a job?"""

    results: dict[str, dict[str, Any]]
    go: bool


class Bench:
    """Deployed nodes of one profile: some stay healthy, each of the others has its fault."""

    def __init__(self, home: Path, lab: Lab) -> None:
        home.mkdir()
        self.tool, self.lab = Tool(home), lab
        self.partners = [node.name for node in lab.nodes[:PARTNERS]]
        done = self.tool("deploy", self._inventory({}), "--yes", "-q")
        assert done.status == 0, done

    def _inventory(self, policies: Mapping[str, Mapping[str, Any]]) -> Path:
        hosts = [
            (name, {**data, **policies.get(name, {})}) for name, data in self.lab.inventory_data()
        ]
        path = self.tool.home / "inventory.py"
        path.write_text(f"lab = ({hosts!r}, {DEPLOYED!r})\n")
        return path

    def break_(self, faults: list[str]) -> dict[str, str]:
        """Restart the nodes with these faults, one for each; fault -> its node."""
        others = self.lab.nodes[PARTNERS:]
        wrong = {node.name: "" for node in others}
        broken = dict(zip(faults, wrong, strict=False))
        wrong |= {name: fault for fault, name in broken.items()}
        self.lab.restart(others, keep_disk=True, fault=wrong)
        return broken

    def ready(self, policies: Mapping[str, Mapping[str, Any]], *words: str) -> dict[str, Report]:
        """Node -> what `ready` reports of it for the job's user, each node by its policy."""
        done = self.tool("ready", self._inventory(policies), "--format", "json", *words)
        go = done.document["go"]
        return {name: Report(results, name in go) for name, results in done.results.items()}


class Row(NamedTuple):
    """What a fault changes: check or proof -> status; the words of the first one."""

    wanted: dict[str, str]
    words: str
    policy: dict[str, Any]


TABLE: dict[str, Row] = {}
for group in json.loads((Path(__file__).parent / "data/faults.json").read_text()):
    checks, policy = group["checks"], group.get("policy", {})
    untold = {f"gpus.{name}": "unknown" for name in UNTOLD[group.get("untold", "")]}
    wanted = {**checks, **untold, **checks, **group.get("proofs", {})}
    policy = {key: HERE.get(str(value), value) for key, value in policy.items()}
    TABLE |= {name: Row(wanted, words, policy) for name, words in group["faults"].items()}

#: What `ready` skips, and the faults.
Batch = tuple[str, list[str]]


def _batches(profile: str) -> list[Batch]:
    """All faults whose first profile is this one."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for name, fault in FAULTS.items():
        if fault.profiles[0] != profile:
            continue
        skipped = DEBUGGERS
        if fault.group in BY_CHECK or fault.group in TOUCHED:
            skipped = "proof" if fault.group in BY_CHECK else "proof.attach_native"
        # Where many cannot log in, the others are too few to tell who is at fault.
        size = BATCH // 3 if fault.group in ("session", "ssh") else BATCH
        kinds.setdefault((skipped, size), []).append(name)
    return [
        (skipped, names[start : start + size])
        for (skipped, size), names in kinds.items()
        for start in range(0, len(names), size)
    ]


@pytest.fixture
def bench(
    lab_machine: None, tmp_path: Path, profile: str, batches: list[Batch]
) -> Iterator[Bench]:
    """Deployed nodes of the profile."""
    count = PARTNERS + max((len(names) for _, names in batches), default=0)
    with started_lab(_lab_name("table"), count, profile) as lab:
        yield Bench(tmp_path / "home", lab)


def healthy(bench: Bench, names: list[str]) -> dict[str, dict[str, str]]:
    """Policy -> the statuses of a healthy node that is judged by it."""
    # No batch has more policies than the bench has nodes.
    policies = [{}, *(TABLE[name].policy for name in names if TABLE[name].policy)]
    some = dict(zip([node.name for node in bench.lab.nodes], policies, strict=False))
    assert len(some) == len(policies)
    reports = bench.ready(some, "--skip", "proof")
    return {
        json.dumps(policy): {check: r["status"] for check, r in reports[node].results.items()}
        for node, policy in some.items()
    }


def complaints(report: Report) -> dict[str, str]:
    """What is not well: check -> its status."""
    # On a machine that is busy, a process of the probe waits in the kernel for a second.
    return {
        check: result["status"]
        for check, result in report.results.items()
        if result["status"] in ("fail", "warn", "unknown")
        and (check, result["status"]) != ("host.stuck", "warn")
    }


def difference(fault: str, report: Report, before: dict[str, str]) -> str:
    """What of this fault's row is not so; "": nothing."""
    row, results = TABLE[fault], report.results
    wanted = row.wanted
    changed = {check: results[check]["status"] for check in wanted if check in results}
    for check, status in complaints(report).items():
        # A node whose policy is another than that of its deploy has another file of it.
        if status != before.get(check) and not (row.policy and check == "gate.policy"):
            changed[check] = status
    if changed != wanted:
        shown = {check: (status, results[check]["actual"]) for check, status in changed.items()}
        return f"wanted {wanted}, got {shown}"
    # A warning stops no job.
    if report.go == (bool({*wanted.values()} & {"fail", "unknown"}) or bool(row.policy)):
        return f"go is {report.go}"
    if wanted and row.words not in (words := results[next(iter(wanted))]["actual"]):
        return f"{row.words!r} is not in {words!r}"
    for check, status in wanted.items():
        result = results[check]
        if status in ("fail", "warn") and not result["fix"] and check != "gpus.model":
            return f"{check} has no fix"
        told = f"{result['source']} {result['fix']}".lower()
        if FAULTS[fault].group == "amd" and "nvidia" in told:
            return f"{check} speaks of NVIDIA: {result}"
    return ""


def differences(bench: Bench, skipped: str, faults: list[str]) -> dict[str, str]:
    """The faults of a batch that do not show as their rows say, and the healthy nodes that are
    named for them.
    """
    before = healthy(bench, faults)
    broken = bench.break_([name for name in faults if all(map(shutil.which, FAULTS[name].needs))])
    policies = {node: TABLE[name].policy for name, node in broken.items()}
    wrong: dict[str, str] = {}
    # On an overloaded machine a section of a probe may reach its time limit: it is asked again.
    for _ in range(2):
        reports = bench.ready(policies, "--skip", skipped)
        for name, node in broken.items():
            policy = json.dumps(TABLE[name].policy)
            wrong[name] = difference(name, reports[node], before[policy])
        for node in bench.partners:
            bad = complaints(reports[node])
            wrong[node] = f"{bad}" if bad or not reports[node].go else ""
        if not any(wrong.values()):
            break
    return {name: why for name, why in wrong.items() if why}


def test_every_fault_is_in_the_table():
    assert set(TABLE) == set(FAULTS)


#: The profile of the nodes, and their batches.
TESTS = [
    pytest.param("h100", [("proof.attach_native", SOME)], id="some"),
    *(
        pytest.param(profile, _batches(profile), id=profile, marks=pytest.mark.nightly)
        for profile in PROFILES
    ),
]


@pytest.mark.parametrize(("profile", "batches"), TESTS)
def test_a_healthy_node_is_well_and_each_fault_shows_where_it_should_and_nowhere_else(
    bench, batches
):
    if batches[:1] != [("proof.attach_native", SOME)]:
        for report in bench.ready({}, "--limit", ",".join(bench.partners)).values():
            assert (complaints(report), report.go) == ({}, True)
            subjects = {check.partition(".")[0] for check in report.results}
            assert subjects == set(SUBJECTS) - {"site"}, "the policy names no checks of a site"
    wrong: dict[str, str] = {}
    for skipped, faults in batches:
        wrong |= differences(bench, skipped, faults)
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())
