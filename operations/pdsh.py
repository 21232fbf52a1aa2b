"""Make pdsh use ssh in every kind of shell, and give users their ~/.pdshrc."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nodeready.core import own_files
from nodeready.core.own_files import is_own
from nodeready.core.policy import Policy
from nodeready.core.templates import render
from nodeready.runs.deploy import actions
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.access import chmod_mends
from nodeready.subjects.pdsh import checks
from nodeready.subjects.pdsh.facts import ENVIRONMENT, PROFILE_D, RCMD_DEFAULT, VARIABLE, Pdsh
from nodeready.subjects.snapshot import Snapshot

# A path that a node reports is changed only if it is one of these.
_MODULE = re.compile(r"/usr/(local/)?lib(64)?(/[A-Za-z0-9_.-]+)?/pdsh/sshcmd\.so")


def _is_own_profile(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    is_nodereadys = folder == PROFILE_D and any(
        is_own(name, f"zz-nodeready-pdsh{suffix}") for suffix in (".sh", ".csh")
    )
    return is_nodereadys or path == RCMD_DEFAULT or _MODULE.fullmatch(path) is not None


@step()
def rcmd(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Set ssh as the remote command: Debian's file, the environment, the login shells."""
    pdsh: Pdsh = snapshot["pdsh"]
    for path in filter(_is_own_profile, checks.read_by_users(pdsh)):
        for barrier in pdsh.access.barriers(path):
            if barrier.path == path or chmod_mends(barrier, path):
                mode = "a+r" if barrier.path == path else "a+rx"
                yield actions.RunCommand(("chmod", mode, barrier.path))
    # The file is one word for Debian's wrapper and has no room for nodeready's mark.
    word = f"{checks.TYPE}\n".encode()
    if pdsh.debian and pdsh.rcmd_default != word:
        yield actions.WriteFile(RCMD_DEFAULT, word, pdsh.rcmd_default)
    old = pdsh.environment or b""
    content = own_files.put_block(old, f"{VARIABLE}={checks.TYPE}\n".encode(), "end")
    if content != old:
        yield actions.WriteFile(ENVIRONMENT, content, pdsh.environment)
    for suffix in checks.suffixes(pdsh):
        default = f"zz-nodeready-pdsh{suffix}"
        path = f"{PROFILE_D}/{actions.name_after(default, checks.last_in_profile(pdsh, suffix))}"
        text = render(f"pdsh/profile{suffix}.j2", variable=VARIABLE, type=checks.TYPE)
        yield from actions.own_file(snapshot, path, text, instead_of=default)


@step()
def pdshrc(snapshot: Snapshot, policy: Policy) -> Iterator[actions.Action]:
    """Put our block into the ~/.pdshrc of the policy's users; what is theirs stays.

    Raises PlanError for lines that make no block.
    """
    inner = render("pdsh/pdshrc.j2", lines=checks.pdshrc_lines(policy))
    for user in snapshot["pdsh"].users:
        if user.name not in policy.pdshrc_users or user.trouble or checks.has_block(user, policy):
            continue
        try:
            content = own_files.put_block(user.pdshrc or b"", inner, "keep")
        except ValueError as error:
            raise actions.PlanError(f"pdshrc_lines: {error}") from None
        yield actions.WriteFile(user.path, content, user.pdshrc, user=user.name)


STEPS = (rcmd, pdshrc)
