"""Gradients into messages, as frameworks other than DDP fuse them, and the queue that sends them one after another.

DDP's own rule is ``sim.training.fill_buckets``. Horovod fuses what became ready within a cycle up to a limit; WFBP
sends every tensor alone; MG-WFBP merges a tensor into its successor where sending it alone would save nothing (Shi et
al. 2019). ``drain`` is the recurrence of one communication stream, such as NCCL's: a message starts when it is ready
and its predecessor is done. It assumes that sending does not slow backward down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wirespeed.errors import UsageError
from wirespeed.sim.training import Bucket
from wirespeed.spec.payloads import BYTES_PER_ELEMENT
from wirespeed.spec.workload import GradientTensor
from wirespeed.units import MIB

FUSION_CYCLE_S = 5e-3
FUSION_BYTES = 64 * MIB
"""Horovod's defaults when its fusion was studied (HOROVOD_CYCLE_TIME 5 ms, HOROVOD_FUSION_THRESHOLD 64 MB)."""


def drain(messages: Sequence[Bucket], seconds: Callable[[int], float]) -> float:
    """When the last message is done, counted from the start of backward. ``seconds`` takes bytes.

    f_i = max(f_{i-1}, r_i) + c(s_i).
    """
    done_s = 0.0
    for message in messages:
        done_s = max(done_s, message.ready_s) + seconds(message.num_elements * BYTES_PER_ELEMENT)
    return done_s


def one_by_one(gradients: Sequence[GradientTensor]) -> tuple[Bucket, ...]:
    """Every tensor alone (wait-free backward propagation)."""
    return tuple(Bucket(gradient.num_elements, gradient.ready_s) for gradient in gradients)


def all_at_once(gradients: Sequence[GradientTensor]) -> tuple[Bucket, ...]:
    """One message after backward, without overlap."""
    if not gradients:
        return ()
    return (Bucket(sum(gradient.num_elements for gradient in gradients), gradients[-1].ready_s),)


def fuse_by_cycle(
    gradients: Sequence[GradientTensor], *, cycle_s: float = FUSION_CYCLE_S, limit_bytes: int = FUSION_BYTES
) -> tuple[Bucket, ...]:
    """What became ready within ``cycle_s`` of compute goes together; a full buffer goes at once."""
    if cycle_s < 0 or limit_bytes < 1:
        raise UsageError(
            f"got a cycle of {cycle_s:g} s and {limit_bytes} bytes", expected="0 s or more, 1 byte or more"
        )
    messages = []
    held, since_s, last_s = 0, 0.0, 0.0
    for gradient in gradients:
        since_s += gradient.ready_s - last_s
        last_s = gradient.ready_s
        held += gradient.num_elements
        if since_s >= cycle_s or held * BYTES_PER_ELEMENT >= limit_bytes:
            messages.append(Bucket(held, gradient.ready_s))
            held, since_s = 0, 0.0
    if held:
        messages.append(Bucket(held, last_s))
    return tuple(messages)


def merge_to_save(gradients: Sequence[GradientTensor], seconds: Callable[[int], float]) -> tuple[Bucket, ...]:
    """Merge a message into the next where sending it alone would save nothing (MG-WFBP).

    That is where it could not start before the next one is ready, or would wait for less than the latency saved.
    ``seconds`` is the cost of a message of so many bytes; its latency is the cost of one byte.
    """
    latency_s = seconds(1)
    messages: list[Bucket] = []
    done_s = 0.0  # when the last message of ``messages`` but the open one is done
    opened = 0
    for place, gradient in enumerate(gradients):
        opened += gradient.num_elements
        is_last = place == len(gradients) - 1
        start_s = max(done_s, gradient.ready_s)
        if not is_last and (
            start_s >= gradients[place + 1].ready_s or gradients[place + 1].ready_s - start_s < latency_s
        ):
            continue
        messages.append(Bucket(opened, gradient.ready_s))
        done_s = start_s + seconds(opened * BYTES_PER_ELEMENT)
        opened = 0
    return tuple(messages)
