"""The fate of a job's connections: walks each packet through the chains of a ruleset.

A packet meets a rule's condition for certain (YES, NO) or not (MAYBE: it depends on the moment, or
on another program). By nft(8) and iptables(8), a dropped packet is gone, and an accepted packet
enters the next base chain, in the order of hooks and priorities. A packet at the end of a base
chain gets the chain's policy. The walk follows marks and notrack. It does not cover XDP and other
eBPF programs, filters of bridges and of ARP, and filters outside the node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from nodeready.subjects.parsed_template import fast_replace
from nodeready.subjects.ports.packets import (
    ALL_BITS,
    MAYBE,
    NO,
    PACKETS,
    YES,
    Packet,
    PacketKind,
    State,
    ports_of,
)
from nodeready.subjects.ports.port_ranges import Range
from nodeready.subjects.ports.rules import CHANGES, CONNTRACK_PRIORITY, Chain, Rule, Ruleset

#: Maximum of pieces of a range of ports that are evaluated one by one.
_MOST_PIECES = 64
#: Maximum of a packet's states that are distinguished; with more states, the marks are unknown.
_MOST_STATES = 16


@dataclass(frozen=True)
class RuleCause:
    """A rule, or a policy, that decides.

    is_certain: every packet that reaches the rule meets it
    how:        its effect on the packet
    varies:     as of a `RuleMatch`
    """

    chain: str
    text: str
    is_certain: bool
    how: str = "dropped by"
    varies: bool = False


# A possible fate ("accept", "drop", "elsewhere", or "end": the packet left the chain undecided)
# and the packet's state then -> the first cause.
_Fates = dict[tuple[str, State], RuleCause]


def _keep_cause(fates: _Fates, fate: tuple[str, State], cause: RuleCause) -> None:
    """Keep the first cause of a fate, or the first certain cause."""
    earlier = fates.get(fate)
    if earlier is None or (cause.is_certain and not earlier.is_certain):
        fates[fate] = cause


def _change_state(verdict: str, target: str, state: State) -> State:
    if verdict == "notrack":
        return replace(state, untracked=True)
    if verdict in ("restore", "save"):
        mask = int(target, 16) if target else ALL_BITS
        new, old = state.ct_mark, state.mark
        if verdict == "save":
            new, old = old, new
        new = ((old[0] & ~mask) | (new[0] & mask), (old[1] & ~mask) | (new[1] & mask))
        return _with_mark(state, new, is_ct=verdict == "save")
    old = state.mark if verdict == "mark" else state.ct_mark
    keep_text, _, flip_text = target.partition("/")
    if not flip_text:
        new = (0, 0)
    else:
        keep, flip = int(keep_text, 16), int(flip_text, 16)
        known_bits = (old[1] | ~keep) & ALL_BITS
        new = (((old[0] & keep) ^ flip) & known_bits, known_bits)
    return _with_mark(state, new, is_ct=verdict == "ct_mark")


def _with_mark(state: State, mark: Range, *, is_ct: bool) -> State:
    return replace(state, ct_mark=mark) if is_ct else replace(state, mark=mark)


def _bound_states(states: Collection[State]) -> list[State]:
    """The states, without their marks where there are too many states."""
    if len(states) <= _MOST_STATES:
        return list(states)
    return [State((0, 0), (0, 0), untracked) for untracked in {s.untracked for s in states}]


class _PacketWalk:
    """One packet's possible paths through the chains of a ruleset."""

    def __init__(self, rules: Ruleset, packet: Packet) -> None:
        self.rules, self.packet = rules, packet
        self.fates: dict[tuple[str, str, State, bool], _Fates] = {}
        self.packets: dict[tuple[State, bool], Packet] = {}
        self.depth = 0
        self.doubt: RuleCause | None = None

    def fates_in_chain(self, chain: Chain, state: State, tracked: bool) -> _Fates:
        """The packet's possible fates in the chain."""
        key = (chain.table, chain.name, state, tracked)
        # The kernel refuses loops and more than 16 levels: a ruleset in force has neither.
        if key not in self.fates:
            endless = RuleCause(chain.name, "jumps without end", False)
            if self.depth > 16:
                return {("elsewhere", state): endless}
            self.fates[key] = {("elsewhere", state): endless, ("end", state): endless}
            self.depth += 1
            self.fates[key] = self._fates_by_rules(chain, state, tracked)
            self.depth -= 1
        return self.fates[key]

    def _fates_by_rules(self, chain: Chain, start: State, tracked: bool) -> _Fates:
        fates: _Fates = {}
        name = f"{chain.table} {chain.name}"
        undecided = [start]
        end = RuleCause(name, "end", True)
        for rule in chain.rules:
            continuing: dict[State, None] = {}
            for state in undecided:
                packet = self._packet(state, tracked)
                answer = rule.answer(packet)
                if answer != YES:
                    continuing[state] = None
                if answer == NO:
                    continue
                is_certain = answer == YES
                if rule.verdict in CHANGES:
                    continuing[_change_state(rule.verdict, rule.target, state)] = None
                elif rule.verdict == "return":
                    _keep_cause(fates, ("end", state), end)
                    self._keep_doubt(rule, name, is_certain)
                elif rule.verdict in ("jump", "goto"):
                    target = self.rules.chains.get((chain.table, rule.target))
                    if target:
                        self._keep_doubt(rule, name, is_certain)
                    inner = (
                        self.fates_in_chain(target, state, tracked)
                        if target
                        else {("end", state): end}
                    )
                    for (fate, after), cause in inner.items():
                        if fate == "end" and rule.verdict == "jump":
                            continuing[after] = None
                        else:
                            is_sure = cause.is_certain and is_certain
                            _keep_cause(fates, (fate, after), replace(cause, is_certain=is_sure))
                else:
                    fate, how = rule.verdict, "dropped by"
                    if fate == "divert":
                        fate, how = self._divert_fate(rule.target, packet), "led elsewhere by"
                    _keep_cause(fates, (fate, state), RuleCause(name, rule.text, is_certain, how))
                    self._keep_doubt(rule, name, is_certain)
            undecided = _bound_states(continuing)
            if not undecided:
                return fates
        for state in undecided:
            _keep_cause(fates, ("end", state), end)
        return fates

    def _keep_doubt(self, rule: Rule, chain: str, is_certain: bool) -> None:
        """Keep the first rule that cannot be evaluated, or the first rule that varies."""
        if is_certain or (self.doubt is not None and (self.doubt.varies or not rule.varies)):
            return
        self.doubt = RuleCause(chain, rule.text, is_certain, varies=rule.varies)

    def _packet(self, state: State, tracked: bool) -> Packet:
        key = (state, tracked)
        if key not in self.packets:
            self.packets[key] = replace(self.packet, state=state, tracked=tracked)
        return self.packets[key]

    def _divert_fate(self, target: str, packet: Packet) -> str:
        """The fate by NAT: accepted where NAT keeps the port and one of the node's addresses."""
        address, port = target, ""
        if target.count(":") == 1:
            address, port = target.split(":")
        if "?" in target:
            return "elsewhere"
        if port and ports_of(port) != (packet.first, packet.last):
            return "drop"
        return "accept" if not address or address in packet.addresses else "drop"

    def fates_in_base_chain(self, chain: Chain, state: State) -> _Fates:
        """The packet's possible fates in a base chain."""
        packet = self._packet(state, True)
        passage = chain.passage(packet)
        name = f"{chain.table} {chain.name}"
        passed = RuleCause(name, "policy accept", True)
        if passage == NO or (chain.is_nat and state.untracked):
            return {("accept", state): passed}
        tracked = chain.hook not in ("ingress", "egress") and not (
            chain.hook in ("prerouting", "output") and chain.priority < CONNTRACK_PRIORITY
        )
        fates: _Fates = {}
        end = RuleCause(name, f"policy {chain.policy}", True)
        for (fate, after), cause in self.fates_in_chain(chain, state, tracked).items():
            final, decider = (chain.policy, end) if fate == "end" else (fate, cause)
            is_certain = decider.is_certain and passage == YES
            _keep_cause(fates, (final, after), replace(decider, is_certain=is_certain))
        if passage == MAYBE:
            _keep_cause(fates, ("accept", state), passed)
        return fates


