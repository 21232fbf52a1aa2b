"""What a node shows of its own check, how it is judged, and what a deploy makes of it."""

import json
import re
import subprocess
from dataclasses import fields, replace
from typing import Any

import pytest

from nodeready.agent.gate import here
from nodeready.core import shell
from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy, make_policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.fleet.transport import bundle
from nodeready.operations import gate as steps
from nodeready.runs.deploy.actions import RemoveFile, RunCommand, WriteFile
from nodeready.subjects.gate import checks
from nodeready.subjects.gate import facts as probe
from nodeready.subjects.gate import files as gate_files
from nodeready.subjects.gate.facts import FILES, PROGRAMS, Gate, SlurmConf
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import by_name
from tests.cases import cases

ON, OFF = Policy(gate=True), Policy()
FLEET = FleetFacts(gate_files=gate_files.digests(ON, bundle.program))
#: "alone": a node that judges itself does not know what its files should be.
POLICIES = {"on": (ON, FLEET), "alone": (ON, ALONE), "off": (OFF, ALONE)}
POLICIES["drains"] = (replace(ON, gate_drain=True), FLEET)
CONTENTS = gate_files.contents(ON, bundle.program)
DIGESTS = dict(FLEET.gate_files or ())
STEPS = (steps.leftover, steps.program, steps.timer, steps.slurm)
CONF = SlurmConf(
    "/etc/slurm/slurm.conf", ((probe.PROLOG, "/etc/slurm/slurm.conf:3"),),
    ((probe.HEALTH_CHECK, "/etc/slurm/slurm.conf:4"),), "300",
)  # fmt: skip
A, B = "a" * 64, "b" * 64
GOOD = Gate(
    existing=tuple(path for path in FILES if path != probe.CRON), runs=PROGRAMS, systemd=True,
    digests={**DIGESTS, probe.COMPILED: A, probe.NOTE: B}, cron=True, slurm=True, slurm_conf=CONF,
    python="python3", magic="a70d0d0a", note=(DIGESTS[probe.BUNDLE], A, "a70d0d0a"), age_s=10,
    since_s=4000,
)  # fmt: skip
UNITS = (probe.TIMER, probe.SERVICE, probe.WANTED)
BY_CRON = replace(GOOD, existing=tuple({*GOOD.existing, probe.CRON} - {*UNITS}), systemd=False)


def planned(observed: Gate, policy: Policy = ON, **files: bytes) -> list[Any]:
    """The actions of all steps, where files of ours have this content."""
    ours = {getattr(probe, name): content for name, content in files.items()}
    snapshot = Snapshot({"gate": observed}, ours)
    changes = [step.plan(snapshot, policy, FLEET) for step in STEPS]
    return [action for change in changes if change for action in change.actions]


def paths(names: list[str]) -> tuple[str, ...]:
    return tuple(getattr(probe, name) for name in names)


def observe(case: dict[str, Any]) -> Gate:
    """The node of a case; files by their names in nodeready.subjects.gate.facts.

    node:    what it has in place of all that a good one has; cron: a good one without systemd
    without: files that are not there; conf: what slurm.conf says instead of `CONF`
    """
    good = Gate(**case["node"]) if "node" in case else BY_CRON if case.get("cron") else GOOD
    digests = {getattr(probe, name): text * 64 for name, text in case.get("digests", {}).items()}
    gone = paths(case.get("without", []))
    changes = {
        key: paths(value) if isinstance(value, list) else value
        for key, value in case.get("change", {}).items()
    }
    there = (*changes.pop("existing", good.existing), *paths(case.get("also", [])))
    if "conf" in case:
        conf = dict(case["conf"] or {})
        if program := conf.get("prolog"):
            conf["prolog"] = ((program.replace("DIRECTORY", probe.DIRECTORY), "x:1"),)
        changes["slurm_conf"] = None if case["conf"] is None else replace(CONF, **conf)
    known = {**(good.digests or {}), **digests}
    return replace(
        good,
        existing=tuple(path for path in there if path not in gone),
        digests={path: sha256 for path, sha256 in known.items() if path not in gone},
        **({**changes, "note": (B, A, "a70d0d0a")} if changes.get("note") else changes),
    )


