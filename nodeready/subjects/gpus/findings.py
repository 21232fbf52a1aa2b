"""Which GPUs of a node are judged, and how findings name them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from nodeready.core.base import cached_last, grouped
from nodeready.core.result import Check, Result, join_names
from nodeready.core.text import join_ranges, range_text
from nodeready.subjects.gpus.gpu import Gpu, Gpus, PciGpu, Tool
from nodeready.subjects.iommu.facts import MODELS, is_integrated

#: The kernel driver that a vendor's tool works with.
DRIVERS = {"nvidia": "nvidia", "amd": "amdgpu"}
_GUEST_DRIVERS = ("pci-stub", "pciback", "xen-pciback")
_DISPLAY = "0300"
_SHOWN = 4


def is_guest(gpu: PciGpu) -> bool:
    """Whether the GPU is given to virtual machines, so that this host does not use it."""
    driver = gpu.driver or ""
    return driver.startswith("vfio") or driver in _GUEST_DRIVERS


def vendor_tool_of(observed: Gpus, vendor: str) -> Tool:
    return observed.nvidia_tool if vendor == "nvidia" else observed.amd_tool


def expected_gpus(observed: Gpus, vendor: str = "") -> list[PciGpu]:
    """The GPUs on the bus that jobs of this host could use.

    GPUs of virtual machines do not count. A display adapter without its vendor's tool and driver
    only serves a screen, like a processor's graphics. Without AMD's tool, only an Instinct counts.
    """
    return [gpu for gpu in _find_expected_gpus(observed) if vendor in ("", gpu.vendor)]


@cached_last
def _find_expected_gpus(observed: Gpus) -> list[PciGpu]:
    gpus = []
    for gpu in observed.pci:
        if is_guest(gpu):
            continue
        is_used = vendor_tool_of(observed, gpu.vendor).state != "missing"
        if gpu.vendor == "nvidia":
            is_used = is_used or gpu.driver == "nvidia" or gpu.pci_class[:4] != _DISPLAY
        else:
            is_used = (is_used and not is_integrated(gpu.device)) or f"0x{gpu.device}" in MODELS
        if is_used:
            gpus.append(gpu)
    return gpus


def unshown_gpus(observed: Gpus, vendor: str = "") -> list[PciGpu]:
    shown = {gpu.pci_address for gpu in observed.gpus}
    return [gpu for gpu in expected_gpus(observed, vendor) if gpu.address not in shown]


def no_gpu_reason(observed: Gpus) -> str:
    """Why the node has no GPU to judge; "" when it has one."""
    if observed.gpus or expected_gpus(observed):
        return ""
    if guests := sum(is_guest(gpu) for gpu in observed.pci):
        return f"the GPUs ({guests}) belong to virtual machines"
    return "display adapters only" if observed.pci else "no GPU on the PCI bus"


def unshown_reason(observed: Gpus, vendor: str = "") -> str:
    """Why GPUs cannot be judged: their tool shows no GPU at all; "" when it shows one.

    Where the tool shows only some GPUs, `gpus.present` alone fails.
    """
    words = []
    for name in (vendor,) if vendor else DRIVERS:
        tool = vendor_tool_of(observed, name)
        if tool.works and any(gpu.vendor == name for gpu in observed.gpus):
            continue
        if lost := unshown_gpus(observed, name):
            state = "does not show" if tool.works else f"{tool.state}:"
            detail = f" ({tool.detail})" if tool.detail and not tool.works else ""
            words.append(f"{tool.name} {state} {join_names(gpu.address for gpu in lost)}{detail}")
    return "; ".join(words)


def findings_text(findings: Iterable[tuple[Gpu, str]]) -> str:
    """``gpu 3 (0000:5e:00.0): text``; GPUs with the same text share one entry."""
    groups = grouped(((gpu.vendor, text), gpu) for gpu, text in findings)
    words = []
    for (_, text), gpus in groups.items():
        if len(gpus) == 1:
            words.append(f"gpu {gpus[0].index} ({gpus[0].pci_address}): {text}")
        else:
            indexes = join_ranges((gpu.index, gpu.index) for gpu in gpus)
            words.append(f"gpus {','.join(range_text(*run) for run in indexes)}: {text}")
    hidden = [f"and {len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
    return "; ".join(words[:_SHOWN] + hidden)


def distinct_values(values: Iterable[Any]) -> str:
    """The different values, without None, each once."""
    return join_names(str(value) for value in dict.fromkeys(values) if value is not None)


def tool_names(gpus: Iterable[Gpu], observed: Gpus) -> str:
    names = dict.fromkeys(vendor_tool_of(observed, gpu.vendor).name for gpu in gpus)
    return ", ".join("nvidia-smi -q" if name == "nvidia-smi" else name for name in names)


def unreadable_text(observed: Gpus, reads: Collection[str]) -> str:
    """The GPUs for which a tool could not read one of these fields, and the tool's words."""
    unread_gpus = []
    for gpu in observed.gpus:
        # Mostly empty, and asked by every check.
        if words := gpu.unread and dict.fromkeys(w for name, w in gpu.unread if name in reads):
            unread_gpus.append((gpu, f"its tool cannot tell: {join_names(words)}"))
    return findings_text(unread_gpus) if unread_gpus else ""


