"""Rules as ``nft list`` prints them (nft(8)), read into the rules of `rules`.

The reader knows the conditions on TCP connections. Any other condition is uncertain, so that its
rule may apply or not. Of a set that packets change, the current elements count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from itertools import takewhile

from nodeready.subjects.ports.packets import ALL_BITS, number, span_of
from nodeready.subjects.ports.rules import (
    ALWAYS,
    NEVER,
    UNCERTAIN,
    VARYING,
    VARYING_MODULES,
    Chain,
    Rule,
    RuleMatch,
    Ruleset,
    connection_limit,
    nat_target,
    rate_limit,
)

# --- The text of ``nft list``: its blocks and statements, its sets and maps.

Tokens = list[str]
#: An element of a set, one part per selector, and the verdict that a map gives for it.
Element = tuple[tuple[str, ...], Tokens]
#: The current elements of a set or map.
Elements = tuple[Element, ...]

_TOKEN = re.compile(r'"[^"\n]*"|# xt_\w+|#[^\n]*|[{}(),;\n]|[^\s{}(),;"]+|"')
#: The words that may follow an element of a set.
_ELEMENT_END = {"timeout", "expires", "comment", "counter", "limit", "quota", "last"}


def tokens(text: str) -> Tokens:
    """The words, brackets and line ends of the text."""
    return _TOKEN.findall(text)


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


def split_block(statement: Tokens) -> tuple[Tokens, Tokens] | None:
    """``chain input {...}`` as its words and what is inside; None for a plain statement."""
    if "{" not in statement or statement[-1] != "}":
        return None
    index = statement.index("{")
    return statement[:index], statement[index + 1 : -1]


def _split(words: Tokens, by: str) -> list[Tokens]:
    """Pieces between separators that are not inside braces."""
    parts: list[Tokens] = [[]]
    depth = 0
    for token in words:
        depth += (token in "{(") - (token in "})")
        if token == by and depth == 0:
            parts.append([])
        elif token != "\n":
            parts[-1].append(token)
    return [part for part in parts if part]


def element_key(words: Tokens) -> tuple[str, ...]:
    """One element, ``10.0.0.1 . tcp . 80``, as its parts; "?" for an unknown part."""
    parts = []
    for part_words in _split(words, "."):
        words = list(takewhile(lambda word: word not in _ELEMENT_END, part_words))
        if len(words) > 2 and set(words[1::2]) == {"|"}:
            # Flags: ``syn | ack``.
            parts.append("|".join(words[::2]))
        else:
            parts.append(words[0].strip('"') if len(words) == 1 else "?")
    return tuple(parts)


def parse_elements(inside: Tokens) -> Elements:
    """The elements between the braces of a set or map."""
    elements = []
    for part in _split(inside, ","):
        halves = _split(part, ":")
        if halves:
            elements.append((element_key(halves[0]), halves[1] if len(halves) > 1 else []))
    return tuple(elements)


def parse_set(inside: Tokens) -> Elements:
    """The elements of the set or map of this block."""
    elements: Elements = ()
    for statement in statements(inside):
        if statement[0] == "elements" and "{" in statement:
            elements = parse_elements(statement[statement.index("{") + 1 : -1])
    return elements


def end_of_bracket(words: Tokens, start: int) -> int:
    """The index after the bracket that closes the bracket at ``start``."""
    depth = 0
    for index in range(start, len(words)):
        depth += (words[index] in "{(") - (words[index] in "})")
        if depth == 0:
            return index + 1
    return len(words)


def value_list(words: Tokens, index: int) -> tuple[Tokens, int]:
    """The words of ``a,b,c``, or of ``(a | b | c)``, and the index after them."""
    if words[index : index + 1] == ["("]:
        end = end_of_bracket(words, index)
        return [t for t in words[index + 1 : end - 1] if t != "|"], end
    values = words[index : index + 1]
    index += 1
    while words[index : index + 1] == [","] and index + 1 < len(words):
        values.append(words[index + 1])
        index += 2
    return values, index


# --- The rules of a chain, and the chains of a table.

_VERDICTS = ("accept", "drop", "return", "continue", "reject", "jump", "goto", "queue")
#: Statements that hand the packet to another program.
_ELSEWHERE = ("queue", "tproxy", "synproxy", "fwd")
_NAT = ("dnat", "redirect", "snat", "masquerade")
_HEADERS = {
    "tcp", "udp", "th", "ip", "ip6", "icmp", "icmpv6", "sctp", "dccp", "udplite", "esp", "ah",
    "comp", "igmp", "ether", "vlan", "arp", "gre", "gretap", "vxlan", "geneve", "hbh", "frag",
    "mh", "rt", "dst",
}  # fmt: skip
_META = {
    "iif", "iifname", "iifgroup", "iiftype", "oif", "oifname", "oifgroup", "oiftype", "mark",
    "pkttype", "skuid", "skgid", "l4proto", "nfproto", "protocol", "cpu", "priority", "length",
    "cgroup", "secmark", "rtclassid", "nftrace", "hour", "day", "time", "random", "iifkind",
    "oifkind", "sdif", "sdifname", "ibrname", "obrname", "ibridgename", "obridgename", "ipsec",
    "secpath",
}  # fmt: skip
_RENAMED = {
    "iif": "iifname", "oif": "oifname", "secpath": "ipsec", "rt ipsec": "ipsec",
    "tcp option mss": "tcp option maxseg",
}  # fmt: skip
_CT = {
    "state", "status", "direction", "mark", "zone", "expiration", "helper", "label", "id",
    "l3proto", "protocol", "bytes", "packets", "avgpkt", "saddr", "daddr", "proto-src",
    "proto-dst", "event", "timeout", "expectation", "secmark",
}  # fmt: skip
#: Selectors with a list of flags as value: one flag must be set.
_FLAG_SELECTORS = ("ct state", "ct status", "tcp flags", "ct label")
#: The words of a log statement that have a value.
_LOG_OPTIONS = ("prefix", "group", "snaplen", "queue-threshold", "level", "flags")
_LOG_FLAGS = {"tcp", "sequence", "options", "ip", "skuid", "ether", "all", ","}
#: Targets of iptables that do not decide about the packet (iptables-extensions(8)).
_HARMLESS = {
    "LOG", "NFLOG", "ULOG", "CT", "TCPMSS", "AUDIT", "SET", "TOS", "CHECKSUM", "CLASSIFY", "DSCP",
    "TTL", "HL", "TRACE", "RATEEST", "SECMARK", "CONNSECMARK", "TEE", "IDLETIMER", "LED", "ECN",
    "TCPOPTSTRIP", "ACCOUNT", "NOTRACK", "MARK", "CONNMARK",
}  # fmt: skip
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_SECONDS |= {"sec": 1, "min": 60, "s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"bytes": 1, "kbytes": 1024, "mbytes": 1 << 20, "gbytes": 1 << 30}
#: A rate of bytes as high as this is no rate limit for a rendezvous.
_MANY_BYTES = 1 << 20


def rate(text: str, burst: str = "") -> float | None:
    """``10/second`` as packets that pass in a second, with the burst; None for another text."""
    match = re.fullmatch(r"(\d{1,12})/(\w+)", text)
    unit = _SECONDS.get(match[2]) if match else None
    if match is None or unit is None:
        return None
    return max(int(match[1]) / unit, float(burst) if burst.isdigit() else 0)


def _selector(tokens: Tokens, index: int) -> tuple[str, int]:
    """The selector of a condition, and the index of its value; "" for an unknown selector."""
    word, following = tokens[index], tokens[index + 1] if index + 1 < len(tokens) else ""
    if word == "meta" and following in _META:
        return _RENAMED.get(following, following), index + 2
    if word in _META:
        return _RENAMED.get(word, word), index + 1
    if word == "ct" and following in ("original", "reply"):
        index += 2
        if tokens[index : index + 1] in (["ip"], ["ip6"]):
            index += 1
        last = tokens[index] if index < len(tokens) else ""
        return (f"ct {following} {last}" if last in _CT else ""), index + 1
    if word == "ct" and following in _CT:
        return f"ct {following}", index + 2
    if word == "fib":
        end = index + 1
        while end < len(tokens) and tokens[end] not in ("type", "oif", "oifname", "check"):
            end += 1
        sides = [
            side for side in tokens[index + 1 : end] if side not in (".", "mark", "iif", "oif")
        ]
        kind = tokens[end] if end < len(tokens) else ""
        if kind == "type" and sides in (["saddr"], ["daddr"]):
            return f"fib {sides[0]} type", end + 1
        return ("reverse path" if sides == ["saddr"] and kind else "fib"), end + 1
    if word == "tcp" and following == "option":
        end = index + 3
        if tokens[end : end + 1] in (["size"], ["count"], ["left"], ["right"]):
            end += 1
        name = " ".join(tokens[index:end])
        return _RENAMED.get(name, name), end
    if word == "exthdr":
        return "extension", index + 2
    if word == "socket":
        has_level = tokens[index + 2 : index + 3] == ["level"]
        return f"socket {following}", index + (4 if has_level else 2)
    if word in _HEADERS and re.fullmatch(r"[a-z][a-z0-9_-]*", following):
        name = f"{word} {following}"
        return _RENAMED.get(name, name), index + 2
    return "", index + 1


def _comparison_range(operator: str, value: str) -> str:
    """``< 1024`` as a range, also of addresses; "?" for another value."""
    bound: int | None = int(value) if re.fullmatch(r"\d{1,19}", value) else None
    span = None if bound is not None else span_of(value)
    if span:
        bound = span[1]
    if bound is None:
        return "?"
    maximum = 2 ** (63 if not span else 32 if span[0] == 4 else 128) - 1
    low, high = {
        "<": (0, bound - 1),
        "<=": (0, bound),
        ">": (bound + 1, maximum),
        ">=": (bound, maximum),
    }[operator]
    if not 0 <= low <= high:
        return "?"
    if span:
        address = IPv4Address if span[0] == 4 else IPv6Address
        return f"{address(low)}-{address(high)}"
    return f"{low}-{high}"


@dataclass(frozen=True)
class NamedObjects:
    """The named objects of a table: its sets and maps, and its limits."""

    sets: Mapping[str, Elements]
    limits: Mapping[str, RuleMatch]


class _RuleReader:
    """Reads one rule of a chain."""

    def __init__(self, tokens: Tokens, named: NamedObjects) -> None:
        self.tokens = [token for token in tokens if token != "\n"]
        self.named = named
        self.matches: list[RuleMatch] = []
        self.rules: list[Rule] = []
        self.text = _rule_text(self.tokens)

    def read(self) -> list[Rule]:
        index = 0
        while index < len(self.tokens):
            index = self._statement(index)
        return self.rules

    def _token_at(self, index: int) -> str:
        return self.tokens[index] if index < len(self.tokens) else ""

    def _add_rule(
        self, verdict: str, target: str = "", extra_matches: tuple[RuleMatch, ...] = ()
    ) -> None:
        self.rules.append(Rule((*self.matches, *extra_matches), verdict, target, self.text))

    def _add_verdict(self, words: Tokens, extra_matches: tuple[RuleMatch, ...] = ()) -> None:
        word = words[0] if words else ""
        target = words[1] if word in ("jump", "goto") and len(words) > 1 else ""
        verdict = {"reject": "drop"}.get(word, "elsewhere" if word in _ELSEWHERE else word)
        if verdict in ("accept", "drop", "return", "jump", "goto", "elsewhere"):
            self._add_rule(verdict, target, extra_matches)

    def _statement(self, index: int) -> int:
        """Read the statement at ``index``. Returns the index of the next one."""
        word, following = self.tokens[index], self._token_at(index + 1)
        if word in _VERDICTS or word in _ELSEWHERE:
            self._add_verdict(self.tokens[index:])
            # The words after a verdict only describe it.
            return len(self.tokens)
        if word in _NAT:
            return self._nat(word, index + 1)
        if word == "counter":
            return index + {"packets": 5, "name": 3}.get(following, 1)
        if word == "comment":
            return index + 2
        if word == "log":
            return self._log(index + 1)
        if word == "last":
            return index + (3 if following == "used" else 1)
        if word.startswith("# xt_"):
            return self._extension(word[len("# xt_") :], index + 1)
        if word == "xt" and following in ("match", "target"):
            return self._extension(self._token_at(index + 2).strip('"'), index + 3)
        if word == "notrack":
            self._add_rule("notrack")
            return index + 1
        if word == "limit":
            return self._limit(index + 1)
        if word == "ct" and following == "count":
            over = self._token_at(index + 2) == "over"
            return self._add_connection_limit(
                self._token_at(index + 2 + over), over, index + 3 + over
            )
        if word in ("add", "update", "delete", "meter") or (
            word == "set" and following in ("add", "update", "delete")
        ):
            return self._set_update(index + 1)
        if word == "flow" and following == "add":
            return index + 3
        if word == "dup":
            return self._skip(index + 1)
        if word in ("numgen", "jhash", "symhash") and "mod" in self.tokens[index:]:
            index = self.tokens.index("mod", index) + 2
            while self._token_at(index) in ("seed", "offset"):
                index += 2
            return self._value(("random",), index)
        if word == "osf":
            index += 3 if following == "ttl" else 1
            return self._value(("osf",), index + 1)
        if word == "quota":
            self.matches.append(VARYING)
            index += 2 if following in ("over", "until") else 1
            index += 2
            return index + 3 if self._token_at(index) == "used" else index
        if word == "ipsec":
            self.matches.append(UNCERTAIN)
            return self._skip(index + 1)
        return self._condition(index)

    def _extension(self, name: str, index: int) -> int:
        """Read a match or target of iptables that nft cannot show; targets are in capitals."""
        if not name.isupper():
            self.matches.append(VARYING if name in VARYING_MODULES else UNCERTAIN)
        elif name in ("MARK", "CONNMARK"):
            self._add_rule(name.lower().replace("conn", "ct_"), "?")
        elif name in ("DNAT", "REDIRECT", "NETMAP"):
            self._add_rule("divert", "?")
        elif name in ("SNAT", "MASQUERADE"):
            self._add_rule("accept")
        elif name not in _HARMLESS:
            self._add_verdict(["reject" if name in ("REJECT", "TARPIT") else "queue"])
        return index

    def _log(self, index: int) -> int:
        while self._token_at(index) in _LOG_OPTIONS:
            flags = self._token_at(index) == "flags"
            index += 2
            while flags and self._token_at(index) in _LOG_FLAGS and self._token_at(index) != "ip":
                index += 1
        return index

    def _limit(self, index: int) -> int:
        """``rate over 10/second burst 5 packets``, or a limit's name."""
        if self._token_at(index) == "name":
            name = self._token_at(index + 1).strip('"')
            self.matches.append(self.named.limits.get(name, VARYING))
            return index + 2
        match, index = parse_limit(self.tokens, index + (self._token_at(index) == "rate"))
        self.matches.append(match)
        return index

    def _add_connection_limit(self, maximum: str, over: bool, index: int) -> int:
        self.matches.append(connection_limit(maximum, over))
        return index

    def _set_update(self, index: int) -> int:
        """An element that packets add to a set, perhaps with a limit."""
        while index < len(self.tokens) and self.tokens[index] not in ("{", *_VERDICTS):
            index += 1
        if self._token_at(index) != "{":
            return index
        end = end_of_bracket(self.tokens, index)
        inside = self.tokens[index + 1 : end - 1]
        if "limit" in inside:
            match, _ = parse_limit(inside, inside.index("limit") + 2)
            self.matches.append(match)
        elif "count" in inside:
            words = inside[inside.index("count") + 1 :]
            over = words[:1] == ["over"]
            self._add_connection_limit("".join(words[over : over + 1]), over, 0)
        elif "quota" in inside:
            self.matches.append(VARYING)
        return end

    def _nat(self, word: str, index: int) -> int:
        """``dnat ip to 10.0.0.1:80``, ``redirect to :8080``; no other statement follows."""
        if word in ("snat", "masquerade"):
            self._add_rule("accept")
            return len(self.tokens)
        words = self.tokens[index:]
        target = ""
        if "to" in words:
            target_words = words[words.index("to") + 1 :]
            target = target_words[0] if target_words else "?"
            if any(word in target_words for word in ("map", ".", "{")) or not re.match(
                r"[\d\[:]", target
            ):
                target = "?"
            target = nat_target(target)
        elif word == "dnat":
            target = "?"
        self._add_rule("divert", target)
        return len(self.tokens)

    def _skip(self, index: int) -> int:
        """Pass over the words of a statement, up to a verdict."""
        while index < len(self.tokens) and self.tokens[index] not in _VERDICTS:
            if self.tokens[index] == "vmap" and self._token_at(index + 1):
                elements, end = self._set_at(index + 1)
                self._lookup((), "vmap", elements)
                return end
            is_bracket = self.tokens[index] == "{"
            index = end_of_bracket(self.tokens, index) if is_bracket else index + 1
        return index

    def _set_at(self, index: int) -> tuple[Elements | None, int]:
        """The set at ``index``, in braces or by name (None: unknown), and the index after it."""
        if self.tokens[index] == "{":
            end = end_of_bracket(self.tokens, index)
            return parse_elements(self.tokens[index + 1 : end - 1]), end
        return self.named.sets.get(self.tokens[index].lstrip("@")), index + 1

    def _condition(self, index: int) -> int:
        """Read a condition, or a statement that changes a field."""
        selectors = []
        while True:
            selector, index = _selector(self.tokens, index)
            selectors.append(selector)
            if self._token_at(index) != "." or index + 1 >= len(self.tokens):
                break
            index += 1
        if self._token_at(index) == "set":
            return self._set_field(selectors[0], index + 1)
        if not all(selectors):
            self.matches.append(UNCERTAIN)
            return index
        return self._value(tuple(selectors), index)

    def _set_field(self, selector: str, index: int) -> int:
        """A statement that changes a field of the packet."""
        if selector in ("mark", "ct mark"):
            return self._mark(selector, index)
        if selector in ("tcp dport", "th dport", "ip daddr", "ip6 daddr", "ip saddr", "ip6 saddr"):
            self._add_rule("elsewhere")
        if self._token_at(index) in ("rt", "ip", "ip6", "ct", "meta", "numgen", "jhash"):
            return self._skip(index)
        _, index = value_list(self.tokens, index)
        return self._skip(index) if self._token_at(index) in ("map", ".", "&", "|") else index

    def _mark(self, selector: str, index: int) -> int:
        """``meta mark set (mark & 0xff) ^ 0x1``: the kept bits, and the flipped bits."""
        verdict, source, keep, flip = selector.replace(" ", "_"), "", 0, 0
        has_value = False
        while index < len(self.tokens):
            word = self.tokens[index]
            if word in "()" or (word == "meta" and self._token_at(index + 1) == "mark"):
                index += 1
            elif not has_value and (
                word == "mark" or (word == "ct" and self._token_at(index + 1) == "mark")
            ):
                source, keep, has_value = "mark" if word == "mark" else "ct mark", ALL_BITS, True
                index += 1 if word == "mark" else 2
            elif not has_value and (constant := number(word)) is not None:
                flip, has_value = constant, True
                index += 1
            elif (
                has_value
                and word in _OPERATORS
                and (n := number(self._token_at(index + 1))) is not None
            ):
                if word in ("and", "&"):
                    keep, flip = keep & n, flip & n
                elif word in ("or", "|"):
                    keep, flip = keep & ~n, (flip & ~n) | n
                else:
                    flip ^= n
                index += 2
            else:
                break
        if not has_value or self._token_at(index) in (*_OPERATORS, "map", "<<", ">>"):
            self._add_rule(verdict, "?")
            return self._skip(index)
        if source and source != selector:
            self._add_rule("restore" if selector == "mark" else "save")
        if (keep, flip) != (ALL_BITS, 0):
            self._add_rule(verdict, f"{keep & ALL_BITS:x}/{flip & ALL_BITS:x}")
        return index

    def _value(self, selectors: tuple[str, ...], index: int) -> int:
        """Read the operator and value of a condition, or the map that gives the verdict."""
        mask: Tokens | None = None
        if self._token_at(index) == "&":
            mask, index = value_list(self.tokens, index + 1)
        operator = ""
        if self._token_at(index) in ("==", "!=", "<", ">", "<=", ">=", "!", "vmap"):
            operator = self.tokens[index]
            index += 1
        if index >= len(self.tokens):
            self.matches.append(UNCERTAIN)
            return index
        token = self.tokens[index]
        if token == "{" or token.startswith("@"):
            elements, end = self._set_at(index)
            self._lookup(selectors, operator, elements, mask)
            return end
        if len(selectors) > 1:
            end = index + 2 * len(selectors) - 1
            values = (element_key(self.tokens[index:end]),)
            self.matches.append(RuleMatch(selectors, values, operator == "!="))
            return end
        words, index = value_list(self.tokens, index)
        while self._token_at(index) == "|" and self._token_at(index + 1):
            words.append(self.tokens[index + 1])
            index += 2
        while self._token_at(index).startswith("-") and words:
            # ``"08:00"-"17:00"``
            index += 2 if self._token_at(index) == "-" else 1
            words = ["?"]
        if self._token_at(index) == "/":
            mask, index = value_list(self.tokens, index + 1)
            operator = operator or "=="
        self.matches.append(_value_match(selectors[0], operator, words, mask))
        return index

    def _lookup(
        self,
        selectors: tuple[str, ...],
        operator: str,
        elements: Elements | None,
        mask: Tokens | None = None,
    ) -> None:
        """Add the condition on a set, or a rule for each verdict of a map; None: unknown."""
        if elements is not None and selectors in (("tcp flags",), ("mark",), ("ct mark",)):
            full_mask = ",".join(mask or (_FLAGS if "flags" in selectors[0] else ()))
            elements = tuple(
                ((_masked(parts[0], full_mask),) if len(parts) == 1 else parts, verdict)
                for parts, verdict in elements
            )
        elif mask is not None:
            selectors = ()
        if operator != "vmap":
            is_known = elements is not None and selectors
            keys = tuple(parts for parts, _ in elements or ())
            match = RuleMatch(selectors, keys, operator == "!=") if is_known else UNCERTAIN
            self.matches.append(match)
            return
        if elements is None:
            self._add_rule("elsewhere", "", (UNCERTAIN,))
            return
        # The keys of a map exclude each other: a map equals a rule for each key, and a last rule
        # for all other values.
        wildcard = ("*",)
        keys = tuple(parts for parts, _ in elements if parts != wildcard)
        for parts, verdict in sorted(elements, key=lambda element: element[0] == wildcard):
            match = RuleMatch(selectors, (parts,))
            if parts == wildcard:
                match = RuleMatch(selectors, keys, negated=True)
            self._add_verdict(verdict, (match if selectors else UNCERTAIN,))


