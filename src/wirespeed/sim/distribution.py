"""Broadcast of an artifact from a store to many hosts, by every scheme that a repository may use.

Fluid closed forms with chunks: a scheme's time is the larger of what each link has to carry and the pipeline's fill.
Links are the store's uplink, hosts' NICs and racks' uplinks; each carries its bytes at its rate. Assumes hosts that
start together and write as fast as they receive (``disk_bytes_per_s`` says where they do not), and no failures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from wirespeed.errors import UsageError
from wirespeed.units import MIB

Scheme = Literal["store", "tree", "binary", "chain", "rack-chain", "binomial-pipeline", "mesh", "rack-share"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
CHUNK_BYTES = 16 * MIB
MESH_SHARE = 0.65
"""Of a NIC's rate that a random mesh of peers reaches (Kraken's and BitTorrent's published 50 to 75 %)."""

WORDS: dict[Scheme, str] = {
    "store": "every host downloads from the store",
    "tree": "store-and-forward binomial tree: whole copies double",
    "binary": "pipelined binary tree",
    "chain": "one pipelined chain, racks in order",
    "rack-chain": "rack heads in a chain, a chain in every rack",
    "binomial-pipeline": "hypercube of binomial trees (RDMC)",
    "mesh": "random mesh of peers (BitTorrent-like), blind to racks",
    "rack-share": "one copy per rack over the uplink, its parts spread over the rack's hosts, then exchanged inside",
}


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the artifact goes. ``rack_of`` names each host's rack; uplinks are per rack and way; others do not bind."""

    nic_bytes_per_s: tuple[float, ...]
    rack_of: tuple[str, ...]
    uplink_bytes_per_s: dict[str, float] = {}
    store_bytes_per_s: float
    latency_s: float = 0.0
    disk_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        rates = (
            *self.nic_bytes_per_s,
            *self.uplink_bytes_per_s.values(),
            self.store_bytes_per_s,
            self.disk_bytes_per_s,
        )
        if not self.nic_bytes_per_s or len(self.nic_bytes_per_s) != len(self.rack_of):
            raise UsageError(
                f"got {len(self.nic_bytes_per_s)} NICs and {len(self.rack_of)} racks", expected="one of each per host"
            )
        if not all(rate > 0 for rate in rates) or not 0 <= self.latency_s < math.inf:
            raise UsageError("got a rate that is not positive, or a latency below zero", expected="rates above zero")


class DistributionPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """When the last host has the whole artifact. ``uplink_bytes``: the most that one rack's uplink carries down."""

    scheme: Scheme
    total_s: float
    lower_bound_s: float
    binding: str
    store_bytes: float
    uplink_bytes: float
    parts_s: dict[str, float]


def predict_distribution(
    size_bytes: float, hosts: Hosts, scheme: Scheme, *, chunk_bytes: float = CHUNK_BYTES
) -> DistributionPrediction:
    """Predict one scheme. Raises UsageError for an unknown scheme or sizes that are not positive."""
    if not 0 < size_bytes < math.inf or not 0 < chunk_bytes < math.inf:
        raise UsageError(f"got {size_bytes:g} bytes in chunks of {chunk_bytes:g}", expected="both above zero")
    if scheme not in SCHEMES:
        raise UsageError(f"got scheme {scheme!r}", expected=f"one of {', '.join(SCHEMES)}")
    num_hosts = len(hosts.nic_bytes_per_s)
    racks = Counter(hosts.rack_of)
    chunk = min(chunk_bytes, size_bytes)
    rounds = math.ceil(math.log2(num_hosts + 1))
    # Copies that leave the store, that enter a rack over its uplink (the most), that leave a rack (the most), and that
    # one host sends; hops that a chunk passes before the last host has it.
    store, entering, leaving, sending, hops = _copies(scheme, num_hosts, racks, rounds)
    nic = min(hosts.nic_bytes_per_s)
    links = {
        "the store's uplink": store * size_bytes / hosts.store_bytes_per_s,
        "a host's NIC, receiving": size_bytes / nic,
        "a host's NIC, sending": sending * size_bytes / nic,
        "a host's disk": size_bytes / hosts.disk_bytes_per_s,
    }
    for rack, rate in hosts.uplink_bytes_per_s.items():
        share = racks[rack] / max(racks.values()) if scheme in ("store", "mesh") else 1.0
        copies = max(1.0, entering * share, leaving * share)
        links[f"uplink of rack {rack}"] = copies * size_bytes / rate
    if scheme == "mesh":
        links = {name: time_s / (MESH_SHARE if "NIC" in name else 1) for name, time_s in links.items()}
    binding = max(links, key=lambda name: links[name])
    fill_s = hops * (chunk / min(nic, hosts.store_bytes_per_s) + hosts.latency_s)
    if scheme == "tree":
        # Whole copies, one round after another; the first comes from the store.
        total_s = (
            size_bytes / min(nic, hosts.store_bytes_per_s, hosts.disk_bytes_per_s) * rounds + rounds * hosts.latency_s
        )
        total_s = max(total_s, links[binding])
        parts_s = {"rounds of whole copies": total_s}
    else:
        total_s = links[binding] + fill_s
        parts_s = {binding: links[binding], "filling the pipeline": fill_s}
    return DistributionPrediction(
        scheme=scheme,
        total_s=total_s,
        lower_bound_s=lower_bound_s(size_bytes, hosts),
        binding=binding,
        store_bytes=store * size_bytes,
        uplink_bytes=entering * size_bytes if hosts.uplink_bytes_per_s else 0.0,
        parts_s=parts_s,
    )


