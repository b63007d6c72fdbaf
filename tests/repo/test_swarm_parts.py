"""The parts of fan-out without processes: chains, slowness, boards, pace, trackers."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from repo_tools import make_model

from wirespeed import wire
from wirespeed.errors import DataError
from wirespeed.repo.cache import Cache
from wirespeed.repo.manifest import Chunk, FileEntry, Manifest, ObjectRef
from wirespeed.repo.repository import Repository
from wirespeed.repo.swarm.asks import group
from wirespeed.repo.swarm.board import GIVEN_BYTES, Board
from wirespeed.repo.swarm.chain import arrange, is_slow, joiner_upstreams, upstreams
from wirespeed.repo.swarm.messages import (
    PIECE_BYTES,
    Announce,
    Ask,
    Join,
    Member,
    Members,
    Plan,
    Progress,
    Status,
    pack,
    unpack,
)
from wirespeed.repo.swarm.pace import Pace
from wirespeed.repo.swarm.peer import Peer
from wirespeed.repo.swarm.tracker import Tracker
from wirespeed.repo.versions import Version
from wirespeed.units import MIB

_T = TypeVar("_T")


def run(main: Coroutine[object, object, _T]) -> _T:
    return wire.run(main)  # type: ignore[arg-type]


def member(address: str, rack: str = "", **more: object) -> Member:
    return Member(address=address, rack=rack, **more)  # type: ignore[arg-type]


MEMBERS = st.lists(
    st.builds(
        lambda at, rack, whole: Member(address=f"h{at}", rack=f"r{rack}", is_whole=whole),
        st.integers(0, 40), st.integers(0, 4), st.booleans(),
    ),
    unique_by=lambda m: m.address, max_size=40,
)  # fmt: skip


@given(MEMBERS)
def test_every_host_stands_in_one_chain_and_every_rack_is_one_block(members: list[Member]) -> None:
    chains = arrange(members)
    assert sorted(m.address for chain in chains for m in chain) == sorted(m.address for m in members)
    for chain in chains:
        racks = [m.rack for m in chain]
        blocks = [rack for at, rack in enumerate(racks) if at == 0 or racks[at - 1] != rack]
        assert len(blocks) == len(set(blocks))
    seeded = {m.rack for m in members if m.is_whole}
    assert len(chains) == (len(seeded) if seeded else bool(members))
    for chain in chains:
        if seeded:
            assert chain[0].is_whole


@given(MEMBERS)
def test_each_rack_is_entered_once_at_most_and_not_at_all_where_it_has_a_seed(members: list[Member]) -> None:
    rack_of = {m.address: m.rack for m in members}
    whole = {m.address for m in members if m.is_whole}
    entries: dict[str, int] = {}
    for chain in arrange(members):
        for at, taker in enumerate(chain):
            if taker.address not in whole and at > 0:
                first = upstreams(chain, at)[0]
                if rack_of[first] != taker.rack:
                    entries[taker.rack] = entries.get(taker.rack, 0) + 1
    assert all(count == 1 for count in entries.values())
    assert not set(entries) & {rack_of[address] for address in whole}


def test_upstreams_are_those_before_nearest_first() -> None:
    chain = [member("a"), member("b"), member("c")]
    assert [upstreams(chain, at) for at in range(3)] == [(), ("a",), ("b", "a")]


def test_a_late_joiner_takes_from_the_last_of_its_rack_and_from_others_after_that() -> None:
    members = [
        member("a", "r0", position=0), member("b", "r0", position=1), member("c", "r1", position=2, is_whole=True),
        member("d", "r1", position=3),
    ]  # fmt: skip
    assert joiner_upstreams(members, "r1") == ("c", "d", "b", "a")
    assert joiner_upstreams(members, "r0") == ("b", "a", "c", "d")
    assert joiner_upstreams(members, "r2") == ("c", "d", "b", "a")


def test_slow_is_who_gains_less_than_half_and_is_well_behind() -> None:
    assert is_slow(gained_bytes=10, upstream_gained_bytes=100, lag_bytes=25 * MIB)
    assert not is_slow(gained_bytes=10, upstream_gained_bytes=100, lag_bytes=20 * MIB)
    assert not is_slow(gained_bytes=60, upstream_gained_bytes=100, lag_bytes=500 * MIB)  # behind, and catching up


def test_a_pace_lets_bytes_go_at_its_rate_and_saves_little_up() -> None:
    now = [100.0]
    pace = Pace(8e6, lambda: now[0])  # 1 MB/s
    assert pace.delay_s(500_000) == 0.0
    assert pace.delay_s(500_000) == pytest.approx(0.5)
    now[0] = 200.0
    assert pace.delay_s(1_000_000) == 0.0
    assert pace.delay_s(1) == pytest.approx(0.95)  # of the 99 idle seconds 0.05 were saved up
    assert Pace(None, lambda: 0.0).delay_s(10**12) == 0.0


# --- the board


def content_of(index: int, length: int) -> bytes:
    return bytes([index + 1]) * length


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


def manifest_of(*lengths: int) -> Manifest:
    chunks = tuple(
        Chunk(blake3(content_of(at, length)).digest(), length, 0, 0, length) for at, length in enumerate(lengths)
    )
    file = FileEntry("f", sum(lengths), b"", tuple(range(len(lengths))))
    return Manifest(objects=(ObjectRef(b"o" * 32, 0, max(lengths)),), chunks=chunks, files=(file,))


def board_of(manifest: Manifest, tmp_path: Path, executor: ThreadPoolExecutor, **options: int) -> Board:
    return Board(manifest, Cache(tmp_path / "cache"), pool=wire.BufferPool(), executor=executor, **options)


def put_piece(board: Board, index: int, offset: int, length: int, source: str = "x") -> None:
    buffer = board.buffer(index)
    whole = content_of(index, len(buffer.content))
    buffer.content[offset : offset + length] = whole[offset : offset + length]
    board.arrive(index, offset, (source, b""))


def test_pieces_are_given_on_before_their_chunk_is_verified_but_not_the_last(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        board = board_of(manifest_of(2 * PIECE_BYTES + 5), tmp_path, executor)
        board.begin()
        first = board.give((Ask(0, 0, PIECE_BYTES),))
        last = board.give((Ask(0, 2 * PIECE_BYTES, 5),))
        assert isinstance(first, asyncio.Future)
        assert isinstance(last, asyncio.Future)
        put_piece(board, 0, 0, PIECE_BYTES)
        assert bytes(first.result().payload) == content_of(0, PIECE_BYTES)  # type: ignore[call-overload]
        put_piece(board, 0, PIECE_BYTES, PIECE_BYTES)
        put_piece(board, 0, 2 * PIECE_BYTES, 5)
        assert not last.done()
        board.right(0)
        assert bytes(last.result().payload) == content_of(0, 5)  # type: ignore[call-overload]
        assert last.result().meta == first.result().meta

    run(main())


def test_a_chunk_that_came_wrong_has_another_generation_when_it_comes_again(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        board = board_of(manifest_of(PIECE_BYTES + 5), tmp_path, executor)
        board.begin()
        put_piece(board, 0, 0, PIECE_BYTES)
        first = board.give((Ask(0, 0, PIECE_BYTES),))
        last = board.give((Ask(0, PIECE_BYTES, 5),))
        put_piece(board, 0, PIECE_BYTES, 5)
        board.drop(0)
        assert isinstance(last, asyncio.Future)
        assert not last.done()
        put_piece(board, 0, 0, PIECE_BYTES)
        put_piece(board, 0, PIECE_BYTES, 5)
        board.right(0)
        assert isinstance(first, wire.Answer)
        assert last.result().meta != first.meta

    run(main())


def test_whoever_waits_is_told_when_nothing_more_comes(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        board = board_of(manifest_of(100), tmp_path, executor)
        board.begin()
        waiting = board.give((Ask(0, 0, 100),))
        board.end("the disk is full")
        assert isinstance(waiting, asyncio.Future)
        with pytest.raises(wire.CallFailed, match="the disk is full"):
            waiting.result()
        later = board.give((Ask(0, 0, 100),))
        assert isinstance(later, asyncio.Future)
        with pytest.raises(wire.CallFailed, match="the disk is full"):
            later.result()

    run(main())


@pytest.mark.parametrize(
    "asks",
    [
        (),
        (Ask(3, 0, 100),),
        (Ask(-1, 0, 100),),
        (Ask(0, 5, 95),),
        (Ask(0, 0, 99),),
        (Ask(0, -PIECE_BYTES, PIECE_BYTES),),
        (Ask(1, 2**62, 1),),
        (Ask(1, 0, PIECE_BYTES), Ask(0, 0, 100)),
    ],
)
def test_an_ask_that_makes_no_sense_is_refused(
    asks: tuple[Ask, ...], tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    async def main() -> None:
        board = board_of(manifest_of(100, 3 * PIECE_BYTES), tmp_path, executor)
        with pytest.raises(DataError):
            board.give(asks)

    run(main())


def test_small_chunks_are_given_together_in_the_order_asked(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        board = board_of(manifest_of(10, 20, 30), tmp_path, executor)
        board.begin()
        waiting = board.give((Ask(2, 0, 30), Ask(0, 0, 10)))
        assert isinstance(waiting, asyncio.Future)
        for index, length in ((0, 10), (2, 30)):
            assert not waiting.done()
            put_piece(board, index, 0, length)
            board.right(index)
        payload = waiting.result().payload
        assert isinstance(payload, list)
        assert b"".join(map(bytes, payload)) == content_of(2, 30) + content_of(0, 10)

    run(main())


def test_memory_is_bounded_and_what_left_it_is_read_back_and_verified(
    folder_store: object, tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    repository = Repository(folder_store, cache=Cache(tmp_path / "cache"))  # type: ignore[arg-type]
    repository.push(make_model(tmp_path / "m"), "m")
    repository.pull("m")
    manifest = repository.manifest(repository.version("m"))

    async def main() -> None:
        board = Board(manifest, repository.cache, pool=wire.BufferPool(), executor=executor, budget_bytes=MIB)
        board.keep(list(board.places))
        assert board.is_whole
        for index in board.places:
            for asks in group(board.manifest, [index]):
                answer = board.give(asks)
                answer = await answer if isinstance(answer, asyncio.Future) else answer
            if len(group(board.manifest, [index])) == 1:
                assert blake3(answer.payload).digest() == manifest.chunks[index].digest  # type: ignore[arg-type]
            assert board.buffered_bytes <= 9 * MIB
        board.rest()
        assert board.buffered_bytes == 0
        # One byte on the disk turns over: the chunk is not given any more.
        at, _ = board.places[next(iter(board.places))]
        path = repository.cache.path_of(manifest.content_id(manifest.files[at]))
        path.chmod(0o644)
        broken = bytearray(path.read_bytes())
        broken[0] ^= 1
        path.write_bytes(broken)
        answer = board.give(group(board.manifest, [next(iter(board.places))])[0])
        with pytest.raises(wire.CallFailed, match="no longer"):
            await answer  # type: ignore[misc]

    run(main())


def test_what_was_given_on_leaves_memory_before_what_was_not(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        length = 3 * MIB
        board = board_of(manifest_of(*[length] * 12), tmp_path, executor)
        board.begin()
        for index in range(12):
            for offset in range(0, length, PIECE_BYTES):
                put_piece(board, index, offset, PIECE_BYTES)
            board.right(index)
        for index in range(8):
            assert not isinstance(board.give((Ask(index, length - PIECE_BYTES, PIECE_BYTES),)), asyncio.Future)
        assert board.buffered_bytes == 12 * length  # nothing is on disk yet
        for index in range(12):
            board.written(index)
        # Of 24 MiB that were given on, 16 MiB may stay: three chunks of 3 MiB have to go.
        assert GIVEN_BYTES == 16 * MIB
        assert board.buffered_bytes == 9 * length
        assert not isinstance(board.give((Ask(11, 0, PIECE_BYTES),)), asyncio.Future)

    run(main())


@pytest.mark.parametrize("is_right", [True, False])
def test_a_manifest_that_comes_with_the_order_is_used_where_it_is_the_right_one(
    is_right: bool, folder_store: object, tmp_path: Path
) -> None:
    repository = Repository(folder_store, cache=Cache(tmp_path / "there"))  # type: ignore[arg-type]
    repository.push(make_model(tmp_path / "m"), "m")
    version = repository.version("m")
    content = repository.manifest_bytes(version)

    async def main() -> None:
        peer = Peer(Cache(tmp_path / "here"))
        await peer.start("127.0.0.1:0")
        try:
            job = peer.order(Plan(version=version, deadline_s=0.2, manifest=content if is_right else content[:-1]))
            await job.done
            # There is nobody to take the chunks from either way.
            assert job.state == "failed"
            assert ("nobody gave the manifest" in job.problem) == (not is_right)
            assert peer.cached_manifest(job.plan.digest) == (content if is_right else None)
        finally:
            await peer.close()

    run(main())


def test_the_bitmap_has_a_bit_per_chunk(tmp_path: Path, executor: ThreadPoolExecutor) -> None:
    async def main() -> None:
        board = board_of(manifest_of(*range(1, 12)), tmp_path, executor)
        board.keep([0, 3, 9])
        assert board.bitmap() == bytes([0b1001, 0b10])
        assert board.held_bytes == 1 + 4 + 10

    run(main())


# --- the order


def test_a_host_whose_answer_to_the_order_is_late_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("wirespeed.repo.swarm.warm")
    monkeypatch.setattr(module, "ORDER_S", 1.0)
    version = Version(name="m", number=1, push_id="p", state="live", created="2026", manifest_digest="ab" * 32)
    states = ["unknown"]

    async def take(request: wire.Request) -> bytes:
        states.append("running")
        await asyncio.Event().wait()  # it fetches, and is too busy to answer
        return b""

    async def main() -> list[str]:
        handlers = {
            "status": lambda _: pack(Status(host="h", rack="r", has_store=False)),
            "progress": lambda _: pack(Progress(state=states[-1])),
            "warm": take,
            "wait": lambda _: pack(Progress(state="whole")),
        }
        async with await wire.listen("127.0.0.1:0", handlers) as server:
            return [host.progress.state for host in (await module.warm(version, [server.address])).hosts]

    assert run(main()) == ["whole"]
    assert states == ["unknown", "running"]


# --- the tracker


def test_a_tracker_hands_out_places_and_learns_everything_again_after_a_restart() -> None:
    digest = b"d" * 32

    async def main() -> None:
        tracker = Tracker()
        await tracker.start("127.0.0.1:0")

        async def call(method: str, message: bytes) -> Members:
            async with await wire.connect(tracker.address) as connection:
                return unpack((await connection.call(method, message)).payload, Members)

        assert (await call("join", pack(Join(address="a:1", digest=digest, rack="r0")))).members == ()
        found = await call("join", pack(Join(address="b:1", digest=digest, rack="r1")))
        assert [(m.address, m.rack, m.position, m.is_whole) for m in found.members] == [("a:1", "r0", 0, False)]
        await tracker.close()
        tracker = Tracker()
        await tracker.start("127.0.0.1:0")
        async with await wire.connect(tracker.address) as connection:
            for address, held, position in (("b:1", 5, 1), ("a:1", 10, 0)):
                said = Announce(address=address, versions=((digest, held, 10, position),))
                await connection.call("announce", pack(said))
        found = await call("join", pack(Join(address="c:1", digest=digest)))
        assert [(m.address, m.is_whole) for m in found.members] == [("a:1", True), ("b:1", False)]
        assert [m.address for m in (await call("peers", b"")).members] == ["b:1", "a:1", "c:1"]
        await tracker.close()

    run(main())
