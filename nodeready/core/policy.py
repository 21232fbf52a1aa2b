"""Policy: the declaration of "ready". A field per setting; the comment above it is its reason.

The field names are the keys of pyinfra's ``group_data``. `make_policy` turns such
data into a Policy, or into a list of errors that name the file, the key and the likely meaning.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, fields, replace
from functools import cache
from typing import Any, cast

from nodeready.core import settings as kinds
from nodeready.core.settings import Invalid, Names, SettingKind, setting, suggestion, value_text

# --- A check of a site's own, as a file of `checks.d` or the setting `site_checks` declares it.

#: The directory of the files that declare checks, beside an inventory.
FOLDER = "checks.d"
#: Where a check can be made: by `nodeready audit`, by `nodeready ready`, by the gate on a node.
AUDIT, READY, GATE = MOMENTS = ("audit", "ready", "gate")
#: The ways to judge an output; a check has exactly one.
COMPARATORS = ("matches", "equals", "range", "status")
KEYS = (
    *("id", "run", "file", "json", *COMPARATORS),
    *("severity", "reason", "fix", "timeout_s", "groups", "in"),
)
#: The result of a subject that could not be observed has this name.
_RESERVED = "observed"
#: `timeout`, and a shell for a command that was ended by a signal, use higher ones.
_MAX_STATUS = 123
#: Control characters other than tab and newline, and halves of surrogate pairs.
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
#: ``a.b[0].c``: names and positions.
_JSON_PATH = re.compile(r"(?:[^.\[\]]+|\[\d{1,6}\])(?:\.[^.\[\]]+|\[\d{1,6}\])*")
_JSON_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True)
class SiteCheck:
    """One check."""

    name: str  # its id is ``site.NAME``
    run: str  # POSIX sh that prints what is judged; "": ``file`` is read
    file: str  # absolute path of the file on the node whose text is judged; "": ``run`` is run
    json: str  # the way to a value in the JSON that was read (``a.b[0].c``); "": the text itself
    comparator: str  # one of COMPARATORS
    expected: Any  # the value that it compares with: a text, (low, high), or an exit status
    severity: str = "fail"  # of a result that is not as it should be: ``fail`` or ``warn``
    reason: str = ""  # why this must hold
    fix: str = ""  # what repairs it
    timeout_s: int = 5  # seconds for the command
    groups: tuple[str, ...] = ()  # the inventory's groups whose nodes are checked; (): all nodes
    moments: tuple[str, ...] = MOMENTS  # those of MOMENTS at which it is made
    source: str = ""  # ``checks.d/FILE.toml:LINE``; "": no file declares it

    @property
    def id(self) -> str:
        return f"site.{self.name}"

    @property
    def json_steps(self) -> tuple[str | int, ...]:
        """The names and positions of ``json``."""
        steps = _JSON_STEP.finditer(self.json)
        return tuple(int(step[1]) if step[1] else step[2] for step in steps)

    def table(self) -> dict[str, Any]:
        """The check as a file declares it, without the defaults."""
        table: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("comparator", "expected") and value not in ("", field.default):
                key = {"name": "id", "moments": "in"}.get(field.name, field.name)
                table[key] = list(value) if isinstance(value, tuple) else value
        is_range = self.comparator == "range"
        return {**table, self.comparator: list(self.expected) if is_range else self.expected}


def parse(table: Any, source: str = "") -> SiteCheck:
    """The check that a table with KEYS declares. Raises Invalid; the text names no check."""
    if not isinstance(table, Mapping):
        raise Invalid("must be a table with id, run or file, and how to judge it")
    for key in table:
        if key not in KEYS:
            raise Invalid(f"unknown key {value_text(key)}: {suggestion(key, KEYS)}")
    name = table.get("id", "")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name):
        words = "must be a small letter, then small letters, digits and _"
        raise Invalid(f"id = {value_text(name)}: {words}" if "id" in table else "has no id")
    if name == _RESERVED:
        raise Invalid(f'id = "{_RESERVED}": is the result of a node that could not be observed')
    run, file = _text(table, "run"), _line(table, "file")
    if bool(run.strip()) == bool(file):
        raise Invalid("must have either run or file")
    if file and (not file.startswith("/") or "\t" in file):
        raise Invalid(f"file = {value_text(file)}: must be an absolute path")
    path = _line(table, "json")
    if "json" in table and not _JSON_PATH.fullmatch(path):
        raise Invalid(f"json = {value_text(path)}: must be names and positions: a.b[0].c")
    comparator, expected = _comparison(table)
    if comparator == "status" and (file or path):
        raise Invalid(f"status: is for run alone, not for {'file' if file else 'json'}")
    severity = table.get("severity", "fail")
    if severity not in ("fail", "warn"):
        raise Invalid(f'severity = {value_text(severity)}: must be "fail" or "warn"')
    timeout_s = table.get("timeout_s", 5)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int) or not 1 <= timeout_s <= 60:
        raise Invalid(f"timeout_s = {value_text(timeout_s)}: must be a whole number from 1 to 60")
    return SiteCheck(
        *(name, run, file, path, comparator, expected, severity),
        *(_line(table, "reason"), _line(table, "fix"), timeout_s),
        *(_words(table, "groups", ()), _words(table, "in", MOMENTS), source),
    )


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise Invalid(f"{key} = {value_text(value)}: must be a string")
    if len(value) > kinds.MOST_CHARACTERS:
        raise Invalid(f"{key}: must have at most {kinds.MOST_CHARACTERS} characters")
    value = value.replace("\r\n", "\n")
    if _NO_TEXT.search(value):
        raise Invalid(f"{key} = {value_text(value)}: must not contain control characters")
    return value


def _line(table: Mapping[str, Any], key: str) -> str:
    value = _text(table, key).strip()
    if "\n" in value:
        raise Invalid(f"{key} = {value_text(value)}: must be one line")
    return value


def _comparison(table: Mapping[str, Any]) -> tuple[str, Any]:
    present = [key for key in COMPARATORS if key in table]
    if len(present) != 1:
        several = f"has {' and '.join(present)}: " if present else ""
        raise Invalid(f"{several}must have exactly one of {', '.join(COMPARATORS)}")
    (comparator,) = present
    value = table[comparator]
    if comparator == "matches":
        return comparator, _pattern(_text(table, comparator))
    if comparator == "equals":
        # A number or a truth value as JSON writes it.
        text = json.dumps(value) if isinstance(value, (bool, int, float)) else value
        return comparator, _text({comparator: text}, comparator).strip()
    if comparator == "range":
        return comparator, _range(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_STATUS:
        reason = (
            "a shell and timeout use higher ones for a command that was ended or cannot be run"
        )
        raise Invalid(f"status = {value_text(value)}: must be 0 to {_MAX_STATUS}; {reason}")
    return comparator, value


def _pattern(text: str) -> str:
    try:
        re.compile(text, re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:
        raise Invalid(f"matches = {value_text(text)}: no regular expression: {error}") from None
    if not text:
        raise Invalid('matches = "": matches everything')
    return text


def _range(value: Any) -> tuple[float, float]:
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))):
        raise Invalid(f"range = {value_text(value)}: must be two numbers: [LOW, HIGH]")
    low, high = value
    if low > high:
        raise Invalid(f"range = {value_text(value)}: is the wrong way round: [{high}, {low}]?")
    return (low, high)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and abs(value) <= 1e300


def _words(table: Mapping[str, Any], key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """The words of ``groups`` or ``in``; ``in`` has a fixed choice of them."""
    value = table.get(key, default)
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(isinstance(word, str) and word for word in value):
        raise Invalid(f'{key} = {value_text(value)}: must be a list of words: ["WORD"]')
    if key in table and not value:
        raise Invalid(f"{key} = []: selects nothing; leave it out for all")
    for word in value:
        if default and word not in default:
            raise Invalid(f"{key} = {value_text(list(value))}: {suggestion(word, default)}")
    return tuple(word for word in default if word in value) if default else tuple(value)


def _checks(value: Any) -> tuple[SiteCheck, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise Invalid("must be a list of tables: [{'id': ..., 'run': ..., 'equals': ...}]")
    checks: dict[str, SiteCheck] = {}
    for number, item in enumerate(value, 1):
        table, source = item, ""
        if isinstance(item, Mapping):
            table = {key: item[key] for key in item if key != "source"}
            source = _line(item, "source")
        try:
            check = parse(table, source)
        except Invalid as error:
            raise Invalid(f"check {number}: {error}") from None
        if check.name in checks:
            raise Invalid(f'check {number}: id = "{check.name}": there are two')
        checks[check.name] = check
    return tuple(checks.values())


SITE_CHECKS = SettingKind(
    _checks, "tables as in a file of `checks.d`", lambda checks: [*map(SiteCheck.table, checks)]
)


# --- The policy: a field per setting.


@dataclass(frozen=True)
class Policy:
    """The required state of every node of a group. All values are plain data.

    Explanations and docs show the comment above a field (`reason`).
    """

    # kernel.yama.ptrace_scope: 0 lets py-spy and gdb attach to processes of the same user without
    # sudo. 3 is refused: it can only be lowered by a reboot.
    ptrace_scope: int = setting(0, kinds.whole_number(0, 2))
    # Who receives a crash: 'path' writes a file by core_pattern, 'systemd-coredump' keeps cores in
    # its own store.
    core_handler: str = setting("path", kinds.one_of("path", "systemd-coredump"))
    # kernel.core_pattern when core_handler is 'path': absolute, at most 128 bytes (core(5)). %h
    # keeps nodes apart on a shared file system, %P is the pid as the host sees it.
    core_pattern: str = setting("/var/crash/core.%e.%P.%h.%t", kinds.CORE_PATTERN)
    # Days after which systemd-tmpfiles removes a core file; 0 keeps them for ever. A core is as
    # large as its process: without a rule the disk fills.
    core_retention_days: int = setting(14, kinds.whole_number(0, 3650))
    # RLIMIT_CORE for jobs, soft and hard, in KiB or 'unlimited': a limit below the process's size
    # leaves a truncated core.
    limit_core: str = setting("unlimited", kinds.LIMIT)
    # RLIMIT_MEMLOCK for jobs, soft and hard, in KiB or 'unlimited': RDMA pins its buffers.
    limit_memlock: str = setting("unlimited", kinds.LIMIT)
    # RLIMIT_NOFILE for jobs, soft and hard: NCCL and data loaders open thousands of files. The
    # kernel refuses more than fs.nr_open (1048576 by default).
    limit_nofile: int = setting(1048576, kinds.whole_number(1024, 1073741816))
    # The limits.d domains that get the limits: '*', 'root', a user, '@group'. '*' does not apply
    # to root, so root has separate lines (limits.conf(5)).
    limit_domains: Names = setting(("*", "root"), kinds.DOMAINS)
    # systemd services whose children are jobs: PAM limits never reach them, so each gets a drop-in
    # where the unit exists.
    limit_services: Names = setting(("slurmd",), kinds.UNITS)
    # Services that a deploy may restart so that a new limit takes effect. Empty: a running service
    # with an old limit is reported as pending, never restarted.
    restart_services: Names = setting((), kinds.UNITS)
    # Debugging tools that the distribution's package manager installs.
    packages: Names = setting(("gdb", "strace", "pdsh"), kinds.PACKAGES)
    # The version of py-spy to install in /usr/local/bin; '': py-spy is not managed.
    py_spy_version: str = setting("0.4.3", kinds.VERSION)
    # True: a deploy installs `nodeready run` as /usr/local/bin/nodeready-run, one file that needs
    # only the node's Python.
    nodeready_run: bool = setting(True, kinds.FLAG)
    # Users who get a ~/.pdshrc, or a marked block in their existing file.
    pdshrc_users: Names = setting((), kinds.USERS)
    # Directories that ~/.pdshrc puts in front of PATH, absolute.
    pdshrc_path: Names = setting((), kinds.PATHS)
    # A shell line in ~/.pdshrc that activates the job's environment; must be quiet.
    pdshrc_activate: str = setting("", kinds.LINE)
    # Further shell lines of ~/.pdshrc.
    pdshrc_lines: Names = setting((), kinds.LINES)
    # How ssh between nodes treats host keys: 'known_hosts' distributes every node's keys,
    # 'accept-new' trusts at first sight, 'no' never asks and never protects.
    ssh_client_mode: str = setting("known_hosts", kinds.one_of("known_hosts", "accept-new", "no"))
    # ssh_config(5) host patterns (gpu*, 10.1.*) for which the mode is set. Empty: only the keys
    # are distributed, and the ssh options of the nodes stay.
    ssh_client_hosts: Names = setting((), kinds.PATTERNS)
    # Further known_hosts lines for every node, e.g. of a login node outside the inventory.
    ssh_known_hosts: Names = setting((), kinds.LINES)
    # Kernel arguments for the IOMMU. None: chosen by the hardware (AMD Instinct); (): not managed.
    iommu_args: Names | None = setting(None, kinds.KERNEL_ARGS)
    # The ports on which jobs rendezvous, first and last. torchrun's default is 29500.
    port_range: tuple[int, int] = setting((29500, 29510), kinds.PORT_RANGE)
    # The user for whom `nodeready ready` proves that a node is debuggable; '': the user that logs
    # in. Root's rights say nothing about the rights of a job's user.
    job_user: str = setting("", kinds.USER)
    # True: a deploy installs the node's own check: one file, a timer that writes the last verdict
    # and the Prometheus textfile, and Slurm's prolog and health check.
    gate: bool = setting(False, kinds.FLAG)
    # Seconds between two verdicts of the timer.
    gate_interval_s: int = setting(300, kinds.whole_number(30, 86400))
    # Seconds for which the prolog accepts a verdict: three of the timer's intervals, so that a
    # late verdict does no harm.
    gate_max_age_s: int = setting(900, kinds.whole_number(0, 86400))
    # Seconds that the prolog and the health check may take: Slurm kills a health check after 60,
    # and a prolog holds every job of its node.
    gate_budget_s: int = setting(10, kinds.whole_number(3, 50))
    # The file for node_exporter's textfile collector, written if its directory exists; '': none.
    gate_textfile: str = setting(
        "/var/lib/prometheus/node-exporter/nodeready.prom", kinds.TEXTFILE
    )
    # A shared directory into which each node writes its verdict as NODE.json, for `audit
    # --recorded`; '': none.
    gate_directory: str = setting("", kinds.DIRECTORY)
    # True: the health check drains its node in Slurm, with a reason that begins with 'nodeready:',
    # and undrains it only from such a reason.
    gate_drain: bool = setting(False, kinds.FLAG)
    # The most nodes of a partition that gate_drain drains, as a share (at least one node) or a
    # number. Where more nodes fail, the policy is often wrong, and not the nodes.
    gate_drain_max: str = setting("10%", kinds.NODE_SHARE)
    # True: the health check also returns its node from a drain whose reason is in undrain_reasons,
    # if no leftover of an ended job holds it, and `ready` on the node proves it.
    gate_undrain: bool = setting(False, kinds.FLAG)
    # The reasons of drains that `nodeready undrain` may end, besides those of nodeready's own: the
    # exact words, as Slurm itself writes them. A drain by another user than root and SlurmUser
    # stays.
    undrain_reasons: Names = setting(
        ("Kill task failed", "Prolog error", "batch job complete failure"), kinds.LINES
    )
    # Seconds that a deploy waits for another deploy on the same node.
    lock_wait_s: int = setting(30, kinds.whole_number(0, 3600))
    # Seconds to wait for the package manager's lock: a fresh node's first update can hold it.
    package_lock_wait_s: int = setting(120, kinds.whole_number(0, 3600))
    # GPUs that every node's PCI bus shows; None: any.
    gpu_count: int | None = setting(None, kinds.or_none(kinds.whole_number(0, 64)))
    # The product name that the vendor's tool prints; '': any, if it is one.
    gpu_model: str = setting("", kinds.LINE)
    # The GPU driver's version; '': any.
    gpu_driver: str = setting("", kinds.LINE)
    # The VBIOS versions that GPUs may have; (): any.
    gpu_vbios: Names = setting((), kinds.LINES)
    # ECC mode of GPUs that have one: without ECC a flipped bit is an unnoticed wrong result.
    # 'default': on, except for cards that are delivered with ECC off (GeForce, RTX). 'any': not
    # judged.
    gpu_ecc: str = setting("default", kinds.one_of("default", "on", "off", "any"))
    # Persistence of NVIDIA's driver, by its daemon or mode: without it the driver unloads after
    # each job, and the next job waits seconds per GPU.
    gpu_persistence: str = setting("on", kinds.one_of("on", "off", "any"))
    # MIG mode of GPUs that have one.
    gpu_mig: str = setting("any", kinds.one_of("on", "off", "any"))
    # Degrees Celsius that no GPU may reach; None: its own slow-down threshold.
    gpu_max_temperature_c: int | None = setting(None, kinds.or_none(kinds.whole_number(30, 120)))
    # True: no process may be left on a GPU, for nodes that have no job.
    gpu_idle: bool = setting(False, kinds.FLAG)
    # NVIDIA Xid codes that are not reported.
    xid_ignore: tuple[int, ...] = setting((), kinds.whole_numbers(0, 1023))
    # Network interfaces that every node has, with their required values: {'eth0': {'speed_mbps':
    # 100000, 'mtu': 9000, 'driver': 'mlx5_core'}}.
    nics: kinds.Table = setting((), kinds.table(speed_mbps=int, mtu=int, driver=str, firmware=str))
    # RDMA ports that every node has, as DEVICE/PORT, with their required values: {'mlx5_0/1':
    # {'rate_gbps': 400, 'link_layer': 'InfiniBand', 'firmware': '28.39.1002'}}.
    rdma_ports: kinds.Table = setting((), kinds.table(rate_gbps=int, link_layer=str, firmware=str))
    # The kernel's release, as uname -r; '': any.
    kernel_release: str = setting("", kinds.LINE)
    # Distribution and version, ID and VERSION_ID of os-release(5): 'ubuntu 22.04'.
    os_release: str = setting("", kinds.LINE)
    # The time zone, e.g. 'Etc/UTC'; '': any.
    timezone: str = setting("", kinds.LINE)
    # Whether the clock must be synchronised: logs and certificates of nodes have to agree.
    clock: str = setting("synchronised", kinds.one_of("synchronised", "any"))
    # Directories that must be mount points, absolute.
    mounts: Names = setting((), kinds.PATHS)
    # Per cent of space and of inodes that must be free on local file systems: at 5 per cent ext4
    # keeps the rest for root, and jobs fail.
    disk_free_percent: int = setting(5, kinds.whole_number(0, 99))
    # MiB that /dev/shm must have: PyTorch's data loaders and NCCL share memory through it. 0: any.
    shm_min_mb: int = setting(0, kinds.whole_number(0, 1 << 30))
    # MiB of memory that the kernel must see; 0: any.
    memory_min_mb: int = setting(0, kinds.whole_number(0, 1 << 30))
    # vm.nr_hugepages; None: any.
    hugepages: int | None = setting(None, kinds.or_none(kinds.whole_number(0, 1 << 30)))
    # Whether there may be swap.
    swap: str = setting("any", kinds.one_of("any", "off"))
    # kernel.numa_balancing; None: 0 where AMD Instinct GPUs are (ROCm asks for it), any elsewhere.
    numa_balancing: int | None = setting(None, kinds.or_none(kinds.whole_number(0, 2)))
    # Gbit/s of bus bandwidth that a collective between nodes must reach in `nodeready smoke`
    # (nccl-tests' busbw in GB/s, times eight); 0: only peers are compared. In use: 370 on one port
    # of 400 Gbit/s, 2000 on eight.
    smoke_min_gbps: int = setting(0, kinds.whole_number(0, 1_000_000))
    # The same inside of a node; 0: only peers are compared. In use: 1200 over NVLink, 120 over
    # PCIe.
    smoke_min_node_gbps: int = setting(0, kinds.whole_number(0, 1_000_000))
    # The network that NCCL must use in `nodeready smoke`, in its own word; '': any. A node on
    # which it chose another one, such as sockets because a container lacks /dev/infiniband, fails.
    nccl_network: str = setting("", kinds.NETWORK)
    # What `nodeready ready` says of a node that failed far more often than its peers, or has a GPU
    # that did (`nodeready lemons`). 'warn': it stays a go, because its fault is not there now;
    # 'fail': it is a no-go; 'ignore': the memory is not judged.
    lemon_nodes: str = setting("warn", kinds.one_of("ignore", "warn", "fail"))
    # The Python of the job, for the PyTorch that `nodeready smoke` tests; '': python3 of the job's
    # user's session.
    smoke_python: str = setting("", kinds.PATH)
    # The words in front of that Python if the job runs in a container: ('apptainer', 'exec',
    # '--nv', '/images/job.sif').
    smoke_prefix: Names = setting((), kinds.WORDS)
    # The job's environment in such a test: the NCCL_* variables decide what is tested.
    smoke_environment: Names = setting((), kinds.VARIABLES)
    # The site's own checks. The files `checks.d/*.toml` beside an inventory add to them, so that
    # this setting is mostly left out.
    site_checks: tuple[SiteCheck, ...] = setting((), SITE_CHECKS)
    # Known and accepted findings, check id -> reason: they are listed as waived and do not fail:
    # {'nics.mtu': {'reason': 'ticket 4711', 'owner': 'ana', 'until': '2027-01-31', 'nodes':
    # 'gpu[001-004]'}}. After the last day, UTC, the finding counts again.
    waivers: tuple[kinds.Waiver, ...] = setting((), kinds.WAIVERS)

    def at(self, moment: str) -> Policy:
        """The policy with the site's checks of one of `site_checks.MOMENTS` alone."""
        return self.with_site_checks(row.id for row in self.site_checks if moment in row.moments)

    def with_site_checks(self, ids: Iterable[str]) -> Policy:
        """The policy with those of the site's checks that have one of these ids."""
        chosen = {*ids}
        checks = tuple(check for check in self.site_checks if check.id in chosen)
        return self if checks == self.site_checks else replace(self, site_checks=checks)


