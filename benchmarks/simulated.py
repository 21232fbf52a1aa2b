"""`benchmarks/run simulated`: thousands of nodes' answers, from the wire to the report.

The answers are made of one real look at a lab node. What differs between two nodes of a cluster
differs between any two of these, so that no section is equal that would not be equal there: host
name and address, host key, boot id, MACs, GUIDs, LIDs and GIDs, serial numbers and UUIDs of GPUs,
temperatures, power, times, free memory, load, numbers of processes and sockets, dropped packets,
and on a few nodes error counters. Every hundredth node has another policy, so that there is
something to report. They go the way of `nodeready audit`, which leaves out only the connections:
read and judged by its readers, completed by the fleet's host keys and addresses, compared, and
rendered, to a file: once in the formats that show no facts, as the table, and once in those that
show all facts of all nodes, as JSON. All its processes together are measured.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import re
import resource
import string
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine, report, table
from benchmarks.contenders import ROOT
from benchmarks.measure import BenchmarkError
from nodeready import shell
from nodeready.audit.workers import AuditWorkers
from nodeready.lab import Lab, down
from nodeready.policy import Policy
from nodeready.reports.registry import FORMATS
from nodeready.subjects import snapshot
from nodeready.subjects.context import FleetContext, expectations
from nodeready.subjects.registry import select
from nodeready.subjects.ssh_client.known_hosts import Endpoint
from nodeready.transport.base import Reply, Request
from nodeready.transport.look import Look, SnapshotQuestion

NONCE = "0" * 16
_HOST, _ADDRESS = "thenode", "10.255.255.254"
#: Seconds in which so many answers are to be read, judged, compared and rendered.
BUDGETS = {10_000: 20, 50_000: 60}
_WRAP = 98

# --- The answers: what differs between two nodes of a cluster differs here.

#: The lab's network is small: all nodes have an address in a larger one, 10.64.0.0/14.
_NETWORK, _MASK, _LAST = "10.64.0.0", "255.252.0.0", "10.67.255.255"


def _in_hex(address: str) -> str:
    """As /proc/net/route shows it."""
    return "".join(f"{int(byte):02X}" for byte in reversed(address.split(".")))


def _large(text: str, host: str) -> str:
    """The text with one word for the node's name and address, and the larger network."""
    match = re.search("^network=eth0 ([0-9A-F]{8}) ([0-9A-F]{8})$", text, re.M)
    own = re.search(rf"^/etc/hosts:([0-9.]+) {host}$", text, re.M)
    if match is None or own is None:
        raise BenchmarkError("the lab node shows no network")
    first, mask = (bytes.fromhex(one)[::-1] for one in match.groups())
    last = bytes(one | ~other & 255 for one, other in zip(first, mask, strict=True))
    for was, now in (
        (host, _HOST),
        (match[1], _in_hex(_NETWORK)),
        (match[2], _in_hex(_MASK)),
        (".".join(map(str, last)), _LAST),
    ):
        text = text.replace(was, now)
    for was, now in ((".".join(map(str, first)), _NETWORK), (own[1], _ADDRESS)):
        text = re.sub(rf"(?<![0-9.]){re.escape(was)}(?![0-9.])", now, text)
    return text


Made = Callable[[int, random.Random, str], str]
_DIGITS = string.ascii_letters + string.digits + "+/"


def _ip(node: int, draw: random.Random, was: str) -> str:
    host = (10 << 24 | 64 << 16) + node + 2
    return ".".join(str(host >> shift & 255) for shift in (24, 16, 8, 0))


def _like(node: int, draw: random.Random, was: str) -> str:
    """Another hexadecimal or decimal identity of the same form."""
    return re.sub(
        "[0-9a-f]",
        lambda digit: draw.choice("123456789" if was.isdigit() else "0123456789abcdef"),
        was,
    )


def _key(node: int, draw: random.Random, was: str) -> str:
    return "".join(draw.choices(_DIGITS, k=len(was)))


def _around(spread: float) -> Callable[[int, random.Random, str], str]:
    def made(node: int, draw: random.Random, was: str) -> str:
        value = float(was) * draw.uniform(1 - spread, 1 + spread)
        return f"{value:.2f}" if "." in was else str(round(value))

    return made


def _rarely(most: int) -> Callable[[int, random.Random, str], str]:
    """A counter of errors, which is 0 on most nodes."""
    return lambda node, draw, was: str(draw.randrange(1, most)) if draw.random() < 0.02 else was


