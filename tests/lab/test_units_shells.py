"""Scripts of ours in the shells of nodes and of their users: what tests/unit asks of `sh`."""

import inspect
import os
import shutil
import subprocess

import pytest

from nodeready.core import shell
from nodeready.runs.ready.environment import question, read_installed
from tests.builders.environments import ENVIRONMENTS
from tests.unit.reports.test_exports import evaluate
from tests.unit.subjects import test_gate, test_iommu, test_pdsh, test_snapshot
from tests.unit.transport.test_clush import run

answer = test_snapshot.answer
for module in (test_gate, test_iommu, test_pdsh, test_snapshot):
    for name, function in vars(module).items():
        if name.startswith("test_") and {"posix_sh", "answer"} & {
            *inspect.signature(function).parameters
        }:
            globals()[name] = function


@pytest.fixture(params=["dash", "bash --posix", "busybox sh"])
def posix_sh(request: pytest.FixtureRequest) -> list[str]:
    return request.param.split()


SHELLS = [("dash",), ("busybox", "sh"), ("bash",), ("fish",), ("tcsh",)]
by_shell = pytest.mark.parametrize("login", SHELLS, ids=lambda words: words[0])


@by_shell
@pytest.mark.parametrize("payload", [None, "", "x" * 200_000 + "\n"], ids=range(3))
def test_a_script_and_what_follows_it_arrive_whole(login, payload):
    script = "printf '%s|' \"a 'b' \\\\\" é; cat" + ("" if payload is None else " <&3; cat <&3")
    line, stdin = shell.command(script, 30, "nodeready:test", payload)
    more = "" if payload is None else "and more\n"
    done = subprocess.run(
        [*login, "-c", line], input=(stdin + more).encode(), capture_output=True, check=True
    )
    assert done.stdout.decode() == f"a 'b' \\|é|{payload or ''}{more}"


@pytest.mark.parametrize("login", SHELLS[:3], ids=lambda words: words[0])
def test_a_framed_command_of_clustershells_brings_its_output_and_status(login):
    script = r"printf '\001\r\n\377'; echo two >&2; exit 3"
    answer = run(script, login=(shutil.which(login[0]), *login[1:]))
    assert answer.gap is None
    assert (answer.stdout, answer.stderr, answer.rc) == ("\x01\r\n\udcff", "two\n", 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_runs_no_python_of_another_user(tmp_path):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    path.chmod(0o755)
    os.chown(path, 65534, 65534)
    done = subprocess.run(
        ["sh", "-c", question(str(path), "N")], capture_output=True, text=True, check=True
    )
    installed = read_installed(done.stdout, "N")
    assert installed.reason == f"root does not run {path}, which is not root's"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh", "zsh"])
def test_a_shell_takes_the_values_and_nothing_else(name, shell, tmp_path):
    words = shell.split()
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed")
    evaluate(words, name, tmp_path)
