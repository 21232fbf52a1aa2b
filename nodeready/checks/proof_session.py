"""Judge the session in which the proofs ran: whose it is, and its limits."""

from __future__ import annotations

from nodeready.checks.declare import check, deploy
from nodeready.checks.limits import shown, wanted
from nodeready.checks.proof_core import limited
from nodeready.checks.proof_unseen import unseen
from nodeready.policy import Policy
from nodeready.probes.limits import Limits
from nodeready.probes.pam_limits import ITEMS, UNLIMITED, PamLimits
from nodeready.probes.sysctl import Boot
from nodeready.proofs.proved import Proved
from nodeready.proofs.seen import Core, Limit, SessionLimits, User
from nodeready.results import Result, fail, fixable, na, ok, unknown, warn


@check(
    "proof.user",
    settings=("job_user",),
    fix=(
        "create NAME on the node, or name another user",
        "log in as root, or name no user",
        "`su - NAME -c id`, as root on the node, has to work",
        "--user NAME proves it for the job's user",
    ),
)
def user(seen: Proved, want: Policy) -> Result:
    """The proofs ran in a new session of the job's user, opened through PAM as a login is.

    What root can do says nothing about what a job's user can: Yama and file permissions stop
    users only.
    """
    check, found = "proof.user", seen.user
    expected = "a session of " + (want.job_user or "the job's user")
    if not isinstance(found, User):
        evidence = f": {found.evidence}" if found.evidence else ""
        return unknown(check, f"{found.reason}{evidence}")
    if found.uid == -1:
        fix = f"create {found.name} on the node, or name another user"
        return fail(check, expected, found.error, "", fix)
    if found.error:
        other = found.error.startswith("logged in as")
        works = f"`su - {found.name} -c id`, as root on the node, has to work"
        fix = "log in as root, or name no user" if other else works
        return fail(check, expected, found.error, "", fix)
    if found.uid == 0 and not found.named:
        fix = "--user NAME proves it for the job's user"
        return warn(check, expected, "proved as root, whom Yama does not stop", "", fix)
    return ok(check, f"a session of {found.name}")


def _kernel(limit: Limit) -> dict[str, int]:
    """soft and hard in kernel units, as the checks of the subject limits have them."""
    return {k: UNLIMITED if v == -1 else v for k, v in vars(limit).items()}


def _possible(seen: SessionLimits, want: Policy) -> dict[str, int]:
    """The policy's limits that this node's kernel gives to anybody at all."""
    ceiling = dict(zip(ITEMS, seen.ceiling))
    most = {item: UNLIMITED if value == -1 else value for item, value in ceiling.items()}
    node = Limits(PamLimits(), {}, (), most, seen.nr_open, Boot(None), systemd=False)
    return wanted(node, want)


@check(
    "proof.limits",
    settings=("core_handler", "core_pattern", "limit_core", "limit_memlock", "limit_nofile"),
    fix=(
        deploy("nodeready deploy INVENTORY --only limits"),
        "remove the ulimit of ITEMS from the user's profile, or /etc/profile",
    ),
)
def limits(seen: Proved, want: Policy) -> Result:
    """A new session of the job's user has the policy's limits, after PAM and after its profile.

    limit_core, limit_memlock and limit_nofile of the policy, or more; soft and hard.
    The files may say so and no login may have it: a pam.d file without pam_limits, a ulimit in a
    profile. A limit that this node's kernel refuses is told by the subject limits, a core limit
    that cost a core by proof.core, and neither again here.
    """
    check = "proof.limits"
    nothing = unseen(check, seen, "limits")
    if nothing is not None or not isinstance(seen.limits, SessionLimits):
        return nothing or na(check, "not proved")
    possible = _possible(seen.limits, want)
    if isinstance(seen.core, Core) and limited(seen.core):
        possible.pop("core", None)
    if not possible:
        return na(check, "none of the policy's limits can be had here, or proof.core tells")
    expected = ", ".join(f"{item} {shown(limit, item)}" for item, limit in possible.items())
    before = dict(zip(ITEMS, seen.limits.before))
    low, lowered = [], []
    for item, limit in possible.items():
        has: Limit = getattr(seen.limits, item)
        if min(_kernel(has).values()) >= limit:
            continue
        values = [shown(value, item) for value in _kernel(has).values()]
        low.append(f"{item} {'/'.join(dict.fromkeys(values))}")
        if item in before and min(_kernel(before[item]).values()) >= limit:
            lowered.append(item)
    if not low:
        return ok(check, expected)
    if lowered:
        name = seen.user.name if isinstance(seen.user, User) else "the user"
        items = ", ".join(lowered)
        actual = f"{', '.join(low)}: the profile lowers {items}"
        fix = f"remove the ulimit of {items} from {name}'s profile, or /etc/profile"
        return fail(check, expected, actual, "", fix)
    fix = "nodeready deploy INVENTORY --only limits"
    return fixable(check, expected, ", ".join(low), "", fix)
