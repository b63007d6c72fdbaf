"""The heartbeat of a node: how loaded it is, in a fixed frame of 56 bytes, once a second and sooner on change.

A dispatcher asks for the next beat with the number of the last one it has; the answer is held back until there is a
newer one. So a beat costs one small frame each way, and a node that says nothing for a second is either slow or gone.
Changes of load are told at most twice a second, so that the traffic stays below 1 KB/s at any load; a node that becomes
ready, or starts to drain, says so within a tenth of a second.

    offset  size  field
    0       2     magic "HB"
    2       1     version, 1
    3       1     flags: 1 ready, 2 draining
    4       4     number of this beat
    8       8     boot: chosen at random when the process starts
    16      4     queued: requests that wait
    20      4     in flight: requests that are being run
    24      4     latency: microseconds from arrival to answer, mean since the beat before; 0 where none was answered
    28      4     compute: microseconds of a model's time per row, the same way
    32      4     rows answered since the beat before
    36      4     memory used on the host, KiB
    40      4     memory of the host, KiB
    44      2     instances that are up
    46      2     device use since the beat before, in tenths of a percent; 65535 unknown
    48      4     reserved, 0
    52      4     CRC-32 of bytes 0 to 51
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable

import msgspec

from wirespeed.errors import DataError
from wirespeed.serve.model import Model
from wirespeed.system import System

MAGIC = b"HB"
VERSION = 1
BEAT_BYTES = 56
PERIOD_S = 1.0
CHANGE_GAP_S = 0.5
"""Between two beats that only tell of a changed load."""
_LOOK_S = 0.1
_READY, _DRAINING = 1, 2
_UNKNOWN_USE = 65535
_FIELDS = struct.Struct("<2sBBIQIIIIIIIHHI")
_CRC = struct.Struct("<I")
_MAX_U32 = 2**32 - 1


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """One heartbeat. ``device_use`` is a share of 1, or None where it is unknown."""

    number: int
    boot: int
    is_ready: bool
    is_draining: bool
    queued: int
    in_flight: int
    latency_s: float
    compute_s_per_row: float
    rows: int
    memory_used_bytes: int
    memory_bytes: int
    instances: int
    device_use: float | None


def encode_beat(beat: Beat) -> bytes:
    """The 56 bytes of a beat. What does not fit its field is told as the most that does."""
    use = _UNKNOWN_USE if beat.device_use is None else min(1000, max(0, round(beat.device_use * 1000)))
    head = _FIELDS.pack(
        MAGIC,
        VERSION,
        _READY * beat.is_ready | _DRAINING * beat.is_draining,
        beat.number & _MAX_U32,
        beat.boot,
        min(beat.queued, _MAX_U32),
        min(beat.in_flight, _MAX_U32),
        min(round(beat.latency_s * 1e6), _MAX_U32),
        min(round(beat.compute_s_per_row * 1e6), _MAX_U32),
        min(beat.rows, _MAX_U32),
        min(beat.memory_used_bytes // 1024, _MAX_U32),
        min(beat.memory_bytes // 1024, _MAX_U32),
        min(beat.instances, 65535),
        use,
        0,
    )
    return head + _CRC.pack(zlib.crc32(head))


def decode_beat(frame: bytes | memoryview) -> Beat:
    """Raises DataError for anything that is not one whole beat of this version."""
    if len(frame) != BEAT_BYTES:
        raise DataError(f"got a heartbeat of {len(frame)} bytes", expected=str(BEAT_BYTES))
    fields = _FIELDS.unpack_from(frame)
    if fields[0] != MAGIC or fields[1] != VERSION:
        raise DataError(f"got a heartbeat that starts with {bytes(frame[:4]).hex(' ')}", expected="HB, version 1")
    if _CRC.unpack_from(frame, _FIELDS.size)[0] != zlib.crc32(frame[: _FIELDS.size]):
        raise DataError("got a heartbeat with a wrong checksum")
    flags, number, boot, queued, in_flight, latency_us, compute_us, rows = fields[2:10]
    used_kib, all_kib, instances, use = fields[10:14]
    return Beat(
        number=number,
        boot=boot,
        is_ready=bool(flags & _READY),
        is_draining=bool(flags & _DRAINING),
        queued=queued,
        in_flight=in_flight,
        latency_s=latency_us / 1e6,
        compute_s_per_row=compute_us / 1e6,
        rows=rows,
        memory_used_bytes=used_kib * 1024,
        memory_bytes=all_kib * 1024,
        instances=instances,
        device_use=None if use == _UNKNOWN_USE else use / 1000,
    )


class Load(msgspec.Struct, frozen=True):
    """Sums over a node's models, from which beats are made."""

    queued: int = 0
    in_flight: int = 0
    num_success: int = 0
    success_ns: int = 0
    compute_ns: int = 0
    rows: int = 0
    instances: int = 0


