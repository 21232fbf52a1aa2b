"""A node's GPUs as dataclasses, the same for every vendor. None: the source has no value."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PCI_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.I
)


def pci_address(text: str) -> str | None:
    """A PCI address in the form of sysfs; None for another text.

    Tools print domains of up to eight digits, in capitals, and some messages omit the function.

    >>> pci_address("00000000:5E:00.0"), pci_address("0000:5e:00")
    ('0000:5e:00.0', '0000:5e:00.0')
    """
    match = _PCI_ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = (int(digits or "0", 16) for digits in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


@dataclass(frozen=True)
class GpuProcess:
    """A process that a GPU's tool lists.

    name: as the tool prints it, often a path
    kind: NVIDIA's type: ``C`` computes, ``G`` only draws (an X server), ``C+G``, ``M+C`` (MPS)
    pid: of the process
    memory_mb: MiB of the GPU's memory that it uses
    """

    pid: int
    name: str
    memory_mb: int | None = None
    kind: str | None = None


@dataclass(frozen=True)
class GpuLink:
    """One link between GPUs (NVLink, XGMI).

    state:      ``active`` or ``inactive``
    speed_gbps: gigabytes per second in one direction, as nvidia-smi prints it
    index: the tool's number of the link
    """

    index: int
    state: str
    speed_gbps: float | None = None


@dataclass(frozen=True)
class Gpu:
    """One device as its vendor's tool shows it.

    pci_address:     ``0000:5e:00.0``: lower case, a domain of four digits
    ecc, mig:        ``on`` or ``off``; None where the device has none
    remap_pending:   memory rows are replaced at the next reset
    throttle:        the active reasons of the hardware for a lower clock: ``hw_slowdown``,
                     ``hw_thermal_slowdown``, ``hw_power_brake_slowdown``, ``sw_thermal_slowdown``
    temperature_slowdown_c: the temperature at which the device slows down
    persistence:     ``on`` or ``off``; None where the driver has no such mode
    performance_state: ``P0`` (busy) to ``P15``
    idle:            no program runs on the device
    virtual:         the node is a virtual machine, where the slot is unknown
    repair_pending:  a memory channel or a TPC that the next reset repairs
    recovery:        the driver's recovery action: ``none``, ``reset``, ``reboot`` and others
    recovery_named:  the driver names the action, so that ``none`` means that no fault is left;
                     older drivers only tell whether the hardware needs a reset
    fabric_state:    registration at the NVLink fabric: ``completed``, ``in progress`` and others
    fabric_status:   outcome of the registration: ``success``, or the error
    fabric_faults:   the faults of the device's attachment to the fabric, in words
    fabric_clique:   clique and cluster in the fabric: devices of one clique reach each other
    peer:            ``switch connected``: the device's NVLinks lead to switches by construction
    throttled:       whether one of `throttle`'s reasons slows the device down
    temperature_left_c: degrees to the limit of temperature (T.Limit), below 0 beyond it
    sram_exceeded:   more errors of SRAM than the vendor allows
    unrepairable:    memory that no spare can replace
    spareless_banks: banks of memory whose spare rows are used up
    retired_pages:   pages of memory retired in the device's lifetime
    compute_mode:    who may compute on it: ``default``, ``exclusive_process``, ``prohibited``
    c2c:             ``on`` or ``off``: the NVLink between the device and its Grace processor
    power_limit_w:   the limit of power that is set
    unread:          the fields that the tool could not read, each with the text in its place; a
                     field that begins with ``tool`` is a value that no other check reads
    index: the tool's number of the device
    vendor: ``nvidia`` or ``amd``
    model, uuid, serial: as the tool prints them
    vbios: version of its firmware
    memory_total_mb, memory_used_mb: MiB
    ecc_pending, mig_pending: ``on`` or ``off`` after the next reset
    ecc_uncorrectable_volatile, ecc_correctable_volatile: errors since the driver was loaded
    ecc_uncorrectable_aggregate: errors in the device's lifetime
    remap_failed: no spare row was left for a memory row
    remapped_uncorrectable: memory rows that were replaced after an uncorrectable error
    retired_pending: memory pages are retired at the next reset
    pcie_generation, pcie_width: of the link now; a width is a number of lanes
    pcie_generation_max, pcie_width_max: the maximum of device and slot together
    temperature_c, memory_temperature_c: degrees Celsius
    memory_temperature_max_c: degrees Celsius; the limit of the memory
    processes: programs that the tool lists on the device
    links: to other GPUs (NVLink, XGMI)
    """

    index: int
    vendor: str
    pci_address: str
    model: str | None = None
    uuid: str | None = None
    serial: str | None = None
    vbios: str | None = None
    memory_total_mb: int | None = None
    memory_used_mb: int | None = None
    ecc: str | None = None
    ecc_pending: str | None = None
    ecc_uncorrectable_volatile: int | None = None
    ecc_uncorrectable_aggregate: int | None = None
    ecc_correctable_volatile: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    remapped_uncorrectable: int | None = None
    retired_pending: bool | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    throttle: tuple[str, ...] = ()
    temperature_c: int | None = None
    temperature_slowdown_c: int | None = None
    memory_temperature_c: int | None = None
    persistence: str | None = None
    mig: str | None = None
    processes: tuple[GpuProcess, ...] = ()
    links: tuple[GpuLink, ...] = ()
    performance_state: str | None = None
    idle: bool | None = None
    virtual: bool = False
    memory_temperature_max_c: int | None = None
    mig_pending: str | None = None
    repair_pending: bool | None = None
    recovery: str | None = None
    fabric_state: str | None = None
    fabric_status: str | None = None
    fabric_faults: tuple[str, ...] = ()
    fabric_clique: str | None = None
    peer: str | None = None
    throttled: bool | None = None
    temperature_left_c: int | None = None
    sram_exceeded: bool | None = None
    unrepairable: bool | None = None
    spareless_banks: int | None = None
    retired_pages: int | None = None
    compute_mode: str | None = None
    c2c: str | None = None
    power_limit_w: int | None = None
    unread: tuple[tuple[str, str], ...] = ()
    recovery_named: bool = False


@dataclass(frozen=True)
class PciGpu:
    """A GPU as the PCI bus shows it, whether or not a driver has it.

    device:     the device id, four hex digits
    pci_class:  six hex digits: 030000 is a display adapter, 030200 and 120000 only compute
    driver:     the kernel driver that is bound to the GPU; ``vfio-pci``: for a virtual machine
    pcie_width: lanes in use; None where sysfs has no number
    pcie_speed: as sysfs prints it: ``16.0 GT/s PCIe``
    aer:        uncorrected errors of its link since the boot, here and at the port above it:
                ``fatal`` or ``nonfatal``, the error's name in sysfs, how many
    address: on the PCI bus, ``0000:5e:00.0``
    vendor: ``nvidia`` or ``amd``
    numa_node: to which its slot is attached; None: not known
    pcie_width_max: lanes that the device and the port above it can use
    """

    address: str
    vendor: str
    device: str
    driver: str | None = None
    numa_node: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_speed: str | None = None
    pci_class: str = ""
    aer: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True)
class Tool:
    """A source of facts, such as nvidia-smi or the kernel's log, and whether it worked.

    state:  ``ok``, ``missing``, ``stuck`` (an earlier process of the tool hangs in the kernel),
            ``timed out``, ``failed``, ``nonsense`` (its output makes no sense) or ``hidden`` (the
            probe itself may not open the GPUs)
    detail: the tool's version, or its message
    name: of the program or source
    """

    name: str
    state: str
    detail: str = ""

    @property
    def works(self) -> bool:
        return self.state == "ok"

    @property
    def state_text(self) -> str:
        """``nvidia-smi timed out: after 20 s``."""
        return f"{self.name} {self.state}: {self.detail}".rstrip(": ")


@dataclass(frozen=True)
class KernelFault:
    """One kind of fault of a GPU in the kernel's log since the boot, equal lines counted.

    source: ``xid``, ``sxid`` (an NVSwitch), ``nvidia``, ``amdgpu`` or ``pcie``
    code:   of the Xid or SXid
    text:   the first such line, at most 160 characters
    action: ``ISOLATE``, ``REBOOT``, ``RESET``, ``MONITOR`` or ``APPLICATION`` (not the node's)
    pci_address: of the device; None: the line names none
    first_s, last_s: when the first and the last such line were written, seconds since the boot;
            None: the log has no such stamps
    count: of such lines
    """

    source: str
    code: int | None
    pci_address: str | None
    text: str
    action: str
    count: int = 1
    first_s: int | None = None
    last_s: int | None = None


@dataclass(frozen=True)
class DeviceFile:
    """A device file that a job opens.

    path: of the file
    mode: as ls prints it, ``crw-rw-rw-``
    uid, gid: numbers of owner and group
    """

    path: str
    mode: str
    uid: int
    gid: int


@dataclass(frozen=True)
class Gpus:
    """A node's GPUs: by the PCI bus, by the vendors' tools, by the kernel's log.

    nvswitches:     NVSwitch devices on the PCI bus
    driver:         the version of NVIDIA's kernel driver; None: not loaded
    cuda:           the highest CUDA version that NVIDIA's driver supports
    fabric_manager: ``running``, ``not running``, ``not needed`` or ``not looked for``
    pci: GPUs on the PCI bus, whether or not a driver has them
    nvidia, amd: devices that the vendor's tool shows
    nvidia_tool, nvlink_tool, amd_tool: whether the tool worked
    amd_driver: the version of AMD's kernel driver; None: not loaded
    device_files: that a job opens
    kernel_faults: in the kernel's log since the boot
    kernel_log: whether the log could be read
    """

    pci: tuple[PciGpu, ...] = ()
    nvswitches: int = 0
    nvidia: tuple[Gpu, ...] = ()
    amd: tuple[Gpu, ...] = ()
    nvidia_tool: Tool = Tool("nvidia-smi", "missing")
    nvlink_tool: Tool = Tool("nvidia-smi nvlink", "missing")
    amd_tool: Tool = Tool("amd-smi", "missing")
    driver: str | None = None
    amd_driver: str | None = None
    cuda: str | None = None
    fabric_manager: str = "not needed"
    device_files: tuple[DeviceFile, ...] = ()
    kernel_faults: tuple[KernelFault, ...] = ()
    kernel_log: Tool = Tool("kernel log", "missing")

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All devices that a tool shows."""
        return self.nvidia + self.amd
