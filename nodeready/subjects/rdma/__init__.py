"""The RDMA devices of a node and their ports."""
