"""The debugging tools of a node: packages, and one py-spy."""
