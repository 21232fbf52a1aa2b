"""A layer of an overlay under construction: directories, files, links, devices, what is hidden."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from nodeready.lab.fresh import DEVICES
from nodeready.lab.hardware import Link, Tree


class Image:
    """The layer under construction; paths are those of the node."""

    def __init__(self, base: Path) -> None:
        self.base = base
        base.mkdir(mode=0o755)

    def directory(self, path: str, mode: int | None = None, opaque: bool = False) -> Path:
        """A directory; with no mode, parents and itself look like this machine's."""
        made = self.base / path.lstrip("/")
        if not made.is_dir():
            self.directory(os.path.dirname(path))
            made.mkdir(mode=0o755)
            if os.path.isdir(path):
                shutil.copystat(path, made)
                like = os.stat(path)
                os.chown(made, like.st_uid, like.st_gid)
        if mode is not None:
            made.chmod(mode)
        if opaque:
            os.setxattr(made, "trusted.overlay.opaque", b"y")
        return made

    def file(self, path: str, content: str, mode: int = 0o644, owner: int = 0) -> None:
        """A regular file."""
        made = self.directory(os.path.dirname(path)) / os.path.basename(path)
        made.write_text(content)
        made.chmod(mode)
        os.chown(made, owner, owner)

    def link(self, path: str, target: str) -> None:
        """A symbolic link, unless something is there."""
        made = self.directory(os.path.dirname(path)) / os.path.basename(path)
        if not os.path.lexists(made):
            made.symlink_to(target)

    def tree(self, path: str, tree: Tree) -> None:
        """A directory with this content."""
        self.directory(path)
        for name, content in tree.items():
            if isinstance(content, Link):
                self.link(f"{path}/{name}", content.target)
            elif name.endswith("/"):
                self.directory(f"{path}/{name[:-1]}")
            else:
                self.file(f"{path}/{name}", content)

    def device(self, path: str, mode: int = 0o666) -> None:
        """A device file that is as harmless as /dev/null."""
        made = self.directory(os.path.dirname(path)) / os.path.basename(path)
        os.mknod(made, stat.S_IFCHR, os.makedev(*DEVICES["null"]))
        made.chmod(mode)

    def hide(self, path: str) -> None:
        """Nothing at this path, whatever the machine has there."""
        made = self.directory(os.path.dirname(path)) / os.path.basename(path)
        if not os.path.lexists(made):
            os.mknod(made, stat.S_IFCHR, os.makedev(0, 0))
