"""What a node's files and processes say about limits, and what is made of it."""

from __future__ import annotations

from functools import partial

import pytest

from nodeready.deploy.actions import RemoveFile, Run, WriteFile
from nodeready.operations import limits as steps
from nodeready.policy import Policy
from nodeready.subjects.base import Output, ProbeError, file_lines
from nodeready.subjects.limits import checks
from nodeready.subjects.limits import facts as limits
from nodeready.subjects.limits.facts import Limits
from nodeready.subjects.snapshot import Snapshot
from tests.builders.judging import by_id, judge_all

CONF = "/etc/security/limits.conf"
OURS = "/etc/security/limits.d/zz-nodeready.conf"
GOOD = "\n".join(f"{d} - {i} {v}" for d in ("*", "root") for i, v in (
    ("core", "unlimited"), ("memlock", "unlimited"), ("nofile", "1048576")))  # fmt: skip
UNIT = "/usr/lib/systemd/system/slurmd.service"
DROPINS = "/etc/systemd/system/slurmd.service.d"
SET = "[Service]\nLimitCORE=infinity\nLimitMEMLOCK=infinity\nLimitNOFILE=1048576\n"
POLICY = Policy()


def lines(files: dict[str, str]) -> str:
    """What grep prints of these files."""
    return "".join(
        f"{path}:{number}:{text}\n"
        for path, content in files.items()
        for number, text in enumerate(content.split("\n"), 1)
    )


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
    text = "\n".join(printed) + "\n" + lines({**files, "/proc/sys/fs/nr_open": nr_open})
    outputs = {"limits": Output(text, 0), "sysctl": Output(sysctl, 0)}
    seen: Limits = limits.parse(outputs, policy)
    return seen


judged = partial(by_id, checks)


def test_a_good_node_has_nothing_to_do() -> None:
    seen = node(
        {OURS: GOOD, UNIT: SET, "/proc/7/limits": proc()},
        f"unit=slurmd {UNIT}",
        "process=slurmd 7",
    )
    assert {r.status for r in judge_all(checks, seen, POLICY)} == {"ok"}
    snapshot = Snapshot({"limits": seen})
    for step in (steps.logins, steps.services, steps.restart):
        assert step.plan(snapshot, POLICY) is None


# Each line stands before or after a good set of lines for the same domains.
@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({CONF: "* hard core 0", OURS: GOOD}, ""),
        ({OURS: GOOD, "/etc/security/limits.d/zzz.conf": "* hard core 0"}, "0 for * hard"),
        ({CONF: GOOD + "\n*\t hard\t\tcore   0\t# no cores\r"}, "0 for * hard"),
        ({CONF: GOOD + "\nroot - core 0"}, "0 for root"),
        ({CONF: GOOD + "\n0: hard core 0"}, "0 for root hard"),
        ({CONF: GOOD + "\n* SOFT CORE 1024"}, "1024 for * soft"),
        ({CONF: GOOD + "\n#* hard core 0\n  # * hard core 0"}, ""),
        ({CONF: GOOD + "\n* hard core\n* hard core zero\n* limit core 0\n* hard cores 0"}, ""),
        ({CONF: GOOD + "\n% hard core 0\nml hard core 0\n@gpu hard core 0"}, ""),
        ({CONF: GOOD + "\n* - core -1\n* - core infinity\n* - core -"}, ""),
        ({CONF: GOOD + "\n* hard core 0\n* hard core unlimited extra words"}, ""),
        ({CONF: GOOD + "\n* -"}, ""),
        ({"/etc/security/limits.d/a.conf": GOOD, CONF: "* - core 0"}, ""),
        (
            {
                "/etc/security/limits.d/a.conf": GOOD,
                "/usr/etc/security/limits.d/a.conf": "* - core 0",
                "/usr/etc/security/limits.d/b.conf": "root soft core 5",
            },
            "5 for root soft",
        ),
    ],
)
def test_the_line_that_pam_takes_counts(files: dict[str, str], wrong: str) -> None:
    result = judged(node(files))["limits.core"]
    assert (result.status, result.actual) == (
        ("fail", wrong) if wrong else ("ok", "unlimited for *, root")
    )
    assert result.fixable is bool(wrong)


