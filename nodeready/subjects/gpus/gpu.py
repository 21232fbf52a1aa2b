"""A node's GPUs as dataclasses, the same for every vendor. None: the source has no value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nodeready.subjects.gpus.peers import PeerAccess

_PCI_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.I
)


def pci_address(text: str) -> str | None:
    """A PCI address in the form of sysfs; None for another text.

    Tools print domains of up to eight digits, in capitals, and some messages omit the function.

    >>> pci_address("00000000:5E:00.0"), pci_address("0000:5e:00")
    ('0000:5e:00.0', '0000:5e:00.0')
    """
    if (match := _PCI_ADDRESS.fullmatch(text.strip())) is None:
        return None
    domain, bus, device, function = (int(digits or "0", 16) for digits in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


@dataclass(frozen=True)
class GpuProcess:
    """A process that a GPU's tool lists."""

    pid: int  # of the process
    name: str  # as the tool prints it, often a path
    memory_mb: int | None = None  # MiB of the GPU's memory that it uses
    kind: str | None = None  # ``C`` computes, ``G`` only draws (X server), ``C+G``, ``M+C`` (MPS)


@dataclass(frozen=True)
class GpuLink:
    """One link between GPUs (NVLink, XGMI)."""

    index: int  # the tool's number of the link
    state: str  # ``active`` or ``inactive``
    speed_gbps: float | None = None  # gigabytes per second in one direction, as nvidia-smi has it


@dataclass(frozen=True)
class Gpu:
    """One device as its vendor's tool shows it."""

    index: int  # the tool's number of the device
    vendor: str  # ``nvidia`` or ``amd``
    pci_address: str  # ``0000:5e:00.0``: lower case, a domain of four digits
    model: str | None = None  # as the tool prints them
    uuid: str | None = None  # likewise
    serial: str | None = None  # likewise
    vbios: str | None = None  # version of its firmware
    memory_total_mb: int | None = None  # MiB
    memory_used_mb: int | None = None  # likewise
    ecc: str | None = None  # ``on`` or ``off``; None where the device has none
    ecc_pending: str | None = None  # ``on`` or ``off`` after the next reset
    ecc_uncorrectable_volatile: int | None = None  # errors since the driver was loaded
    ecc_uncorrectable_aggregate: int | None = None  # errors in the device's lifetime
    ecc_correctable_volatile: int | None = None  # errors since the driver was loaded
    remap_pending: bool | None = None  # memory rows are replaced at the next reset
    remap_failed: bool | None = None  # no spare row was left for a memory row
    remapped_uncorrectable: int | None = None  # memory rows replaced after an uncorrectable error
    retired_pending: bool | None = None  # memory pages are retired at the next reset
    pcie_generation: int | None = None  # of the link now; a width is a number of lanes
    pcie_generation_max: int | None = None  # the maximum of device and slot together
    pcie_width: int | None = None  # of the link now; a width is a number of lanes
    pcie_width_max: int | None = None  # the maximum of device and slot together
    # the active reasons of the hardware for a lower clock: ``hw_slowdown``,
    # ``hw_thermal_slowdown``, ``hw_power_brake_slowdown``, ``sw_thermal_slowdown``
    throttle: tuple[str, ...] = ()
    temperature_c: int | None = None  # degrees Celsius
    temperature_slowdown_c: int | None = None  # the temperature at which the device slows down
    memory_temperature_c: int | None = None  # degrees Celsius
    persistence: str | None = None  # ``on`` or ``off``; None where the driver has no such mode
    mig: str | None = None  # ``on`` or ``off``; None where the device has none
    processes: tuple[GpuProcess, ...] = ()  # programs that the tool lists on the device
    links: tuple[GpuLink, ...] = ()  # to other GPUs (NVLink, XGMI)
    performance_state: str | None = None  # ``P0`` (busy) to ``P15``
    idle: bool | None = None  # no program runs on the device
    virtual: bool = False  # the node is a virtual machine, where the slot is unknown
    memory_temperature_max_c: int | None = None  # degrees Celsius; the limit of the memory
    mig_pending: str | None = None  # ``on`` or ``off`` after the next reset
    repair_pending: bool | None = None  # a memory channel or a TPC that the next reset repairs
    recovery: str | None = None  # the driver's action: ``none``, ``reset``, ``reboot`` and others
    fabric_state: str | None = None  # registration at the fabric: ``completed`` and others
    fabric_status: str | None = None  # outcome of the registration: ``success``, or the error
    fabric_faults: tuple[str, ...] = ()  # faults of its attachment to the fabric, in words
    fabric_clique: str | None = None  # clique, cluster: devices of one clique reach each other
    peer: str | None = None  # ``switch connected``: its NVLinks lead to switches by construction
    throttled: bool | None = None  # whether one of `throttle`'s reasons slows the device down
    temperature_left_c: int | None = None  # degrees to the limit (T.Limit), below 0 beyond it
    sram_exceeded: bool | None = None  # more errors of SRAM than the vendor allows
    unrepairable: bool | None = None  # memory that no spare can replace
    spareless_banks: int | None = None  # banks of memory whose spare rows are used up
    retired_pages: int | None = None  # pages of memory retired in the device's lifetime
    compute_mode: str | None = None  # ``default``, ``exclusive_process`` or ``prohibited``
    c2c: str | None = None  # ``on`` or ``off``: the NVLink between it and its Grace processor
    power_limit_w: int | None = None  # the limit of power that is set
    # the fields that the tool could not read, each with the text in its place; a field that begins
    # with ``tool`` is a value that no other check reads
    unread: tuple[tuple[str, str], ...] = ()
    # the driver names the action, so that ``none`` means that no fault is left; older drivers only
    # tell whether the hardware needs a reset
    recovery_named: bool = False


