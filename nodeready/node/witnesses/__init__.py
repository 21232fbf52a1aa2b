"""WITNESSES: what else knows where a job stands, beside its stacks; each with a limit of its own.

A file is a witness: a frozen dataclass of what it saw, and the functions that look. All of it is
data as it was found; what it means is for `nodeready.triage.stacks` to say. A witness that is not
there is an answer, too: its `absent` says why, in one line. The program on the node
(`nodeready.node.stacks.program`) asks them all in its one round, and none can make it wait:
whatever a job's user can have made is read in a fork, with that user's rights.
"""
