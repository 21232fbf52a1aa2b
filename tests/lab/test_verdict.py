"""Whose verdict is read: root alone writes one."""

from __future__ import annotations

import os
import time

from nodeready.healthcheck import gate
from nodeready.healthcheck.gate import Verdict


def test_only_roots_own_file_is_read(tmp_path):
    place = tmp_path / "nodeready" / "verdict.json"
    made = Verdict(time.time() - 1, gate.boot_id(), "policy", True)

    def read() -> Verdict | None:
        return gate.read("policy", 60, str(place))

    assert read() is None
    gate.write(made, str(place))
    assert read().boot_id == made.boot_id
    os.chmod(place, 0o646)
    assert read() is None
    gate.write(made, str(place))
    assert read() is not None, "written anew, it is root's alone again"
    os.chown(place, 65534, -1)
    assert read() is None
    os.chown(place, 0, -1)
    os.chmod(place.parent, 0o777)
    assert read() is None, "others could put an older one in its place"
    os.chmod(place.parent, 0o755)
    place.rename(tmp_path / "elsewhere")
    for make in (
        lambda: place.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(place),
    ):
        make()
        assert read() is None
        place.unlink()
    place.mkdir()
    assert read() is None