def predict_all(
    size_bytes: float, hosts: Hosts, *, chunk_bytes: float = CHUNK_BYTES, schemes: Sequence[Scheme] = SCHEMES
) -> tuple[DistributionPrediction, ...]:
    """Every scheme, fastest first; equal ones by fewer bytes over uplinks."""
    found = [predict_distribution(size_bytes, hosts, scheme, chunk_bytes=chunk_bytes) for scheme in schemes]
    return tuple(sorted(found, key=lambda one: (float(f"{one.total_s:.3g}"), one.uplink_bytes, one.store_bytes)))


def lower_bound_s(size_bytes: float, hosts: Hosts) -> float:
    """No scheme is faster (Mundinger et al. 2008).

    One copy leaves the store, enters the slowest host and disk and passes the slowest uplink; all copies leave
    everything that can send.
    """
    nics = hosts.nic_bytes_per_s
    bounds = [
        size_bytes / hosts.store_bytes_per_s,
        size_bytes / min(nics),
        size_bytes / hosts.disk_bytes_per_s,
        len(nics) * size_bytes / (hosts.store_bytes_per_s + sum(nics)),
    ]
    bounds += [size_bytes / rate for rate in hosts.uplink_bytes_per_s.values()]
    return max(bounds)


def _copies(  # noqa: PLR0911 - one row per scheme
    scheme: Scheme, num_hosts: int, racks: Counter[str], rounds: int
) -> tuple[float, float, float, float, float]:
    """Copies ``(out of the store, into a rack, out of a rack, sent by a host)`` and the hops that fill the pipeline."""
    largest = max(racks.values())
    others = (num_hosts - largest) / max(1, num_hosts)
    match scheme:
        case "store":
            return num_hosts, largest, 0.0, 0.0, 1.0
        case "tree":
            # The first host serves one host per round after its own.
            return 1.0, 1.0, float(min(rounds, len(racks)) if len(racks) > 1 else 0), max(0.0, rounds - 1.0), 0.0
        case "binary":
            return 1.0, 1.0, 2.0 if len(racks) > 1 else 0.0, min(2.0, num_hosts - 1.0), float(rounds)
        case "chain":
            return 1.0, 1.0, 1.0, min(1.0, num_hosts - 1.0), float(num_hosts)
        case "rack-chain":
            # A head would send twice, to the next head and into its rack; so the last host of the previous rack
            # feeds the next head, and everyone sends once.
            return 1.0, 1.0, 1.0, min(1.0, num_hosts - 1.0), float(len(racks) + largest)
        case "binomial-pipeline":
            crossing = 0.0 if len(racks) == 1 else min(1.0, math.log2(len(racks)) / max(1, rounds)) * largest * others
            return 1.0, max(1.0, crossing), max(1.0, crossing), 1.0, float(rounds)
        case "mesh":
            return 1.0, max(1.0, largest * others), largest * others, 1.0, float(rounds)
        case "rack-share":
            # Each rack takes one copy from the store; its hosts pass their parts around inside the rack.
            return float(len(racks)), 1.0, 0.0, (largest - 1) / largest, 2.0
