"""How ssh from a node answers the host-key question, and how others know the node."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from nodeready import blocks, shell
from nodeready.policy import Policy
from nodeready.probes import identity, routes, ssh_config
from nodeready.probes.base import Line, Output, Probe, Section, file_lines
from nodeready.probes.identity import Identity

KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
#: A larger ssh_known_hosts is not sent: its block is told by digest, and only the lines of other
#: people come along. At 200 nodes the file has about this size.
SENT_BYTES = 192 * 1024
#: Patterns of the policy that are tried with ``ssh -G``: each costs a process on the node.
MAX_SAMPLES = 3


_DROPINS = tuple(f"{folder}/" for folder in ssh_config.DROPIN_FOLDERS)


def samples(policy: Policy) -> tuple[str, ...]:
    """A host name for each of the policy's first patterns: ``*`` becomes x, ``?`` becomes 0."""
    wanted = [name for name in policy.ssh_client_hosts if not name.startswith("!")]
    made = (name.replace("*", "x").replace("?", "0") for name in wanted[:MAX_SAMPLES])
    return tuple(dict.fromkeys(made))


def _effective(policy: Policy) -> str:
    """The shell text that asks ssh itself; nothing when the policy has no patterns.

    root's own file wins over the system's. Where it speaks about our options, nobody's view is
    shown too: the one of a user without a file of his own.
    """
    hosts = shell.join(samples(policy))
    if not hosts:
        return ""
    version = "printf 'version=%s\\n' \"$(ssh -V 2>&1)\"" if "accept" in _mode(policy) else ":"
    return rf"""
    {version}
    nr_own=
    for nr_file in ~root/.ssh/config "$HOME/.ssh/config"; do
        if [ -s "$nr_file" ]; then nr_own=$nr_file; fi
    done
    nr_ask() {{
        printf 'ask=%s %s\n' "$1" "$2"
        nr_rc=0
        if [ "$1" = own ]; then
            ssh -GT -- "$2" 2>&1 || nr_rc=$?
        else
            setpriv --reuid=65534 --regid=65534 --clear-groups ssh -GT -- "$2" 2>/dev/null ||
                ssh -GT -F {ssh_config.MAIN} -- "$2" 2>&1 || nr_rc=$?
        fi
        printf 'rc=%s\n' "$nr_rc"
    }}
    for nr_host in {hosts}; do nr_ask own "$nr_host"; done
    if [ -n "$nr_own" ]; then
        printf 'own=%s\n' "$nr_own"
        grep -asHn '' "$nr_own" /dev/null
        for nr_host in {hosts}; do nr_ask system "$nr_host"; done
    fi
    """


def _mode(policy: Policy) -> str:
    return policy.ssh_client_mode


def _script(policy: Policy) -> str:
    begin, end = (mark.decode() for mark in (blocks.BEGIN, blocks.END))
    return rf"""
    {identity.SCRIPT}
    for nr_dir in {" ".join(ssh_config.DROPIN_FOLDERS)}; do
        set -- "$nr_dir"/*.conf
        if [ -e "$1" ]; then grep -asHn '' "$@" /dev/null; fi
    done
    nr_size=0
    if [ -s {KNOWN_HOSTS} ]; then nr_size=$(wc -c <{KNOWN_HOSTS}); fi
    printf 'size=%s\n' "$nr_size"
    if [ "$nr_size" -gt {SENT_BYTES} ]; then
        printf 'digest=%s\n' "$(sed -n '/^{begin}$/,/^{end}$/p' {KNOWN_HOSTS} | sha256sum)"
    fi
    if command -v ssh >/dev/null; then
        printf 'have=ssh\n'
        {_effective(policy)}
    fi
    if [ "$nr_size" -le {SENT_BYTES} ]; then
        nr_exact {KNOWN_HOSTS}
    else
        printf '\n@%s file %s\n' "$NR" {KNOWN_HOSTS}
        sed '/^{begin}$/,/^{end}$/d' {KNOWN_HOSTS} | head -c {SENT_BYTES}
        printf '\n@%s eof\n' "$NR"
    fi
    nr_exact {ssh_config.MAIN} {ssh_config.VENDOR} {ssh_config.DROPIN}
    :
    """


@dataclass(frozen=True)
class KnownHosts:
    """The node's ssh_known_hosts.

    content: its bytes; without our block when ``sent`` is False; None: no such file
    lines:   the lines of our block; None: there is none, or it was not sent
    digest:  sha256 of our block with its marks, hexadecimal; "" when there is none
    size:    bytes of the file
    sent:    whether the block came along (see SENT_BYTES)
    whole:   False when even the lines outside our block are more than SENT_BYTES
    """

    content: bytes | None = None
    lines: tuple[str, ...] | None = None
    digest: str = ""
    size: int = 0
    sent: bool = True
    whole: bool = True


