"""The faults in the kernel's log of this boot: counted on the node, explained here.

A broken GPU can log the same line a hundred thousand times. So the node sends each kind of line
once, with its count and the number of its last line. A kind is the code of an Xid and its device,
or a line without its numbers; lines of different devices are different kinds.

The faults of other hardware (`nodeready.subjects.hardware_log`) are read with those of GPUs.
``dmesg`` shows the kernel's ring buffer, which is short. When the ring buffer begins after the
boot on a node with a GPU, or may not be read, journald's log of this boot is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from nodeready.core.base import Output, Section
from nodeready.subjects import hardware_log
from nodeready.subjects.gpus import xids
from nodeready.subjects.gpus.gpu import KernelFault, Tool, pci_address
from nodeready.subjects.hardware_log import HardwareLog, KernelLines

NAME = "kernel log"
#: A ring buffer that begins later than this many seconds after the boot has lost its first lines.
_COMPLETE_S = 5
#: From the first to the last Xid of a kind, if no application can have caused them all.
_RECURS_S = 3600
_DAY_S = 86400
_TEXT = 160

# Regular expressions here are of the kind that awk and Python share. mawk knows no {4}.
_HEX = "[0-9a-fA-F]"
_ADDRESS = f"{_HEX * 4}:{_HEX * 2}:{_HEX * 2}"
# Time stamps of dmesg, of dmesg -T and of dmesg --time-format iso, the caller ([T12]) of some
# kernels, the level of dmesg -r and of dmesg -x.
_STAMP = (
    r"^(<[0-9]+>|\[ *[0-9.]+\]|\[ *[TC][0-9]+\]"
    r"|\[[A-Z][a-z][a-z] [A-Z][a-z][a-z] [ 0-9][0-9] [0-9:]+ [0-9]+\]"
    r"|[a-z]+ *:[a-z]+ *: |[0-9]+-[0-9]+-[0-9]+T[0-9:,.]+([+-][0-9:]+|Z)? ) *"
)

# The text after the name of a process at the beginning of a line.
_NAMED = r"\[[0-9]+\]:? | \([0-9]+\)[: ]|: page allocation failure| invoked oom-killer|: vmalloc "

# A user can forge a message in three ways:
#
# - As the name of a process. So the patterns are anchored at a line's beginning. Some lines of the
#   kernel begin with the name of a process (15 bytes), such as those about a segmentation fault.
#   There the process's number, or what happened to the process, follows the name. Such a line is
#   skipped (Linux: arch/x86/mm/fault.c show_signal_msg, mm/oom_kill.c dump_header,
#   mm/page_alloc.c warn_alloc).
# - As the name of a file, or of a mount in the user's own namespace (fs/overlayfs/super.c). A
#   newline in that name starts another line of the same microsecond. So the lines of a record
#   count only where a driver wrote the first line.
# - In the journal, where the later lines of a record are indented: the same rule holds.
#
# Lines of a device (dev_printk: driver and PCI address) and of the firmware contain no text of a
# user. Thousands of them may come with the fault of a GPU.
#
# A line of a stack that names a module, after its address. The name of a process fits into no such
# line: it is not at its end. These modules stand between two others.
_FRAME = r"[A-Za-z0-9_.]+[+]0x[0-9a-f]+.0x[0-9a-f]+ \[[a-z0-9_]+( [0-9a-f]+)?\]( \([A-Z]+\))?"
_BETWEEN = r"\[(drm|ttm|amdttm|amdkcl|gpu_sched|ib_|iw_cm|rdma_|mlx_compat|nvidia_fs)"

# A multiple of 65535 errors is no count: a device that sleeps or is gone has all ones in each
# register (amdgpu's UMC of Radeon boards: 1048560 for 16 channels).
_DEVICES = rf"^[A-Za-z0-9_-]+ {_ADDRESS}|^[{{][0-9]+[}}]\[Hardware Error\]"
# Of these messages the kernel prints some, and then how many it left out.
_LIMITED = "severity=Correct|IO_PAGE_FAULT|DMAR: .*Request device"
_HARDWARE = " || ".join(f"line ~ /{words}/" for words in hardware_log.WORDS)
_SCAN = rf"""
function bare(line) {{
    while (match(line, /{_STAMP}/)) line = substr(line, RLENGTH + 1)
    sub(/^[^ ]+ kernel: /, "", line)
    while (match(line, /{_STAMP}/)) line = substr(line, RLENGTH + 1)
    return line
}}
function is_hardware(line) {{ return {_HARDWARE} }}
function named(text,  all) {{
    while (match(text, /{_ADDRESS}/)) {{
        all = all substr(text, RSTART, RLENGTH) " "
        text = substr(text, RSTART + RLENGTH)
    }}
    return all
}}
function keep(key, text, events) {{
    if (!(key in count)) {{
        if (kinds >= 400) {{ more++; return }}
        name[++kinds] = key
    }}
    if (!(key in count) || key ~ /: 154$|soft lockup|throttled/) first[key] = substr(text, 1, 300)
    count[key] += events == "" ? 1 : events
    last[key] = lines
    # Seconds since the boot. dmesg -T and --time-format iso have others.
    if (time ~ /^(<[0-9]+>)?\[ *[0-9]+[.][0-9]+\]$/ && match(time, /[0-9]+[.]/)) {{
        ended[key] = int(substr(time, RSTART, RLENGTH))
        if (!(key in begun)) begun[key] = ended[key]
    }}
}}
function read_line(  text, inside, key, size) {{
    if (!/[^ \t]/ || /^ERROR: ld[.]so: object /) return
    if (!lines++) {{
        said = substr($0, 1, 200)
        if (match($0, /^\[ *[0-9]+[.]/)) begins = substr($0, 2, RLENGTH - 2) + 0
    }}
    text = index($0, "] ")
    time = text ? substr($0, 1, text) : ""
    inside = /^ /
    if (!inside && (time == "" || time != record || time !~ /[.][0-9]+\]$/)) {{
        record = time
        lead = $0
    }}
    if (/\]: segfault at |\]: bad frame in /) {{
        text = bare($0)
        if (match(text, /\[[0-9]+\]: (segfault at|bad frame in) /) && RSTART <= 16)
            users = substr($0, 1, length($0) - length(text))
    }}
    # An oops, a blocked task or a stuck processor is of the first driver that its stack names. A
    # processor that waits for another one, and for no lock, is of none; nor is a stack that begins
    # with packets: the driver hands them to all of the network.
    if (stack != "" && (/[+]0x|RIP: |<.TASK>|\[ (end trace|cut here) / || lines > traced + 100)) {{
        text = bare($0)
        if (/\[ end trace |<.TASK>|\[ cut here / || lines > traced + 100 ||
            (stack ~ /^stuck/ && text ~ /^(RIP|pc ):/ && text !~ /_lock|\]$/)) stack = ""
        gsub(/\[<[0-9a-f]+>\] */, "", text)
        if (!sub(/^ *(R?IP: ([0-9]+:)?|pc : )/, "", text)) {{
            sub(/^ *(lr : )?/, "", text)
            if (text ~ /^[^ ]*(napi|poll|_rx[_+]|irq|intr)[^ ]* \[/) stack = ""
        }}
        if (stack != "" && text ~ /^{_FRAME}$/ && text !~ /{_BETWEEN}/) {{
            match(text, /\[[a-z0-9_]+/)
            key = substr(text, RSTART + 1, RLENGTH - 1)
            sub(/^nvidia.*/, "nvidia", key)
            sub(/^amdkfd/, "amdgpu", key)
            keep(stack " " key, key " driver: " stack " in " text)
            stack = ""
        }}
    }}
    # Each handler of an interrupt that the kernel switched off.
    if (/: nobody cared /) unheard = lines
    if (unheard && lines - unheard < 100 && match($0, />. [a-z0-9_]+ \[[a-z0-9_]+\]/)) {{
        text = substr($0, RSTART + 3, RLENGTH - 3)
        match(text, /\[[a-z0-9_]+/)
        key = substr(text, RSTART + 1, RLENGTH - 1)
        sub(/^nvidia.*/, "nvidia", key)
        keep("interrupt off " key, key " driver: interrupt off: " text)
        return
    }}
    if (!/NVRM|SXid|amdgpu|nvidia.*: probe |Uncorrect|DPC: |inaccessible|Nvlink Core/ &&
        !/nvidia-modeset: ERR|ooted with .*nomodeset|; giving up/ &&
        !/recover .no error|qcm fence|The cp might|message .*ret is|callbacks suppressed/ &&
        !/nouveau .*fifo|GPU lockup|Fence fallback|VM flush|TLB flush| type 7f class/ &&
        !/nvswitch.*: (Failed to init|Version)/ &&
        !/[.]this_module|Lockdown: |Loading of .*rejected/ &&
        !/\[Hardware Error\]: .*(severity|device_id|section_type): / &&
        !is_hardware($0)) return
    if (users != "" && index($0, users) == 1) return
    if (lead != $0 && bare(lead) !~ /{xids.ORIGIN}|{_DEVICES}|^-+\[ cut here /) return
    if (inside && bare(lead) !~ /{xids.ORIGIN}/) return
    text = bare($0)
    if (inside) sub(/^ +/, "", text)
    if (text ~ /^[{{][0-9]+[}}]\[Hardware Error\]: /) {{
        # The firmware's record of an error: its severity, and some lines later its device.
        if (text ~ /event severity: /) {{
            grave = text ~ /: fatal/ ? "Fatal" : text ~ /: recoverable/ ? "Non-Fatal" : ""
            record_of = text
        }} else if (grave != "" && text ~ /section_type: memory error/)
            keep("memory " grave, record_of)
        else if (text ~ /section_type: memory error/)
            keep("hardware corrected memory", text)
        else if (grave != "" && text ~ /section_type: .*processor error/)
            keep("processor " grave, text)
        else if (grave == "" && text ~ /section_type: PCIe error/)
            keep("corrected", text)
        else if (grave != "" && text ~ /device_id: / && match(text, /{_ADDRESS}/)) {{
            key = substr(text, RSTART, RLENGTH)
            keep(key grave, "pcieport " key ".0: by the firmware: Uncorrected (" grave ") error")
        }}
        return
    }}
    # Only the first process has this number.
    if (text !~ /^systemd\[1\]: / && match(text, /{_NAMED}/) && RSTART <= 16) return
    # Open modules of 535 write "NVRM FUNCTION: ".
    if (text ~ /^NVRM [A-Za-z_0-9]+: /) text = "NVRM: " substr(text, 6)
    if (text ~ /^NVRM: |^amdgpu [0-9]|^\[drm\] amdgpu kernel/) driven = 1
    # A module without a signature; the log does not name it.
    if (text ~ /^(Lockdown: .*(unsigned )?module |Loading of .*module.* is rej)/) {{
        keep("refused", "nvidia driver: refused: " text)
        return
    }}
    if (text ~ /^Booted with .*nomodeset|^You have booted with nomodeset/) {{
        keep("refused nomodeset", "amdgpu driver: off: " text)
        return
    }}
    # What the kernel does not print, to print less, are errors of the device before.
    if (match(text, /^(aer_[a-z_]+|amd_iommu_[a-z_]+|dmar_fault): [0-9]+ callbacks/)) {{
        if (bus in count) keep(bus, "", substr(text, index(text, " ")) + 0)
        return
    }}
    # A load begins with this line; its driver takes the devices before it names itself.
    if (text ~ /^nvidia-nvlink: Nvlink Core is being initialized/) {{ starts = lines; return }}
    # Where the log has no such line, the load begins with the first device that is refused.
    if (!starts && text ~ /^NVRM: This PCI I.O region|^nvidia[ :].*: probe with|^nvidia: probe of/)
        starts = lines
    if (text ~ /^NVRM: loading NVIDIA/) {{ loaded = starts ? starts : lines; starts = 0; return }}
    if (match(text, /^NVRM: Xid \([^)]*\): [0-9]+/)) {{
        key = substr(text, 1, RLENGTH)
        if (key ~ /: (14[4-9]|150)$/ && text ~ /{xids.FATAL}/) key = key " Fatal"
        if (match(text, /caused by previous Xid [0-9]+$/)) key = key substr(text, RSTART)
        keep(key, text)
        return
    }}
    if (text ~ /^NVRM: (The NVIDIA )?GPU / && match(text, /{_ADDRESS}/)) {{
        gpu = substr(text, RSTART, RLENGTH)
        seen = lines
    }}
    if (text ~ /^(amdgpu|\[drm)/ && match(text, /{xids.RECOVERED}|{xids.RING}/) &&
        match(text, /{_ADDRESS}/)) {{
        key = substr(text, RSTART, RLENGTH)
        ring[key] = lines
        if (text ~ /{xids.RECOVERED}/) recovered[key] = lines
        return
    }}
    # The bus resets the link after a fatal error. A device whose driver takes no part loses its
    # state.
    if (text ~ /Uncorrect(ed|able) [(]Fatal/) fatal = lines
    if (fatal && lines - fatal < 12 && text ~ /AER: can.t recover [(]no/)
        text = text ", Uncorrected (Fatal)"
    if (text ~ /{xids.ORIGIN}/ && text ~ /{xids.ANY}/) {{
        # The driver breaks its sentence into three lines, and names the device in the first.
        if (text ~ /^NVRM: (system has )?fallen off/ && seen && lines - seen <= 3)
            sub(/^NVRM: /, "NVRM: GPU " gpu ": ", text)
        if (text ~ /errors/ && match(text, /[0-9]+ (new )?((un)?correctable|deferred) /)) {{
            size = substr(text, RSTART) + 0
            if (size > 0 && size % 65535 == 0) return
        }}
        key = text
        gsub(/0x[0-9a-fA-F]+/, "#", key)
        gsub(/[0-9]+/, "#", key)
        key = named(text) key
        # A device of the IOMMU: bus, device and function.
        if (match(text, /equest device .(0x)?[0-9a-f]+:[0-9a-f]+[.]/))
            key = substr(text, RSTART, RLENGTH) key
        keep(key, text)
        if (text ~ /{_LIMITED}/) bus = key
    }} else if (is_hardware(text)) {{
        # The numbers in names of disks, ports and processors stay. The hundreds of servers of
        # objects (OST) of a Lustre are one kind.
        key = text
        gsub(/0x[0-9a-fA-F]+|(scmd|sc)[(=][0-9a-f]+|OST[0-9a-f]+/, "#", key)
        gsub(/[] (:=,.#-][0-9]+/, "#", key)
        key = "hardware " named(text) key
        if (text ~ /^BUG: Bad page /) stack = ""
        else if (text ~ /^(general |Internal error: )?({hardware_log.ROWS["oops"].words})/)
            stack = "kernel oops"
        else if (text ~ /^INFO: task .*for more than /) stack = "blocked task"
        else if (text ~ /: soft lockup - CPU/) stack = "stuck processor"
        traced = lines
        size = text ~ /^EDAC / && match(text, /[0-9]+ CE /) ? substr(text, RSTART) + 0 : 1
        if (text ~ /{_LIMITED}/) bus = key
        if (!(key in count) && hardware++ >= 150) more++
        else keep(key, text, size)
    }}
}}
# Returns whether the log was read. lines: those with a text
function scan(command,  program, status, key, up, i) {{
    lines = begins = kinds = more = hardware = starts = loaded = seen = driven = fatal = 0
    unheard = 0
    record = lead = users = grave = said = stack = bus = ""
    split("", count); split("", recovered); split("", ring); split("", begun)
    while ((command | getline) > 0) read_line()
    status = close(command)
    split(command, program, " ")
    print "scan=" program[2]
    print "status=" status
    print "lines=" (lines > 0)
    print "begins=" begins
    print "loaded=" loaded
    print "more=" more
    # In whole hours, and no number of lines: nodes whose logs are well have one text, which is
    # parsed once.
    if ((getline up < "/proc/uptime") > 0) print "uptime=" int(up / 3600) * 3600
    close("/proc/uptime")
    print "said=" said
    for (key in recovered) print "recovered=" key " " recovered[key]
    for (key in ring) print "ring=" key " " ring[key]
    for (i = 1; i <= kinds; i++) {{
        key = name[i]
        # It was the driver of the GPUs if none works.
        if (key ~ /^refused/ && (driven || begins > {_COMPLETE_S})) continue
        up = (key in begun) ? "@" begun[key] "-" ended[key] : ""
        print "fault=" count[key] " " last[key] up " " first[key]
    }}
    print "end=" program[2]
    return status == 0 && lines > 0
}}
BEGIN {{
    if (scan("exec dmesg 2>&1") && (begins <= {_COMPLETE_S} || !gpus) || !journal) exit
    scan("exec journalctl -k -b -o short-monotonic --no-pager -q 2>&1")
}}
"""


# Where dmesg is not complete, the journal has the rest, and takes longer. It is read for faults of
# GPUs, and where dmesg may not be read. Other nodes say since when they know their log.
_SCRIPT = (
    r"""
    nr_gpus=0 nr_journal=0
    for nr_file in /sys/module/nvidia /sys/bus/pci/drivers/nvidia /sys/module/amdgpu; do
        if [ -e "$nr_file" ]; then nr_gpus=1; fi
    done
    if command -v journalctl >/dev/null; then nr_journal=1; fi
    exec awk -v gpus=$nr_gpus -v journal=$nr_journal '"""
    + _SCAN
    + "'\n"
)


# Mostly quick: a journal can be slow.
SECTION = Section("kernel_log", lambda policy: _SCRIPT, timeout_s=10, parallel=True, quick=True)


@dataclass(frozen=True)
class _Scan:
    source: str
    values: Mapping[str, str]
    faults: tuple[KernelLines, ...]  # the kinds of lines
    # device -> the number of the last line about the device's recovery
    recovered: Mapping[str, int]
    # device -> the number of the last line about the recovery of the device or of a ring
    rings: Mapping[str, int]

    @property
    def readable(self) -> bool:
        return self.values.get("status") == "0" and _number(self.values.get("lines")) > 0

    @property
    def begins(self) -> int:
        return _number(self.values.get("begins"))


def _number(text: str | None) -> int:
    """A whole number; 0 for any other text."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else 0


def _counted(lines: list[str]) -> tuple[KernelLines, ...]:
    """The kind of lines of each ``COUNT LAST TEXT`` or ``COUNT LAST@SECONDS-SECONDS TEXT``."""
    number = "[0-9]{1,18}"
    pattern = re.compile(rf"({number}) ({number})(?:@({number})-({number}))? (.*)", re.S)
    matches = (pattern.match(line) for line in lines)
    return tuple(
        KernelLines(int(m[1]), int(m[2]), m[5], *(int(m[g]) if m[g] else None for g in (3, 4)))
        for m in matches
        if m
    )


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """The lines between each ``scan=SOURCE`` and its ``end=SOURCE``."""
    source, body = "", list[str]()
    for line in text.split("\n"):
        begins = re.fullmatch(r"scan=([a-z]+)", line)
        if begins:
            source, body = begins[1], []
        elif source and line == f"end={source}":
            yield source, body
            source = ""
        else:
            body.append(line)


def _scans(output: Output) -> list[_Scan]:
    scans = []
    for source, body in _blocks(output.text):
        values: dict[str, str] = {}
        lists: dict[str, list[str]] = {"fault": [], "recovered": [], "ring": []}
        for line in body:
            name, _, value = line.partition("=")
            if name in lists:
                lists[name].append(value)
            else:
                values.setdefault(name, value)
        recovered, rings = (
            {
                device.lower(): _number(line_number)
                for device, _, line_number in (entry.rpartition(" ") for entry in lists[name])
            }
            for name in ("recovered", "ring")
        )
        scans.append(_Scan(source, values, _counted(lists["fault"]), recovered, rings))
    return scans


def _tool(output: Output, scan: _Scan | None) -> Tool:
    """Whether the log could be read, and from where; else why not."""
    if scan is not None:
        detail = scan.source
        if scan.begins > _COMPLETE_S:
            detail += f", which begins {scan.begins} s after the boot"
        return Tool(NAME, "ok", detail)
    words = " ".join(scan.values.get("said", "") for scan in _scans(output))
    if re.search(r"not permitted|denied", words, re.I):
        return Tool(NAME, "failed", "needs root")
    if output.rc == 0 and not output.text.strip():
        return Tool(NAME, "missing", "the answer has none")
    if output.rc is None:
        return Tool(NAME, "nonsense" if output.truncated else "timed out")
    if not _scans(output):
        return Tool(NAME, "nonsense", output.text.strip()[:_TEXT])
    return Tool(NAME, "failed", f"empty: needs root; {words.strip()}"[:_TEXT].rstrip("; "))


def _address(text: str) -> str | None:
    """The PCI address in ``text``, in sysfs' form; Xids leave the function out."""
    match = re.search(rf"{_HEX}{{4,8}}:{_HEX}{{2}}:{_HEX}{{2}}(\.[0-7])?", text)
    return pci_address(match[0]) if match else None


def _source(text: str) -> str | None:
    """The device whose error a line of the PCI bus reports: often a port reports it.

    ``pcieport ADDRESS: AER: Uncorrectable (Fatal) error message received from ADDRESS``; DPC gives
    the device's number as ``source:0x3b00`` (bus, then device and function in one byte).
    """
    port, _, message = text.partition(": ")
    number = re.search(r"\bsource:0x([0-9a-fA-F]{2})([0-9a-fA-F]{2})\b", message)
    if number and number[0] != "source:0x0000" and _address(port):
        place = int(number[2], 16)
        return f"{(_address(port) or '')[:4]}:{number[1]}:{place >> 3:02x}.{place & 7}".lower()
    # Intel's IOMMU names no domain.
    device = re.match(r"DMAR: .*Request device \[(?:0x)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\]", text)
    if device:
        return f"0000:{device[1]}"
    # The line of a device itself may name the port above it.
    return (_address(message) if port.startswith("pcieport ") else None) or _address(port)


def _undemanded(scan: _Scan) -> dict[str, int]:
    """Each GPU for which the driver took its demand back -> the line's number (Xid 154)."""
    pattern = re.compile(r"NVRM: Xid \(([^)]*)\): 154\b")
    return {
        match[1]: lines.last
        for lines in scan.faults
        if (match := pattern.match(lines.text)) and not xids.action_of(154, lines.text)
    }


def _fault(scan: _Scan, lines: KernelLines, undemanded: Mapping[str, int]) -> KernelFault | None:
    """The fault of one kind of line; None where it was repaired, or is no fault."""
    last, text = lines.last, lines.text
    address = _address(text)
    xid = re.match(r"NVRM: Xid \(([^)]*)\): ([0-9]{1,5})\b", text)
    reloaded = last < _number(scan.values.get("loaded"))
    code = int(xid[2]) if xid else None
    # The line of the cause may have left the log.
    cause = re.search(r", Ch [0-9a-f]{1,8} caused by previous Xid ([0-9]{1,5})$", text)
    if xid and cause:
        code = int(cause[1])
    if code is not None:
        source, action = "xid", xids.action_of(code, text)
        if xids.lookup(code).recurs and hardware_log.duration_s([lines]) >= _RECURS_S:
            action = xids.MONITOR
        # A new load of the driver repairs a fault, unless the fault needs a reboot or hands.
        if reloaded and action not in (xids.REBOOT, xids.ISOLATE):
            return None
        # So does a reset, after which the driver demands none.
        is_later = xid is not None and last < undemanded.get(xid[1], 0)
        if is_later and action == xids.RESET and xids.is_cleared_by_action(code):
            return None
    else:
        rule = xids.find_rule(text)
        if rule is None:
            return None
        source = rule.driver
        code = xids.sxid_code(text) if source == "sxid" else None
        if source == "pcie":
            address = _source(text)
        # Lines of amdgpu's compute part do not name the device.
        ends = scan.rings if rule.ring_resets else scan.recovered
        resets = [ends.get(address[:10], 0)] if address else ends.values()
        was_reset = last < max(resets, default=0)
        was_reset = was_reset or (source in ("nvidia", "pcie") and reloaded)
        action = rule.after_reset if was_reset else rule.action
    if not action:
        return None
    stamps = (lines.first_s, lines.last_s)
    return KernelFault(source, code, address, text[:_TEXT], action, lines.count, *stamps)


def _best(output: Output) -> _Scan | None:
    """The readable scan that begins first; the journal's where both begin alike."""
    readable = [scan for scan in reversed(_scans(output)) if scan.readable]
    return min(readable, key=lambda scan: scan.begins, default=None)


def hardware(outputs: Mapping[str, Output], subject: str) -> HardwareLog:
    """What the log says of a subject's devices, other than GPUs."""
    return _hardware(outputs.get(SECTION.name, Output("", 0)), subject)


@lru_cache(maxsize=64)
def _hardware(output: Output, subject: str) -> HardwareLog:
    # Thousands of nodes have the same log.
    scan = _best(output)
    if scan is None:
        tool = _tool(output, scan)
        return HardwareLog(absent="" if tool.state == "missing" else tool.state_text)
    faults = hardware_log.faults_of(scan.faults, subject, _number(scan.values.get("uptime")))
    begins_s = scan.begins if scan.begins > _COMPLETE_S else 0
    return HardwareLog(tuple(faults), scan.source, begins_s=begins_s)


@lru_cache(maxsize=64)
def parse(output: Output) -> tuple[tuple[KernelFault, ...], Tool]:
    """The faults of this boot, equal ones counted, and whether the log could be read at all."""
    scan = _best(output)
    tool = _tool(output, scan)
    if scan is None:
        return (), tool
    merged: dict[tuple[object, ...], KernelFault] = {}
    undemanded = _undemanded(scan)
    yesterday_s = _number(scan.values.get("uptime")) - _DAY_S
    for lines in scan.faults:
        fault = _fault(scan, lines, undemanded)
        if fault is None:
            continue
        rule = None if fault.code is not None else xids.find_rule(lines.text)
        if rule and rule.fades and lines.last_s is not None and lines.last_s < yesterday_s:
            continue
        key = (fault.source, fault.code, fault.pci_address, fault.action, rule)
        earlier = merged.get(key)
        if earlier:
            count = earlier.count + fault.count
            stamps = [stamp for stamp in (earlier.last_s, fault.last_s) if stamp is not None]
            fault = replace(earlier, count=count, last_s=max(stamps, default=None))
        merged[key] = fault
    return tuple(fault for fault in merged.values() if _comes_often(fault)), tool


def _comes_often(fault: KernelFault) -> bool:
    """Whether messages came often enough to make its row a fault."""
    rule = None if fault.code is not None else xids.find_rule(fault.text)
    seconds = (fault.last_s or 0) - (fault.first_s or 0)
    if rule is None:
        return True
    return fault.count * rule.within_s >= rule.least * max(seconds, rule.within_s)


def faults_of_gpus(faults: Iterable[KernelFault], gpus: Iterable[str]) -> tuple[KernelFault, ...]:
    """The faults without the PCI bus's faults of devices that are no GPU.

    gpus: the GPUs' addresses; a function of the same card counts. A line of a GPU's driver counts
          also when the device has left the bus.
    """
    cards = {address[:10] for address in gpus}
    return tuple(
        fault
        for fault in faults
        if fault.source != "pcie"
        or fault.text.startswith(xids.BEGINNINGS["pcie"][:2])
        or (fault.pci_address or "")[:10] in cards
    )
