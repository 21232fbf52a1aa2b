"""The lab: a cluster of real SSH nodes on one machine, without a container engine.

    from nodeready.lab import Lab

    lab = Lab.up("lab", nodes=3, profile="cpu")
    node = lab.nodes[0]
    node.run("hostname", user="ml")        # over ssh, as any client
    node.enter(["ip", "link"])             # without ssh, for breaking things
    node.write("/etc/motd", "hello\\n")
    node.reset()                           # a fresh node again
    lab.down()

Each node has an overlay of this machine's root file system, its own namespaces (mount, PID,
network, UTS, IPC), an address on a bridge, its own /proc/sys and a real sshd. What no
namespace separates stays this machine's: the kernel's real Yama and core_pattern, memory and CPUs.

profiles   the kinds of node: hardware as data, nvidia, amd
faults     the faults of nodes by name;  culprits: processes that are a fault
state      /run/nodeready/lab/NAME, and the errors
host       this machine: its programs, system calls, what it needs for a lab, subnets
image      the layer that makes an overlay a fresh node, with its /proc, /sys and kernel log
boot       the process that starts nodes
processes  the processes of a lab, the helper that starts nodes, and programs in a node
machines   starts and stops nodes, their disks before and after a fault; ends a lab
cluster    Lab, LabNode
"""

from __future__ import annotations

from nodeready.lab.cluster import Lab, LabNode
from nodeready.lab.machines import down
from nodeready.lab.profiles import PROFILES, Profile
from nodeready.lab.state import LabError, LabUnavailable

__all__ = ["PROFILES", "Lab", "LabError", "LabNode", "LabUnavailable", "Profile", "down"]
