"""What can be wrong with a node itself: its clock, mounts and processes."""

from __future__ import annotations

from nodeready.lab.fault import Fault
from nodeready.lab.fresh import CLOCK
from nodeready.lab.network_faults import ALL

FAULTS = (
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
        programs=(("dead_mount", "/nas"),),
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
