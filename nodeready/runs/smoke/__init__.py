"""One collective over all nodes before the job starts; names the faulty node, GPU or path.

`participants` and `rounds` ask the nodes; all further modules are pure.
"""
