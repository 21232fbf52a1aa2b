"""A rank with a RAS port, as a process of its own: a stand-in that plays recorded answers.

It maps a file that is named like NCCL's library, listens, and answers as `MANNERS` has it. A file
``asked`` beside the library says that somebody connected. What it prints: its port.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANNERS = ("answers", "old", "hangs", "drips", "garbage", "closes", "endless", "half")


def library(directory: Path, version: str, name: str = "libnccl.so.2") -> Path:
    """A file like NCCL's library, with the text that names its version; "": without."""
    path = directory / name
    text = f"NCCL version {version}+cuda13.3\0" if version else "nothing\0"
    path.write_bytes(b"\x7fELF" + b"\0" * 5000 + text.encode() + b"\0" * 5000)
    return path


def member(rank: int, pid: int, host: str = "10.0.0.1", **other: Any) -> dict[str, Any]:
    """A rank as the report in JSON has it. other: counts, and flags of its status."""
    flags = dict.fromkeys(("finalize_called", "destroy_flag", "abort_flag"), False)
    status = {"init_state": 0, "async_error": 0, **flags}
    names = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
    return {
        "rank": rank, "host": host, "pid": pid, "cuda_dev": rank, "nvml_dev": rank,
        "status": {name: other.get(name, value) for name, value in status.items()},
        "collective_counts": {name: other.get(name, 0) for name in names},
    }  # fmt: skip


def missing(rank: int, pid: int, host: str = "10.0.0.2", **status: bool) -> dict[str, Any]:
    """A rank that has not answered, as the report in JSON has it."""
    says = {"unresponsive": False, "considered_dead": False, **status}
    return {"rank": rank, "host": host, "pid": pid, "cuda_dev": 0, "nvml_dev": 3, "status": says}


def report(
    ranks: list[Any], gone: list[Any] | None = None, *, version="2.30.7", timeouts=0, comma=True
) -> str:
    """The report in JSON, in the order and with the line breaks of jsonWrite* in
    src/ras/client_support.cc. comma: False: as 2.28.7 prints a missing rank.
    """
    away = gone or []
    group = {
        "hash": "0x514e98cf4e44862b", "secondary_hash": "0x2cd6d618b4a75a5a:0xe6854f9ece96c663",
        "size": len(ranks) + len(away), "ranks_count": len(ranks),
        "missing_ranks_count": len(away), "ranks": ranks, "missing_ranks": away,
    }  # fmt: skip
    found = {
        "nccl_version": version, "cuda_runtime_version": 13030, "cuda_driver_version": 13030,
        "timestamp": "2026-06-19 06:51:56", "communicators_count": 1, "communicators": [group],
        "ras": {"collection_time_sec": 0.003, "timeouts_count": timeouts},
    }  # fmt: skip
    text = json.dumps(found, indent=2) + "\n"
    return text if comma else text.replace('"nvml_dev": 3,', '"nvml_dev": 3')


@dataclass
class Port:
    pid: int
    port: int
    directory: Path

    @property
    def asked(self) -> bool:
        return (self.directory / "asked").exists()

    @property
    def said(self) -> list[str]:
        path = self.directory / "said"
        return path.read_text().splitlines() if path.exists() else []


@contextmanager
def running(
    directory: Path, *, version="2.30.7", manner="answers", answer="", name="libnccl.so.2",
    host="127.0.0.1", port=0, uid: int | None = None,
) -> Iterator[Port]:  # fmt: skip
    """A rank that listens; ``PID`` in the answer is its pid.

    uid: whose process it is, who must be able to read the directory; None: ours
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = library(directory, version, name)
    (directory / "answer").write_text(answer)
    argv = [sys.executable, __file__, str(path), manner, host, str(port)]
    how: dict[str, Any] = {}
    if uid is not None:
        script = directory / "port.py"
        script.write_text(Path(__file__).read_text())
        os.chown(directory, uid, uid)
        argv[:2] = ["/usr/bin/python3", str(script)]
        how = {"user": uid, "group": uid, "extra_groups": []}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True, **how)
    try:
        assert process.stdout is not None
        yield Port(process.pid, int(process.stdout.readline()), directory)
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def _serve(path: Path, manner: str, host: str, port: int) -> None:
    with open(path, "rb") as file:
        kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(16)
    print(listener.getsockname()[1], flush=True)
    answer = path.with_name("answer").read_text().replace("PID", str(os.getpid()))
    while kept is not None:
        line, _ = listener.accept()
        path.with_name("asked").touch()
        try:
            _talk(line, manner, answer, path.with_name("said"))
        except OSError:
            pass
        finally:
            line.close()


def _talk(line: socket.socket, manner: str, answer: str, said: Path) -> None:
    if manner == "garbage":
        line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        line.recv(100)
        return
    if manner == "hangs":
        time.sleep(600)
    for row in line.makefile("r"):
        with open(said, "a") as file:
            file.write(row)
        words = row.strip().upper()
        if words.startswith("CLIENT PROTOCOL"):
            line.sendall(b"SERVER PROTOCOL 2\n")
            if manner == "closes":
                return
        elif words.startswith("TIMEOUT"):
            line.sendall(b"OK\n")
        elif words.startswith("SET FORMAT"):
            line.sendall(b"ERROR: Unknown command\n" if manner == "old" else b"OK\n")
        elif words == "VERBOSE STATUS":
            if manner == "drips":
                for letter in answer:
                    line.sendall(letter.encode())
                    time.sleep(0.1)
            while manner == "endless":
                line.sendall(b"x" * 65536)
            line.sendall((answer[: len(answer) // 2] if manner == "half" else answer).encode())
            return


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
