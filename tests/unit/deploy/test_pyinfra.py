"""The settings of an operation under pyinfra: where they come from, and what a wrong one says."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pyinfra import logger
from pyinfra.api import Host, Inventory, State, deploy
from pyinfra.api.connect import connect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_host, ctx_state

from nodeready import deploys
from nodeready.core import probe_script, shell
from nodeready.core.policy import Policy
from nodeready.core.probe_script import parse_answer
from nodeready.operations import STEPS, core_dumps, gate, ptrace
from nodeready.runs.deploy import pyinfra
from nodeready.subjects import snapshot
from nodeready.subjects.context import Judged
from nodeready.subjects.registry import CHANGED, SUBJECTS
from nodeready.subjects.snapshot import Snapshot
from tests import declared
from tests.builders.results import fail, ok
from tests.cases import with_table
from tests.helpers import here
from tests.paths import ROOT
from tests.unit.commands import pyinfra as run_pyinfra

#: Where a setting can come from, from the weakest to the strongest.
ORIGINS = ("default", "deploy", "all", "group", "host", "command line", "assigned", "argument")
#: The data of each of these.
Origins = dict[str, dict[str, Any]]


@contextmanager
def on_this_machine(data: Origins) -> Iterator[Host]:
    """A host of pyinfra on which operations are prepared, and never executed."""
    inventory = Inventory(
        ([("@local", data.get("host", {}))], data.get("all", {})),
        override_data=data.get("command line"),
        gpus=(["@local"], data.get("group", {})),
    )
    state = State(inventory)
    connect_all(state)
    (host,) = inventory
    with ctx_state.use(state), ctx_host.use(host):
        yield host


def policy_of(call: Callable[..., Any], data: Origins) -> Policy:
    """The policy by which the node is judged when a deploy makes this call."""

    @deploy("mine", data_defaults=data.get("deploy"))
    def mine() -> None:
        call(**data.get("argument", {}))

    with on_this_machine(data) as host:
        for key, value in data.get("assigned", {}).items():
            setattr(host.data, key, value)
        mine()
        *_, policy = pyinfra._run(host).nodes[host.name]
    return policy


@pytest.mark.parametrize("strongest", ORIGINS)
def test_the_stronger_origin_wins(strongest):
    """Each weaker one has the setting, too; a deploy inside of another does not hide its data."""
    last = ORIGINS.index(strongest)
    data = {ORIGINS[i]: {"core_retention_days": i} for i in range(1, last + 1)}
    for call in (core_dumps.directory, deploys.core_dumps):
        assert policy_of(call, data).core_retention_days == (last or 14)


@with_table("name, arguments, defaults, line")
def test_a_wrong_setting_ends_the_run_with_one_line(name, arguments, defaults, line):
    """defaults: the data of the deploy around the call."""
    call = pkgutil.resolve_name(f"nodeready.{name}")
    with pytest.raises(PyinfraError) as caught:
        policy_of(call, {"argument": arguments, "deploy": defaults})
    assert str(caught.value) == line


def test_a_value_without_a_name_is_refused():
    with (
        on_this_machine({}),
        pytest.raises(PyinfraError, match=r"^ptrace\.scope: 1 has no name: "),
    ):
        ptrace.scope(1)


#: Lines of a deploy.py, a key of the inventory -> the end of the one line about it.
WRONG_LINES = [
    # Also where pyinfra prepares without asking what would change (-y).
    (ROOT.joinpath("deploy.py").read_text().splitlines(), ["--data", "ptrace_scop=1"],
     "command line: unknown setting ptrace_scop: did you mean ptrace_scope?"),
    (["from nodeready.operations import ptrace", "ptrace.scope(", "    ptrace_scop=1)"], [],
     " deploy.py:2: ptrace.scope: unknown setting ptrace_scop: did you mean ptrace_scope?"),
    (["from pyinfra.api import deploy", "from nodeready.deploys import limits",
      "@deploy('mine')", "def mine():", "    limits(limit_nofil=1)", "mine()"], [],
     " deploy.py:5: limits: unknown setting limit_nofil: did you mean limit_nofile?"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "data", "message"), WRONG_LINES)
def test_a_wrong_key_is_one_line_with_its_place(lines, data, message, tmp_path):
    (tmp_path / "deploy.py").write_text("\n".join(lines))
    done = run_pyinfra("-y", *data, "@local", "deploy.py", cwd=tmp_path)
    shown = [line for line in done.stderr.splitlines() if "unknown setting" in line]
    assert (done.returncode, len(shown)) == (1, 1), done.stderr
    assert shown[0].endswith(message), done.stderr


def test_an_operation_takes_the_settings_that_its_actions_read():
    """tests/declared.py compares them whenever a test plans a step; these have no check's own."""
    assert ptrace.scope.settings == ("ptrace_scope",)
    assert "gate_textfile" in gate.leftover.settings
    # The node gets the whole policy but for the lines of host keys.
    assert {*vars(Policy())} - {*gate.program.settings} == {"ssh_known_hosts"}


