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
    assert {r.status for r in judge_all(checks, seen, POLICY) if r.check != "limits.pam"} == {"ok"}
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
        "@hpc - nofile 1048576\nada -\n%gpu - core 0\nml hard nproc 5"
    )
    result = judged(node({CONF: text, OURS: GOOD}))["limits.exceptions"]
    assert (result.status, result.owner, result.source) == ("warn", "admin", f"{CONF}:3")
    assert result.actual == (
        f"@gpu soft nofile 1024, @gpu hard nofile 1024 ({CONF}:3); "
        f"1000:2000 hard memlock 64 ({CONF}:4); ada is exempt from all limits ({CONF}:6)"
    )
    assert result.fix == f"raise or remove {CONF}:3, {CONF}:4, {CONF}:6, or leave them be"


# What stands beside a good set of lines, the status, and what the result must say.
# Rules: Linux-PAM's modules/pam_limits/pam_limits.c (parse_uid_range, parse_config_file,
# process_limit, setup_limits).
EXCEPTIONS = [
    ("ml - nofile 1024", "warn", f"ml soft nofile 1024, ml hard nofile 1024 ({CONF}:1)"),
    ("@gpu hard memlock 64", "warn", f"@gpu hard memlock 64 ({CONF}:1)"),
    ("1000: - nofile 1024", "fail", f"1000: soft nofile 1024, 1000: hard nofile 1024 ({CONF}:1)"),
    ("0: hard nofile 1024", "fail", f"0: hard nofile 1024 ({CONF}:1)"),
    ("500:65000 hard core 0", "fail", f"500:65000 hard core 0 ({CONF}:1)"),
    ("@1000: hard core 0", "fail", f"@1000: hard core 0 ({CONF}:1)"),
    ("1000:1010 hard core 0", "warn", f"1000:1010 hard core 0 ({CONF}:1)"),
    # Without a first id, a range is its last id alone.
    (":60000 hard core 0", "warn", f":60000 hard core 0 ({CONF}:1)"),
    # What pam_limits skips: a range that is none, and % for anything but logins.
    ("1000:x hard core 0", "ok", ""),
    (": hard core 0", "ok", ""),
    ("ab:cd hard core 0", "ok", ""),
    ("%gpu hard core 0", "ok", ""),
    ("%gpu -", "ok", ""),
    ("* -", "ok", ""),
    ("@gpu -", "warn", f"@gpu is exempt from all limits ({CONF}:1)"),
    ("1000: -", "fail", f"1000: is exempt from all limits ({CONF}:1)"),
    # A later range of the same kind about at least the same people wins.
    ("1000:2000 - core 0\n1000:3000 - core unlimited", "ok", ""),
    ("1000:3000 - core unlimited\n1000:2000 - core 0", "warn", f"({CONF}:2)"),
    ("1000:2000 - core 0\n1000:1500 - core unlimited", "warn", f"({CONF}:1)"),
    ("ml - core 0\n1000: - core unlimited", "ok", ""),
    ("1000: - core unlimited\nml - core 0", "warn", f"({CONF}:2)"),
    # A range of uids wins over groups, wherever it stands.
    ("1000: - core unlimited\n@gpu - core 0", "ok", ""),
    ("@1000: - core unlimited\nml - core 0", "warn", f"({CONF}:2)"),
    ("@gpu - core 0\n@1000: - core unlimited", "ok", ""),
    # More than the policy's is as good, more than the kernel's is no login.
    ("ml - memlock unlimited\n@gpu - core unlimited", "ok", ""),
    ("ml - nofile 1048576", "ok", ""),
    ("ml - nofile unlimited", "ok", ""),
    ("ml - nofile 1048577", "fail", "ml soft nofile 1048577 breaks logins, ml hard nofile"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "status", "says"), EXCEPTIONS, ids=[e[0] for e in EXCEPTIONS])
def test_a_line_of_few_or_of_all(text: str, status: str, says: str) -> None:
    result = judged(node({CONF: text, OURS: GOOD}))["limits.exceptions"]
    assert result.status == status
    assert says in result.actual
    assert not result.fixable
    if status != "ok":
        assert result.source in says or result.source.startswith(CONF)
        assert result.source in result.fix


