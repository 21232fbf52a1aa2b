"""A field that cannot be read is never healthy: each field by a wrong value by each error word.

The looks are recorded ones of healthy nodes. A row names a field, a wrong value of it, and the
check that says so: an expert's verdict. In place of the same field each word that the kernel or a
tool has for "I cannot tell" may make the check anything but ok and na. The words of the GPU tools
are judged with those tools' recordings, in tests/unit/subjects/test_gpus*.py. Sources of the rows:
net/core/net-sysfs.c, drivers/net/bonding/bond_sysfs*.c, drivers/infiniband/core/sysfs.c,
drivers/pci/pci-sysfs.c; proc(5), statfs(2).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeready.core.base import Output, Probe
from nodeready.core.policy import make_policy
from nodeready.subjects import snapshot
from tests.builders.hostile import RECORDED, encoded, recorded
from tests.cases import read
from tests.unit.fuzz.alone import DO

#: The policy with which the recorded nodes were deployed.
POLICY = make_policy({"limit_memlock": 4096, "limit_nofile": 16384})
PROBES = {probe.subject: probe for probe in snapshot.probes()}
GOOD = ("ok", "na")

#: What stands in place of a value that could not be read: errno(3) in the words of libc, sysfs's
#: and vendors' own words, what scripts make of nothing.
WORDS = (
    "", "Invalid argument", "Input/output error", "Permission denied", "No such device",
    "Operation not supported", "N/A", "<unknown>", "unknown", "Unknown Error", "ERR!",
    "[Not Supported]", "(null)", "null", "None", "nan", "?", "\x00", "\udcff",
)  # fmt: skip


class Field(NamedTuple):
    """pattern: a regular expression whose first group is the value; wrong: a wrong value of it."""

    name: str
    check: str
    section: str
    pattern: str
    wrong: str
    status: str

    def put(self, value: str, texts: dict[str, str]) -> dict[str, str]:
        text = texts[self.section]
        match = re.search(self.pattern, text)
        assert match, self
        return {**texts, self.section: text[: match.start(1)] + value + text[match.end(1) :]}


FIELDS = [Field(**row) for row in read(Path(__file__).parent / "data" / "fields.json")]


def sections(subject: str) -> dict[str, str]:
    one, other = recorded("h100"), recorded("mi300x")
    return {s.name: one.get(s.name) or other.get(s.name, "") for s in PROBES[subject].sections}


def verdicts(probe: Probe, texts: dict[str, str]) -> dict[str, str]:
    outputs = {n: Output(encoded(text), 0, nonce=RECORDED) for n, text in texts.items()}
    seen = snapshot.Snapshot({probe.subject: snapshot.observe(probe, outputs, POLICY)})
    return {result.check: result.status for result in snapshot.judge(seen, POLICY)}


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_field_that_cannot_be_read_is_not_healthy(field):
    subject = field.check.partition(".")[0]
    probe, texts = PROBES[subject], sections(subject)
    assert verdicts(probe, texts)[field.check] in GOOD
    assert verdicts(probe, field.put(field.wrong, texts))[field.check] == field.status
    healthy = []
    for word in WORDS:
        found = verdicts(probe, field.put(word, texts))
        # A subject that cannot be read at all has one result, "observed".
        if found.get(field.check, "unknown") in GOOD:
            healthy.append(word)
    assert healthy == []


def values(text: str) -> Iterator[tuple[int, int]]:
    """Where the values are that a file gave: behind its path, and its line.

    A row of a table (/proc/net/route) is none: the kernel writes it whole.
    """
    for match in re.finditer(r"^/[^:\n]*(?::\d+)?:([^\t\n]*)$", text, re.M):
        yield match.span(1)


@pytest.mark.parametrize("subject", ["nics", "rdma", "host"])
def test_an_unreadable_field_beside_a_fault_hides_nothing(subject, effort):
    """The wrong field, and an error word in any other value of the same look.

    Another check of the subject may say so instead: a port whose state cannot be read has no rate.
    """
    probe, texts = PROBES[subject], sections(subject)
    mine = [
        field
        for field in FIELDS
        if field.check.startswith(f"{subject}.") and field.status == "fail"
    ]
    places = [(name, *span) for name, text in texts.items() for span in values(text)]

    @given(st.sampled_from(mine), st.sampled_from(places), st.sampled_from(WORDS))
    def each(field: Field, place: tuple[str, int, int], word: str) -> None:
        name, start, end = place
        faulty = field.put("\x01", texts)
        if name == field.section and start <= faulty[name].find("\x01") <= end:
            return
        text = texts[name]
        spoilt = field.put(field.wrong, {**texts, name: text[:start] + word + text[end:]})
        found = verdicts(probe, spoilt)
        assert not {*found.values()} <= {*GOOD}, (field, text[start:end])

    DO[effort](each, 600)


def test_every_subject_of_the_audit_has_a_row_or_a_reason():
    """A new subject is asked for the fields on which its verdicts rest."""
    elsewhere = {
        "gpus": "tests/unit/subjects/test_gpus*.py: words of nvidia-smi, rocm-smi and amd-smi",
        "iommu": "boot loader and command line are texts of people: any is valid",
        "ssh_client": "the same: ssh_config(5) and known_hosts",
        "debug_tools": "modes and sums of files: tests/unit/subjects/test_debug_tools.py",
        "gate": "our own files, compared byte by byte",
        "site": "the text of a site is any: tests/unit/subjects/test_site.py",
        "proof": "programs of ours answer: test_answers.py",
        "ours": "files of ours, which are not judged",
    }
    rows = {field.check.partition(".")[0] for field in FIELDS}
    assert rows | elsewhere.keys() == PROBES.keys() | {"proof"}
    assert not rows & elsewhere.keys()
