"""Subjects of other packages, which name themselves by entry points of their distribution.

    [project.entry-points."nodeready.subjects"]
    scratch = "nodeready_scratch.checks:SUBJECT"
    [project.entry-points."nodeready.operations"]
    scratch = "nodeready_scratch.operations"

A node's own program has another module in the place of this one (`transport.bundle`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nodeready
from nodeready.policy import Policy
from nodeready.subjects.fleet import FleetFacts
from nodeready.subjects.result import OBSERVED, Subject

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SUBJECTS_GROUP, OPERATIONS_GROUP = "nodeready.subjects", "nodeready.operations"

_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
#: Names of observations, results and probes that are no subject.
_RESERVED = frozenset({"ours", "site"})


class PluginError(Exception):
    """A plugin that cannot be used: one line, which names its distribution."""


def plugin_error(text: str) -> PluginError:
    """The error; in pyinfra's own command also one of pyinfra's, which it prints as one line."""
    if "pyinfra_cli" not in sys.modules:
        return PluginError(text)
    from pyinfra.api.exceptions import PyinfraError

    error: PluginError = type("PluginError", (PluginError, PyinfraError), {})(text)
    return error


@dataclass(frozen=True)
class Plugin:
    """One subject of another package.

    name:         of the subject
    distribution: ``nodeready-scratch 1.0``
    subject:      where the Subject is, ``MODULE:NAME``
    operations:   the module of its operations; "": it has none
    """

    name: str
    distribution: str
    subject: str
    operations: str

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.subject.partition(".")[0].partition(":")[0]

    def error(self, problem: str) -> PluginError:
        return plugin_error(
            f"plugin {self.name} ({self.distribution}): {problem}: "
            f"repair it, or pip uninstall {self.distribution.partition(' ')[0]}"
        )


def _has_plugins(directory: str) -> bool:
    """Whether a distribution in a directory of sys.path names itself as a plugin.

    The import of importlib.metadata alone takes longer than these reads.
    """
    for path in Path(directory).glob("*-info/entry_points.txt"):
        try:
            if b"[nodeready." in path.read_bytes():
                return True
        except OSError:
            continue
    return False


@lru_cache(maxsize=1)
def installed() -> tuple[Plugin, ...]:
    """The plugins that are installed, sorted by name. Raises PluginError.

    Nothing of them is imported.
    """
    if not any(map(_has_plugins, dict.fromkeys(sys.path))):
        return ()
    from importlib.metadata import entry_points

    operations: dict[str, EntryPoint] = {}
    for entry in entry_points(group=OPERATIONS_GROUP):
        operations[entry.name] = entry
    plugins: dict[str, Plugin] = {}
    for entry in sorted(entry_points(group=SUBJECTS_GROUP), key=lambda entry: entry.name):
        module = operations.pop(entry.name, None)
        plugin = Plugin(
            entry.name, _distribution(entry), entry.value, module.value if module else ""
        )
        if entry.name in plugins:
            raise plugin.error(f"{plugins[entry.name].distribution} has a subject of this name")
        _check_requirement(plugin, entry)
        plugins[entry.name] = plugin
    for name, entry in operations.items():
        plugin = Plugin(name, _distribution(entry), "", entry.value)
        raise plugin.error(f"has an entry point in {OPERATIONS_GROUP}, none in {SUBJECTS_GROUP}")
    return tuple(plugins.values())


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"


def _check_requirement(plugin: Plugin, entry: EntryPoint) -> None:
    """Raise PluginError where the distribution requires another version of nodeready.

    pip checks that when it installs the plugin, and installs a new nodeready without it.
    """
    from packaging.requirements import Requirement

    for text in (entry.dist.requires if entry.dist else None) or ():
        try:
            requirement = Requirement(text)
        except ValueError as error:
            raise plugin.error(f"requires {text!r}: {type(error).__name__}") from error
        allowed = requirement.specifier
        if requirement.name == "nodeready" and not allowed.contains(
            nodeready.__version__, prereleases=True
        ):
            raise plugin.error(f"needs nodeready{allowed}, and this is {nodeready.__version__}")


def load(built_in: Mapping[str, Subject]) -> dict[str, Subject]:
    """The subjects of all plugins, by name. Raises PluginError for one that cannot be used."""
    subjects: dict[str, Subject] = {}
    for plugin in installed():
        subject = _import(plugin, plugin.subject)
        problem = next(_problems(plugin, subject, {**built_in, **subjects}), "")
        if problem:
            raise plugin.error(problem)
        subjects[plugin.name] = subject
    return subjects


def load_operations(name: str) -> Any:
    """The module of a plugin's operations. Raises PluginError."""
    plugin = next((plugin for plugin in installed() if plugin.name == name), None)
    if plugin is None:
        raise LookupError(f"operations/__init__.py: a line is missing for {name}")
    module = _import(plugin, plugin.operations)
    steps = getattr(module, "STEPS", None)
    if not isinstance(steps, tuple) or not all(hasattr(step, "fixes") for step in steps):
        raise plugin.error(f"{plugin.operations}: STEPS is no tuple of steps")
    names = {step.name for step in steps}
    for check in _import(plugin, plugin.subject).checks:
        if check.fixed_by and check.fixed_by not in names:
            raise plugin.error(f"{check.id}: no step {check.fixed_by} in {plugin.operations}")
    return module


