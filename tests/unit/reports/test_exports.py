"""The lines for a shell and the JSON: readable, valid, and never a node's code."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import jsonschema
import pytest

from nodeready.ready import job_env
from nodeready.ready.job_env import Environment, Variable
from nodeready.reports import exports, json_report
from nodeready.subjects.base import Unknown
from nodeready.subjects.snapshot import Snapshot
from tests.builders.job_env import POLICY, nics, node, ports, rdma, socket
from tests.paths import schema

SCHEMA = schema("env")
VALID = jsonschema.Draft202012Validator(SCHEMA)
WHEN = "2026-03-01T12:00:00Z"


def fleet(nodes: Iterable[Snapshot], missing: job_env.Groups = ()) -> Environment:
    named = {f"gpu{number:03}": one for number, one in enumerate(nodes, 1)}
    found = job_env.variables(named, dict.fromkeys(named, POLICY))
    return Environment(WHEN, tuple(named), missing, found)


EVIL = "x'; touch pwned; $(touch pwned)`touch pwned`\ntouch pwned\r\x85\u2028touch pwned\x1b[2J"
FLEETS = {
    "good": fleet([node()] * 64),
    "one": fleet([node(rdma=rdma())]),
    "differs": fleet([*[node()] * 63, node(nics=nics("eth1"), rdma=rdma())], ((EVIL, ("a",)),)),
    "halves": fleet([node(), node(nics=nics("eth1", "eth0"))]),
    "unknown": fleet([node(), node(nics=Unknown(EVIL), ports=Unknown(EVIL))]),
    "blind": fleet([Snapshot()]),
    "hostile": fleet(
        [
            node(nics=nics("$(reboot)"), ports=ports(socket(29500, EVIL))),
            node(rdma=rdma("mlx5_0;id")),
            node(ports=ports(socket(29501, EVIL))),
        ]
    ),
    "debug": Environment(
        WHEN,
        ("gpu001",),
        (),
        job_env.debug_variables({"gpu001": job_env.Installed(why=EVIL)}, "/share/fr", "0a1b"),
    ),
    "taken": fleet([node(ports=ports(*(socket(p, f"j{p}") for p in range(29500, 29511))))]),
}


def text(found: Environment) -> str:
    return "".join(exports.shell_lines(found))


def test_how_it_looks_where_all_agree() -> None:
    assert (
        text(FLEETS["good"])
        == """\
# nodeready env, 2026-03-01T12:00:00Z: gpu[001-064] (64 nodes)

# its routes lead to the other nodes
export NCCL_SOCKET_IFNAME='=eth0'

# its routes lead to the other nodes
export GLOO_SOCKET_IFNAME=eth0

# active InfiniBand ports at 400 Gb/s
export NCCL_IB_HCA='=mlx5_0,mlx5_1'

# pdsh is installed, and its own default may be rsh
export PDSH_RCMD_TYPE=ssh

# the first of 29500-29510 that is free on all nodes
export MASTER_PORT=29500
"""
    )
    assert list(exports.troubles(FLEETS["good"])) == []


def test_how_it_looks_where_one_differs() -> None:
    found = fleet(
        [*[node()] * 63, node(nics=nics("eth1"), rdma=rdma(), ports=ports(socket(29500)))],
        (("no answer in 15 s", ("gpu065",)),),
    )
    assert (
        text(found)
        == """\
# nodeready env, 2026-03-01T12:00:00Z: gpu[001-064] (64 nodes)
# not among them: gpu065: no answer in 15 s

# NCCL_SOCKET_IFNAME is not set: the nodes differ
#   =eth0  gpu[001-063]
#   =eth1  gpu064
# mend gpu064, or give each node its own value in a file there
# =eth0,eth1 means the right one on each: no node has two of them

# GLOO_SOCKET_IFNAME is not set: the nodes differ
#   eth0  gpu[001-063]
#   eth1  gpu064
# mend gpu064, or give each node its own value in a file there

