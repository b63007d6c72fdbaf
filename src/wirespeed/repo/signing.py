"""Signatures of versions: ed25519 over the name, the number and the manifest's digest.

The digest binds every byte of every file, so a signature binds a model to a name and a number: a store, a mirror or a
peer that was taken over can withhold a version, but not exchange it, nor pass an old one for a new number. Where an
alias points is not signed. A signature is part of the version's record, made with it or added later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wirespeed.errors import DataError, MissingCapability, UsageError
from wirespeed.repo import names
from wirespeed.repo.store import Store
from wirespeed.repo.versions import Signature, Version

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_BYTES = 32
_PUBLIC_PREFIX = "wirespeed-ed25519 "
_CONTEXT = "wirespeed version 1"


class SignatureMissing(DataError):  # noqa: N818 - says what it is
    """A version is not signed by anyone who is trusted."""


def make_key(path: Path) -> str:
    """Make a key pair: the secret in ``path`` (readable by its owner only), the public key in ``path.pub``.

    Gives the public key. Raises UsageError where either file exists.
    """
    ed25519, serialization = _crypto()
    key = ed25519.Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public: str = key.public_key().public_bytes_raw().hex()
    shown = path.with_name(path.name + ".pub")
    if shown.exists():
        raise UsageError(f"{shown} exists already", hint="choose another name: a key that is lost cannot be made again")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(secret)
        shown.write_text(f"{_PUBLIC_PREFIX}{public}\n", encoding="ascii")
    except FileExistsError:
        raise UsageError(f"{path} exists already", hint="choose another name") from None
    except OSError as fault:
        raise UsageError(f"cannot write {path}: {fault.strerror}") from fault
    return public


def read_secret(path: Path) -> Ed25519PrivateKey:
    """The secret key of a file. Raises UsageError."""
    ed25519, serialization = _crypto()
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as fault:
        raise UsageError(f"cannot read the key {path}: {fault.strerror}") from fault
    except (ValueError, TypeError) as fault:
        raise UsageError(
            f"{path} is no key to sign with", expected="an ed25519 key, PEM", hint="`wirespeed repo keygen` makes one"
        ) from fault
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise UsageError(f"{path} is a {type(key).__name__}", expected="an ed25519 key")
    found: Ed25519PrivateKey = key
    return found


def read_public(text: str) -> bytes:
    """A public key, from its 64 hexadecimal digits or the file that holds it. Raises UsageError."""
    content = text
    if len(text) != 2 * KEY_BYTES or Path(text).exists():
        try:
            content = Path(text).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as fault:
            raise UsageError(
                f"cannot read the public key {text}: {fault}", expected="a .pub file, or 64 hexadecimal digits"
            ) from fault
    digits = content.strip().removeprefix(_PUBLIC_PREFIX).split(" ")[0]
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(f"{text} holds no public key", expected=f"{_PUBLIC_PREFIX}and 64 hexadecimal digits")
    return key


def trusted_from(values: Sequence[str] | None) -> tuple[bytes, ...]:
    """Public keys that are named, else those of WIRESPEED_REQUIRE_SIGNATURE (separated by ``:``); none: no demand."""
    named = list(values or ()) or [
        part for part in os.environ.get("WIRESPEED_REQUIRE_SIGNATURE", "").split(":") if part
    ]
    return tuple(read_public(text) for text in named)


def statement(version: Version) -> bytes:
    """What is signed. Lines cannot run into each other: names hold no line breaks."""
    names.check_name(version.name)
    return "\n".join((_CONTEXT, version.name, str(version.number), version.manifest_digest, "")).encode()


def sign(version: Version, key: Ed25519PrivateKey) -> Version:
    """The version with this key's signature."""
    public = key.public_key().public_bytes_raw()
    made = Signature(key=public.hex(), signature=key.sign(statement(version)).hex())
    others = tuple(found for found in version.signatures if found.key != made.key)
    return msgspec.structs.replace(version, signatures=(*others, made))


def add(store: Store, version: Version, key: Ed25519PrivateKey) -> Version:
    """Sign a version that is in the store. Two that sign at the same time may lose one signature: look afterwards."""
    signed = sign(version, key)
    store.put(names.version_key(version.name, version.number), msgspec.json.encode(signed))
    return signed


def signers(version: Version, trusted: Iterable[bytes]) -> list[bytes]:
    """Which of these keys have signed the version. Others' signatures are not even looked at."""
    ed25519, _ = _crypto()
    from cryptography.exceptions import InvalidSignature

    found = []
    by_key = {given.key: given.signature for given in version.signatures}
    for key in trusted:
        given = by_key.get(key.hex())
        if given is None:
            continue
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(key).verify(bytes.fromhex(given), statement(version))
        except (InvalidSignature, ValueError):
            continue
        found.append(key)
    return found


def check(version: Version, trusted: Sequence[bytes]) -> None:
    """Raise SignatureMissing unless one of the trusted keys has signed. No trusted keys: nothing is demanded."""
    if trusted and not signers(version, trusted):
        others = len(version.signatures)
        raise SignatureMissing(
            f"{version.label} is not signed by a key that is trusted here"
            + (f" ({others} other or wrong signatures)" if others else ""),
            expected=f"a signature of {', '.join(key.hex()[:16] + '...' for key in trusted[:4])}",
            hint="`wirespeed repo sign` signs it, once somebody has looked at it",
        )


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as fault:
        raise MissingCapability(
            "the package cryptography is not installed", hint="pip install 'wirespeed[sign]'"
        ) from fault
    return ed25519, serialization
