"""The table of hangs: what every rank does, and what `nodeready stacks` must say of it.

`scenarios.json` has a scenario a row. Its acts are those of `tests/hang/acts.py`, one after the
other; `!` marks the one that hangs, else it is the last. After it come those that the others wait
in, so that the job can go on. Where a row names one act only:

own      rank 3 plays it, and the others all_reduce
loader   the same, in a data loader
others   rank 3 reads a file, and the others are in this
healthy  all ranks play it, and make steps all the time
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import cases

#: Words that are wrong where the job has no such thing.
NO_PIPELINE = ("pipeline",)
NO_LOADER = ("loader worker", "num_workers", *NO_PIPELINE)


@dataclass(frozen=True)
class Scenario:
    """One row."""

    name: str
    what: str
    acts: Mapping[str, str]  # ranks -> acts; `*` are all others
    kinds: tuple[str, ...] = ("late",)  # the verdicts that are true of it
    # the groups that are suspects, all of them; one of them is on top. (): none
    suspects: tuple[tuple[int, ...], ...] = ((3,),)
    must: tuple[str, ...] = ()  # words that the table must have
    never: tuple[str, ...] = NO_LOADER  # and those that it must not have
    world: int = 4
    # where the stacks alone make nobody a suspect: any of these ranks is first
    first: tuple[tuple[int, ...], ...] = ()
    # what the test does to ranks: stopped, frozen, traced, killed, dead_mount
    fault: tuple[str, tuple[int, ...]] = ("none", ())
    ends: bool = True  # whether it can go on after the look; else it is ended
    status: int = 0  # of the command
    native: bool = False  # the look takes native stacks, too
    # ranks of which Python's frames alone cannot tell whether they wait for others
    unknown: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()  # ranks that WORLD_SIZE counts, and are not there
    moves: tuple[int, ...] = ()  # ranks that use the processor while they hang
    alone: tuple[int, ...] = ()  # ranks that go on without a signal, when the fault is undone
    lab: bool = False  # `make test-lab` runs it
    core: bool = False  # tried on every Python that has torch
    newest: bool = False  # not on torch 1.13
    module: str = ""  # what the Python must have beside torch

    @property
    def healthy(self) -> bool:
        """Whether its ranks make steps all the time."""
        return not self.suspects and not self.first

    def ranks(self, key: str) -> list[int]:
        """The ranks that are there, of a key of `acts`."""
        named = {int(rank) for ranks in self.acts if ranks != "*" for rank in ranks.split(",")}
        rest = set(range(self.world)) - named - set(self.missing)
        return sorted(rest) if key == "*" else [int(rank) for rank in key.split(",")]

    @property
    def parts(self) -> dict[int, tuple[list[str], int]]:
        """Rank -> its acts, and the number of the one that hangs."""
        parts = {}
        for key, text in self.acts.items():
            acts = text.split()
            if acts[0] != "join" and "-" not in acts:
                acts.insert(0, "join")
            acts = [act for act in acts if act != "-"]
            marked = [number for number, act in enumerate(acts) if act.endswith("!")]
            part = [act.rstrip("!") for act in acts], marked[0] if marked else len(acts) - 1
            parts.update(dict.fromkeys(self.ranks(key), part))
        return dict(sorted(parts.items()))

    @property
    def released(self) -> set[int]:
        """Who hangs in an act of its own, which a signal ends."""
        marked = {
            rank for key, acts in self.acts.items() if "!" in acts for rank in self.ranks(key)
        }
        return marked - set(self.alone)

    @property
    def victims(self) -> set[int]:
        """All that wait for a suspect."""
        culprits = {rank for group in self.suspects for rank in group}
        return set(range(self.world)) - culprits - set(self.unknown) if culprits else set()


def scenario(row: dict[str, Any]) -> Scenario:
    """What a row leaves out is added."""
    values = {key: cases.as_tuples(value) for key, value in row.items()}
    if act := values.pop("own", "") or row.get("loader"):
        values["acts"] = {"3": f"{act}! all_reduce", "*": "all_reduce"}
    if values.pop("loader", ""):
        values = {"kinds": ("late", "loader"), "never": NO_PIPELINE, **values}
    if act := values.pop("others", ""):
        values["acts"] = {"3": f"read_shard! {act}", "*": act}
    if act := values.pop("healthy", ""):
        values["acts"] = {"*": act}
        values = {"suspects": (), "never": ("suspect", *NO_PIPELINE), **values}
    marked = [
        word[:-1] for acts in values["acts"].values() for word in acts.split() if "!" in word
    ]
    values = {"must": tuple(marked), **values}
    if "read_shard" in values["must"]:
        values = {"kinds": ("late", "storage"), **values}
    if "first" in values:
        values = {"suspects": (), **values}
    return Scenario(**values)


SCENARIOS = tuple(map(scenario, cases.read(Path(__file__).with_name("scenarios.json"))))
