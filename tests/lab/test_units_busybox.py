"""The scripts of the probes under busybox, of which unit tests ask the same of sh and bash."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.subjects import test_gpus_kernel_log as kernel_log
from tests.unit.subjects import test_gpus_nvidia, test_gpus_pci, test_rdma_script

BUSYBOX = ["busybox", "ash"]
pytestmark = pytest.mark.skipif(not shutil.which("busybox"), reason="no busybox here")


@pytest.mark.parametrize(
    "question",
    [
        test_gpus_nvidia.test_the_script_sees_what_runs,
        test_gpus_pci.test_the_script_reads_only_gpus,
        test_rdma_script.test_it_reads_what_is_there,
        test_rdma_script.test_gids_beyond_the_first_16_are_not_read,
        test_rdma_script.test_adapters_without_a_device_and_virtual_functions,
        test_rdma_script.test_nothing_there_prints_nothing,
    ],
)
def test_the_shell(question: Any, tmp_path: Path) -> None:
    question(BUSYBOX, tmp_path)


def test_the_shell_in_a_step_of_slurms() -> None:
    test_gpus_nvidia.test_the_script_knows_what_a_step_of_slurms_may_not_open(BUSYBOX)


@pytest.mark.parametrize(
    "question",
    [
        kernel_log.test_each_line_gets_the_verdict_of_its_source,
        kernel_log.test_each_line_without_a_device_gets_its_verdict,
        kernel_log.test_a_sentence_of_three_lines_names_its_device,
        kernel_log.test_sources_codes_and_counts,
        kernel_log.test_a_storm_is_counted_and_hides_nothing,
        kernel_log.test_a_new_load_of_the_driver_ends_what_a_reset_would_have,
        kernel_log.test_what_the_ring_has_lost_comes_from_the_journal,
        kernel_log.test_a_fault_beside_such_a_process_counts,
    ],
)
def test_the_awk(question: Any, tmp_path: Path) -> None:
    question(kernel_log.scanner(tmp_path, "busybox awk"))
