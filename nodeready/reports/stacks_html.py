"""The stacks as one HTML page that needs nothing beside itself: to send, to keep, to search."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence

from nodeready.reports import stack_words as words
from nodeready.reports.stack_branches import Branch, branches
from nodeready.reports.stacks_page import SCRIPT, STYLE
from nodeready.reports.text import counted, nodes
from nodeready.sanitise import sanitise
from nodeready.stacks import Frame, Group, Rank, Stacks, fold_ranks

#: Groups that are unfolded at first, and processes that are listed in each group.
_OPEN, _PROCESSES = 3, 1000
#: Branches at one place, and one below the other: browsers nest 512 elements.
_BRANCHES, _DEEPEST = 200, 100
#: Characters of a name, and of a set of ranks or nodes in a row.
_LONG, _SET = 300, 60
_COLUMNS = ("rank", "node", "pid", "state", "waits in", "CPU s", "")


def _text(text: str, limit: int = 4000) -> str:
    """A text as a text: no tag, no attribute, nothing that hides or reorders."""
    return html.escape(sanitise(text, limit))


def _code(frame: Frame) -> str:
    return f"{_text(frame.function, _LONG)}  {_text(words.place(frame), _LONG)}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_digest(STYLE)}'; "
    f"script-src 'sha256-{_digest(SCRIPT)}'; base-uri 'none'; form-action 'none'"
)


def _frames(frames: Sequence[Frame], fork: int | None = None) -> Iterator[str]:
    """Innermost first; ``>`` stands where no larger group has been."""
    fork = len(frames) if fork is None else fork
    yield '<ol class="frames">'
    for at, frame in reversed(list(enumerate(frames))):
        mark = ' class="apart"' if at >= fork else ""
        yield f"<li{mark}>{'&gt;' if mark else ' '} <code>{_code(frame)}</code></li>"
    yield "</ol>"


def _processes(found: Sequence[Rank]) -> Iterator[str]:
    yield '<details class="inner"><summary>' + counted(len(found), "process", "processes")
    yield '</summary><div class="wide"><table class="mono"><tr>'
    yield "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS) + "</tr>"
    for one in found[:_PROCESSES]:
        cells = (
            "" if one.rank is None else str(one.rank), one.node, str(one.pid), one.state,
            one.wait_channel, "" if one.cpu_s is None else f"{one.cpu_s:.2f}", one.note,
        )  # fmt: skip
        yield "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table></div>"
    if found[_PROCESSES:]:
        yield f"<p>and {len(found) - _PROCESSES} more: --format json has them</p>"
    yield "</details>"


def _folded(group: Group, limit: int = 1_000_000) -> str:
    return nodes(group.nodes, limit) if group.nodes else ""


def _whole(group: Group) -> Iterator[str]:
    """The ranks and the nodes where they are cut above."""
    for whole, cut in (
        (words.who(group), words.who(group, _SET)),
        (_folded(group), _folded(group, _SET)),
    ):
        if whole != cut:
            yield f'<p class="soft">{html.escape(whole)}</p>'


def _group(
    number: int, group: Group, found: Sequence[Rank], marked: bool, begun: bool
) -> Iterator[str]:
    """One group: who, and where its path ends; unfolded: why, the path, what it means."""
    style = group.verdict or group.kind
    names = "\n".join(_text(name, _LONG) for name in group.nodes)
    shown = " open" if number < _OPEN else ""
    leaf = f'<code class="soft">{_code(group.frames[-1])}</code>' if group.frames else ""
    yield f'<details class="group {_text(style)}" id="group{number + 1}"{shown}'
    yield f' data-ranks="{fold_ranks(group.ranks)}" data-nodes="{names}"><summary>'
    yield f"<b>{_text(words.word(group))}</b><span>{_text(words.who(group, _SET))}</span>"
    yield f"<span>{html.escape(_folded(group, _SET))}</span>"
    yield f"<span>{leaf or _text(group.why)}</span></summary><div>"
    yield from _whole(group)
    if group.why and leaf:
        yield f'<p class="why">{_text(group.why)}</p>'
    if group.frames:
        yield from _frames(group.frames, group.fork if marked else None)
    if begun:
        yield '<p class="soft">others have gone on from here</p>'
    if group.hint:
        yield f'<p class="hint">{_text(group.hint)}</p>'
    if group.native:
        yield '<details class="inner"><summary>native frames</summary>'
        yield from _frames(group.native)
        yield "</details>"
    for thread in group.threads:
        name = _text(thread.name, _LONG) or "without a name"
        yield f'<details class="inner"><summary>thread {name}</summary>'
        yield from _frames(thread.frames)
        yield "</details>"
    if found:
        yield from _processes(found)
    yield "</div></details>"


def _groups(stacks: Stacks) -> Iterator[str]:
    found: dict[int, list[Rank]] = {}
    for one in stacks.processes:
        found.setdefault(one.group, []).append(one)
    largest, begun = words.largest(stacks), words.begun(stacks)
    yield '<section id="groups"><h2>Groups, the most suspicious first</h2>'
    for number, group in enumerate(stacks.groups):
        here, marked = found.get(number, []), group is not largest
        yield from _group(number, group, here, marked, number in begun)
    yield "</section>"


def _branch(branch: Branch) -> Iterator[str]:
    """What a row of the tree says, folded."""
    yield f'<span class="count">{branch.processes}</span>'
    if branch.hidden:
        yield counted(branch.hidden, "more branch", "more branches")
        return
    ends = [branch.frames[0], branch.frames[-1]][: len(branch.frames)]
    between = " &hellip; " if len(branch.frames) > 2 else " &gt; "
    yield between.join(f"<code>{_code(frame)}</code>" for frame in ends)
    yield f' <span class="soft">{_text(words.ranks(branch.ranks, _SET))}</span>'
    if len(branch.groups) == 1:
        yield f' <a href="#group{branch.groups[0] + 1}">group {branch.groups[0] + 1}</a>'


def _calls(branch: Branch) -> Iterator[str]:
    """All calls of a chain, where the row names only the first and the last."""
    if len(branch.frames) > 2:
        yield f'<details class="inner"><summary>{len(branch.frames)} calls</summary>'
        yield from _frames(branch.frames)
        yield "</details>"


def _tree(stacks: Stacks) -> Iterator[str]:
    """The merged tree; what is below a branch folds away with it."""
    yield '<section id="tree"><h2>All stacks, merged</h2><ul>'
    rows = list(branches(stacks, _BRANCHES, _DEEPEST))
    depths = [*(row.depth for row in rows[1:]), 0]
    for row, after in zip(rows, depths):
        known = "" if row.hidden else f' data-groups="{" ".join(map(str, row.groups))}"'
        yield f"<li{known}>"
        if after > row.depth:
            yield "<details open><summary>"
            yield from _branch(row)
            yield "</summary>"
            yield from _calls(row)
            yield "<ul>"
            continue
        yield "<div>"
        yield from _branch(row)
        yield from _calls(row)
        yield "</div></li>" + "</ul></details></li>" * (row.depth - after)
    yield "</ul></section>"


def _list(title: str, rows: Iterable[str]) -> Iterator[str]:
    shown = [f"<li>{_text(row)}</li>" for row in rows]
    if shown:
        yield f"<section><h2>{title}</h2><ul>{''.join(shown)}</ul></section>"


def _page(stacks: Stacks) -> Iterator[str]:
    title = _text(words.headline(stacks))
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
    when = " to ".join(filter(None, (stacks.started, stacks.finished)))
    yield f'<header><h1>{title}</h1><p class="soft">{_text(when)}</p></header>'
    if not stacks.complete:
        yield "<p><b>interrupted: not all nodes were looked at</b></p>"
    yield from _list("Look next", stacks.advice)
    yield '<div id="search" role="search" hidden><label for="find">Find</label>'
    yield '<input id="find" type="search" autocomplete="off" spellcheck="false"'
    yield ' placeholder="a rank, a node, a function or a file  ( / )">'
    yield '<output id="said" for="find"></output>'
    yield '<button type="button" id="open">Unfold all</button>'
    yield '<button type="button" id="close">Fold all</button></div>'
    yield from _groups(stacks)
    if any(group.frames for group in stacks.groups):
        yield from _tree(stacks)
    silent = (f"{node}: {why}" for node, why in words.silent(stacks))
    yield from _list("Nodes without an answer", silent)
    yield f"</main><script>{SCRIPT}</script></body></html>\n"


def render(stacks: Stacks) -> str:
    """The whole page. It folds without its script, and searches with it."""
    return "".join(_page(stacks))
