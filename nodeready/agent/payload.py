"""A program that travels to a node as one text, and the script that runs it there.

The modules go as they are, compressed; a finder of a few lines gives them to Python's import on
the node. No file is written there. The text comes over a file descriptor: a command line can be
read by every user of the node.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

from nodeready import knowledge
from nodeready.core.shell import KILL_AFTER_S, PYTHONS, join, quote
from nodeready.core.wire import NO_PYTHON

OLDEST_PYTHON = (3, 9)  # the oldest Python that runs a node's programs

# --- The modules that a program needs, found by their imports; from files or out of a zip.


def _folder(name: str) -> Any:
    """The folder of a package, by its dotted name."""
    top, *words = name.split(".")
    path: Any = resources.files(top)
    for word in words:
        path = path.joinpath(word)
    return path


def _source(name: str) -> str | None:
    """The source of a module; None when there is no such module."""
    parent, _, last = name.rpartition(".")
    files = [_folder(name).joinpath("__init__.py")]
    files += [_folder(parent).joinpath(f"{last}.py")] if parent else []
    for file in files:
        if file.is_file():
            text: str = file.read_text("utf-8")
            return text
    return "" if is_package(name) else None


# A block that never runs; and an import on a separate line. Python parses the imports alone: all
# statements of a program would take a quarter of a second.
_TYPE_CHECKING = re.compile(r"^( *)if TYPE_CHECKING:\n(?:\1 +.*\n|\n)*", re.M)
_IMPORT = re.compile(r"^ *(from [\w.]+ import (?:\([^)]*\)|.*)|import \w.*)", re.M)


@lru_cache(maxsize=512)
def imports(source: str, package: str = "") -> frozenset[str]:
    """The dotted names that a module imports: ``MODULE``, and ``MODULE.NAME`` for each name.
    package: to which the module's relative imports are relative
    """
    names: set[str] = set()
    for text in _IMPORT.findall(_TYPE_CHECKING.sub("", source)):
        try:
            (node,) = ast.parse(text).body
        except (SyntaxError, ValueError):
            # A sentence in a docstring.
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            names.add(module)
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def _parents(name: str) -> Iterator[str]:
    """The module and the packages around it."""
    words = name.split(".")
    return (".".join(words[:count]) for count in range(1, len(words) + 1))


def closure(roots: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """The modules of nodeready that these (dotted names) need, each with its source.

    The tables of knowledge that these modules read are in the module ``knowledge.compiled``.

    without: modules that are left out, with the modules that only they import
    """
    sources: dict[str, str] = {}
    todo, left_out = list(roots), frozenset(without)
    while todo:
        root = todo.pop()
        if left_out.intersection(_parents(root)):
            continue
        for name in _parents(root):
            if name.partition(".")[0] != "nodeready" or name in sources:
                continue
            if (source := _source(name)) is not None:
                sources[name] = source
                package = name if is_package(name) else name.rpartition(".")[0]
                todo += imports(source, package)
    if knowledge.COMPILED not in sources:
        tables = re.findall(r'\bknowledge\.rows\("(\w+)"\)', "".join(sources.values()))
        sources[knowledge.COMPILED] = knowledge.compiled(tables)
    return dict(sorted(sources.items()))


def is_package(name: str) -> bool:
    """Whether a module is a package: a folder with modules in it."""
    folder = _folder(name)
    return folder.is_dir() and any(entry.name.endswith(".py") for entry in folder.iterdir())


# --- The program as one text, and the script that starts it.

_ISOLATED = "-I -S -B -c"  # without a user's or site's additions, and no compiled files

# Reads the program from a file descriptor and runs it; what follows stays there, or becomes the
# program's input. Its words: the descriptor, the size of the program's text, whether the
# descriptor becomes the program's input, the run's tag.
_START = """
import os, sys
number, size, is_input = map(int, sys.argv[1:4])
text = bytearray()
while len(text) < size:
    chunk = os.read(number, size - len(text))
    if not chunk:
        sys.exit("cut off")
    text += chunk
if is_input:
    os.dup2(number, 0)
if number:
    os.close(number)
