"""The policy of every node. The lines below are nodeready's defaults: uncomment what differs.

A file named after a group (`h100.py`) holds the values that differ for that group. nodeready
refuses misspelt keys and wrong values before it contacts a node.
"""

from __future__ import annotations

# kernel.yama.ptrace_scope: 0 lets py-spy and gdb attach to processes of the same user without
# sudo. 3 is refused: it can only be lowered by a reboot.
# ptrace_scope = 0

# Who receives a crash: 'path' writes a file by core_pattern, 'systemd-coredump' keeps cores in
# its own store.
# core_handler = "path"

# kernel.core_pattern when core_handler is 'path': absolute, at most 128 bytes (core(5)). %h
# keeps nodes apart on a shared file system, %P is the pid as the host sees it.
# core_pattern = "/var/crash/core.%e.%P.%h.%t"

# Days after which systemd-tmpfiles removes a core file; 0 keeps them for ever. A core is as
# large as its process: without a rule the disk fills.
# core_retention_days = 14

# RLIMIT_CORE for jobs, soft and hard, in KiB or 'unlimited': a limit below the process's size
# leaves a truncated core.
# limit_core = "unlimited"

# RLIMIT_MEMLOCK for jobs, soft and hard, in KiB or 'unlimited': RDMA pins its buffers.
# limit_memlock = "unlimited"

# RLIMIT_NOFILE for jobs, soft and hard: NCCL and data loaders open thousands of files. The
# kernel refuses more than fs.nr_open (1048576 by default).
# limit_nofile = 1048576

# The limits.d domains that get the limits: '*', 'root', a user, '@group'. '*' does not apply to
# root, so root has separate lines (limits.conf(5)).
# limit_domains = ("*", "root")

# systemd services whose children are jobs: PAM limits never reach them, so each gets a drop-in
# where the unit exists.
# limit_services = ("slurmd",)

# Services that a deploy may restart so that a new limit takes effect. Empty: a running service
# with an old limit is reported as pending, never restarted.
# restart_services = ()

# Debugging tools that the distribution's package manager installs.
# packages = ("gdb", "strace", "pdsh")

# The version of py-spy to install in /usr/local/bin; '': py-spy is not managed.
# py_spy_version = "0.4.3"

# True: a deploy installs `nodeready run` as /usr/local/bin/nodeready-run, one file that needs
# only the node's Python.
# nodeready_run = True

# Users who get a ~/.pdshrc, or a marked block in their existing file.
# pdshrc_users = ()

# Directories that ~/.pdshrc puts in front of PATH, absolute.
# pdshrc_path = ()

# A shell line in ~/.pdshrc that activates the job's environment; must be quiet.
# pdshrc_activate = ""

# Further shell lines of ~/.pdshrc.
# pdshrc_lines = ()

# How ssh between nodes treats host keys: 'known_hosts' distributes every node's keys,
# 'accept-new' trusts at first sight, 'no' never asks and never protects.
# ssh_client_mode = "known_hosts"

# ssh_config(5) host patterns (gpu*, 10.1.*) for which the mode is set. Empty: only the keys are
# distributed, and the ssh options of the nodes stay.
# ssh_client_hosts = ()

# Further known_hosts lines for every node, e.g. of a login node outside the inventory.
# ssh_known_hosts = ()

# Kernel arguments for the IOMMU. None: chosen by the hardware (AMD Instinct); (): not managed.
# iommu_args = None

# The ports on which jobs rendezvous, first and last. torchrun's default is 29500.
# port_range = (29500, 29510)

# The user for whom `nodeready ready` proves that a node is debuggable; '': the user that logs
# in. Root's rights say nothing about the rights of a job's user.
# job_user = ""

# True: a deploy installs the node's own check: one file, a timer that writes the last verdict
# and the Prometheus textfile, and Slurm's prolog and health check.
# gate = False

# Seconds between two verdicts of the timer.
# gate_interval_s = 300

# Seconds for which the prolog accepts a verdict: three of the timer's intervals, so that a late
# verdict does no harm.
# gate_max_age_s = 900

# Seconds that the prolog and the health check may take: Slurm kills a health check after 60, and
# a prolog holds every job of its node.
# gate_budget_s = 10

# The file for node_exporter's textfile collector, written if its directory exists; '': none.
# gate_textfile = "/var/lib/prometheus/node-exporter/nodeready.prom"

# A shared directory into which each node writes its verdict as NODE.json, for `audit
# --recorded`; '': none.
# gate_directory = ""

# True: the health check drains its node in Slurm, with a reason that begins with 'nodeready:',
# and undrains it only from such a reason.
# gate_drain = False

# The most nodes of a partition that gate_drain drains, as a share (at least one node) or a
# number. Where more nodes fail, the policy is often wrong, and not the nodes.
# gate_drain_max = "10%"

