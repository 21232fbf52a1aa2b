"""AMD's GPUs as amd-smi shows them, or rocm-smi where that is all there is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.policy import Policy
from nodeready.probes import amd_smi, kfd, rocm_smi
from nodeready.probes.amd_smi import AmdGpu
from nodeready.probes.amd_values import entries
from nodeready.probes.base import Output, Section
from nodeready.probes.gpu import Tool

_BIN = "/opt/rocm/bin"


def _script(policy: Policy) -> str:
    """Ask the tool, unless one hangs already; what sysfs says of its processes comes first.

    A tool is a Python script: one that was started through env is named python3.
    """
    return rf"""
    PATH=$PATH:{_BIN}
    nr_have amd-smi rocm-smi
    if [ ! -d /sys/module/amdgpu ]; then echo module=no; exit 0; fi
    nr_value version /sys/module/amdgpu/version
    {kfd.SCRIPT}
    for nr_file in $(grep -alsE '\((amd-smi|rocm-smi|python[0-9.]*)\) D ' /proc/[0-9]*/stat); do
        if grep -aqsE '/?(amd|rocm)[-_]smi' "${{nr_file%stat}}cmdline"; then
            nr_file=${{nr_file%/stat}}
            printf 'stuck=%s\n' "${{nr_file##*/}}"
            exit 0
        fi
    done
    nr_run() {{
        printf '\n@%s run %s\n' "$NR" "$1"
        shift
        "$@" 2>&1
        nr_status=$?
        printf '\n@%s ran %s\n' "$NR" "$nr_status"
        return $nr_status
    }}
    if command -v amd-smi >/dev/null; then
        nr_run static amd-smi static --json && nr_run metric amd-smi metric --json &&
            nr_run xgmi amd-smi xgmi --json
    else
        grep -asH '' /sys/bus/pci/drivers/amdgpu/*/ras/*_err_count
        nr_run rocm rocm-smi -a --json
    fi
    exit 0
    """


# 64 devices of 8 partitioned GPUs print about 30 kB each.
SECTION = Section(
    "amd",
    _script,
    timeout_s=20,
    cap_bytes=3 << 20,
    beside=True,
    when="command -v amd-smi >/dev/null || command -v rocm-smi >/dev/null"
    f" || [ -x {_BIN}/amd-smi ] || [ -x {_BIN}/rocm-smi ]",
)


@dataclass(frozen=True)
class _Run:
    """What one call of the tool printed; ``status`` is None when it did not end."""

    printed: str
    status: int | None


def _runs(output: Output) -> dict[str, _Run]:
    """The calls of the tool, by name."""
    mark = re.escape(f"@{output.nonce}")
    runs = {}
    for piece in re.split(rf"^{mark} run ", output.text, flags=re.M)[1:]:
        name, _, rest = piece.partition("\n")
        ended = re.search(rf"^{mark} ran ([0-9]{{1,3}})\s*\Z", rest, re.M)
        printed = rest[: ended.start()] if ended else rest
        runs[name] = _Run(printed, int(ended[1]) if ended else None)
    return runs


def _call(name: str, call: str, run: _Run | None, output: Output) -> Tool | None:
    """What is wrong with one call of the tool; None: nothing."""
    if run is None or run.status is None:
        if output.truncated:
            return Tool(name, "nonsense", "its output is too long")
        return Tool(name, "timed out", call)
    if run.status != 0:
        said = [line.strip() for line in run.printed.splitlines() if line.strip()]
        detail = f"exit status {run.status}: {said[-1] if said else ''}"
        return Tool(name, "failed", detail[:160])
    devices = rocm_smi.cards(run.printed) if call == "rocm" else list(entries(run.printed))
    return None if devices else Tool(name, "nonsense", run.printed.strip()[:160])


def _tool(output: Output, before: str, runs: Mapping[str, _Run]) -> Tool:
    """How the tool fared. Its XGMI table is no reason to doubt the rest."""
    have = re.findall(r"^have=(amd-smi|rocm-smi)$", before, re.M)
    if not have:
        # Without its first line the section never came to its tool.
        unseen = output.rc is None and not output.truncated
        return Tool("amd-smi", "timed out" if unseen else "missing")
    name = have[0]
    stuck = re.search(r"^stuck=([0-9]+)$", before, re.M)
    if stuck:
        return Tool(name, "stuck", f"process {stuck[1]} hangs in the kernel")
    if re.search(r"^module=no$", before, re.M):
        return Tool(name, "failed", "the kernel module amdgpu is not loaded")
    for call in ("static", "metric") if name == "amd-smi" else ("rocm",):
        wrong = _call(name, call, runs.get(call), output)
        if wrong:
            return wrong
    return Tool(name, "ok")


def _driver(before: str) -> str | None:
    """The version of amdgpu when it comes from ROCm; "in-tree" when it is the kernel's own."""
    version = re.search(r"^version=(.+)$", before, re.M)
    if version:
        return version[1].strip()
    loaded = before.startswith("have=") and not re.search(r"^module=no$", before, re.M)
    return "in-tree" if loaded else None


def parse_amd(output: Output) -> tuple[tuple[AmdGpu, ...], Tool, str | None]:
    """The devices, how the tool fared, and the driver's version."""
    before = re.split(rf"^@{re.escape(output.nonce)} run ", output.text, maxsplit=1, flags=re.M)[0]
    runs = _runs(output)
    tool = _tool(output, before, runs)
    more = kfd.parse(before)
    if "rocm" in runs:
        gpus = tuple(rocm_smi.parse(runs["rocm"].printed, more))
    else:
        static, metric, xgmi = (
            runs[call].printed if call in runs else "" for call in ("static", "metric", "xgmi")
        )
        gpus = tuple(amd_smi.parse(static, metric, xgmi, more))
    return gpus, tool, _driver(before)
