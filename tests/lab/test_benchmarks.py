"""The deploy benchmark runs to its end and reports every contender. No number is judged here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.paths import ROOT

EACH = ("nodeready deploy", "pyinfra deploy.py", "stock pyinfra operations")


def benchmark(name: str, lab: str, document: Path, *words: str) -> str:
    """Run a benchmark on two nodes without Ansible; what it printed."""
    argv = [ROOT / "benchmarks" / "run", name, "--nodes", "2", "--repeat", "1"]
    argv += ["--without-ansible", "--name", lab, "-o", document, *words]
    done = subprocess.run(
        [str(word) for word in argv],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_contender_is_in_the_table(own_lab: str, tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text("# Numbers\n\nkept\n\n<!-- begin deploy -->old<!-- end deploy -->\n")
    shown = benchmark("deploy", own_lab, document)
    text = document.read_text()
    assert text.startswith("# Numbers\n\nkept\n")
    assert "old" not in text
    for name in EACH:
        for phase in ("first deploy", "nothing to do"):
            row = f"{name}, {phase}"
            assert row in shown
            assert sum(line.startswith(f"| {row} ") for line in text.splitlines()) == 1, row
    assert "pyinfra exec -- true (E)" in shown
    # The one number that is no timing: a look is one command, whatever the machine does.
    (look,) = [line for line in text.splitlines() if line.startswith(f"| {EACH[0]}, nothing")]
    assert look.rstrip(" |").split("|")[-2].strip() == "1"


def test_the_audit_benchmark_reports_everybody(own_lab: str, tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    benchmark("audit", own_lab, document, "--simulated", "20")
    text = document.read_text()
    for name in ("nodeready audit", "pyinfra fact, one by one", "pdsh true", "clush true"):
        assert sum(line.startswith(f"| {name} ") for line in text.splitlines()) == 1, name
    for row in ("20 cpu, ", "20 h100, "):
        assert f"| {row}" in text
    (look,) = [line for line in text.splitlines() if line.startswith("| nodeready audit ")]
    assert look.rstrip(" |").split("|")[-2].strip() == "1"


def test_the_nodes_own_program_is_measured_on_both_kinds_of_node(
    own_lab: str, tmp_path: Path
) -> None:
    document = tmp_path / "benchmarks.md"
    benchmark("local", own_lab, document)
    text = document.read_text()
    for name in (
        "python3 -c pass (P)",
        "the look alone",
        "nodeready.pyz audit",
        "compiled.pyz audit",
    ):
        assert sum(line.startswith(f"| {name} ") for line in text.splitlines()) == 2, name
    for profile in ("cpu", "h100"):
        assert f"### On a node, profile {profile}" in text


def test_stacks_are_measured_beside_py_spy_by_hand(own_lab: str, tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    benchmark("capture", own_lab, document, "--repeat", "2")
    text = document.read_text()
    for name in ("py-spy dump, one rank per node (Y)", "nodeready stacks --samples 1"):
        assert sum(line.startswith(f"| {name} ") for line in text.splitlines()) == 1, name
    assert "py-spy dump --native, a plain Python" in text


def test_the_start_is_measured_of_every_command_line(tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    argv = [str(ROOT / "benchmarks" / "run"), "start", "--repeat", "1", "-o", str(document)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    text = document.read_text()
    for name in ("nodeready --help", "nodeready audit --help", "completion of an option"):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
        modules = int(row.rstrip(" |").split("|")[-1])
        assert 100 < modules < 500, row
