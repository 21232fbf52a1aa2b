"""Draws the rooms of nodeready/ from their imports: docs/images/house.svg.

A room is a package or a module directly under nodeready/. tests/rooms.py lists the rooms in their
order. An import of a room further down the list, or a room that is not on the list, is a problem:
then nothing is written and the exit status is 1.

A room's floor is the length of the longest path of imports from it: 0 without imports.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from jinja2 import Template

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "nodeready"
PICTURE = ROOT / "docs/images/house.svg"

Graph = dict[str, set[str]]  # a room, or a module, and those that it imports


@dataclass
class HouseRoom:
    """A room: its number of modules and of lines, and its imports of other rooms."""

    modules: int = 0
    lines: int = 0
    #: room -> its imports, as `file: module`.
    imports: dict[str, list[str]] = field(default_factory=dict)


def _module(path: Path, package: Path) -> str:
    words = path.relative_to(package).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" and len(words) > 1 else words)


def sources(package: Path = PACKAGE) -> dict[str, Path]:
    """module (`core.settings`) -> its file; without links and the package's `__init__`."""
    links = {path for path in package.iterdir() if path.is_symlink()}
    top = {package / "__init__.py", package / "__main__.py"}
    return {
        _module(path, package): path
        for path in sorted(package.rglob("*.py"))
        if path not in top and not links & set(path.parents)
    }


