"""What a node's files say about pdsh, and what is made of it."""

import subprocess
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from nodeready.core import own_files
from nodeready.core.base import Line, Output
from nodeready.core.policy import Policy
from nodeready.operations import pdsh as steps
from nodeready.runs.deploy.actions import PlanError, WriteFile
from nodeready.subjects.access import parse_access
from nodeready.subjects.pdsh import checks
from nodeready.subjects.pdsh import facts as pdsh
from nodeready.subjects.pdsh.facts import Pdsh, PdshUser
from nodeready.subjects.snapshot import Snapshot
from tests.builders import sections
from tests.builders.judging import by_id, judge_all
from tests.builders.printed import grep_lines
from tests.builders.sections import NONCE, exact
from tests.builders.verdicts import assert_says
from tests.cases import read_table

POLICY = Policy()
BEGIN, END = own_files.BEGIN.decode(), own_files.END.decode()
MODULE = "have=pdsh\nmodule=/usr/lib/pdsh/sshcmd.so\n"
PROFILE = "/etc/profile.d/zz-nodeready-pdsh.sh:3:export PDSH_RCMD_TYPE=ssh\n"
BLOCK = f"{BEGIN}\nPDSH_RCMD_TYPE=ssh\n{END}\n"
BLOCKED = exact("/etc/environment", BLOCK) + PROFILE

judged = partial(by_id, checks)


def node(text: str, users: str = "", policy: Policy = POLICY) -> Pdsh:
    outputs = {"pdsh": Output(text, 0, nonce=NONCE), "pdshrc": Output(users, 0, nonce=NONCE)}
    observed: Pdsh = pdsh.parse(outputs, policy)
    return observed


def environment(content: str) -> str:
    return exact("/etc/environment", content)


def default(word: str) -> str:
    return "debian=1\n" + exact("/etc/pdsh/rcmd_default", f"{word}\n")


def test_a_good_node_has_nothing_to_do():
    observed = node(MODULE + default("ssh") + BLOCKED)
    statuses = [result.status for result in judge_all(checks, observed, POLICY)]
    assert statuses == ["ok", "ok", "ok", "na", "na"]
    for step in (steps.rcmd, steps.pdshrc):
        assert step.plan(Snapshot({"pdsh": observed}), POLICY) is None


def test_pdsh_that_is_missing():
    both = ("gdb", "pdsh")
    for printed, packages, installed, rcmd in (
        ("", both, ("fail", True), "fail"),
        ("", ("gdb",), ("fail", False), "na"),
        # Without its ssh module, a package of its own on RHEL and SLES.
        ("have=pdsh\n", both, ("warn", False), "fail"),
    ):
        policy = Policy(packages=packages, pdshrc_users=("ml",))
        results = judged(node(printed, policy=policy), policy)
        result = results["pdsh.installed"]
        assert ((result.status, result.fixable), results["pdsh.rcmd"].status) == (installed, rcmd)
    assert steps.rcmd.fixes == ("pdsh.rcmd",)


@pytest.mark.parametrize(("modes", "words"), read_table(__file__, "modules"))
def test_pdsh_loads_no_module_that_others_could_have_changed(modes, words):
    """modes: of the module, of a directory above it, and of pdsh's program (src/pdsh/mod.c; tried
    with 2.34); words: why pdsh does not load the module.
    """
    paths = ("/usr/lib/pdsh/sshcmd.so", "/usr/lib/pdsh", "/usr/bin/pdsh.bin")
    rows = "".join(f"at={mode} 0 5000 {path}\n" for mode, path in zip(modes, paths, strict=True))
    observed = replace(
        node(MODULE + default("ssh")), access=parse_access({"access": Output(rows, 0)})
    )
    result = judged(observed)["pdsh.installed"]
    assert_says(result, f"fail: {words}" if words else "ok")


def test_what_pam_env_takes_from_etc_environment():
    values = read_table(__file__, "etc_environment")
    assert {text: pdsh.in_environment(text.encode())[0] for text in values} == values


def test_what_a_shell_line_assigns():
    values = read_table(__file__, "shell_lines")
    assert {text: checks.assigned(Line("/x", 1, text)) for text in values} == values