#: The first words of settings: an unknown key that begins with such a word is misspelt.
_PREFIXES = (
    "ptrace_", "core_", "limit_", "pdshrc_", "ssh_client_", "iommu_", "py_spy_", "gpu_", "xid_",
    "rdma_", "gate_", "smoke_", "undrain_",
)  # fmt: skip
_FIELDS: dict[str, Field[Any]] = {field.name: field for field in fields(Policy)}


class PolicyError(ValueError):
    """A policy that cannot be used. Each of ``problems`` is one line: file, key, meaning."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


#: Maximum characters of the reason why a value is wrong: it may quote a part of the value.
_MAX_REASON = 600


def setting_kind(key: str) -> SettingKind:
    """The kind of the setting of this name. Raises KeyError for an unknown one."""
    return cast(SettingKind, _FIELDS[key].metadata["kind"])


@cache
def _reasons() -> dict[str, str]:
    """The comment above each field of Policy."""
    import inspect

    reasons: dict[str, str] = {}
    comment: list[str] = []
    for line in inspect.getsource(Policy).splitlines():
        name, colon, _ = line.strip().partition(": ")
        if name.startswith("# "):
            comment.append(line.strip()[2:])
        elif colon and name in _FIELDS:
            reasons[name], comment = " ".join(comment), []
    return reasons


def reason(key: str) -> str:
    """The purpose of the setting of this name. Raises KeyError for an unknown one."""
    return _reasons()[key]


def _misspelt(key: str) -> str:
    """The probable meaning of an unknown ``key``; "" for a key of other software."""
    import difflib

    if close := difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.85):
        return f"did you mean {close[0]}?"
    if key.startswith(_PREFIXES):
        related = [name for name in _FIELDS if name.split("_")[0] == key.split("_", maxsplit=1)[0]]
        return "the settings are " + ", ".join(related)
    return ""


def key_text(key: str) -> str:
    """An unknown setting for a message: as it is, or like a wrong value."""
    return key if key.isprintable() and len(key) <= 60 else value_text(key)


def check_settings(
    data: Mapping[str, Any], source: str, foreign: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The validated settings among ``data``, without keys of other software.

    source:  the file or other origin, for the error text
    foreign: keys of pyinfra, which are never misspelt settings
    Raises PolicyError with every problem of this origin.
    """
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in data.items():
        if key in _FIELDS:
            try:
                settings[key] = setting_kind(key).check(value)
            except Invalid as error:
                rule = str(error)
                rule = rule if len(rule) <= _MAX_REASON else f"{rule[: _MAX_REASON - 3]}..."
                problems.append(f"{source}: {key} = {value_text(value)}: {rule}")
        elif not isinstance(key, str) or key.startswith("_") or key in foreign:
            continue
        elif hint := _misspelt(key):
            problems.append(f"{source}: unknown setting {key_text(key)}: {hint}")
    if problems:
        raise PolicyError(problems)
    return settings


def make_policy(data: Mapping[str, Any]) -> Policy:
    """The Policy that ``data`` declares; missing settings have their default."""
    return Policy(**check_settings(data, "policy"))


def as_data(policy: Policy) -> dict[str, Any]:
    """All settings in the form of group_data, or JSON; `make_policy` is the inverse."""
    return {name: setting_kind(name).plain(vars(policy)[name]) for name in _FIELDS}


def digest(policies: Iterable[Policy]) -> str:
    """A short name for a set of policies in any order: equal policies have equal names.

    A report names its policies by it, and a stored verdict counts for no other policy.
    """
    texts = {json.dumps(asdict(policy), sort_keys=True) for policy in set(policies)}
    return hashlib.sha256("\n".join(sorted(texts)).encode()).hexdigest()[:16]