@dataclass(frozen=True)
class PciGpu:
    """A GPU as the PCI bus shows it, whether or not a driver has it."""

    address: str  # on the PCI bus, ``0000:5e:00.0``
    vendor: str  # ``nvidia`` or ``amd``
    device: str  # the device id, four hex digits
    driver: str | None = None  # the kernel driver bound to it; ``vfio-pci``: for a virtual machine
    numa_node: int | None = None  # to which its slot is attached; None: not known
    pcie_width: int | None = None  # lanes in use; None where sysfs has no number
    pcie_width_max: int | None = None  # lanes that the device and the port above it can use
    pcie_speed: str | None = None  # as sysfs prints it: ``16.0 GT/s PCIe``
    pci_class: str = ""  # six hex digits: 030000 is a display adapter, 030200 and 120000 compute
    # uncorrected errors of its link since the boot, here and at the port above it: ``fatal`` or
    # ``nonfatal``, the error's name in sysfs, how many
    aer: tuple[tuple[str, str, int], ...] = ()


@dataclass(frozen=True)
class Tool:
    """A source of facts, such as nvidia-smi or the kernel's log, and whether it worked."""

    name: str  # of the program or source
    # ``ok``, ``missing``, ``stuck`` (an earlier process of the tool hangs in the kernel), ``timed
    # out``, ``failed``, ``nonsense`` (its output makes no sense) or ``hidden`` (the probe itself
    # may not open the GPUs)
    state: str
    detail: str = ""  # the tool's version, or its message

    @property
    def works(self) -> bool:
        return self.state == "ok"

    @property
    def state_text(self) -> str:
        """``nvidia-smi timed out: after 20 s``."""
        return f"{self.name} {self.state}: {self.detail}".rstrip(": ")


@dataclass(frozen=True)
class KernelFault:
    """One kind of fault of a GPU in the kernel's log since the boot, equal lines counted."""

    source: str  # ``xid``, ``sxid`` (an NVSwitch), ``nvidia``, ``amdgpu`` or ``pcie``
    code: int | None  # of the Xid or SXid
    pci_address: str | None  # of the device; None: the line names none
    text: str  # the first such line, at most 160 characters
    action: str  # ``ISOLATE``, ``REBOOT``, ``RESET``, ``MONITOR``; ``APPLICATION``: not a node's
    count: int = 1  # of such lines
    first_s: int | None = None  # seconds since the boot, of the first such line; None: no stamps
    last_s: int | None = None  # likewise, of the last such line


@dataclass(frozen=True)
class DeviceFile:
    """A device file that a job opens."""

    path: str  # of the file
    mode: str  # as ls prints it, ``crw-rw-rw-``
    uid: int  # numbers of owner and group
    gid: int  # likewise


@dataclass(frozen=True)
class Gpus:
    """A node's GPUs: by the PCI bus, by the vendors' tools, by the kernel's log."""

    pci: tuple[PciGpu, ...] = ()  # GPUs on the PCI bus, whether or not a driver has them
    nvswitches: int = 0  # NVSwitch devices on the PCI bus
    nvidia: tuple[Gpu, ...] = ()  # devices that the vendor's tool shows
    amd: tuple[Gpu, ...] = ()  # likewise
    nvidia_tool: Tool = Tool("nvidia-smi", "missing")  # whether the tool worked
    nvlink_tool: Tool = Tool("nvidia-smi nvlink", "missing")  # likewise
    amd_tool: Tool = Tool("amd-smi", "missing")  # likewise
    driver: str | None = None  # the version of NVIDIA's kernel driver; None: not loaded
    amd_driver: str | None = None  # the version of AMD's kernel driver; None: not loaded
    cuda: str | None = None  # the highest CUDA version that NVIDIA's driver supports
    fabric_manager: str = "not needed"  # or ``running``, ``not running``, ``not looked for``
    device_files: tuple[DeviceFile, ...] = ()  # that a job opens
    kernel_faults: tuple[KernelFault, ...] = ()  # in the kernel's log since the boot
    kernel_log: Tool = Tool("kernel log", "missing")  # whether the log could be read
    peers: PeerAccess = PeerAccess()  # how GPUs and fast RDMA adapters reach each other

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All devices that a tool shows."""
        return self.nvidia + self.amd
