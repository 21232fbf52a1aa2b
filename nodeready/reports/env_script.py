"""The variables of a job's environment as lines for a shell, and what is wrong in its script.

A text of a node stands in comments, one line each, and in quoted values, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from nodeready.core import shell
from nodeready.core.outcome import reasons_of
from nodeready.core.text import counted, sanitise
from nodeready.reports.lines import node_set, reasons
from nodeready.reports.registry import PLAIN, Options
from nodeready.runs.ready.batch_script import BatchScript
from nodeready.runs.ready.job_env import Environment, JobVariable, nodes_by_reason

WIDTH = 80  # columns of the comments
_NONE = "nothing"  # the word for no value


def _comment(text: str, indent: str = "# ") -> list[str]:
    # A sanitised text is one line, so that nothing in it can end the comment.
    return wrap(
        sanitise(text), WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )  # fmt: skip


def _differing(variable: JobVariable) -> list[str]:
    """Which nodes would have which value, and what to do about the difference."""
    width = max(len(value or _NONE) for value, _ in variable.nodes_by_value)
    lines = []
    for value, names in variable.nodes_by_value:
        lines += _comment(f"{value or _NONE:<{width}}  {node_set(names)}", "#   ")
    (_, first), (_, second), *_ = variable.nodes_by_value
    fewer = node_set(name for _, names in variable.nodes_by_value[1:] for name in names)
    mend = f"mend {fewer}, or " if len(first) > len(second) else ""
    return lines + _comment(f"{mend}give each node its own value in a file there")


def _shown(variable: JobVariable) -> Iterator[str]:
    problem = f"{variable.name} is not set: " if variable.value is None else ""
    yield from _comment(f"{problem}{variable.reason}")
    if variable.value is None and len(variable.nodes_by_value) > 1:
        yield from _differing(variable)
    for note in variable.notes:
        yield from _comment(note)
    for reason, names in variable.unknown:
        yield from _comment(f"unknown on {node_set(names)}: {reason}")
    if variable.value is not None:
        yield f"export {variable.name}={shell.quote(variable.value)}"


def shell_lines(environment: Environment, options: Options = PLAIN) -> Iterator[str]:
    """The text for `eval`, in pieces: POSIX sh, for bash, dash, ksh and zsh."""
    count = counted(len(environment.nodes), "node")
    lines = _comment(
        f"nodeready env, {environment.taken}: {node_set(environment.nodes)} ({count})"
    )
    for error, names in nodes_by_reason(reasons_of(environment.gaps)):
        lines += _comment(f"not among them: {node_set(names)}: {error}")
    for variable in environment.variables:
        lines += ["", *_shown(variable)]
    return (f"{line}\n" for line in lines)


def troubles(environment: Environment) -> Iterator[str]:
    """A line for each variable that a person has to decide on: `eval` hides the comments."""
    for variable in environment.variables:
        if variable.value is None and not variable.settled:
            rows = variable.nodes_by_value[:3]
            shares = "; ".join(
                f"{value or _NONE} on {node_set(names, 40)}" for value, names in rows
            )
            reason = f"{variable.reason}: {shares}" if shares else variable.reason
            yield f"{variable.name} is not set: {reason}"
        unknown = ((name, reason) for reason, names in variable.unknown for name in names)
        for reason, names in reasons(unknown):
            yield f"{variable.name} is unknown on {node_set(names)}: {reason}"


def script_lines(document: BatchScript, options: Options = PLAIN) -> Iterator[str]:
    """``SCRIPT:LINE: problem``, as a compiler's, and what to do below it."""
    path = sanitise(document.script)
    for finding in document.findings:
        yield f"{path}:{finding.line}: {finding.problem}\n"
        yield f"    {finding.advice}\n"
        if options.verbose:
            yield f"    {finding.rule}: {finding.source}\n"
    if not document.findings:
        yield f"{path}: right by all {document.rules} rules\n"
