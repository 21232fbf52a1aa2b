"""nvidia-smi on a node: a script that prints recorded answers from files.

The answers lie below `HOME`; a file `before` there is run first, for a tool that hangs or fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nodeready.lab import nvidia_smi
from nodeready.lab.hardware import File

HOME = "/.lab/nvidia-smi"

_SCRIPT = f"""\
#!/bin/sh
# A stand-in: prints what was recorded.
cd {HOME} || exit
if [ -e before ]; then . ./before; fi
case " $* " in
*" nvlink "*) exec cat nvlink ;;
*" -q -x "* | *" -x -q "* | *" -qx "* | *" -xq "*) exec cat query.xml ;;
*" -L "* | *" --list-gpus "*) exec cat list ;;
"  ") exec cat plain ;;
esac
printf 'Invalid combination of input arguments. Please run '\\''nvidia-smi -h'\\'' for help.\\n\\n'
exit 6
"""

#: What can be wrong with the tool itself, as shell text.
BEFORE = {
    "ok": "",
    "hangs": "trap '' TERM INT HUP\nwhile :; do sleep 86400; done\n",
    "fails": """\
echo 'Failed to initialize NVML: Driver/library version mismatch'
echo 'NVML library version: 550.54'
exit 18
""",
}


def files(
    gpus: Mapping[int, Mapping[str, Any]],
    model: str,
    inactive: Collection[tuple[int, int]] = (),
    state: str = "ok",
) -> dict[str, File]:
    """The tool and its answers. `gpus`: those that it shows, as in `nvidia_smi.query`."""
    board = nvidia_smi.BOARDS[model]
    listed = [
        f"GPU {at}: {board.product} (UUID: {nvidia_smi.uuid(at)})\n" for at in range(len(gpus))
    ]
    answers = {
        "query.xml": nvidia_smi.query(gpus.values(), model),
        "nvlink": nvidia_smi.nvlink_status(len(gpus), model, inactive),
        "list": "".join(listed),
        "plain": _plain(gpus, board),
    }
    if BEFORE[state]:
        answers["before"] = BEFORE[state]
    return {
        "/usr/bin/nvidia-smi": File(_SCRIPT, 0o755),
        **{f"{HOME}/{name}": File(text) for name, text in answers.items()},
    }


def _plain(gpus: Mapping[int, Mapping[str, Any]], board: nvidia_smi.Board) -> str:
    """The table that the tool prints without arguments, in short."""
    rule = f"+{'-' * 77}+\n"
    head = f"NVIDIA-SMI {nvidia_smi.DRIVER}    Driver Version: {nvidia_smi.DRIVER}"
    rows = [f"| {head:<56}CUDA Version: {nvidia_smi.CUDA:<6}|\n"]
    for at, gpu in enumerate(gpus.values()):
        temperature = gpu.get("temperature_c", nvidia_smi.CHANGES["temperature_c"])
        address = f"0000{gpu['address'].upper()}"
        row = (
            f"{at:>3}  {board.product:<26} {address:<18} {temperature:>3}C  {board.memory_mib}MiB"
        )
        rows.append(f"| {row:<76}|\n")
    return rule + rule.join([rows[0], "".join(rows[1:])]) + rule