def _below(most: int) -> Callable[[int, random.Random, str], str]:
    return lambda node, draw, was: str(draw.randrange(most))


#: What is a node's own: the text before it, itself, the text after it; whether equal texts of a
#: node become equal texts, as of an identity; and what makes another node's of it.
_OWN: tuple[tuple[str, bool, Made], ...] = (
    (rf"()({_HOST})", True, lambda node, draw, was: f"gpu{node:05}"),
    (rf"()({re.escape(_ADDRESS)})", True, _ip),
    (r"\b()([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b", True, _like),
    (r"(_guid:[0-9a-f]{4}:)([0-9a-f:]{14})$", True, _like),
    (r"(/sys/class/net/\w+/address:.*:)((?:[0-9a-f]{2}:){2}[0-9a-f]{2})$", True, _like),
    (r"(<serial>)(\d+)", True, _like),
    (r"(AAAAC3NzaC1lZDI1NTE5AAAAI)(\S{43})", True, _key),
    (r"(/lid:0x)([1-9a-f][0-9a-f]*)$", True, _like),
    (r"(/gids/[01]:.*:)([0-9a-f]{4}:[0-9a-f]{4})$", True, _like),
    (
        r"(/gids/[23]:.*:)(0a00:000b)$",
        True,
        lambda node, draw, was: f"0a40:{node + 2 & 65535:04x}",
    ),
    # Measures, and times.
    (r"(<gpu_temp>)(\d+)", False, _around(0.2)),
    (r"(<gpu_temp_tlimit>)(\d+)", False, _around(0.1)),
    (r"(<memory_temp>)(\d+)", False, _around(0.2)),
    (r"(<power_draw>)([\d.]+)", False, _around(0.1)),
    (
        r"(<timestamp>.*:)(\d\d:\d\d) 20",
        False,
        lambda node, draw, was: f"{draw.randrange(60):02}:00",
    ),
    (
        r"^(/proc/meminfo:\d+:(?:Mem[FA]|Buff|Cach|Act|Inact|Anon|Mapp|Slab)[^:]*: +)(\d+)",
        False,
        _around(0.3),
    ),
    (r"^(/proc/uptime:1:)([\d.]+)", False, _around(0.9)),
    (r"^(/proc/uptime:1:[\d.]+ )([\d.]+)", False, _around(0.9)),
    (r"^(/proc/loadavg:1:)(\d+\.\d+)", False, lambda node, draw, was: f"{draw.uniform(0, 9):.2f}"),
    (
        r"^(/proc/loadavg:1:\S+ )(\d+\.\d+)",
        False,
        lambda node, draw, was: f"{draw.uniform(0, 9):.2f}",
    ),
    (r"^(/proc/loadavg:.*/)(\d+)", False, _below(3000)),
    (r"^(/proc/loadavg:.* )(\d+)$", False, _below(90000)),
    (r"(se\.exec_start *: *)([\d.]+)", False, _around(0.5)),
    (r"(/proc/sys/fs/file-nr:1:)(\d+)", False, _below(90000)),
    # Counters, numbers of processes and of sockets.
    (r"(/statistics/rx_dropped:)(\d+)$", False, _below(5000)),
    (
        r"(/carrier_changes:)(\d+)$",
        False,
        lambda node, draw, was: str(draw.choice((2, 2, 2, 3, 4))),
    ),
    (r"(_(?:errors?|err):)(\d+)$", False, _rarely(9)),
    (r"(/link_downed:)(\d+)$", False, _rarely(3)),
    (r"(nr_fabric_manager=)(\d+)", False, _below(90000)),
    (r"^(/proc/|ceiling=)(\d+)(?=/limits:|$)", True, _below(90000)),
    (r"( 0A 0 )(\d+)$", False, _below(90000000)),
)


