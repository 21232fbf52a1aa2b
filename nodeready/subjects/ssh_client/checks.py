"""Judge whether ssh between nodes asks no question, and still refuses a wrong host key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nodeready import knowledge
from nodeready.core import own_files
from nodeready.core.base import cached_last
from nodeready.core.policy import Policy
from nodeready.core.result import Check, FactKinds, FleetFacts, Result, Subject, check
from nodeready.core.severity import drifts, loses_job
from nodeready.core.shell import quote
from nodeready.subjects import access
from nodeready.subjects.ssh_client import config, facts
from nodeready.subjects.ssh_client.facts import EffectiveOptions, SshClient

# --- Why ssh does not log in: the causes behind its messages, and their fixes.

#: ``FILE: line N: Bad configuration option`` and ``FILE line N: unsupported option``.
AT_LINE = re.compile(r"(/[^\s:]+):? line (\d+):")
OF_FILE = re.compile(r"(?:Bad owner or permissions on|Can't open user config file) (/[^\s:]+)")


@dataclass(frozen=True)
class LoginCause:
    """One cause: a row of knowledge/login_failures.toml."""

    key: str  # the cause's name, in `nodeready.subjects.proof.facts.Trouble`
    words: str  # the fault; ``{user}`` is the job's user, ``{said}`` ssh's message
    source: str  # where this is documented
    pattern: str = ""  # matches ssh's message; "": the cause is not found by a message
    fix: str = ""  # the repair by a person; ``{file}`` is the file that the message names
    deploy: bool = False  # a deploy of the subject ssh_client repairs the cause


#: Key -> the cause. The first in this order whose pattern matches a message counts.
CAUSES: dict[str, LoginCause] = {
    key: LoginCause(key, **row) for key, row in knowledge.rows("login_failures").items()
}

_OFFENDING = re.compile(r"Offending (?:\S+ )?key (?:for IP )?in ([^\s:]+:\d+)")
#: Messages of ssh that name no cause.
_NOISE = re.compile(
    r"Warning: Permanently added|debug\d: |(kex|ssh)_exchange_identification: |[@*# ]+$|"
    r"Connection (to|closed|reset)|(Connection|Disconnected|Received disconnect) "
)
_NAMED = re.compile(r"(?:^|[\s'\"])(/[^\s'\":]+)")


def cause_of(messages: str) -> tuple[str, str]:
    """The key of the cause in ssh's messages, and the line to show for it.

    Without a known cause: "other" and ssh's last line.
    """
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    for cause in CAUSES.values():
        for index, line in enumerate(lines if cause.pattern else ()):
            if re.search(cause.pattern, line):
                return cause.key, _line_to_show(cause.key, lines, index)
    return "other", lines[-1] if lines else "ssh says nothing"


def _line_to_show(key: str, lines: list[str], index: int) -> str:
    """The line with the reason. index: of the line that matched the cause

    If the matching line only reports the end of ssh, an earlier line has the reason: the message
    of a ProxyCommand, a line of the configuration, or the text of /etc/nologin.
    """
    if key == "changed_key":
        return next(filter(offending, lines), lines[index])
    if key == "open_key":
        return next((line for line in lines if line.startswith("Permissions ")), lines[index])
    before = [line for line in lines[:index] if not _NOISE.match(line)]
    if key == "config" and "terminating" in lines[index]:
        return before[-1] if before else lines[index]
    if key in ("proxy", "closed", "startups"):
        return before[0] if before else lines[index]
    return lines[index]


def named_file(messages: str) -> str:
    """The first path in ssh's messages, or words that stand for it."""
    match = _NAMED.search(messages)
    return match[1] if match else "the file that ssh names"


def offending(messages: str) -> str:
    """``FILE:LINE`` of the known host key that ssh's message names as offending, or ""."""
    match = _OFFENDING.search(messages)
    return match[1] if match else ""


def message_source(messages: str) -> str:
    """What ssh's message names: ``FILE:LINE`` of a key or a setting, or a file; "": nothing."""
    line, file = AT_LINE.search(messages), OF_FILE.search(messages)
    return offending(messages) or (f"{line[1]}:{line[2]}" if line else file[1] if file else "")


