"""Records pictures of real runs: docs/images/NAME.svg from the output of commands, and NAME.png of
pages from a browser.

Usage: scripts/pictures.py [NAME]...

Each scene starts nodes of the lab, breaks them, and runs the command on a terminal of COLUMNS
columns. Values that differ in every run (times, process ids, the subnet) become constants. It
needs root, and no lab of the default name: only its nodes have the names of the documentation.
"""

from __future__ import annotations

import fcntl
import inspect
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nodeready.lab import Lab, down  # noqa: E402
from tests.builders.proof import put_py_spy  # noqa: E402
from tests.command import wait_for  # noqa: E402

IMAGES = ROOT / "docs/images"
COLUMNS = 96
LAB = "lab"
INVENTORY = "inventories/lab.py"
NODEREADY = (sys.executable, "-m", "nodeready")

#: A value that differs in every run -> the constant in the picture.
VOLATILE = (
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-01-01T12:00:00Z"),
    (r"pid \d+", "pid 4711"),
    # The lab takes the first subnet that is free.
    (r"10\.213\.\d+\.", "10.213.0."),
    (r"\d+\.\d\d s CPU", "0.00 s CPU"),
)

#: rich's own format, without the font that it would fetch from another server.
FORMAT = re.sub(
    r" *@font-face \{\{.*?\}\}\n",
    "",
    inspect.signature(Console.export_svg).parameters["code_format"].default,
    flags=re.DOTALL,
).replace(
    "font-family: Fira Code, monospace",
    'font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace',
)

#: Each colour has a contrast of 4.5:1 or more (WCAG 2.1, 1.4.3).
THEME = TerminalTheme(
    (27, 31, 36), (220, 226, 232),
    [
        (128, 140, 152), (244, 112, 103), (87, 171, 90), (218, 170, 63), (83, 155, 245),
        (203, 145, 240), (57, 197, 207), (220, 226, 232),
    ],
)  # fmt: skip


class Terminal:
    """A terminal of a person who types commands: each with its output."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.text = Text()
        inherited = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.environment = {**inherited, "HOME": str(home), "TERM": "xterm-256color"}

    def run(self, *words: str, status: int = 0, quiet: bool = False) -> None:
        """Run `nodeready WORDS`; quiet: not shown. Raises SystemExit for another status."""
        output, returned = _on_terminal([*NODEREADY, *words], self.environment)
        if returned != status:
            raise SystemExit(f"pictures: nodeready {' '.join(words)}: exit {returned}\n{output}")
        if not quiet:
            if self.text:
                self.text.append("\n\n")
            self.text.append("$ ", "bold green").append(f"nodeready {' '.join(words)}\n", "bold")
            self.text.append(Text.from_ansi(_constant(output.rstrip())))

    def svg(self, name: str) -> str:
        console = Console(
            record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
        )
        console.print(self.text, soft_wrap=True)
        return console.export_svg(
            title="nodeready", theme=THEME, code_format=FORMAT, unique_id=f"nodeready-{name}"
        )


def _constant(text: str) -> str:
    """The text with constants for the values that differ in every run."""
    for pattern, constant in VOLATILE:
        text = re.sub(pattern, constant, text)
    return text


def _on_terminal(argv: list[str], env: dict[str, str]) -> tuple[str, int]:
    """The output of a command on a terminal, with its standard error, and its exit status."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    errors, into = os.pipe()
    started = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=slave, stderr=into, env=env, cwd=ROOT
    )
    os.close(slave)
    os.close(into)
    output, open_ends = b"", {master, errors}
    while open_ends:
        for end in select.select(open_ends, [], [])[0]:
            try:
                data = os.read(end, 65536)
            except OSError:  # EIO: the terminal has no writer
                data = b""
            output += data
            if not data:
                open_ends.discard(end)
                os.close(end)
    return output.decode().replace("\r\n", "\n"), started.wait()


# --- The scenes: each starts nodes of the lab.


def fleet(terminal: Terminal) -> None:
    """Eight H100 nodes after a deploy; then four of them break."""
    nodes = Lab.up(LAB, nodes=8, profile="h100").nodes
    terminal.run("deploy", INVENTORY, "--yes", quiet=True)
    nodes[3].write(
        "/etc/sysctl.d/99-zzz-hardening.conf", "# CIS 1.5\nkernel.yama.ptrace_scope = 2\n"
    )
    nodes[3].enter(["sysctl", "-q", "-w", "kernel.yama.ptrace_scope=2"])
    nodes[4].enter(["ip", "link", "set", "eth0", "mtu", "1400"])
    nodes[6].stop_sshd()
    nodes[7].reboot(fault="ib-half-rate")


