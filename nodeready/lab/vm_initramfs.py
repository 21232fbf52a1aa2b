"""The initramfs of the virtual machine: busybox, and the modules that reach the disk."""

from __future__ import annotations

import lzma
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nodeready.lab import vm_recipe as recipe
from nodeready.lab.vm_host import remove, run_logged


def pack(root: Path, version: str, work: Path, log: Path) -> None:
    """Write `work`/initrd for the kernel `version` in the tree `root`, after depmod."""
    modules = root / "usr/lib/modules" / version
    tree = work / "initramfs"
    for name in ("bin", "dev", "proc", "sys", "root", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy(root / "bin/busybox", tree / "bin/busybox")
    order = load_order((modules / "modules.dep").read_text().splitlines())
    for path in order:
        (tree / "modules" / path.stem).write_bytes(_module(modules / path))
    (tree / "modules/order").write_text("".join(f"{path.stem}\n" for path in order))
    (tree / "init").write_text(recipe.INITRAMFS_INIT)
    (tree / "init").chmod(0o755)
    command = "cd initramfs && find . | cpio --quiet -o -H newc -R 0:0 | gzip -1 > ../initrd"
    run_logged(["sh", "-c", command], log, cwd=work)
    remove(tree)


def _module(path: Path) -> bytes:
    """A module as busybox can load it: newer releases compress theirs."""
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dc", path], stdout=subprocess.PIPE, check=True).stdout
    return path.read_bytes()


def load_order(modules_dep: Sequence[str]) -> list[Path]:
    """The files of the wanted modules, each after all that it needs (see modules.dep(5))."""
    needs: dict[str, list[Path]] = {}
    for line in modules_dep:
        file, _, rest = line.partition(":")
        path = Path(file)
        name = path.name.split(".")[0].replace("-", "_")
        needs[name] = [*(Path(part) for part in reversed(rest.split())), path]
    wanted = (path for name in recipe.MODULES for path in needs.get(name, []))
    return list(dict.fromkeys(wanted))
