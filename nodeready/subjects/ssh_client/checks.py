"""Judge whether ssh between nodes asks no question, and still refuses a wrong host key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nodeready.policy import Policy
from nodeready.policy.policy import JudgingPolicy as Completed
from nodeready.subjects import managed_block
from nodeready.subjects.access import UNLOADED, Stuck, chmod_mends, stuck
from nodeready.subjects.result import Result, Subject, check, fail, fixable, na, ok, warn
from nodeready.subjects.ssh_client.facts import (
    DROPIN,
    KNOWN_HOSTS,
    MAIN,
    PROBE,
    SSH,
    VENDOR,
    Asked,
    SshClient,
    block_digest,
    directive,
    fingerprint,
    known_as,
    samples,
    winner,
)

STRICT = "stricthostkeychecking"
GLOBAL_FILE = "globalknownhostsfile"
#: OpenSSH 7.6 knows accept-new; older ones refuse the whole configuration.
ACCEPT_NEW = (7, 6)
#: A block that was not sent is replaced only by one of at least this share of its size: a smaller
#: one is of a run that saw a part of the fleet, and would lose the keys of the other nodes.
SHRINK = 0.9

# Mode -> what ssh -G prints for the option: versions of OpenSSH have different words.
_STRICT_VALUES = {
    "known_hosts": ("true", "yes"),
    "accept-new": ("accept-new",),
    "no": ("false", "no", "off"),
}
_STRICT_SETTING = {"known_hosts": "yes", "accept-new": "accept-new", "no": "no"}


class Expected(NamedTuple):
    """The block that every node shall have.

    inner:  the block's bytes without its marks
    lines:  its lines
    keys:   host name or address -> its keys
    digest: as `block_digest` has it
    """

    inner: bytes
    lines: frozenset[str]
    keys: dict[str, set[str]]
    digest: str


_made: list[tuple[tuple[str, ...], Expected]] = []


def expected(lines: tuple[str, ...]) -> Expected:
    """The block of a fleet's lines, computed once for all nodes that share the tuple."""
    for known, made in _made:
        if known is lines:
            return made
    inner = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    keys: dict[str, set[str]] = {}
    for line in lines:
        names, _, key = line.partition(" ")
        for name in names.split(","):
            keys.setdefault(name, set()).add(key)
    made = Expected(inner, frozenset(lines), keys, block_digest(inner))
    _made.append((lines, made))
    # A run has a handful of groups with lines of their own.
    del _made[:-8]
    return made


def _strange(line: str, want: Expected) -> bool:
    """Whether no name of the line is one of the fleet's."""
    return want.keys.keys().isdisjoint(line.partition(" ")[0].split(","))


@check(
    "ssh_client.known_hosts",
    settings=("ssh_client_mode", "ssh_known_hosts"),
    fixed_by="ssh_client.known_hosts",
    fix=(
        "shorten /etc/ssh/ssh_known_hosts",
        "deploy to all nodes at once, or remove the block by hand",
        "let users read PATH",
        "remove the line SOURCE, or give the host a new key",
    ),
)
def known_hosts(seen: SshClient, want: Policy) -> Result:
    """The node knows the host keys of all nodes, by their names and addresses.

    A key that is known asks no question, in any program, and a wrong one is refused (sshd(8),
    SSH_KNOWN_HOSTS FILE FORMAT). Lines of other people stay, outside our block. In it, every line
    is about a node of the inventory: a node that was re-imaged has new keys, and its old ones
    must go, like those of hosts that the inventory has not. Every user must be able to read the
    file, root alone may change it, and no line of others may revoke a key of the fleet
    (``@revoked``).
    """
    found = _block(seen, want)
    if found.status == "na" or (found.status == "fail" and not found.fixable):
        return found
    check = found.check
    there = seen.access.seen.get(KNOWN_HOSTS)
    barrier = seen.access.barrier(KNOWN_HOSTS)
    if barrier is not None:
        if barrier.path == KNOWN_HOSTS or chmod_mends(barrier, KNOWN_HOSTS):
            return fixable(check, found.expected, barrier.words, barrier.path)
        fix = f"let users read {barrier.path}"
        return fail(check, found.expected, barrier.words, barrier.path, fix)
    if there is not None and found.status == "ok" and (there.uid or there.mode & 0o022):
        actual = f"others can change it (uid {there.uid}, mode {there.mode & 0o7777:o})"
        return fixable(check, found.expected, actual, KNOWN_HOSTS)
    if found.status == "ok":
        return _revoked(seen, expected(want.ssh_known_hosts)) or found
    return found


