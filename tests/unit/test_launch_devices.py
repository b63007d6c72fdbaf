"""Recorded trees of sysfs: a server with two sockets, four GPUs and RDMA devices, and a small virtual machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from wirespeed.errors import DataError, UsageError
from wirespeed.launch.binding import Binding, TrafficClass, bind
from wirespeed.launch.devices import FAR, SAME_BRIDGE, SAME_NODE, SAME_SWITCH, distance, parse_cpulist, read_devices
from wirespeed.system import System


def put(root: Path, name: str, text: str) -> None:
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def pci(root: Path, path: str, *, numa: int, vendor: str, kind: str) -> str:
    """A device at ``path`` below /sys/devices, with sysfs's link to it. Gives its address."""
    address = path.rsplit("/", 1)[1]
    for name, text in (("numa_node", str(numa)), ("vendor", vendor), ("class", kind)):
        put(root, f"/sys/devices/{path}/{name}", text)
    link = root / "sys/bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / "sys/devices" / path)
    return address


def hca(
    root: Path, name: str, path: str, *, numa: int, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)"
) -> None:
    pci(root, path, numa=numa, vendor="0x15b3", kind="0x020700")
    put(root, f"/sys/class/infiniband/{name}/ports/1/state", state)
    put(root, f"/sys/class/infiniband/{name}/ports/1/rate", rate)
    (root / f"sys/class/infiniband/{name}/device").symlink_to(root / "sys/devices" / path)


def nic(root: Path, name: str, path: str, *, numa: int, state: str = "up", speed: int = 25000) -> None:
    pci(root, path, numa=numa, vendor="0x8086", kind="0x020000")
    put(root, f"/sys/class/net/{name}/operstate", state)
    put(root, f"/sys/class/net/{name}/speed", str(speed))
    (root / f"sys/class/net/{name}/device").symlink_to(root / "sys/devices" / path)


@pytest.fixture
def server(tmp_path) -> Path:
    """Two nodes of 8 cores with two threads each (cpu n and n + 16); GPUs behind one switch per pair with their HCA."""
    for node in (0, 1):
        cores = f"{8 * node}-{8 * node + 7},{16 + 8 * node}-{16 + 8 * node + 7}"
        put(tmp_path, f"/sys/devices/system/node/node{node}/cpulist", cores)
    put(tmp_path, "/sys/devices/system/node/online", "0-1")
    for cpu in range(32):
        put(tmp_path, f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 16},{cpu % 16 + 16}")
    for node, bridge in ((0, "pci0000:10"), (1, "pci0000:90")):
        bus = "1" if node == 0 else "9"
        switch = f"{bridge}/0000:{bus}0:01.0/0000:{bus}1:00.0"
        pci(tmp_path, f"{switch}/0000:{bus}2:00.0/0000:{bus}3:00.0", numa=node, vendor="0x10de", kind="0x030200")
        pci(tmp_path, f"{switch}/0000:{bus}2:01.0/0000:{bus}4:00.0", numa=node, vendor="0x10de", kind="0x030200")
        hca(tmp_path, f"mlx5_{node}", f"{switch}/0000:{bus}2:02.0/0000:{bus}5:00.0", numa=node)
    hca(tmp_path, "mlx5_2", "pci0000:10/0000:10:02.0/0000:16:00.0", numa=0, rate="25 Gb/sec (1X EDR)")
    hca(tmp_path, "mlx5_3", "pci0000:90/0000:90:02.0/0000:96:00.0", numa=1, state="1: DOWN")
    nic(tmp_path, "eno1", "pci0000:10/0000:10:03.0/0000:17:00.0", numa=0)
    nic(tmp_path, "eno2", "pci0000:10/0000:10:03.0/0000:17:00.1", numa=0, state="down", speed=-1)
    put(tmp_path, "/sys/class/net/lo/operstate", "unknown")
    # A desktop's display controller is no accelerator.
    pci(tmp_path, "pci0000:00/0000:00:02.0", numa=0, vendor="0x8086", kind="0x030000")
    return tmp_path


def place(root: Path, rank: int, size: int = 4, **options) -> Binding:
    options.setdefault("allowed_cpus", range(32))
    options.setdefault("environ", {})
    return bind(read_devices(System(root)), local_rank=rank, local_size=size, **options)


def test_devices_are_read_with_their_place_in_the_pci_tree(server):
    devices = read_devices(System(server))
    assert [gpu.name for gpu in devices.gpus] == ["0000:13:00.0", "0000:14:00.0", "0000:93:00.0", "0000:94:00.0"]
    assert [gpu.numa for gpu in devices.gpus] == [0, 0, 1, 1]
    assert devices.gpus[0].path == ("pci0000:10", "0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0")
    assert {h.name: (h.is_up, h.rate_bit_per_s) for h in devices.hcas} == {
        "mlx5_0": (True, 400e9), "mlx5_1": (True, 400e9), "mlx5_2": (True, 25e9), "mlx5_3": (False, 400e9),
    }  # fmt: skip
    assert {n.name: n.is_up for n in devices.nics} == {"eno1": True, "eno2": False}
    assert devices.cores[:2] == ((0, 16), (1, 17))


def test_distance_follows_the_tree(server):
    devices = read_devices(System(server))
    gpu = devices.gpus[0]
    by_name = {d.name: d for d in (*devices.hcas, *devices.nics)}
    assert distance(gpu, devices.gpus[1]) == SAME_SWITCH
    assert distance(gpu, by_name["mlx5_0"]) == SAME_SWITCH
    assert distance(gpu, by_name["mlx5_2"]) == SAME_BRIDGE
    assert distance(gpu, by_name["mlx5_1"]) == FAR
    assert distance(by_name["eno1"], read_devices(System(server)).gpus[1]) == SAME_BRIDGE
    assert SAME_BRIDGE < SAME_NODE < FAR