@pytest.mark.parametrize(("text", "actual", "source"), [
    (PROFILE, "unset in /etc/environment", ""),
    (environment(BLOCK + "PDSH_RCMD_TYPE=rsh\n") + PROFILE, "rsh in /etc/environment",
     "/etc/environment:4"),
    (BLOCKED + "/etc/profile.d/zzz.sh:9:export PDSH_RCMD_TYPE=rsh\n",
     "rsh in /etc/profile.d/*.sh", "/etc/profile.d/zzz.sh:9"),
    (default("rsh") + BLOCKED, "rsh in /etc/pdsh/rcmd_default",
     "/etc/pdsh/rcmd_default"),
    ("csh=1\n" + BLOCKED, "unset in /etc/profile.d/*.csh", ""),
])  # fmt: skip
def test_each_kind_of_shell_is_repaired(text, actual, source):
    observed = node(MODULE + text)
    result = judged(observed)["pdsh.rcmd"]
    assert (result.fixable, result.actual, result.source) == (True, actual, source)
    # The lines of /etc/environment are no others that somebody wrote elsewhere.
    assert judged(observed)["pdsh.conflicts"].status == "ok"
    change = steps.rcmd.plan(Snapshot({"pdsh": observed}), POLICY)
    assert change is not None
    # The later output of a path counts, as after the change.
    for action in change.actions:
        if isinstance(action, WriteFile):
            show = grep_lines if "profile.d" in action.path else lambda f: exact(*f.popitem())
            text += show({action.path: action.content.decode()})
    assert judged(node(MODULE + text))["pdsh.rcmd"].status == "ok"


def test_conflicts_elsewhere_are_named():
    text = (
        "/etc/bash.bashrc:3:export PDSH_RCMD_TYPE=rsh\n"
        "/etc/bash.bashrc:4:# export PDSH_RCMD_TYPE=rsh\n"
        "/etc/csh.cshrc:8:unsetenv PDSH_RCMD_TYPE\n"
        "/etc/profile:1:export PDSH_RCMD_TYPE=ssh\n"
        "/etc/profile.d/a.sh:1:export PDSH_RCMD_TYPE=rsh\n"
    )
    result = judged(node(MODULE + text))["pdsh.conflicts"]
    assert (result.status, result.owner) == ("warn", "admin")
    assert result.actual == "rsh (/etc/bash.bashrc:3), unset (/etc/csh.cshrc:8)"
    # What no file of ours can win over needs a person.
    continued = environment("PATH=/bin \\\n")
    last = f"{BLOCKED}/etc/profile.d/~.sh:1:PDSH_RCMD_TYPE=rsh\n"
    for printed in (continued, last):
        result = judged(node(MODULE + printed))["pdsh.rcmd"]
        assert (result.status, result.fixable) == ("fail", False)


USERS = Policy(
    pdshrc_users=("ml", "eve"),
    pdshrc_path=("/opt/a b/bin", "/opt/$x`y`"),
    pdshrc_activate="echo welcome",
    pdshrc_lines=("OMP=1", "# a comment", "export OMP"),
)
UNSEEN = "could not be looked at"
SLOW = f"{UNSEEN} within 3 s"
LARGE = "has a ~/.pdshrc of more than 32768 bytes"


def home(name: str, state: str, content: str = "") -> str:
    return sections.home(name, f"{state}\n{content}\nnodeready: end")


@pytest.mark.parametrize(("printed", "trouble", "content"), [
    (home("ml", "file", "x\n"), "", b"x\n"),
    (home("ml", "file ", ""), "", b""),
    (home("ml", "nofile "), "", None),
    (home("ml", "none"), "has no home directory on the node", None),
    ("user=ml /home/ml\n", UNSEEN, None),
    (home("ml", ""), UNSEEN, None),
    (home("ml", "\x1b[2J"), UNSEEN, None),
    (sections.home("ml", "file \nthe first half"), SLOW, None),
    (sections.home("ml", ""), SLOW, None),
    # A base64 that was ended by its limit, in the middle of a line.
    (sections.home("ml", "file \nhalf").rstrip("=\n")[:-1] + "\n\nread=eve\n", SLOW, None),
    (home("ml", "file", "x" * 32769), LARGE, None),
    (sections.home("ml", "x" * 32832), LARGE, None),
    (home("ml", "file", "x" * 32768), "", b"x" * 32768),
    ("", "is no user of the node", None),
])  # fmt: skip
def test_a_users_home(printed, trouble, content):
    user = PdshUser("ml", "/home/ml" if printed else "", trouble, content)
    assert replace(node(MODULE, printed, USERS).users[0], uid=None) == user


