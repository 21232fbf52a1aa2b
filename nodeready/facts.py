"""The probes as pyinfra facts: `pyinfra INVENTORY fact nodeready.facts.NodeFacts`.

`NodeFacts` has all subjects, from one round trip. Each subject is also a fact: `Ptrace`,
`CoreDumps`. A subject that could not be observed is ``{"unknown": reason}``.
"""

from __future__ import annotations

from typing import Any

from pyinfra.api import FactBase
from pyinfra.context import ctx_host
from typing_extensions import override

from nodeready.inventory.node_policies import policies
from nodeready.subjects.registry import LOOKED_AT
from nodeready.subjects.snapshot import shown_facts
from nodeready.subjects.wire import plain
from nodeready.transport.snapshots import snapshot_question
from nodeready.transport.ssh import ConnectedHosts


class NodeFacts(FactBase[dict[str, Any]]):
    """Every subject of one node, as plain data, in one round trip: ``{subject: {...}}``."""

    subjects: tuple[str, ...] = LOOKED_AT

    @override
    def command(self) -> str:
        # pyinfra gives a fact's command no input, and a snapshot's script does not fit into a
        # command line: nodeready asks the node here, and pyinfra runs an empty command.
        host = ctx_host.get()
        policy = policies(host.inventory, [host])[host.name]
        probe = snapshot_question(host.name, policy, self.subjects)
        transport = ConnectedHosts([host.inventory.get_host(host.name)])
        ((_, answer),) = transport.ask([probe.request])
        self._seen = probe.read(answer)
        return "echo"

    @staticmethod
    @override
    def default() -> dict[str, Any]:
        return {}

    @override
    def process(self, output: list[str]) -> dict[str, Any]:
        return {
            subject: plain(shown_facts(subject, self._seen[subject])) for subject in self.subjects
        }


def _fact_of(subject: str) -> type[FactBase[Any]]:
    """The fact of one subject, named like it: ``core_dumps`` becomes ``CoreDumps``."""
    name = "".join(word.capitalize() for word in subject.split("_"))

    def process(self: NodeFacts, output: list[str]) -> Any:
        return NodeFacts.process(self, output)[subject]

    body = {
        "__doc__": f"The subject {subject} of one node, as plain data.",
        "__module__": __name__,
        "subjects": (subject,),
        "process": process,
    }
    return type(name, (NodeFacts,), body)


for _subject in LOOKED_AT:
    _fact = _fact_of(_subject)
    globals()[_fact.__name__] = _fact