# --- The checks.

STRICT = "stricthostkeychecking"
GLOBAL_FILE = "globalknownhostsfile"
#: OpenSSH 7.6 knows accept-new; older ones refuse the whole configuration.
ACCEPT_NEW = (7, 6)
#: A block that was not sent is replaced only by one of at least this share of its size: a smaller
#: block comes from a run over a part of the fleet, and would lose the keys of the rest.
SHRINK = 0.9

_MODE = ("ssh_client_mode",)
_SHORTEN_FIX = f"shorten {facts.KNOWN_HOSTS}"
_PART_FIX = "deploy to all nodes at once, or remove the block by hand"
_INSTALL_FIX = "install openssh-client (Debian, Ubuntu) or openssh-clients (RHEL, SLES)"
_MODE_FIX = "choose another ssh_client_mode for this node"
_PATTERN_FIX = "add a pattern without '!'"

# Mode -> what ssh -G prints for the option: versions of OpenSSH have different words.
_STRICT_VALUES = {
    "known_hosts": ("true", "yes"),
    "accept-new": ("accept-new",),
    "no": ("false", "no", "off"),
}
_STRICT_SETTING = {"known_hosts": "yes", "accept-new": "accept-new", "no": "no"}


class FleetBlock(NamedTuple):
    """The block that every node shall have."""

    inner: bytes  # the block's bytes without its marks
    lines: frozenset[str]  # its lines
    keys: dict[str, set[str]]  # host name or address -> its keys
    digest: str  # as `block_digest` has it


@cached_last
def fleet_block(lines: tuple[str, ...]) -> FleetBlock:
    """The block of a fleet's lines, computed once for all nodes that share the tuple."""
    inner = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
    keys: dict[str, set[str]] = {}
    for line in lines:
        names, _, key = line.partition(" ")
        for name in names.split(","):
            keys.setdefault(name, set()).add(key)
    return FleetBlock(inner, frozenset(lines), keys, facts.block_digest(inner))


def expected_lines(policy: Policy, fleet: FleetFacts) -> tuple[str, ...]:
    """The lines that the node's block shall have: the fleet's, or the policy's own alone."""
    return policy.ssh_known_hosts if fleet.known_hosts is None else fleet.known_hosts


@check("ssh_client.known_hosts", loses_job("deploy", "configure"),
       settings=("ssh_client_mode", "ssh_known_hosts"), fleet=("known_hosts",),
       fixed_by="ssh_client.known_hosts", fix=(
    _SHORTEN_FIX,
    _PART_FIX,
    "let users read PATH",
    "remove the line SOURCE, or give the host a new key",
))  # fmt: skip
def known_hosts(observed: SshClient, policy: Policy, fleet: FleetFacts) -> Result:
    """The node knows the host keys of all nodes, by their names and addresses.

    With a known key no program asks a question, and a wrong key is refused (sshd(8),
    SSH_KNOWN_HOSTS FILE FORMAT). Lines outside nodeready's block stay. Every line in the block is
    about a node of the inventory: old keys of a re-imaged node must go, like those of other hosts.
    Every user must be able to read the file, only root may change it, and no line outside the
    block may revoke a key of the fleet (``@revoked``).
    """
    lines = expected_lines(policy, fleet)
    result = _block(observed, policy, lines)
    if result.status == "na" or (result.status == "fail" and not result.fixable):
        return result
    check = known_hosts.expecting(result.expected)
    if closed := access.closed_result(check, observed.access, facts.KNOWN_HOSTS):
        return closed
    if result.status != "ok":
        return result
    inode = observed.access.inodes.get(facts.KNOWN_HOSTS)
    if inode is not None and (inode.uid or inode.mode & 0o022):
        actual = f"others can change it (uid {inode.uid}, mode {inode.mode & 0o7777:o})"
        return check.fixable(actual, facts.KNOWN_HOSTS)
    return _revoked(observed, fleet_block(lines)) or result


