"""The program compiled for one Python: that one takes the code, every other one the sources."""

import hashlib
import subprocess
import sys
import zipfile
from importlib.util import MAGIC_NUMBER

import pytest

from nodeready.agent.gate import main


def run(python, *words):
    argv = [python, "-I", "-S", "-B", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def without_sources(path):
    bare = path.with_name("bare.pyz")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(bare, "w") as new:
        for name in old.namelist():
            if not name.endswith(".py"):
                new.writestr(name, old.read(name))
    return bare


def takes_its_code(python, compiled):
    done = run(python, without_sources(compiled), "audit", "--only", "nosuch")
    return done.returncode == 2 and "no such check" in done.stderr


def test_this_python_takes_its_own_code(bundle_file, tmp_path, capsys):
    out = tmp_path / "x.pyz"
    main.compile_bundle(str(bundle_file), str(out), "/usr/local/lib/x.pyz")
    program, compiled, magic = capsys.readouterr().out.split()
    assert program == hashlib.sha256(bundle_file.read_bytes()).hexdigest()
    assert compiled == hashlib.sha256(out.read_bytes()).hexdigest()
    assert bytes.fromhex(magic) == MAGIC_NUMBER
    with zipfile.ZipFile(bundle_file) as old, zipfile.ZipFile(out) as new:
        names = old.namelist()
        assert {*new.namelist()} == {*names, *(f"{n}c" for n in names if n.endswith(".py"))}
        assert all(new.read(name) == old.read(name) for name in names)
    assert takes_its_code(sys.executable, out)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04"])
def test_a_file_that_is_no_program_is_not_compiled(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(zipfile.BadZipFile):
        main.compile_bundle(str(tmp_path / "x"), str(tmp_path / "y"), "/z")
    assert not (tmp_path / "y").exists()
