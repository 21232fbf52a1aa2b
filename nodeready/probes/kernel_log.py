"""What the kernel of this boot says of GPUs and of tasks that hang: read once, counted there.

A broken GPU can say the same thing a hundred thousand times. So the node sends each kind of line
once, with its count and the number of its last line, and never a tail of the log. A kind is an
Xid's code of one device, or a line without its numbers; the address of the device always counts.

It is read where a GPU, or the driver of one, is there. ``dmesg`` is the kernel's own ring, and
short: when it begins after the boot, or may not be read, journald is asked for this boot too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nodeready.policy import Policy
from nodeready.probes import kernel_faults, xids
from nodeready.probes.base import Output, Section
from nodeready.probes.gpu import KernelFault, Tool

NAME = "kernel log"
#: A ring that begins later than this many seconds after the boot has lost its first lines.
_COMPLETE_S = 5
_TEXT = 160

# Regular expressions here are of the kind that awk and Python share. mawk knows no {4}.
_HEX = "[0-9a-fA-F]"
_ADDRESS = f"{_HEX * 4}:{_HEX * 2}:{_HEX * 2}"
# Time stamps of dmesg and of dmesg -T, the caller ([T12]) of some kernels, the level of dmesg -r.
_STAMP = (
    r"^(<[0-9]+>|\[ *[0-9.]+\]|\[ *[TC][0-9]+\]"
    r"|\[[A-Z][a-z][a-z] [A-Z][a-z][a-z] [ 0-9][0-9] [0-9:]+ [0-9]+\]) *"
)

# What the lines tell is anchored at their begin: a process may be named like any message.
_SCAN = rf"""
function keep(key, text) {{
    if (!(key in count)) {{
        if (kinds >= 400) {{ more++; return }}
        name[++kinds] = key
    }}
    if (!(key in count) || key ~ /: 154$/) first[key] = substr(text, 1, 300)
    count[key]++
    last[key] = NR
}}
index($0, mark) == 1 {{ status = substr($0, length(mark) + 1); next }}
NF {{
    lines++
    if (lines == 1) {{
        said = substr($0, 1, 200)
        if (match($0, /^\[ *[0-9]+[.]/)) begins = substr($0, 2, RLENGTH - 2) + 0
    }}
}}
!/NVRM|SXid|amdgpu/ {{ next }}
{{
    text = $0
    while (match(text, /{_STAMP}/)) text = substr(text, RLENGTH + 1)
    sub(/^[^ ]+ kernel: /, "", text)
    while (match(text, /{_STAMP}/)) text = substr(text, RLENGTH + 1)
}}
text ~ /^NVRM: loading NVIDIA/ {{ loaded = NR; next }}
match(text, /^NVRM: Xid \([^)]*\): [0-9]+/) {{
    key = substr(text, 1, RLENGTH)
    if (text ~ /[^n]Fatal/) key = key " Fatal"
    keep(key, text)
    next
}}
match(text, /^amdgpu {_ADDRESS}/) && /{kernel_faults.RECOVERED}/ {{
    recovered[substr(text, 8, 10)] = NR
    next
}}
text ~ /{kernel_faults.ORIGIN}/ && text ~ /{kernel_faults.ANY}/ {{
    device = match(text, /{_ADDRESS}/) ? substr(text, RSTART, RLENGTH) : ""
    key = text
    gsub(/0x[0-9a-fA-F]+/, "#", key)
    gsub(/[0-9]+/, "#", key)
    keep(device " " key, text)
}}
END {{
    print "scan=" from
    print "status=" status
    print "lines=" lines + 0
    print "begins=" begins
    print "loaded=" loaded + 0
    print "more=" more + 0
    print "said=" said
    for (device in recovered) print "recovered=" device " " recovered[device]
    for (i = 1; i <= kinds; i++) {{
        key = name[i]
        print "fault=" count[key] " " last[key] " " first[key]
    }}
    print "end=" from
    exit !(status == "0" && lines > 0 && begins + 0 <= {_COMPLETE_S})
}}
"""


def _script(policy: Policy) -> str:
    """Scan dmesg; when it is not complete, or may not be read, scan the journal."""
    return (
        'nr_scan() { exec awk -v mark="@$NR status " -v from="$1" \''
        + _SCAN
        + r"""'
    }
    if { dmesg 2>&1; printf '\n@%s status %s\n' "$NR" $?; } | nr_scan dmesg; then exit 0; fi
    command -v journalctl >/dev/null || exit 0
    { journalctl -k -b -o short-monotonic --no-pager -q 2>&1
      printf '\n@%s status %s\n' "$NR" $?; } | nr_scan journalctl
    exit 0
    """
    )


# Also where the driver of a GPU is loaded that has left the bus.
_WHEN = r"""nr_gpu=
if [ -d /sys/module/nvidia ] || [ -d /sys/module/amdgpu ]; then nr_gpu=1; fi
for nr_file in /sys/bus/pci/devices/*/vendor; do
if [ -n "$nr_gpu" ]; then break; fi
nr_line=
{ read -r nr_line <"$nr_file"; } 2>/dev/null
case $nr_line in 0x10de | 0x1002) nr_gpu=1 ;; esac
done
[ -n "$nr_gpu" ]"""

SECTION = Section("kernel_log", _script, timeout_s=10, beside=True, when=_WHEN)


@dataclass(frozen=True)
class _Scan:
    """One reading of the log: its values, and its lines (count, number of the last, text)."""

    source: str
    values: Mapping[str, str]
    faults: tuple[tuple[int, int, str], ...]
    recovered: Mapping[str, int]

    @property
    def readable(self) -> bool:
        return self.values.get("status") == "0" and _number(self.values.get("lines")) > 0

    @property
    def begins(self) -> int:
        return _number(self.values.get("begins"))


def _number(text: str | None) -> int:
    """A whole number of the node, 0 for anything else."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else 0


def _counted(lines: list[str]) -> tuple[tuple[int, int, str], ...]:
    """The ``COUNT LAST TEXT`` of these lines."""
    found = (re.match(r"([0-9]{1,18}) ([0-9]{1,18}) (.*)", line, re.S) for line in lines)
    return tuple((int(m[1]), int(m[2]), m[3]) for m in found if m)


def _scans(output: Output) -> list[_Scan]:
    """The scans that came to their end, in order."""
    scans = []
    for source, body in re.findall(r"^scan=([a-z]+)\n(.*?)^end=\1$", output.text, re.M | re.S):
        values: dict[str, str] = {}
        lists: dict[str, list[str]] = {"fault": [], "recovered": []}
        for line in body.split("\n"):
            name, _, value = line.partition("=")
            if name in lists:
                lists[name].append(value)
            else:
                values.setdefault(name, value)
        devices = (line.rpartition(" ") for line in lists["recovered"])
        recovered = {device.lower(): _number(at) for device, _, at in devices}
        scans.append(_Scan(source, values, _counted(lists["fault"]), recovered))
    return scans


def _best(output: Output) -> _Scan | None:
    """The scan that could read the log and goes back furthest; the journal when both do."""
    readable = [scan for scan in reversed(_scans(output)) if scan.readable]
    return min(readable, key=lambda scan: scan.begins, default=None)


def _tool(output: Output, scan: _Scan | None) -> Tool:
    """Whether the log could be read, and from where; else why not."""
    if scan is not None:
        detail = scan.source
        if scan.begins > _COMPLETE_S:
            detail += f", which begins {scan.begins} s after the boot"
        return Tool(NAME, "ok", detail)
    said = " ".join(scan.values.get("said", "") for scan in _scans(output))
    if re.search(r"not permitted|denied", said, re.I):
        return Tool(NAME, "failed", "needs root")
    if output.rc == 0 and not output.text.strip():
        return Tool(NAME, "missing", "not read where there is no GPU")
    if output.rc is None:
        return Tool(NAME, "nonsense" if output.truncated else "timed out")
    if not _scans(output):
        return Tool(NAME, "nonsense", output.text.strip()[:_TEXT])
    return Tool(NAME, "failed", f"empty: needs root; {said.strip()}"[:_TEXT].rstrip("; "))


def _address(text: str) -> str | None:
    """The PCI address in ``text``, as all of us write it; Xids leave the function out."""
    match = re.search(rf"({_HEX}{{4,8}}):({_HEX}{{2}}):({_HEX}{{2}})(?:\.([0-7]))?", text)
    if match is None:
        return None
    return f"{match[1][-4:]}:{match[2]}:{match[3]}.{match[4] or 0}".lower()


def _fault(scan: _Scan, count: int, last: int, text: str) -> KernelFault | None:
    """What one kind of line tells; None when it is over or says nothing."""
    address = _address(text)
    xid = re.match(r"NVRM: Xid \(([^)]*)\): ([0-9]{1,5})\b", text)
    reloaded = last < _number(scan.values.get("loaded"))
    if xid:
        code = int(xid[2])
        action = xids.judge(code, text)
        # A new load of the driver initialises the devices again: only what it cannot heal stays.
        over = not action or (reloaded and action not in (xids.REBOOT, xids.ISOLATE))
        return None if over else KernelFault("xid", code, address, text[:_TEXT], action, count)
    kind = kernel_faults.find(text)
    if kind is None:
        return None
    # The compute part of amdgpu does not name the device.
    resets = [scan.recovered.get(address[:10], 0)] if address else scan.recovered.values()
    healed = reloaded if kind.source == "nvidia" else last < max(resets, default=0)
    action = kind.healed if healed else kind.action
    if not action:
        return None
    number = kernel_faults.sxid(text) if kind.source == "sxid" else None
    return KernelFault(kind.source, number, address, text[:_TEXT], action, count)


def parse_kernel_log(output: Output) -> tuple[tuple[KernelFault, ...], Tool]:
    """The faults of this boot, equal ones counted, and whether the log could be read at all."""
    scan = _best(output)
    tool = _tool(output, scan)
    if scan is None:
        return (), tool
    merged: dict[tuple[object, ...], KernelFault] = {}
    for count, last, text in scan.faults:
        fault = _fault(scan, count, last, text)
        if fault is None:
            continue
        kind = "" if fault.code is not None else kernel_faults.kind_of(text)
        key = (fault.source, fault.code, fault.pci_address, fault.action, kind)
        known = merged.get(key)
        merged[key] = replace(known, count=known.count + count) if known else fault
    return tuple(merged.values()), tool
