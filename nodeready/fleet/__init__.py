"""Inventories and transports: who the nodes are, and how they are asked."""
