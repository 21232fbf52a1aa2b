"""What the pages promise is what runs: every command line of README.md and docs/*.md.

pages.toml lists each with its exit status, or with the reason why it is not run here. The cluster
of the pages is four nodes, gpu001 to gpu004, with a job 4711 on them; the lab is one that the page
starts itself.
"""

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nodeready.lab import Lab, LabNode, down
from tests.cases import tomllib
from tests.command import POLICY, WAIVERS, Tool, ours, wait_for
from tests.conftest import _lab_name, started_lab, started_slurm
from tests.lab.stacks_job import Job
from tests.paths import ROOT
from tests.slurm_lab import SlurmLab

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
#: page -> its commands in their order: (exit status, or the reason; command).
ROWS = tomllib.loads(Path(__file__).with_name("pages.toml").read_text())
LIMIT_S = 120
#: A worker of pytest-xdist has nodes of its own.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
LAB = f"test-pages-{WORKER}"
TRAIN_PYTHON = Path("/opt/train/bin/python")
#: Sections that are followed from the first line on, with nodes of their own: their number.
FIRST_HOURS = {"docs/install.md#a-slurm-site": 4, "docs/install.md#cloud-machines": 3}
#: The README has the four uses, and hangs and deaths have no other page: all others wait a night.
NIGHTLY = {
    "docs/README.md", "docs/audit.md", "docs/deploy.md", "docs/env.md", "docs/history.md",
    "docs/lab.md", "docs/options.md", "docs/ready.md", "docs/smoke.md",
    "docs/install.md#a-slurm-site",
}  # fmt: skip


def rows_of(pages: Iterable[str]) -> list[Any]:
    """A row for each page: two workers share them, and those of `NIGHTLY` have that mark."""
    rows = []
    for index, page in enumerate(pages):
        marks = [pytest.mark.xdist_group(f"pages-{index % 2}")]
        rows.append(pytest.param(page, marks=marks + [pytest.mark.nightly] * (page in NIGHTLY)))
    return rows


def block_commands(language: str, block: str) -> list[str]:
    """The command lines of a `sh` or `console` block, without comments."""
    lines = re.sub(r" *\\\n *", " ", block).splitlines()
    if language == "console":
        found = [line.strip().removeprefix("$ ") for line in lines if line.startswith("$ ")]
    elif "done" in lines:
        found = ["; ".join(line.strip() for line in lines)]
    else:
        found = [line.strip() for line in lines]
    found = [re.sub(r"(^|\s)# .*", "", command).strip() for command in found]
    return [command for command in found if command]


def page_text(page: str) -> str:
    """The section of `FILE#SECTION`; of a file, the text without the sections of FIRST_HOURS."""
    path, _, name = page.partition("#")
    head, *sections = re.split(r"(?m)^(?=## )", (ROOT / path).read_text())
    anchors = [text[3:].partition("\n")[0].lower().replace(" ", "-") for text in sections]
    if name:
        return sections[anchors.index(name)]
    named = zip(anchors, sections, strict=True)
    return head + "".join(text for name, text in named if f"{path}#{name}" not in FIRST_HOURS)


def commands(page: str) -> list[str]:
    blocks = re.findall(r"^ *```(sh|console)\n(.*?)^ *```", page_text(page), re.M | re.S)
    return [command for block in blocks for command in block_commands(*block)]


@pytest.mark.parametrize("page", [*PAGES, *FIRST_HOURS])
def test_every_command_of_a_page_is_listed(page):
    assert commands(page) == [command for _, command in ROWS.get(page, [])]


@pytest.fixture(scope="module")
def cluster(lab_machine: None) -> Iterator[Job]:
    """The nodes of the pages, and the job 4711 on them."""
    with started_lab(_lab_name("pages"), 4) as lab:
        yield Job(lab.nodes, slurm_job="4711")
        assert not [row for node in lab.nodes for row in ours(node)]


def make_home(home: Path, nodes: Sequence[LabNode]) -> list[str]:
    """A user's home with ssh's settings, and the user ada on the nodes. Returns their names."""
    (home / ".ssh").mkdir()
    names = [f"gpu{number:03}" for number in range(1, len(nodes) + 1)]
    lab = nodes[0].lab
    config = [
        f"Host {name}\n  HostName {node.address}\n  HostKeyAlias {node.name}\n  User root\n"
        for name, node in zip(names, nodes, strict=True)
    ]
    config.append(
        f"Host *\n  IdentityFile {lab.ssh_key}\n  UserKnownHostsFile {lab.known_hosts}\n"
    )
    (home / ".ssh/config").write_text("".join(config))
    hosts = "".join(f"{node.address} {name}\n" for name, node in zip(names, nodes, strict=True))
    for node in nodes:
        keys = "useradd -m ada; cp -a ~ml/.ssh ~ada/; chown -R ada: ~ada/.ssh"
        node.run(f"cat >>/etc/hosts; {keys}", input=hosts)
    return names


