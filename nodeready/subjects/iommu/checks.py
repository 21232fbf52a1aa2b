"""Judge a node's kernel arguments for the IOMMU: wanted ones there, contradicting ones gone."""

from __future__ import annotations

from nodeready import shell
from nodeready.policy import Policy
from nodeready.subjects.iommu.arguments import configured, contradicting, missing, words
from nodeready.subjects.iommu.facts import GENERATED, GRUB_D, OURS, PROBE, Iommu
from nodeready.subjects.iommu.instincts import MODELS
from nodeready.subjects.iommu.next_boot import ENTRIES
from nodeready.subjects.result import Result, Subject, check, fail, fixable, na, ok, unknown, warn

#: From here on MI100 and MI200 need the IOMMU: without it the kernel falls back from X2APIC and
#: enumerates 255 of 256 logical CPUs (AMD's system optimization guides for MI100 and MI200). A
#: node that shows 255 already suffers from it.
MANY_CPUS = 255
#: The running kernel's command line.
PROC = "/proc/cmdline"
#: Tokens by which a person switches the IOMMU off, as a last resort against hangs.
OFF = (("amd_iommu", "off"), ("intel_iommu", "off"), ("iommu", "off"))


def wanted(seen: Iommu, want: Policy) -> tuple[str, ...] | str:
    """The arguments that this node should boot with, or the reason why there are none.

    AMD's guides: MI300 and newer run with the IOMMU on and ``iommu=pt``, so that DMA of the GPUs
    and NICs is not translated; on Intel hosts ``intel_iommu=on`` belongs to it
    (rocm.docs.amd.com, MI300X system optimization, GRUB settings). MI100 and MI200 need it on
    hosts with 256 and more logical CPUs only.
    """
    if want.iommu_args is not None:
        return want.iommu_args or "the policy manages none"
    models = [MODELS[device] for device in seen.devices if device in MODELS]
    if not models:
        return "no AMD Instinct in this node"
    models = [model for model in models if not model.virtual]
    if not models:
        return "virtual functions only: the IOMMU is the host's"
    newest = max(models, key=lambda model: model.generation)
    if newest.generation < 3 and seen.cpus < MANY_CPUS:
        return f"{newest.name} with {seen.cpus} logical CPUs: needed from 256 on"
    if seen.cpu_vendor == "GenuineIntel":
        return ("intel_iommu=on", "iommu=pt")
    return ("iommu=pt",)


def tool(seen: Iommu) -> tuple[str, ...]:
    """The command that makes the next boot's configuration; () for a node without a known one."""
    if seen.family != "redhat" and any(e.where.startswith(f"{ENTRIES}/") for e in seen.boot):
        # systemd-boot: GRUB's tools may be there, and nobody reads what they write.
        return ()
    if seen.family == "debian" and "update-grub" in seen.tools:
        return ("update-grub",)
    if seen.family == "debian" and "grub-mkconfig" in seen.tools:
        return ("grub-mkconfig", "-o", "/boot/grub/grub.cfg")
    if seen.family == "redhat" and "grubby" in seen.tools:
        return ("grubby",)
    if seen.family == "suse" and "grub2-mkconfig" in seen.tools:
        return ("grub2-mkconfig", "-o", "/boot/grub2/grub.cfg")
    return ()


def our_line(args: tuple[str, ...]) -> str:
    """The line of our piece of GRUB's configuration that holds these arguments."""
    return f"{OURS}={shell.quote(' '.join(args))}"


def ours_wins(seen: Iommu, args: tuple[str, ...]) -> bool:
    """Whether our piece of GRUB's configuration is there, for these arguments, and read last."""
    last = configured(seen.config).last
    return (
        seen.ours is not None
        and last is not None
        and seen.ours.text == our_line(args)
        and last.path == seen.ours.path
        and "nodeready_" in last.text
    )


def _wrong(tokens: tuple[str, ...], args: tuple[str, ...]) -> str:
    """What is wrong with a command line, in words, or ""."""
    parts = [f"{token} contradicts" for token in contradicting(tokens, args)]
    lacking = missing(tokens, args)
    return ", ".join([*parts, *([f"{' '.join(lacking)} missing"] if lacking else [])])


def _source(seen: Iommu, tokens: tuple[str, ...], default: str) -> str:
    """The line of GRUB's configuration that adds one of these tokens, else ``default``."""
    for line in reversed(seen.config):
        if "nodeready" not in line.text and any(token in line.text for token in tokens):
            return line.where
    return default


def _next_boot(seen: Iommu, args: tuple[str, ...]) -> tuple[str, str, bool]:
    """What is wrong at the next boot, where, and whether it is wrong in GRUB's generated file."""
    for entry in seen.boot:
        wrong = _wrong(entry.tokens, args)
        if wrong:
            bad = contradicting(entry.tokens, args)
            return f"next boot: {wrong}", _source(seen, bad, entry.where), True
    if seen.family != "redhat" and not ours_wins(seen, args):
        found = configured(seen.config)
        if found.tokens is None:
            where = found.last.where if found.last else ""
            return "next update of GRUB: cannot be foretold", where, False
        wrong = _wrong(found.tokens, args)
        if wrong:
            bad = contradicting(found.tokens, args)
            where = found.last.where if found.last else ""
            return f"next update of GRUB: {wrong}", _source(seen, bad, where), False
    return "", seen.boot[0].where if seen.boot else "", False


