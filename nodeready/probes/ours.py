"""The files of ours on a node, for diffs and so that a change knows what it replaces."""

from __future__ import annotations

from collections.abc import Mapping

from nodeready.policy import Policy
from nodeready.probes.base import Output, Probe, Section, file_lines

#: Every file that we own outright. Its path contains the project's name.
PATHS = (
    "/etc/sysctl.d/*nodeready*.conf",
    "/etc/tmpfiles.d/*nodeready*.conf",
    "/etc/systemd/coredump.conf.d/*nodeready*.conf",
    "/etc/security/limits.d/*nodeready*.conf",
    "/etc/systemd/system/*.service.d/*nodeready*.conf",
    "/etc/profile.d/*nodeready*",
    "/etc/ssh/ssh_config.d/*nodeready*.conf",
    "/etc/default/grub.d/*nodeready*.cfg",
    "/etc/systemd/system/nodeready.*",
    "/etc/cron.d/nodeready",
    "/etc/nodeready/policy.json",
    # Not the bundle, which is no text.
    "/usr/local/lib/nodeready/record",
    "/usr/local/lib/nodeready/slurm-*",
)


def _script(policy: Policy) -> str:
    return rf"""
    set --
    for nr_file in {" ".join(PATHS)}; do
        if [ -f "$nr_file" ]; then set -- "$@" "$nr_file"; fi
    done
    if [ $# != 0 ]; then nr_lines "$@"; fi
    """


def parse(outputs: Mapping[str, Output], policy: Policy) -> dict[str, bytes]:
    """The content of each file of ours, by path; they all end with a newline."""
    lines: dict[str, list[str]] = {}
    for line in file_lines(outputs["ours"].require()):
        lines.setdefault(line.path, []).append(line.text + "\n")
    return {path: "".join(text).encode("utf-8", "surrogateescape") for path, text in lines.items()}


PROBE = Probe("ours", (Section("ours", _script),), parse)
