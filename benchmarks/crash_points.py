"""kill -9 at every effect of push, pull, delta, alias, warm, gc, rm: what readers see, and what the next run repairs.

Each operation runs once to count its effects (requests to the store and calls that change files), then once per place
to die: before and after every effect, and in the middle of file writes. After each death, without any repair:

    every version that can be listed reads back bit for bit (a fresh reader, an empty cache);
    a folder with a completeness marker, and every file in the cache, holds exactly what it should;
    an alias points at its old or its new version;

and then the same operation runs again to its end, and the same is checked of its outcome; an interrupted pull reads at
most what was not yet whole, plus one chunk per stream; an interrupted warm exactly the chunks that are not on disk. The
store is a folder; with --s3 it is SeaweedFS.

What dies of a warm is the host's peer with everything in it, in the middle of an order: fetching from the store as the
head of a chain, from a neighbour that lives on, by differences against what is here, or giving to a host behind it,
which has to come through that death whole.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3  # noqa: F401 - with the next ones: loaded once, before the forks
import numpy as np
import obstore  # noqa: F401
import zstandard  # noqa: F401

import wirespeed.repo.devstore  # noqa: F401
from _crash_child import Injector
from _harness import RESULTS, Bar, finish
from wirespeed import wire
from wirespeed.errors import UsageError
from wirespeed.repo import aliases, gc, pull, versions
from wirespeed.repo.cache import Cache
from wirespeed.repo.fetch import NUM_WORKERS
from wirespeed.repo.repository import Repository
from wirespeed.repo.safetensors import build_head
from wirespeed.repo.store import open_store
from wirespeed.repo.swarm.messages import Plan
from wirespeed.repo.swarm.peer import Peer
from wirespeed.repo.swarm.warm import Warmed, warm

CHILD_TIMEOUT_S = 60


class World:
    """One state of store, cache and folders, made anew from a copy for every death."""

    def __init__(self, root: Path, url: str | None) -> None:
        self.root = root
        self.url = url if url is not None else str(root / "store")

    def repository(self, cache: str = "cache") -> Repository:
        """Opened in the process that asks: a fork must not share the library's threads."""
        return Repository(open_store(self.url), cache=Cache(self.root / cache))


def model(folder: Path, step: int) -> dict[str, bytes]:
    """A small model after a number of steps; written to the folder."""
    tensors = []
    content = []
    for layer in range(2):
        values = (np.random.default_rng(layer).standard_normal(700_000) * 0.02).astype(np.float32)
        for at in range(step):
            noise = np.random.default_rng(100 + at).standard_normal(values.size).astype(np.float32)
            values += noise * np.float32(3e-7)
        bits = values.view(np.uint32)
        half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        tensors.append((f"w{layer}", "BF16", (half.size,), half.nbytes))
        content.append(half.tobytes())
    files = {
        "model.safetensors": build_head(tensors, {}) + b"".join(content),
        "config.json": b'{"step": %d}' % step,
        "sub/tokens.bin": np.random.default_rng(9 + step).integers(0, 256, 700_000, dtype=np.uint8).tobytes(),
    }
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return files


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != pull.MARKER
    }


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Run in a forked process: (signal or 0, what it gave)."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 1
        try:
            result = work()
            with os.fdopen(write, "wb") as stream:
                pickle.dump(result, stream)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    signal.alarm(CHILD_TIMEOUT_S)
    with os.fdopen(read, "rb") as stream:
        content = stream.read()
    _, status = os.waitpid(pid, 0)
    signal.alarm(0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), None
    if os.WEXITSTATUS(status):
        raise RuntimeError("the operation failed in its process")
    return 0, pickle.loads(content)


