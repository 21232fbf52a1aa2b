"""A block of ours never costs its host file a byte."""

from itertools import product

import pytest

from nodeready.core import own_files
from nodeready.core.own_files import BEGIN, END

INNER = b"export A=1\n"
BLOCK = BEGIN + b"\n" + INNER + END + b"\n"
#: What stands in files of other people.
LINES = [
    b"one\n", b"two\r\n", b"caf\xe9 \xff\xfe\n", b"a\x00b\x1b[31m\x0bc\x85\nd\re\n", b"no end",
]  # fmt: skip
LINES += [b"echo '" + BEGIN + b"'\n", b"  " + END + b" x\n"]


@pytest.mark.parametrize("place", own_files.PLACES)
def test_put_keeps_every_byte_of_the_rest_and_is_idempotent(place):
    for rest in (b"", *LINES, *map(b"".join, product(LINES, LINES))):
        put = own_files.put_block(rest, INNER, place)
        newline = b"" if place == "top" or not rest or rest.endswith(b"\n") else b"\n"
        assert put == (BLOCK + rest if place == "top" else rest + newline + BLOCK)
        assert own_files.find_block(put) == INNER
        assert own_files.put_block(put, INNER, place) == put
        assert own_files.remove_block(put) == rest + newline


@pytest.mark.parametrize(("place", "expected"), [
    ("top", BLOCK + b"before\nafter"),
    ("end", b"before\nafter\n" + BLOCK),
    ("keep", b"before\n" + BLOCK + b"after"),
])  # fmt: skip
def test_an_old_block_is_replaced_where_it_must_stand(place, expected):
    old = b"before\n" + BEGIN + b"\nold\n" + END + b"\nafter"
    assert own_files.put_block(old, INNER, place) == expected


@pytest.mark.parametrize(("content", "rest"), [
    pytest.param(BEGIN + b"\nmine\n", b"mine\n", id="no end"),
    pytest.param(b"mine\n" + END + b"\nmore\n", b"mine\nmore\n", id="no begin"),
    pytest.param(BEGIN + b"\nmine\n" + BLOCK + b"more\n", b"mine\nmore\n", id="two begins"),
    pytest.param(BLOCK + b"mine\n" + BLOCK, b"mine\n", id="two blocks"),
])  # fmt: skip
def test_damaged_marks_cost_no_line_of_the_owner(content, rest):
    assert own_files.remove_block(content) == rest
    assert own_files.put_block(content, INNER, "end") == rest + BLOCK


def test_marks_that_an_editor_gave_other_line_ends_are_still_ours():
    crlf = b"x\r\n" + BLOCK.replace(b"\n", b"\r\n")
    assert own_files.find_block(crlf) == INNER.replace(b"\n", b"\r\n")
    assert own_files.put_block(crlf, INNER, "keep") == b"x\r\n" + BLOCK
    assert own_files.find_block(BLOCK.rstrip(b"\n")) == INNER


def test_a_block_cannot_hold_its_own_marks():
    with pytest.raises(ValueError, match="marks"):
        own_files.put_block(b"", b"a\n" + END + b"\nb\n", "end")
    with pytest.raises(ValueError, match="place"):
        own_files.put_block(b"", b"", "middle")
