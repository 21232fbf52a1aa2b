"""Snapshot: everything that was observed on one node in one round trip, and its judging.

The sections of all subjects become one script. The script's answer becomes a Snapshot, and the
Snapshot becomes Results, some of which the policy waives. A subject whose section failed, timed
out or made no sense is Unknown, and no other subject is.
"""

from __future__ import annotations

import base64
import fnmatch
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nodeready import shell
from nodeready.policy import Policy
from nodeready.policy.fields import closest
from nodeready.subjects.base import (
    Output,
    OwnFiles,
    Probe,
    ProbeError,
    Refusal,
    Section,
    Unknown,
)
from nodeready.subjects.registry import OBSERVED, PROBES, SUBJECTS
from nodeready.subjects.result import ADMIN, Result, unknown

# --- One script for all sections, and the way from the script's answer back to sections.
#
# The answer on the wire: a line ``nodeready/1 NONCE gzip`` (or ``plain``), base64 of the sections,
# a line ``nodeready/1 NONCE end``. Each section: ``@NONCE begin NAME``, what the section printed,
# ``@NONCE rc N`` when it ended by itself, ``@NONCE end``. A section that ran in a shell of its own
# begins with ``@NONCE piped NAME``, and each of its lines has seven characters of ours in front:
# the line's number, as `cat -n` prints it, or a bar. What all others print is of our own words
# alone, or behind one of them, or in base64 (nodeready/sh/probe.sh).

#: More than this of one node's answer is refused, so that one node cannot fill our memory.
MAX_ANSWER_BYTES = 8 * 1024 * 1024

#: No section is larger, whatever the node says of its own caps: reading one takes a bounded time.
SECTION_BYTES = 1 << 20

#: Seconds that are left for the answer when a section beside the others was ended by its limit.
MARGIN_S = 3

#: Seconds for all sections that run together in one shell, which take a tenth of a second. It is
#: more where one of them may wait for longer: for a home directory.
TOGETHER_S = 5

#: Characters in front of each line of a section that ran in a shell of its own.
_IN_FRONT = 7

