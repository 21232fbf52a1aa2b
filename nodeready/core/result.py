"""The result of a check on a node, and how checks and subjects are declared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partialmethod
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple

from nodeready.core.base import Probe, grouped
from nodeready.core.parsed_template import fast_replace
from nodeready.core.policy import Policy
from nodeready.core.settings import ENDING_DAYS, Waiver, closest_word
from nodeready.core.severity import (
    ACTIONS,
    DISRUPTIVE,
    LOSES_JOB,
    SEVERITIES,
    Cost,
    severity_rank,
    words,
)

# --- The third argument of a check: facts about a node from other nodes and from earlier runs.


@dataclass(frozen=True)
class Counters:
    """The counters of one subject in an earlier snapshot of the same boot of the same node.

    A counter of an adapter runs from the last reset or load of its driver. Its total is
    meaningless: only the change between two snapshots matters.
    """

    seconds: float  # from the earlier snapshot to the present one
    values: Mapping[str, int]  # the subject's counters ("mlx5_0/1.link_downed") -> their values


@dataclass(frozen=True)
class FleetFacts:
    """Facts about one node from other nodes and from earlier runs."""

    addresses: tuple[str, ...] | None = None  # of one node alone; None: fewer than two are probed
    known_hosts: tuple[str, ...] | None = None  # lines expected in its block; None: not gathered
    host_key: str = ""  # the key of the node's sshd in this run, ``type base64``; "": unknown
    # (path, sha256) of every file of the node's gate; None: unknown, as on the node
    gate_files: tuple[tuple[str, str], ...] | None = None
    # subject -> its counters in an earlier snapshot
    counters: Mapping[str, Counters] = field(default_factory=dict)


#: For a node that is judged without its fleet.
ALONE = FleetFacts()


# --- The kinds of a subject's facts: what a comparison of two looks at a node compares, and how.

VOLATILE, COUNTER = "volatile", "counter"
HARDWARE, VERSION, SETTING = "hardware", "version", "setting"


@dataclass(frozen=True, eq=False)
class FactKinds:
    """The kinds of a subject's facts; a fact without a kind is a setting.

    Each text has words with white space between. A word is the end of a fact's path, which is its
    keys with dots, without the names of elements: ``clock.offset_ms``. It includes all facts below
    it that no other word names. Of two words for one path the longer counts.
    """

    # change by themselves or from run to run (temperatures, process ids, lines' numbers), or
    # repeat another fact: neither kept nor compared
    volatile: str = ""
    counters: str = ""  # totals that grow until the node boots
    hardware: str = ""  # what a machine consists of
    versions: str = ""  # of software and firmware
    counted: str = ""  # long lists; their number of elements and a digest are compared
    unique: str = ""  # hardware or settings that differ on sound peers: serial numbers, addresses
    # path of a list -> the keys that identify an element; path of a mapping of names -> ""
    elements: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def kind(self, path: str) -> str:
        """The kind of the fact with this path.

        >>> FactKinds(versions="nvidia.vbios").kind("nvidia.vbios")
        'version'
        """
        return _nearest(_kinds(self.volatile, self.counters, self.hardware, self.versions), path)

    def is_counted(self, path: str) -> bool:
        """Whether only the number of the elements is shown of the list with this path."""
        return bool(_nearest(_kinds(self.counted), path, ""))

    def is_unique(self, path: str) -> bool:
        """Whether healthy peers differ in the fact with this path."""
        return bool(_nearest(_kinds(self.unique), path, ""))


@lru_cache(maxsize=256)
def _kinds(*texts: str) -> Mapping[str, str]:
    """Word -> its kind."""
    kinds = (VOLATILE, COUNTER, HARDWARE, VERSION)
    return {word: kind for kind, text in zip(kinds, texts) for word in text.split()}


def _nearest(kinds: Mapping[str, str], path: str, default: str = SETTING) -> str:
    """The kind of the longest word that ends the path, else of the nearest path above it."""
    while path:
        end = path
        while end:
            if end in kinds:
                return kinds[end]
            end = end.partition(".")[2]
        path = path.rpartition(".")[0]
    return default


# --- The result of a check.

#: The statuses, worst first. ``unknown`` may hide a failure, and stops a job like ``fail``.
STATUSES: tuple[str, ...] = ("fail", "unknown", "warn", "waived", "ok", "na")

#: The owner of a Result that an operation repairs.
NODEREADY = "nodeready"
#: The owner of a Result that only a person can repair: by a reboot, a restart, another's file.
ADMIN = "admin"


@dataclass(frozen=True)
class Result:
    """What one check found on one node."""

    JSON: ClassVar = (
        *("check", "status", "expected", "actual", "source", "fix", "owner"),
        *("severity?", "actions?"),
    )

    # stable dotted id, ``subject.noun``; an id never changes its meaning
    check: Annotated[str, {"pattern": r"^[a-z0-9_]+\.[a-z0-9_]+$"}]
    status: Annotated[str, {"enum": STATUSES}]  # one of STATUSES
    expected: str = ""  # what the policy asks for, in words or as a value
    actual: str = ""  # observed, live and at the next boot; for ``na`` and ``unknown`` the reason
    source: str = ""  # where the actual value comes from (``/etc/sysctl.d/10-x.conf:3``), or ""
    fix: str = ""  # the repair: by an operation, a command or a person; ``waived``: the reason
    # ``nodeready`` where ``nodeready deploy`` repairs it, else ``admin``; "" when ok
    owner: Annotated[str, {"enum": (NODEREADY, ADMIN, "")}] = ""
    # of a result that is neither ok nor na: what it costs a job; else ""
    severity: Annotated[str, {"enum": tuple(SEVERITIES)}] = ""
    # the actions that repair it, the first one first
    actions: tuple[Annotated[str, {"enum": tuple(ACTIONS)}], ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Result:
        """The result in JSON; a key that this version does not know is left out."""
        names = {field.name for field in fields(cls)}
        values: dict[str, Any] = {name: row[name] for name in names if name in row}
        return cls(**{**values, "actions": tuple(values.get("actions", ()))})

    @property
    def bad(self) -> bool:
        """Whether a person or a deploy must act: not ``ok``, ``na`` or ``waived``."""
        return self.status not in ("ok", "na", "waived")

    @property
    def fixable(self) -> bool:
        """Whether ``nodeready deploy`` repairs it."""
        return self.status in ("fail", "warn") and self.owner == NODEREADY

    @property
    def rank(self) -> tuple[int, int]:
        """The places of its status and of its severity, the worst first; "" is the worst."""
        return STATUSES.index(self.status), severity_rank(self.severity)


def fix_text(result: Result) -> str:
    """The fix; before it the first action where that takes the node or a part out of service, and
    the fix does not name it: ``replace: open a case with the vendor``.
    """
    action = result.actions[0] if result.actions else ""
    if action not in DISRUPTIVE or action.partition("_")[0] in result.fix.lower():
        return result.fix
    return f"{words(action)}: {result.fix}" if result.fix else words(action)


def result_text(result: Result) -> str:
    """``1 (want 0)  [/etc/sysctl.conf:3]``: the observed and the expected value, the source."""
    text = result.actual
    if result.expected and result.status in ("fail", "warn") and result.expected != result.actual:
        text = f"{text} (want {result.expected})"
    return f"{text}  [{result.source}]" if result.source else text


# Thousands of healthy nodes have the same results: equal results are one object.
@lru_cache(maxsize=4096)
def shared(
    check: str, status: str, expected: str = "", actual: str = "", source: str = ""
) -> Result:
    """The result with these values: one object for equal results."""
    return Result(check, status, expected, actual, source)


def worst(results: Iterable[Result]) -> str:
    """The worst status among ``results``, in the order of STATUSES; ``na`` for no results."""
    statuses = {result.status for result in results}
    for status in STATUSES:
        if status in statuses:
            return status
    return "na"


def join_first(texts: Iterable[str], joint: str = "; ", maximum: int = 4) -> str:
    """The first texts, and the number of further ones.

    >>> join_first("abcdef")
    'a; b; c; d and 2 more'
    """
    listed = list(texts)
    remaining = f" and {len(listed) - maximum} more" if len(listed) > maximum else ""
    return joint.join(listed[:maximum]) + remaining


def join_names(names: Iterable[str]) -> str:
    """``a, b, c, d and 3 more``."""
    return join_first(names, ", ")


def by_value(values: Mapping[str, object], unit: str = "") -> str:
    """``200 Gb/s on mlx5_3/1; 400 Gb/s on mlx5_0/1, mlx5_1/1``: names with one value together."""
    names = grouped((value, name) for name, value in values.items())
    return join_first(f"{value}{unit} on {join_names(group)}" for value, group in names.items())


#: The result that stands for a subject that could not be observed is ``SUBJECT.observed``.
OBSERVED = "observed"

#: (observed, policy) -> Result; with the fleet as third argument where the check needs it.
Judge = Callable[..., Result]
#: (observed, policy) -> shell patterns of the files that the repair of a finding writes.
Writes = Callable[[Any, Policy], Iterable[str]]

PERSON = "By a person"
DEPLOY = "Repaired by"


class Remedy(NamedTuple):
    """The repair of a finding. A word in capitals stands for the node's value."""

    actor: str  # PERSON or DEPLOY
    action: str

    def __str__(self) -> str:
        return f"{self.actor}: {self.action}"


