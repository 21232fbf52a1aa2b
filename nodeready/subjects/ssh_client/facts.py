"""How ssh on a node answers the host-key question, and how other nodes know the node."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from nodeready.core import own_files, shell
from nodeready.core.base import Line, Output, Probe, Section, file_lines, frozen
from nodeready.core.policy import Policy
from nodeready.subjects.access import ACCESS, Access, parse_access
from nodeready.subjects.nics import nic
from nodeready.subjects.nics.nic import Address
from nodeready.subjects.ssh_client import config
from nodeready.subjects.ssh_client.config import Files

# --- A node's names, addresses and host keys.

# Names, addresses and keys are written to every other node: only well-formed ones are taken.

#: Interfaces whose addresses are the same on many nodes or change with every container.
_VIRTUAL = re.compile(
    r"(docker|br-|virbr|veth|cni|flannel|cali|cilium|lxc|lxd|podman|kube|tunl|weave|vmnet|nodelocal)"
)
_KEY = re.compile(
    r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521))"
    r"[ \t]+([A-Za-z0-9+/]{40,4096}={0,2})(?:[ \t].*)?"
)
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# The last label is no number: a malformed address is no name.
_NAME = re.compile(rf"(?=.{{1,253}}\Z)(?:(?:{_LABEL}\.)+(?!\d+\Z))?{_LABEL}")
_LOCAL_NAME = re.compile(r"(localhost|ip6-.*|.*\.localdomain)(\..*)?")

#: sshd has a key for each type, and a second one while they are renewed. Every node gets them all.
MOST_KEYS = 12
#: A node has few addresses outside of the networks of its interfaces (a cloud's /32, a tunnel's).
#: More such addresses are those of a load balancer's services (kube-ipvs0), which every node has.
MOST_ALONE = 16
_HOSTS = "/etc/hosts"
_KEY_FILE = re.compile(r"^/etc/ssh/ssh_host_[^/:\n]{1,80}_key\.pub:(?:\d+:)?(.*)$", re.M)


@dataclass(frozen=True)
class NodeIdentity:
    """What a node says about itself, each text well-formed."""

    names: tuple[str, ...] = ()  # host name, short and in full, in small letters
    addresses: tuple[str, ...] = ()  # of the node: no loopback, link-local or container addresses
    keys: tuple[str, ...] = ()  # host keys, ``type base64``


@lru_cache(maxsize=65536)
def clean_name(text: str) -> str:
    """A host name in small letters; "" for another text, and for localhost and the like.

    >>> clean_name("GPU001.cluster.")
    'gpu001.cluster'

    known_hosts takes ``*``, ``!`` and ``,`` for patterns, so that only plain names may pass.
    """
    name = text.strip().lower().rstrip(".")
    if not _NAME.fullmatch(name) or _LOCAL_NAME.fullmatch(name) or clean_address(name):
        return ""
    return name


@lru_cache(maxsize=65536)
def clean_address(text: str) -> str:
    """An address as ssh writes it; "" for another text, and for loopback and the like."""
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return ""
    local = address.is_loopback or address.is_link_local or address.is_unspecified
    return "" if local or address.is_multicast or "%" in str(address) else str(address)


@lru_cache(maxsize=65536)
def clean_key(text: str) -> str:
    """``type base64`` of a public key line; "" for another text, or a key of another type."""
    if (match := _KEY.fullmatch(text.strip())) is None:
        return ""
    kind = match[1].encode()
    try:
        blob = base64.b64decode(match[2], validate=True)
    except binascii.Error:
        return ""
    if blob[: 4 + len(kind)] != len(kind).to_bytes(4, "big") + kind:
        return ""
    return f"{match[1]} {match[2]}"


def fingerprint(key: str) -> str:
    """The fingerprint of a key, ``type base64``, as ssh-keygen -l shows it."""
    blob = base64.b64decode(key.partition(" ")[2])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _addresses(addresses: Iterable[Address]) -> tuple[str, ...]:
    """The addresses by which other nodes may reach this one, IPv4 first."""
    usable, unattached = [], []
    for address in sorted(addresses, key=lambda address: ":" in address.text):
        if not address.interfaces:
            unattached.append(address.text)
        elif address.lasting and not all(map(_VIRTUAL.match, address.interfaces)):
            usable.append(address.text)
    usable += unattached if len(unattached) <= MOST_ALONE else []
    return tuple(dict.fromkeys(filter(None, map(clean_address, usable))))


def _names(host: str, fqdn: str, hosts: Iterable[str]) -> tuple[str, ...]:
    """The names of the host. hosts: the lines of /etc/hosts"""
    if not fqdn:
        # The first name on the first line that knows this host (hosts(5)).
        rows = (line.split()[1:] for line in hosts)
        fqdn = next((row[0] for row in rows if host.lower() in map(str.lower, row)), "")
    host, full = clean_name(host), clean_name(fqdn)
    short = host.partition(".")[0]
    # A full name with another first label belongs to another host.
    names = [short, host, full if full.partition(".")[0] == short else ""]
    return tuple(dict.fromkeys(filter(None, names)))


def parse_identity(output: Output, addresses: Iterable[Address]) -> NodeIdentity:
    """The identity in what sh/ssh_client.sh printed; malformed names and keys are left out.

    addresses: the node's, from nodeready.subjects.nics.nic
    """
    values = output.values()
    hosts = re.findall(rf"^{_HOSTS}:([^#\n]*)", output.text, re.M)
    keys = (*_KEY_FILE.findall(output.text), *output.all("key"))
    return NodeIdentity(
        _names(values.get("host", ""), values.get("fqdn", ""), hosts),
        _addresses(addresses),
        tuple(dict.fromkeys(filter(None, map(clean_key, keys))))[:MOST_KEYS],
    )


def known_as(names: str, host: str) -> bool:
    """Whether the names of a known_hosts line, plain or hashed, mean the host (sshd(8))."""
    if not names.startswith("|1|"):
        return config.matches(names.lower().split(","), host)
    _, _, salt, digest = (*names.split("|"), "", "", "")[:4]
    try:
        expected = base64.b64decode(digest, validate=True)
        actual = hmac.new(base64.b64decode(salt, validate=True), host.encode(), "sha1").digest()
    except (binascii.Error, ValueError):
        return False
    return expected == actual


# --- The files of host keys, and what ssh itself says about its options.

KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
#: From a larger ssh_known_hosts, the node sends only the digest of our block, and the remaining
#: lines. At 200 nodes the file has about this size.
SENT_BYTES = 192 * 1024
#: Patterns of the policy that are tried with ``ssh -G``: each costs a process on the node.
MAX_SAMPLES = 3
#: Maximum further hosts that are tried, from the Host and Match lines of the node's files.
MAX_NAMED = 8
#: The host of ``ssh -G`` where the policy has no pattern: whether ssh accepts its configuration.
NO_HOST = "nodeready"

SSH = "/usr/bin/ssh"
_DROPINS = tuple(f"{folder}/" for folder in config.DROPIN_FOLDERS)


def samples(policy: Policy) -> tuple[str, ...]:
    """A host name for each of the policy's first patterns: ``*`` becomes x, ``?`` becomes 0."""
    patterns = [name for name in policy.ssh_client_hosts if not name.startswith("!")]
    names = (name.replace("*", "x").replace("?", "0") for name in patterns[:MAX_SAMPLES])
    return tuple(dict.fromkeys(names))