def test_the_winning_line_is_named() -> None:
    seen = node({CONF: "* hard core 0\n* hard core 1", "/etc/security/limits.d/b.conf": GOOD})
    entry = seen.pam.effective("*", "hard", "core")
    assert entry is not None
    assert entry.where == "/etc/security/limits.d/b.conf:1"
    result = judged(node({CONF: GOOD + "\n\n* hard core 0"}))["limits.core"]
    assert result.source == f"{CONF}:8"


def test_exceptions_are_named_and_left_to_a_person() -> None:
    text = (
        "ml soft core 0\nml soft core unlimited\n@gpu - nofile 1024\n1000:2000 hard memlock 64\n"
        "@hpc - nofile 9999999\nada -\n%gpu - core 0\nml hard nproc 5"
    )
    result = judged(node({CONF: text, OURS: GOOD}))["limits.exceptions"]
    assert (result.status, result.owner, result.source) == ("warn", "admin", f"{CONF}:3")
    assert result.actual == (
        f"@gpu soft nofile 1024, @gpu hard nofile 1024 ({CONF}:3); "
        f"1000:2000 hard memlock 64 ({CONF}:4); ada is exempt from all limits ({CONF}:6)"
    )


def test_domains_of_the_policy_are_all_judged() -> None:
    policy = Policy(limit_domains=("*", "root", "ml", "@gpu"), limit_core="1000")
    text = "* - core 1000\nroot - core 1000\nml - core 0\n@gpu soft core 1000"
    result = judged(node({CONF: text}), policy)["limits.core"]
    assert result.actual == "0 for ml; unset for @gpu hard"
    assert judged(node({CONF: text}), policy)["limits.exceptions"].status == "ok"


def test_root_exempt_from_limits_needs_a_person() -> None:
    result = judged(node({CONF: "root -", OURS: GOOD}))["limits.core"]
    assert (result.status, result.fixable, result.source) == ("fail", False, f"{CONF}:1")


@pytest.mark.parametrize("name", ["~last.conf", "zz{.conf", "\udcc3\udcbf.conf", "z" * 220])
def test_a_file_behind_every_name_of_ours_needs_a_person(name: str) -> None:
    path = f"/etc/security/limits.d/{name}"
    result = judged(node({OURS: GOOD, path: "* hard core 0"}))["limits.core"]
    assert (result.status, result.fixable) == ("fail", False)
    assert path in result.fix
    # It costs nobody else: what it does not set is repaired.
    change = steps.logins.plan(
        Snapshot({"limits": node({path: "* - core unlimited", CONF: "* - nofile 64"})}), POLICY
    )
    assert change is not None
    assert change.fixes == ("limits.core", "limits.memlock", "limits.nofile")


def test_our_file_wins_over_every_other() -> None:
    last = "/etc/security/limits.d/zzz-site.conf"
    seen = node({OURS: GOOD, last: "* hard core 0"})
    change = steps.logins.plan(Snapshot({"limits": seen}, {OURS: b"old"}), POLICY)
    assert change is not None
    write, remove = change.actions
    assert remove == RemoveFile(OURS, b"old")
    assert isinstance(write, WriteFile)
    assert write.path > last
    assert write.old is None
    assert judged(node({last: "* hard core 0", write.path: write.content.decode()}))[
        "limits.core"
    ].status == "ok"  # fmt: skip


