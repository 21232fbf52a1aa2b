"""What a user owns on a node says nothing in root's answer but that user's own row.

mallory is among the policy's pdshrc_users, so that every look reads her ~/.pdshrc with her own
rights: she owns that process while it runs.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodeready.core import probe_script, shell
from nodeready.core.policy import Policy
from nodeready.lab import LabNode
from nodeready.subjects import snapshot
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof.facts import Attach, Control
from nodeready.subjects.snapshot import Snapshot
from tests.attacks.conftest import Person
from tests.builders.proof import configured, line, put_py_spy
from tests.cases import read_data, read_table
from tests.command import Tool, ours, wait_for

#: Takes a lease on her ~/.pdshrc (fcntl(2)): whoever opens the file waits until she gives it
#: back, or for 45 s; as many as $2 says may open it first. Of the waiting process, which has her
#: uid, she takes every descriptor (pidfd_getfd(2)), writes into those that take it what $1 says,
#: keeps them, and stops the process.
_HIJACK = r"""
import ctypes, fcntl, glob, os, re, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
text, passes = sys.argv[1], int(sys.argv[2])
home, uid, own = os.environ["HOME"], os.getuid(), os.getpid()
broken = []
signal.signal(signal.SIGIO, lambda *_: broken.append(1))
def lease():
    while True:
        file = os.open(f"{home}/.pdshrc", os.O_RDWR)
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            return file
        except BlockingIOError:
            os.close(file)
file = lease()
open(f"{home}/waits", "w").close()
nonces = set()
def strangers():
    for path in glob.glob("/proc/[0-9]*"):
        try:
            if os.stat(path).st_uid == uid and int(path[6:]) != own:
                yield int(path[6:])
        except OSError:
            pass
def words(hurries=False):
    for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        if hurries and broken:
            # Whoever opens the file waits for three seconds only.
            return
        try:
            data = open(path, "rb").read()
        except OSError:
            continue
        nonces.update(re.findall(rb"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])", data))
until = time.monotonic() + 60
while time.monotonic() < until:
    words(hurries=True)
    if broken and not passes:
        break
    if broken:
        passes -= 1
        os.close(file)
        broken.clear()
        file = lease()
kept, taken, log = [], {}, []
for pid in strangers():
    pidfd = os.pidfd_open(pid)
    for number in range(0, 64):
        fd = libc.syscall(438, pidfd, number, 0)
        if fd >= 0:
            kept.append(fd)
            taken[number] = os.readlink(f"/proc/self/fd/{fd}")
            nonce = (sorted(nonces) or [b"0" * 16])[0].decode()
            forged = text.replace("NONCE", nonce).encode()
            try:
                os.set_blocking(fd, False)
                os.write(fd, forged)
            except OSError as problem:
                log.append(f"{number} {problem}")
    os.kill(pid, signal.SIGSTOP)
    log.append(f"stopped {pid}")
words()
with open(f"{home}/log", "w") as out:
    for number, name in taken.items():
        print("taken", number, name, file=out)
    print("nonces", len(nonces), file=out)
    print(*log, sep="\n", file=out)
time.sleep(600)
"""

#: The node's row of an audit, and its results by check.
_Audited = tuple[dict[str, Any], dict[str, Any]]

#: Sections as root's shell prints them: of a unit and a file that are somebody else's.
_FORGED = read_data(__file__, "forged_sections.txt")

_USERS = {"pdshrc_users": ["mallory", "bob"]}


@pytest.fixture
def audited(
    tool: Tool, fleet: Callable[..., Path], fresh_node: LabNode, mallory: Person, bob: Person
) -> Callable[[], _Audited]:
    inventory = fleet([fresh_node], **_USERS)
    assert tool("deploy", inventory, "--yes", "--only", "pdsh").status == 0

    def audit() -> _Audited:
        done = tool("audit", inventory, "--format", "json")
        assert done.status in {0, 3}, done
        ((name, results),) = done.results.items()
        return done.nodes[name], results

    return audit


def _stopping(results: dict[str, Any]) -> set[str]:
    """The checks that give a node no job."""
    return {check for check, one in results.items() if one["status"] in {"fail", "unknown"}}


def _hijack(mallory: Person, text: str, passes: int = 0) -> None:
    mallory.python(_HIJACK, text, str(passes))
    wait_for(lambda: mallory.run("test -e waits", check=False).returncode == 0)


def _taken(mallory: Person) -> dict[str, str]:
    """The descriptors that she took, by their numbers there; nothing has told her the nonce."""
    wait_for(lambda: mallory.run("test -s log", check=False).returncode == 0)
    log = mallory.run("cat log").stdout
    assert "stopped" in log, log
    assert "nonces 0" in log, log
    return dict(re.findall(r"^taken (\d+) (.*)$", log, re.M))


def _named(results: dict[str, Any]) -> str:
    """Why mallory's row is not known; bob's row is."""
    row = results["pdsh.users"]
    assert row["status"] == "warn", row
    assert results["pdsh.pdshrc"]["status"] == "ok"
    (hers,) = row["actual"].split("; ")
    assert hers.startswith("mallory ")
    return hers.removeprefix("mallory ")


def test_her_process_holds_nothing_of_roots_answer(audited, mallory):
    """She has the process that reads her file: its memory, its descriptors, its signals."""
    _, quiet = audited()
    _hijack(mallory, _FORGED)
    node, results = audited()
    taken = _taken(mallory)
    assert (taken.pop("0"), taken.pop("2"), set(taken)) == ("/dev/null", "/dev/null", {"1"})
    assert _stopping(results) == _stopping(quiet)
    assert re.match("could not be looked at within 3 s|has a ~/.pdshrc of more", _named(results))
    # Not for as long as her lease holds, nor until the limits of all sections are over.
    assert node["seconds"] < 30


_MADE = read_table(__file__, "_MADE")


def test_her_file_costs_her_own_row_alone(audited, mallory):
    _, quiet = audited()
    for make, says in _MADE.items():
        mallory.run(f"rm .pdshrc; {make}")
        node, results = audited()
        assert _stopping(results) == _stopping(quiet), make
        assert _named(results) == says, make
        assert node["seconds"] < 30


@pytest.mark.nightly
def test_her_process_holds_nothing_of_a_deploys_change(fresh_node, mallory, bob, tool, fleet):
    """Nor does it keep bob from his block."""
    inventory = fleet([fresh_node], **_USERS)
    mallory.run("echo mine=1 >.pdshrc")
    bob.run("echo x >nodeready.cfg")
    fresh_node.write("/etc/systemd/system/bobs.service", "[Service]\nExecStart=/bin/true\n")
    before = fresh_node.enter(["sh", "-c", _STATE]).stdout
    # Her file is opened by the look, and then by the change.
    _hijack(mallory, "nr_done\n" * 8000, 1)
    done = tool("deploy", inventory, "--yes", "--only", "pdsh,core_dumps")
    _taken(mallory)
    assert done.status in {0, 1, 3}, done
    assert re.search("mallory", done.err + done.out), done
    file = fresh_node.testinfra().file(f"{bob.home}/.pdshrc")
    assert (file.user, "nodeready" in file.content_string) == ("bob", True)
    assert fresh_node.enter(["sh", "-c", _STATE]).stdout == before
    assert not ours(fresh_node)


#: What she would like root to change: who logs in, and what starts.
_STATE = """
    sha256sum /etc/passwd /etc/shadow /etc/group /home/bob/nodeready.cfg
    ls -lR /etc/systemd/system /etc/cron.d
