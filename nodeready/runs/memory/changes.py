"""The changes of one node between two looks, or its differences from a peer. Pure.

A part that was replaced, an interface that was renamed, and a reboot are one change each, with
everything that follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from nodeready.agent.audit_document import STOPPING
from nodeready.core.result import COUNTER, HARDWARE, SETTING, VERSION, join_first
from nodeready.runs.memory.look import (
    ASKED,
    WAIVERS,
    NodeLook,
    Value,
    changed_words,
    is_unique,
    kind_of,
    shown_value,
)
from nodeready.runs.memory.store import StoredFacts
from nodeready.subjects.registry import page

RESULT, REBOOT, POLICY = "result", "reboot", "policy"
#: The kinds of changes, in the order of reports.
KINDS = (RESULT, HARDWARE, VERSION, SETTING, COUNTER, REBOOT, POLICY)
ANSWER = "answer"  # the key of a node's answer, in place of a check's id


class _PartList(NamedTuple):
    """What is known of the parts in one list of facts."""

    noun: str
    identities: tuple[str, ...]  # the facts that identify a part wherever it is
    always: str  # a fact that each of the parts has
    is_named: bool = True  # by names that a kernel or an administrator gives


_PARTS = {
    "gpus.nvidia": _PartList("GPU", ("serial", "uuid"), "pci_address", is_named=False),
    "gpus.amd": _PartList("GPU", ("serial", "uuid"), "pci_address", is_named=False),
    "nics.interfaces": _PartList("interface", ("mac",), "name"),
    "rdma.devices": _PartList("RDMA device", ("node_guid",), "name"),
}
_NO_PARTS = _PartList("", (), "")
#: Interfaces with a part behind them; the kernel draws the addresses of most others at each boot.
_PHYSICAL = ("ethernet", "infiniband", "wifi", "usb")
#: A smaller share of memory is what the kernel keeps for itself, and differs from boot to boot;
#: the smallest part that can be missing, one of 32 memory modules, is 3 %.
_SAME_MEMORY = 0.01
#: Counters that also grow in a boot without any fault: links come up.
_COUNT_AT_BOOT = ("carrier_changes",)
#: File systems' UUIDs, which differ on equal nodes.
_UUID = re.compile(r"[0-9a-fA-F]{4,8}(-[0-9a-fA-F]{4,12}){1,4}")
#: GRUB's name of the kernel's file, which repeats the kernel's release.
_BOOT_IMAGE = re.compile(r"BOOT_IMAGE=\S*")
_MAX_ALSO = 4
_MAX_SETTINGS = 3
Facts = Mapping[str, Value]


@dataclass(frozen=True)
class Change:
    kind: str  # one of KINDS
    key: str  # of a fact, an element or a counter; the id of a check; ANSWER
    before: Value  # value or status; None: it was not there
    after: Value  # as ``before``
    note: str = ""  # what the values do not show
    # kind of the part that was replaced, added or removed, as ``before`` and ``after``; "": none
    part: str = ""


def changes(before: NodeLook, after: NodeLook) -> tuple[Change, ...]:
    """The changes of one node from one look to a later one, in the order of KINDS.

    What another policy asks or expects is no change of the node: it is one change of the policy.
    """
    every: list[Change] = []
    settings, requested = _policy_differences(before, after)
    if before.error or after.error:
        if bool(before.error) != bool(after.error):
            values = ("no answer", "answered") if before.error else ("answered", "no answer")
            every.append(Change(RESULT, ANSWER, *values, after.error))
    else:
        results = [*_results(before, after)]
        expected = [change for change in results if _is_of_policy(change, settings)]
        every += [change for change in results if change not in expected]
        if expected:
            names = join_first(sorted(settings), ", ", _MAX_SETTINGS)
            follow = "result follows" if len(expected) == 1 else "results follow"
            every.append(Change(POLICY, names, None, None, f"{len(expected)} {follow}"))
        old, new = _different(before.facts, after.facts)
        words: dict[str, str] = {}
        for parts in (name for name, parts in _PARTS.items() if parts.is_named):
            renamed = _renames(parts, old, new)
            words |= renamed
            for name, word in renamed.items():
                every.append(Change(SETTING, f"{parts}[{word}]", name, word, "renamed"))
        if words:
            before = _renamed(replace(before, facts=old), words)
            old = before.facts
        every += _FactChanges(old, new).changes(requested)
        is_same_boot = before.boot_id == after.boot_id
        if before.boot_id and after.boot_id and not is_same_boot:
            every.append(Change(REBOOT, "host.boot_id", None, None, "rebooted"))
        every += _counter_changes(before.counters, after.counters, is_same_boot)
    return tuple(sorted(every, key=lambda change: KINDS.index(change.kind)))


def differences(peer: NodeLook, node: NodeLook) -> tuple[Change, ...]:
    """In what a node differs from its peer (``before``): no serial, address or counter."""
    if peer.error or node.error:
        return ()
    old, new = map(_shared, _different(peer.facts, node.facts))
    _, requested = _policy_differences(peer, node)
    every = [*_results(peer, node), *_FactChanges(old, new).changes(requested)]
    return tuple(sorted(every, key=lambda change: KINDS.index(change.kind)))


def is_failing(look: NodeLook) -> bool:
    """Whether the node may get no job, by this look."""
    return bool(look.error) or any(r.status in STOPPING for r in look.results.values())


def _shared(facts: Facts) -> dict[str, Value]:
    """The facts that equal nodes share."""
    return {
        key: _UUID.sub("UUID", value) if isinstance(value, str) else value
        for key, value in facts.items()
        if not is_unique(key)
    }


def _different(before: Facts, after: Facts) -> tuple[Facts, Facts]:
    """The facts, without subjects that the memory knows to be equal."""
    if before is after:
        return {}, {}
    if not (isinstance(before, StoredFacts) and isinstance(after, StoredFacts)):
        return dict(before), dict(after)
    old: dict[str, Value] = {}
    new: dict[str, Value] = {}
    for name, number in after.contents.items():
        if before.contents.get(name, number) != number:
            old.update(before.section(name))
            new.update(after.section(name))
    return old, new


def _results(before: NodeLook, after: NodeLook) -> Iterator[Change]:
    """The checks with another status; ok and na both mean that there is no finding."""
    for check, result in after.results.items():
        earlier = before.results.get(check, result)
        statuses = {earlier.status, result.status}
        if len(statuses) == 2 and statuses != {"ok", "na"}:
            yield Change(RESULT, check, earlier.status, result.status, result.actual)


# --- The policy.


def _policy_differences(before: NodeLook, after: NodeLook) -> tuple[set[str], set[str]]:
    """The settings that differ, and the subjects that the two looks asked different things."""
    settings, requested = set[str](), set[str]()
    for owner, words in after.policies.items():
        changed = changed_words(before.policies.get(owner, words), words)
        if ASKED in changed:
            requested.add(owner)
        settings |= changed - {ASKED}
    return settings, requested


def _is_of_policy(change: Change, settings: Collection[str]) -> bool:
    """Whether a result has another status because the policy has one of these other settings."""
    if not settings or change.key == ANSWER:
        return False
    if WAIVERS in settings and "waived" in (change.before, change.after):
        return True
    try:
        deciding = page(change.key).settings
    except KeyError:
        deciding = ()
    return not {change.key, *deciding}.isdisjoint(settings)


# --- Facts.


class _FactChanges:
    def __init__(self, before: Facts, after: Facts) -> None:
        self._before, self._after = before, after

    def changes(self, requested: Collection[str]) -> Iterator[Change]:
        """The changes of parts, of elements that came or went, and of single facts. requested: the
        subjects whose facts the two looks requested differently: a fact of one look alone is no
        change
        """
        before, after = self._before, self._after
        keys = [key for key, value in after.items() if before.get(key) != value]
        keys += [key for key in before if key not in after]
        owners: dict[str, list[str]] = {}
        for key in keys:
            if (owner := self._owner(key)) is not None:
                owners.setdefault(owner, []).append(key)
        for owner, changed in owners.items():
            identities = self._identities(owner)
            if identities is not None:
                yield self._part_change(owner, changed, *identities)
            elif owner.partition(".")[0] in requested and not (owner in before and owner in after):
                continue
            elif owner != changed[0]:
                # The place on the PCI bus of a GPU that came or went follows from the GPU.
                address = owner.removeprefix("gpus.pci")
                parts = (f"gpus.nvidia{address}", f"gpus.amd{address}")
                if owner == address or owners.keys().isdisjoint(parts):
                    was_there = changed[0] in before
                    values = ("present", "absent") if was_there else ("absent", "present")
                    yield Change(kind_of(owner), owner, *values)
            elif not _is_same(owner, before.get(owner), after.get(owner), after):
                yield Change(kind_of(owner), owner, before.get(owner), after.get(owner))

    @cached_property
    def _groups(self) -> tuple[frozenset[str], frozenset[str]]:
        return _groups(self._before), _groups(self._after)

    def _owner(self, key: str) -> str | None:
        """The changed part, element or key; None: a subject that only one look has."""
        elements = [*_elements(key)]
        if key in self._before and key in self._after:
            groups = None
        else:
            groups = self._groups[key in self._before]
            if key.partition(".")[0] not in groups:
                return None
        if elements and self._identities(elements[0]) is not None:
            return elements[0]
        came_or_went = (e for e in elements if groups is not None and e not in groups)
        return next(came_or_went, key)

    def _identities(self, element: str) -> tuple[Value, Value] | None:
        """The different parts that are in one place before and after; None: the same part."""
        _, names, always, _ = _PARTS.get(element.partition("[")[0], _NO_PARTS)
        for name in names:
            sides = self._before, self._after
            old, new = (_identity(facts, f"{element}.{name}") for facts in sides)
            if old is not None and new is not None:
                return None if old == new else (old, new)
            was_there, is_there = (f"{element}.{always}" in facts for facts in sides)
            if old != new and was_there != is_there:
                return old, new
        return None

    def _part_change(self, part: str, keys: Iterable[str], old: Value, new: Value) -> Change:
        """The change of a part, with the facts in which the new part differs from the old part."""
        note = "new" if old is None else "gone"
        if old is not None and new is not None:
            sides, differing = (self._before, self._after), []
            for key in (key for key in keys if not is_unique(key)):
                before, after = (shown_value(key, facts.get(key)) for facts in sides)
                differing.append(f"{key[len(part) + 1 :]} {before} -> {after}")
            note = "; ".join(("replaced", *differing[:_MAX_ALSO]))
            if len(differing) > _MAX_ALSO:
                note += f" and {len(differing) - _MAX_ALSO} more"
        return Change(HARDWARE, part, old, new, note, _PARTS[part.partition("[")[0]].noun)


def _groups(facts: Facts) -> frozenset[str]:
    return frozenset(group for key in facts for group in (key.partition(".")[0], *_elements(key)))


def _elements(key: str) -> Iterator[str]:
    """The elements that a key is in, the outermost first."""
    end = key.find("]")
    while end >= 0:
        yield key[: end + 1]
        end = key.find("]", end + 1)


def _identity(facts: Facts, key: str) -> Value:
    element = key.rpartition(".")[0]
    if element.startswith("nics.") and facts.get(f"{element}.kind") not in _PHYSICAL:
        return None
    return facts.get(key)


def _is_same(key: str, before: Value, after: Value, facts: Facts) -> bool:
    if key.endswith(".memory_total_mb") and isinstance(before, int) and isinstance(after, int):
        return abs(after - before) <= _SAME_MEMORY * before
    if key == "host.cmdline":
        old, new = (_BOOT_IMAGE.sub("", str(value)) for value in (before, after))
        return old == new
    element, _, name = key.rpartition(".")
    if name == "index" and element.startswith("gpus."):
        return True  # GPUs are numbered anew when one is missing
    is_interface = element.startswith("nics.interfaces[")
    return is_interface and name == "mac" and facts.get(f"{element}.kind") not in _PHYSICAL


# --- Names that changed.


def _renames(parts: str, before: Facts, after: Facts) -> dict[str, str]:
    """Old name -> new name, of the parts of a list that are the same as before."""
    end = f"].{_PARTS[parts].identities[0]}"
    keys = [key for key in after if key.startswith(parts) and key.endswith((end, "].pci_address"))]
    if all(before.get(key) == after[key] for key in keys):
        return {}
    renamed: dict[str, str] = {}
    # The ports of a bond share its address: then the slot tells them apart.
    for with_slot in (False, True):
        old_names = _names(parts, end, before, with_slot)
        for identity, names in _names(parts, end, after, with_slot).items():
            earlier = old_names.get(identity, [])
            if len(names) == len(earlier) == 1 and names != earlier:
                renamed.setdefault(earlier[0], names[0])
    return renamed


def _names(
    parts: str, end: str, facts: Facts, with_slot: bool
) -> dict[tuple[Value, ...], list[str]]:
    names: dict[tuple[Value, ...], list[str]] = {}
    for key, value in facts.items():
        if not (key.startswith(parts) and key.endswith(end)) or _identity(facts, key) is None:
            continue
        element = key.rpartition(".")[0]
        identity = (value, facts.get(f"{element}.pci_address")) if with_slot else (value,)
        names.setdefault(identity, []).append(element[len(parts) + 1 : -1])
    return names


def _renamed(look: NodeLook, names: Mapping[str, str]) -> NodeLook:
    pattern = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, names))})(?![\w-])")

    def new(text: str) -> str:
        return pattern.sub(lambda match: names[match[1]], text)

    facts = dict[str, Value]()
    for key, value in look.facts.items():
        is_named = key.startswith(("nics.", "rdma."))
        text = new(value) if is_named and isinstance(value, str) else value
        facts[new(key) if is_named else key] = text
    counters = {}
    for key, total in look.counters.items():
        subject, _, name = key.partition(".")
        counters[f"{subject}.{new(name)}" if subject in ("nics", "rdma") else key] = total
    return replace(look, facts=facts, counters=counters)


# --- Counters.


def _counter_changes(
    before: Mapping[str, int], after: Mapping[str, int], is_same_boot: bool
) -> Iterator[Change]:
    """The counters that grew, were reset, or have counted in the new boot."""
    has_gpus = any(key.startswith("gpus.") for key in before)
    for key, total in after.items():
        earlier = before.get(key)
        if earlier is None and key.startswith("gpus.") and has_gpus:
            earlier = 0  # a fault in the kernel's log has a counter from its first line on
        if earlier is None or total == earlier == 0:
            continue
        if not is_same_boot:
            if total > (earlier if key.endswith(_COUNT_AT_BOOT) else 0):
                yield Change(COUNTER, key, earlier, total, f"{total} since the boot")
        elif total > earlier:
            yield Change(COUNTER, key, earlier, total, f"{total - earlier} more")
        elif total < earlier:
            note = "smaller in the same boot: it wrapped or was reset"
            yield Change(COUNTER, key, earlier, total, note)
