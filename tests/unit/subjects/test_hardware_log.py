"""Faults of hardware that is no GPU in the kernel's log, chosen by the node's own awk."""

import re
from types import SimpleNamespace

import pytest

from nodeready import knowledge
from nodeready.core.policy import Policy
from nodeready.subjects import hardware_log
from nodeready.subjects.gpus import kernel_log
from nodeready.subjects.host.checks import kernel_faults as of_host
from nodeready.subjects.nics.checks import kernel_faults as of_nics
from tests.cases import cases
from tests.unit.subjects.test_gpus_kernel_log import BOOT, scanner


@pytest.mark.parametrize("case", cases(__file__, "data/hardware_lines.json"))
def test_a_fault_stands_until_it_is_cured(case, tmp_path):
    """at_once: the lines are of one moment; every_s: seconds between them, else 1; uptime_s: the
    node's, if the log is old.
    """
    lines = case["lines"] * case.get("times", 1)
    every_s = case.get("every_s", 1)
    moments = [0 if case.get("at_once") else number * every_s for number in range(len(lines))]
    text = "".join(
        f"[  {90 + at}.000001] {line}\n" for at, line in zip(moments, lines, strict=True)
    )
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/uptime").write_text(f"{case.get('uptime_s', 400)}.25 1000.0\n")
    outputs = {kernel_log.SECTION.name: scanner(tmp_path)(BOOT + text)}
    for subject, check in (("host", of_host), ("nics", of_nics)):
        observed = SimpleNamespace(kernel_log=kernel_log.hardware(outputs, subject))
        result = check(observed, Policy())
        assert result.status == case.get(subject, "ok"), (subject, result.actual)


@pytest.mark.parametrize("key", hardware_log.ROWS)
def test_awk_sends_each_example_and_each_cure(key):
    row, examples = hardware_log.ROWS[key], knowledge.read("kernel_lines")[key]
    # All but the section of the firmware's record, which awk reads by itself.
    assert all(re.search(row.words, line) for line in examples["matches"])
    cures = examples.get("cures", [])
    assert bool(cures) == (row.cured is not None)
    assert all(row.cured.match(line) and re.search(row.words, line) for line in cures)
    assert not re.search(r"[/'{}\\]", row.words)
