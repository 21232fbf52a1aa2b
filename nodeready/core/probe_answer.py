"""The parser of the script's answer: the output of each section."""

from __future__ import annotations

import base64
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from nodeready.core.base import Output, ProbeError, Section
from nodeready.core.probe_script import SEPARATOR, mark

# The answer on the wire: a line ``nodeready/1 NONCE gzip`` (or ``plain``), base64 of the sections,
# a line ``nodeready/1 NONCE end``. Each section: ``@NONCE begin NAME``, what the section printed,
# ``@NONCE rc N`` when it ended by itself, ``@NONCE end``. A section from a separate shell begins
# with ``@NONCE piped NAME``, and each of its lines has a prefix of seven characters: the line's
# number, as `cat -n` prints it, or a bar. All other sections print only fixed words, text behind
# such a word, or base64 (nodeready/sh/probe.sh).

#: Maximum bytes of one node's answer: no node can fill the memory.
MAX_ANSWER_BYTES = 8 * 1024 * 1024

#: Maximum bytes of a section, so that reading one takes a bounded time.
SECTION_BYTES = 1 << 20
_STATUS = re.compile(r"[0-9]{1,3}\n?")

#: The loader's message at each program's start about a missing library in /etc/ld.so.preload.
_PRELOAD = re.compile(r"^ERROR: ld\.so: object '.*\n?", re.M)

#: Length of the prefix of each line of a section from a separate shell.
_IN_FRONT = 7


def _word_at(text: str, start: int, words: tuple[str, ...]) -> tuple[str, int]:
    """The first of these words that stands at ``start``, alone on its line, and the index behind.

    "" and ``start`` when there is no such word.
    """
    for word in words:
        if text.startswith(word, start):
            end = text.find("\n", start)
            after = text[start + len(word) : end if end >= 0 else len(text)]
            return (word, start + len(word)) if not after.strip() else ("", start)
    return "", start


def _unpack(text: str, nonce: str) -> bytes:
    """The bytes between the answer's first and last line; a login's output is ignored."""
    # A regular expression with the nonce would be compiled for each answer, which takes longer
    # than the search.
    start, how, first = f"{mark(nonce)} ", "", -1
    # The mark may stand inside of a line: what a login prints can end without a newline.
    while not how and (first := text.find(start, first + 1)) >= 0:
        how, begin = _word_at(text, first + len(start), ("gzip", "plain", "nobase64"))
    if not how:
        raise ProbeError("no answer from the node's shell", text.strip())
    if how == "nobase64":
        raise ProbeError("base64 is not installed")
    ended, last = "", begin - 1
    while not ended and (last := text.find(f"\n{start}", last + 1)) >= 0:
        ended, _ = _word_at(text, last + 1 + len(start), ("end",))
    if not ended:
        raise ProbeError("the answer was cut off")
    try:
        packed = base64.b64decode(text[begin:last], validate=False)
        if how == "plain":
            return packed[:MAX_ANSWER_BYTES]
        return zlib.decompressobj(31).decompress(packed, MAX_ANSWER_BYTES)
    except (ValueError, zlib.error) as error:
        raise ProbeError(f"the answer is damaged: {error}") from None


def _sections(body: bytes, nonce: str) -> Iterator[tuple[bytes, str, str]]:
    """The first word, the name and the text of each section."""
    start, position = f"\n@{nonce} ".encode(), 0
    headers: list[tuple[bytes, str, int, int]] = []
    body = b"\n" + body
    while (position := body.find(start, position)) >= 0:
        word = position + len(start)
        end = body.find(b"\n", word) if body[word : word + 6] in (b"begin ", b"piped ") else -1
        if end >= 0:
            name = body[word + 6 : end].decode("utf-8", "surrogateescape")
            headers.append((body[word : word + 5], name, position, end + 1))
        position = word if end < 0 else end + 1
    until = [first for _, _, first, _ in headers[1:]]
    for (how, name, _, begin), end in zip(headers, (*until, len(body))):
        yield how, name, body[begin:end].decode("utf-8", "surrogateescape")


