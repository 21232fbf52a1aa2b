"""The script that runs all sections of a snapshot in one round trip, and its answer's parser."""

from __future__ import annotations

import base64
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from nodeready.core import shell
from nodeready.core.base import Output, ProbeError, Section
from nodeready.core.policy import Policy

#: Seconds that remain for the answer when a parallel section was ended by its limit.
MARGIN_S = 3

#: Seconds for all sections in the shared shell, which take a tenth of a second. The limit is
#: higher where a section may wait for a home directory.
TOGETHER_S = 5

#: Seconds for the shared shell with the mostly quick sections: a hung network mount takes five.
#: At most this part of the whole script's time, so that they can run in parallel afterwards when
#: the shell did not finish.
QUICK_S = 10
_QUICK_PART = 2 / 3

#: Files are read for many sections at once. This file of one line separates the sections: no other
#: path is spelt so.
SEPARATOR = "//proc/sys/kernel/ostype"


# - The shared shell. First all sections run in one shell, in order, as functions: a process costs
#   more than the work of most sections. The shell fails when a section hangs, prints without end
#   or ends the shell. Then each section runs again in a separate shell, under its own timeout and
#   cap, and the later of the two outputs counts.
# - A section's status is its last line; in a separate shell the exit trap of the probe library
#   prints it. A section without this line was cut off or ended.
# - The text of a shell, with the nonce, is in the shell's environment, which only its user can
#   read; every user can read arguments. The programs that the shell starts do not inherit the
#   text. nr_shell is only called in a subshell.
# - A parallel section is started first, in the background of the left side of a pipe. All further
#   sections run on the right side; then the pipe is read, within a limit. So nothing waits for a
#   program in state D, which no signal ends and for which `timeout` would wait: the program is
#   left behind with a pipe without a reader. This needs no file, and a section with nothing to run
#   costs no process.
# - A parallel section costs seven processes, more than most of them need. So the quick ones run
#   last in the shared shell, each in a subshell with a separate pipe: a program that hangs holds
#   this pipe and not the shell's output. The shell prints the text behind bars, without empty
#   lines. They run in parallel only when the shared shell failed.
# - One process searches for the lines that sections seek by their patterns, before they run.
# - The shared shell collects the files that its sections read by nr_lines, and reads them at the
#   end: one process per kind. The lines of a kind are the section =KIND.
_RUN = r"""
nr_eval='nr_text=$NR_TEXT; unset NR_TEXT; eval "$nr_text"'
nr_shell() {
    NR_TEXT=$2
    export NR_TEXT
    $nr_limit "$1" sh -c "$nr_eval"
}
nr_section() {
    printf '\n@%s piped %s\n' "$NR" "$1"
    nr_soon "$2"
    nr_shell "$nr_soon" "$NR_LIB
nr_trap
$NR_BODIES
nr_in_$1" 2>&1 | head -c "$3" | sed 's/^/      |/'
    printf '\n@%s end\n' "$NR"
}
# nr_soon SECONDS: nr_soon, these seconds, at most the rest of the whole probe's time.
nr_soon() {
    read -r nr_up nr_x </proc/uptime
    nr_soon=$((nr_end - ${nr_up%%.*}))
    if [ "$1" -lt "$nr_soon" ]; then nr_soon=$1; fi
    if [ "$nr_soon" -lt 1 ]; then nr_soon=1; fi
}
nr_start() {
    NR_TEXT="$NR_LIB
nr_trap
$2"
    export NR_TEXT
    nr_soon "$1"
    $nr_limit "$nr_soon" sh -c "$nr_eval" </dev/null 2>&1 &
}
nr_take() {
    printf '\n@%s piped %s\n' "$NR" "$1"
    read -r nr_up nr_x </proc/uptime
    nr_left=$(($2 + 2 + nr_begin - ${nr_up%%.*}))
    if [ "$nr_left" -lt 1 ]; then nr_left=1; fi
    if [ "$nr_limit" = nr_session ]; then
        nr_session "$nr_left" cat | head -c "$3" | sed 's/^/      |/'
    else
        # Twice its size, for the numbers.
        $nr_limit "$nr_left" cat -n | head -c "$(($3 * 2))"
    fi
    printf '\n@%s end\n' "$NR"
}
nr_empty() {
    printf '\n@%s begin %s\n\n@%s rc 0\n\n@%s end\n' "$NR" "$1" "$NR" "$NR"
}
nr_together() {
    { { nr_shell "$1" "$NR_LIB$NR_BODIES
$NR_CALLS" 2>&1 4>&- 5>&-; echo $? >&4; } |
        head -c "$2" >&5; } 4>&1
}
"""