def _revoked(seen: SshClient, fleet: Expected) -> Result | None:
    """A line outside our block that revokes a key of the fleet (sshd(8), ``@revoked``)."""
    keys = {key: name for name, keys in fleet.keys.items() for key in keys}
    text = (seen.known_hosts.content or b"").decode("utf-8", "surrogateescape")
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if len(words) < 4 or words[0] != "@revoked":
            continue
        name = keys.get(f"{words[2]} {words[3]}", "")
        if not name or not known_as(words[1], name):
            continue
        # Of a large file, our block is not among the lines.
        source = f"{KNOWN_HOSTS}:{number}" if seen.known_hosts.sent else KNOWN_HOSTS
        actual = f"a line revokes the {words[2]} key of {name}"
        fix = f"remove the line {source}, or give the host a new key"
        wanted = f"the {len(fleet.lines)} lines of the fleet"
        return fail("ssh_client.known_hosts", wanted, actual, source, fix)
    return None


def _block(seen: SshClient, want: Policy) -> Result:
    """Judge our block alone."""
    check, file = "ssh_client.known_hosts", seen.known_hosts
    if want.ssh_client_mode != "known_hosts":
        return na(check, f"ssh_client_mode is {want.ssh_client_mode}")
    if not want.ssh_known_hosts:
        return na(check, "no host keys were gathered")
    fleet = expected(want.ssh_known_hosts)
    wanted = f"the {len(fleet.lines)} lines of the fleet"
    if file.digest == fleet.digest:
        return ok(check, wanted)
    if not file.sent:
        return _unsent(seen, fleet, wanted)
    if file.lines is None:
        return fixable(check, wanted, "no block" if file.content else "no file", KNOWN_HOSTS)
    held = {line for line in file.lines if not line.startswith("#")}
    surplus = held - fleet.lines
    strange = sum(_strange(line, fleet) for line in surplus)
    if strange > len(held) - strange:
        # Of an inventory that has a part of the fleet: it would lose the keys of the other nodes.
        return warn(
            check,
            wanted,
            f"{strange} of its {len(held)} lines are about hosts that this inventory has not",
            KNOWN_HOSTS,
            "deploy to all nodes at once, or remove the block by hand",
        )
    missing = sum(not line.startswith("#") for line in fleet.lines.difference(file.lines))
    if missing or surplus:
        actual = f"{missing} missing, {len(surplus)} that are none of them"
        return fixable(check, wanted, actual, KNOWN_HOSTS)
    return ok(check, wanted)


@check(
    "ssh_client.host_key",
    settings=("ssh_client_mode",),
    fix=(
        "find out who answers at the node's address; sshd's keys are those that HostKey in "
        "sshd_config(5) names",
    ),
)
def host_key(seen: SshClient, want: Policy) -> Result:
    """The node tells the host key with which its sshd answered this run.

    A node whose own files name other keys is not what it says, or its address is another's: its
    keys are given to no node (RFC 4253, section 8: the key of the exchange is proven, a file is
    not).
    """
    check = "ssh_client.host_key"
    if want.ssh_client_mode != "known_hosts":
        return na(check, f"ssh_client_mode is {want.ssh_client_mode}")
    met = want.host_key if isinstance(want, Completed) else ""
    if not met:
        return na(check, "this run did not connect by ssh")
    if not seen.identity.keys:
        return na(check, "the node tells no host key")
    wanted = f"{met.partition(' ')[0]} {fingerprint(met)}"
    if met in seen.identity.keys:
        return ok(check, wanted)
    kind = met.partition(" ")[0]
    told = [key for key in seen.identity.keys if key.startswith(f"{kind} ")]
    actual = f"{kind} {fingerprint(told[0])}" if told else f"no {kind} key"
    fix = (
        "find out who answers at the node's address; sshd's keys are those that HostKey in "
        "sshd_config(5) names"
    )
    return fail(check, wanted, actual, "/etc/ssh/ssh_host_*_key.pub", fix)


