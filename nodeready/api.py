"""The commands as functions: `nodeready.audit("prod.py")` returns the document of the command.

A document is what the JSON of ``--format json`` is made of, as a frozen dataclass. The parameters
of a function are the options of its command (`nodeready.runs.options`), with the variables and the
files that set these.

pyinfra and ssh need a standard library that gevent has patched, an inventory is code, and the
nodes' answers are judged by forks. So a separate process (`cli.as_document`) runs the command: the
caller's is not patched, forks nothing, and prints nothing. Lines that the command would print to
standard error go to the logger ``nodeready``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from nodeready.core.exit_codes import FAILED
from nodeready.runs.options import (
    AuditOptions,
    DeployOptions,
    Path,
    ReadyOptions,
    StacksOptions,
    options_of,
)

if TYPE_CHECKING:
    from nodeready.agent.audit_document import Audit, Ready
    from nodeready.runs.deploy.document import Deploy
    from nodeready.runs.stacks.document import Stacks

__all__ = ["Error", "audit", "deploy", "ready", "stacks", "watch_audit"]

#: Seconds for an interrupted command to end what it runs on the nodes.
_END_S = 20.0

_logger = logging.getLogger("nodeready")


class Error(Exception):
    """A command that made no document.

    exit_code: of the command: 2 for a wrong argument, inventory or policy, else 1
    """

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.exit_code)


# --- The functions.

_OptionsP = ParamSpec("_OptionsP")
_DocumentT_co = TypeVar("_DocumentT_co", covariant=True)


class _OfInventory(Protocol[_OptionsP, _DocumentT_co]):
    def __call__(
        self, inventory: Path, *args: _OptionsP.args, **options: _OptionsP.kwargs
    ) -> _DocumentT_co: ...


class _OfNodes(Protocol[_OptionsP, _DocumentT_co]):
    def __call__(
        self, inventory: Path | None = None, *args: _OptionsP.args, **options: _OptionsP.kwargs
    ) -> _DocumentT_co: ...


def _function(kind: Any, stub: Callable[..., Any], **fixed: Any) -> Any:
    """The function of a command: the parameters of the stub, and the options of this class.

    A stub with another name than its command's returns an iterator over documents.
    """
    command = stub.__name__.rpartition("_")[2]
    options = {name: opt for name, opt in options_of(kind).items() if opt.in_python}
    parameters = [*inspect.signature(stub).parameters.values()]
    for name in options:
        default = inspect.signature(kind).parameters[name].default
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default))
    signature = inspect.Signature(parameters)

    @functools.wraps(stub)
    def function(*args: Any, **keywords: Any) -> Any:
        values = signature.bind(*args, **keywords).arguments
        inventory = values.pop("inventory", None)
        documents = _documents(_words(command, kind, inventory, {**fixed, **values}))
        if command != stub.__name__:
            return documents
        (document,) = documents
        return document

    lines = [f"{name}: {opt.help}" for name, opt in options.items()]
    function.__doc__ = "\n".join([inspect.cleandoc(stub.__doc__ or ""), "", *lines])
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _of_inventory(
    kind: Callable[_OptionsP, Any], **fixed: Any
) -> Callable[[Callable[..., _DocumentT_co]], _OfInventory[_OptionsP, _DocumentT_co]]:
    return functools.partial(_function, kind, **fixed)


def _of_nodes(
    kind: Callable[_OptionsP, Any],
) -> Callable[[Callable[..., _DocumentT_co]], _OfNodes[_OptionsP, _DocumentT_co]]:
    return functools.partial(_function, kind)


@_of_inventory(AuditOptions)
def audit(inventory: Path) -> Audit:  # type: ignore[empty-body]
    """What differs from the policy on every node, as `nodeready audit`. Raises Error."""


@_of_inventory(AuditOptions)
def watch_audit(  # type: ignore[empty-body]
    inventory: Path, *, every: float
) -> Generator[Audit, None, None]:
    """An audit each time, this many seconds apart, as `nodeready audit --watch`. Raises Error.

    The connections are kept. The nodes have no facts. Its `close` ends it.
    """


@_of_nodes(ReadyOptions)
def ready(inventory: Path | None = None) -> Ready:  # type: ignore[empty-body]
    """Which nodes may get a job, with proofs, as `nodeready ready`. Raises Error."""


@_of_inventory(DeployOptions, yes=True)
def deploy(inventory: Path) -> Deploy:  # type: ignore[empty-body]
    """Configure every node by the policy, as `nodeready deploy --yes`. Raises Error."""


@_of_nodes(StacksOptions)
def stacks(inventory: Path | None = None) -> Stacks:  # type: ignore[empty-body]
    """Which rank holds up a job, and where each stands, as `nodeready stacks`. Raises Error."""


# --- The process of a run.

#: Unlike `python -m`, it imports nothing from the current directory.
_CHILD = """\
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]
from nodeready.cli.as_document import main
main()
"""
#: The directory from which the caller has imported the package.
_PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _words(
    command: str, kind: type[Any], inventory: Path | None, values: Mapping[str, Any]
) -> list[str]:
    """The command line of a call. values: field of the class -> what was given"""
    words, options = [command, "--format=json"], options_of(kind)
    for name, value in values.items():
        opt = options.get(name)
        option = max(opt.names, key=len) if opt else f"--{name}"
        if value is True:
            words.append(option)
        elif opt is not None and opt.multiple:
            words += [f"{option}={item}" for item in value]
        elif value is not None and value is not False:
            is_one = isinstance(value, str | int | float | os.PathLike)
            text = os.fspath(value) if isinstance(value, os.PathLike) else value
            words.append(f"{option}={text if is_one else ','.join(value)}")
    return words if inventory is None else [*words, "--", os.fspath(inventory)]


def _documents(words: list[str]) -> Generator[Any, None, None]:
    """The documents of a run in a separate process. Raises Error if it returns none."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as complaints, open(reading, "rb") as answers:
        try:
            child = subprocess.Popen(
                [
                    *(sys.executable, "-c", _CHILD, _PLACE, str(writing)),
                    *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=[writing],
                # Ctrl-C at a terminal interrupts this process alone, which then tells the child.
                start_new_session=True,
            )
        finally:
            os.close(writing)
        count = 0
        try:
            while answers.peek(1):
                # Of our own process: nodes have no part in its form.
                yield pickle.load(answers)
                count += 1
            child.wait()
        except BaseException:
            _end(child)
            raise
        complaints.seek(0)
        text = complaints.read().decode("utf-8", "replace")
    lines = [line.removeprefix("nodeready: ") for line in text.splitlines()]
    if not count:
        exit_code = child.returncode if child.returncode > 0 else FAILED
        raise Error("\n".join(lines) or f"the command ended with {child.returncode}", exit_code)
    for line in lines:
        _logger.info("%s", line)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the command, so that it ends what it runs on the nodes; then kill it."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_END_S)
    except BaseException:
        child.kill()
        with contextlib.suppress(BaseException):
            child.wait()
        raise