@check(
    "iommu.args",
    settings=("iommu_args",),
    writes=lambda seen, want: (f"{GRUB_D}/*nodeready*.cfg",) if seen.family == "debian" else (),
    fixed_by="iommu.args",
    fix=(
        "set EXPECTED on the kernel's command line by hand (boot loader, PXE or image)",
        "look in /etc/grub.d for what writes WHERE",
    ),
)
def args(seen: Iommu, want: Policy) -> Result:
    """The next boot has the wanted kernel arguments and no other value of the same options.

    Judged by the entry that the boot loader will really boot (GRUB's default, saved or next entry
    in its generated file, or a boot loader entry), and by what the next run of update-grub, after
    a kernel update, would make of GRUB's configuration. ``iommu=soft iommu=pt`` must not both
    stay: the kernel obeys both. Words that take nothing from each other may share an option, as
    in ``iommu=pt,nofullflush``.
    """
    check, wants = "iommu.args", wanted(seen, want)
    if isinstance(wants, str):
        return na(check, wants)
    expected = " ".join(wants)
    if seen.unreadable:
        return unknown(check, f"only root may read {seen.unreadable[0]}")
    if not seen.boot and not _wrong(seen.live, wants):
        return ok(check, expected, f"{expected}; the boot loader is not on this node")
    command = tool(seen)
    if seen.boot:
        wrong, source, stale = _next_boot(seen, wants)
        if not wrong:
            return ok(check, expected, expected, source)
    else:
        wrong, source, stale = (
            f"no boot loader configuration ({_wrong(seen.live, wants)})",
            "",
            False,
        )
    if not command or not seen.boot:
        fix = f"set {expected} on the kernel's command line by hand (boot loader, PXE or image)"
        shown = wrong or f"running kernel: {_wrong(seen.live, wants)}"
        return fail(check, expected, f"{shown}; no supported boot loader", source, fix)
    foreign = stale and seen.boot[0].script not in GENERATED
    if foreign:
        script = f"/etc/grub.d/{seen.boot[0].script}"
        fix = f"look in /etc/grub.d for what writes {seen.boot[0].where}"
        return fail(check, expected, f"{wrong}, in the entry of {script}", source, fix)
    if stale and seen.generated and ours_wins(seen, wants):
        # grub.cfg was generated with our file in place and is wrong: another run changes nothing.
        return fail(
            check,
            expected,
            f"{wrong}, though {seen.ours.path if seen.ours else ''} is in place",
            seen.boot[0].where,
            f"look in /etc/grub.d for what writes {seen.boot[0].where}",
        )
    return fixable(check, expected, wrong, source)


@check(
    "iommu.live",
    settings=("iommu_args",),
    fix=("repair iommu.args, then reboot the node", "reboot the node"),
)
def live(seen: Iommu, want: Policy) -> Result:
    """The running kernel has the wanted arguments; a change takes effect at the next boot only."""
    check, wants = "iommu.live", wanted(seen, want)
    if isinstance(wants, str):
        return na(check, wants)
    expected, wrong = " ".join(wants), _wrong(seen.live, wants)
    if not wrong:
        return ok(check, expected, expected, PROC)
    if args(seen, want).status == "ok":
        return warn(
            check, expected, f"pending reboot: {wrong}", "/proc/cmdline", "reboot the node"
        )
    return warn(check, expected, wrong, "/proc/cmdline", "repair iommu.args, then reboot the node")


@check(
    "iommu.off",
    settings=("iommu_args",),
    fix=("reboot the node", "remove TOKEN from WHERE, unless it is there for a reason"),
)
def off(seen: Iommu, want: Policy) -> Result:
    """Nothing switches the IOMMU off, now or at the next boot.

    ``iommu=pt`` does nothing beside ``amd_iommu=off``. Somebody put that there as a last resort,
    so it stays, and is reported. A token of an option that iommu.args sets is replaced there.
    """
    check, wants = "iommu.off", wanted(seen, want)
    if isinstance(wants, str):
        return na(check, wants)
    options = {name for token in wants for name, _ in words(token)}
    found: list[tuple[str, str]] = []
    for where, tokens in [*((e.where, e.tokens) for e in seen.boot), ("/proc/cmdline", seen.live)]:
        for token in tokens:
            off = {name for name, word in words(token) if (name, word) in OFF}
            if off - options:
                found.append((token, _source(seen, (token,), where)))
    if not found:
        return ok(check, "the IOMMU is not switched off")
    token, where = found[0]
    pending = "pending reboot: " if where == "/proc/cmdline" and seen.boot else ""
    fix = (
        "reboot the node"
        if pending
        else f"remove {token} from {where}, unless it is there for a reason"
    )
    return warn(check, "the IOMMU is not switched off", f"{pending}{token}", where, fix)


SUBJECT = Subject(
    "iommu",
    __doc__,
    checks=(args, live, off),
    probe=PROBE,
    files=("/etc/default/grub.d/*nodeready*.cfg",),
)