def _revoked(observed: SshClient, block: FleetBlock) -> Result | None:
    """A line outside our block that revokes a key of the fleet (sshd(8), ``@revoked``)."""
    keys = {key: name for name, keys in block.keys.items() for key in keys}
    file = observed.known_hosts
    text = (file.content or b"").decode("utf-8", "surrogateescape")
    for number, line in enumerate(text.split("\n"), 1):
        words = line.split()
        if len(words) < 4 or words[0] != "@revoked":
            continue
        name = keys.get(f"{words[2]} {words[3]}", "")
        if not name or not facts.known_as(words[1], name):
            continue
        # Of a large file, our block is not among the lines.
        source = f"{facts.KNOWN_HOSTS}:{number}" if file.sent else facts.KNOWN_HOSTS
        actual = f"a line revokes the {words[2]} key of {name}"
        fix = f"remove the line {source}, or give the host a new key"
        expected = f"the fleet's {len(block.lines)} host keys"
        return known_hosts.fail(actual, source, fix, expected=expected)
    return None


def _block(observed: SshClient, policy: Policy, lines: tuple[str, ...]) -> Result:
    file = observed.known_hosts
    if policy.ssh_client_mode != "known_hosts":
        return known_hosts.na(f"ssh_client_mode is {policy.ssh_client_mode}")
    if not lines:
        return known_hosts.na("no host keys were gathered")
    block = fleet_block(lines)
    check = known_hosts.expecting(f"the fleet's {len(block.lines)} host keys")
    if file.digest == block.digest:
        return check.ok()
    if not file.sent:
        return _unsent(check, observed, block)
    if file.lines is None:
        return check.fixable("no block" if file.content else "no file", facts.KNOWN_HOSTS)
    held = {line for line in file.lines if not line.startswith("#")}
    surplus = held - block.lines
    # No name of such a line is one of the fleet's.
    strange = sum(
        block.keys.keys().isdisjoint(line.partition(" ")[0].split(",")) for line in surplus
    )
    if strange > len(held) - strange:
        # The inventory seems to be a part of the fleet: a deploy would remove further nodes' keys.
        actual = f"{strange} of its {len(held)} lines are about hosts outside this inventory"
        return check.warn(actual, facts.KNOWN_HOSTS, _PART_FIX)
    missing = sum(not line.startswith("#") for line in block.lines.difference(file.lines))
    if missing or surplus:
        return check.fixable(f"{missing} missing, {len(surplus)} unexpected", facts.KNOWN_HOSTS)
    return check.ok()


@check("ssh_client.host_key", loses_job("inspect", "configure"), settings=_MODE,
       fleet=("host_key",),
       fix="find out who answers at the node's address; sshd's keys are those that HostKey in "
           "sshd_config(5) names")  # fmt: skip
def host_key(observed: SshClient, policy: Policy, fleet: FleetFacts) -> Result:
    """The node's own files have the host key with which its sshd answered this run.

    A node whose files have other keys is another node, or has another node's address: its keys
    are given to no node (RFC 4253, section 8: the key exchange proves its key, a file does not).
    """
    if policy.ssh_client_mode != "known_hosts":
        return host_key.na(f"ssh_client_mode is {policy.ssh_client_mode}")
    if not fleet.host_key:
        return host_key.na("this run did not connect by ssh")
    if not observed.identity.keys:
        return host_key.na("the node shows no host key")
    kind = fleet.host_key.partition(" ")[0]
    check = host_key.expecting(f"{kind} {facts.fingerprint(fleet.host_key)}")
    if fleet.host_key in observed.identity.keys:
        return check.ok()
    keys = [key for key in observed.identity.keys if key.startswith(f"{kind} ")]
    actual = f"{kind} {facts.fingerprint(keys[0])}" if keys else f"no {kind} key"
    return check.fail(actual, "/etc/ssh/ssh_host_*_key.pub")


