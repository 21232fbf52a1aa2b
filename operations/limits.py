"""Give jobs their resource limits: at login, and in the services that start jobs."""

from __future__ import annotations

from collections.abc import Iterator

from nodeready.deploy.actions import Action, Run
from nodeready.deploy.step import name_after, own_file, step
from nodeready.policy import Policy
from nodeready.subjects.limits.checks import possible_limits, restarts, shown, unit_value
from nodeready.subjects.limits.facts import Limits
from nodeready.subjects.snapshot import Snapshot
from nodeready.subjects.templates import render

NAME = "zz-nodeready.conf"
LIMITS_D = "/etc/security/limits.d"


def _last(seen: Snapshot, directory: str, other: str, content: bytes) -> Iterator[Action]:
    """Our file in a directory where the last file wins; ours under another name is removed."""
    path = f"{directory}/{name_after(NAME, other)}"
    yield from own_file(seen, path, content, instead_of=NAME)


@step()
def logins(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Write the limits of new logins into a file of limits.d that is read last."""
    limits: Limits = seen["limits"]
    lines = [
        f"{domain} - {item} {shown(limit, item)}"
        for domain in want.limit_domains
        for item, limit in possible_limits(limits, want).items()
    ]
    content = render("limits/limits.conf.j2", lines=lines)
    yield from _last(seen, LIMITS_D, limits.pam.last, content)


@step()
def services(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Write a drop-in with the limits for each of the policy's services that is installed."""
    limits: Limits = seen["limits"]
    lines = [
        f"Limit{item.upper()}={unit_value(limit, item)}"
        for item, limit in possible_limits(limits, want).items()
    ]
    content = render("limits/service.conf.j2", lines=lines)
    for service in want.limit_services:
        if service not in limits.units:
            continue
        unit = limits.units[service]
        yield from _last(seen, f"/etc/systemd/system/{service}.service.d", unit.last, content)
    if limits.systemd:
        yield Run(("systemctl", "daemon-reload"))


# A restart waits for the service to stop, up to systemd's own 90 s.
@step(timeout_s=150)
def restart(seen: Snapshot, want: Policy) -> Iterator[Action]:
    """Restart the services that the policy lets us restart, so that their limits take effect."""
    # systemctl restart alone would start a unit with the settings that systemd last read.
    yield Run(("systemctl", "daemon-reload"))
    for service in restarts(seen["limits"], want):
        yield Run(("systemctl", "restart", f"{service}.service"), f"restart {service}")


STEPS = (logins, services, restart)