def load_of(models: Iterable[Model]) -> Load:
    """What the models do and have done."""
    held = list(models)
    return Load(
        queued=sum(model.num_queued for model in held),
        in_flight=sum(model.num_running for model in held),
        num_success=sum(model.statistics.num_success for model in held),
        success_ns=sum(model.statistics.success_ns for model in held),
        compute_ns=sum(ns for model in held for _, ns in model.statistics.batches.values()),
        rows=sum(model.statistics.num_rows for model in held),
        instances=sum(model.num_instances for model in held),
    )


def make_beat(  # noqa: PLR0917 - private to this module and its tests
    number: int, boot: int, before: Load, now: Load, took_s: float, memory: tuple[int, int], *, ready: bool, drain: bool
) -> Beat:
    """A beat from two looks at the load, ``took_s`` apart. A model that was unloaded in between counts from zero."""
    answered = max(0, now.num_success - before.num_success)
    rows = max(0, now.rows - before.rows)
    busy_s = max(0, now.compute_ns - before.compute_ns) / 1e9
    can_be_busy_s = took_s * now.instances
    return Beat(
        number=number,
        boot=boot,
        is_ready=ready,
        is_draining=drain,
        queued=now.queued,
        in_flight=now.in_flight,
        latency_s=max(0, now.success_ns - before.success_ns) / 1e9 / answered if answered else 0.0,
        compute_s_per_row=busy_s / rows if rows else 0.0,
        rows=rows,
        memory_used_bytes=memory[0],
        memory_bytes=memory[1],
        instances=now.instances,
        device_use=min(1.0, busy_s / can_be_busy_s) if can_be_busy_s > 0 else None,
    )


def is_news(told: Load, now: Load) -> bool:
    """Whether a load differs so much from the one that was told that it is told at once: twice or half."""
    before, after = told.queued + told.in_flight, now.queued + now.in_flight
    return abs(after - before) >= 8 and (after > 2 * before or before > 2 * after)


class Pulse:
    """Makes the beats of one node while somebody listens. ``state`` gives (ready, draining)."""

    def __init__(self, models: Callable[[], Iterable[Model]], state: Callable[[], tuple[bool, bool]]) -> None:
        self._models = models
        self._state = state
        self._boot = int.from_bytes(os.urandom(8), "little")
        self._number = 0
        self._frame = b""
        self._told = Load()
        self._told_state: tuple[bool, bool] | None = None
        self._told_s = 0.0
        self._waiting: list[asyncio.Future[bytes]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._system = System()

    @property
    def num_beats(self) -> int:
        """How many were made."""
        return self._number

    @property
    def num_waiting(self) -> int:
        """Dispatchers that wait for the next one."""
        return sum(not future.done() for future in self._waiting)

    async def after(self, number: int) -> bytes:
        """The first beat that is not number ``number``: the newest one at once, or the next."""
        loop = asyncio.get_running_loop()
        if number != self._number or not self._number:
            if time.monotonic() - self._told_s >= PERIOD_S:
                self._beat(time.monotonic())
            return self._frame
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting.append(future)
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_S, self._look)
        return await future

    def close(self) -> None:
        """Let go of everybody who waits."""
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.cancel()

    def _look(self) -> None:
        self._timer = None
        self._waiting = [future for future in self._waiting if not future.done()]
        if not self._waiting:
            return
        now_s = time.monotonic()
        since_s = now_s - self._told_s
        is_due = since_s >= PERIOD_S or self._state() != self._told_state
        if is_due or (since_s >= CHANGE_GAP_S and is_news(self._told, load_of(self._models()))):
            self._beat(now_s)
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                future.set_result(self._frame)
            return
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _beat(self, now_s: float) -> None:
        load, state = load_of(self._models()), self._state()
        self._number = self._number % _MAX_U32 + 1
        beat = make_beat(
            self._number,
            self._boot,
            self._told,
            load,
            max(1e-3, now_s - self._told_s),
            _host_memory(self._system),
            ready=state[0],
            drain=state[1],
        )
        self._frame, self._told, self._told_state, self._told_s = encode_beat(beat), load, state, now_s


def _host_memory(system: System) -> tuple[int, int]:
    """Bytes used and bytes there are; zeros where the kernel does not say."""
    found = {}
    for line in (system.read_text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = int(rest.split()[0]) * 1024
    total = found.get("MemTotal", 0)
    return max(0, total - found.get("MemAvailable", total)), total
