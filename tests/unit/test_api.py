"""`nodeready.audit`, `.ready`, `.deploy`, `.stacks`: the commands as functions."""

import inspect
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nodeready
from nodeready import api
from nodeready.cli import cli
from nodeready.runs.options import StacksOptions
from tests.cases import with_table
from tests.command import wait_for
from tests.paths import ROOT

COMMANDS = ("audit", "ready", "deploy", "stacks")
#: Options of a command that choose what is shown or asked, or how often: a function does not.
NOT_IN_PYTHON = {
    *("format", "output", "fail_on", "hostfile_out", "hostfile_format", "diff", "yes"),
    *("color", "quiet", "verbose", "help", "every", "wait_s"),
}


def run(text: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=directory,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(directory)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_function_has_the_options_of_its_command(command):
    function = getattr(nodeready, command)
    watch = {*inspect.signature(nodeready.watch_audit).parameters}
    assert command != "audit" or watch == {*inspect.signature(function).parameters, "every"}
    names = {
        {"locals_": "locals"}.get(name, name) for name in inspect.signature(function).parameters
    }
    options = {str(param.name) for param in cli.get_command(None, command).params}
    left_out = NOT_IN_PYTHON | ({"check", "attach"} if command == "stacks" else set())
    # `stacks -o DIR` keeps traces; of the other commands, it keeps a report.
    left_out -= {"output"} if command == "stacks" else set()
    assert names == options - left_out


@pytest.mark.parametrize(("values", "words"), [
    ({"inventory": "-x.py", "only": None, "local": False}, "-- -x.py"),
    ({"limit": ["ptrace", "gpus.*"], "check": True}, "--limit=ptrace,gpus.* --check"),
    ({"limit": "-q", "samples": 0, "interval": 0.5}, "--limit=-q --samples=0 --interval=0.5"),
    ({"pids": (1, 2), "locals_": True, "source": Path("d")}, "--pid=1 --pid=2 --locals --from=d"),
    ({"timeout": "5m", "interval": 20}, "--timeout=5m --interval=20"),
    ({"ssh_user": "a b"}, "--ssh-user=a b"),
])  # fmt: skip
def test_a_value_is_never_an_option(values, words):
    inventory = values.pop("inventory", None)
    given = api._words("stacks", StacksOptions, inventory, values)
    assert " ".join(given) == f"stacks --format=json {words}"


def test_a_document_comes_and_the_callers_process_stays_as_it_was(tmp_path):
    # Another file of the caller's, which is no module of the command's.
    (tmp_path / "click.py").write_text("1/0\n")
    text = (
        "import sys, threading, nodeready\n"
        "audit = nodeready.audit('@local', only=['host', 'ptrace'])\n"
        "deploy = nodeready.deploy('@local', only='ptrace', check=True)\n"
        "assert not {'gevent', 'paramiko', 'click'} & {*sys.modules}\n"
        "(node,) = audit.nodes\n"
        "assert node.facts['host']['boot_id'] and {*node.facts} == {'host', 'ptrace'}\n"
        "assert {r.check.split('.')[0] for r in node.results} == {'host', 'ptrace'}\n"
        "assert deploy.check and deploy.nodes[0].name == node.name == '@local'\n"
    )
    done = run(text, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@with_table("call, why")
def test_an_error_has_the_message_and_the_exit_code_of_the_command(
    call, why, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nodeready.Error, match=re.escape(why)) as caught:
        eval(f"nodeready.{call}", {"nodeready": nodeready})
    assert caught.value.exit_code == 2
    assert not str(caught.value).startswith("nodeready:")


def test_ctrl_c_ends_the_caller_and_the_command(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('pid').write_text(f'{os.getpid()}\\n')\n"
        "time.sleep(600)\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", "import nodeready; nodeready.audit('slow.py')"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid_file = tmp_path / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    caller.send_signal(signal.SIGINT)
    _, complaints = caller.communicate(timeout=60)
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert not Path(f"/proc/{int(pid_file.read_text())}").exists()


def test_a_watch_gives_an_audit_each_time_until_it_is_closed(tmp_path):
    text = (
        "import os, nodeready\n"
        "looks = nodeready.watch_audit('@local', every=1, only='host,ptrace')\n"
        "first, second = next(looks), next(looks)\n"
        "assert first.started < second.started and first.complete\n"
        "assert [r.check for r in first.nodes[0].results] == [\n"
        "    r.check for r in second.nodes[0].results\n"
        "] and first.nodes[0].status == second.nodes[0].status\n"
        "looks.close()\n"
        "try:\n"
        "    os.wait()\n"
        "except ChildProcessError:\n"
        "    print('ended')\n"
        "next(nodeready.watch_audit('@local', every=1, recorded='/tmp'))\n"
    )
    done = run(text, tmp_path)
    assert done.stdout == "ended\n"
    assert "nodeready.api.Error: --watch: asks the nodes; remove --recorded" in done.stderr
