"""Ten thousand connections to one server: each is answered, what each costs is bounded, and none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wirespeed import wire
from wirespeed.errors import PeerFailure

NUM_CONNECTIONS = 10_000
LIMITS = wire.Limits(keepalive_s=60, handshake_s=30)
SPARE_FILES = 200
"""What a test process has open besides."""
MAX_BYTES_PER_CONNECTION = 24 * 1024
"""Objects and timers take about half of it. A read buffer of its own would take 64 KiB."""

SERVER = """
import asyncio, sys
from wirespeed import wire
from wirespeed.wire.sockets import raise_file_limit

async def main():
    assert raise_file_limit() >= int(sys.argv[1])
    limits = wire.Limits(keepalive_s=60, handshake_s=30)
    loop = asyncio.get_running_loop()
    handlers = {"echo": lambda request: request.payload}
    async with await wire.listen("127.0.0.1:0", handlers, limits=limits) as server:
        print(server.address, flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(len(server.connections), flush=True)

wire.run(main())
"""


@contextlib.contextmanager
def many_files(num_files: int) -> Iterator[None]:
    """The right to have so many files open, for a while."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < num_files:
        pytest.skip(f"this host allows {hard} open files; the test needs {num_files} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, num_files), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


def test_a_server_takes_as_many_connections_as_it_has_files_for_and_tells_the_others() -> None:
    async def test() -> None:
        async with await wire.listen("127.0.0.1:0", {"echo": lambda request: request.payload}) as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # this process holds the other ends too
            fitting = [await wire.connect(server.address) for _ in range(22)]
            with pytest.raises(PeerFailure, match="all the connections that it takes"):
                await wire.connect(server.address)
            for connection in fitting:
                assert bytes((await connection.call("echo", b"x")).payload) == b"x"
                await connection.close()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, hard))  # 128 of them are spared for other things
    try:
        wire.run(test())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_ten_thousand_connections_are_served_in_bounded_memory() -> None:
    with (
        many_files(NUM_CONNECTIONS + SPARE_FILES),
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(NUM_CONNECTIONS + SPARE_FILES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            assert address

            def num_held() -> int:
                assert server.stdin is not None
                assert server.stdout is not None
                print(file=server.stdin, flush=True)
                return int(server.stdout.readline())

            wire.run(drive(address, server.pid))
            for _ in range(100):  # each asks the server, which has a turn of its loop in between
                if num_held() == 0:
                    break
            assert num_held() == 0
        finally:
            server.kill()


async def drive(address: str, pid: int) -> None:
    async with await wire.connect(address, limits=LIMITS) as first:
        assert bytes((await first.call("echo", b"x" * 1000)).payload) == b"x" * 1000
        before = resident_bytes(pid)
        connections: list[wire.Connection] = []
        for _ in range(NUM_CONNECTIONS // 500):
            connections += await asyncio.gather(
                *(wire.connect(address, limits=LIMITS, timeout_s=60) for _ in range(500))
            )
        for start in range(0, NUM_CONNECTIONS, 500):
            some = connections[start : start + 500]
            calls = (c.call("echo", f"{start + n}".encode(), timeout_s=60) for n, c in enumerate(some))
            replies = await asyncio.gather(*calls)
            assert [bytes(reply.payload) for reply in replies] == [f"{start + n}".encode() for n in range(len(some))]
        per_connection = (resident_bytes(pid) - before) / NUM_CONNECTIONS
        assert per_connection < MAX_BYTES_PER_CONNECTION
        # Those that are there take nothing away from one that asks.
        assert bytes((await first.call("echo", b"still here", timeout_s=60)).payload) == b"still here"
        for connection in connections:
            await connection.close()