@dataclass(frozen=True)
class Fate:
    """The fate of connections on some ports.

    verdict: open, dropped, or cannot tell
    cause:   the rule that drops, or the rule that cannot be evaluated; None when open
    kind:    the affected packet
    varies:  whether the cause varies
    """

    first: int
    last: int
    verdict: str
    cause: RuleCause | None = None
    kind: PacketKind = PACKETS[0]

    @property
    def varies(self) -> bool:
        return self.cause is not None and self.cause.varies


def _packet_fate(rules: Ruleset, packet: Packet) -> tuple[Fate, list[State]]:
    """The packet's fate, and its possible states after the last chain."""
    walk = _PacketWalk(rules, packet)
    doubt: RuleCause | None = None
    states = [packet.state]
    for chain in rules.base_chains(packet):
        chain_fates: _Fates = {}
        for state in states:
            for fate, cause in walk.fates_in_base_chain(chain, state).items():
                _keep_cause(chain_fates, fate, cause)
        drops, accepts, elsewhere = (
            [cause for (fate, _), cause in chain_fates.items() if fate == name]
            for name in ("drop", "accept", "elsewhere")
        )
        if drops and not accepts and not elsewhere:
            return Fate(packet.first, packet.last, "dropped", drops[0], packet.kind), []
        if drops or elsewhere:
            # A certain drop takes all remaining packets: then the accepting rule is in doubt.
            unsure = [cause for cause in (*drops, *accepts) if not cause.is_certain]
            doubt = doubt or (elsewhere or unsure or [walk.doubt or drops[0]])[0]
        states = _bound_states(
            dict.fromkeys(state for fate, state in chain_fates if fate == "accept")
        )
        if not states:
            break
    verdict = "cannot tell" if doubt else "open"
    if doubt and walk.doubt and walk.doubt.varies:
        doubt = walk.doubt
    return Fate(packet.first, packet.last, verdict, doubt, packet.kind), states


