"""`nodeready history`: the life of a node and of a part, from looks with injected changes."""

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nodeready.cli import cli
from nodeready.core.exit_codes import Refused
from nodeready.core.result import Result
from nodeready.reports.registry import Options, find_format
from nodeready.reports.schema import schema
from nodeready.runs.memory import history
from nodeready.runs.memory.look import Event, dump, node_sections, results_text
from nodeready.runs.memory.store import Memory
from tests.cases import read_data
from tests.unit.memory.test_store import away, look, state

HOUR = 3600.0
ECC = Result("gpus.ecc", "fail", "0", "7 errors on GPU 2", "nvidia-smi", "replace it", "admin")
LINK = Result("nics.link", "warn", "up", "eth1 is down")


def gpus(driver: str, serials: str = "AB") -> bytes:
    facts: dict[str, Any] = {"gpus.driver": driver}
    for slot, serial in enumerate(serials):
        facts |= {f"gpus.nvidia[{slot}].serial": serial, f"gpus.nvidia[{slot}].model": "H100"}
    return dump(facts)


def at(driver: str = "550.54", serials: str = "AB", **values: Any) -> Any:
    """The state of gpu1 with this driver, and the GPUs with these serial numbers."""
    places = {serial: f"0000:{slot:02}:00.0" for slot, serial in enumerate(serials)}
    return state("gpu1", gpus=places, **{"gpus.facts": gpus(driver, serials)}, **values)


@pytest.fixture
def memory(tmp_path: Path) -> Any:
    """Looks of 60 hours, one each hour."""
    hours = {
        10: {"results": (ECC,)},
        13: {},
        20: {"boot": "b2", "driver": "550.90"},
        30: {"boot": "b2", "driver": "550.90", "serials": "AC"},
        40: {"boot": "b2", "driver": "550.90", "serials": "AC", "mtu": 1500,
             "results": (ECC, LINK)},
    }  # fmt: skip
    now: dict[str, Any] = {}
    with Memory.open(tmp_path / "nodeready" / "memory.db", make=True) as opened:
        for hour in range(60):
            now = hours.get(hour, now)
            gpu1 = away() if 25 <= hour < 28 else at(**now)
            other = state("gpu2", gpus={"X": "0"} if hour < 35 else {"B": "0"})
            opened.keep(look(hour * HOUR), [gpu1, other])
        event = Event(45 * HOUR, "gpu1", "C", "smoke-suspect", "gpu: [3] fails", "smoke")
        opened.keep(look(45 * HOUR, command="smoke", code=3), (), [event])
        yield opened


def lines(document: Any, **options: Any) -> list[str]:
    rows = find_format("history", "table").lines(document, Options(**options))
    return [row.plain for row in rows]


SACCT = (
    "JobID|User|State|Start|End\n"
    f"4711|ana|FAILED|{datetime.fromtimestamp(41 * HOUR).isoformat()}|"
    f"{datetime.fromtimestamp(44.5 * HOUR).isoformat()}\n"
)
JOBS = history.parse_jobs(SACCT)


def test_a_life_names_each_change_once(memory, monkeypatch):
    monkeypatch.setattr(history, "node_jobs", lambda node, since_s: (JOBS, ""))
    document = history.read_history(memory, "gpu1")
    assert lines(document) == read_data(__file__, "life.txt").splitlines()
    assert all(len(row) <= 80 for row in lines(document))
    since = history.read_history(memory, "gpu1", 40 * HOUR)
    # A span that has begun before is shown, as it lasted.
    kinds = [entry.kind for entry in since.entries]
    assert kinds == ["event", "job", "status", "result", "setting"]


def test_one_state_is_one_row_whatever_the_order_of_its_findings(tmp_path):
    with Memory.open(tmp_path / "nodeready" / "memory.db", make=True) as kept:
        # The section that changed last comes last.
        for hour, (errors, port) in enumerate(((7, 1), (8, 1), (8, 2))):
            ecc = replace(ECC, actual=f"{errors} errors")
            link = replace(LINK, status="fail", actual=f"eth{port} is down")
            kept.keep(look(hour * HOUR), [state("gpu1", results=(ecc,), **{
                "nics.results": results_text([link], {LINK.check})
            })])  # fmt: skip
        (entry,) = history.read_history(kept, "gpu1").entries
    assert ({*entry.checks}, entry.looks) == ({ECC.check, LINK.check}, 3)


