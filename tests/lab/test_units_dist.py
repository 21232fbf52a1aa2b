"""What is published: the wheel and the sdist, which hold the package, and the manual page."""

import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import nodeready
from tests.paths import DOCS, ROOT

NAME = f"nodeready-{nodeready.__version__}"
INFO = f"{NAME}.dist-info"


def build(source: Path, target: Path) -> tuple[Path, Path]:
    """The sdist of a checkout, and the wheel made of that sdist."""
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source],
        env={**os.environ, "SOURCE_DATE_EPOCH": "1750000000"},
        check=True,
        capture_output=True,
    )
    (sdist,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    return sdist, wheel


def package() -> set[str]:
    """Every file of the package, those behind the two links to the top level as well."""
    found = set()
    for where, folders, files in os.walk(ROOT / "nodeready", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {str(Path(where, name).relative_to(ROOT)) for name in files}
    return found


def shared() -> set[str]:
    """The files that come with the package: alerts, a dashboard, examples."""
    files = (path for path in (ROOT / "share").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT / "share")) for path in files}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_the_package_and_nothing_else(built):
    members = zipfile.ZipFile(built[1]).infolist()
    names = {member.filename for member in members}
    # Links of the checkout arrive as files, here and there.
    assert not [one.filename for one in members if stat.S_ISLNK(one.external_attr >> 16)]
    about = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    about |= {f"{INFO}/licenses/LICENSE", f"{NAME}.data/data/share/man/man1/nodeready.1"}
    about |= {f"{NAME}.data/data/share/nodeready/{name}" for name in shared()}
    assert names == package() | about
    for part in ("operations/ptrace.py", "templates/sysctl.conf.j2", "sh/change.sh"):
        assert f"nodeready/{part}" in names
    assert "nodeready/py.typed" in names


def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    with tarfile.open(built[0]) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)
    names = {member.name.removeprefix(f"{NAME}/") for member in members}
    outside = {"docs/nodeready.1", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"}
    outside |= {f"share/{name}" for name in shared()}
    assert names == package() | outside | {"PKG-INFO", ".gitignore"}


def test_another_checkout_builds_the_same_bytes(built, tmp_path):
    """Other times, another place, another umask."""
    other = shutil.ignore_patterns(".git", ".venv", "tests", "__pycache__", ".*_cache", "dist")
    copy = shutil.copytree(ROOT, tmp_path / "copy", symlinks=True, ignore=other)
    for path in copy.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o600)
            os.utime(path, (1600000000, 1600000000))
    again = build(copy, tmp_path / "dist")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_the_wheel_runs_without_the_checkout(built, tmp_path):
    """Installed alone, its dependencies from this environment, away from the checkout."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", built[1]], check=True, cwd=tmp_path)
    (site,) = venv.glob("lib/python*/site-packages")
    # A directory named in a .pth file gives its packages; its own .pth files, of which one is
    # the checkout's, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def say(*words: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        command = [venv / "bin" / words[0], *words[1:]]
        return subprocess.check_output(command, cwd=tmp_path, env=env, text=True)

    where = say("python", "-c", "import nodeready; print(nodeready.__file__)")
    assert Path(where.strip()).parent == site / "nodeready"
    assert say("nodeready", "--version").split()[-1] == nodeready.__version__
    assert "ptrace.scope" in say("nodeready", "explain", "ptrace.scope")
    assert (venv / "share/man/man1/nodeready.1").is_file()
    shutil.copy(ROOT / "deploy.py", tmp_path)
    say("python", "-m", "pyinfra", "--dry", "@local", "deploy.py")
    assert (venv / "share/nodeready/prometheus/nodeready.rules.yml").is_file()


def test_man_understands_the_manual():
    if not shutil.which("man"):
        pytest.skip("man is not installed (man-db)")
    words = ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", str(DOCS / "nodeready.1")]
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=True)
    assert done.stderr == ""
    assert "EXIT STATUS" in re.sub(".\x08", "", done.stdout)
