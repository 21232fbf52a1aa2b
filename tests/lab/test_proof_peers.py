"""ssh and pdsh from node to node: the real program on real nodes, and what is made of it."""

from __future__ import annotations

import secrets
import threading

import pytest

from nodeready.policy import Policy
from nodeready.ready import localize
from nodeready.ready.mesh import peers_of, ring_and_skips
from nodeready.subjects.base import Unknown
from nodeready.subjects.proof import facts as proved
from nodeready.subjects.proof import reach as proof_reach
from nodeready.subjects.proof.facts import Config, Peers, Proved, User
from tests.builders.proof import line
from tests.command import ours

KNOWN = "/etc/ssh/ssh_known_hosts"
USER = "ml"


def host_key(node):
    return " ".join(node.read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])


def introduce(nodes):
    """Every node knows every other one's host key, and pdsh's remote command is ssh."""
    lines = [f"{node.name},{node.address} {host_key(node)}\n" for node in nodes]
    for node in nodes:
        node.write(KNOWN, "".join(lines), mode=0o644)
        node.write("/etc/pdsh/rcmd_default", "ssh\n", mode=0o644)


def prove(node, peers):
    """What the program sees on the node, in the session of the job's user."""
    config = Config(
        nonce=f"nodeready-{secrets.token_hex(8)}",
        tag="nodeready:test",
        user=USER,
        wanted=("peers",),
        peers=peers,
    )
    command = line(config)
    said = node.run(command.line, input=command.stdin).stdout
    return proved.read(said, config)


