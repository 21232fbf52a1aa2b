"""The session of the job's user, its limits, and whether it can look into a process."""

from dataclasses import replace
from typing import Any

import pytest

from nodeready.agent.proofs import program, session
from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.core.settings import Waiver
from nodeready.subjects.proof import checks as proof
from nodeready.subjects.proof import debugging, facts
from nodeready.subjects.proof import session as session_checks
from nodeready.subjects.proof.facts import Attach, DebuggerAttempt, Limit, Proved, Service, User
from tests.builders.judging import by_name
from tests.builders.proof import AS_ROOT, GOOD, LIMITS, NO_GUARDS, SPY, WELL, judged
from tests.builders.verdicts import assert_verdict, policy_of
from tests.cases import cases, read_table

TOOLS = ("attach", "attach_nonblocking", "attach_native", "gdb", "strace")


def limit(value: int | list[int]) -> Limit:
    """A limit, written as soft and hard where the two differ."""
    soft, hard = value if isinstance(value, list) else (value, value)
    return Limit(soft, hard)


def limits(good: facts.SessionLimits, changes: dict[str, Any]) -> facts.SessionLimits:
    """The limits of a session; `before`, "same": PAM gave what the session has."""
    values = {
        name: limit(changes[name]) for name in changes if name in ("core", "nofile", "memlock")
    }
    changed = replace(good, nr_open=changes.get("nr_open", good.nr_open), **values)
    before = changes.get("before", good.before)
    if before == "same":
        before = (changed.core, changed.memlock, changed.nofile)
    elif "before" in changes:
        before = tuple(map(limit, before))
    others = tuple(changes.get("others", {}).get(item, -1) for item in facts.OTHER_ITEMS)
    ceiling = tuple(changes.get("ceiling", good.ceiling))
    ulimits = tuple(changes.get("ulimits", ()))
    return replace(changed, before=before, ceiling=ceiling, further=others, ulimits=ulimits)


def service(good: Service, lines: list[str] | None) -> Service:
    """A service's PAM lines, as `NUMBER MODULE WORDS`; None: its file cannot be read."""
    if lines is None:
        return replace(good, is_complete=False, lines=())
    path = good.path or f"/etc/pam.d/{good.name}"
    parts = [f"{line} ".split(" ", 2) for line in lines]
    pam_lines = [
        facts.PamLine(name, words.strip(), f"{path}:{number}") for number, name, words in parts
    ]
    return replace(good, path=path, lines=tuple(pam_lines))


PLAIN = (Limit(-1, -1), Limit(-1, -1), Limit(1048576, 1048576))
SU = replace(LIMITS, opener="su", before=PLAIN)
SSH, SRUN = replace(SU, opener="ssh"), replace(LIMITS, opener="srun")
SERVICES = (
    service(Service("ssh", "/etc/pam.d/sshd", True, ()), ["7 nologin", "40 limits"]),
    service(Service("su", "/etc/pam.d/su", True, ()), ["52 limits"]),
    Service("slurm", "", True, ()),
)
LOGINS = facts.Logins(
    SERVICES, use_pam=True, nologin="", notice="", shutdown=False,
    sshd=(*PLAIN[:2], Limit(1024, 524288)), slurmd=(), lines=(),
    domains=("ml", ":2000", "@:2000", "@ml", "@:3000", "@gpu"),
)  # fmt: skip
#: A node on which su and ssh open good sessions.
SESSIONS = replace(WELL, limits=SU, ssh=facts.SessionProof("", limits=SSH), logins=LOGINS)
WAYS = {
    "no key": facts.SessionProof("ml@node001: Permission denied (publickey)."),
    "closed": facts.SessionProof(
        "System is going down.; Connection closed by 10.0.0.2 port 22", closed=True
    ),
    "exit 1": facts.SessionProof("exit status 1", ended=True),
    "broken": Unknown("x"),
}


def way(value: str | dict[str, Any], good: facts.SessionLimits) -> facts.SessionProof | Unknown:
    if isinstance(value, str):
        return WAYS.get(value) or facts.SessionProof(value)
    return facts.SessionProof("", limits=limits(good, value))


