"""The proofs of `nodeready ready`, on each node and between nodes, and the environment of a job.

Proofs touch only processes, files and listeners that they made. The checks judge them.
"""
