"""Give a living DistributedDataParallel another bucket size, between two steps.

DDP fixes its bucket size when it is made and forms the final buckets after the first backward. There is no public call
to change it. What ``DistributedDataParallel.__setstate__`` does after unpickling is done here again: its reducer is
made anew with another limit. The old reducer takes its gradient hooks away when it goes. Checked on torch 2.6 and 2.13;
where the pieces are not found, nothing is changed and the caller is told.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from wirespeed.units import MIB


def bucket_bytes_of(ddp: DistributedDataParallel) -> int | None:
    """The present bucket limit in bytes, or None where this torch does not tell."""
    value = getattr(ddp, "bucket_bytes_cap", None)
    return int(value) if isinstance(value, int) else None


def rebucket(ddp: DistributedDataParallel, bucket_bytes: int, *, first_bucket_bytes: int = MIB) -> bool:
    """Form buckets of ``bucket_bytes`` from the next step on. All ranks must do so at the same step.

    The first bucket to be ready is at most ``first_bucket_bytes``: 1 MiB is DDP's own default. Returns False, with
    nothing changed, where this version of torch has no way. Communication hooks are forgotten: the caller registers its
    hook again.
    """
    needed = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper", "bucket_bytes_cap")
    if not all(hasattr(ddp, name) for name in needed):
        return False
    inner: Any = ddp
    config = getattr(ddp, "_bucket_config", None)
    if config is not None:
        import dataclasses

        if not dataclasses.is_dataclass(config):
            return False
        inner._bucket_config = dataclasses.replace(
            config,  # type: ignore[type-var]
            bucket_bytes_cap=bucket_bytes,
            per_bucket_bytes_caps=(),
            first_bucket_bytes_cap=min(first_bucket_bytes, bucket_bytes),
        )
        inner.bucket_bytes_cap_list = []
    inner.bucket_bytes_cap = bucket_bytes
    inner.bucket_bytes_cap_default = bucket_bytes > MIB
    parameters, expect_sparse_gradient = inner._build_params_for_reducer()
    names = inner._build_debug_param_to_name_mapping(parameters)
    inner.reducer = None  # the old one must be gone before the new one hooks the same gradients
    inner._ddp_init_helper(parameters, expect_sparse_gradient, names, inner.static_graph)
    inner._comm_hooks = []
    return True
