"""Defaults from files: the user's over the system's, and a mistake in one is named with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nodeready.cli import options
from nodeready.cli.options import Refused
from nodeready.exit_codes import USAGE


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the system's and the user's file."""
    monkeypatch.setattr(options, "SYSTEM", tmp_path / "system.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def both(system: str, user: str) -> None:
        (tmp_path / "system.toml").write_text(system)
        (tmp_path / "nodeready").mkdir()
        options.user_file().write_text(user)

    return both


def test_the_users_file_wins_over_the_systems(write):
    write('sudo = true\nlimit = "a"\n[deploy]\ndiff = true\n', 'limit = "b"\n')
    found = options.defaults()
    assert found["deploy"] == {"sudo": True, "limit": "b", "diff": True}
    assert found["audit"] == {"sudo": True, "limit": "b"}


def test_a_list_is_words_and_a_dash_is_an_underscore(write):
    write("", '[deploy]\nonly = ["ptrace", "limits"]\nssh-user = "ml"\n')
    assert options.defaults()["deploy"] == {"only": "ptrace,limits", "ssh_user": "ml"}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('env = ["NCCL_IB_HCA=mlx5_0,mlx5_1", "A=1"]', ("NCCL_IB_HCA=mlx5_0,mlx5_1", "A=1")),
        ('env = "A=1"', ("A=1",)),
    ],
)
def test_what_may_be_given_several_times_is_a_list_whose_words_may_have_commas(
    write, text, values
):
    write("", f"[smoke]\n{text}\n")
    assert options.defaults()["smoke"] == {"env": values}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('lmit = "a"', "unknown option lmit: did you mean limit?"),
        ("yes = true", "unknown option yes"),
        ("[depoly]\nyes = true", "[depoly] is no command of nodeready"),
        ("limit = ", "Invalid value"),
    ],
)
def test_a_mistake_is_named_with_its_file(write, text, words):
    write("", text)
    with pytest.raises(Refused) as refused:
        options.defaults()
    assert refused.value.exit_code == USAGE
    assert str(options.user_file()) in refused.value.message
    assert words in refused.value.message


#: In a process of its own: a command that talks to nodes makes sockets and threads gevent's.
_OPTIONS = """
import sys
import nodeready.cli
command = nodeready.cli.cli.get_command(None, sys.argv[1])
print(*(p.name for p in command.params if p.param_type_name == "option"))
"""


@pytest.mark.parametrize("name", options.OPTIONS)
def test_every_option_may_stand_in_a_file(name):
    shown = subprocess.check_output([sys.executable, "-c", _OPTIONS, name], text=True)
    assert set(options.OPTIONS[name]) == set(shown.split()) - {"help"}
