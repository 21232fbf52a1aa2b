"""nodeready's files on a node, its blocks in files of others, and paths that refuse a deploy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nodeready.core.base import Output, Probe, Section, by_path, file_lines

if TYPE_CHECKING:
    from nodeready.core.policy import Policy

#: A file name has at most 255 bytes (limits.h, NAME_MAX), and the rest follows the z's.
_MOST_ZS = 200


def beatable(name: str) -> bool:
    """Whether a name of z's can sort after ``name``.

    >>> beatable("99-site.conf"), beatable("~x.conf")
    (True, False)
    """
    tail = name.lstrip("z")
    return len(name) - len(tail) < _MOST_ZS and tail[:1] <= "z"


def is_own(name: str, default: str) -> bool:
    """Whether ``name`` is a name of nodeready's file in its directory.

    default: the file's usual name. A prefix before its ``nodeready`` may change its sort order;
             the prefix never contains a slash or a dot.
    """
    suffix = re.escape(default[default.index("nodeready") :])
    return re.fullmatch(rf"[A-Za-z0-9_-]{{0,{_MOST_ZS}}}{suffix}", name) is not None


#: The reasons why a deploy refuses to write at a path, and the remedies.
#: The rules are those of nr_write and nr_walk (nodeready/sh/change.sh).
_REFUSALS = {
    "null": ("a link to /dev/null", "remove {}"),
    "nowhere": ("a link that leads nowhere", "remove {}"),
    "directory": ("a directory", "remove {}"),
    "special": ("no regular file", "remove {}"),
    "nodir": ("no directory", "remove {}"),
    "fixed": (
        "read-only file system or immutable",
        "make {} writable (mount -o remount,rw; chattr -i)",
    ),
    "theirs": ("not root's", "chown root {}"),
    "loose": ("writable by others than root", "chmod go-w {}"),
}

#: login.defs(5), GID_MIN: a group of persons.
_FIRST_GROUP = 1000


@dataclass(frozen=True)
class Refusal:
    """Why a deploy would not write at a path, and the remedy."""

    reason: str
    remedy: str


@dataclass(frozen=True)
class OwnFiles:
    """nodeready's own files on a node."""

    files: Mapping[str, bytes]  # path -> its content
    refused: Mapping[str, Refusal]  # path, also a directory's -> why no deploy would write there


def _own_files_script(patterns: tuple[str, ...]) -> str:
    parents = dict.fromkeys(pattern.rpartition("/")[0] for pattern in patterns)
    return rf"""
    set --
    for nr_file in {" ".join(patterns)}; do
        if [ -L "$nr_file" ] && [ ! -e "$nr_file" ]; then printf 'nowhere=%s\n' "$nr_file"
        elif [ "$nr_file" -ef /dev/null ]; then printf 'null=%s\n' "$nr_file"
        elif [ -d "$nr_file" ]; then printf 'directory=%s\n' "$nr_file"
        elif [ -f "$nr_file" ]; then
            set -- "$@" "$nr_file"
            # Not even root: the file is immutable, or its file system is read-only.
            if [ ! -w "$nr_file" ]; then printf 'fixed=%s\n' "$nr_file"; fi
        elif [ -e "$nr_file" ]; then printf 'special=%s\n' "$nr_file"
        fi
    done
    if [ $# != 0 ]; then nr_lines all "$@"; fi
    set --
    for nr_file in {" ".join(parents)}; do
        # A pattern of directories that names none stands for its parent.
        case $nr_file in *\**) nr_file=${{nr_file%/*}} ;; esac
        if nr_writable "$nr_file"; then set -- "$@" "$nr_at"; fi
    done
    nr_self
    if [ "$nr_self_uid" = 0 ]; then printf 'root=1\n'; fi
    for nr_file in "$@"; do
        shift
        if nr_seen_at "$nr_file"; then
            printf 'mode=%s %s %o %s\n' "$nr_uid" "$nr_gid" "$nr_mode" "$nr_file"
        else
            set -- "$@" "$nr_file"
        fi
    done
    if [ $# != 0 ]; then stat -Lc 'mode=%u %g %a %n' "$@" 2>/dev/null; fi
    :
    """


def _parse_own_files(text: str, patterns: Iterable[str]) -> dict[str, bytes]:
    """Path -> the content of that file; each of nodeready's files ends with a newline."""
    # A star matches no slash: a node cannot name a path outside of the pattern's directory.
    path_pattern = re.compile("|".join(re.escape(p).replace(r"\*", r"[^/\n]*") for p in patterns))
    by_file = by_path(file_lines(text)).items()
    texts = {path: "".join(f"{line.text}\n" for line in lines) for path, lines in by_file}
    matching = {path: text for path, text in texts.items() if path_pattern.fullmatch(path)}
    return {path: text.encode("utf-8", "surrogateescape") for path, text in matching.items()}


