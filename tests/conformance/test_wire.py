"""What every wire connection does, whatever event loop and protection it runs on."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import uvloop

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.units import MIB
from wirespeed.wire import (
    Answer,
    CallFailed,
    Connection,
    Limits,
    Request,
    Security,
    Server,
    SocketSettings,
    Status,
    connect,
    listen,
)
from wirespeed.wire.frames import Kind, pack_header

TOKEN = "correct-horse-battery"
KINDS = ("asyncio-plain", "uvloop-plain", "uvloop-token", "asyncio-tls", "uvloop-tls")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test authority")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name in ("server", "client"):
        openssl("req", *ec, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
                "-extfile", "san", "-out", f"{name}.pem")  # fmt: skip
    return folder


class Case:
    """One kind of connection: ``run`` an async test on it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.loop, self.protection = kind.split("-")
        self.server_security = self.client_security = Security()
        if self.protection == "token":
            self.server_security = self.client_security = Security(token=TOKEN)
        elif self.protection == "tls":
            self.server_security = Security(
                certificate=folder / "server.pem", key=folder / "server.key", authority=folder / "ca.pem"
            )
            self.client_security = Security(
                certificate=folder / "client.pem", key=folder / "client.key", authority=folder / "ca.pem"
            )

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        factory = uvloop.new_event_loop if self.loop == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(test(), 120))

    @asynccontextmanager
    async def pair(
        self, *, limits: Limits | None = None, client: Limits | None = None, **handlers: object
    ) -> AsyncIterator[tuple[Server, Connection]]:
        held = {"echo": lambda request: Answer(request.payload, meta=request.meta), **handlers}
        server = await listen("127.0.0.1:0", held, security=self.server_security, limits=limits)  # type: ignore[arg-type]
        async with server, await connect(server.address, security=self.client_security, limits=client) as connection:
            yield server, connection


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, certificates: Path) -> Case:
    return Case(request.param, certificates)


@pytest.fixture
def plain(certificates: Path) -> Case:
    return Case("uvloop-plain", certificates)


async def settles(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.002)


def test_messages_of_every_size_come_back_as_they_were(case: Case) -> None:
    async def test() -> None:
        async with case.pair() as (server, connection):
            rng = np.random.default_rng(1)
            for size in (0, 1, 100, 32 * 1024, 32 * 1024 + 1, 65536, 100_000, MIB, MIB + 1, 5_000_000):
                payload = rng.bytes(size)
                reply = await connection.call("echo", payload, meta=b"m" * (size % 17))
                assert (bytes(reply.payload), reply.meta) == (payload, b"m" * (size % 17))
            await settles(lambda: server.budget.used_bytes == 0)

    case.run(test)


def test_many_calls_at_once_each_get_their_own_answer(case: Case) -> None:
    async def test() -> None:
        async with case.pair() as (_, connection):
            sizes = [0, 3, 1000, 40_000, 300_000, 2_000_000] * 12
            payloads = [bytes([place % 251]) * size for place, size in enumerate(sizes)]
            replies = await asyncio.gather(*(connection.call("echo", payload) for payload in payloads))
            assert all(bytes(reply.payload) == payload for reply, payload in zip(replies, payloads, strict=True))

    case.run(test)


def test_payloads_may_be_several_buffers_and_arrays(case: Case) -> None:
    async def test() -> None:
        async with case.pair() as (_, connection):
            array = np.arange(300_000, dtype=np.float32).reshape(3, -1)
            reply = await connection.call("echo", [b"head", memoryview(b"er"), array])
            assert bytes(reply.payload) == b"header" + array.tobytes()

    case.run(test)


def test_a_reply_lands_in_the_buffer_that_was_given(case: Case) -> None:
    async def test() -> None:
        async with case.pair() as (_, connection):
            for size in (100, 3_000_000):
                target = bytearray(size + 10)
                reply = await connection.call("echo", b"z" * size, into=memoryview(target))
                assert isinstance(reply.payload, memoryview)
                assert reply.payload.obj is target
                assert target == b"z" * size + bytes(10)

    case.run(test)


def test_a_small_call_is_not_held_up_by_a_large_one(plain: Case) -> None:
    async def test() -> None:
        order: list[str] = []
        async with plain.pair() as (_, connection):
            large = connection.call_soon("echo", bytes(60 * MIB))
            large.add_done_callback(lambda _: order.append("large"))
            await connection.call("echo", b"small")
            order.append("small")
            await large
        assert order == ["small", "large"]

    plain.run(test)


