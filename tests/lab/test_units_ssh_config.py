"""ssh's configuration: names that share a question have nothing of each other, as ssh -G says."""

import random
import subprocess
from pathlib import Path

import pytest

from nodeready.fleet.transport.ssh_config import SshConfig
from tests.cases import read_table

#: Names, and of what their configuration is drawn: patterns, lines, lines that ask for more.
NAMES, PATTERNS, VALUES, STRANGE = read_table(__file__, "DRAWN")
COMPARED = read_table(__file__, "COMPARED")


def told(words: list[str]) -> dict[str, list[str]]:
    done = subprocess.run(["ssh", "-G", *words], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for row in done.stdout.splitlines():
        key, _, value = row.partition(" ")
        found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("seed", range(24))
def test_what_is_shared_between_names_is_what_ssh_says_of_each(seed, tmp_path):
    draw = random.Random(seed)
    inner = tmp_path / "inner"
    values = [one.format(inner=inner) for one in VALUES]
    choices = [*values, *(STRANGE if seed % 3 == 0 else ())]

    def block() -> str:
        rows = draw.sample(choices, draw.randint(1, 4))
        rows = [row for row in rows if not row.startswith("Include")] or ["Port 9"]
        return f"Host {draw.choice(PATTERNS)}\n" + "".join(f"  {row}\n" for row in rows)

    inner.write_text("".join(block() for _ in range(3)))
    rows = [block() for _ in range(6)]
    rows.insert(draw.randint(0, 5), f"Host {draw.choice(PATTERNS)}\nInclude {inner}\nPort 7\n")
    file = tmp_path / "config"
    file.write_text("".join(rows))
    config = SshConfig(str(file))
    for name in NAMES:
        found, right = config.settings_of(name), told(["-F", str(file), "--", name])
        for key in COMPARED:
            mine = list(found.values.get(key, ()))
            assert mine == right.get(key, []), (key, name, file.read_text(), inner.read_text())
        assert found.hostname == right["hostname"][0], (name, file.read_text())
        known = " ".join(found.values["userknownhostsfile"])
        assert known.replace("~", str(Path.home())) == right["userknownhostsfile"][0]


def test_names_for_which_the_same_lines_hold_share_one_question(tmp_path, monkeypatch):
    asked = []
    ask = SshConfig._run_ssh_g
    monkeypatch.setattr(SshConfig, "_run_ssh_g", lambda *how: asked.append(how[1]) or ask(*how))
    file = tmp_path / "config"
    blocks = "".join(f"Host gpu{n}\nHostName 10.1.0.{n}\n" for n in range(200))
    file.write_text(f"{blocks}Host gpu*\nControlPath /run/%C\nHost gpu1?\nPort 2222\n")
    config = SshConfig(str(file))
    found = {f"gpu{n}": config.settings_of(f"gpu{n}") for n in range(200)}
    # One without any file, one for each port.
    assert len(asked) == 3
    assert [found["gpu7"].hostname, found["gpu13"].hostname] == ["10.1.0.7", "10.1.0.13"]
    assert (found["gpu7"].port, found["gpu13"].port, found["gpu130"].port) == (22, 2222, 22)
    assert len({one.value("controlpath") for one in found.values()}) == 200
    # Another user is another question, and so is each name of a file that asks for more.
    assert config.settings_of("gpu7", "bob").user == "bob"
    assert len(asked) == 4
