"""Hostfiles of DeepSpeed, Open MPI, MPICH and Intel MPI, and files that are none."""

from pathlib import Path

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.fleet.inventory import hostfile
from nodeready.fleet.inventory import load as inventory
from tests.cases import cases


@pytest.mark.parametrize("case", cases(__file__, "data/hostfiles.json"))
def test_reads_hosts_and_slots_in_their_order(case, tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(case["text"].encode())
    assert list(hostfile.read(path).items()) == list(case["hosts"].items())


@pytest.mark.parametrize("case", cases(__file__, "data/hostfile_errors.json"))
def test_a_malformed_line_is_named_with_its_file_and_number(case, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(f"# good\ngpu0\n{case['line']}", errors="surrogateescape")
    with pytest.raises(InventoryError) as caught:
        inventory.load(str(path), cwd=tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert case["why"] in message
    assert message.isprintable()


def test_a_hostfile_without_hosts_or_without_end_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "hosts"
    for content in (b"", b"# nobody\n\n", b"\xef\xbb\xbf"):
        path.write_bytes(content)
        with pytest.raises(InventoryError, match="names no host"):
            inventory.load(str(path), cwd=tmp_path)
    path.write_text("gpu1 slots=8\nlogin1\n")
    loaded = inventory.load(str(path), cwd=tmp_path)
    assert [host.data.get("slots") for host in loaded] == [8, None]
    path.write_text("gpu1\n")
    monkeypatch.setattr(hostfile, "MAX_BYTES", 5)
    assert hostfile.read(path) == {"gpu1": None}
    monkeypatch.setattr(hostfile, "MAX_BYTES", 4)
    with pytest.raises(InventoryError, match="larger than 4 bytes"):
        hostfile.read(path)


def test_the_file_is_the_one_of_the_environment_or_of_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hostfile, "DEFAULT_FILES", ("./hostfile", str(tmp_path / "job")))
    with pytest.raises(InventoryError, match="NODEREADY_HOSTFILE"):
        hostfile.find({})
    (tmp_path / "job").write_text("c\n")
    assert hostfile.find({}) == tmp_path / "job"
    (tmp_path / "hostfile").write_text("a\n")
    assert hostfile.find({}) == Path("hostfile")
    assert hostfile.find({"NODEREADY_HOSTFILE": "/x/y"}) == Path("/x/y")
    with pytest.raises(InventoryError, match="cannot read the hostfile /x/y: No such file"):
        hostfile.read("/x/y")
