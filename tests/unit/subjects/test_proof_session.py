"""The session of the job's user: opened as a login is, with the limits that it really has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nodeready.node.proofs import session
from nodeready.policy import Policy
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import checks as proof
from nodeready.subjects.proof.facts import (
    Attach,
    Attempt,
    Core,
    Directory,
    Guards,
    Limit,
    LimitsLine,
    Logins,
    PamLine,
    Proved,
    Service,
    User,
    Way,
)
from tests.builders.proof import LIMITS, WELL

NONE = Limit(-1, -1)
LOW = Limit(1024, 1048576)


@pytest.mark.parametrize(
    ("user", "status", "actual", "fix"),
    [
        (User("ml", 2000, True, ""), "ok", "a session of ml", ""),
        (User("ml", 2000, False, ""), "ok", "a session of ml", ""),
        (User("root", 0, True, ""), "ok", "a session of root", ""),
        (
            User("root", 0, False, ""),
            "warn",
            "proved as root, whom Yama does not stop",
            "--user NAME proves it for the job's user",
        ),
        (
            User("x", -1, True, "no such user: x"),
            "fail",
            "no such user: x",
            "create x on the node, or name another user",
        ),
        (
            User("x", 9, True, "no session: Permission denied"),
            "fail",
            "no session: Permission denied",
            "`su - x -c id`, as root on the node, has to work",
        ),
        (
            User("x", 9, True, "logged in as ml, who cannot become x: log in as root"),
            "fail",
            "logged in as ml, who cannot become x: log in as root",
            "log in as root, or name no user",
        ),
        (Unknown("did not finish in time"), "unknown", "did not finish in time", ""),
        (Unknown("timed out", "hello"), "unknown", "timed out: hello", ""),
    ],
)
def test_whose_session_it_is(user, status, actual, fix):
    result = proof.user(Proved(user), Policy())
    assert (result.status, result.actual, result.fix) == (status, actual, fix)


@pytest.mark.parametrize(
    ("limits", "status", "actual"),
    [
        (LIMITS, "ok", "core unlimited, memlock unlimited, nofile 1048576"),
        (
            replace(LIMITS, nofile=Limit(2097152, 2097152), nr_open=2097152),
            "ok",
            "core unlimited, memlock unlimited, nofile 1048576",
        ),
        (replace(LIMITS, nofile=LOW), "fail", "nofile 1024/1048576"),
        (
            replace(LIMITS, memlock=Limit(8388608, 8388608), nofile=LOW),
            "fail",
            "memlock 8192, nofile 1024/1048576",
        ),
        (replace(LIMITS, core=Limit(0, -1)), "fail", "core 0/unlimited"),
        # PAM gave it, and it is gone.
        (
            replace(LIMITS, nofile=Limit(512, 512), before=(NONE, NONE, LIMITS.nofile)),
            "fail",
            "nofile 512: the profile lowers nofile",
        ),
        (
            replace(LIMITS, nofile=Limit(512, 512), before=(NONE, NONE, LOW)),
            "fail",
            "nofile 512",
        ),
        # What the kernel refuses, the subject limits tells.
        (
            replace(LIMITS, nofile=LOW, nr_open=524288),
            "ok",
            "core unlimited, memlock unlimited",
        ),
        (
            replace(LIMITS, memlock=Limit(0, 65536), ceiling=(-1, 65536, 1048576)),
            "ok",
            "core unlimited, nofile 1048576",
        ),
        (replace(LIMITS, nofile=LOW, ceiling=(-1, -1, 1048576)), "fail", "nofile 1024/1048576"),
        (Unknown("the proof's answer makes no sense", "[]"), "unknown", "the proof's answer"),
    ],
)
def test_limits(limits, status, actual):
    result = proof.limits(replace(WELL, limits=limits), Policy())
    assert result.status == status
    assert result.actual.startswith(actual)


def test_nothing_that_the_kernel_gives_is_not_ok():
    limits = replace(LIMITS, ceiling=(0, 0, 512))
    assert proof.limits(replace(WELL, limits=limits), Policy()).status == "na"


def test_who_repairs_a_limit():
    low = replace(WELL, limits=replace(LIMITS, nofile=LOW))
    result = proof.limits(low, Policy())
    assert (result.fixable, result.fix) == (True, "nodeready deploy INVENTORY --only limits")
    before = (NONE, NONE, LIMITS.nofile)
    lowered = replace(WELL, limits=replace(LIMITS, nofile=LOW, before=before))
    result = proof.limits(lowered, Policy())
    assert (result.fixable, "ulimit of nofile from ml's profile" in result.fix) == (False, True)


# --- The other ways in: ssh, and slurmd for jobs.

GOOD = Limit(1048576, 1048576)
SSH = replace(LIMITS, way="ssh", before=(NONE, NONE, GOOD))
SU = replace(LIMITS, way="su", before=(NONE, NONE, GOOD))
PLAIN = PamLine("limits", "", "/etc/pam.d/sshd:40")
NOLOGIN = PamLine("nologin", "", "/etc/pam.d/sshd:7")
CONF = PamLine("limits", "conf=/etc/security/other.conf", "/etc/pam.d/sshd:40")
SSHD = Service("ssh", "/etc/pam.d/sshd", True, (NOLOGIN, PLAIN))
SU_PAM = Service("su", "/etc/pam.d/su", True, (PamLine("limits", "", "/etc/pam.d/su:52"),))
SU_CONF = replace(SU_PAM, lines=(replace(CONF, where="/etc/pam.d/su:52"),))
OWN = (NONE, NONE, Limit(1024, 524288))
LOGINS = Logins(
    (SSHD, SU_PAM, Service("slurm", "", True, ())),
    use_pam=True,
    nologin="",
    says="",
    shutdown=False,
    sshd=OWN,
    slurmd=(),
    lines=(),
    domains=("ml", ":2000", "@:2000", "@ml", "@:3000", "@gpu"),
)
WAYS = replace(WELL, limits=SU, ssh=Way("", limits=SSH), logins=LOGINS)
FEW = Limit(1024, 4096)


def by_ssh(**other):
    """What ssh's session has instead."""
    return replace(WAYS, ssh=Way("", limits=replace(SSH, **other)))