def test_looks_that_did_not_make_a_check_do_not_count_for_it(tmp_path):
    def results(*found: Result) -> bytes:
        return results_text(found, {result.check for result in found})

    fine = Result("nics.link", "ok")
    whole = {"gpus.results": results(ECC), "nics.results": results(fine)}
    with Memory.open(tmp_path / "nodeready" / "memory.db", make=True) as kept:
        for hour, texts in enumerate(
            (
                whole,
                *[{"nics.results": results(fine)}] * 3,
                whole,
                {"gpus.results": results(ECC)},
                # Begins a span; the looks at gpus alone are none of this check.
                {"nics.results": results(replace(LINK, status="fail"))},
                *[{"gpus.results": results(Result("gpus.ecc", "ok"))}] * 4,
            )
        ):
            kept.keep(look(hour * HOUR), [node_sections("gpu1", {"boot": dump("b1"), **texts})])
        spans = [
            (entry.checks, entry.looks)
            for entry in history.read_history(kept, "gpu1").entries
            if entry.kind == "status"
        ]
    assert spans == [(("nics.link",), 0), (("gpus.ecc", "nics.link"), 1), (("gpus.ecc",), 3)]


def test_a_long_row_continues_below_its_text(memory):
    document = history.read_history(memory, "gpu1")
    change = replace(document.entries[0], text="host.cmdline: " + " ".join(["word"] * 20))
    rows = lines(replace(document, entries=(change,)), lines=40, width=80)[1:]
    assert len(rows) == 3
    assert all(len(row) <= 80 for row in rows)
    assert [row[:31].strip() for row in rows[1:]] == ["", ""]


def test_a_part_is_known_in_every_node(memory):
    document = history.read_history(memory, "B")
    assert lines(document) == [
        "B  GPU in gpu2 at 0, seen from 1970-01-01 00:00 to 1970-01-03 11:00 UTC",
        "1970-01-02 11:00  part         in gpu2 at 0",
        "1970-01-01 00:00  part         in gpu1 at 0000:01:00.0, until 1970-01-02 06:00",
    ]
    (event, _) = history.read_history(memory, "C").entries
    assert (event.kind, event.node, event.serial) == ("event", "gpu1", "C")
    assert history.read_history(memory, "gpu9") is None


def test_a_node_that_changes_at_every_look_costs_a_bounded_time(memory, monkeypatch):
    whole = history.read_history(memory, "gpu1")
    monkeypatch.setattr(history, "MAX_ENTRIES", len(whole.entries) - 2)
    newest = history.read_history(memory, "gpu1")
    assert newest.missing["earlier changes"] == f"more than {len(whole.entries) - 2} entries"
    assert {*newest.entries} < {*whole.entries}


def test_the_looks_and_the_size(memory):
    rows = lines(history.read_history(memory, ""), lines=5)
    assert len(rows) == 7
    assert rows[0] == "60  1970-01-03 11:00  audit  1 ok  prod.py"
    assert rows[5] == "and 56 earlier ones (-v shows them)"
    assert re.fullmatch(r"61 looks since 1970-01-01 00:00 UTC, 0\.\d MB", rows[6])


def test_the_json_has_its_schema(memory, monkeypatch):
    monkeypatch.setattr(history, "node_jobs", lambda node, since_s: (JOBS, "no accounting"))
    for name in ("", "gpu1", "B"):
        document = history.read_history(memory, name)
        text = "".join(find_format("history", "json").render(document))
        jsonschema.Draft202012Validator(schema("history")).validate(json.loads(text))


def test_the_command_says_what_is_missing(tmp_path, memory, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run(*words: str) -> Any:
        return cli.main(["history", *words], standalone_mode=False)

    assert run("gpu1", "--format", "json") == 0
    with pytest.raises(Refused, match="did you mean gpu1"):
        run("gpu11")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "none"))
    with pytest.raises(Refused, match="no look was kept yet: nodeready audit keeps one") as error:
        run()
    assert error.value.exit_code == 2