JOB = "/run/job"  # the directory of the training on the nodes
JOB_NODES, PER_NODE = 4, 2
#: Of `hung_train.py`: which rank hangs, and in which step.
HANGS, STEP = 5, 20
# With `--redirects` and `--tee` because torch 1.13 under Python 3.11 has no value for "none".
TORCHRUN = f"""
setsid /usr/bin/python3 -m torch.distributed.run --nnodes {JOB_NODES} --nproc_per_node {PER_NODE} \
    --max_restarts 0 --redirects 1 --tee 2 --log_dir {JOB}/logs \
    --node_rank {{number}} --master_addr {{master}} --master_port 29500 \
    {JOB}/train.py </dev/null >{JOB}/log 2>&1 &
"""


def hung_job(terminal: Terminal) -> None:
    """A real training under torchrun, until all ranks wait for rank HANGS."""
    nodes = Lab.up(LAB, nodes=JOB_NODES).nodes
    program = Path(__file__).with_name("hung_train.py").read_text()
    for node in nodes:
        put_py_spy(node)
        node.write(f"{JOB}/train.py", program)
        node.enter(["mkfifo", f"{JOB}/go"])
        node.enter(["chown", "-R", "ml", JOB])
    for number, node in enumerate(nodes):
        node.run(TORCHRUN.format(number=number, master=nodes[0].name), user="ml")
    files = [
        Path(f"/proc/{nodes[rank // PER_NODE].pid}/root{JOB}/rank-{rank}")
        for rank in range(JOB_NODES * PER_NODE)
        if rank != HANGS
    ]
    try:
        wait_for(lambda: all(p.exists() and p.read_text().split() == [f"{STEP}"] for p in files))
    except AssertionError:
        raise AssertionError("\n".join(node.read(f"{JOB}/log") for node in nodes)) from None


def page(terminal: Terminal, picture: Path, words: Sequence[str], script: str) -> None:
    """A picture of the page of `nodeready WORDS` in a browser, after this script."""
    import chromium

    path = terminal.home / "page.html"
    done = subprocess.run(
        [*NODEREADY, *words, "--format", "html"],
        env=terminal.environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    path.write_text(_constant(done.stdout))
    browser = chromium.start()
    try:
        browser.get(path.as_uri())
        browser.execute_script(script)
        browser.save_screenshot(str(picture))
    finally:
        browser.quit()


class Scene(NamedTuple):
    start: Callable[[Terminal], None]
    words: Sequence[str]  # of the command
    status: int = 0  # its exit status
    script: str | None = None  # for its page in a browser, which is the picture


_UNFOLD = "document.querySelector('.finding.fail').open = true"  # the first finding
SCENES = {
    "audit": Scene(fleet, ("audit", INVENTORY), 4),
    "audit-page": Scene(fleet, ("audit", INVENTORY), script=_UNFOLD),
    "deploy": Scene(fleet, ("deploy", INVENTORY, "--diff", "--yes"), 4),
    "stacks": Scene(hung_job, ("stacks", INVENTORY)),
    "stacks-page": Scene(hung_job, ("stacks", INVENTORY), script=""),
}


def main() -> int:
    names = sys.argv[1:] or list(SCENES)
    if unknown := [name for name in names if name not in SCENES]:
        print(f"pictures: no {unknown[0]}; there are {', '.join(SCENES)}", file=sys.stderr)
        return 2
    if Lab.load(LAB):
        print("pictures: a lab runs; end it first: nodeready lab down", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    for name in names:
        scene = SCENES[name]
        path = IMAGES / f"{name}.{'svg' if scene.script is None else 'png'}"
        with tempfile.TemporaryDirectory() as home:
            terminal = Terminal(Path(home))
            try:
                scene.start(terminal)
                if scene.script is None:
                    terminal.run(*scene.words, status=scene.status)
                    path.write_text(terminal.svg(name))
                else:
                    page(terminal, path, scene.words, scene.script)
            finally:
                down(LAB)
        print(f"{path.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