# First all sections run in one shell, one after the other, as functions: a process costs more than
# what most sections do. When that shell does not end well (a section hangs, prints without end, or
# ends the shell), each section runs once more in a shell of its own, under its own timeout and
# cap; of two outputs the later one counts. A section's status is its last line (in a shell of its
# own, the exit trap of the probe library prints it): a section without it was cut off or ended.
# Busybox's timeout ends only its child and leaves the child's children: there, we end the session.
# $nr_limit is mostly a program, not a function of ours, so that no further shell is needed. The
# text of a shell, with the nonce, is in its environment, which its user alone can read, and not in
# its arguments, which everybody can read; what the shell starts has it no more. nr_shell is called
# in a subshell only.
#
# A section that runs beside the others is started first, in the background of the left side of a
# pipe. On the right side all other sections run; then the output that came through the pipe is
# taken, within a limit. So nothing waits for a program in state D, which no signal ends and for
# which `timeout` would wait: the program is left behind with a pipe that nobody reads. This needs
# no file, and a section with nothing to run costs no process.
_RUN = r"""
nr_timeout=
IFS=:
for nr_dir in $PATH; do
    case $nr_dir in *[!A-Za-z0-9/._+-]*) continue ;; esac
    if [ -x "$nr_dir/timeout" ]; then nr_timeout=$nr_dir/timeout; break; fi
done
unset IFS
nr_limit="$nr_timeout -k 1"
if [ -z "$nr_timeout" ] || [ "$nr_timeout" -ef /bin/busybox ]; then nr_limit=nr_session; fi
nr_session() {
    nr_seconds=$1
    shift
    # What runs in the background has no standard input, unless it is told.
    { setsid "$@" <&6 & } 6<&0
    nr_pid=$!
    (sleep "$nr_seconds"; kill -TERM -- -$nr_pid; sleep 1; kill -KILL -- -$nr_pid) \
        >/dev/null 2>&1 4>&- 5>&- &
    nr_watch=$!
    wait $nr_pid
    nr_status=$?
    kill $nr_watch
    return $nr_status
}
nr_eval='nr_text=$NR_TEXT; unset NR_TEXT; eval "$nr_text"'
nr_shell() {
    NR_TEXT=$2
    export NR_TEXT
    $nr_limit "$1" sh -c "$nr_eval"
}
nr_section() {
    printf '\n@%s piped %s\n' "$NR" "$1"
    nr_shell "$2" "$NR_LIB
nr_trap
$4" 2>&1 | head -c "$3" | sed 's/^/      |/'
    printf '\n@%s end\n' "$NR"
}
nr_join() {
    NR_TOGETHER="$NR_TOGETHER
nr_it() {
:
$2
}
printf '\n@%s begin %s\n' $NR $1
nr_it
printf '\n@%s rc %s\n\n@%s end\n' $NR \$? $NR"
}
nr_start() {
    NR_TEXT="$NR_LIB
nr_trap
$2"
    export NR_TEXT
    $nr_limit "$1" sh -c "$nr_eval" </dev/null 2>&1 &
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
    { { nr_shell "$1" "$NR_LIB$NR_TOGETHER" 2>&1 4>&- 5>&-; echo $? >&4; } |
        head -c "$2" >&5; } 4>&1
}
"""
_PACK = r"""
if command -v base64 >/dev/null 2>&1; then
    if command -v gzip >/dev/null 2>&1; then
        printf 'nodeready/1 %s gzip\n' "$NR"
        nr_all | gzip -c1 | base64
    else
        printf 'nodeready/1 %s plain\n' "$NR"
        nr_all | base64
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
    rest = max(1, limit_s - margin_s)
    sections = tuple(replace(s, timeout_s=min(s.timeout_s, rest)) for s in sections)
    together = [section for section in sections if not section.beside]
    beside = [section for section in sections if section.beside]
    # A policy can leave a section nothing to do.
    idle = {section.name for section in sections if section.script(policy).strip() == ":"}
    bodies = {s.name: shell.quote(shell.minify(s.script(policy))) for s in (*together, *beside)}
    lines = [
        f"NR={nonce}",
        "exec 3<&-",
        f"NR_LIB={shell.quote(f'NR={nonce}' + chr(10) + shell.library('probe'))}",
        *(f"nr_body_{name}={body}" for name, body in bodies.items()),
        shell.minify(_RUN),
        "NR_TOGETHER=",
        *(f'nr_join {s.name} "$nr_body_{s.name}"' for s in together),
        "read -r nr_begin nr_x </proc/uptime",
        "nr_begin=${nr_begin%%.*}",
    ]
    busy = [section for section in together if section.name not in idle]
    cap = sum(section.cap_bytes for section in busy)
    limit = min(rest, max([TOGETHER_S, *(section.timeout_s for section in busy)]))
    lines += ["nr_level_0() {", f"nr_ended=$(nr_together {limit} {cap})"]
    lines += ['if [ "$nr_ended" != 0 ]; then', ":"]
    lines += [f'nr_section {_limits(s)} "$nr_body_{s.name}"' for s in together]
    lines += ["fi", "} 5>&1"]
    for level, section in enumerate(beside):
        lines += [
            f"nr_level_{level + 1}() {{",
            f"if {'false' if section.name in idle else section.when}; then",
            f'nr_start {section.timeout_s} "$nr_body_{section.name}" </dev/null | {{',
            f"nr_level_{level} </dev/null",
            f"nr_take {_limits(section)}",
            "}",
            "else",
            f"nr_empty {section.name}",
            f"nr_level_{level}",
            "fi",
            "}",
        ]
    lines += [f"nr_all() {{ nr_level_{len(beside)}; }}", shell.minify(_PACK)]
    return "\n".join(lines)


def _limits(section: Section) -> str:
    return f"{section.name} {section.timeout_s} {section.cap_bytes}"


def mark(nonce: str) -> str:
    """The text with which the script's answer begins."""
    return f"nodeready/1 {nonce}"


def _unpack(text: str, nonce: str) -> bytes:
    """The bytes between our two lines; what a login printed around the lines is passed over."""
    start = re.escape(mark(nonce))
    # The mark may stand inside of a line: what a login prints can end without a newline.
    begin = re.search(rf"{start} (gzip|plain|nobase64)\s*$", text, re.M)
    if begin is None:
        raise ProbeError("no answer from the node's shell", text.strip())
    if begin[1] == "nobase64":
        raise ProbeError("base64 is not installed")
    end = re.compile(rf"^{start} end\s*$", re.M).search(text, begin.end())
    if end is None:
        raise ProbeError("the answer was cut off")
    try:
        packed = base64.b64decode(text[begin.end() : end.start()], validate=False)
        if begin[1] == "plain":
            return packed[:MAX_ANSWER_BYTES]
        return zlib.decompressobj(31).decompress(packed, MAX_ANSWER_BYTES)
    except (ValueError, zlib.error) as error:
        raise ProbeError(f"the answer is damaged: {error}") from None