def test_a_call_ends_at_its_deadline_and_its_handler_too(case: Case) -> None:
    async def test() -> None:
        num_started = num_ended = 0

        async def never(_: Request) -> None:
            nonlocal num_started, num_ended
            num_started += 1
            try:
                await asyncio.Event().wait()
            finally:
                num_ended += 1

        late_s = []
        async with case.pair(never=never) as (server, connection):
            for timeout_s in (0.05, 0.15, 0.2):
                begin_s = asyncio.get_running_loop().time()
                with pytest.raises(CallFailed, match="did not answer within") as fault:
                    await connection.call("never", timeout_s=timeout_s)
                assert fault.value.status is Status.DEADLINE
                late_s.append(asyncio.get_running_loop().time() - begin_s - timeout_s)
            await settles(lambda: server.num_running == 0 and server.budget.used_bytes == 0)
        # Never early. A busy machine can be late for one of them, and end one before its handler has begun.
        assert -0.002 <= min(late_s) < 1.0
        assert num_ended == num_started > 0

    case.run(test)


def test_cancelling_a_call_cancels_its_handler(case: Case) -> None:
    async def test() -> None:
        started, ended = asyncio.Event(), asyncio.Event()

        async def never(_: Request) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async with case.pair(never=never) as (_, connection):
            task = asyncio.ensure_future(connection.call("never"))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(ended.wait(), 60)
            assert connection.num_calls == 0

    case.run(test)


def test_cancelling_a_large_call_half_way_leaves_the_connection_whole(case: Case) -> None:
    async def test() -> None:
        small = Limits(max_message_bytes=12 * MIB, credit_bytes=16 * MIB, memory_bytes=64 * MIB)
        async with case.pair(limits=small, client=small) as (server, connection):
            for _ in range(4):
                futures = [connection.call_soon("echo", bytes(4 * MIB)) for _ in range(3)]
                await asyncio.sleep(0)
                for future in futures:
                    future.cancel()
                assert bytes((await connection.call("echo", b"still here")).payload) == b"still here"
            await settles(lambda: server.budget.used_bytes == 0 and server.num_running == 0)
            # All credit is there again: a message that needs most of it passes.
            assert len((await connection.call("echo", bytes(12 * MIB))).payload) == 12 * MIB

    case.run(test)


def test_what_a_handler_raises_reaches_the_caller_with_its_status(case: Case) -> None:
    async def test() -> None:
        def busy(_: Request) -> None:
            raise CallFailed("come back later", status=Status.EXHAUSTED)

        def wrong(_: Request) -> None:
            raise UsageError("got 3", expected="4")

        async def broken(_: Request) -> None:
            raise RuntimeError("a bug")

        seen: list[str] = []
        held = {"busy": busy, "wrong": wrong, "broken": broken}
        server = await listen(
            "127.0.0.1:0", held, security=case.server_security, on_error=lambda _, fault: seen.append(str(fault))
        )
        async with server, await connect(server.address, security=case.client_security) as connection:
            for method, status, text in (("busy", Status.EXHAUSTED, "come back later"), ("wrong", Status.INVALID, "got 3; expected 4"),
                                         ("broken", Status.INTERNAL, "RuntimeError: a bug"), ("nothing", Status.UNKNOWN_METHOD, "busy, wrong, broken")):  # fmt: skip
                with pytest.raises(CallFailed, match=text) as fault:
                    await connection.call(method)
                assert fault.value.status is status
        assert seen == ["a bug"]

    case.run(test)


def test_a_lost_server_fails_every_call_at_once(case: Case) -> None:
    async def test() -> None:
        async def never(_: Request) -> None:
            await asyncio.Event().wait()

        async with case.pair(never=never) as (server, connection):
            futures = [connection.call_soon("never") for _ in range(5)]
            await settles(lambda: server.num_running == 5)
            for held in list(server.connections):
                held.abort()
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert [fault.status for fault in results if isinstance(fault, CallFailed)] == [Status.UNAVAILABLE] * 5
            with pytest.raises(CallFailed, match="is closed"):
                await connection.call("echo")

    case.run(test)


def test_draining_answers_what_is_under_way_and_refuses_what_is_new(case: Case) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow(_: Request) -> bytes:
            await go.wait()
            return b"done"

        async with case.pair(slow=slow) as (server, connection):
            under_way = connection.call_soon("slow")
            await settles(lambda: server.num_running == 1)
            draining = asyncio.ensure_future(server.drain(timeout_s=10))
            await settles(lambda: not connection.is_usable)
            with pytest.raises(CallFailed, match="takes no new calls: it is shutting down") as fault:
                await connection.call("echo")
            assert fault.value.is_retriable
            go.set()
            assert bytes((await under_way).payload) == b"done"
            assert await draining

    case.run(test)


