"""The nodes that a command names: ``h1:7000,h2:7000``, ``node[01-64]:7000``, ``dns:NAME:7000``, or a file of those.

``dns:`` takes every address that a name has, as a headless service in Kubernetes gives one per pod. Names are looked up
once, when the command starts: pods that come later are not known to it.
"""

from __future__ import annotations

import socket
from pathlib import Path

from wirespeed.errors import PeerFailure, UsageError
from wirespeed.launch.hostlist import expand_hostlist
from wirespeed.wire.sockets import split_address

MAX_NODES = 4096
_EXPECTED = "HOST:PORT,..., node[01-64]:PORT, dns:NAME:PORT or @FILE"


def parse_nodes(text: str) -> tuple[str, ...]:
    """Addresses, each once, in order. Raises UsageError for what is none, PeerFailure for a name without addresses."""
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise UsageError(f"cannot read the nodes in {text[1:]}: {fault}") from fault
        words = [word for line in lines if (word := line.partition("#")[0].strip())]
    else:
        words = [text]
    found = dict.fromkeys(address for word in words for part in _parts(word) for address in _addresses(part))
    if not 0 < len(found) <= MAX_NODES:
        raise UsageError(f"got {len(found)} nodes in {text!r}", expected=_EXPECTED)
    return tuple(found)


def _parts(word: str) -> list[str]:
    """Words between the commas that are outside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(word + ","):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(word[start:index].strip())
            start = index + 1
    return [part for part in parts if part]


def _addresses(part: str) -> list[str]:
    if part.startswith("dns:"):
        host, port = split_address(part.removeprefix("dns:"))
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as fault:
            raise PeerFailure(f"cannot find nodes by the name {host!r}: {fault.strerror}") from fault
        hosts = sorted({str(address[0]) for _, _, _, _, address in found})
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    expanded = [part] if part.startswith("[") or "[" not in part else list(expand_hostlist(part))
    for address in expanded:
        try:
            split_address(address)
        except UsageError as fault:
            raise UsageError(f"got node {address!r}", expected=_EXPECTED) from fault
    return expanded
