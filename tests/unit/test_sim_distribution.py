"""Broadcast schemes against closed forms of the literature."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wirespeed.errors import UsageError
from wirespeed.sim.distribution import SCHEMES, Hosts, predict_all, predict_distribution

# 140 GB to 64 hosts of 100 Gbit/s in 8 racks with 200 Gbit/s uplinks; a store of 20 GB/s; 64 MB chunks.
RACKS = Hosts(
    nic_bytes_per_s=(12.5e9,) * 64,
    rack_of=tuple(f"r{host // 8}" for host in range(64)),
    uplink_bytes_per_s={f"r{rack}": 25e9 for rack in range(8)},
    store_bytes_per_s=20e9,
)
SIZE = 140e9


@pytest.mark.parametrize(
    ("scheme", "seconds"),
    {
        "store": 64 * SIZE / 20e9,  # every copy leaves the store
        "tree": math.ceil(math.log2(65)) * SIZE / 12.5e9,  # rounds of whole copies
        "chain": (SIZE / 64e6 + 64) * 64e6 / 12.5e9,  # (M + N) S / (M B)
        "binary": 2 * SIZE / 12.5e9 + 7 * 64e6 / 12.5e9,  # every host sends two copies
        "rack-chain": (SIZE / 64e6 + 16) * 64e6 / 12.5e9,
    }.items(),
)
def test_schemes_take_their_closed_forms(scheme, seconds):
    assert predict_distribution(SIZE, RACKS, scheme, chunk_bytes=64e6).total_s == pytest.approx(seconds, rel=0.002)


def test_a_mesh_that_is_blind_to_racks_is_bound_by_their_uplinks():
    found = predict_distribution(SIZE, RACKS, "mesh", chunk_bytes=64e6)
    # 8 hosts, 7 of 8 sources elsewhere: 7 copies over an uplink of 25 GB/s.
    assert found.uplink_bytes == pytest.approx(7 * SIZE)
    assert found.total_s == pytest.approx(7 * SIZE / 25e9, rel=0.01)
    assert found.binding.startswith("uplink of rack")


def test_one_copy_per_rack_over_the_uplink_is_the_fastest():
    best = predict_all(SIZE, RACKS, chunk_bytes=64e6)[0]
    assert best.scheme == "rack-chain"
    assert best.uplink_bytes == SIZE
    assert best.total_s == pytest.approx(best.lower_bound_s, rel=0.01)


def test_a_slow_disk_binds_every_scheme_that_streams():
    slow = Hosts(nic_bytes_per_s=(12.5e9,) * 4, rack_of=("r0",) * 4, store_bytes_per_s=12.5e9, disk_bytes_per_s=1e9)
    assert predict_distribution(10e9, slow, "chain").binding == "a host's disk"


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.floats(1e8, 1e11),
    st.floats(1e8, 1e11),
    st.floats(1e8, 1e11),
    st.floats(1e6, 1e12),
)
def test_no_scheme_beats_the_bound(num_hosts, num_racks, nic, uplink, store, size):
    hosts = Hosts(
        nic_bytes_per_s=(nic,) * num_hosts,
        rack_of=tuple(f"r{host % num_racks}" for host in range(num_hosts)),
        uplink_bytes_per_s={f"r{rack}": uplink for rack in range(min(num_racks, num_hosts))},
        store_bytes_per_s=store,
    )
    for found in predict_all(size, hosts):
        assert found.total_s >= found.lower_bound_s * (1 - 1e-9)
        assert found.store_bytes >= size


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_chain_of_one_host_is_a_download(scheme):
    one = Hosts(nic_bytes_per_s=(1e9,), rack_of=("r0",), store_bytes_per_s=1e9)
    assert predict_distribution(1e9, one, scheme, chunk_bytes=1e6).total_s == pytest.approx(
        1.0, rel=0.6 if scheme == "mesh" else 0.01
    )


def test_wrong_sizes_rates_and_schemes_are_refused():
    with pytest.raises(UsageError, match="0 bytes"):
        predict_distribution(0, RACKS, "chain")
    with pytest.raises(UsageError, match="scheme 'owl'"):
        predict_distribution(1, RACKS, "owl")
    with pytest.raises(UsageError, match="rate that is not positive"):
        Hosts(nic_bytes_per_s=(0.0,), rack_of=("r0",), store_bytes_per_s=1)
