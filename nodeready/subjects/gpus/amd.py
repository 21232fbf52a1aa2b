"""AMD's GPUs: the section that runs amd-smi, or rocm-smi where the node has no amd-smi.

The readers are in `amd_gpu` and, for the kernel's own counts, `kfd`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.core.base import Output, Section
from nodeready.subjects.gpus.amd_gpu import AmdGpu, cards, parse_amd_smi, parse_rocm_smi
from nodeready.subjects.gpus.amd_json import entries
from nodeready.subjects.gpus.gpu import Tool
from nodeready.subjects.gpus.kfd import DRIVER, KFD_SCRIPT, parse_kfd

_BIN = "/opt/rocm/bin"


# Print the kernel's counts, then run the tool, unless an earlier run hangs. A tool is a Python
# script; the process is called python3 when env started the script.
_SCRIPT = rf"""
    PATH=$PATH:{_BIN}
    nr_have amd-smi rocm-smi
    if [ ! -d /sys/module/amdgpu ]; then echo module=no; exit 0; fi
    nr_value version /sys/module/amdgpu/version
    {KFD_SCRIPT}
    for nr_file in $(grep -alsE '\((amd-smi|rocm-smi|python[0-9.]*)\) D ' /proc/[0-9]*/stat); do
        # Any user can give a process such a name, and have it wait there.
        nr_is_roots "${{nr_file%/stat}}" || continue
        if grep -aqsE '/?(amd|rocm)[-_]smi' "${{nr_file%stat}}cmdline"; then
            nr_file=${{nr_file%/stat}}
            printf 'stuck=%s\n' "${{nr_file##*/}}"
            exit 0
        fi
    done
    nr_run() {{
        printf '\n@%s run %s\n' "$NR" "$1"
        shift
        nr_answer "$@"
        printf '\n@%s ran %s\n' "$NR" "$nr_status"
        return $nr_status
    }}
    if command -v amd-smi >/dev/null; then
        nr_run static amd-smi static --json && nr_run metric amd-smi metric --json &&
            nr_run xgmi amd-smi xgmi --json
    else
        grep -asH '' {DRIVER}/*/ras/*_err_count \
            {DRIVER}/*/hwmon/hwmon*/temp[1-3]_crit {DRIVER}/*/hwmon/hwmon*/temp[1-3]_label
        nr_run rocm rocm-smi -a --json
    fi
    exit 0
    """


# 64 devices of 8 partitioned GPUs print about 30 kB each.
SECTION = Section(
    "amd",
    lambda policy: _SCRIPT,
    timeout_s=20,
    cap_bytes=3 << 20,
    parallel=True,
    when="command -v amd-smi >/dev/null || command -v rocm-smi >/dev/null"
    f" || [ -x {_BIN}/amd-smi ] || [ -x {_BIN}/rocm-smi ]",
)


@dataclass(frozen=True)
class _ToolCall:
    """The output of one call of the tool; ``status`` is None when the call did not end."""

    printed: str
    status: int | None

    @property
    def last_line(self) -> str:
        return (self.printed.strip().splitlines() or [""])[-1].strip()


def _tool_calls(output: Output) -> dict[str, _ToolCall]:
    """The calls of the tool, by name."""
    mark = re.escape(f"@{output.nonce}")
    calls = {}
    for section in re.split(rf"^{mark} run ", output.text, flags=re.M)[1:]:
        name, _, body = section.partition("\n")
        end = re.search(rf"^{mark} ran ([0-9]{{1,3}})\s*\Z", body, re.M)
        printed = body[: end.start()] if end else body
        calls[name] = _ToolCall(printed, int(end[1]) if end else None)
    return calls


def _call_failure(tool: str, name: str, call: _ToolCall | None, output: Output) -> Tool | None:
    """The tool's failure, where the call of this name failed; else None."""
    if call is None or call.status is None:
        if output.truncated:
            return Tool(tool, "nonsense", "its output is too long")
        return Tool(tool, "timed out", name)
    devices = cards(call.printed) if name == "rocm" else list(entries(call.printed))
    # For each value that a board lacks, rocm-smi sets its exit status and continues.
    if call.status != 0 and not (name == "rocm" and call.status in (1, 2) and devices):
        return Tool(tool, "failed", f"exit status {call.status}: {call.last_line}"[:160])
    return None if devices else Tool(tool, "nonsense", call.printed.strip()[:160])


#: The answer of a version without this command, and of a board without such links.
_NO_LINKS = re.compile(r"not supported|not_supported|invalid choice|unrecognized|usage:|N/A", re.I)


def _links_error(call: _ToolCall | None) -> str:
    """Why ``amd-smi xgmi`` could not read the links; "" where it read them, or where there are
    none.
    """
    if call is None or call.status == 0:
        return ""
    if call.status is None:
        return "" if list(entries(call.printed)) else "amd-smi xgmi timed out"
    if _NO_LINKS.search(call.printed):
        return ""
    return f"amd-smi xgmi: {call.last_line or f'exit status {call.status}'}"[:80]


def _tool(output: Output, before: str, calls: Mapping[str, _ToolCall]) -> Tool:
    """The tool and its state; a failure of ``xgmi`` alone does not count."""
    installed = re.findall(r"^have=(amd-smi|rocm-smi)$", before, re.M)
    if not installed:
        # Without its first line, the section ended before its search for a tool.
        timed_out = output.rc is None and not output.truncated
        return Tool("amd-smi", "timed out" if timed_out else "missing")
    name = installed[0]
    if stuck := re.search(r"^stuck=([0-9]+)$", before, re.M):
        return Tool(name, "stuck", f"process {stuck[1]} hangs in the kernel")
    if re.search(r"^module=no$", before, re.M):
        return Tool(name, "failed", "the kernel module amdgpu is not loaded")
    for call in ("static", "metric") if name == "amd-smi" else ("rocm",):
        if failure := _call_failure(name, call, calls.get(call), output):
            return failure
    return Tool(name, "ok")


def _driver(before: str) -> str | None:
    """The version of amdgpu when it comes from ROCm; "in-tree" when it is the kernel's own."""
    if version := re.search(r"^version=(.+)$", before, re.M):
        return version[1].strip()
    loaded = before.startswith("have=") and not re.search(r"^module=no$", before, re.M)
    return "in-tree" if loaded else None


def parse(output: Output) -> tuple[tuple[AmdGpu, ...], Tool, str | None]:
    """The devices, the tool with its state, and the driver's version."""
    before = re.split(rf"^@{re.escape(output.nonce)} run ", output.text, maxsplit=1, flags=re.M)[0]
    calls = _tool_calls(output)
    tool = _tool(output, before, calls)
    kfd = parse_kfd(before)
    if "rocm" in calls:
        gpus = tuple(parse_rocm_smi(calls["rocm"].printed, kfd))
    else:
        static, metric, xgmi = (
            calls[name].printed if name in calls else "" for name in ("static", "metric", "xgmi")
        )
        links_error = _links_error(calls.get("xgmi"))
        gpus = tuple(parse_amd_smi(static, metric, xgmi, kfd, links_error))
    return gpus, tool, _driver(before)
