"""The deploy benchmark's result: a table per cluster size, and the budgets beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks import table
from benchmarks.contenders import ANSIBLE, EXEC, LOOK, NODEREADY, PYINFRA, STOCK
from benchmarks.measure import Sample
from benchmarks.probe_cost import ProbeCost

#: Phases of a contender; the yardstick has one only.
FIRST, NOTHING, RUN = "first deploy", "nothing to do", "run"

Key = tuple[str, str]


@dataclass(frozen=True)
class Budget:
    """A limit that the design sets, and what was measured.

    most: the measured value is to be at most the limit; else at least
    """

    what: str
    limit: float
    measured: float
    unit: str = ""
    most: bool = True

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.most else self.measured >= self.limit

    def row(self) -> tuple[str, ...]:
        bound = "≤" if self.most else "≥"
        number = f"{self.measured:.2f}".rstrip("0").rstrip(".")
        return (
            self.what,
            f"{bound} {self.limit:g}{self.unit}",
            f"{number}{self.unit}",
            "met" if self.met else "missed",
        )


@dataclass
class Report:
    """Medians by cluster size, then by (contender, phase); how many runs they are of."""

    sizes: dict[int, dict[Key, Sample]] = field(default_factory=dict)
    runs: dict[int, dict[Key, int]] = field(default_factory=dict)
    probe: ProbeCost | None = None
    command: str = ""
    about: str = ""

    def rows(self, size: int) -> list[tuple[str, ...]]:
        """The table of one cluster size. Its first row is the head."""
        found = self.sizes[size]
        unit = found[EXEC, RUN].wall_s
        made: list[tuple[str, ...]] = [
            ("", "runs", "wall", "÷ E", "÷ nodeready", "CPU", "CPU/node", "commands", "logins")
        ]
        for (name, phase), sample in sorted(found.items(), key=_order):
            ours = found[NODEREADY, phase].wall_s if phase != RUN else 0.0
            made.append(
                (
                    name if phase == RUN else f"{name}, {phase}",
                    str(self.runs[size][name, phase]),
                    f"{sample.wall_s:.2f} s",
                    f"{sample.wall_s / unit:.2f}",
                    f"{sample.wall_s / ours:.2f}" if ours else "",
                    f"{sample.cpu_s:.2f} s",
                    f"{sample.cpu_s / size * 1000:.0f} ms",
                    f"{sample.sessions:.4g}",
                    f"{sample.logins:.4g}",
                )
            )
        return made

    def budgets(self) -> Iterator[Budget]:
        """What DESIGN asks, on the largest cluster."""
        size = max(self.sizes)
        found = self.sizes[size]
        unit, ours = found[EXEC, RUN].wall_s, found[NODEREADY, NOTHING]
        at = f"{size} nodes, nothing to do"
        yield Budget(f"`nodeready deploy`, {at}: wall ÷ E", 1.3, ours.wall_s / unit)
        wall = found[PYINFRA, NOTHING].wall_s
        yield Budget(f"`pyinfra … deploy.py`, {at}: wall ÷ E", 3, wall / unit)
        yield Budget(f"`nodeready deploy`, {at}: commands per node", 1, ours.sessions)
        yield Budget(
            f"`nodeready deploy`, {at}: CPU per node (audit's budget)",
            25,
            ours.cpu_s / size * 1000,
            " ms",
        )
        if (ANSIBLE, NOTHING) in found:
            faster = found[ANSIBLE, NOTHING].wall_s / ours.wall_s
            yield Budget(f"Ansible ÷ `nodeready deploy`, {at}: wall", 20, faster, most=False)
        if self.probe:
            yield Budget("one look, on the node: processes started", 48, self.probe.processes)
            yield Budget("one look beyond `true`, a node: CPU", 54, self.probe.cpu_s * 1000, " ms")

    def budget_rows(self) -> list[tuple[str, ...]]:
        return [("", "budget", "measured", ""), *(budget.row() for budget in self.budgets())]

    def text(self) -> str:
        """For a terminal."""
        parts = [f"{size} nodes\n{table.aligned(self.rows(size))}" for size in self.sizes]
        return "\n\n".join([*parts, table.aligned(self.budget_rows()), self.about])

    def markdown(self) -> str:
        """For docs/benchmarks.md."""
        parts = [f"## Deploy\n\n```\n{self.command}\n```\n\n{textwrap.fill(self.about, 98)}"]
        parts += [f"### {size} nodes\n\n{table.markdown(self.rows(size))}" for size in self.sizes]
        parts += [f"### Budgets\n\n{table.markdown(self.budget_rows())}"]
        return "\n\n".join(parts)


def _order(item: tuple[Key, Sample]) -> tuple[int, int]:
    (name, phase), _ = item
    return (
        (RUN, FIRST, NOTHING).index(phase),
        (EXEC, LOOK, NODEREADY, PYINFRA, STOCK, ANSIBLE).index(name),
    )
