# It ends a moment after the signal: until then it takes connections.
pid=$(cat /run/sshd.pid) && kill "$pid" || exit 1
for i in $(seq 200); do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.05; done
exit 1
