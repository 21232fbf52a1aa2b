nsenter -t "$(cat /run/peer)" --net python3 -c '
import socket
try:
    socket.create_connection(("10.9.0.1", 29505), 1)
    print("connected")
except OSError:
    print("filtered")
'