def judged(nodes, silent=()):
    """Each node's results of proof.ssh and proof.pdsh; the silent ones run no proofs."""
    names = [node.name for node in nodes]
    peers = peers_of(names, ring_and_skips(len(nodes)))
    found = {}

    def one(node):
        found[node.name] = prove(node, peers[node.name])

    threads = [threading.Thread(target=one, args=(n,)) for n in nodes if n not in silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = {name: one.peers for name, one in found.items()}
    assert all(isinstance(one, Peers) for one in seen.values()), seen
    reach = localize.reach(seen)
    results = {}
    for name in names:
        known = seen.get(name, Unknown("not asked"))
        both = Proved(User(USER, 1000, True, ""), peers=known, reach=reach.get(name))
        results[name] = tuple(
            check(both, Policy()) for check in (proof_reach.ssh, proof_reach.pdsh)
        )
    return results


def bad(nodes, silent=()):
    """``{node: {check: actual}}`` of what fails."""
    return {
        name: {one.check: one.actual for one in both if one.status == "fail"}
        for name, both in judged(nodes, silent).items()
        if any(one.status == "fail" for one in both)
    }


def statuses(nodes):
    return {tuple(one.status for one in both) for both in judged(nodes).values()}


def no_client(node):
    running = node.enter(["ps", "-e", "-o", "comm="]).stdout.split()
    return not {"ssh", "pdsh", "pdsh.bin"} & {*running}


def test_the_right_node_is_named_with_the_right_cause(fresh_nodes):
    nodes = first, second, third, fourth = fresh_nodes(4)
    # Nobody knows anybody: where nothing works, every node says so.
    found = bad(nodes)
    assert {name: set(told) for name, told in found.items()} == {
        node.name: {"proof.ssh"} for node in nodes
    }
    for told in found.values():
        assert "the host key is unknown, so ssh would ask" in told["proof.ssh"]

    introduce(nodes)
    assert statuses(nodes) == {("ok", "ok")}

    # A line of the user's own that is older than the file of all nodes stops nobody.
    old = f"{third.name} {host_key(first)}\n"
    first.run(f"echo '{old}' >~/.ssh/known_hosts", user=USER)
    assert statuses(nodes) == {("ok", "ok")}
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
    assert bad(nodes) == {
        first.name: {"proof.ssh": f"cannot log in to {second.name}: {third.name} answers"}
    }
    first.write("/etc/hosts", hosts)
    first.run("rm ~/.ssh/config", user=USER)

    # sshd takes connections and never answers; then it is not there at all.
    for end, cause in (
        (fourth.pause_sshd, "sshd takes the connection and says nothing"),
        (fourth.stop_sshd, "connection refused"),
    ):
        end()
        assert bad(nodes, silent=[fourth]) == {
            fourth.name: {"proof.ssh": f"2 of 2 peers cannot log in: {cause}"}
        }
        fourth.resume_sshd()
    assert statuses(nodes) == {("ok", "ok")}

    assert all(ours(node) == [] and no_client(node) for node in nodes)


@pytest.mark.nightly
def test_pdsh_is_judged_by_its_answers(fresh_nodes):
    nodes = first, second = fresh_nodes(2)
    introduce(nodes)
    # What the user's own settings ask for stays.
    first.run("echo 'export PDSH_SSH_ARGS_APPEND=-oUser=nobody' >.profile", user=USER)
    told = judged(nodes)
    assert told[first.name][0].status == "ok"
    assert "Permission denied" in told[first.name][1].actual
    assert [one.status for one in told[second.name]] == ["ok", "ok"]
    first.run("rm .profile", user=USER)

    # A shell that does not know `$?`, as fish and the BSD csh.
    shell = '#!/bin/sh\ncase "$2" in *"\\$?"*) echo "no \\$? here" >&2; exit 1;; esac\n'
    second.write("/usr/local/bin/other", shell + 'exec /bin/sh "$@"\n', mode=0o755)
    second.run(f"echo /usr/local/bin/other >>/etc/shells; usermod -s /usr/local/bin/other {USER}")
    assert statuses(nodes) == {("ok", "ok")}

    first.run("rm $(find /usr/lib* -name sshcmd.so)")
    second.run("mv /usr/bin/pdsh /usr/bin/away")
    told = bad(nodes)
    assert "No such rcmd module" in told[first.name].pop("proof.pdsh")
    assert told == {first.name: {}, second.name: {"proof.pdsh": "pdsh is not installed"}}


@pytest.mark.nightly
def test_what_hangs_after_the_login_costs_only_itself(fresh_nodes):
    nodes = first, second, third = fresh_nodes(3)
    introduce(nodes)
    second.run("echo 'exec sleep 1000' >.bashrc", user=USER)
    assert bad(nodes) == {
        second.name: {"proof.ssh": "2 of 2 peers cannot log in: timed out; the way back works"}
    }
    assert all(no_client(node) for node in (first, third))

    # The second login hangs, pdsh's: it puts its ssh into a session of its own.
    again = "[ ! -e been ] || exec sleep 1000; touch been\n"
    second.write(f"/home/{USER}/.bashrc", again)
    told = bad([first, second])[first.name]
    assert "proof.ssh" not in told
    assert "command timeout" in told["proof.pdsh"]
    assert no_client(first)


_GIVES = "export PDSH_RCMD_TYPE=rsh\n"
HOME = f"/home/{USER}"
#: What gives pdsh another remote command: files -> words of the finding, "": it is none. What is
#: to be done then is asked of tests/unit.
WRONG_DEFAULTS = {
    "a file that profile.d reads": (
        {"/opt/env.sh": f"# the site's\n{_GIVES}", "/etc/profile.d/a-site.sh": ". /opt/env.sh\n"},
        "rsh by /opt/env.sh:2",
    ),
    "~/.bashrc": (
        {f"{HOME}/.bashrc": f"case $- in *i*) ;; *) return ;; esac\n{_GIVES}"},
        f"interactive shell: PDSH_RCMD_TYPE is rsh by {HOME}/.bashrc:2",
    ),
    "an alias": (
        {f"{HOME}/.bashrc": "alias pdsh='pdsh -R rsh'\n"},
        f"interactive shell by {HOME}/.bashrc:1",
    ),
    "a shell that is noisy": (
        {f"{HOME}/.bashrc": "export WCOLL=/x FANOUT=1; echo Rcmd type rsh; echo '{'\n"},
        "",
    ),
    "by the build": ({"/etc/pdsh/rcmd_default": None}, "by default"),
    "/etc/environment": ({"/etc/environment": "PDSH_RCMD_TYPE=rsh\n"}, "by /etc/environment:1"),
    "a shell that ends": ({f"{HOME}/.bashrc": "case $- in *i*) exit 3;; esac\n"}, ""),
}
SOME, REST = [*WRONG_DEFAULTS][:4], [*WRONG_DEFAULTS][4:]


@pytest.mark.parametrize("names", [SOME, pytest.param(REST, marks=pytest.mark.nightly)])
def test_pdsh_is_run_as_its_user_would(fresh_nodes, names):
    first, second = fresh_nodes(2)
    introduce([first, second])
    first.run(f"chsh -s /bin/bash {USER}")
    user, wrong = User(USER, 1000, True, ""), {}
    for name in names:
        files, words = WRONG_DEFAULTS[name]
        first.run(f"tar cPf /srv/as.tar {' '.join(files)} 2>/dev/null; rm -f {' '.join(files)}")
        for path, content in files.items():
            if content is not None:
                first.write(path, content, mode=0o644)
        peers = prove(first, (second.name,)).peers
        reach = localize.reach({first.name: peers})[first.name]
        result = proof_reach.pdsh(Proved(user, peers=peers, reach=reach), Policy())
        if result.status != ("fail" if words else "ok") or words not in result.actual:
            wrong[name] = result
        first.run(f"rm -f {' '.join(files)}; tar xPf /srv/as.tar")
    assert wrong == {}