def _unsent(seen: SshClient, fleet: Expected, wanted: str) -> Result:
    """Judge a file whose block is too large to be sent, by its digest and size."""
    check, file = "ssh_client.known_hosts", seen.known_hosts
    if not file.whole:
        return fail(
            check,
            wanted,
            f"{file.size} bytes, too many of them outside our block",
            KNOWN_HOSTS,
            f"shorten {KNOWN_HOSTS}",
        )
    held = file.size - len(file.content or b"")
    if file.digest and len(fleet.inner) < SHRINK * held:
        return warn(
            check,
            wanted,
            f"a block of {held} bytes; this run gathered {len(fleet.inner)}",
            KNOWN_HOSTS,
            "deploy to all nodes at once, or remove the block by hand",
        )
    return fixable(check, wanted, "another block" if file.digest else "no block", KNOWN_HOSTS)


@check("ssh_client.leftover", settings=("ssh_client_mode",), fixed_by="ssh_client.leftover")
def leftover(seen: SshClient, want: Policy) -> Result:
    """In the other modes, no block of ours is left in ssh_known_hosts.

    Nothing keeps it right there: a node that is re-imaged would be refused for ever.
    """
    check = "ssh_client.leftover"
    if want.ssh_client_mode == "known_hosts":
        return na(check, "ssh_client_mode is known_hosts")
    if seen.known_hosts.digest:
        return fixable(check, "no block of ours", "one from mode known_hosts", KNOWN_HOSTS)
    return ok(check, "no block of ours")


def option_lines(want: Policy) -> tuple[str, ...]:
    """The ssh_config lines that the policy asks for, without marks and comments."""
    lines = [
        f"Host {' '.join(want.ssh_client_hosts)}",
        f"    StrictHostKeyChecking {_STRICT_SETTING[want.ssh_client_mode]}",
    ]
    if want.ssh_client_mode == "known_hosts":
        lines.append(f"    GlobalKnownHostsFile {KNOWN_HOSTS} {KNOWN_HOSTS}2")
    return tuple(lines)


def wanted_options(want: Policy) -> tuple[str, ...]:
    """The options that the mode sets, in small letters."""
    return (STRICT, GLOBAL_FILE) if want.ssh_client_mode == "known_hosts" else (STRICT,)


def _wrong(asked: Asked, want: Policy) -> str:
    """The option that has another value than the mode wants, with that value, or ""."""
    value = asked.values.get(STRICT, "")
    if value not in _STRICT_VALUES[want.ssh_client_mode]:
        return f"{STRICT} {value}"
    files = asked.values.get(GLOBAL_FILE, "")
    if want.ssh_client_mode == "known_hosts" and KNOWN_HOSTS not in files.split():
        return f"{GLOBAL_FILE} {files}"
    return ""


class Ours(NamedTuple):
    """The lines of our drop-in and of our block; None where there is none."""

    dropin: tuple[str, ...] | None
    block: tuple[str, ...] | None


def ours(seen: SshClient) -> Ours:
    """Our drop-in and our block in the main file, without comments and empty lines."""

    def speaking(texts: list[str]) -> tuple[str, ...]:
        kept = (text.rstrip() for text in texts)
        return tuple(text for text in kept if text and not text.startswith("#"))

    dropin = seen.files.get(DROPIN) if DROPIN in seen.config else None
    inner = managed_block.find(seen.config.get(MAIN, b""))
    text = "" if inner is None else inner.decode("utf-8", "surrogateescape")
    return Ours(
        None if dropin is None else speaking([line.text for line in dropin]),
        None if inner is None else speaking(text.split("\n")),
    )


def _current(seen: SshClient, want: Policy) -> bool:
    """Whether our lines stand in one place alone, and are those of the policy."""
    there, lines = ours(seen), option_lines(want)
    if there.dropin is not None and there.block is not None:
        return False
    if there.block is not None:
        return there.block[: len(lines)] == lines
    return there.dropin is None or there.dropin == lines


def block_at_top(seen: SshClient) -> bool:
    """Whether the main file begins with our block."""
    return seen.config.get(MAIN, b"").startswith(managed_block.BEGIN)


