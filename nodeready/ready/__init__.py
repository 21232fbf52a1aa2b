"""READY: prove between nodes that a job can start, and say who is to blame where it cannot.

Proofs touch only processes, files and listeners of their own. The judgement is the checks'.
"""
