"""CHANGE: what the nodes need to be as the policy wants them, and how that is done."""
