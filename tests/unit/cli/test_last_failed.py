"""`--limit @last-failed`: the nodes that a run keeps, and those that a later run selects."""

import pytest

from nodeready.cli.screen import Screen
from nodeready.core.exit_codes import Refused
from nodeready.fleet.inventory.nodeset import expand
from nodeready.runs import targets
from tests.cases import cases, read_table
from tests.fake import Fake
from tests.unit.commands import AWAY


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "nodeready" / "last-failed"


def fail(words: str, names: str, limit: str | None = None, **options: object) -> None:
    loaded, _, policies = targets.load_targets(words, targets.TargetOptions(limit=limit), print)
    nodes = targets.Targets(Fake(dict.fromkeys(policies, AWAY)), policies, loaded)
    nodes.remember_failed(expand(names), **options)


def chosen(words: str, limit: str = "@last-failed", *, quiet: bool = False) -> list[str]:
    options = targets.TargetOptions(limit=limit)
    return [h.name for h in targets.load_targets(words, options, Screen(quiet=quiet).note)[1]]


@pytest.mark.parametrize("case", cases(__file__, "data/last_failed.json"))
def test_the_next_run_selects_the_failed_nodes(case, tmp_path, state, capsys):
    """Each step: a run (`failed`), the names that are `kept`, and the nodes that are `chosen`."""
    for step in case["steps"]:
        if "file" in step:
            (tmp_path / step["of"]).write_text(step["file"] + "\n")
        if "failed" in step:
            options = {key: step[key] for key in ("lost", "reached", "limit") if key in step}
            fail(step["of"], step["failed"], **options)
            names = [row.partition("\t")[0] for row in state.read_text().splitlines()]
            assert names == step["kept"]
        for limit, names in step.get("chosen", {}).items():
            capsys.readouterr()
            assert chosen(step["of"], limit) == names
            warning = f"nodeready: --limit @last-failed: {step.get('warning')}\n"
            assert capsys.readouterr().err == (warning if "warning" in step else "")
            assert chosen(step["of"], limit, quiet=True) == names
            assert capsys.readouterr().err == ""
        if "refused" in step:
            with pytest.raises(Refused, match=step["refused"]):
                chosen(step["of"])


def test_this_machine_is_no_node_to_ask_again():
    fail("n[1-2]", "n1")
    targets.local_targets(targets.Policy()).remember_failed(["n2"])
    assert chosen("n[1-2]") == ["n1"]


def test_a_deploy_that_only_looks_writes_nothing(run, tmp_path):
    run({"n1": AWAY}, "deploy", "--check", "--only", "ptrace")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    read_table(__file__, "every_command_keeps_the_nodes_that_gave_no_answer"),
    ids=" ".join,
)
def test_every_command_keeps_the_nodes_that_gave_no_answer(words, run):
    run({"n1": AWAY, "n2": AWAY}, *words)
    assert chosen("n[1-3]") == ["n1", "n2"]
