"""What ranks do that talk to each other beside torch.distributed, or wait for their own threads.

Acts for `acts.py`: a training's code, by a user's names. Each rank is in the same directory.
"""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import http.server
import itertools
import multiprocessing
import os
import queue
import socket
import threading
import time
import urllib.request
from multiprocessing.managers import BaseManager

LONG = 3600


def rank():
    return int(os.environ["RANK"])


def world():
    return int(os.environ["WORLD_SIZE"])


def read_shard():
    with open(f"fifo-{rank()}", "rb") as file:
        file.read()


def publish(port, name=""):
    with open(f"port-{name or rank()}.new", "w") as file:
        file.write(str(port))
    os.replace(f"port-{name or rank()}.new", f"port-{name or rank()}")


def port_of(name):
    while True:
        with contextlib.suppress(OSError, ValueError), open(f"port-{name}") as file:
            return int(file.read())
        time.sleep(0.02)


# --- Own protocols over TCP.


def listen(port=0):
    server = socket.create_server(("127.0.0.1", port), backlog=64)
    publish(server.getsockname()[1])
    return server


def clients(server, count=0):
    """The other ranks' connections, by their ranks."""
    found = {}
    while len(found) < (count or world() - 1):
        connection, _ = server.accept()
        found[connection.recv(1)[0]] = connection
    return found


def connect(other=0):
    connection = socket.create_connection(("127.0.0.1", port_of(other)))
    connection.sendall(bytes([rank()]))
    return connection


def fetch_parameters():
    connect().recv(1)


def serve_nobody():
    """Rank 0 has all connections, and reads before it answers."""
    _kept = clients(listen())
    read_shard()


def connect_and_read():
    _kept = connect()
    read_shard()


def gather_in_order(port=0):
    """Rank 0 takes a part of each rank, one after the other."""
    for _rank, connection in sorted(clients(listen(port)).items()):
        connection.recv(2)


def gather_at_master_port():
    """The same where torch would have its store."""
    gather_in_order(int(os.environ["MASTER_PORT"]))


def send_part():
    connection = connect()
    connection.sendall(b"ab")
    connection.recv(1)


def gather_of_any():
    """Rank 0 takes parts as they come: select() over all connections."""
    import selectors

    pending = selectors.DefaultSelector()
    for connection in clients(listen()).values():
        pending.register(connection, selectors.EVENT_READ)
    while pending.get_map():
        for key, _ in pending.select():
            if not key.fileobj.recv(2):
                pending.unregister(key.fileobj)


def ring(act=None):
    server = listen()
    after = connect((rank() + 1) % world())
    (before,) = clients(server, 1).values()
    if act:
        act()
    before.recv(1)
    after.sendall(b"x")


def ring_reads():
    ring(read_shard)


def ask_without_accept():
    """The server has not accepted the connection yet."""
    connection = socket.create_connection(("127.0.0.1", port_of(0)))
    connection.recv(1)


def listen_and_read():
    _kept = listen()
    read_shard()


def fetch_async():
    async def fetch():
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(0))
        writer.write(bytes([rank()]))
        await reader.read(1)

    asyncio.run(fetch())


def each_for_the_other():
    """Two ranks, each of which waits for the other."""
    if rank() == 0:
        (connection,) = clients(listen(), 1).values()
    else:
        connection = connect()
    connection.recv(1)


# --- Servers of the standard library.


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer()
        self.send_response(200)
        self.end_headers()

    def answer(self):
        read_shard()

    def log_message(self, *words):
        pass


def serve_http():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    publish(server.server_address[1])
    server.serve_forever()


