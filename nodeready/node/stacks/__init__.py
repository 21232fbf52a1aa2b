"""CAPTURE: find a job's processes on a node, and the stack and state of each; touch none.

The modules here run on the node, as one text that needs nothing but Python 3.9
(`nodeready.node.payload`). Their observations go back as plain data; the control machine groups
and judges them.
"""
