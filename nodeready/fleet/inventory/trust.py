"""Whether the user takes a file that runs with the user's rights, or decides what runs."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path

from nodeready.agent.users_file import walked
from nodeready.core.files import user_name

OPTION = "--trust-inventory"
#: Asks for the same as OPTION: for configuration files, and where pyinfra runs the inventory.
VARIABLE = "NODEREADY_TRUST_INVENTORY"
USE_OPTION = f"use {OPTION}"
Authors = Collection[int] | None  # see `distrust`
SET_VARIABLE = f"set {VARIABLE}=1"  # the remedy where OPTION does not count


def distrust(path: str | Path, *, remedy: str = USE_OPTION, authors: Authors = None) -> str:
    """Why the user does not take this file or directory, in one line with the remedy; "": taken.

    Always "" for a missing file.

    remedy:  how to take the file nevertheless, for the message
    authors: None: the user has named the file; only root then checks who could have written it.
             Otherwise the file is a default: uids, besides the user's own, whose files a user
             other than root takes, because that user already runs their code.
    """
    uid = os.geteuid()
    is_asked = os.environ.get(VARIABLE, "").lower() in ("1", "true", "t", "yes", "y", "on")
    if (uid != 0 and authors is None) or is_asked:
        return ""
    owners = {0, uid, *(authors or ())}
    if uid == 0:
        # Root, and the user who became root by sudo.
        sudo = os.environ.get("SUDO_UID", "")
        owners = {0, int(sudo)} if sudo.isascii() and sudo.isdigit() else {0}
    try:
        entries = walked(os.path.join(os.getcwd(), path))
        reason = next(filter(None, (_entry_problem(*entry, owners) for entry in entries)), "")
    except OSError as error:
        # A process can stand in a directory whose path it may not walk (sudo -u).
        unreadable = (errno.EACCES,) if authors is None else ()
        if error.errno in (errno.ENOENT, errno.ENOTDIR, *unreadable):
            return ""
        reason = f"{error.strerror}: name the file itself"
    return f"{path} is not taken by {user_name(uid)}: {reason}, or {remedy}" if reason else ""


def _entry_problem(place: str, status: os.stat_result, owners: Collection[int]) -> str:
    """The problem of one file, directory or link, with its repair; "": none."""
    if status.st_uid not in owners:
        repair = "copy it" if os.geteuid() else "chown root it"
        return f"{place} belongs to {user_name(status.st_uid)}; {repair}"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if stat.S_ISLNK(status.st_mode) or is_sticky:
        return ""
    if status.st_mode & stat.S_IWOTH:
        return f"{place} is world-writable; chmod o-w it"
    if status.st_mode & stat.S_IWGRP and not _private(place, status):
        return f"group {_group(status.st_gid)} may write to {place}; chmod g-w it"
    return ""


def _private(place: str, status: os.stat_result) -> bool:
    """Whether the group of a place is its owner's alone.

    With an access list, the group's bits are those of the whole list (acl(5)).
    """
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    try:
        os.getxattr(place, "system.posix_acl_access")
    except OSError:
        is_private = owner.pw_gid == status.st_gid and owner.pw_name == group.gr_name
        return is_private and set(group.gr_mem) <= {owner.pw_name}
    return False


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"
