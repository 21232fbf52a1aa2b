"""What a node of mischief may answer, and recorded answers to make it from.

tests/unit/fuzz/data has the sections of a look at a node of the lab after a deploy, per profile;
tests/lab/test_recorded_looks.py holds them against such a node, and records them anew.
"""

import base64
import gzip
import json
from copy import deepcopy
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from nodeready.agent.asking import Answer, Request
from nodeready.subjects.debug_tools import facts
from tests.fake import Does

_DATA = Path(__file__).parent.parent / "unit" / "fuzz" / "data"
#: What a node with a packet filter prints.
FILTER = """manager=firewalld
drop=inet firewalld filter_INPUT: ct state invalid drop
rule=inet firewalld filter_IN_public_allow: tcp dport { 22, 29500-29510 } accept
rule=ip filter INPUT: -p tcp -m multiport --dports 22,29500:29510 -j ACCEPT
"""
#: The nonce in the recorded sections.
RECORDED = "0123456789abcdef"
#: Stands in the recorded sections for the sha256 of nodeready-run, which each version changes.
RUN_DIGEST = "NODEREADY_RUN"


@cache
def recorded(profile: str) -> dict[str, str]:
    """Section -> what it printed, with the files as they are on the node, and not in base64."""
    text = (_DATA / f"{profile}.json").read_text().replace(RUN_DIGEST, facts.digest())
    found: dict[str, str] = json.loads(text)
    found["firewall"] += FILTER
    return found


def encoded(text: str) -> str:
    """What a section prints, its files in base64 as nr_exact prints them."""
    begin, end = f"\n@{RECORDED} file ", f"\n@{RECORDED} eof\n"
    before, *files = text.split(begin)
    pieces = [before]
    for file in files:
        path, _, rest = file.partition("\n")
        content, ended, after = rest.partition(end)
        raw = content.encode("utf-8", "surrogateescape")
        pieces.append(f"{begin}{path}\n{base64.encodebytes(raw).decode()}{ended}{after}")
    return "".join(pieces)


def look(sections: dict[str, str], nonce: str) -> str:
    """The answer of a node whose sections printed this."""
    end = f"\n@{nonce} rc 0\n\n@{nonce} end\n"
    body = "".join(
        f"\n@{nonce} begin {name}\n{encoded(text).replace(RECORDED, nonce)}{end}"
        for name, text in sections.items()
    )
    packed = gzip.compress(body.encode("utf-8", "surrogateescape"), 1, mtime=0)
    return envelope(base64.b64encode(packed).decode(), nonce)


def envelope(packed: str, nonce: str) -> str:
    return f"welcome\nnodeready/1 {nonce} gzip\n{packed}\nnodeready/1 {nonce} end\n"


def shows(sections: dict[str, str]) -> Does:
    def does(request: Request) -> Answer:
        return Answer(look(sections, request.mark.rpartition(" ")[2]))

    return does


#: Pieces of the grammars that nodes answer in.
PIECES = (
    "a", "9", " ", "\t", "\n", ",", ":", "/", "=", "-", "[", "(", "{", "<", '"', "'", "\\", "#",
    "&", "$", "*", ".", "@", "\x00", "\x1b[", "\x1b]0;x\x07", "\r", "\u2028", "\u202e", "\udcff",
    "é",
    "1-9,", "gpu[1-1000000000],", "a=", "a:1:", "\n/a/b:1:x", "0x0 in ", " at ", " from ", " (",
    "::", "[[", "{}", "[],", "1e400", "NaN", "-Infinity", '"a":', "null", "-1", "9" * 400, "rank1",
    "[1:11<", "12:00:00 ", "<host>:1:1 ", "operator", f"\n@{RECORDED} begin host\n",
    f"\n@{RECORDED} file /a\n", f"\n@{RECORDED} eof\n", "\nrule=", " dport ", "{ 1-9",
)  # fmt: skip

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("cut", "drop", "repeat", "insert", "change", "swap")),
        st.floats(0, 1),
        st.integers(1, 300),
        st.sampled_from(PIECES),
    ),
    min_size=1,
    max_size=5,
)


@st.composite
def mutated(draw: st.DrawFn, *texts: str) -> str:
    """One of these texts with something cut off, dropped, repeated, put in, changed or swapped."""
    text = draw(st.sampled_from(texts))
    for step, where, count, piece in draw(_STEPS):
        at = int(where * len(text))
        if step == "cut":
            text = text[:at]
        elif step == "drop":
            text = text[:at] + text[at + count :]
        elif step == "repeat":
            text = text[:at] + text[at : at + count] * 20 + text[at:]
        elif step == "insert":
            text = text[:at] + piece * count + text[at:]
        elif step == "change":
            text = text[:at] + piece + text[at + len(piece) :]
        else:
            text = text[at:] + text[:at]
    return text


#: JSON that is none of ours, or that stands where something else belongs.
NONSENSE = st.sampled_from(
    (
        None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, 1e300, float("nan"), float("inf"),
        "", "x" * 100_000, "9" * 5000, "\x1b[31m\u202e\n", "\ud800", "\udcff", [], {}, [[]] * 50,
        {"a": {"a": {}}}, [None], ["x" * 9000],
    )
)  # fmt: skip


@st.composite
def spoiled(draw: st.DrawFn, *rows: object) -> object:
    """One of these JSON values with something in it replaced, added or taken away."""
    row = json.loads(json.dumps(draw(st.sampled_from(rows))))
    for _ in range(draw(st.integers(1, 3))):
        place = row
        while isinstance(place, (dict, list)) and place:
            key = draw(
                st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
            )
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or draw(st.booleans()):
                act = draw(st.sampled_from(("put", "put", "put", "drop", "add")))
                if act == "put":
                    place[key] = deepcopy(draw(NONSENSE))
                elif act == "drop":
                    del place[key]
                elif isinstance(place, dict):
                    place["more"] = deepcopy(draw(NONSENSE))
                else:
                    place.append(deepcopy(draw(NONSENSE)))
                break
            place = inner
    return row