def deploy(command: str) -> Remedy:
    """A ``fix`` that is no operation of the check's own subject: ``nodeready deploy`` does it."""
    return Remedy(DEPLOY, command)


@dataclass(frozen=True)
class Page:
    """What `nodeready explain` and the docs say about one check."""

    id: str  # ``SUBJECT.NOUN``; an id never changes its meaning
    cost: Cost  # what a failure costs a job, and the actions that repair it
    meaning: str  # what the check judges, why, and where the rule comes from
    settings: tuple[str, ...]  # the fields of Policy that decide it, in the order of Policy
    fixed_by: str  # the operation that makes the check pass, ``SUBJECT.NOUN``; "": none does
    remedies: tuple[Remedy, ...]  # what else repairs a finding, one for each way to fail

    @property
    def subject(self) -> str:
        return self.id.partition(".")[0]

    @property
    def brief(self) -> str:
        """The first sentence of the meaning, on one line."""
        return " ".join(self.meaning.split("\n\n", 1)[0].split()).split(". ", 1)[0].rstrip(".")

    def rated(self, result: Result) -> Result:
        """The result with its severity and actions, if it is neither ok nor na."""
        if result.status in ("ok", "na"):
            return result
        actions = result.actions or self.cost.actions
        if result.status == "unknown":
            actions = ("inspect",)
        elif result.owner == ADMIN:
            # A deploy does not repair it, or not before a person has acted.
            actions = tuple(action for action in actions if action != "deploy")
        return replace(result, severity=self.cost.severity, actions=actions)