class Nodes:
    """The answers of many nodes, made of one node's. Each is the same in every run."""

    def __init__(self, answer: str, host: str) -> None:
        text = snapshot._unpack(answer, NONCE).decode("utf-8", "surrogateescape")
        text = _large(text, host)
        found: dict[int, tuple[int, int]] = {}
        for row, (pattern, _, _) in enumerate(_OWN):
            for match in re.finditer(pattern, text, re.M):
                found.setdefault(match.start(2), (match.end(2), row))
        for match in re.finditer(f"@()({NONCE})", text):
            found[match.start(2)] = (match.end(2), -1)
        self.pieces: list[str] = []
        self.slots: list[tuple[int, str]] = []
        at = 0
        for start, (end, row) in sorted(found.items()):
            if start < at:
                continue
            self.pieces.append(text[at:start])
            self.slots.append((row, text[start:end]))
            at = end
        self.rest = text[at:]

    def text(self, node: int, nonce: str) -> str:
        """What the node of this number printed."""
        draw = random.Random(node)
        known: dict[tuple[int, str], str] = {}
        made = []
        for (row, was), piece in zip(self.slots, self.pieces, strict=True):
            now = nonce if row < 0 else known.get((row, was))
            if now is None:
                _, identity, make = _OWN[row]
                now = make(node, draw, was)
                if identity:
                    known[row, was] = now
            made += (piece, now)
        return "".join((*made, self.rest))

    def answer(self, node: int, nonce: str) -> str:
        """The same, as it comes over the wire."""
        packing = zlib.compressobj(1, wbits=31)
        text = self.text(node, nonce).encode("utf-8", "surrogateescape")
        packed = base64.encodebytes(packing.compress(text) + packing.flush()).decode()
        return f"{snapshot.mark(nonce)} gzip\n{packed}{snapshot.mark(nonce)} end\n"


# --- The run.


@dataclass(frozen=True)
class Simulated:
    """What so many answers cost. Seconds of wall time; render: these formats, one after another.

    facts:     whether the formats are those that show the nodes' facts

    combine_s: what all nodes together tell: host keys, addresses
    judge_s:   judging, comparing, keeping the counters
    cpu_s:     of all processes, all formats
    peak_mb:   of all processes together, shared memory once
    """

    profile: str
    nodes: int
    facts: bool
    readers: int
    read_s: float
    combine_s: float
    judge_s: float
    render_s: dict[str, float]
    cpu_s: float
    peak_mb: float = 0.0

    @property
    def total_s(self) -> float:
        """With the slowest of the formats: a run renders one."""
        return self.read_s + self.combine_s + self.judge_s + max(self.render_s.values())

    @property
    def name(self) -> str:
        return f"{self.nodes} {self.profile}, {'with' if self.facts else 'without'} facts"

    def row(self) -> tuple[str, ...]:
        render = ", ".join(f"{name} {value:.1f}" for name, value in self.render_s.items())
        return (
            self.name,
            str(self.readers),
            f"{self.read_s:.1f} s",
            f"{self.combine_s:.1f} s",
            f"{self.judge_s:.1f} s",
            f"{render} s",
            f"{self.total_s:.1f} s",
            f"{self.cpu_s:.1f} s",
            f"{self.peak_mb:.0f} MiB",
        )

    def budgets(self) -> list[report.Budget]:
        """What is wanted of so many nodes."""
        found = [report.Budget(f"{self.name}: peak memory", 1024, self.peak_mb, " MiB")]
        if self.nodes in BUDGETS:
            limit = BUDGETS[self.nodes]
            found.insert(
                0, report.Budget(f"{self.name}: to the report", limit, self.total_s, " s")
            )
        return found


HEAD = ("answers", "readers", "read", "combine", "judge", "render", "all", "CPU", "peak memory")


def look(profile: str, name: str) -> str:
    """The answer of a lab node of this profile."""
    command = shell.command(
        snapshot.make_script(snapshot.sections(snapshot.probes()), Policy(), NONCE),
        60,
        "nodeready:benchmark",
    )
    down(name)
    try:
        node = Lab.up(name, nodes=1, profile=profile).nodes[0]
        # Its name becomes each node's own.
        found = node.run(command.line, input=command.stdin).stdout
    finally:
        down(name)
    return found


def _make(answer: str, host: str, first: int, last: int, file: str) -> None:
    nodes = Nodes(answer, host)
    with open(file, "wb") as out:
        for node in range(first, last):
            nonce = f"{random.Random(-1 - node).getrandbits(64):016x}"
            text = nodes.answer(node, nonce).encode()
            out.write(b"%s %d\n%s" % (nonce.encode(), len(text), text))


def _answers(directory: Path) -> Iterator[tuple[str, str]]:
    """Every answer with its nonce."""
    for file in sorted(directory.iterdir()):
        with file.open("rb") as text:
            while head := text.readline():
                nonce, size = head.split()
                yield nonce.decode(), text.read(int(size)).decode()


