"""What a deploy.py calls: `from nodeready.deploys import debuggable`, then `debuggable()`.

`debuggable` is all of it; `ptrace`, `limits` and so on, one for each subject with operations, are
those of the subject. Each is a deploy of pyinfra, and takes the settings of its operations:
`debuggable(ptrace_scope=1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyinfra import host
from pyinfra.api import deploy

from nodeready.operations import MODULES, STEPS
from nodeready.runs.deploy import pyinfra
from nodeready.runs.deploy.pyinfra import DeployStep, own_arguments


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


debuggable = _deploy(
    "debuggable",
    "Make every node debuggable: all operations, in the order of `nodeready deploy`.",
    STEPS,
)
for _subject, _module in MODULES.items():
    globals()[_subject] = _deploy(_subject, _module.__doc__ or "", _module.STEPS)