def parse_answer(text: str, sections: Iterable[Section], nonce: str) -> dict[str, Output]:
    """The sections of one node's answer, by name.

    Raises ProbeError when there is no answer at all. A section that is missing, was cut off or
    timed out is an Output whose ``require`` raises.
    """
    body = _unpack(text, nonce).decode("utf-8", "surrogateescape")
    caps = {section.name: section.cap_bytes for section in sections}
    outputs: dict[str, Output] = {}
    pieces = re.split(rf"\n@{re.escape(nonce)} (begin|piped) ([^\n]*)\n", f"\n{body}")
    for how, name, rest in zip(pieces[1::3], pieces[2::3], pieces[3::3]):
        if name not in caps:
            continue
        content = rest.partition(f"\n@{nonce} end\n")[0]
        most = max(caps[name], SECTION_BYTES)
        came = content
        if how == "piped" and len(came) <= 2 * most:
            content = "\n".join(line[_IN_FRONT:] for line in came.split("\n"))
        if len(content) > most:
            outputs[name] = Output(content[:most], None, truncated=True, nonce=nonce)
            continue
        printed, ended, status = content.rpartition(f"\n@{nonce} rc ")
        # A section can print such a line itself: only the last one tells the status.
        if ended and re.fullmatch(r"[0-9]{1,3}\n?", status):
            outputs[name] = Output(printed, int(status), nonce=nonce)
        else:
            size, whole = (
                len(text.encode("utf-8", "surrogateescape")) for text in (content, came)
            )
            cut = size >= caps[name] or whole >= 2 * caps[name]
            outputs[name] = Output(content, None, truncated=cut, nonce=nonce)
    for name in caps:
        outputs.setdefault(name, Output("", None))
    return outputs


# --- The snapshot and its results.


@dataclass(frozen=True)
class Snapshot:
    """What one node showed.

    subjects: subject -> its observation, or Unknown with the reason
    files:    path -> the content of that file of ours
    refused:  path -> why a deploy would not write there
    """

    subjects: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)

    def __getitem__(self, subject: str) -> Any:
        """The observation of a subject. Raises KeyError when it was not observed at all."""
        return self.subjects[subject]

    def merged(self, newer: Snapshot) -> Snapshot:
        """This snapshot with the subjects of a newer, smaller one in place of its own."""
        ours = newer if "ours" in newer.subjects else self
        return Snapshot({**self.subjects, **newer.subjects}, ours.files, ours.refused)


def probes(subjects: Iterable[str] | None = None) -> tuple[Probe, ...]:
    """The probes of these subjects (None: all), and the one that reads the files of ours."""
    if subjects is None:
        return PROBES
    wanted = {*subjects, "ours"}
    return tuple(probe for probe in PROBES if probe.subject in wanted)


def sections(chosen: Iterable[Probe]) -> tuple[Section, ...]:
    """The sections of these probes, each once, in order; those that come first in front."""
    found = {s.name: s for probe in chosen for s in probe.sections}.values()
    return tuple(sorted(found, key=lambda section: not section.first))


def _observe(probe: Probe, outputs: Mapping[str, Output], policy: Policy) -> Any:
    try:
        return probe.parse(outputs, policy)
    except ProbeError as error:
        return Unknown(error.reason, error.evidence)
    except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
        evidence = "".join(outputs[section.name].text[:200] for section in probe.sections[:1])
        return Unknown(_nonsense(error), evidence)


def _nonsense(error: Exception) -> str:
    return f"makes no sense ({type(error).__name__}: {error})"


