"""Judge whether the job's user has what a job uses beside its limits: directories and devices."""

from __future__ import annotations

from nodeready.core.policy import Policy
from nodeready.core.result import Result, check, fail, join_first, ok, warn
from nodeready.core.severity import loses_job
from nodeready.core.shell import quote
from nodeready.subjects.proof.facts import Proved
from nodeready.subjects.proof.preconditions import observation
from nodeready.subjects.proof.session_facts import SHM, JobDirectory, Resources


def _unusable(place: JobDirectory, home: str) -> str:
    """What is wrong with a directory that only costs caches and compiled code; "": nothing."""
    if place.error:
        return f"{place.path}: {place.error}" if place.path == home else ""
    if place.exec_error and place.path != SHM:
        return f"no code can be run from {place.path} ({place.exec_error}: noexec?)"
    return ""


_SHM_FIX = "free or enlarge /dev/shm: `df -h /dev/shm`, host.shm"
# Shared memory uses memory, even in a file system with a larger size.
_MEMORY_FIX = "see what takes the memory: `free -m`, and memory.max of the user's slice"
_CACHE_FIX = (
    "TMPDIR, XDG_CACHE_HOME, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR elsewhere, or "
    "remount it with exec, for writing or with room"
)


@check(
    "proof.resources",
    loses_job("clean_up", "configure"),
    proof="resources",
    settings=("shm_min_mb",),
    fix=(
        "chmod 1777 PATH, or see what is full or read-only there",
        _SHM_FIX,
        _MEMORY_FIX,
        "add NAME to the file's group, or open it with a rule of udev (NVIDIA: "
        "NVreg_DeviceFileMode=0666)",
        _CACHE_FIX,
    ),
)
def resources(observed: Proved, policy: Policy) -> Result:
    """The job's user can use what a job uses: /tmp, shared memory, the home, the device files.

    1 MiB is written and mapped in each directory: a failed write breaks jobs (NCCL and data
    loaders share memory, sockets lie in /tmp). shm_min_mb is not allocated, which could cost a
    running job its memory: the check reads the free space of /dev/shm, and the free memory and
    swap, within memory.max of the session's cgroups (v2). Where no code can be run, or the home
    takes no file, PyTorch and Triton need another place for compiled code: a warning. A device
    file of a GPU or of RDMA fails where its mode excludes this user. Not judged: quotas of a
    tmpfs, the cgroup that Slurm gives to a job, devices that a cgroup withholds from a session.
    """
    check = "proof.resources"
    resources = observation(check, observed, "resources", Resources)
    if isinstance(resources, Result):
        return resources
    expected, name = "usable for the job's user", observed.user_name
    closed = [f"{device.path} ({device.mode})" for device in resources.devices]
    if closed:
        fix = f"add {name} to the file's group, or open it with a rule of udev (NVIDIA: "
        actual = f"{name} cannot open {join_first(closed)}"
        return fail(check, expected, actual, "/dev", f"{fix}NVreg_DeviceFileMode=0666)")
    broken = [place for place in resources.places if place.error and place.path != resources.home]
    if broken:
        actual = "; ".join(f"{place.path}: {place.error}" for place in broken)
        fix = f"chmod 1777 {quote(broken[0].path)}, or see what is full or read-only there"
        return fail(check, expected, actual, broken[0].path, fix)
    free_mb = min(place.free_bytes >> 20 for place in resources.places if place.path == SHM)
    if free_mb < policy.shm_min_mb:
        actual = f"{free_mb} MiB of shared memory are free, {policy.shm_min_mb} wanted"
        return warn(check, expected, actual, SHM, _SHM_FIX)
    if resources.memory_bytes is not None and resources.memory_bytes >> 20 < policy.shm_min_mb:
        free_mb = resources.memory_bytes >> 20
        actual = f"shared memory can grow by {free_mb} MiB of memory, {policy.shm_min_mb} wanted"
        return warn(check, expected, actual, SHM, _MEMORY_FIX)
    costly = [words for place in resources.places if (words := _unusable(place, resources.home))]
    if costly:
        return warn(check, expected, "; ".join(costly), "", _CACHE_FIX)
    return ok(check, expected)
