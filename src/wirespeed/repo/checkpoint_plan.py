"""The plan of a distributed checkpoint as JSON: what torch keeps in a pickle, without one.

Which tensors there are, of which shards they consist, and where in the version's files each shard lies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from wirespeed.errors import DataError

SCHEMA = 1


class Where(msgspec.Struct, frozen=True):
    """Where an item lies: file, offset, bytes."""

    file: str
    offset: int
    num_bytes: int


def encode_plan(metadata: Metadata, where: Sequence[tuple[MetadataIndex, Where]]) -> bytes:
    """A checkpoint's metadata as JSON."""
    tensors: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, dcp_metadata.TensorStorageMetadata):
            tensors[name] = {
                "dtype": _dtype_text(entry.properties.dtype),
                "requires_grad": entry.properties.requires_grad,
                "size": list(entry.size),
                "chunks": [{"offsets": list(c.offsets), "sizes": list(c.sizes)} for c in entry.chunks],
            }
        else:
            tensors[name] = None
    document = {
        "schema": SCHEMA,
        "state": tensors,
        "paths": {name: list(path) for name, path in (metadata.planner_data or {}).items()},
        "where": [
            {
                "name": index.fqn,
                "offset": None if index.offset is None else list(index.offset),
                "index": index.index,
                "at": [at.file, at.offset, at.num_bytes],
            }
            for index, at in where
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode_plan(content: bytes, *, source: str) -> Metadata:
    """Back from JSON. Raises DataError."""
    try:
        document = json.loads(content)
        if document["schema"] != SCHEMA:
            raise DataError(f"{source} has schema {document['schema']}", expected=f"schema {SCHEMA}")
        state: dict[str, Any] = {}
        for name, entry in document["state"].items():
            if entry is None:
                state[name] = dcp_metadata.BytesStorageMetadata()
                continue
            state[name] = dcp_metadata.TensorStorageMetadata(
                properties=dcp_metadata.TensorProperties(
                    dtype=dtype_of(entry["dtype"]), requires_grad=bool(entry["requires_grad"])
                ),
                size=torch.Size(entry["size"]),
                chunks=[
                    dcp_metadata.ChunkStorageMetadata(offsets=torch.Size(c["offsets"]), sizes=torch.Size(c["sizes"]))
                    for c in entry["chunks"]
                ],
            )
        where = {
            MetadataIndex(w["name"], None if w["offset"] is None else torch.Size(w["offset"]), w["index"]): Where(
                str(w["at"][0]), int(w["at"][1]), int(w["at"][2])
            )
            for w in document["where"]
        }
        paths = {name: tuple(path) for name, path in document["paths"].items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as fault:
        raise DataError(f"{source} is damaged: {fault}", expected="the plan of a checkpoint") from fault
    return Metadata(state_dict_metadata=state, planner_data=paths, storage_data=where)


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(text: str) -> torch.dtype:
    """torch's dtype of this name. Raises DataError."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise DataError(f"the plan names dtype {text!r}", expected="one of torch's")
    return found
