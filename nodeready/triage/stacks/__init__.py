"""STACKS: collect every rank's trace, group equal stacks, say what each waits for."""
