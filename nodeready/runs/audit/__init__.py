"""AUDIT: the snapshots of all nodes become one document: history, peers, results, readiness.

It judges by the subjects' checks alone, and never writes to a node.
"""
