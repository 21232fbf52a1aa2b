"""What the lab says when it cannot do what it was asked."""

from __future__ import annotations


class LabError(Exception):
    """One line for a person: what happened, where, what to do. Never a traceback."""


class LabUnavailable(LabError):
    """This machine cannot run a lab: not root, a program missing, or namespaces refused."""
