"""One collective over all nodes before the job starts; names the faulty node, GPU or path.

`participants` and `rounds` talk with the nodes; the other modules are pure.
"""
