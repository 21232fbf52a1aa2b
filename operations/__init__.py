"""CHANGE a node: each operation makes the checks pass that name the operation in ``fixed_by``.

An operation does not judge: it asks the check. A subject whose checks name operations has them in
a module of its name, with STEPS. STEPS here is the order in which `nodeready deploy` runs them:
the registry's order of subjects, and within a subject the order of its STEPS; `nodeready.deploys`
takes the same for pyinfra.
"""

from __future__ import annotations

from importlib import import_module

from nodeready.runs.deploy.pyinfra import DeployStep
from nodeready.subjects.registry import CHANGED

#: subject -> the module of its operations.
MODULES = {name: import_module(f"nodeready.operations.{name}") for name in CHANGED}
STEPS: tuple[DeployStep, ...] = tuple(step for module in MODULES.values() for step in module.STEPS)
