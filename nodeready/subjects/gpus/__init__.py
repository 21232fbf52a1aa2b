"""The GPUs of a node, NVIDIA and AMD: the bus, the tools, the links, the kernel log."""
