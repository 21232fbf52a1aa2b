"""What a node's files and processes say about limits, and what is made of it."""

from functools import partial
from typing import Any

import pytest

from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.operations import limits as steps
from nodeready.runs.deploy.actions import RemoveFile, RunCommand, StepChange, WriteFile
from nodeready.subjects.limits import checks, limit_files
from nodeready.subjects.limits import facts as limits
from nodeready.subjects.limits.facts import Limits
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import by_id, judge_all
from tests.builders.printed import grep_lines
from tests.builders.verdicts import assert_verdict, policy_of
from tests.cases import cases

CONF = "/etc/security/limits.conf"
OURS = "/etc/security/limits.d/zz-nodeready.conf"
GOOD = "\n".join(f"{d} - {i} {v}" for d in ("*", "root") for i, v in (
    ("core", "unlimited"), ("memlock", "unlimited"), ("nofile", "1048576")))  # fmt: skip
UNIT = "/usr/lib/systemd/system/slurmd.service"
DROPINS = "/etc/systemd/system/slurmd.service.d"
SET = "[Service]\nLimitCORE=infinity\nLimitMEMLOCK=infinity\nLimitNOFILE=1048576\n"
POLICY = Policy()
STRICT = "/etc/pam.d/sshd:3:session required pam_limits.so"

judged = partial(by_id, checks)


def proc(core: str = "unlimited", nofile: str = "1048576") -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max core file size        {core:<21}unlimited            bytes     \n"
        f"Max open files            {nofile:<21}1048576              files     \n"
        "Max locked memory         unlimited            unlimited            bytes     "
    )


def node(
    files: dict[str, str],
    *printed: str,
    policy: Policy = POLICY,
    sysctl: str = "",
    nr_open: str = "1048576",
) -> Limits:
    """The observation of a node with these files, on which the probe printed these lines too."""
    text = "\n".join(printed) + "\n" + grep_lines({**files, "/proc/sys/fs/nr_open": nr_open})
    outputs = {"limits": Output(text, 0), "sysctl": Output(f"reader=systemd\n{sysctl}", 0)}
    observed: Limits = limits.parse(outputs, policy)
    return observed


def plan(step: Any, observed: Limits, policy: Policy = POLICY, **files: bytes) -> StepChange:
    ours = {OURS: files["ours"]} if files.get("ours") else {}
    change: StepChange | None = step.plan(Snapshot({"limits": observed}, ours), policy)
    assert change is not None
    return change


def path_of(short: str) -> str:
    if short.startswith(("limits.", "site.conf")):
        return f"/etc/security/{short}"
    return short.replace("DROPINS", DROPINS) if short[:1] in "/D" else f"/etc/{short}"


def texts(case: dict[str, Any]) -> dict[str, str]:
    """The files of a case, by path.

    conf: /etc/security/limits.conf, or several that are judged alike
    good: our own file is there; it is not where the check is about other lines
    unit: of slurmd; None: it is not installed
    """
    files = dict(case.get("files", {}))
    if case.get("conf") is not None:
        files["limits.conf"] = case["conf"]
    if case.get("good", case["check"] in ("pam", "exceptions")):
        files[OURS] = "GOOD"
    if (unit := case.get("unit", f"[Unit]\nDescription=x\n{SET}[Install]\n")) is not None:
        files[UNIT] = unit
    call = "session required pam_limits.so"
    return {
        path_of(path): text.replace("GOOD", GOOD).replace("CALL", call)
        for path, text in files.items()
    }


@pytest.mark.parametrize("case", cases(__file__, "data/limits.json"))
def test_verdict(case):
    """limits.conf(5), pam_limits(8), pam.conf(5), sshd_config(5), systemd-system.conf(5);
    Linux-PAM's pam_limits.c (parse_uid_range, parse_config_file, process_limit, setup_limits);
    the PAM stacks of Debian 12, RHEL 9 and SLES 15.
    """
    for conf in case["conf"] if isinstance(case.get("conf"), list) else [case.get("conf")]:
        assert_case({**case, "conf": conf})


def assert_case(case: dict[str, Any]) -> None:
    policy = policy_of(case)
    files = texts(case)
    printed = [*case.get("printed", ()), *([f"unit=slurmd {UNIT}"] if UNIT in files else [])]
    values = {key: case[key] for key in ("nr_open", "sysctl") if key in case}
    observed = node(files, *printed, policy=policy, **values)
    result = judged(observed, policy)[f"limits.{case['check']}"]
    assert_verdict(result, case)
    if not result.bad:
        return
    by_deploy = case["check"] not in ("pam", "exceptions") and "fix" not in case
    assert result.fixable is by_deploy
    default = "" if by_deploy and "unset" in result.actual else result.source
    assert result.source == (path_of(case["source"]) if "source" in case else default)
    if case["check"] in ("pam", "exceptions"):
        assert result.source.partition(":")[0] in result.fix
    assert case.get("fix", "").replace("DROPINS", DROPINS) in result.fix
    if by_deploy:
        step = steps.services if case["check"] == "services" else steps.logins
        after = changed(files, plan(step, observed, policy, ours=files.get(OURS, "").encode()))
        assert judged(node(after, *printed, policy=policy), policy)[result.check].status == "ok"


