"""The static py-spy binary that goes to the nodes: where the control machine gets it from.

Nodes need no internet. The sources, in this order: the directory of $NODEREADY_PY_SPY_DIR (wheels
as pip downloads them), the py-spy of this environment, nodeready's cache, and pip. py-spy's
manylinux wheels hold one statically linked program per machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from nodeready.agent.run import private_directory
from nodeready.core.files import make_directory, only_regular, write_atomically
from nodeready.fleet.inventory import trust
from nodeready.subjects.debug_tools.facts import DIGESTS

#: machine -> the number of its ELF files (elf.h, EM_*), and pip's names for it, newest first.
_MACHINES = {
    "x86_64": (62, ("manylinux_2_17_x86_64", "manylinux_2_5_x86_64", "manylinux1_x86_64")),
    "aarch64": (183, ("manylinux_2_17_aarch64", "manylinux2014_aarch64")),
}
_PIP_TIMEOUT_S = 120  # seconds for pip to download three megabytes over a slow proxy
_INTERPRETER = 3  # PT_INTERP: the program needs a dynamic loader and the node's libc

_lock = threading.Lock()
_binaries: dict[tuple[str, str], bytes | str] = {}


class PySpyError(Exception):
    """There is no py-spy for a machine; the text says why and what to do, in one line."""


def binary(version: str, machine: str) -> bytes:
    """The program of this version for ``uname -m``, searched once. Raises PySpyError."""
    with _lock:
        if (version, machine) not in _binaries:
            try:
                _binaries[version, machine] = _find(version, machine)
            except PySpyError as error:
                _binaries[version, machine] = str(error)
        content = _binaries[version, machine]
    if isinstance(content, str):
        raise PySpyError(content)
    return content


def _find(version: str, machine: str) -> bytes:
    if machine not in _MACHINES:
        raise PySpyError(f"no static py-spy for {machine}, only for {', '.join(_MACHINES)}")
    directory = os.environ.get("NODEREADY_PY_SPY_DIR", "")
    if directory:
        return _from_directory(Path(directory), version, machine)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cached = Path(home, "nodeready", "py-spy", version, machine)
    # Not a file that a user other than root may have written.
    from_cache = None if _distrust_reason(cached, version, machine) else _read(cached)
    for content in (_installed(version, machine), from_cache):
        if content is not None and not binary_problem(content, version, machine):
            return content
    content = _download(version, machine)
    _write_cache(cached, content)
    return content


def _write_cache(path: Path, content: bytes) -> None:
    """Put a program into the cache; a write error is ignored."""
    with contextlib.suppress(OSError):
        make_directory(path.parent, 0o700)
        write_atomically(path, [content], 0o600)


def binary_problem(content: bytes, version: str, machine: str) -> str:
    """Why ``content`` is not the static py-spy of this version and machine; "" when it is."""
    pinned = DIGESTS.get((version, machine))
    if pinned is not None:
        return "" if hashlib.sha256(content).hexdigest() == pinned else "not the expected sha256"
    try:
        if content[:6] != b"\x7fELF\x02\x01":
            return "no 64-bit program"
        (number,) = struct.unpack_from("<H", content, 18)
        (start,) = struct.unpack_from("<Q", content, 32)
        size, count = struct.unpack_from("<HH", content, 54)
        offsets = range(start, start + count * size, size)
        kinds = [struct.unpack_from("<I", content, offset)[0] for offset in offsets]
    except (struct.error, ValueError, OverflowError):
        return "a damaged program"
    if number != _MACHINES[machine][0]:
        return f"not for {machine}"
    return "not statically linked" if _INTERPRETER in kinds else ""


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _distrust_reason(path: Path, version: str, machine: str) -> str:
    """Why no node may get the file; "": only root can write it, or its sha256 is known."""
    if (version, machine) in DIGESTS:
        return ""
    return trust.distrust(path, remedy=trust.SET_VARIABLE)


def _installed(version: str, machine: str) -> bytes | None:
    """The program of the py-spy package in this environment, if the version matches."""
    try:
        package = metadata.distribution("py-spy")
    except metadata.PackageNotFoundError:
        return None
    if (platform.machine(), package.version) != (machine, version):
        return None
    files = (file for file in package.files or () if file.name == "py-spy")
    return next((_read(Path(str(package.locate_file(file)))) for file in files), None)


def _from_wheel(wheel: Path, version: str) -> bytes:
    """The program inside a wheel. Raises PySpyError."""
    try:
        with open(wheel, "rb", opener=only_regular) as file, zipfile.ZipFile(file) as archive:
            return archive.read(f"py_spy-{version}.data/scripts/py-spy")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise PySpyError(f"{wheel}: no wheel of py-spy {version}: {error}") from None


def _from_directory(directory: Path, version: str, machine: str) -> bytes:
    """The program from a site's own wheels, then the only source. Raises PySpyError."""
    wheels = sorted(directory.glob(f"py_spy-{version}-*manylinux*_{machine}.whl"))
    if not wheels:
        place = f"{directory} ($NODEREADY_PY_SPY_DIR): put the wheel for {machine} there"
        raise PySpyError(f"no py_spy-{version}-…_{machine}.whl in {place}")
    if distrust := _distrust_reason(wheels[0], version, machine):
        raise PySpyError(f"py-spy {version}: {distrust}")
    content = _from_wheel(wheels[0], version)
    if reason := binary_problem(content, version, machine):
        raise PySpyError(f"py-spy in {wheels[0]} is {reason}: replace the file")
    return content