@check(
    "ssh_client.options",
    settings=("ssh_client_mode", "ssh_client_hosts", "ssh_known_hosts", "job_user"),
    fixed_by="ssh_client.options",
    fix=(
        "add a pattern without '!'",
        "choose another ssh_client_mode for this node",
        "correct that line",
        "chown root PATH; chmod 644 PATH",
        "chmod a+r PATH",
        "remove SOURCE",
        "remove the line SOURCE",
        "look at root's own ssh config",
    ),
)
def options(seen: SshClient, want: Policy) -> Result:
    """ssh itself has the options of the mode for the policy's host patterns.

    In ssh_config the first value wins (ssh_config(5)): a ``Host *`` above ours, a drop-in that
    sorts before it or the user's own file decides, so ``ssh -G`` is asked for the effective one,
    by a user who is not root. It is asked as well about the hosts of the policy that somebody's
    ``Host`` and ``Match`` lines name: no such line may send ssh to another port, host or user, ask
    for a key that is not known, or forbid the login by key.
    """
    check = "ssh_client.options"
    there = ours(seen)
    if not want.ssh_client_hosts:
        if there != Ours(None, None):
            where = DROPIN if there.dropin is not None else MAIN
            return fixable(check, "nothing of ours", "options of an earlier policy", where)
        return na(check, "no ssh_client_hosts in the policy")
    if not seen.installed:
        return na(check, "ssh is not installed")
    if trouble_of(seen) is not None:
        return na(check, "ssh does not run: see ssh_client.installed")
    wanted = f"{_STRICT_SETTING[want.ssh_client_mode]} for {' '.join(want.ssh_client_hosts)}"
    if want.ssh_client_mode == "known_hosts" and not want.ssh_known_hosts:
        # Without keys, "yes" would refuse every node.
        return na(check, "no host keys were gathered")
    keys = known_hosts(seen, want)
    if keys.status == "fail" and not keys.fixable:
        return na(check, f"no host keys on the node: {keys.actual}")
    if not samples(want):
        return fail(
            check,
            wanted,
            "only negated patterns: they match no host",
            "policy ssh_client_hosts",
            "add a pattern without '!'",
        )
    if want.ssh_client_mode == "accept-new" and seen.version and seen.version < ACCEPT_NEW:
        version = ".".join(map(str, seen.version))
        fix = "choose another ssh_client_mode for this node"
        return fail(check, wanted, f"OpenSSH {version} has no accept-new (7.6 has)", "ssh -V", fix)
    return _asked(seen, want, wanted)


def _asked(seen: SshClient, want: Policy, wanted: str) -> Result:
    """Judge what ssh said: first the system's files, then root's own."""
    check, there = "ssh_client.options", ours(seen)
    for path in (MAIN, DROPIN):
        barrier = seen.access.barrier(path) if path in seen.config else None
        if barrier is None:
            continue
        if path == DROPIN or chmod_mends(barrier, path):
            return fixable(check, wanted, barrier.words, barrier.path)
        return fail(check, wanted, barrier.words, barrier.path, f"chmod a+r {barrier.path}")
    broken = next((asked for asked in seen.asked if asked.error), None)
    if broken is not None:
        if DROPIN in broken.error:
            return fixable(check, wanted, broken.error, DROPIN)
        return refused(check, wanted, broken.error)
    # Where root has no file of its own, root sees what a user without a file of his own sees.
    system = [a for a in seen.asked if not a.own] or [a for a in seen.asked if a.own]
    for asked in system:
        wrong = _wrong(asked, want)
        if not wrong:
            continue
        source = _source(seen, asked, wrong)
        if block_at_top(seen) and _current(seen, want):
            fix = f"remove {source or 'the line that wins'}"
            return fail(check, wanted, f"{wrong} for {asked.host}", source, fix)
        return fixable(check, wanted, f"{wrong} for {asked.host}", source)
    if not _current(seen, want):
        where = DROPIN if there.dropin is not None else MAIN
        return fixable(check, wanted, "options of an earlier policy", where)
    tried = sum(not pattern.startswith("!") for pattern in want.ssh_client_hosts)
    if tried > len(system) and there == Ours(None, None):
        return fixable(check, wanted, "not set for every pattern")
    astray = [one for asked in system for one in _astray(asked, system[0], seen, want)]
    for status, asked, words in sorted(astray, key=lambda one: one[0]):
        source = _source(seen, asked, words)
        fix = f"remove the line {source}" if source else "correct that line"
        judged = fail if status == "fail" else warn
        return judged(check, wanted, f"{words} for {asked.host}", source, fix)
    for asked in seen.asked:
        wrong = _wrong(asked, want)
        if wrong:
            source = _source(seen, asked, wrong)
            fix = f"remove the line {source}" if source else "look at root's own ssh config"
            return warn(check, wanted, f"root's own file wins: {wrong}", source, fix)
    return ok(check, wanted)


#: ``FILE: line N: Bad configuration option`` and ``FILE line N: unsupported option``.
_AT_LINE = re.compile(r"(/[^\s:]+):? line (\d+):")
_OF_FILE = re.compile(r"(?:Bad owner or permissions on|Can't open user config file) (/[^\s:]+)")