_OPERATORS = ("and", "or", "xor", "&", "|", "^")
_FLAGS = ("fin", "syn", "rst", "psh", "ack", "urg", "ecn", "cwr")


def _masked(value: str, mask: str) -> str:
    """A value of a set that is compared under a mask: ``syn|ack`` as ``syn,ack/fin,syn,ack``."""
    value = "" if value in ("0x0", "0") and "," in mask else value.replace("|", ",")
    return f"{value}/{mask}" if mask else value


def parse_limit(words: Tokens, index: int) -> tuple[RuleMatch, int]:
    """``over 10/second burst 5 packets``, ``10 mbytes/second``, and the index after it."""
    over = words[index : index + 1] == ["over"]
    index += over
    text = words[index] if index < len(words) else ""
    index += 1
    size = re.fullmatch(r"(\w*bytes)/(\w+)", words[index]) if index < len(words) else None
    if size:
        index += 1
    burst = ""
    if words[index : index + 1] == ["burst"]:
        burst = "".join(words[index + 1 : index + 2])
        index += 3
    if size:
        many = text.isdigit() and int(text) * _BYTES.get(size[1], 0) >= _MANY_BYTES
        return (NEVER if over else ALWAYS) if many else VARYING, index
    return rate_limit(rate(text, burst), over), index


