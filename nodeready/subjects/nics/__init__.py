"""The network interfaces of a node, its bonds and its routes."""
