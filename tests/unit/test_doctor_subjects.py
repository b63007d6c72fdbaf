"""Single faults by subject: each is one change to a healthy host, and gives its finding."""

from __future__ import annotations

import socket
import struct

import pytest

from doctor_trees import ROUTES, Tree, cloud_vm, config_space, h100, roce, system_of
from wirespeed.doctor.check import Finding, Unknown
from wirespeed.doctor.counters import Delta
from wirespeed.doctor.examine import CHECKS, Question, examine
from wirespeed.doctor.inventory import HostView
from wirespeed.doctor.launch import matching
from wirespeed.doctor.pci import Link, parse_config
from wirespeed.doctor.recorded import RecordedSystem
from wirespeed.doctor.roce import roce_mtu
from wirespeed.doctor.sockets import parse_answer


def found(tree: Tree, question: Question | None = None) -> dict[str, Finding]:
    return {f.id: f for c in examine(system_of(tree), question).checks for f in c.findings}


def unknown(tree: Tree) -> list[Unknown]:
    return [u for c in examine(system_of(tree)).checks for u in c.unknowns]


def ethernet(**change: object) -> Tree:
    """A host of 64 processors with one 100 Gbit/s interface and no GPU."""
    tree = Tree("n1")
    bdf = tree.pci(
        "pci0000:20/0000:20:01.0/0000:21:00.0",
        kind=0x0200,
        vendor=0x8086,
        device=0x1592,
        speed="16.0 GT/s PCIe",
        max_speed="16.0 GT/s PCIe",
    )
    tree.nic("ens1", bdf, driver="ice", speed=100000, **change)  # type: ignore[arg-type]
    tree.say("ethtool", "-m", "ens1", stdout="\tModule temperature : 40.00 degrees C / 104.00 degrees F\n")
    tree.say("nft", "list", "ruleset")
    return tree


def sysctl(tree: Tree, key: str, value: str) -> Tree:
    tree.files[f"/proc/sys/{key.replace('.', '/')}"] = value
    return tree


def test_the_plain_ethernet_host_is_healthy():
    assert found(ethernet()) == {}
    assert unknown(ethernet()) == []


@pytest.mark.parametrize(
    ("key", "value", "id_", "severity"),
    [
        ("net.ipv4.tcp_window_scaling", "0", "tcp.no-window-scaling", "critical"),
        ("net.ipv4.tcp_sack", "0", "tcp.no-sack", "warning"),
        ("net.ipv4.tcp_timestamps", "0", "tcp.no-timestamps", "warning"),
        ("net.ipv4.tcp_moderate_rcvbuf", "0", "tcp.no-autotuning", "warning"),
        ("net.ipv4.tcp_tw_recycle", "1", "tcp.tw-recycle", "critical"),
        ("net.ipv4.tcp_tw_reuse", "1", "tcp.tw-reuse", "notice"),
        ("net.ipv4.tcp_fin_timeout", "10", "tcp.fin-timeout", "notice"),
        ("net.ipv4.tcp_max_tw_buckets", "1000", "tcp.tw-buckets", "notice"),
        ("net.ipv4.tcp_low_latency", "1", "tcp.low-latency", "notice"),
        ("net.ipv4.tcp_fack", "1", "tcp.fack", "notice"),
        ("net.ipv4.tcp_mem", "1000 4000000000 8000000000", "tcp.mem-in-bytes", "notice"),
        ("net.core.rmem_max", "268435456", "tcp.core-maximum", "notice"),
        ("net.core.somaxconn", "128", "tcp.listen-queue", "warning"),
        ("net.ipv4.tcp_notsent_lowat", "16384", "tcp.notsent-lowat", "warning"),
        ("net.ipv4.ip_local_port_range", "50000 60000", "tcp.port-range", "warning"),
        ("net.ipv4.ip_local_port_range", "1024 65535", "tcp.rendezvous-port", "warning"),
    ],
)
def test_a_kernel_parameter_that_hurts_or_does_nothing_is_found(key: str, value: str, id_: str, severity: str):
    held = found(sysctl(ethernet(), key, value))
    assert {f.id: f.severity for f in held.values()} == {id_: severity}
    assert held[id_].path in ("tcp", "any")