def refused(check: str, wanted: str, error: str) -> Result:
    """The result for a configuration that ssh refuses with this message (readconf.c)."""
    line, file = _AT_LINE.search(error), _OF_FILE.search(error)
    if file is not None:
        owner = error.startswith("Bad owner")
        fix = f"chown root {file[1]}; chmod 644 {file[1]}" if owner else f"chmod a+r {file[1]}"
        return fail(check, wanted, error, file[1], fix)
    source = f"{line[1]}:{line[2]}" if line else "ssh -G"
    return fail(check, wanted, error, source, "correct that line")


#: Options whose value for one peer is a wonder where the others have another one.
_PECULIAR = ("proxycommand", "proxyjump", "identityfile", "bindaddress", "bindinterface")
_RSA = {"ssh-rsa", "rsa-sha2-256", "rsa-sha2-512"}


def _astray(
    asked: Asked, usual: Asked, seen: SshClient, want: Policy
) -> Iterator[tuple[str, Asked, str]]:
    """(status, what was asked, option with its value) of what keeps a login from this peer, or
    sends the login elsewhere.

    usual: what was said about the first of the policy's patterns
    """
    said = asked.values

    def found(status: str, option: str) -> tuple[str, Asked, str]:
        return status, asked, f"{option} {said.get(option, '')}"

    no, ways = ("no", "false"), ("hostbasedauthentication", "gssapiauthentication")
    other = any(said.get(way, "no") not in no for way in ways)
    alone = usual.values.get("pubkeyauthentication") not in no
    if said.get("pubkeyauthentication") in no and (alone or not other):
        yield found("fail", "pubkeyauthentication")
    preferred = said.get("preferredauthentications", "publickey")
    if not re.search(r"publickey|hostbased|gssapi", preferred):
        yield found("fail", "preferredauthentications")
    if said.get("remotecommand", "none") != "none":
        yield found("fail", "remotecommand")
    if said.get("sessiontype", "default") != "default":
        yield found("fail", "sessiontype")
    if said.get("user") != usual.values.get("user") and said.get("user") != want.job_user:
        yield found("fail", "user")
    for option in _PECULIAR:
        if said.get(option, "none") != usual.values.get(option, "none"):
            yield found("warn", option)
    fleet: Mapping[str, set[str]] = {}
    if want.ssh_client_mode == "known_hosts":
        fleet = expected(want.ssh_known_hosts).keys
    port, name = said.get("port", "22"), said.get("hostname", asked.host)
    at_port = fleet.get(f"[{asked.host}]:{port}", set())
    keys = fleet.get(asked.host, set()) | at_port
    if port != usual.values.get("port", "22") and not at_port:
        yield found("fail", "port")
    elif port != "22" and fleet and not any(target.endswith(f"]:{port}") for target in fleet):
        yield found("warn", "port")
    if keys and name != asked.host:
        there = fleet.get(name, set()) | fleet.get(f"[{name}]:{port}", set())
        if not there & keys:
            yield found("fail", "hostname")
    alias = said.get("hostkeyalias", "none")
    if alias != "none" and keys and not fleet.get(alias, set()) & keys:
        yield found("fail", "hostkeyalias")
    kinds = {key.partition(" ")[0] for key in keys or set[str]().union(*fleet.values())}
    offered = set(said.get("hostkeyalgorithms", "").split(","))
    usable = kinds & offered or ("ssh-rsa" in kinds and _RSA & offered)
    if kinds and "hostkeyalgorithms" in said and not usable:
        yield found("fail", "hostkeyalgorithms")


def _source(seen: SshClient, asked: Asked, wrong: str) -> str:
    """The line that gives the wrong value; "" when it is ssh's default or cannot be told."""
    option = wrong.partition(" ")[0]
    if asked.own and seen.own:
        own = {seen.own[0].path: seen.own}
        found = winner(seen.own[0].path, {**seen.files, **own}, asked.host, option)
        if found:
            return found.where
    main = MAIN if MAIN in seen.files else VENDOR
    found = winner(main, seen.files, asked.host, option)
    if found:
        return found.where
    # A line below criteria that ssh alone can judge (Match user, exec, final).
    value = wrong.partition(" ")[2].lower()
    told = (directive(line) for lines in seen.files.values() for line in lines)
    same = (one for one in told if one and (one.keyword, one.value.lower()) == (option, value))
    line = next(same, None)
    return line.line.source if line else ""


