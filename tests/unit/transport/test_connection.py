"""A connection by ssh: names, host keys, keys, turns, deadlines, and why there is none."""

import errno
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import gevent
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificateBuilder,
    SSHCertificateType,
)
from paramiko import Ed25519Key, PKey, RSAKey, SSHException
from paramiko.pkey import PublicBlob

from nodeready.core.outcome import FAILED, Gap
from nodeready.fleet.transport import keys, logins, ssh
from nodeready.fleet.transport.connection import ASKING, Neighbours, connect_error, on_link, routes
from nodeready.fleet.transport.ssh_config import (
    Login,
    SshConfig,
    SshConfigError,
    expand,
    jump_of,
    parse_jump_host,
    ssh_lines,
)
from tests.cases import cases, read_data, with_table


def test_a_text_that_is_no_name_never_gets_to_ssh(monkeypatch):
    monkeypatch.setattr(SshConfig, "_run_ssh_g", lambda *how: pytest.fail(f"asked: {how}"))
    for text in ("-oProxyCommand=x", "a b", "a;b", "$(x)", "a\nb", "a`b`", "a|b"):
        for name, user in ((text, ""), ("a", text), ("", "")):
            with pytest.raises(SshConfigError, match="can be no"):
                SshConfig("/dev/null").settings_of(name, user)


def test_lines_of_included_files_hold_where_their_include_does(tmp_path):
    (tmp_path / "one.conf").write_text("Port 1\nHost b\nPort 2\n")
    main = tmp_path / "main"
    main.write_text("Host a\nInclude *.conf\nPort 3\nMatch all\nPort 4\n# Port 5\n")
    read: set[Path] = set()
    lines = [(item.when, item.text) for item in ssh_lines(str(main), str(tmp_path), read=read)]
    a, b = "originalhost a", "originalhost b"
    assert lines == [((a,), "Port 1"), ((a, b), "Port 2"), ((a,), "Port 3"), ((), "Port 4")]
    assert read == {main, tmp_path / "one.conf"}


