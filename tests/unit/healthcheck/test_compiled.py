"""The program compiled for one Python: that one takes the code, every other one the sources."""

from __future__ import annotations

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from nodeready.healthcheck import main

_MAKE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nodeready.healthcheck import main; "
    "main.compile_bundle(*sys.argv[1:])"
)


def run(python: str, *words: object) -> subprocess.CompletedProcess[str]:
    argv = [python, "-I", "-S", "-B", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def without_sources(path: Path) -> Path:
    """A copy that has the code alone."""
    bare = path.with_name("bare.pyz")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bare, "w") as new:
        for name in old.namelist():
            if not name.endswith(".py"):
                new.writestr(name, old.read(name))
    return bare


def test_each_python_takes_its_own_code_and_any_other_the_sources(pythons, bundle_file, tmp_path):
    new_enough = {version: path for version, path in pythons.items() if version >= (3, 9)}
    for version, python in new_enough.items():
        out = tmp_path / f"{version[1]}.pyz"
        done = run(python, "-c", _MAKE, bundle_file, out, "/usr/local/lib/x.pyz")
        assert (done.returncode, done.stderr) == (0, ""), done
        of, made, magic = done.stdout.split()
        assert of == hashlib.sha256(bundle_file.read_bytes()).hexdigest()
        assert made == hashlib.sha256(out.read_bytes()).hexdigest()
        assert len(bytes.fromhex(magic)) == 4
        bare = without_sources(out)
        for other, runs in new_enough.items():
            assert run(runs, out, "--version").stdout == "0.1.0\n", (version, other)
            if other == version:
                done = run(runs, bare, "audit", "--only", "nosuch")
                assert done.returncode == 2, done
                assert "no such check" in done.stderr


def test_it_holds_all_that_the_program_holds(bundle_file):
    program = bundle_file.read_bytes()
    made = main.compiled(program, "/x")
    with (
        zipfile.ZipFile(io.BytesIO(program)) as old,
        zipfile.ZipFile(io.BytesIO(made)) as new,
    ):
        names = old.namelist()
        assert {*new.namelist()} == {*names, *(f"{n}c" for n in names if n.endswith(".py"))}
        assert all(new.read(name) == old.read(name) for name in names)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04"])
def test_what_is_no_program_leaves_no_file(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(zipfile.BadZipFile):
        main.compile_bundle(str(tmp_path / "x"), str(tmp_path / "y"), "/z")
    assert not (tmp_path / "y").exists()