# Runs $2 ... with the directory $1. Standard input is a pipe from this process: when the process
# ends for any reason, the program is ended and the directory removed.
_WATCHED = """
directory=$1
shift
exec 3<&0
"$@" </dev/null 3<&- &
program=$!
{
    read -r nothing <&3
    kill -KILL "$program"
    rm -rf -- "$directory"
} >/dev/null 2>&1 &
exec 3<&- </dev/null
wait "$program"
status=$?
kill -KILL $! 2>/dev/null
exit $status
"""


@contextlib.contextmanager
def _private_directory() -> Iterator[tuple[str, int]]:
    """A directory, and the read end of a pipe that closes when this process ends (`_WATCHED`)."""
    # Also removes the directory of an earlier run whose `_WATCHED` was killed.
    directory, lock = private_directory("nodeready-py-spy-")
    read, write = os.pipe()
    try:
        yield directory, read
    finally:
        for number in (read, write, lock):
            os.close(number)
        shutil.rmtree(directory, ignore_errors=True)


def _download(version: str, machine: str) -> bytes:
    """The program from the package index that pip is set up for. Raises PySpyError."""
    help_text = f"put its {machine} wheel into a directory and set NODEREADY_PY_SPY_DIR to it"
    platforms = [word for name in _MACHINES[machine][1] for word in ("--platform", name)]
    if distrust := _distrust_reason(Path(tempfile.gettempdir()), version, machine):
        # The owner of a directory can replace its files.
        raise PySpyError(f"py-spy {version}: {distrust}")
    with _private_directory() as (directory, alive):
        # -I, cwd: no import from the current directory or PYTHONPATH. pip's own settings stay.
        argv = [sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps"]
        argv += ["--disable-pip-version-check", "--no-input", "--only-binary=:all:", *platforms]
        argv += ["--dest", directory, f"py-spy=={version}"]
        try:
            process = subprocess.run(
                ["sh", "-c", _WATCHED, "sh", directory, *argv],
                cwd=directory,
                stdin=alive,
                # pip writes temporary files.
                env={**os.environ, "TMPDIR": directory},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PIP_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise PySpyError(f"py-spy {version}: pip took too long; {help_text}") from None
        wheels = sorted(Path(directory).glob("*.whl"))
        if process.returncode or not wheels:
            # The last ERROR line of pip, or its last line.
            lines = [line.strip() for line in process.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR:")]
            reason = (errors or lines or ["pip failed"])[-1].removeprefix("ERROR: ")
            raise PySpyError(f"py-spy {version}: {reason}; {help_text}")
        content = _from_wheel(wheels[0], version)
    if reason := binary_problem(content, version, machine):
        raise PySpyError(f"py-spy {version} from pip is {reason}; {help_text}")
    return content