def _effective(policy: Policy) -> str:
    """The shell text that asks ssh itself, as an ordinary user."""
    hosts = shell.join(samples(policy) or (NO_HOST,))
    version = (
        'printf "version=%s\\n" "$(ssh -V 2>&1)"' if "accept" in policy.ssh_client_mode else ":"
    )
    named = _named(policy)
    return shell.script("ssh_options", VERSION=version, NAMED=named, HOSTS=hosts, MAIN=config.MAIN)


def _named(policy: Policy) -> str:
    """The shell text about the hosts of the policy that Host and Match lines name."""
    if not (names := samples(policy)):
        return "nr_named="
    tests = "\n".join(
        f"case $1 in {_glob(name.removeprefix('!'))}) "
        f"{'return 1' if name.startswith('!') else 'nr_is=0'} ;; esac"
        for name in policy.ssh_client_hosts
    )
    return shell.script(
        "ssh_named", TESTS=tests, SAMPLES=" ".join(names), MAX_NAMED=MAX_NAMED, **_BLOCK
    )


def _glob(pattern: str) -> str:
    """A pattern of the policy for the shell's ``case``: only ``*`` and ``?`` are special."""
    return "".join(char if char in "*?" else shell.quote(char) for char in pattern)


def _conf(policy: Policy) -> str:
    """The shell text that prints the lines of ssh's files; with hosts in the policy, it keeps them
    in nr_conf.
    """
    dropins = " ".join(f"{folder}/*.conf" for folder in config.DROPIN_FOLDERS)
    root_file = '${nr_own:+"$nr_own"}'
    if not samples(policy):
        return f"nr_lines all {dropins} {root_file}"
    return (
        f"nr_conf=$(grep -asHn '' {dropins} {config.MAIN} {config.VENDOR} {root_file} /dev/null)\n"
        "printf '%s\\n' \"$nr_conf\""
    )