"""


#: As random as every run's; here, the worst: every file and every tool knows it.
_NONCE = "0123456789abcdef"
_KNOWN = f"\n@{_NONCE} end\n{_FORGED.replace('NONCE', _NONCE)}"
_FILES = read_table(__file__, "_FILES")
#: Commands that the look starts, and what it starts them for.
_TOOLS = ("nvidia-smi", "nft", "hostname", "py-spy", "timedatectl", "dmesg", "chronyc", "ssh")


def test_content_that_knows_the_nonce_begins_no_section(fresh_nodes):
    """Nor ends one: not in a file, not from a tool, not in the path of a mount."""
    node = fresh_nodes(1, profile="h100")[0]
    users = ("ml", "mallory")
    policy = Policy(
        pdshrc_users=users, iommu_args=("iommu=pt",), gate=True, ssh_client_hosts=("gpu*", "x")
    )
    chosen = snapshot.probes()
    sections = snapshot.sections(chosen)
    script = probe_script.make_script(sections, policy, _NONCE)
    line, stdin = shell.command(script, 60, "nodeready:test")

    def look() -> tuple[list[str], Snapshot]:
        said = node.run(line, input=stdin).stdout
        body = probe_script.unpack(said, _NONCE).decode("utf-8", "surrogateescape")
        marks = re.findall(rf"^@{_NONCE} (begin \w+|piped \w+|end)$", body, re.M)
        return marks, snapshot.read(said, chosen, policy, _NONCE)

    node.enter(["useradd", "-m", "mallory"])
    before, quiet = look()
    sent = sorted(mark.split()[1] for mark in before if mark != "end")
    assert sent == sorted(section.name for section in sections)
    for path in _FILES:
        node.enter(["sh", "-c", 'mkdir -p "${1%/*}"; cat >>"$1"', "sh", path], _KNOWN)
    node.write("/srv/known", _KNOWN)
    for name in _TOOLS:
        node.write(f"/usr/local/sbin/{name}", "#!/bin/sh\nexec cat /srv/known\n", mode=0o755)
    node.write("/usr/local/bin/py-spy", "#!/bin/sh\nexec cat /srv/known\n", mode=0o755)
    mounted = f"/home/mallory/x{_KNOWN.replace('/', '_')[:200]}"
    node.enter(["sh", "-c", 'mkdir -p "$1" && mount -t tmpfs x "$1"', "sh", mounted])

    after, seen = look()

    assert after == before
    assert seen["ptrace"] == quiet["ptrace"]
    assert seen["core_dumps"].rewriters == quiet["core_dumps"].rewriters
    assert seen["core_dumps"].live == quiet["core_dumps"].live
    assert not any("bob" in path for path in seen.files)
    files = {user.name: user.pdshrc for user in seen["pdsh"].users}
    assert files == dict.fromkeys(users, _KNOWN.encode())


def test_the_jobs_user_does_not_say_what_root_saw(mallory):
    """Her profile can read the program that travels to her session, and with it the nonce."""
    node = mallory.node
    put_py_spy(node)
    config = configured(user="mallory", wanted=("attach",))
    forged = json.dumps({"broken": "forged"})
    said = shell.quote(f"{config.nonce} control {forged}")
    mallory.run("cat >.profile", input=f"echo {said}\n")
    command = line(config)
    done = node.run(command.line, input=command.stdin, check=False)
    seen = proved.read(done.stdout, config)
    assert isinstance(seen.attach, Attach), done.stdout
    assert isinstance(seen.control, Control), done.stdout
    assert "forged" not in done.stdout