@pytest.mark.parametrize(
    ("nr_open", "sysctl"),
    [
        ("65536", ""),
        ("1048576", "file=/etc/sysctl.d/a.conf\n/etc/sysctl.d/a.conf:3:fs.nr_open = 65536\n"),
    ],
)
def test_more_files_than_the_kernel_allows_are_never_written(nr_open: str, sysctl: str) -> None:
    seen = node({}, sysctl="reader=systemd\n" + sysctl, nr_open=nr_open)
    result = judged(seen)["limits.nofile"]
    assert (result.status, result.fixable) == ("fail", False)
    assert "fs.nr_open is 65536" in result.actual
    change = steps.logins.plan(Snapshot({"limits": seen}), POLICY)
    assert change is not None
    assert change.fixes == ("limits.core", "limits.memlock")
    write = change.actions[0]
    assert isinstance(write, WriteFile)
    assert b"core" in write.content
    assert b"nofile" not in write.content


def test_our_own_line_that_breaks_logins_is_taken_back() -> None:
    seen = node({OURS: GOOD}, nr_open="65536")
    assert judged(seen)["limits.nofile"].fixable
    change = steps.logins.plan(Snapshot({"limits": seen}, {OURS: GOOD.encode()}), POLICY)
    assert change is not None
    after = node({OURS: change.actions[0].content.decode()}, nr_open="65536")  # type: ignore[union-attr]
    assert not any(result.fixable for result in judge_all(checks, after, POLICY))


def test_a_container_that_cannot_raise_limits_is_not_locked_out() -> None:
    strict = "/etc/pam.d/sshd:session required pam_limits.so"
    seen = node({"/proc/1/limits": proc(nofile="512")}, strict, "ceiling=1")
    assert judged(seen)["limits.nofile"].status == "fail"
    seen = node({"/proc/9/limits": proc().replace("1048576", "4096")}, strict, "ceiling=9")
    assert checks.wanted(seen, POLICY).keys() == {"core", "memlock"}
    seen = node({"/proc/9/limits": proc().replace("1048576", "4096")}, "ceiling=9")
    assert checks.wanted(seen, POLICY).keys() == {"core", "memlock", "nofile"}


# Every case with the unit's own file, which sets all limits right.
@pytest.mark.parametrize(
    ("dropins", "wrong"),
    [
        ({}, ""),
        ({f"{DROPINS}/override.conf": "[Service]\nLimitCORE=0\n"}, "slurmd core 0"),
        ({f"{DROPINS}/a.conf": "[Unit]\nLimitCORE=0\n[Service]\n#LimitCORE=0"}, ""),
        (
            {f"{DROPINS}/a.conf": "[Service]\nLimitCORE = 4M:infinity"},
            "slurmd core 4096/unlimited",
        ),
        ({f"{DROPINS}/a.conf": "[Service]\nLimitCORE="}, "slurmd core unset"),
        ({f"{DROPINS}/a.conf": "[Service]\nLimitCORE=lots\nLimitSTACK=1"}, ""),
        (
            {
                f"{DROPINS}/a.conf": "[Service]\nLimitNOFILE=1024",
                "/run/systemd/system/slurmd.service.d/b.conf": "[Service]\nLimitNOFILE=1M",
            },
            "",
        ),
        (
            {
                f"{DROPINS}/a.conf": "[Service]\nLimitNOFILE=1M",
                "/usr/lib/systemd/system/slurmd.service.d/a.conf": "[Service]\nLimitNOFILE=5",
                "/usr/lib/systemd/system/service.d/b.conf": "[Service]\nLimitMEMLOCK=64K",
            },
            "slurmd memlock 64",
        ),
    ],
)
def test_the_drop_in_that_systemd_takes_counts(dropins: dict[str, str], wrong: str) -> None:
    files = {UNIT: f"[Unit]\nDescription=x\n{SET}[Install]\n", **dropins}
    result = judged(node(files, f"unit=slurmd {UNIT}"))["limits.services"]
    assert (result.status, result.actual) == (
        ("fail", wrong) if wrong else ("ok", "core unlimited, memlock unlimited, nofile 1048576")
    )


