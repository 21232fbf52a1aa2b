"""Cores that lie: reading them raises NoCore or OSError at most, and stays small.

NODEREADY_FUZZ: how many examples; few by default.
"""

import contextlib
import os
import struct
import tracemalloc

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodeready.agent.cores import core_file
from nodeready.agent.cores.core_file import CoreReader, NoCore
from nodeready.agent.cores.core_pattern import STORE_PATTERN, CorePlace, PatternDirectory
from nodeready.agent.users_file import ROOT
from tests.unit.node.test_core_notes import NOTES, header

EXAMPLES = int(os.environ.get("NODEREADY_FUZZ", "25"))
#: Bytes that the reader may need for one core, whose file has less than 20 kB.
MOST = 64 << 20

ENDS = (0, 1, 2, 4, 56, 64, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
NUMBER = st.one_of(st.sampled_from(ENDS), st.integers(0, 2**64 - 1))


def whole() -> bytes:
    rows = struct.pack("<IIQQQQQQ", 4, 4, 4096, 0, 0, len(NOTES), 0, 4)
    rows += struct.pack("<IIQQQQQQ", 1, 4, 8192, 0x400000, 0, 4096, 4096, 4096)
    return (header(count=2) + rows).ljust(4096, b"\0") + NOTES.ljust(4096, b"\0") + header() * 64


CORE = whole()
#: Where numbers stand: the header's, the program headers', the notes'.
PLACES = st.one_of(st.integers(0, 64 + 2 * 56), st.integers(4096, 8192), st.integers(8192, 8300))
CHANGES = st.lists(st.tuples(PLACES, st.sampled_from((1, 2, 4, 8)), NUMBER), max_size=12)


def mutated(changes: list[tuple[int, int, int]], cut: int) -> bytes:
    data = bytearray(CORE)
    for place, size, number in changes:
        data[place : place + size] = (number % 256**size).to_bytes(size, "little")
    return bytes(data[:cut])


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(CHANGES, st.one_of(st.just(len(CORE)), st.integers(0, len(CORE))))
def test_a_mutated_core_is_read_or_refused_within_a_bound(changes, cut):
    with open(os.memfd_create("core"), "wb", buffering=0) as file:
        file.write(mutated(changes, cut))
        tracemalloc.start()
        with contextlib.suppress(NoCore, OSError):
            core = CoreReader(file.fileno())
            address, program = core.notes.executable()
            core.build_id(address)
            rank, jobs = core.rank()
            assert rank is None or rank < 10**9
            assert len(str(jobs)) < 2000
            assert len(program) <= 4096
            assert core.whole_bytes is None or 0 <= core.whole_bytes < 2**63
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=5000))
def test_bytes_that_are_no_core_cost_nothing(data):
    core_file.parse(data).executable()
    core_file.build_id(data)
    core_file.build_id(b"\x7fELF\x02\x01" + data)
    core_file.segments(data)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.text(st.characters(exclude_characters="/\0"), max_size=255))
def test_no_name_is_too_much_for_a_pattern(name):
    where = PatternDirectory("/cores", ROOT, {})
    for pattern in (STORE_PATTERN, "/cores/core.%e.%h.%E.%p.%t"):
        for found in CorePlace(pattern).names(where, [name, f"core.{name}"]):
            assert found.path.startswith("/cores/")