def _unsent(check: Check, observed: SshClient, block: FleetBlock) -> Result:
    file = observed.known_hosts
    if not file.is_complete:
        actual = f"{file.size} bytes, too many of them outside our block"
        return check.fail(actual, facts.KNOWN_HOSTS, _SHORTEN_FIX)
    held = file.size - len(file.content or b"")
    if file.digest and len(block.inner) < SHRINK * held:
        actual = f"a block of {held} bytes; this run gathered {len(block.inner)}"
        return check.warn(actual, facts.KNOWN_HOSTS, _PART_FIX)
    return check.fixable("another block" if file.digest else "no block", facts.KNOWN_HOSTS)


@check("ssh_client.leftover", drifts("deploy"), settings=_MODE, fixed_by="ssh_client.leftover",
       expects="no block of ours")  # fmt: skip
def leftover(observed: SshClient, policy: Policy) -> Result:
    """Without the mode known_hosts, ssh_known_hosts has no block of nodeready.

    Nothing would update the block: a re-imaged node would be refused for ever.
    """
    if policy.ssh_client_mode == "known_hosts":
        return leftover.na("ssh_client_mode is known_hosts")
    if observed.known_hosts.digest:
        return leftover.fixable("one from mode known_hosts", facts.KNOWN_HOSTS)
    return leftover.ok()


def option_lines(policy: Policy) -> tuple[str, ...]:
    """The ssh_config lines that the policy asks for, without marks and comments."""
    lines = [
        f"Host {' '.join(policy.ssh_client_hosts)}",
        f"    StrictHostKeyChecking {_STRICT_SETTING[policy.ssh_client_mode]}",
    ]
    if policy.ssh_client_mode == "known_hosts":
        lines.append(f"    GlobalKnownHostsFile {facts.KNOWN_HOSTS} {facts.KNOWN_HOSTS}2")
    return tuple(lines)


def wanted_options(policy: Policy) -> tuple[str, ...]:
    """The options that the mode sets, in small letters."""
    return (STRICT, GLOBAL_FILE) if policy.ssh_client_mode == "known_hosts" else (STRICT,)


def _wrong_option(answer: EffectiveOptions, policy: Policy) -> str:
    """The option that has another value than the mode wants, with that value, or ""."""
    value = answer.values.get(STRICT, "")
    if value not in _STRICT_VALUES[policy.ssh_client_mode]:
        return f"{STRICT} {value}"
    files = answer.values.get(GLOBAL_FILE, "")
    if policy.ssh_client_mode == "known_hosts" and facts.KNOWN_HOSTS not in files.split():
        return f"{GLOBAL_FILE} {files}"
    return ""


class OurLines(NamedTuple):
    """The lines of nodeready's drop-in and of its block; None: missing."""

    dropin: tuple[str, ...] | None
    block: tuple[str, ...] | None


def our_lines(observed: SshClient) -> OurLines:
    """Our drop-in and our block in the main file, without comments and empty lines."""

    def speaking(texts: list[str]) -> tuple[str, ...]:
        stripped = (text.rstrip() for text in texts)
        return tuple(text for text in stripped if text and not text.startswith("#"))

    dropin = observed.files.get(config.DROPIN) if config.DROPIN in observed.config else None
    inner = own_files.find_block(observed.config.get(config.MAIN, b""))
    text = "" if inner is None else inner.decode("utf-8", "surrogateescape")
    return OurLines(
        None if dropin is None else speaking([line.text for line in dropin]),
        None if inner is None else speaking(text.split("\n")),
    )


def _current(observed: SshClient, policy: Policy) -> bool:
    """Whether our lines are in one place only, and are those of the policy."""
    our, lines = our_lines(observed), option_lines(policy)
    if our.dropin is not None and our.block is not None:
        return False
    if our.block is not None:
        return our.block[: len(lines)] == lines
    return our.dropin is None or our.dropin == lines


