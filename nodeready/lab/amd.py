"""Nodes with AMD Instinct accelerators: modelled on 8-way MI300X (OAM) platforms."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nodeready.lab import hardware
from nodeready.lab.hardware import SERVER, File, Hardware, read_text, read_toml

# --- The output of amd-smi with AMD Instinct MI300X, and a stand-in that prints it.
#
#     outputs()                                  # 8 healthy GPUs
#     outputs(changes={3: {"uncorrectable": 2}}) # GPU 3 has two uncorrectable errors
#     outputs(missing=(5,))                      # the driver has lost GPU 5
#     stand_in(outputs())                        # the text of /usr/bin/amd-smi
#
# The format is that of amd-smi 25 and 26 (ROCm 6.4 and 7): ROCm/amdsmi, amdsmi_commands.py.

#: Bus numbers of the eight accelerators of an 8-way MI300X (OAM) platform, four per socket.
BUSES = ("05", "29", "49", "65", "85", "a5", "c5", "e5")


# The output of a healthy, idle GPU by subcommand: the first of its node.
_GPU = read_text("mi300x.json")

#: The values that may differ between two GPUs: name -> their places in `mi300x.json`. Further
#: names: ``down``, the GPUs to which its link is down; ``violation``, what slows it down
#: (``prochot``, ``socket_thermal``, ``vr_thermal``, ``hbm_thermal``); ``static`` and ``metric``,
#: other values of these subcommands, at any depth.
_PLACES: Mapping[str, Sequence[str]] = read_toml("amd")


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with these changes at any depth."""
    merged = dict(values)
    for name, value in changes.items():
        is_deep = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
        merged[name] = _merged(values[name], value) if is_deep else value
    return merged


def _gpu(index: int, bus: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The output of one GPU, by subcommand. Raises KeyError for a value that it does not have."""
    gpu: dict[str, Any] = json.loads(_GPU)

    def put(place: str, value: object) -> None:
        *parents, name = place.split("/")
        inner = gpu
        for parent in parents:
            inner = inner[parent]
        inner[name] = value

    for place, value in (
        ("static/gpu", index),
        ("metric/gpu", index),
        ("static/asic/asic_serial", f"0x{0x5F1CC6AB32BB1B80 + index:X}"),
        ("static/asic/oam_id", index),
        ("static/bus/bdf", f"0000:{bus}:00.0"),
        ("static/board/product_serial", f"69232000{index:04}"),
        ("static/numa/node", index // 4),
        ("static/numa/affinity", index // 4),
    ):
        put(place, value)
    errors = sum(changes.get(name, 0) for name in ("uncorrectable", "xgmi_uncorrectable"))
    if errors:
        put("metric/ecc/total_uncorrectable_count", errors)
    # Other values of a subcommand win over those with a name.
    for name, value in sorted(changes.items(), key=lambda item: item[0] in ("static", "metric")):
        if name == "violation":
            put(f"metric/throttle/{value}_violation_status", "ACTIVE")
        elif name in ("static", "metric"):
            gpu[name] = _merged(gpu[name], value)
        elif name != "down":
            for place in _PLACES[name]:
                put(place, value)
    return gpu


def outputs(
    changes: Mapping[int, Mapping[str, Any]] = {},  # number of a GPU -> its values that differ
    missing: Collection[int] = (),  # those that the driver lacks; the tool numbers the rest from 0
    buses: Sequence[str] = BUSES,
) -> dict[str, str]:
    """The output of ``amd-smi static``, ``metric`` and ``xgmi`` with ``--json``, by subcommand."""
    present = [slot for slot in range(len(buses)) if slot not in missing]
    static, metric, table, status = [], [], [], []
    for index, slot in enumerate(present):
        values, address = changes.get(slot, {}), f"0000:{buses[slot]}:00.0"
        gpu, down = _gpu(index, buses[slot], values), values.get("down", ())
        static.append(gpu["static"])
        metric.append(gpu["metric"])
        words = ["X" if peer == slot else "D" if peer in down else "U" for peer in present]
        table.append({"gpu": index, "bdf": address, "link_metrics": {"link_type": "XGMI"}})
        status.append({"gpu": index, "bdf": address, "link_status": words})
    return {
        "static": json.dumps({"gpu_data": static}, indent=1),
        "metric": json.dumps({"gpu_data": metric}, indent=1),
        "xgmi": f"{json.dumps(table, indent=1)}\n{json.dumps(status, indent=1)}",
    }


def stand_in(printed: Mapping[str, str], before: str = "") -> str:
    """A program that prints the output of its subcommand. before: shell text that it runs first"""
    cases = "".join(f"{name})\ncat <<'END'\n{text}\nEND\n;;\n" for name, text in printed.items())
    return (
        f"#!/bin/sh\n# A stand-in for amd-smi.\n{before}case $1 in\n{cases}"
        '*)\necho "amd-smi: unknown command $1" >&2\nexit 2\n;;\nesac\n'
    )


# The tool runs a second program with the answers, which a fault can replace.
_ANSWERS = "/.lab/amd-smi"
_TOOL = f'#!/bin/sh\n# A stand-in: prints recorded answers.\nexec {_ANSWERS} "$@"\n'


def make(
    *,
    gpus: Mapping[int, Mapping[str, Any]] = {},  # index -> its values that differ (`outputs`)
    missing: Collection[int] = (),
    unbound: Collection[int] = (),
    unplugged: Collection[int] = (),
    ports: Mapping[str, Mapping[str, Any]] = {},
    nics: Mapping[str, Mapping[str, Any]] = {},
    tool: str = "",  # shell text that amd-smi runs first
    numa_balancing: int = 0,
    log: Sequence[str] = (),
) -> Hardware:
    """A node with eight MI300X; further arguments are as of `nvidia.make`."""
    devices, interfaces = hardware.adapters(hardware.ports_of("mi300x"), ports, nics)
    hidden = {*missing, *unbound, *unplugged}
    # Class 0x1200 is "processing accelerator", the class of Instinct boards.
    link = ("32.0 GT/s PCIe", 16, "32.0 GT/s PCIe", 16)
    card = hardware.PciDevice("", "0x1002", "0x74a1", "0x120000", driver="amdgpu", link=link)
    cards = hardware.accelerators(BUSES, card, gpus, unbound, unplugged)
    functions = [*SERVER, *cards, *hardware.pci(devices, interfaces)]
    return Hardware(
        trees={
            **hardware.pci_trees(*functions),
            **hardware.trees(devices, interfaces),
            "/sys/module/amdgpu": {"version": "6.12.12\n", "initstate": "live\n"},
        },
        files={
            "/usr/bin/amd-smi": File(_TOOL, 0o755),
            _ANSWERS: File(stand_in(outputs(gpus, hidden), tool), 0o755),
        },
        devices={
            "/dev/kfd": 0o666,
            **{f"/dev/dri/renderD{128 + index}": 0o666 for index in range(len(BUSES))},
            **hardware.device_files(devices),
        },
        sysctls={"kernel/numa_balancing": str(numa_balancing)},
        kernel_log=(
            (11.201544, "[drm] amdgpu kernel modesetting enabled."),
            *hardware.log_lines(log, BUSES),
        ),
    )
