"""The file of the memory: every look, and the states of every node, in SQLite.

A node's state has sections (`look`). A section's text is kept once for all nodes and times, by
its digest. `current` has the sections of each node's newest state, and `past` the replaced ones,
so that a look at an unchanged node updates one row of `nodes`.

A look is one transaction: it is kept whole or not at all, and two writers wait for each other. The
journal is a rollback journal with synchronous=FULL: SQLite's WAL needs memory that is shared
between the users of the file, which a network file system does not have
(https://www.sqlite.org/wal.html). The next reader rolls a killed writer's transaction back.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nodeready.core.exit_codes import Refused
from nodeready.core.files import private_file
from nodeready.runs.memory.look import (
    BOOT,
    COUNTERS,
    ENDED_BY_LOOK,
    ERROR,
    FACTS,
    GATE,
    MISSED,
    PARTS,
    POLICY,
    RESULTS,
    Event,
    Look,
    NodeLook,
    NodeSections,
    PartSpan,
    SectionText,
    Value,
    digest,
    dump,
    parse_results,
)

if TYPE_CHECKING:
    import sqlite3
else:
    try:
        import sqlite3
    except ImportError:
        # A Python that was built without it.
        sqlite3 = None
from nodeready.core.result import Result

#: "nrdy": the file is a memory (https://www.sqlite.org/pragma.html#pragma_application_id).
APPLICATION_ID = 0x6E726479
VERSION = 1  # Of the tables. A file with another version is neither read nor written.
BUSY_S = 10.0  # seconds to wait for another writer: a look at 10,000 nodes is written in some two
_MAX_CACHED = 4096  # maximum sections whose data a Memory remembers
_TRIM_EVERY_S = 86400.0  # seconds between two removals of old looks
#: Seconds of one boot by which the clock may be wrong: NTP has then corrected it.
_MAX_DRIFT_S = 3600.0
#: Seconds without a look across a boot, such as holidays. More are a clock that jumped.
_MAX_GAP_S = 7 * 86400.0
#: Bytes of the file that each node has at least: twice the newest state of a node with 8 GPUs.
_MIN_SHARE = 40_000
#: The part of the maximum size that the nodes share, so that not every look removes something.
_SHARED = 0.9
#: Bytes of a section in the file beside its text: its rows, and its digest in an index.
_ROW_BYTES = 250
#: Maximum parts of a node, former ones too: it has some 20, each replaced weekly for 90 days.
MAX_PARTS = 256

# looks.time, events.time: seconds since 1970. looks.is_old: the states of that time were removed;
# the look is only the beginning of a later state.
# nodes.counted: JSON, subject -> the time of its newest counters; and of looks at some checks:
# "missed" -> as the section; "missing" -> the owners of results that the last look did not make.
# current, past: a section from first_look on, which was the look number `number` at the node; it
# was replaced by until_look, the look until_number at the node.
_SCHEMA = """
CREATE TABLE looks(id INTEGER PRIMARY KEY, time REAL, command TEXT, inventory TEXT,
    policy_digest TEXT, complete INTEGER, code INTEGER, summary TEXT, is_old INTEGER);
CREATE TABLE contents(id INTEGER PRIMARY KEY, digest BLOB UNIQUE, data BLOB);
CREATE TABLE nodes(id INTEGER PRIMARY KEY, name TEXT UNIQUE, state BLOB, counted TEXT,
    first_look INTEGER, last_look INTEGER, looks INTEGER);
CREATE TABLE current(node INTEGER, section TEXT, content INTEGER, first_look INTEGER,
    number INTEGER, PRIMARY KEY(node, section)) WITHOUT ROWID;
CREATE TABLE past(node INTEGER, section TEXT, first_look INTEGER, until_look INTEGER,
    content INTEGER, number INTEGER, until_number INTEGER,
    PRIMARY KEY(node, section, first_look)) WITHOUT ROWID;
CREATE TABLE parts(serial TEXT, kind TEXT, uuid TEXT, node INTEGER, slot TEXT,
    first_look INTEGER, until_look INTEGER);
CREATE INDEX parts_serial ON parts(serial);
CREATE INDEX parts_uuid ON parts(uuid);
CREATE INDEX parts_node ON parts(node);
CREATE TABLE events(time REAL, look INTEGER, node TEXT, serial TEXT, kind TEXT, text TEXT,
    user TEXT);
