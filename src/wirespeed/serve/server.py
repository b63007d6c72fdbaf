"""One serving process: its doors, its models, and its end.

At SIGTERM it stops saying that it is ready, refuses new requests with UNAVAILABLE, finishes what it has (up to
``drain_s``), and only then goes.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from wirespeed.errors import UsageError
from wirespeed.serve._generated import POOL
from wirespeed.serve.cluster import Cluster, Wanted
from wirespeed.serve.doors import Desk
from wirespeed.serve.following import Follower
from wirespeed.serve.grpc_v2 import PREDICT_SERVICE, SERVICE, GrpcDoor
from wirespeed.serve.http import HttpDoor
from wirespeed.serve.node import NodeDoor
from wirespeed.serve.node_link import NodeLink
from wirespeed.serve.repository import ModelRepository
from wirespeed.serve.routed import RoutedRepository
from wirespeed.serve.router import Router
from wirespeed.serve.shared_memory import SharedMemory
from wirespeed.serve.shelf import Shelf
from wirespeed.units import MIB
from wirespeed.wire.security import Security
from wirespeed.wire.sockets import name_of, split_address

HEALTH_SERVICE = "grpc.health.v1.Health"
_BACKLOG = 4096


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a server is reached and bounded. An address of None closes that door.

    ``node_address``: the data-plane door, for dispatchers on other hosts.
    """

    grpc_address: str | None = "127.0.0.1:8001"
    http_address: str | None = "127.0.0.1:8000"
    node_address: str | None = None
    nodes: tuple[str, ...] = ()
    """Where the models run, if not here."""
    cluster: Wanted | None = None
    """Have Ray start the nodes, instead."""
    security: Security = Security()
    max_message_bytes: int = 256 * MIB
    max_connections: int = 16384
    drain_s: float = 30.0
    server_name: str = "wirespeed"
    reuse_port: bool = False
    is_client_memory_allowed: bool = False
    keepalive_s: float = 30.0
    follow_s: float | None = None
    """How often the store is asked where the aliases point that are served; None: never."""
    max_stale_s: float = math.inf
    """Without an answer for so long the models are not ready."""

    def __post_init__(self) -> None:
        addresses = (self.grpc_address, self.http_address, self.node_address)
        if all(address is None for address in addresses):
            raise UsageError("got no address", expected="--grpc, --http or --node")
        for address in addresses:
            if address is not None:
                self.security.check_listening(split_address(address)[0])


