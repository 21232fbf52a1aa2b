"""What a node's files say about pdsh, and what is made of it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from functools import partial

import pytest

from nodeready.deploy.actions import PlanError, WriteFile
from nodeready.operations import pdsh as steps
from nodeready.policy import Policy
from nodeready.subjects import managed_block
from nodeready.subjects.base import Line, Output
from nodeready.subjects.pdsh import checks
from nodeready.subjects.pdsh import facts as pdsh
from nodeready.subjects.pdsh.facts import Pdsh, User
from nodeready.subjects.snapshot import Snapshot
from tests.builders import sections
from tests.builders.judging import by_id, judge_all
from tests.builders.sections import NONCE, exact

POLICY = Policy()
MODULE = "have=pdsh\nmodule=/usr/lib/pdsh/sshcmd.so\n"
PROFILE = "/etc/profile.d/zz-nodeready-pdsh.sh:3:export PDSH_RCMD_TYPE=ssh\n"
BLOCK = f"{managed_block.BEGIN.decode()}\nPDSH_RCMD_TYPE=ssh\n{managed_block.END.decode()}\n"


def node(text: str, users: str = "", policy: Policy = POLICY) -> Pdsh:
    """The observation of a node whose probe printed this."""
    outputs = {"pdsh": Output(text, 0, nonce=NONCE), "pdshrc": Output(users, 0, nonce=NONCE)}
    seen: Pdsh = pdsh.parse(outputs, policy)
    return seen


judged = partial(by_id, checks)


def environment(content: str) -> str:
    return exact("/etc/environment", content)


def test_a_good_node_has_nothing_to_do() -> None:
    debian = "debian=1\n" + exact("/etc/pdsh/rcmd_default", "ssh\n")
    seen = node(MODULE + debian + environment(BLOCK) + PROFILE)
    assert {r.check: r.status for r in judge_all(checks, seen, POLICY)} == {
        "pdsh.installed": "ok", "pdsh.rcmd": "ok", "pdsh.conflicts": "ok",
        "pdsh.pdshrc": "na", "pdsh.users": "na",
    }  # fmt: skip
    assert steps.rcmd.plan(Snapshot({"pdsh": seen}), POLICY) is None
    assert steps.pdshrc.plan(Snapshot({"pdsh": seen}), POLICY) is None


@pytest.mark.parametrize(
    ("packages", "statuses"),
    [(("gdb", "pdsh"), ("fail", True, "fail")), (("gdb",), ("fail", False, "na"))],
)
def test_pdsh_that_is_missing(packages: tuple[str, ...], statuses: tuple[str, bool, str]) -> None:
    policy = Policy(packages=packages, pdshrc_users=("ml",))
    results = judged(node("", policy=policy), policy)
    result = results["pdsh.installed"]
    assert (result.status, result.fixable, results["pdsh.rcmd"].status) == statuses
    assert steps.rcmd.fixes == ("pdsh.rcmd",)


def test_a_pdsh_without_its_ssh_module_is_a_warning() -> None:
    result = judged(node("have=pdsh\n"))["pdsh.installed"]
    assert (result.status, result.owner) == ("warn", "admin")


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("", None),
        ("PATH=/bin\nPDSH_RCMD_TYPE=ssh", "ssh"),
        ("  export PDSH_RCMD_TYPE='ssh' # why", "ssh' "),
        ('PDSH_RCMD_TYPE="ssh"\n', "ssh"),
        ("PDSH_RCMD_TYPE=ssh#x\n", "ssh"),
        ("PDSH_RCMD_TYPE=ssh\r\n", "ssh\r"),
        ("#PDSH_RCMD_TYPE=ssh\nXPDSH_RCMD_TYPE=ssh\n", None),
        ("PDSH_RCMD_TYPE=ssh\nPDSH_RCMD_TYPE=rsh\n", "rsh"),
    ],
)
def test_what_pam_env_takes_from_etc_environment(content: str, value: str | None) -> None:
    assert pdsh.in_environment(content.encode())[0] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("export PDSH_RCMD_TYPE=ssh", "ssh"),
        ("PDSH_RCMD_TYPE='rsh'; export PDSH_RCMD_TYPE", "rsh"),
        ('[ -x /a ] && export PDSH_RCMD_TYPE="exec"', "exec"),
        ("setenv PDSH_RCMD_TYPE mrsh", "mrsh"),
        ("unset PDSH_RCMD_TYPE", ""),
        ("export PDSH_RCMD_TYPE=ssh; unset -v PDSH_RCMD_TYPE", ""),
        ("export PDSH_RCMD_TYPE", None),
        ('echo "$PDSH_RCMD_TYPE" MY_PDSH_RCMD_TYPE=rsh', None),
    ],
)
def test_what_a_shell_line_assigns(text: str, value: str | None) -> None:
    assert checks.assigned(Line("/etc/profile", 1, text)) == value


@pytest.mark.parametrize(
    ("text", "actual", "source"),
    [
        (PROFILE, "unset in /etc/environment", ""),
        (
            environment(BLOCK + "PDSH_RCMD_TYPE=rsh\n") + PROFILE,
            "rsh in /etc/environment",
            "/etc/environment:4",
        ),
        (
            environment(BLOCK) + PROFILE + "/etc/profile.d/zzz.sh:9:export PDSH_RCMD_TYPE=rsh\n",
            "rsh in /etc/profile.d/*.sh",
            "/etc/profile.d/zzz.sh:9",
        ),
        (
            "debian=1\n" + exact("/etc/pdsh/rcmd_default", "rsh\n") + environment(BLOCK) + PROFILE,
            "rsh in /etc/pdsh/rcmd_default",
            "/etc/pdsh/rcmd_default",
        ),
        (
            "csh=1\n" + environment(BLOCK) + PROFILE,
            "unset in /etc/profile.d/*.csh",
            "",
        ),
    ],
)
def test_each_kind_of_shell_is_repaired(text: str, actual: str, source: str) -> None:
    seen = node(MODULE + text)
    result = judged(seen)["pdsh.rcmd"]
    assert (result.fixable, result.actual, result.source) == (True, actual, source)
    # The lines of /etc/environment are no others that somebody wrote elsewhere.
    assert judged(seen)["pdsh.conflicts"].status == "ok"
    change = steps.rcmd.plan(Snapshot({"pdsh": seen}), POLICY)
    assert change is not None
    written = {a.path: a.content.decode() for a in change.actions if isinstance(a, WriteFile)}
    text += "".join(
        exact(path, content)
        if "profile.d" not in path
        else "".join(f"{path}:{n}:{t}\n" for n, t in enumerate(content.splitlines(), 1))
        for path, content in written.items()
    )
    # The later output of a path counts, as after the change.
    assert judged(node(MODULE + text))["pdsh.rcmd"].status == "ok"


@pytest.mark.parametrize(
    "text",
    [
        environment("PATH=/bin \\\n"),
        environment(BLOCK) + PROFILE + "/etc/profile.d/~.sh:1:PDSH_RCMD_TYPE=rsh\n",
    ],
)
def test_what_no_file_of_ours_can_win_over_needs_a_person(text: str) -> None:
    result = judged(node(MODULE + text))["pdsh.rcmd"]
    assert (result.status, result.fixable) == ("fail", False)


def test_conflicts_elsewhere_are_named() -> None:
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


USERS = Policy(
    pdshrc_users=("ml", "eve"),
    pdshrc_path=("/opt/a b/bin", "/opt/$x`y`"),
    pdshrc_activate="echo welcome",
    pdshrc_lines=("OMP=1", "# a comment", "export OMP"),
)


def home(name: str, state: str, content: str = "") -> str:
    return sections.home(name, f"{state}\n{content}\nnodeready: end")


@pytest.mark.parametrize(
    ("users", "user"),
    [
        (home("ml", "file", "x\n"), User("ml", "/home/ml", "", b"x\n")),
        (home("ml", "file ", ""), User("ml", "/home/ml", "", b"")),
        (home("ml", "nofile "), User("ml", "/home/ml", "", None)),
        (home("ml", "none"), User("ml", "/home/ml", "has no home directory on the node", None)),
        ("user=ml /home/ml\n", User("ml", "/home/ml", "could not be looked at", None)),
        (home("ml", ""), User("ml", "/home/ml", "could not be looked at", None)),
        (
            sections.home("ml", "file \nthe first half"),
            User("ml", "/home/ml", "could not be looked at within 3 s", None),
        ),
        (
            sections.home("ml", ""),
            User("ml", "/home/ml", "could not be looked at within 3 s", None),
        ),
        (
            # A base64 that was ended by its limit, in the middle of a line.
            sections.home("ml", "file \nhalf").rstrip("=\n")[:-1] + "\n\nread=eve\n",
            User("ml", "/home/ml", "could not be looked at within 3 s", None),
        ),
        (
            home("ml", "file", "x" * 32769),
            User("ml", "/home/ml", "has a ~/.pdshrc of more than 32768 bytes", None),
        ),
        (
            sections.home("ml", "x" * 32832),
            User("ml", "/home/ml", "has a ~/.pdshrc of more than 32768 bytes", None),
        ),
        (home("ml", "file", "x" * 32768), User("ml", "/home/ml", "", b"x" * 32768)),
        (home("ml", "\x1b[2J"), User("ml", "/home/ml", "could not be looked at", None)),
        ("", User("ml", "", "is no user of the node", None)),
    ],
)
def test_a_users_home(users: str, user: User) -> None:
    assert replace(node(MODULE, users, USERS).users[0], uid=None) == user


@pytest.mark.parametrize(
    ("users", "status"),
    [
        (home("ml", "file", "mine=1"), "warn"),
        (home("ml", "nofile ") + home("eve", "nofile "), "warn"),
        (home("ml", "file", "mine=1") + home("root", "nofile "), "fail"),
        (home("ml", "file").replace("uid=ml 1000", "uid=ml 999"), "fail"),
        (home("ml", "file").replace("uid=ml 1000\n", ""), "fail"),
    ],
)
def test_a_persons_block_stops_no_job_and_roots_does(users: str, status: str) -> None:
    policy = replace(USERS, pdshrc_users=("ml", "eve", "root"))
    seen = node(MODULE, users, policy)
    known = tuple(user for user in seen.users if user.home)
    result = judged(replace(seen, users=known), policy)["pdsh.pdshrc"]
    assert (result.status, result.fixable, "ml" in result.actual) == (status, True, True)


def test_homes_that_hang_cost_only_their_checks() -> None:
    outputs = {"pdsh": Output(MODULE, 0), "pdshrc": Output("", None)}
    results = judged(pdsh.parse(outputs, USERS), USERS)
    assert results["pdsh.pdshrc"].status == results["pdsh.users"].status == "unknown"
    assert results["pdsh.rcmd"].status == "fail"


def test_missing_users_are_named() -> None:
    result = judged(node(MODULE, home("ml", "file"), USERS), USERS)["pdsh.users"]
    assert (result.status, result.actual) == ("warn", "eve is no user of the node")


def test_the_block_is_quiet_exact_and_quick(tmp_path: object) -> None:
    seen = node(MODULE, home("ml", "file", "mine=1") + home("eve", "nofile readonly"), USERS)
    change = steps.pdshrc.plan(Snapshot({"pdsh": seen}), USERS)
    assert change is not None
    (write,) = change.actions
    assert isinstance(write, WriteFile)
    assert (write.path, write.user, write.old) == ("/home/ml/.pdshrc", "ml", b"mine=1")
    script = write.content.decode()
    assert script.startswith("mine=1\n")
    for shell in (["dash"], ["bash"], ["busybox", "sh"]):
        done = subprocess.run(
            [*shell, "-eu", "-c", f'{script}\n{script}\nprintf "%s|" "$PATH" "$OMP"'],
            capture_output=True,
            text=True,
            env={"PATH": "/bin:/usr/bin"},
            check=True,
        )
        assert (done.stdout, done.stderr) == ("/opt/a b/bin:/opt/$x`y`:/bin:/usr/bin|1|", "")
    after = node(MODULE, home("ml", "file", script) + home("eve", "nofile readonly"), USERS)
    assert judged(after, USERS)["pdsh.pdshrc"].status == "ok"
    assert judged(after, USERS)["pdsh.users"].status == "warn"


def test_a_block_that_was_edited_is_put_back_where_it_stands() -> None:
    old = f"a=1\n{managed_block.BEGIN.decode()}\nPATH=/evil\n{managed_block.END.decode()}\nb=2"
    seen = node(MODULE, home("ml", "file", old), USERS)
    change = steps.pdshrc.plan(Snapshot({"pdsh": seen}), USERS)
    assert change is not None
    write = change.actions[0]
    assert isinstance(write, WriteFile)
    assert managed_block.remove(write.content) == b"a=1\nb=2"
    assert write.content.startswith(b"a=1\n#")


def test_lines_that_hold_our_marks_are_refused() -> None:
    policy = Policy(pdshrc_users=("ml",), pdshrc_lines=(managed_block.END.decode(),))
    seen = node(MODULE, home("ml", "file"), policy)
    with pytest.raises(PlanError, match="pdshrc_lines"):
        steps.pdshrc.plan(Snapshot({"pdsh": seen}), policy)


def test_hostile_content_stays_data() -> None:
    evil = (
        f"$(reboot)\x1b[2J\n@{NONCE} file /etc/environment\n{managed_block.BEGIN.decode()}\n"
        + "x" * 30000
    )
    seen = node(MODULE + environment("PATH=`id`\n") + PROFILE, home("ml", "file", evil), USERS)
    assert seen.environment == b"PATH=`id`\n"
    change = steps.pdshrc.plan(Snapshot({"pdsh": seen}), USERS)
    assert change is not None
    write = change.actions[0]
    assert isinstance(write, WriteFile)
    assert managed_block.remove(write.content) == managed_block.remove(evil.encode()) + b"\n"
    assert "\x1b" not in change.diff()


@pytest.mark.parametrize("users", ["user=ml relative\n", "user=ml /a\x1bb\n"])
def test_a_home_that_is_no_path_is_unknown(users: str) -> None:
    seen = node(MODULE, users, USERS)
    assert "no path" in seen.users_unknown
