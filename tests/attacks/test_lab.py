"""A lab is root's: other users of this machine get nothing of its nodes.

A node's users are users of this machine by their numbers, and root of a node is close to root of
this machine. mallory has the number of the nodes' user, who may become root there.
"""

import os
import subprocess

from nodeready.lab import image
from nodeready.lab.image import free_id, without_password
from tests.attacks.conftest import become


def here(uid: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A program with a user's rights, on this machine. setpriv itself still has root's."""
    return subprocess.run(
        [*become(uid), "sh", "-c", '"$@"', "sh", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_nobody_here_reads_the_key_or_runs_a_node_s_setuid_program(lab, fresh_node):
    mallory = int(fresh_node.run("id -u ml").stdout)
    node = fresh_node
    node.run("cp /usr/bin/id /tmp/root; chmod 4755 /tmp/root")
    assert node.run("/tmp/root -u", user="ml").stdout == "0\n"
    # Where they lie, as root of this machine sees it.
    fs = node.lab.directory / "fs"
    keys = [*fs.glob("base/home/ml/.ssh/id_ed25519"), node.lab.directory / "ssh" / "id_ed25519"]
    (program,) = fs.glob(f"nodes/{node.name}/*/upper0/tmp/root")
    assert len(keys) == 2
    assert program.stat().st_mode & 0o4001 == 0o4001
    assert here(0, program, "-u").stdout == "0\n"
    for path in keys:
        assert here(mallory, "cat", path).returncode != 0, path
    assert here(mallory, program, "-u").stdout == ""
    assert here(mallory, "ls", fs).stdout == ""


def test_nobody_here_has_the_number_of_a_node_s_user(monkeypatch):
    assert free_id() == image.USER_IDS.start
    monkeypatch.setattr(image.pwd, "getpwuid", lambda number: (number != 2001) or {}[number])
    monkeypatch.setattr(image.grp, "getgrgid", lambda number: {}[number])
    assert free_id() == 2001
    monkeypatch.setattr(image.pwd, "getpwuid", lambda number: (number < 2003) or {}[number])
    monkeypatch.setattr(image.grp, "getgrgid", lambda number: (number < 2005) or {}[number])
    assert free_id() == 2005


def test_no_password_of_this_machine_opens_a_node(fresh_node, lab):
    kept, hashed = "root:!:1:0:99999:7:::", "mallory:$y$j9T$salt$hash:1:0:99999:7:::"
    shadow = [without_password(line) for line in (kept, hashed, "guest::1:0:99999:7:::")]
    assert shadow == [kept, "mallory:*:1:0:99999:7:::", "guest:*:1:0:99999:7:::"]
    fields = [line.split(":")[1] for line in fresh_node.read("/etc/shadow").splitlines()]
    assert all(field[:1] in ("!", "*") for field in fields)
    assert os.stat(fresh_node.lab.directory / "ssh").st_mode & 0o022 == 0