@pytest.fixture(scope="module")
def home(cluster: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home that is also the directory where the commands run: prod.py, ssh's settings."""
    home = tmp_path_factory.mktemp("home")
    names = make_home(home, cluster.nodes)
    for directory in ("inventories", "group_data", "bin"):
        (home / directory).mkdir()
    data = {**POLICY, "waivers": WAIVERS}
    for path in ("prod.py", "inventories/prod.py"):
        (home / path).write_text(f"h100 = ({names!r}, {data!r})\n")
    (home / "hostfile").write_text("".join(f"{name} slots=8\n" for name in names))
    for path in (ROOT / "inventories").glob("*.py"):
        (home / "inventories" / path.name).symlink_to(path)
    for name in ("deploy.py", "templates", "docs"):
        (home / name).symlink_to(ROOT / name)
    for index, node in enumerate(cluster.nodes):
        node.run(f"mkdir -p {TRAIN_PYTHON.parent}; ln -s /usr/bin/python3 {TRAIN_PYTHON}")
        node.write(f"/var/log/train/rank_{index}.log", f"step {index}\n" * 5)
    assert run(home, "nodeready deploy prod.py --yes -q").returncode == 0
    return home


def run(home: Path, command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = Tool(home).environment(
        PATH=f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        NODEREADY_LAB=LAB,
        # Nobody moves: a third sample, for jobs of slow steps, would be 8 s later.
        NODEREADY_SAMPLES="2",
        SLURM_JOB_NODELIST="gpu[001-004]",
        VIRTUAL_ENV=str(ROOT / ".venv"),
        **extra,
    )
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
    "page",
    rows_of(
        page
        for page, rows in ROWS.items()
        if page not in FIRST_HOURS and any(isinstance(row[0], int) for row in rows)
    ),
)
def test_the_commands_of_a_page_end_as_listed(page, home, pages_lab):
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


# --- The first hours, line by line: the files that a page shows, and its commands.

#: Whether the job of the page hangs: its last rank is connected to rank 0.
WAITS = "ss -Htn state established dport = :29500 | grep -q ."
#: A block of a page: a file, if its first line, or the one after `#!`, is a comment with its name.
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
FILE = re.compile(r"(?:#!.*\n)?# ([\w/]+(?:\.\w+)?)\n")


@pytest.fixture
def first_home(page: str, lab_machine: None, tmp_path: Path) -> Iterator[tuple[Path, Lab]]:
    """A home with nothing but ssh's settings, and fresh nodes, with Slurm for Slurm's page."""
    started = started_slurm if "slurm" in page else started_lab
    with started(LAB, FIRST_HOURS[page]) as lab:
        make_home(tmp_path, lab.nodes)
        for machine in [lab.controller, *lab.nodes] if isinstance(lab, SlurmLab) else lab.nodes:
            machine.run(f"id ada >/dev/null || useradd -m ada; mkdir -p {tmp_path}")
        yield tmp_path, lab


@pytest.mark.parametrize("page", rows_of(FIRST_HOURS))
def test_a_first_hour_can_be_followed_line_by_line(page, first_home):
    home, lab = first_home
    limits = "".join(
        f"{key} = {value!r}\n" for key, value in {**POLICY, "waivers": WAIVERS}.items()
    )
    # What this machine's kernel does not allow is no part of the page.
    (home / "group_data").mkdir()
    (home / "group_data/all.py").write_text(limits)
    rows = iter(ROWS[page])
    for language, block in BLOCK.findall(page_text(page)):
        if (named := FILE.match(block)) and language not in ("sh", "console"):
            text = block + limits if named[1] == "group_data/all.py" else block
            (home / named[1]).write_text(text)
            for node in lab.nodes:
                node.write(str(home / named[1]), text)
        elif block.startswith("Prolog="):
            # The job of the page is 4711.
            assert isinstance(lab, SlurmLab)
            lab.slurm_configure(*block.splitlines(), "FirstJobId=4711")
        elif language == "sh":
            for _ in block_commands(language, block):
                status, command = next(rows)
                if isinstance(status, str):
                    continue
                done = run(home, command, SLURM_CONF=f"{lab.directory}/slurm.conf")
                shown = f"$ {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
                assert done.returncode == status, shown
                if command.startswith("sbatch"):
                    wait_for(lambda: lab.nodes[-1].run(WAITS, check=False).returncode == 0)
                if command == "nodeready stacks prod.py --job 4711":
                    assert re.match(r"(?s).*\nlate +rank 0 \(gpu001\): ", done.stdout), shown
    assert next(rows, None) is None
