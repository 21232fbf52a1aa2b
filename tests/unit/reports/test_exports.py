"""Lines for a shell to evaluate."""

import subprocess
from pathlib import Path

import pytest

from nodeready.reports import env_script, json_report
from nodeready.runs.ready.job_env import Environment, JobVariable
from tests.builders.environments import ENVIRONMENTS

EACH = pytest.mark.parametrize("name", ENVIRONMENTS)


def text(environment: Environment) -> str:
    return "".join(env_script.shell_lines(environment))


def evaluate(shell: list[str], name: str, directory: Path) -> None:
    """The shell takes the values of this environment, and runs nothing."""
    environment = ENVIRONMENTS[name]
    done = subprocess.run(
        [*shell, "-c", 'eval "$1"; echo "status $?"; env -0', "sh", text(environment)],
        capture_output=True,
        text=True,
        cwd=directory,
        env={"PATH": "/usr/bin:/bin"},
        check=True,
    )
    status, _, rest = done.stdout.partition("\n")
    assert (status, done.stderr) == ("status 0", "")
    values = dict(row.split("=", 1) for row in rest.split("\0") if row)
    for variable in environment.variables:
        assert values.get(variable.name) == variable.value
    assert not list(directory.iterdir())


@EACH
def test_sh_takes_the_values_and_nothing_else(name, tmp_path):
    evaluate(["sh"], name, tmp_path)


@EACH
def test_comments_fit_a_terminal_and_cannot_steer_it(name):
    shown = text(ENVIRONMENTS[name])
    for line in shown.split("\n"):
        assert line[:1] in ("", "#") or line.startswith("export "), line
        assert len(line) <= 80, line
    for form in (shown, "".join(json_report.render(ENVIRONMENTS[name]))):
        assert not {c for c in form if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n"}
        assert "\u2028" not in form


def test_what_needs_attention_is_a_line_each():
    good, unknown, differs = (
        list(env_script.troubles(ENVIRONMENTS[name])) for name in ("good", "unknown", "differs")
    )
    assert (good, unknown) == ([], ["MASTER_PORT is unknown on gpu003: timed out"])
    words = "is not set: the nodes differ: "
    assert differs == [
        f"NCCL_SOCKET_IFNAME {words}=eth0 on gpu[001-063]; =eth1 on gpu064",
        f"GLOO_SOCKET_IFNAME {words}eth0 on gpu[001-063]; eth1 on gpu064",
        f"OMPI_MCA_btl_tcp_if_include {words}eth0 on gpu[001-063]; eth1 on gpu064",
        f"NCCL_IB_HCA {words}=mlx5_0,mlx5_1 on gpu[001-063]; nothing on gpu064",
    ]


def test_a_value_that_zsh_would_expand_is_quoted():
    """Of a bare ``=eth0``, zsh would look for a command eth0."""
    variable = JobVariable("A", "=eth0", "why", True)
    assert "export A='=eth0'\n" in text(Environment("", ("n",), (), (variable,)))
