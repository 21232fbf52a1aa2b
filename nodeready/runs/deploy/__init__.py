"""CHANGE: plan what a node's failing checks ask for, do exactly that, and probe again.

It does not judge a node, and never restarts or reboots beyond the policy.
"""
