"""Many nodes of a lab, each with a fault of its own: one `ready` reports on all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass
class NodeReport:
    """What `ready` reports of one node: check -> result; `go`: may it have a job?"""

    results: dict[str, dict[str, Any]]
    go: bool
    reasons: list[str]


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
        hosts = [
            (name, {**data, **policies.get(name, {})}) for name, data in self.lab.inventory_data()
        ]
        path = self.tool.home / "inventory.py"
        path.write_text(f"lab = ({hosts!r}, {DEPLOYED!r})\n")
        return path

    def break_(self, faults: Iterable[str]) -> dict[str, Node]:
        """Restart the nodes with these faults, one for each; the fault's node by its name."""
        broken = dict(zip(faults, self.others, strict=False))
        wrong = {node.name: "" for node in self.others}
        wrong |= {node.name: fault for fault, node in broken.items()}
        self.lab.restart(self.others, keep_disk=True, fault=wrong)
        return broken

    def ready(
        self, policies: Mapping[str, Mapping[str, Any]], *words: str
    ) -> dict[str, NodeReport]:
        """Node -> what `ready` reports of it for the job's user, each node by its policy."""
        done = self.tool("ready", self._inventory(policies), "--format", "json", *words)
        document = json.loads(done.out)
        return {
            node["name"]: NodeReport(
                results={result["check"]: result for result in node["results"]},
                go=node["name"] in document["go"],
                reasons=document["no_go"].get(node["name"], []),
            )
            for node in document["nodes"]
        }
