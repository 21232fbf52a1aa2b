"""The program on the node: its commands, the line and exit code of each error, and how the
program is compiled there.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import nodeready
from nodeready.agent.gate import here
from nodeready.core import exit_codes
from nodeready.core.policy import PolicyError


class PyzCommand(NamedTuple):
    about: str  # what the command is for
    module: str  # the command's module in this room, imported when the command is used
    run: str  # the module's function ``(policy, options) -> exit code``
    arguments: str = ""  # the module's function that adds the options to a parser; "": no options


COMMANDS = {
    "audit": PyzCommand("what differs from the policy on this node; changes nothing",
                        "here", "run", "arguments"),
    "ready": PyzCommand("go or no-go for a job, proven by acting, within a budget",
                        "here", "run_ready", "ready_arguments"),
    "record": PyzCommand("audit, and keep the verdict and the Prometheus textfile",
                         "gate", "record"),
    "prolog": PyzCommand("the kept verdict, or a quick audit: 0 go, 3 no-go with its reasons",
                         "gate", "prolog"),
    "healthcheck": PyzCommand("record, and drain the node in Slurm or take that back",
                              "gate", "healthcheck"),
}  # fmt: skip

_EXIT = """
exit status:
  0    all good
  1    the tool failed
  2    usage, or a bad policy
  3    a check failed or could not be observed: no-go
  130  interrupted
"""


class _Once(argparse.Action):
    """Stores the value of an option. argparse would silently take the last of several."""

    is_given = False

    def __call__(
        self, parser: argparse.ArgumentParser, into: Any, value: Any, name: str | None = None
    ) -> None:
        if self.is_given:
            raise argparse.ArgumentError(self, "is given more than once")
        self.is_given = True
        setattr(into, self.dest, value)


class _Parser(argparse.ArgumentParser):
    def __init__(self, name: str, about: str, epilog: str) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(name, None, about, epilog, formatter_class=form, allow_abbrev=False)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        _complain(message)
        print(f"Try '{self.prog} --help'.", file=sys.stderr)
        sys.exit(exit_codes.exit_code(usage=True))


def _complain(text: str) -> None:
    from nodeready.core.text import sanitise

    print(f"nodeready: {sanitise(text)}", file=sys.stderr)


def _terminate(number: int, frame: FrameType | None) -> None:
    # A second signal ends the process at once.
    exit_codes.handle_signals(exit_codes.leave)
    raise KeyboardInterrupt


def _command(words: list[str]) -> tuple[str, list[str]]:
    """The command and its words. Ends the process for --help, --version and a wrong command."""
    listed = "".join(f"  {name:<12} {command.about}\n" for name, command in COMMANDS.items())
    listed += f"  {'run':<12} start one rank of a job so that its hang can be debugged\n"
    epilog = f"commands:\n{listed}\nA command's own --help has its options.\n{_EXIT}"
    parser = _Parser("nodeready.pyz", "Whether this node is ready for a job.", epilog)
    parser.add_argument("--version", action="version", version=nodeready.__version__)
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of those below")
    index = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    return parser.parse_args(words[: index + 1]).command, words[index + 1 :]


def _run(words: list[str]) -> int:
    # --local is the control machine's option, and all that this program can do.
    name, tail = _command([word for word in words if word != "--local"])
    command = COMMANDS[name]
    module = importlib.import_module(f"nodeready.agent.gate.{command.module}")
    parser = _Parser(f"nodeready.pyz {name}", f"{name}: {command.about}.", _EXIT)
    parser.add_argument("--policy", metavar="FILE", help="settings as JSON, before all others")
    if command.arguments:
        getattr(module, command.arguments)(parser)
    options = parser.parse_args(tail)
    code: int = getattr(module, command.run)(here.load(options.policy), options)
    sys.stdout.flush()
    return code


def main(words: list[str] | None = None) -> int:
    exit_codes.handle_signals(_terminate)
    try:
        return _run(sys.argv[1:] if words is None else words)
    except PolicyError as error:
        for problem in error.problems:
            _complain(problem)
        return exit_codes.exit_code(usage=True)
    except KeyboardInterrupt:
        _complain("interrupted")
        return exit_codes.exit_code(interrupted=True)
    except BrokenPipeError:
        # The reader of the output is gone. Python would complain again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.exit_code(failed=True)
    except OSError as error:
        _complain(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
        return exit_codes.exit_code(failed=True)


# --- The program compiled for the Python that runs here: it starts in half the time.
#
# The compiled program is the same zip with compiled code beside each source, where Python's import
# finds it. Another version of Python takes the sources from the same zip, which is slower.

#: PEP 552, an unchecked hash-based .pyc: import does not compare the source with its hash.
_UNCHECKED_HASH = (1).to_bytes(4, "little")


def compiled(program: bytes, place: str) -> bytes:
    """The compiled program.

    program: a bundle's bytes
    place:   the path of the compiled program on the node, for tracebacks
    Raises zipfile.BadZipFile for what is no zip, and SyntaxError for what is no Python.
    """
    # Imported here, because these modules slow down every start of the program.
    import io
    import marshal
    import zipfile
    from importlib.util import MAGIC_NUMBER, source_hash

    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(zipfile.ZipInfo(entry.filename, entry.date_time), content)
            if entry.filename.endswith(".py"):
                code = compile(content, f"{place}/{entry.filename}", "exec", dont_inherit=True)
                head = MAGIC_NUMBER + _UNCHECKED_HASH + source_hash(content)
                named = zipfile.ZipInfo(f"{entry.filename}c", entry.date_time)
                new.writestr(named, head + marshal.dumps(code))
    return target.getvalue()


def compile_bundle(source: str, target: str, place: str) -> None:
    """Compile the bundle ``source`` into the file ``target``, and print the note about both.
    place: the path to which ``target`` will be moved
    The note is one line: the sha256 of the bundle, the sha256 of the compiled program, Python's
    magic number. Raises OSError, and what `compiled` raises.
    """
    import hashlib
    from importlib.util import MAGIC_NUMBER

    with open(source, "rb") as file:
        program = file.read()
    target_bytes = compiled(program, place)
    with open(target, "wb") as file:
        file.write(target_bytes)
    digests = (hashlib.sha256(data).hexdigest() for data in (program, target_bytes))
    print(*digests, MAGIC_NUMBER.hex())
    sys.stdout.flush()
