"""Give jobs their resource limits: at login, and in the services that start jobs."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.core.policy import Policy
from nodeready.core.templates import render
from nodeready.runs.deploy.actions import Action, RunCommand, name_after, own_file
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.limits.checks import item_text, possible_limits, restarts, unit_value
from nodeready.subjects.limits.facts import Limits
from nodeready.subjects.snapshot import Snapshot

NAME = "zz-nodeready.conf"
LIMITS_D = "/etc/security/limits.d"


def _last(snapshot: Snapshot, directory: str, other: str, content: bytes) -> Iterator[Action]:
    """Our file in a directory where the last file wins; ours under another name is removed."""
    path = f"{directory}/{name_after(NAME, other)}"
    yield from own_file(snapshot, path, content, instead_of=NAME)


@step()
def logins(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Write the limits of new logins into a file of limits.d that is read last."""
    limits: Limits = snapshot["limits"]
    lines = [
        f"{domain} - {item} {item_text(limit, item)}"
        for domain in policy.limit_domains
        for item, limit in possible_limits(limits, policy).items()
    ]
    content = render("limits/limits.conf.j2", lines=lines)
    yield from _last(snapshot, LIMITS_D, limits.pam.last, content)


@step()
def services(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Write a drop-in with the limits for each of the policy's services that is installed."""
    limits: Limits = snapshot["limits"]
    values = possible_limits(limits, policy).items()
    lines = [f"Limit{item.upper()}={unit_value(limit, item)}" for item, limit in values]
    content = render("limits/service.conf.j2", lines=lines)
    for service in policy.limit_services:
        if service not in limits.units:
            continue
        unit = limits.units[service]
        yield from _last(snapshot, f"/etc/systemd/system/{service}.service.d", unit.last, content)
    if limits.systemd:
        yield RunCommand(("systemctl", "daemon-reload"))


# A restart waits for the service to stop, up to systemd's own 90 s.
@step(timeout_s=150)
def restart(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Restart the services that the policy lets us restart, so that their limits take effect."""
    # systemctl restart alone would start a unit with the settings that systemd last read.
    yield RunCommand(("systemctl", "daemon-reload"))
    for service in restarts(snapshot["limits"], policy):
        yield RunCommand(("systemctl", "restart", f"{service}.service"), f"restart {service}")


STEPS = (logins, services, restart)