exec(bytes(text))
"""

_BOOT = """
import importlib, importlib.abc, importlib.util, sys
class Carried(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name in SOURCES:
            return importlib.util.spec_from_loader(name, self, is_package=name in PACKAGES)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__spec__.name
        exec(compile(SOURCES[name], name.replace(".", "/") + ".py", "exec"), module.__dict__)
    def get_source(self, name):
        return SOURCES[name]
sys.meta_path.insert(0, Carried())
sys.dont_write_bytecode = True
from nodeready.agent import payload
payload.HERE = MAIN, TEXT, PACKAGES
main = importlib.import_module(MAIN)
config_class = getattr(importlib.import_module(CONFIG_CLASS[0]), CONFIG_CLASS[1])
CONFIG = {key: tuple(v) if isinstance(v, list) else v for key, v in CONFIG.items()}
main.main(config_class(**CONFIG), **HOW)
"""

#: On a node: which program this is, its compressed modules, and which of them are packages.
HERE: tuple[str, str, frozenset[str]] = ("", "", frozenset())


@lru_cache(maxsize=8)
def _modules(main: str) -> tuple[str, frozenset[str]]:
    """All modules of a program, compressed, and which of them are packages."""
    if HERE[0] == main:
        return HERE[1:]
    sources = closure([main, "nodeready.agent.payload"])
    packed = base64.b85encode(zlib.compress(json.dumps(sources).encode(), 9)).decode("ascii")
    return packed, frozenset(name for name in sources if is_package(name))


class Program(NamedTuple):
    script: str  # the POSIX sh text that finds a Python there and starts it
    text: str  # the program, which the script's Python reads first from its file descriptor


def text(main: str, config: Any, **how: object) -> str:
    """The program as Python source on one line of ASCII: ``MAIN.main(config, **how)``.

    main:   the dotted name of a module with ``main``
    config: a dataclass of plain values and tuples, from a module that ``main``'s module imports
    how:    plain values
    """
    (modules, packages), config_class = _modules(main), type(config)
    return (
        "import base64,json,zlib;"
        f"MAIN={main!r};TEXT={modules!r};PACKAGES={packages!r};"
        "SOURCES=json.loads(zlib.decompress(base64.b85decode(TEXT)));"
        f"CONFIG_CLASS={(config_class.__module__, config_class.__name__)!a};"
        f"CONFIG={dataclasses.asdict(config)!a};HOW={how!a};"
        f"exec({_BOOT!r})"
    )


def program(
    main: str,
    config: Any,
    *,
    stdin: bool = False,
    first: str = "",
    descriptor: int = 3,
    **how: object,
) -> Program:
    """The program, and the script that finds a Python on the node and runs it there.

    config:     as for `text`; its ``limit_s`` limits the program. If the node has no such Python,
                only a line that begins with its ``nonce`` is printed
    stdin:      the program reads the data after its text
    first:      the path of the Python to try first, which runs the program that starts this
                program, watches it, and sends its text
    descriptor: from which the text is read
    """
    timeout_words = "" if first else f"timeout -k {KILL_AFTER_S} {config.limit_s + 1} "
    test_code = quote(f"import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})")
    source = text(main, config, **how)
    # A program that another program starts gets no nonce here: a command line is public.
    no_python_line = NO_PYTHON if first else f"{config.nonce} {NO_PYTHON}"
    # The first Python runs this program's parent, so its error is the reason.
    reason = '": $nr_why"' if first else ""
    words = join([str(descriptor), str(len(source)), str(int(stdin)), config.tag])
    script = f"""
    nr_python= nr_why=
    for nr_name in {join([first or PYTHONS[0], *PYTHONS])}; do
        if nr_said=$("$nr_name" {_ISOLATED} {test_code} 2>&1); then nr_python=$nr_name; break; fi
        nr_why=${{nr_why:-$nr_said}}
    done
    if [ -z "$nr_python" ]; then
        echo {quote(no_python_line)}{reason}
        exit 0
    fi
    exec {timeout_words}"$nr_python" {_ISOLATED} {quote(_START)} {words}
    """
    return Program(script, source)


def inner_program(main: str, config: Any, descriptor: int = 3) -> Program:
    """A program inside a session that this program opens. It runs ``main(config, inside=True)`` on
    this program's Python. The data after its text is its input.
    """
    python = sys.executable
    return program(main, config, stdin=True, first=python, descriptor=descriptor, inside=True)
