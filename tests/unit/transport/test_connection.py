"""The ways to a node: what ssh says of a name, whose host key is taken, who has a turn."""

from __future__ import annotations

import errno
import random
import subprocess
from pathlib import Path

import gevent
import pytest
from paramiko import Ed25519Key, PKey, RSAKey, SSHException
from paramiko.pkey import PublicBlob

from nodeready.inventory.load import ssh_lines
from nodeready.transport.connection import ASKING, Neighbours, connect_error, on_link, routes
from nodeready.transport.host_keys import HostKey, HostKeyError, KnownHosts
from nodeready.transport.identities import Identity, offered
from nodeready.transport.logins import HANDSHAKES, Client, Gate, Patience
from nodeready.transport.ssh_config import SshConfig, Unusable, jump_of, place

NAMES = ("gpu1", "gpu2", "gpu17", "login", "10.0.0.7")
PATTERNS = ("gpu1", "gpu2", "gpu*", "gpu?", "!gpu2 *", "* !gpu17", "login gpu1", "*", "10.0.*")
VALUES = (
    "HostName %h.example.com", "HostName 10.1.2.3", "Port 2222", "Port 23", "User bob", "User eve",
    "IdentityFile ~/.ssh/%h", "IdentityFile /k1", "IdentityFile /k2", "IdentitiesOnly yes",
    "ControlPath /run/cm-%C", "ControlPath /run/%r@%h:%p-%n", "UserKnownHostsFile /a /b_%h",
    "ProxyJump j1,u@j2:33", "ProxyCommand nc %h %p", "HostKeyAlias one", "Match all",
    "StrictHostKeyChecking yes", "IdentityAgent none", "Include {inner}", "Ciphers aes256-ctr",
)  # fmt: skip
STRANGE = (
    'Match exec "test %h = gpu1"',
    "Match user bob",
    "Match host *.example.com",
    "Match final",
)


