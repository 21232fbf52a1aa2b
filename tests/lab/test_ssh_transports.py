"""The ways to a node are those of ssh: its configuration, its jump hosts, its masters, its limits.

What ssh itself does with the same words is the judge, wherever ssh can be asked.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nodeready.lab import LabNode
from tests.cases import read_table
from tests.command import Done, Tool, hang, hangs, wait_for
from tests.lab.rows import rows
from tests.paths import ROOT

AUDIT = ("--only", "ptrace", "--format", "json")


def reached(done: Done) -> dict[str, str]:
    """Each node of an audit: "" when it was reached, else why not."""
    return {name: done.reasons.get(name, "") for name in done.nodes}


class Logins:
    """How often somebody has logged in since now, by the node's sshd."""

    def __init__(self, node: LabNode) -> None:
        self.node, self._before = node, 0
        self._before = self()

    def __call__(self) -> int:
        text = self.node.log.read_text(errors="replace")
        return text.count("Accepted publickey") - self._before


class Site:
    """Keys, authorities and an agent of one user, and the files for them."""

    def __init__(self, directory: Path, node: LabNode) -> None:
        self.directory, self.node = directory, node
        self.words: dict[str, str] = {
            **PIECES,
            "d": str(directory),
            "a": node.address,
            "key": str(node.lab.ssh_key),
            "known": str(node.lab.known_hosts),
        }

    def keygen(self, *words: str) -> None:
        subprocess.run(["ssh-keygen", "-q", *words], check=True, cwd=self.directory)

    def key(self, name: str, kind: str = "ed25519", phrase: str = "") -> Path:
        self.keygen("-t", kind, "-N", phrase, "-f", name)
        return self.directory / name

    def file(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return path

    def config(self, name: str, text: str) -> Path:
        for word, value in self.words.items():
            text = text.replace(f"<{word}>", value)
        return self.file(f"config.{name}", text)


@pytest.fixture
def site(tmp_path: Path, fresh_node: LabNode) -> Site:
    directory = tmp_path / "site"
    directory.mkdir()
    return Site(directory, fresh_node)


@pytest.fixture
def agent(site: Site) -> Iterator[Callable[..., str]]:
    """An ssh-agent with these keys; its socket."""
    running = []

    def start(*keys: str | Path) -> str:
        path = str(site.directory / f"agent{len(running)}")
        running.append(subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=-3))
        wait_for(lambda: os.path.exists(path))
        for key in keys:
            env = {**os.environ, "SSH_AUTH_SOCK": path}
            subprocess.run(["ssh-add", "-q", str(key)], check=True, env=env, stderr=-3)
        return path

    yield start
    for one in running:
        one.kill()
        one.wait()


