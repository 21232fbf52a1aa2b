"""Manners of the command line: what is asked, where it is written, and how it looks."""

import os
import re

from tests.command import Terminal, hang, hangs, wait_for, written


def test_a_terminal_is_asked_once(fresh_node, fleet, tool):
    """No means no, Ctrl-C means interrupted, yes means yes; 80 columns are kept."""
    before = written(fresh_node)
    where = fleet([fresh_node])
    words = ("deploy", where, "--only", "ptrace,limits,core_dumps,pdsh")
    # Without a terminal nothing is asked.
    done = tool(*words, "--format", "json")
    assert (done.status, done.out) == (2, ""), done
    assert done.lines == ["nodeready: no terminal to ask on: add --yes, or --check to only look"]
    for answer, status in (("n\n", 3), ("\x03", 130), ("\x04", 130)):
        terminal = Terminal(tool, *words)
        terminal.asked("changes on 1 node? [y/N]: ")
        terminal.send(answer)
        done = terminal.end()
        assert done.status == status, (answer, done)
        assert "nothing was changed" in done.out
        assert written(fresh_node) == before
    assert max(map(len, re.split(r"[\r\n]+", done.out))) <= 80
    terminal = Terminal(tool, *words)
    terminal.asked("[y/N]: ")
    terminal.send("y\n")
    assert terminal.end().status == 0
    assert fresh_node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"
    quiet = tool(*words, "-q")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", "")


def test_output_into_a_closed_pipe(fresh_node, fleet, tool):
    """`| head -1` stops the output, not the work; a full disk behind it is told in one line."""
    where = fleet([fresh_node])
    reader, writer = os.pipe()
    os.close(reader)
    done = tool("deploy", where, "--yes", "--only", "ptrace", stdout=writer)
    os.close(writer)
    assert (done.status, done.err) == (0, ""), done
    assert fresh_node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"
    with open("/dev/full", "wb") as full:
        done = tool("audit", where, stdout=full)
    assert (done.status, done.err) == (1, "nodeready: No space left on device\n"), done


def test_progress_on_a_terminal_names_the_slowest(fresh_nodes, fleet, tool):
    fast, slow = fresh_nodes(2)
    hang(slow)
    terminal = Terminal(tool, "deploy", fleet([fast, slow]), "--yes", "--only", "ptrace")
    wait_for(lambda: hangs(slow))
    for words in ("changing ", "1/2", "waiting for "):
        terminal.expect(words)
    assert f"waiting for {slow.name}"[:30] in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.text)
    terminal.send("\x03")
    assert terminal.end().status == 130