class InferenceServer:
    """See the module. ``start``, then ``close``."""

    def __init__(
        self,
        folder: Path | None,
        options: ServeOptions,
        *,
        shelf: Shelf | None = None,
        on_news: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.options = options
        self._shelf = shelf
        self.models = _repository(folder, options, on_news)
        self.memory = SharedMemory(is_allowed=options.is_client_memory_allowed)
        self.desk = Desk(self.models, self.memory, server_name=options.server_name, token=options.security.token)
        self.grpc_address = ""
        """Where it listens, with the port that the kernel chose; empty where the door is closed."""
        self.http_address = ""
        self._follower: Follower | None = None
        if options.follow_s is not None:
            if shelf is None:
                raise UsageError("got --follow and models that are elsewhere", expected="repo:NAME@ALIAS on this host")
            self._follower = Follower(
                self.models, shelf, every_s=options.follow_s, max_stale_s=options.max_stale_s, on_news=on_news
            )
            self.desk.staleness_s = self._follower.staleness_s
        self._following: asyncio.Task[None] | None = None
        self._node = NodeDoor(self.models)
        self._grpc: Any = None
        self._health: Any = None
        self._http: uvicorn.Server | None = None
        self._http_task: asyncio.Task[None] | None = None

    @property
    def node_address(self) -> str:
        """Where the data-plane door listens; empty where it is closed."""
        return self._node.address

    async def start(self, *, load_all: bool = True) -> None:
        """Load the models, then open the doors. Raises UsageError and RequestFailed; nothing is left open then."""
        try:
            if load_all:
                await self.models.load_all()
            for name, model in self.models.models.items():
                model.origin = "" if self._shelf is None else self._shelf.labels.get(name, "")
            if self.options.grpc_address is not None:
                await self._open_grpc(self.options.grpc_address)
            if self.options.http_address is not None:
                await self._open_http(self.options.http_address)
            if self.options.node_address is not None:
                await self._node.open(
                    self.options.node_address, security=self.options.security, reuse_port=self.options.reuse_port
                )
            if self._follower is not None:
                self._following = asyncio.get_running_loop().create_task(self._follower.run())
        except BaseException:
            await self.close(drain_s=0)
            raise

    async def close(self, *, drain_s: float | None = None) -> None:
        """Refuse new requests, finish those under way within ``drain_s`` (default: the option), close everything."""
        drain_s = self.options.drain_s if drain_s is None else drain_s
        self.desk.is_draining = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        self._node.begin_drain()
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        end_s = asyncio.get_running_loop().time() + drain_s
        models = list(self.models.models.values())

        def is_busy() -> bool:
            return self._node.num_running > 0 or any(model.num_queued or model.num_running for model in models)

        while is_busy() and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.01)
        await self._node.close()
        if self._grpc is not None:
            await self._grpc.stop(max(0.2, end_s - asyncio.get_running_loop().time()) if drain_s else 0)
        if self._http is not None and self._http_task is not None:
            self._http.should_exit = True
            await self._http_task
        await self.models.close()
        self.memory.close()

    async def _open_grpc(self, address: str) -> None:
        options = self.options
        limit = options.max_message_bytes
        keepalive_ms = round(options.keepalive_s * 1000)
        server = grpc.aio.server(
            options=[
                ("grpc.max_send_message_length", limit),
                ("grpc.max_receive_message_length", limit),
                ("grpc.so_reuseport", int(options.reuse_port)),
                ("grpc.keepalive_time_ms", keepalive_ms),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.keepalive_permit_without_calls", 1),
                # Clients that ping every ten seconds during a long inference are right to; the default would end them.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_concurrent_streams", 4096),
            ]
        )
        server.add_generic_rpc_handlers(tuple(GrpcDoor(self.desk).handlers()))
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for service in ("", SERVICE, PREDICT_SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
        names = (SERVICE, PREDICT_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, pool=POOL)
        host, _ = split_address(address)
        try:
            credentials = self._credentials()
            port = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError as fault:
            raise UsageError(f"cannot listen on {address} for gRPC", hint="is the port in use?") from fault
        await server.start()
        self._grpc = server
        self.grpc_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _credentials(self) -> grpc.ServerCredentials | None:
        security = self.options.security
        if security.listening_context() is None:  # also checks that the files are what they should be
            return None
        assert security.key is not None
        assert security.certificate is not None
        authority = None if security.authority is None else security.authority.read_bytes()
        return grpc.ssl_server_credentials(
            [(security.key.read_bytes(), security.certificate.read_bytes())],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )

    async def _open_http(self, address: str) -> None:
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.options.reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind((host, port))
        except OSError as fault:
            sock.close()
            raise UsageError(
                f"cannot listen on {address} for HTTP: {fault.strerror}", hint="is the port in use?"
            ) from fault
        security = self.options.security
        door = HttpDoor(self.desk, max_body_bytes=self.options.max_message_bytes)
        config = uvicorn.Config(
            door.application(),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            backlog=_BACKLOG,
            limit_concurrency=self.options.max_connections,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            server_header=False,
            ssl_certfile=None if security.certificate is None else str(security.certificate),
            ssl_keyfile=None if security.key is None else str(security.key),
            ssl_ca_certs=None if security.authority is None else str(security.authority),
            ssl_cert_reqs=2 if security.authority is not None else 0,
        )
        self._http = uvicorn.Server(config)
        config.load()
        self._http.lifespan = config.lifespan_class(config)
        self.http_address = name_of(sock.getsockname())
        self._http_task = asyncio.get_running_loop().create_task(self._serve_http(self._http, sock))
        while not self._http.started and not self._http_task.done():
            await asyncio.sleep(0.005)

    async def _serve_http(self, server: uvicorn.Server, sock: socket.socket) -> None:
        # Not Server.serve: it would take over this process's signals, which are the command's to handle.
        await server.startup(sockets=[sock])
        await server.main_loop()
        await server.shutdown(sockets=[sock])


def _repository(folder: Path | None, options: ServeOptions, on_news: Callable[[str], None]) -> ModelRepository:
    if not options.nodes and options.cluster is None:
        return ModelRepository(folder, security=options.security, on_news=on_news)
    cluster = None if options.cluster is None else Cluster(options.cluster, on_news=on_news)

    def make_router(on_change: Callable[[NodeLink], None]) -> Router:
        return Router(
            options.nodes,
            security=options.security,
            can_grow=cluster is not None,
            on_news=on_news,
            on_change=on_change,
        )

    return RoutedRepository(make_router, cluster=cluster)