def changed(files: dict[str, str], change: StepChange) -> dict[str, str]:
    """The files after the change: whatever stood there, ours is the last one that is read."""
    after = dict(files)
    for action in change.actions:
        if isinstance(action, WriteFile):
            after[action.path] = action.content.decode()
        elif isinstance(action, RemoveFile):
            del after[action.path]
    return after


def test_a_good_node_has_nothing_to_do():
    observed = node(
        {OURS: GOOD, UNIT: SET, "/proc/7/limits": proc()},
        f"unit=slurmd {UNIT}",
        "process=slurmd 7",
    )
    results = judge_all(checks, observed, POLICY)
    assert {r.status for r in results if r.check != "limits.pam"} == {"ok"}
    snapshot = Snapshot({"limits": observed})
    for step in (steps.logins, steps.services, steps.restart):
        assert step.plan(snapshot, POLICY) is None


@pytest.mark.parametrize("name", ["~last.conf", "zz{.conf", "\udcc3\udcbf.conf", "z" * 220])
def test_a_file_behind_every_name_of_ours_needs_a_person(name):
    path = f"/etc/security/limits.d/{name}"
    result = judged(node({OURS: GOOD, path: "* hard core 0"}))["limits.core"]
    assert (result.status, result.fixable) == ("fail", False)
    assert path in result.fix
    # What the file does not set is repaired.
    observed = node({path: "* - core unlimited", CONF: "* - nofile 64"})
    fixes = plan(steps.logins, observed).fixes
    assert fixes == ("limits.core", "limits.memlock", "limits.nofile")


def test_more_files_than_the_kernel_allows_are_never_written():
    for files, ours in (({}, b""), ({OURS: GOOD}, GOOD.encode())):
        observed = node(files, nr_open="65536")
        # Our own line that breaks logins is taken back.
        assert judged(observed)["limits.nofile"].fixable is bool(ours)
        change = plan(steps.logins, observed, ours=ours)
        fixes = ("limits.core", "limits.memlock")
        assert change.fixes == (("limits.nofile",) if ours else fixes)
        write = change.actions[0]
        assert isinstance(write, WriteFile)
        assert (b"core" in write.content, b"nofile" in write.content) == (True, False)
        after = node({OURS: write.content.decode()}, nr_open="65536")
        assert not any(result.fixable for result in judge_all(checks, after, POLICY))


def test_a_container_that_cannot_raise_limits_is_not_locked_out():
    observed = node({"/proc/1/limits": proc(nofile="512")}, STRICT, "ceiling=1")
    assert judged(observed)["limits.nofile"].status == "fail"
    files = {"/proc/9/limits": proc().replace("1048576", "4096")}
    observed = node(files, STRICT, "ceiling=9")
    assert checks.possible_limits(observed, POLICY).keys() == {"core", "memlock"}
    observed = node(files, "ceiling=9")
    assert checks.possible_limits(observed, POLICY).keys() == {"core", "memlock", "nofile"}


def test_a_service_gets_a_drop_in_in_units_of_systemd():
    files = {UNIT: "[Service]\n", f"{DROPINS}/zzz.conf": "[Service]\nRestart=no"}
    observed = node(files, f"unit=slurmd {UNIT}", "systemd=1")
    write, reload = plan(steps.services, observed, Policy(limit_memlock="2048")).actions
    assert isinstance(write, WriteFile)
    assert b"LimitMEMLOCK=2048K\n" in write.content
    # A drop-in that sets no limit may come later.
    assert write.path == f"{DROPINS}/zz-nodeready.conf"
    assert reload == RunCommand(("systemctl", "daemon-reload"))


def test_a_running_service_waits_for_its_restart():
    files = {UNIT: SET, "/proc/4242/limits": proc("0", "1024")}
    restarts = [("systemctl", "daemon-reload"), ("systemctl", "restart", "slurmd.service")]
    for restart, systemd, commands in (
        ((), ["systemd=1"], []), (("slurmd",), ["systemd=1"], restarts), (("slurmd",), [], []),
    ):  # fmt: skip
        policy = Policy(restart_services=restart)
        observed = node(files, f"unit=slurmd {UNIT}", "process=slurmd 4242", *systemd)
        result = judged(observed, policy)["limits.running"]
        assert result.actual == "pending: restart of slurmd (pid 4242: core 0, nofile 1024)"
        assert (result.status, result.fixable) == (("fail", True) if commands else ("warn", False))
        assert commands or result.fix == "systemctl restart slurmd, when idle"
        change = steps.restart.plan(Snapshot({"limits": observed}), policy)
        assert ([action.argv for action in change.actions] if change else []) == commands


def test_what_makes_no_sense_is_refused():
    for nr_open in ("", "many", "\x1b[31m"):
        with pytest.raises(ProbeError, match="no number"):
            node({}, nr_open=nr_open)
    for unit in ("evil /x.service", "slurmd x.service"):
        with pytest.raises(ProbeError, match="not requested"):
            node({}, f"unit={unit}")


def test_hostile_lines_stay_data():
    hostile = "$(reboot);\x1b[2J hard core `id`\n* hard core 0;rm\n" + "x " * 100000
    observed = node({CONF: hostile + "\n* - nofile 99999999999999999999999999\n* - core -5"})
    assert [entry.source for entry in observed.pam.entries] == [
        f"{CONF}:{number}" for number in (2, 4, 4, 5, 5)
    ]
    assert max(entry.value for entry in observed.pam.entries) == limit_files.UNLIMITED
    assert "rm" not in plan(steps.logins, observed).diff()