@dataclass(frozen=True)
class Check(Page):
    """A check: its page, and the pure function that judges."""

    judge: Judge
    fleet: tuple[str, ...] = ()  # fields of FleetFacts that it needs, as its third argument
    proof: str = ""  # the proof that must run before: SESSION, MESH, COLLECTIVE, HISTORY; "": none
    # the files that the repair writes: where a deploy may not write them, a person must act first;
    # None: all files of the subject
    writes: Writes | None = None
    opt_in: bool = False  # made only where ``--only`` has its whole id, not with its subject
    expects: str = ""  # the expectation of its results, where it is always the same

    @property
    def fix(self) -> str:
        """What a person does about any finding, where there is only one such text."""
        return self.remedies[0].action if len(self.remedies) == 1 else ""

    def expecting(self, expected: str) -> Check:
        return fast_replace(self, expects=expected)

    def ok(self, actual: str = "", source: str = "", *, expected: str | None = None) -> Result:
        """The value is as the policy wants it; ``actual`` defaults to the expectation."""
        expected = self.expects if expected is None else expected
        return shared(self.id, "ok", expected, actual or expected, source)

    def na(self, reason: str) -> Result:
        """The check does not apply to this node, for ``reason``."""
        return shared(self.id, "na", "", reason)

    def unknown(self, reason: str) -> Result:
        """The value could not be observed, for ``reason``."""
        return Result(self.id, "unknown", actual=reason)

    def fail(
        self,
        actual: str,
        source: str = "",
        fix: str | None = None,
        *,
        expected: str | None = None,
        actions: tuple[str, ...] = (),
        status: str = "fail",
    ) -> Result:
        """A failure that only a person can repair.

        expected, fix: None: those that the check declares
        actions:       where the ladder of the check begins with one that is too mild for this
        status:        ``warn``: a person should know it; it stops no job
        """
        expected = self.expects if expected is None else expected
        fix = self.fix if fix is None else fix
        return Result(self.id, status, expected, actual, source, fix, ADMIN, actions=actions)

    warn = partialmethod(fail, status="warn")

    def fixable(
        self,
        actual: str,
        source: str = "",
        fix: str = "",
        *,
        expected: str | None = None,
        status: str = "fail",
    ) -> Result:
        """A failure that ``nodeready deploy`` repairs; ``status`` is as of `fail`."""
        expected = self.expects if expected is None else expected
        fix = fix or f"nodeready deploy INVENTORY --only {self.subject}"
        return Result(self.id, status, expected, actual, source, fix, NODEREADY)

    def held(self, actual: str, source: str, remedy: str) -> Result:
        """A failure that a deploy repairs after a person has applied ``remedy``."""
        fix = f"{remedy}, then nodeready deploy INVENTORY --only {self.subject}"
        return self.fail(actual, source, fix)

    def __call__(self, observed: Any, policy: Policy, fleet: FleetFacts = ALONE) -> Result:
        arguments = (observed, policy, fleet) if self.fleet else (observed, policy)
        return self.rated(self.judge(*arguments))


