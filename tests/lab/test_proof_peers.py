"""ssh and pdsh from node to node: what `ready` makes of them, on real nodes."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nodeready.lab import LabNode
from tests.cases import read_table
from tests.command import Tool, ours

KNOWN = "/etc/ssh/ssh_known_hosts"
USER = "ml"
WELL = ("ok", "na")
ONLY = ("--only", "proof.ssh,proof.pdsh", "--format", "json")


def host_key(node):
    return " ".join(node.read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])


def introduce(nodes):
    """Every node knows every other one's host key, and pdsh's remote command is ssh."""
    lines = [f"{node.name},{node.address} {host_key(node)}\n" for node in nodes]
    for node in nodes:
        node.write(KNOWN, "".join(lines), mode=0o644)
        node.write("/etc/pdsh/rcmd_default", "ssh\n", mode=0o644)


@pytest.fixture
def bad(tool: Tool, fleet: Callable[..., Path]) -> Callable[..., dict[str, dict[str, str]]]:
    """``{node: {check: actual}}`` of what is not well, for the job's user on these nodes."""

    def ask(nodes: Sequence[LabNode]) -> dict[str, dict[str, str]]:
        results = tool("ready", fleet(nodes), "--user", USER, *ONLY).results
        found = {
            name: {check: r["actual"] for check, r in rows.items() if r["status"] not in WELL}
            for name, rows in results.items()
        }
        return {name: told for name, told in found.items() if told}

    return ask


def no_client(node):
    running = node.enter(["ps", "-e", "-o", "comm="]).stdout.split()
    return not {"ssh", "pdsh", "pdsh.bin"} & {*running}


def test_the_right_node_is_named_with_the_right_cause(fresh_nodes, bad):
    nodes = first, second, third = fresh_nodes(3)
    # Nobody knows anybody: where nothing works, every node says so.
    found = bad(nodes)
    assert {name: set(told) for name, told in found.items()} == {
        node.name: {"proof.ssh"} for node in nodes
    }
    for told in found.values():
        assert "the host key is unknown, so ssh would ask" in told["proof.ssh"]

    introduce(nodes)
    assert bad(nodes) == {}

    # A line of the user's own that is older than the file of all nodes stops nobody.
    old = f"{third.name} {host_key(first)}\n"
    first.run(f"echo '{old}' >~/.ssh/known_hosts", user=USER)
    assert bad(nodes) == {}
    first.run("rm ~/.ssh/known_hosts", user=USER)

    # Re-imaged: the others know another key of it.
    lines = [line for line in first.read(KNOWN).splitlines() if third.name not in line]
    for node in nodes:
        node.write(KNOWN, "\n".join([*lines, old]))
    why = "2 of 2 peers cannot log in: the host key is not the one that is known"
    assert bad(nodes) == {third.name: {"proof.ssh": f"{why}; the way back works"}}
    introduce(nodes)

    # No key of one's own; a login that prints before it answers is no trouble.
    second.run("mv ~/.ssh/id_ed25519 ~/.ssh/away", user=USER)
    third.write("/etc/profile.d/motd.sh", "echo welcome\n")
    third.run("echo 'echo noise; echo more >&2' >.bashrc", user=USER)
    why = "cannot log in to 2 of 2 peers: no key of ml is accepted; the way back works"
    assert bad(nodes) == {second.name: {"proof.ssh": why}}
    second.run("mv ~/.ssh/away ~/.ssh/id_ed25519", user=USER)

    # One name that leads elsewhere, for one node, whose ssh does not look at the key.
    hosts = first.read("/etc/hosts")
    first.write("/etc/hosts", hosts.replace(f"{second.address} ", f"{third.address} "))
    first.run("echo StrictHostKeyChecking no >~/.ssh/config", user=USER)
    why = f"cannot log in to {second.name}: {third.name} answers; the way back works"
    assert bad(nodes) == {first.name: {"proof.ssh": why}}
    first.write("/etc/hosts", hosts)
    first.run("rm ~/.ssh/config", user=USER)

    assert all(ours(node) == [] and no_client(node) for node in nodes)


#: Lines of a user's own configuration that keep a login from a peer -> what is said of them.
OWN_LINES = read_table(__file__, "OWN_LINES")