def parse_answer(text: str, sections: Iterable[Section], nonce: str) -> dict[str, Output]:
    """The sections of one node's answer, by name.

    Raises ProbeError when there is no answer at all. A section that is missing, was cut off or
    timed out is an Output whose ``require`` raises.
    """
    caps = {section.name: section.cap_bytes for section in sections}
    outputs: dict[str, Output] = {}
    files: dict[str, list[str]] = {}
    waiting: dict[str, Output] = {}
    for how, name, section_text in _sections(_unpack(text, nonce), nonce):
        content = section_text.partition(f"\n@{nonce} end\n")[0]
        if name[:1] == "=":
            # The text before the first separator belongs to no section.
            files[name[1:]] = f"\n{content}".split(f"\n{SEPARATOR}:1:")[1:]
        if name not in caps:
            continue
        maximum = max(caps[name], SECTION_BYTES)
        raw = content
        if how == b"piped" and len(raw) <= 2 * maximum:
            content = "\n".join([line[_IN_FRONT:] for line in raw.split("\n")])
        if "ERROR: ld.so: object '" in content:
            content = _PRELOAD.sub("", content)
        if len(content) > maximum:
            outputs[name] = Output(content[:maximum], None, truncated=True, nonce=nonce)
            continue
        printed, ended, status = content.rpartition(f"\n@{nonce} rc ")
        # A section can print such a line itself: only the last one tells the status.
        if ended and _STATUS.fullmatch(status):
            outputs[name] = Output(printed, int(status), nonce=nonce)
            if how == b"begin" and f"\n@{nonce} later " in printed:
                waiting[name] = outputs[name]
        else:
            size = len(content.encode("utf-8", "surrogateescape"))
            raw_size = len(raw.encode("utf-8", "surrogateescape"))
            cut = size >= caps[name] or raw_size >= 2 * caps[name]
            outputs[name] = Output(content, None, truncated=cut, nonce=nonce)
    for name, complete in _complete_outputs(waiting, files):
        if outputs[name] is waiting[name]:
            outputs[name] = complete
    for name in caps:
        outputs.setdefault(name, Output("", None))
    return outputs


#: Kind of nr_lines -> the kind under which its files are read, and whether with line numbers.
_LATER = {
    "all": ("all", True),
    "raw": ("all", False),
    "set": ("set", True),
    "routes": ("set", False),
    "few": ("few", True),
}

#: A line's path, which is kept, and its number.
_NUMBER = re.compile(r"^(/[^:\n]*:)[0-9]+:", re.M)


def _complete_outputs(
    waiting: Mapping[str, Output], files: Mapping[str, list[str]]
) -> Iterator[tuple[str, Output]]:
    """These outputs by name, with each mark replaced by the lines of its files.

    waiting: in the order in which the sections have noted their files
    files:   kind -> the lines of each section's files in that order, and an end. Where a part is
             missing, the parts cannot be assigned to sections.
    """
    parts = {
        name: output.text.split(f"\n@{output.nonce} later ") for name, output in waiting.items()
    }
    marks = [part.partition("\n")[0] for _, *later in parts.values() for part in later]
    noted = Counter(_LATER.get(mark, ("", False))[0] for mark in marks)
    remaining = {
        kind: iter(lines) for kind, lines in files.items() if len(lines) == noted.get(kind, 0) + 1
    }
    for name, (first, *later_pieces) in parts.items():
        text, is_complete = first, True
        for part in later_pieces:
            kind, _, after = part.partition("\n")
            read, numbered = _LATER.get(kind, ("", False))
            # The first line is the separator.
            file_lines = next(remaining.get(read, iter(())), None)
            is_complete = is_complete and file_lines is not None
            lines = (file_lines or "").partition("\n")[2]
            if not numbered:
                lines = "".join(_NUMBER.split(lines))
            text += f"\n{lines}\n{after}"
        cut = len(text) > SECTION_BYTES
        if is_complete and not cut:
            output = waiting[name]
            yield name, Output(text, output.rc, output.truncated, output.nonce)
        else:
            yield name, Output(text[:SECTION_BYTES], None, cut, waiting[name].nonce)