def simulate(profile: str, nodes: int, name: str) -> list[Simulated]:
    """Take one answer of a lab node of this profile, and measure in processes of their own."""
    answer, host = look(profile, name), f"{name}001"
    pieces = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="nodeready-benchmark-") as directory:
        place = Path(directory, "answers")
        place.mkdir()
        with ProcessPoolExecutor(pieces) as pool:
            made = [
                pool.submit(
                    _make,
                    *(answer, host),
                    *(nodes * part // pieces, nodes * (part + 1) // pieces),
                    str(place / f"{part:03}"),
                )
                for part in range(pieces)
            ]
            for one in made:
                one.result()
        return [_measured([profile, str(nodes), directory, facts]) for facts in ("", "facts")]


def _measured(words: list[str]) -> Simulated:
    """Run it, and look at the memory of all its processes meanwhile."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.simulated", "--child", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(0.25)
    out, err = process.communicate()
    if process.returncode != 0:
        raise BenchmarkError(f"simulated answers: {err.strip()[-2000:]}")
    return Simulated(**{**json.loads(out), "peak_mb": peak / 1024})


def _memory(pid: int) -> int:
    """KiB of a process and its children: the memory that several share counts once (PSS)."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    own = re.search(r"^Pss: +([0-9]+) kB", text, re.M)
    return (int(own[1]) if own else 0) + sum(_memory(int(child)) for child in children)


def _run(profile: str, nodes: int, directory: Path, *, facts: bool) -> Simulated:
    os.environ["XDG_STATE_HOME"] = str(directory)
    policy, odd = Policy(), Policy(ptrace_scope=1, timezone="Mars/Olympus", shm_min_mb=1 << 29)
    policies = {f"gpu{n:05}": policy if n % 100 else odd for n in range(nodes)}
    chosen, selection = snapshot.probes(), select()
    formats = {
        name: form for name, form in FORMATS["audit"].items() if (form.tell is not None) == facts
    }
    tell = next(iter(formats.values())).tell
    render: dict[str, float] = {}
    begun = time.perf_counter()
    with AuditWorkers(policies, tell) as workers:
        looks = []
        for name, (nonce, text) in zip(policies, _answers(directory / "answers"), strict=True):
            asked = SnapshotQuestion(Request(name, "", 60), policies[name], chosen, nonce)
            looks.append(Look(name, workers.read(asked, Reply(text)), seconds=1.0))
        looks = workers.settle(looks)
        read = time.perf_counter()
        snapshots = {one.name: one.snapshot for one in looks if one.snapshot is not None}
        endpoints = {name: Endpoint() for name in policies}
        wanted = expectations(policies, snapshots, endpoints, bytes, lambda name: "")
        context = workers.complete(FleetContext(wanted), {})
        combined = time.perf_counter()
        audit, _ = workers.audit(looks, context, selection, "2026-01-01T00:00:00Z", lambda _: ())
        judged = time.perf_counter()
        if len(audit.nodes) != nodes or audit.summary["nodes"]["failed"]:
            raise BenchmarkError(f"not what is measured: {audit.summary}")
        for name, form in formats.items():
            moment = time.perf_counter()
            with (directory / f"report{form.extension}").open("w", encoding="utf-8") as out:
                out.writelines(form.render(audit))
            render[name] = time.perf_counter() - moment
        count = workers.count
    cpu = sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    times = (read - begun, combined - read, judged - combined)
    return Simulated(profile, nodes, facts, count, *times, render, cpu)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="benchmarks/run simulated", description=__doc__)
    parser.add_argument("--nodes", default="10000,50000", metavar="N,...")
    parser.add_argument("--profiles", default="h100", metavar="PROFILE,...")
    parser.add_argument("--name", default="bench", help="of the lab that is started")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        profile, nodes, directory, facts = given.child
        found = _run(profile, int(nodes), Path(directory), facts=bool(facts))
        print(json.dumps(found.__dict__))
        return 0
    load = os.getloadavg()[0]
    try:
        measured = [
            one
            for profile in given.profiles.split(",")
            for nodes in given.nodes.split(",")
            for one in simulate(profile, int(nodes), given.name)
        ]
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    rows = [HEAD, *(one.row() for one in measured)]
    budgets = [("", "budget", "measured", "")]
    budgets += [budget.row() for one in measured for budget in one.budgets()]
    about = f"{machine.today()}; {machine.describe()}. Load average before the run {load:.1f}."
    print(f"{table.aligned(rows)}\n\n{table.aligned(budgets)}\n\n{about}")
    words = f"benchmarks/run simulated --nodes {given.nodes} --profiles {given.profiles}"
    text = (
        f"## Answers of a large fleet\n\n```\n{words}\n```\n\n{textwrap.fill(about, _WRAP)}\n\n"
        f"{table.markdown(rows)}\n\n{table.markdown(budgets)}"
    )
    table.replace(given.output, "simulated", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
