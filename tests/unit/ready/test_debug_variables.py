"""What makes a job debuggable: the names of the installed PyTorch, and how it is asked for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nodeready.runs.ready.environment import (
    InstalledTorch,
    debug_variables,
    question,
    read_installed,
)
from tests.cases import read_table

WORD = "0a1b2c3d"


def variables(*installed, directory=""):
    nodes = {f"gpu{number}": torch for number, torch in enumerate(installed, 1)}
    return {variable.name: variable for variable in debug_variables(nodes, directory, WORD)}


def values(*installed, **how):
    return {name: variable.value for name, variable in variables(*installed, **how).items()}


ALWAYS = {"NCCL_DEBUG": "WARN", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
PIPE = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"/dev/shm/nodeready-{WORD}-"}
#: Variables by the words of the rows.
NAMED = {
    "PIPE": PIPE, "DUMP": {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", **PIPE},
    "OLD": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, "NEW": {"TORCH_FR_BUFFER_SIZE": "2000"},
    "CUDA": {"CUDA_LAUNCH_BLOCKING": "1"},
    "AMD": {"HIP_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3"},
    "UNSAFE": {"CUDA_LAUNCH_BLOCKING": None},
}  # fmt: skip


def named(words):
    return {name: value for word in words.split() for name, value in NAMED[word].items()}


@pytest.mark.parametrize(("torch", "recorder", "files"), read_table(__file__, "recorders"))
def test_the_recorder_of_the_installed_version_and_its_files(torch, recorder, files):
    assert values(InstalledTorch(torch, False)) == {**named(recorder), **ALWAYS}
    if files is not None:
        by_name = values(InstalledTorch(torch, False), directory="/share/records/")
        by_name = {name: value for name, value in by_name.items() if name.endswith("TEMP_FILE")}
        assert by_name == dict.fromkeys(files.split(), "/share/records/comm_lib_trace_rank_")


def test_cores_of_the_gpu_where_torch_was_built_for_them():
    for cuda, is_there in ((True, True), (None, True), (False, False)):
        names = values(InstalledTorch("2.15.0", cuda))
        for name in ("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", "CUDA_COREDUMP_PIPE"):
            assert (name in names) is is_there


def test_nodes_with_several_versions_get_the_names_of_all():
    by_name = variables(InstalledTorch("2.7.0", True), InstalledTorch("2.9.0", True))
    assert by_name["TORCH_NCCL_TRACE_BUFFER_SIZE"].notes == (
        "gpu2: not needed there, and harmless",
    )
    assert by_name["TORCH_FR_BUFFER_SIZE"].nodes_by_value == (("2000", ("gpu2",)),)
    assert all(variable.settled and variable.reason for variable in by_name.values())
    # A node without a version is named.
    by_name = variables(
        InstalledTorch("2.15.0", True), InstalledTorch(reason="there is no python3")
    )
    assert "gpu2: there is no python3" in by_name["TORCH_FR_BUFFER_SIZE"].notes
    assert by_name["NCCL_DEBUG"].notes == ()


def test_every_variable_is_one_that_a_shell_can_export_and_pipes_are_of_this_job_alone():
    pipes = set()
    for _ in range(2):
        by_name = {
            variable.name: variable
            for variable in debug_variables({"n": InstalledTorch()}, "/a b;$(reboot)")
        }
        assert all(re.fullmatch("[A-Z][A-Z0-9_]*", name) for name in by_name)
        pipes.add(by_name["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"].value)
    assert len(pipes) == 2


@pytest.mark.parametrize(("torch", "nccl", "cuda", "wanted"), read_table(__file__, "launches"))
def test_a_launch_waits_for_its_kernel_where_nccl_does_not_hang_with_it(torch, nccl, cuda, wanted):
    nodes = {"gpu1": InstalledTorch(torch, cuda, "", nccl)}
    by_name = {one.name: one for one in debug_variables(nodes, debug=False, sync_cuda=True)}
    assert {name: one.value for name, one in by_name.items()} == named(wanted)
    if wanted == "UNSAFE":
        (variable,) = by_name.values()
        assert not variable.settled
        assert re.fullmatch("gpu1: NCCL 2.1[46].[23] hangs .* 2.17 or newer", variable.reason)
        nodes = {"gpu2": InstalledTorch("2.9.0", True, "", "2.27.5"), **nodes}
        assert debug_variables(nodes, debug=False, sync_cuda=True) == (variable,)


# --- How a node is asked.


def query(python: str) -> InstalledTorch:
    done = subprocess.run(
        ["sh", "-c", question(python, "N")], capture_output=True, text=True, check=True
    )
    return read_installed(done.stdout, "N")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A factory: a Python with a torch of this version file; None: without torch."""
    path = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
    (site,) = path.glob("lib/python*/site-packages")

    def make(text):
        if text is not None:
            (site / "torch").mkdir(exist_ok=True)
            (site / "torch/__init__.py").write_text("raise SystemExit('imported')\n")
            (site / "torch/version.py").write_text(text)
        return str(path / "bin/python")

    return make


def test_a_nodes_python_answers_without_importing_torch(environment):
    path = environment(None)
    assert query(path) == InstalledTorch(reason=f"{path} finds no torch")
    for text, torch, cuda in (
        ("__version__ = '2.15.0+cu132'\ncuda: Optional[str] = '13.2'\n", "2.15.0+cu132", True),
        ("__version__ = '2.7.0+rocm6.3'\ncuda = None\nhip = '6.3.1'\n", "2.7.0+rocm6.3", False),
        ("__version__ = '1.13.1'\n", "1.13.1", False),
        ("__version__ = '2.9.0a0+git1'\ncuda = '12.8'\n", "2.9.0a0+git1", True),
    ):
        assert query(environment(text)) == InstalledTorch(torch, cuda)
    (site,) = Path(path).parents[1].glob("lib/python*/site-packages")
    (site / "nvidia_nccl_cu11-2.14.3.dist-info").mkdir()
    assert query(environment("__version__ = '2.0.1'\ncuda = '11.7'\n")).nccl == "2.14.3"
    for text in ("", "__version__ = 3\n", "__version__ = '$(reboot)'\n"):
        assert query(environment(text)).torch == ""
    assert query("/no/such/python; reboot") == InstalledTorch(
        reason="there is no /no/such/python; reboot"
    )


def test_an_answer_that_makes_no_sense():
    for answer in ("", " version", " version \x1b[2J", " version 2", " why"):
        installed = read_installed(f"N{answer}", "N")
        assert (installed.torch, bool(installed.reason)) == ("", True)
    assert read_installed("", "N").reason
    assert read_installed("X version 2.15.0", "N").reason
