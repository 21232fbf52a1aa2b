"""The probes as pyinfra facts: `pyinfra INVENTORY fact nodeready.facts.NodeFacts`.

`NodeFacts` has all subjects, from one round trip. Each subject is also a fact: `Ptrace`,
`CoreDumps`. A subject that could not be observed is ``{"unknown": reason}``. `Verdicts` has the
results of the checks. All facts and operations of a run share the snapshots of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pyinfra.api import FactBase, Host
from pyinfra.api.exceptions import FactProcessError, PyinfraError
from pyinfra.context import ctx_host
from typing_extensions import override

from nodeready.core.result import Result
from nodeready.core.wire import plain
from nodeready.runs.deploy import pyinfra
from nodeready.subjects.registry import LOOKED_AT, SelectionError, select
from nodeready.subjects.snapshot import shown_facts

T = TypeVar("T")

# pyinfra gives a fact's command no input, and a snapshot's script does not fit into a command
# line. So nodeready asks the node when pyinfra asks for the command, which then does nothing.
_NO_COMMAND = "echo"


class _NodeFact(FactBase[T]):
    """A fact for which nodeready asks the node.

    An exception here would end pyinfra's run with a traceback. One in `process` is one line, and
    the node counts as failed.
    """

    _problem = ""
    _value: Any = None

    def _ask(self, ask: Callable[[Host], Any]) -> str:
        """Keep the answer, or the error. Returns the command for pyinfra."""
        try:
            self._value = ask(ctx_host.get())
        except (PyinfraError, SelectionError) as error:
            self._problem = str(error)
        return _NO_COMMAND

    def _answer(self) -> Any:
        if self._problem:
            raise FactProcessError(self._problem)
        return self._value


class NodeFacts(_NodeFact[dict[str, Any]]):
    """Every subject of one node, as plain data, in one round trip: ``{subject: {...}}``."""

    subjects: tuple[str, ...] = LOOKED_AT

    @override
    def command(self) -> str:
        return self._ask(lambda host: pyinfra.observed(host, self.subjects))

    @staticmethod
    @override
    def default() -> dict[str, Any]:
        return {}

    @override
    def process(self, output: list[str]) -> dict[str, Any]:
        snapshot = self._answer()
        return {
            subject: plain(shown_facts(subject, snapshot[subject])) for subject in self.subjects
        }


class Verdicts(_NodeFact[list[dict[str, Any]]]):
    """The results of one node's checks, as in the JSON of an audit.

    The first call of a run probes all nodes at once, because some checks compare a node with the
    others. There is no earlier audit, so that error counters are not judged by their change.
    """

    @override
    def command(self, only: str | Iterable[str] = "", skip: str | Iterable[str] = "") -> str:
        """only, skip: check ids, subjects and globs, with commas or as a list"""

        def ask(host: Host) -> list[Result]:
            call = pyinfra.call_settings(host, self.name, (), {})
            policies = pyinfra.policies_of(host, call)
            selection = select(policies, _words(only), _words(skip))
            return selection.of(pyinfra.judged(host, call, selection.subjects).results)

        return self._ask(ask)

    @staticmethod
    @override
    def default() -> list[dict[str, Any]]:
        return []

    @override
    def process(self, output: list[str]) -> list[dict[str, Any]]:
        return [plain(result) for result in self._answer()]


def _words(words: str | Iterable[str]) -> str | None:
    return (words if isinstance(words, str) else ",".join(words)) or None


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
