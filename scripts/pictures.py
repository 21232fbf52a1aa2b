"""Records the pictures of real runs: docs/images/NAME.svg, from what the commands print; of the
page of stacks NAME.png, from a browser.

Usage: scripts/pictures.py [NAME]...

Each scene starts nodes of the lab, breaks what the picture shall show, and runs the command with
standard output on a terminal of COLUMNS columns. Nothing in a picture is written by hand; what is
another in every run (times, process ids, the subnet) is made the same. As root, and while no lab
of the default name runs: only its nodes are called as in the documentation.
"""

from __future__ import annotations

import fcntl
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
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nodeready.lab import Lab, down  # noqa: E402
from tests.hang.job import NODES as JOB_NODES  # noqa: E402
from tests.hang.job import Job  # noqa: E402

IMAGES = ROOT / "docs/images"
COLUMNS = 96
LAB = "lab"
INVENTORY = "inventories/lab.py"

#: What is another in every run -> what stands there in the picture.
VOLATILE = (
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "2026-01-01T12:00:00Z"),
    (r"pid \d+", "pid 4711"),
    # The lab takes the first subnet that is free.
    (r"10\.213\.\d+\.", "10.213.0."),
    (r"\d+\.\d\d s CPU", "0.00 s CPU"),
)

#: rich's own, without the font that it would fetch from another server.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
    font-variant-east-asian: full-width;
}}
.{unique_id}-title {{
    font-size: 16px;
    font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g>
</g>
</svg>
"""

#: Readable on its dark ground, each colour at 4.5:1 or more (WCAG 2.1, 1.4.3).
THEME = TerminalTheme(
    (27, 31, 36),
    (220, 226, 232),
    [
        (128, 140, 152),
        (244, 112, 103),
        (87, 171, 90),
        (218, 170, 63),
        (83, 155, 245),
        (203, 145, 240),
        (57, 197, 207),
        (220, 226, 232),
    ],
)


class Shown:
    """What a person sees who types commands: each with its output and its exit status."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.text = Text()

    def run(self, *words: str, status: int) -> None:
        """Run `nodeready WORDS`. Raises SystemExit when it ends in another way than it should."""
        said, ended = _on_terminal(self._command(words), self._environment())
        if ended != status:
            raise SystemExit(f"pictures: nodeready {' '.join(words)}: exit {ended}\n{said}")
        if self.text:
            self.text.append("\n\n")
        self.text.append("$ ", "bold green").append(f"nodeready {' '.join(words)}\n", "bold")
        for pattern, same in VOLATILE:
            said = re.sub(pattern, same, said)
        self.text.append(Text.from_ansi(said.rstrip()))

    def quietly(self, *words: str) -> None:
        """Run `nodeready WORDS` beside the picture. Raises SystemExit when it fails."""
        said, ended = _on_terminal(self._command(words), self._environment())
        if ended:
            raise SystemExit(f"pictures: nodeready {' '.join(words)}: exit {ended}\n{said}")

    def page(self, *words: str) -> str:
        """What `nodeready WORDS` writes into a pipe. Raises SystemExit when it fails."""
        command, env = self._command(words), self._environment()
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(f"pictures: nodeready {' '.join(words)}: {done.stderr.decode()}")
        return done.stdout.decode()

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "nodeready", *words]

    def _environment(self) -> dict[str, str]:
        kept = {k: os.environ[k] for k in ("PATH", "LANG") if k in os.environ}
        return {**kept, "HOME": str(self.home), "TERM": "xterm-256color"}

    def svg(self, name: str) -> str:
        """The picture."""
        console = Console(
            record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
        )
        console.print(self.text, soft_wrap=True)
        return console.export_svg(
            title="nodeready", theme=THEME, code_format=FORMAT, unique_id=f"nodeready-{name}"
        )


def _on_terminal(argv: list[str], env: dict[str, str]) -> tuple[str, int]:
    """Run a command with standard output on a terminal: what it said there and on standard error,
    in the order in which it came, and its exit status. Its progress bars are not asked for."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    errors, into = os.pipe()
    started = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=slave, stderr=into, env=env, cwd=ROOT
    )
    os.close(slave)
    os.close(into)
    said, open_ends = b"", {master, errors}
    while open_ends:
        for end in select.select(open_ends, [], [])[0]:
            try:
                data = os.read(end, 65536)
            except OSError:  # EIO: nobody has the terminal any more
                data = b""
            said += data
            if not data:
                open_ends.discard(end)
                os.close(end)
    return said.decode().replace("\r\n", "\n"), started.wait()


def _fleet(shown: Shown) -> None:
    """Eight H100 nodes, deployed, of which four have something since then."""
    lab = Lab.up(LAB, nodes=8, profile="h100")
    shown.quietly("deploy", INVENTORY, "--yes")
    nodes = lab.nodes
    nodes[3].write(
        "/etc/sysctl.d/99-zzz-hardening.conf", "# CIS 1.5\nkernel.yama.ptrace_scope = 2\n"
    )
    nodes[3].enter(["sysctl", "-q", "-w", "kernel.yama.ptrace_scope=2"])
    nodes[4].enter(["ip", "link", "set", "eth0", "mtu", "1400"])
    nodes[6].stop_sshd()
    nodes[7].reboot(fault="ib-half-rate")


def audit(shown: Shown) -> None:
    _fleet(shown)
    shown.run("audit", INVENTORY, status=4)


def deploy(shown: Shown) -> None:
    _fleet(shown)
    shown.run("deploy", INVENTORY, "--diff", "--yes", status=4)


def stacks(shown: Shown) -> None:
    job = Job(Lab.up(LAB, nodes=JOB_NODES).nodes)
    with job.fault(5, "loader"):
        shown.run("stacks", INVENTORY, status=0)


def stacks_page(shown: Shown) -> None:
    """The same as a page in a browser: the picture is what its window shows."""
    import chromium

    page = shown.home / "page.html"
    job = Job(Lab.up(LAB, nodes=JOB_NODES).nodes)
    with job.fault(5, "loader"):
        text = shown.page("stacks", INVENTORY, "--format", "html")
    for pattern, same in VOLATILE:
        text = re.sub(pattern, same, text)
    page.write_text(text)
    browser = chromium.start()
    try:
        browser.get(page.as_uri())
        browser.save_screenshot(str(IMAGES / "stacks-page.png"))
    finally:
        browser.quit()


SCENES: dict[str, Callable[[Shown], None]] = {
    "audit": audit,
    "deploy": deploy,
    "stacks": stacks,
    "stacks-page": stacks_page,
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
        with tempfile.TemporaryDirectory() as home:
            shown = Shown(Path(home))
            try:
                SCENES[name](shown)
            finally:
                down(LAB)
        path = IMAGES / f"{name}.svg"
        if shown.text:
            path.write_text(shown.svg(name))
        else:  # A scene that has made its picture itself.
            path = path.with_suffix(".png")
        print(f"{path.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
