"""Who may talk to whom: a shared token, proved without being sent, and TLS with or without client certificates.

The token is proved by both sides over both sides' nonces and both sides' stated limits, so that neither can be replayed
nor changed on the way. Without TLS the bytes after that are neither hidden nor protected against somebody in the path.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from pathlib import Path

import msgspec

from wirespeed.errors import UsageError

NONCE_BYTES = 16
MIN_TOKEN_CHARACTERS = 16


class Security(msgspec.Struct, frozen=True, kw_only=True):
    """How one side proves itself and what it asks of the other.

    ``token``: the shared secret; never shown by ``repr``. ``certificate`` and ``key``: this side's, PEM. ``authority``:
    who must have signed the peer's certificate; on a listening side it makes client certificates mandatory.
    ``is_insecure``: listen beyond loopback with neither.
    """

    token: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    server_name: str | None = None
    """The name to look for in the server's certificate; default: the host of the address."""
    is_insecure: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < MIN_TOKEN_CHARACTERS:
            raise UsageError(
                f"got a token of {len(self.token)} characters",
                expected=f"at least {MIN_TOKEN_CHARACTERS}",
                hint="python3 -c 'import secrets; print(secrets.token_urlsafe(24))'",
            )
        if (self.certificate is None) != (self.key is None):
            raise UsageError("got one of certificate and key", expected="both or neither")

    def __repr__(self) -> str:
        token = None if self.token is None else "***"
        return f"Security(token={token}, certificate={self.certificate}, authority={self.authority})"

    @property
    def secret(self) -> bytes:
        """The token's bytes; empty where there is none."""
        return b"" if self.token is None else self.token.encode()

    def listening_context(self) -> ssl.SSLContext | None:
        """TLS for a listening side, or None without a certificate."""
        if self.certificate is None or self.key is None:
            if self.authority is not None:
                raise UsageError(
                    "got an authority but no certificate", expected="a certificate and key to listen with TLS"
                )
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load(context, self.certificate, self.key)
        if self.authority is not None:
            _trust(context, self.authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def connecting_context(self) -> ssl.SSLContext | None:
        """TLS for a connecting side, or None without an authority."""
        if self.authority is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _trust(context, self.authority)
        if self.certificate is not None and self.key is not None:
            _load(context, self.certificate, self.key)
        return context

    def check_listening(self, host: str) -> None:
        """Raise UsageError where ``host`` can be reached from elsewhere and nothing protects it."""
        is_mutual = self.certificate is not None and self.authority is not None
        if self.token is None and not is_mutual and not self.is_insecure and not is_loopback(host):
            raise UsageError(
                f"refuse to listen on {host or 'every address'} for anyone",
                expected="a token or client certificates on an address beyond loopback",
                hint="set WIRESPEED_TOKEN, or say --insecure on a network that you trust",
            )


def is_loopback(host: str) -> bool:
    """Whether an address is only reachable from this machine. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def prove(secret: bytes, role: bytes, *said: bytes) -> bytes:
    """A side's proof that it holds the secret, bound to its role and to everything that was said so far."""
    mac = hmac.new(secret, role, hashlib.sha256)
    for part in said:
        mac.update(len(part).to_bytes(4, "little"))
        mac.update(part)
    return mac.digest()


def is_proof(given: bytes, expected: bytes) -> bool:
    """Compare proofs without telling by the time taken how far they agree."""
    return hmac.compare_digest(given, expected)


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as fault:
        raise UsageError(f"cannot use certificate {certificate} with key {key}: {fault}") from fault


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as fault:
        raise UsageError(f"cannot read authority {authority}: {fault}") from fault
