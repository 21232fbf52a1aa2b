"""The node's own check: its files, the timer, Slurm's configuration, the last verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from nodeready.core import base, shell
from nodeready.core.policy import Policy
from nodeready.core.shell import SCRIPT as PYTHONS_SCRIPT
from nodeready.core.shell import parse_pythons

DIRECTORY = "/usr/local/lib/nodeready"
BUNDLE = f"{DIRECTORY}/nodeready.pyz"
#: The bundle compiled for the node's Python, and the note about both (agent/gate/main.py).
COMPILED = f"{DIRECTORY}/compiled.pyz"
NOTE = f"{DIRECTORY}/compiled"
POLICY = "/etc/nodeready/policy.json"
RECORD = f"{DIRECTORY}/record"
PROLOG = f"{DIRECTORY}/slurm-prolog"
HEALTH_CHECK = f"{DIRECTORY}/slurm-healthcheck"
SERVICE = "/etc/systemd/system/nodeready.service"
TIMER = "/etc/systemd/system/nodeready.timer"
WANTED = "/etc/systemd/system/timers.target.wants/nodeready.timer"
CRON = "/etc/cron.d/nodeready"
#: The verdict of `record`; /run is empty after a boot, and a verdict holds for one boot.
VERDICT = "/run/nodeready/verdict.json"
#: Why the node stays in service although it is not ready, on one line: a `Hold`.
HELD = "/run/nodeready/held"
#: The first word of nodeready's drain reasons. A drain with another one is never changed.
PREFIX = "nodeready:"
#: So begins the reason of a drain that a second look has not confirmed (agent/gate/drain.py).
PENDING = f"{PREFIX} (pending) "

#: In the order in which they are removed: first the files that start the check.
FILES = (
    WANTED, TIMER, SERVICE, CRON, RECORD, HEALTH_CHECK, PROLOG, NOTE, COMPILED, BUNDLE, POLICY,
)  # fmt: skip
PROGRAMS = (RECORD, PROLOG, HEALTH_CHECK)
#: What root runs, and what decides what root runs: only root may write these.
ROOTS = (DIRECTORY, POLICY.rpartition("/")[0], *FILES)


def _script(policy: Policy) -> str:
    files = " ".join(FILES)
    look = shell.script("gate", FILES=files)
    conf = shell.library("slurm_conf")
    if policy.gate:
        state = shell.script(
            "gate_state", PROGRAMS=" ".join(PROGRAMS), FILES=files, ROOTS=" ".join(ROOTS),
            VERDICT=VERDICT, NOTE=NOTE, HELD=HELD,
        )  # fmt: skip
        return f"{look}{PYTHONS_SCRIPT}{state}{conf}:\n"
    # Of an earlier policy's files, a program that slurm.conf names must stay.
    return f"{look}if [ -e {PROLOG} ] || [ -e {HEALTH_CHECK} ]; then\n:\n{conf}fi\n:\n"


#: Maximum questions about all nodes, per second, of the nodes that gate_drain_max holds: an answer
#: about 10,000 nodes has 10 MB.
_LOOKS_PER_S = 4


@dataclass(frozen=True)
class Hold:
    """A node that is not ready, and that the gate did not drain."""

    time_s: int  # when Slurm was asked, in whole seconds since 1970
    nodes: int  # the nodes of the partition that has its share; 0: Slurm could not be asked
    policy_digest: str  # of the policy by which the node is not ready
    reason: str  # why it was not drained, one line

    def line(self) -> str:
        return f"{self.time_s} {self.nodes} {self.policy_digest} {self.reason}\n"

    @classmethod
    def parse(cls, line: str) -> Hold | None:
        """The hold on this line; None: the line has no hold."""
        match = re.fullmatch(r"(\d{1,11}) (\d{1,6}) ([0-9a-f]+) (.+)", line.strip())
        return cls(int(match[1]), int(match[2]), match[3], match[4]) if match else None

    def is_valid(self, now_s: float, policy_digest: str, trusted_s: float) -> bool:
        """Whether Slurm need not be asked again: all nodes of the partition together ask for it at
        most `_LOOKS_PER_S` times a second.

        trusted_s: minimum seconds for which it is valid
        """
        limit_s = max(trusted_s, self.nodes / _LOOKS_PER_S)
        is_same = bool(self.nodes) and self.policy_digest == policy_digest
        return is_same and 0 <= now_s - self.time_s < limit_s


@dataclass(frozen=True)
class SlurmConf:
    """What slurm.conf says about its prolog and health check."""

    path: str  # the file
    prolog: tuple[tuple[str, str], ...] = ()  # (value, ``/path:number``) of each Prolog line
    health: tuple[tuple[str, str], ...] = ()  # (value, ``/path:number``) of HealthCheckProgram's
    interval: str | None = None  # HealthCheckInterval as written; None: not set, which is never
    timeout: str | None = None  # PrologEpilogTimeout as written; None: not set, which is for ever

    def names(self, program: str) -> str:
        """Where slurm.conf names this program, or "". Prolog may be a pattern."""
        rows = self.prolog if program == PROLOG else self.health
        return next((source for value, source in rows if fnmatchcase(program, value)), "")


@dataclass(frozen=True)
class Gate:
    """The node's own check, as far as it is installed."""

    JSON_KEYS: ClassVar = {"existing": "there"}
    existing: tuple[str, ...] = ()  # our files that exist, in the order of FILES
    digests: Mapping[str, str] | None = None  # path -> sha256; None where the policy wants no gate
    runs: tuple[str, ...] = ()  # our programs that are executable
    systemd: bool = False  # systemd runs as the init
    cron: bool = False  # there is an /etc/cron.d
    slurm: bool = False  # slurmd is installed, or there is a slurm.conf
    slurm_conf: SlurmConf | None = None  # None: none was found, or it was not looked for
    python: str = ""  # a Python that can run the check, or ""
    old: str = ""  # without a new enough Python: the first one, with its version; else ""
    magic: str = ""  # the magic number of that Python's compiled code, or ""
    # sha256 of the compiled bundle, sha256 of the program, magic number; None: no note
    note: tuple[str, str, str] | None = None
    exposed: tuple[str, ...] = ()  # files that root runs and other users can write
    age_s: int | None = None  # seconds since the last verdict; None: no verdict yet
    since_s: int | None = None  # seconds since the bundle was installed; None: it is not installed
    held: str = ""  # why the gate did not drain the node though it is not ready, or ""