def told(words: list[str]) -> dict[str, list[str]]:
    """What ssh itself says."""
    done = subprocess.run(["ssh", "-G", *words], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for row in done.stdout.splitlines():
        key, _, value = row.partition(" ")
        found.setdefault(key, []).append(value)
    return found


COMPARED = (
    "port", "user", "identityfile", "identitiesonly", "controlpath", "proxyjump",
    "proxycommand", "hostkeyalias", "stricthostkeychecking", "identityagent", "ciphers",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_what_is_shared_between_names_is_what_ssh_says_of_each(seed: int, tmp_path: Path) -> None:
    """Random files: names that share a question have nothing of each other."""
    draw = random.Random(seed)
    inner = tmp_path / "inner"
    values = [one.format(inner=inner) for one in VALUES]
    choices = [*values, *(STRANGE if seed % 3 == 0 else ())]

    def block() -> str:
        rows = draw.sample(choices, draw.randint(1, 4))
        rows = [row for row in rows if not row.startswith("Include")] or ["Port 9"]
        return f"Host {draw.choice(PATTERNS)}\n" + "".join(f"  {row}\n" for row in rows)

    inner.write_text("".join(block() for _ in range(3)))
    rows = [block() for _ in range(6)]
    rows.insert(draw.randint(0, 5), f"Host {draw.choice(PATTERNS)}\nInclude {inner}\nPort 7\n")
    file = tmp_path / "config"
    file.write_text("".join(rows))
    config = SshConfig(str(file))
    for name in NAMES:
        found, right = config.about(name), told(["-F", str(file), "--", name])
        for key in COMPARED:
            mine = list(found.values.get(key, ()))
            assert mine == right.get(key, []), (key, name, file.read_text(), inner.read_text())
        assert found.hostname == right["hostname"][0], (name, file.read_text())
        known = " ".join(found.values["userknownhostsfile"])
        assert known.replace("~", str(Path.home())) == right["userknownhostsfile"][0]


def test_names_for_which_the_same_lines_hold_share_one_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = SshConfig._ask
    monkeypatch.setattr(SshConfig, "_ask", lambda *how: asked.append(how[1]) or ask(*how))
    file = tmp_path / "config"
    blocks = "".join(f"Host gpu{n}\nHostName 10.1.0.{n}\n" for n in range(200))
    file.write_text(f"{blocks}Host gpu*\nControlPath /run/%C\nHost gpu1?\nPort 2222\n")
    config = SshConfig(str(file))
    found = {f"gpu{n}": config.about(f"gpu{n}") for n in range(200)}
    # One without any file, one for each port.
    assert len(asked) == 3
    assert [found["gpu7"].hostname, found["gpu13"].hostname] == ["10.1.0.7", "10.1.0.13"]
    assert (found["gpu7"].port, found["gpu13"].port, found["gpu130"].port) == (22, 2222, 22)
    assert len({one.one("controlpath") for one in found.values()}) == 200
    # Another user is another question, and so is each name of a file that asks for more.
    assert config.about("gpu7", "bob").user == "bob"
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("name", "user"),
    [
        ("-oProxyCommand=x", ""), ("a b", ""), ("a;b", ""), ("$(x)", ""), ("a\nb", ""), ("", ""),
        ("a`b`", ""), ("a|b", ""), ("a", "-l"), ("a", "$(x)"), ("a", "x;y"), ("a", "x y"),
    ],
)  # fmt: skip
def test_what_is_no_name_never_gets_to_ssh(
    name: str, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SshConfig("/dev/null")
    monkeypatch.setattr(SshConfig, "_ask", lambda *how: pytest.fail(f"asked: {how}"))
    with pytest.raises(Unusable, match="can be no"):
        config.about(name, user)


def test_lines_of_included_files_hold_where_their_include_does(tmp_path: Path) -> None:
    (tmp_path / "one.conf").write_text("Port 1\nHost b\nPort 2\n")
    main = tmp_path / "main"
    main.write_text("Host a\nInclude *.conf\nPort 3\nMatch all\nPort 4\n# Port 5\n")
    read: set[Path] = set()
    found = [(one.when, one.text) for one in ssh_lines(str(main), str(tmp_path), read=read)]
    a, b = "originalhost a", "originalhost b"
    assert found == [((a,), "Port 1"), ((a, b), "Port 2"), ((a,), "Port 3"), ((), "Port 4")]
    assert read == {main, tmp_path / "one.conf"}


def test_without_ssh_the_file_is_read_as_well_as_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    file.write_text("Host gpu1\nPort 2222\nUser bob\nHostName 10.0.0.1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = SshConfig(str(file)).about("gpu1")
    assert (found.hostname, found.port, found.user) == ("10.0.0.1", 2222, "bob")
    assert found.files("userknownhostsfile")[0].endswith("/.ssh/known_hosts")


# --- Host keys.


def key() -> Ed25519Key:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    own = Ed25519PrivateKey.generate().public_key()
    text = own.public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH).decode()
    return Ed25519Key(data=PublicBlob.from_string(text).key_blob)


def row(names: str, one: PKey) -> str:
    return f"{names} {one.get_name()} {one.get_base64()}"


OWN, OTHER, RSA = key(), key(), RSAKey.generate(1024)


def judge(tmp_path: Path, text: str, strict: str = "accept-new", name: str = "n1") -> str:
    """ "" when the key is taken, else why not."""
    file = tmp_path / "known"
    file.write_text(text)
    bare = name.strip("[").partition("]")[0]
    try:
        HostKey(KnownHosts([str(file)]), name, bare, strict).missing_host_key(Client(), name, OWN)
    except HostKeyError as problem:
        return str(problem)
    except SSHException:
        return "unknown"
    return ""


@pytest.mark.parametrize("strict", ["yes", "accept-new", "no", "ask"])
def test_a_changed_key_is_refused_whatever_is_wanted(tmp_path: Path, strict: str) -> None:
    for text in (
        row("n1", OTHER), row("n1", RSA), row("a,N1", OTHER), row("n*", OTHER),
        f"@revoked * {row('', OWN).strip()}\n{row('n1', OWN)}",
    ):  # fmt: skip
        assert judge(tmp_path, f"{text}\n", strict), text
    for text in (row("n1", OWN), row("x,n1", OWN), row("n?", OWN), f"{row('n1', OTHER)}\n" * 2):
        right = f"{text}\n{row('n1', OWN)}\n"
        assert judge(tmp_path, right, strict) == "", right
        assert (tmp_path / "known").read_text() == right
    # A name that only looks alike is another host's.
    for text in (row("n1.x", OTHER), row("!n1,n*", OTHER), row("[n1]:2222", OTHER)):
        assert judge(tmp_path, f"{text}\n", "yes") == "unknown"


def test_a_new_key_is_remembered_and_known_from_then_on(tmp_path: Path) -> None:
    assert judge(tmp_path, f"{row('x', OTHER)}") == ""
    assert (tmp_path / "known").read_text() == f"{row('x', OTHER)}\n{row('n1', OWN)}\n"
    assert judge(tmp_path, "", "yes") == "unknown"
    # At another port, the key of the usual one will do, and another one is a new one.
    assert judge(tmp_path, f"{row('n1', OWN)}\n", "yes", "[n1]:2222") == ""
    assert judge(tmp_path, f"{row('n1', OTHER)}\n", "yes", "[n1]:2222") == "unknown"


def test_keys_that_are_known_are_asked_for_first(tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(f"{row('n1', RSA)}\n@cert-authority ca* {row('', OTHER).strip()}\n")
    wanted = ("ssh-ed25519", "rsa-sha2-512", "ssh-rsa")
    known = KnownHosts([str(file)])
    assert HostKey(known, "n1", "n1", "yes").order(wanted) == (
        "rsa-sha2-512", "ssh-rsa", "ssh-ed25519",
    )  # fmt: skip
    first = HostKey(known, "ca1", "ca1", "yes").order(wanted)
    assert first[0] == "ssh-ed25519-cert-v01@openssh.com"
    assert first[-3:] == wanted


def test_a_file_that_may_not_be_read_knows_something(tmp_path: Path) -> None:
    directory = tmp_path / "known"
    directory.mkdir()
    with pytest.raises(Unusable, match="known hosts"):
        KnownHosts([str(directory)])
    assert KnownHosts([str(directory)], shared=[str(directory)]).about("x") == []


# --- Keys, and the order in which they are offered.


class Held:
    """A key of an agent."""

    def __init__(self, one: PKey) -> None:
        self.name, self._blob = one.get_name(), one.asbytes()

    def asbytes(self) -> bytes:
        return self._blob


def test_keys_are_offered_in_the_order_of_ssh() -> None:
    named, further, filed = key(), key(), key()
    identities = [Identity("f", filed, filed.asbytes()), Identity("n.pub", None, named.asbytes())]
    agent = [Held(further), Held(named)]
    blobs = [one.asbytes() for one in offered(identities, [], agent, only=False)]  # type: ignore[arg-type]
    assert blobs == [named.asbytes(), further.asbytes(), filed.asbytes()]
    blobs = [one.asbytes() for one in offered(identities, [], agent, only=True)]  # type: ignore[arg-type]
    assert blobs == [named.asbytes(), filed.asbytes()]


# --- Turns, deadlines, and what this machine can hold.


def test_an_address_has_few_turns_and_is_found_dead_once() -> None:
    gate, at_once, most, tries = Gate(), 0, 0, 0

    def one(dead: int) -> str:
        nonlocal at_once, most, tries
        client = Client()
        try:
            with Patience(5) as patience, gate.turn(client, patience):
                at_once, tries = at_once + 1, tries + 1
                most = max(most, at_once)
                gevent.sleep(0.01)
                at_once -= 1
                if dead:
                    raise OSError(dead, "gone")
        except OSError as problem:
            return str(problem)
        return ""

    jobs = [gevent.spawn(one, 0) for _ in range(20)]
    gevent.joinall(jobs)
    assert ({job.value for job in jobs}, most, tries) == ({""}, HANDSHAKES, 20)
    jobs = [gevent.spawn(one, errno.ECONNREFUSED) for _ in range(20)]
    gevent.joinall(jobs)
    assert {job.value for job in jobs} == {"[Errno 111] gone"}
    assert tries == 20 + HANDSHAKES
    # Who comes later tries anew.
    assert one(0) == ""
    # What is wrong with one of us alone is not the address's fault.
    jobs = [gevent.spawn(one, errno.EADDRNOTAVAIL if n < 1 else 0) for n in range(20)]
    gevent.joinall(jobs)
    assert [job.value for job in jobs if job.value] == ["[Errno 99] gone"]


def test_a_deadline_stands_still_while_others_have_their_turn() -> None:
    with Patience(0.3) as patience:
        with patience.paused():
            gevent.sleep(0.6)
        gevent.sleep(0.05)
    patience = Patience(0.1)
    with pytest.raises(gevent.Timeout) as raised, patience:
        gevent.sleep(5)
    assert patience.owns(raised.value)


ROUTE = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth0\t0001000A\t0200000A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def test_nodes_on_our_own_networks_are_counted_and_told_once() -> None:
    networks = routes(ROUTE)
    assert on_link(networks, "10.0.7.7")
    # Behind a router of the same network, behind the default one, ourselves, no IPv4 address.
    for address in ("10.0.1.7", "192.0.2.1", "127.0.0.1", "fe80::1", "x"):
        assert not on_link(networks, address)
    said: list[str] = []
    neighbours = Neighbours(said.append)
    neighbours._limit, neighbours._networks = 10, networks
    for n in range(40):
        neighbours.meet(f"10.0.1.{n}")
        neighbours.meet(f"10.0.2.{n // 5}")
    assert said == []
    for n in range(40):
        neighbours.meet(f"10.0.3.{n}")
    (line,) = said
    assert "net.ipv4.neigh.default.gc_thresh3" in line


@pytest.mark.parametrize(
    ("command", "jump"),
    [
        ("ssh -W %h:%p jump", ("jump", "")),
        ("/usr/bin/ssh -q -x bob@jump -W [%h]:%p", ("bob@jump", "")),
        ("ssh -l bob -p 2222 -F /x -W %h:%p jump", ("bob@jump:2222", "/x")),
        ("ssh -W other:22 jump", ("", "")),
        ("ssh -W %h:%p -i key jump", ("", "")),
        ("ssh -o X=y -W %h:%p jump", ("", "")),
        ("ssh jump nc %h %p", ("", "")),
        ("ssh -W %h:%p jump; true", ("", "")),
        ("nc %h %p", ("", "")),
        ("ssh 'unclosed", ("", "")),
    ],
)
def test_the_older_form_of_a_jump_is_seen(command: str, jump: tuple[str, str]) -> None:
    assert jump_of(command) == jump


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("jump", ("", "jump", 0)),
        ("bob@jump:33", ("bob", "jump", 33)),
        ("ssh://bob@jump:33", ("bob", "jump", 33)),
        ("[fe80::1]:33", ("", "fe80::1", 33)),
        ("fe80::1", ("", "fe80::1", 0)),
        ("bob@dom@jump", ("bob@dom", "jump", 0)),
    ],
)
def test_a_jump_host_is_read_as_ssh_does(text: str, parts: tuple[str, str, int]) -> None:
    assert place(text) == parts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("SSH error (revoked)", "host key of h is revoked in /k; refused"),
        (
            "SSH error (certificate has expired)",
            "host key of h is refused: its certificate has exp",
        ),
        ("Could not connect ([Errno 24] Too many open files)", "h: too many open files here"),
        ("Could not connect ([Errno 105] No buffer space available)", "gc_thresh3"),
        ("Could not connect ([Errno 22] Invalid argument)", "gc_thresh3"),
        ("Could not connect ([Errno 99] Cannot assign requested address)", "BindAddress"),
        (ASKING, "h: ssh -G does not end"),
    ],
)
def test_a_failure_names_its_cause(text: str, words: str) -> None:
    said = connect_error(text, "h", user="u", key="k", known_hosts="/k", limit_s=15)
    assert words in said