@check("ssh_client.options", loses_job("deploy", "configure"),
       settings=("ssh_client_mode", "ssh_client_hosts", "ssh_known_hosts", "job_user"),
       fleet=("known_hosts",), fixed_by="ssh_client.options", fix=(
    _PATTERN_FIX,
    _MODE_FIX,
    "correct that line",
    "chown root PATH; chmod 644 PATH",
    "chmod a+r PATH",
    "remove SOURCE",
    "remove the line SOURCE",
    "look at root's own ssh config",
))  # fmt: skip
def options(observed: SshClient, policy: Policy, fleet: FleetFacts) -> Result:
    """ssh itself has the options of the mode for the policy's host patterns.

    In ssh_config the first value wins (ssh_config(5)): a ``Host *`` above ours, a drop-in that
    sorts before it or the user's own file decides, so ``ssh -G`` is asked for the effective one,
    by a user who is not root. ssh is also asked about the policy's hosts in foreign ``Host`` and
    ``Match`` lines: no such line may send ssh to another port, host or user, ask for a key that is
    not known, or forbid the login by key.
    """
    our = our_lines(observed)
    if not policy.ssh_client_hosts:
        if our != OurLines(None, None):
            path = config.DROPIN if our.dropin is not None else config.MAIN
            expected = "nothing of ours"
            return options.fixable("options of an earlier policy", path, expected=expected)
        return options.na("no ssh_client_hosts in the policy")
    if not observed.installed:
        return options.na("ssh is not installed")
    if trouble_of(observed) is not None:
        return options.na("ssh does not run: see ssh_client.installed")
    hosts = " ".join(policy.ssh_client_hosts)
    check = options.expecting(f"{_STRICT_SETTING[policy.ssh_client_mode]} for {hosts}")
    if policy.ssh_client_mode == "known_hosts" and not expected_lines(policy, fleet):
        # Without keys, "yes" would refuse every node.
        return options.na("no host keys were gathered")
    keys = known_hosts(observed, policy, fleet)
    if keys.status == "fail" and not keys.fixable:
        return options.na(f"no host keys on the node: {keys.actual}")
    if not facts.samples(policy):
        actual = "only negated patterns: they match no host"
        return check.fail(actual, "policy ssh_client_hosts", _PATTERN_FIX)
    version = observed.version
    if policy.ssh_client_mode == "accept-new" and version and version < ACCEPT_NEW:
        actual = f"OpenSSH {'.'.join(map(str, version))} has no accept-new (7.6 has)"
        return check.fail(actual, "ssh -V", _MODE_FIX)
    return _judge_effective(check, observed, policy, fleet)


def _judge_effective(
    check: Check, observed: SshClient, policy: Policy, fleet: FleetFacts
) -> Result:
    """Judge what ssh -G printed: first the system's files, then root's own."""
    our = our_lines(observed)
    for path in (config.MAIN, config.DROPIN):
        barrier = observed.access.barrier(path) if path in observed.config else None
        if barrier is None:
            continue
        if path == config.DROPIN or access.chmod_mends(barrier, path):
            return check.fixable(barrier.words, barrier.path)
        return check.fail(barrier.words, barrier.path, f"chmod a+r {quote(barrier.path)}")
    broken = next((answer for answer in observed.effective if answer.error), None)
    if broken is not None:
        if config.DROPIN in broken.error:
            return check.fixable(broken.error, config.DROPIN)
        return refused(check, broken.error)
    # A root without ~/.ssh/config has the options of a user without one.
    system = [answer for answer in observed.effective if not answer.as_prober]
    system = system or list(observed.effective)
    for answer in system:
        if not (option := _wrong_option(answer, policy)):
            continue
        source = _source(observed, answer, option)
        at_top = observed.config.get(config.MAIN, b"").startswith(own_files.BEGIN)
        if at_top and _current(observed, policy):
            fix = f"remove {source or 'the line that wins'}"
            return check.fail(f"{option} for {answer.host}", source, fix)
        return check.fixable(f"{option} for {answer.host}", source)
    if not _current(observed, policy):
        place = config.DROPIN if our.dropin is not None else config.MAIN
        return check.fixable("options of an earlier policy", place)
    tried = sum(not pattern.startswith("!") for pattern in policy.ssh_client_hosts)
    if tried > len(system) and our == OurLines(None, None):
        return check.fixable("not set for every pattern")
    host_keys: Mapping[str, set[str]] = {}
    if policy.ssh_client_mode == "known_hosts":
        host_keys = fleet_block(expected_lines(policy, fleet)).keys
    findings = [
        (status, answer, words)
        for answer in system
        for status, words in _peer_findings(answer, system[0], policy, host_keys)
    ]
    if findings:
        status, answer, words = min(findings, key=lambda finding: finding[0])
        source = _source(observed, answer, words)
        fix = f"remove the line {source}" if source else "correct that line"
        judged = check.fail if status == "fail" else check.warn
        return judged(f"{words} for {answer.host}", source, fix)
    for answer in observed.effective:
        if option := _wrong_option(answer, policy):
            source = _source(observed, answer, option)
            fix = f"remove the line {source}" if source else "look at root's own ssh config"
            return check.warn(f"root's own file wins: {option}", source, fix)
    return check.ok()


