"""Options that are not on the command line: from files and from variables."""

import os
import re

import click
import pytest

from nodeready.agent.gate import here
from nodeready.cli import cli
from nodeready.cli.audit import LearnWords
from nodeready.cli.options import FORMS, KEY, Option, Span, defaults_of, find_inventory
from nodeready.core.exit_codes import USAGE, Refused
from nodeready.core.policy import AUDIT
from nodeready.runs import user_files
from nodeready.runs.targets import local_policy, select_targets
from tests.cases import read_table, with_table

# --- From the system's file and the user's.


@pytest.fixture
def write(tmp_path, monkeypatch):
    """``write(system, user)``: write both files."""
    monkeypatch.setattr(user_files, "SYSTEM", tmp_path / "system.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def both(system: str, user: str) -> None:
        (tmp_path / "system.toml").write_text(system)
        (tmp_path / "nodeready").mkdir()
        user_files.user_file().write_text(user)

    return both


def defaults(name: str) -> dict[str, object]:
    command = cli.get_command(click.Context(cli), name)
    return defaults_of(command, cli.list_commands(click.Context(cli)))


def test_the_file_of_the_user_wins_over_that_of_the_system(write):
    write('sudo = true\nlimit = "a"\n[deploy]\ndiff = true\n', 'limit = "b"\n')
    assert defaults("deploy") == {"sudo": True, "limit": "b", "diff": True}
    assert defaults("audit") == {"sudo": True, "limit": "b"}
    assert defaults("bundle") == {"limit": "b"}


@with_table("text, command, values")
def test_a_value_is_that_of_its_option(write, text, command, values):
    write("", f"[{command}]\n{text}\n")
    assert defaults(command) == values


@with_table("text, words")
def test_a_mistake_is_named_with_its_file(write, text, words):
    write("", text)
    with pytest.raises(Refused) as refused:
        defaults("deploy")
    assert refused.value.exit_code == USAGE
    assert str(user_files.user_file()) in refused.value.message
    assert words in refused.value.message


@pytest.fixture
def variables(monkeypatch, tmp_path):
    """``variables(FORMAT="json")``: set NODEREADY_FORMAT, and no other variable of ours."""
    for name in [name for name in os.environ if name.startswith("NODEREADY")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()

    def put(**values: str) -> None:
        for name, text in values.items():
            monkeypatch.setenv(f"NODEREADY_{name}", text)

    return put


# --- The inventory of a command line that names none.


#: The variable, the key of config.toml, the name of a file -> the inventory, and its source.
INVENTORIES = [
    (("@lab", "gpu[001-004]", "inventory.py"), "@lab", "NODEREADY_INVENTORY"),
    (("", "gpu[001-004]", "inventory.py"), "gpu[001-004]", "config.toml"),
    (("", "", "inventory.py"), "inventory.py", "of this directory"),
    (("", "", "x.py"), None, ""),
]


@pytest.mark.parametrize("row", INVENTORIES)
def test_the_default_inventory_is_named(row, variables, tmp_path, capsys):
    (variable, config, file), inventory, source = row
    variables(INVENTORY=variable)
    (tmp_path / file).write_text("")
    options = LearnWords()
    with click.Context(cli, default_map={KEY: config} if config else {}).scope():
        assert find_inventory("gpu001", options) == "gpu001"
        assert find_inventory(None, options, elsewhere=True) is None
        assert capsys.readouterr().err == ""
        assert find_inventory(None, options) == inventory
        line = f"nodeready: inventory: {inventory} ({source})\n" if inventory else ""
        assert capsys.readouterr() == ("", line)
        assert find_inventory(None, LearnWords(quiet=True)) == inventory
        assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("variables")
def test_an_inventory_of_another_user_is_not_taken_unnamed(monkeypatch, tmp_path):
    file = tmp_path / "inventory.py"
    file.write_text("")

    def refuse() -> None:
        with click.Context(cli).scope(), pytest.raises(Refused, match="is not taken by"):
            find_inventory(None, LearnWords())

    file.chmod(0o666)
    refuse()
    file.chmod(0o644)
    if os.getuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refuse()


def test_the_gate_keeps_the_policy_of_the_inventory():
    """Whatever the command line sets for this run: `gate.policy` does not fail by it."""
    options = LearnWords()
    targets = select_targets("gpu001", options, {"gpu_count": 8}, job=None, tell=print).at(AUDIT)
    counts = targets.policies["gpu001"].gpu_count, targets.gate_policies["gpu001"].gpu_count
    assert counts == (8, None)


@pytest.mark.usefixtures("variables")
def test_this_machine_has_the_policy_of_the_current_directory(monkeypatch, tmp_path):
    """As @local has it; without one, that of the last deploy."""
    monkeypatch.setattr(here, "PATH", str(tmp_path / "policy.json"))
    (tmp_path / "policy.json").write_text('{"ptrace_scope": 2}')
    assert local_policy(LearnWords(), print).ptrace_scope == 2
    (tmp_path / "group_data").mkdir()
    (tmp_path / "group_data/all.py").write_text("ptrace_scope = 1\n")
    (tmp_path / "checks.d").mkdir()
    (tmp_path / "checks.d/a.toml").write_text('[[check]]\nid = "a"\nrun = "true"\nstatus = 0\n')
    policy = local_policy(LearnWords(), print)
    assert (policy.ptrace_scope, len(policy.site_checks)) == (1, 1)
    (tmp_path / "checks.d").chmod(0o777)
    with pytest.raises(Refused, match=r"checks\.d is not taken by"):
        local_policy(LearnWords(), print)


def test_words_that_name_other_nodes_take_no_default(tool, tmp_path):
    """A command that used the default would fail because of it."""
    (tmp_path / "inventory.py").write_text("1/0")
    for words in (("tail", "--local", "/nosuch"), ("stacks", "--from", "."), ("bundle",)):
        assert "inventory.py" not in tool(*words, cwd=tmp_path).err
    for words in (("tail", "/nosuch"), ("deploy", "--check"), ("watch", "--job", "1")):
        done = tool(*words, cwd=tmp_path)
        assert "inventory.py:1: ZeroDivisionError" in done.err, done


# --- From variables: the command's own, and a general one where the command has such a value.

_ROOT = click.Context(cli, info_name="nodeready", **cli.context_settings)
COMMANDS = {name: cli.get_command(_ROOT, name) for name in cli.list_commands(_ROOT)}
OPTIONS = [(name, option) for name, command in COMMANDS.items() for option in command.params]
COMMAND_OPTIONS = [pair for pair in OPTIONS if isinstance(pair[1], Option)]


def test_every_option_that_takes_seconds_takes_a_span_of_time():
    spans = {option for _, option in COMMAND_OPTIONS if isinstance(option.type, Span)}
    named = {option for _, option in COMMAND_OPTIONS if option.metavar in ("S", "SPAN", "TIME")}
    in_help = {
        option
        for _, option in COMMAND_OPTIONS
        if not option.is_flag and re.search("second|minute|[Tt]ime ", option.help or "")
    }
    assert named | in_help <= spans
    for option in spans:
        values = [option.type.convert(words, option, None) for words in ("1m", "60s", "60", 60)]
        assert values == [60, 60, 60, 60], option.name
    assert {option.name for option in spans} == {
        *("timeout", "budget", "wait_s", "every", "interval", "confirm", "newer_s", "slow"),
        *("syscalls", "wait"),
    }


def test_a_span_is_within_the_options_range():
    option = next(option for _, option in COMMAND_OPTIONS if option.name == "budget")
    for words, reason in read_table(__file__, "a_span_is_within_the_options_range"):
        with pytest.raises(click.BadParameter, match=reason):
            option.type.convert(words, option, None)


def value(name: str, option: str) -> object:
    """The value of an option that is not on the command line."""
    words = {"tail": ["x", "/x"]}.get(name, ["x"] * (name in ("audit", "ready", "env", "learn")))
    with COMMANDS[name].make_context(name, words, _ROOT) as context:
        return context.params[option]


@with_table("option, word, values")
def test_a_general_variable_counts_where_the_command_has_such_a_value(
    variables, option, word, values
):
    variables(**{option.upper(): word})
    assert {name: value(name, option) for name in values} == values


@pytest.mark.parametrize("name", ["audit", "cores", "env", "stacks", "tail"])
def test_the_variable_of_the_command_beats_the_general_one(variables, name):
    own = {f"{name.upper()}_FORMAT": "json", f"{name.upper()}_OUTPUT": "mine"}
    variables(FORMAT="table", OUTPUT="report", **own)
    output = "mine" if name in ("cores", "stacks") else ("mine",)
    assert (value(name, "format"), value(name, "output")) == ("json", output)


@with_table("name, variable, word")
def test_a_value_that_no_command_has_is_a_mistake(variables, name, variable, word):
    variables(**{variable: word})
    with pytest.raises(click.BadParameter, match=f"'{word}' is not one of") as mistake:
        value(name, "format")
    assert f"NODEREADY_{variable}" in mistake.value.format_message() or variable == "FORMAT"


@pytest.mark.parametrize("name", ["audit", "deploy", "bundle", "ready"])
def test_the_values_of_a_repeated_selection_add_up(name):
    words = ["x", "-l", "gpu001", "--limit", "gpu[003,007]"]
    selects = [] if name == "bundle" else ["--only", "limits", "--only", "ptrace,pdsh"]
    with COMMANDS[name].make_context(name, [*words, *selects], _ROOT) as context:
        assert context.params["limit"] == "gpu001,gpu[003,007]"
        assert not selects or context.params["only"] == "limits,ptrace,pdsh"


def test_every_option_is_in_the_help_once(tool):
    for name, command in COMMANDS.items():
        text = tool(name, "--help").out.partition("\nOptions:")[2]
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                shown = re.findall(
                    rf"^  (?:-\w, )?{re.escape(param.opts[-1])}(?![\w-])", text, re.M
                )
                assert len(shown) == 1, (name, param.name)


def test_every_format_is_known():
    choices = [p.type.choices for _, p in COMMAND_OPTIONS if p.name == "format"]
    assert {*FORMS} == {form for forms in choices for form in forms}


def test_no_two_options_have_the_same_variable_of_their_own():
    own = [option.variables[0] for _, option in COMMAND_OPTIONS]
    general = {name for _, option in COMMAND_OPTIONS for name in option.variables[1:]}
    assert len({*own}) == len(own)
    assert not general & {*own}
    for name, option in COMMAND_OPTIONS:
        assert option.variables[0].startswith(f"NODEREADY_{name.upper()}_")


def test_options_that_share_a_variable_take_the_same_words():
    """Or declare which of the words count."""
    kinds: dict[str, set[str]] = {}
    for _, option in COMMAND_OPTIONS:
        for name in option.variables[1:]:
            if option.takes is None:
                kinds.setdefault(name, set()).add(repr(option.type.to_info_dict()))
    assert [name for name, types in kinds.items() if len(types) > 1] == []
