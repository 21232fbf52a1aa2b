"""The connections with the other paramiko: pyinfra's range has one, nodeready's has two.

requirements.lock has paramiko 4, because pyinfra 3.10 wants it (CONTRIBUTING.md, "Dependencies").
Here the one of requirements-paramiko.lock takes its place.
"""

from importlib.metadata import version
from pathlib import Path

import pytest

from tests.attacks.test_connection import (  # noqa: F401
    evil,
    test_a_hostile_sshd_costs_its_own_row,
)
from tests.command import Tool
from tests.lab.releases import install, put_in_front, unit_tests, versions
from tests.lab.test_ssh_transports import (  # noqa: F401
    agent,
    audited,
    site,
    test_behind_a_jump_host_a_node_that_is_down_costs_itself,
    test_each_setting_means_what_it_means_to_ssh,
)
from tests.paths import ROOT

# One worker installs it, once.
pytestmark = pytest.mark.xdist_group("other_paramiko")

LOCK = ROOT / "requirements-paramiko.lock"


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("paramiko") / "packages"
    return install(directory, "--no-deps", "--require-hashes", "-r", str(LOCK))


@pytest.fixture
def tool(tool: Tool, other: Path) -> Tool:
    return put_in_front(tool, other)


def test_it_is_the_other_one_and_units_of_the_connection_hold(other):
    (release,) = versions(other).values()
    assert release.partition(".")[0] != version("paramiko").partition(".")[0]
    unit_tests(
        other, "tests/unit/transport/test_connection.py", "tests/unit/transport/test_sha1.py"
    )
