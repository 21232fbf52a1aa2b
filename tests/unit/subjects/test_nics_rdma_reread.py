"""Sections like those of an earlier node are read by what differs: as if they were the first."""

import random
import re
from typing import Any

import pytest

from nodeready.core.base import Output, ProbeError
from nodeready.core.policy import Policy
from nodeready.subjects.nics import facts as nics
from nodeready.subjects.rdma import facts as rdma
from tests.builders.hostile import recorded

VALUES = ("0", "1", "-1", "65535", "18446744073709551615", "0x2a1", "", "x", "00:00:00:00:00:00",
          "0000:0000", "fe80::1", "7\r", " 7 ", "4: DOWN")  # fmt: skip
#: The lines in which nodes differ, which most changes hit.
OWN = {nics: "address|errors:|_changes", rdma: "counters|guid|lid:|gids"}


def changed(text: str, own: str, draw: random.Random) -> str:
    lines = text.split("\n")
    at_own = [index for index, line in enumerate(lines) if re.search(own, line)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        index = draw.choice(at_own) if draw.random() < 0.7 else draw.randrange(len(lines))
        index = min(index, len(lines) - 1)
        path, colon, value = lines[index].partition(":")
        step = draw.random()
        if step < 0.94:
            lines[index] = f"{path}{colon}{draw.choice((*VALUES, value[::-1]))}"
        elif step < 0.97:
            lines.insert(
                index, draw.choice((lines[index], path.replace("/address", "/x/address")))
            )
        else:
            del lines[index]
    return "\n".join(lines)


@pytest.mark.parametrize("times", [25, pytest.param(400, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("profile", ["h100", "mi300x"])
@pytest.mark.parametrize(("module", "section"), [(nics, "nics"), (rdma, "rdma")])
def test_a_look_like_an_earlier_one(module, section, profile, times, monkeypatch):
    draw = random.Random(f"{section} {profile}")
    sections = {name: Output(text, 0) for name, text in recorded(profile).items()}

    def parse(text: str) -> Any:
        try:
            return module.parse({**sections, section: Output(text, 0)}, Policy())
        except ProbeError as error:
            return error.reason

    parse(sections[section].text)
    reread = 0
    for _ in range(times):
        text = changed(sections[section].text, OWN[module], draw)
        lines, known = text.split("\n"), module._TEMPLATES
        reread += known.adapted(lambda read, differing: read, lines) is not None
        result = parse(text)
        monkeypatch.setattr(module, "_TEMPLATES", type(known)())
        assert parse(text) == result
        monkeypatch.setattr(module, "_TEMPLATES", known)
    assert reread > times // 5