@pytest.mark.parametrize("case", cases(__file__, "data/gate.json"))
def test_what_is_wrong_is_one_finding_and_somebodys(case):
    """bad: check -> "deploy": a failure that a deploy repairs, else its status: a person does."""
    observed, (policy, fleet) = observe(case), POLICIES[case.get("policy", "on")]
    bad = {
        name: "deploy" if result.fixable else result.status
        for name, result in by_name(checks, observed, policy, fleet).items()
        if result.bad
    }
    assert bad == case.get("bad", {})
    assert bool(planned(observed, policy)) is ("deploy" in bad.values())


def test_a_fresh_node_gets_all_of_it_the_bundle_first():
    actions = planned(Gate(python="python3", systemd=True, slurm=True))
    modes = {action.path: action.mode for action in actions if isinstance(action, WriteFile)}
    assert list(modes)[:2] == [probe.BUNDLE, probe.POLICY]
    assert set(modes) == set(DIGESTS) - {probe.CRON}
    assert {path for path, mode in modes.items() if mode == "0755"} == set(PROGRAMS)
    assert [" ".join(action.argv) for action in actions if isinstance(action, RunCommand)] == [
        "systemctl daemon-reload",
        "systemctl enable nodeready.timer",
        "systemctl restart nodeready.timer",
    ]


def test_only_what_differs_is_written():
    compiled, files = f"compile {probe.BUNDLE} for python3", ("PROLOG", "HEALTH_CHECK", "POLICY")
    ours = {name: CONTENTS[getattr(probe, name)] for name in files}
    owned = [f"run chown 0:0 -- {probe.COMPILED}", f"run chmod go-w -- {probe.COMPILED}"]
    other = {**(GOOD.digests or {}), probe.POLICY: "0" * 64}
    for changes, files, actions in (
        ({"magic": "cb0d0d0a"}, ours, [compiled]),
        ({"exposed": (probe.COMPILED,)}, ours, [*owned, compiled]),
        ({"digests": other}, {"POLICY": b"{}\n"}, [f"change {probe.POLICY}"]),
        ({"runs": (probe.RECORD, probe.PROLOG)}, ours, [f"run chmod 0755 {probe.HEALTH_CHECK}"]),
    ):
        done = planned(replace(GOOD, **changes), **files)
        assert [action.describe() for action in done] == actions


def test_the_prolog_that_slurm_conf_names_is_never_taken_away():
    free = replace(GOOD, slurm_conf=SlurmConf("/etc/slurm/slurm.conf"))
    named, gone = (
        [a.path for a in planned(observed, OFF) if isinstance(a, RemoveFile)]
        for observed in (GOOD, free)
    )
    assert {probe.PROLOG, probe.HEALTH_CHECK}.isdisjoint(named)
    assert named[0] == probe.WANTED
    assert set(GOOD.existing) <= set(gone)


def test_the_node_reads_the_policy_back_as_it_was_declared():
    settings = {"gate": True, "limit_memlock": 4096, "xid_ignore": [13], "waivers": {"x.y": "é"}}
    settings |= {"nics": {"eth0": {"mtu": 9000}}, "rdma_ports": {"mlx5_0/1": {"rate_gbps": 400}}}
    settings |= {"iommu_args": ["iommu=pt"], "ssh_known_hosts": ["host ssh-ed25519 AAAA"]}
    declared = make_policy(settings)
    data = json.loads(gate_files.document(declared))
    assert make_policy(data) == replace(declared, ssh_known_hosts=())
    assert data.keys() == {field.name for field in fields(Policy)} - {"ssh_known_hosts"}


