"""Give the kernel the IOMMU arguments of the hardware that is there, from the next boot on."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nodeready.core import own_files, shell
from nodeready.core.policy import Policy
from nodeready.core.templates import render
from nodeready.runs.deploy.actions import (
    Action,
    PlanError,
    RunCommand,
    WriteFile,
    name_after,
    own_file,
)
from nodeready.runs.deploy.pyinfra import step
from nodeready.subjects.iommu import facts
from nodeready.subjects.iommu.checks import own_line, required_arguments, tool
from nodeready.subjects.snapshot import Snapshot

_DROPIN = "zz-nodeready.cfg"
# What grubby, a shell script, may be asked to remove.
_PLAIN = re.compile(r"[A-Za-z0-9_.,:-]{1,64}(?:=[A-Za-z0-9_.,:-]{0,64})?")
#: GRUB's configuration is shell: a file that does not parse would stop update-grub.
_VALIDATOR = ("sh", "-n")


def _pattern(token: str) -> str:
    """The shell patterns of the tokens that ``token`` replaces; only ``*`` is special in them."""
    name = token.partition("=")[0]
    spelt = "".join("[-_]" if char in "-_" else char for char in name)
    if facts.option(token) in facts.REPEATABLE:
        return shell.quote(token)
    other = f" | {facts.PASSTHROUGH}=*" if facts.option(token) == "iommu" else ""
    return f"{spelt} | {spelt}=*{other}"


def grub_piece(args: tuple[str, ...]) -> bytes:
    """Our piece of GRUB's configuration: shell, to be read behind all other pieces."""
    patterns = dict.fromkeys(_pattern(token) for token in args)
    words, variable = own_line(args).partition("=")[2], facts.OWN_VARIABLE
    text = " | ".join(patterns)
    return render("iommu/grub.cfg.j2", variable=variable, args=words, patterns=text)


def _debian(snapshot: Snapshot, iommu: facts.Iommu, content: bytes) -> Iterator[Action]:
    """A drop-in that is read last, for update-grub."""
    paths = (line.path for line in iommu.config if line.path != facts.DEFAULT_GRUB)
    names = [path.rpartition("/")[2] for path in paths]
    names = [name for name in names if "nodeready" not in name]
    path = f"{facts.GRUB_D}/{name_after(_DROPIN, max(names, default=''))}"
    yield from own_file(snapshot, path, content, validator=_VALIDATOR, instead_of=_DROPIN)


def _suse(iommu: facts.Iommu, block: bytes) -> Iterator[Action]:
    """A block at the end of /etc/default/grub, the only file that SUSE's grub2-mkconfig reads."""
    if iommu.default_grub is None:
        raise PlanError(f"{facts.DEFAULT_GRUB} is not there; is GRUB this node's boot loader?")
    content = own_files.put_block(iommu.default_grub, block, "end")
    if content != iommu.default_grub:
        yield WriteFile(facts.DEFAULT_GRUB, content, iommu.default_grub, validator=_VALIDATOR)


def _redhat(iommu: facts.Iommu, args: tuple[str, ...]) -> RunCommand:
    """grubby edits every boot loader entry, and the arguments that new kernels get.

    Raises PlanError for an argument that is no plain word.
    """
    tokens = [token for entry in (*iommu.boot, *iommu.entries) for token in entry.tokens]
    remove = facts.contradicting(tokens, args)
    words = ["grubby", "--update-kernel=ALL", f"--args={' '.join(args)}"]
    for token in remove:
        if not _PLAIN.fullmatch(token):
            raise PlanError(f"{token[:100]!r}: remove it by hand from the boot loader entries")
    if remove:
        words.insert(2, f"--remove-args={' '.join(remove)}")
    return RunCommand(tuple(words))


@step(timeout_s=300)
def args(snapshot: Snapshot, policy: Policy) -> Iterator[Action]:
    """Put the arguments on the kernel's command line of the next boot. Never reboots."""
    iommu: facts.Iommu = snapshot["iommu"]
    wants = required_arguments(iommu, policy)
    if isinstance(wants, str):
        return
    if iommu.family == "redhat":
        yield _redhat(iommu, wants)
        return
    content = grub_piece(wants)
    if iommu.family == "debian":
        yield from _debian(snapshot, iommu, content)
    else:
        yield from _suse(iommu, content)
    # os-prober and a dozen kernels make the tool slow on a busy disk: hence the long limit.
    yield RunCommand(tool(iommu))


STEPS = (args,)
