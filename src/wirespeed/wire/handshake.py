"""What the two sides say before anything else: versions, limits, methods, and the proof that both hold the token.

listening side                          connecting side
CHALLENGE nonce, limits, methods   -->
                                   <--  HELLO nonce, limits, name, proof
WELCOME proof                      -->
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from wirespeed.errors import DataError
from wirespeed.wire.frames import MAX_TOTAL_BYTES
from wirespeed.wire.reader import MAX_CONTROL_BYTES, Payload
from wirespeed.wire.security import NONCE_BYTES, prove

_T = TypeVar("_T")
MAX_METHODS = 256
_MAX_NAME = 128


class _Said(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    nonce: bytes
    max_message_bytes: int
    credit_bytes: int

    def _check(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise DataError(f"got a nonce of {len(self.nonce)} bytes", expected=str(NONCE_BYTES))
        if not 0 < self.max_message_bytes <= MAX_TOTAL_BYTES or not 0 < self.credit_bytes < 2**48:
            raise DataError("got limits out of range in the handshake")


class Challenge(_Said, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The listening side's first word. A method's place in ``methods`` is its code in a REQUEST."""

    methods: tuple[str, ...]
    wants_token: bool
    max_streams: int
    idle_s: float
    """A connection that says nothing for so long is closed; a side that has nothing to say pings."""

    def __post_init__(self) -> None:
        self._check()
        if len(self.methods) > MAX_METHODS or any(len(name) > _MAX_NAME for name in self.methods):
            raise DataError(
                f"got {len(self.methods)} methods", expected=f"at most {MAX_METHODS}, of {_MAX_NAME} characters"
            )
        if not self.idle_s > 0 or self.max_streams < 1:
            raise DataError("got limits out of range in the handshake")


class Hello(_Said, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The connecting side's answer. ``name`` is who it says it is: for logs, never for rights."""

    name: str
    proof: bytes

    def __post_init__(self) -> None:
        self._check()
        if len(self.name) > _MAX_NAME:
            raise DataError(f"got a name of {len(self.name)} characters", expected=f"at most {_MAX_NAME}")


class Welcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """The listening side accepts."""

    proof: bytes


_ENCODER = msgspec.msgpack.Encoder()


def encode(said: Challenge | Hello | Welcome) -> bytes:
    """The bytes of a handshake message."""
    payload = _ENCODER.encode(said)
    if len(payload) > MAX_CONTROL_BYTES:
        raise DataError(
            f"the handshake takes {len(payload)} bytes", expected=f"at most {MAX_CONTROL_BYTES}: fewer methods"
        )
    return payload


def decode_challenge(payload: Payload) -> Challenge:
    """Raises DataError for anything else."""
    return _decode(payload, Challenge)


def decode_hello(payload: Payload) -> Hello:
    """Raises DataError for anything else."""
    return _decode(payload, Hello)


def decode_welcome(payload: Payload) -> Welcome:
    """Raises DataError for anything else."""
    return _decode(payload, Welcome)


def _decode(payload: Payload, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.MsgspecError as fault:
        raise DataError(f"got a handshake that is not understood: {fault}") from fault


def client_proof(secret: bytes, challenge: bytes, hello_nonce: bytes, limits: tuple[int, int], name: str) -> bytes:
    """The connecting side's proof, over the challenge as received and what it says itself."""
    said = f"{limits[0]} {limits[1]} {name}".encode()
    return prove(secret, b"wirespeed wire 1 client", challenge, hello_nonce, said)


def server_proof(secret: bytes, challenge: bytes, hello: bytes) -> bytes:
    """The listening side's proof, over everything that was said."""
    return prove(secret, b"wirespeed wire 1 server", challenge, hello)
