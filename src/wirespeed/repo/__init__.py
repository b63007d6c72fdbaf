"""The model repository: immutable versions of models in an object store, and their way onto machines.

    repository   what users call
    push | pull | gc | aliases        what is done
    upload | fetch | cache | parts    how bytes go in, come out, and lie on disk
    versions     numbers, leases, commits
    chunks | delta | safetensors      how files are cut and made small
    manifest | names                  what a version is; what things are called
    store | credentials | hot         the only doors to S3 and Redis

Listing, verifying and moving models needs no torch; ``load`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wirespeed.repo.repository import Repository

if TYPE_CHECKING:
    from wirespeed.repo.tensors import load

__all__ = ["Repository", "load"]


def __getattr__(name: str) -> object:
    if name == "load":
        from wirespeed.repo.tensors import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