@pytest.mark.nightly
def test_a_users_own_configuration_is_no_fault_of_the_peers(fresh_nodes, bad):
    nodes = fresh_nodes(len(OWN_LINES) + 1)
    introduce(nodes)
    wanted = {}
    for at, (lines, words) in enumerate(OWN_LINES.items()):
        node, peer, other = nodes[at], nodes[at + 1], nodes[at - 1].address
        text = f"Host {peer.name}\nStrictHostKeyChecking no\n{lines.format(other=other)}\n"
        node.write(f"/home/{USER}/.ssh/config", text)
        node.run(f"chown {USER} /home/{USER}/.ssh/config")
        wanted[node.name] = (
            f"cannot log in to {peer.name}: the ssh configuration of ml alone stands in the way "
            rf"\(.*{words.format(other=other)}.*\)"
        )
    found = bad(nodes)
    assert found.keys() == wanted.keys()
    for name, words in wanted.items():
        assert re.fullmatch(words, found[name]["proof.ssh"]), found
    # What they ask for is done.
    for node in nodes:
        node.run(f"rm -f /home/{USER}/.ssh/config")
    # The key that they all have may do something else alone on the last one.
    last, keys = nodes[-1], f"/home/{USER}/.ssh/authorized_keys"
    last.run(f"sed -i 's/^/command=\"echo backup\" /' {keys}")
    why = f"the key of ml is there for another command alone (command= at {keys}:1)"
    assert why in bad(nodes).pop(last.name)["proof.ssh"]
    last.run(f"sed -i 's/^command=[^ ]* backup. //' {keys}")
    assert bad(nodes) == {}


@pytest.mark.nightly
def test_pdsh_is_judged_by_its_answers(fresh_nodes, bad):
    nodes = first, second = fresh_nodes(2)
    introduce(nodes)
    # What the user's own settings ask for stays.
    first.run("echo 'export PDSH_SSH_ARGS_APPEND=-oUser=nobody' >.profile", user=USER)
    told = bad(nodes)
    assert "Permission denied" in told[first.name].pop("proof.pdsh")
    assert told == {first.name: {}}
    first.run("rm .profile", user=USER)

    # A shell that does not know `$?`, as fish and the BSD csh.
    shell = '#!/bin/sh\ncase "$2" in *"\\$?"*) echo "no \\$? here" >&2; exit 1;; esac\n'
    second.write("/usr/local/bin/other", shell + 'exec /bin/sh "$@"\n', mode=0o755)
    second.run(f"echo /usr/local/bin/other >>/etc/shells; usermod -s /usr/local/bin/other {USER}")
    assert bad(nodes) == {}


@pytest.mark.nightly
def test_what_hangs_after_the_login_costs_only_itself(fresh_nodes, bad):
    nodes = first, second, third = fresh_nodes(3)
    introduce(nodes)
    # Debian's ~/.profile reads ~/.bashrc, too.
    by_ssh = '[ -n "$SSH_CLIENT" ] || return'
    second.run(f"echo '{by_ssh}; exec sleep 1000' >.bashrc", user=USER)
    assert bad(nodes) == {
        second.name: {"proof.ssh": "2 of 2 peers cannot log in: timed out; the way back works"}
    }
    assert all(no_client(node) for node in (first, third))

    # The second login hangs, pdsh's: it puts its ssh into a session of its own.
    again = f"{by_ssh}; [ ! -e been ] || exec sleep 1000; touch been\n"
    second.write(f"/home/{USER}/.bashrc", again)
    told = bad([first, second])[first.name]
    assert "proof.ssh" not in told
    assert "command timeout" in told["proof.pdsh"]
    assert no_client(first)


#: What gives pdsh another remote command: files -> words of the finding, "": it is none. What is
#: to be done then is asked of tests/unit.
WRONG_DEFAULTS = read_table(__file__, "WRONG_DEFAULTS")
SOME, REST = [*WRONG_DEFAULTS][:4], [*WRONG_DEFAULTS][4:]


@pytest.mark.parametrize("names", [SOME, pytest.param(REST, marks=pytest.mark.nightly)])
def test_pdsh_is_run_as_its_user_would(fresh_nodes, bad, names):
    first, second = fresh_nodes(2)
    introduce([first, second])
    first.run(f"chsh -s /bin/bash {USER}")
    wrong = {}
    for name in names:
        files, words = WRONG_DEFAULTS[name]
        first.run(f"tar cPf /srv/as.tar {' '.join(files)} 2>/dev/null; rm -f {' '.join(files)}")
        for path, content in files.items():
            if content is not None:
                first.write(path, content, mode=0o644)
        told = bad([first, second])
        if set(told) != ({first.name} if words else set()) or words not in str(told):
            wrong[name] = told
        first.run(f"rm -f {' '.join(files)}; tar xPf /srv/as.tar")
    assert wrong == {}
