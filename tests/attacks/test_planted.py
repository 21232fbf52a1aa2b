"""What another user of the control machine has put where root's commands write or read.

This machine is the control machine; she is a user without a name. No kernel setting protects root
here: the directory that both use is not sticky.
"""

import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeready.core.policy import Policy
from nodeready.runs.deploy import py_spy_binary
from tests.attacks.conftest import become, reached_by_all
from tests.lab.rows import rows
from tests.paths import ROOT

HER = 4001


@pytest.fixture
def shared() -> Iterator[Path]:
    with reached_by_all(0o777) as place:
        yield place


def hers(path: Path, target: object) -> None:
    subprocess.run([*become(HER), "ln", "-s", str(target), str(path)], check=True)


DUMP = """\
Process 7: python3 train.py
Python v3.11.2 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    wait (train.py:3)
"""


@pytest.mark.parametrize("where", rows(["job/new", "job"], "job/new"))
def test_no_directory_is_made_where_her_link_leads(where, shared, tool, tmp_path):
    (tool.home / "dump.txt").write_text(DUMP)
    roots = tmp_path / "roots"
    roots.mkdir()
    hers(shared / "job", roots)
    done = tool("stacks", "--from", "dump.txt", "-o", shared / where)
    assert list(roots.iterdir()) == []
    assert (done.status, len(done.lines)) == (2, 1), done
    assert f"{shared}/job: a link of uid {HER}: not followed" in done.err, done


def test_setup_writes_over_nothing_of_root_s(shared):
    """Its predictable names in /tmp are hers to take: it has none."""
    bin, checkout, victim = shared / "bin", shared / "checkout", shared / "victim"
    for path in (bin, checkout / "scripts", checkout / ".venv"):
        path.mkdir(parents=True)
    for name in ("dirname", "id", "cmp", "cat", "rm", "cp", "env", "grep", "sort", "chmod"):
        (bin / name).symlink_to(shutil.which(name) or name)
    said = "#!/bin/sh\ncase $* in *install*) echo overwritten; exit 100 ;; esac\n"
    (bin / "apt-get").write_text(said)
    (bin / "apt-get").chmod(0o755)
    shutil.copy(ROOT / "scripts" / "setup.sh", checkout / "scripts")
    victim.write_text("root's")
    for name in ("nodeready-setup.log", "setup.log", "nodeready.log"):
        hers(shared / name, "/tmp/victim")
    setup = "cd /tmp/checkout && exec /bin/sh scripts/setup.sh demo"
    script = f"/usr/bin/mount --bind {shared} /tmp && {setup}"
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    done = subprocess.run(
        [str(shutil.which("unshare")), "--mount", "/bin/sh", "-c", script],
        env={"PATH": "/tmp/bin:/nowhere", "PYTHON": python or "python3", "HOME": "/root"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert victim.read_text() == "root's", done
    assert done.returncode == 1, done
    assert "overwritten" in done.stderr, done
    assert sorted(path.name for path in shared.iterdir() if not path.is_symlink()) == [
        "bin", "checkout", "victim",
    ]  # fmt: skip


#: A version whose sha256 nobody knows: what is found is as good as where it was found.
VERSION = "0.3.99"


@pytest.mark.parametrize("where", rows(["cache", "wheels", "TMPDIR"], "cache"))
def test_no_py_spy_of_hers_goes_to_the_nodes(where, shared, fresh_node, fleet, tool):
    machine = fresh_node.run("uname -m").stdout.strip()
    content = py_spy_binary.binary(Policy().py_spy_version, machine)
    kept = tool.home / ".cache" / "nodeready" / "py-spy" / VERSION / machine
    wheel = shared / f"py_spy-{VERSION}-py2.py3-none-manylinux_2_17_{machine}.whl"
    env = {"PIP_NO_INDEX": "1"}
    if where == "cache":
        kept.parent.mkdir(parents=True)
        kept.write_bytes(content)
        kept.chmod(0o666)
    elif where == "wheels":
        env["NODEREADY_PY_SPY_DIR"] = str(shared)
    else:
        # pip is slow enough for whoever owns the directory in which it works.
        env = {"TMPDIR": str(shared), "PIP_FIND_LINKS": str(tool.home), "PIP_NO_INDEX": "1"}
        wheel = tool.home / wheel.name
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(f"py_spy-{VERSION}.data/scripts/py-spy", content)
    inventory = fleet([fresh_node], packages=(), py_spy_version=VERSION)
    done = tool("deploy", inventory, "--yes", "--only", "debug_tools", env=env)
    # What runs there as root, if only to tell its version.
    assert "it does not run" not in done.out, done
    assert "the new file is not valid" not in done.out, done
    assert done.status == 1, done
    named = "set NODEREADY_PY_SPY_DIR" if where == "cache" else "is world-writable"
    assert named in done.out, done
    assert fresh_node.run("test -e /usr/local/bin/py-spy", check=False).returncode == 1
