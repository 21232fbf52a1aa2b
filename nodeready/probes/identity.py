"""By which names, addresses and host keys ssh knows a node. They are written to every other node.

So nothing passes here that is not exactly one name, one address or one key.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass
from functools import lru_cache

from nodeready.probes.base import Output

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


# The keys are those that sshd offers: the usual files, and what its configuration names instead.
SCRIPT = r"""
    nr_host=
    nr_value host /proc/sys/kernel/hostname
    IFS= read -r nr_host </proc/sys/kernel/hostname
    case $nr_host in
    *.*) ;;
    *) if command -v hostname >/dev/null; then
        printf 'fqdn=%s\n' "$(timeout 1 hostname -f 2>/dev/null)"
    fi ;;
    esac
    if command -v ip >/dev/null; then
        ip -o addr show scope global 2>/dev/null
    elif command -v hostname >/dev/null; then
        printf 'addresses=%s\n' "$(hostname -I 2>/dev/null)"
    fi
    for nr_file in /etc/ssh/ssh_host_*_key.pub; do nr_value key "$nr_file"; done
    nr_keys=$(grep -ahsi '^[[:space:]]*hostkey[[:space:]=]' /etc/ssh/sshd_config \
        /etc/ssh/sshd_config.d/*.conf)
    set -f
    for nr_file in $nr_keys; do
        case $nr_file in
        /etc/ssh/ssh_host_*_key) ;;
        /*) nr_value key "$nr_file.pub" ;;
        esac
    done
    set +f
"""


@dataclass(frozen=True)
class Identity:
    """What a node says about itself, well-formed.

    names:     host name, short and in full, in small letters
    addresses: of its interfaces, without loopback, link-local and container ones
    keys:      its host keys, ``type base64``
    """

    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


@lru_cache(maxsize=65536)
def clean_name(text: str) -> str:
    """A host name in small letters; "" for what is none or means every node itself.

    known_hosts takes ``*``, ``!`` and ``,`` as patterns, so nothing else may pass.
    """
    name = text.strip().lower().rstrip(".")
    if not _NAME.fullmatch(name) or _LOCAL_NAME.fullmatch(name) or clean_address(name):
        return ""
    return name


@lru_cache(maxsize=65536)
def clean_address(text: str) -> str:
    """An address as ssh writes it; "" for what is none or holds on one node only."""
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return ""
    local = address.is_loopback or address.is_link_local or address.is_unspecified
    return "" if local or address.is_multicast or "%" in str(address) else str(address)


@lru_cache(maxsize=65536)
def clean_key(text: str) -> str:
    """``type base64`` of a public key line; "" when it is none or its inside says otherwise."""
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


def _addresses(head: str, listed: str) -> tuple[str, ...]:
    found: list[str] = listed.split()
    for match in re.finditer(r"^\d+: (\S+)\s+inet6? (\S+?)/\d+ ?(.*)$", head, re.M):
        # Temporary addresses (RFC 8981) change every day.
        if not _VIRTUAL.match(match[1]) and not re.search(r"\b(temporary|tentative)\b", match[3]):
            found.append(match[2])
    return tuple(dict.fromkeys(filter(None, map(clean_address, found))))


def _names(host: str, full: str) -> tuple[str, ...]:
    host, full = clean_name(host), clean_name(full)
    short = host.partition(".")[0]
    # A full name that is not this host's own would be somebody else's.
    names = [short, host, full if full.partition(".")[0] == short else ""]
    return tuple(dict.fromkeys(filter(None, names)))


def parse(output: Output) -> Identity:
    """What the script printed. Names and keys that are no such are left out."""
    values = output.values()
    return Identity(
        _names(values.get("host", ""), values.get("fqdn", "")),
        _addresses(output.text, values.get("addresses", "")),
        tuple(dict.fromkeys(filter(None, map(clean_key, output.all("key"))))),
    )