#: Our file, and the marks of our block in it.
_BLOCK = {
    "KNOWN_HOSTS": KNOWN_HOSTS, "BEGIN": own_files.BEGIN.decode(), "END": own_files.END.decode(),
}  # fmt: skip


def _script(policy: Policy) -> str:
    return shell.script(
        "ssh_client", CONF=_conf(policy), EFFECTIVE=_effective(policy), SENT_BYTES=SENT_BYTES,
        MAIN=config.MAIN, VENDOR=config.VENDOR, DROPIN=config.DROPIN, **_BLOCK,
    )  # fmt: skip


@dataclass(frozen=True)
class KnownHosts:
    """The node's ssh_known_hosts."""

    JSON_KEYS: ClassVar = {"is_complete": "whole"}
    content: bytes | None = None  # bytes; without our block unless ``sent``; None: no such file
    lines: tuple[str, ...] | None = None  # lines of our block; None: no block, or it was not sent
    digest: str = ""  # sha256 of our block with its marks, hexadecimal; "" without a block
    size: int = 0  # bytes of the file
    sent: bool = True  # whether the block came along (see SENT_BYTES)
    is_complete: bool = True  # False where even the lines outside our block exceed SENT_BYTES


@dataclass(frozen=True)
class EffectiveOptions:
    """The options that ``ssh -G`` prints for one host."""

    JSON_KEYS: ClassVar = {"as_prober": "own"}
    host: str  # the name that ssh was asked about
    as_prober: bool  # asked by the probing user; False: by a user without a configuration file
    values: Mapping[str, str]  # option in small letters -> its value
    error: str = ""  # ssh's message when it refused the configuration, else ""


@dataclass(frozen=True)
class SshClient:
    """The ssh client of a node and the node's own identity."""

    JSON_KEYS: ClassVar = {"effective": "asked", "root_lines": "own"}
    installed: bool  # the command ssh exists
    version: tuple[int, int] | None  # of OpenSSH, (9, 2); None: not asked or not OpenSSH
    identity: NodeIdentity  # the node's names, addresses and host keys
    known_hosts: KnownHosts  # the node's file of other hosts' keys
    config: Mapping[str, bytes]  # path -> bytes of the system's ssh_config and of our drop-in
    files: Files  # path -> lines of every system file of ssh_config
    root_lines: tuple[Line, ...]  # lines of root's own file, which wins over the system's
    effective: tuple[EffectiveOptions, ...]  # what ssh itself says about the policy's hosts
    access: Access = field(default_factory=Access)  # modes of ssh and of the files it reads
    package: str = ""  # the installed package of an ssh whose program is missing


def block_digest(inner: bytes) -> str:
    """sha256 of a block with its marks, as the node computes it for a large file."""
    return hashlib.sha256(own_files.BEGIN + b"\n" + inner + own_files.END + b"\n").hexdigest()