def _value_match(selector: str, operator: str, words: Tokens, mask: Tokens | None) -> RuleMatch:
    """A condition on one value, or on a list of flags: one of them must be set."""
    values = [word.strip('"') for word in words]
    negated = operator == "!="
    zero = values in (["0x0"], ["0"], ["0x00"])
    if mask is not None:
        if operator not in ("==", "!="):
            return UNCERTAIN
        if selector == "tcp flags":
            flags = "" if zero else ",".join(values)
            return RuleMatch((selector,), ((f"{flags}/{','.join(mask)}",),), negated)
        if selector in ("mark", "ct mark"):
            return RuleMatch((selector,), ((f"{values[0]}/{mask[0]}",),), negated)
        if selector in _FLAG_SELECTORS and zero:
            return RuleMatch((selector,), tuple((flag,) for flag in mask), not negated)
        if selector in _FLAG_SELECTORS and values == mask and len(mask) == 1:
            return RuleMatch((selector,), ((mask[0],),), negated)
        if selector in ("ip frag-off", "ip6 frag-off") and zero:
            # The packet is no fragment; only the flag "don't fragment" (0x4000) may be set.
            bits = number(mask[0])
            return (NEVER if negated else ALWAYS) if bits and not bits & 0x4000 else UNCERTAIN
        if selector.endswith(("saddr", "daddr")):
            net = f"{values[0]}/{mask[0]}"
            return RuleMatch((selector,), ((net,),), negated) if span_of(net) else UNCERTAIN
        return UNCERTAIN
    if operator in ("<", ">", "<=", ">="):
        return RuleMatch((selector,), ((_comparison_range(operator, values[0]),),))
    if operator == "!":
        return RuleMatch((selector,), tuple((value,) for value in values), negated=True)
    if selector == "tcp flags" and operator:
        flags = "" if zero else ",".join(values)
        return RuleMatch((selector,), ((f"{flags}/{','.join(_FLAGS)}",),), negated)
    return RuleMatch((selector,), tuple((value,) for value in values), negated)