# True: the health check also returns its node from a drain whose reason is in undrain_reasons,
# if no leftover of an ended job holds it, and `ready` on the node proves it.
# gate_undrain = False

# The reasons of drains that `nodeready undrain` may end, besides those of nodeready's own: the
# exact words, as Slurm itself writes them. A drain by another user than root and SlurmUser
# stays.
# undrain_reasons = ("Kill task failed", "Prolog error", "batch job complete failure")

# GPUs that every node's PCI bus shows; None: any.
# gpu_count = None

# The product name that the vendor's tool prints; '': any, if it is one.
# gpu_model = ""

# The GPU driver's version; '': any.
# gpu_driver = ""

# The VBIOS versions that GPUs may have; (): any.
# gpu_vbios = ()

# ECC mode of GPUs that have one: without ECC a flipped bit is an unnoticed wrong result.
# 'default': on, except for cards that are delivered with ECC off (GeForce, RTX). 'any': not
# judged.
# gpu_ecc = "default"

# Persistence of NVIDIA's driver, by its daemon or mode: without it the driver unloads after each
# job, and the next job waits seconds per GPU.
# gpu_persistence = "on"

# MIG mode of GPUs that have one.
# gpu_mig = "any"

# Degrees Celsius that no GPU may reach; None: its own slow-down threshold.
# gpu_max_temperature_c = None

# True: no process may be left on a GPU, for nodes that have no job.
# gpu_idle = False

# NVIDIA Xid codes that are not reported.
# xid_ignore = ()

# Network interfaces that every node has, with their required values: {'eth0': {'speed_mbps':
# 100000, 'mtu': 9000, 'driver': 'mlx5_core'}}.
# nics = ()

# RDMA ports that every node has, as DEVICE/PORT, with their required values: {'mlx5_0/1':
# {'rate_gbps': 400, 'link_layer': 'InfiniBand', 'firmware': '28.39.1002'}}.
# rdma_ports = ()

# The kernel's release, as uname -r; '': any.
# kernel_release = ""

# Distribution and version, ID and VERSION_ID of os-release(5): 'ubuntu 22.04'.
# os_release = ""

# The time zone, e.g. 'Etc/UTC'; '': any.
# timezone = ""

# Whether the clock must be synchronised: logs and certificates of nodes have to agree.
# clock = "synchronised"

# Directories that must be mount points, absolute.
# mounts = ()

# Per cent of space and of inodes that must be free on local file systems: at 5 per cent ext4
# keeps the rest for root, and jobs fail.
# disk_free_percent = 5

# MiB that /dev/shm must have: PyTorch's data loaders and NCCL share memory through it. 0: any.
# shm_min_mb = 0

# MiB of memory that the kernel must see; 0: any.
# memory_min_mb = 0

# vm.nr_hugepages; None: any.
# hugepages = None

# Whether there may be swap.
# swap = "any"

# kernel.numa_balancing; None: 0 where AMD Instinct GPUs are (ROCm asks for it), any elsewhere.
# numa_balancing = None

# Gbit/s of bus bandwidth that a collective between nodes must reach in `nodeready smoke`
# (nccl-tests' busbw in GB/s, times eight); 0: only peers are compared. In use: 370 on one port
# of 400 Gbit/s, 2000 on eight.
# smoke_min_gbps = 0

# The same inside of a node; 0: only peers are compared. In use: 1200 over NVLink, 120 over PCIe.
# smoke_min_node_gbps = 0

# The network that NCCL must use in `nodeready smoke`, in its own word; '': any. A node on which
# it chose another one, such as sockets because a container lacks /dev/infiniband, fails.
# nccl_network = ""

# What `nodeready ready` says of a node that failed far more often than its peers, or has a GPU
# that did (`nodeready lemons`). 'warn': it stays a go, because its fault is not there now;
# 'fail': it is a no-go; 'ignore': the memory is not judged.
# lemon_nodes = "warn"

# The Python of the job, for the PyTorch that `nodeready smoke` tests; '': python3 of the job's
# user's session.
# smoke_python = ""

# The words in front of that Python if the job runs in a container: ('apptainer', 'exec', '--nv',
# '/images/job.sif').
# smoke_prefix = ()

# The job's environment in such a test: the NCCL_* variables decide what is tested.
# smoke_environment = ()

# The site's own checks. The files `checks.d/*.toml` beside an inventory add to them, so that
# this setting is mostly left out.
# site_checks = ()

# Known and accepted findings, check id -> reason: they are listed as waived and do not fail:
# {'nics.mtu': {'reason': 'ticket 4711', 'owner': 'ana', 'until': '2027-01-31', 'nodes':
# 'gpu[001-004]'}}. After the last day, UTC, the finding counts again.
# waivers = ()