def refused(check: Check, error: str) -> Result:
    """The result for a configuration that ssh refuses with this message (readconf.c)."""
    line, file = AT_LINE.search(error), OF_FILE.search(error)
    if file is not None:
        owner = error.startswith("Bad owner")
        quoted = quote(file[1])
        fix = f"chown root {quoted}; chmod 644 {quoted}" if owner else f"chmod a+r {quoted}"
        return check.fail(error, file[1], fix)
    source = f"{line[1]}:{line[2]}" if line else "ssh -G"
    return check.fail(error, source, "correct that line")


#: Options whose value for a single peer is suspicious where other peers have another value.
_SUSPICIOUS = ("proxycommand", "proxyjump", "identityfile", "bindaddress", "bindinterface")
_RSA = {"ssh-rsa", "rsa-sha2-256", "rsa-sha2-512"}


def _peer_findings(
    answer: EffectiveOptions,
    usual: EffectiveOptions,
    policy: Policy,
    host_keys: Mapping[str, set[str]],
) -> Iterator[tuple[str, str]]:
    """(status, option with its value) for each that prevents a login to this peer or diverts it.

    usual:     the options of the first of the policy's patterns
    host_keys: name -> its keys, in the block that the node shall have
    """
    values = answer.values

    def finding(status: str, option: str) -> tuple[str, str]:
        return status, f"{option} {values.get(option, '')}"

    no, methods = ("no", "false"), ("hostbasedauthentication", "gssapiauthentication")
    other = any(values.get(method, "no") not in no for method in methods)
    usual_allows = usual.values.get("pubkeyauthentication") not in no
    if values.get("pubkeyauthentication") in no and (usual_allows or not other):
        yield finding("fail", "pubkeyauthentication")
    preferred = values.get("preferredauthentications", "publickey")
    if not re.search(r"publickey|hostbased|gssapi", preferred):
        yield finding("fail", "preferredauthentications")
    for option, harmless in (("remotecommand", "none"), ("sessiontype", "default")):
        if values.get(option, harmless) != harmless:
            yield finding("fail", option)
    if values.get("user") != usual.values.get("user") and values.get("user") != policy.job_user:
        yield finding("fail", "user")
    for option in _SUSPICIOUS:
        if values.get(option, "none") != usual.values.get(option, "none"):
            yield finding("warn", option)
    port, name = values.get("port", "22"), values.get("hostname", answer.host)
    at_port = host_keys.get(f"[{answer.host}]:{port}", set())
    keys = host_keys.get(answer.host, set()) | at_port
    if port != usual.values.get("port", "22") and not at_port:
        yield finding("fail", "port")
    elif port != "22" and host_keys and not any(name.endswith(f"]:{port}") for name in host_keys):
        yield finding("warn", "port")
    if keys and name != answer.host:
        our = host_keys.get(name, set()) | host_keys.get(f"[{name}]:{port}", set())
        if not our & keys:
            yield finding("fail", "hostname")
    alias = values.get("hostkeyalias", "none")
    if alias != "none" and keys and not host_keys.get(alias, set()) & keys:
        yield finding("fail", "hostkeyalias")
    kinds = {key.partition(" ")[0] for key in keys or set[str]().union(*host_keys.values())}
    offered = set(values.get("hostkeyalgorithms", "").split(","))
    usable = kinds & offered or ("ssh-rsa" in kinds and _RSA & offered)
    if kinds and "hostkeyalgorithms" in values and not usable:
        yield finding("fail", "hostkeyalgorithms")


