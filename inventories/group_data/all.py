"""The policy of every node. The lines below are nodeready's defaults: uncomment what differs.

A file named after a group (`h100.py`) holds the values that differ for that group. nodeready
refuses misspelt keys and wrong values before it contacts a node.
"""

from __future__ import annotations

# py-spy and gdb attach to processes of the same user without sudo.
# ptrace_scope = 0

# Crashes leave a file. %h keeps nodes apart on a shared file system, %P is the pid as the host
# sees it. "systemd-coredump" keeps cores in its own store instead.
# core_handler = "path"
# core_pattern = "/var/crash/core.%e.%P.%h.%t"
# core_retention_days = 14

# A lower core limit leaves a truncated core; RDMA pins its buffers (memlock). "*" does not apply
# to root.
# limit_core = "unlimited"
# limit_memlock = "unlimited"
# limit_nofile = 1048576
# limit_domains = ("*", "root")

# systemd services whose children are jobs: PAM limits never reach them. A running one is
# restarted only when it is listed in restart_services.
# limit_services = ("slurmd",)
# restart_services = ()

# What the distribution's package manager installs; "" as py_spy_version leaves py-spy alone.
# packages = ("gdb", "strace", "pdsh")
# py_spy_version = "0.4.3"
# nodeready_run = True

# Who gets a ~/.pdshrc, and what it puts in front of PATH, activates and runs.
# pdshrc_users = ()
# pdshrc_path = ()
# pdshrc_activate = ""
# pdshrc_lines = ()

# "known_hosts" gives every node the host keys of all nodes, "accept-new" trusts at first sight,
# "no" never asks and never protects; for ssh to the hosts that match these patterns (gpu*).
# ssh_client_mode = "known_hosts"
# ssh_client_hosts = ()
# ssh_known_hosts = ()

# None chooses by the hardware that is there, () leaves the kernel's command line alone.
# iommu_args = None

# The ports on which jobs meet: torchrun's default and the ten after it.
# port_range = (29500, 29510)

# As whom `nodeready ready` proves that a node is debuggable: an account like those of your jobs.
# job_user = ""

# True installs the node's own check: a timer that looks every gate_interval_s seconds, and what
# Slurm's prolog and health check run (docs/gate.md). The prolog believes a verdict for
# gate_max_age_s and takes gate_budget_s at most; gate_drain lets the health check drain its node,
# while at most gate_drain_max nodes of a partition (a share, or a number) are drained so.
# gate = False
# gate_interval_s = 300
# gate_max_age_s = 900
# gate_budget_s = 10
# gate_textfile = "/var/lib/prometheus/node-exporter/nodeready.prom"
# gate_directory = ""
# gate_drain = False
# gate_drain_max = "10%"

# Settings that an audit checks and a deploy does not change. `nodeready learn` writes these for a
# group, from the values of most of its nodes.

# The GPUs of every node. None and "" and () judge nothing; "any" neither.
# gpu_count = None
# gpu_model = ""
# gpu_driver = ""
# gpu_vbios = ()
# gpu_ecc = "default"
# gpu_persistence = "on"
# gpu_mig = "any"
# gpu_max_temperature_c = None

# True where no job may have left a process on a GPU; Xid codes that are not reported.
# gpu_idle = False
# xid_ignore = ()

# Interfaces and RDMA ports that every node has: {"eth0": {"speed_mbps": 100000, "mtu": 9000}},
# {"mlx5_0/1": {"rate_gbps": 400, "link_layer": "InfiniBand"}}.
# nics = ()
# rdma_ports = ()

# The system: "" and None and 0 judge nothing. os_release is like "ubuntu 22.04".
# kernel_release = ""
# os_release = ""
# timezone = ""
# clock = "synchronised"
# mounts = ()
# disk_free_percent = 5
# shm_min_mb = 0
# memory_min_mb = 0
# hugepages = None
# swap = "any"
# numa_balancing = None

# What `nodeready smoke` tests with, the bus bandwidth in Gbit/s that it must reach (0: only peers
# are compared), and the network that NCCL must choose ("IB"):
# ("apptainer", "exec", "--nv", "/images/job.sif"), ("NCCL_DEBUG=WARN",).
# smoke_min_gbps = 0
# smoke_min_node_gbps = 0
# nccl_network = ""
# lemon_nodes = "warn"
# smoke_python = ""
# smoke_prefix = ()
# smoke_environment = ()

# Checks of the site's own are files checks.d/*.toml beside the inventory (docs/site-checks.md).
# site_checks = ()

# Findings that are known and accepted: {"nics.mtu": "until the switch is replaced, ticket 4711"},
# or {"nics.mtu": {"reason": "ticket 4711", "owner": "ana", "until": "2027-01-31",
# "nodes": "gpu[001-004]"}} (docs/audit.md).
# waivers = ()
