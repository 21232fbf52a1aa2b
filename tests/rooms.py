"""The rooms of nodeready/ in their order: a room imports only itself and rooms above it.

The one list of them. The test of the walls holds the imports against it, and scripts/draw_house.py
draws it.
"""

#: room -> what it does.
ROOMS = {
    "core": "values, judging, text, files",
    "knowledge": "what the field knows, as rows",
    "subjects": "observe and judge",
    "agent": "all else that a node runs",
    "fleet": "inventories and transports",
    "runs": "a command's work, its document",
    "reports": "show, a file per format",
    "lab": "a cluster on one machine",
    "cli": "the commands",
    "nodesets": "node sets, for inventories",
    "facts": "the probes, for pyinfra",
    "deploys": "whole deploys, for pyinfra",
    "api": "the commands, for Python",
}