def test_cron_runs_at_least_as_often():
    wanted = {30: "* * * * *", 60: "* * * * *", 300: "*/5 * * * *", 3599: "*/59 * * * *"}
    wanted |= {3600: "7 * * * *", 7200: "7 */2 * * *", 86400: "7 0 * * *"}
    assert {interval_s: gate_files.cron_times(interval_s) for interval_s in wanted} == wanted


def test_the_programs_are_sound_sh_and_end_in_time(posix_sh):
    most = gate_files.contents(Policy(gate=True, gate_budget_s=50), bundle.program)
    for path in PROGRAMS:
        subprocess.run([*posix_sh, "-n"], input=most[path], check=True)
    assert gate_files.RECORD_S >= here.LIMIT_S + 10
    # Slurm ends a health check after 60 s.
    limit = re.search(r"timeout -k 2 (\d+)", most[probe.HEALTH_CHECK].decode())
    assert limit is not None
    assert int(limit[1]) + 2 <= 60


def parse(*lines: str, now: str = "2000") -> Gate:
    text = "\n".join([f"now={now}", *lines, ""])
    observed: Gate = probe.parse({"gate": Output(text, 0)}, ON)
    return observed


def test_a_node_without_the_gate_starts_no_program_for_it():
    (section,) = probe.PROBE.sections
    script = f"{shell.library('probe')}PATH=/nonexistent\n{section.script(OFF)}"
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    observed = probe.parse({"gate": Output(done.stdout, 0)}, OFF)
    assert (observed.existing, observed.digests) == ((), None)


@pytest.mark.parametrize("case", cases(__file__, "data/slurm_conf.json"))
def test_slurm_conf_is_read_as_slurm_reads_it(case):
    conf = parse(*(line.replace("OURS", probe.PROLOG) for line in case["lines"])).slurm_conf
    seen = None if conf is None else [*vars(conf).values()]
    assert json.loads(json.dumps(seen).replace(probe.PROLOG, "OURS")) == case["conf"]


def test_nothing_but_our_own_files_is_taken_from_an_answer():
    observed = parse(
        f"{A}  {probe.BUNDLE}", f"{B}  /etc/shadow", "there=/etc/shadow", f"there={probe.BUNDLE}",
        "runs=/bin/sh", f"file=1900 0 644 {probe.BUNDLE}", f"file=2500 0 644 {probe.VERDICT}",
        f"file=1 0 666 {probe.COMPILED}", "file=1 7 755 /usr/local",
    )  # fmt: skip
    assert (observed.existing, observed.runs) == ((probe.BUNDLE,), ())
    assert observed.digests == {probe.BUNDLE: A}
    assert (observed.since_s, observed.age_s) == (100, 0)
    assert observed.exposed == (probe.COMPILED,)


def test_what_root_runs_is_changeable_by_root_only():
    exposed = {"0 755": False, "0 2755": False, "0 644": False, "0 400": False, "0 0": True}
    exposed |= {"0 775": True, "0 757": True, "1000 755": True, "": True}
    printed = {rights: f"file=1900 {rights} {probe.DIRECTORY}" for rights in exposed}
    assert {rights: bool(parse(line).exposed) for rights, line in printed.items()} == exposed


def test_a_note_and_a_time_are_what_they_should_be_or_nothing():
    assert parse(f"note={A} {B} a70d0d0a").note == (A, B, "a70d0d0a")
    for text in (f"{A} {B}", f"{A} {B} a70d0d0a x", "", f"{A} /etc/shadow a70d0d0a"):
        assert parse(f"note={text}").note is None
    assert parse("held=1900 3 abc 1 of 3 nodes").held == "1 of 3 nodes"
    assert parse("held=soon 3 abc 1 of 3 nodes").held == ""
    for line, now in (("file=soon 0 644 /run/nodeready/verdict.json", "2000"), ("", "")):
        with pytest.raises(ProbeError):
            parse(line, now=now)
