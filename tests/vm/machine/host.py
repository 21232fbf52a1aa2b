"""What this machine gives to the virtual machine: tools, apt's sources, a place to log."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nodeready.lab.host import environment
from tests.vm.machine import recipe
from tests.vm.machine.boot import VmError, last_lines

# Command and the Debian package that brings it.
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "cpio": "cpio",
    "busybox": "busybox-static",
    "ssh-keygen": "openssh-client",
}

# PID and mount namespaces of its own: mmdebstrap survives a plain SIGTERM.
_CONTAINED = (
    *("setpriv", "--pdeathsig", "KILL", "--"),
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
)


def missing() -> list[str]:
    """What this machine lacks to build and run the virtual machine, one phrase each."""
    lacks = [
        f"{command} (package {package})"
        for command, package in TOOLS.items()
        if shutil.which(command, path=environment()["PATH"]) is None
    ]
    if os.geteuid() != 0:
        lacks.append("root (to build the image)")
    if platform.machine() != "x86_64":
        lacks.append("an x86_64 machine (the kernel is amd64)")
    if os_release().get("ID") not in recipe.KERNEL:
        lacks.append("Debian or Ubuntu (the image is built from this machine's packages)")
    return lacks


def os_release() -> dict[str, str]:
    """The fields of this machine's /etc/os-release; empty where there is none."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def apt_sources() -> list[str]:
    """This machine's own apt sources of its distribution, as `deb` lines. Raises VmError."""
    release = os_release()
    codename = release["VERSION_CODENAME"]
    fields = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    argv = ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    lines: list[str] = []
    for row in dict.fromkeys(listed.splitlines()):
        origin, name, uri, suite, component = row.split("|")
        ours = origin.lower() == release["ID"] and name.split("-")[0] == codename
        if ours and not uri.startswith("cdrom:"):
            lines.append(f"deb {uri} {suite} {component}")
    if not lines:
        what = f"{release['ID']} {codename}"
        raise VmError(f"apt has no package lists of {what}: run apt-get update first")
    return lines


def apt_options() -> list[str]:
    """How this machine's apt gets at its mirrors (proxy, dates), for mmdebstrap's own apt."""
    argv = ["apt-config", "dump", "--no-empty", "Acquire"]
    dump = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries")
    return [line for line in dump.splitlines() if line.startswith(wanted)]


def run_logged(
    command: Sequence[str | Path],
    log: Path,
    extra_env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run one step of the build, its output added to `log`. Raises VmError when it fails."""
    with log.open("a") as out:
        done = subprocess.run(
            [*_CONTAINED, *(str(part) for part in command)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**environment(), **(extra_env or {})},
            cwd=cwd,
            check=False,
        )
    if done.returncode != 0:
        what = f"building the image failed in {command[0]} (rc {done.returncode})"
        raise VmError(f"{what}\n{last_lines(log)}log: {log}")


def remove(path: Path) -> None:
    """Remove a tree of ours; nothing happens when it is not there."""
    # One file system: a build that was killed may have left something mounted.
    subprocess.run(["rm", "-rf", "--one-file-system", "--", str(path)], check=False)
