"""Bandwidth and round trips between all pairs of hosts over TCP, as one SPMD program without torch.

One process per host takes part (local rank 0). The pairs are met in rounds of disjoint pairs, so N hosts need N - 1
rounds (N when odd) and no NIC serves two pairs at once; within a round all pairs pass through the same phases behind a
common barrier, so round trips are taken while nobody sends in bulk. Pairs of a round do share the uplinks between
racks: what a pair reaches through one is its share under that load, not what it would reach alone. A host that dies or
hangs ends the measurement with a PeerFailure that names it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import msgspec

from wirespeed.errors import PeerFailure, UsageError, WirespeedError
from wirespeed.launch import Ranks
from wirespeed.measure.clock import Deadline
from wirespeed.measure.control import Channel, admit, listen, receive_from_all
from wirespeed.measure.environment import capture
from wirespeed.measure.messages import Done, Fault, Finish, Go, Hello, Listening, Message, Ready, SocketOptions, Task
from wirespeed.measure.participant import take_part
from wirespeed.measure.transfers import DRAIN_S, MAX_STREAMS, NONCE_BYTES, PING_BUDGET_S, SEND_MARGIN_S
from wirespeed.records import LinkSample, LinksRecord

_Kind = TypeVar("_Kind", bound=Message)
Schedule = Sequence[Sequence[tuple[int, int]]]
"""Rounds of disjoint pairs of hosts, by number."""

NUM_PINGS = 500
WARMUP_S = 0.2
WARMUP_STREAMS_S = 0.4
"""Several bbr flows take longer to share a link: after 0.1 s, four of them read 82 to 104 Mbit/s of 95.6."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    streams: tuple[int, ...]
    duration_s: float
    windows: int
    is_bidirectional: bool
    timeout_s: float
    num_pings: int


@dataclass(frozen=True, kw_only=True)
class _Host:
    name: str
    channel: Channel
    place: Listening


def measure_links(
    ranks: Ranks,
    *,
    streams: Sequence[int] = (1, 4),
    duration_s: float = 0.5,
    windows: int = 5,
    num_pings: int = NUM_PINGS,
    bidirectional: bool = False,
    options: SocketOptions | None = None,
    port: int | None = None,
    timeout_s: float = 15.0,
    join_timeout_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
    schedule: Callable[[int], Schedule] | None = None,
    follow_up: Callable[[LinksRecord], Schedule] | None = None,
) -> LinksRecord | None:
    """Measure all pairs; every rank calls this. Returns the record on rank 0 and None elsewhere.

    ``schedule`` makes the rounds for a number of hosts (None: ``rounds``, all pairs). ``follow_up`` is given the record
    and asks for more rounds, then is given the record of those alone, until it asks for none; what is returned is the
    first record.

    Per pair and direction and number of ``streams`` one transfer of ``duration_s`` is cut into ``windows``, each a
    sample; before it ``num_pings`` small messages go to and fro. ``timeout_s`` bounds every wait for a host beyond the
    time its work takes, ``join_timeout_s`` the wait for all ranks. Rank 0 listens at MASTER_ADDR on ``port``:
    MASTER_PORT, or one above it under torchrun, whose agent holds that one. What rank 0 was given counts for all.
    Raises PeerFailure naming the host that failed.
    """
    if not streams or not all(1 <= count <= MAX_STREAMS for count in streams):
        raise UsageError(f"got streams {list(streams)}", expected=f"numbers of 1 to {MAX_STREAMS}")
    if not 0.05 <= duration_s <= 60 or windows < 1:
        raise UsageError(f"got {windows} windows in {duration_s:g} s", expected="at least one, in 0.05 to 60 s")
    if ranks.world_size < 2:
        raise UsageError("got one rank", expected="two hosts or more", hint="start the command on every host")
    plan = _Plan(
        streams=tuple(sorted(set(streams))),
        duration_s=duration_s,
        windows=windows,
        is_bidirectional=bidirectional,
        timeout_s=timeout_s,
        num_pings=num_pings,
    )
    port = control_port(ranks) if port is None else port
    patience_s = join_timeout_s + 10 * (timeout_s + duration_s)
    if ranks.rank != 0:
        take_part(ranks, port, join_timeout_s, patience_s)
        return None
    with listen(ranks.master_addr, port) as server:
        own = threading.Thread(
            target=_take_part_quietly,
            args=(ranks, port, join_timeout_s, patience_s),
            name="wirespeed-links",
            daemon=True,
        )
        own.start()
        with _admitted(server, ranks.world_size, Deadline(join_timeout_s, "joining")) as hellos:
            record = _coordinate(
                hellos, plan, SocketOptions() if options is None else options, progress,
                rounds if schedule is None else schedule, follow_up,
            )  # fmt: skip
    own.join(timeout_s)
    return record