def test_a_persons_block_stops_no_job_and_roots_does():
    policy = replace(USERS, pdshrc_users=("ml", "eve", "root"))
    mine, none = home("ml", "file", "mine=1"), home("ml", "file")
    for users, status in (
        (mine, "warn"),
        (home("ml", "nofile ") + home("eve", "nofile "), "warn"),
        (mine + home("root", "nofile "), "fail"),
        (none.replace("uid=ml 1000", "uid=ml 999"), "fail"),
        (none.replace("uid=ml 1000\n", ""), "fail"),
    ):
        observed = node(MODULE, users, policy)
        known = tuple(user for user in observed.users if user.home)
        result = judged(replace(observed, users=known), policy)["pdsh.pdshrc"]
        assert (result.status, result.fixable, "ml" in result.actual) == (status, True, True)


def test_homes_that_hang_or_are_no_paths_cost_only_their_checks():
    outputs = {"pdsh": Output(MODULE, 0), "pdshrc": Output("", None)}
    for printed in ("user=ml relative\n", "user=ml /a\x1bb\n", None):
        hung = pdsh.parse(outputs, USERS)
        observed = hung if printed is None else node(MODULE, printed, USERS)
        assert "no path" in observed.users_unknown or printed is None
        results = judged(observed, USERS)
        assert results["pdsh.pdshrc"].status == results["pdsh.users"].status == "unknown"
        assert results["pdsh.rcmd"].status == "fail"


def write_pdshrc(observed: Pdsh, policy: Policy = USERS) -> tuple[WriteFile, str]:
    change: Any = steps.pdshrc.plan(Snapshot({"pdsh": observed}), policy)
    (write,) = change.actions
    assert isinstance(write, WriteFile)
    return write, change.diff()


def test_the_block_is_quiet_exact_and_quick(posix_sh):
    readonly = home("eve", "nofile readonly")
    write, _ = write_pdshrc(node(MODULE, home("ml", "file", "mine=1") + readonly, USERS))
    assert (write.path, write.user, write.old) == ("/home/ml/.pdshrc", "ml", b"mine=1")
    script = write.content.decode()
    assert script.startswith("mine=1\n")
    done = subprocess.run(
        [*posix_sh, "-eu", "-c", f'{script}\n{script}\nprintf "%s|" "$PATH" "$OMP"'],
        capture_output=True,
        text=True,
        env={"PATH": "/bin:/usr/bin"},
        check=True,
    )
    assert (done.stdout, done.stderr) == ("/opt/a b/bin:/opt/$x`y`:/bin:/usr/bin|1|", "")
    results = judged(node(MODULE, home("ml", "file", script) + readonly, USERS), USERS)
    assert results["pdsh.pdshrc"].status == "ok"
    assert results["pdsh.users"].status == "warn"
    known = node(MODULE, home("ml", "file", script), USERS)
    missing = judged(known, USERS)["pdsh.users"]
    assert (missing.status, missing.actual) == ("warn", "eve is no user of the node")
    # A block that was edited is put back where it stands.
    old = f"a=1\n{BEGIN}\nPATH=/evil\n{END}\nb=2"
    write, _ = write_pdshrc(node(MODULE, home("ml", "file", old), USERS))
    assert own_files.remove_block(write.content) == b"a=1\nb=2"
    assert write.content.startswith(b"a=1\n#")


def test_lines_that_hold_our_marks_are_refused():
    policy = Policy(pdshrc_users=("ml",), pdshrc_lines=(END,))
    observed = node(MODULE, home("ml", "file"), policy)
    with pytest.raises(PlanError, match="pdshrc_lines"):
        steps.pdshrc.plan(Snapshot({"pdsh": observed}), policy)


def test_hostile_content_stays_data():
    hostile = f"$(reboot)\x1b[2J\n@{NONCE} file /etc/environment\n{BEGIN}\n" + "x" * 30000
    printed = MODULE + environment("PATH=`id`\n") + PROFILE
    observed = node(printed, home("ml", "file", hostile), USERS)
    assert observed.environment == b"PATH=`id`\n"
    change: Any = steps.rcmd.plan(Snapshot({"pdsh": observed}), USERS)
    assert "+PDSH_RCMD_TYPE=ssh" in change.diff().splitlines()
    # The lines of others, which may hold a secret, are not shown with ours.
    assert "PATH=" not in change.diff()
    write, diff = write_pdshrc(observed)
    assert (
        own_files.remove_block(write.content) == own_files.remove_block(hostile.encode()) + b"\n"
    )
    assert "\x1b" not in diff
