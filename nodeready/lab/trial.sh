# What a node needs from the kernel, in namespaces that vanish with the trial.
mount -t tmpfs lab /mnt && mkdir /mnt/u /mnt/w /mnt/m || { echo 'mount a tmpfs'; exit 1; }
mount -t overlay lab -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/m ||
    { echo 'mount an overlay of /'; exit 1; }
mount -t proc lab /mnt/m/proc || { echo 'mount /proc'; exit 1; }
ip link add name lab0 type bridge && ip link add name lab1 type veth peer name lab2 ||
    { echo 'make a bridge'; exit 1; }
