"""Rules as ``iptables-save`` prints them, and as `netfilter` evaluates them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from nodeready.probes.netfilter import UNCERTAIN, Chain, Match, Rule, Ruleset

#: The hook of each built-in chain that a packet for this node passes (iptables(8)).
_HOOKS = {"PREROUTING": "prerouting", "INPUT": "input"}
_TARGETS = {
    "ACCEPT": "accept",
    "DROP": "drop",
    "REJECT": "drop",
    "TARPIT": "drop",
    "RETURN": "return",
    "QUEUE": "elsewhere",
    "NFQUEUE": "elsewhere",
    "TPROXY": "elsewhere",
}
#: Options with one value, and what they look at.
_SELECTORS = {
    "-p": "l4proto",
    "-i": "iifname",
    "--dport": "tcp dport",
    "--dports": "tcp dport",
    "--sport": "tcp sport",
    "--sports": "tcp sport",
    "--ctstate": "ct state",
    "--state": "ct state",
    "--dst-type": "fib daddr type",
    "--pkt-type": "pkttype",
    "--mark": "mark",
    "--ctdir": "ct direction",
}
#: Modules that say nothing by themselves: their options do.
_PLAIN = {
    "tcp", "udp", "conntrack", "state", "multiport", "addrtype", "pkttype", "mark", "comment",
    "set", "limit", "icmp", "icmp6", "iprange", "connmark", "owner",
}  # fmt: skip
#: Modules for headers that the packet does not have.
_LACKED = {"rt", "frag", "hbh", "dst", "mh", "ah", "esp", "sctp", "dccp"}
_NEVER = Match(("udp ",))
_ONLY_SYN = "syn/fin,syn,rst,ack"


def _values(text: str, selector: str) -> tuple[tuple[str, ...], ...]:
    if selector == "iifname":
        return ((text,),)
    parts = (part.replace(":", "-") for part in text.split(","))
    return tuple((part,) for part in parts)


def _matches(words: list[str], ip: str) -> Iterator[Match]:
    """The conditions among a rule's words, its target excluded."""
    index, negated = 0, False
    while index < len(words):
        word = words[index]
        following = words[index + 1] if index + 1 < len(words) else ""
        index += 2
        if word == "!":
            negated, index = True, index - 1
            continue
        if word in _SELECTORS:
            selector = _SELECTORS[word]
            if word == "-p" and not negated and following not in ("tcp", "6", "all"):
                # Another protocol's ports must not be taken for ours.
                yield _NEVER
            yield Match((selector,), _values(following, selector), negated)
        elif word in ("-s", "-d"):
            yield Match(
                (f"{ip} {'saddr' if word == '-s' else 'daddr'}",), ((following,),), negated
            )
        elif word == "--tcp-flags":
            flags = words[index] if index < len(words) else ""
            yield Match(("tcp flags",), ((f"{flags}/{following}",),), negated)
            index += 1
        elif word == "--syn":
            yield Match(("tcp flags",), ((_ONLY_SYN,),), negated)
            index -= 1
        elif word == "-m" and following == "rpfilter":
            inverted = "--invert" in words[index:]
            yield Match(("reverse path",), (("missing" if inverted else "exists",),))
            words = [w for w in words if w not in ("--invert", "--loose", "--validmark")]
        elif word == "-m":
            if following in _LACKED:
                yield _NEVER
            elif following not in _PLAIN:
                yield UNCERTAIN
        else:
            yield UNCERTAIN
            index -= 1
        negated = False


def _rule(words: list[str], ip: str, text: str) -> Rule | None:
    """The rule of the words behind ``-A CHAIN``; None for one that decides nothing."""
    while "--comment" in words:
        at = words.index("--comment")
        words = words[:at] + words[at + 2 :]
    for option in ("-j", "-g"):
        if option in words:
            at = words.index(option)
            target = words[at + 1] if at + 1 < len(words) else ""
            break
    else:
        return None
    matches = tuple(_matches(words[:at], ip))
    if option == "-g":
        return Rule(matches, "goto", target, text)
    verdict = _TARGETS.get(target, "jump")
    return Rule(matches, verdict, target if verdict == "jump" else "", text)


def parse(text: str, family: int) -> Ruleset:
    """The rules of one family (4, 6). Targets that are no chain (LOG, MARK) decide nothing.

    Raises ValueError when there is text, and no whole table in it.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and "COMMIT" not in lines:
        raise ValueError("no whole table in what iptables-save printed")
    ip = "ip" if family == 4 else "ip6"
    table = ""
    bases: dict[tuple[str, str], str] = {}
    rules: dict[tuple[str, str], list[Rule]] = {}
    marks = False
    for line in lines:
        if line.startswith("*"):
            table = f"{ip} {line[1:].strip()}"
        elif line.startswith(":") and table:
            name, _, rest = line[1:].partition(" ")
            rules[table, name] = []
            if name in _HOOKS and table != f"{ip} nat":
                bases[table, name] = rest.partition(" ")[0].lower()
        elif line.startswith("-A ") and table:
            try:
                words = shlex.split(line)[1:]
            except ValueError:
                # A quote without its end: what the rule asks is unknown, what it does is not.
                words = line.split()[1:]
                words[1:1] = ["--unreadable"]
            rule = _rule(words[1:], ip, " ".join(words[1:])[:160]) if words else None
            marks = marks or "MARK" in words or "CONNMARK" in words
            if rule is not None:
                rules.setdefault((table, words[0]), []).append(rule)
    chains = {}
    for key, found in rules.items():
        hook, policy = ("", "")
        if key in bases:
            hook, policy = _HOOKS[key[1]], bases[key]
        chains[key] = Chain(*key, tuple(found), hook, policy if policy == "drop" else "accept")
    return Ruleset(chains, marks)