@check(
    "ssh_client.installed",
    settings=("ssh_client_hosts",),
    fixed_by="ssh_client.installed",
    fix=(
        "install openssh-client (Debian, Ubuntu) or openssh-clients (RHEL, SLES)",
        "chmod a+rx PATH",
        "remove PATH, or put a program there that runs",
        "correct that line",
        "chown root PATH; chmod 644 PATH",
        "chmod a+r PATH",
    ),
)
def installed(seen: SshClient, want: Policy) -> Result:
    """The ssh client is there, and every user can start it: pdsh, mpirun and DeepSpeed's launcher
    start their ranks by it.

    ssh ends at once where a file of its configuration is not readable, may be changed by others
    than root, or holds a line that ssh does not know (readconf.c).
    """
    check, wanted = "ssh_client.installed", "installed"
    judged = fail if want.ssh_client_hosts else warn
    if not seen.installed:
        if seen.package:
            actual = f"the program of the package {seen.package} is gone or closed"
            return fixable(check, wanted, actual, SSH)
        fix = "install openssh-client (Debian, Ubuntu) or openssh-clients (RHEL, SLES)"
        return judged(check, wanted, "not installed", "", fix)
    trouble = trouble_of(seen)
    if trouble is not None:
        if trouble.mend:
            return fixable(check, wanted, trouble.words, trouble.path)
        closed = "has mode" in trouble.words
        fix = f"{'chmod a+rx' if closed else 'remove'} {trouble.path}"
        fix += "" if closed else ", or put a program there that runs"
        return (warn if trouble.chosen else fail)(check, wanted, trouble.words, trouble.path, fix)
    if not want.ssh_client_hosts:
        # Where the policy has hosts, ssh_client.options tells this.
        broken = next((one.error for one in seen.asked if one.error and not one.own), "")
        if broken:
            return refused(check, wanted, broken)
    return ok(check, wanted)


def trouble_of(seen: SshClient) -> Stuck | None:
    """What keeps users from starting ssh; None: nothing."""
    trouble = stuck(seen.access, "ssh")
    if trouble is not None:
        return trouble
    for asked in seen.asked:
        _, mark, why = asked.error.partition(UNLOADED)
        if mark:
            return Stuck(SSH, f"{SSH} does not start: {why}", "reinstall")
    return None


SUBJECT = Subject(
    "ssh_client",
    __doc__,
    checks=(installed, known_hosts, host_key, options, leftover),
    probe=PROBE,
    files=("/etc/ssh/ssh_config.d/*nodeready*.conf",),
)


# --- Why ssh does not log in: the causes that its messages tell, their words and their fixes.


@dataclass(frozen=True)
class Cause:
    """One cause.

    key:     the cause's name, in `nodeready.subjects.proof.facts.Trouble`
    pattern: matches ssh's message; "": the cause is told by something else than a message
    words:   what is wrong; ``{user}`` is the job's user, ``{said}`` ssh's message
    fix:     what a person does about the cause; ``{file}`` is the file that the message names
    deploy:  a deploy of the subject ssh_client repairs the cause
    """

    key: str
    pattern: str
    words: str
    fix: str = ""
    deploy: bool = False


