"""PROGRAMS FOR NODES: they need only Python 3.9, observe a node, and print their observations.

A program travels as one text (`payload`), and ends with all its processes (`runtime`). It never
judges: the subjects' checks and the control machine do.
"""