# nr_run and nr_quick run a section in the shared shell; a quick one may end with `exec`.
# The trap of this shell keeps the shell alive while a program ignores TERM, so that `timeout`
# kills both. `exec`: a redirection of dash's would keep the shell's output open.
_CALLS = r"""
trap 'exit 143' TERM
nr_run() {
    printf '\n@%s begin %s\n' "$NR" "$1"
    "nr_in_$1"
    printf '\n@%s rc %s\n\n@%s end\n' "$NR" $? "$NR"
}
nr_read() {
    if [ $# = 1 ]; then return; fi
    nr_kind=$1
    shift
    printf '\n@%s begin =%s\n' "$NR" "$nr_kind"
    nr_grep "$@" "$NR_LATER" || exit 1
    printf '\n@%s end\n' "$NR"
}
nr_read_later() {
    set -f
    IFS='
'
    # shellcheck disable=SC2086 # one word per file
    { nr_read all $nr_later_all; nr_read set $nr_later_set; }
    unset IFS
    set +f
    NR_LATER=
}
nr_quick() {
    printf '\n@%s piped %s\n' "$NR" "$1"
    nr_out=$(exec </dev/null 2>&1; "nr_in_$1")
    nr_rc=$?
    set -f
    IFS='
'
    # shellcheck disable=SC2086 # one word per line
    printf '      |%s\n' '' $nr_out "@$NR rc $nr_rc"
    unset IFS
    set +f
    printf '\n@%s end\n' "$NR"
}
"""

_PACK = r"""
if command -v base64 >/dev/null 2>&1; then
    if command -v gzip >/dev/null 2>&1; then
        printf 'nodeready/1 %s gzip\n' "$NR"
        nr_all | gzip -c1 2>/dev/null | base64 2>/dev/null
    else
        printf 'nodeready/1 %s plain\n' "$NR"
        nr_all | base64 2>/dev/null
    fi
    printf 'nodeready/1 %s end\n' "$NR"
else
    printf 'nodeready/1 %s nobase64\n' "$NR"
fi
"""


