"""CORES: list the core files of a node, read them with gdb, take one of a live process.

The modules run on the node. No core is written, moved or removed, save the one that was asked for.
"""
