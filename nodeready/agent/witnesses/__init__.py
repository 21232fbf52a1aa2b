"""WITNESSES: sources other than stacks that show a job's progress; each has its time limit.

A witness is a file with a frozen dataclass of its observations, and the functions that observe.
`nodeready.runs.stacks` interprets them. A missing witness is an observation, too: its `absent`
is the reason, in one line. The program on the node (`nodeready.agent.stacks.program`) asks all
witnesses in its one round, and none can block it: files that the job's user can write are read in
a fork, with that user's rights.
"""
