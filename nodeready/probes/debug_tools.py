"""The debugging tools of a node: which are installed, what installs them, and its py-spy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nodeready import shell
from nodeready.policy import Policy
from nodeready.probes.base import Output, Probe, ProbeError, Section

PY_SPY = "/usr/local/bin/py-spy"
_DPKG = "/var/lib/dpkg/info"
#: In the order of preference: Debian can have dnf installed, openSUSE too.
MANAGERS = ("apt-get", "zypper", "dnf", "yum")


def _script(policy: Policy) -> str:
    # A package counts as there when its command is (built by hand, from a module tree), or when
    # the package manager has it: not every package has a command of its name.
    names = " ".join(shell.quote(name) for name in policy.packages)
    packages = rf"""
    nr_missing=
    for nr_name in {names}; do
        nr_found=
        if command -v "$nr_name" >/dev/null 2>&1; then nr_found=1; fi
        for nr_file in {_DPKG}/"$nr_name".md5sums {_DPKG}/"$nr_name":*.md5sums; do
            if [ -e "$nr_file" ]; then nr_found=1; fi
        done
        if [ -z "$nr_found" ] && [ ! -d {_DPKG} ] && command -v rpm >/dev/null; then
            if rpm -q "$nr_name" >/dev/null 2>&1; then nr_found=1; fi
        fi
        if [ -z "$nr_found" ]; then printf 'missing=%s\n' "$nr_name"; fi
    done
    nr_have {" ".join(MANAGERS)}
    """
    py_spy = rf"""
    nr_line=
    {{ read -r nr_line </proc/sys/kernel/arch; }} 2>/dev/null
    printf 'machine=%s\n' "${{nr_line:-$(uname -m)}}"
    if [ -e {PY_SPY} ]; then
        printf 'mode=%s\n' "$(stat -Lc %a {PY_SPY})"
        printf 'version=%s\n' "$(timeout -k 1 2 {PY_SPY} --version 2>/dev/null)"
    fi
    """
    parts = [packages if policy.packages else "", py_spy if policy.py_spy_version else "", ":"]
    return "\n".join(parts)


@dataclass(frozen=True)
class DebugTools:
    """What a debugging session would find.

    missing:  the policy's packages that are not there, in its order
    manager:  apt-get, zypper, dnf or yum; "" when none of them is there
    machine:  ``uname -m``; "" when the policy leaves py-spy alone
    py_spy:   the version that /usr/local/bin/py-spy says it is; "" when it is there but does not
              run; None: no such file
    mode:     that file's permission bits
    """

    missing: tuple[str, ...] = ()
    manager: str = ""
    machine: str = ""
    py_spy: str | None = None
    mode: int = 0


def parse(outputs: Mapping[str, Output], policy: Policy) -> DebugTools:
    """Raises ProbeError for a machine or mode that is none."""
    output = outputs["debug_tools"]
    values = output.values()
    machine = values.get("machine", "")
    if policy.py_spy_version and not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", machine):
        raise ProbeError("uname -m makes no sense", machine)
    mode = values.get("mode", "")
    if "mode" in values and not re.fullmatch(r"[0-7]{1,5}", mode):
        raise ProbeError(f"the mode of {PY_SPY} is no mode", mode)
    have = output.all("have")
    said = re.fullmatch(r"py-spy (\d[\w.+-]*)", values.get("version", ""))
    return DebugTools(
        missing=tuple(name for name in policy.packages if name in output.all("missing")),
        manager=next((name for name in MANAGERS if name in have), ""),
        machine=machine,
        py_spy=(said[1] if said else "") if "version" in values else None,
        mode=int(mode, 8) if mode else 0,
    )


PROBE = Probe("debug_tools", (Section("debug_tools", _script),), parse)
