"""Two runs at once, commands that hang, a user who interrupts: nothing of ours stays behind."""

import re
import signal

from nodeready.fleet.inventory.nodeset import fold
from tests.command import SHORT, hang, hangs, ours, wait_for


def release(node) -> None:
    """The hanging sysctl ends, and the next one works."""
    node.enter(["sh", "-c", "rm /usr/local/sbin/sysctl; pkill -x sleep"])


def test_two_runs_at_once(fresh_node, fleet, tool):
    """The second waits a bounded time, then names the holder; a dead holder's lock is free."""
    hang(fresh_node)
    where = fleet([fresh_node], lock_wait_s=1)
    words = ("deploy", where, "--yes", "--only", "ptrace")
    first = tool.start(*words, first=SHORT.format(seconds=900))
    wait_for(lambda: hangs(fresh_node))

    second = tool(*words, status=1)
    by = r"locked by root@\S+ since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
    locked = re.search(rf"ptrace\.scope: ({by}); waited 1 s$", second.out, re.M)
    assert locked, second

    # The holder dies, but what it started on the node has not ended: still nobody else's.
    first.kill()
    first.wait()
    third = tool(*words)
    assert locked[1] in third.out, third

    # It ends while the next one waits: that one goes on.
    patient = tool.start("deploy", fleet([fresh_node], lock_wait_s=60), *words[2:])
    wait_for(lambda: len(set(re.findall(r"nodeready:\w+", "".join(ours(fresh_node))))) == 2)
    release(fresh_node)
    tool.end(patient, status=0)
    # Its connection is gone, and the lock with it: at once, without waiting at all.
    fresh_node.enter(["sysctl", "-qw", "kernel.yama.ptrace_scope=1"])
    tool("deploy", fleet([fresh_node], lock_wait_s=0), *words[2:], status=0)


def test_the_second_of_two_runs_plans_from_what_the_first_has_left(fresh_node, fleet, tool):
    """It was planned before the first wrote, and waited for the lock since then."""
    hang(fresh_node, 'sleep 600\nexec /usr/sbin/sysctl "$@"')
    words = ("deploy", fleet([fresh_node], lock_wait_s=60), "--yes", "--only", "ptrace,ssh_client")
    first = tool.start(*words)
    wait_for(lambda: hangs(fresh_node))
    second = tool.start(*words)
    wait_for(lambda: len(set(re.findall(r"nodeready:\w+", "".join(ours(fresh_node))))) == 2)
    release(fresh_node)
    for run in (first, second):
        tool.end(run, status=0)


def test_a_command_hangs(fresh_nodes, fleet, tool):
    """A change: that operation failed. A probe: that subject is unknown. No orphan stays."""
    good, slow, deaf, probed = fresh_nodes(4)
    hang(slow)
    hang(deaf, "trap '' TERM INT HUP\n")
    # Whoever opens it waits for a writer.
    probed.enter(["mkfifo", "/etc/sysctl.d/50-hangs.conf"])
    where = fleet([good, slow, deaf, probed], lock_wait_s=0)
    words = ("--yes", "--only", "ptrace,limits,debug_tools")
    done = tool("deploy", where, *words, first=SHORT.format(seconds=6), status=1)
    both = fold([slow.name, deaf.name])
    assert f"failed      {both}: ptrace.scope: ended after 6 s\n" in done.out, done
    for node in (slow, deaf):
        assert node.run("cat /etc/security/limits.d/zz-nodeready.conf").stdout
    assert re.search(rf"unknown +ptrace\S* +{probed.name}\n.*timed out", done.out), done
    assert probed.run("py-spy --version").stdout.startswith("py-spy ")
    assert re.search(rf"^changed +{good.name}: ", done.out, re.M), done
    for node in (good, slow, deaf, probed):
        wait_for(lambda node=node: not ours(node))
        assert not sleepers(node)


def sleepers(node) -> str:
    """What `hang` has left."""
    return node.enter(["pgrep", "-fx", "sleep 600"], check=False).stdout


def test_interrupted_while_changing(fresh_nodes, fleet, tool):
    """What was done is shown and marked partial; what runs is ended, but no package manager."""
    good, slow, installing = fresh_nodes(3)
    hang(slow)
    # A process of that name, as apt runs it: half-way it must not be ended.
    hang(installing, "cp /bin/sleep /run/dpkg; /run/dpkg 30\n")
    where = fleet([good, slow, installing])
    running = tool.start("deploy", where, "--yes", "--only", "ptrace")
    scope = "sysctl -n kernel.yama.ptrace_scope"
    wait_for(lambda: hangs(slow) and hangs(installing) and good.run(scope).stdout == "0\n")
    wait_for(lambda: not ours(good))
    running.send_signal(signal.SIGINT)
    done = tool.end(running, status=130)
    assert re.search(rf"^changed +{good.name}: ptrace\.scope$", done.out, re.M), done
    stopped = fold([slow.name, installing.name])
    assert f"partial     {stopped}: stopped in ptrace.scope\n" in done.out
    assert f"partial: 1 of 3 nodes were completed; not {slow.name[:-3]}[" in done.err
    wait_for(lambda: not ours(slow))
    assert not sleepers(slow)
    assert installing.enter(["pgrep", "-x", "dpkg"]).stdout
    installing.enter(["pkill", "-x", "dpkg"])


def test_a_second_ctrl_c_leaves_at_once(fresh_node, fleet, tool):
    """Also when a node that no longer answers keeps the first one busy."""
    hang(fresh_node)
    running = tool.start("deploy", fleet([fresh_node]), "--yes", "--only", "ptrace")
    wait_for(lambda: hangs(fresh_node))
    fresh_node.freeze()
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    assert b"again: leave at once" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    done = tool.end(running, status=130)
    fresh_node.thaw()
    assert "partial" not in done.out + done.err
