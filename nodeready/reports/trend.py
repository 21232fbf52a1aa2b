"""The trend of a fleet: its nodes by status over the kept looks, as areas of a picture. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nodeready.agent.audit_document import FAILED, UNREACHABLE
from nodeready.core.text import counted, utc_moment
from nodeready.runs.memory.look import Look

#: The statuses of each area, from the bottom: their name is that of the first one.
_AREAS = (("fail", UNREACHABLE, FAILED), ("unknown",), ("warn",))
#: A look at a smaller share of the nodes, or with a smaller share of the results per node, is one
#: at a part of the fleet (--limit, --only), whose counts are no trend.
_SHARE = 0.5
#: Maximum looks of the picture, which has some pixels for each, and of the table below it.
_POINTS, _ROWS = 400, 50
WIDTH, HEIGHT = 800, 80


@dataclass(frozen=True)
class Trend:
    """The picture and its text."""

    sentence: str  # what the picture shows
    # status -> the path of its area in SVG, in a box of WIDTH and HEIGHT
    areas: tuple[tuple[str, str], ...]
    maximum: int  # the nodes at the top of the picture
    first: str  # moments of the first and the last look
    last: str  # likewise
    rows: tuple[tuple[str, ...], ...]  # moment and count per area, the newest looks first


HEADS = ("look", "fail or no answer", "unknown", "warn")


def trend(looks: Sequence[Look], nodes: int) -> Trend | None:
    """The trend of a fleet of this many nodes; None: fewer than two looks at it were kept."""
    looks = [
        look
        for look in looks
        if look.complete and sum(look.summary.get("nodes", {}).values()) >= max(1, nodes * _SHARE)
    ]
    maximum_results = max(map(_results_per_node, looks), default=0)
    counts_at = [
        (look.time_s, [sum(look.summary["nodes"][name] for name in area) for area in _AREAS])
        for look in looks
        if not _answered(look) or _results_per_node(look) >= maximum_results * _SHARE
    ]
    if len(counts_at) < 2:
        return None
    step = -(-len(counts_at) // _POINTS)
    # The newest look is always a point.
    points = counts_at[::-step][::-1]
    maximum = max(1, *(sum(counts) for _, counts in points))
    failing = [counts[0] for _, counts in counts_at]
    sentence = (
        f"{counted(len(counts_at), 'look')} since {utc_moment(counts_at[0][0])}: "
        f"at least {min(failing)} and at most {max(failing)} nodes failed or gave no "
        f"answer, {failing[-1]} at last"
    )
    return Trend(
        sentence,
        tuple(zip((area[0] for area in _AREAS), _paths(points, maximum))),
        maximum,
        utc_moment(points[0][0]),
        utc_moment(points[-1][0]),
        tuple(
            (utc_moment(time_s), *map(str, counts))
            for time_s, counts in counts_at[: -_ROWS - 1 : -1]
        ),
    )


def _answered(look: Look) -> int:
    counts = look.summary["nodes"]
    return sum(counts.values()) - counts[UNREACHABLE] - counts[FAILED]


def _results_per_node(look: Look) -> float:
    return sum(look.summary["results"].values()) / max(1, _answered(look))


def _paths(points: Sequence[tuple[float, Sequence[int]]], maximum: int) -> Iterator[str]:
    """The path of each area, on top of the area before it. A count holds until the next look."""
    first_s, last_s = points[0][0], points[-1][0]
    xs = [round((time_s - first_s) / max(1.0, last_s - first_s) * WIDTH) for time_s, _ in points]
    lower = [0] * len(points)
    for area in range(len(_AREAS)):
        upper = [low + counts[area] for low, (_, counts) in zip(lower, points)]
        top, bottom = (
            [
                (x, round(HEIGHT - height / maximum * HEIGHT, 1))
                for index, height in enumerate(heights)
                for x in xs[index : index + 2]
            ]
            for heights in (upper, lower)
        )
        yield "M" + "L".join(f"{x} {y}" for x, y in (*top, *reversed(bottom))) + "Z"
        lower = upper
