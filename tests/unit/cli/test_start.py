"""What a command imports before it does anything, and the nodes that failed in the last runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from nodeready.cli import _COMMANDS, cli, start
from nodeready.cli.options import Refused
from nodeready.inventory.nodeset import expand
from tests.fake import Fake
from tests.unit.commands import AWAY

#: What takes long to load, and is for those who talk to nodes or show a table.
HEAVY = {"pyinfra", "gevent", "paramiko", "rich", "jinja2"}

# Argument 1: (words, environment) of each command line as JSON, one after the other.
_RUN = """
import contextlib, io, json, os, sys
from nodeready.cli import main
heavy, told = set(json.loads(sys.argv[2])), []
for words, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(out):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code
    found = heavy & {name.partition(".")[0] for name in sys.modules}
    told.append([code, out.buffer.getvalue().decode(), sorted(found)])
print(json.dumps(told))
"""


def told(*lines: tuple[list[str] | None, dict[str, str]]) -> tuple[list[Any], str]:
    """Of each command line: exit code, output, what is loaded by then; and standard error."""
    argv = [sys.executable, "-c", _RUN, json.dumps(lines), json.dumps(sorted(HEAVY))]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def test_help_imports_nothing_that_talks_to_nodes():
    words = [["--help"], ["--version"], ["-h"], *([name, "--help"] for name in _COMMANDS)]
    found, errors = told(*((one, {}) for one in words))
    assert errors == ""
    for one, (code, out, heavy) in zip(words, found, strict=True):
        assert (code, heavy) == (0, []), one
        assert out, one


def test_completion_imports_nothing_that_talks_to_nodes_and_says_what_the_help_says():
    lines = {f"nodeready {name} --": "--help" for name in _COMMANDS}
    lines |= {"nodeready au": "audit", "nodeready audit --format js": "json"}
    asked = [
        (None, {"_NODEREADY_COMPLETE": "zsh_complete", "COMP_WORDS": line,
                "COMP_CWORD": str(len(line.split()) - 1)})
        for line in lines
    ]  # fmt: skip
    found, errors = told(*asked)
    assert errors == ""
    for (line, word), (code, out, heavy) in zip(lines.items(), found, strict=True):
        assert (code, heavy) == (0, []), line
        assert word in out.splitlines(), line
        if line == "nodeready au":
            assert _COMMANDS["audit"] in out


@pytest.mark.parametrize("name", ["audit", "stacks"])
def test_what_talks_to_nodes_is_imported_into_a_patched_library(name):
    """gevent would warn of modules that were there before it, on standard error."""
    ((code, _, heavy),), errors = told(([name, "--nosuch"], {}))
    assert (code, errors.splitlines()) == (
        2,
        [
            "nodeready: No such option '--nosuch'.",
            f"Try 'nodeready {name} --help'.",
        ],
    )
    assert "gevent" in heavy


def test_every_command_of_the_list_is_there():
    context = cli.make_context("nodeready", ["audit"], resilient_parsing=True)
    for name, about in _COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert (command.name, bool(command.help), about[-1]) == (name, True, ".")


# --- `--limit @last-failed`: what a run keeps, and what a later one selects.


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """``failed(inventory, limit, failed, lost=..., asked=...)``: a run; the names kept then."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def go(words: str, limit: str | None, names: str, **more: Any) -> list[str]:
        loaded, _, policies = start.declared(words, start.Common(limit=limit))
        nodes = start.Nodes(Fake(dict.fromkeys(policies, AWAY)), policies, loaded)
        start.remember_failed(nodes, expand(names), **more)
        kept = tmp_path / "state" / "nodeready" / "last-failed"
        return [row.partition("\t")[0] for row in kept.read_text().splitlines()]

    return go


def chosen(words: str, limit: str = "@last-failed") -> list[str]:
    return [host.name for host in start.declared(words, start.Common(limit=limit))[1]]


def test_a_run_with_a_limit_forgets_no_node_that_it_has_not_asked(failed):
    assert failed("n[1-9]", None, "n3,n5,n7") == ["n3", "n5", "n7"]
    # n5 is fine now, n4 is not, and nobody has asked the others.
    assert failed("n[1-9]", "n4,n5", "n4") == ["n3", "n7", "n4"]
    assert chosen("n[1-9]") == ["n3", "n4", "n7"]
    assert failed("n[1-9]", "@last-failed", "n7") == ["n7"]
    assert chosen("n[1-9]", "@last-failed,n1") == ["n1", "n7"]