def test_a_message_above_the_servers_limit_is_refused_before_it_is_sent(case: Case) -> None:
    async def test() -> None:
        small = Limits(max_message_bytes=MIB, credit_bytes=2 * MIB, memory_bytes=4 * MIB)
        async with case.pair(limits=small) as (_, connection):
            with pytest.raises(UsageError, match="expected at most 1048576"):
                await connection.call("echo", bytes(MIB + 1))
            assert len((await connection.call("echo", bytes(MIB))).payload) == MIB

    case.run(test)


def test_a_reply_above_the_clients_limit_is_an_error_of_that_call(case: Case) -> None:
    async def test() -> None:
        small = Limits(max_message_bytes=MIB, credit_bytes=2 * MIB, memory_bytes=4 * MIB)
        async with case.pair(client=small, grow=lambda _: bytes(MIB + 1)) as (_, connection):
            with pytest.raises(CallFailed, match="the caller takes 1048576") as fault:
                await connection.call("grow")
            assert fault.value.status is Status.EXHAUSTED
            assert bytes((await connection.call("echo", b"x")).payload) == b"x"

    case.run(test)


def test_credit_bounds_what_a_server_holds_of_one_client(plain: Case) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def hold(request: Request) -> bytes:
            await go.wait()
            return bytes(request.payload[:1])

        limits = Limits(max_message_bytes=MIB, credit_bytes=4 * MIB, memory_bytes=64 * MIB)
        async with plain.pair(limits=limits, hold=hold) as (server, connection):
            futures = [connection.call_soon("hold", bytes(MIB)) for _ in range(20)]
            await settles(lambda: server.num_running == 3)
            await asyncio.sleep(0.05)
            # 3 MiB and their overhead fit into 4 MiB of credit; a fourth would not.
            assert (server.num_running, server.budget.used_bytes) == (3, 3 * MIB)
            go.set()
            assert len(await asyncio.gather(*futures)) == 20
            assert server.budget.peak_bytes <= 4 * MIB

    plain.run(test)


def test_memory_is_bounded_over_all_connections(plain: Case) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def hold(request: Request) -> int:
            await go.wait()
            return b"ok"  # type: ignore[return-value]

        limits = Limits(max_message_bytes=MIB, credit_bytes=4 * MIB, memory_bytes=5 * MIB)
        async with await listen("127.0.0.1:0", {"hold": hold}, limits=limits) as server:
            connections = [await connect(server.address) for _ in range(6)]
            futures = [connection.call_soon("hold", bytes(MIB)) for connection in connections for _ in range(3)]
            await settles(lambda: server.num_running == 5)
            await asyncio.sleep(0.05)
            assert server.budget.used_bytes == 5 * MIB
            go.set()
            assert {bytes(reply.payload) for reply in await asyncio.gather(*futures)} == {b"ok"}
            assert server.budget.peak_bytes == 5 * MIB
            await asyncio.gather(*(connection.close() for connection in connections))

    plain.run(test)


def test_more_requests_than_streams_are_refused(plain: Case) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def hold(_: Request) -> None:
            await go.wait()

        async with plain.pair(limits=Limits(max_streams=3), hold=hold) as (_, connection):
            futures = [connection.call_soon("hold") for _ in range(5)]
            await settles(lambda: sum(future.done() for future in futures) == 2)
            statuses = [future.exception().status for future in futures if future.done()]  # type: ignore[union-attr]
            assert statuses == [Status.EXHAUSTED, Status.EXHAUSTED]
            go.set()
            await asyncio.gather(*futures, return_exceptions=True)

    plain.run(test)


def test_more_connections_than_allowed_are_told_so(plain: Case) -> None:
    async def test() -> None:
        async with await listen("127.0.0.1:0", {"x": lambda _: b""}, limits=Limits(max_connections=1)) as server:
            first = await connect(server.address)
            with pytest.raises(CallFailed, match="all the connections that it takes"):
                await connect(server.address)
            await first.close()

    plain.run(test)


