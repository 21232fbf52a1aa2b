"""Plugins, installed into a directory as pip does: a package, and what its distribution says."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.paths import ROOT

EXAMPLE = ROOT / "docs/examples/nodeready-scratch"


def install_example(directory: Path) -> Path:
    """Build the wheel of the example and unpack it: an installation without pip's network."""
    wheels = directory.with_name("wheels")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)],
        cwd=EXAMPLE,
        check=True,
        capture_output=True,
    )
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory)
    return directory


def install(
    directory: Path,
    distribution: str,
    files: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
    requires: str = "nodeready",
) -> None:
    """Write the files, and the metadata of a distribution of version 1.0.

    entry_points: group (``subjects``) -> name -> place
    """
    info = directory / f"{distribution.replace('-', '_')}-1.0.dist-info"
    groups = (
        "\n".join([f"[nodeready.{group}]", *(f"{name} = {place}" for name, place in rows.items())])
        for group, rows in entry_points.items()
    )
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    metadata += f"Requires-Dist: {requires}\n"
    texts = {**files, f"{info.name}/METADATA": metadata}
    texts[f"{info.name}/entry_points.txt"] = "\n\n".join(groups) + "\n"
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
