"""What can be wrong with a node, by name: `nodeready lab up --profile h100 --fault ib-half-rate`.

A fault is data, and nothing of it is on the node's disk: it comes back at every start of the
node, and is gone at the first start without it. To add one, add a `Fault` to one of the tuples
below (AMD's and NVIDIA's GPUs, the network, the host), and a row to the table of
tests/lab/faults/test_fault_table.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nodeready.lab import helper, image
from nodeready.lab.boot import STASH
from nodeready.lab.hardware import Hardware
from nodeready.lab.helper import Content
from nodeready.lab.image import CLOCK
from nodeready.lab.needs import environment
from nodeready.lab.profiles import PROFILES
from nodeready.lab.state import LabError

# --- A fault as data.


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a node.

    about:    what is wrong, in one line
    profiles: the kinds of node that can have it
    hardware: what its hardware has instead: arguments of the function that makes the profile's
    gone:     files that are missing; below /run, /tmp or /dev, which a restart makes anew
    start:    shell text that root runs on the node before its sshd
    programs: modules of nodeready.lab to run beside, each with its words after the node's pid
    needs:    programs that this machine must have
    """

    name: str
    about: str
    profiles: tuple[str, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    start: str = ""
    programs: tuple[tuple[str, ...], ...] = ()
    needs: tuple[str, ...] = ()


# --- Faults of AMD's GPUs and their links: of GPU 3, where one GPU is faulty.

AMD = ("mi300x",)

AMD_FAULTS = (
    Fault(
        "amd-gpu-gone",
        "PCI shows 8 GPUs, amd-smi 7",
        AMD,
        hardware={"missing": (3,)},
    ),
    Fault(
        "amd-ecc",
        "GPU 3 has had 2 uncorrectable memory errors",
        AMD,
        hardware={"gpus": {3: {"uncorrectable": 2}}},
    ),
    Fault(
        "amd-xgmi-down",
        "the link between GPU 3 and GPU 5 is down",
        AMD,
        hardware={"gpus": {3: {"down": (5,)}, 5: {"down": (3,)}}},
    ),
    Fault(
        "amd-half-width",
        "GPU 3 uses 8 of its 16 PCIe lanes",
        AMD,
        hardware={"gpus": {3: {"pcie_width": 8}}},
    ),
    Fault(
        "amd-hang",
        "GPU 3 hangs: the kernel's log has a ring that timed out",
        AMD,
        hardware={"log": {3: "ring sdma0 timeout, signaled seq=1183, emitted seq=1185"}},
    ),
    Fault(
        "numa-balancing",
        "the kernel moves memory between NUMA nodes under running jobs",
        AMD,
        hardware={"numa_balancing": 1},
    ),
)


# --- Faults of interfaces, InfiniBand ports and TCP ports.

ALL = ("cpu", "h100", "a100", "mi300x")

IB = ("h100", "a100")

NETWORK_FAULTS = (
    Fault(
        "ib-down",
        "port mlx5_3 has no link: a cable is out",
        IB,
        hardware={"ports": {"mlx5_3": {"state": "1: DOWN", "phys_state": "2: Polling"}}},
    ),
    Fault(
        "ib-half-rate",
        "port mlx5_3 runs at half its speed: two of its lanes are dead",
        ("h100",),
        hardware={"ports": {"mlx5_3": {"rate": "200 Gb/sec (2X NDR)"}}},
    ),
    Fault(
        "ib-firmware",
        "mlx5_3 has another firmware than the other adapters",
        ("h100",),
        hardware={"ports": {"mlx5_3": {"firmware": "28.36.1010"}}},
    ),
    Fault(
        "roce-down",
        "port mlx5_3 has no link: a cable is out",
        ("mi300x",),
        hardware={"ports": {"mlx5_3": {"state": "1: DOWN", "phys_state": "3: Disabled"}}},
    ),
    Fault(
        "bond-half",
        "one of the two ports of the management bond has no link",
        ("h100",),
        hardware={"cut": ("ens1f1np1",)},
    ),
    Fault(
        "wrong-mtu",
        "eth0 has MTU 1400",
        ALL,
        start="ip link set dev eth0 mtu 1400\n",
    ),
    Fault(
        "port-taken",
        "a forgotten TensorBoard listens on port 29500",
        ALL,
        programs=(("culprits", "listener", "29500"),),
    ),
    Fault(
        "ephemeral",
        "outgoing connections may take the ports of jobs: ip_local_port_range 15000-61000",
        ALL,
        start="echo '15000 61000' >/proc/sys/net/ipv4/ip_local_port_range\n",
    ),
    Fault(
        "firewall",
        "nftables drops everything but ssh",
        ALL,
        start="""\
nft -f - <<'END'
table inet filter {
    chain input {
        type filter hook input priority filter; policy drop;
        iif lo accept
        ct state established,related accept
        tcp dport 22 accept
    }
}
END
""",
        needs=("nft",),
    ),
)


# --- Faults of the host: its clock, mounts and processes.

HOST_FAULTS = (
    Fault("clock", "no time server answers: the clock is not synchronised", ALL, gone=(CLOCK,)),
    Fault(
        "disk-full",
        "/scratch is full",
        ALL,
        start="""\
mkdir -p /scratch
mount -t tmpfs -o size=1m,mode=1777 /dev/nvme0n1 /scratch
head -c 2m /dev/zero >/scratch/checkpoint.pt 2>/dev/null || :
""",
    ),
    Fault(
        "read-only",
        "the root file system became read-only after an error of its disk",
        ALL,
        start="""\
for dir in /run /tmp /dev; do mount --bind $dir $dir; done
mount -o remount,bind,ro /
""",
    ),
    Fault(
        "dead-mount",
        "the server of the network mount /nas is gone: whoever looks into it hangs",
        ALL,
        programs=(("culprits", "dead_mount", "/nas"),),
    ),
    Fault(
        "other-kernel",
        "another kernel than on the other nodes",
        ALL,
        start="echo 5.4.0-1-generic >/proc/sys/kernel/osrelease\n",
    ),
    Fault(
        "stuck-process",
        "a process hangs in the kernel (state D)",
        ALL,
        programs=(("culprits", "stuck"),),
    ),
)


# --- Faults of NVIDIA's GPUs and their links: of GPU 3, where one GPU is faulty.

BOTH = ("h100", "a100")

NVIDIA_FAULTS = (
    Fault(
        "gpu-gone",
        "PCI shows 8 GPUs, nvidia-smi 7",
        BOTH,
        hardware={"gpus": {3: None}},
    ),
    Fault(
        "gpu-ecc",
        "GPU 3 has had 2 uncorrectable memory errors",
        BOTH,
        hardware={"gpus": {3: {"ecc_uncorrectable": 2, "ecc_uncorrectable_aggregate": 2}}},
    ),
    Fault(
        "ecc-off",
        "GPU 3 runs without ECC: a flipped bit is a wrong result",
        BOTH,
        hardware={"gpus": {3: {"ecc": "off"}}},
    ),
    Fault(
        "remap-pending",
        "GPU 3 waits for a reset to replace a row of its memory",
        BOTH,
        hardware={"gpus": {3: {"remap_pending": True}}},
    ),
    Fault(
        "pcie-half-width",
        "GPU 3 uses 8 of its 16 PCIe lanes",
        BOTH,
        hardware={"gpus": {3: {"pcie_width": 8}}},
    ),
    Fault(
        "gpu-hot",
        "GPU 3 has 92 degrees and slows down",
        BOTH,
        hardware={"gpus": {3: {"temperature_c": 92, "throttle": ("hw_thermal_slowdown",)}}},
    ),
    Fault(
        "no-persistence",
        "the driver unloads after each job: persistence is off",
        BOTH,
        hardware={"gpus": {at: {"persistence": "off"} for at in range(8)}},
    ),
    Fault(
        "xid",
        "the kernel's log has Xid 79 of GPU 3: it fell off the bus",
        BOTH,
        hardware={
            "xids": {3: (79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")}
        },
    ),
    Fault(
        "nvidia-smi-hangs",
        "nvidia-smi never ends, whoever asks it to",
        BOTH,
        hardware={"tool": "hangs"},
    ),
    Fault(
        "nvidia-smi-fails",
        "the driver was updated under the running one: nvidia-smi fails",
        BOTH,
        hardware={"tool": "fails"},
    ),
    Fault(
        "nvlink-down",
        "2 NVLinks of GPU 3 are down",
        BOTH,
        hardware={"inactive": ((3, 4), (3, 5))},
    ),
    Fault(
        "no-fabric-manager",
        "nv-fabricmanager does not run: the NVSwitches were never set up",
        BOTH,
        hardware={"fabric_manager": False},
    ),
)


# --- All faults by name, and how a node gets one.

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for faults in (
        NVIDIA_FAULTS,
        AMD_FAULTS,
        NETWORK_FAULTS,
        HOST_FAULTS,
    )
    for fault in faults
}


def find(name: str, profile: str) -> Fault:
    """The fault of this name. Raises LabError where a node of the profile cannot have it."""
    fault = FAULTS.get(name)
    if fault is None:
        raise LabError(f"no fault {name!r}; there are: {', '.join(FAULTS)}")
    if profile not in fault.profiles:
        raise LabError(
            f"a node of profile {profile} cannot have the fault {name}; "
            f"there it is: --profile {' or '.join(fault.profiles)}"
        )
    path = environment()["PATH"]
    if missing := [one for one in fault.needs if not shutil.which(one, path=path)]:
        raise LabError(f"the fault {name} needs {', '.join(missing)}, which is not installed here")
    return fault


def changes(name: str, profile: str) -> tuple[dict[str, Content], list[str]]:
    """The files of a node with this fault, and what it does not have. Raises LabError."""
    fault = find(name, profile)
    files: dict[str, Content] = {}
    gone = list(fault.gone)
    if fault.hardware:
        kind = PROFILES[profile]
        healthy, broken = _shown(kind.hardware), _shown(kind.make(**fault.hardware))
        gone += [path for path in healthy if path not in broken]
        files |= {path: text for path, text in broken.items() if healthy.get(path) != text}
    if fault.start:
        files[f"{STASH}/fault"] = fault.start
    return files, gone


def _shown(hardware: Hardware) -> dict[str, Content]:
    """All its files by their path on a node, below STASH where they are laid over the kernel's."""
    files: dict[str, Content] = {
        f"{STASH}{tree}/{path}": content
        for tree, contents in hardware.trees.items()
        for path, content in contents.items()
        if isinstance(content, str)
    }
    for path, file in hardware.files.items():
        files[path] = (file.content, file.mode)
    for key, value in hardware.sysctls.items():
        files[f"{STASH}/proc/sys/{key}"] = f"{value}\n"
    files[f"{STASH}/kernel.log"] = image.kernel_log(*hardware.kernel_log)
    files[f"{STASH}/start"] = hardware.start
    return files


def act(name: str, pid: int) -> None:
    """Start what this fault needs beside the node's files. Raises LabError."""
    for module, *words in FAULTS[name].programs:
        done = helper.module(f"nodeready.lab.{module}", str(pid), *words)
        if done.returncode:
            raise LabError(f"the fault {name}: {done.stderr.strip()}")