# The lines that give * and root their limits, and what is made of more than the policy's.
@pytest.mark.parametrize(
    ("text", "policy", "status", "expected"),
    [
        ("* - nofile 1048576", {"limit_nofile": 65536}, "ok", "at least 65536 for *, root"),
        ("* - nofile 65535", {"limit_nofile": 65536}, "fail", "at least 65536 for *, root"),
        ("* - nofile unlimited", {"limit_nofile": 65536}, "ok", "at least 65536 for *, root"),
        ("* - nofile 2000000", {"limit_nofile": 65536}, "fail", "at least 65536 for *, root"),
        ("* soft nofile 2048\n* hard nofile 65536", {"limit_nofile": 65536}, "fail",
         "at least 65536 for *, root"),
    ],
)  # fmt: skip
def test_more_than_the_policy_asks_for_is_what_was_asked(
    text: str, policy: dict[str, int], status: str, expected: str
) -> None:
    result = judged(node({CONF: f"{text}\n{text.replace('*', 'root')}"}), Policy(**policy))
    found = result["limits.nofile"]
    assert (found.status, found.expected) == (status, expected)
    assert found.fixable is (status == "fail")


def test_a_policy_of_no_cores_is_exact() -> None:
    policy = Policy(limit_core="0")
    found = judged(node({CONF: "* - core unlimited\nroot - core 0"}), policy)["limits.core"]
    assert (found.status, found.expected) == ("fail", "exactly 0 for *, root")
    seen = node({CONF: "* - core 0\nroot - core 0"})
    assert judged(seen, policy)["limits.core"].status == "ok"


def test_an_empty_file_masks_the_vendors() -> None:
    vendor = {"/usr/etc/security/limits.d/a.conf": "* - core 0"}
    seen = node({OURS: GOOD, **vendor}, "there=/etc/security/limits.d/a.conf")
    assert judged(seen)["limits.core"].status == "ok"
    main = {"/usr/etc/security/limits.conf": "ml - core 0"}
    assert judged(node({OURS: GOOD, **main}))["limits.exceptions"].status == "warn"
    seen = node({OURS: GOOD, **main}, f"there={CONF}")
    assert judged(seen)["limits.exceptions"].status == "ok"


SSHD, SU, SU_L = "/etc/pam.d/sshd", "/etc/pam.d/su", "/etc/pam.d/su-l"
CALL = "session required pam_limits.so"
SITE = "/etc/security/site.conf"
SSHD_CONFIG = "/etc/ssh/sshd_config"
# The files, the status of limits.pam, what it says, and where (pam.conf(5), pam_limits(8),
# sshd_config(5); the stacks of Debian 12, RHEL 9 and SLES 15).
STACKS = [
    ("nothing seen", {}, "na", "", ""),
    ("Debian", {SSHD: f"@include common-session\n{CALL}", SU: f"{CALL}\n@include common-session",
                "/etc/pam.d/common-session": "session required pam_unix.so"}, "ok", "", ""),
    ("RHEL", {SSHD: "session include password-auth\nsession include postlogin",
              SU: "session include system-auth", SU_L: "session include su",
              "/etc/pam.d/password-auth": "session required  pam_limits.so",
              "/etc/pam.d/system-auth": "-session optional pam_systemd.so\n"
              "session [success=1 default=ignore] pam_succeed_if.so service in crond\n" + CALL,
              "/etc/pam.d/postlogin": "session optional pam_lastlog.so"}, "ok", "", ""),
    ("SLES", {"/usr/lib/pam.d/sshd": "session include common-session",
              "/etc/pam.d/common-session": "session\trequired\tpam_limits.so"}, "ok", "", ""),
    ("a substack", {SSHD: "session substack system-auth", "/etc/pam.d/system-auth": CALL}, "ok",
     "", ""),
    ("brackets, a path, options", {SSHD: "session [default=1 success=ok] "
     "/lib/x86_64-linux-gnu/security/pam_limits.so debug noaudit set_all"}, "ok", "", ""),
    ("commented out", {SSHD: f"#{CALL}\nsession required pam_unix.so"}, "fail",
     "sshd calls no pam_limits", SSHD),
    ("of another kind", {SSHD: "auth required pam_limits.so"}, "fail", "no pam_limits", SSHD),
    ("an include that was not seen", {SSHD: "session include site-session"}, "ok", "", ""),
    ("su without", {SSHD: CALL, SU: "session required pam_unix.so"}, "warn",
     "su calls no pam_limits", SU),
    ("su-l without, su with", {SSHD: CALL, SU: CALL, SU_L: "session required pam_unix.so"}, "warn",
     "su-l calls no pam_limits", SU_L),
    ("conf= in sshd", {SSHD: f"auth required pam_unix.so\n{CALL} conf={SITE}",
                       SITE: "* hard core 0"},
     "fail", f"sshd reads {SITE} alone: core 0 for *", f"{SSHD}:2"),
    ("conf= with nothing", {SSHD: f"{CALL} conf={SITE}", SITE: ""}, "fail",
     "core unset for *, core unset for root", f"{SSHD}:1"),
    ("conf= in su", {SSHD: CALL, SU: f"{CALL} conf={SITE}", SITE: "* - nofile 1024"}, "warn",
     f"su reads {SITE} alone", f"{SU}:1"),
    ("conf= with all of it", {SSHD: f"{CALL} conf={SITE}", SITE: GOOD}, "ok", "", ""),
    ("conf= elsewhere", {SSHD: f"{CALL} conf=/opt/limits"}, "warn", "not looked at", f"{SSHD}:1"),
    ("conf= in what sshd includes", {SSHD: "session include system-auth", SITE: "* - core 0",
                                     "/etc/pam.d/system-auth": f"{CALL} conf={SITE}"},
     "fail", f"sshd reads {SITE} alone", "/etc/pam.d/system-auth:1"),
    ("a loop of includes", {SSHD: "@include sshd"}, "ok", "", ""),
    ("UsePAM no", {SSHD: CALL, SSHD_CONFIG: "Port 22\nUsePAM no"}, "fail", "does not use PAM",
     f"{SSHD_CONFIG}:2"),
    ("UsePAM yes", {SSHD: CALL, SSHD_CONFIG: "usepam yes\nUsePAM no"}, "ok", "", ""),
    ("UsePAM perhaps in a file that was not looked at",
     {SSHD: CALL, SSHD_CONFIG: "Include /opt/site/sshd.conf"}, "ok", "", ""),
    ("UsePAM in the vendor's files",
     {SSHD: CALL, "/usr/etc/ssh/sshd_config": "Include /usr/etc/ssh/sshd_config.d/*.conf",
      "/usr/etc/ssh/sshd_config.d/50-suse.conf": "UsePAM yes"}, "ok", "", ""),
    ("UsePAM nowhere", {SSHD: CALL, SSHD_CONFIG: "Port 22"}, "fail", "does not use PAM",
     SSHD_CONFIG),
    ("UsePAM in a file that comes first",
     {SSHD: CALL, SSHD_CONFIG: "Include /etc/ssh/sshd_config.d/*.conf\nUsePAM yes",
      "/etc/ssh/sshd_config.d/50.conf": "UsePAM=no"}, "fail", "does not use PAM",
     "/etc/ssh/sshd_config.d/50.conf:1"),
    ("UsePAM in a file that is not included",
     {SSHD: CALL, SSHD_CONFIG: "UsePAM yes",
      "/etc/ssh/sshd_config.d/50.conf": "UsePAM no"}, "ok", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "status", "says", "where"), [s[1:] for s in STACKS], ids=[s[0] for s in STACKS]
)
def test_whether_logins_take_the_limits(
    files: dict[str, str], status: str, says: str, where: str
) -> None:
    result = judged(node({OURS: GOOD, **files}))["limits.pam"]
    assert (result.status, result.source) == (status, where)
    assert says in result.actual
    if where:
        assert where.partition(":")[0] in result.fix


