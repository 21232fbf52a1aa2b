"""Whose verdict is read: root alone writes one."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from nodeready.healthcheck import gate
from nodeready.healthcheck.gate import Verdict

GOOD = Verdict(1000.0, "boot", "policy", True)


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "nodeready"
    return folder / "verdict.json"


def _write(path, **more):
    made = replace(GOOD, time=time.time() - 1, boot_id=gate.boot_id(), **more)
    gate.write(made, str(path))
    return made


def test_only_roots_own_file_is_read(place, tmp_path):
    def read():
        return gate.read("policy", 60, str(place))

    assert read() is None
    made = _write(place)
    assert read().go
    assert read().boot_id == made.boot_id
    os.chmod(place, 0o646)
    assert read() is None
    _write(place)
    assert read() is not None, "written anew, it is root's alone again"
    os.chown(place, 65534, -1)
    assert read() is None
    os.chown(place, 0, -1)
    os.chmod(place.parent, 0o777)
    assert read() is None, "others could put an older one in its place"
    os.chmod(place.parent, 0o755)
    elsewhere = tmp_path / "elsewhere"
    os.replace(place, elsewhere)
    place.symlink_to(elsewhere)
    assert read() is None
    place.unlink()
    os.mkfifo(place)
    assert read() is None
    place.unlink()
    place.mkdir()
    assert read() is None