@pytest.fixture
def audited(fleet: Callable[..., Path], tool: Tool) -> Callable[..., dict[str, str]]:
    """Each of these hosts: "" when an audit reached it, else why not."""
    return lambda hosts, **how: reached(tool("audit", fleet([], hosts), *AUDIT, **how))


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for that of a socket (unix(7))."""
    with tempfile.TemporaryDirectory(prefix="nr") as path:
        yield Path(path)


#: What the configurations of WAYS and REASONS are made of; `<HERE>` stands for a piece.
PIECES = read_table(__file__, "PIECES")

#: What a user's file can say about `target`. ssh tells whether that is a way to the node. What
#: blocks and patterns mean is asked of ssh in test_units_ssh_config, which host keys are taken in
#: tests/unit.
WAYS = read_table(__file__, "WAYS")


def furnish(site: Site, agent: Callable[..., str]) -> dict[str, str]:
    """Everything that WAYS names; the environment for it."""
    node, d = site.node, site.directory
    for name in ("wrong", "user", "beside", "k2", "user_ca", "host_ca"):
        site.key(name)
    for name in ("rsa", "host_rsa"):
        site.key(name, "rsa")
    site.key("locked", phrase="secret")
    site.keygen("-s", "user_ca", "-I", "u", "-n", "root", "user.pub")
    (d / "user-cert.pub").rename(d / "elsewhere-cert.pub")
    site.keygen("-s", "user_ca", "-I", "u", "-n", "root", "-V", "20200101:20200201", "user.pub")
    (d / "user-cert.pub").rename(d / "expired-cert.pub")
    for name in ("beside", "rsa"):
        site.keygen("-s", "user_ca", "-I", "u", "-n", "root", f"{name}.pub")
    shutil.copy(d / "k2", d / f"k_{node.address}_root_target")
    # The node: one more key of its own, a certificate for the other; authorities of users.
    site.file("host.pub", node.read("/etc/ssh/ssh_host_ed25519_key.pub"))
    site.keygen("-s", "host_ca", "-I", "h", "-h", "-n", "certified", "host.pub")
    for name in ("host_rsa", "host-cert.pub"):
        node.write(f"/etc/ssh/{name}", (d / name).read_text(), 0o600)
    node.write("/etc/ssh/user_ca.pub", (d / "user_ca.pub").read_text())
    mine = "HostKey /etc/ssh/ssh_host_ed25519_key\nHostKey /etc/ssh/host_rsa\n"
    node.write(
        "/etc/ssh/sshd_config.d/10-ways.conf",
        f"Port 22\nPort 2222\nTrustedUserCAKeys /etc/ssh/user_ca.pub\n{mine}"
        "HostCertificate /etc/ssh/host-cert.pub\n"
        "MaxAuthTries 20\n",
    )
    allowed = "".join((d / f"{name}.pub").read_text() for name in ("k2", "locked"))
    node.enter(["sh", "-c", "cat >>/root/.ssh/authorized_keys"], input=allowed)
    node.stop_sshd()
    node.resume_sshd()
    known_hosts(site)
    agents = {"agent": "k2", "cert_agent": "beside", "user_agent": "user"}
    site.words |= {name: agent(d / key) for name, key in agents.items()}
    opened = Path(shutil.copy(d / "locked", d / "unlocked"))
    site.keygen("-p", "-P", "secret", "-N", "", "-f", "unlocked")
    site.words["locked_agent"] = agent(opened)
    mine = site.words["agent"]
    return {"NR_TEST_DIR": str(d), "NR_TEST_AGENT": mine, "SSH_AUTH_SOCK": mine}


def known_hosts(site: Site) -> None:
    node, d = site.node, site.directory
    own = " ".join(node.read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])
    rsa, other = ((d / f"{name}.pub").read_text() for name in ("host_rsa", "wrong"))
    a, ca = node.address, (d / "host_ca.pub").read_text()
    site.file("empty", "")
    site.file("new", "")
    site.file("hashed", f"{a} {own}\n")
    site.keygen("-H", "-f", "hashed")
    site.file("changed", f"{a} {other}")
    site.file("rsa_known", f"{a} {rsa}")
    site.file("alias", f"alias-target {own}\n")
    site.file("authority", f"@cert-authority certified,other {ca}")
    known = Path(site.words["known"]).read_text()
    site.words["known"] = str(site.file("known", f"{known}[{a}]:2222 {own}\n"))


def ssh(config: Path, name: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Its messages go to a file: what a ProxyCommand leaves behind would hold a pipe open."""
    words = ["ssh", "-F", str(config), "-o", "ConnectTimeout=8", "--", name, "true"]
    with tempfile.TemporaryFile("w+") as said:
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said}
        done = subprocess.run(words, **how, env={**os.environ, **env}, check=False, timeout=120)
        said.seek(0)
        return subprocess.CompletedProcess(words, done.returncode, "", said.read())


def test_each_setting_means_what_it_means_to_ssh(site, agent, audited):
    env = furnish(site, agent)
    files = {case: site.config(case, text) for case, text in WAYS.items()}
    hosts = {
        case: {"ssh_hostname": "target", "ssh_config_file": str(file)}
        for case, file in files.items()
    }
    # In front of ssh, which would make the new key a known one.
    ours = audited(hosts, env=env)
    known = (site.directory / "new").read_text()
    assert re.search(rf"target|{site.node.address}", known), ours["strict-accept-new"]
    (site.directory / "new").write_text("")
    with ThreadPoolExecutor(6) as pool:
        theirs = pool.map(lambda file: ssh(file, "target", env), files.values())
    wrong = {
        case: (ours[case], found.stderr)
        for case, found in zip(files, theirs, strict=True)
        if (ours[case] == "") != (found.returncode == 0)
    }
    assert wrong == {}
    # Both ways of each kind were seen.
    assert 10 < sum(not why for why in ours.values()) < len(ours) - 10, ours