def _source(observed: SshClient, answer: EffectiveOptions, setting_text: str) -> str:
    """The line that gives the wrong value; "" for ssh's default or an unknown line."""
    option = setting_text.partition(" ")[0]
    files = observed.files
    mains = [config.MAIN if config.MAIN in files else config.VENDOR]
    if answer.as_prober and observed.root_lines:
        mains.insert(0, observed.root_lines[0].path)
        files = {**files, mains[0]: observed.root_lines}
    for main in mains:
        if result := config.winner(main, files, answer.host, option):
            return result.source
    # A line below criteria that only ssh can judge (Match user, exec, final).
    value = setting_text.partition(" ")[2].lower()
    for entry in (config.directive(line) for lines in observed.files.values() for line in lines):
        if entry and (entry.keyword, entry.value.lower()) == (option, value):
            return entry.line.source
    return ""


@check("ssh_client.installed", loses_job("deploy", "configure", "install"),
       settings=("ssh_client_hosts",), fixed_by="ssh_client.installed", expects="installed", fix=(
    _INSTALL_FIX,
    "chmod a+rx PATH",
    "remove PATH, or put a program there that runs",
    "correct that line",
    "chown root PATH; chmod 644 PATH",
    "chmod a+r PATH",
))  # fmt: skip
def installed(observed: SshClient, policy: Policy) -> Result:
    """The ssh client is there, and every user can start it: pdsh, mpirun and DeepSpeed's launcher
    start their ranks by it.

    ssh ends at once where a file of its configuration is not readable, may be changed by others
    than root, or holds a line that ssh does not know (readconf.c).
    """
    judged = installed.fail if policy.ssh_client_hosts else installed.warn
    if not observed.installed:
        if observed.package:
            actual = f"the program of the package {observed.package} is gone or closed"
            return installed.fixable(actual, facts.SSH)
        return judged("not installed", "", _INSTALL_FIX)
    if (trouble := trouble_of(observed)) is not None:
        if trouble.repair:
            return installed.fixable(trouble.words, trouble.path)
        fix = f"remove {quote(trouble.path)}, or put a program there that runs"
        if "has mode" in trouble.words:
            fix = f"chmod a+rx {quote(trouble.path)}"
        judged = installed.warn if trouble.chosen else installed.fail
        return judged(trouble.words, trouble.path, fix)
    # Where the policy has hosts, ssh_client.options reports a refused configuration.
    errors = [answer.error for answer in observed.effective if not answer.as_prober]
    if not policy.ssh_client_hosts and any(errors):
        return refused(installed, next(filter(None, errors)))
    return installed.ok()


def trouble_of(observed: SshClient) -> access.UnusableProgram | None:
    """Why users cannot start ssh; None: they can."""
    if (trouble := access.unusable_program(observed.access, "ssh")) is not None:
        return trouble
    for answer in observed.effective:
        _, mark, reason = answer.error.partition(access.UNLOADED)
        if mark:
            return access.UnusableProgram(
                facts.SSH, f"{facts.SSH} does not start: {reason}", "reinstall"
            )
    return None


_ELEMENTS = {
    "config": "", "files": "", "asked": "host own", "asked.values": "", "access.seen": "",
    "access.links": "", "access.unloaded": "",
}  # fmt: skip
SUBJECT = Subject(
    "ssh_client", __doc__, checks=(installed, known_hosts, host_key, options, leftover),
    probe=facts.PROBE, files=("/etc/ssh/ssh_config.d/*nodeready*.conf",),
    kinds=FactKinds(
        # A program's size changes with its version.
        volatile="number size_bytes known_hosts.content known_hosts.size known_hosts.digest",
        counted="known_hosts.lines",
        versions="version package",
        unique="identity",
        elements=_ELEMENTS,
    ),
)  # fmt: skip
