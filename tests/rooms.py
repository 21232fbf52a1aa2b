"""The rooms of nodeready/ in their order: a room imports only itself and rooms above it.

The one list of them. The test of the walls holds the imports against it, and scripts/draw_house.py
draws it.
"""

from __future__ import annotations

#: room -> what it does.
ROOMS = {
    "shell": "quotes what a shell gets",
    "text": "cleans text from a node",
    "files": "writes a file whole or not at all",
    "exit_codes": "says how a command ends",
    "policy": "declares what is wanted",
    "subjects": "observe and judge",
    "node": "programs that run on a node",
    "inventory": "who: node sets, hostfiles, Slurm",
    "transport": "a text there, its answer back",
    "audit": "peers, history, the document",
    "deploy": "plans and changes",
    "ready": "proofs between nodes",
    "smoke": "a collective over all nodes",
    "triage": "stacks, cores, logs",
    "memory": "what earlier looks showed",
    "reports": "show, a file per format",
    "healthcheck": "the node's own program",
    "lab": "a cluster on one machine",
    "cli": "the commands",
    "nodesets": "node sets, for inventories",
    "facts": "the probes, for pyinfra",
    "deploys": "whole deploys, for pyinfra",
    "api": "the commands, for Python",
}