@lru_cache(maxsize=64)
def parse_known_hosts(content: bytes) -> KnownHosts:
    """The KnownHosts of a file that was sent; one object for all nodes whose files are alike."""
    if (inner := own_files.find_block(content)) is None:
        return KnownHosts(content, None, "", len(content))
    text = inner.decode("utf-8", "surrogateescape")
    lines = tuple(line.rstrip() for line in text.splitlines() if line.strip())
    return KnownHosts(content, lines, block_digest(inner), len(content))


def _known_hosts(values: Mapping[str, str], files: Mapping[str, bytes]) -> KnownHosts:
    if (content := files.get(KNOWN_HOSTS)) is None:
        return KnownHosts()
    if "digest" not in values:
        return parse_known_hosts(content)
    match = re.match(r"[0-9a-f]{64}\b", values["digest"])
    # Without a block, the node hashes nothing.
    digest = match[0] if match and match[0] != hashlib.sha256(b"").hexdigest() else ""
    size = int(values["size"]) if values.get("size", "").strip().isdigit() else 0
    return KnownHosts(content, None, digest, size, False, len(content) < SENT_BYTES)


@lru_cache(maxsize=64)
def parse_effective(text: str) -> tuple[EffectiveOptions, ...]:
    """The answers of ``ssh -G``."""
    answers = []
    question, answer_lines = None, list[str]()
    for row in text.split("\n"):
        if row.startswith("|"):
            answer_lines.append(row[1:])
        if begins := re.fullmatch(r"ask=(own|system) (\S+)", row):
            question, answer_lines = begins, []
        ended = re.fullmatch(r"rc=(\d{1,9})", row)
        if question is None or ended is None:
            continue
        values: dict[str, str] = {}
        for line in answer_lines:
            option, _, value = line.partition(" ")
            values.setdefault(option, value)
        error = ""
        if ended[1] != "0":
            error = next(filter(None, map(str.strip, answer_lines)), f"status {ended[1]}")
        answers.append(EffectiveOptions(question[2], question[1] == "own", values, error))
        question = None
    shared: tuple[EffectiveOptions, ...] = frozen(tuple(answers))
    return shared


def parse(outputs: Mapping[str, Output], policy: Policy) -> SshClient:
    """The observation. Raises ProbeError when the section did not end well."""
    output = outputs["ssh_client"]
    # Values come before the first file, so that no file's content is taken for a value.
    head = output.require().partition(f"\n@{output.nonce} file ")[0]
    top = Output(head, 0, nonce=output.nonce)
    values, files = top.values(), output.files()
    lines: dict[str, list[Line]] = {}
    root = values.get("own", "")
    for line in file_lines(head):
        if line.path == root or line.path.startswith(_DROPINS):
            lines.setdefault(line.path, []).append(line)
    root_file = lines.pop(root, [])
    exact = (config.MAIN, config.VENDOR, config.DROPIN)
    contents = {path: files[path] for path in exact if path in files}
    system = {path: tuple(file_lines_) for path, file_lines_ in lines.items()}
    system.update({path: config.lines_of(path, data) for path, data in contents.items()})
    # The loader may print a message before it.
    version = re.search(r"^(?:version=)?OpenSSH_(\d{1,3})\.(\d{1,3})", head, re.M)
    return SshClient(
        installed="ssh" in top.all("have"),
        version=(int(version[1]), int(version[2])) if version else None,
        identity=parse_identity(top, nic.parse_section(outputs[nic.SECTION.name])[1]),
        known_hosts=_known_hosts(values, files),
        config=contents,
        files=system,
        root_lines=tuple(root_file),
        # The text above the first question differs by node.
        effective=parse_effective("".join(head.partition("ask=")[1:])),
        access=parse_access(outputs),
        package=values.get("package", ""),
    )


_SECTION = Section(
    "ssh_client", _script, cap_bytes=SENT_BYTES + 262144,
    seeks=lambda policy: shell.library("identity_seeks"),
)  # fmt: skip
PROBE = Probe("ssh_client", (_SECTION, nic.SECTION, ACCESS), parse)