def test_an_operation_is_for_pyinfra_what_its_own_operations_are():
    for step in STEPS:
        name = step.name.partition(".")[2]
        assert (step.__name__, step.__module__) == (name, f"nodeready.operations.{step.subject}")
        assert step.__doc__ == step.make_actions.__doc__
        assert callable(step._inner)


def test_every_step_repairs_checks_of_its_own_subject():
    assert tuple(dict.fromkeys(step.subject for step in STEPS)) == CHANGED
    for step in STEPS:
        assert step.fixes
        assert all(check.startswith(f"{step.subject}.") for check in step.fixes), step.name
        assert step.make_actions.__doc__


def test_every_subject_with_operations_is_a_deploy():
    assert {name for name in CHANGED if not getattr(deploys, name).__doc__} == set()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_an_operation_warns_once_of_what_a_person_has_to_do(step, monkeypatch):
    """Also of the checks of its subject that no operation repairs; pyinfra calls it twice."""
    checks = SUBJECTS[step.subject].checks
    by_hand = [check.id for check in checks if check.fixed_by in ("", step.name)]
    other = [check.id for check in checks if check.id not in by_hand]
    results = [
        *(fail(check, "2", "1\x1b", "/etc/x:3", f"repair {check}") for check in by_hand),
        *(fail(check, "2", "1", fix=f"repair {check}") for check in other),
        *(ok(check) for check in by_hand),
    ]
    node = Judged("@local", Policy(), snapshot=Snapshot({step.subject: None}), results=(*results,))
    monkeypatch.setattr(pyinfra, "judged", lambda host, call: node)
    lines = []
    monkeypatch.setattr(Host, "log", lambda host, text, log_func: lines.append((text, log_func)))
    with on_this_machine({}):
        for _ in range(2):
            assert list(step._inner()) == []
    shown = [
        (f"fail {check}: 1\\x1b (want 2)  [/etc/x:3]; fix: repair {check}", logger.warning)
        for check in by_hand
    ]
    assert lines == shown


#: Every setting on which a probe of an operation's subject depends has another value than usual.
UNUSUAL = Policy(
    pdshrc_users=("root",),
    ssh_client_hosts=("gpu*",),
    gate=True,
    iommu_args=("iommu=pt",),
    limit_services=("slurmd", "k3s"),
)


@pytest.mark.parametrize("policy", [Policy(), UNUSUAL], ids=["default", "unusual"])
def test_no_parser_reads_a_setting_that_its_script_does_not(policy):
    """So the observation of a subject whose script is the same holds under another policy."""
    chosen = snapshot.probes(CHANGED)
    sections = snapshot.sections(chosen)
    text = probe_script.make_script(sections, policy, "n" * 16)
    printed = here(*shell.command(text, 60, "nodeready:test")).stdout
    outputs = parse_answer(printed, sections, "n" * 16)
    for probe in chosen:
        in_script, in_parser = declared.recorded(policy), declared.recorded(policy)
        for section in probe.sections:
            section.script(in_script)
        probe.parse(outputs, in_parser)
        unread = declared.read(in_parser) - declared.read(in_script)
        assert not unread, f"{probe.subject}: {unread}"


#: They share the section that asks what users can reach on the way to a file of the policy.
REACHED = {"debug_tools", "pdsh", "ssh_client"}


@pytest.mark.parametrize(("changed", "subjects"), [
    ({"ptrace_scope": 2, "limit_nofile": 4096, "gate_interval_s": 60}, set()),
    ({"core_pattern": "/var/crash/core.%p"}, set()),
    ({"core_pattern": "/srv/cores/core.%p"}, {"core_dumps", *REACHED}),
    ({"packages": ("gdb",), "gate": True}, {"gate", *REACHED}),
])  # fmt: skip
def test_only_what_depends_on_an_argument_is_probed_again(changed, subjects):
    assert snapshot.differently_probed(Policy(), Policy(**changed), CHANGED) == subjects
