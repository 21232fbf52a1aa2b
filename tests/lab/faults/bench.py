"""Many nodes of a lab, each with a fault of its own: one `ready` tells of all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nodeready.lab import Lab, Node
from tests.command import Tool

#: What a lab cannot show: nodes share this machine's kernel, and its core_pattern.
WAIVERS = {"proof.core": "shared kernel", "proof.backtrace": "shared kernel"}

#: What every node of the bench is deployed with.
DEPLOYED = {
    "limit_memlock": 4096,
    "limit_nofile": 16384,
    "gate": True,
    "job_user": "ml",
    "waivers": WAIVERS,
}

#: Check -> its result, as in the documents.
Results = dict[str, dict[str, Any]]


@dataclass
class Told:
    """What `ready` said of one node, the checks and the proofs; `go`: may it have a job?"""

    ready: Results = field(default_factory=dict)
    go: bool = False
    reasons: list[str] = field(default_factory=list)


class Bench:
    """Deployed nodes of one profile: some stay healthy, each of the others has its fault."""

    def __init__(self, home: Path, lab: Lab, partners: int = 0) -> None:
        home.mkdir(exist_ok=True)
        self.tool = Tool(home)
        self.lab = lab
        self.partners = lab.nodes[:partners]
        self.others = lab.nodes[partners:]
        done = self.tool("deploy", self._inventory({}), "--yes", "-q")
        assert done.status == 0, done

    def _inventory(self, policies: Mapping[str, Mapping[str, Any]]) -> Path:
        hosts = []
        for node in self.lab.nodes:
            name, data = node.inventory_data()
            hosts.append((name, {**data, **policies.get(name, {})}))
        path = self.tool.home / "inventory.py"
        path.write_text(f"lab = ({hosts!r}, {DEPLOYED!r})\n")
        return path

    def break_(self, faults: Iterable[str]) -> dict[str, Node]:
        """Restart the nodes with these faults, one for each; the fault's node by its name."""
        given = dict(zip(faults, self.others, strict=False))
        wrong = {node.name: "" for node in self.others}
        wrong |= {node.name: fault for fault, node in given.items()}
        self.lab.restart(self.others, keep_disk=True, fault=wrong)
        return given

    def ready(self, policies: Mapping[str, Mapping[str, Any]], *words: str) -> dict[str, Told]:
        """Node -> what `ready` says of it for the job's user, each node by its policy."""
        done = self.tool("ready", self._inventory(policies), "--format", "json", *words)
        made = json.loads(done.out)
        return {
            one["name"]: Told(
                ready=_results(one),
                go=one["name"] in made["go"],
                reasons=made["no_go"].get(one["name"], []),
            )
            for one in made["nodes"]
        }


def _results(node: Mapping[str, Any]) -> Results:
    return {one["check"]: one for one in node["results"]}
