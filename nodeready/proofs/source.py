"""The program of the proofs as one text, and the command that runs it.

The modules travel as they are, compressed; a finder of a few lines gives them to Python's import
on the node. No file is written there.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from functools import lru_cache
from importlib import resources

from nodeready.proofs.config import Config
from nodeready.shell import KILL_AFTER_S, join, quote

#: What the program consists of, besides the modules of this package.
_OTHERS = ("nodeready.shell", "nodeready.probes.base", "nodeready.policy")

# Where the proofs' Python may be: the interpreter of the platform is often older than 3.9.
PYTHONS = (
    "python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.9",
    "/usr/libexec/platform-python",
)  # fmt: skip
#: What the command says, in place of any answer, when the node has no such Python.
NO_PYTHON = "no Python 3.9 or newer"

_BOOT = """
import importlib.abc, importlib.util, json, sys
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
from nodeready.proofs import MAIN, source
from nodeready.proofs.config import Config
source.TEXT = TEXT
CONFIG = {key: tuple(v) if isinstance(v, list) else v for key, v in CONFIG.items()}
MAIN.main(Config(**CONFIG), **HOW)
"""

#: The compressed modules, on a node where there is nothing else to read them from.
TEXT = ""


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")


@lru_cache(maxsize=1)
def _modules() -> str:
    """All modules of the program by name, compressed."""
    found = {"nodeready": "", "nodeready.probes": ""}
    for name in _OTHERS:
        package, _, module = name.rpartition(".")
        found[name] = _read(package, module)
    here = resources.files("nodeready.proofs")
    for file in sorted(here.iterdir(), key=lambda one: one.name):
        stem, dot, ending = file.name.partition(".")
        if dot and ending == "py":
            name = "nodeready.proofs" + ("" if stem == "__init__" else f".{stem}")
            found[name] = file.read_text("utf-8")
    return base64.b85encode(zlib.compress(json.dumps(found).encode(), 9)).decode("ascii")


def text(config: Config, main: str = "program", **how: object) -> str:
    """The program as Python source on one line: ``proofs.MAIN.main(config, **how)``."""
    modules = TEXT or _modules()
    packages = {"nodeready", "nodeready.probes", "nodeready.proofs"}
    return (
        "import base64,json,zlib;"
        f"TEXT={modules!r};PACKAGES={packages!r};"
        "SOURCES=json.loads(zlib.decompress(base64.b85decode(TEXT)));"
        f"CONFIG={dataclasses.asdict(config)!r};HOW={how!r};"
        f"exec({_BOOT.replace('MAIN', main)!r})"
    )


def script(
    config: Config, main: str = "program", stdin: bool = False, first: str = "", **how: object
) -> str:
    """The POSIX sh text that finds a Python on the node and runs the program with it.

    stdin: the program reads what comes over the connection
    first: the path of a Python that is tried before the others: that of the program that starts
           this one, and watches over it
    """
    within = "" if first else f"timeout -k {KILL_AFTER_S} {config.limit_s + 1} "
    old = "import sys; sys.exit(sys.version_info < (3, 9))"
    return f"""
    nr_python=
    for nr_name in {join([first or PYTHONS[0], *PYTHONS])}; do
        if "$nr_name" -I -S -c {quote(old)} 2>/dev/null; then nr_python=$nr_name; break; fi
    done
    if [ -z "$nr_python" ]; then
        echo {quote(f"{config.nonce} {NO_PYTHON}")}
        exit 0
    fi
    exec {within}"$nr_python" -I -S -c {quote(text(config, main, **how))}{" <&3" if stdin else ""}
    """