def test_a_reserved_rendezvous_port_is_fine():
    tree = sysctl(ethernet(), "net.ipv4.ip_local_port_range", "1024 65535")
    assert found(sysctl(tree, "net.ipv4.ip_local_reserved_ports", "29000-29600")) == {}


def test_where_rdma_is_active_tcp_settings_are_notices_only():
    tree = sysctl(sysctl(h100(), "net.ipv4.tcp_sack", "0"), "net.ipv4.tcp_slow_start_after_idle", "1")
    assert {f.id: f.severity for f in found(tree).values()} == {
        "tcp.no-sack": "notice",
        "tcp.slow-start-after-idle": "notice",
    }


def test_buffers_are_held_against_rate_and_round_trip():
    tree = sysctl(ethernet(), "net.ipv4.tcp_rmem", "4096 131072 6291456")
    assert found(tree, Question(rtt_s=100e-6)) == {}  # 2 x 100 Gbit/s x 0.1 ms = 2.5 MB
    finding = found(tree, Question(rtt_s=1e-3))["tcp.buffer-below-bdp"]
    # 2 x 100e9/8 x 1e-3 = 25,000,000: the next power of two is 33,554,432; without it one connection gets half the
    # buffer per round trip: 6,291,456 x 8 / 2 / 1e-3 = 25.2 Gbit/s
    assert finding.remedy is not None
    assert finding.remedy.settings[0].value == "4096 131072 33554432"
    assert finding.limit_bit_per_s == pytest.approx(25.165824e9)
    assert finding.severity == "notice"  # no connection is shown to wait for it


def test_the_price_of_slow_start_decides_its_severity():
    tree = sysctl(ethernet(), "net.ipv4.tcp_slow_start_after_idle", "1")
    # 100 Gbit/s x 1 ms = 12.5 MB = 856 times the initial 14,600 bytes: 10 doublings of 1 ms each
    finding = found(tree, Question(rtt_s=1e-3))["tcp.slow-start-after-idle"]
    assert ("10 ms" in finding.title, finding.severity) == (True, "warning")
    # at 20 us: 250 kB = 17 times: 5 doublings, 0.1 ms
    assert found(tree, Question(rtt_s=20e-6))["tcp.slow-start-after-idle"].severity == "notice"


def test_a_virtual_machine_is_judged_once_its_rate_is_said():
    assert "tcp.slow-start-after-idle" in found(cloud_vm(), Question(rate_bit_per_s=32e9, rtt_s=1e-3))


def test_a_sysctl_file_that_was_not_applied_and_files_that_disagree_are_found():
    tree = ethernet()
    tree.files["/etc/sysctl.d/10-a.conf"] = "net.core.somaxconn = 8192\n# comment\nvm.swappiness = 1\n"
    tree.files["/usr/lib/sysctl.d/50-b.conf"] = "net.core.somaxconn=16384\n"
    held = found(tree)
    assert set(held) == {"host.sysctl-files-disagree", "host.sysctl-not-applied"}
    assert held["host.sysctl-not-applied"].evidence[1].where == "/usr/lib/sysctl.d/50-b.conf"


@pytest.mark.parametrize(
    ("change", "id_"),
    [
        ({"queues": 1}, "nic.one-queue"),
        ({"gro": "off"}, "nic.offload-off"),
        ({"cpus": "7"}, "nic.interrupts-on-one-cpu"),
        ({"cpus": "40-50"}, "nic.interrupts-on-far-node"),
        ({"most": 200000}, "nic.below-own-speed"),
    ],
)
def test_a_fast_interface_that_is_held_back_is_found(change: dict[str, object], id_: str):
    assert set(found(ethernet(**change))) == {id_}


def test_no_carrier_and_half_duplex_are_found():
    tree = ethernet()
    tree.files["/sys/class/net/ens1/carrier"] = "0"
    assert set(found(tree)) == {"nic.no-carrier"}
    tree.files["/sys/class/net/ens1/carrier"] = "1"
    tree.files["/sys/class/net/ens1/duplex"] = "half"
    assert found(tree)["nic.half-duplex"].severity == "critical"


