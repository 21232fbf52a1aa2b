"""A node's names, addresses and host keys."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from nodeready.core.base import Output
from nodeready.subjects.nics.nic import Address
from nodeready.subjects.ssh_client.config import matches

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
_KEY_FILE = re.compile(r"^/etc/ssh/ssh_host_[^/:\n]{1,80}_key\.pub:(.*)$", re.M)

# The keys are those that sshd offers: the usual files, and those that its configuration names. The
# full name comes from /etc/hosts, else from DNS. The addresses come from
# nodeready.subjects.nics.nic: `ip` can wait for the kernel's network lock for ever.
_IDENTITY_SCRIPT = rf"""
    nr_host=
    {{ IFS= read -r nr_host </proc/sys/kernel/hostname; }} 2>/dev/null
    printf 'host=%s\n' "$nr_host"
    case $nr_host in
    *[!A-Za-z0-9_-]*) nr_full=1 nr_line='hostkey' ;;
    *) nr_full= nr_line="[^#]*[[:space:]]$nr_host([[:space:]#]|$)" ;;
    esac
    nr_found=$(grep -aHsiE -e "^$nr_line" \
        -e '^[[:space:]]*hostkey[[:space:]=]' -e '^(ssh|ecdsa)-' {_HOSTS} \
        /etc/ssh/ssh_host_*_key.pub /etc/ssh/sshd_config /etc/ssh/sshd_config.d/*.conf)
    printf '%s\n' "$nr_found"
    set -f
    for nr_file in $nr_found; do
        case $nr_file in
        /etc/ssh/ssh_host_*_key | *:*) ;;
        /*) nr_value key "$nr_file.pub" ;;
        esac
    done
    set +f
    case $nr_found in *{_HOSTS}:*) nr_full=1 ;; esac
    if [ -z "$nr_full" ] && command -v hostname >/dev/null; then
        nr_say fqdn "$(timeout 1 hostname -f 2>/dev/null)"
    fi
"""


@dataclass(frozen=True)
class NodeIdentity:
    """What a node says about itself, each text well-formed."""

    names: tuple[str, ...] = ()  # host name, short and in full, in small letters
    # of the node's interfaces, without loopback, link-local and container addresses
    addresses: tuple[str, ...] = ()
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
    match = _KEY.fullmatch(text.strip())
    if match is None:
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
    """The identity in what _IDENTITY_SCRIPT printed; malformed names and keys are left out.

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
    """Whether the names of a known_hosts line, plain or hashed, mean the host (sshd(8),
    SSH_KNOWN_HOSTS FILE FORMAT).
    """
    if not names.startswith("|1|"):
        return matches(names.lower().split(","), host)
    _, _, salt, digest = (*names.split("|"), "", "", "")[:4]
    try:
        expected = base64.b64decode(digest, validate=True)
        actual = hmac.new(base64.b64decode(salt, validate=True), host.encode(), "sha1").digest()
    except (binascii.Error, ValueError):
        return False
    return expected == actual
