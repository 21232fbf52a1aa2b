"""A node as the two sections of the probe print it: a healthy one, and what differs from it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from nodeready.policy import Policy
from nodeready.subjects.base import Output
from nodeready.subjects.host import checks
from nodeready.subjects.host import facts as host
from nodeready.subjects.host.facts import Host
from tests.builders import judging
from tests.builders.printed import grep_lines

POLICY = Policy()
FILES: Mapping[str, str] = {
    "/etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.4 LTS"\nVERSION_ID="22.04"\nID=ubuntu',
    "/proc/sys/kernel/osrelease": "5.15.0-113-generic",
    "/proc/sys/kernel/arch": "x86_64",
    "/proc/sys/kernel/hostname": "gpu001",
    "/proc/sys/kernel/pid_max": "4194304",
    "/proc/sys/kernel/threads-max": "8254000",
    "/proc/sys/kernel/numa_balancing": "1",
    "/proc/sys/fs/file-nr": "4096\t0\t9223372036854775807",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=UUID=76c84c6d-a59f-4a8d-903e-4cb9ef69b970 ro "
    "iommu=pt resume=/dev/sda3 console=ttyS0",
    "/proc/uptime": "86400.12 8000000.00",
    "/proc/loadavg": "1.50 0.12 0.09 1/2594 12345",
    "/proc/meminfo": "MemTotal: 2113430528 kB\nMemAvailable: 2000000000 kB\nSwapTotal: 0 kB\n"
    "HugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    "/sys/devices/system/cpu/online": "0-95,96-191",
    "/sys/devices/system/node/online": "0-1",
    "/sys/module/apparmor/parameters/enabled": "Y",
    "/etc/fstab": "# comment\nUUID=1 / ext4 errors=remount-ro 0 1\n/dev/sda2 none swap sw 0 0\n"
    "nas:/home /home nfs rw,nofail 0 0",
    "/proc/self/mounts": "proc /proc proc rw 0 0\n/dev/sda1 / ext4 rw,relatime 0 0\n"
    "tmpfs /dev/shm tmpfs rw,nosuid 0 0\nnas:/home /home nfs4 rw,hard 0 0",
}
TRACKING = """\
Reference ID    : 0A000001 (10.0.0.1)
Stratum         : 3
System time     : 0.000123456 seconds slow of NTP time
Last offset     : -0.000012345 seconds
Root delay      : 0.000500000 seconds
Root dispersion : 0.001200000 seconds
Leap status     : Normal
"""
PACKAGES = """\
packages=dpkg
Package: libc6
Status: install ok installed
Source: glibc
Version: 2.35-0ubuntu3.8
--
Package: gdb
Status: deinstall ok config-files
Version: 12.1
packages=end
"""
COUNTS = "zombies=0\nunseen=0\n"
PROCESSES = f"processes=1\n{COUNTS}processes=end\n"
MOUNTS = """\
mounts=begin
asked=/
asked=/dev/shm
nr_fs=4096 1000000 600000 550000 65536 60000 /
nr_fs=4096 262144 262144 262144 262144 262143 /dev/shm
mounts=local
asked=/home
nr_fs=1048576 1000000 200 200 0 0 /home
mounts=end
"""


def clock(name: str, text: str, rc: int = 0) -> str:
    return f"clock={name}\n{text}\nclock_rc={rc}\n"


def node(
    files: Mapping[str, str] | None = None,
    *printed: str,
    clock_text: str = clock("chronyc", TRACKING),
    packages: str = PACKAGES,
    processes: str = PROCESSES,
    mounts: str = MOUNTS,
    slow_rc: int | None = 0,
    sysctl: str = "",
    policy: Policy = POLICY,
) -> Host:
    """The observation of a node with these files and slow answers instead of the healthy ones."""
    first = "\n".join(("localtime=/usr/share/zoneinfo/Etc/UTC", *printed))
    text = f"{first}\n{grep_lines({**FILES, **(files or {})})}"
    slow = packages + clock_text + processes + mounts
    outputs = {
        "host": Output(text, 0),
        "host_slow": Output(slow, slow_rc),
        "sysctl": Output(sysctl, 0),
    }
    return host.parse(outputs, policy)


judged = partial(judging.by_name, checks)
wrong = partial(judging.wrong, checks)