def test_twins_of_other_speed_or_mtu_are_found():
    tree = ethernet()
    bdf = tree.pci(
        "pci0000:20/0000:20:02.0/0000:22:00.0",
        kind=0x0200,
        vendor=0x8086,
        device=0x1592,
        speed="16.0 GT/s PCIe",
        max_speed="16.0 GT/s PCIe",
    )
    tree.nic("ens2", bdf, driver="ice", speed=25000)
    held = found(tree)
    assert (set(held), held["nic.slower-than-twin"].subject) == ({"nic.slower-than-twin"}, "ens2")
    tree.nic("ens2", bdf, driver="ice", speed=100000, mtu=1500)
    assert set(found(tree)) == {"nic.mtu-differs"}


def test_a_container_without_ethtool_says_so_and_finds_nothing():
    tree = ethernet()
    tree.commands = {name: said for name, said in tree.commands.items() if not name.startswith("ethtool")}
    assert found(tree) == {}
    assert {u.why for u in unknown(tree)} == {
        "program 'ethtool' is not installed",
        "neither mlxlink nor `ethtool -m` answers",
    }


def test_a_slot_slower_than_the_port_is_found():
    tree = ethernet()
    tree.pci(
        "pci0000:20/0000:20:01.0/0000:21:00.0",
        kind=0x0200,
        vendor=0x8086,
        device=0x1592,
        speed="8.0 GT/s PCIe",
        max_speed="8.0 GT/s PCIe",
        width=8,
        max_width=8,
    )
    finding = found(tree)["pci.slot-too-slow"]
    assert finding.limit_bit_per_s == pytest.approx(8e9 * 8 * 128 / 130)


def test_a_narrow_bridge_above_a_card_is_found():
    tree = h100()
    for name in ("current_link_width",):
        tree.files[f"/sys/bus/pci/devices/0000:31:00.0/{name}"] = "8"
    finding = found(tree)["pci.width-reduced"]
    assert "bridge 0000:31:00.0 above mlx5_2" in finding.title


def test_payload_of_a_link_counts_its_coding():
    assert Link(gt_per_s=8.0, width=16).bit_per_s == pytest.approx(126.03e9, rel=1e-3)
    assert Link(gt_per_s=2.5, width=4).bit_per_s == 8e9


def test_small_read_requests_of_a_connectx_are_found_as_root_only():
    tree = h100()
    tree.binaries["/sys/bus/pci/devices/0000:14:00.0/config"] = config_space(read_request=512)
    assert found(tree)["pci.read-request"].evidence[0].seen == "MaxReadReq 512"
    tree.files["/proc/self/status"] = "Uid:\t1000\t1000\t0\t0\n"
    assert found(tree) == {}
    assert any("read requests" in u.what and "root" in u.hint for u in unknown(tree))


def test_configuration_space_that_is_cut_or_loops_ends_the_walk():
    assert parse_config(b"") == parse_config(bytes(64)) == parse_config(b"\xff" * 256)
    loop = bytearray(256)
    loop[0x34], loop[0x41] = 0x40, 0x40
    assert parse_config(bytes(loop)).max_read_request_bytes is None
    full = parse_config(bytes.fromhex(config_space(read_request=1024, is_validating=True)))
    assert (full.max_read_request_bytes, full.acs_source_validation) == (1024, True)


def test_translation_on_bare_metal_with_gpus_is_found_and_in_a_virtual_machine_not():
    tree = h100()
    tree.files["/sys/kernel/iommu_groups/0/type"] = "DMA-FQ"
    tree.files["/proc/cmdline"] = "ro quiet"
    assert set(found(tree)) == {"pci.iommu-translated"}
    tree.files["/proc/cpuinfo"] = "flags\t: fpu hypervisor lm\n"
    assert found(tree) == {}


@pytest.mark.parametrize(
    ("mtu", "payload"),
    [(1500, 1024), (4096, 2048), (4192, 4096), (4191, 2048), (4200, 4096), (9000, 4096), (300, None), (352, 256)],
)
def test_roce_payload_follows_the_kernels_arithmetic(mtu: int, payload: int | None):
    assert roce_mtu(mtu) == payload


