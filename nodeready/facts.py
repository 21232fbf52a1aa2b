"""The probes as pyinfra facts: `pyinfra INVENTORY fact nodeready.facts.NodeFacts`.

NodeFacts carries all subjects in one round trip; each subject is a fact of its own as well
(`nodeready.facts.Ptrace`). A subject that could not be observed is ``{"unknown": reason}``.
"""

from __future__ import annotations

import secrets
from typing import Any

from pyinfra.api import FactBase
from pyinfra.context import ctx_host
from typing_extensions import override

from nodeready import fleet, shell, snapshot
from nodeready.plain import plain
from nodeready.probes.script import make_script
from nodeready.subjects import LOOKED_AT
from nodeready.transports.answer import PROBE_TIMEOUT_S


class NodeFacts(FactBase[dict[str, Any]]):
    """Every subject of one node, as plain data, in one round trip: ``{subject: {...}}``."""

    subjects: tuple[str, ...] = LOOKED_AT

    @override
    def command(self) -> str:
        host = ctx_host.get()
        self._policy = fleet.policies(host.inventory, [host])[host.name]
        self._nonce = secrets.token_hex(8)
        self._probes = snapshot.probes(self.subjects)
        script = make_script(snapshot.sections(self._probes), self._policy, self._nonce)
        return shell.command(script, PROBE_TIMEOUT_S, "nodeready:fact")

    @staticmethod
    @override
    def default() -> dict[str, Any]:
        return {}

    @override
    def process(self, output: list[str]) -> dict[str, Any]:
        seen = snapshot.read("\n".join(output), self._probes, self._policy, self._nonce)
        return {subject: plain(seen[subject]) for subject in self.subjects}


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