def _rule_text(tokens: Tokens) -> str:
    """A rule in one line, without its counters."""
    line = re.sub(r" ([,;])", r"\1", " ".join(tokens))
    return re.sub(r" ?counter( packets \d+ bytes \d+)?", "", line).strip()[:160]


#: The names of priorities (nft(8)).
_PRIORITIES = {
    "raw": -300, "mangle": -150, "dstnat": -100, "filter": 0, "security": 50, "srcnat": 100,
}  # fmt: skip


def _priority(words: Tokens) -> int:
    """``filter + 10``, ``mangle - 5``, ``-300``; 0 for any other text."""
    match = re.fullmatch(r"([a-z]*)\s*([+-]?)\s*(\d{0,10})", " ".join(words))
    if match is None or (match[1] and match[1] not in _PRIORITIES):
        return 0
    offset = int(match[3] or 0) * (-1 if match[2] == "-" else 1)
    return _PRIORITIES.get(match[1], 0) + offset


def _parse_chain(table: str, name: str, inside: Tokens, named: NamedObjects) -> Chain:
    hook, policy, is_nat, priority = "", "accept", False, 0
    devices: tuple[str, ...] = ()
    rules: list[Rule] = []
    for statement in statements(inside):
        words = [token for token in statement if token != "\n"]
        if not words or words[0] in ("comment", "flags"):
            continue
        if words[0] == "type":
            if len(words) < 4 or "hook" not in words[:-1]:
                raise ValueError("a chain that makes no sense")
            hook, is_nat = words[words.index("hook") + 1], words[1] == "nat"
            index = words.index("priority") if "priority" in words else len(words)
            priority = _priority(words[index + 1 :])
            device_words = words[words.index("hook") + 2 : index]
            devices = tuple(
                device_word.strip('"') for device_word in device_words
                if device_word not in ("device", "devices", "=", "{", "}", ",")
            )  # fmt: skip
        elif words[0] == "policy":
            policy = words[-1]
            if policy not in ("accept", "drop"):
                raise ValueError("a policy that makes no sense")
        else:
            rules += _RuleReader(words, named).read()
    return Chain(table, name, tuple(rules), hook, policy, priority, is_nat, devices)