def test_a_service_gets_a_drop_in_that_sorts_last() -> None:
    files = {UNIT: "[Service]\n", f"{DROPINS}/zzz.conf": "[Service]\nLimitCORE=0"}
    policy = Policy(limit_memlock="2048")
    seen = node(files, f"unit=slurmd {UNIT}", "systemd=1")
    change = steps.services.plan(Snapshot({"limits": seen}), policy)
    assert change is not None
    write, reload = change.actions
    assert isinstance(write, WriteFile)
    assert write.path > f"{DROPINS}/zzz.conf"
    assert b"LimitMEMLOCK=2048K\n" in write.content
    assert reload == Run(("systemctl", "daemon-reload"))
    after = node({**files, write.path: write.content.decode()}, f"unit=slurmd {UNIT}")
    assert judged(after, policy)["limits.services"].status == "ok"


def test_a_drop_in_behind_every_name_of_ours_needs_a_person() -> None:
    files = {UNIT: SET, f"{DROPINS}/~.conf": "[Service]\nLimitCORE=0"}
    result = judged(node(files, f"unit=slurmd {UNIT}"))["limits.services"]
    assert (result.status, result.fixable) == ("fail", False)
    assert f"{DROPINS}/~.conf" in result.fix


def test_no_service_is_not_applicable() -> None:
    results = judged(node({}))
    assert results["limits.services"].status == results["limits.running"].status == "na"


@pytest.mark.parametrize(
    ("restart", "systemd", "acts"),
    [((), True, False), (("slurmd",), True, True), (("slurmd",), False, False)],
)
def test_a_running_service_waits_for_its_restart(
    restart: tuple[str, ...], systemd: bool, acts: bool
) -> None:
    policy = Policy(restart_services=restart)
    printed = [f"unit=slurmd {UNIT}", "process=slurmd 4242", *(["systemd=1"] if systemd else [])]
    seen = node({UNIT: SET, "/proc/4242/limits": proc(core="0", nofile="1024")}, *printed)
    result = judged(seen, policy)["limits.running"]
    assert result.actual == "pending: restart of slurmd (pid 4242: core 0, nofile 1024)"
    assert (result.status, result.fixable) == (("fail", True) if acts else ("warn", False))
    change = steps.restart.plan(Snapshot({"limits": seen}), policy)
    commands = (
        [action.argv for action in change.actions if isinstance(action, Run)] if change else []
    )
    assert commands == (
        [("systemctl", "daemon-reload"), ("systemctl", "restart", "slurmd.service")]
        if acts
        else []
    )


def test_a_process_that_ended_meanwhile_is_passed_over() -> None:
    assert node({}, "process=slurmd 99").running == ()


@pytest.mark.parametrize("nr_open", ["", "many", "\x1b[31m"])
def test_a_value_that_makes_no_sense_is_refused(nr_open: str) -> None:
    with pytest.raises(ProbeError, match="no number"):
        node({}, nr_open=nr_open)


def test_hostile_lines_stay_data() -> None:
    evil = "$(reboot);\x1b[2J hard core `id`\n* hard core 0;rm\n" + "x " * 100000
    seen = node({CONF: evil + "\n* - nofile 99999999999999999999999999\n* - core -5"})
    assert [entry.where for entry in seen.pam.entries] == [
        f"{CONF}:2", f"{CONF}:4", f"{CONF}:4", f"{CONF}:5", f"{CONF}:5",
    ]  # fmt: skip
    assert max(entry.value for entry in seen.pam.entries) == limits.UNLIMITED
    change = steps.logins.plan(Snapshot({"limits": seen}), POLICY)
    assert change is not None
    assert "rm" not in change.diff()


def test_bytes_that_are_no_text_cost_nothing() -> None:
    raw = f"{CONF}:1:# caf\udce9\n{CONF}:2:* hard core 0 \udcff\n"
    entry = limits.parse_pam_limits(file_lines(raw)).effective("*", "hard", "core")
    assert entry is not None
    assert entry.value == 0