#: The first cause whose pattern is found counts: the message that ends a login is often the
#: consequence of an earlier one. Patterns: OpenSSH 7 to 10 (sshconnect.c, sshconnect2.c,
#: readconf.c).
_ALL = (
    Cause(
        # A connection through a command has no address (packet.c, ssh_remote_ipaddr).
        "proxy",
        r"UNKNOWN port 65535|[Ss]tdio forwarding failed",
        "the ProxyCommand or ProxyJump of the ssh configuration fails ({said})",
        "correct or remove that line: ssh -G NAME, as {user}, shows it; it stands in "
        "~/.ssh/config or /etc/ssh/ssh_config",
    ),
    Cause(
        "changed_key",
        r"HOST IDENTIFICATION HAS CHANGED|Host key for .* has changed|Offending key for IP in ",
        "the host key is not the one that is known",
        deploy=True,
    ),
    Cause(
        "revoked_key",
        r"REVOKED HOST KEY|is marked as revoked|revoked by file|in revoked keys file",
        "the host key is revoked",
        "give the host a new key, or take the @revoked line out of known_hosts and the key out of "
        "the file RevokedHostKeys",
    ),
    Cause(
        "unknown_key",
        r"Host key verification failed|host key is known for",
        "the host key is unknown, so ssh would ask",
        deploy=True,
    ),
    Cause(
        "config_owner",
        r"Bad owner or permissions on",
        "ssh refuses a configuration that others could have written ({said})",
        "chown {user} {file}; chmod go-w {file} (below /etc: chown root)",
    ),
    Cause(
        "config_closed",
        r"Can't open user config file",
        "ssh may not read its configuration ({said})",
        "let {user} read {file}: chmod a+r",
    ),
    Cause(
        "config",
        r"[Bb]ad configuration option|terminating, \d+ bad",
        "ssh does not accept its configuration ({said})",
        "correct the line that ssh names",
    ),
    Cause(
        "remote_command",
        r"Cannot execute command-line and remote command",
        "RemoteCommand in the ssh configuration leaves no room for a command",
        "remove that line: ssh -G NAME, as {user}, shows it",
    ),
    Cause(
        "library",
        # Of ssh itself: a peer's login shell says the same of its own libraries.
        r"^(\S*/)?ssh: (error while loading shared libraries|(symbol lookup|relocation) error)",
        "ssh does not start ({said})",
        deploy=True,
    ),
    Cause(
        "open_key",
        r"Permissions \d+ for .* are too open|UNPROTECTED PRIVATE KEY",
        "a private key that others may read is not used ({said})",
        "chmod 600 {file}",
    ),
    Cause(
        "no_key",
        r"no such identity:",
        "the private key of the ssh configuration is not there ({said})",
        "correct IdentityFile in ~/.ssh/config of {user}, or make {file}",
    ),
    Cause(
        "unusable_key",
        r"Load key .*: |sign_and_send_pubkey: |agent refused operation",
        "a private key cannot be used ({said})",
        "look at {file}: its owner is {user}, its mode 600, and it is a key without a passphrase "
        "or in an agent",
    ),
    Cause(
        "slurm",
        r"pam_slurm_adopt|[Aa]ccess denied by pam_slurm",
        "pam_slurm_adopt lets only the user of a running job in",
        "name as job_user somebody who may log in to nodes without a job, or --skip proof.ssh",
    ),
    Cause(
        "nologin",
        r"pam_nologin|System is (booting up|going down)|Unprivileged users are not permitted",
        "logins are closed (pam_nologin)",
        "remove /run/nologin and /etc/nologin there when their reason is over",
    ),
    Cause(
        "password",
        r"[Pp]assword (has )?expired|[Pp]assword change required|"
        r"(must|required to) change your password",
        "the password of {user} has expired ({said})",
        "passwd {user} there; for an account that logs in by keys alone: chage -M -1 -d -1 {user}",
    ),
    Cause(
        "expired",
        r"account has expired",
        "the account of {user} has expired",
        "chage -E -1 {user} there, or prolong it in the directory service",
    ),
    Cause(
        "too_many_keys",
        r"Too many authentication failures",
        "sshd hangs up before the right key of {user} is tried (MaxAuthTries)",
        "IdentitiesOnly yes and the right IdentityFile in ~/.ssh/config of {user}, or fewer keys "
        "in the agent",
    ),
    Cause(
        "denied",
        r"Permission denied \(|Permission denied, please try again",
        "no key of {user} is accepted",
        "put the public key of {user} into ~/.ssh/authorized_keys there, with a home directory "
        "that only {user} may write to; or sshd there lets {user} not in: AllowUsers, DenyUsers, "
        "AllowGroups, PermitRootLogin (sshd -T)",
    ),
    Cause(
        "no_shell",
        r"account is currently not available",
        "the login shell of {user} there is nologin",
        "usermod -s /bin/bash {user} there",
    ),
    Cause(
        "resolve",
        r"Could not resolve hostname",
        "the name does not resolve",
        "make the name known, in the DNS or in /etc/hosts; AddressFamily in the ssh configuration "
        "(ssh -G NAME) hides the addresses of the other family",
    ),
    Cause(
        "refused",
        r"Connection refused",
        "connection refused",
        "start sshd there; a firewall that rejects says the same",
    ),
    Cause(
        "no_route",
        r"No route to host|Network is unreachable|Host is down",
        "no route ({said})",
        "correct routes, interfaces or the firewall between the nodes",
    ),
    Cause(
        "silent",
        r"timed out during banner exchange",
        "sshd takes the connection and says nothing",
        "restart sshd there: it is stopped, stuck or overloaded",
    ),
    Cause(
        "timeout",
        r"timed out|not responding",
        "timed out",
        "look for a firewall that drops, a wrong address, or a node or home directory that hangs",
    ),
    Cause(
        "host_key_type",
        r"no matching host key type found",
        "no type of host key in common ({said})",
        "correct HostKeyAlgorithms (ssh -G NAME, as {user}, shows it) or the crypto policy, or "
        "give that host a key of another type: ssh-keygen -A",
    ),
    Cause(
        "algorithms",
        r"Unable to negotiate",
        "no algorithm in common ({said})",
        "give both ends the same crypto policy",
    ),
    Cause(
        "startups",
        r"Exceeded MaxStartups|Not allowed at this time|(kex|ssh)_exchange_identification: ",
        "sshd closes the connection before the login ({said})",
        "read sshd's log there: MaxStartups, PerSourcePenalties, hosts.deny (TCP wrappers)",
    ),
    Cause(
        "closed",
        r"Connection (closed|reset)|closed by remote host",
        "sshd closes the connection ({said})",
        "read sshd's log there: /etc/nologin and /run/nologin, PAM (pam_access), MaxStartups, "
        "or a host key that is missing",
    ),
    Cause(
        "own_config",
        "",
        "the ssh configuration of {user} alone stands in the way ({said})",
        "correct or remove these lines in ~/.ssh/config of {user}: ssh -G NAME, as {user}, shows "
        "what they make of NAME",
    ),
    Cause(
        "forced",
        "",
        "the key of {user} is there for another command alone (command= at {said})",
        "remove command= there, or give the jobs of {user} a key without it",
    ),
    Cause(
        "shell",
        "",
        "the login runs no command ({said})",
        "try `ssh NAME true` as {user}: the login shell there, its libraries and start-up files, "
        "a ForceCommand of its sshd",
    ),
    Cause(
        "other_host",
        "",
        "{said} answers",
        "correct the address of the name, in the DNS, /etc/hosts or ~/.ssh/config",
    ),
    Cause(
        "namesake",
        "",
        "nobody can tell them apart",
        "give every node a host name of its own (hostnamectl set-hostname)",
    ),
    Cause(
        "other",
        "",
        "{said}",
        "try `ssh -v NAME true` as {user}",
    ),
)