def test_each_rank_gets_whole_cores_of_its_devices_node(server):
    placed = [place(server, rank) for rank in range(4)]
    assert [p.device for p in placed] == ["0000:13:00.0", "0000:14:00.0", "0000:93:00.0", "0000:94:00.0"]
    assert placed[0].cpus == (0, 1, 2, 3, 16, 17, 18, 19)
    assert placed[1].cpus == (4, 5, 6, 7, 20, 21, 22, 23)
    assert placed[2].cpus == (8, 9, 10, 11, 24, 25, 26, 27)
    assert not set(placed[2].cpus) & set(placed[3].cpus or ())
    assert [p.nearest_hca for p in placed] == ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]
    assert placed[0].environment["OMP_NUM_THREADS"] == "4"
    assert not placed[0].uses_batch  # NCCL does the work


def test_every_rank_of_a_host_is_told_the_same_rdma_devices(server):
    told = {place(server, rank).environment["NCCL_IB_HCA"] for rank in range(4)}
    assert told == {"=mlx5_0,mlx5_1"}
    assert any("mlx5_2: far below the 400 Gbit/s" in reason for reason in place(server, 0).reasons)


def test_cores_that_a_scheduler_has_set_apart_are_not_taken(server):
    assert place(server, 0, allowed_cpus=[2, 3, 18]).cpus == (2, 18)
    assert place(server, 1, allowed_cpus=[2, 3, 18]).cpus == (3,)
    outside = place(server, 0, allowed_cpus=[8, 9])
    assert outside.cpus is None
    assert "none of the cores of NUMA node 0" in " ".join(outside.reasons)


def test_a_visible_device_order_is_followed(server):
    assert place(server, 0, environ={"CUDA_VISIBLE_DEVICES": "3,1"}).device == "0000:94:00.0"
    # One GPU per task, as Slurm's --gpu-bind gives it.
    assert place(server, 2, environ={"CUDA_VISIBLE_DEVICES": "1"}).device == "0000:14:00.0"
    assert place(server, 0, environ={"CUDA_VISIBLE_DEVICES": "GPU-1234"}).device is None


def test_what_the_user_has_set_stays(server):
    found = place(server, 0, environ={"NCCL_IB_HCA": "mlx5_2", "OMP_NUM_THREADS": "1"})
    assert "NCCL_IB_HCA" not in found.environment
    assert "OMP_NUM_THREADS" not in found.environment
    assert "NCCL_IB_HCA=mlx5_2 stays: it is set already" in found.reasons


def test_traffic_classes_become_nccls_settings(server):
    found = place(server, 0, traffic=TrafficClass(dscp=26, service_level=3))
    assert (found.environment["NCCL_IB_TC"], found.environment["NCCL_IB_SL"]) == ("104", "3")
    with pytest.raises(UsageError, match="0 to 63"):
        TrafficClass(dscp=64)
    with pytest.raises(UsageError, match="0 to 15"):
        TrafficClass(service_level=16)


def test_the_only_interface_that_is_up_carries_tcp_and_several_are_the_users_choice(server):
    assert place(server, 0).nics == ("eno1",)
    put(server, "/sys/class/net/eno2/operstate", "up")
    several = place(server, 0)
    assert several.nics == ()
    assert "GLOO_SOCKET_IFNAME" not in several.environment
    assert place(server, 0, nic="eno2").environment["GLOO_SOCKET_IFNAME"] == "eno2"
    with pytest.raises(UsageError, match="eno9"):
        place(server, 0, nic="eno9")


def test_a_host_without_gpus_spreads_ranks_over_its_nodes_and_takes_the_batch_class(tmp_path, server):
    import shutil

    for address in ("0000:13:00.0", "0000:14:00.0", "0000:93:00.0", "0000:94:00.0"):
        (server / "sys/bus/pci/devices" / address).unlink()
    shutil.rmtree(server / "sys/class/infiniband")
    placed = [place(server, rank, 2) for rank in range(2)]
    assert [p.numa for p in placed] == [0, 1]
    assert placed[1].cpus == (*range(8, 16), *range(24, 32))
    assert placed[0].uses_batch
    assert not place(server, 0, 2, batch=False).uses_batch
    assert "CUDA_DEVICE_ORDER" not in placed[0].environment


def test_more_ranks_than_cores_are_not_bound(tmp_path):
    put(tmp_path, "/sys/devices/system/node/node0/cpulist", "0-1")
    for cpu in range(2):
        put(tmp_path, f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", str(cpu))
    found = place(tmp_path, 3, 4, allowed_cpus=[0, 1])
    assert found.cpus is None
    assert "not bound: 4 ranks share 2 cores" in found.reasons


def test_a_host_that_tells_nothing_is_left_alone(tmp_path):
    found = place(tmp_path, 0, 1, allowed_cpus=[0, 1, 2])
    assert (found.device, found.numa, found.hcas, found.nics) == (None, None, (), ())
    assert found.cpus == (0, 1, 2)


def test_cpu_lists_of_the_kernel_are_read():
    assert parse_cpulist("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11)
    assert parse_cpulist("") == ()
    with pytest.raises(DataError, match="0-3,8"):
        parse_cpulist("0-")


def test_a_rank_outside_its_host_is_refused(server):
    with pytest.raises(UsageError, match="local rank 4 of 4"):
        place(server, 4)
