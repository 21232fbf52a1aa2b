#!/usr/bin/python3
"""A gateway of ClusterShell's that does what no gateway does: /root/how has the name of its lie.

It stands in place of the gateway's python3. Its words are the functions of LIES, which get what
the gateway was asked: the number of the command, its nodes, and the word that frames an answer.
"""

import base64
import os
import pickle
import re
import sys
import time
from pathlib import Path

#: Of ClusterShell's `Gateway`: the first lines of a channel.
OPEN = b'<?xml version="1.0" encoding="utf-8"?>\n<channel version="1.9">\n'
WIDE = b"QUFB" * (8 << 10)


def say(data):
    while data:
        data = data[os.write(1, data) :]


def message(kind, data=b"", **attributes):
    """A message with this text as its payload."""
    words = "".join(f' {name}="{value}"' for name, value in {"msgid": 0, **attributes}.items())
    packed = base64.b64encode(pickle.dumps(data, 4)) if data else b""
    say(f'<message type="{kind}"{words}>'.encode() + packed + b"</message>\n")


def forever(kind, number, nodes, rows):
    while True:
        for row in rows:
            message(kind, row, srcid=number, nodes=nodes)


def others(number, nodes, nonce):
    """What only another gateway may say of its nodes, to the commands of all."""
    every = Path("/root/names").read_text().strip()
    for name in every.split(","):
        message("SER", b"nodeready: too much output", srcid=0, nodes=name)
        message("OUT", nonce + b" b\n" + b"QUFB\n" + nonce + b" z 0", srcid=number, nodes=name)
        message("RET", srcid=number, nodes=name, retcode=0)
    message("SER", b"x", srcid=0, nodes="x[1-999999999]")
    while True:
        message("OUT", b"x", srcid=number, nodes="x[1-60000]")


def half(number, nodes, nonce):
    message("OUT", nonce + b" b\nQUFB", srcid=number, nodes=nodes)
    sys.exit(0)


def words(number, nodes, nonce):
    evil = b"\x1b]0;x\x07\x1b[31m[bold]\xe2\x80\xae</message>\n"
    message("OUT", evil, srcid=number, nodes=nodes)
    message("SER", evil, srcid=number, nodes=nodes)
    message("ERR", reason="\u202e[bold]&lt;script&gt;" * 99)


def errors(number, nodes, nonce):
    while True:
        os.write(2, b"A" * 65536)


def payload(number, nodes, nonce):
    """A pickle of ten bytes that fills the memory."""
    bomb = base64.b64encode(b"\x80\x04N" + b"r\xff\xff\xff\x7f" + b".")
    say(b'<message type="OUT" msgid="0" srcid="%d" nodes="%s">' % (number, nodes.encode()))
    say(bomb + b"</message>\n")


def endless(head, piece):
    def lie(number, nodes, nonce):
        say(head % {b"number": number, b"nodes": nodes.encode()})
        while True:
            say(piece)

    return lie


OUT = b'<message type="OUT" msgid="0" srcid="%(number)d" nodes="%(nodes)s">'
LIES = {
    "a line without an end": endless(b"<", b"A" * 65536),
    "a message without an end": endless(OUT, WIDE + b"\n"),
    "an attribute without an end": endless(b'<message type="', b"A" * 999 + b"\n"),
    "channels in channels": endless(b"", b'<channel version="1">\n'),
    "errors without an end": errors,
    "output without an end": lambda number, nodes, nonce: forever(
        "OUT", number, nodes, [nonce + b" b", *[WIDE] * 999]
    ),
    "standard error without an end": lambda number, nodes, nonce: forever(
        "SER", number, nodes, [nonce + b" b", WIDE]
    ),
    "other nodes": others,
    "half an answer": half,
    "words": words,
    "a payload that grows": payload,
    "nothing": lambda *asked: time.sleep(999),
}


def main():
    how = Path("/root/how").read_text().strip()
    if how == "declarations":
        bomb = "".join(f'<!ENTITY a{n + 1} "{f"&a{n};" * 10}">' for n in range(9))
        say(OPEN.replace(b"\n<", f'<!DOCTYPE x [<!ENTITY a0 "AAAA">{bomb}]>\n<'.encode(), 1))
        say(b'<message type="ERR" msgid="0" reason="&a9;"></message>\n')
    say(OPEN)
    header = {}
    for line in sys.stdin.buffer:
        if begin := re.search(rb"<message ([^>]*)>", line):
            header = dict(re.findall(r'(\w+)="([^"]*)"', begin[1].decode()))
            packed = line[begin.end() :]
        elif header:
            packed += line
        else:
            continue
        if b"</message>" not in packed:
            continue
        message("ACK", ack=header["msgid"])
        if header.get("action") == "shell":
            asked = pickle.loads(base64.b64decode(packed.partition(b"<")[0]))
            nonce = re.search(r"nodeready-[0-9a-f]{16}(?= b)", asked["cmd"])[0].encode()
            LIES[how](int(header["srcid"]), header["target"], nonce)
        header = {}


if __name__ == "__main__":
    main()
