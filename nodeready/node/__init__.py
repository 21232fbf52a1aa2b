"""PROGRAMS FOR NODES: run there with Python 3.9 and nothing else, print what they saw.

They are carried as one text (`payload`), end with every process that they started (`runtime`), and
never judge: the subjects' checks and the control machine do.
"""
