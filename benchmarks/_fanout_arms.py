"""What fan-out is held against, each run on every host of a lab; started by fanout.py, never by hand.

    raw RECEIVER|SENDER   one plain TCP stream over one link: the goodput B
    gloo                  torch.distributed.broadcast from rank 0, in one tensor
    torrent               libtorrent, everyone connected to everyone, without DHT and trackers
    store FOLDER ADDRESS  SeaweedFS on the seed host, until stdin ends

Each prints one JSON line. Times begin when all are ready and end when the last has every byte, which are checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any


def raw(role: str, address: str, port: int, num_bytes: int) -> None:
    if role == "receive":
        listener = socket.create_server(("", port))
        print("ready", flush=True)
        stream, _ = listener.accept()
        buffer = bytearray(1 << 20)
        left = num_bytes
        with stream:
            while left and (got := stream.recv_into(buffer)):
                left -= got
            stream.sendall(b"." if not left else b"!")
        return
    payload = bytes(1 << 20)
    with socket.create_connection((address, port), timeout=60) as stream:
        begin = time.perf_counter()
        left = num_bytes
        while left:
            part = payload[: min(left, len(payload))]
            stream.sendall(part)
            left -= len(part)
        if stream.recv(1) != b".":
            raise RuntimeError("the receiver did not get every byte")
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)


def gloo(rank: int, size: int, address: str, port: int, num_bytes: int, rounds: int) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
    seconds = []
    for round_ in range(rounds):
        tensor = torch.full((num_bytes,), round_ + 1 if rank == 0 else 0, dtype=torch.uint8)
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(tensor, 0)
        mine = torch.tensor([time.perf_counter() - begin])
        if int(tensor[0]) != round_ + 1 or int(tensor[-1]) != round_ + 1:
            raise RuntimeError("a wrong byte")
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        seconds.append(float(mine[0]))
    if rank == 0:
        print(json.dumps({"seconds": seconds}), flush=True)
    dist.destroy_process_group()


def torrent(index: int, folder: Path, metafile: Path, addresses: list[str], port: int, go: Path) -> None:
    import libtorrent as lt

    session = lt.session(
        {
            "listen_interfaces": f"{addresses[index]}:{port}", "enable_dht": False, "enable_lsd": False,
            "enable_upnp": False, "enable_natpmp": False, "allow_multiple_connections_per_ip": True,
            "connections_limit": 200, "unchoke_slots_limit": 8, "alert_mask": 0, "out_enc_policy": 2,
            "in_enc_policy": 2, "request_queue_time": 1, "mixed_mode_algorithm": 0,
        }
    )  # fmt: skip
    parameters = lt.add_torrent_params()
    parameters.ti = lt.torrent_info(str(metafile))
    parameters.save_path = str(folder)
    if index == 0:
        parameters.flags |= lt.torrent_flags.seed_mode
    handle: Any = session.add_torrent(parameters)
    handle.unset_flags(lt.torrent_flags.auto_managed)
    handle.resume()
    while not session.is_listening():
        time.sleep(0.01)
    print("ready", flush=True)
    while not go.exists():
        time.sleep(0.005)
    begin = float(go.read_text())
    for other in range(len(addresses)):
        if other < index:
            handle.connect_peer((addresses[other], port))
    while not handle.status().is_seeding:
        time.sleep(0.01)
    print(json.dumps({"seconds": time.time() - begin}), flush=True)
    sys.stdin.read()  # goes on seeding until it is let go


def store(folder: Path, address: str) -> None:
    from wirespeed.repo.devstore import dev_store

    with dev_store(folder, host=address) as found:
        print(json.dumps({**found.environment, "WIRESPEED_REPO": found.url}), flush=True)
        sys.stdin.read()


def checked(folder: Path) -> str:
    digest = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    arm, *given = sys.argv[1:]
    if arm == "raw":
        raw(given[0], given[1], int(given[2]), int(given[3]))
    elif arm == "store":
        store(Path(given[0]), given[1])
    elif arm == "gloo":
        gloo(int(given[0]), int(given[1]), given[2], int(given[3]), int(given[4]), int(given[5]))
    else:
        torrent(int(given[0]), Path(given[1]), Path(given[2]), given[3].split(","), int(given[4]), Path(given[5]))
