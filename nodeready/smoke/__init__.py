"""A collective over all nodes before the job starts, and who spoils it when it fails.

`search` and `judge` are pure; `run` talks with the nodes.
"""