@dataclass(frozen=True)
class Asked:
    """What ``ssh -G`` said about one host.

    own:    as the probing user sees it, else as a user without a file of his own does
    values: the options, by name in small letters
    error:  its message when it refused the configuration, else ""
    """

    host: str
    own: bool
    values: Mapping[str, str]
    error: str = ""


@dataclass(frozen=True)
class SshClient:
    """The ssh client of a node and the node's own identity.

    installed:   the command ssh is there
    version:     of OpenSSH, (9, 2); None: not asked or not OpenSSH
    identity:    by what others know it: names, addresses, host keys
    known_hosts: what it knows about others
    config:      bytes of the system's ssh_config and of our drop-in, by path
    files:       lines of all system files of ssh_config, by path
    own:         lines of root's own file, which wins over the system's
    asked:       what ssh itself says about the policy's hosts
    """

    installed: bool
    version: tuple[int, int] | None
    identity: Identity
    known_hosts: KnownHosts
    config: Mapping[str, bytes]
    files: ssh_config.Files
    own: tuple[Line, ...]
    asked: tuple[Asked, ...]


def block_digest(inner: bytes) -> str:
    """sha256 of a block with its marks, as the node computes it for a large file."""
    return hashlib.sha256(blocks.BEGIN + b"\n" + inner + blocks.END + b"\n").hexdigest()


@lru_cache(maxsize=64)
def parse_known_hosts(content: bytes) -> KnownHosts:
    """One object for all nodes whose files are alike: a fleet's are."""
    inner = blocks.find(content)
    if inner is None:
        return KnownHosts(content, None, "", len(content))
    text = inner.decode("utf-8", "surrogateescape")
    lines = tuple(line.rstrip() for line in text.splitlines() if line.strip())
    return KnownHosts(content, lines, block_digest(inner), len(content))


def _known_hosts(values: Mapping[str, str], files: Mapping[str, bytes]) -> KnownHosts:
    content = files.get(KNOWN_HOSTS)
    digest = re.match(r"[0-9a-f]{64}\b", values.get("digest", ""))
    if content is None:
        return KnownHosts()
    if "digest" not in values:
        return parse_known_hosts(content)
    found = digest[0] if digest else ""
    if found == hashlib.sha256(b"").hexdigest():
        found = ""
    size = int(values["size"]) if values.get("size", "").strip().isdigit() else 0
    return KnownHosts(content, None, found, size, False, len(content) < SENT_BYTES)


def _asked(head: str) -> tuple[Asked, ...]:
    found = []
    pieces = re.finditer(r"^ask=(own|system) (\S+)\n(.*?)^rc=(\d+)$", head, re.M | re.S)
    for match in pieces:
        values: dict[str, str] = {}
        for line in match[3].splitlines():
            option, _, value = line.partition(" ")
            values.setdefault(option, value)
        error = ""
        if match[4] != "0":
            error = match[3].strip().splitlines()[0] if match[3].strip() else f"status {match[4]}"
        found.append(Asked(match[2], match[1] == "own", values, error))
    return tuple(found)


def parse(outputs: Mapping[str, Output], policy: Policy) -> SshClient:
    """Raises ProbeError when the section did not end well."""
    output = outputs["ssh_client"]
    # Values stand before the first file, so that no file's content passes for one.
    head = output.require().partition(f"\n@{output.nonce} file ")[0]
    top = Output(head, 0, nonce=output.nonce)
    values, files = top.values(), output.files()
    lines: dict[str, list[Line]] = {}
    root = values.get("own", "")
    for line in file_lines(head):
        if line.path == root or line.path.startswith(_DROPINS):
            lines.setdefault(line.path, []).append(line)
    own = lines.pop(root, [])
    exact = (ssh_config.MAIN, ssh_config.VENDOR, ssh_config.DROPIN)
    config = {path: files[path] for path in exact if path in files}
    system = {path: tuple(found) for path, found in lines.items()}
    system.update({path: ssh_config.lines_of(path, data) for path, data in config.items()})
    version = re.search(r"OpenSSH_(\d{1,3})\.(\d{1,3})", values.get("version", ""))
    return SshClient(
        installed="ssh" in top.all("have"),
        version=(int(version[1]), int(version[2])) if version else None,
        identity=identity.parse(top, routes.parse_section(outputs[routes.SECTION.name])[1]),
        known_hosts=_known_hosts(values, files),
        config=config,
        files=system,
        own=tuple(own),
        asked=_asked(head),
    )


PROBE = Probe(
    "ssh_client",
    (Section("ssh_client", _script, cap_bytes=SENT_BYTES + 262144), routes.SECTION),
    parse,
)
