"""Nobody runs an inventory that another user of the control machine could have written.

This machine is the control machine: here root or alice runs the tool, and mallory is a user
without a name. Whether her code ran is told by a file in a directory of root's, or of alice's.
"""

import marshal
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest

from nodeready.fleet.inventory import trust
from tests.attacks.conftest import reached_by_all
from tests.cases import read, read_table
from tests.lab.batch import Line, run_batch

#: Her user and group on the control machine.
MALLORY = 4001
#: Who runs the tool where it is not root, and the group of a project of both.
ALICE, TEAM = 4002, 5001
#: Starts a program as alice. It reads what root can read: the interpreter may be in root's home.
AS_ALICE = (
    *("setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", f"--groups={TEAM}"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--"),
)


class Control:
    """A directory of root's on the control machine, with one of mallory's below it."""

    def __init__(self, base: Path) -> None:
        self.base, self.home = base, base / "mallory"
        self.secret = base / "secret"
        self.secret.mkdir(mode=0o700)
        self.home.mkdir()
        os.chown(self.home, MALLORY, MALLORY)
        self.write(
            "payload", f"open({str(self.secret / 'owned')!r}, 'w').close()\ngpu = ['gpu1']\n"
        )

    def write(self, name: str, text: str) -> Path:
        path = self.base / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
        return path

    def mallory(self, script: str, groups: str = "--clear-groups") -> None:
        """A shell script with her rights; it begins where root's files are."""
        become = ["setpriv", f"--reuid={MALLORY}", f"--regid={MALLORY}", groups, "--"]
        subprocess.run([*become, "sh", "-euc", script], cwd=self.base, check=True)

    @property
    def owned(self) -> bool:
        """Whether her code ran as root; forgets it."""
        found = (self.secret / "owned").exists()
        (self.secret / "owned").unlink(missing_ok=True)
        return found


@pytest.fixture
def control() -> Iterator[Control]:
    with reached_by_all(0o755) as place:
        yield Control(place)


#: What Mallory does, the inventory that root runs after it, where root stands, and what the one
#: line names.
PLANTED = read(Path(__file__).with_name("planted.json"))


def compile_payload(base: Path, module: Path) -> None:
    """What Python would make of her code, and would take for the one of an empty module."""
    code = compile((base / "payload").read_text(), str(module), "exec")
    seen = b"".join(int(n).to_bytes(4, "little") for n in (0, module.stat().st_mtime, 0))
    (base / "made.pyc").write_bytes(MAGIC_NUMBER + seen + marshal.dumps(code))


def furnish(control: Control) -> None:
    """Root's files, which PLANTED names, and what Mallory can change of them."""
    for name in ("fleet.py", "open/fleet.py"):
        control.write(name, "gpu = ['gpu001']\n")
    control.write("imports.py", "import sites\ngpu = ['gpu001']\n")
    for name, key, file in (
        ("connects.py", "ssh_config_file", "ssh"),
        ("knows.py", "ssh_known_hosts_file", "known"),
    ):
        control.write(name, f"gpu = [('gpu001', {{{key!r}: '{control.home}/{file}'}})]\n")
    control.write("sites.py", "").chmod(0o666)
    control.write("places/__init__.py", "")
    os.chown(control.base / "places", MALLORY, MALLORY)
    control.write("packaged.py", "from places import names\ngpu = ['gpu001']\n")
    old = control.write("old.py", "")
    control.write("compiled.py", "import old\ngpu = ['gpu001']\n")
    compile_payload(control.base, old)
    (control.base / "__pycache__").mkdir()
    (control.base / "__pycache__").chmod(0o777)
    (control.base / "open").chmod(0o777)


def test_another_users_words_do_not_run_as_root(tool):
    with ExitStack() as places:
        lines, controls = [], []
        for case in PLANTED:
            control = Control(places.enter_context(reached_by_all(0o755)))
            furnish(control)
            script, inventory = case["script"], case["inventory"]
            control.mallory(script.replace("{cache_tag}", str(sys.implementation.cache_tag)))
            # A name with a slash in front is below root's directory, wherever root stands.
            words = f"{control.base}{inventory}" if inventory.startswith("/") else inventory
            lines.append(
                Line(["bundle", words, "-o", tool.home / "made"], control.base / case["where"])
            )
            controls.append(control)
        ended = run_batch(tool, lines)
        for case, done, control in zip(PLANTED, ended, controls, strict=True):
            assert not control.owned, case
            assert (done.status, len(done.lines), done.out) == (2, 1, ""), (case, done)
            assert case["named"] in done.err, (case, done)
            assert "--trust-inventory" in done.err or case["name"] == "a module where root is"
        hers = controls[0].home / "trusted.py"
        controls[0].mallory("cp payload mallory/trusted.py")
        done = tool("bundle", hers, "--trust-inventory", "-o", tool.home / "made")
        assert (done.status, controls[0].owned) == (0, True), done


#: A variable or a file of root's home that leads to what others can write -> what the line names.
LEADING = read_table(__file__, "LEADING")


#: What mallory does in a sticky directory that she shares with alice, where alice stands, the
#: inventory and an option of her command ([]: she names none), and what the one line names; "":
#: the inventory is read. taken: mallory's code runs, as alice asks for it.
BESIDE = read(Path(__file__).with_name("beside.json"))


def furnish_shared(base: Path) -> None:
    """Alice's files, which BESIDE names, and where mallory can write beside them."""
    home = base / "alice"
    (home / "group_data").mkdir(parents=True)
    (base / "open" / "project").mkdir(parents=True)
    (base / "team").mkdir()
    plain = "gpu = ['gpu001']\n"
    (base / "own.py").write_text("")
    (home / "plain.py").write_text(plain)
    (home / "imports.py").write_text(f"import helper\n{plain}")
    (home / "compiled.py").write_text(f"import own\n{plain}")
    (home / "packaged.py").write_text(f"from places import names\n{plain}")
    adds = "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport helper\n"
    (base / "team" / "adds.py").write_text(adds + plain)
    (base / "team" / "plain.py").write_text(plain)
    (home / "group_data" / "all.py").write_text("ptrace_scope = 1\n")
    for path in (home, *home.rglob("*"), base / "own.py", *(base / "team").iterdir()):
        os.chown(path, ALICE, ALICE)
    os.chown(base / "open" / "project", ALICE, ALICE)
    (base / "open").chmod(0o777)
    os.chown(base / "team", 0, TEAM)
    (base / "team").chmod(0o2775)
    compile_payload(base, base / "own.py")


def test_another_users_words_do_not_run_as_alice(tool):
    """One rule for the inventory that nobody named, group_data, checks.d and each module."""
    os.chown(tool.home, ALICE, ALICE)
    with ExitStack() as places:
        lines, controls = [], []
        for case in BESIDE:
            control = Control(places.enter_context(reached_by_all(0o1777)))
            os.chown(control.secret, ALICE, ALICE)
            furnish_shared(control.base)
            script = case["script"].replace("{cache_tag}", str(sys.implementation.cache_tag))
            control.mallory(f"umask 002; {script}", groups=f"--groups={TEAM}")
            words = [word.replace("{base}", str(control.base)) for word in case["words"]]
            command = ["bundle", "-o", control.base / "made"] if words else ["waivers"]
            lines.append(Line([*command, *words], control.base / case["where"]))
            controls.append(control)
        ended = run_batch(tool, lines, prefix=AS_ALICE)
        for case, done, control in zip(BESIDE, ended, controls, strict=True):
            assert control.owned == case.get("taken", False), (case, done)
            if named := case["named"]:
                assert (done.status, done.out) == (2, ""), (case, done)
                assert named in done.err, (case, done)
                assert "is not taken by uid 4002" in done.err, (case, done)
                assert "--trust-inventory" in done.err, (case, done)
            else:
                assert done.status == 0, (case, done)


def test_no_home_of_hers_is_roots(tool, control):
    fleet, lines = control.write("fleet.py", "gpu = ['gpu001']\n"), []
    nothing = {"ssh_config_file": os.devnull, "ssh_known_hosts_file": os.devnull}
    sound = control.write("none.py", f"gpu = [('gpu001', {nothing})]\n")
    for number, (script, variables, _) in enumerate(LEADING.values()):
        home = tool.home / str(number)
        (home / ".ssh").mkdir(mode=0o700, parents=True)
        for name in ("config", "known_hosts"):
            (home / ".ssh" / name).touch(0o600)
        subprocess.run(["sh", "-euc", script], cwd=home, check=True)
        env = {key: value.format(hers=control.home) for key, value in variables.items()}
        environment = {"HOME": str(home), **env}
        lines.append(Line(["bundle", fleet, "-o", home / "made"], home, environment))
    trusted = [replace(line, env={**line.env, trust.VARIABLE: "1"}) for line in lines]
    ended = run_batch(tool, [Line(["bundle", sound, "-o", tool.home / "made"]), *lines, *trusted])
    assert ended[0].status == 0, ended[0]
    for (case, (_, _, named)), done in zip(LEADING.items(), ended[1:], strict=False):
        assert (done.status, len(done.lines), done.out) == (2, 1, ""), (case, done)
        assert named in done.err, done
        assert "uid 4001" in done.err or "is world-writable" in done.err, done
    assert {done.status for done in ended[1 + len(LEADING) :]} == {0}


def test_another_users_configuration_is_not_roots(tool, control):
    control.mallory(
        "mkdir mallory/nodeready; echo 'limit = \"gpu9\"' >mallory/nodeready/config.toml"
    )
    fleet = control.write("fleet.py", "gpu = ['gpu001']\n")

    def said(**env: str) -> str:
        env["XDG_CONFIG_HOME"] = str(control.home)
        done = tool("bundle", fleet, "-o", tool.home / "made", env=env)
        assert (done.status, len(done.lines)) == (2, 1), done
        return done.err

    refused = said()
    assert "belongs to uid 4001" in refused
    assert "NODEREADY_TRUST_INVENTORY=1" in refused
    # Asked for, it counts: there is no such node.
    assert "gpu9" in said(NODEREADY_TRUST_INVENTORY="1")