def _refusals(output: Output) -> dict[str, Refusal]:
    """Path -> why a deploy would not write there. Only root can observe that."""
    if not output.all("root"):
        return {}
    kinds_of_refusal = [(path, kind) for kind in _REFUSALS for path in output.all(kind)]
    for text in output.all("mode"):
        match = re.fullmatch(r"(\d{1,10}) (\d{1,10}) ([0-7]{1,5}) (/.*)", text)
        if match is None:
            continue
        uid, gid, mode, path = match.groups()
        # A deploy gives nodeready's own directory back to root.
        if path.endswith("/nodeready"):
            continue
        if uid != "0":
            kinds_of_refusal.append((path, "theirs"))
        elif int(mode, 8) & 0o2 or (int(mode, 8) & 0o20 and int(gid) >= _FIRST_GROUP):
            kinds_of_refusal.append((path, "loose"))
    pairs = ((path, _REFUSALS[kind]) for path, kind in kinds_of_refusal)
    return {path: Refusal(reason, remedy.format(path)) for path, (reason, remedy) in pairs}


def own_files(patterns: Iterable[str]) -> Probe:
    """The probe ``ours``: the files of these shell patterns, and paths that refuse a deploy."""
    chosen = tuple(dict.fromkeys(patterns))
    text = _own_files_script(chosen)

    def parse(outputs: Mapping[str, Output], policy: Policy) -> OwnFiles:
        output = outputs["ours"]
        return OwnFiles(_parse_own_files(output.require(), chosen), _refusals(output))

    return Probe("ours", (Section("ours", lambda policy: text),), parse)


# --- nodeready's marked block in a file that an administrator or user owns: bytes in, bytes out.
#
# Everything outside the block stays byte for byte: its line ends, a missing final newline, bytes
# that are no UTF-8. The block itself always has plain newlines, which the readers of these files
# accept, also in a file with CRLF.

BEGIN = b"# >>> nodeready: managed block, do not edit >>>"
END = b"# <<< nodeready <<<"

#: Where the block goes: top of the file, its end, or where it stands now (a new block: the end).
PLACES = ("top", "end", "keep")


def _parts(content: bytes) -> tuple[bytes, bytes | None, bytes]:
    """The file before, inside (None: no block) and after its first whole block. Markers without
    their partner and further blocks are left out.

    The lines behind a BEGIN without END may be the owner's own: they stay, only the marker goes.
    """
    outside: list[bytes] = []
    open_block: list[bytes] | None = None
    inner: bytes | None = None
    split = 0
    for line in re.findall(rb"[^\n]*\n|[^\n]+", content):
        word = line.rstrip()
        if word == BEGIN:
            outside.extend(open_block or ())
            open_block = []
        elif word == END:
            if open_block is not None and inner is None:
                inner, split = b"".join(open_block), len(outside)
            open_block = None
        elif open_block is not None:
            open_block.append(line)
        else:
            outside.append(line)
    outside.extend(open_block or ())
    if inner is None:
        split = len(outside)
    return b"".join(outside[:split]), inner, b"".join(outside[split:])


def _line_end(content: bytes) -> bytes:
    """The newline that is missing at the end of these lines, or nothing."""
    return b"\n" if content and not content.endswith(b"\n") else b""


def find_block(content: bytes) -> bytes | None:
    """The lines between the marks, unchanged; None without a whole block."""
    return _parts(content)[1]


def put_block(content: bytes, inner: bytes, place: str) -> bytes:
    """``content`` with exactly one block that holds ``inner``, standing at ``place``.

    Putting the same block again changes nothing. Outside the block one thing may change: a last
    line without a newline gets one when the block comes behind it. Raises ValueError for an
    ``inner`` that holds one of our marks and for an unknown place.
    """
    if any(line.rstrip() in (BEGIN, END) for line in inner.split(b"\n")):
        raise ValueError("the block's own lines must not hold its marks")
    if place not in PLACES:
        raise ValueError(f"place must be one of {', '.join(PLACES)}")
    block = BEGIN + b"\n" + inner + _line_end(inner) + END + b"\n"
    before, old_inner, after = _parts(content)
    if place == "top":
        return block + before + after
    if place == "end" or old_inner is None:
        before, after = before + after, b""
    return before + _line_end(before) + block + after


def remove_block(content: bytes) -> bytes:
    """``content`` without nodeready's block and without stray marks."""
    before, _, after = _parts(content)
    return before + after