def make_script(
    sections: Iterable[Section],
    policy: Policy,
    nonce: str,
    limit_s: int = 60,
    margin_s: int = MARGIN_S,
) -> str:
    """The POSIX sh text that runs ``sections`` and prints the packed answer; it only reads.

    limit_s:  seconds for the whole script
    margin_s: a section gets at most ``limit_s`` less this, so that a slow section costs its own
              output and not the answer
    """
    run_s = max(1, limit_s - margin_s)
    sections = tuple(replace(s, timeout_s=min(s.timeout_s, run_s)) for s in sections)
    together = [section for section in sections if not section.parallel]
    quick = [section for section in sections if section.quick]
    slow = [section for section in sections if section.parallel and not section.quick]
    texts = {section.name: shell.minify(section.script(policy)) for section in sections}
    for section in quick:
        if section.when != ":":
            texts[section.name] = f"if {section.when}; then\n{texts[section.name]}fi\n"
    # A policy can leave a section nothing to do.
    idle = {name for name, text in texts.items() if text.strip() == ":"}
    shared = [s for s in (*together, *quick) if s.name not in idle]
    bodies = "".join(f"nr_in_{s.name}() {{\n:\n{texts[s.name]}}}\n" for s in (*together, *quick))
    seeking = {s.name: shell.minify(s.seeks(policy)) for s in together if s.seeks}
    bodies += "".join(f"nr_seek_{name}() {{\n{text}}}\n" for name, text in seeking.items())
    calls = [
        f"NR_LATER={SEPARATOR}",
        *(f"nr_seek_{name}" for name in seeking),
        *(["nr_search"] if seeking else []),
        *(f"nr_run {s.name}" for s in together),
        "nr_read_later",
        *(f"nr_quick {s.name}" for s in quick),
    ]
    limit = min(run_s, max([TOGETHER_S, *(s.timeout_s for s in shared if not s.quick)]))
    if quick:
        limit = max(1, min(int(run_s * _QUICK_PART), max(limit, QUICK_S)))
    library = f"NR={nonce}\n{shell.library('answer')}{shell.library('probe')}"
    lines = [
        f"NR={nonce}",
        "exec 3<&-",
        f"NR_LIB={shell.quote(library)}",
        f"NR_BODIES={shell.quote(bodies)}",
        f"NR_CALLS={shell.quote(shell.minify(_CALLS) + chr(10).join(calls))}",
        *(f"nr_body_{s.name}={shell.quote(texts[s.name])}" for s in slow),
        shell.library("limit") + shell.minify(_RUN),
        "read -r nr_begin nr_x </proc/uptime",
        "nr_begin=${nr_begin%%.*}",
        f"nr_end=$((nr_begin + {run_s}))",
        "nr_again_0() {",
        ":",
        *(f"nr_section {_limits(s)}" for s in together),
        "}",
        *_levels("nr_again", quick, idle),
        "nr_level_0() {",
        # Twice the size, for what stands in front of each line.
        f"nr_ended=$(nr_together {limit} {sum(s.cap_bytes * (1 + s.quick) for s in shared)})",
        'if [ "$nr_ended" != 0 ]; then',
        "(read -r nr_begin nr_x </proc/uptime",
        "nr_begin=${nr_begin%%.*}",
        # A program that is left behind must not hold the answer's pipe.
        f"nr_again_{len(quick)}) 5>&-",
        "fi",
        "} 5>&1",
        *_levels("nr_level", slow, idle),
    ]
    lines += [f"nr_all() {{ nr_level_{len(slow)}; }}", shell.minify(_PACK)]
    return "\n".join(lines)


def _levels(name: str, slow_sections: list[Section], idle: set[str]) -> Iterator[str]:
    """The shell functions NAME_1 and so on: each runs a section beside the function before."""
    for level, section in enumerate(slow_sections):
        text = f'"$nr_body_{section.name}"'
        if section.quick:
            text = f'"$NR_BODIES\n(nr_in_{section.name})"'
        yield from (
            f"{name}_{level + 1}() {{",
            f"if {'false' if section.name in idle else section.when}; then",
            f"nr_start {section.timeout_s} {text} </dev/null | {{",
            f"{name}_{level} </dev/null",
            f"nr_take {_limits(section)}",
            "}",
            "else",
            f"nr_empty {section.name}",
            f"{name}_{level}",
            "fi",
            "}",
        )


def _limits(section: Section) -> str:
    return f"{section.name} {section.timeout_s} {section.cap_bytes}"


def mark(nonce: str) -> str:
    """The text with which the script's answer begins."""
    return f"nodeready/1 {nonce}"


# --- The parser of the script's answer: the output of each section.


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


def unpack(text: str, nonce: str) -> bytes:
    """The bytes between the answer's first and last line, without a login's. Raises ProbeError."""
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


def parse_answer(text: str | bytes, sections: Iterable[Section], nonce: str) -> dict[str, Output]:
    """The sections of one node's answer, by name. text: bytes: of `unpack`

    Raises ProbeError when there is no answer at all. A section that is missing, was cut off or
    timed out is an Output whose ``require`` raises.
    """
    caps = {section.name: section.cap_bytes for section in sections}
    outputs: dict[str, Output] = {}
    files: dict[str, list[str]] = {}
    waiting: dict[str, Output] = {}
    body = unpack(text, nonce) if isinstance(text, str) else text
    for how, name, section_text in _sections(body, nonce):
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
_LATER = {"all": ("all", True), "raw": ("all", False)}
_LATER |= {"set": ("set", True), "routes": ("set", False)}

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
    parts = {name: o.text.split(f"\n@{o.nonce} later ") for name, o in waiting.items()}
    marks = [part.partition("\n")[0] for _, *later in parts.values() for part in later]
    noted = Counter(_LATER.get(mark, ("", False))[0] for mark in marks)
    counts = {kind: noted.get(kind, 0) + 1 for kind in files}
    remaining = {kind: iter(rows) for kind, rows in files.items() if len(rows) == counts[kind]}
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