def subject_of_operations(module: str) -> str:
    """The subject whose operations a module has: a plugin's by its entry point, else by its name.

    >>> subject_of_operations("nodeready.operations.ptrace")
    'ptrace'
    """
    subjects = {plugin.operations: plugin.name for plugin in installed()}
    return subjects.get(module, module.rpartition(".")[2])


def _import(plugin: Plugin, place: str) -> Any:
    """What stands at ``MODULE`` or ``MODULE:NAME``. Raises PluginError."""
    from importlib import import_module

    module, _, name = place.partition(":")
    try:
        value = import_module(module)
        return getattr(value, name) if name else value
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split())
        raise plugin.error(f"{place}: {type(error).__name__}: {words}") from error


def _problems(plugin: Plugin, subject: Any, peers: Mapping[str, Subject]) -> Iterator[str]:
    """What a plugin declares wrong."""
    name = plugin.name
    if not isinstance(subject, Subject):
        yield f"{plugin.subject} is no Subject"
        return
    if subject.name != name:
        yield f"the subject's name is {subject.name!r}, its entry point's is {name!r}"
    if not _NAME.match(name):
        yield f"a subject's name is lower-case letters, digits and _, not {name!r}"
    if name in peers or name in _RESERVED:
        yield f"nodeready has a subject {name}"
    if subject.probe is None or subject.probe.subject != name:
        yield f"needs a Probe whose subject is {name!r}"
        return
    if not hasattr(sys.modules[plugin.package], "__path__"):
        yield f"{plugin.package} is a module, and must be a package: a folder"
    yield from _wrong_sections(subject, peers)
    yield from _wrong_checks(subject)
    for path in subject.files:
        if not path.startswith("/") or "nodeready" not in path.rpartition("/")[2]:
            yield f"a file of its own is /DIRECTORY/NAME with nodeready in NAME, not {path!r}"
    if subject.changed and not plugin.operations:
        yield f"has a check with fixed_by, and no entry point in {OPERATIONS_GROUP}"


def _wrong_sections(subject: Subject, peers: Mapping[str, Subject]) -> Iterator[str]:
    assert subject.probe is not None
    sections = {
        section.name: section
        for other in peers.values()
        if other.probe
        for section in other.probe.sections
    }
    for section in subject.probe.sections:
        if not _NAME.match(section.name):
            yield f"a section's name is lower-case letters, digits and _, not {section.name!r}"
        if sections.get(section.name, section) != section or section.name in _RESERVED:
            yield f"another subject has a section {section.name}"


def _wrong_checks(subject: Subject) -> Iterator[str]:
    keys, facts = _field_names(Policy), _field_names(FleetFacts)
    ids = subject.ids()
    if not ids:
        yield "has no check"
    for check in subject.checks:
        head, _, noun = check.id.partition(".")
        if head != subject.name or not _NAME.match(noun) or noun == OBSERVED:
            yield f"a check's id is {subject.name}.NOUN, not {check.id!r}"
        if ids.count(check.id) > 1:
            yield f"has two checks {check.id}"
        if check.proof:
            yield f"{check.id}: a plugin has no proofs"
        yield from _unknown(check.id, "setting", check.settings, keys)
        yield from _unknown(check.id, "fact of the fleet", check.fleet, facts)


def _unknown(
    check: str, kind: str, names: Iterable[str], declared: frozenset[str]
) -> Iterator[str]:
    return (f"{check}: there is no {kind} {name}" for name in names if name not in declared)


def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
