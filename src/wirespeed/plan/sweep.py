"""Scaling: one question over fabrics of several sizes, weak (batch per device kept) or strong (batch kept).

A one-line fabric is rebuilt at every size, so that its uplinks grow as its shape says; a fabric from a file is cut to
its first hosts rack by rack. Efficiency is throughput per device over that of the smallest size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from wirespeed.errors import UsageError, WirespeedError
from wirespeed.fabric.placement import host_order, place
from wirespeed.fabric.topology import Fabric
from wirespeed.fabric.words import load_fabric, parse_words
from wirespeed.plan.question import Answer, Question, ask


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One size. ``answer`` is None where nothing is legal there, with ``trouble`` saying why."""

    num_hosts: int
    num_ranks: int
    global_batch: int
    step_s: float | None
    samples_per_s: float | None
    efficiency: float | None
    what: str
    exposed_share: float | None
    trouble: str = ""


def resized(text: str, num_hosts: int) -> Fabric:
    """The fabric of ``text`` (a line or a path) with ``num_hosts`` hosts. Raises UsageError where it has fewer."""
    if num_hosts < 1:
        raise UsageError(f"got {num_hosts} hosts", expected="1 or more")
    if not text.endswith(".toml") and not Path(text).is_file():
        if not re.search(r"\bhosts=\d+", text):
            raise UsageError(
                f"got the fabric {text!r}", expected="hosts=... in it, to sweep over", hint="or a fabric.toml"
            )
        return parse_words(re.sub(r"\bhosts=\d+", f"hosts={num_hosts}", text))
    whole = load_fabric(text)
    if num_hosts > len(whole.hosts):
        raise UsageError(f"got {num_hosts} hosts", expected=f"at most the {len(whole.hosts)} of {text}")
    kept = [whole.hosts[index] for index in host_order(whole, "racks")[:num_hosts]]
    racks = {host.rack for host in kept}
    return msgspec.structs.replace(
        whole, hosts=tuple(kept), uplinks=tuple(uplink for uplink in whole.uplinks if uplink.rack in racks)
    )


def sweep(question: Question, fabric: str, sizes: Sequence[int], *, is_strong: bool = False) -> tuple[SweepPoint, ...]:
    """Ask at every size. Weak scaling keeps the question's batch per device; strong keeps its global batch."""
    if not sizes:
        raise UsageError("got no sizes", expected="one or more numbers of hosts")
    per_device = question.global_batch / question.num_ranks
    points: list[SweepPoint] = []
    first: tuple[float, int] | None = None
    for size in sorted(set(sizes)):
        held = resized(fabric, size)
        placement = place(held)
        batch = question.global_batch if is_strong else max(1, round(per_device * placement.num_ranks))
        at = msgspec.structs.replace(question, fabric=held, placement=placement, global_batch=batch, current=None)
        try:
            answer = ask(at)
        except WirespeedError as fault:
            points.append(
                SweepPoint(
                    num_hosts=size,
                    num_ranks=placement.num_ranks,
                    global_batch=batch,
                    step_s=None,
                    samples_per_s=None,
                    efficiency=None,
                    what="",
                    exposed_share=None,
                    trouble=str(fault),
                )
            )
            continue
        each = answer.samples_per_s / placement.num_ranks
        if first is None:
            first = (each, size)
        what, exposed_s = _advised(answer)
        points.append(
            SweepPoint(
                num_hosts=size,
                num_ranks=placement.num_ranks,
                global_batch=batch,
                step_s=answer.step_s,
                samples_per_s=answer.samples_per_s,
                efficiency=each / first[0],
                what=what,
                exposed_share=exposed_s / answer.step_s,
            )
        )
    return tuple(points)


def _advised(answer: Answer) -> tuple[str, float]:
    """What is advised, in its short name, and its exposed communication."""
    if answer.layouts is not None and answer.layouts.chosen.step_s == answer.step_s:
        return answer.layouts.chosen.layout.name, answer.layouts.chosen.exposed_s
    assert answer.choice is not None
    return answer.choice.strategy.name, answer.choice.prediction.exposed_s
