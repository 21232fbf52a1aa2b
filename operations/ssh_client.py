"""Make ssh between nodes ask no question: the fleet's host keys, and options for its hosts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from nodeready.core import own_files
from nodeready.core.policy import Policy
from nodeready.core.result import FleetFacts
from nodeready.core.templates import render
from nodeready.runs.deploy import actions
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.access import READ, chmod_mends
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.ssh_client import checks
from nodeready.subjects.ssh_client.config import DROPIN, MAIN, VENDOR, speaks_first
from nodeready.subjects.ssh_client.facts import KNOWN_HOSTS, SSH, SshClient

#: A file of this size and more travels over the connection's standard input: the base64 of such a
#: file and of the script around it does not fit into one command line.
LARGE_BYTES = 32 * 1024

#: The names of ssh's package: a node's answer only chooses among them.
PACKAGES = ("openssh-client", "openssh-clients")

# ssh reads the new file before the file is put in place; its name comes as last word.
_READS = 'ssh -GT -F "$1" nodeready >/dev/null'
# With strict checking and without the keys, ssh would refuse every node.
_HAS_KEYS = f"""grep -qxF '{own_files.BEGIN.decode()}' {KNOWN_HOSTS} 2>/dev/null || {{
    echo 'the host keys are not in {KNOWN_HOSTS} yet'
    exit 1
}}
"""


def validator(policy: Policy) -> tuple[str, ...]:
    """The command that a new ssh_config has to pass on the node."""
    strict = policy.ssh_client_hosts and policy.ssh_client_mode == "known_hosts"
    return ("sh", "-c", (_HAS_KEYS if strict else "") + _READS, "sh")


@lru_cache(maxsize=64)
def _with_block(content: bytes, inner: bytes) -> bytes:
    """One object for all nodes whose files are alike, however large the fleet."""
    return own_files.put_block(content, inner, "keep")


def _open(client: SshClient, path: str) -> Iterator[actions.Action]:
    """Let every user read the file, which is root's: its mode, and that of the directories of
    root's on the way to it.
    """
    observed = client.access.inodes.get(path)
    for barrier in client.access.barriers(path):
        if barrier.path != path and chmod_mends(barrier, path):
            yield actions.RunCommand(("chmod", "a+rx", barrier.path))
    if observed is not None and (
        observed.uid or observed.mode & 0o022 or not observed.mode & READ
    ):
        yield actions.RunCommand(("chown", "root:root", path))
        yield actions.RunCommand(("chmod", "0644", path))


@step(timeout_s=600, settings=("package_lock_wait_s",))
def installed(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Let users run ssh; reinstall its package where the program is gone or does not start."""
    client: SshClient = snapshot["ssh_client"]
    trouble = checks.trouble_of(client)
    if trouble is not None and trouble.repair == "chmod":
        yield actions.RunCommand(("chmod", "a+rx", trouble.path))
        return
    wait_s = min(policy.package_lock_wait_s, 540)
    package = next((name for name in PACKAGES if name == client.package), PACKAGES[0])
    words = ("nr_again", "", str(wait_s), package, SSH)
    yield actions.Script("packages", words, f"install the package of {SSH} again")


@step(timeout_s=120, needs_fleet=True)
def known_hosts(snapshot: Snapshot, policy: Policy, fleet: FleetFacts) -> Iterator[actions.Action]:
    """Write every node's host keys into our block of /etc/ssh/ssh_known_hosts.

    Raises PlanError for lines that make no block.
    """
    client: SshClient = snapshot["ssh_client"]
    yield from _open(client, KNOWN_HOSTS)
    old = client.known_hosts.content
    block = checks.fleet_block(checks.expected_lines(policy, fleet))
    if client.known_hosts.digest == block.digest:
        return
    try:
        new = _with_block(old or b"", block.inner)
    except ValueError as error:
        raise actions.PlanError(f"ssh_known_hosts: {error}") from None
    yield _write(client, new)


@step(timeout_s=120)
def leftover(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Take our block out of /etc/ssh/ssh_known_hosts: comes after the options."""
    client: SshClient = snapshot["ssh_client"]
    old = client.known_hosts.content or b""
    new = own_files.remove_block(old)
    yield _write(client, new) if new else actions.RemoveFile(KNOWN_HOSTS, old)


def _write(client: SshClient, new: bytes) -> actions.WriteFile:
    old = client.known_hosts.content
    large = not client.known_hosts.sent or max(len(new), len(old or b"")) > LARGE_BYTES
    return actions.WriteFile(KNOWN_HOSTS, new, old, large=large)


def _goes_into_dropin(client: SshClient, policy: Policy) -> bool:
    """Whether the options go into the drop-in, else into a block at the top of the main file.

    A drop-in with the right lines and no effect is overridden by an unobserved file.
    """
    block = checks.our_lines(client)
    if block.block is not None or block.dropin == checks.option_lines(policy):
        return False
    main = MAIN if MAIN in client.config else VENDOR
    return speaks_first(main, client.files, checks.wanted_options(policy))


def _without_block(client: SshClient, policy: Policy) -> Iterator[actions.Action]:
    """Take our block out of the main file; remove a main file that held nothing else."""
    old = client.config.get(MAIN, b"")
    if own_files.find_block(old) is None:
        return
    remaining = own_files.remove_block(old)
    if remaining.strip():
        yield actions.WriteFile(MAIN, remaining, old, validator=validator(policy))
    else:
        yield actions.RemoveFile(MAIN, old)


@step()
def options(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Set the options of the mode for the policy's hosts where the first value wins."""
    client: SshClient = snapshot["ssh_client"]
    lines = checks.option_lines(policy)
    opened = [
        *(_open(client, MAIN) if client.access.barrier(MAIN) is not None else ()),
        *(_open(client, DROPIN) if DROPIN in client.config else ()),
    ]
    if opened:
        # The next snapshot shows the options of the files that ssh can now read.
        yield from opened
        return
    if policy.ssh_client_hosts and _goes_into_dropin(client, policy):
        content = render("ssh_client/ssh_config.conf.j2", lines=lines)
        old = client.config.get(DROPIN)
        if old != content:
            yield actions.WriteFile(DROPIN, content, old, validator=validator(policy))
        return
    if policy.ssh_client_hosts:
        old = client.config.get(MAIN)
        is_alone = not own_files.remove_block(old or b"").strip()
        vendor = VENDOR if is_alone and VENDOR in client.config else ""
        inner = render("ssh_client/block.j2", lines=lines, vendor=vendor)
        new = own_files.put_block(old or b"", inner, "top")
        if new != old:
            yield actions.WriteFile(MAIN, new, old, validator=validator(policy))
    else:
        yield from _without_block(client, policy)
    if DROPIN in client.config:
        yield actions.RemoveFile(DROPIN, client.config[DROPIN])


# The keys are taken out last: until the options are gone, ssh refuses a node without a key.
STEPS = (installed, known_hosts, options, leftover)
