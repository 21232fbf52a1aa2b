"""How ssh on a node answers the host-key question, and how other nodes know the node."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects import managed_block
from nodeready.subjects.access import ACCESS, Access, parse_access
from nodeready.subjects.base import Line, Output, Probe, Section, file_lines, frozen
from nodeready.subjects.nics import routes
from nodeready.subjects.nics.routes import Address
from nodeready.subjects.sysctl import Setting

# --- ssh_config(5): which line gives an option its value for a host.
#
# The first value wins: the user's own file, then the system's, each from its top. A section holds
# until the next Host or Match line of the same file; a file that Include names begins and ends
# inside the section of its Include line. Match lines other than ``all`` and ``host`` depend on
# what happens later, and count as not matching.

MAIN = "/etc/ssh/ssh_config"
#: Where newer SLES keeps its defaults: read when MAIN does not exist.
VENDOR = "/usr/etc/ssh/ssh_config"
#: Our file; its name sorts in front of every usual one.
DROPIN = "/etc/ssh/ssh_config.d/00-nodeready.conf"

#: The directories whose files a probe reads.
DROPIN_FOLDERS = ("/etc/ssh/ssh_config.d", "/usr/etc/ssh/ssh_config.d")

#: ssh itself gives up at this depth of Include (READCONF_MAX_DEPTH).
_MAX_DEPTH = 16

#: The lines of each file, by path.
Files = Mapping[str, tuple[Line, ...]]


class Directive(NamedTuple):
    """One line with a keyword: the keyword in small letters, and the rest of the line."""

    keyword: str
    value: str
    line: Line


def lines_of(path: str, content: bytes) -> tuple[Line, ...]:
    """A file's bytes as lines, without their line ends."""
    text = content.decode("utf-8", "surrogateescape")
    return tuple(Line(path, at, raw) for at, raw in enumerate(text.split("\n"), 1))


def directive(line: Line) -> Directive | None:
    """The directive of a line; None for a comment or an empty line."""
    match = re.match(r"([^\s=#]+)(?:\s*=\s*|\s+)(.*)$", line.text.strip(), re.S)
    if match is None:
        return None
    return Directive(match[1].lower(), match[2].replace('"', "").strip(), line)


