"""A node that lies in every word gets no plan with a path, a unit or a name of its own choice.

The observations are made from the types of their dataclasses, of words that steps look for and of
an attacker's: what no shell of ours would print, too. Each word of the attacker has EVIL in it,
whatever it looks like; nothing that a plan names has.
"""

import dataclasses
import json
import random
import re
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nodeready.core.policy import Policy
from nodeready.core.result import ALONE, FleetFacts
from nodeready.core.sysctl import BootSetting, Setting
from nodeready.fleet.transport import bundle
from nodeready.operations import STEPS
from nodeready.runs.deploy import py_spy_binary
from nodeready.runs.deploy.actions import Action, WriteFile
from nodeready.runs.deploy.command import plan
from nodeready.subjects.context import Judged
from nodeready.subjects.core_dumps.facts import CoreDumps
from nodeready.subjects.debug_tools.facts import DebugTools
from nodeready.subjects.gate.facts import Gate
from nodeready.subjects.gate.files import digests
from nodeready.subjects.iommu.facts import Entry, Iommu
from nodeready.subjects.limits.facts import Limits, Running, Unit
from nodeready.subjects.pdsh.facts import Pdsh, PdshUser
from nodeready.subjects.ptrace.facts import Ptrace
from nodeready.subjects.registry import CHANGED
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.ssh_client.facts import SshClient

#: `words` are those that steps look for; each of `lies` has EVIL in it; `ours` are files.
TEXTS: dict[str, list[str]] = json.loads((Path(__file__).parent / "data/hostile.json").read_text())
EVIL = "3v1l"
SUBJECTS: dict[str, type] = {
    "ptrace": Ptrace, "core_dumps": CoreDumps, "limits": Limits, "ssh_client": SshClient,
    "pdsh": Pdsh, "iommu": Iommu, "debug_tools": DebugTools, "gate": Gate,
}  # fmt: skip
#: What a liar says, too, so that the steps come to their lies.
PLAUSIBLE: dict[str, dict[str, Any]] = {
    "ptrace": {"boot": BootSetting(Setting("2", f"/etc/sysctl.d/{EVIL}.conf:1"))},
    "core_dumps": {
        "boot": BootSetting(Setting("core", f"/etc/sysctl.d/{EVIL}.conf:1")),
        "blocked": ("", "", 0),
        "closed": (),
        "directory_owner": 0,
        "in_place": (),
    },
    "iommu": {
        "family": "redhat",
        "tools": ("update-grub", "grubby", "grub2-mkconfig"),
        "boot": (Entry("/boot/x:1", ("iommu=soft",)), Entry("/b:1", (f"iommu={EVIL}.ok",))),
        "unreadable": (),
        "devices": ("0x74a1",),
    },
    "pdsh": {
        "installed": True,
        "users": (PdshUser("ml", f"/home/../{EVIL}"), PdshUser("bob", "/home/bob")),
        "users_unknown": "",
    },
    "gate": {"python": "python3", "digests": {}},
    "debug_tools": {"machine": "x86_64"},
    "limits": {
        "systemd": True,
        "units": {"slurmd": Unit("/x"), EVIL: Unit("/x")},
        "running": (
            Running("slurmd", 7, {"nofile": (1, 1)}),
            Running(EVIL, 8, {"core": (0, 0), "nofile": (1, 1)}),
        ),
        "ceiling": {},
        "nr_open": 2**40,
    },
}

_COMMON: dict[str, Any] = {
    **{"pdshrc_users": ("ml",), "limit_services": ("slurmd",), "restart_services": ("slurmd",)},
    **{"ssh_known_hosts": ("gpu001 ssh-ed25519 AAAA",), "ssh_client_hosts": ("gpu*",)},
}
POLICIES = (
    Policy(**_COMMON),
    Policy(**_COMMON, gate=True, core_handler="systemd-coredump", ssh_client_mode="accept-new"),
    Policy(**_COMMON, iommu_args=("iommu=pt", "pci=realloc"), ptrace_scope=1),
    Policy(
        **{**_COMMON, "ssh_client_hosts": ()}, ssh_client_mode="no", gate_textfile="/srv/x.prom"
    ),
)


def _word(chance: random.Random) -> str:
    return chance.choice(TEXTS["lies" if chance.random() < 0.4 else "words"])


def lie(hint: Any, chance: random.Random) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return lie(chance.choice(inner), chance)
    if hint is type(None):
        return None
    if hint is bool:
        return chance.random() < 0.5
    if hint is int:
        return chance.choice((0, 1, 2, 3, 7, 9, 256, 0o755, 0o1777, 2**64 - 1, -1, 10**30))
    if hint is bytes:
        text = "\n".join(_word(chance) for _ in range(chance.randrange(4)))
        return text.encode("utf-8", "surrogateescape")
    if origin is tuple:
        if inner[-1] is not Ellipsis:
            return tuple(lie(item, chance) for item in inner)
        return tuple(lie(inner[0], chance) for _ in range(chance.randrange(4)))
    if origin is not None and issubclass(origin, Mapping):
        size = chance.randrange(4)
        return {lie(inner[0], chance): lie(inner[1], chance) for _ in range(size)}
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        names = getattr(hint, "_fields", None) or [f.name for f in dataclasses.fields(hint)]
        return hint(**{name: lie(hints[name], chance) for name in names})
    assert hint is str, hint
    return _word(chance)


def snapshot(chance: random.Random) -> Snapshot:
    """A node that lies in all that is observed for a deploy."""
    files = {path: b"# ours\n" for path in TEXTS["lies"] + TEXTS["ours"] if chance.random() < 0.3}
    subjects = {name: lie(kind, chance) for name, kind in SUBJECTS.items()}
    for name, values in PLAUSIBLE.items():
        some = {key: value for key, value in values.items() if chance.random() < 0.8}
        subjects[name] = dataclasses.replace(subjects[name], **some)
    return Snapshot(subjects, files)


def named(action: Action) -> str:
    """All that an action names, but for the text of a file that is not nodeready's alone."""
    if isinstance(action, WriteFile):
        text = action.content.decode(errors="replace") if action.owned else ""
        return dataclasses.replace(action, content=b"", old=None, large=False).sh() + text
    # A wrong value of a kernel argument is named so that it is removed.
    return re.sub(rf"iommu={EVIL}\.ok", "", action.sh())


@pytest.mark.parametrize(
    ("cases", "least"), [(120, 2), pytest.param(2000, 20, marks=pytest.mark.nightly)]
)
def test_a_plan_names_nothing_that_the_node_chose(cases, least, monkeypatch):
    monkeypatch.setattr(py_spy_binary, "binary", lambda version, machine: b"\x7fELF")
    steps: Counter[str] = Counter()
    actions: set[str] = set()
    for case in range(cases):
        want = POLICIES[case % len(POLICIES)]
        fleet = FleetFacts(gate_files=digests(want, bundle.program)) if want.gate else ALONE
        node = Judged("n", want, fleet).judged(snapshot(random.Random(case)))
        for change in plan(node, CHANGED).changes:
            steps[change.step] += 1
            for action in change.actions:
                actions.add(type(action).__name__)
                assert EVIL not in named(action), (case, change.step)
                assert getattr(action, "user", "") in ("", *want.pdshrc_users), (case, change.step)
    # Every step had to plan something, and often: else the lies prove nothing.
    planned = {name for name, count in steps.items() if count > least}
    assert {step.name for step in STEPS} == planned
    assert actions == {"WriteFile", "RemoveFile", "MakeDirectory", "RunCommand", "Script"}
