"""CAPTURE: find a job's processes on a node, and the stack and state of each; touch none.

The modules run on the node, as one text that needs only Python 3.9 (`nodeready.agent.payload`).
Their observations are plain data, which the control machine groups and judges.
"""
