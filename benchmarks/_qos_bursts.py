"""Bursts of answers between two hosts, as inference makes them: FOLDER OWN_NAME NEXT_HOST PORT BURST_BYTES PERIOD_S.

Every period a burst becomes due, whether or not the one before has arrived; it goes to the next host in equal parts
over several connections, as fast as TCP lets it, and is done when the receiver has said so of every part. At most
MAX_WAITING bursts wait. Runs while FOLDER/on is there; ends with the lab. Each done burst is a line in
FOLDER/bursts-NAME: when it was done, how long it took, and its bytes.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from pathlib import Path

NUM_CONNECTIONS = 4
MAX_WAITING = 4
CHUNK = bytes(1 << 16)


def receive(server: socket.socket, part_bytes: int) -> None:
    """Take parts from every connection and answer each with a byte."""

    def take(connection: socket.socket) -> None:
        buffer = bytearray(1 << 18)
        while True:
            left = part_bytes
            while left:
                got = connection.recv_into(buffer, min(left, len(buffer)))
                if not got:
                    return
                left -= got
            connection.sendall(b"k")

    while True:
        threading.Thread(target=take, args=(server.accept()[0],), daemon=True).start()


def send(connection: socket.socket, part_bytes: int, work: queue.Queue[int], done: queue.Queue[int]) -> None:
    """Send a part for every number in ``work``."""
    while True:
        number = work.get()
        left = part_bytes
        while left:
            left -= connection.send(CHUNK[: min(left, len(CHUNK))])
        connection.recv(1)
        done.put(number)


def connect(host: str, port: int) -> socket.socket:
    """Tried again until the next host listens."""
    for _ in range(400):
        try:
            return socket.create_connection((host, port), timeout=120)
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{host} does not listen")


def main() -> None:
    folder, name, following, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    part_bytes, period_s = int(sys.argv[5]) // NUM_CONNECTIONS, float(sys.argv[6])
    server = socket.create_server(("", port))
    threading.Thread(target=receive, args=(server, part_bytes), daemon=True).start()
    works: list[queue.Queue[int]] = [queue.Queue() for _ in range(NUM_CONNECTIONS)]
    done: queue.Queue[int] = queue.Queue()
    for work in works:
        stream = connect(following, port)
        threading.Thread(target=send, args=(stream, part_bytes, work, done), daemon=True).start()
    due_s: dict[int, float] = {}
    parts: dict[int, int] = {}
    number, next_s = 0, time.monotonic()
    with (folder / f"bursts-{name}").open("w", buffering=1) as log:
        while True:
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = max(next_s + period_s, now_s)
                if (folder / "on").exists() and len(due_s) < MAX_WAITING:
                    number += 1
                    due_s[number], parts[number] = now_s, 0
                    for work in works:
                        work.put(number)
            try:
                ended = done.get(timeout=max(0.001, next_s - time.monotonic()))
            except queue.Empty:
                continue
            parts[ended] += 1
            if parts[ended] == NUM_CONNECTIONS:
                ended_s = time.monotonic()
                log.write(f"{ended_s} {ended_s - due_s.pop(ended)} {part_bytes * NUM_CONNECTIONS}\n")
                del parts[ended]


if __name__ == "__main__":
    main()
