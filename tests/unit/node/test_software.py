"""The software of a process: the libraries that it has mapped, and what brought them."""

import mmap
import os

import pytest

from nodeready.agent.witnesses import software

OWN = "site-packages/nvidia/nccl/lib/libnccl.so.2"


@pytest.mark.parametrize(("variable", "mapped", "expected"), [
    ("LD_PRELOAD=/x.so:{}/opt/libnccl.so.2.18.3", "opt/libnccl.so.2.18.3", "LD_PRELOAD"),
    ("LD_LIBRARY_PATH=relative:{}/link", "opt/libnccl.so.2.18.3", "LD_LIBRARY_PATH"),
    ("LD_LIBRARY_PATH={}/link", OWN, ""),
    ("PATH={}/opt", "opt/libnccl.so.2.18.3", ""),
])  # fmt: skip
def test_where_the_nccl_of_a_process_comes_from(variable, mapped, expected, tmp_path, monkeypatch):
    files = {
        "opt/libnccl.so.2.18.3": "x", OWN: "x", "lib/libcuda.so.575.57.08": "x",
        "site-packages/torch/lib/libtorch_cuda.so": "x",
        "site-packages/torch/version.py": "__version__ = '2.6.0+cu124'\n",
        "site-packages/nvidia_nccl_cu12-2.21.5.dist-info/METADATA": "",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "link").symlink_to("opt")
    maps = []
    for name in (mapped, "lib/libcuda.so.575.57.08", "site-packages/torch/lib/libtorch_cuda.so"):
        with (tmp_path / name).open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    data = f"A=b\0{variable.format(tmp_path)}\0".encode()
    monkeypatch.setattr(software.processes, "environment_bytes", lambda pid: data)
    versions = software.observe(os.getpid(), os.getuid())
    assert (versions.nccl_by, versions.nccl_path) == (expected, str(tmp_path / mapped))
    assert versions.nccl == ("2.21.5" if mapped == OWN else "2.18.3")
    assert (versions.torch, versions.driver) == ("2.6.0+cu124", "575.57.08")
    assert versions.nccl_own == "2.21.5"
    for file_map in maps:
        file_map.close()
