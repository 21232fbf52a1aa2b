"""Judge a node's kernel arguments for the IOMMU: required ones there, contradicting ones gone."""

from __future__ import annotations

from nodeready.core import shell
from nodeready.core.policy import Policy
from nodeready.core.result import FactKinds, Result, Subject, check
from nodeready.core.severity import loses_job
from nodeready.subjects.iommu import facts
from nodeready.subjects.iommu.facts import Iommu

#: From this number of CPUs on MI100 and MI200 need the IOMMU. Without the IOMMU the kernel falls
#: back from X2APIC and enumerates 255 of 256 logical CPUs (AMD's system optimization guides for
#: MI100 and MI200), so that a node with this fault shows 255.
MANY_CPUS = 255
#: The running kernel's command line.
PROC = "/proc/cmdline"
#: Tokens by which a person switches the IOMMU off, as a last resort against hangs.
OFF = (("amd_iommu", "off"), ("intel_iommu", "off"), ("iommu", "off"))


def required_arguments(observed: Iommu, policy: Policy) -> tuple[str, ...] | str:
    """The arguments that this node should boot with, or why the policy needs none.

    AMD's guides: MI300 and newer run with the IOMMU on and ``iommu=pt``, so that DMA of the GPUs
    and NICs is not translated; on Intel hosts ``intel_iommu=on`` is needed, too
    (rocm.docs.amd.com, MI300X system optimization, GRUB settings). MI100 and MI200 need the
    arguments only on hosts with 256 and more logical CPUs.
    """
    if policy.iommu_args is not None:
        return policy.iommu_args or "the policy manages none"
    models = [facts.MODELS[device] for device in observed.devices if device in facts.MODELS]
    if not models:
        return "no AMD Instinct in this node"
    models = [model for model in models if not model.virtual]
    if not models:
        return "virtual functions only: the IOMMU is the host's"
    newest = max(models, key=lambda model: model.generation)
    if newest.generation < 3 and observed.cpus < MANY_CPUS:
        return f"{newest.name} with {observed.cpus} logical CPUs: needed from 256 on"
    if observed.cpu_vendor == "GenuineIntel":
        return ("intel_iommu=on", "iommu=pt")
    return ("iommu=pt",)


_COMMANDS = (
    ("debian", ("update-grub",)),
    ("debian", ("grub-mkconfig", "-o", "/boot/grub/grub.cfg")),
    ("redhat", ("grubby",)),
    ("suse", ("grub2-mkconfig", "-o", "/boot/grub2/grub.cfg")),
)


def tool(observed: Iommu) -> tuple[str, ...]:
    """The command that makes the next boot's configuration; () for a node without a known one."""
    if observed.family != "redhat" and any(
        e.source.startswith(f"{facts.ENTRIES}/") for e in observed.boot
    ):
        # systemd-boot does not read the files that GRUB's tools write.
        return ()
    commands = (command for family, command in _COMMANDS if family == observed.family)
    return next((command for command in commands if command[0] in observed.tools), ())


def own_line(args: tuple[str, ...]) -> str:
    """The line of nodeready's file for GRUB that holds these arguments."""
    return f"{facts.OWN_VARIABLE}={shell.quote(' '.join(args))}"


def is_own_line_last(observed: Iommu, args: tuple[str, ...]) -> bool:
    """Whether nodeready's file for GRUB has these arguments, and GRUB reads it last."""
    last = facts.configured(observed.config).last
    return (
        observed.own_line is not None
        and last is not None
        and observed.own_line.text == own_line(args)
        and last.path == observed.own_line.path
        and "nodeready_" in last.text
    )


def _problem(tokens: tuple[str, ...], args: tuple[str, ...]) -> str:
    parts = [f"{token} contradicts" for token in facts.contradicting(tokens, args)]
    if lacking := facts.missing(tokens, args):
        parts.append(f"{' '.join(lacking)} missing")
    return ", ".join(parts)


def _source(observed: Iommu, tokens: tuple[str, ...], default: str) -> str:
    """The line of GRUB's configuration that adds one of these tokens, else ``default``."""
    for line in reversed(observed.config):
        if "nodeready" not in line.text and any(token in line.text for token in tokens):
            return line.source
    return default


def _next_boot(observed: Iommu, args: tuple[str, ...]) -> tuple[str, str, bool]:
    """The problem of the next boot, its source, and whether GRUB's generated file has it."""
    for entry in observed.boot:
        if problem := _problem(entry.tokens, args):
            bad = facts.contradicting(entry.tokens, args)
            return f"next boot: {problem}", _source(observed, bad, entry.source), True
    if observed.family != "redhat" and not is_own_line_last(observed, args):
        grub = facts.configured(observed.config)
        source = grub.last.source if grub.last else ""
        if grub.tokens is None:
            return "next update of GRUB: cannot be foretold", source, False
        if problem := _problem(grub.tokens, args):
            bad = facts.contradicting(grub.tokens, args)
            return f"next update of GRUB: {problem}", _source(observed, bad, source), False
    return "", observed.boot[0].source if observed.boot else "", False