CREATE INDEX events_node ON events(node);
CREATE INDEX events_serial ON events(serial);
"""
# One row: the last clock, and the time and look of its last jump. Older files are without it.
_CLOCK = """CREATE TABLE IF NOT EXISTS clock(time REAL, boot TEXT, uptime REAL, since REAL,
    since_look INTEGER)"""
_NEVER = 1 << 62  # the look that replaces a current section: later than every look
# Both kinds of sections: a look has those with since <= look < until.
_SECTIONS = f"""CREATE TEMP VIEW sections AS
    SELECT node, section, content, first_look AS since, number, {_NEVER} AS until,
        0 AS until_number FROM current
    UNION ALL SELECT node, section, content, first_look, number, until_look, until_number
        FROM past"""
_REMOVE_UNUSED = "DELETE FROM contents WHERE id NOT IN (SELECT content FROM sections)"
# Remove what ended until a look, and the nodes without a later look.
_FORGET = (
    "DELETE FROM nodes WHERE last_look <= :look",
    "DELETE FROM current WHERE node NOT IN (SELECT id FROM nodes)",
    "DELETE FROM past WHERE until_look <= :look OR node NOT IN (SELECT id FROM nodes)",
    "DELETE FROM parts WHERE until_look <= :look OR node NOT IN (SELECT id FROM nodes)",
    "DELETE FROM events WHERE look <= :look",
    "DELETE FROM looks WHERE id <= :look AND id NOT IN (SELECT since FROM sections"
    " UNION SELECT first_look FROM parts UNION SELECT first_look FROM nodes)",
    "UPDATE looks SET is_old=1 WHERE id <= :look",
    _REMOVE_UNUSED,
)
# Keep the newest sections of each node, as many as its share of the file holds.
_KEEP_SHARES = f"""DELETE FROM past WHERE (node, until_look) IN (
    SELECT node, until FROM (
        SELECT node, until, sum(length(data) + {_ROW_BYTES})
            OVER (PARTITION BY node ORDER BY until DESC) AS size
        FROM sections JOIN contents ON id=content)
    WHERE size > ?)"""


class ControlClock(NamedTuple):
    time_s: float  # seconds since 1970
    boot_id: str  # of the machine's boot; "": not known
    uptime_s: float  # seconds since the boot, which no setting of the clock changes

    @classmethod
    def read(cls) -> ControlClock:
        try:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
            uptime_s = float(Path("/proc/uptime").read_text("ascii").split()[0])
        except (OSError, ValueError):
            boot_id, uptime_s = "", 0.0
        return cls(time.time(), boot_id, uptime_s)

    def jump_s(self, earlier: ControlClock) -> float:
        """Seconds by which the clock was set since then; 0: it was not."""
        passed_s = self.time_s - earlier.time_s
        if self.boot_id and self.boot_id == earlier.boot_id:
            jump_s = passed_s - (self.uptime_s - earlier.uptime_s)
            return jump_s if abs(jump_s) > _MAX_DRIFT_S else 0.0
        return 0.0 if -_MAX_DRIFT_S <= passed_s <= _MAX_GAP_S else passed_s


class MemoryUnavailable(Refused):
    """The memory cannot be read or written; one line that says where, why and what to do."""


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Problems of the file, as MemoryUnavailable."""
    advice = "NODEREADY_MEMORY names another file, or off"
    try:
        yield
    except OSError as error:
        raise MemoryUnavailable(f"{path}: {error.strerror}: {advice}") from None
    except sqlite3.OperationalError as error:
        raise MemoryUnavailable(f"{path}: {error}: {advice}") from None
    except (sqlite3.DatabaseError, zlib.error, ValueError, TypeError, KeyError) as error:
        text = f"{path}: is damaged ({error}): move it away, and the next look makes a new one"
        raise MemoryUnavailable(text) from None


def _text(name: str) -> str:
    """A name as the file has it: text that is no Unicode cannot be a value of SQLite."""
    return name.encode("utf-8", "backslashreplace").decode()


def _of_kind(contents: Mapping[str, int], kind: str) -> dict[str, int]:
    """Owner -> content, of the sections with this end of their names."""
    return {name[: -len(kind)]: c for name, c in contents.items() if name.endswith(kind)}