class Scenario:
    """An operation with the state it starts from.

    ``is_exact``: what the next run may fetch is what ``missing_bytes`` says and no more. ``beside``: a process that
    lives through the death, started for each; it ends with what it saw wrong, or "".
    """

    def __init__(
        self, name: str, prepare: Callable[[World], None], act: Callable[[World], Any], *,
        is_exact: bool = False, beside: Callable[[World, Any], str] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.prepare = prepare
        self.act = act
        self.is_exact = is_exact
        self.beside = beside


SEED = "seed-address"
"""A file in a world: where a peer that has everything listens."""
HOST = "host-address"
"""Where the peer that dies listens, once it does."""


async def _open_peer(world: World, cache: str, *, has_store: bool) -> Peer:
    repository = world.repository(cache) if has_store else None
    peer = Peer(Cache(world.root / cache), repository=repository)
    await peer.start("127.0.0.1:0")
    return peer


def run_seed(world: World, ready: int) -> None:
    """In a process of its own: a peer with every version, until it is killed."""

    async def main() -> None:
        peer = await _open_peer(world, "seed-cache", has_store=False)
        os.write(ready, peer.address.encode())
        os.close(ready)
        await asyncio.Event().wait()

    wire.run(main())


@contextlib.contextmanager
def seed_beside(world: World) -> Iterator[str]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            run_seed(world, write)
        finally:
            os._exit(1)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as stream:
            yield stream.read().decode()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def warm_here(world: World, wanted: str, *, has_store: bool, has_seed: bool) -> dict[str, int]:
    """A peer on the world's cache, and an order to it. Gives what it fetched."""

    async def main() -> Warmed:
        # The order is made from a repository that shares nothing with the host: its reads are not the host's effects.
        version = world.repository("driver").version(wanted)
        peer = await _open_peer(world, "cache", has_store=has_store)
        seeds = [(world.root / SEED).read_text()] if has_seed else []
        return await warm(version, [peer.address], seeds=seeds, deadline_s=30)

    progress = wire.run(main()).hosts[0].progress
    if progress.state != "whole":
        raise RuntimeError(f"the host ended as {progress.state}: {progress.problem}")
    return {"fetched_bytes": progress.peer_bytes + progress.store_bytes}


def head_of_a_chain(world: World) -> dict[str, int]:
    """The host that dies gives to one behind it, which waits for it to listen. Without one it gives to nobody."""

    async def main() -> int:
        version = world.repository("driver").version("m@1")
        peer = await _open_peer(world, "cache", has_store=True)
        job = peer.order(Plan(version=version, deadline_s=30))
        address = world.root / HOST
        address.with_name("new").write_text(peer.address)
        address.with_name("new").rename(address)
        await job.done
        if job.state != "whole":
            raise RuntimeError(job.problem)
        # Until whoever is behind has it all, so that there are deaths while it is served.
        for _ in range(500):
            if not (world.root / "behind-runs").exists() or (world.root / "behind-done").exists():
                break
            await asyncio.sleep(0.01)
        return job.progress().store_bytes

    return {"fetched_bytes": wire.run(main())}


def behind_it(world: World, contents: Any) -> str:
    """A host behind the one that dies, and behind that the seed: it has to end whole, whatever happens before it."""
    (world.root / "behind-runs").touch()

    async def main() -> str:
        version = world.repository("driver").version("m@1")
        for _ in range(1000):
            if (world.root / HOST).exists():
                break
            await asyncio.sleep(0.005)
        # It may have died before it said where it is: a port that nobody listens on is as good.
        first = (world.root / HOST).read_text() if (world.root / HOST).exists() else "127.0.0.1:9"
        peer = await _open_peer(world, "behind", has_store=False)
        upstreams = (first, (world.root / SEED).read_text())
        job = peer.order(Plan(version=version, upstreams=upstreams, position=1, deadline_s=30))
        await job.done
        return "" if job.state == "whole" else f"the host behind ended as {job.state}: {job.problem}"

    problem = wire.run(main())
    (world.root / "behind-done").touch()
    folders = list((world.root / "behind" / "versions" / "m").glob("v1-*"))
    if not problem and (len(folders) != 1 or tree(folders[0]) != contents[0]):
        return "the host behind holds wrong bytes"
    return problem


def missing_bytes(world: World, wanted: str) -> int:
    """Of chunks of a version that are not right on the host's disk now."""
    repository = world.repository("driver")
    manifest = repository.manifest(repository.version(wanted))
    cache = Cache(world.root / "cache")
    missing: set[int] = set()
    for file in manifest.files:
        if cache.find(manifest, file) is None:
            part = cache.part(manifest, file)
            missing |= {file.chunks[at] for at in part.missing()}
            part.close()
    return sum(manifest.chunks[index].length for index in missing)


def scenarios(models: Path) -> list[Scenario]:
    def nothing(world: World) -> None:
        pass

    def one(world: World) -> None:
        world.repository("seed").push(models / "0", "m")

    def two(world: World) -> None:
        one(world)
        world.repository("seed").push(models / "1", "m", parent="v1")
        aliases.set_alias(world.repository().store, "m", "prod", 1)

    def near(world: World) -> None:
        two(world)
        world.repository().pull("m@1")

    def old_folder(world: World) -> None:
        two(world)
        world.repository("seed").pull("m@1", to=world.root / "out")

    def garbage(world: World) -> None:
        two(world)
        repository = world.repository("seed")
        repository.push(models / "2", "m")
        versions.remove(repository.store, repository.version("m@3"))

    def seeded(world: World) -> None:
        two(world)
        world.repository("seed-cache").pull("m@1")
        world.repository("seed-cache").pull("m@2")

    def seeded_and_near(world: World) -> None:
        seeded(world)
        world.repository().pull("m@1")

    def pull_cache(world: World) -> dict[str, int]:
        found = world.repository().pull("m@2")
        return {"store_bytes": found.store_bytes}

    def pull_folder(world: World) -> dict[str, int]:
        found = world.repository().pull("m@2", to=world.root / "out")
        return {"store_bytes": found.store_bytes}

    def remove(world: World) -> None:
        repository = world.repository()
        # A death after the write: the version is gone, and asking again says so.
        with contextlib.suppress(UsageError):
            versions.remove(repository.store, repository.version("m@2"))

    return [
        Scenario("push", nothing, lambda w: w.repository().push(models / "0", "m") and None),
        Scenario("push a delta", one, lambda w: w.repository("seed").push(models / "1", "m", parent="v1") and None),
        Scenario("pull to the cache", two, pull_cache),
        Scenario("pull to a folder", two, pull_folder),
        Scenario("apply a delta here", near, pull_cache),
        Scenario("move a folder on", old_folder, pull_folder),
        Scenario("alias", two, lambda w: aliases.set_alias(w.repository().store, "m", "prod", 2) and None),
        Scenario(
            "warm from the store", seeded,
            lambda w: warm_here(w, "m@1", has_store=True, has_seed=False), is_exact=True,
        ),
        Scenario(
            "warm from a neighbour", seeded,
            lambda w: warm_here(w, "m@1", has_store=False, has_seed=True), is_exact=True,
        ),
        Scenario(
            "warm by differences", seeded_and_near,
            lambda w: warm_here(w, "m@2", has_store=True, has_seed=False), is_exact=True,
        ),
        Scenario("warm a host behind", seeded, head_of_a_chain, is_exact=True, beside=behind_it),
        Scenario("gc", garbage, lambda w: gc.collect(w.repository().store, grace_s=-5, lease_s=-5) and None),
        Scenario("rm", garbage, remove),
    ]  # fmt: skip


def check_readers(world: World, contents: list[dict[str, bytes]]) -> None:
    """No reader sees a wrong or a partial byte, whatever state the death left."""
    shutil.rmtree(world.root / "reader", ignore_errors=True)
    reader = world.repository("reader")
    for version in reader.versions("m"):
        found = tree(Path(reader.pull(version.label).folder))
        if found not in contents:
            raise AssertionError(f"{version.label} reads back as something that was never pushed")
        shutil.rmtree(world.root / "reader")
    prod = aliases.current(reader.store, "m", "prod")
    if prod is not None and prod.number not in (1, 2):
        raise AssertionError(f"prod points at v{prod.number}")
    out = world.root / "out"
    marker = pull.read_marker(out)
    if marker is not None and tree(out) != contents[marker.number - 1]:
        raise AssertionError(f"{out} says that it holds v{marker.number} and does not")
    for path in out.rglob("*"):
        # Whatever has a file's own name is that file whole, of the old version or of the new one.
        relative = path.relative_to(out).as_posix()
        is_named = path.is_file() and not path.name.startswith(".wirespeed")
        if is_named and path.read_bytes() not in [content.get(relative) for content in contents]:
            raise AssertionError(f"{path} is neither the old file nor the new one")
    known = {data for content in contents for data in content.values()}
    for path in (world.root / "cache").glob("files/*/*"):
        if path.suffix != ".chunks" and not path.name.startswith(".") and path.read_bytes() not in known:
            raise AssertionError(f"{path} in the cache is not whole")


def dies(effects: list[str]) -> Iterator[tuple[int, str]]:
    for index, name in enumerate(effects):
        yield index, "before"
        if name == "os.pwrite":
            yield index, "half"
    yield len(effects) - 1, "after"


def _run(scenario: Scenario, world: World, at: tuple[int, str] | None) -> tuple[int, Any]:
    def work() -> Any:
        injector = Injector(at)
        injector.install()
        result = scenario.act(world)
        return injector.effects, result

    return in_child(work)


@contextlib.contextmanager
def beside(scenario: Scenario, world: World, contents: Any) -> Iterator[list[str]]:
    """The process that lives through it, if the scenario has one. What it saw wrong is in the list at the end."""
    problem: list[str] = []
    if scenario.beside is None:
        yield problem
        return
    act = scenario.beside
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        said = "it failed"
        try:
            said = act(world, contents)
        except BaseException:
            traceback.print_exc()
        finally:
            os.write(write, said.encode()[:4000])
            os._exit(0)
    os.close(write)
    try:
        yield problem
    finally:
        signal.alarm(CHILD_TIMEOUT_S)
        with os.fdopen(read, "rb") as stream:
            said = stream.read().decode()
        os.waitpid(pid, 0)
        signal.alarm(0)
        if said:
            problem.append(said)


@contextlib.contextmanager
def fresh(root: Path, prepared: Path | None, scenario: Scenario, url: Callable[[], str] | None) -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        if url is not None:
            world = World(folder, url())
            in_child(lambda: scenario.prepare(world))
        else:
            assert prepared is not None
            shutil.rmtree(folder)
            shutil.copytree(prepared, folder, symlinks=True)
            world = World(folder, None)
        yield world
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_scenario(
    scenario: Scenario, root: Path, contents: list[dict[str, bytes]], *, start: int, every: int,
    url: Callable[[], str] | None,
) -> dict[str, Any]:  # fmt: skip
    prepared = None
    if url is None:
        prepared = Path(tempfile.mkdtemp(dir=root))
        in_child(lambda: scenario.prepare(World(prepared, None)))
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(fresh(root, prepared, scenario, url))
        if scenario.is_exact:
            (world.root / SEED).write_text(stack.enter_context(seed_beside(world)))
        _, (effects, whole) = _run(scenario, world, None)
    places = list(dies(effects))[start::every]
    num_died, failures, excess = 0, [], 0
    stream_bytes = NUM_WORKERS * max(1_400_000, 700_000)
    with contextlib.ExitStack() as stack:
        seed = None
        if scenario.is_exact and prepared is not None:
            seed = stack.enter_context(seed_beside(World(prepared, None)))
        for at in places:
            with fresh(root, prepared, scenario, url) as world:
                if scenario.is_exact:
                    own = seed if seed is not None else stack.enter_context(seed_beside(world))
                    (world.root / SEED).write_text(own)
                try:
                    with beside(scenario, world, contents) as problems:
                        died, _ = _run(scenario, world, at)
                    num_died += died == signal.SIGKILL
                    failures += [{"effect": effects[at[0]], "at": list(at), "problem": text} for text in problems]
                    in_child(lambda world=world: check_readers(world, contents))
                    allowed = None
                    if scenario.is_exact:
                        wanted = "m@2" if scenario.name == "warm by differences" else "m@1"
                        _, allowed = in_child(lambda world=world, wanted=wanted: missing_bytes(world, wanted))
                    elif isinstance(whole, dict):
                        allowed = whole["store_bytes"] + stream_bytes
                    _, (_, again) = _run(scenario, world, None)
                    in_child(lambda world=world: check_readers(world, contents))
                    excess += allowed is not None and sum(again.values()) > allowed
                except (AssertionError, RuntimeError) as fault:
                    failures.append({"effect": effects[at[0]], "at": list(at), "problem": str(fault)})
    return {
        "effects": len(effects),
        "every": every,
        "places": len(places),
        "died": num_died,
        "failures": failures,
        "excess": excess,
    }


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """A server started by another process: this one forks, and so must never start the store library's threads."""
    command = [sys.executable, "-m", "wirespeed", "repo", "dev-store", "--data", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = dict(process.stdout.readline().strip().removeprefix("export ").split("=", 1) for _ in range(5))
            os.environ.update(found)
            yield found["WIRESPEED_REPO"]
        finally:
            process.send_signal(signal.SIGINT)


def _share(text: str) -> tuple[int, int]:
    at, _, num = text.partition("/")
    if not (at.isdecimal() and num.isdecimal() and 1 <= int(at) <= int(num)):
        raise SystemExit(f"got --share {text!r}; expected K/N with K from 1 to N")
    return int(at) - 1, int(num)


def _joined(shares: dict[str, Any], name: str, found: dict[str, Any]) -> dict[str, Any]:
    """A scenario's outcome over the shares of its places that were run; shares of another division are dropped."""
    num = name.partition("/")[2]
    shares = {key: share for key, share in shares.items() if key.partition("/")[2] == num} | {name: found}
    return {
        "effects": found["effects"],
        "places": sum(share["places"] for share in shares.values()),
        "died": sum(share["died"] for share in shares.values()),
        "failures": [failure for share in shares.values() for failure in share["failures"]],
        "excess": sum(share["excess"] for share in shares.values()),
        "is_complete": len(shares) == int(num),
        "shares": shares,
        "created": found["created"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print one line per bar, and exit 1 if one is short")
    parser.add_argument("--quick", action="store_true", help="every eighth place only")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th place only")
    parser.add_argument(
        "--share", metavar="K/N", help="the K-th of N equal shares of the places; together they are all of them"
    )
    parser.add_argument("--only", metavar="WORDS", help="scenarios whose name holds this; results of others are kept")
    parser.add_argument("--s3", action="store_true", help="against SeaweedFS instead of a folder")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    name = "crash_points_s3" if options.s3 else "crash_points"
    held = RESULTS / f"{name}.json" if options.out is None else options.out
    if options.only is not None and not options.quick and held.exists():
        results = json.loads(held.read_text())["results"]
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wirespeed-crash-")))
        contents = [model(root / "models" / str(step), step) for step in range(3)]
        url = None
        if options.s3:
            prefix = stack.enter_context(s3_server(root / "s3"))
            counter = iter(range(10**6))
            url = lambda: f"{prefix}/{next(counter)}"  # noqa: E731
        for scenario in scenarios(root / "models"):
            if options.only is not None and options.only not in scenario.name:
                continue
            start, every = (
                (0, 8 if options.quick else options.every) if options.share is None else _share(options.share)
            )
            found = run_scenario(scenario, root, contents, start=start, every=every, url=url)
            found["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            held_shares = results.get(scenario.name, {}).get("shares", {})
            results[scenario.name] = found if options.share is None else _joined(held_shares, options.share, found)
            counts = f"{found['effects']} effects, {found['died']} deaths of {found['places']}"
            print(f"{scenario.name}: {counts}, {len(found['failures'])} failures", file=sys.stderr)
            for failure in found["failures"][:3]:
                print(f"  {failure}", file=sys.stderr)
    bars = [
        Bar("crash_points/deaths", sum(r["died"] for r in results.values()), 25 if options.quick else 200),
        Bar("crash_points/failures", sum(len(r["failures"]) for r in results.values()), 0, at_least=False),
        Bar("crash_points/read_again", sum(r["excess"] for r in results.values()), 0, at_least=False),
    ]
    return finish(name, bars, results, check=options.check, is_quick=options.quick, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
