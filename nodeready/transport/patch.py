"""Imported before a command that talks to nodes: gevent must patch the standard library before
anything else opens a socket, as pyinfra's own command does.
"""

from __future__ import annotations

import logging

from gevent import monkey

monkey.patch_all()

# pyinfra and paramiko log what we report ourselves, once and in one line.
for _name in ("pyinfra", "paramiko"):
    _logger = logging.getLogger(_name)
    _logger.addHandler(logging.NullHandler())
    _logger.propagate = False
    _logger.setLevel(logging.CRITICAL + 1)
