"""The node itself: its system, memory, clock, mounts and processes."""
