"""Policy: the one declaration of what "ready" means. A field per setting, with its reason.

The field names are the keys of pyinfra's ``group_data``. `nodeready/settings.py` turns such data
into a Policy, or into a list of errors that name the file, the key and the likely meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from nodeready.setting import Names, Table
from nodeready.setting import setting as _setting


@dataclass(frozen=True)
class Policy:
    """What every node of a group has to be. All values are plain data."""

    ptrace_scope: int = _setting(
        0,
        "int",
        "kernel.yama.ptrace_scope: 0 lets py-spy and gdb attach to processes of the same user "
        "without sudo. 3 is refused: it can only be lowered by a reboot.",
        low=0,
        high=2,
    )
    core_handler: str = _setting(
        "path",
        "choice",
        "Who receives a crash: 'path' writes a file by core_pattern, 'systemd-coredump' keeps "
        "cores in its own store.",
        choices=("path", "systemd-coredump"),
    )
    core_pattern: str = _setting(
        "/var/crash/core.%e.%P.%h.%t",
        "core_pattern",
        "kernel.core_pattern when core_handler is 'path': absolute, at most 128 bytes (core(5)). "
        "%h keeps nodes apart on a shared file system, %P is the pid as the host sees it.",
    )
    core_retention_days: int = _setting(
        14,
        "int",
        "Days after which systemd-tmpfiles removes a core file; 0 keeps them for ever. A core is "
        "as large as its process: without a rule the disk fills.",
        low=0,
        high=3650,
    )
    limit_core: str = _setting(
        "unlimited",
        "limit",
        "RLIMIT_CORE for jobs, soft and hard, in KiB or 'unlimited': a limit below the process's "
        "size leaves a truncated core.",
    )
    limit_memlock: str = _setting(
        "unlimited",
        "limit",
        "RLIMIT_MEMLOCK for jobs, soft and hard, in KiB or 'unlimited': RDMA pins its buffers.",
    )
    limit_nofile: int = _setting(
        1048576,
        "int",
        "RLIMIT_NOFILE for jobs, soft and hard: NCCL and data loaders open thousands of files. "
        "The kernel refuses more than fs.nr_open (1048576 by default).",
        low=1024,
        high=1073741816,
    )
    limit_domains: Names = _setting(
        ("*", "root"),
        "domains",
        "The limits.d domains that get the limits: '*', 'root', a user, '@group'. '*' does not "
        "apply to root, so root has lines of its own (limits.conf(5)).",
    )
    limit_services: Names = _setting(
        ("slurmd",),
        "units",
        "systemd services whose children are jobs: PAM limits never reach them, so each gets a "
        "drop-in where the unit exists.",
    )
    restart_services: Names = _setting(
        (),
        "units",
        "Services that a deploy may restart so that a new limit takes effect. Empty: a running "
        "service with an old limit is reported as pending, never restarted.",
    )
    packages: Names = _setting(
        ("gdb", "strace", "pdsh"),
        "packages",
        "Debugging tools that the distribution's package manager installs.",
    )
    py_spy_version: str = _setting(
        "0.4.3",
        "version",
        "The py-spy that is put into /usr/local/bin; '' leaves py-spy alone.",
    )
    pdshrc_users: Names = _setting(
        (), "users", "Users who get a ~/.pdshrc (a marked block in an existing file of theirs)."
    )
    pdshrc_path: Names = _setting(
        (), "paths", "Directories that ~/.pdshrc puts in front of PATH, absolute."
    )
    pdshrc_activate: str = _setting(
        "",
        "line",
        "A shell line in ~/.pdshrc that activates the job's environment; must be quiet.",
    )
    pdshrc_lines: Names = _setting((), "lines", "Further shell lines of ~/.pdshrc.")
    ssh_client_mode: str = _setting(
        "known_hosts",
        "choice",
        "How ssh between nodes answers the host-key question: 'known_hosts' distributes every "
        "node's keys, 'accept-new' trusts at first sight, 'no' never asks and never protects.",
        choices=("known_hosts", "accept-new", "no"),
    )
    ssh_client_hosts: Names = _setting(
        (),
        "patterns",
        "ssh_config(5) host patterns (gpu*, 10.1.*) for which the mode is set. Empty: the ssh "
        "options of the nodes are left alone, only the keys are distributed.",
    )
    ssh_known_hosts: Names = _setting(
        (),
        "lines",
        "Further known_hosts lines for every node, e.g. of a login node outside the inventory.",
    )
    iommu_args: Names | None = _setting(
        None,
        "kernel_args",
        "Kernel arguments for the IOMMU. None chooses by the hardware that is there (AMD "
        "Instinct); () manages nothing.",
    )
    port_range: tuple[int, int] = _setting(
        (29500, 29510),
        "port_range",
        "The ports on which jobs rendezvous, first and last. torchrun's default is 29500.",
    )
    job_user: str = _setting(
        "",
        "user",
        "The user as whom `nodeready ready` proves that a node is debuggable; '': whoever logs "
        "in. What root can do says nothing about what a job's user can.",
    )
    gate: bool = _setting(
        False,
        "bool",
        "True: a deploy installs the node's own check: one file, a timer that writes the last "
        "verdict and the Prometheus textfile, and Slurm's prolog and health check.",
    )
    gate_interval_s: int = _setting(
        300, "int", "Seconds between two verdicts of the timer.", low=30, high=86400
    )
    gate_max_age_s: int = _setting(
        900,
        "int",
        "Seconds for which the prolog believes a verdict: three of the timer's intervals, so that "
        "one that is late costs nothing.",
        low=0,
        high=86400,
    )
    gate_budget_s: int = _setting(
        10,
        "int",
        "Seconds that the prolog and the health check may take: Slurm kills a health check after "
        "60, and a prolog holds every job of its node.",
        low=3,
        high=50,
    )
    gate_textfile: str = _setting(
        "/var/lib/prometheus/node-exporter/nodeready.prom",
        "path",
        "The file for node_exporter's textfile collector, written where its directory exists; "
        "'': none.",
    )
    gate_drain: bool = _setting(
        False,
        "bool",
        "True: the health check drains its node in Slurm, with a reason that begins with "
        "'nodeready:', and takes back only what bears such a reason.",
    )
    lock_wait_s: int = _setting(
        30,
        "int",
        "Seconds that a deploy waits for another one on the same node.",
        low=0,
        high=3600,
    )
    package_lock_wait_s: int = _setting(
        120,
        "int",
        "Seconds to wait for the package manager's lock: a fresh node's first update can hold it.",
        low=0,
        high=3600,
    )
    gpu_count: int | None = _setting(
        None,
        "count",
        "GPUs that every node's PCI bus shows; None: any.",
        low=0,
        high=64,
    )
    gpu_model: str = _setting(
        "", "line", "The product name that the vendor's tool prints; '': any, if it is one."
    )
    gpu_driver: str = _setting("", "line", "The GPU driver's version; '': any.")
    gpu_vbios: Names = _setting((), "lines", "The VBIOS versions that GPUs may have; (): any.")
    gpu_ecc: str = _setting(
        "on",
        "choice",
        "ECC mode of GPUs that have one: without it a flipped bit is a wrong result that nobody "
        "sees. 'any' judges nothing.",
        choices=("on", "off", "any"),
    )
    gpu_persistence: str = _setting(
        "on",
        "choice",
        "Persistence of NVIDIA's driver, by its daemon or mode: without it the driver unloads "
        "after each job and the next one waits seconds per GPU.",
        choices=("on", "off", "any"),
    )
    gpu_mig: str = _setting(
        "any", "choice", "MIG mode of GPUs that have one.", choices=("on", "off", "any")
    )
    gpu_max_temperature_c: int | None = _setting(
        None,
        "count",
        "Degrees Celsius that no GPU may reach; None: its own slow-down threshold.",
        low=30,
        high=120,
    )
    gpu_idle: bool = _setting(
        False, "bool", "True: no process may be left on a GPU, for nodes that have no job."
    )
    xid_ignore: tuple[int, ...] = _setting(
        (), "numbers", "NVIDIA Xid codes that are not reported.", low=0, high=1023
    )
    nics: Table = _setting(
        (),
        "table",
        "Network interfaces that every node has, and what they must be: "
        "{'eth0': {'speed_mbps': 100000, 'mtu': 9000, 'driver': 'mlx5_core'}}.",
        columns={"speed_mbps": int, "mtu": int, "driver": str, "firmware": str},
    )
    rdma_ports: Table = _setting(
        (),
        "table",
        "RDMA ports that every node has, as DEVICE/PORT, and what they must be: "
        "{'mlx5_0/1': {'rate_gbps': 400, 'link_layer': 'InfiniBand', 'firmware': '28.39.1002'}}.",
        columns={"rate_gbps": int, "link_layer": str, "firmware": str},
    )
    kernel_release: str = _setting("", "line", "The kernel's release, as uname -r; '': any.")
    os_release: str = _setting(
        "", "line", "Distribution and version, ID and VERSION_ID of os-release(5): 'ubuntu 22.04'."
    )
    timezone: str = _setting("", "line", "The time zone, e.g. 'Etc/UTC'; '': any.")
    clock: str = _setting(
        "synchronised",
        "choice",
        "Whether the clock must be synchronised: logs and certificates of nodes have to agree.",
        choices=("synchronised", "any"),
    )
    mounts: Names = _setting((), "paths", "Directories that must be mount points, absolute.")
    disk_free_percent: int = _setting(
        5,
        "int",
        "Per cent of space and of inodes that must be free on local file systems: at 5 per cent "
        "ext4 keeps the rest for root, and jobs fail.",
        low=0,
        high=99,
    )
    shm_min_mb: int = _setting(
        0,
        "int",
        "MiB that /dev/shm must have: PyTorch's data loaders and NCCL share memory through it. "
        "0: any.",
        low=0,
        high=1 << 30,
    )
    memory_min_mb: int = _setting(
        0, "int", "MiB of memory that the kernel must see; 0: any.", low=0, high=1 << 30
    )
    hugepages: int | None = _setting(
        None, "count", "vm.nr_hugepages; None: any.", low=0, high=1 << 30
    )
    swap: str = _setting("any", "choice", "Whether there may be swap.", choices=("any", "off"))
    numa_balancing: int | None = _setting(
        None,
        "count",
        "kernel.numa_balancing; None: 0 where AMD Instinct GPUs are (ROCm asks for it), any "
        "elsewhere.",
        low=0,
        high=2,
    )
    waivers: tuple[tuple[str, str], ...] = _setting(
        (),
        "waivers",
        "Findings that are known and accepted, check id -> reason: they are listed as waived, "
        "and fail nothing: {'nics.mtu': 'until the switch is replaced, ticket 4711'}.",
    )


@dataclass(frozen=True)
class Expected(Policy):
    """A policy as the control machine judges by it: with what follows from it, no setting.

    gate_files: path -> sha256 of what the node's own check consists of. On the node itself,
                where a policy is no more than that, nobody knows it.
    """

    gate_files: tuple[tuple[str, str], ...] = ()
