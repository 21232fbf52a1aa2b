"""The program on a node that runs the vendor's tests on idle GPUs: nvbandwidth and dcgmi diag.

A test takes the GPUs for seconds to half an hour. None is started while a process has memory on a
GPU. At its deadline or the program's, a tool gets SIGTERM. dcgmi then stops the test in DCGM's
host engine, which is not a child of dcgmi (its Diag.cpp). Then the tool's processes are killed.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from nodeready.agent import runtime
from nodeready.agent.proofs.session import BrokenProof
from nodeready.agent.runtime import Ended, ProcessSupervisor
from nodeready.core import wire
from nodeready.core.shell import find_program
from nodeready.subjects.proof import facts

_GRACE_S = 3  # seconds that a tool has to end after SIGTERM; less than the program itself has
#: Maximum seconds of nvidia-smi, and of nvbandwidth, which takes about 20 with eight GPUs.
_SMI_S, _BANDWIDTH_S = 20, 180
#: Above this percentage of used memory without a visible process, a hidden process is assumed (a
#: container's). The driver of an idle data centre GPU uses less.
_OCCUPIED_PERCENT = 10
_MAX_TEXT, _MAX_FINDINGS = 300, 64
_ENVIRONMENT = {"LC_ALL": "C", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _line(text: object, maximum: int = _MAX_TEXT) -> str:
    """A text of a tool on one line."""
    return " ".join(str(text).split())[:maximum]


class IdleTools:
    """Runs the tools. `models` has the GPU's number -> its model, once `busy` has looked."""

    def __init__(self, supervisor: ProcessSupervisor) -> None:
        self._supervisor = supervisor
        self.models: dict[int, str] = {}

    def missing(self, name: str) -> str:
        """Why a tool cannot be used; "": it can."""
        path = find_program(name)
        if path is None:
            return f"{name} is not installed"
        return "" if runtime.changeable_by_root_only(path) else f"{path} can be changed by users"

    def run(self, name: str, *words: str, limit_s: float = 3600) -> Ended:
        """Run a tool within the time that is left. Raises OSError."""
        limit_s = max(0.2, min(limit_s, self._supervisor.left_s - _GRACE_S - 1))
        environment = {**os.environ, **_ENVIRONMENT}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        return self._supervisor.run([str(find_program(name)), *words], limit_s, env=environment)

    def busy(self) -> str:
        """Why the GPUs may not be used now; "": they are idle."""
        csv = "--format=csv,noheader,nounits"
        running = self.run("nvidia-smi", "--query-compute-apps=pid,name", csv, limit_s=_SMI_S)
        query = "--query-gpu=index,memory.used,memory.total,name"
        listed = self.run("nvidia-smi", query, csv, limit_s=_SMI_S)
        rows = [row.split(", ", 3) for row in listed.out.splitlines()]
        gpus = [row for row in rows if len(row) == 4 and row[0].isdecimal()][:_MAX_FINDINGS]
        if running.rc != 0 or listed.rc != 0 or not gpus:
            ended = running if running.rc != 0 else listed
            return f"nvidia-smi: {_line(ended.first) or 'no answer'}"
        self.models = {int(index): _line(model, 80) for index, _, _, model in gpus}
        processes = [row.replace(", ", " ", 1) for row in running.out.splitlines() if row.strip()]
        if processes:
            return _line(f"the GPUs are in use: pid {'; pid '.join(processes[:4])}")
        for index, used, total, _ in gpus:
            # A GPU that shares the processor's memory shows "[N/A]" instead of numbers.
            is_counted = used.isdecimal() and total.isdecimal()
            if is_counted and 100 * int(used) > _OCCUPIED_PERCENT * int(total):
                return f"GPU {index} is in use: {used} of {total} MiB of its memory are taken"
        return ""


# --- nvbandwidth.

_COPIES = ("host_to_device_memcpy_ce", "device_to_host_memcpy_ce",
           "device_to_device_memcpy_read_ce")  # fmt: skip
_RUNNING = re.compile(r"\s*Running (\w{1,60})\.\s*")
# A row of a matrix. The header of its columns has no decimal point.
_ROW = re.compile(r"\s*(\d{1,3})((?:\s+(?:\d{1,9}\.\d{1,9}|N/A))+)\s*")


