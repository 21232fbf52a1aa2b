"""The exit codes for the command line, and the error that means 2."""

from __future__ import annotations

import click

from nodeready.exit_codes import (
    CHECK,
    FAILED,
    INTERRUPTED,
    OK,
    UNREACHABLE,
    USAGE,
    audit_code,
    deploy_code,
    exit_code,
    nagios_code,
    ready_code,
    stacks_code,
)

__all__ = [
    "CHECK",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "UNREACHABLE",
    "USAGE",
    "Refused",
    "audit_code",
    "deploy_code",
    "exit_code",
    "nagios_code",
    "ready_code",
    "stacks_code",
]


class Refused(click.ClickException):
    """An inventory, policy or file of the user's that cannot be used: its words, and exit 2.

    Unlike click.UsageError, no advice to read the command's --help follows.
    """

    exit_code = USAGE
