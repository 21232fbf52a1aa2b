# Process 1 of a node. It brings up the network with the address in $3; applies the persisted
# sysctls as a boot does, with the distribution's reader, or procps' where there is no systemd; runs the
# scripts of the node's hardware and fault; starts sshd; and stays to reap orphans, also when sshd
# is stopped.
printf '%s\n' 'link set lo up' "address add $3 dev eth0" 'link set eth0 up' | ip -batch - || exit
for s in /usr/lib/systemd/systemd-sysctl /lib/systemd/systemd-sysctl /usr/sbin/sysctl; do
    case $s in */sysctl) set_all='--quiet --system' ;; *) set_all= ;; esac
    if [ -x "$s" ]; then "$s" $set_all; break; fi
done
for s in start fault; do
    if [ -e /.lab/$s ]; then sh -e /.lab/$s || exit; fi
done
/usr/sbin/sshd -D -e &
while :; do sleep 86400 & wait; done