@pytest.mark.parametrize(
    ("state", "phys", "id_"),
    [
        ("2: INIT", "5: LinkUp", "rdma.no-subnet-manager"),
        ("1: DOWN", "2: Polling", "rdma.port-down"),
        ("1: DOWN", "3: Disabled", "gpu.nic-far"),
    ],
)
def test_ports_that_are_not_active(state: str, phys: str, id_: str):
    tree = h100()
    tree.files["/sys/class/infiniband/mlx5_2/ports/1/state"] = state
    tree.files["/sys/class/infiniband/mlx5_2/ports/1/phys_state"] = phys
    ids = set(found(tree))
    assert ids == {id_}


def test_a_port_slower_than_its_twins_is_found():
    tree = h100()
    tree.files["/sys/class/infiniband/mlx5_6/ports/1/rate"] = "200 Gb/sec (4X HDR)"
    held = found(tree)["rdma.slower-than-twin"]
    assert (held.subject, held.limit_bit_per_s, held.full_bit_per_s) == ("mlx5_6:1", 200e9, 400e9)


def test_an_efa_port_is_unknown_since_its_state_is_fixed_text():
    tree = Tree("p5-1")
    bdf = tree.pci("pci0000:50/0000:50:00.0", kind=0x0200, vendor=0x1D0F, device=0xEFA2)
    tree.rdma("rdmap80s0", bdf, state="1: DOWN", phys="3: Disabled", rate="100 Gb/sec (4X EDR)", layer="Unspecified")
    assert any(u.what == "link of rdmap80s0:1" for u in unknown(tree))
    assert "rdma.port-down" not in found(tree)


def test_roce_without_a_routable_address_and_without_priorities():
    tree = roce()
    for index in range(2):
        tree.files[f"/sys/class/infiniband/mlx5_{index}/ports/1/gid_attrs/types/1"] = "IB/RoCE v1"
        tree.say(
            "dcb",
            "-j",
            "pfc",
            "show",
            "dev",
            f"ens{index + 1}np0",
            stdout='{"prio-pfc":[false,false,false,false,false,false,false,false]}',
        )
        tree.say("lldptool", "-t", "-n", "-i", f"ens{index + 1}np0", "-V", "PFC", stdout="\tPFC enabled: none\n")
    held = {(f.id, f.severity) for f in found(tree).values()}
    assert held == {("rdma.no-routable-gid", "critical"), ("rdma.roce-lossy", "warning")}


def test_priorities_are_unknown_without_a_tool():
    tree = roce()
    tree.commands = {name: said for name, said in tree.commands.items() if not name.startswith(("dcb", "mlnx_qos"))}
    assert found(tree) == {}
    assert {u.what for u in unknown(tree)} == {
        "lossless priorities (PFC) of ens1np0",
        "lossless priorities (PFC) of ens2np0",
        "what ens1np0 takes the priority of packets from",
        "what ens2np0 takes the priority of packets from",
    }


def test_rails_in_one_subnet_need_arp_settings():
    tree = roce()
    tree.files["/proc/net/route"] = ROUTES + "".join(
        f"ens{i}np0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n" for i in (1, 2)
    )
    assert set(found(tree)) == {"rdma.rails-arp"}


def test_cards_without_a_driver_are_found():
    tree = Tree("n9")
    tree.pci("pci0000:20/0000:20:01.0/0000:21:00.0", kind=0x0207, vendor=0x15B3)
    assert found(tree)["rdma.no-device"].severity == "critical"


