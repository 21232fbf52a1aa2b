"""A node that lies in every word gets no plan with a path, a unit or a name of its own choice.

The observations are made from the types of their dataclasses, of words that steps look for and of
an attacker's: what no shell of ours would print, too. What a plan may name is written down here,
from the policy alone.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shlex
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nodeready.deploy import py_spy_binary
from nodeready.deploy.actions import Action, Directory, RemoveFile, Run, Script, WriteFile
from nodeready.deploy.plan import plan
from nodeready.operations import STEPS
from nodeready.policy import Policy
from nodeready.subjects.core_dumps.facts import CoreDumps
from nodeready.subjects.debug_tools.facts import PY_SPY_NOTE, DebugTools
from nodeready.subjects.gate.facts import Gate
from nodeready.subjects.gate.files import complete
from nodeready.subjects.iommu.facts import Entry, Iommu
from nodeready.subjects.limits.facts import Limits, Running, Unit
from nodeready.subjects.pdsh.facts import Pdsh, User
from nodeready.subjects.ptrace.facts import Ptrace
from nodeready.subjects.snapshot import Snapshot, judge
from nodeready.subjects.ssh_client.facts import SshClient
from nodeready.subjects.sysctl import Boot, Setting
from nodeready.transport import bundle

#: The words of a node: `lies` have EVIL in each, `words` are those that steps look for. `files`
#: and `gate` are the paths that a plan may always name.
TEXTS: dict[str, list[str]] = json.loads((Path(__file__).parent / "data/hostile.json").read_text())
EVIL = "3v1l"
SUBJECTS: dict[str, type] = {
    "ptrace": Ptrace, "core_dumps": CoreDumps, "limits": Limits, "ssh_client": SshClient,
    "pdsh": Pdsh, "iommu": Iommu, "debug_tools": DebugTools, "gate": Gate,
}  # fmt: skip
#: What a liar says, too, so that the steps come to their lies.
PLAUSIBLE: dict[str, dict[str, Any]] = {
    "ptrace": {"boot": Boot(Setting("2", f"/etc/sysctl.d/{EVIL}.conf:1"))},
    "core_dumps": {
        "boot": Boot(Setting("core", f"/etc/sysctl.d/{EVIL}.conf:1")),
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
        "users": (User("ml", f"/home/../{EVIL}"), User("bob", "/home/bob")),
        "users_unknown": "",
    },
    "gate": {"python": "python3", "digests": {}},
    "debug_tools": {"machine": "x86_64"},
    "limits": {
        "systemd": True,
        "units": {"slurmd": Unit("/x"), f"{EVIL}": Unit("/x"), "sshd": Unit("/x")},
        "running": (
            Running("slurmd", 7, {"nofile": (1, 1)}),
            Running("sshd", 8, {"core": (0, 0)}),
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
    """Any value of this type."""
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


# --- What a plan may name, from the policy alone.

_FORM = "[A-Za-z0-9_-]{0,200}"


@cache
def _paths(want: Policy) -> re.Pattern[str]:
    forms = [
        rf"/etc/sysctl\.d/{_FORM}nodeready-(ptrace|core_dumps)\.conf",
        rf"/etc/security/limits\.d/{_FORM}nodeready\.conf",
        rf"/etc/profile\.d/{_FORM}nodeready-pdsh\.c?sh",
        rf"/etc/default/grub\.d/{_FORM}nodeready\.cfg",
        *(
            rf"/etc/systemd/system/{re.escape(name)}\.service\.d/{_FORM}nodeready\.conf"
            for name in want.limit_services
        ),
        *map(re.escape, (*TEXTS["files"], *TEXTS["gate"], *filter(None, [want.gate_textfile]))),
    ]
    return re.compile("|".join(forms))


_DIRECTORY = "/usr/local/lib/nodeready"
_ROOTS = "|".join(map(re.escape, [_DIRECTORY, "/etc/nodeready", *TEXTS["gate"]]))
_WRITABLE = f"(?: (?:{_ROOTS})){{1,20}}"
_FOLDERS = "(?:/usr(?:/local)?)?/s?bin"
_ON_THE_WAY = (
    f"/|/usr|/usr/local|{_FOLDERS}|/etc|/etc/(?:ssh|ssh/ssh_config\\.d|pdsh|profile\\.d)|"
    "/usr/lib(?:64)?(?:/[A-Za-z0-9_.-]+){0,2}"
)
_READ = (
    "/etc/ssh/(?:ssh_known_hosts|ssh_config|ssh_config\\.d/00-nodeready\\.conf)|"
    f"/etc/pdsh/rcmd_default|/etc/profile\\.d/{_FORM}nodeready-pdsh\\.c?sh|"
    "/usr/lib(?:64)?(?:/[A-Za-z0-9_.-]+)?/pdsh/sshcmd\\.so"
)


@cache
def _commands(want: Policy) -> re.Pattern[str]:
    """Of the words of a command, with a space between them."""
    names = "|".join(map(re.escape, ("ssh", "pdsh.bin", *want.packages)))
    restart = "|".join(re.escape(name) for name in want.restart_services)
    wanted = want.iommu_args or ("iommu=pt", "intel_iommu=on")
    args = "(?: ?(?:" + "|".join(map(re.escape, wanted)) + r")){1,3}"
    options = "|".join(re.escape(token.partition("=")[0]) for token in wanted)
    remove = rf"(?:--remove-args=(?:(?:{options})(?:=[A-Za-z0-9_.,:-]*)? ?)+ )?"
    pattern = rf"{re.escape(want.core_pattern)}|\|/usr/lib/systemd/systemd-coredump %P %u %g"
    programs = rf"{_DIRECTORY}/(?:record|slurm-prolog|slurm-healthcheck)|/usr/local/bin/py-spy"
    return re.compile(
        "|".join(
            [
                r"systemctl (?:disable --now|mask) (?:apport|abrt-ccpp)\.service",
                r"systemctl (?:disable --now|enable|restart) nodeready\.timer",
                r"systemctl daemon-reload",
                rf"systemctl restart (?:{restart})\.service",
                rf"sysctl -w kernel\.yama\.ptrace_scope={want.ptrace_scope}",
                rf"sysctl -w kernel\.core_pattern=(?:{pattern})",
                r"setsebool -P deny_ptrace off",
                rf"chmod 0755 (?:{programs})",
                # An empty path is none.
                rf"chmod a\+rx (?:{_FOLDERS}/(?:{names})|{_ON_THE_WAY})?",
                rf"(?:chown root:root|chmod 0644) (?:{_READ})",
                rf"chmod a\+r (?:{_READ})",
                rf"(?:chown 0:0|chmod go-w) --{_WRITABLE}",
                rf"sh -c rmdir {_DIRECTORY} 2>/dev/null \|\| :",
                r"update-grub|grub2?-mkconfig -o /boot/grub2?/grub\.cfg",
                rf"grubby --update-kernel=ALL {remove}--args={args}",
            ]
        )
    )


def named(action: Action, want: Policy) -> Iterator[str]:
    """What an action names and may not."""
    if isinstance(action, Script):
        head, *words = action.argv
        if head == "nr_compile":
            good = re.fullmatch(r"python3(\.\d+)?|/usr/libexec/platform-python", words[0])
            files = [f"{_DIRECTORY}/{n}" for n in ("nodeready.pyz", "compiled.pyz", "compiled")]
            digest = dict(getattr(want, "gate_files", ())).get(files[0])
            if not good or words[1:] != [*files, digest]:
                yield f"compile {words}"
        elif head == "nr_note":
            if words != ["/usr/local/bin/py-spy", PY_SPY_NOTE]:
                yield f"note {words}"
        elif head == "nr_again":
            packages = {*want.packages, "openssh-client", "openssh-clients"}
            programs = "|".join(map(re.escape, ("ssh", "pdsh.bin", *want.packages)))
            good = words[0] in {"", "apt-get", "zypper", "dnf", "yum"} and words[1].isdigit()
            paths = all(re.fullmatch(f"-|{_FOLDERS}/(?:{programs})", item) for item in words[3::2])
            if not good or not paths or not set(words[2::2]) <= packages:
                yield f"again {words}"
        elif head != "nr_packages" or words[0] not in {"apt-get", "zypper", "dnf", "yum"}:
            yield f"script {action.argv}"
        elif not set(words[2:]) <= set(want.packages):
            yield f"packages {words}"
        return
    words = shlex.split(action.sh())
    if isinstance(action, WriteFile) and action.user:
        if action.user not in want.pdshrc_users or words[:2] != ["nr_as", action.user]:
            yield f"user {words}"
        if shlex.split(words[2])[:2] != ["nr_write", "$NR_HOME/.pdshrc"]:
            yield f"in a home {words}"
    elif isinstance(action, (WriteFile, RemoveFile)):
        if not _paths(want).fullmatch(action.path) or words[1] != action.path:
            yield f"path {action.path!r}"
    elif isinstance(action, Directory):
        if action.path != want.core_pattern.rpartition("/")[0]:
            yield f"directory {action.path!r}"
    elif not isinstance(action, Run) or not _commands(want).fullmatch(" ".join(action.argv)):
        yield f"command {action!r}"
    if isinstance(action, WriteFile):
        if any(EVIL in word for word in action.validator):
            yield f"validator {action.validator}"
        if action.owned and EVIL.encode() in action.content:
            yield f"content of {action.path}"


@pytest.fixture(scope="module")
def policies() -> list[Policy]:
    return [complete(policy, policy, bundle.program) for policy in POLICIES]


@pytest.mark.parametrize(
    ("cases", "least"), [(120, 2), pytest.param(2000, 20, marks=pytest.mark.nightly)]
)
def test_a_plan_names_nothing_that_the_node_chose(cases, least, policies, monkeypatch):
    monkeypatch.setattr(py_spy_binary, "binary", lambda version, machine: b"\x7fELF")
    steps: Counter[str] = Counter()
    actions: set[str] = set()
    for case in range(cases):
        want, node = policies[case % len(policies)], snapshot(random.Random(case))
        for change in plan(node, want, judge(node, want)).changes:
            steps[change.step] += 1
            for action in change.actions:
                actions.add(type(action).__name__)
                assert not list(named(action, want)), (case, change.step)
    # Every step had to plan something, and often: else the lies prove nothing.
    assert {step.name for step in STEPS} == {
        name for name, count in steps.items() if count > least
    }
    assert actions == {"WriteFile", "RemoveFile", "Directory", "Run", "Script"}