def read_rates(text: str, models: Mapping[int, str]) -> Iterator[facts.CopyRate]:
    """What nvbandwidth printed (0.5 to 0.10), for each test and GPU; a test that it waives has no
    rate. The columns of a row of the host are the GPUs; else a GPU has a row with its peers.
    """
    rates: dict[tuple[str, int], list[float]] = {}
    test, by_column = "", False
    for line in text.splitlines():
        if match := _RUNNING.fullmatch(line):
            test = match[1]
        elif "(row)" in line:
            by_column = "CPU(row)" in line
        elif test in _COPIES and (match := _ROW.fullmatch(line)):
            for column, cell in enumerate(match[2].split()):
                if cell != "N/A" and float(cell) > 0:
                    gpu = column if by_column else int(match[1])
                    rates.setdefault((test, gpu), []).append(float(cell))
    for (test, gpu), values in rates.items():
        if gpu in models:
            yield facts.CopyRate(test, gpu, models[gpu], round(statistics.median(values), 2))


# GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-…)
#          Link 0: Replay Errors: 0
_LINKED_GPU = re.compile(r"GPU (\d{1,4}): .*")
_LINK_ERRORS = re.compile(r"\s+Link (\d{1,3}): (Replay|Recovery|CRC) Errors: (\d{1,18})\s*")


def read_link_errors(text: str) -> dict[tuple[int, int, str], int]:
    """(GPU, link, kind) -> the errors since the driver was loaded (``nvidia-smi nvlink -e``)."""
    counts: dict[tuple[int, int, str], int] = {}
    gpu = None
    for line in text.splitlines():
        if match := _LINKED_GPU.fullmatch(line):
            gpu = int(match[1])
        elif gpu is not None and (match := _LINK_ERRORS.fullmatch(line)):
            counts[gpu, int(match[1]), match[2]] = int(match[3])
    return counts


def _bandwidth(tools: IdleTools, level: int) -> facts.Bandwidth:
    if reason := tools.missing("nvbandwidth"):
        return facts.Bandwidth(absent=reason)
    if reason := tools.busy():
        return facts.Bandwidth(error=reason)
    before = tools.run("nvidia-smi", "nvlink", "-e", limit_s=_SMI_S)
    ended = tools.run("nvbandwidth", "-t", *_COPIES, limit_s=_BANDWIDTH_S)
    after = tools.run("nvidia-smi", "nvlink", "-e", limit_s=_SMI_S)
    rates = tuple(read_rates(ended.out, tools.models))
    if ended.rc != 0 or not rates:
        # Its errors come after the header of its output.
        last = _line(ended.err[-_MAX_TEXT:] or ended.out[-_MAX_TEXT:])
        reason = last if last and ended.rc is not None else failure(ended)
        return facts.Bandwidth(error=f"nvbandwidth: {reason}")
    old, new = read_link_errors(before.out), read_link_errors(after.out)
    counters = sorted(old.keys() & new.keys())
    link_errors = tuple(
        f"GPU {gpu} link {link}: {new[gpu, link, kind] - old[gpu, link, kind]} {kind}"
        for gpu, link, kind in counters
        if new[gpu, link, kind] > old[gpu, link, kind]
    )
    links = len({key[:2] for key in counters})
    return facts.Bandwidth("", "", rates, links, link_errors[:_MAX_FINDINGS])


def failure(ended: Ended) -> str:
    """Why a tool has no result."""
    if ended.rc is None:
        return f"did not end within {ended.seconds:.0f} s, and was stopped: give more --budget"
    return _line(ended.first) or f"exit status {ended.rc}"


# --- dcgmi diag.