def test_without_ssh_the_file_is_read_as_well_as_can_be(tmp_path, monkeypatch):
    file = tmp_path / "config"
    file.write_text("Host gpu1\nPort 2222\nUser bob\nHostName 10.0.0.1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = SshConfig(str(file)).settings_of("gpu1")
    assert (settings.hostname, settings.port, settings.user) == ("10.0.0.1", 2222, "bob")
    assert settings.paths("userknownhostsfile")[0].endswith("/.ssh/known_hosts")


#: A stand-in for `ssh -G`; it fails for a file called broken.
SSH = read_data(__file__, "ssh.sh")


def test_the_answer_of_ssh_is_read_by_its_lines(tmp_path, stand_ins):
    stand_ins(ssh=SSH)
    for name in ("config", "broken"):
        (tmp_path / name).write_text("Host gpu1\nPort 2222\n")
    settings = SshConfig(str(tmp_path / "config")).settings_of("gpu1")
    assert (settings.hostname, settings.port, settings.user) == ("gpu1", 2222, "bob")
    assert settings.values["identityfile"] == ("~/.ssh/a b", "~/.ssh/c")
    assert settings.values["userknownhostsfile"] == ("/a", "/b c")
    with pytest.raises(SshConfigError, match="broken line 3: Bad configuration option: y"):
        SshConfig(str(tmp_path / "broken")).settings_of("gpu1")


def key() -> Ed25519Key:
    own = Ed25519PrivateKey.generate().public_key()
    text = own.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return Ed25519Key(data=PublicBlob.from_string(text).key_blob)


def row(names: str, item: PKey) -> str:
    return f"{names} {item.get_name()} {item.get_base64()}"


OWN, OTHER, RSA = key(), key(), RSAKey.generate(1024)


def judge(tmp_path, text: str, strict: str = "accept-new", name: str = "n1") -> str:
    """ "" when the key is taken, else why not."""
    file = tmp_path / "known"
    file.write_text(text)
    bare = name.strip("[").partition("]")[0]
    try:
        policy = keys.HostKeyPolicy(keys.KnownHostsFiles([str(file)]), name, bare, strict)
        policy.missing_host_key(logins.Client(), name, OWN)
    except keys.HostKeyError as problem:
        return str(problem)
    except SSHException:
        return "unknown"
    return ""


@pytest.mark.parametrize("strict", ["yes", "accept-new", "no", "ask"])
def test_a_changed_key_is_refused_whatever_is_wanted(tmp_path, strict):
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


def test_a_new_key_is_remembered_and_known_from_then_on(tmp_path):
    assert judge(tmp_path, f"{row('x', OTHER)}") == ""
    assert (tmp_path / "known").read_text() == f"{row('x', OTHER)}\n{row('n1', OWN)}\n"
    assert judge(tmp_path, "", "yes") == "unknown"
    # At another port, the key of the usual one will do, and another one is a new one.
    assert judge(tmp_path, f"{row('n1', OWN)}\n", "yes", "[n1]:2222") == ""
    assert judge(tmp_path, f"{row('n1', OTHER)}\n", "yes", "[n1]:2222") == "unknown"


def test_a_new_key_makes_the_directory_of_its_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ssh/known_hosts"
    policy = keys.HostKeyPolicy(keys.KnownHostsFiles([str(file)]), "n1", "n1", "accept-new")
    policy.missing_host_key(None, "n1", OWN)
    assert file.read_text() == f"{row('n1', OWN)}\n"
    assert [path.stat().st_mode & 0o777 for path in (file.parent, file)] == [0o700, 0o600]


def certificate(authority, **changed) -> Ed25519Key:
    """The key of n1, with a certificate of this authority."""
    given = {"type": "host", "valid_after": 0, "valid_before": 1 << 40, "names": ["n1"], **changed}
    given["type"] = SSHCertificateType[given["type"].upper()]
    given["valid_principals"] = [name.encode() for name in given.pop("names")]
    made = SSHCertificateBuilder().key_id(b"x").public_key(authority_key("ed25519").public_key())
    for name, value in given.items():
        made = getattr(made, name)(value)
    text = made.sign(authority).public_bytes().decode()
    shown = PublicBlob.from_string(text)
    item = Ed25519Key(data=OWN.asbytes())
    item.public_blob = shown
    return item


def authority_key(kind: str):
    if kind == "rsa":
        return rsa.generate_private_key(65537, 2048)
    is_curve = kind == "ecdsa"
    return ec.generate_private_key(ec.SECP256R1()) if is_curve else Ed25519PrivateKey.generate()


@with_table("kind, mark, changed, why")
def test_a_certificate_holds_by_its_authority(tmp_path, kind, mark, changed, why):
    own = authority_key(kind)
    public = own.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    (tmp_path / "known").write_text(f"{mark} n* {public}\n" if mark else "")
    host = keys.HostKeyPolicy(keys.KnownHostsFiles([str(tmp_path / "known")]), "n1", "n1", "yes")
    if not why:
        host.missing_host_key(None, "n1", certificate(own))
        return
    with pytest.raises(keys.HostKeyError, match=why):
        host.missing_host_key(None, "n1", certificate(own, **changed))


def test_keys_that_are_known_are_asked_for_first(tmp_path):
    file = tmp_path / "known"
    file.write_text(f"{row('n1', RSA)}\n@cert-authority ca* {row('', OTHER).strip()}\n")
    wanted = ("ssh-ed25519", "rsa-sha2-512", "ssh-rsa")
    known = keys.KnownHostsFiles([str(file)])
    assert keys.HostKeyPolicy(known, "n1", "n1", "yes").order(wanted) == (
        "rsa-sha2-512", "ssh-rsa", "ssh-ed25519",
    )  # fmt: skip
    first = keys.HostKeyPolicy(known, "ca1", "ca1", "yes").order(wanted)
    assert first[0] == "ssh-ed25519-cert-v01@openssh.com"
    assert first[-3:] == wanted


def test_a_file_that_may_not_be_read_knows_something(tmp_path):
    directory = tmp_path / "known"
    directory.mkdir()
    with pytest.raises(SshConfigError, match="known hosts"):
        keys.KnownHostsFiles([str(directory)])
    assert keys.KnownHostsFiles([str(directory)], optional=[str(directory)]).about("x") == []


class Held:
    def __init__(self, item: PKey):
        self.name, self._blob = item.get_name(), item.asbytes()

    def asbytes(self) -> bytes:
        return self._blob


def test_keys_are_offered_in_the_order_of_ssh():
    named, further, filed = key(), key(), key()
    identities = [keys.SshIdentity("f", filed, filed.asbytes())]
    identities.append(keys.SshIdentity("n.pub", None, named.asbytes()))
    agent = [Held(further), Held(named)]
    blobs = [item.asbytes() for item in keys.offered_keys(identities, [], agent, only_named=False)]  # type: ignore[arg-type]
    assert blobs == [named.asbytes(), further.asbytes(), filed.asbytes()]
    blobs = [item.asbytes() for item in keys.offered_keys(identities, [], agent, only_named=True)]  # type: ignore[arg-type]
    assert blobs == [named.asbytes(), filed.asbytes()]


def test_an_address_has_few_turns_and_is_dead_for_all_at_once():
    gate, at_once, most, tries = logins.HandshakeLimiter(), 0, 0, 0

    def turn(error: int) -> str:
        nonlocal at_once, most, tries
        client = logins.Client()
        try:
            with logins.PausableDeadline(60) as patience, gate.turn(client, patience):
                at_once, tries = at_once + 1, tries + 1
                most = max(most, at_once)
                gevent.sleep(0.01)
                at_once -= 1
                if error:
                    raise OSError(error, "gone")
        except OSError as problem:
            return str(problem)
        return ""

    def turns(*errors: int) -> list[str]:
        jobs = [gevent.spawn(turn, error) for error in errors]
        gevent.joinall(jobs)
        return [job.value for job in jobs]

    assert turns(*[0] * 20) == [""] * 20
    assert (most, tries) == (logins.HANDSHAKES, 20)
    assert turns(*[errno.ECONNREFUSED] * 20) == ["[Errno 111] gone"] * 20
    assert tries == 20 + logins.HANDSHAKES
    # Who comes later tries anew.
    assert turn(0) == ""
    # A fault of one of us is not the address's.
    assert sorted(turns(errno.EADDRNOTAVAIL, *[0] * 19)) == [""] * 19 + ["[Errno 99] gone"]


def test_an_argument_that_paramiko_lacks_is_named():
    connect, login = logins.SshLogins(5).connect, Login("gpu1", "/dev/null")
    with pytest.raises(SshConfigError, match="gpu1: paramiko here has no bogus: correct"):
        connect(logins.Client(), login, logins.PausableDeadline(5), timeout=1, bogus=True)


def test_a_deadline_stands_still_while_others_have_their_turn():
    with logins.PausableDeadline(0.5) as patience:
        with patience.paused():
            gevent.sleep(0.7)
        gevent.sleep(0)
    patience = logins.PausableDeadline(0.05)
    with pytest.raises(gevent.Timeout) as raised, patience:
        gevent.sleep(60)
    assert patience.owns(raised.value)


@with_table("limits, room, raised, words")
def test_room_for_as_many_nodes_as_there_are_descriptors(monkeypatch, limits, room, raised, words):
    """Eight nodes: two descriptors each, beside 24 of our own."""
    monkeypatch.setattr(ssh.os, "listdir", lambda path: [])
    calls, told = [], []
    monkeypatch.setattr(ssh.resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(ssh.resource, "setrlimit", lambda which, pair: calls.append(pair))
    made, parallel = ssh._connection_slots(8, 4, told.append)
    assert (made.maximum, parallel, calls) == (*room, [raised] * bool(raised))
    assert tuple(line.partition(";")[0] for line in told) == words


def test_a_link_asks_for_its_rights_once_and_again_only_if_it_is_told_to(monkeypatch):
    calls, failures = [], [Gap(FAILED, "gone"), None]
    for name, does in (
        ("connect", lambda host: calls.append("connect") or failures.pop(0)),
        ("ssh_peer", lambda host: "peer"),
    ):
        monkeypatch.setattr(ssh.connectors, name, does)
    monkeypatch.setattr(ssh, "rights_of", lambda host: calls.append("become") or "rights")
    link = ssh.NodeConnection(host := SimpleNamespace(connected=False))
    assert (link.connect().reason, link.connect(again=False).reason) == ("gone", "gone")
    assert (link.connect(), link.peer, link.rights) == (None, "peer", "rights")
    host.connected = True
    assert (link.connect(), calls) == (None, ["connect", "connect", "become"])


ROUTE = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000000A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth0\t0001000A\t0200000A\t0003\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def test_nodes_on_our_own_networks_are_counted_and_told_once():
    networks = routes(ROUTE)
    assert on_link(networks, "10.0.7.7")
    # Behind a router of the same network, behind the default one, ourselves, no IPv4 address.
    for address in ("10.0.1.7", "192.0.2.1", "127.0.0.1", "fe80::1", "x"):
        assert not on_link(networks, address)
    lines: list[str] = []
    neighbours = Neighbours(lines.append)
    neighbours._limit, neighbours._networks = 10, networks
    for n in range(40):
        neighbours.add(f"10.0.1.{n}")
        neighbours.add(f"10.0.2.{n // 5}")
    assert lines == []
    for n in range(40):
        neighbours.add(f"10.0.3.{n}")
    (line,) = lines
    assert "net.ipv4.neigh.default.gc_thresh3" in line


def causes(text: str) -> str:
    return connect_error(text, "h", user="u", key="k", known_hosts="/k", limit_s=15)


@pytest.mark.parametrize("case", cases(__file__, "data/texts.json"))
def test_a_text_is_read(case):
    """The name of a case is what reads it, and the text."""
    read, _, text = case["name"].partition(": ")
    if read == "causes":
        assert case["expected"] in causes(ASKING if text == "ASKING" else text)
    else:
        assert [*{"jump_of": jump_of, "place": parse_jump_host}[read](text)] == case["expected"]


def test_a_path_is_filled_in(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ml")
    monkeypatch.setenv("SITE", "lab")
    path = expand("~/${SITE}/%h-%x-${NO}", {"h": "gpu1"})
    assert path == "/home/ml/lab/gpu1-%x-${NO}"


def test_names_that_do_not_resolve_do_not_block_the_lookups_of_other_names():
    logins.SshLogins(15)
    waiting = Event()
    pool = gevent.get_hub().threadpool
    try:
        with gevent.Timeout(10):
            blocked = [pool.spawn(waiting.wait) for _ in range(60)]
            assert pool.spawn(lambda: "an address").get() == "an address"
    finally:
        waiting.set()
    gevent.wait(blocked)