#: What ssh can do and nodeready cannot, or what can never be a way: the reason names it.
REASONS = read_table(__file__, "REASONS")


SOME = [*REASONS][:-1]


@pytest.mark.parametrize("cases", rows([SOME, ["exec-hangs"]], SOME))
def test_what_cannot_be_done_is_named(site, cases, audited):
    hosts = {}
    for case in cases:
        text = REASONS[case][0]
        config = site.config(case, text) if text else site.directory / "nowhere"
        hosts[case] = {"ssh_hostname": "target", "ssh_config_file": str(config)}
    ours = audited(hosts)
    for case in cases:
        assert REASONS[case][1] in ours[case], (case, ours[case])
        assert "\n" not in ours[case]
    # Of what was started here, nothing is left.
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "sleep 4747" not in running.stdout


def test_the_inventory_stands_before_the_configuration(site, fleet, tool):
    config = site.config("all", "Host *\nPort 1\nUser nobody\nIdentityFile <d>/none\n")
    changed = site.file("changed", f"{site.node.address} {site.key('other')}")
    config.write_text(f"{config.read_text()}UserKnownHostsFile {changed}\n")
    own = {"ssh_config_file": str(config), "ssh_port": 22}
    done = tool("audit", fleet([site.node], {site.node.name: own}), *AUDIT)
    assert reached(done) == {site.node.name: ""}
    # The user's own file, by $HOME, as everything else of the user's here.
    (tool.home / ".ssh").mkdir()
    inner = site.config("inner", "Host target\n<HERE>")
    (tool.home / ".ssh" / "more").write_text(inner.read_text())
    (tool.home / ".ssh" / "config").write_text("Include more\n")
    assert reached(tool("audit", "target", *AUDIT)) == {"target": ""}


STINGY = "MaxStartups 2:100:3\nMaxSessions 2\n"
BEHIND = "Host jump\nHostName <a>\nHost behind*\nProxyJump jump\nHost *\n<ENOUGH>"


def sshd(node: LabNode, text: str) -> None:
    node.write("/etc/ssh/sshd_config.d/10-ways.conf", f"LogLevel VERBOSE\n{text}")

    def begun() -> int:
        return node.log.read_text(errors="replace").count("Server listening")

    # It reads its files again, and goes on writing into the same log.
    before = begun()
    node.enter(["sh", "-c", 'kill -HUP "$(cat /run/sshd.pid)"'])
    wait_for(lambda: begun() >= before + 2)


def test_an_sshd_that_takes_one_session_gets_another_connection(tool, fleet, fresh_node):
    """sshd_config(5), MaxSessions: the look, the proofs and the mesh go on side by side."""
    sshd(fresh_node, "MaxSessions 1\n")
    before = Logins(fresh_node)
    words = ("--user", "ml", "--only", "ptrace,proof.user,proof.mesh", "--format", "json")
    (results,) = tool("ready", fleet([fresh_node]), *words).results.values()
    statuses = {check: result["status"] for check, result in results.items()}
    assert statuses["proof.user"] == "ok"
    assert "unknown" not in statuses.values()
    assert 2 <= before() <= 3
    sessions = ["sh", "-c", "ps -C sshd -o args= | grep -c root@notty"]
    wait_for(lambda: fresh_node.enter(sessions, check=False).stdout == "0\n")


def test_a_watch_keeps_its_login_and_makes_another_where_it_was_lost(tool, fleet, fresh_node):
    sshd(fresh_node, "LogLevel VERBOSE\n")
    before, begun = Logins(fresh_node), "Starting session: command"
    words = ("audit", fleet([fresh_node]), "--only", "ptrace", "--watch", "1")
    watch = tool.start(*words, stdout=subprocess.PIPE, text=True)

    def looks_again() -> None:
        seen = fresh_node.log.read_text(errors="replace").count(begun)
        wait_for(lambda: fresh_node.log.read_text(errors="replace").count(begun) >= seen + 3)

    looks_again()
    assert before() == 1
    fresh_node.enter(["pkill", "-f", "sshd: root@notty"])
    looks_again()
    assert before() == 2
    watch.send_signal(signal.SIGINT)
    shown, _ = watch.communicate(timeout=30)
    assert watch.returncode == 130
    assert "unreachable" not in shown


