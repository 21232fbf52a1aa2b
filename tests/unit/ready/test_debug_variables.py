"""What makes a job debuggable: the names of the installed PyTorch, and how it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nodeready.ready import job_env
from nodeready.ready.job_env import Installed, debug_variables, question, read_installed

WORD = "0a1b2c3d"


def values(*installed: Installed, directory: str = "") -> dict[str, str | None]:
    nodes = {f"gpu{number}": one for number, one in enumerate(installed, 1)}
    return {one.name: one.value for one in debug_variables(nodes, directory, WORD)}


ALWAYS = {"NCCL_DEBUG": "WARN", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
PIPE = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"/dev/shm/nodeready-{WORD}-"}
DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **PIPE}
OLD = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
NEW = {"TORCH_FR_BUFFER_SIZE": "2000"}


@pytest.mark.parametrize(
    ("torch", "recorder"),
    [
        ("1.13.1", {}),
        ("2.1.2+cu121", {}),
        ("2.2.0", {**OLD, **DUMP}),
        ("2.7.1+rocm6.3", {**OLD, **DUMP}),
        ("2.8.0", {**NEW, **DUMP}),
        ("2.10.0", {**NEW, **DUMP}),
        ("2.11.0", PIPE),
        ("2.15.0+cu132", PIPE),
        ("3.0.0", PIPE),
        ("", {**OLD, **NEW, **DUMP}),
    ],
)
def test_the_recorder_by_the_version_that_is_installed(torch, recorder):
    assert values(Installed(torch, False)) == {**recorder, **ALWAYS}


@pytest.mark.parametrize(
    ("torch", "names"),
    [
        ("2.7.0", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}),
        ("2.15.0", {"TORCH_FR_DUMP_TEMP_FILE"}),
        ("", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"}),
    ],
)
def test_where_the_records_are_written(torch, names):
    found = values(Installed(torch, False), directory="/share/records/")
    of_files = {name: value for name, value in found.items() if name.endswith("TEMP_FILE")}
    assert of_files == dict.fromkeys(names, "/share/records/comm_lib_trace_rank_")


@pytest.mark.parametrize(("cuda", "there"), [(True, True), (None, True), (False, False)])
def test_cores_of_the_gpu_where_torch_was_built_for_them(cuda, there):
    found = values(Installed("2.15.0", cuda))
    assert ("CUDA_ENABLE_USER_TRIGGERED_COREDUMP" in found) is there
    assert ("CUDA_COREDUMP_PIPE" in found) is there


def test_nodes_with_several_versions_get_the_names_of_all():
    nodes = {"gpu1": Installed("2.7.0", True), "gpu2": Installed("2.9.0", True)}
    found = {one.name: one for one in debug_variables(nodes, "", WORD)}
    assert found["TORCH_NCCL_TRACE_BUFFER_SIZE"].notes == ("gpu2: not needed there, and harmless",)
    assert found["TORCH_FR_BUFFER_SIZE"].nodes_by_value == (("2000", ("gpu2",)),)
    assert all(one.settled and one.reason for one in found.values())


def test_a_node_that_does_not_tell_is_named():
    nodes = {"gpu1": Installed("2.15.0", True), "gpu2": Installed(why="there is no python3")}
    found = {one.name: one for one in debug_variables(nodes, "", WORD)}
    assert "gpu2: there is no python3" in found["TORCH_FR_BUFFER_SIZE"].notes
    assert found["NCCL_DEBUG"].notes == ()


def test_the_names_of_pipes_are_of_this_job_alone():
    one, two = (debug_variables({"n": Installed("2.15.0")}) for _ in range(2))
    assert one[0].name == "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    assert one[0].value != two[0].value


# --- How a node is asked.


def asked(python: str) -> Installed:
    done = subprocess.run(
        ["sh", "-c", question(python, "N")], capture_output=True, text=True, check=True
    )
    return read_installed(done.stdout, "N")


def environment(path: Path, text: str | None) -> str:
    """A Python with a torch of this version file; None: without any."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    (site,) = path.glob("lib/python*/site-packages")
    if text is not None:
        (site / "torch").mkdir()
        (site / "torch/__init__.py").write_text("raise SystemExit('imported')\n")
        (site / "torch/version.py").write_text(text)
    return str(path / "bin/python")


@pytest.mark.parametrize(
    ("text", "torch", "cuda"),
    [
        ("__version__ = '2.15.0+cu132'\ncuda: Optional[str] = '13.2'\n", "2.15.0+cu132", True),
        ("__version__ = '2.7.0+rocm6.3'\ncuda = None\nhip = '6.3.1'\n", "2.7.0+rocm6.3", False),
        ("__version__ = '1.13.1'\n", "1.13.1", False),
        ("__version__ = '2.9.0a0+git1'\ncuda = '12.8'\n", "2.9.0a0+git1", True),
    ],
)  # fmt: skip
def test_a_nodes_python_tells_without_importing_torch(tmp_path, text, torch, cuda):
    assert asked(environment(tmp_path, text)) == Installed(torch, cuda)


def test_a_python_without_torch(tmp_path):
    path = environment(tmp_path, None)
    assert asked(path) == Installed(why=f"{path} finds no torch")


@pytest.mark.parametrize("text", ["", "__version__ = 3\n", "__version__ = '$(reboot)'\n"])
def test_a_version_that_is_none(tmp_path, text):
    assert asked(environment(tmp_path, text)).torch == ""


def test_no_such_python():
    assert asked("/no/such/python; reboot") == Installed(why="there is no /no/such/python; reboot")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_runs_no_python_of_another_user(tmp_path):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    path.chmod(0o755)
    os.chown(path, 65534, 65534)
    assert asked(str(path)).why == f"root does not run {path}, which is not root's"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "said", ["", "N", "N version", "N version \x1b[2J", "X version 2.15.0", "N version 2", "N why"]
)
def test_an_answer_that_makes_no_sense(said):
    found = read_installed(said, "N")
    assert (found.torch, bool(found.why)) == ("", True)


def test_every_variable_is_one_that_a_shell_can_export():
    for one in debug_variables({"n": Installed()}, "/share/a b;$(reboot)", WORD):
        assert job_env.re.fullmatch("[A-Z][A-Z0-9_]*", one.name)