@pytest.mark.parametrize(
    ("name", "value", "id_"),
    [
        ("NCCL_IB_DISABLE", "1", "launch.ib-disabled"),
        ("NCCL_NET", "Socket", "launch.net-socket"),
        ("NCCL_P2P_DISABLE", "1", "launch.p2p-disabled"),
        ("NCCL_SHM_DISABLE", "1", "launch.shm-disabled"),
        ("NCCL_IB_RETRY_CNT", "10", "launch.retry-count"),
        ("NCCL_IB_TIMEOUT", "14", "launch.ib-timeout"),
        ("NCCL_CHUNK_SIZE", "2097152", "launch.chunk-size"),
        ("NCCL_NET_GDR_LEVEL", "SYS", "launch.gdr-level"),
        ("NCCL_SOCKET_IFNAME", "eth9", "launch.no-such-interface"),
        ("NCCL_SOCKET_IFNAME", "^docker0", "launch.excludes-too-little"),
        ("NCCL_SOCKET_IFNAME", "lo", "launch.unroutable-interface"),
        ("NCCL_IB_HCA", "=mlx5_9", "launch.no-such-hca"),
        ("NCCL_NSOCKS_PERTHREAD", "128", "launch.too-many-sockets"),
        ("NCCL_ALGO", "Tree", "launch.pinned-algorithm"),
    ],
)
def test_an_nccl_setting_that_hurts_is_found_where_it_stands(name: str, value: str, id_: str):
    tree = h100()
    tree.environ[name] = value
    assert set(found(tree)) == {id_}
    tree.environ.clear()
    tree.files["/etc/nccl.conf"] = f"# site\n{name}={value}\n"
    assert found(tree)[id_].evidence[0].where == "/etc/nccl.conf"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_DISABLE", "0"),
        ("NCCL_IB_RETRY_CNT", "7"),
        ("NCCL_SOCKET_IFNAME", "eno"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo,virbr"),
        ("NCCL_IB_HCA", "mlx5"),
        ("NCCL_DEBUG", "INFO"),
    ],
)
def test_settings_that_are_fine_are_no_finding(name: str, value: str):
    tree = h100()
    tree.environ[name] = value
    assert found(tree) == {}


def test_ranks_of_one_job_with_other_settings_are_found():
    held = h100().held()
    held["folders"] = {"/proc": ["self", "10", "11", "12"]}
    held["process_environs"] = {
        str(pid): {
            "RANK": str(pid - 10),
            "MASTER_ADDR": "192.0.2.1",
            "MASTER_PORT": "29500",
            **({"NCCL_ALGO": "Ring"} if pid == 11 else {}),
        }
        for pid in (10, 11, 12)
    }
    ids = {f.id: f for c in examine(RecordedSystem(held)).checks for f in c.findings}
    assert [e.where for e in ids["launch.ranks-differ"].evidence] == ["rank 0, 2", "rank 1"]


@pytest.mark.parametrize(
    ("selector", "taken"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^eth", ["ib0"]),
        ("^=eth0", ["eth1", "ib0"]),
        ("eth1,ib", ["eth1", "ib0"]),
        ("=ib", []),
    ],
)
def test_selectors_follow_ncclS_rules(selector: str, taken: list[str]):
    assert matching(selector, ["eth0", "eth1", "ib0"]) == taken


def test_two_interfaces_in_one_subnet_and_strict_filters():
    tree = ethernet()
    tree.files["/proc/net/route"] = ROUTES + "".join(
        f"ens{i}\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n" for i in (1, 2)
    )
    assert set(found(tree)) == {"route.one-subnet"}
    assert set(found(sysctl(tree, "net.ipv4.conf.all.rp_filter", "1"))) == {"route.one-subnet", "route.strict-filter"}


def test_a_gateway_though_on_link_and_peers_by_other_interfaces():
    tree = ethernet()
    tree.files["/proc/net/route"] = ROUTES + "ens1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    for peer, route in {
        "192.0.2.5": '[{"dst":"192.0.2.5","gateway":"192.0.2.1","dev":"ens1"}]',
        "192.0.2.6": '[{"dst":"192.0.2.6","dev":"ens1"}]',
        "198.51.100.7": '[{"dst":"198.51.100.7","gateway":"203.0.113.1","dev":"eno9"}]',
    }.items():
        tree.say("ip", "-j", "route", "get", peer, stdout=route)
    held = found(tree, Question(peers=("192.0.2.5", "192.0.2.6", "198.51.100.7")))
    assert {f.id: f.subject for f in held.values()} == {
        "route.gateway-though-on-link": "192.0.2.5",
        "route.peers-by-other-interface": "eno9",
    }


def test_a_firewall_that_drops_an_open_engine_port_and_a_full_tracking_table():
    tree = sysctl(
        sysctl(ethernet(), "net.netfilter.nf_conntrack_count", "250000"), "net.netfilter.nf_conntrack_max", "262144"
    )
    tree.say(
        "nft",
        "list",
        "ruleset",
        stdout="table inet filter {\n chain input {\n  type filter hook input priority filter; policy drop;\n }\n}\n",
    )
    # 8265 = 0x2049 on all addresses, 6379 = 0x18EB on loopback
    tree.files["/proc/net/tcp"] = (
        "  sl  local\n   0: 00000000:2049 00000000:0000 0A\n   1: 0100007F:18EB 00000000:0000 0A\n"
    )
    held = found(tree)
    assert set(held) == {"route.firewall-drops", "route.open-engine-port", "route.conntrack-full"}
    assert held["route.open-engine-port"].subject == "port 8265"


