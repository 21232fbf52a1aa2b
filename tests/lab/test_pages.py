"""What the pages promise is what runs: every command line of README.md and docs/*.md.

pages.toml lists each with its exit status, or with the reason why it is not run here. The cluster
of the pages is four nodes, gpu001 to gpu004, with a job 4711 on them; the lab is one that the page
starts itself.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeready.lab import Lab, down
from tests.cases import tomllib
from tests.command import POLICY, ours
from tests.lab.stacks_job import Job
from tests.paths import ROOT

pytestmark = pytest.mark.xdist_group("pages")

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
#: page -> its commands in their order: (exit status, or the reason; command).
ROWS = tomllib.loads(Path(__file__).with_name("pages.toml").read_text())
LIMIT_S = 120
LAB = "test-pages"
TRAIN_PYTHON = Path("/opt/train/bin/python")
WAIVERS = {"proof.core": "shared kernel", "proof.backtrace": "shared kernel"}


def commands(page: str) -> list[str]:
    """The command lines of the page's `sh` and `console` blocks, without comments."""
    found = []
    for language, block in re.findall(
        r"^ *```(sh|console)\n(.*?)^ *```", (ROOT / page).read_text(), re.M | re.S
    ):
        lines = re.sub(r" *\\\n *", " ", block).splitlines()
        if language == "console":
            found += [line.strip().removeprefix("$ ") for line in lines if line.startswith("$ ")]
        elif "done" in lines:
            found.append("; ".join(line.strip() for line in lines))
        else:
            found += [line.strip() for line in lines]
    found = [re.sub(r"(^|\s)# .*", "", command).strip() for command in found]
    return [command for command in found if command]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_listed(page: str) -> None:
    assert commands(page) == [command for _, command in ROWS.get(page, [])]


@pytest.fixture(scope="module")
def cluster(lab_machine: None) -> Iterator[Job]:
    """The nodes of the pages, and the job 4711 on them."""
    name = f"test-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}-{os.getpid()}-pages"
    try:
        job = Job(Lab.up(name, 4).nodes, slurm_job="4711")
        yield job
        assert not [row for node in job.nodes for row in ours(node)]
    finally:
        down(name)


@pytest.fixture(scope="module")
def home(cluster: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home that is also the directory where the commands run: prod.py, ssh's settings."""
    home = tmp_path_factory.mktemp("home")
    for directory in (".ssh", "inventories", "group_data", "bin"):
        (home / directory).mkdir()
    names = [f"gpu{number:03}" for number in range(1, 5)]
    lab = cluster.nodes[0].lab
    config = [
        f"Host {name}\n  HostName {node.address}\n  HostKeyAlias {node.name}\n  User root\n"
        for name, node in zip(names, cluster.nodes, strict=True)
    ]
    config.append(
        f"Host *\n  IdentityFile {lab.ssh_key}\n  UserKnownHostsFile {lab.known_hosts}\n"
    )
    (home / ".ssh/config").write_text("".join(config))
    data = {**POLICY, "waivers": WAIVERS}
    for path in ("prod.py", "inventories/prod.py"):
        (home / path).write_text(f"h100 = ({names!r}, {data!r})\n")
    (home / "hostfile").write_text("".join(f"{name} slots=8\n" for name in names))
    for path in (ROOT / "inventories").glob("*.py"):
        (home / "inventories" / path.name).symlink_to(path)
    for name in ("deploy.py", "templates", "docs"):
        (home / name).symlink_to(ROOT / name)
    hosts = "".join(
        f"{node.address} {name}\n" for name, node in zip(names, cluster.nodes, strict=True)
    )
    for index, node in enumerate(cluster.nodes):
        keys = "useradd -m ada; cp -a ~ml/.ssh ~ada/; chown -R ada: ~ada/.ssh"
        node.run(f"cat >>/etc/hosts; {keys}; mkdir -p {TRAIN_PYTHON.parent}", input=hosts)
        node.run(f"ln -s /usr/bin/python3 {TRAIN_PYTHON}")
        node.write(f"/var/log/train/rank_{index}.log", f"step {index}\n" * 5)
    assert run(home, "nodeready deploy prod.py --yes -q").returncode == 0
    return home


def run(home: Path, command: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NODEREADY", "XDG_"))}
    environment = {
        **kept,
        "HOME": str(home),
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NODEREADY_LAB": LAB,
        # Nobody moves: a third sample, for jobs of slow steps, would be 8 s later.
        "NODEREADY_SAMPLES": "2",
        "SLURM_JOB_NODELIST": "gpu[001-004]",
        "VIRTUAL_ENV": str(ROOT / ".venv"),
    }
    return subprocess.run(
        ["sh", "-c", command], cwd=home, env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False,
    )  # fmt: skip


@pytest.fixture
def pages_lab(page: str) -> Iterator[None]:
    """The page's lab: it starts it itself, or finds it running."""
    shown = " ".join(commands(page))
    try:
        if "inventories/lab.py" in shown and "nodeready lab up" not in shown:
            Lab.up(LAB, 3)
        yield
    finally:
        down(LAB)


@pytest.mark.parametrize(
    "page", [page for page, rows in ROWS.items() if any(isinstance(row[0], int) for row in rows)]
)
def test_the_commands_of_a_page_end_as_listed(page: str, home: Path, pages_lab: None) -> None:
    done_before: set[str] = set()
    for status, command in ROWS[page]:
        # On the cluster, no command of a page changes how the same one ends again.
        if isinstance(status, int) and command not in done_before:
            if "prod.py" in command or "gpu[" in command:
                done_before.add(command)
            done = run(home, command)
            shown = f"$ {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            assert done.returncode == status, shown
            assert "Traceback" not in done.stdout + done.stderr, shown
