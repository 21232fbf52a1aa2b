=== differs
# nodeready env, 2026-03-01T12:00:00Z: gpu[001-064] (64 nodes)
# not among them: gpu065: no answer in 15 s
# not among them: gpu066: x'; touch pwned; $(touch pwned)`touch pwned`\x0atouch
#   pwned\x0d\x85\u2028touch pwned\x1b[2J

# NCCL_SOCKET_IFNAME is not set: the nodes differ
#   =eth0  gpu[001-063]
#   =eth1  gpu064
# mend gpu064, or give each node its own value in a file there
# =eth0,eth1 means the right one on each: no node has two of them

# GLOO_SOCKET_IFNAME is not set: the nodes differ
#   eth0  gpu[001-063]
#   eth1  gpu064
# mend gpu064, or give each node its own value in a file there

# OMPI_MCA_btl_tcp_if_include is not set: the nodes differ
#   eth0  gpu[001-063]
#   eth1  gpu064
# mend gpu064, or give each node its own value in a file there

# NCCL_IB_HCA is not set: the nodes differ
#   =mlx5_0,mlx5_1  gpu[001-063]
#   nothing         gpu064
# mend gpu064, or give each node its own value in a file there

# pdsh is installed, and its own default may be rsh
export PDSH_RCMD_TYPE=ssh

# gpu001, the first node, on eth0; rank 0 must run there
export MASTER_ADDR=10.0.0.1

# the first of 29500-29510 that is free on all nodes
# not 29500 on gpu064: python3 of ada listens
export MASTER_PORT=29501

=== halves
# nodeready env, 2026-03-01T12:00:00Z: gpu[001-002] (2 nodes)

# NCCL_SOCKET_IFNAME is not set: the nodes differ
#   =eth0  gpu001
#   =eth1  gpu002
# give each node its own value in a file there

# GLOO_SOCKET_IFNAME is not set: the nodes differ
#   eth0  gpu001
#   eth1  gpu002
# give each node its own value in a file there

# OMPI_MCA_btl_tcp_if_include is not set: the nodes differ
#   eth0  gpu001
#   eth1  gpu002
# give each node its own value in a file there

# active InfiniBand ports at 400 Gb/s
export NCCL_IB_HCA='=mlx5_0,mlx5_1'

# pdsh is installed, and its own default may be rsh
export PDSH_RCMD_TYPE=ssh

# gpu001, the first node, on eth0; rank 0 must run there
export MASTER_ADDR=10.0.0.1

# the first of 29500-29510 that is free on all nodes
export MASTER_PORT=29500

=== unknown
# nodeready env, 2026-03-01T12:00:00Z: gpu[001-003] (3 nodes)

# its routes lead to the other nodes
export NCCL_SOCKET_IFNAME='=eth0'

# its routes lead to the other nodes
export GLOO_SOCKET_IFNAME=eth0

# its routes lead to the other nodes
export OMPI_MCA_btl_tcp_if_include=eth0

# active InfiniBand ports at 400 Gb/s
export NCCL_IB_HCA='=mlx5_0,mlx5_1'

# pdsh is installed, and its own default may be rsh
export PDSH_RCMD_TYPE=ssh

# gpu001, the first node, on eth0; rank 0 must run there
export MASTER_ADDR=10.0.0.1

# the first of 29500-29510 that is free on all nodes
# unknown on gpu003: timed out
export MASTER_PORT=29500
