python3 -m http.server 29505 &
ip link add eth0 type veth peer name peer
unshare --net sh -c 'touch /run/peer; exec sleep 1000' &
until [ -e /run/peer ]; do sleep .1; done
ip link set peer netns $!
echo $! >/run/peer
in="nsenter -t $! --net"
ip addr add 10.9.0.1/24 dev eth0; ip link set eth0 up
$in ip addr add 10.9.0.2/24 dev peer; $in ip link set peer up
until ss -Hltn sport = 29505 | grep -q .; do sleep .1; done