@check(
    "iommu.args",
    loses_job("deploy", "configure", "reboot"),
    settings=("iommu_args",),
    writes=lambda observed, policy: (
        (f"{facts.GRUB_D}/*nodeready*.cfg",) if observed.family == "debian" else ()
    ),
    fixed_by="iommu.args",
    fix=(
        "set EXPECTED on the kernel's command line by hand (boot loader, PXE or image)",
        "look in /etc/grub.d for what writes WHERE",
    ),
)
def args(observed: Iommu, policy: Policy) -> Result:
    """The next boot has the required kernel arguments and no other value of the same options.

    Two command lines are judged: that of the entry that the boot loader will boot (GRUB's default,
    saved or next entry in its generated file, or a boot loader entry), and the result of the
    next run of update-grub, after a kernel update. ``iommu=soft iommu=pt`` contradict each
    other, since the kernel obeys both. Independent words may share an option, as in
    ``iommu=pt,nofullflush``.
    """
    arguments = required_arguments(observed, policy)
    if isinstance(arguments, str):
        return args.na(arguments)
    expected = " ".join(arguments)
    check = args.expecting(expected)
    if observed.unreadable:
        return args.unknown(f"only root may read {observed.unreadable[0]}")
    if not observed.boot and not _problem(observed.live, arguments):
        return check.ok(f"{expected}; the boot loader is not on this node")
    command = tool(observed)
    problem, source, stale = _next_boot(observed, arguments)
    if not observed.boot:
        problem = f"no boot loader configuration ({_problem(observed.live, arguments)})"
        source = ""
    elif not problem:
        return check.ok(source=source)
    if not command or not observed.boot:
        fix = f"set {expected} on the kernel's command line by hand (boot loader, PXE or image)"
        return check.fail(f"{problem}; no supported boot loader", source, fix)
    entry = observed.boot[0]
    fix = f"look in /etc/grub.d for what writes {entry.source}"
    if stale and entry.script not in facts.GENERATED:
        return check.fail(f"{problem}, in the entry of /etc/grub.d/{entry.script}", source, fix)
    if stale and observed.generated and is_own_line_last(observed, arguments):
        # grub.cfg was generated from nodeready's file and is wrong: another run changes nothing.
        path = observed.own_line.path if observed.own_line else ""
        return check.fail(f"{problem}, though {path} is in place", entry.source, fix)
    return check.fixable(problem, source)


_REBOOT, _REPAIR = "reboot the node", "repair iommu.args, then reboot the node"


@check("iommu.live", loses_job("configure", "reboot"), settings=("iommu_args",),
       fix=(_REPAIR, _REBOOT))  # fmt: skip
def live(observed: Iommu, policy: Policy) -> Result:
    """The running kernel has the wanted arguments; a change takes effect at the next boot only."""
    arguments = required_arguments(observed, policy)
    if isinstance(arguments, str):
        return live.na(arguments)
    check, problem = live.expecting(" ".join(arguments)), _problem(observed.live, arguments)
    if not problem:
        return check.ok(source=PROC)
    if args(observed, policy).status == "ok":
        problem, actions = f"pending reboot: {problem}", ("reboot",)
        return check.warn(problem, PROC, _REBOOT, actions=actions)
    return check.warn(problem, PROC, _REPAIR)


@check("iommu.off", loses_job("configure", "reboot"), settings=("iommu_args",),
       expects="the IOMMU is not switched off",
       fix=(_REBOOT, "remove TOKEN from WHERE, unless it is there for a reason"))  # fmt: skip
def off(observed: Iommu, policy: Policy) -> Result:
    """Nothing switches the IOMMU off, now or at the next boot.

    ``amd_iommu=off`` cancels ``iommu=pt``. An administrator sets it as a last resort against
    hangs, so a deploy keeps it, and this check reports it. iommu.args replaces a token of an
    option that iommu.args sets.
    """
    arguments = required_arguments(observed, policy)
    if isinstance(arguments, str):
        return off.na(arguments)
    options = {name for token in arguments for name, _ in facts.words(token)}
    command_lines = [(entry.source, entry.tokens) for entry in observed.boot]
    for default, tokens in [*command_lines, (PROC, observed.live)]:
        for token in tokens:
            if any(pair in OFF and pair[0] not in options for pair in facts.words(token)):
                source = _source(observed, (token,), default)
                if source == PROC and observed.boot:
                    text = f"pending reboot: {token}"
                    return off.warn(text, source, _REBOOT, actions=("reboot",))
                fix = f"remove {token} from {source}, unless it is there for a reason"
                return off.warn(token, source, fix)
    return off.ok()


SUBJECT = Subject(
    "iommu", __doc__, checks=(args, live, off), probe=facts.PROBE,
    files=("/etc/default/grub.d/*nodeready*.cfg",),
    kinds=FactKinds(
        # The arguments of the running kernel are in the subject host.
        volatile="where number live",
        hardware="devices cpus cpu_vendor",
    ),
)  # fmt: skip
