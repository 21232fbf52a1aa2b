"""The job that is asked through srun: it runs, and Slurm starts our step in it."""

from __future__ import annotations

import os

import pytest

from nodeready.transport import allocation
from nodeready.transport.allocation import SrunError, running


@pytest.fixture
def slurm(tmp_path):
    """An environment whose squeue says what is written to the file beside it."""
    (tmp_path / "said").write_text("")
    for name in ("squeue", "srun"):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    return tmp_path, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "7|RUNNING|bob|n[1-2]\n",
            "--job 7: is bob's: Slurm starts a step in it for nobody but bob",
        ),
        ("7|PENDING|bob|\n", "--job 7: does not run: it is PENDING"),
        ("", "--job 7: does not run any more"),
        ("7|RUNNING|ada|n1\n8|RUNNING|ada|n2\n", "--job 7: is an array"),
        ("7|RUNNING\n", "--job 7: does not run any more"),
    ],
)
def test_why_a_job_cannot_be_asked(slurm, monkeypatch, said, why):
    directory, environ = slurm
    (directory / "said").write_text(said)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(allocation, "_own_name", lambda: "ada")
    with pytest.raises(SrunError) as caught:
        running("7", environ)
    assert str(caught.value).startswith(why)


@pytest.mark.parametrize(("uid", "user"), [(1000, "ada"), (0, "bob"), (1000, "1000")])
def test_ones_own_job_and_every_job_for_root(slurm, monkeypatch, uid, user):
    directory, environ = slurm
    (directory / "said").write_text(f"7|RUNNING|{user}|n[1-2]\n")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(allocation, "_own_name", lambda: "ada")
    assert running("7", environ).number == "7"