class StoredFacts(Mapping[str, Value]):
    """The facts of a node, read when needed. contents: equal numbers, equal facts"""

    def __init__(self, contents: Mapping[str, int], memory: Memory) -> None:
        self.contents, self._memory = contents, memory

    def section(self, name: str) -> Mapping[str, Value]:
        facts: Mapping[str, Value] = self._memory.load(self.contents[name])
        return facts

    def __getitem__(self, key: str) -> Value:
        try:
            return self.section(f"{key.partition('.')[0]}{FACTS}")[key]
        except KeyError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        for name in self.contents:
            yield from self.section(name)

    def __len__(self) -> int:
        return sum(len(self.section(name)) for name in self.contents)


class Memory:
    """The memory in one file, as a context manager. Methods raise MemoryUnavailable."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._connection = path, connection
        # Returns the data of a section's text.
        self.load = lru_cache(_MAX_CACHED)(self._load)
        # The nodes of a fleet share most of their results.
        self._judged = lru_cache(_MAX_CACHED)(self._judge)

    @classmethod
    def open(cls, path: Path, *, make: bool = False) -> Memory:
        """The memory in this file. make: if it is missing. Raises MemoryUnavailable."""
        if sqlite3 is None:
            text = "this Python has no sqlite3: install it, or NODEREADY_MEMORY=off"
            raise MemoryUnavailable(text)
        with _named(path):
            path = private_file(path, make=make)
            # None: transactions begin and end where this module says so.
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            try:
                _prepare(connection, path)
            except BaseException:
                connection.close()
                raise
        return cls(path, connection)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *problem: object) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _named(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                # A content that is removed or rolled back leaves its number to another one.
                self.load.cache_clear()
                self._judged.cache_clear()
                # SQLite itself has rolled back after some errors, such as a full disk.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with _named(self.path):
            return self._connection.execute(query, values).fetchall()

    def _json(self, text: str | bytes) -> Any:
        with _named(self.path):
            return json.loads(text)

    # --- Keeping a look.

    def digests(self) -> frozenset[bytes]:
        """The digests of the sections of all nodes."""
        rows = self._rows("SELECT digest FROM contents WHERE id IN (SELECT content FROM current)")
        return frozenset(value for (value,) in rows)

    def keep(
        self, look: Look, nodes: Iterable[NodeSections], events: Iterable[Event] = (),
        declared: Collection[str] = (),
    ) -> int:  # fmt: skip
        """Keep a look at these nodes and its events; returns the id of the look. declared: the
        checks that the nodes' policies declare: the result of another one ends
        """
        with self._transaction() as connection:
            values = look.time_s, look.command, _text(look.inventory), look.policy_digest
            look_id = connection.execute(
                "INSERT INTO looks VALUES(NULL,?,?,?,?,?,?,?,0)",
                (*values, look.complete, look.code, json.dumps(look.summary)),
            ).lastrowid
            assert look_id is not None
            for node in nodes:
                self._keep_node(look_id, look.time_s, node, declared)
            rows = [
                (e.time_s, look_id, _text(e.node), e.serial, e.kind, _text(e.text), e.user)
                for e in events
            ]
            connection.executemany("INSERT INTO events VALUES(?,?,?,?,?,?,?)", rows)
        return look_id

    def _keep_node(
        self, look: int, time_s: float, node: NodeSections, declared: Collection[str]
    ) -> None:
        connection, name = self._connection, _text(node.name)
        query = "INSERT OR IGNORE INTO nodes VALUES(NULL,?,NULL,'{}',?,?,0)"
        connection.execute(query, (name, look, look))
        query = "SELECT id, state, counted, looks + 1 FROM nodes WHERE name=?"
        node_id, state, counted, number = connection.execute(query, (name,)).fetchone()
        times = json.loads(counted)
        missed, new_state = times.pop("missed", {}), node.digest
        if declared:
            # A check that is declared no more is a change of a node whose sections are equal.
            new_state = digest(new_state + digest(dump(sorted(declared))))
        if state != new_state:
            query = "SELECT section, digest FROM current JOIN contents ON id=content WHERE node=?"
            current = dict(connection.execute(query, (node_id,)))
            sections = {section.name: section for section in node.read()}
            changed = [s for s in sections.values() if current.get(s.name) != s.digest]
            absent = [name for name in current if name not in sections]
            ended, times["missing"] = _ended(absent, sections, changed, declared)
            text = dump(missed)
            if (changed or ended) and missed and current.get(MISSED) != digest(text):
                changed.append(SectionText(MISSED, digest(text), partial(zlib.compress, text)))
            names = (*ended, *(section.name for section in changed))
            replaced = [(node_id, name) for name in names if name in current]
            query = (
                f"INSERT INTO past SELECT node, section, first_look, {look}, content, number,"
                f" {number} FROM current WHERE node=? AND section=?"
            )
            connection.executemany(query, replaced)
            connection.executemany("DELETE FROM current WHERE node=? AND section=?", replaced)
            for section in changed:
                content = _content(connection, section)
                values = node_id, section.name, content, look, number
                connection.execute("INSERT INTO current VALUES(?,?,?,?,?)", values)
                if section.name.endswith(PARTS):
                    _change_parts(connection, look, node_id, self.load(content))
        for owner in times.get("missing", ()):
            missed[owner] = missed.get(owner, 0) + 1
        times.update(dict.fromkeys(node.counted, time_s), missed=missed)
        counted = json.dumps({key: value for key, value in times.items() if value})
        query = "UPDATE nodes SET state=?, counted=?, last_look=?, looks=? WHERE id=?"
        connection.execute(query, (new_state, counted, look, number, node_id))

    def trim(self, clock: ControlClock, days: float, max_bytes: int) -> float:
        """Remove looks that are older than these days, and of a file that is larger the oldest
        past of each node with more than its share. The newest state of a node stays as long as the
        node was looked at within the days. Nothing is too old until the clock has run for the days
        without a jump. Returns the seconds by which the clock has jumped since the last look.
        """
        jump_s, since_s, since_look = self._follow(clock)
        limit_s = clock.time_s - days * 86400
        oldest = self._rows("SELECT time FROM looks WHERE NOT is_old ORDER BY id LIMIT 1")
        if since_s <= limit_s and oldest and oldest[0][0] < limit_s - _TRIM_EVERY_S:
            # Looks before the clock was right are older, also by wrong times.
            ((look,),) = self._rows(
                "SELECT coalesce((SELECT min(id) - 1 FROM looks WHERE id >= ? AND time >= ?),"
                " max(id), 0) FROM looks", since_look, limit_s,
            )  # fmt: skip
            with self._transaction() as connection:
                for statement in _FORGET:
                    connection.execute(statement, {"look": look})
            self._vacuum()
        if self.size_bytes > max_bytes:
            # The file is larger than its sections, by the room that is unused in its pages.
            ((nodes, size),) = self._rows(
                f"SELECT count(DISTINCT node), sum(length(data) + {_ROW_BYTES})"
                " FROM sections JOIN contents ON id=content"
            )
            packing = min(1.0, (size or 0) / self.size_bytes)
            share = max(_MIN_SHARE, _SHARED * max_bytes * packing / max(1, nodes))
            with self._transaction() as connection:
                connection.execute(_KEEP_SHARES, (share,))
                connection.execute(_REMOVE_UNUSED)
            self._vacuum()
        return jump_s

    def _follow(self, clock: ControlClock) -> tuple[float, float, int]:
        """The jump, and the time and the look from which the clock has run without a jump."""
        with self._transaction() as connection:
            connection.execute(_CLOCK)
            row = connection.execute("SELECT * FROM clock").fetchone()
            jump_s = clock.jump_s(ControlClock(*row[:3])) if row else 0.0
            (look,) = connection.execute("SELECT coalesce(max(id), 0) FROM looks").fetchone()
            since = (clock.time_s, look) if row is None or jump_s else row[3:]
            connection.execute("DELETE FROM clock")
            connection.execute("INSERT INTO clock VALUES(?,?,?,?,?)", (*clock, *since))
        return jump_s, *since

    def _vacuum(self) -> None:
        with _named(self.path):
            # A script, because `execute` makes only the first step of a statement without rows.
            self._connection.executescript("PRAGMA incremental_vacuum")

    @property
    def size_bytes(self) -> int:
        (pages,), (page_bytes,) = self._rows("PRAGMA page_count") + self._rows("PRAGMA page_size")
        return int(pages * page_bytes)

    # --- Looks, parts and events.

    def looks(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[Look]:
        """The looks of this time, the newest first."""
        rows = self._rows(
            "SELECT * FROM looks WHERE time BETWEEN ? AND ? AND NOT is_old"
            " ORDER BY time DESC, id DESC", since_s, until_s,
        )  # fmt: skip
        return [
            Look(*(*values, bool(complete), code, self._json(text)))
            for *values, complete, code, text, _ in rows
        ]

    def parts(self, word: str, condition: str = "? IN (serial, parts.uuid)") -> list[PartSpan]:
        """Where the part with this serial or uuid was, the newest first."""
        rows = self._rows(
            "SELECT kind, serial, uuid, name, slot, first.time, last.time, until_look IS NULL"
            " FROM parts JOIN nodes ON nodes.id=parts.node"
            " JOIN looks AS first ON first.id=parts.first_look"
            " JOIN looks AS last ON last.id=coalesce(until_look, last_look)"
            f" WHERE {condition} ORDER BY first.time DESC, slot", word,
        )  # fmt: skip
        return [PartSpan(*(*values, bool(is_there))) for *values, is_there in rows]

    def parts_of(self, name: str) -> list[PartSpan]:
        """The parts that were in this node, the newest first."""
        return self.parts(_text(name), "name=?")

    def parts_of_kind(self, kind: str) -> list[PartSpan]:
        """The parts of this kind in all nodes, the newest first."""
        return self.parts(kind, "kind=?")

    def events(self, name: str = "", serial: str = "") -> list[Event]:
        """The events of a node, of a part, or all of them, the newest first."""
        rows = self._rows(
            "SELECT time, node, serial, kind, text, user FROM events"
            " WHERE ? IN ('', node) AND ? IN ('', serial) ORDER BY time DESC, rowid DESC",
            _text(name), serial,
        )  # fmt: skip
        return [Event(*row) for row in rows]

    # --- Nodes.

    def names(self) -> list[str]:
        """The nodes, in the order in which they were first seen."""
        return [name for (name,) in self._rows("SELECT name FROM nodes ORDER BY id")]

    def _look_at(self, time_s: float) -> tuple[int, float]:
        """The id and the time of the last look until this time; 0: no look. Until ever: the newest
        look, also where an earlier look had a wrong clock.
        """
        order = "id" if time_s == float("inf") else "time DESC, id"
        query = "SELECT id, time FROM looks WHERE time<=? AND NOT is_old"
        rows = self._rows(f"{query} ORDER BY {order} DESC LIMIT 1", time_s)
        return (rows[0][0], rows[0][1]) if rows else (0, 0.0)

    def time_s(self, until_s: float) -> float:
        """The time of the last look until this time; 0: no look."""
        return self._look_at(until_s)[1]

    def node(self, name: str, time_s: float) -> NodeLook | None:
        """The node as the last look until this time knows it; None: no look has seen it yet."""
        return next(self.nodes([name], time_s), None)

    def nodes(self, names: Iterable[str], time_s: float) -> Iterator[NodeLook]:
        """Those of these nodes that a look until this time has seen, as `node`."""
        look, look_s = self._look_at(time_s)
        for name in names:
            for node, last_look, looks, last_s in self._rows(
                "SELECT nodes.id, last_look, looks, time FROM nodes"
                " LEFT JOIN looks ON looks.id=last_look WHERE name=?",
                _text(name),
            ):
                sections = self._rows(
                    "SELECT section, content, number FROM sections"
                    " WHERE node=?1 AND since<=?2 AND until>?2", node, look,
                )  # fmt: skip
                if sections:
                    newest = last_look, last_s if last_s is not None else time_s, looks
                    if look < last_look:
                        newest = look, look_s, max(number for *_, number in sections)
                    contents = {section: content for section, content, _ in sections}
                    yield self._node_look(name, *newest, contents)

    def changed(self, since_s: float, until_s: float = float("inf")) -> set[str]:
        """The nodes with a section that changed after one time, until another."""
        rows = self._rows(
            "SELECT name FROM nodes WHERE id IN (SELECT node FROM sections"
            " WHERE (since>?1 AND since<=?2) OR (until>?1 AND until<=?2))",
            self._look_at(since_s)[0], self._look_at(until_s)[0],
        )  # fmt: skip
        return {name for (name,) in rows}

    def last_seen(self, name: str) -> tuple[float, int, Mapping[str, int]] | None:
        """The time of the last look at the node, the number of the looks at it, and owner of
        results -> the number of these that did not make them.
        """
        rows = self._rows(
            "SELECT time, looks, counted FROM nodes JOIN looks ON looks.id=last_look WHERE name=?",
            _text(name),
        )
        return (*rows[0][:2], self._json(rows[0][2]).get("missed", {})) if rows else None

    def spans(self) -> dict[str, tuple[float, float]]:
        """Each node's times of the first and the last look at it."""
        rows = self._rows(
            "SELECT name, first.time, last.time FROM nodes"
            " JOIN looks AS first ON first.id=first_look JOIN looks AS last ON last.id=last_look"
        )
        return {name: (first_s, last_s) for name, first_s, last_s in rows}

    def life(self, name: str) -> Iterator[NodeLook]:
        """The node at each look at which a section changed, the oldest first."""
        for (node,) in self._rows("SELECT id FROM nodes WHERE name=?", _text(name)):
            for _, life in self._lives("node=?", node):
                yield from life

    def lives(self, sections: Collection[str]) -> Iterator[tuple[str, Iterator[NodeLook]]]:
        """Every node with its `life`, as far as these sections show it."""
        return self._lives(f"section IN ({','.join('?' * len(sections))})", *sections)

    def _lives(self, condition: str, *values: Any) -> Iterator[tuple[str, Iterator[NodeLook]]]:
        # Where a section begins (1) and ends (0): an end comes before the next beginning.
        changes = self._rows(
            "SELECT name, look, time, step.number, begins, section, content FROM ("
            " SELECT node, since AS look, number, 1 AS begins, section, content"
            f" FROM sections WHERE {condition}"
            " UNION ALL SELECT node, until, until_number, 0, section, content"
            f" FROM sections WHERE until<{_NEVER} AND {condition}) AS step"
            " JOIN nodes ON nodes.id=node LEFT JOIN looks ON looks.id=look"
            " ORDER BY name, look, begins",
            *values * 2,
        )
        for name, node_changes in groupby(changes, key=lambda change: change[0]):
            yield name, self._life(name, node_changes)

    def _life(self, name: str, changes: Iterable[tuple[Any, ...]]) -> Iterator[NodeLook]:
        contents: dict[str, int] = {}
        for (look, time_s, number), group in groupby(changes, key=lambda change: change[1:4]):
            for *_, begins, section, content in group:
                if begins:
                    contents[section] = content
                else:
                    contents.pop(section, None)
            yield self._node_look(name, look, time_s or 0.0, number, dict(contents))

    def earlier_counters(self, name: str) -> str:
        """The newest counters of a node as the JSON of `audit.counters`; "": there are none."""
        rows = self._rows("SELECT id, counted FROM nodes WHERE name=?", _text(name))
        if not rows or rows[0][1] == "{}":
            return ""
        node, times = rows[0][0], self._json(rows[0][1])
        kinds = f"(section='{BOOT}' OR section LIKE '%{COUNTERS}')"
        query = f"SELECT section, content FROM current WHERE node=? AND {kinds}"
        contents = dict(self._rows(query, node))
        boot = self.load(contents[BOOT]) if BOOT in contents else ""
        totals = _of_kind(contents, COUNTERS)
        taken = {s: (times[s], self.load(c)) for s, c in totals.items() if s in times}
        return dump({"boot_id": boot, "taken": taken}).decode()

    def _load(self, content: int) -> Any:
        rows = self._rows("SELECT data FROM contents WHERE id=?", content)
        with _named(self.path):
            ((data,),) = rows
            return json.loads(zlib.decompress(data))

    def _node_look(
        self, name: str, look: int, time_s: float, number: int, contents: Mapping[str, int]
    ) -> NodeLook:
        def data(section: str, missing: Any) -> Any:
            return self.load(contents[section]) if section in contents else missing

        error, unreachable = data(ERROR, ("", False))
        # The gate's own results are newer than those of the last audit.
        results = [*_of_kind(contents, RESULTS).items(), *_of_kind(contents, GATE).items()]
        facts = StoredFacts({n: c for n, c in contents.items() if n.endswith(FACTS)}, self)
        totals = {
            f"{subject}.{key}": value
            for subject, content in _of_kind(contents, COUNTERS).items()
            for key, value in self.load(content).items()
        }
        judged, policies = self._judged(tuple(results))
        return NodeLook(
            *(name, time_s, data(BOOT, ""), look, error, facts, totals, judged),
            *(unreachable, number, policies, data(MISSED, {})),
        )

    def _judge(
        self, sections: tuple[tuple[str, int], ...]
    ) -> tuple[dict[str, Result], dict[str, str]]:
        """The results, and the words of policies, of these (owner, content)."""
        results: dict[str, Result] = {}
        policies: dict[str, str] = {}
        for owner, content in sections:
            data = self.load(content)
            results.update(parse_results(data))
            if POLICY in data:
                policies[owner] = data[POLICY]
        return results, policies


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of an empty file. Raises MemoryUnavailable for a file that is no memory."""

    def values(*queries: str) -> list[int]:
        return [connection.execute(query).fetchone()[0] for query in queries]

    tables = "SELECT count(*) FROM main.sqlite_master"
    connection.execute("PRAGMA synchronous=FULL")
    # One transaction: another process may be making the tables.
    connection.execute("BEGIN")
    count, identity, version = values(tables, "PRAGMA application_id", "PRAGMA user_version")
    connection.execute("COMMIT")
    if identity != APPLICATION_ID and (count or identity or version):
        raise MemoryUnavailable(
            f"{path}: is no memory of nodeready: NODEREADY_MEMORY names another file"
        )
    if identity == APPLICATION_ID and version != VERSION:
        raise MemoryUnavailable(
            f"{path}: is of a newer nodeready (format {version}, this one has {VERSION}): "
            "update nodeready, or name another file with NODEREADY_MEMORY"
        )
    if not identity:
        # SQLite takes auto_vacuum only before the first table.
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("BEGIN IMMEDIATE")
        # Another process may have made the tables meanwhile.
        if values(tables) == [0]:
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")
    connection.execute(_SECTIONS)


def _ended(
    absent: Iterable[str], new: Collection[str], changed: Iterable[SectionText],
    declared: Collection[str],
) -> tuple[list[str], list[str]]:  # fmt: skip
    """The sections that a look without them ends, and the owners of the results that it did not
    make. absent: the node's sections that the look does not have; new: those that it has
    """
    is_new_boot = any(section.name == BOOT for section in changed)
    has_results = any(name.endswith(RESULTS) for name in new)
    ended, missing = [], []
    for name in absent:
        owner = name.removesuffix(RESULTS)
        if name in ENDED_BY_LOOK or (is_new_boot and name.endswith(COUNTERS)):
            ended.append(name)
        elif has_results and owner != name:
            # SUBJECT.CHECK: a policy declares the check.
            if "." in owner and owner not in declared:
                ended.append(name)
            else:
                missing.append(owner)
    return ended, missing


def _content(connection: sqlite3.Connection, section: SectionText) -> int:
    """The id of the section's text, which is kept if it is new."""
    query = "SELECT id FROM contents WHERE digest=?"
    if (row := connection.execute(query, (section.digest,)).fetchone()) is None:
        data = section.read()
        if data is None:
            raise sqlite3.OperationalError("old looks were removed meanwhile")
        values = section.digest, data
        row = (connection.execute("INSERT INTO contents VALUES(NULL,?,?)", values).lastrowid,)
    return int(row[0])


def _change_parts(
    connection: sqlite3.Connection, look: int, node: int, parts: list[list[str]]
) -> None:
    """Replace the node's parts of the kinds of these."""
    query = "SELECT kind, serial, uuid, slot, rowid FROM parts WHERE node=? AND until_look IS NULL"
    old = {tuple(part): rowid for *part, rowid in connection.execute(query, (node,))}
    new = {tuple(map(_text, part)) for part in parts}
    kinds = {kind for kind, *_ in new}
    gone = [(look, old[part]) for part in old if part[0] in kinds and part not in new]
    connection.executemany("UPDATE parts SET until_look=? WHERE rowid=?", gone)
    came = [
        (serial, kind, uuid, node, slot, look) for kind, serial, uuid, slot in sorted(new - {*old})
    ]
    connection.executemany("INSERT INTO parts VALUES(?,?,?,?,?,?,NULL)", came)
    connection.execute(
        "DELETE FROM parts WHERE node=?1 AND rowid NOT IN (SELECT rowid FROM parts WHERE node=?1"
        " ORDER BY until_look IS NOT NULL, until_look DESC, first_look DESC, rowid LIMIT ?2)",
        (node, MAX_PARTS),
    )
