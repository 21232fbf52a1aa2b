"""WHAT WENT WRONG: stacks of a hung job, core files, logs, from all nodes, grouped.

Each asks the nodes, and makes a document of their answers, purely. Nothing here
stops, changes or judges a job; a core of a live process is taken only on request.
"""