CAUSES: dict[str, Cause] = {cause.key: cause for cause in _ALL}

_OFFENDING = re.compile(r"Offending (?:\S+ )?key (?:for IP )?in ([^\s:]+:\d+)")
#: What ssh says beside the cause.
_NOISE = re.compile(
    r"Warning: Permanently added|debug\d: |(kex|ssh)_exchange_identification: |[@*# ]+$|"
    r"Connection (to|closed|reset)|(Connection|Disconnected|Received disconnect) "
)
_NAMED = re.compile(r"(?:^|[\s'\"])(/[^\s'\":]+)")


def cause_of(said: str) -> tuple[str, str]:
    """The key of the cause that ssh's messages tell, and the message that tells it.

    "other" and ssh's last message when no known cause is among them. Where ssh's own message only
    says that it ends, what was said before it tells why: the command of a ProxyCommand, a line of
    the configuration, the text of /etc/nologin.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for cause in _ALL:
        for at, line in enumerate(lines if cause.pattern else ()):
            if re.search(cause.pattern, line):
                return cause.key, _telling(cause.key, lines, at)
    return "other", lines[-1] if lines else "ssh says nothing"


def _telling(key: str, lines: list[str], at: int) -> str:
    """The line that tells most, of those in which the cause was found at this place."""
    if key == "changed_key":
        return next(filter(offending, lines), lines[at])
    if key == "open_key":
        return next((line for line in lines if line.startswith("Permissions ")), lines[at])
    before = [line for line in lines[:at] if not _NOISE.match(line)]
    if key == "config" and "terminating" in lines[at]:
        return before[-1] if before else lines[at]
    if key in ("proxy", "closed", "startups"):
        return before[0] if before else lines[at]
    return lines[at]


def named_file(said: str) -> str:
    """The first path that a message of ssh's names; in words where it names none."""
    found = _NAMED.search(said)
    return found[1] if found else "the file that ssh names"


def offending(said: str) -> str:
    """``FILE:LINE`` of the known host key that ssh's message names as offending, or ""."""
    found = _OFFENDING.search(said)
    return found[1] if found else ""


def where_of(said: str) -> str:
    """Where a person has to look, by ssh's message: the offending key, the line or the file of a
    configuration; "" where it names none.
    """
    line, file = _AT_LINE.search(said), _OF_FILE.search(said)
    return offending(said) or (f"{line[1]}:{line[2]}" if line else file[1] if file else "")
