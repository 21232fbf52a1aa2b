"""What a node shows of its own check, how it is judged, and what a deploy makes of it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import fields, replace

import pytest

from nodeready.deploy.actions import RemoveFile, Run, WriteFile
from nodeready.healthcheck import here
from nodeready.operations import gate as steps
from nodeready.policy import Policy
from nodeready.policy.policy import make_policy
from nodeready.subjects.base import Output, ProbeError
from nodeready.subjects.gate import checks
from nodeready.subjects.gate import facts as probe
from nodeready.subjects.gate import files as wanted
from nodeready.subjects.gate.facts import FILES, PROGRAMS, Gate, SlurmConf
from nodeready.subjects.snapshot import Snapshot
from nodeready.transport import bundle
from tests.builders.judging import by_name

ON = Policy(gate=True)
WANT = wanted.complete(ON, ON, bundle.program)
DIGESTS = dict(WANT.gate_files)  # type: ignore[attr-defined]
POLICY_FILE = wanted.contents(WANT, bundle.program)[probe.POLICY]
STEPS = (steps.leftover, steps.program, steps.timer, steps.slurm)
CONF = SlurmConf(
    "/etc/slurm/slurm.conf",
    ((probe.PROLOG, "/etc/slurm/slurm.conf:3"),),
    ((probe.HEALTH_CHECK, "/etc/slurm/slurm.conf:4"),),
    "300",
)
A, B = "a" * 64, "b" * 64
GOOD = Gate(
    there=tuple(path for path in FILES if path != probe.CRON),
    digests={
        **{path: digest for path, digest in DIGESTS.items() if path != probe.CRON},
        probe.COMPILED: A,
        probe.NOTE: B,
    },
    runs=PROGRAMS,
    systemd=True,
    cron=True,
    slurm=True,
    slurm_conf=CONF,
    python="python3",
    magic="a70d0d0a",
    note=(DIGESTS[probe.BUNDLE], A, "a70d0d0a"),
    age_s=10,
    since_s=4000,
)


def judged(seen: Gate, policy: Policy = WANT) -> dict[str, str]:
    """What is not ok and not na, with its owner."""
    found = by_name(checks, seen, policy)
    return {name: f"{r.status} {r.owner}" for name, r in found.items() if r.bad}


def planned(seen: Gate, policy: Policy = WANT, files: dict[str, bytes] | None = None):
    snapshot = Snapshot({"gate": seen}, files or {})
    changes = [step.plan(snapshot, policy) for step in STEPS]
    return [action for change in changes if change for action in change.actions]


def without(seen: Gate, *paths: str, **more) -> Gate:
    digests = {path: sha for path, sha in (seen.digests or {}).items() if path not in paths}
    there = tuple(path for path in seen.there if path not in paths)
    runs = tuple(path for path in seen.runs if path not in paths)
    return replace(seen, there=there, digests=digests, runs=runs, **more)


BY_CRON = replace(
    without(GOOD, probe.TIMER, probe.SERVICE, probe.WANTED),
    there=(probe.CRON, *PROGRAMS, probe.NOTE, probe.COMPILED, probe.BUNDLE, probe.POLICY),
    systemd=False,
)
BY_CRON = replace(BY_CRON, digests={**(BY_CRON.digests or {}), probe.CRON: DIGESTS[probe.CRON]})
FIX, DO = "fail nodeready", "fail admin"
WARN = "warn admin"


@pytest.mark.parametrize(
    ("seen", "policy", "found"),
    [
        (GOOD, WANT, {}),
        (BY_CRON, WANT, {}),
        (Gate(), Policy(), {}),
        (Gate(slurm=True, slurm_conf=CONF), Policy(), {}),
        # A node that judges itself does not know what its files should be.
        (GOOD, ON, {}),
        # Fresh nodes.
        (Gate(python="python3", systemd=True), WANT,
         {"bundle": FIX, "policy": FIX, "timer": FIX}),
        (Gate(python="python3", cron=True, slurm=True), WANT,
         {"bundle": FIX, "policy": FIX, "timer": FIX, "slurm_scripts": FIX}),
        (Gate(python="python3"), WANT, {"bundle": FIX, "policy": FIX, "timer": DO}),
        (Gate(old="python3 is 3.6", systemd=True, slurm=True), WANT, {"python": DO}),
        # Something is otherwise.
        (without(GOOD, probe.POLICY), WANT, {"policy": FIX}),
        (replace(GOOD, digests={**DIGESTS, probe.BUNDLE: "0" * 64}), WANT, {"bundle": FIX}),
        (replace(GOOD, runs=(probe.RECORD, probe.PROLOG)), WANT, {"slurm_scripts": FIX}),
        # What was compiled is gone, damaged, of another program, or of the Python before.
        (without(GOOD, probe.COMPILED), WANT, {"bundle": FIX}),
        (replace(GOOD, note=None), WANT, {"bundle": FIX}),
        (replace(GOOD, digests={**(GOOD.digests or {}), probe.COMPILED: B}), WANT,
         {"bundle": FIX}),
        (replace(GOOD, note=(B, A, "a70d0d0a")), WANT, {"bundle": FIX}),
        (replace(GOOD, magic="cb0d0d0a"), WANT, {"bundle": FIX}),
        (replace(GOOD, exposed=(probe.DIRECTORY,)), WANT, {"bundle": FIX}),
        # The Python went away: one finding, and nobody can compile.
        (replace(GOOD, python="", magic=""), WANT, {"python": DO}),
        (without(GOOD, probe.WANTED), WANT, {"timer": FIX}),
        (replace(GOOD, there=FILES), WANT, {"timer": FIX}),
        (replace(BY_CRON, systemd=True), WANT, {"timer": FIX}),
        # slurm.conf is the administrator's.
        (replace(GOOD, slurm_conf=SlurmConf("/etc/slurm/slurm.conf")), WANT,
         {"slurm_conf": WARN}),
        (replace(GOOD, slurm_conf=replace(CONF, interval=None)), WANT, {"slurm_conf": WARN}),
        (replace(GOOD, slurm_conf=replace(CONF, timeout="10")), WANT, {"slurm_conf": WARN}),
        (replace(GOOD, slurm_conf=replace(CONF, timeout="60")), WANT, {}),
        (replace(GOOD, slurm_conf=replace(CONF, prolog=(("/etc/slurm/p", "x:1"),))), WANT,
         {"slurm_conf": WARN}),
        (replace(GOOD, slurm_conf=replace(CONF, prolog=((f"{probe.DIRECTORY}/slurm-*", "x:1"),))),
         WANT, {}),
        (replace(GOOD, slurm_conf=None), WANT, {}),
        # The timer does not do its work.
        (replace(GOOD, age_s=901), WANT, {"verdict": WARN}),
        (replace(GOOD, age_s=None), WANT, {"verdict": WARN}),
        (replace(GOOD, age_s=None, since_s=60), WANT, {}),
        # Left from another policy.
        (GOOD, Policy(), {"leftover": FIX}),
        (Gate(there=(probe.PROLOG,), slurm=True, slurm_conf=CONF), Policy(), {"leftover": WARN}),
        (Gate(there=(probe.PROLOG,), slurm=True), Policy(), {"leftover": WARN}),
        (Gate(there=(probe.PROLOG,), slurm=True, slurm_conf=SlurmConf("x")), Policy(),
         {"leftover": FIX}),
        (Gate(there=(probe.PROLOG,)), Policy(), {"leftover": FIX}),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_finding_and_somebodys(seen, policy, found):
    assert judged(seen, policy) == found
    acting = bool(planned(seen, policy))
    assert acting is (FIX in found.values())


def test_a_fresh_node_gets_all_of_it_the_bundle_first():
    actions = planned(Gate(python="python3", systemd=True, slurm=True))
    written = [action.path for action in actions if isinstance(action, WriteFile)]
    assert written[:2] == [probe.BUNDLE, probe.POLICY]
    assert set(written) == set(DIGESTS) - {probe.CRON}
    assert {a.path for a in actions if isinstance(a, WriteFile) and a.mode == "0755"} == set(
        PROGRAMS
    )
    runs = [" ".join(action.argv) for action in actions if isinstance(action, Run)]
    assert runs == [
        "systemctl daemon-reload",
        "systemctl enable nodeready.timer",
        "systemctl restart nodeready.timer",
    ]


def test_only_what_differs_is_written():
    seen = replace(GOOD, magic="cb0d0d0a")
    assert [action.describe() for action in planned(seen, files={probe.POLICY: POLICY_FILE})] == [
        f"compile {probe.BUNDLE} for python3"
    ]
    seen = replace(GOOD, exposed=(probe.COMPILED,))
    assert [action.describe() for action in planned(seen, files={probe.POLICY: POLICY_FILE})] == [
        f"run chown 0:0 -- {probe.COMPILED}",
        f"run chmod go-w -- {probe.COMPILED}",
        f"compile {probe.BUNDLE} for python3",
    ]
    seen = replace(GOOD, digests={**(GOOD.digests or {}), probe.POLICY: "0" * 64})
    assert [action.describe() for action in planned(seen, files={probe.POLICY: b"{}\n"})] == [
        f"change {probe.POLICY}"
    ]
    contents = wanted.contents(WANT, bundle.program)
    files = {path: contents[path] for path in (probe.PROLOG, probe.HEALTH_CHECK)}
    seen = replace(GOOD, runs=(probe.RECORD, probe.PROLOG))
    assert [action.describe() for action in planned(seen, files=files)] == [
        f"run chmod 0755 {probe.HEALTH_CHECK}"
    ]


def test_the_prolog_that_slurm_conf_names_is_never_taken_away():
    gone = [a.path for a in planned(GOOD, Policy()) if isinstance(a, RemoveFile)]
    assert probe.PROLOG not in gone
    assert probe.HEALTH_CHECK not in gone
    assert gone[0] == probe.WANTED
    assert probe.BUNDLE in gone
    free = replace(GOOD, slurm_conf=SlurmConf("/etc/slurm/slurm.conf"))
    gone = [a.path for a in planned(free, Policy()) if isinstance(a, RemoveFile)]
    assert set(GOOD.there) <= set(gone)


def test_the_node_reads_the_policy_back_as_it_was_declared():
    declared = make_policy(
        {
            "gate": True,
            "limit_memlock": 4096,
            "nics": {"eth0": {"mtu": 9000}},
            "rdma_ports": {"mlx5_0/1": {"rate_gbps": 400}},
            "waivers": {"nics.mtu": "why\u00e9"},
            "xid_ignore": [13],
            "iommu_args": ["iommu=pt"],
            "ssh_known_hosts": ["host ssh-ed25519 AAAA"],
        }
    )
    data = json.loads(wanted.document(declared))
    assert make_policy(data) == replace(declared, ssh_known_hosts=())
    assert data.keys() == {field.name for field in fields(Policy)} - {"ssh_known_hosts"}


def test_what_the_fleet_told_changes_no_file():
    told = replace(ON, ssh_known_hosts=("n1 ssh-ed25519 AAAA",))
    completed = wanted.complete(told, ON, bundle.program)
    assert completed.gate_files == WANT.gate_files  # type: ignore[attr-defined]
    assert completed.ssh_known_hosts == told.ssh_known_hosts
    assert wanted.contents(completed, bundle.program) == wanted.contents(ON, bundle.program)
    off = Policy()
    assert wanted.complete(off, off, bundle.program) is off


@pytest.mark.parametrize(
    ("interval_s", "times"),
    [(30, "* * * * *"), (60, "* * * * *"), (300, "*/5 * * * *"), (3599, "*/59 * * * *"),
     (3600, "7 * * * *"), (7200, "7 */2 * * *"), (86400, "7 0 * * *")],
)  # fmt: skip
def test_cron_runs_at_least_as_often(interval_s, times):
    assert wanted.cron_times(interval_s) == times


def test_the_programs_are_sound_sh_and_end_in_time():
    most = wanted.contents(Policy(gate=True, gate_budget_s=50), bundle.program)
    for path in PROGRAMS:
        text = most[path].decode()
        done = subprocess.run(["dash", "-n"], input=text, text=True, check=False)
        assert done.returncode == 0, path
    assert wanted.RECORD_S >= here.LIMIT_S + 10
    # Slurm ends a health check after 60 s.
    limit = re.search(r"timeout -k 2 (\d+)", most[probe.HEALTH_CHECK].decode())
    assert limit is not None
    assert int(limit[1]) + 2 <= 60


def test_a_node_without_the_gate_starts_no_program_for_it():
    (section,) = probe.PROBE.sections
    done = subprocess.run(
        ["/bin/sh", "-c", section.script(Policy())],
        env={"PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    seen = probe.parse({"gate": Output(done.stdout, 0)}, Policy())
    assert (seen.there, seen.digests) == ((), None)


SLURM = "/etc/slurm/slurm.conf"


def printed(*lines: str) -> Output:
    return Output("\n".join(["now=2000", *lines, ""]), 0)


@pytest.mark.parametrize(
    ("lines", "conf"),
    [
        ((f"slurm={SLURM}",), SlurmConf(SLURM)),
        ((f"slurm={SLURM}", f"{SLURM}:3:PROLOG = {probe.PROLOG} # ours",
          f"{SLURM}:4:HealthCheckInterval=300", f"{SLURM}:9:healthcheckinterval=0"),
         SlurmConf(SLURM, ((probe.PROLOG, f"{SLURM}:3"),), (), "0")),
        # What is not included does not count.
        ((f"slurm={SLURM}", "/etc/slurm/old.conf:1:Prolog=/old"), SlurmConf(SLURM)),
        ((f"slurm={SLURM}", f"{SLURM}:1:include site.conf", "/etc/slurm/site.conf:7:Prolog=/p",
          "/etc/slurm/site.conf:8:Include /etc/slurm/*.conf"),
         SlurmConf(SLURM, (("/p", "/etc/slurm/site.conf:7"),))),
        # Hostile: a line that names itself, or nothing at all.
        ((f"slurm={SLURM}", f"{SLURM}:1:include slurm.conf", f"{SLURM}:2:Prolog=",
          f"{SLURM}:3:Prolog"), SlurmConf(SLURM)),
        ((), None),
    ],
)  # fmt: skip
def test_slurm_conf_is_read_as_slurm_reads_it(lines, conf):
    assert probe.parse({"gate": printed(*lines)}, ON).slurm_conf == conf


@pytest.mark.parametrize(
    ("lines", "python", "old"),
    [
        (["python=python3 3.11 a70d0d0a"], "python3", ""),
        (["python=python3 3.11"], "python3", ""),
        (["python=python3 3.6", "python=python3.9 3.9 610d0d0a"], "python3.9", ""),
        (["python=python3 3.6"], "", "python3 is 3.6"),
        (["python=python3 ?"], "", "python3 does not run"),
        (["python=; rm -rf / 3.11"], "", "; does not run"),
        ([], "", ""),
    ],
)
def test_the_python_that_can_run_it_is_found(lines, python, old):
    seen = probe.parse({"gate": printed(*lines)}, ON)
    assert (seen.python, seen.old) == (python, old)


def test_nothing_but_our_own_files_is_taken_from_an_answer():
    seen = probe.parse(
        {"gate": printed(f"{'a' * 64}  {probe.BUNDLE}", f"{'b' * 64}  /etc/shadow",
                         "there=/etc/shadow", f"there={probe.BUNDLE}", "runs=/bin/sh",
                         f"file=1900 0 644 {probe.BUNDLE}", f"file=2500 0 644 {probe.VERDICT}",
                         f"file=1 0 666 {probe.COMPILED}", "file=1 7 755 /usr/local")},
        ON,
    )  # fmt: skip
    assert (seen.there, seen.runs) == ((probe.BUNDLE,), ())
    assert seen.digests == {probe.BUNDLE: "a" * 64}
    assert (seen.since_s, seen.age_s) == (100, 0)
    assert seen.exposed == (probe.COMPILED,)


@pytest.mark.parametrize(
    ("rights", "exposed"),
    [("0 755", False), ("0 2755", False), ("0 644", False), ("0 400", False), ("0 0", True),
     ("0 775", True), ("0 757", True), ("1000 755", True), ("", True)],
)  # fmt: skip
def test_what_root_runs_is_roots_alone(rights, exposed):
    seen = probe.parse({"gate": printed(f"file=1900 {rights} {probe.DIRECTORY}")}, ON)
    assert bool(seen.exposed) is exposed


@pytest.mark.parametrize(
    ("note", "read"),
    [(f"{A} {B} a70d0d0a", True), (f"{A} {B}", False), (f"{A} {B} a70d0d0a x", False),
     ("", False), (f"{A} /etc/shadow a70d0d0a", False)],
)  # fmt: skip
def test_a_note_is_a_note_or_none(note, read):
    seen = probe.parse({"gate": printed(f"note={note}")}, ON)
    assert seen.note == ((A, B, "a70d0d0a") if read else None)


@pytest.mark.parametrize("line", ["file=soon 0 644 /run/nodeready/verdict.json", "now="])
def test_a_time_that_is_none_makes_no_sense(line):
    with pytest.raises(ProbeError):
        probe.parse({"gate": Output(f"{line}\n", 0)}, ON)