def check(
    id: str,
    cost: Cost,
    *,
    settings: tuple[str, ...] = (),
    fleet: tuple[str, ...] = (),
    fixed_by: str = "",
    fix: str | Iterable[str | Remedy] = (),
    proof: str = "",
    writes: Writes | None = None,
    opt_in: bool = False,
    expects: str = "",
    meaning: str = "",
) -> Callable[[Judge], Check]:
    """Make a Check of a function whose docstring is the check's page.

    The function makes its results by the methods of its Check: ``count.fail("7")``.

    cost:    what a failure costs and what repairs it: ``loses_job("reset_gpu", "reboot", …)``
    fix:     what a person does; with `deploy`, what a deploy of another subject does
    expects: the expectation of its results, where it is always the same
    meaning: the page, where the function has no docstring
    """
    fixes = (fix,) if isinstance(fix, str) else fix
    remedies = tuple(Remedy(PERSON, text) if isinstance(text, str) else text for text in fixes)

    def wrap(judge: Judge) -> Check:
        text = inspect.cleandoc(meaning or judge.__doc__ or "")
        further = (fleet, proof, writes, opt_in, expects)
        return Check(id, cost, text, settings, fixed_by, remedies, judge, *further)

    return wrap


def no_facts(observed: Any, fleet: FleetFacts) -> Mapping[str, Any]:
    return {}


def _no_checks(policy: Policy) -> tuple[Check, ...]:
    return ()


def _nothing_learned(observed: Any) -> Mapping[str, Any]:
    return {}


_OBSERVED = """\
The subject could not be observed on the node, so none of its checks was judged.

The result has the reason, with the first bytes of the node's output: a command that hung or is
missing, output that cannot be parsed, or a file that cannot be read. No setting changes it. It
never counts as ok, and cannot be waived."""
_LOOK = "run the audit with --only {} on that node, and repair what the reason names"


@dataclass(frozen=True)
class Subject:
    """One subject: everything that the commands, the reports and the docs need to know."""

    name: str
    doc: str  # the docstring of its checks' module; the first line says what is judged
    checks: tuple[Check, ...]  # in the order of the reports
    probe: Probe | None = None  # None: observed by acting, before a job (nodeready/agent/proofs)
    # (observation, fleet) -> what the nodes of a group should have in common, fact -> number or
    # text. A fact's name is relative to the subject (``driver``, ``eth0.mtu``); a value that could
    # not be observed is left out
    compared: Callable[[Any, FleetFacts], Mapping[str, Any]] = no_facts
    # (observation, fleet) -> further facts of the documents; one may replace a field
    derived: Callable[[Any, FleetFacts], Mapping[str, Any]] = no_facts
    # observation -> the settings that this node would pass, as group_data holds them
    learned: Callable[[Any], Mapping[str, Any]] = _nothing_learned
    # (observation, fleet) -> totals, which are compared with those of an earlier snapshot of the
    # same boot (`FleetFacts.counters`); None: the subject has no counters
    counters: Callable[[Any, FleetFacts], dict[str, int]] | None = None
    files: tuple[str, ...] = ()  # patterns of files that nodeready alone writes, named after it
    judged_on_node: bool = True  # whether a node that audits itself judges the subject
    # policy -> further checks, which the policy itself declares
    policy_checks: Callable[[Policy], tuple[Check, ...]] = _no_checks
    kinds: FactKinds = FactKinds()  # how facts are compared with an earlier look or a peer

    @property
    def about(self) -> str:
        """What is judged, in one sentence."""
        words = (self.doc or self.name).splitlines()[0].removeprefix("Judge ")
        return words[:1].upper() + words[1:]

    @property
    def changed(self) -> bool:
        """Whether an operation repairs a check of the subject."""
        return any(check.fixed_by for check in self.checks)

    @property
    def learnable(self) -> bool:
        return self.learned is not _nothing_learned

    @property
    def needs_fleet(self) -> bool:
        return any(check.fleet for check in self.checks)

    @property
    def observed(self) -> Page:
        """The page of the result that stands for all checks when nothing could be observed."""
        remedy = Remedy(PERSON, _LOOK.format(self.name))
        severities = {check.cost.severity for check in self.checks}
        worst_severity = next((name for name in SEVERITIES if name in severities), LOSES_JOB)
        cost = Cost(worst_severity, ("inspect",))
        return Page(f"{self.name}.{OBSERVED}", cost, _OBSERVED, (), "", (remedy,))

    def ids(self, policies: Iterable[Policy] = ()) -> list[str]:
        """The ids of its checks, with those that these policies declare."""
        return [check.id for check in self.declared(policies)]

    def declared(self, policies: Iterable[Policy]) -> tuple[Check, ...]:
        """Its checks, with those that these policies declare; one of several with one id."""
        if self.policy_checks is _no_checks:
            return self.checks
        further = (check for policy in policies for check in self.policy_checks(policy))
        return tuple({check.id: check for check in (*self.checks, *further)}.values())


