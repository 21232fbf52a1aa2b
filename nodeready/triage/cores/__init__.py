"""CORES: every core file of the nodes once, read where it was written; equal crashes together."""