def read(answer: str, chosen: tuple[Probe, ...], policy: Policy, nonce: str) -> Snapshot:
    """The snapshot in a node's answer. Never raises: a subject that cannot be read is Unknown."""
    seen: dict[str, Any] = {}
    try:
        outputs = parse_answer(answer, sections(chosen), nonce)
    except ProbeError as error:
        return nothing(error.reason, chosen, error.evidence)
    for probe in chosen:
        seen[probe.subject] = _observe(probe, outputs, policy)
    ours: OwnFiles | Unknown = seen.get("ours", Unknown(""))
    return (
        Snapshot(seen) if isinstance(ours, Unknown) else Snapshot(seen, ours.files, ours.refused)
    )


def nothing(reason: str, chosen: tuple[Probe, ...] = PROBES, evidence: str = "") -> Snapshot:
    """The snapshot of a node that gave no answer: every subject is Unknown for this reason."""
    return Snapshot({probe.subject: Unknown(reason, evidence) for probe in chosen})


def judge(
    snapshot: Snapshot, policy: Policy, subjects: Iterable[str] | None = None
) -> list[Result]:
    """The results of all checks of these subjects (None: all that were observed), after waivers.

    A subject that is Unknown gives one ``unknown`` result, with the reason and the evidence.
    """
    results: list[Result] = []
    for name, subject in SUBJECTS.items():
        if name not in snapshot.subjects or (subjects is not None and name not in subjects):
            continue
        seen = snapshot[name]
        if isinstance(seen, Unknown):
            shown = f"{seen.reason}: {seen.evidence}" if seen.evidence else seen.reason
            results.append(unknown(f"{name}.{OBSERVED}", shown))
            continue
        for given in subject.checks:
            try:
                found = given(seen, policy)
                if found.fixable:
                    patterns = (
                        subject.files if given.writes is None else given.writes(seen, policy)
                    )
                    found = _promised(found, snapshot.refused, patterns)
                results.append(found)
            except Exception as error:  # noqa: BLE001 - a node's answer must never end the run
                results.append(unknown(given.id, _nonsense(error)))
    return waive(results, policy)


def _promised(result: Result, refused: Mapping[str, Refusal], patterns: Iterable[str]) -> Result:
    """A fixable result as it is, or a person's where a deploy would not write these files."""
    for path, refusal in refused.items():
        for pattern in patterns:
            parent = pattern.rpartition("/")[0]
            if fnmatch.fnmatchcase(path, pattern) or _holds(path, parent):
                actual = f"{result.actual}; {path}: {refusal.why}"
                fix = f"{refusal.remedy}, then {result.fix}"
                return replace(result, actual=actual, fix=fix, owner=ADMIN)
    return result


def _holds(directory: str, parent: str) -> bool:
    """Whether a directory is ``parent``, a pattern, or one that holds it."""
    depth = directory.rstrip("/").count("/")
    start = "/".join(parent.split("/")[: depth + 1])
    return directory == "/" or fnmatch.fnmatchcase(directory, start)


# --- Waivers: findings that the policy accepts. They are listed always, and fail nothing.

#: The only statuses that can be waived: a value that was not observed cannot be accepted.
WAIVABLE = ("fail", "warn")
_WORD = "waived: "


def waive(results: Iterable[Result], policy: Policy) -> list[Result]:
    """``results`` with the findings that the policy waives as ``waived``.

    A waived result keeps what was expected and found; its ``fix`` is the reason of the waiver.
    """
    reasons = dict(policy.waivers)
    return [
        replace(result, status="waived", fix=f"{_WORD}{reasons[result.check]}", owner="")
        if result.check in reasons and result.status in WAIVABLE
        else result
        for result in results
    ]


def reason(result: Result) -> str:
    """The reason of the waiver of a waived result."""
    return result.fix.removeprefix(_WORD)


def problems(policy: Policy, ids: Iterable[str]) -> list[str]:
    """What is wrong with the policy's waivers, a line each: checks that are none of ``ids``.

    A waiver without a finding is no problem: the finding was repaired.
    """
    known = list(ids)
    return [
        f"waivers: {check!r}: {_meant(check, known)}"
        for check, _ in policy.waivers
        if check not in known
    ]


def _meant(check: str, known: list[str]) -> str:
    subject, _, name = check.partition(".")
    same = [one for one in known if one.startswith(f"{subject}.")]
    if same and name == "observed":
        return "what could not be observed cannot be waived"
    close = closest(check, known)
    if close:
        return f"no such check; did you mean {close}?"
    return f"no such check; there are {', '.join(same)}" if same else "no such check"