# --- Waivers: findings that the policy accepts. They are always listed, and never fail a run.

#: The only statuses that can be waived: a value that was not observed cannot be accepted.
WAIVABLE = ("fail", "warn")


def waive(results: Iterable[Result], policy: Policy, today: str) -> list[Result]:
    """``results`` with the findings that the policy waives as ``waived``.

    A waived result keeps what was expected and found; its ``fix`` is the reason of the waiver. In
    the last ENDING_DAYS of the waiver it is a warning, and after them the finding counts again.
    No text depends on the day within one of these states.

    today: ``2027-01-31``, UTC
    """
    waiver_of = last_ending(policy.waivers)
    return [
        _waived(result, waiver_of[result.check], today)
        if result.check in waiver_of and result.status in WAIVABLE
        else result
        for result in results
    ]


def last_ending(waivers: Iterable[Waiver]) -> dict[str, Waiver]:
    """Check -> its waiver with the latest end, which is the waiver in force."""
    ordered = sorted(waivers, key=lambda waiver: waiver.until or "9999-12-31")
    return {waiver.check: waiver for waiver in ordered}


def _waived(result: Result, waiver: Waiver, today: str) -> Result:
    days_left = waiver.days_left(today)
    if days_left is None or days_left > ENDING_DAYS:
        return replace(result, status="waived", fix=waiver_text(waiver), owner="", actions=())
    if days_left >= 0:
        fix = f"{waiver_text(waiver)}; it ends within {ENDING_DAYS} days: extend or remove it"
        return replace(result, status="warn", fix=fix, owner=ADMIN, actions=())
    owner = f" of {waiver.owner}" if waiver.owner else ""
    actual = f"{result.actual}; the waiver{owner} expired after {waiver.until}"
    return replace(result, actual=actual)


def waiver_text(waiver: Waiver) -> str:
    """``waived until 2027-01-31 (ana): ticket 4711``."""
    until = f" until {waiver.until}" if waiver.until else ""
    owner = f" ({waiver.owner})" if waiver.owner else ""
    return f"waived{until}{owner}: {waiver.reason}"


def waiver_problems(policy: Policy, ids: Iterable[str]) -> list[str]:
    """The waivers of checks that are not in ``ids``, a line each.

    A waiver without a finding is accepted: the finding was repaired.
    """
    check_ids = list(ids)
    waived = dict.fromkeys(waiver.check for waiver in policy.waivers)
    unknown = [check for check in waived if check not in check_ids]
    return [f"waivers: {check!r}: {_waiver_problem(check, check_ids)}" for check in unknown]


def _waiver_problem(check: str, check_ids: list[str]) -> str:
    subject, _, name = check.partition(".")
    same = [check_id for check_id in check_ids if check_id.startswith(f"{subject}.")]
    if same and name == "observed":
        return "what could not be observed cannot be waived"
    if close := closest_word(check, check_ids):
        return f"no such check; did you mean {close}?"
    return f"no such check; there are {', '.join(same)}" if same else "no such check"
