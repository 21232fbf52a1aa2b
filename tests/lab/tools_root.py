"""Nodes with tools of other distributions that Debian has: dnf, zypper, firewalld, tuned ...

Such a node is a chroot in namespaces of its own, over a tree that mmdebstrap builds once and keeps
in `~/.cache/nodeready`. Changes are in memory. It has no apt, writes no setting of this machine's
kernel but those of its own network, and no network but `lo`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cases import read_data
from tests.vm.machine import host, image

PACKAGES = (
    *("createrepo-c", "dnf", "rpm", "zypper", "dbus", "firewalld", "iproute2", "iptables"),
    *("netbase", "nftables", "procps", "tuned", "ufw"),
)
#: Runs in the new tree: it becomes one without apt, with a repository of tiny packages.
FINISH = read_data(__file__, "tools_root_finish.sh")
#: Becomes process 1 of a node: $1 the tree, $2 an empty directory.
START = read_data(__file__, "tools_root_start.sh")


def tree() -> Path:
    """Where the cache has it, or will have it."""
    recipe = f"{PACKAGES}{FINISH}{host.os_release().get('VERSION_CODENAME')}"
    return image.cache_dir() / f"tools-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"


def lacking() -> str:
    """Why this machine has no such tree and cannot build it; "": nothing is lacking."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        return "root and mmdebstrap build the tree of tools"
    if tree().is_dir():
        return ""
    show = ["apt-cache", "show", *PACKAGES]
    known = subprocess.run(show, capture_output=True, text=True, check=False).stdout
    missing = {*PACKAGES} - {*re.findall(r"^Package: (\S+)", known, re.M)}
    return f"apt knows no {' '.join(sorted(missing))} (apt-get update)" if missing else ""


def build() -> Path:
    """The tree, from the cache or built now (about a minute)."""
    built = tree()
    built.parent.mkdir(parents=True, exist_ok=True)
    with (built.parent / "tools.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.is_dir():
            work = Path(tempfile.mkdtemp(prefix=".tools-", dir=built.parent))
            try:
                _bootstrap(work)
                (work / "root").rename(built)
            finally:
                host.remove(work)
    return built


def _bootstrap(work: Path) -> None:
    (work / "finish").write_text(FINISH)
    command: list[str | Path] = [
        *("mmdebstrap", "--mode=root", "--variant=apt", f"--include={','.join(PACKAGES)}"),
        "--dpkgopt=force-unsafe-io",
        *(f"--aptopt={line}" for line in host.apt_options()),
        f'--customize-hook=chroot "$1" sh -s <{work}/finish',
        *(host.os_release()["VERSION_CODENAME"], work / "root", *host.apt_sources()),
    ]
    host.run_logged(command, work.parent / "tools.log")


class ToolsNode:
    """A running node; looks.* and tests.helpers take it as they take a lab's."""

    def __init__(self, tree: Path, directory: Path) -> None:
        spaces = ("--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
        argv = ["unshare", *spaces, "sh", "-ec", START, "sh", tree, directory]
        how = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        self._start = subprocess.Popen(argv, **how, text=True)
        assert self._start.stdout is not None
        assert self._start.stdout.readline() == "ready\n"
        parent = self._start.pid
        self._pid = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]

    def run(
        self, command: str, *, input: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as root, with its standard error."""
        argv = ["nsenter", "-t", self._pid, "-a", "-r", "-w", "env", "-i", "HOME=/root"]
        argv += ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "sh", "-c", command]
        how = {"capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run(argv, input=input or "", **how, check=False)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done

    def write(self, path: str, text: str) -> None:
        self.run(f'mkdir -p "{os.path.dirname(path)}" && cat >"{path}"', input=text)

    def end(self) -> None:
        self._start.kill()
        self._start.communicate()