def _slurm_conf(path: str, lines: Iterable[base.Line]) -> SlurmConf:
    """The values of slurm.conf and its included files; keys in any case, the last line counts."""
    by_file = base.by_path(lines)
    settings: dict[str, list[tuple[str, str]]] = {}
    todo, done = [path], set[str]()
    while todo:
        file = todo.pop(0)
        # A file that is included twice is read once.
        for line in by_file.get(file, ()) if file not in done else ():
            words = line.text.partition("#")[0].strip()
            if (match := re.match(r"(\w+)(?:\s*=\s*|\s+)(\S+)", words)) is None:
                continue
            key, value = match[1].lower(), match[2].strip("\"'")
            if key == "include":
                pattern = value if value.startswith("/") else f"{path.rpartition('/')[0]}/{value}"
                todo += [other for other in by_file if fnmatchcase(other, pattern)]
            else:
                settings.setdefault(key, []).append((value, line.source))
        done.add(file)
    last = {key: rows[-1][0] for key, rows in settings.items()}
    return SlurmConf(
        path,
        tuple(settings.get("prolog", ())),
        tuple(settings.get("healthcheckprogram", ())),
        last.get("healthcheckinterval"),
        last.get("prologepilogtimeout"),
    )


def parse(outputs: Mapping[str, base.Output], policy: Policy) -> Gate:
    """The observation. Raises ProbeError for a time that is no number."""
    output = outputs["gate"]
    text, values = output.require(), output.values()
    python, old, magic = parse_pythons(output.all("python"))
    paths = {*FILES, VERDICT}
    digests = {
        match[2]: match[1]
        for match in re.finditer(r"^([0-9a-f]{64})  (/\S+)$", text, re.M)
        if match[2] in paths
    }
    existing, executable = {*output.all("there")}, {*output.all("runs")}
    written, exposed = {}, []
    for row in output.all("file"):
        time, _, remaining = row.partition(" ")
        rights, _, path = remaining.partition(" /")
        written[f"/{path}"] = base.number(time, "a file's time")
        # Only the owner may write, and the owner is root.
        if f"/{path}" in ROOTS and not re.fullmatch("0 [0-7]*[0145][0145]", rights):
            exposed.append(f"/{path}")
    now_s = base.number(values["now"], "the time") if "now" in values else 0
    if policy.gate and not now_s:
        raise base.ProbeError("date +%s printed no time", text)
    conf = values.get("slurm", "")
    hold = Hold.parse(values.get("held", ""))
    # The note of agent/gate/main.py.
    note = re.fullmatch(r"([0-9a-f]{64}) ([0-9a-f]{64}) ([0-9a-f]{8})", values.get("note", ""))
    return Gate(
        existing=tuple(path for path in FILES if path in existing),
        digests=digests if policy.gate else None,
        runs=tuple(path for path in PROGRAMS if path in executable),
        systemd="systemd" in values,
        cron="cron" in values,
        slurm="slurmd" in values or bool(conf),
        slurm_conf=_slurm_conf(conf, base.file_lines(text)) if conf else None,
        python=python,
        old=old,
        magic=magic,
        note=(note[1], note[2], note[3]) if note else None,
        exposed=tuple(exposed),
        age_s=max(0, now_s - written[VERDICT]) if VERDICT in written else None,
        since_s=max(0, now_s - written[BUNDLE]) if BUNDLE in written else None,
        held=hold.reason if hold else "",
    )


PROBE = base.Probe("gate", (base.Section("gate", _script),), parse)
