"""A step: an operation that asks its checks, and yields actions when one of them fails.

A step is written as a generator of actions. ``@step`` turns it into a pyinfra operation (for
``pyinfra INVENTORY deploy.py``) that also has ``plan`` (for ``nodeready deploy``). Both decide in
one place: a step acts exactly when one of its checks fails and is ours to repair.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pyinfra import host
from pyinfra.api import StringCommand, operation

from nodeready.deploy import pyinfra
from nodeready.deploy.actions import Action, Change, PlanError, RemoveFile, WriteFile
from nodeready.policy import Policy
from nodeready.subjects.base import Unknown, beatable, is_own
from nodeready.subjects.registry import SUBJECTS
from nodeready.subjects.result import Result
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.sysctl import BootSetting, sets
from nodeready.subjects.templates import render

Act = Callable[[Snapshot, Policy], Iterator[Action]]


@dataclass(frozen=True)
class Step:
    """One operation: a callable for deploy.py, with the plan that ``nodeready deploy`` runs.

    name:      ``subject.noun``
    fixes:     ids of the checks that it makes pass
    touches:   the subjects that it makes stale
    timeout_s: limit of the whole change on the node
    """

    name: str
    fixes: tuple[str, ...]
    act: Act
    touches: tuple[str, ...]
    timeout_s: int
    operation: Any = None

    @property
    def subject(self) -> str:
        return self.name.partition(".")[0]

    @property
    def does(self) -> str:
        """What the step does, in one sentence."""
        return (self.act.__doc__ or "").split("\n")[0]

    def plan(
        self, seen: Snapshot, want: Policy, results: Iterable[Result] | None = None
    ) -> Change | None:
        """The change that this step would make to a node that shows ``seen``; None: none.

        results: of judging ``seen`` by ``want``; None: they are made here

        A subject that could not be observed is left alone: we do not change what we cannot see.
        """
        if isinstance(seen.subjects.get(self.subject, Unknown("")), Unknown):
            return None
        if results is None:
            results = judge(seen, want, (self.subject,))
        failing = tuple(
            result.check for result in results if result.check in self.fixes and result.fixable
        )
        if not failing:
            return None
        actions = tuple(self.act(seen, want))
        return Change(self.name, failing, actions, self.touches, self.timeout_s)

    def __call__(self, **arguments: Any) -> Any:
        return self.operation(**arguments)


def step(touches: Iterable[str] = (), timeout_s: int = 60) -> Callable[[Act], Step]:
    """Make a Step of a generator of actions; its name is ``module.function``.

    It fixes the checks of its subject that name it. Raises ValueError when none does.
    """

    def wrap(act: Act) -> Step:
        subject = act.__module__.rpartition(".")[2]
        name = f"{subject}.{act.__name__}"
        fixes = tuple(one.id for one in SUBJECTS[subject].checks if one.fixed_by == name)
        if not fixes:
            raise ValueError(f"no check of {subject} is fixed by {name}")
        made = Step(name, fixes, act, (subject, *touches), timeout_s)

        def run() -> Generator[StringCommand, None, None]:
            seen, want, results = pyinfra.observed(host)
            subject = seen[made.subject]
            if isinstance(subject, Unknown):
                yield pyinfra.refuse(f"{made.subject} could not be observed: {subject.reason}")
                return
            try:
                change = made.plan(seen, want, results)
            except PlanError as error:
                yield pyinfra.refuse(f"{name}: {error}")
                return
            if change is None:
                host.noop(f"{name} is as the policy wants it")
                return
            yield pyinfra.command(host, change)
            pyinfra.forget(host, change.touches)

        run.__name__, run.__module__, run.__doc__ = act.__name__, act.__module__, act.__doc__
        object.__setattr__(made, "operation", operation()(run))
        return made

    return wrap


def name_after(default: str, other: str) -> str:
    """A file name that sorts behind ``other``: ``default``, or one that begins with z's.

    For directories in which the last file wins (sysctl.d, limits.d, grub.d). Raises PlanError for
    an ``other`` behind which no file can be (nodeready/subjects/base.py, ``beatable``).
    """
    if not beatable(other):
        raise PlanError(f"{other[:100]!r}: no file can be read after it: rename it")
    name, zs = default, 0
    while other and name <= other:
        zs += 1
        name = "z" * zs + "-" + default[default.index("nodeready") :]
    return name


# --- Actions that several steps share: files of ours, from their templates.


def own_file(
    seen: Snapshot,
    path: str,
    content: bytes,
    *,
    validator: tuple[str, ...] = (),
    instead_of: str = "",
) -> Iterator[Action]:
    """Write a file that we own outright, unless it has this content already.

    instead_of: the file's usual name: what stands in its directory under other forms of that name
                is removed after the file is written, so that a connection that dies in between
                leaves the setting in place
    """
    old = seen.files.get(path)
    if old != content:
        yield WriteFile(path, content, old, validator=validator, owned=True)
    if instead_of:
        for other, before in others_of(seen, path.rpartition("/")[0], instead_of):
            if other != path:
                yield RemoveFile(other, before)


def others_of(seen: Snapshot, directory: str, default: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of what is ours in this very directory under a form of this name."""
    for path, content in seen.files.items():
        folder, _, name = path.rpartition("/")
        if folder == directory and is_own(name, default):
            yield path, content


SYSCTL_D = "/etc/sysctl.d"


def sysctl_name(subject: str) -> str:
    """The usual name of our sysctl.d file for a subject."""
    return f"99-zz-nodeready-{subject}.conf"


def sysctl_dropin(
    seen: Snapshot, subject: str, key: str, value: str, boot: BootSetting
) -> Iterator[Action]:
    """Our sysctl.d file for one key, named so that it wins at boot over every other file."""
    if (boot.winner is not None and sets(boot.winner.value, value)) or not boot.beatable:
        return
    default = sysctl_name(subject)
    path = f"{SYSCTL_D}/{name_after(default, boot.last_name)}"
    content = render(f"{subject}/sysctl.conf.j2", key=key, value=value)
    yield from own_file(seen, path, content, instead_of=default)
