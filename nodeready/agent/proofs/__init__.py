"""PROVE: act on a node, on processes and files that we made ourselves, and report the results.

"Configured" is not "works": a canary does what a person will do when the job hangs. These modules
run on the node, as one text that needs only Python 3.9 (`nodeready.agent.payload`). Their results
are plain data, which ``nodeready/subjects/proof`` judges.
"""
