"""Hostfiles of DeepSpeed, Open MPI, MPICH and Intel MPI, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyinfra.api.exceptions import InventoryError

from nodeready.inventory import hostfile
from nodeready.inventory import load as inventory


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu001 slots=8\ngpu002 slots=4\n", {"gpu001": 8, "gpu002": 4}),
        ("gpu002:8\ngpu001:8", {"gpu002": 8, "gpu001": 8}),
        ("gpu1 slots=8 max_slots=16\ngpu2 slots = 2 max-slots=4\n", {"gpu1": 8, "gpu2": 2}),
        ("gpu1:8 ifname=ib0\n", {"gpu1": 8}),
        ("# all of them\r\n\r\n  gpu1 # bare\r\ngpu2\tslots=1\r\n", {"gpu1": None, "gpu2": 1}),
        ("\ufeffgpu1\n", {"gpu1": None}),
        ("gpu[01-02] slots=8\nold[1,3]:4\n", {"gpu01": 8, "gpu02": 8, "old1": 4, "old3": 4}),
        (
            "[fe80::1]:8\nfe80::2\n[fe80::3] slots=2\n",
            {"fe80::1": 8, "fe80::2": None, "fe80::3": 2},
        ),
        ("10.0.0.1:8\n", {"10.0.0.1": 8}),
        ("gpu1\ngpu2\ngpu1\ngpu1 slots=4\n", {"gpu1": 6, "gpu2": None}),
    ],
)
def test_reads_hosts_and_slots_in_their_order(text: str, hosts: dict[str, int | None]) -> None:
    content = text.encode().decode("utf-8-sig")
    assert list(hostfile.parse(content, "f").items()) == list(hosts.items())
    assert hostfile.parse(hostfile.render(hosts), "rendered") == hosts


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("gpu1 slots=", "slots="),
        ("gpu1 slots=eight", "slots are a number"),
        ("gpu1 slots=-1", "slots are a number"),
        ("gpu1 slots=99999999999999999999", "slots are a number"),
        ("gpu1 gpu2", "'gpu2' is not understood"),
        ("gpu1:eight", "is no host name"),
        ("gpu[1-", "missing bracket"),
        ("gpu[1-99999999]", "the most is 65,536"),
        ("-oProxyCommand=x slots=8", "dash"),
        ("$(reboot) slots=8", "is no host name"),
        ("a;b", "is no host name"),
        ("a\x1b]0;owned\x07", r"\x1b"),
        ("alice@gpu1", "ssh_user"),
        ("hosts: {web: gpu1}", "is not understood"),
        ("[gpu]", "is no range"),
        ("caf\\xe9", "is no host name"),
    ],
)
def test_a_malformed_line_is_named_with_its_file_and_number(
    line: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(
        b"# good\ngpu0\n" + line.replace("\\xe9", "\udce9").encode("utf-8", "surrogateescape")
    )
    with pytest.raises(InventoryError) as caught:
        inventory.load(str(path), cwd=tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert why in message
    assert message.isprintable()


@pytest.mark.parametrize("content", [b"", b"# nobody\n\n", b"\xef\xbb\xbf"])
def test_a_hostfile_without_hosts_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    with pytest.raises(InventoryError, match="names no host"):
        inventory.load(str(path), cwd=tmp_path)


def test_slots_become_host_data(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("gpu[1-2] slots=8\nlogin1\n")
    loaded = inventory.load(str(path), cwd=tmp_path)
    assert [(host.name, host.data.get("slots")) for host in loaded] == [
        ("gpu1", 8),
        ("gpu2", 8),
        ("login1", None),
    ]


def test_finds_the_file_that_is_named_else_the_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
