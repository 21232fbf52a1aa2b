"""What is wrong in a batch script of Slurm, before it runs: the rows of batch_scripts.toml.

A row's patterns see a script as `lines_of` writes it: one line per directive or command, with
each variable as it will be expanded: ``$NAME`` by the batch script itself, ``@NAME`` by the shell
of each task. So ``srun bash -c "torchrun --node_rank $SLURM_PROCID"`` and the same in single
quotes differ, and that difference is what most of these scripts get wrong.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nodeready import knowledge
from nodeready.core.exit_codes import Refused
from nodeready.core.files import read_regular

_MOST_BYTES = 1 << 16  # no person writes a larger script: those of large jobs have 10 KiB
# Characters, with the values of variables: the patterns' time grows with the square.
_LONGEST_COMMAND = 1 << 12
# sbatch's options of one letter (sbatch(1)).
_SHORT = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "t": "time", "w": "nodelist",
    "p": "partition", "o": "output", "e": "error", "J": "job-name",
}  # fmt: skip
_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_OPTION = re.compile(r"(?:^|\s)-(?:-([a-z][a-z-]*)|([A-Za-z]))(?:[= ]?\s*([^\s#-][^\s#]*))?")
_ASSIGNED = re.compile(r"(?:(?:export|declare -x|local|readonly) )?([A-Za-z_]\w*)=(\S*)")
_VARIABLE = re.compile(r"[$@](?:\{(\w+)\}|(\w+))")
_HEREDOC = re.compile(r"<<-?\s*(['\"\\]?)(\w+)")
_QUOTED_BLANK = "\0"  # a blank within quotes, until the words of a command are known


@dataclass(frozen=True)
class ScriptRule:
    key: str
    pattern: re.Pattern[str]  # what is wrong; its group `at`, else its beginning, is where
    unless: re.Pattern[str] | None  # what makes it right, anywhere in the script
    problem: str
    advice: str
    source: str


@dataclass(frozen=True)
class ScriptFinding:
    """One thing that is wrong in a script."""

    line: int  # the line in the script, from 1
    rule: str  # the key of the row in knowledge/batch_scripts.toml
    problem: str
    advice: str
    source: str  # where the rule comes from


@dataclass(frozen=True)
class BatchScript:
    """The document of `nodeready env --check`."""

    SCHEMA: ClassVar = "script"
    VERSION: ClassVar = 1

    script: str  # its path as it was given
    rules: int  # how many rules there are
    findings: tuple[ScriptFinding, ...]  # in the order of their lines


def _rule(key: str, row: dict[str, str]) -> ScriptRule:
    pattern = re.compile(row["pattern"], re.MULTILINE)
    unless = re.compile(row["unless"], re.MULTILINE) if "unless" in row else None
    return ScriptRule(key, pattern, unless, row["problem"], row["advice"], row["source"])


RULES = tuple(_rule(key, row) for key, row in knowledge.rows("batch_scripts").items())

# --- The script as its rules see it.


@dataclass
class _Scanner:
    """The commands of a script, without quotes."""

    rows: list[str]
    at: int = 0  # the next row
    quote: str = ""  # the open quote
    ticks: bool = False  # inside `...`

    def command(self) -> str:
        """The next command: its row, and the rows that continue it or are in its quotes."""
        text, open_documents = "", []
        while self.at < len(self.rows):
            row = self.rows[self.at]
            self.at += 1
            if not self.quote:
                open_documents += [(m[1], m[2]) for m in _HEREDOC.finditer(row)]
            part, continues = self._row(row)
            text += part
            if not (continues or self.quote):
                break
            text += _QUOTED_BLANK if self.quote else " "
        for quote, end in open_documents:
            text += self._document(quote, end)
        self.quote, self.ticks = "", False
        return text

    def _document(self, quote: str, end: str) -> str:
        text = ""
        while self.at < len(self.rows):
            row = self.rows[self.at]
            self.at += 1
            if row.strip() == end:
                break
            late = row.replace("$", "@") if quote else row.replace("\\$", "@")
            text += f" ; {late}"
        return text

    def _row(self, row: str) -> tuple[str, bool]:
        """A row without its quotes; and whether the next row continues it."""
        out, at = [], 0
        while at < len(row):
            character, after = row[at], row[at + 1 : at + 2]
            at += 1
            if self.quote == "'":
                if character == "'":
                    self.quote = ""
                else:
                    out.append({"$": "@", " ": _QUOTED_BLANK}.get(character, character))
            elif character == "\\":
                if not after:
                    return "".join(out), True
                at += 1
                out.append({"$": "@", "`": "@`"}.get(after, after))
            elif character == '"':
                self.quote = "" if self.quote else '"'
            elif character == "`":
                out.append(")" if self.ticks else "$(")
                self.ticks = not self.ticks
            elif self.quote:
                out.append(_QUOTED_BLANK if character == " " else character)
            elif character == "'":
                self.quote = "'"
            elif character == "#" and (not out or out[-1] in (" ", "\t", ";")):
                break
            else:
                out.append(character)
        return "".join(out), False


def _directives(text: str, kind: str) -> Iterator[str]:
    """``sbatch --nodes=2`` for each option of a directive."""
    for match in _OPTION.finditer(text):
        name = match[1] or _SHORT.get(match[2], match[2])
        yield f"{kind} --{name}={match[3] or ''}"


def lines_of(script: str) -> list[tuple[int, str]]:
    """What the rules see: the number of a row, and ``first TEXT``, ``sbatch --OPTION=VALUE``,
    ``late --OPTION=VALUE`` (a directive that sbatch does not read) or ``run COMMAND``.
    """
    rows = script.split("\n")
    lines = [(1, f"first {rows[0]}")]
    values: dict[str, str] = {}
    scanner, kind, size = _Scanner(rows), "sbatch", 0
    while scanner.at < len(rows):
        number, row = scanner.at + 1, rows[scanner.at]
        if match := _DIRECTIVE.match(row):
            lines += [(number, text) for text in _directives(match[1], kind)]
            scanner.at += 1
            continue
        command = scanner.command().strip()
        if size < _MOST_BYTES:
            command = _with_values(command, values)
        size += len(command)
        if command:
            kind = "late"
            words = re.sub(rf"(?:\\?[\s{_QUOTED_BLANK}])+", " ", command).strip()
            lines.append((number, f"run {words}"))
    return lines


def _with_values(command: str, values: dict[str, str]) -> str:
    """A command with the values of the variables that the script has set; and its own are kept."""

    def value(match: re.Match[str]) -> str:
        return values.get(match[1] or match[2], match[0])

    full = _VARIABLE.sub(value, command)[:_LONGEST_COMMAND]
    for name, text in _ASSIGNED.findall(full):
        # An array is no text, and the output of a step is not its command.
        if not text.startswith(("(", "$(srun")):
            values[name] = text
    return full


def judge(path: str) -> BatchScript:
    """The findings of a file. Raises Refused for one that cannot be read, or is no text."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from None
    if len(content) > _MOST_BYTES or b"\0" in content:
        raise Refused(f"{path}: no batch script: a program, or over {_MOST_BYTES >> 10} KiB")
    return BatchScript(path, len(RULES), check(content.decode("utf-8", "replace")))


def check(script: str) -> tuple[ScriptFinding, ...]:
    lines = lines_of(script)
    text, starts = "", []
    for _, line in lines:
        starts.append(len(text))
        text += f"{line}\n"
    findings = []
    for rule in RULES:
        if rule.unless and rule.unless.search(text):
            continue
        if match := rule.pattern.search(text):
            at = match.start("at" if "at" in match.re.groupindex else 0)
            number = lines[bisect(starts, at) - 1][0]
            words = rule.key, rule.problem, rule.advice, rule.source
            findings.append(ScriptFinding(number, *words))
    return tuple(sorted(findings, key=lambda finding: finding.line))