def serve_http_aside():
    """The server is in a thread, and the main thread asks rank 1 over TCP."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    publish(server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    connect(1).recv(1)


def ask_http():
    urllib.request.urlopen(f"http://127.0.0.1:{port_of(0)}/", timeout=LONG).read()


def ask_http_and_serve():
    _kept = listen()
    server = port_of(0)
    urllib.request.urlopen(f"http://127.0.0.1:{server}/", timeout=LONG).read()


class Tasks(BaseManager):
    pass


def serve_tasks():
    """A queue of a manager in rank 0, which reads before it puts anything."""
    tasks = queue.Queue()
    Tasks.register("tasks", callable=lambda: tasks)
    server = Tasks(("127.0.0.1", 0), b"key").get_server()
    publish(server.address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    read_shard()


def take_task():
    Tasks.register("tasks")
    manager = Tasks(("127.0.0.1", port_of(0)), b"key")
    manager.connect()
    manager.tasks().get()


# --- Pipes and shared memory.


def open_pipe(mode):
    with contextlib.suppress(FileExistsError):
        os.mkfifo("between")
    return os.open("between", mode)


def wait_at_pipe():
    os.read(open_pipe(os.O_RDONLY), 1)


def hold_pipe():
    _kept = open_pipe(os.O_WRONLY)
    read_shard()


def semaphore():
    library = ctypes.CDLL(None, use_errno=True)
    library.sem_open.restype = ctypes.c_void_p
    name = f"/nodeready-{os.environ['MASTER_PORT']}".encode()
    found = library.sem_open(name, os.O_CREAT, 0o600, 0)
    return library, ctypes.c_void_p(found)


def wait_at_semaphore():
    library, found = semaphore()
    library.sem_wait(found)


def hold_semaphore():
    _kept = semaphore()
    read_shard()


# --- Own threads.


def in_pool(act=read_shard):
    pool = concurrent.futures.ThreadPoolExecutor(2)
    pool.submit(act).result()


def in_pool_beside_others():
    threading.Thread(target=heartbeat, daemon=True).start()
    pool = concurrent.futures.ThreadPoolExecutor(4)
    list(pool.map(abs, range(4)))
    pool.submit(read_shard).result()


def heartbeat():
    while True:
        time.sleep(10)


def wait_condition():
    ready = threading.Condition()
    threading.Thread(target=read_shard, daemon=True).start()
    with ready:
        ready.wait()


def wait_event():
    ready = threading.Event()
    threading.Thread(target=read_shard, daemon=True).start()
    ready.wait()


def prefetch():
    batches = queue.Queue(2)

    def fill():
        read_shard()
        batches.put(1)

    threading.Thread(target=fill, daemon=True).start()
    batches.get()


def map_in_threads():
    from multiprocessing.pool import ThreadPool

    with ThreadPool(2) as pool:
        pool.map(lambda number: read_shard() if number == 0 else None, range(2), 1)


def async_offload():
    async def work():
        await asyncio.get_running_loop().run_in_executor(None, read_shard)

    asyncio.run(work())


def fetch_in_pool():
    in_pool(fetch_parameters)


def in_pool_of_pool():
    outer = concurrent.futures.ThreadPoolExecutor(1)
    outer.submit(in_pool).result()


def wait_for_first():
    """concurrent.futures.wait() of several, of which one reads and one is done."""
    pool = concurrent.futures.ThreadPoolExecutor(2)
    concurrent.futures.wait([pool.submit(abs, 1), pool.submit(read_shard)])


def as_completed():
    pool = concurrent.futures.ThreadPoolExecutor(2)
    list(concurrent.futures.as_completed([pool.submit(abs, 1), pool.submit(read_shard)]))


def poll_future():
    """Looks again and again, with a timeout."""
    future = concurrent.futures.ThreadPoolExecutor(1).submit(read_shard)
    while True:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return future.result(timeout=1)


def in_process_pool():
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        pool.submit(read_shard).result()


def map_in_processes():
    with multiprocessing.Pool(1) as pool:
        pool.map(call, [read_shard], 1)


def call(function):
    function()


def join_process():
    process = multiprocessing.Process(target=read_shard)
    process.start()
    process.join()


def take_of_process():
    """A queue that a process fills."""
    batches = multiprocessing.Queue()
    multiprocessing.Process(target=read_shard, daemon=True).start()
    batches.get()


# --- Healthy: steps of their own over TCP, until the test says so.


def take_in_order(connections):
    for one in connections:
        one.recv(1)


def steps_over_tcp(pause, take=take_in_order):
    """All give to rank 0, which answers all."""
    if rank() == 0:
        connections = clients(listen())
    else:
        connection = connect()
    for step in itertools.count(1):
        pause(step)
        if rank() == 0:
            take(connections.values())
            end = os.path.exists("end")
            for one in connections.values():
                one.sendall(b"e" if end else b"g")
        else:
            connection.sendall(b"x")
            end = connection.recv(1) == b"e"
        yield step
        if end:
            return


def nap(seconds, of=None):
    return lambda step: time.sleep(seconds) if of is None or rank() == of else None
