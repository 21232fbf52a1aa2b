"""CAPTURE: find a job's processes on a node, and the stack and state of each; touch none.

The modules here run on the node, as one text that needs nothing but Python 3.9
(`nodeready.node.payload`). What they saw goes back as plain data; grouping and judging are the
control machine's.
"""
