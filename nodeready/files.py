"""Write a file on this machine whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, pieces: Iterable[str | bytes], mode: int = 0o644) -> None:
    """Make ``path`` hold these pieces: a reader sees the old file or the new one, never a part.

    A link stays and its target is replaced. An existing file keeps its mode. A path that is no
    regular file (``/dev/stdout``, a pipe) is written to directly. Raises OSError with the path as
    its file name; the old file is intact then.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("wb") as out:
            out.writelines(map(_bytes, pieces))
        return
    new = None
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = target.stat().st_mode & 0o7777
        handle, new = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(handle, "wb") as out:
            out.writelines(map(_bytes, pieces))
            out.flush()
            os.fchmod(out.fileno(), mode)
            os.fsync(out.fileno())
        os.replace(new, target)
    except BaseException as problem:
        if new is not None:
            with contextlib.suppress(OSError):
                os.unlink(new)
        if isinstance(problem, OSError):
            problem.filename = str(path)
        raise


def _bytes(piece: str | bytes) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode("utf-8", "backslashreplace")