def logins(case: dict[str, Any]) -> facts.Logins | None:
    changes = case.get("logins", {})
    if changes is None:
        return None
    rows = {key: tuple(map(limit, changes[key])) for key in ("sshd", "slurmd") if key in changes}
    text = case.get("own", case.get("line"))
    lines = (facts.LimitsLine("/etc/security/limits.d/x.conf", 3, text),) if text else ()
    pam = case.get("pam", {})
    services = tuple(service(s, pam[s.name]) if s.name in pam else s for s in SERVICES)
    return replace(LOGINS, **{**changes, **rows}, lines=lines, services=services)


def proved(case: dict[str, Any]) -> Proved:
    """What was proved on the node of a case.

    su, ssh, shell, login, step: what its session has instead of good limits, or why there is none
    only:          limits of su alone, where nothing is known of other ways
    own:           a line of limits.conf about the user, whose sessions have what it gives
    line:          such a line, and sessions that do not have it
    """
    if "only" in case:
        return replace(WELL, limits=limits(LIMITS, case["only"]))
    own = {"nofile": [2048, 1048576], "before": []} if "own" in case else {}
    observed = replace(
        SESSIONS, limits=limits(SU, case.get("su", own)), ssh=way(case.get("ssh", own), SSH),
        logins=logins(case),
    )  # fmt: skip
    if "shell" in case:
        shell = replace(SU, opener="shell")
        observed = replace(observed, shell=way(case["shell"], shell))
    if "login" in case:
        by_ssh, login = replace(SU, opener="ssh"), replace(SU, opener="login")
        own = limits(by_ssh, case.get("ssh", {}))
        observed = replace(observed, limits=own, ssh=None, login=way(case["login"], login))
    if "step" in case:
        observed = replace(observed, step=way(case["step"], SRUN))
    user = case.get("user", ["ml", 2000, True, ""])
    if "refused" in case:
        user = ["ml", 2000, True, f"no session: {case['refused']}"]
    return replace(observed, user=User(*user))


def attempt(value: Any) -> DebuggerAttempt | None:
    if isinstance(value, dict):
        return (
            DebuggerAttempt(SPY, **value)
            if value.get("rc") == facts.NO_START
            else replace(GOOD, **value)
        )
    refused = replace(GOOD, good=False, rc=1, complaint="Error: Permission Denied", refused=True)
    return {"good": GOOD, "refused": refused, "missing": DebuggerAttempt("")}.get(value)


def attached(case: dict[str, Any]) -> Proved:
    """All tools fared like this, and root's control like that."""
    tried = attempt(case["attempt"])
    guards = replace(NO_GUARDS, **case.get("guards", {}))
    root = attempt(case.get("root", "good"))
    root_guards = replace(AS_ROOT, **case.get("root_guards", {}))
    return replace(
        WELL,
        user=User("ml", case.get("uid", 2000), True, ""),
        attach=Attach(guards, "", tried, tried, tried),
        tracers=replace(WELL.tracers, guards=guards, gdb=tried, strace=tried),
        control=facts.Control(root_guards, "", root) if root else None,
    )


@pytest.mark.parametrize("case", cases(__file__, "data/proof.json"))
def test_verdict(case):
    """limits.conf(5), pam_limits(8), sshd_config(5) UsePAM, slurm.conf(5) PropagateResourceLimits,
    pam_nologin(8), sshd(8) FILES, pam_access(8), pam_listfile(8), shadow(5), ptrace(2).
    """
    policy = policy_of(case)
    observed = attached(case) if case["check"] == "attach" else proved(case)
    result = by_name(proof, observed, policy)[case["check"]]
    assert_verdict(result, case)
    if deploy := case.get("deploy"):
        assert result.fix == f"nodeready deploy INVENTORY --only {deploy}"
    else:
        assert case.get("fix", "") in result.fix
    assert result.fixable == bool(deploy)
    if case["check"] == "attach":
        # A refusal concerns all tools; what else goes wrong is told in each tool's own words.
        tools = TOOLS if result.status in ("ok", "na") or "refused" in result.actual else TOOLS[:3]
        statuses = judged(observed, policy)
        assert {statuses[tool][0] for tool in tools} == {result.status}
        if result.bad:
            assert {statuses[tool][1] for tool in tools} == {result.actual}


