"""The rules for attaching to a process: Yama's scope, its next-boot value, SELinux."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodeready.core import sysctl
from nodeready.core.base import Output, Probe, ProbeError, Section, number
from nodeready.core.policy import Policy

KEY = "kernel.yama.ptrace_scope"


_SCRIPT = r"""
    nr_value live /proc/sys/kernel/yama/ptrace_scope
    if [ -d /proc/sys/kernel ]; then printf 'proc=1\n'; fi
    nr_value enforcing /sys/fs/selinux/enforce
    nr_value deny_ptrace /sys/fs/selinux/booleans/deny_ptrace
    :
"""


@dataclass(frozen=True)
class Ptrace:
    """The rules of the kernel and of the boot files."""

    live: int | None  # Yama's scope in force, 0 to 3; None: no Yama, so the classic rules
    boot: sysctl.BootSetting  # the scope in the sysctl files, for the next boot
    deny_ptrace: bool | None = None  # SELinux denies ptrace, also to root; None: no such boolean


def parse(outputs: Mapping[str, Output], policy: Policy) -> Ptrace:
    """The observation. Raises ProbeError without /proc/sys, and for a scope unknown to Yama."""
    values = outputs["ptrace"].values()
    if "proc" not in values:
        raise ProbeError("/proc/sys/kernel is not there")
    live: int | None = None
    if "live" in values:
        live = number(values["live"], KEY)
        if live not in range(4):
            raise ProbeError(f"{KEY} has a value that Yama does not have", values["live"])
    deny = values.get("deny_ptrace", "").split()
    return Ptrace(
        live,
        sysctl.boot_value(sysctl.parse(outputs["sysctl"]), KEY),
        # The boolean file holds the current and the pending value.
        (deny[0] == "1" and values.get("enforcing") == "1") if deny else None,
    )


PROBE = Probe("ptrace", (Section("ptrace", lambda policy: _SCRIPT), sysctl.SECTION), parse)
