"""proof.diagnostic and proof.bandwidth: what the vendor's tools print, and what it means.

The files in data/active are shortened recordings: DCGM 2 of facebookresearch/gcm, DCGM 3 of
microsoft/VirtualClient and of DCGM's own test of its reader, DCGM 4 of baldwinSPC/glimmer-burnin
(a GB10), nvbandwidth 0.5 on an A10, 0.7 of NVIDIA/nvbandwidth issue 34, 0.10 on eight H100 and of
Azure/azurehpc-health-checks.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nodeready.agent.proofs import active
from nodeready.core import wire
from nodeready.core.base import Unknown
from nodeready.core.policy import Policy
from nodeready.runs.ready.run import WantedProofs
from nodeready.subjects.proof import checks, facts
from nodeready.subjects.proof.active import ACTIVE_CHECKS, NETWORK_CHECKS, with_medians
from nodeready.subjects.proof.facts import Bandwidth, CopyRate, Diagnostic, Proved, User
from nodeready.subjects.registry import SUBJECTS, SelectionError, select
from tests.builders.judging import by_name
from tests.cases import read_table
from tests.helpers import executable
from tests.paths import ROOT

DATA = Path(__file__).parent / "data" / "active"
USER = User("root", 0, True, "")
H100 = "NVIDIA H100 80GB HBM3"
TO_GPU, TO_HOST, PEERS = active._COPIES


def recorded(name: str) -> str:
    return (DATA / name).read_text()


def judged(name: str, observed: Any) -> str:
    proved = observed if isinstance(observed, Proved) else Proved(USER, **{name: observed})
    result = by_name(checks, proved, Policy())[name]
    return f"{result.status}: {result.actual}"


# --- What dcgmi prints.


@pytest.mark.parametrize(("name", "expected"), read_table(__file__, "dcgm"))
def test_each_form_of_dcgms_json(name, expected):
    assert judged("diagnostic", active.read_diagnostic(recorded(name), 1)) == expected


def dcgm4(*results: dict[str, Any], **test: Any) -> Diagnostic:
    tests = [{"name": "memory", "results": list(results), **test}]
    root = {"test_categories": [{"category": "Hardware", "tests": tests}]}
    return active.read_diagnostic(json.dumps({"DCGM Diagnostic": root}), 2)


def test_a_failed_test_has_its_gpu_and_its_text():
    good = {"entity_group": "GPU", "entity_id": 0, "status": "Pass"}
    text = {"warning": "Uncorrectable ECC memory error detected", "error_severity": 2}
    bad = {"entity_group": "GPU", "entity_id": 3, "status": "Fail", "warnings": [text]}
    summary = {"status": "Fail", "warnings": [text]}
    assert judged("diagnostic", dcgm4(good, bad, test_summary=summary)) == (
        "fail: memory on GPU 3: Uncorrectable ECC memory error detected"
    )
    # Only the summary knows it.
    assert judged("diagnostic", dcgm4(good, test_summary=summary)) == (
        "fail: memory: Uncorrectable ECC memory error detected"
    )
    # One severity of two is no configuration's, or there is none: it stays a failure.
    for warnings in ([{**text, "error_severity": 5}, text], [{"warning": "?"}], ["?"], "?"):
        found = dcgm4({"gpu_id": "3", "status": "FAIL", "warnings": warnings})
        assert judged("diagnostic", found).startswith("fail: memory on GPU 3: ")


def test_what_dcgm_says_without_a_result():
    error = '{"DCGM GPU Diagnostic": {"runtime_error": "Error: no\\nGPU"}}'
    found = active.read_diagnostic(error, 1)
    assert judged("diagnostic", found) == "unknown: dcgmi: Error: no GPU"
    skipped = dcgm4({"status": "Skip"})
    assert judged("diagnostic", skipped) == (
        "unknown: dcgmi diag -r 2: no test ran; skipped: memory"
    )
    assert judged("diagnostic", Diagnostic(absent="no GPU")) == "na: no GPU"


DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [
    "{", "{}", "{]", '{"DCGM Diagnostic": 7}', f'{{"DCGM Diagnostic": {DEEP}}}',
    '{"DCGM Diagnostic": {}, "DCGM Diagnostic": {}}', '{"a": ' + "9" * 5000 + "}",
    '{"a": "\\ud800"}',
])  # fmt: skip
def test_an_answer_that_is_no_diagnostic_is_refused(text):
    with pytest.raises(wire.DecodeError):
        active.read_diagnostic(text, 1)


@pytest.mark.parametrize("value", [None, 7, "x", [], {}, [None], [7], [{}], {"a": [{}]}, 1e99])
def test_no_value_of_the_wrong_kind_ends_the_reader(value):
    """And what it makes goes over the wire."""
    test = {"name": value, "results": [{"status": value}, {"status": "Fail", "warnings": value}],
            "test_summary": value}  # fmt: skip
    finding = {"status": "Fail", "entity_id": value, "entity_group": value,
               "warnings": [{"warning": value, "error_severity": value}]}  # fmt: skip
    categories = [{"tests": value}, {"tests": [test, {"name": "t", "results": [finding]}]}, value]
    for root in ({"test_categories": value}, {"test_categories": categories, "version": value}):
        document = {"DCGM Diagnostic": root, "metadata": value}
        found = active.read_diagnostic(json.dumps(document), 1)
        assert wire.decode(Diagnostic, json.loads(wire.line("n", "d", found)[4:])) == found


def test_the_numbers_of_findings_and_of_characters_are_bounded():
    many = [{"entity_id": n, "status": "Fail", "warnings": ["x" * 5000]} for n in range(5000)]
    found = dcgm4(*many)
    assert len(found.failed) == 64
    assert len(found.failed[0].text) == 300


# --- What nvbandwidth prints.


def rates(name: str, count: int, model: str = H100) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for rate in active.read_rates(recorded(name), dict.fromkeys(range(count), model)):
        found.setdefault(rate.test, []).append(rate.gbps)
    return found


def test_each_form_of_nvbandwidths_matrices():
    assert rates("nvbandwidth-0.10-h100.txt", 8) == {
        TO_HOST: [55.2, 55.2, 55.18, 55.18, 55.25, 55.25, 55.26, 55.2],
        TO_GPU: [55.37, 55.36, 55.37, 55.36, 55.36, 55.36, 55.36, 55.33],
    }
    assert rates("nvbandwidth-0.5-a10.txt", 1) == {TO_GPU: [25.17]}
    # The median of a row: a GPU with one slow peer is not slow. 0.00 is no measurement.
    assert rates("nvbandwidth-0.10-peers.txt", 3) == {PEERS: [276.22, 276.24, 138.1]}
    assert rates("nvbandwidth-0.7-a100-assert.txt", 1) == {}
    # A GPU that nvidia-smi does not list.
    assert rates("nvbandwidth-0.5-a10.txt", 0) == {}


def test_the_errors_of_each_link():
    found = active.read_link_errors(recorded("nvlink-e-h100.txt"))
    assert len(found) == 12
    assert {key: count for key, count in found.items() if count} == {
        (1, 0, "Replay"): 7, (1, 1, "CRC"): 2,
    }  # fmt: skip
    # Without the line of a GPU, with a number that none is, and Blackwell's names.
    for text in ("\t Link 0: CRC Errors: 1", f"GPU 0: x\n Link 0: CRC Errors: {'9' * 99}",
                 "GPU 0: x\n\t Link 0: Symbol Errors: 3"):  # fmt: skip
        assert active.read_link_errors(text) == {}
    assert judged("nvlink_errors", Proved(USER, bandwidth=Bandwidth())) == (
        "na: nvidia-smi nvlink -e counts no errors of these GPUs"
    )


def of(*gbps: float, test: str = TO_GPU, model: str = H100) -> Proved:
    found = [CopyRate(test, gpu, model, rate) for gpu, rate in enumerate(gbps)]
    return Proved(USER, bandwidth=Bandwidth(rates=tuple(found)))


def compared(**tested: Proved) -> dict[str, str]:
    return {
        node: judged("bandwidth", proved.bandwidth)
        for node, proved in with_medians(tested).items()
    }


def test_a_gpu_is_compared_with_the_median_of_its_model_on_all_nodes():
    text = f"GPU 1 copies from the host at 26.1 GB/s: the median of 5 {H100} is 55.2"
    assert compared(a=of(55.2, 26.1), b=of(55.0, 55.4, 55.3), c=of(24.0, 25.0, model="A10")) == {
        "a": f"fail: {text}",
        "b": "ok: from the host 55.0 GB/s",
        # Two GPUs tell nothing of each other.
        "c": "na: fewer than three GPUs of a model: there is no median to compare with",
    }
    # Recorded on healthy nodes: 5 % between the GPUs of one.
    assert compared(a=of(56.54, 56.53, 56.53, 56.56, 56.29, 56.47, 56.51, 53.61)) == {
        "a": "ok: from the host 53.6 GB/s"
    }


def test_a_node_has_no_more_voice_than_16_gpus_and_what_it_says_of_the_median_does_not_count():
    loud = of(*[500.0] * 2000)
    lying = CopyRate(TO_GPU, 0, H100, 55.0, median_gbps=500.0, compared=9)
    honest = {f"n{number}": of(*[55.0] * 8) for number in range(7)}
    found = compared(loud=loud, lying=Proved(USER, bandwidth=Bandwidth(rates=(lying,))), **honest)
    assert {name for name, text in found.items() if text[:2] != "ok"} == set()


def test_what_was_not_measured_stays_unknown():
    proved = Proved(USER, bandwidth=Unknown("did not finish in time"))
    assert with_medians({"a": proved}) == {"a": proved}


# --- Whether they are made.


def test_they_are_made_only_when_they_are_named_or_asked_for():
    chosen = {*select((), "proof", subjects=SUBJECTS).checks}
    assert not {*ACTIVE_CHECKS, *NETWORK_CHECKS} & chosen
    with pytest.raises(SelectionError):
        select((), "proof.diag*", subjects=SUBJECTS)
    chosen = select((), "proof.ssh", "proof.bandwidth", SUBJECTS, ACTIVE_CHECKS).checks
    assert chosen == ("proof.ssh", "proof.diagnostic", "proof.nvlink_errors")
    assert WantedProofs.of(ACTIVE_CHECKS, level=3) == WantedProofs(
        (), mesh=False, history=False, active=("bandwidth", "diagnostic"), level=3
    )


# --- The program, with stand-ins for the tools.

SMI = (
    'case "$1" in *compute*) {running};; nvlink) {links};; '
    '*) printf "0, {used}, 81559, {model}\\n";; esac'
)
TWO = facts.ACTIVE


def put(directory: Path, **tools: str) -> Path:
    for name, script in tools.items():
        executable(directory / name.replace("_", "-"), script)
    return directory


def smi(running: str = ":", used: int = 4, links: str = ":") -> str:
    return SMI.format(running=running, used=used, links=links, model=H100)


def start(directory: Path, limit_s: int = 30, level: int = 2) -> "subprocess.Popen[str]":
    config = f"ProofConfig('n', 'nodeready:test', proofs={tuple(TWO)}, limit_s={limit_s})"
    program = (
        "from nodeready.agent.proofs import active\n"
        "from nodeready.subjects.proof.facts import ProofConfig\n"
        f"active.main({config}, level={level})"
    )
    environment = {"PATH": f"{directory}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", program], env=environment, text=True, stdout=subprocess.PIPE
    )


def prove(directory: Path, **how: int) -> Proved:
    out = start(directory, **how).communicate(timeout=60)[0]
    return facts.read(out, facts.ProofConfig("n", "t", proofs=tuple(TWO)))


def told(directory: Path, **how: int) -> dict[str, str]:
    proved = prove(directory, **how)
    return {name: judged(name, getattr(proved, name)) for name in TWO}


def test_both_tools_run_on_idle_gpus(tmp_path):
    log = tmp_path / "words"
    directory = put(
        tmp_path,
        nvidia_smi=smi(),
        dcgmi=f'echo "$@" >>{log}; cat {DATA}/dcgm-3-level-3.json',
        nvbandwidth=f'echo "$@" >>{log}; cat {DATA}/nvbandwidth-0.5-a10.txt',
    )
    assert told(directory) == {
        "bandwidth": "na: fewer than three GPUs of a model: there is no median to compare with",
        "diagnostic": "ok: 4 tests passed; skipped: EUD Test",
    }
    assert log.read_text() == f"-t {TO_GPU} {TO_HOST} {PEERS}\ndiag -r 2 --json\n"


@pytest.mark.parametrize(("changes", "expected"), [
    ("", "ok: 4 links without new errors"),
    ("s/1: CRC Errors: 0/1: CRC Errors: 9/", "warn: GPU 0 link 1: 9 CRC"),
    ("$ s/CRC Errors: 2/CRC Errors: 1/; s/0: Replay Errors: 7/0: Replay Errors: 8/",
     "fail: GPU 1 link 0: 1 Replay"),
])  # fmt: skip
def test_errors_of_nvlink_count_that_come_during_the_copies(tmp_path, changes, expected):
    """Earlier ones, since the driver was loaded, do not."""
    directory = put(
        tmp_path,
        nvidia_smi=smi(links=f"cat {tmp_path}/links; sed -i '{changes}' {tmp_path}/links"),
        nvbandwidth=f"cat {DATA}/nvbandwidth-0.5-a10.txt",
    )
    (directory / "links").write_text(recorded("nvlink-e-h100.txt"))
    assert judged("nvlink_errors", prove(directory)) == expected


@pytest.mark.parametrize(("tool", "reason"), [
    (smi('printf "4711, python\\n"'), "the GPUs are in use: pid 4711 python"),
    (smi(used=40000), "GPU 0 is in use: 40000 of 81559 MiB of its memory are taken"),
    ("echo No devices were found; exit 6", "nvidia-smi: No devices were found"),
    (smi("exit 9"), "nvidia-smi: no answer"),
])  # fmt: skip
def test_a_gpu_that_is_in_use_is_left_alone(tmp_path, tool, reason):
    ran = tmp_path / "ran"
    directory = put(tmp_path, nvidia_smi=tool, dcgmi=f"touch {ran}", nvbandwidth=f"touch {ran}")
    assert told(directory) == dict.fromkeys(TWO, f"unknown: {reason}")
    assert not ran.exists()


def test_a_missing_tool_is_no_failure(tmp_path):
    assert told(tmp_path) == dict.fromkeys(TWO, "na: no nvidia-smi on the node")
    assert told(put(tmp_path, nvidia_smi=smi())) == {
        "bandwidth": "na: nvbandwidth is not installed",
        "diagnostic": "unknown: dcgmi is not installed",
    }


HOST = "Error: unable to establish a connection to the specified host: localhost"


@pytest.mark.parametrize(("dcgmi", "nvbandwidth", "expected"), [
    (f"echo {HOST}; exit 225", f"cat {DATA}/nvbandwidth-0.7-a100-assert.txt; exit 1",
     {"diagnostic": f"dcgmi diag -r 2: {HOST}",
      "bandwidth": "ASSERT in expression h_errorFlag == 0"}),
    (f"cat {DATA}/dcgm-3-level-3.json; exit 226", "exit 127",
     {"diagnostic": "dcgmi: exit status 226, although no test failed",
      "bandwidth": "nvbandwidth: exit status 127"}),
    # A gigabyte, and what is no JSON.
    ("echo '{'; head -c 1000000000 /dev/zero", "head -c 1000000000 /dev/zero",
     {"diagnostic": "dcgmi diag: the answer makes no sense (no JSON)",
      "bandwidth": "nvbandwidth: "}),
])  # fmt: skip
def test_a_tool_that_does_not_test(tmp_path, dcgmi, nvbandwidth, expected):
    found = told(put(tmp_path, nvidia_smi=smi(), dcgmi=dcgmi, nvbandwidth=nvbandwidth))
    for name, text in expected.items():
        assert found[name].startswith("unknown: ")
        assert text in found[name]


def test_at_its_limit_dcgmi_is_asked_to_stop_and_then_ended_with_its_children(tmp_path):
    """The host engine runs the test, and stops it only when dcgmi gets a signal."""
    asked, alive = tmp_path / "asked", tmp_path / "alive"
    sleeper = f"(trap '' TERM; while sleep 0.2; do date +%s%N >{alive}; done)"
    directory = put(
        tmp_path,
        nvidia_smi=smi(),
        nvbandwidth=f"cat {DATA}/nvbandwidth-0.5-a10.txt",
        dcgmi=f"trap 'touch {asked}; exit 1' TERM; {sleeper} & while :; do sleep 0.1; done",
    )
    began = time.monotonic()
    text = told(directory, limit_s=7)["diagnostic"]
    assert text.startswith("unknown: dcgmi diag -r 2: did not end within ")
    assert text.endswith("and was stopped: give more --budget")
    assert time.monotonic() - began < 20
    assert asked.exists()
    last = alive.read_text()
    time.sleep(0.6)
    assert alive.read_text() == last
    # The same when the program itself is ended.
    asked.unlink()
    program = start(directory, limit_s=50)
    while not alive.exists() or alive.read_text() == last:
        time.sleep(0.1)
    # `timeout` passes on the signal that the whole group gets.
    program.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    program.send_signal(signal.SIGTERM)
    assert program.wait(10) == 128 + signal.SIGTERM
    assert asked.exists()
    last = alive.read_text()
    time.sleep(0.6)
    assert alive.read_text() == last
