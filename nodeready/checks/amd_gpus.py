"""Judge what jobs need of a node's GPUs beside the GPUs: the device files, and AMD's links."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nodeready.checks.declare import check
from nodeready.checks.each_gpu import each, expected, few, none
from nodeready.policy import Policy
from nodeready.probes.amd_smi import AmdGpu
from nodeready.probes.gpu import DeviceFile, Gpu, Gpus
from nodeready.results import Result, fail, na, ok, unknown

_KFD = "/dev/kfd"
_RENDER = "/dev/dri/renderD"
#: What CUDA opens; capabilities (MIG) and modeset have owners of their own.
_NVIDIA = re.compile(r"/dev/nvidia([0-9]+|ctl|-uvm)")
_FIX_AMD = 'udev rule: KERNEL=="kfd" and "renderD*", GROUP="render", MODE="0666"'
_FIX_NVIDIA = "NVreg_DeviceFileMode=0666 for the module nvidia"


def _by_group(file: DeviceFile) -> bool:
    """Whether a group other than root's may use it."""
    return file.mode[4:6] == "rw" and file.gid != 0


def _closed(files: Iterable[DeviceFile]) -> list[str]:
    """The files that no user but root can open for reading and writing."""
    return [
        f"{file.path} {file.mode} group {file.gid}"
        for file in files
        if file.mode[7:9] != "rw" and not _by_group(file)
    ]


@check(
    "gpus.device_access",
    fix=(
        "load amdgpu with its compute part (ROCm)",
        'udev rule: KERNEL=="kfd" and "renderD*", GROUP="render", MODE="0666"',
        "NVreg_DeviceFileMode=0666 for the module nvidia",
    ),
)
def device_access(seen: Gpus, want: Policy) -> Result:
    """Jobs can open the GPUs' device files: everybody, or the members of a group.

    ROCm opens /dev/kfd and /dev/dri/renderD*, which belong to the groups render and video unless a
    rule of udev opens them (ROCm's installation guide: configuring permissions for GPU access);
    CUDA opens /dev/nvidia*, 0666 by default (NVIDIA's driver README, "DeviceFileMode"). Whether a
    job's user is in that group is not looked at here.
    """
    check, wanted = "gpus.device_access", "readable and writable for jobs"
    reason = none(seen)
    if reason:
        return na(check, reason)
    bound = {gpu.vendor for gpu in expected(seen) if gpu.driver in ("amdgpu", "nvidia")}
    bound |= {gpu.vendor for gpu in seen.gpus}
    if not bound:
        return na(check, "no GPU has its driver")
    amd, lost = [], []
    if "amd" in bound:
        amd = [f for f in seen.device_files if f.path == _KFD or f.path.startswith(_RENDER)]
        lost += [] if any(f.path == _KFD for f in amd) else [_KFD]
        lost += [] if any(f.path != _KFD for f in amd) else [f"{_RENDER}*"]
    nvidia = [f for f in seen.device_files if "nvidia" in bound and _NVIDIA.fullmatch(f.path)]
    if lost and not seen.device_files:
        return unknown(check, "no device file was seen")
    closed, fixes = _closed([*amd, *nvidia]), []
    if lost or closed:
        fixes += ["load amdgpu with its compute part (ROCm)"] if lost else []
        fixes += [_FIX_AMD] if _closed(amd) else []
        fixes += [_FIX_NVIDIA] if _closed(nvidia) else []
        words = [f"{path} is missing" for path in lost] + closed
        return fail(check, wanted, few(words), "/dev", "; ".join(fixes))
    if not amd and not nvidia:
        # nvidia-modprobe makes them when the first program asks for them.
        return na(check, "no program has used a GPU since the boot")
    groups = sorted({file.gid for file in (*amd, *nvidia) if file.mode[7:9] != "rw"})
    if groups:
        names = few([str(group) for group in groups])
        return ok(check, wanted, f"for members of group {names} only", "/dev")
    return ok(check, wanted, "for everybody", "/dev")


@check(
    "gpus.xgmi_errors",
    fix=("drain, reset the GPUs; open a case with the vendor if they come back",),
)
def xgmi_errors(seen: Gpus, want: Policy) -> Result:
    """No error on the links between AMD's GPUs (XGMI) since the driver was loaded.

    RAS counts them as block XGMI_WAFL; MI200 and older have a status of their own, which amd-smi
    clears when it reads it (Linux' amdgpu_xgmi.c): there, each look shows what is new.
    """
    check = "gpus.xgmi_errors"
    if not seen.amd and not expected(seen, "amd"):
        return na(check, none(seen) or "no AMD GPU")

    def value(gpu: Gpu) -> int | None:
        return gpu.xgmi_errors if isinstance(gpu, AmdGpu) else None

    def wrong(gpu: Gpu) -> str:
        errors = value(gpu)
        return f"{errors} XGMI errors" if errors else ""

    fix = "drain, reset the GPUs; open a case with the vendor if they come back"
    return each(check, seen, "0 errors", value, wrong, absent="these GPUs count none", fix=fix)