#: The severity of a wrong configuration (DCGM_ERROR_CONFIG, dcgm_errors.h), and the test that
#: DCGM 2 and 3 have for one.
_CONFIGURATION, _SETTING_TEST = "5", "Persistence Mode"


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_diagnostic(text: str, level: int) -> facts.Diagnostic:
    """The JSON of ``dcgmi diag --json``, of DCGM 2 to 4. Raises DecodeError."""
    document = wire.load_json(text[max(0, text.find("{")) : text.rfind("}") + 1])
    root = document.get("DCGM Diagnostic") or document.get("DCGM GPU Diagnostic")
    if not isinstance(root, dict):
        raise wire.DecodeError("no DCGM Diagnostic", text[:_MAX_TEXT])
    if "runtime_error" in root:
        return facts.Diagnostic(error=f"dcgmi: {_line(root['runtime_error'])}")
    metadata = document.get("metadata")
    version = (metadata if isinstance(metadata, dict) else root).get("version", "")
    by_status: dict[str, list[Any]] = {"pass": [], "skip": [], "fail": [], "warn": []}
    for category in _objects(root.get("test_categories")):
        for test in _objects(category.get("tests")):
            name, statuses = _line(test.get("name", ""), 80), set()
            results = _objects(test.get("results"))
            summary = test.get("test_summary")
            if isinstance(summary, dict) and {"fail", "warn"}.isdisjoint(map(_status, results)):
                results.append(summary)
            for result in results:
                statuses.add(status := _status(result))
                if status in ("fail", "warn"):
                    by_status[status].append(_finding(name, result))
            if not statuses & {"fail", "warn"}:
                by_status["pass" if "pass" in statuses else "skip"].append(name)
    passed, skipped, failed, warned = (
        tuple(dict.fromkeys(rows))[:_MAX_FINDINGS] for rows in by_status.values()
    )
    return facts.Diagnostic("", "", level, _line(version, 80), passed, skipped, failed, warned)


def _status(result: dict[str, Any]) -> str:
    return str(result.get("status", "")).lower()[:8]


def _finding(test: str, result: dict[str, Any]) -> facts.DiagnosticFinding:
    gpus = result.get("entity_id", result.get("gpu_id", result.get("gpu_ids", "")))
    gpu = "" if gpus == "" else _line(f"{result.get('entity_group', 'GPU')} {gpus}", 60)
    # DCGM 2 has a text, DCGM 3 a text or a list of texts or objects, DCGM 4 a list of objects.
    warnings = result.get("warnings", "")
    rows = warnings if isinstance(warnings, list) else [warnings]
    texts = [str(row.get("warning", "")) if isinstance(row, dict) else str(row) for row in rows]
    severities = [row.get("error_severity") for row in _objects(warnings)]
    is_setting = {*map(str, severities)} == {_CONFIGURATION} or test == _SETTING_TEST
    return facts.DiagnosticFinding(test, gpu, _line("; ".join(texts)), is_setting)


def _diagnostic(tools: IdleTools, level: int) -> facts.Diagnostic:
    if reason := tools.missing("dcgmi") or tools.busy():
        return facts.Diagnostic(error=reason)
    ended = tools.run("dcgmi", "diag", "-r", str(level), "--json")
    if ended.rc is None or "{" not in ended.out:
        return facts.Diagnostic(error=f"dcgmi diag -r {level}: {failure(ended)}")
    try:
        observed = read_diagnostic(ended.out, level)
    except wire.DecodeError as problem:
        return facts.Diagnostic(error=f"dcgmi diag: {problem.reason}")
    if ended.rc and not (observed.failed or observed.warned or observed.error):
        reason = f"dcgmi: exit status {ended.rc}, although no test failed"
        return facts.Diagnostic(error=reason)
    return observed


# --- The program.

_PROVE = {"bandwidth": _bandwidth, "diagnostic": _diagnostic}


def main(config: facts.ProofConfig, *, level: int) -> None:
    """Run the tests of ``config.proofs`` in sequence, dcgmi's at this level."""
    runtime.hold_streams()
    supervisor = ProcessSupervisor(config.tag, config.limit_s, grace_s=_GRACE_S)
    supervisor.end_on_signals()
    with supervisor:
        tools = IdleTools(supervisor)
        for name in config.proofs:
            try:
                observed: Any = facts.ACTIVE[name](absent="no nvidia-smi on the node")
                if find_program("nvidia-smi"):
                    observed = _PROVE[name](tools, level)
            except OSError as problem:
                observed = facts.ACTIVE[name](error=_line(problem))
            except Exception as problem:  # noqa: BLE001
                observed = BrokenProof(runtime.bug_text(problem))
            print(wire.line(config.nonce, name, observed), flush=True)
