"""What ranks do that talk by libraries, sockets of the machine, files and shared memory.

Acts for `acts.py`, beside those of `talks.py`.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from talks import clients, connect, listen, port_of, publish, rank, read_shard, world


def wait_for_file(name):
    while not os.path.exists(name):
        time.sleep(0.02)


def touch(name):
    with open(name, "w"):
        pass


# --- Sockets of the machine.


def serve_unix():
    """Rank 0 has the others' connections, and reads before it answers."""
    server = socket.socket(socket.AF_UNIX)
    server.bind("server.new")
    server.listen(8)
    os.rename("server.new", "server")
    _kept = [server.accept() for _ in range(world() - 1)]
    read_shard()


def ask_unix():
    wait_for_file("server")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("server")
    connection.recv(1)


def serve_datagrams():
    _kept = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    _kept.bind("datagrams")
    touch("bound")
    read_shard()


def ask_datagrams():
    wait_for_file("bound")
    own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    own.bind(f"datagrams-{rank()}")
    own.connect("datagrams")
    own.send(b"x")
    own.recv(1)


def serve_udp():
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    publish(server.getsockname()[1])
    read_shard()


def ask_udp():
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.connect(("127.0.0.1", port_of(0)))
    own.send(b"x")
    own.recv(1)


def pour():
    """Sends more than fits, and rank 0 takes nothing."""
    connect().sendall(b"x" * (64 << 20))


def ask_by_thread():
    """Each connection has a thread, and the main thread waits for all answers."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: socket.create_connection(("127.0.0.1", port_of(0))).recv(1), "ab"))


def tree_root():
    """Rank 0 has rank 1, and reads; rank 1 has the others, and asks rank 0 for them."""
    _kept = clients(listen(), 1)
    read_shard()


def tree_middle():
    server = listen()
    above = connect(0)
    _kept = clients(server, world() - 2)
    above.recv(1)


def tree_leaf():
    connect(1).recv(1)


# --- zmq.


def zmq_socket(kind, port=0):
    import zmq

    own = zmq.Context.instance().socket(getattr(zmq, kind))
    if port:
        own.connect(f"tcp://127.0.0.1:{port}")
    else:
        publish(own.bind_to_random_port("tcp://127.0.0.1"))
    return own


def zmq_rep():
    """Takes one question of each, and reads before it answers."""
    own = zmq_socket("REP")
    own.recv()
    read_shard()


def zmq_req():
    own = zmq_socket("REQ", port_of(0))
    own.send(b"x")
    own.recv()


def zmq_router():
    """Takes a part of each rank, whoever comes first."""
    import zmq

    own = zmq_socket("ROUTER")
    poller = zmq.Poller()
    poller.register(own, zmq.POLLIN)
    for _ in range(world() - 1):
        poller.poll()
        own.recv_multipart()


def zmq_dealer():
    own = zmq_socket("DEALER", port_of(0))
    own.send(b"x")
    own.recv()


def zmq_dealer_reads():
    _kept = zmq_socket("DEALER", port_of(0))
    read_shard()


# --- gRPC.


def grpc_serve(work):
    import grpc

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            if details.method == "/job/stream":
                return grpc.unary_stream_rpc_method_handler(lambda question, context: work())
            return grpc.unary_unary_rpc_method_handler(lambda question, context: work())

    server = grpc.server(ThreadPoolExecutor(8))
    server.add_generic_rpc_handlers([Handler()])
    publish(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    return server


def grpc_unary():
    """A handler reads, and the main thread waits for the end."""

    def answer():
        read_shard()
        return b""

    grpc_serve(answer).wait_for_termination()


def grpc_stream():
    """The handlers wait for what the main thread makes, which reads first."""
    made = threading.Event()

    def answer():
        made.wait()
        yield b""

    _kept = grpc_serve(answer)
    read_shard()


def grpc_channel():
    import grpc

    return grpc.insecure_channel(f"127.0.0.1:{port_of(0)}")


def grpc_ask():
    grpc_channel().unary_unary("/job/unary")(b"")


def grpc_take():
    next(grpc_channel().unary_stream("/job/stream")(b""))


def grpc_ask_later():
    grpc_channel().unary_unary("/job/unary").future(b"").result()


# --- Files and shared memory.


def hold_flock():
    with open("lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        touch("held")
        read_shard()


def wait_flock():
    wait_for_file("held")
    with open("lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def hold_record():
    with open("lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        touch("held")
        read_shard()


def wait_record():
    wait_for_file("held")
    with open("lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)


def hold_lock_file():
    os.close(os.open("lock", os.O_CREAT | os.O_EXCL))
    read_shard()


def poll_lock_file():
    """As filelock's SoftFileLock does."""
    wait_for_file("lock")
    while True:
        with contextlib.suppress(FileExistsError):
            os.close(os.open("lock", os.O_CREAT | os.O_EXCL))
            return
        time.sleep(0.05)


def shared_page():
    number = os.open("page", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(number, 4096)
    return mmap.mmap(number, 4096)


def hold_flag():
    _kept = shared_page()
    read_shard()


def poll_flag():
    """Looks again and again into shared memory."""
    page = shared_page()
    while not page[0]:
        time.sleep(0.01)


def wait_futex():
    page = shared_page()
    word = ctypes.c_uint32.from_buffer(page)
    number = 98 if platform.machine() == "aarch64" else 202
    ctypes.CDLL(None).syscall(number, ctypes.byref(word), 0, 0, None)


def hold_mutex():
    """A mutex of pthread_mutexattr_setpshared(3) in shared memory."""
    library, mutex = ctypes.CDLL(None), (ctypes.c_char * 64).from_buffer(shared_page())
    attributes = ctypes.create_string_buffer(16)
    library.pthread_mutexattr_init(attributes)
    library.pthread_mutexattr_setpshared(attributes, 1)
    library.pthread_mutex_init(mutex, attributes)
    library.pthread_mutex_lock(mutex)
    touch("held")
    read_shard()


def wait_mutex():
    wait_for_file("held")
    ctypes.CDLL(None).pthread_mutex_lock((ctypes.c_char * 64).from_buffer(shared_page()))


# --- Healthy: long steps, in which rank 0 takes the others' words in threads.


def take_in_threads(connections):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: one.recv(1), connections))
