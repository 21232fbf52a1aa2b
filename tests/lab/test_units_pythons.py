"""`nodeready run` and the node's program under other Pythons of this machine."""

from pathlib import Path

import pytest

from nodeready import __version__
from tests.paths import ROOT
from tests.unit.conftest import bundle_file, pythons
from tests.unit.healthcheck.test_compiled import run as run_alone
from tests.unit.healthcheck.test_compiled import takes_its_code
from tests.unit.node.test_debugger import (  # noqa: F401
    job,
    test_a_breakpoint_waits_and_steps_and_the_job_goes_on,
    test_a_rank_that_runs_is_interrupted_and_a_killed_user_changes_nothing,
    test_an_exception_is_examined_before_the_program_ends,
)
from tests.unit.node.test_run import (  # noqa: F401
    script,
    test_all_stacks_on_a_signal_also_in_c_with_the_lock,
    test_the_users_own_path_and_sitecustomize_stay,
)
from tests.unit.transport.test_bundle import run

__all__ = ["bundle_file", "pythons"]

_BUILD = (
    "import sys, hashlib; sys.path.insert(0, sys.argv[1]); "
    "from nodeready.fleet.transport import bundle; "
    "from nodeready.core.policy import make_policy; "
    "made = bundle.build(make_policy({'mounts': ('/a', '/b'), 'waivers': {'nics.mtu': 'x'}})); "
    "print(hashlib.sha256(made).hexdigest())"
)
_MAKE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nodeready.agent.gate import main; "
    "main.compile_bundle(*sys.argv[1:])"
)


@pytest.fixture(params=["3.9", "3.13"])
def python(request: pytest.FixtureRequest) -> str:
    """The oldest Python of a node, and a newer one."""
    found = [*Path("/usr/bin").glob(f"python{request.param}")]
    found += Path.home().glob(f".pyenv/versions/{request.param}.*/bin/python")
    if not found:
        pytest.skip(f"no Python {request.param}")
    return str(found[0])


def test_the_same_content_makes_the_same_bytes_in_every_python(pythons):
    digests = {
        run(python, "-B", "-c", _BUILD, ROOT, env={"PYTHONHASHSEED": str(seed)}).stdout
        for seed, (version, python) in enumerate(pythons.items())
        # These read the tables of knowledge without a package.
        if version >= (3, 11)
    }
    assert [len(digest.strip()) for digest in digests] == [64]


def test_it_runs_in_every_python_from_3_9_on_and_no_older_one_shows_a_traceback(
    pythons, bundle_file
):
    for version, python in pythons.items():
        done = run(python, "-I" if version > (3, 3) else "-E", bundle_file, "--version", cwd="/")
        if version >= (3, 9):
            assert (done.returncode, done.stdout) == (0, f"{__version__}\n"), (version, done)
        else:
            (line,) = done.stderr.splitlines()
            assert done.returncode == 1
            assert line.startswith("nodeready needs Python 3.9 or newer; this is ")
            assert line.endswith(f"({python})")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_each_python_takes_its_own_code_and_any_other_the_sources(
    pythons, bundle_file, tmp_path, every
):
    """Compiling takes some 10 s: the oldest and the newest do it, nightly all."""
    pythons = {version: path for version, path in pythons.items() if version >= (3, 9)}
    for version in pythons if every else (min(pythons), max(pythons)):
        python = pythons[version]
        out = tmp_path / f"{version[1]}.pyz"
        done = run_alone(python, "-c", _MAKE, bundle_file, out, "/usr/local/lib/x.pyz")
        assert (done.returncode, done.stderr) == (0, ""), done
        assert takes_its_code(python, out)
        for other in pythons.values():
            assert run_alone(other, out, "--version").stdout == f"{__version__}\n", other
