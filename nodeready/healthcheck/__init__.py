"""ON THE NODE: look, prove, judge and report on this machine alone; carried there as one file.

The room has no look, check or report of its own: it runs those of the control machine, with the
standard library alone. It never asks another node.
"""