Hosts = dict[str, dict[str, object]]


def behind(site: Site, nodes: list[LabNode], text: str = BEHIND) -> tuple[Hosts, Path]:
    """Names of these nodes, each behind the jump host of ``text``."""
    names = "".join(f"Host behind{n}\nHostName {one.address}\n" for n, one in enumerate(nodes))
    config = site.config("jump", f"{names}{text}")
    return {f"behind{n}": {"ssh_config_file": str(config)} for n in range(len(nodes))}, config


@pytest.mark.nightly
def test_many_nodes_behind_a_jump_host_share_a_login_there(site, fresh_nodes, audited):
    nodes = fresh_nodes(9)
    sshd(site.node, STINGY)
    jump, targets = Logins(site.node), [Logins(node) for node in nodes]
    hosts, _ = behind(site, nodes)
    assert set(audited(hosts).values()) == {""}
    assert jump() == 1
    assert [count() for count in targets] == [1] * len(nodes)
    # By the jump host, and not past it.
    assert f"from {site.node.address} " in nodes[0].log.read_text(errors="replace")
    # A connection carries two nodes at most.
    few = "import nodeready.fleet.transport.logins as l; l.FORWARDS = 2\n"
    jump = Logins(site.node)
    assert set(audited(hosts, first=few).values()) == {""}
    assert 3 < jump() < 8
    # A jump host in front of the jump host.
    jump = Logins(site.node)
    text = BEHIND.replace("ProxyJump jump", f"ProxyJump jump,root@{nodes[0].address}")
    hosts, config = behind(site, nodes[1:5], text)
    assert set(audited(hosts).values()) == {""}
    assert jump() == 1
    # ssh itself is dropped there, now and then.
    wait_for(lambda: ssh(config, "behind1", {}).returncode == 0)


#: What is wrong with the jump host, how that ends, and the words for it.
JUMP_FAULTS = {
    "forwards nothing": (
        lambda node: sshd(node, "AllowTcpForwarding no\n"),
        lambda node: sshd(node, ""),
        "jump host jump: refuses to forward to",
    ),
    "no sshd": (LabNode.stop_sshd, LabNode.resume_sshd, "jump host jump: connection refused"),
    "frozen": (LabNode.freeze, LabNode.thaw, "jump host jump: (no answer in 15 s|no route)"),
}


@pytest.mark.parametrize("case", rows(JUMP_FAULTS, "no sshd"))
def test_a_jump_host_that_is_down_is_the_cause_and_found_once(site, fresh_nodes, case, audited):
    # One after the other, so many times the deadline would be longer than the tests wait.
    nodes = fresh_nodes(3 if case == "no sshd" else 9)
    hosts, _ = behind(site, nodes)
    fault, repair, words = JUMP_FAULTS[case]
    fault(site.node)
    found = audited(hosts)
    repair(site.node)
    assert len(found) == len(nodes)
    assert all(re.match(words, why) for why in found.values()), (words, found)


def test_behind_a_jump_host_a_node_that_is_down_costs_itself(site, fresh_nodes, audited):
    nodes = fresh_nodes(3)
    hosts, config = behind(site, nodes)
    nodes[0].stop_sshd()
    found = audited(hosts)
    nodes[0].resume_sshd()
    assert "connection refused: is sshd running?" in found["behind0"], found
    assert [why for why in found.values() if why] == [found["behind0"]]
    # An unknown key of the jump host's is refused as a node's is.
    text = config.read_text().replace(site.words["known"], str(site.file("none", "")))
    config.write_text(text)
    found = audited(hosts)
    assert all("jump host jump: host key of" in why for why in found.values()), found


@pytest.mark.nightly
def test_a_jump_host_that_dies_in_the_middle_is_the_cause(site, fresh_nodes, fleet, tool):
    nodes = fresh_nodes(2)
    hosts, _ = behind(site, nodes)
    for node in nodes:
        hang(node)
    running = tool.start("deploy", fleet([], hosts), "--yes", "--only", "core_dumps")
    wait_for(lambda: all(map(hangs, nodes)))
    site.node.enter(["sh", "-c", "kill -9 $(pgrep -x sshd)"])
    done = tool.end(running, status=4)
    assert "connection lost (jump host jump: connection lost) in core_dumps.pattern" in done.out


