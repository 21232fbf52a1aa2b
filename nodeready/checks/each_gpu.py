"""How the checks of GPUs go over a node's GPUs: which ones count, and how they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nodeready.probes.gpu import Gpu, Gpus, PciGpu, Tool
from nodeready.probes.instinct import MODELS
from nodeready.results import Result, fail, na, ok, unknown

#: The kernel driver that a vendor's tool works with.
DRIVERS = {"nvidia": "nvidia", "amd": "amdgpu"}

_GUEST_DRIVERS = ("pci-stub", "pciback", "xen-pciback")
_DISPLAY = "0300"
_SHOWN = 4


def guest(gpu: PciGpu) -> bool:
    """Whether the host gives it to virtual machines and does not use it itself."""
    return gpu.driver is not None and (
        gpu.driver.startswith("vfio") or gpu.driver in _GUEST_DRIVERS
    )


def tool(seen: Gpus, vendor: str) -> Tool:
    """How the vendor's tool fared."""
    return seen.nvidia_tool if vendor == "nvidia" else seen.amd_tool


def expected(seen: Gpus, vendor: str = "") -> list[PciGpu]:
    """The GPUs on the bus that jobs of this host could use.

    Not those of guests. A display adapter without its vendor's tool and driver is a screen's, like
    the graphics of a processor: for AMD only an Instinct or what the tool would show counts.
    """
    found = []
    for gpu in seen.pci:
        if guest(gpu) or vendor not in ("", gpu.vendor):
            continue
        wanted = tool(seen, gpu.vendor).state != "missing"
        if gpu.vendor == "nvidia":
            wanted = wanted or gpu.driver == "nvidia" or gpu.pci_class[:4] != _DISPLAY
        else:
            wanted = wanted or f"0x{gpu.device}" in MODELS
        found += [gpu] if wanted else []
    return found


def unseen(seen: Gpus, vendor: str = "") -> list[PciGpu]:
    """The GPUs that are on the bus and that no tool shows."""
    shown = {gpu.pci_address for gpu in seen.gpus}
    return [gpu for gpu in expected(seen, vendor) if gpu.address not in shown]


def none(seen: Gpus) -> str:
    """Why there is nothing to judge; "" when there is."""
    if seen.gpus or expected(seen):
        return ""
    guests = sum(guest(gpu) for gpu in seen.pci)
    if guests:
        return f"the GPUs ({guests}) belong to virtual machines"
    return "display adapters only" if seen.pci else "no GPU on the PCI bus"


def why_unseen(seen: Gpus, vendor: str = "") -> str:
    """Which GPUs nobody can judge because their tool shows none, and why; "" when it shows them.

    That one is missing among the others is what `gpus.present` fails for, not every check.
    """
    words = []
    for name in ("nvidia", "amd"):
        source = tool(seen, name)
        if vendor not in ("", name):
            continue
        if source.works and any(gpu.vendor == name for gpu in seen.gpus):
            continue
        lost = unseen(seen, name)
        if lost:
            state = "does not show" if source.works else f"{source.state}:"
            said = f" ({source.detail})" if source.detail and not source.works else ""
            where = few([gpu.address for gpu in lost])
            words.append(f"{source.name} {state} {where}{said}")
    return "; ".join(words)


def few(texts: Sequence[str]) -> str:
    """The texts, the first ones and how many more."""
    more = len(texts) - _SHOWN
    return ", ".join(texts[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3,6``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def listed(found: Iterable[tuple[Gpu, str]]) -> str:
    """``gpu 3 (0000:5e:00.0): text``; several GPUs with the same text stand together."""
    groups: dict[tuple[str, str], list[Gpu]] = {}
    for gpu, text in found:
        groups.setdefault((gpu.vendor, text), []).append(gpu)
    words = []
    for (_, text), gpus in groups.items():
        if len(gpus) == 1:
            words.append(f"gpu {gpus[0].index} ({gpus[0].pci_address}): {text}")
        else:
            words.append(f"gpus {_ranges(gpu.index for gpu in gpus)}: {text}")
    more = len(words) - _SHOWN
    return "; ".join(words[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def values(gpus: Iterable[Gpu], value: Callable[[Gpu], Any]) -> str:
    """The different values, each once."""
    return few([str(v) for v in dict.fromkeys(value(gpu) for gpu in gpus) if v is not None])


def sources(gpus: Iterable[Gpu], seen: Gpus) -> str:
    """The tools that show these GPUs."""
    names = dict.fromkeys(tool(seen, gpu.vendor).name for gpu in gpus)
    return ", ".join("nvidia-smi -q" if name == "nvidia-smi" else name for name in names)


def each(
    check: str,
    seen: Gpus,
    expectation: str,
    value: Callable[[Gpu], Any],
    wrong: Callable[[Gpu], str],
    *,
    absent: str,
    fix: str = "",
    shown: str = "",
    without: Callable[[Gpu], bool] = lambda gpu: False,
    bad: Callable[[str, str, str, str, str], Result] = fail,
) -> Result:
    """Judge each GPU that has a ``value`` (not None); ``wrong`` says what is wrong, or "".

    GPUs whose tool does not work, or one that alone of its model does not say its value, make the
    answer unknown, not ok: what is wrong with another one is still said. ``absent`` is the reason
    when no GPU has such a value at all, ``shown`` the words when all is well (else the values);
    ``without`` says of a GPU that its settings leave it without a value.
    """
    reason = none(seen)
    if reason:
        return na(check, reason)
    told = [gpu for gpu in seen.gpus if value(gpu) is not None]
    found = [(gpu, text) for gpu in told if (text := wrong(gpu))]
    if found:
        at = sources((gpu for gpu, _ in found), seen)
        return bad(check, expectation, listed(found), at, fix)
    hidden = why_unseen(seen)
    if hidden:
        return unknown(check, hidden)
    models = {gpu.model for gpu in told}
    mute = [gpu for gpu in seen.gpus if value(gpu) is None and gpu.model in models]
    silent = [gpu for gpu in mute if not without(gpu)]
    if silent:
        return unknown(check, listed((gpu, "its tool does not say") for gpu in silent))
    if not told:
        return na(check, absent)
    return ok(check, expectation, shown or values(told, value), sources(told, seen))
