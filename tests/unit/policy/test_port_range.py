"""``--ports``: one spelling for the commands and for the program on the node."""

import pytest

from nodeready.core.exit_codes import Refused
from nodeready.core.settings import port_range
from nodeready.runs.values import read_ports


@pytest.mark.parametrize(
    ("words", "span"),
    [("29500-29510", (29500, 29510)), (" 80 ", (80, 80)), ("1-65535", (1, 65535))],
)
def test_a_range_or_one_port(words, span):
    assert port_range(words) == read_ports(words) == span


@pytest.mark.parametrize("words", ["", "x", "0", "1-65536", "5-4", "-5", "1 - 2", "\u0661"])
def test_what_is_no_range(words):
    with pytest.raises(ValueError, match="must be FIRST-LAST, two ports from 1 to 65535"):
        port_range(words)
    with pytest.raises(Refused, match=rf"^--ports {words}: must be FIRST-LAST"):
        read_ports(words)
