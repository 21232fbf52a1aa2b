"""The lab: a cluster of real SSH nodes on one machine, without a container engine.

    from nodeready.lab import Lab

    lab = Lab.up("lab", nodes=3, profile="cpu")
    node = lab.nodes[0]
    node.run("hostname", user="ml")        # over ssh, as any client
    node.enter(["ip", "link"])             # without ssh, for breaking things
    node.write("/etc/motd", "hello\\n")
    node.reset()                           # a fresh node again
    lab.slurm_run("sinfo")                 # where it was started with slurm=True
    lab.down()

Each node has an overlay of this machine's root file system, namespaces of its own (mount, PID,
network, UTS, IPC), an address on a bridge, its own /proc/sys and a real sshd. What is not a
namespace's to separate stays this machine's: the kernel's real Yama and core_pattern, memory
and CPUs.

needs     what the machine must have
profiles  the kinds of node: hardware as data, nvidia, amd
faults    what can be wrong with a node, by name;  culprits: processes that are a fault
state     /run/nodeready/lab/NAME, and the errors
network   subnets, addresses
image     the layer that makes an overlay a fresh node, with its /proc, /sys and kernel log
slurm     the files for Slurm, and the running Slurm
boot      the process that starts nodes: cgroups, what each does at its start;  syscalls
processes recognising a lab's processes; running others, with our end of the one that starts nodes
cluster   Lab, and its end;  node: starting nodes, Node
"""

from __future__ import annotations

from nodeready.lab.cluster import Lab, down
from nodeready.lab.node import Node
from nodeready.lab.profiles import PROFILES, Profile
from nodeready.lab.state import LabError, LabUnavailable

__all__ = ["PROFILES", "Lab", "LabError", "LabUnavailable", "Node", "Profile", "down"]