def matches(patterns: list[str], host: str) -> bool:
    """Whether a Host line's patterns match ``host``, and no negated pattern does."""
    found = False
    for pattern in patterns:
        name = pattern.lstrip("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(host, name):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _section(said: Directive, host: str) -> bool:
    words = said.value.split()
    if said.keyword == "host":
        return matches(words, host)
    if [word.lower() for word in words] == ["all"]:
        return True
    if len(words) == 2 and words[0].lower() in ("host", "originalhost"):
        return matches(words[1].split(","), host)
    return False


def _folder(pattern: str) -> str:
    """The directory of one word of an Include line; a relative one is below /etc/ssh."""
    return (pattern if pattern.startswith("/") else f"/etc/ssh/{pattern}").rpartition("/")[0]


def included(pattern: str, files: Files) -> list[str]:
    """The files that one word of an Include line names, in the order in which ssh reads them."""
    folder, name = _folder(pattern), pattern.rpartition("/")[2]
    return sorted(
        path
        for path in files
        if path.rpartition("/")[0] == folder and fnmatch.fnmatchcase(path.rpartition("/")[2], name)
    )


def applied(path: str, files: Files, host: str, depth: int = 0) -> Iterator[Directive]:
    """The directives of a file that apply to ``host``, in order, with those of included files."""
    active = True
    for line in files.get(path, ()):
        said = directive(line)
        if said is None:
            continue
        if said.keyword in ("host", "match"):
            active = _section(said, host)
        elif active and said.keyword == "include" and depth < _MAX_DEPTH:
            for word in said.value.split():
                for name in included(word, files):
                    yield from applied(name, files, host, depth + 1)
        elif active:
            yield said


def winner(path: str, files: Files, host: str, option: str) -> Setting | None:
    """The first line that gives ``option`` (small letters) a value for ``host``, or None."""
    for said in applied(path, files, host):
        if said.keyword == option:
            return Setting(said.value, said.line.source)
    return None


def speaks_first(path: str, files: Files, options: tuple[str, ...]) -> bool:
    """Whether DROPIN, there or not, is read for every host and before any line about ``options``.

    A file that is read before DROPIN and was not seen counts as one with such a line.
    """
    known: dict[str, tuple[Line, ...]] = {**files, DROPIN: ()}
    for line in known.get(path, ()):
        said = directive(line)
        if said is None:
            continue
        if said.keyword in ("host", "match", *options):
            return False
        if said.keyword != "include":
            continue
        for word in said.value.split():
            names = included(word, known)
            before = names[: names.index(DROPIN)] if DROPIN in names else names
            if any(
                _about(entry, (*options, "include")) for name in before for entry in known[name]
            ):
                return False
            if DROPIN in names:
                return True
            if _folder(word) not in DROPIN_FOLDERS:
                return False
    return False


def _about(line: Line, options: tuple[str, ...]) -> bool:
    said = directive(line)
    return said is not None and said.keyword in options


# --- A node's names, addresses and host keys.
#
# They are written to every other node, so that nothing passes here but one well-formed name,
# address or key at a time.

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
# full name is the resolver's: of /etc/hosts, else of DNS. The addresses come from
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
class Identity:
    """What a node says about itself, each text well-formed.

    names:     host name, short and in full, in small letters
    addresses: of the node's interfaces, without loopback, link-local and container addresses
    keys:      host keys, ``type base64``
    """

    names: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


@lru_cache(maxsize=65536)
def clean_name(text: str) -> str:
    """A host name in small letters; "" for a text that is none, and for localhost and the like.

    known_hosts takes ``*``, ``!`` and ``,`` for patterns, so that only plain names may pass.
    """
    name = text.strip().lower().rstrip(".")
    if not _NAME.fullmatch(name) or _LOCAL_NAME.fullmatch(name) or clean_address(name):
        return ""
    return name


@lru_cache(maxsize=65536)
def clean_address(text: str) -> str:
    """An address as ssh writes it; "" for a text that is none, and for loopback and the like."""
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


def _addresses(own: Iterable[Address]) -> tuple[str, ...]:
    """The addresses by which other nodes may reach this one, IPv4 first."""
    found, alone = [], []
    for one in sorted(own, key=lambda one: ":" in one.text):
        if not one.interfaces:
            alone.append(one.text)
        elif one.lasting and not all(map(_VIRTUAL.match, one.interfaces)):
            found.append(one.text)
    found += alone if len(alone) <= MOST_ALONE else []
    return tuple(dict.fromkeys(filter(None, map(clean_address, found))))


def _in_hosts(host: str, head: str) -> str:
    """The first name on the first line of /etc/hosts that knows this host (hosts(5))."""
    for line in re.findall(rf"^{_HOSTS}:([^#\n]*)", head, re.M):
        words = line.split()
        if host.lower() in map(str.lower, words[1:]):
            return str(words[1])
    return ""


def _names(host: str, full: str) -> tuple[str, ...]:
    host, full = clean_name(host), clean_name(full)
    short = host.partition(".")[0]
    # A full name that is not this host's own would be somebody else's.
    names = [short, host, full if full.partition(".")[0] == short else ""]
    return tuple(dict.fromkeys(filter(None, names)))


def parse_identity(output: Output, own: Iterable[Address]) -> Identity:
    """The identity in what _IDENTITY_SCRIPT printed; malformed names and keys are left out.

    own: the node's addresses, of nodeready.subjects.nics.nic
    """
    values = output.values()
    host = values.get("host", "")
    keys = (*_KEY_FILE.findall(output.text), *output.all("key"))
    return Identity(
        _names(host, values.get("fqdn") or _in_hosts(host, output.text)),
        _addresses(own),
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
        wanted = base64.b64decode(digest, validate=True)
        made = hmac.new(base64.b64decode(salt, validate=True), host.encode(), "sha1").digest()
    except (binascii.Error, ValueError):
        return False
    return wanted == made


# --- The look at the ssh client: its files, and what ssh itself says about the policy's hosts.

KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
#: Of a larger ssh_known_hosts our block is not sent, only its digest and the lines of other
#: people. At 200 nodes the file has about this size.
SENT_BYTES = 192 * 1024
#: Patterns of the policy that are tried with ``ssh -G``: each costs a process on the node.
MAX_SAMPLES = 3
#: Of the hosts that somebody's Host and Match lines name, so many are tried beside them.
MAX_NAMED = 8
#: Whom ssh is asked about where the policy has no pattern: whether it takes its configuration.
NO_HOST = "nodeready"

SSH = "/usr/bin/ssh"
_DPKG = "/var/lib/dpkg/info"
_DROPINS = tuple(f"{folder}/" for folder in DROPIN_FOLDERS)


def samples(policy: Policy) -> tuple[str, ...]:
    """A host name for each of the policy's first patterns: ``*`` becomes x, ``?`` becomes 0."""
    wanted = [name for name in policy.ssh_client_hosts if not name.startswith("!")]
    made = (name.replace("*", "x").replace("?", "0") for name in wanted[:MAX_SAMPLES])
    return tuple(dict.fromkeys(made))


def _effective(policy: Policy) -> str:
    """The shell text that asks ssh itself, as an ordinary user.

    A user without a file of his own sees the system's options, where the modes of the files let
    him. root's own file wins over the system's: where root has one, root asks as well. Beside the
    samples, ssh is asked about the hosts of the policy that a Host or Match line of somebody's
    names: their options can differ from everybody else's.
    """
    hosts = shell.join(samples(policy) or (NO_HOST,))
    version = 'printf "version=%s\\n" "$(ssh -V 2>&1)"' if "accept" in _mode(policy) else ":"
    return rf"""
    {version}
    {_named(policy)}
    nr_ask() {{
        printf 'ask=%s %s\n' "$1" "$2"
        nr_rc=0
        if [ "$1" = own ]; then
            nr_line=$(nr_told ssh -GT -- "$2" </dev/null) || nr_rc=$?
        else
            nr_line='setpriv: none'
            if [ -n "$nr_user" ]; then
                nr_line=$(nr_told $nr_user ssh -GT -- "$2" </dev/null \
                    3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-) || nr_rc=$?
            fi
            # Where root may not become another user.
            case $nr_line in
            'setpriv: failed to execute'*) ;;
            'setpriv: '*)
                nr_user='' nr_rc=0
                nr_line=$(nr_told ssh -GT -F {MAIN} -- "$2" </dev/null) || nr_rc=$?
                ;;
            esac
        fi
        nr_said "$nr_line"
        printf 'rc=%s\n' "$nr_rc"
    }}
    while read -r nr_key nr_x nr_me nr_x; do
        if [ "$nr_key" = Uid: ]; then break; fi
    done </proc/self/status
    # Busybox has one that changes no user.
    nr_user=
    IFS=:
    for nr_dir in $PATH; do
        if [ "$nr_me" = 0 ] && [ -x "$nr_dir/setpriv" ]; then
            if [ ! "$nr_dir/setpriv" -ef /bin/busybox ]; then
                nr_user="$nr_dir/setpriv --reuid=65534 --regid=65534 --clear-groups --"
            fi
            break
        fi
    done
    unset IFS
    nr_as=own
    if [ -n "$nr_user$nr_own" ]; then nr_as=system; fi
    for nr_host in {hosts} $nr_named; do nr_ask $nr_as "$nr_host"; done
    if [ -n "$nr_own" ]; then
        printf 'own=%s\n' "$nr_own"
        for nr_host in {hosts} $nr_named; do nr_ask own "$nr_host"; done
    fi
    """


# The words that do not follow a criterion of a host in a Match line.
_OTHER_CRITERIA = ("match", "match=", "exec", "user", "localuser", "localnetwork", "tagged")


# The words of Host lines, and of the host and originalhost of Match lines. A pattern stands for
# the policy's sample that it means, else for the first name in ssh_known_hosts that the policy
# means as well, else for the name that it makes as a sample.
def _named(policy: Policy) -> str:
    if not samples(policy):
        return "nr_named="
    begin, end = (mark.decode() for mark in (managed_block.BEGIN, managed_block.END))
    tests = "\n".join(
        f"case $1 in {_glob(name.removeprefix('!'))}) "
        f"{'return 1' if name.startswith('!') else 'nr_is=0'} ;; esac"
        for name in policy.ssh_client_hosts
    )
    seen = " ".join(samples(policy))
    return rf"""
    nr_meant() {{
        nr_is=1
        {tests}
        return $nr_is
    }}
    nr_stands_for() {{
        for nr_host in {seen}; do
            case $nr_host in $1) return ;; esac
        done
        nr_known=${{nr_known:-$(sed -n '/^{begin}$/,/^{end}$/s/[ ,].*//p' {KNOWN_HOSTS})}}
        for nr_host in $nr_known; do
            case $nr_host in $1) if nr_meant "$nr_host"; then return; fi ;; esac
        done
        nr_host=$1
        while :; do
            case $nr_host in
            *'*'*) nr_host=${{nr_host%%'*'*}}x${{nr_host#*'*'}} ;;
            *'?'*) nr_host=${{nr_host%%'?'*}}0${{nr_host#*'?'}} ;;
            *) return ;;
            esac
        done
    }}
    nr_named='' nr_known='' nr_left={MAX_NAMED} nr_kind=''
    set -f
    nr_hosts=
    IFS='
'
    for nr_line in $nr_conf; do
        nr_line=${{nr_line#*:[0-9]*:}}
        nr_line=${{nr_line#"${{nr_line%%[![:space:]]*}}"}}
        case $nr_line in
        {_any_case("host", "match", then="[[:space:]=]*")}) nr_hosts="$nr_hosts$nr_line
" ;;
        esac
    done
    IFS=', "
'
    for nr_word in $nr_hosts; do
        case $nr_word in
        {_any_case("host", "host=", "originalhost")}) nr_kind=host && continue ;;
        {_any_case(*_OTHER_CRITERIA)}) nr_kind='' && continue ;;
        {_any_case("host=")}*) nr_kind=host nr_word=${{nr_word#*=}} ;;
        esac
        [ -n "$nr_kind" ] || continue
        case $nr_word in
        '' | '*' | -* | *[!A-Za-z0-9._*?:-]*) continue ;;
        *[*?]*) nr_stands_for "$nr_word" ;;
        *) nr_host=$nr_word ;;
        esac
        case " {seen} $nr_named " in *" $nr_host "*) continue ;; esac
        if [ -n "$nr_host" ] && [ "$nr_left" -gt 0 ] && nr_meant "$nr_host"; then
            nr_named="$nr_named $nr_host" nr_left=$((nr_left - 1))
        fi
    done
    unset IFS
    set +f
    """


def _any_case(*words: str, then: str = "") -> str:
    """A pattern of the shell's ``case`` for these words, in capitals or not, and what follows."""
    return " | ".join(
        "".join(f"[{char.upper()}{char}]" if char.isalpha() else char for char in word) + then
        for word in words
    )


def _glob(pattern: str) -> str:
    """A pattern of the policy for the shell's ``case``: stars and question marks alone are none of
    the plain characters."""
    return "".join(char if char in "*?" else shell.quote(char) for char in pattern)


def _mode(policy: Policy) -> str:
    return policy.ssh_client_mode


def _conf(policy: Policy) -> str:
    """The shell text that prints the lines of ssh's files, and has them in nr_conf where the
    policy has hosts that those lines may name."""
    dropins = " ".join(f"{folder}/*.conf" for folder in DROPIN_FOLDERS)
    own = '${nr_own:+"$nr_own"}'
    if not samples(policy):
        return f"nr_lines all {dropins} {own}"
    return (
        f"nr_conf=$(grep -asHn '' {dropins} {MAIN} {VENDOR} {own} /dev/null)\n"
        "printf '%s\\n' \"$nr_conf\""
    )


def _script(policy: Policy) -> str:
    begin, end = (mark.decode() for mark in (managed_block.BEGIN, managed_block.END))
    return rf"""
    {_IDENTITY_SCRIPT}
    nr_own=
    for nr_file in ~root/.ssh/config "$HOME/.ssh/config"; do
        if [ -s "$nr_file" ]; then nr_own=$nr_file; fi
    done
    {_conf(policy)}
    nr_size=0
    if nr_seen_at {KNOWN_HOSTS}; then :
    elif [ -s {KNOWN_HOSTS} ]; then nr_size=$(wc -c <{KNOWN_HOSTS}); fi
    printf 'size=%s\n' "$nr_size"
    if [ "$nr_size" -gt {SENT_BYTES} ]; then
        printf 'digest=%s\n' "$(sed -n '/^{begin}$/,/^{end}$/p' {KNOWN_HOSTS} | sha256sum)"
    fi
    if command -v ssh >/dev/null; then
        printf 'have=ssh\n'
        {_effective(policy)}
    else
        for nr_file in {_DPKG}/openssh-client.md5sums {_DPKG}/openssh-client:*.md5sums; do
            if [ -e "$nr_file" ]; then printf 'package=openssh-client\n'; fi
        done
        if command -v rpm >/dev/null && rpm -q openssh-clients >/dev/null 2>&1; then
            printf 'package=openssh-clients\n'
        fi
    fi
    if [ "$nr_size" -le {SENT_BYTES} ]; then
        nr_exact {KNOWN_HOSTS}
    else
        printf '\n@%s file %s\n' "$NR" {KNOWN_HOSTS}
        sed '/^{begin}$/,/^{end}$/d' {KNOWN_HOSTS} | head -c {SENT_BYTES} | base64
        printf '\n@%s eof\n' "$NR"
    fi
    nr_exact {MAIN} {VENDOR} {DROPIN}
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

    own:    asked by the probing user; False: by a user without a file of his own
    values: option in small letters -> its value
    error:  ssh's message when it refused the configuration, else ""
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
    identity:    the node's names, addresses and host keys
    known_hosts: the node's file of other hosts' keys
    config:      path -> bytes of the system's ssh_config and of our drop-in
    files:       path -> lines of every system file of ssh_config
    own:         lines of root's own file, which wins over the system's
    asked:       what ssh itself says about the policy's hosts
    access:      the modes of ssh and of the files that it reads
    package:     the package of an ssh that is not there, where the package manager has it
    """

    installed: bool
    version: tuple[int, int] | None
    identity: Identity
    known_hosts: KnownHosts
    config: Mapping[str, bytes]
    files: Files
    own: tuple[Line, ...]
    asked: tuple[Asked, ...]
    access: Access = field(default_factory=Access)
    package: str = ""


def block_digest(inner: bytes) -> str:
    """sha256 of a block with its marks, as the node computes it for a large file."""
    return hashlib.sha256(
        managed_block.BEGIN + b"\n" + inner + managed_block.END + b"\n"
    ).hexdigest()


@lru_cache(maxsize=64)
def parse_known_hosts(content: bytes) -> KnownHosts:
    """The KnownHosts of a file that was sent; one object for all nodes whose files are alike."""
    inner = managed_block.find(content)
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
    """What ssh says that it would do; what stands above that is the node's own."""
    start = head.find("ask=")
    return _said(head[start:]) if start >= 0 else ()


@lru_cache(maxsize=64)
def _said(head: str) -> tuple[Asked, ...]:
    found = []
    asked, said = None, list[str]()
    for row in head.split("\n"):
        if row.startswith("|"):
            said.append(row[1:])
        begins = re.fullmatch(r"ask=(own|system) (\S+)", row)
        if begins:
            asked, said = begins, []
        ended = re.fullmatch(r"rc=(\d{1,9})", row)
        if asked is None or ended is None:
            continue
        values: dict[str, str] = {}
        for line in said:
            option, _, value = line.partition(" ")
            values.setdefault(option, value)
        error = ""
        if ended[1] != "0":
            error = next((line.strip() for line in said if line.strip()), f"status {ended[1]}")
        found.append(Asked(asked[2], asked[1] == "own", values, error))
        asked = None
    shared: tuple[Asked, ...] = frozen(tuple(found))
    return shared


def parse(outputs: Mapping[str, Output], policy: Policy) -> SshClient:
    """The observation. Raises ProbeError when the section did not end well."""
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
    exact = (MAIN, VENDOR, DROPIN)
    config = {path: files[path] for path in exact if path in files}
    system = {path: tuple(found) for path, found in lines.items()}
    system.update({path: lines_of(path, data) for path, data in config.items()})
    # Above it can stand what the loader has to say.
    version = re.search(r"^(?:version=)?OpenSSH_(\d{1,3})\.(\d{1,3})", head, re.M)
    return SshClient(
        installed="ssh" in top.all("have"),
        version=(int(version[1]), int(version[2])) if version else None,
        identity=parse_identity(top, routes.parse_section(outputs[routes.SECTION.name])[1]),
        known_hosts=_known_hosts(values, files),
        config=config,
        files=system,
        own=tuple(own),
        asked=_asked(head),
        access=parse_access(outputs),
        package=values.get("package", ""),
    )


PROBE = Probe(
    "ssh_client",
    (Section("ssh_client", _script, cap_bytes=SENT_BYTES + 262144), routes.SECTION, ACCESS),
    parse,
)