def test_many_names_of_one_address_do_not_storm_its_sshd(site, audited):
    sshd(site.node, STINGY)
    logins = Logins(site.node)
    _, data = site.node.inventory_data()
    assert set(audited({f"name{n}": dict(data) for n in range(20)}).values()) == {""}
    assert logins() == 20


#: A dialogue, after a question: what a run says and asks over one connection.
TALK = """
import sys
from nodeready.cli import patch
patch()
from nodeready.fleet.inventory import load
from nodeready.agent.asking import Request, collect, once
from nodeready.fleet.transport.ssh import SshTransport
found = load.load(sys.argv[1])
with SshTransport(found, list(found)) as fleet:
    (name,) = fleet.nodes
    print(collect(fleet, {name: once(Request(name, "echo one; exit 7", 20))})[name])
    script = "exec <&3\\necho MARK $PPID; while read -r it; do echo MARK got $it; done"
    channel = fleet.open(Request(name, script, 60, "", "MARK"))
    print(channel.read_line(10))
    channel.send_line("two")
    print(channel.read_line(10), flush=True)
    sys.stdin.readline()
    print(channel.read_line(20), channel.error)
    print(collect(fleet, {name: once(Request(name, "echo three", 20))})[name])
    channel.close()
"""


def test_a_masters_connection_is_used_instead_of_a_login(site, fleet, short, audited):
    node = site.node
    control = f"ControlPath {short}/cm-%r@%h:%p\nControlMaster auto\n"
    config = site.config("master", f"Host target\n{control}<HERE>")
    hosts = {"target": {"ssh_config_file": str(config)}}
    sshd(node, "")
    logins = Logins(node)
    # Without a master we log in, and make none.
    assert audited(hosts) == {"target": ""}
    assert (logins(), list(short.glob("cm-*"))) == (1, [])
    master = subprocess.Popen(["ssh", "-F", str(config), "-MN", "target"], stdin=-3)
    try:
        wait_for(lambda: bool(list(short.glob("cm-*"))))
        assert audited(hosts) == {"target": ""}
        # It dies in the middle: what was said over it is lost, the next question has a login.
        talk = [sys.executable, "-c", TALK, str(fleet([], hosts))]
        with subprocess.Popen(talk, stdin=-1, stdout=-1, text=True, cwd=ROOT) as running:
            said = ""
            while "MARK got two" not in said:
                row = running.stdout.readline()
                assert row, said
                said += row
            assert logins() == 2
            master.kill()
            master.wait()
            said += running.communicate("\n")[0]
        lost = "None connection lost (the master of ssh has ended)"
        for words in ("Answer(stdout='one\\n'", "rc=7", lost, "three"):
            assert words in said, said
        assert logins() == 3
    finally:
        master.kill()
        master.wait()
    # Its socket is left, and nobody is there.
    assert list(short.glob("cm-*"))
    assert audited(hosts) == {"target": ""}
    assert logins() == 4


@pytest.mark.nightly
def test_a_masters_connection_to_a_jump_host_is_used_instead_of_a_login(
    site, fresh_nodes, short, audited
):
    """Such as to a bastion that asks a person for a second factor."""
    nodes = fresh_nodes(4)
    hosts, config = behind(site, nodes, f"{BEHIND}ControlPath {short}/cm-%n\n")
    with subprocess.Popen(["ssh", "-F", str(config), "-MN", "jump"], stdin=-3) as master:
        wait_for(lambda: bool(list(short.glob("cm-*"))))
        jump, targets = Logins(site.node), [Logins(node) for node in nodes]
        found = audited(hosts)
        master.kill()
    assert set(found.values()) == {""}, found
    assert (jump(), [count() for count in targets]) == (0, [1] * 4)
    # Nobody is there any more: a login of ours.
    assert set(audited(hosts).values()) == {""}
    assert jump() == 1


@pytest.mark.nightly
def test_few_open_files_cost_no_node(lab, fleet, tool):
    more = {f"{node.name}-{n}": node.inventory_data()[1] for node in lab.nodes for n in range(14)}
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    done = tool("audit", fleet([], more), *AUDIT, first=few)
    assert reached(done) == dict.fromkeys(more, ""), done
    (line,) = [one for one in done.lines if "open files" in one]
    assert re.match(r"nodeready: \d+ nodes at once and not 42: this machine allows 64 open", line)