def _statements(
    node: ast.AST, loading: bool = True
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import, and whether it happens when the module is loaded."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, loading
        else:
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                is_later = True
            yield from _statements(child, loading and not is_later)


def imported(
    path: Path, modules: Iterable[str], package: str = "nodeready"
) -> Iterator[tuple[str, bool]]:
    """The modules of the package that a file imports, and whether it does so when it is loaded."""
    names_of_modules = set(modules)
    for statement, loading in _statements(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            base = statement.module or ""
            names = [f"{base}.{alias.name}" for alias in statement.names]
        for name in names:
            words = name.split(".")
            if words[0] != package:
                continue
            # `from nodeready.core.policy import Policy` imports a module's name, not a module.
            for end in range(len(words), 1, -1):
                if (module := ".".join(words[1:end])) in names_of_modules:
                    yield module, loading
                    break


def read(package: Path = PACKAGE) -> tuple[dict[str, HouseRoom], Graph]:
    """The rooms, and for each module the modules that it imports when it is loaded."""
    files = sources(package)
    rooms: dict[str, HouseRoom] = {}
    graph: Graph = {module: set() for module in files}
    for module, path in files.items():
        name = module.split(".")[0]
        room = rooms.setdefault(name, HouseRoom())
        room.modules += 1
        room.lines += len(path.read_text().splitlines())
        for target, loading in imported(path, files, package.name):
            if loading:
                graph[module].add(target)
            if (imported_room := target.split(".")[0]) != name:
                place = f"{path.relative_to(package.parent)}: {package.name}.{target}"
                room.imports.setdefault(imported_room, []).append(place)
    return rooms, graph


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """The nodes of a cycle in their order; [] without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Node -> the length of the longest path from it. The graph has no cycle.

    >>> floors({"a": {"b"}, "b": set()})
    {'b': 0, 'a': 1}
    """
    levels: dict[str, int] = {}
    for node in TopologicalSorter(graph).static_order():
        levels[node] = 1 + max((levels[target] for target in graph[node]), default=-1)
    return levels


def order_problems(rooms: Mapping[str, HouseRoom], order: list[str]) -> list[str]:
    """A line for each room that is not on the list, and for each import against its order."""
    problems = [f"{n}: not on the list of tests/rooms.py" for n in rooms if n not in order]
    for name, room in rooms.items():
        for target, places in room.imports.items():
            if name in order and target in order and order.index(target) > order.index(name):
                text = f"{name} imports {target}, which is below it"
                problems += [f"{place}: {text}" for place in places]
    return problems


def without_implied(graph: Mapping[str, set[str]]) -> Graph:
    """The graph without arrows that a longer path implies. The graph has no cycle."""
    targets_below: Graph = {}
    for node in sorted(graph, key=floors(graph).__getitem__):
        targets_below[node] = graph[node].union(*(targets_below[target] for target in graph[node]))
    return {
        node: {t for t in targets if not any(t in targets_below[peer] for peer in targets - {t})}
        for node, targets in graph.items()
    }


# -- the picture, in pixels -------------------------------------------------------------------

_WIDTH, _HEIGHT = 190, 58
_GAP, _STOREY, _EDGE, _MARGIN = 22, 104, 28, 36
_TEMPLATE = Path(__file__).with_name("house.svg.j2")


def picture(rooms: Mapping[str, HouseRoom], about: Mapping[str, str], order: list[str]) -> str:
    """The rooms floor by floor, as SVG: an arrow for each import that no longer path implies."""
    graph: Graph = {name: set(rooms[name].imports) & set(rooms) for name in order if name in rooms}
    floor = floors(graph)
    top = max(floor.values(), default=0)
    storeys = [[name for name in graph if floor[name] == level] for level in range(top + 1)]
    step = _WIDTH + _GAP
    middle = _EDGE + _MARGIN + max(map(len, storeys)) * step / 2
    place = {
        name: (middle + (number - (len(row) - 1) / 2) * step, _EDGE + (top - level) * _STOREY)
        for level, row in enumerate(storeys)
        for number, name in enumerate(row)
    }
    width = round(max(x for x, _ in place.values()) + _WIDTH / 2 + _MARGIN + _EDGE)
    arrows = [
        _arrow(place[name], place[target], width - _EDGE)
        for name, targets in without_implied(graph).items()
        for target in sorted(targets, key=order.index)
    ]
    boxes = [
        {"name": name, "room": rooms[name], "about": about.get(name, ""), "x": x, "y": y}
        for name, (x, y) in place.items()
    ]
    heights = [_EDGE + (top - level) * _STOREY + _HEIGHT / 2 + 6 for level in range(top + 1)]
    template = Template(_TEMPLATE.read_text(), autoescape=True, trim_blocks=True)
    text = template.render(
        width=width, height=2 * _EDGE + top * _STOREY + _HEIGHT, edge=_EDGE,
        levels=enumerate(heights), arrows=arrows, boxes=boxes,
        box_width=_WIDTH, box_height=_HEIGHT, INK="#1c2733", LINE="#4a6785",
    )  # fmt: skip
    return f"{text}\n"


def _arrow(start: tuple[float, float], end: tuple[float, float], right: float) -> str:
    """The path from the bottom of a room to the top of one on the next floor; to a room further
    down, along the right edge of the picture.
    """
    (x1, y1), (x2, y2) = start, end
    if y2 - y1 > _STOREY:
        middle = y1 + _HEIGHT / 2, y2 + _HEIGHT / 2
        return f"M{x1:.0f} {middle[0]:.0f}H{right:.0f}V{middle[1]:.0f}H{x2 + _WIDTH / 2:.0f}"
    # The arrows of a room spread at both ends, so that they stay apart.
    shift = max(-_WIDTH / 3, min(_WIDTH / 3, (x2 - x1) / 5))
    x1, x2, y1 = x1 + shift, x2 - shift, y1 + _HEIGHT
    bend = (y1 + y2) / 2
    return f"M{x1:.0f} {y1:.0f}C{x1:.0f} {bend:.0f} {x2:.0f} {bend:.0f} {x2:.0f} {y2:.0f}"


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tests.rooms import ROOMS

    rooms, _ = read()
    if problems := order_problems(rooms, list(ROOMS)):
        text = f"draw_house: {len(problems)} imports against the list: nothing drawn"
        print(*problems, text, sep="\n", file=sys.stderr)
        return 1
    PICTURE.write_text(picture(rooms, ROOMS, list(ROOMS)))
    print(f"{PICTURE.relative_to(ROOT)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
