"""ON THE NODE: probe, prove, judge and report on this machine alone; it travels as one file.

This package adds no probe, check or report: it runs those of the control machine, with the
standard library alone. It never asks another node.
"""