# What systemd gives to a unit that sets nothing (systemd-system.conf(5)).
@pytest.mark.parametrize(
    ("files", "status"),
    [
        ({}, "fail"),
        ({"/etc/systemd/system.conf": SET.replace("[Service]", "[Manager]")}, "fail"),
        ({"/etc/systemd/system.conf": SET.replace("[Service]\nL", "[Manager]\nDefaultL")
          .replace("\nL", "\nDefaultL")}, "ok"),
        ({"/etc/systemd/system.conf.d/9.conf": "[Manager]\nDefaultLimitCORE=infinity\n"
          "DefaultLimitMEMLOCK=infinity\nDefaultLimitNOFILE=1024:2M"}, "fail"),
        ({"/etc/systemd/system.conf.d/9.conf": "[Manager]\nDefaultLimitCORE=infinity\n"
          "DefaultLimitMEMLOCK=infinity\nDefaultLimitNOFILE=2M"}, "ok"),
    ],
)  # fmt: skip
def test_a_unit_without_limits_has_the_managers(files: dict[str, str], status: str) -> None:
    seen = node({UNIT: "[Service]\nExecStart=/x\n", **files}, f"unit=slurmd {UNIT}")
    assert judged(seen)["limits.services"].status == status


def test_a_drop_in_that_is_empty_masks_the_vendors() -> None:
    files = {
        UNIT: SET,
        "/usr/lib/systemd/system/slurmd.service.d/a.conf": "[Service]\nLimitCORE=0",
    }
    assert judged(node(files, f"unit=slurmd {UNIT}"))["limits.services"].status == "fail"
    seen = node(files, f"unit=slurmd {UNIT}", f"there={DROPINS}/a.conf")
    assert judged(seen)["limits.services"].status == "ok"


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
    strict = "/etc/pam.d/sshd:3:session required pam_limits.so"
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
        ("fail", wrong)
        if wrong
        else ("ok", "core unlimited, memlock unlimited, nofile at least 1048576")
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
