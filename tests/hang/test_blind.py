"""Hangs of strangers, after public reports, as programs of ranks: the answers were written first.

Each file of blind/ is a draw: its ``cases`` by name, each with its source, its program and what an
expert accepts; ``first_run`` has what was not right then, ``wrong`` what still is not.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hang.pythons import DEBIAN, needed

DRAWS = [json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("blind/*"))]
#: Seconds until the ranks have met, and until they hang after that.
MEET_S, HANG_S = 8, 14


def outcome(case, document):
    """right, victim (an innocent rank is named), accused (a healthy job is), unclear or wrong."""
    verdict = document["verdict"]
    named = sorted(verdict["suspects"][0]["ranks"]) if verdict["suspects"] else []
    is_certain = verdict["kind"] not in ("unclear", "moving", "not-stuck")
    if case["healthy"]:
        return "accused" if named and is_certain else "right"
    if {*named}.intersection(case["never"]):
        return "victim" if is_certain else "unclear"
    if named in [sorted(ranks) for ranks in case["suspects"]]:
        return "right" if re.search(case["text"], json.dumps(document), re.I) else "wrong"
    if not named:
        return "right" if case["unclear_ok"] else "unclear"
    return "wrong"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("draw", "name"),
    [pytest.param(draw, name, id=name) for draw in DRAWS for name in draw["cases"]],
)
def test_a_hang_of_a_stranger_is_judged_as_an_expert_does(draw, name, tool, tmp_path):
    case, python = draw["cases"][name], needed(DEBIAN)
    program = tmp_path / "run.py"
    for file, lines in {"run.py": case["program"], **case.get("files", {})}.items():
        (tmp_path / file).write_text("\n".join(lines))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TMPDIR": str(tmp_path)}
    own |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    size, ranks = case.get("ranks", 4), []
    try:
        for rank in range(size):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            env = {"PATH": os.environ["PATH"], **own, **(of_rank if size > 1 else {})}
            where = {"stdin": subprocess.DEVNULL, "start_new_session": True, "cwd": tmp_path}
            with (tmp_path / f"log{rank}").open("wb") as log:
                words = [python.path, program]
                ranks.append(subprocess.Popen(words, env=env, stdout=log, stderr=log, **where))
        time.sleep(MEET_S)
        if "act" in case:
            pids = [str(rank.pid) for rank in ranks]
            subprocess.run(["sh", "-c", "\n".join(case["act"]), "act", *pids], check=True)
        time.sleep(HANG_S)
        path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        job = ("--job", f"127.0.0.1:{port}")
        done = tool("stacks", "--local", *job, "--format", "json", env=path)
        if case["healthy"] and not done.out:
            assert "no ranks on" in done.err  # it has ended
            return
        document = json.loads(done.out)
        assert outcome(case, document) in {"right", draw["wrong"].get(name)}, document["verdict"]
    finally:
        for rank in ranks:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
        subprocess.run(["pkill", "-KILL", "-f", str(tmp_path)], check=False)
