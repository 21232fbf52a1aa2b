"""PROVE: act on a node, on processes and files that we made ourselves, and tell what came of it.

"Configured" is not "works": a canary does what a person will do when the job hangs. The modules
here run on the node, as one text that needs nothing but Python 3.9 (`nodeready.node.payload`).
What they saw is plain data, which ``nodeready/subjects/proof`` judges.
"""
