"""What a deploy.py calls: `from nodeready.deploys import debuggable`, then `debuggable()`.

`debuggable` is all of it; `ptrace`, `limits` and so on are the operations of one subject. Each is
a deploy of pyinfra, and takes the settings of its operations: `debuggable(ptrace_scope=1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyinfra import host
from pyinfra.api import deploy

from nodeready.operations import STEPS
from nodeready.runs.deploy import pyinfra
from nodeready.runs.deploy.step import DeployStep, own_arguments


def _deploy(name: str, does: str, steps: Iterable[DeployStep]) -> Callable[..., None]:
    """A deploy of these steps. does: its docstring"""
    steps = tuple(steps)
    setting_names = tuple(dict.fromkeys(key for step in steps for key in step.settings))

    def run(*words: Any, **arguments: Any) -> None:
        pyinfra.call_settings(host, name, setting_names, own_arguments(arguments), words)

        def call_steps(**settings: Any) -> None:
            for step in steps:
                step(**{key: settings[key] for key in step.settings if key in settings})

        # Without this, the data of a deploy around this one would not hold here.
        deploy("nodeready", data_defaults=host.get_deploy_data())(call_steps)(**arguments)

    run.__name__ = run.__qualname__ = name
    run.__doc__ = does
    return run


def _of_subject(subject: str, does: str) -> Callable[..., None]:
    return _deploy(subject, does, [step for step in STEPS if step.subject == subject])


debuggable = _deploy(
    "debuggable",
    "Make every node debuggable: all operations, in the order of `nodeready deploy`.",
    STEPS,
)
ptrace = _of_subject("ptrace", "Let debuggers attach to the processes of the same user.")
core_dumps = _of_subject("core_dumps", "Let a crash leave a whole core file.")
limits = _of_subject("limits", "Give jobs the limits of the policy, in logins and in services.")
ssh_client = _of_subject("ssh_client", "Let ssh between the nodes ask nothing.")
pdsh = _of_subject("pdsh", "Let pdsh go by ssh, with the environment of the policy.")
iommu = _of_subject("iommu", "Give the kernel the IOMMU arguments of the hardware.")
debug_tools = _of_subject("debug_tools", "Install py-spy and the debuggers.")
gate = _of_subject("gate", "Install the node's own check, or remove it.")