def test_a_run_over_all_begins_anew(failed):
    assert failed("n[1-9]", None, "n3,n5") == ["n3", "n5"]
    # The nodes that are gone from the list are forgotten with it.
    assert failed("n[1-4]", None, "n2") == ["n2"]
    assert failed("n[1-4]", None, "") == []
    with pytest.raises(Refused, match="no node failed in the last run"):
        chosen("n[1-4]")
    # Beside other words it selects nothing.
    assert chosen("n[1-4]", "@last-failed,n2") == ["n2"]


def test_an_interrupted_run_forgets_no_node_that_it_did_not_get_to(failed):
    failed("n[1-9]", None, "n3,n5", lost=True)
    assert failed("n[1-9]", None, "n1", lost=True, asked=["n1", "n3"]) == ["n5", "n1"]


def test_a_command_that_only_asks_leaves_what_was_judged(failed):
    failed("n[1-9]", None, "n3")
    assert failed("n[1-9]", None, "n5", lost=True) == ["n3", "n5"]
    # n5 answers again; nobody has judged n3 anew.
    assert failed("n[1-9]", None, "n3", lost=True) == ["n3"]
    assert failed("n[1-9]", None, "") == []


def test_a_node_that_has_left_the_inventory_is_named_and_passed_over(failed, tmp_path, capsys):
    (tmp_path / "prod.py").write_text("gpu = ['n1', 'n2', 'n3']\n")
    failed("prod.py", None, "n1,n2")
    (tmp_path / "prod.py").write_text("gpu = ['n2', 'n3']\n")
    assert chosen("prod.py") == ["n2"]
    assert capsys.readouterr().err == (
        "nodeready: --limit @last-failed: not in the inventory: n1\n"
    )
    start.declared("prod.py", start.Common(limit="@last-failed", quiet=True))
    assert capsys.readouterr().err == ""
    (tmp_path / "prod.py").write_text("gpu = ['n3']\n")
    with pytest.raises(Refused, match=r"@last-failed: not in the inventory: n\[1-2\]"):
        chosen("prod.py")
    # A run over all of it knows that they are gone.
    assert failed("prod.py", None, "n3") == ["n3"]


def test_two_inventories_keep_theirs_and_share_their_nodes(failed, tmp_path, capsys):
    (tmp_path / "a.py").write_text("gpu = ['a1', 'a2', 'both']\n")
    (tmp_path / "b.py").write_text("gpu = ['b1', 'both']\n")
    failed("a.py", None, "a2,both")
    assert failed("b.py", None, "b1") == ["a2", "b1"]
    assert chosen("a.py") == ["a2"]
    assert chosen("b.py") == ["b1"]
    # Nobody is told of the nodes of another inventory.
    assert capsys.readouterr().err == ""
    # A list of nodes is another way to the same ones.
    assert chosen("a2,b1,c") == ["a2", "b1"]
    assert failed("a2,c", None, "c") == ["b1", "c"]


def test_this_machine_is_no_node_to_ask_again(failed):
    failed("n[1-2]", None, "n1")
    local = start.this_machine(start.Policy())
    start.remember_failed(local, ["n2"])
    assert chosen("n[1-2]") == ["n1"]


def test_ten_thousand_failed_nodes_are_selected(failed):
    assert len(failed("n[00001-10000]", None, "n[00001-10000]")) == 10_000
    assert len(chosen("n[00001-10000]")) == 10_000


def test_a_deploy_that_only_looks_writes_nothing_anywhere(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run({"n1": AWAY}, "deploy", "--check", "--only", "ptrace")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("audit", "--only", "ptrace"),
        ("ready", "--only", "ptrace", "--budget", "5"),
        ("deploy", "--yes", "--only", "ptrace"),
        ("learn",),
        ("env",),
        ("tail", "/log/*"),
        ("stacks",),
        ("stacks", "--check"),
        ("cores",),
        ("incident", "--job", "7", "-o", "kept"),
    ],
    ids=" ".join,
)
def test_every_command_keeps_the_nodes_that_it_could_not_ask(words, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run({"n1": AWAY, "n2": AWAY}, *words)
    assert chosen("n[1-3]") == ["n1", "n2"]
