"""A block of ours never costs its host file a byte."""

from __future__ import annotations

import pytest

from nodeready.subjects import managed_block

INNER = b"export A=1\n"
BLOCK = managed_block.BEGIN + b"\n" + INNER + managed_block.END + b"\n"

# What files of other people look like: nothing, plain, CRLF, no final newline, no UTF-8, binary.
RESTS = {
    "empty": b"",
    "plain": b"one\ntwo\n",
    "crlf": b"one\r\ntwo\r\n",
    "no_final_newline": b"one\ntwo",
    "not_utf8": b"caf\xe9 \xff\xfe\n",
    "control_bytes": b"a\x00b\x1b[31m\x0bc\x85\nd\re\n",
    "mentions_the_mark": b"echo '" + managed_block.BEGIN + b"'\n  " + managed_block.END + b" x\n",
}


@pytest.mark.parametrize("rest", RESTS.values(), ids=RESTS.keys())
@pytest.mark.parametrize("place", managed_block.PLACES)
def test_put_keeps_every_byte_of_the_rest_and_is_idempotent(rest: bytes, place: str) -> None:
    put = managed_block.put(rest, INNER, place)
    newline = b"" if place == "top" or not rest or rest.endswith(b"\n") else b"\n"
    assert put == (BLOCK + rest if place == "top" else rest + newline + BLOCK)
    assert managed_block.find(put) == INNER
    assert managed_block.put(put, INNER, place) == put
    assert managed_block.remove(put) == rest + newline


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("top", BLOCK + b"before\nafter"),
        ("end", b"before\nafter\n" + BLOCK),
        ("keep", b"before\n" + BLOCK + b"after"),
    ],
)
def test_an_old_block_is_replaced_where_it_must_stand(place: str, expected: bytes) -> None:
    old = b"before\n" + managed_block.BEGIN + b"\nold\n" + managed_block.END + b"\nafter"
    assert managed_block.put(old, INNER, place) == expected


@pytest.mark.parametrize(
    ("content", "rest"),
    [
        (managed_block.BEGIN + b"\nmine\n", b"mine\n"),
        (b"mine\n" + managed_block.END + b"\nmore\n", b"mine\nmore\n"),
        (managed_block.BEGIN + b"\nmine\n" + BLOCK + b"more\n", b"mine\nmore\n"),
        (BLOCK + b"mine\n" + BLOCK, b"mine\n"),
    ],
    ids=["end_deleted", "begin_deleted", "begin_twice", "block_twice"],
)
def test_damaged_marks_cost_no_line_of_the_owner(content: bytes, rest: bytes) -> None:
    assert managed_block.remove(content) == rest
    put = managed_block.put(content, INNER, "end")
    assert put == rest + BLOCK


def test_marks_that_an_editor_gave_other_line_ends_are_still_ours() -> None:
    crlf = BLOCK.replace(b"\n", b"\r\n")
    assert managed_block.find(b"x\r\n" + crlf) == INNER.replace(b"\n", b"\r\n")
    assert managed_block.put(b"x\r\n" + crlf, INNER, "keep") == b"x\r\n" + BLOCK
    assert managed_block.find(BLOCK.rstrip(b"\n")) == INNER


def test_a_block_cannot_hold_its_own_marks() -> None:
    with pytest.raises(ValueError, match="marks"):
        managed_block.put(b"", b"a\n" + managed_block.END + b"\nb\n", "end")
    with pytest.raises(ValueError, match="place"):
        managed_block.put(b"", b"", "middle")