def with_logins(seen=WAYS, **other):
    return replace(seen, logins=replace(LOGINS, **other))


def services(ssh=SSHD, su=SU_PAM, slurm=LOGINS.services[2]):
    return (ssh, su, slurm)


def own_line(text):
    """A line of the user's own, and sessions that have it."""
    few = replace(SU, nofile=Limit(2048, 1048576), before=())
    both = replace(WAYS, limits=few, ssh=Way("", limits=replace(few, way="ssh")))
    line = LimitsLine("/etc/security/limits.d/x.conf", 3, text)
    return with_logins(both, lines=(line,))


NO_KEY = Way("ml@node001: Permission denied (publickey).")
LOW_SSH = by_ssh(nofile=FEW, before=(NONE, NONE, FEW))
SLURMD = (NONE, NONE, Limit(1024, 131072))
BY_WAYS = {
    "all well": (WAYS, "ok", "core unlimited, memlock unlimited, nofile 1048576", ""),
    "more than is asked": (
        replace(
            WAYS,
            limits=replace(SU, nofile=Limit(2097152, 2097152), nr_open=2097152),
            ssh=Way("", limits=replace(SSH, nofile=Limit(2097152, 2097152), nr_open=2097152)),
        ),
        "ok",
        "nofile 1048576",
        "",
    ),
    "no key": (replace(WAYS, ssh=NO_KEY), "ok", "not proved by ssh: Permission denied", ""),
    "a hung ssh": (replace(WAYS, ssh=Way("timed out")), "ok", "not proved by ssh: timed out", ""),
    "ssh's proof is broken": (replace(WAYS, ssh=Unknown("x")), "ok", "nofile 1048576", ""),
    "conf= in sshd": (
        with_logins(LOW_SSH, services=services(replace(SSHD, lines=(CONF,)))),
        "fail",
        "nofile 1024/4096 by ssh: pam_limits reads /etc/security/other.conf by "
        "/etc/pam.d/sshd:40; nofile 1048576 by su -",
        "take conf=/etc/security/other.conf off /etc/pam.d/sshd:40",
    ),
    "conf= in sshd, and no key": (
        with_logins(
            replace(WAYS, ssh=NO_KEY), services=services(replace(SSHD, lines=(CONF,)))
        ),
        "warn",
        "not seen by ssh, where pam_limits reads /etc/security/other.conf",
        "take conf=/etc/security/other.conf off",
    ),
    "conf= in both, all well": (
        with_logins(services=services(replace(SSHD, lines=(CONF,)), SU_CONF)), "ok", "", ""
    ),
    "conf=, the usual file": (
        with_logins(
            replace(WAYS, ssh=NO_KEY),
            services=services(
                replace(SSHD, lines=(replace(CONF, words="conf=/etc/security/limits.conf"),))
            ),
        ),
        "ok",
        "",
        "",
    ),
    "conf= in su": (
        with_logins(
            replace(WAYS, limits=replace(SU, nofile=FEW, before=())),
            services=services(su=SU_CONF),
        ),
        "fail",
        "nofile 1024/4096 by su -: pam_limits reads /etc/security/other.conf by /etc/pam.d/su:52",
        "off /etc/pam.d/su:52",
    ),
    "no pam_limits in sshd": (
        with_logins(LOW_SSH, services=services(replace(SSHD, lines=()))),
        "fail",
        "no pam_limits in /etc/pam.d/sshd",
        "add `session required pam_limits.so` to /etc/pam.d/sshd",
    ),
    "no pam_limits in sshd, and no key": (
        with_logins(replace(WAYS, ssh=NO_KEY), services=services(replace(SSHD, lines=()))),
        "fail",
        "nofile 1024/524288 by ssh: no pam_limits in /etc/pam.d/sshd; nofile 1048576 by su -",
        "add `session required",
    ),
    "a file that cannot be read": (
        with_logins(
            replace(WAYS, ssh=NO_KEY), services=services(replace(SSHD, whole=False, lines=()))
        ),
        "ok",
        "not proved by ssh",
        "",
    ),
    "no pam_limits in su": (
        with_logins(
            replace(WAYS, limits=replace(SU, nofile=FEW, before=())),
            services=services(su=replace(SU_PAM, lines=())),
        ),
        "fail",
        "no pam_limits in /etc/pam.d/su; nofile 1048576 by ssh",
        "to /etc/pam.d/su",
    ),
    "UsePAM no": (
        with_logins(LOW_SSH, use_pam=False),
        "fail",
        "sshd does not ask PAM: UsePAM no",
        "UsePAM yes",
    ),
    "UsePAM no, and no key": (
        with_logins(replace(WAYS, ssh=NO_KEY), use_pam=False),
        "fail",
        "nofile 1024/524288 by ssh: sshd does not ask PAM",
        "UsePAM yes",
    ),
    "a ulimit in ~/.bashrc": (
        by_ssh(nofile=Limit(300, 300)),
        "fail",
        "nofile 300 by ssh: the shell's start-up lowers nofile; nofile 1048576 by su -",
        "~/.bashrc",
    ),
    "a ulimit in ~/.profile": (
        replace(WAYS, limits=replace(SU, core=Limit(0, 0))),
        "fail",
        "core 0 by su -: the profile lowers core; core unlimited by ssh",
        "ml's profile, or /etc/profile",
    ),
    "sshd's own limits": (
        by_ssh(nofile=OWN[2], before=()),
        "fail",
        "nofile 1024/524288 by ssh: these are sshd's own; nofile 1048576 by su -",
        "journalctl -t sshd",
    ),
    "less by ssh, nobody knows why": (
        by_ssh(nofile=FEW, before=()),
        "fail",
        "nofile 1024/4096 by ssh; nofile 1048576 by su -",
        "compare /etc/pam.d/sshd and /etc/pam.d/su",
    ),
    "the files say less": (
        replace(
            WAYS,
            limits=replace(SU, nofile=FEW, before=()),
            ssh=Way("", limits=replace(SSH, nofile=FEW, before=())),
        ),
        "fail",
        "nofile 1024/4096",
        "nodeready deploy INVENTORY --only limits",
    ),
    "both less, each for its reason": (
        with_logins(
            replace(LOW_SSH, limits=replace(SU, core=Limit(0, 0))),
            services=services(replace(SSHD, lines=(CONF,))),
        ),
        "fail",
        "core 0 by su -: the profile lowers core; nofile 1024/4096 by ssh: pam_limits reads",
        "",
    ),
    "both enough, and not the same": (
        by_ssh(nofile=Limit(1048576, 2097152), nr_open=2097152),
        "warn",
        "nofile 1048576 by su -; nofile 1048576/2097152 by ssh",
        "compare /etc/pam.d/sshd and /etc/pam.d/su",
    ),
    "the user's line": (
        own_line("ml soft nofile 2048"), "fail",
        "nofile 2048/1048576: ml has limits of its own (/etc/security/limits.d/x.conf:3)",
        "raise or remove the line /etc/security/limits.d/x.conf:3",
    ),
    "a group's line": (own_line("@gpu - nofile 2048"), "fail", "@gpu has limits", "raise or rem"),
    "a range of users": (own_line("1000:3000 - nofile 2048"), "fail", "1000:3000 has", "raise"),
    "an open range": (own_line("1000: - nofile 2048"), "fail", "1000: has limits", "raise or"),
    "one number": (own_line(":2000 - nofile 2048"), "fail", ":2000 has limits", "raise or"),
    "a range of groups": (own_line("@2500:3500 - nofile 2048"), "fail", "@2500:3500 has", "raise"),
    "exempt": (own_line("ml -"), "fail", "ml is exempt from all limits", "raise or remove"),
    "another user's": (own_line("ada - nofile 2048"), "fail", "nofile 2048/1048576", "deploy"),
    "another range": (own_line("5000: - nofile 2048"), "fail", "nofile 2048", "nodeready deploy"),
    "the user's line beats the group's": (
        replace(
            own_line("@gpu - nofile 2048"), limits=SU, ssh=Way("", limits=SSH)
        ), "ok", "", "",
    ),
    "slurmd has less": (
        with_logins(slurmd=SLURMD),
        "fail",
        "nofile 131072 by slurmd: slurmd's own limits, which its jobs inherit; "
        "nofile 1048576 by su -",
        "systemctl restart slurmd, when idle",
    ),
    "slurmd's soft limit alone, and no step": (
        replace(
            with_logins(slurmd=(NONE, NONE, Limit(1024, 1048576))),
            step=Way("Requested nodes are busy"),
        ),
        "ok",
        "not proved by srun: Requested nodes are busy",
        "",
    ),
    "slurmd's soft limit, and a step has more": (
        replace(
            with_logins(slurmd=(NONE, NONE, Limit(1024, 1048576))),
            step=Way("", limits=replace(LIMITS, way="srun")),
        ),
        "ok",
        "",
        "",
    ),
    "slurmd's soft limit, and a step has it": (
        replace(
            with_logins(slurmd=(NONE, NONE, Limit(1024, 1048576))),
            step=Way("", limits=replace(LIMITS, nofile=Limit(1024, 1048576), way="srun")),
        ),
        "fail",
        "nofile 1024/1048576 by srun: slurmd's own limits",
        "systemctl restart slurmd",
    ),
    "a step gets what the submitter has": (
        replace(
            with_logins(slurmd=(NONE, NONE, GOOD)),
            step=Way("", limits=replace(LIMITS, nofile=Limit(1024, 1048576), way="srun")),
        ),
        "fail",
        "nofile 1024/1048576 by srun: slurmd itself has more",
        "PropagateResourceLimitsExcept",
    ),
    "Slurm's own PAM may raise them": (
        with_logins(
            slurmd=SLURMD, services=services(slurm=replace(SSHD, name="slurm", lines=(PLAIN,)))
        ),
        "ok",
        "",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_WAYS)
def test_limits_in_every_way_in(name):
    """limits.conf(5), pam_limits(8), sshd_config(5) UsePAM, slurm.conf(5)
    PropagateResourceLimits."""
    seen, status, actual, fix = BY_WAYS[name]
    result = proof.limits(seen, Policy())
    assert (result.status, actual in result.actual, fix in result.fix) == (status, True, True), (
        result
    )
    assert result.fixable == (status == "fail" and result.fix.endswith("--only limits"))


def test_a_waived_core_does_not_hide_its_limit():
    zero = replace(SU, core=Limit(0, -1), before=(Limit(0, -1), NONE, GOOD))
    core = Core("/c/core.%p", dumped=False, limit_bytes=0, expected="/c/core.1")
    seen = replace(WAYS, limits=zero, ssh=Way("", limits=replace(zero, way="ssh")), core=core)
    assert proof.core(seen, Policy()).status == "fail"
    assert proof.limits(seen, Policy()).status == "ok"
    waived = Policy(waivers=(("proof.core", "shared kernel"),))
    result = proof.limits(seen, waived)
    assert (result.status, "core 0/unlimited" in result.actual) == ("fail", True)
    # Where only ssh's sessions have none, proof.core cannot tell.
    result = proof.limits(replace(seen, limits=SU, core=None), Policy())
    assert (result.status, "core 0/unlimited by ssh" in result.actual) == ("fail", True)


def test_what_ssh_alone_refuses_is_told_of_ssh():
    refused = Attempt("/usr/local/bin/py-spy", rc=1, said="Permission denied", refused=True)
    way = Way("", attach=Attach(Guards(None, None, False, True), "", refused, None, None))
    result = proof.attach(replace(WAYS, ssh=way), Policy())
    assert result.status == "fail"
    assert result.actual.startswith("by ssh: refused")
    late = Way("", attach=Attach(Guards(None, None, False, False), "", None, None, None))
    assert proof.attach(replace(WAYS, ssh=late), Policy()).status == "ok"
    whole = Core(
        "/var/crash/core.%e.%p.%h.%t", dumped=True, path="/var/crash/c", size_bytes=9,
        whole_bytes=9, gdb="/usr/bin/gdb", frames=3,
    )  # fmt: skip
    want = Policy(core_pattern=whole.pattern)
    lost = replace(whole, dumped=False, path="", directory=Directory("/var/crash", "No such"))
    assert proof.core(replace(WAYS, core=whole), want).status == "ok"
    result = proof.core(replace(WAYS, core=whole, ssh=Way("", core=lost)), want)
    assert (result.status, result.actual) == ("fail", "by ssh: none: /var/crash: No such")
    # Its limit is for proof.limits to tell, and what was not crashed proves nothing.
    for other in (replace(lost, limit_bytes=0), replace(whole, skipped="another one")):
        seen = replace(WAYS, core=whole, ssh=Way("", core=other))
        assert proof.core(seen, want).status == "ok"


CLOSED = Way("System is going down.; Connection closed by 10.0.0.2 port 22", closed=True)
AT = "/run/nologin"


def refused(said, seen=WAYS):
    return replace(seen, user=User("ml", 2000, True, f"no session: {said}"))


ACCESS = replace(SU_PAM, lines=(PamLine("access", "", "/etc/pam.d/su:61"), *SU_PAM.lines))
LISTED = PamLine("listfile", "item=user sense=allow file=/etc/su.users", "/etc/pam.d/su:3")
REFUSALS = {
    "nologin, no key": (
        replace(with_logins(nologin=AT, says="down"), ssh=NO_KEY),
        "fail", "ssh is closed to ml: /run/nologin is there (down)", "remove /run/nologin",
    ),
    "nologin, ssh refused": (
        replace(with_logins(nologin="/etc/nologin"), ssh=CLOSED),
        "fail", "ssh is closed to ml: /etc/nologin is there", "remove /etc/nologin",
    ),
    "nologin, a shutdown": (
        replace(with_logins(nologin=AT, shutdown=True), ssh=CLOSED),
        "fail", "a shutdown is pending", "shutdown -c",
    ),
    "nologin, UsePAM no": (
        replace(with_logins(nologin=AT, use_pam=False), ssh=NO_KEY), "fail", "is closed", "remove",
    ),
    "nologin, and ssh lets the user in": (with_logins(nologin=AT), "ok", "", ""),
    "nologin that sshd does not ask for": (
        replace(
            with_logins(nologin=AT, services=services(replace(SSHD, lines=(PLAIN,)))), ssh=NO_KEY
        ),
        "ok", "", "",
    ),
    "nologin, root": (
        replace(with_logins(nologin=AT), ssh=NO_KEY, user=User("root", 0, True, "")), "ok", "", "",
    ),
    "nologin, no sshd": (
        replace(with_logins(nologin=AT, sshd=()), ssh=Way("Connection refused")), "ok", "", "",
    ),
    "nologin in su": (
        refused("System is going down", with_logins(nologin=AT, says="System is going down")),
        "fail", "/run/nologin is there", "remove /run/nologin",
    ),
    "expired": (
        refused("Your account has expired; please contact your system administrator."),
        "fail", "expired", "chage -E -1 ml",
    ),
    "expired, by RHEL": (
        refused("su: User account has expired"), "fail", "expired", "chage -E -1 ml",
    ),
    "must change": (
        refused("You are required to change your password immediately (administrator enforced)."),
        "fail", "required to change", "passwd ml",
    ),
    "an old password": (
        refused("su: Authentication token is no longer valid; new one required"),
        "fail", "no longer valid", "passwd ml",
    ),
    "pam_access": (
        refused("su: Permission denied", with_logins(services=services(su=ACCESS))),
        "fail", "pam_access may refuse ml (/etc/pam.d/su:61)", "/etc/security/access.conf",
    ),
    "pam_listfile": (
        refused(
            "su: Permission denied",
            with_logins(services=services(su=replace(SU_PAM, lines=(LISTED,)))),
        ),
        "fail", "pam_listfile may refuse ml", "let ml in: /etc/su.users",
    ),
    "a module that is gone": (
        refused("su: Module is unknown"), "fail", "Module", "the module that /etc/pam.d/su names",
    ),
    "too many logins": (
        refused("su: Too many logins for 'ml'."), "fail", "Too many", "raise maxlogins for ml",
    ),
    "nobody knows why": (
        refused("su: Permission denied"), "fail", "denied", "`su - ml -c id`, as root on the node",
    ),
    "nothing told": (
        refused("go away", replace(WAYS, logins=None)), "fail", "go away", "`su - ml -c id`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_who_refuses_a_login(name):
    """pam_nologin(8), sshd(8) FILES, pam_access(8), pam_listfile(8), shadow(5)."""
    seen, status, actual, fix = REFUSALS[name]
    result = proof.user(seen, Policy())
    assert (result.status, actual in result.actual, fix in result.fix) == (status, True, True), (
        result
    )


PAM_FILES = {
    "plain": ("session required pam_limits.so\n", [("limits", "", 1)]),
    "with a path and words": (
        "# x\nsession  required  /lib/security/pam_limits.so  conf=/o.conf debug # x\n",
        [("limits", "conf=/o.conf debug", 2)],
    ),
    "a dash, brackets, capitals": (
        "-Session [success=1 default=ignore] pam_limits.so\n", [("limits", "", 1)],
    ),
    "a comment": ("# session required pam_limits.so\n", []),
    "not a session's": ("auth required pam_limits.so\naccount required pam_limits.so\n", []),
    "two lines": ("session required \\\n pam_limits.so\n", [("limits", "", 1)]),
    "an @include": ("@include other\n", [("access", "", 1), ("limits", "", 2)]),
    "an include of one stack": ("session include other\n", [("limits", "", 2)]),
    "a substack": ("account substack other\n", [("access", "", 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", PAM_FILES)
def test_what_pam_asks(name, tmp_path, monkeypatch):
    """pam.conf(5)."""
    text, wanted = PAM_FILES[name]
    monkeypatch.setattr(session, "PAM_DIRECTORIES", (str(tmp_path),))
    (tmp_path / "one").write_text(text)
    (tmp_path / "other").write_text("account required pam_access.so\nsession x pam_limits.so\n")
    seen = session._service("su", "none", "one")
    found = [(one.module, one.words, int(one.where.rpartition(":")[2])) for one in seen.lines]
    assert (found, seen.whole) == (wanted, True)


def test_a_file_of_pams_that_cannot_be_read_or_includes_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "PAM_DIRECTORIES", (str(tmp_path),))
    for text in ("@include missing\n", "@include one\n", "session include one\n"):
        (tmp_path / "one").write_text(text)
        assert not session._service("su", "one").whole
    assert session._service("su", "none") == Service("su", "", True, ())


@pytest.mark.parametrize(
    ("these", "than", "lower"),
    [
        ((GOOD,), (GOOD,), False),
        ((NONE,), (GOOD,), False),
        ((GOOD,), (NONE,), True),
        ((Limit(1024, 1048576),), (GOOD,), True),
        ((), (GOOD,), False),
    ],
)
def test_whether_a_step_would_show_less(these, than, lower):
    assert session._lower(these, than) == lower