def test_the_kernel_log_shows_flaps_of_a_day_and_what_cards_complain_of():
    tree = ethernet()
    now = 864000
    flaps = "".join(f"[{now - 100 * i}.123456] ice 0000:21:00.0 ens1: NIC Link is Down\n" for i in range(5))
    old = "".join(f"[{i}.5] mlx5_core 0000:22:00.0 ens2: Link down\n" for i in range(9))
    tree.say(
        "dmesg",
        stdout=old
        + "[1.0] pci 0000:21:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link\n"
        + flaps,
    )
    held = found(tree)
    assert set(held) == {"nic.flapping", "host.log-pcie-limited"}
    assert held["nic.flapping"].subject == "ens1"


def test_governor_numa_balancing_and_clock():
    tree = h100()
    for name in list(tree.files):
        if name.endswith("scaling_governor"):
            tree.files[name] = "schedutil"
    sysctl(tree, "kernel.numa_balancing", "1")
    tree.exists = {}
    tree.say(
        "chronyc",
        "-n",
        "tracking",
        stdout="System time     : 0.250000000 seconds slow of NTP time\nLeap status     : Not synchronised\n",
    )
    assert {f.id: f.severity for f in found(tree).values()} == {
        "host.cpu-governor": "warning",
        "host.numa-balancing": "notice",
        "host.clock-adrift": "notice",
    }


def delta(**grown: int) -> dict[str, Finding]:
    view = HostView(system_of(h100()))
    before = {name.replace("__", "."): 100 for name in grown}
    view.delta = Delta(
        seconds=10.0, before=before, after={name.replace("__", "."): 100 + by for name, by in grown.items()}
    )
    checks = [c for c in CHECKS if c.name.startswith("counters.")]
    return {f.id: f for c in checks for f in c.run(view) if isinstance(f, Finding)}


@pytest.mark.parametrize(
    ("counter", "by", "id_"),
    [
        ("nic__eth0__rx_out_of_buffer", 5, "counters.ring-too-small"),
        ("nic__eth0__rx_discards_phy", 1, "counters.port-discards"),
        ("nic__eth0__tx_prio3_pause", 9, "counters.asks-to-pause"),
        ("nic__eth0__rx_prio3_pause", 9, "counters.told-to-pause"),
        ("nic__eth0__carrier_down_count", 1, "counters.link-down"),
        ("nic__eth0__rx_oversize_pkts_phy", 3, "counters.peer-mtu-larger"),
        ("rdma__mlx5_0:1__symbol_error", 101, "counters.physical-errors"),
        ("rdma__mlx5_0:1__local_ack_timeout_err", 11, "counters.rdma-ack-timeouts"),
        ("rdma__mlx5_0:1__link_downed", 1, "counters.link-down"),
        ("rdma__mlx5_0:1__rnr_nak_retry_err", 1, "counters.receiver-not-ready"),
        ("softnet__3__dropped", 1, "counters.backlog-drops"),
        ("tcp__TcpExt__ListenOverflows", 1, "counters.listen-overflows"),
    ],
)
def test_a_counter_that_grows_beyond_its_rate_is_found(counter: str, by: int, id_: str):
    assert set(delta(**{counter: by})) == {id_}


@pytest.mark.parametrize(
    ("counter", "by"),
    [
        ("rdma__mlx5_0:1__symbol_error", 100),
        ("rdma__mlx5_0:1__port_xmit_discards", 1000),
        ("nic__eth0__rx_bytes", 10**9),
        ("nic__eth0__rx_out_of_buffer", -50),
    ],
)
def test_growth_within_the_rate_traffic_and_resets_are_no_finding(counter: str, by: int):
    assert delta(**{counter: by}) == {}


