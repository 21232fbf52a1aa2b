"""SHOW a command's document: a module per output format, and the rows of the registry.

Nothing is judged here, and no node is asked. A text of a node is sanitised before it is shown.
"""
