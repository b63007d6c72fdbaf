"""What things are called: models, versions, aliases, and the keys they have in a store.

A model's name is one part or two (``llama-8b``, ``org/llama-8b``). A version is named ``N@12``, ``N@v12``, ``N@alias``
or ``N`` (the newest). Keys are made here only, so that the layout of a store is one page:

    wirespeed.json                       format of this repository
    objects/AB/DIGEST-EPOCH              immutable bytes, named by their BLAKE3-256 and the collection epoch
    pushes/NAME/NUMBER                   a push that is under way, kept fresh by its owner: the lease
    versions/NAME/NUMBER                 the commit: made once by the push, or by whoever breaks its lease
    aliases/NAME/ALIAS/SEQUENCE          an append-only log; its last entry is where the alias points
    gc/EPOCH                             what one collection is going to delete, then that it is done

Numbers are padded with zeros: a listing is in order.
"""

from __future__ import annotations

import re

import msgspec

from wirespeed.errors import UsageError

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?")
_ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
_NUMBER = re.compile(r"v?([0-9]{1,10})")
_WIDTH = 10

FORMAT_KEY = "wirespeed.json"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A model and which version of it: a number, an alias, or neither (the newest)."""

    name: str
    number: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        if self.number is not None:
            return f"{self.name}@v{self.number}"
        return self.name if self.alias is None else f"{self.name}@{self.alias}"


def check_name(name: str) -> str:
    """The name itself. Raises UsageError where it cannot be one."""
    if _NAME.fullmatch(name) is None or any(part.endswith(".") for part in name.split("/")):
        raise UsageError(
            f"got model name {name!r}",
            expected='letters, digits, ".", "_", "-", at most one "/" (as in org/model)',
        )
    return name


def check_alias(alias: str) -> str:
    """The alias itself. Raises UsageError where it cannot be one, such as ``v12``, which is a version."""
    if _ALIAS.fullmatch(alias) is None or _NUMBER.fullmatch(alias) is not None:
        raise UsageError(
            f"got alias {alias!r}", expected='a letter, then letters, digits, ".", "_", "-"; not like a version (v12)'
        )
    return alias


def parse_wanted(text: str) -> Wanted:
    """Read ``N``, ``N@12``, ``N@v12`` or ``N@alias``."""
    name, at, version = text.partition("@")
    check_name(name)
    if not at:
        return Wanted(name=name)
    return parse_version(name, version)


def parse_version(name: str, version: str) -> Wanted:
    """A version of ``name`` as people write it: ``12``, ``v12`` or an alias."""
    number = _NUMBER.fullmatch(version)
    if number is not None:
        return Wanted(name=name, number=int(number.group(1)))
    return Wanted(name=name, alias=check_alias(version))


def object_key(digest: bytes, epoch: int) -> str:
    """Where the object lies that was uploaded in this epoch."""
    text = digest.hex()
    return f"objects/{text[:2]}/{text}-{epoch}"


def parse_object_key(key: str) -> tuple[bytes, int] | None:
    """Digest and epoch, or None where the key is not one of ours."""
    match = re.fullmatch(r"objects/[0-9a-f]{2}/([0-9a-f]{64})-([0-9]{1,12})", key)
    return None if match is None else (bytes.fromhex(match.group(1)), int(match.group(2)))


def _folder(name: str) -> str:
    return check_name(name).replace("/", "=")


def name_of_folder(folder: str) -> str | None:
    """The model whose keys lie in this folder, or None."""
    name = folder.replace("=", "/")
    return name if _NAME.fullmatch(name) is not None else None


def pushes_prefix(name: str) -> str:
    """Below it lie the pushes of a model that are under way."""
    return f"pushes/{_folder(name)}"


def push_key(name: str, number: int) -> str:
    """The lease of one push."""
    return f"{pushes_prefix(name)}/{number:0{_WIDTH}d}"


def versions_prefix(name: str) -> str:
    """Below it lie the versions of a model."""
    return f"versions/{_folder(name)}"


def version_key(name: str, number: int) -> str:
    """The commit of one version."""
    return f"{versions_prefix(name)}/{number:0{_WIDTH}d}"


def broken_key(name: str, number: int) -> str:
    """Only where the store has no conditions: says that this push may no longer commit."""
    return f"{version_key(name, number)}.broken"


def aliases_prefix(name: str, alias: str | None = None) -> str:
    """Below it lie the logs of a model's aliases, or of one."""
    return f"aliases/{_folder(name)}" if alias is None else f"aliases/{_folder(name)}/{check_alias(alias)}"


def alias_key(name: str, alias: str, sequence: int, suffix: str = "") -> str:
    """One entry of an alias's log. ``suffix`` makes it unique where the store has no conditions."""
    return f"{aliases_prefix(name, alias)}/{sequence:0{_WIDTH}d}{suffix}"


def collection_key(epoch: int) -> str:
    """One collection's list."""
    return f"gc/{epoch:0{_WIDTH}d}"


def number_in(key: str) -> int | None:
    """The number that a key ends with (before any ``.suffix``), or None."""
    head = key.rsplit("/", 1)[-1].split(".", 1)[0]
    return int(head) if head.isdigit() else None