def _named_limits(inner: list[tuple[Tokens, Tokens]]) -> Iterator[tuple[str, RuleMatch]]:
    """The named limits of a table."""
    for head, body in inner:
        words = [token for token in body if token not in "\n;"]
        if head[0] == "limit" and "rate" in words:
            yield head[1], parse_limit(words, words.index("rate") + 1)[0]
        elif head[0] == "limit" and words:
            yield head[1], parse_limit(words, 0)[0]


def parse(text: str) -> Ruleset:
    """The chains of the tables that ``nft list`` printed.

    Lines of another kind are skipped. Raises ValueError for a text without a table, and for a
    table that makes no sense or has no end.
    """
    chains: dict[tuple[str, str], Chain] = {}
    all_statements = list(statements(tokens(text)))
    tables = [statement for statement in all_statements if statement[0] == "table"]
    if all_statements and not tables:
        raise ValueError("no table in what nft printed")
    for statement in tables:
        block = split_block(statement)
        if block is None or len(block[0]) != 3 or statement.count("{") != statement.count("}"):
            raise ValueError("a table that makes no sense")
        table = " ".join(block[0][1:])
        parts = list(statements(block[1]))
        if any(part[0] == "flags" and "dormant" in part for part in parts):
            continue
        inner = [block for part in parts if (block := split_block(part)) and len(block[0]) > 1]
        sets = {head[1]: parse_set(body) for head, body in inner if head[0] in ("set", "map")}
        named = NamedObjects(sets, dict(_named_limits(inner)))
        for head, body in inner:
            if head[0] == "chain":
                chains[table, head[1]] = _parse_chain(table, head[1], body, named)
    return Ruleset(chains)
