#!/usr/bin/python3
"""A gateway that does what no gateway does: /root/how has the name of its lie.

It stands in place of the gateway's python3. Its lies are the functions of LIES, which get the
number of the command, and the word that frames its answer.
"""

import base64
import json
import os
import re
import sys
import time
import zlib
from pathlib import Path

WIDE = b"A" * 65536


def say(data):
    while data:
        data = data[os.write(1, data) :]


def line(number, kind, data):
    say(b"%d %s %s\n" % (number, kind, base64.b64encode(data)))


def forever(*pieces):
    while True:
        for piece in pieces:
            say(piece)


def others(number, nonce):
    """What only another gateway may say of its nodes, to the commands of all."""
    while True:
        for command in range(number + 9):
            if command != number:
                line(command, b"out", b"\n%s b\nQUFB\n%s z 0\n" % (nonce, nonce))
                line(command, b"end", b"0")


def half(number, nonce):
    line(number, b"out", b"\n%s b\nQUFB" % nonce)
    sys.exit(0)


def words(number, nonce):
    evil = b"\x1b]0;x\x07\x1b[31m[bold]\xe2\x80\xae\n"
    line(number, b"out", evil)
    line(number, b"err", evil)
    line(number, b"end", b"255")
    say(evil * 99)


def errors(number, nonce):
    while True:
        os.write(2, WIDE)


def output(kind):
    def lie(number, nonce):
        line(number, b"out", b"\n%s b\n" % nonce)
        while True:
            line(number, kind, WIDE)

    return lie


LIES = {
    "a line without an end": lambda number, nonce: forever(WIDE),
    "a message without an end": lambda number, nonce: forever(b"%d out " % number, WIDE, WIDE),
    "lines of nothing": lambda number, nonce: forever(b"\n" * 9999),
    "numbers without an end": lambda number, nonce: forever(b"9" * 900_000 + b" out \n"),
    "errors without an end": errors,
    "output without an end": output(b"out"),
    "standard error without an end": output(b"err"),
    "other nodes": others,
    "half an answer": half,
    "words": words,
    "a payload that is none": lambda number, nonce: say(b"%d out \xff%%%%\n" % number),
    "nothing": lambda *asked: time.sleep(999),
}


def main():
    how = Path("/root/how").read_text().strip()
    packed = re.search(r'b64decode\("([^"]+)"', sys.argv[-1])[1]
    source = zlib.decompress(base64.b64decode(packed))
    say(re.search(rb"nodeready-[0-9a-f]{16} gateway", source)[0] + b"\n")
    for row in sys.stdin:
        order = json.loads(row)
        if "argv" in order:
            nonce = re.search(r"nodeready-[0-9a-f]{16}(?= b)", order["argv"][-1])
            LIES[how](order["number"], nonce[0].encode() if nonce else b"session")


if __name__ == "__main__":
    main()