@pytest.mark.parametrize(
    ("name", "field"), [("user", "user"), ("limits", "limits"), ("gdb", "tracers"), *(
        (tool, "attach") for tool in TOOLS[:3])]
)  # fmt: skip
def test_what_was_not_proved_is_unknown(name, field):
    observed = replace(WELL, **{field: Unknown("timed out", "the first words")})
    assert judged(observed)[name] == ("unknown", "timed out: the first words")
    observed = replace(WELL, **{field: Unknown("timed out")})
    assert judged(observed)[name] == ("unknown", "timed out")


def test_without_a_session_or_a_canary_no_tool_is_judged():
    attach = replace(WELL.attach, error="python3 does not run", blocking=None)
    found = judged(replace(WELL, attach=attach))
    assert found["attach"] == ("unknown", "no process to look at: python3 does not run")
    assert judged(Proved(WELL.user)).keys() == {"user"}
    found = judged(Proved(User("ml", 2000, True, "no session: go away")))
    assert {found[tool] for tool in TOOLS} == {("na", "no session: see proof.user")}


def test_a_waived_core_does_not_hide_its_limit():
    zero = replace(SU, core=Limit(0, -1), before=(Limit(0, -1), *PLAIN[1:]))
    core = facts.ProvedCore("/c/core.%p", dumped=False, limit_bytes=0, expected="/c/core.1")
    by_ssh = facts.SessionProof("", limits=replace(zero, opener="ssh"))
    observed = replace(SESSIONS, limits=zero, ssh=by_ssh, core=core)
    assert debugging.core(observed, Policy()).status == "fail"
    assert session_checks.limits(observed, Policy()).status == "ok"
    result = session_checks.limits(
        observed, Policy(waivers=(Waiver("proof.core", "shared kernel"),))
    )
    assert (result.status, "core 0/unlimited" in result.actual) == ("fail", True)
    # Where only ssh's sessions have none, proof.core cannot tell.
    result = session_checks.limits(replace(observed, limits=SU, core=None), Policy())
    assert (result.status, "core 0/unlimited by ssh" in result.actual) == ("fail", True)


def test_a_gdb_that_only_one_way_in_breaks_is_told_of_that_way():
    broken = replace(
        GOOD, good=False, rc=127, complaint="gdb: error while loading shared libraries"
    )
    way = facts.SessionProof("", tracers=facts.Tracers(NO_GUARDS, "", broken, GOOD))
    for name, words in (("ssh", "by ssh"), ("shell", "by a shell as sshd starts it")):
        observed = replace(SESSIONS, **{"ssh": facts.SessionProof("no key"), name: way})
        result = debugging.gdb(observed, Policy())
        assert (result.status, result.actual) == ("fail", f"{words}: {broken.complaint}")
        assert debugging.strace(observed, Policy()).status == "ok"


def test_what_ssh_alone_refuses_is_told_of_ssh():
    refused = DebuggerAttempt(SPY, rc=1, complaint="Permission denied", refused=True)
    by_ssh = facts.SessionProof(
        "",
        attach=Attach(facts.Guards(None, None, False, True), "", refused, None, None),
    )
    result = debugging.attach(replace(SESSIONS, ssh=by_ssh), Policy())
    assert result.status == "fail"
    assert result.actual.startswith("by ssh: refused")
    late = facts.SessionProof("", attach=Attach(NO_GUARDS, "", None, None, None))
    assert debugging.attach(replace(SESSIONS, ssh=late), Policy()).status == "ok"