def test_retransmissions_by_share():
    base = {"tcp__Tcp__OutSegs": 1_000_000}
    assert delta(**base, tcp__Tcp__RetransSegs=100) == {}  # 0.01 %
    assert delta(**base, tcp__Tcp__RetransSegs=500)["counters.retransmits"].severity == "notice"
    assert delta(**base, tcp__Tcp__RetransSegs=2000)["counters.retransmits"].severity == "warning"


def test_one_processor_bound_by_packets():
    assert delta(cpu__3__total=1000, cpu__3__softirq=850)["counters.softirq-bound"].subject == "cpu 3"
    assert delta(cpu__3__total=1000, cpu__3__softirq=700) == {}


def test_counters_are_read_before_and_after_on_a_real_host():
    from wirespeed.system import System

    waited: list[float] = []
    examination = examine(System(), Question(during_s=0.01, only=("counters",)), wait=waited.append)
    assert waited == [0.01]
    assert {c.status for c in examination.checks} <= {"passed", "unknown", "found"}
    assert examination.during_s is not None


def inet_diag(
    *,
    remote: str = "192.0.2.9",
    congestion: str = "cubic",
    busy_us: int = 2_000_000,
    limited_us: int = 800_000,
    info_bytes: int = 232,
) -> bytes:
    """One established connection as the kernel sends it."""
    info = bytearray(info_bytes)
    struct.pack_into("=I", info, 68, 350)  # rtt, us
    if info_bytes > 200:
        struct.pack_into("=I", info, 148, 300)  # min_rtt
        struct.pack_into("=QQQ", info, 168, busy_us, limited_us, 0)
    ids = (
        struct.pack("!HH", 40000, 29500)
        + socket.inet_aton("192.0.2.8").ljust(16, b"\0")
        + socket.inet_aton(remote).ljust(16, b"\0")
        + bytes(12)
    )
    body = bytes((socket.AF_INET, 1, 0, 0)) + ids + bytes(20)
    attribute = struct.pack("=HH", 4 + len(info), 2) + bytes(info)
    name = congestion.encode() + b"\0"
    attribute += struct.pack("=HH", 4 + len(name), 4) + name + bytes(-len(name) % 4)
    message = body + attribute
    return struct.pack("=IHHII", 16 + len(message), 20, 0, 1, 0) + message


def test_a_connection_that_waits_for_the_receivers_window_is_found():
    tree = ethernet()
    tree.tcp_diagnostics["2"] = inet_diag().hex()
    finding = found(tree)["tcp.window-limited"]
    assert (finding.subject, "40 %" in finding.title) == ("192.0.2.9:29500", True)
    tree.tcp_diagnostics["2"] = inet_diag(limited_us=100_000).hex()
    assert found(tree) == {}


def test_mixed_congestion_controls_are_found():
    tree = ethernet()
    each = [inet_diag(limited_us=0, congestion=name) for name in ("bbr", "cubic", "cubic", "bbr")]
    tree.tcp_diagnostics["2"] = b"".join(each).hex()
    assert set(found(tree)) == {"tcp.mixed-congestion-control"}
    tree.tcp_diagnostics["2"] = b"".join(each[1:3]).hex()
    assert found(tree) == {}


def test_live_round_trips_are_used_where_none_is_given():
    tree = sysctl(ethernet(), "net.ipv4.tcp_slow_start_after_idle", "1")
    tree.tcp_diagnostics["2"] = inet_diag(limited_us=0).hex()
    assert (
        "round trip 300 us (median of 1 live connections)" in found(tree)["tcp.slow-start-after-idle"].evidence[1].seen
    )


def test_connections_within_the_host_and_cut_answers_are_passed_over():
    assert parse_answer(inet_diag(remote="127.0.0.1")) == ()
    whole = inet_diag()
    assert len(parse_answer(whole + whole)) == 2
    for length in range(len(whole)):
        assert len(parse_answer(whole[:length])) <= 1
    assert parse_answer(inet_diag(info_bytes=104))[0].busy_s is None  # an old kernel


def test_the_kernels_own_answer_is_understood():
    """A real connection between two addresses of this host is left out; the request itself is answered."""
    from wirespeed.system import System

    answer = System().tcp_diagnostics(socket.AF_INET)
    assert answer is None or isinstance(parse_answer(answer), tuple)