@pytest.mark.parametrize(
    ("client_token", "server_token", "text"),
    [
        ("another-secret-token", TOKEN, "token is not this server's"),
        (None, TOKEN, "asks for a token"),
        (TOKEN, None, "token is not"),
    ],
)
def test_a_wrong_token_is_refused(plain: Case, client_token: str | None, server_token: str | None, text: str) -> None:
    async def test() -> None:
        async with await listen("127.0.0.1:0", {"x": lambda _: b""}, security=Security(token=server_token)) as server:
            with pytest.raises(CallFailed, match=text) as fault:
                await connect(server.address, security=Security(token=client_token))
            assert fault.value.status is Status.REFUSED
            await settles(lambda: not server.connections)

    plain.run(test)


def test_the_token_is_never_sent_nor_shown(plain: Case) -> None:
    async def test() -> None:
        seen = bytearray()

        async def spy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with await listen("127.0.0.1:0", {"x": lambda _: b""}, security=Security(token=TOKEN)) as server:
                up_reader, up_writer = await asyncio.open_connection(*server.address.split(":"))

                async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                    while data := await source.read(65536):
                        seen.extend(data)
                        target.write(data)
                    target.close()

                await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

        middle = await asyncio.start_server(spy, "127.0.0.1", 0)
        port = middle.sockets[0].getsockname()[1]
        async with await connect(f"127.0.0.1:{port}", security=Security(token=TOKEN)) as connection:
            await connection.call("x", b"marker")
        assert b"marker" in seen
        assert TOKEN.encode() not in seen
        assert TOKEN not in repr(Security(token=TOKEN))
        middle.close()

    plain.run(test)


def test_a_client_without_a_certificate_is_refused(certificates: Path, plain: Case) -> None:
    async def test() -> None:
        secure = Case("uvloop-tls", certificates)
        async with await listen("127.0.0.1:0", {"x": lambda _: b""}, security=secure.server_security) as server:
            with pytest.raises(PeerFailure):
                await connect(server.address, security=Security(authority=certificates / "ca.pem"), timeout_s=3)
            with pytest.raises(PeerFailure, match="no connection"):
                await connect(server.address, timeout_s=0.5)  # plain TCP to TLS

    plain.run(test)


def test_listening_beyond_loopback_needs_protection(plain: Case) -> None:
    async def test() -> None:
        with pytest.raises(UsageError, match=r"refuse to listen on 0\.0\.0\.0"):
            await listen("0.0.0.0:0", {"x": lambda _: b""})
        async with await listen("0.0.0.0:0", {"x": lambda _: b""}, security=Security(token=TOKEN)) as server:
            assert server.address.startswith("0.0.0.0:")

    plain.run(test)


def test_nobody_listening_and_a_port_in_use_say_so(plain: Case) -> None:
    async def test() -> None:
        async with await listen("127.0.0.1:0", {"x": lambda _: b""}) as server:
            with pytest.raises(UsageError, match="another process listens there"):
                await listen(server.address, {"x": lambda _: b""})
            address = server.address
        with pytest.raises(PeerFailure, match=r"Connection refused|no connection"):
            await connect(address, timeout_s=60)

    plain.run(test)