def test_a_core_that_ssh_alone_does_not_leave_is_told_of_ssh():
    whole = facts.ProvedCore(
        "/var/crash/core.%e.%p.%h.%t", dumped=True, path="/var/crash/c", size_bytes=9,
        whole_bytes=9, gdb="/usr/bin/gdb", frames=3,
    )  # fmt: skip
    policy = Policy(core_pattern=whole.pattern)
    lost = replace(
        whole, dumped=False, path="", directory=facts.CoreDirectory("/var/crash", "No such")
    )
    assert debugging.core(replace(SESSIONS, core=whole), policy).status == "ok"
    by_ssh = facts.SessionProof("", core=lost)
    result = debugging.core(replace(SESSIONS, core=whole, ssh=by_ssh), policy)
    assert (result.status, result.actual) == ("fail", "by ssh: none: /var/crash: No such")
    # Its limit is for proof.limits to tell, and what was not crashed proves nothing.
    for other in (replace(lost, limit_bytes=0), replace(whole, skipped="another one")):
        observed = replace(SESSIONS, core=whole, ssh=facts.SessionProof("", core=other))
        assert debugging.core(observed, policy).status == "ok"


@pytest.mark.parametrize("case", cases(__file__, "data/resources.json"))
def test_what_a_job_uses_can_be_used(case):
    """open(2), mmap(2), mount(8) noexec."""
    paths = ("/tmp", facts.SHM, "/home/ml")
    errors, exec_errors = case.get("errors", {}), case.get("exec_errors", {})
    places = [
        facts.JobDirectory(path, errors.get(path, ""), exec_errors.get(path, ""), 4 << 30)
        for path in paths
    ]
    devices = [facts.DeviceNode(*row) for row in case.get("devices", [])]
    observed = facts.Resources(tuple(places), tuple(devices), "/home/ml", case.get("memory_bytes"))
    policy = Policy(shm_min_mb=case.get("shm_min_mb", 0))
    result = session_checks.resources(replace(SESSIONS, resources=observed), policy)
    assert (result.status, case["words"] in result.actual) == (case["status"], True), result
    assert case.get("fix", "") in result.fix


@pytest.mark.parametrize(("files", "memory_mb"), read_table(__file__, "memory_of_a_job"))
def test_what_shared_memory_can_grow_by(tmp_path, files, memory_mb):
    """proc(5), cgroups(7), cgroup-v2.rst."""
    usual = {
        "proc/meminfo": "MemAvailable: 4194304 kB\nSwapFree: 2097152 kB\n",
        "proc/self/cgroup": "1:name=systemd:/x\n0::/a.slice/b.scope\n",
    }
    for name, text in {**usual, **files}.items():
        path = tmp_path / (name if name.startswith("proc/") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = program._memory_bytes(str(tmp_path))
    assert found == (memory_mb and memory_mb << 20)


PAM = "session required pam_limits.so\n"


@pytest.mark.parametrize("case", cases(__file__, "data/pam.json"))
def test_what_pam_asks(tmp_path, monkeypatch, case):
    """pam.conf(5)."""
    monkeypatch.setattr(session, "PAM_DIRECTORIES", (str(tmp_path),))
    (tmp_path / "own").write_text(case["text"])
    (tmp_path / "other").write_text("account required pam_access.so\nsession x pam_limits.so\n")
    observed = session._service("su", "none", "own")
    assert observed.is_complete is (case["lines"] is not None)
    if case["lines"] is not None:
        assert case["lines"] == [
            f"{line.module} {line.words}".strip() + f":{line.source.rpartition(':')[2]}"
            for line in observed.lines
        ]
    assert session._service("su", "none") == Service("su", "", True, ())


def test_whether_a_step_would_show_less():
    good, unlimited, soft = limit(1048576), limit(-1), limit([1024, 1048576])
    for step, submitter, lower in (
        ((unlimited,), (good,), False),
        ((good,), (unlimited,), True),
        ((good,), (good,), False),
        ((soft,), (good,), True),
        ((), (good,), False),
    ):
        assert any(map(session._is_lower, step, submitter)) == lower
