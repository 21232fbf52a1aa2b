"""Rules as ``nft list`` prints them (nft(8)), read into the rules of `netfilter`.

The conditions of a new TCP connection are understood; a condition of any other kind is uncertain,
so that its rule may apply or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nodeready.subjects.ports.netfilter import UNCERTAIN, Chain, Match, Rule, Ruleset

# --- The text of ``nft list``: its blocks and statements, its sets and maps.

Tokens = list[str]
#: An element of a set, one part per selector, and the verdict that a map gives for it.
Element = tuple[tuple[str, ...], Tokens]

_TOKEN = re.compile(r'"[^"\n]*"|# xt_\w+|#[^\n]*|[{}(),;\n]|[^\s{}(),;"]+|"')
#: What may follow an element of a set.
_ELEMENT_END = {"timeout", "expires", "comment", "counter", "limit", "quota", "last"}


def tokens(text: str) -> Tokens:
    """The words, brackets and line ends of the text."""
    return _TOKEN.findall(text)


@dataclass(frozen=True)
class SetOf:
    """A set or map; ``elements``: None when packets or timeouts change the set."""

    elements: tuple[Element, ...] | None


def statements(words: Tokens) -> Iterator[Tokens]:
    """The statements of a block; a line end or a semicolon ends one, but not inside braces."""
    depth = 0
    current: Tokens = []
    for token in words:
        depth += (token in "{(") - (token in "})")
        if token in "\n;" and depth <= 0:
            if current:
                yield current
            current = []
        elif not token.startswith("#") or token.startswith("# xt_"):
            current.append(token)
    if current:
        yield current


def rule_block(statement: Tokens) -> tuple[Tokens, Tokens] | None:
    """``chain input {...}`` as its words and what is inside; None for a plain statement."""
    if "{" not in statement or statement[-1] != "}":
        return None
    at = statement.index("{")
    return statement[:at], statement[at + 1 : -1]


def _split(words: Tokens, by: str) -> list[Tokens]:
    """Pieces between separators that are not inside braces."""
    pieces: list[Tokens] = [[]]
    depth = 0
    for token in words:
        depth += (token in "{(") - (token in "})")
        if token == by and depth == 0:
            pieces.append([])
        elif token != "\n":
            pieces[-1].append(token)
    return [piece for piece in pieces if piece]


def key(words: Tokens) -> tuple[str, ...]:
    """One element, ``10.0.0.1 . tcp . 80``, as its parts."""
    parts = []
    for piece in _split(words, "."):
        word = piece[0].strip('"')
        parts.append(word if len(piece) == 1 or piece[1] in _ELEMENT_END else "?")
    return tuple(parts)


def elements(inside: Tokens) -> tuple[Element, ...]:
    """What stands between the braces of a set or map."""
    found: list[Element] = []
    for piece in _split(inside, ","):
        halves = _split(piece, ":")
        if halves:
            found.append((key(halves[0]), halves[1] if len(halves) > 1 else []))
    return tuple(found)


def read_set(inside: Tokens) -> SetOf:
    """The set or map whose block this is."""
    found: tuple[Element, ...] = ()
    for statement in statements(inside):
        if statement[0] == "elements" and "{" in statement:
            found = elements(statement[statement.index("{") + 1 : -1])
        elif statement[0] == "timeout" or (statement[0] == "flags" and "dynamic" in statement):
            return SetOf(None)
    return SetOf(found)


def group(words: Tokens, at: int) -> int:
    """The index behind the bracket that closes the bracket at ``at``."""
    depth = 0
    for index in range(at, len(words)):
        depth += (words[index] in "{(") - (words[index] in "})")
        if depth == 0:
            return index + 1
    return len(words)


def listed(words: Tokens, at: int) -> tuple[Tokens, int]:
    """The words of ``a,b,c``, or of ``(a | b | c)``, and the index behind them."""
    if words[at : at + 1] == ["("]:
        end = group(words, at)
        return [t for t in words[at + 1 : end - 1] if t != "|"], end
    found = words[at : at + 1]
    at += 1
    while words[at : at + 1] == [","] and at + 1 < len(words):
        found.append(words[at + 1])
        at += 2
    return found, at


# --- The rules of a chain, and the chains of a table.

_VERDICTS = ("accept", "drop", "return", "continue", "reject", "jump", "goto", "queue")
#: Statements that hand the packet to another program, outside of NAT chains.
_ELSEWHERE = ("queue", "tproxy", "synproxy")
_HEADERS = {
    "tcp", "udp", "th", "ip", "ip6", "icmp", "icmpv6", "sctp", "dccp", "udplite", "esp", "ah",
    "comp", "igmp", "ether", "vlan", "arp", "gre", "vxlan", "hbh", "frag", "mh", "rt",
}  # fmt: skip
_META = {
    "iif", "iifname", "iifgroup", "iiftype", "oif", "oifname", "mark", "pkttype", "skuid",
    "skgid", "l4proto", "nfproto", "protocol", "cpu", "priority", "length", "cgroup", "secmark",
}  # fmt: skip
_CT = {"state", "status", "direction", "mark", "zone", "expiration", "helper", "label", "id"}
_SETS = ("set", "map")
_STATEMENT = re.compile(r"(limit|quota|meter|add|update|delete|dup|fwd|numgen|notrack|flow)")
#: Targets of iptables that leave the packet its way (iptables-extensions(8)).
_HARMLESS = {
    "LOG", "NFLOG", "ULOG", "MARK", "CONNMARK", "CT", "NOTRACK", "TCPMSS", "AUDIT", "SET", "TOS",
    "CHECKSUM", "CLASSIFY", "DSCP", "TTL", "HL", "TRACE", "RATEEST", "SECMARK", "CONNSECMARK",
}  # fmt: skip

Values = tuple[tuple[str, ...], ...]


def _selector(tokens: Tokens, at: int) -> tuple[str, int]:
    """The selector of a condition, and the index of its value; "" for an unknown selector."""
    word, following = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else ""
    if word == "meta" and following in _META:
        return ("iifname" if following == "iif" else following), at + 2
    if word in _META:
        return ("iifname" if word == "iif" else word), at + 1
    if word == "ct" and following in _CT:
        return f"ct {following}", at + 2
    if word == "fib":
        end = at + 1
        while end < len(tokens) and tokens[end] not in ("type", "oif", "oifname", "check"):
            end += 1
        what = tokens[at + 1 : end]
        if "saddr" in what and tokens[end : end + 1] != ["type"]:
            return "reverse path", end + 1
        if what == ["daddr"] and tokens[end : end + 1] == ["type"]:
            return "fib daddr type", end + 1
        return "fib", end + 1
    if word in _HEADERS and re.fullmatch(r"[a-z][a-z0-9_-]*", following):
        return f"{word} {following}", at + 2
    return "", at + 1


def _compared(operator: str, value: str) -> str:
    """``< 1024`` as a range; "?" for what is no number."""
    if not re.fullmatch(r"\d{1,5}", value):
        return "?"
    number = int(value)
    low, high = {
        "<": (0, number - 1), "<=": (0, number), ">": (number + 1, 65535), ">=": (number, 65535),
    }[operator]  # fmt: skip
    return f"{low}-{high}" if 0 <= low <= high else "?"


class _RuleReader:
    """Reads one rule of a chain."""

    def __init__(self, tokens: Tokens, sets: Mapping[str, SetOf]) -> None:
        self.tokens = [token for token in tokens if token != "\n"]
        self.sets = sets
        self.matches: list[Match] = []
        self.rules: list[Rule] = []
        self.marks = False
        self.text = _text(self.tokens)

    def read(self) -> list[Rule]:
        at = 0
        while at < len(self.tokens):
            at = self._statement(at)
        return self.rules

    def _verdict(self, words: Tokens, more: tuple[Match, ...] = ()) -> None:
        word = words[0] if words else ""
        target = words[1] if word in ("jump", "goto") and len(words) > 1 else ""
        verdict = {"reject": "drop"}.get(word, "elsewhere" if word in _ELSEWHERE else word)
        if verdict in ("accept", "drop", "return", "jump", "goto", "elsewhere"):
            self.rules.append(Rule((*self.matches, *more), verdict, target, self.text))

    def _statement(self, at: int) -> int:
        """Read the statement at ``at``. Returns the index of the next one."""
        word = self.tokens[at]
        if word in _VERDICTS or word in _ELSEWHERE:
            self._verdict(self.tokens[at:])
            # The words behind a verdict only describe it.
            return len(self.tokens)
        if word == "counter":
            return at + (5 if self.tokens[at + 1 : at + 2] == ["packets"] else 1)
        if word == "comment":
            return at + 2
        if word == "log":
            return self._skip(at + 1)
        if word.startswith("# xt_"):
            return self._extension(word[len("# xt_") :], at + 1)
        if word == "xt" and self.tokens[at + 1 : at + 2] in (["match"], ["target"]):
            return self._extension("".join(self.tokens[at + 2 : at + 3]).strip('"'), at + 3)
        if _STATEMENT.fullmatch(word):
            if word != "notrack":
                self.matches.append(UNCERTAIN)
            return self._skip(at + 1)
        return self._condition(at)

    def _extension(self, name: str, at: int) -> int:
        """Read a match or target of iptables that nft cannot show; targets are in capitals."""
        if not name.isupper():
            self.matches.append(UNCERTAIN)
        elif name in _HARMLESS:
            self.marks = self.marks or "MARK" in name
        else:
            self._verdict(["reject" if name == "REJECT" else "queue"])
        return at

    def _skip(self, at: int) -> int:
        """Pass over the words of a statement, up to a verdict."""
        while at < len(self.tokens) and self.tokens[at] not in _VERDICTS:
            at = group(self.tokens, at) if self.tokens[at] == "{" else at + 1
        return at

    def _condition(self, at: int) -> int:
        selectors = []
        while True:
            selector, at = _selector(self.tokens, at)
            selectors.append(selector)
            if self.tokens[at : at + 1] != ["."] or at + 1 >= len(self.tokens):
                break
            at += 1
        if self.tokens[at : at + 1] == ["set"]:
            self.marks = self.marks or "mark" in selectors or "ct mark" in selectors
            return self._skip(at + 1)
        if not all(selectors):
            self.matches.append(UNCERTAIN)
            return at
        return self._value(tuple(selectors), at)

    def _value(self, selectors: tuple[str, ...], at: int) -> int:
        """Read the operator and value of a condition, or the map that gives the verdict."""
        mask: Tokens | None = None
        if self.tokens[at : at + 1] == ["&"]:
            mask, at = listed(self.tokens, at + 1)
        operator = "=="
        if self.tokens[at : at + 1] and self.tokens[at] in (
            "==", "!=", "<", ">", "<=", ">=", "!", "vmap",
        ):  # fmt: skip
            operator = self.tokens[at]
            at += 1
        if at >= len(self.tokens):
            self.matches.append(UNCERTAIN)
            return at
        token = self.tokens[at]
        if token == "{" or token.startswith("@"):
            end = group(self.tokens, at) if token == "{" else at + 1
            inside = self.tokens[at + 1 : end - 1]
            given = SetOf(elements(inside)) if token == "{" else self.sets.get(token[1:])
            self._lookup(selectors, operator, given or SetOf(None))
            return end
        if len(selectors) > 1:
            end = at + 2 * len(selectors) - 1
            values: Values = (key(self.tokens[at:end]),)
            self.matches.append(Match(selectors, values, operator == "!="))
            return end
        words, at = listed(self.tokens, at)
        if self.tokens[at : at + 1] == ["/"]:
            mask, at = listed(self.tokens, at + 1)
        self.matches.append(_plain(selectors[0], operator, words, mask))
        return at

    def _lookup(self, selectors: tuple[str, ...], operator: str, given: SetOf) -> None:
        if operator != "vmap":
            known = given.elements
            values = tuple(key for key, _ in known) if known is not None else ()
            found = Match(selectors, values, operator == "!=")
            self.matches.append(UNCERTAIN if known is None else found)
            return
        if given.elements is None:
            self.rules.append(Rule((*self.matches, UNCERTAIN), "elsewhere", "", self.text))
            return
        # The keys of a map exclude each other: a rule for each key is the same as the map.
        for key, verdict in given.elements:
            values = () if key == ("*",) else (key,)
            match = UNCERTAIN if key == ("*",) else Match(selectors, values)
            self._verdict(verdict, (match,))


def _plain(selector: str, operator: str, words: Tokens, mask: Tokens | None) -> Match:
    """A condition on one value, or on a list of flags of which one must be set."""
    values = [word.strip('"') for word in words]
    if mask is not None:
        if selector == "tcp flags" and operator in ("==", "!="):
            flags = "" if values == ["0x0"] else ",".join(values)
            return Match((selector,), ((f"{flags}/{','.join(mask)}",),), operator == "!=")
        if selector == "mark" and operator in ("==", "!="):
            return Match((selector,), ((f"{values[0]}/{mask[0]}",),), operator == "!=")
        return UNCERTAIN
    if operator in ("<", ">", "<=", ">="):
        return Match((selector,), ((_compared(operator, values[0]),),))
    if operator == "!":
        return Match((selector,), tuple((value,) for value in values), negated=True)
    return Match((selector,), tuple((value,) for value in values), operator == "!=")


def _text(tokens: Tokens) -> str:
    """A rule in one line, without its counters."""
    line = re.sub(r" ([,;])", r"\1", " ".join(tokens))
    return re.sub(r" ?counter( packets \d+ bytes \d+)?", "", line).strip()[:160]


def _chain(table: str, name: str, inside: Tokens, sets: Mapping[str, SetOf]) -> tuple[Chain, bool]:
    hook, policy, nat, marks = "", "accept", False, False
    rules: list[Rule] = []
    for statement in statements(inside):
        words = [token for token in statement if token != "\n"]
        if not words or words[0] in ("comment", "flags"):
            continue
        if words[0] == "type":
            if len(words) < 4 or "hook" not in words[:-1]:
                raise ValueError("a chain that makes no sense")
            hook, nat = words[words.index("hook") + 1], words[1] == "nat"
        elif words[0] == "policy":
            policy = words[-1]
            if policy not in ("accept", "drop"):
                raise ValueError("a policy that makes no sense")
        else:
            reader = _RuleReader(words, sets)
            rules += reader.read()
            marks = marks or reader.marks
    # What NAT does is not judged here.
    hook = "" if nat else hook
    return Chain(table, name, tuple(rules), hook, policy), marks


def parse(text: str) -> Ruleset:
    """The chains of the tables that ``nft list`` printed.

    Lines of another kind are passed over. Raises ValueError when nothing else is there, and for
    a table that makes no sense or has no end.
    """
    chains: dict[tuple[str, str], Chain] = {}
    marks = False
    found = list(statements(tokens(text)))
    tables = [statement for statement in found if statement[0] == "table"]
    if found and not tables:
        raise ValueError("no table in what nft printed")
    for statement in tables:
        block = rule_block(statement)
        if block is None or len(block[0]) != 3 or statement.count("{") != statement.count("}"):
            raise ValueError("a table that makes no sense")
        table = " ".join(block[0][1:])
        parts = list(statements(block[1]))
        if any(part[0] == "flags" and "dormant" in part for part in parts):
            continue
        inner = [one for part in parts if (one := rule_block(part)) and len(one[0]) > 1]
        sets = {head[1]: read_set(body) for head, body in inner if head[0] in _SETS}
        for head, body in inner:
            if head[0] == "chain":
                chain, sets_mark = _chain(table, head[1], body, sets)
                chains[table, head[1]] = chain
                marks = marks or sets_mark
    return Ruleset(chains, marks)