# NCCL_IB_HCA is not set: the nodes differ
#   =mlx5_0,mlx5_1  gpu[001-063]
#   nothing         gpu064
# mend gpu064, or give each node its own value in a file there

# pdsh is installed, and its own default may be rsh
export PDSH_RCMD_TYPE=ssh

# the first of 29500-29510 that is free on all nodes
# not 29500 on gpu064: python3 of ada listens
export MASTER_PORT=29501
"""
    )
    assert list(exports.troubles(found)) == [
        "NCCL_SOCKET_IFNAME is not set: the nodes differ: =eth0 on gpu[001-063]; =eth1 on gpu064",
        "GLOO_SOCKET_IFNAME is not set: the nodes differ: eth0 on gpu[001-063]; eth1 on gpu064",
        "NCCL_IB_HCA is not set: the nodes differ: "
        "=mlx5_0,mlx5_1 on gpu[001-063]; nothing on gpu064",
    ]


def test_what_is_unknown_is_named_beside_the_value() -> None:
    found = fleet([node(), node(), node(ports=Unknown("timed out"))])
    assert text(found).endswith(
        "\n# the first of 29500-29510 that is free on all nodes\n"
        "# unknown on gpu003: timed out\nexport MASTER_PORT=29500\n"
    )
    assert list(exports.troubles(found)) == ["MASTER_PORT is unknown on gpu003: timed out"]


def test_where_nobody_is_in_the_majority_nobody_is_to_be_mended() -> None:
    shown = text(FLEETS["halves"])
    assert "# give each node its own value in a file there\n" in shown
    assert "mend" not in shown


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh"])
def test_a_shell_takes_the_values_and_nothing_else(name: str, shell: str, tmp_path: Path) -> None:
    words = shell.split()
    if not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed")
    found = FLEETS[name]
    script = 'eval "$1"; echo "status $?"; env -0'
    done = subprocess.run(
        [*words, "-c", script, "sh", text(found)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        check=True,
    )
    status, _, rest = done.stdout.partition("\n")
    assert (status, done.stderr) == ("status 0", "")
    known = dict(one.split("=", 1) for one in rest.split("\0") if one)
    for one in found.variables:
        assert known.get(one.name) == one.value
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FLEETS)
def test_comments_fit_a_terminal_and_cannot_steer_it(name: str) -> None:
    shown = text(FLEETS[name])
    for line in shown.split("\n"):
        assert line[:1] in ("", "#") or line.startswith("export "), line
        assert len(line) <= 80, line
    for told in (shown, "".join(json_report.env(FLEETS[name]))):
        assert not {c for c in told if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u2028"} - {
            "\n"
        }


@pytest.mark.parametrize("name", FLEETS)
def test_json_is_as_its_schema_says(name: str) -> None:
    found = FLEETS[name]
    made = json.loads("".join(json_report.env(found)))
    VALID.validate(made)
    assert {one["name"]: one["value"] for one in made["variables"]} == {
        one.name: one.value for one in found.variables
    }


def test_the_schema_is_strict() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    good = json.loads("".join(json_report.env(FLEETS["differs"])))
    for spoil in (
        lambda doc: doc.update(more=1),
        lambda doc: doc["variables"][0].update(value="$(id)"),
        lambda doc: doc["variables"][0].pop("reason"),
        lambda doc: doc["variables"][0]["nodes_by_value"][0].update(nodes=[]),
        lambda doc: doc.update(taken="yesterday"),
    ):
        bad = json.loads(json.dumps(good))
        spoil(bad)
        assert not VALID.is_valid(bad)


def test_a_name_of_zsh_is_quoted() -> None:
    """Of a bare ``=eth0``, zsh would look for a command eth0."""
    one = Variable("A", "=eth0", "why", True)
    assert "export A='=eth0'\n" in text(Environment(WHEN, ("n",), (), (one,)))