def _alike_ranges(rules: Ruleset, first: int, last: int) -> list[Range]:
    """The pieces of the range within which every rule treats all ports alike."""
    starts: Sequence[int] = [first, *(port for port in rules.ports if first < port <= last)]
    return [(start, end - 1) for start, end in zip(starts, [*starts[1:], last + 1])]


def fates(rules: Ruleset, packet: Packet) -> Iterable[Fate]:
    """The fates of such connections, one for each piece of the packet's ports.

    A fate is that of the first packet that does not pass for certain.
    """
    ranges = _alike_ranges(rules, packet.first, packet.last)
    if len(ranges) > _MOST_PIECES:
        many = RuleCause("", f"{len(ranges)} pieces of it", False)
        return (Fate(packet.first, packet.last, "cannot tell", many),)
    most_sources = _MOST_PIECES // len(ranges)
    return [
        _range_fate(rules, fast_replace(packet, first=first, last=last), most_sources)
        for first, last in ranges
    ]


def _range_fate(rules: Ruleset, packet: Packet, most_sources: int) -> Fate:
    """The fate that connections from all source ports have, or a doubt.

    most_sources: the maximum of ranges of source ports that are evaluated one by one
    """
    fate = _worst_fate(rules, packet)
    if fate.verdict != "cannot tell":
        return fate
    sources = _source_ranges(rules, packet)
    if len(sources) > most_sources:
        return fate
    piece_fates = []
    for source in sources:
        piece_fate = _worst_fate(rules, fast_replace(packet, sources=(source,)))
        if piece_fate.verdict == "cannot tell":
            return fate if fate.varies else piece_fate
        piece_fates.append(piece_fate)
    dropped = [piece_fate for piece_fate in piece_fates if piece_fate.verdict == "dropped"]
    if dropped and len(dropped) < len(piece_fates):
        return replace(dropped[0], verdict="cannot tell")
    return piece_fates[0]


def _source_ranges(rules: Ruleset, packet: Packet) -> list[Range]:
    """One range for each group of source ports that the rules treat alike."""
    ranges_by_rules: dict[int, Range] = {}
    for first, last in packet.sources:
        for alike_range in _alike_ranges(rules, first, last):
            ranges_by_rules.setdefault(bisect_right(rules.ports, alike_range[0]), alike_range)
    return list(ranges_by_rules.values())


def _worst_fate(rules: Ruleset, packet: Packet) -> Fate:
    """The worst fate of a connection's packets."""
    worst = Fate(packet.first, packet.last, "open")
    lost, mark = False, State().ct_mark
    for kind in PACKETS:
        if kind.first:
            lost, mark = False, State().ct_mark
        kind_packet = fast_replace(packet, kind=kind, lost=lost, state=State(ct_mark=mark))
        fate, states = _packet_fate(rules, kind_packet)
        if fate.verdict == "dropped":
            return fate
        if fate.verdict == "cannot tell" and (worst.verdict == "open" or fate.varies):
            worst = fate
        if kind.first:
            # Connection tracking does not know a connection whose first packet was untracked.
            lost = bool(states) and all(state.untracked for state in states)
        marks = {state.ct_mark for state in states}
        mark = marks.pop() if len(marks) == 1 else (0, 0)
    return worst
