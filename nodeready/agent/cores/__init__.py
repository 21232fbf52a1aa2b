"""CORES: list the core files of a node, read them with gdb, take a core of a live process.

The modules run on the node. Only a core that is taken on request is written; none is removed.
"""