def silent_text(gpus: Iterable[Gpu]) -> str:
    return findings_text((gpu, "its tool does not say") for gpu in gpus)


def judge_each(
    check: Check,
    observed: Gpus,
    field: str | Callable[[Gpu], Any],
    find_problem: Callable[[Gpu], str],
    *,
    absent: str,
    expected: str | None = None,
    fix: str | None = None,
    shown: str = "",
    reads: Collection[str] = (),
    without: Callable[[Gpu], bool] = lambda gpu: False,
    status: str = "fail",
    actions: tuple[str, ...] = (),
) -> Result:
    """Judge each GPU that has a value (not None).

    field:        the value's name in `Gpu`, or a function that returns the value
    find_problem: GPU -> the problem in words, or ""
    absent:       the reason of na, when no GPU has a value
    expected:     as of `Check.fail`; so are ``fix``, ``status`` and ``actions``
    shown:        the text of ok; "": the values
    reads:        the fields that decide the verdict, if not ``field``; the result is unknown where
                  the tool could not read a field
    without:      whether a GPU's settings leave it without a value

    Without a finding, the result is unknown when a tool does not work, or when a GPU has no value
    where others of its model have one.
    """
    if reason := no_gpu_reason(observed):
        return check.na(reason)
    value = attrgetter(field) if isinstance(field, str) else field
    if isinstance(field, str):
        reads = reads or (field,)
    values = [(gpu, value(gpu)) for gpu in observed.gpus]
    gpus_with_value = [gpu for gpu, current in values if current is not None]
    if findings := [(gpu, text) for gpu in gpus_with_value if (text := find_problem(gpu))]:
        text, source = findings_text(findings), tool_names((gpu for gpu, _ in findings), observed)
        return check.fail(text, source, fix, expected=expected, actions=actions, status=status)
    if hidden := unshown_reason(observed) or unreadable_text(observed, reads):
        return check.unknown(hidden)
    # A GPU without a name can be of any model.
    models = {*(gpu.model for gpu in gpus_with_value), None} if gpus_with_value else set()
    without_value = (gpu for gpu, current in values if current is None and gpu.model in models)
    if silent := silent_text(gpu for gpu in without_value if not without(gpu)):
        return check.unknown(silent)
    if not gpus_with_value:
        return check.na(absent)
    text = shown or distinct_values(current for _, current in values)
    return check.ok(text, tool_names(gpus_with_value, observed), expected=expected)


class FaultSign(NamedTuple):
    """A field of `Gpu` whose value can be a finding."""

    field: str
    words: str  # of the finding; ``{}`` is the value
    fix: str
    actions: tuple[str, ...] = ()  # as of `Check.fail`
    status: str = "fail"
    least: int = 1  # the lowest number that is a finding


def judge_signs(
    check: Check,
    observed: Gpus,
    signs: Sequence[FaultSign],
    field: Callable[[Gpu], Any],
    *,
    absent: str,
    shown: str = "",
    without: Callable[[Gpu], bool] = lambda gpu: False,
) -> Result:
    """Judge each GPU by several fields, as `judge_each` does.

    The gravest sign decides about fix and status: failures first, then signs that name actions.
    """

    visible, texts = list[FaultSign](), dict[int, str]()
    for gpu in observed.gpus:
        for sign in signs:
            number = getattr(gpu, sign.field, None)
            if number and number >= sign.least:
                visible.append(sign)
                words = sign.words.format(number)
                texts[id(gpu)] = f"{texts[id(gpu)]}, {words}" if id(gpu) in texts else words

    def value(gpu: Gpu) -> Any:
        current = field(gpu)
        return True if current is None and id(gpu) in texts else current

    gravest = max(
        visible, key=lambda sign: (sign.status == "fail", bool(sign.actions)), default=signs[0]
    )
    return judge_each(
        *(check, observed, value, lambda gpu: texts.get(id(gpu), "")),
        absent=absent,
        fix=gravest.fix,
        shown=shown,
        reads=[sign.field for sign in signs],
        without=without,
        status=gravest.status,
        actions=gravest.actions,
    )