def control_port(ranks: Ranks) -> int:
    """Where rank 0 listens. Under torchrun MASTER_PORT belongs to the agent's store."""
    return ranks.master_port + (1 if "TORCHELASTIC_RUN_ID" in os.environ else 0)


def rounds(num_hosts: int) -> Schedule:
    """A 1-factorisation of the complete graph by the circle method: disjoint pairs per round, every pair once."""
    seats: list[int | None] = [*range(num_hosts), *([None] if num_hosts % 2 else [])]
    count = len(seats)
    table = []
    for _ in range(count - 1):
        pairs = [(seats[i], seats[count - 1 - i]) for i in range(count // 2)]
        table.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return table


@contextlib.contextmanager
def _admitted(server: socket.socket, num_ranks: int, deadline: Deadline) -> Iterator[dict[Channel, Hello]]:
    """All ranks' channels; told why when the measurement ends early, and closed."""
    hellos = admit(server, num_ranks, deadline)
    try:
        yield hellos
    except BaseException as fault:
        reason = str(fault) if isinstance(fault, WirespeedError) else f"rank 0 was stopped ({type(fault).__name__})"
        for channel in hellos:
            with contextlib.suppress(PeerFailure):
                channel.send(Fault(text=reason), timeout_s=1.0)
        raise
    finally:
        for channel in hellos:
            channel.close()


def _coordinate(  # noqa: PLR0917 - one caller
    hellos: dict[Channel, Hello],
    plan: _Plan,
    options: SocketOptions,
    progress: Callable[[str], None] | None,
    schedule: Callable[[int], Schedule],
    follow_up: Callable[[LinksRecord], Schedule] | None,
) -> LinksRecord:
    by_rank = sorted(hellos.items(), key=lambda item: item[1].rank)
    for channel, hello in by_rank:
        channel.send(options if hello.local_rank == 0 else Finish())
    members = [(channel, hello.host) for channel, hello in by_rank if hello.local_rank == 0]
    names = [name for _, name in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(
            f"two ranks with local rank 0 call themselves host {twice!r}",
            expected="one per host",
            hint="set LOCAL_RANK, or WIRESPEED_HOST to tell the hosts apart",
        )
    if len(members) < 2:
        raise UsageError(f"all ranks are on host {names[0]!r}", expected="two hosts or more")
    answers = receive_from_all([channel for channel, _ in members], Deadline(plan.timeout_s, "opening a listener"))
    places = _expect(Listening, answers)
    hosts = [_Host(name=name, channel=channel, place=places[channel]) for channel, name in members]
    record = first = _measure_rounds(hosts, schedule(len(hosts)), plan, progress)
    while follow_up is not None and (table := follow_up(record)):
        record = _measure_rounds(hosts, table, plan, progress)
    for host in hosts:
        host.channel.send(Finish())
    return msgspec.structs.replace(first, socket_options=_joined_options(hosts))


def _measure_rounds(
    hosts: Sequence[_Host], table: Schedule, plan: _Plan, progress: Callable[[str], None] | None
) -> LinksRecord:
    samples: list[LinkSample] = []
    for number, pairs in enumerate(table, start=1):
        if progress is not None:
            progress(f"round {number} of {len(table)}: {len(pairs)} pair{'s' if len(pairs) > 1 else ''} at once")
        samples.extend(_measure_round([(hosts[a], hosts[b]) for a, b in pairs], plan))
    order = {host.name: place for place, host in enumerate(hosts)}
    samples.sort(key=lambda s: (order[s.source], order[s.target], s.is_bidirectional, s.streams))
    return LinksRecord(
        environment=capture(), hosts=tuple(host.name for host in hosts), samples=tuple(samples), socket_options={}
    )


def _measure_round(pairs: Sequence[tuple[_Host, _Host]], plan: _Plan) -> list[LinkSample]:
    """All phases of one round; the pairs do the same at the same time, each direction in turn."""
    ways = [pairs, [(b, a) for a, b in pairs]]
    rtts: dict[tuple[str, str], tuple[float, float, float]] = {}
    for way in ways:
        for (source, target), (pinged, _) in _phase(way, plan, does_ping=True).items():
            if pinged.rtts_s is None:
                raise PeerFailure(f"host {source} measured no round trip to host {target}")
            rtts[source, target] = pinged.rtts_s
    # Slow start doubles per round trip: twenty of them open any window.
    slowest_s = max(min(20 * median_s, 2.0) for _, median_s, _ in rtts.values())
    warmups_s = {n: max(slowest_s, WARMUP_S if n == 1 else WARMUP_STREAMS_S) for n in plan.streams}
    samples = []
    for streams in plan.streams:
        for way in ways:
            for (source, target), (_, done) in _phase(way, plan, streams=streams, warmup_s=warmups_s[streams]).items():
                rtt = rtts[source, target] if streams == min(plan.streams) == 1 else (None, None, None)
                samples.append(_sample(source, target, streams, done, rtt))
    if plan.is_bidirectional:
        for streams in plan.streams:
            both = _phase(pairs, plan, streams=streams, warmup_s=warmups_s[streams], is_bidirectional=True)
            for (source, target), (at_source, at_target) in both.items():
                samples.append(_sample(source, target, streams, at_target, is_bidirectional=True))
                samples.append(_sample(target, source, streams, at_source, is_bidirectional=True))
    return samples


def _phase(
    pairs: Sequence[tuple[_Host, _Host]],
    plan: _Plan,
    *,
    does_ping: bool = False,
    streams: int = 1,
    warmup_s: float = 0.0,
    is_bidirectional: bool = False,
) -> dict[tuple[str, str], tuple[Done, Done]]:
    """Source connects to target, all are ready, all start, all end. Returns both sides' results by host names."""
    for source, target in pairs:
        nonce = secrets.token_hex(NONCE_BYTES)
        for own, other in ((target, source), (source, target)):
            own.channel.send(
                Task(
                    does_ping=does_ping,
                    is_driving=own is source,
                    is_bidirectional=is_bidirectional,
                    peer=other.name,
                    address=other.place.address,
                    port=other.place.port,
                    nonce=nonce,
                    streams=streams,
                    num_pings=plan.num_pings,
                    warmup_s=warmup_s,
                    duration_s=plan.duration_s,
                    windows=plan.windows,
                    timeout_s=plan.timeout_s,
                )
            )
    channels = [host.channel for pair in pairs for host in pair]
    # A host waits timeout_s for its peer and then says so: rank 0 waits a little longer, to hear which peer it was.
    _expect(Ready, receive_from_all(channels, Deadline(plan.timeout_s + 2, "connecting")))
    for channel in channels:
        channel.send(Go())
    work_s = PING_BUDGET_S if does_ping else warmup_s + plan.duration_s + SEND_MARGIN_S + DRAIN_S
    results = _expect(Done, receive_from_all(channels, Deadline(work_s + plan.timeout_s + 2, "a transfer")))
    return {(a.name, b.name): (results[a.channel], results[b.channel]) for a, b in pairs}


def _expect(kind: type[_Kind], messages: dict[Channel, Message]) -> dict[Channel, _Kind]:
    checked: dict[Channel, _Kind] = {}
    for channel, message in messages.items():
        if not isinstance(message, kind):
            raise PeerFailure(f"{channel.peer} answered {type(message).__name__}", expected=kind.__name__)
        checked[channel] = message
    return checked


def _sample(
    source: str,
    target: str,
    streams: int,
    done: Done,
    rtt: tuple[float | None, float | None, float | None] = (None, None, None),
    *,
    is_bidirectional: bool = False,
) -> LinkSample:
    return LinkSample(
        source=source,
        target=target,
        streams=streams,
        num_bytes=done.num_bytes,
        bit_per_s=done.bit_per_s,
        rtt_min_s=rtt[0],
        rtt_median_s=rtt[1],
        rtt_p99_s=rtt[2],
        is_bidirectional=is_bidirectional,
    )


def _joined_options(hosts: Sequence[_Host]) -> dict[str, str]:
    """One value where all hosts agree, else one per host."""
    joined = {}
    for name in hosts[0].place.options:
        values = [host.place.options.get(name, "unknown") for host in hosts]
        if all(a == b for a, b in pairwise(values)):
            joined[name] = values[0]
        else:
            joined[name] = ", ".join(f"{host.name}: {value}" for host, value in zip(hosts, values, strict=True))
    return joined


def _take_part_quietly(ranks: Ranks, port: int, join_timeout_s: float, patience_s: float) -> None:
    """Rank 0's own part. It reports faults to the coordinator as every host does, so they need not be raised twice."""
    with contextlib.suppress(WirespeedError, OSError):
        take_part(ranks, port, join_timeout_s, patience_s)
