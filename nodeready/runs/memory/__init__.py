"""MEMORY: what earlier looks showed of each node and part, kept on the control machine.

It judges nothing and asks no node.
"""
