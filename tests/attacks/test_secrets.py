"""No other user reads a secret or what a job works on: not in a process list, not in a file."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeready.lab.processes import nsenter
from tests.attacks.conftest import become
from tests.command import wait_for
from tests.helpers import project
from tests.lab.targets import WAIT, WATCH, start

OTHER = 4001


@contextmanager
def watched(mallory, secret: str) -> Iterator[list[str]]:
    """What mallory on her node and another user of this machine saw, when it is over."""
    here, there = mallory.node.lab.directory / f"seen-{secret}", f"{mallory.home}/seen"
    here.touch()
    os.chown(here, OTHER, OTHER)
    found: list[str] = []
    with open(here, "ab") as file:
        other = subprocess.Popen(
            [*become(OTHER), sys.executable, "-ISc", WATCH, "/dev/stdout"], stdout=file
        )
    mallory.node.write(there, "")
    mallory.node.run(f"chown mallory {there}")
    hers = mallory.python(WATCH, there)
    try:
        # Either would see a command line of root's.
        mark = f"mark-{secrets.token_hex(8)}"
        for place, seen in (
            ([], lambda: mark.encode() in here.read_bytes()),
            (nsenter(mallory.node.pid), lambda: mark in mallory.node.read(there)),
        ):
            argv = [*place, "sh", "-c", f"sleep 60; : {mark}"]
            with subprocess.Popen(argv, start_new_session=True) as shown:
                wait_for(seen)
                os.killpg(shown.pid, 9)
        yield found
        time.sleep(0.2)
        # Both have looked all the time.
        assert other.poll() is None
        assert hers.poll() is None
    finally:
        for process in (other, hers):
            process.kill()
            process.wait()
        text = here.read_text(errors="replace") + mallory.node.read(there)
        found += [line for line in text.splitlines() if secret in line]
        here.unlink()


@pytest.fixture
def password(mallory) -> str:
    """That of ml, who may do everything by sudo on mallory's node."""
    password = f"pw{secrets.token_hex(8)}"
    mallory.node.enter(["chpasswd"], input=f"ml:{password}\n")
    mallory.node.write("/etc/sudoers.d/ml", "ml ALL=(ALL:ALL) ALL\n", mode=0o440)
    return password


@pytest.mark.parametrize("way", ["nodeready", pytest.param("pyinfra", marks=pytest.mark.nightly)])
def test_no_user_sees_the_sudo_password(mallory, fleet, tool, password, way):
    """Of the inventory, while every step runs, by either way in; every file is then in place."""
    node = mallory.node
    node.run("rm -f /usr/local/bin/py-spy")
    more = {node.name: {"ssh_user": "ml", "_sudo": True, "_sudo_password": password}}
    inventory = fleet([node], more, packages=(), gate=True)
    with watched(mallory, password) as seen:
        if way == "nodeready":
            done = tool("deploy", inventory, "--yes")
            assert done.status in {0, 3}, done
        else:
            project(
                Path(sys.executable).with_name("pyinfra"), inventory, "deploy.py", "-y", status=0
            )
    assert seen == []
    assert node.run("sysctl -n kernel.yama.ptrace_scope").stdout == "0\n"
    assert node.run("py-spy --version").stdout
    # Nor in a file that is left.
    found = node.enter(["grep", "-rlF", password, "/etc", "/tmp", "/run", "/home", "/usr/local"],
                       check=False)  # fmt: skip
    assert [line for line in found.stdout.splitlines() if line != f"{mallory.home}/seen"] == []


def _modes(place: Path) -> dict[str, str]:
    """Every file and directory below, with the rights of others than its owner."""
    said = subprocess.run(
        ["find", str(place), "-printf", "%P %m\\n"], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.rpartition(" ") for line in said.splitlines())
    return {path: mode for path, _, mode in rows}


def test_what_a_job_works_on_is_not_for_others(mallory, fleet, tool, tmp_path):
    """The copy of a log that only its owner may read, a job's stacks, what failed last."""
    node = mallory.node
    node.run("umask 077; echo 'the key is k3y' >/root/train.log")
    inventory = fleet([node], {"gone": {"ssh_hostname": "192.0.2.1", "ssh_connect_timeout": 1}})
    place = tmp_path / "kept"
    place.mkdir(mode=0o755)
    pid = start(node, "python3", "-c", WAIT, RANK="0")
    old = os.umask(0o022)
    try:
        tool("tail", inventory, "/root/train.log", "-o", place / "tail.txt")
        tool("stacks", inventory, "--pid", pid, "-o", place / "stacks")
        tool("audit", inventory, "--format", "prometheus", "-o", place / "audit.prom")
    finally:
        os.umask(old)
    assert "k3y" in (place / "tail.txt").read_text()
    assert f'"pid":{pid},' in (place / "stacks" / "stacks.json").read_text().replace(" ", "")
    modes = _modes(place)
    # What a scraper of another user reads.
    assert modes.pop("audit.prom") == "644"
    assert modes.pop("") == "755"
    assert {path: mode for path, mode in modes.items() if mode not in ("600", "700")} == {}
    kept = _modes(tool.home / ".local" / "state")
    assert "nodeready/last-failed" in kept
    assert [f"{path} {mode}" for path, mode in kept.items()
            if path.startswith("nodeready") and mode not in ("600", "700")] == []  # fmt: skip