def test_a_peer_that_speaks_something_else_is_named(plain: Case) -> None:
    async def test() -> None:
        async def http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
            await writer.drain()
            writer.close()

        other = await asyncio.start_server(http, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(PeerFailure, match=r"broke the protocol|frame") as fault:
            await connect(f"127.0.0.1:{port}", timeout_s=60)
        assert "48 54 54 50" in str(fault.value)  # "HTTP": what was seen is shown
        other.close()

    plain.run(test)


def test_a_silent_peer_is_noticed(plain: Case) -> None:
    async def test() -> None:
        quick = Limits(keepalive_s=0.1)
        async with await listen("127.0.0.1:0", {"x": lambda _: b""}, limits=Limits(handshake_s=0.2)) as server:
            reader, writer = await asyncio.open_connection(*server.address.split(":"))
            async with asyncio.timeout(60):
                while await reader.read(65536):
                    pass  # its greeting, then the end: it was not answered
            writer.close()

        async def never(_: Request) -> None:
            await asyncio.Event().wait()

        async with plain.pair(never=never, client=quick) as (server, connection):
            pending = connection.call_soon("never")
            await settles(lambda: server.num_running == 1)
            for held in server.connections:
                held._control = lambda *_, **__: None  # type: ignore[method-assign]  # a server that hangs: no more pongs
            with pytest.raises(CallFailed, match="said nothing for"):
                await pending

    plain.run(test)


def test_a_process_that_slept_does_not_take_its_peer_for_lost(case: Case) -> None:
    async def test() -> None:
        async with case.pair(client=Limits(keepalive_s=0.05)) as (_, connection):
            time.sleep(0.5)  # as a process that is stopped, or gets no core
            await asyncio.sleep(0.2)
            assert not connection.is_closed
            assert bytes((await connection.call("echo", b"still here")).payload) == b"still here"

    case.run(test)


def test_socket_options_are_read_back(plain: Case) -> None:
    async def test() -> None:
        settings = SocketSettings(send_buffer_bytes=65536, user_timeout_s=3, dscp=10, congestion="reno")
        async with (
            await listen("127.0.0.1:0", {"x": lambda _: b""}) as server,
            await connect(server.address, sockets=settings) as connection,
        ):
            shown = connection.describe()
        assert shown["SO_SNDBUF"] == "128 KiB (asked for 64 KiB)"
        assert (shown["TCP_USER_TIMEOUT"], shown["DSCP"], shown["TCP_CONGESTION"], shown["TCP_NODELAY"]) == (
            "3000 ms",
            "10",
            "reno",
            "on",
        )

    plain.run(test)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (
            (Kind.REQUEST, 0, 0, 9, 200 * MIB, 0, MIB, 1000),
            "got a message of 209715200 bytes; expected at most 100663296",
        ),
        ((Kind.REQUEST, 0, 0, 9, 10 * MIB, MIB, MIB, 1000), "out of order"),
        ((Kind.CREDIT, 0, 0, 0, 0, 0, 0, 5), "5 bytes of credit that were never used"),
        ((Kind.HELLO, 0, 0, 0, 0, 0, 0, 0), "kind 2 at this point"),
        ((Kind.REPLY, 0, 0, 9, 0, 0, 0, 0), "kind 5 at this point"),
        (None, "where a frame starts"),
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_and_cut_off(
    plain: Case, frame: tuple[int, ...] | None, text: str
) -> None:
    async def test() -> None:
        async with plain.pair() as (server, bad):
            pending = bad.call_soon("echo", bytes(5 * MIB))
            assert bad._transport is not None
            bad._transport.write(b"x" * 32 if frame is None else pack_header(*frame))
            await asyncio.wait_for(bad.closed, 60)
            assert text in str(bad.goodbye)
            assert pending.done()
            async with await connect(server.address) as good:
                assert bytes((await good.call("echo", b"fine")).payload) == b"fine"
            await settles(lambda: not server.connections and server.budget.used_bytes == 0)

    plain.run(test)


def test_a_client_that_never_reads_is_cut_off_and_costs_a_bounded_amount(plain: Case) -> None:
    async def test() -> None:
        limits = Limits(max_message_bytes=4 * MIB, credit_bytes=8 * MIB, memory_bytes=16 * MIB, stall_s=0.5)
        async with plain.pair(limits=limits, grow=lambda _: bytes(4 * MIB)) as (server, slow):
            assert slow._transport is not None
            slow._transport.pause_reading()
            for _ in range(200):
                slow.call_soon("grow").add_done_callback(lambda done: done.exception())
            (held,) = server.connections
            await asyncio.wait_for(held.closed, 60)
            assert "took no bytes for" in str(held.closed.result())
            assert server.budget.peak_bytes <= limits.memory_bytes

    plain.run(test)


def test_an_abandoned_half_of_a_message_does_not_stay(plain: Case) -> None:
    async def test() -> None:
        async with plain.pair(limits=Limits(stall_s=0.3)) as (server, half):
            assert half._transport is not None
            (held,) = server.connections
            half._transport.write(pack_header(Kind.REQUEST, 0, 0, 77, 10 * MIB, 0, MIB, 60_000) + bytes(1000))
            await asyncio.wait_for(held.closed, 60)
            assert server.budget.peak_bytes == 10 * MIB
            assert "made no progress" in str(held.closed.result())
            assert server.budget.used_bytes == 0

    plain.run(test)


@pytest.mark.slow
def test_a_thousand_connections_are_served(plain: Case) -> None:
    async def test() -> None:
        patient = Limits(handshake_s=100)
        async with await listen("127.0.0.1:0", {"echo": lambda request: request.payload}, limits=patient) as server:
            connections = await asyncio.gather(*(connect(server.address, timeout_s=100) for _ in range(1000)))
            replies = await asyncio.gather(*(c.call("echo", str(n).encode()) for n, c in enumerate(connections)))
            assert [bytes(reply.payload) for reply in replies] == [str(n).encode() for n in range(1000)]
            await asyncio.gather(*(c.close() for c in connections))
            await settles(lambda: not server.connections)

    plain.run(test)
