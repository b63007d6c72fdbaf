"""Subnet manager, service level, cables, queues of RoCE traffic, options of live connections, ports of ranks."""

from __future__ import annotations

import socket
import struct

import pytest

from doctor_trees import LLDP_PFC, MLNX_QOS, MLXLINK, ROUTES, SMINFO, Tree, h100, roce, system_of
from wirespeed.doctor.check import Finding, Unknown
from wirespeed.doctor.examine import Question, examine
from wirespeed.doctor.recorded import RecordedSystem
from wirespeed.doctor.sockets import parse_answer
from wirespeed.doctor.traffic_class import parse_map, parse_trust


def found(tree: Tree, question: Question | None = None) -> dict[str, Finding]:
    return {f.id: f for c in examine(system_of(tree), question).checks for f in c.findings}


def unknown(tree: Tree) -> set[str]:
    return {u.what for c in examine(system_of(tree)).checks for u in c.unknowns if isinstance(u, Unknown)}


def facts(tree: Tree) -> dict[str, str]:
    return {f.key: f.value for c in examine(system_of(tree)).checks for f in c.facts}


def test_the_subnet_manager_of_a_healthy_host_is_a_fact():
    assert facts(h100())["rdma.subnet-manager"] == "0x2c90300000001 priority 14 SMINFO_MASTER"
    assert found(h100()) == {}


def test_a_port_without_a_subnet_manager_and_one_that_does_not_answer():
    tree = h100()
    tree.files["/sys/class/infiniband/mlx5_2/ports/1/sm_lid"] = "0x0\n"
    assert found(tree)["rdma.no-subnet-manager"].subject == "mlx5_2:1"
    tree = h100()
    tree.say("sminfo", "-C", "mlx5_0", "-P", "1", stderr="sminfo: iberror: failed: query", returncode=1)
    assert found(tree)["rdma.subnet-manager-silent"].subject == "mlx5_0:1"
    tree.say(
        "sminfo", "-C", "mlx5_0", "-P", "1", stdout=SMINFO.replace("state 3 SMINFO_MASTER", "state 2 SMINFO_STANDBY")
    )
    assert "SMINFO_STANDBY" in found(tree)["rdma.subnet-manager-not-master"].title


def test_without_the_tool_the_subnet_managers_state_is_not_known():
    tree = h100()
    del tree.commands["sminfo -C mlx5_0 -P 1"]
    assert found(tree) == {}
    assert unknown(tree) == {"state of the subnet manager"}


@pytest.mark.parametrize(("lids", "is_found"), [(("0x1", "0x7"), True), (("0x1", "0x1"), False)])
def test_two_managers_in_one_subnet_are_found_but_not_on_the_default_prefix(lids: tuple[str, str], is_found: bool):
    tree = h100()
    for index, lid in enumerate(lids):
        base = f"/sys/class/infiniband/mlx5_{index}/ports/1"
        tree.files[f"{base}/sm_lid"] = f"{lid}\n"
        tree.files[f"{base}/gids/0"] = f"fec0:0000:0000:0001:0002:c903:0000:000{index}\n"
    assert ("rdma.two-subnet-managers" in found(tree)) is is_found
    for index in range(2):
        tree.files[f"/sys/class/infiniband/mlx5_{index}/ports/1/gids/0"] = (
            f"fe80:0000:0000:0000:0002:c903:0000:000{index}\n"
        )
    assert "rdma.two-subnet-managers" not in found(tree)


SL2VL = """\
# SL2VL table: Lid 5
#                 SL: | 0| 1| 2| 3| 4| 5| 6| 7| 8| 9|10|11|12|13|14|15|
ports: in  0, out  0: | 0| 1| 2| 3|15|15|15|15|15|15|15|15|15|15|15|15|
"""


@pytest.mark.parametrize(("level", "is_found"), [("1", False), ("4", True), ("16", True)])
def test_a_service_level_that_ends_in_lane_15_is_thrown_away(level: str, is_found: bool):
    tree = h100()
    tree.environ["NCCL_IB_SL"] = level
    tree.files["/sys/class/infiniband/mlx5_0/ports/1/lid"] = "0x5\n"
    tree.say("smpquery", "-C", "mlx5_0", "-P", "1", "sl2vl", "5", stdout=SL2VL)
    assert ("rdma.service-level-dropped" in found(tree)) is is_found


def test_a_cable_that_complains_and_a_module_that_raises_alarms():
    tree = h100()
    text = MLXLINK.replace("No issue was observed", "Bad signal integrity")
    tree.say("mlxlink", "-d", "mlx5_4", "-p", "1", "-m", "-c", stdout=f"\x1b[1m{text}\x1b[0m")
    finding = found(tree)["nic.cable-advice"]
    assert (finding.subject, "MT0000X00001" in finding.evidence[0].seen) == ("mlx5_4", True)
    tree = h100()
    tree.say("ethtool", "-m", "eno1", stdout=(
        "\tIdentifier : 0x11 (QSFP28)\n\tModule temperature : 71.50 degrees C / 160.70 degrees F\n"
        "\tModule temperature high alarm             : Off\n\tLaser rx power low alarm   : On\n"
        "\tLaser rx power low warning : On\n"
    ))  # fmt: skip
    finding = found(tree)["nic.module-alarm"]
    assert (finding.subject, finding.severity) == ("eno1", "critical")
    assert "Laser rx power low (alarm)" in finding.title


def test_without_any_tool_cables_are_not_known():
    tree = h100()
    tree.commands = {name: said for name, said in tree.commands.items() if not name.startswith("mlxlink")}
    assert unknown(tree) == {"cables and optical modules"}


def test_trust_and_map_are_read_from_either_tool():
    assert parse_trust(MLNX_QOS) == "dscp"
    assert parse_map(MLNX_QOS)[26] == 3
    assert parse_map('{"ifname":"x","dscp-prio":[[26,5],[48,6]]}') == {26: 5, 48: 6}
    assert parse_map("nothing") == {}


def test_a_mark_that_the_interface_does_not_look_at_is_found():
    tree = roce()
    tree.say("mlnx_qos", "-i", "ens1np0", stdout=MLNX_QOS.replace("state: dscp", "state: pcp"))
    finding = found(tree)["rdma.mark-not-trusted"]
    assert (finding.subject, "DSCP 26" in finding.title) == ("ens1np0", True)


def test_the_interfaces_own_map_decides_the_priority():
    tree = roce()
    # DSCP 26 (traffic class 106) goes to priority 4 here, and only 3 is lossless.
    moved = MLNX_QOS.replace("30,29,28,27,26,25,24", "30,29,28,27,25,24").replace("prio:4 dscp:39", "prio:4 dscp:26,39")
    tree.say("mlnx_qos", "-i", "ens2np0", stdout=moved)
    finding = found(tree)["rdma.lossy-priority"]
    assert (finding.subject, "priority 4" in finding.title) == ("ens2np0", True)


def test_a_switch_with_other_lossless_priorities_is_found_and_a_silent_one_is_unknown():
    tree = roce()
    tree.say(
        "lldptool",
        "-t",
        "-n",
        "-i",
        "ens1np0",
        "-V",
        "PFC",
        stdout=LLDP_PFC.replace("PFC enabled: 3", "PFC enabled: 4"),
    )
    finding = found(tree)["rdma.pfc-differs-from-switch"]
    assert finding.remedy is not None
    assert finding.remedy.commands == ("mlnx_qos -i ens1np0 --pfc 0,0,0,0,1,0,0,0",)
    tree.say("lldptool", "-t", "-n", "-i", "ens1np0", "-V", "PFC", stdout="")
    assert unknown(tree) == {"priorities of the switch behind ens1np0"}


def connection(
    *, remote: str = "192.0.2.9", options: int = 7, mss: int = 8948, mtu: int = 9000, tos: int = 0,
    sent: int = 0, again: int = 0, buffers: tuple[int, int] = (131072, 87040), rtt_us: int = 300,
) -> bytes:  # fmt: skip
    """One established connection as the kernel sends it."""
    info = bytearray(232)
    info[5] = options
    struct.pack_into("=I", info, 16, mss)
    struct.pack_into("=I", info, 60, mtu)
    struct.pack_into("=I", info, 68, rtt_us)
    struct.pack_into("=I", info, 148, rtt_us)
    struct.pack_into("=QQ", info, 200, sent, again)
    ids = (
        struct.pack("!HH", 40000, 29500)
        + socket.inet_aton("192.0.2.8").ljust(16, b"\0")
        + socket.inet_aton(remote).ljust(16, b"\0")
        + bytes(12)
    )
    body = bytes((socket.AF_INET, 1, 0, 0)) + ids + bytes(20)
    for kind, content in (
        (2, bytes(info)),
        (5, bytes([tos])),
        (7, struct.pack("=IIII", 0, buffers[0], 0, buffers[1]) + bytes(20)),
    ):
        body += struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)
    return struct.pack("=IHHII", 16 + len(body), 20, 0, 1, 0) + body


def ethernet() -> Tree:
    tree = Tree("n1")
    bdf = tree.pci("pci0000:20/0000:20:01.0/0000:21:00.0", kind=0x0200, vendor=0x8086, device=0x1592,
                   speed="16.0 GT/s PCIe", max_speed="16.0 GT/s PCIe")  # fmt: skip
    tree.nic("ens1", bdf, driver="ice", speed=100000)
    tree.say("nft", "list", "ruleset")
    tree.say("ethtool", "-m", "ens1", stdout="\tModule temperature : 40.00 degrees C / 104.00 degrees F\n")
    return tree


@pytest.mark.parametrize(
    ("changes", "id_"),
    [
        ({}, ""),
        ({"options": 3}, "tcp.connection-without-scaling"),
        ({"mss": 1448, "mtu": 1500}, "tcp.small-segments"),
        ({"sent": 10**9, "again": 5 * 10**6}, "tcp.connection-lossy"),
        ({"sent": 10**6, "again": 5 * 10**5}, ""),
        ({"buffers": (425984, 87040)}, "tcp.fixed-buffer"),
        ({"buffers": (131072, 425984)}, "tcp.fixed-buffer"),
        ({"options": 3, "rtt_us": 40_000}, ""),
    ],
)
def test_options_of_live_connections(changes: dict[str, int], id_: str):
    tree = ethernet()
    tree.tcp_diagnostics["2"] = (connection(**changes) + connection(**changes)).hex()  # type: ignore[arg-type]
    assert set(found(tree)) == ({id_} if id_ else set())


def test_marks_of_live_connections_are_a_fact():
    tree = ethernet()
    tree.tcp_diagnostics["2"] = (connection(tos=104) + connection()).hex()
    assert facts(tree)["tcp.connections-dscp"] == "0, 26"
    (one, other) = parse_answer(bytes.fromhex(tree.tcp_diagnostics["2"]))
    assert (one.tos, other.tos, one.mss_bytes) == (104, 0, 8948)


def test_a_peer_that_is_reached_another_way_than_it_reaches_us_is_found():
    tree = ethernet()
    tree.files["/proc/net/route"] = ROUTES + "ens1\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    tree.say("ip", "-j", "route", "get", "192.0.2.5", stdout='[{"dst":"192.0.2.5","dev":"ens1","prefsrc":"192.0.2.8"}]')
    assert found(tree, Question(peers=("192.0.2.5",), address="192.0.2.8")) == {}
    held = found(tree, Question(peers=("192.0.2.5",), address="198.51.100.8"))
    assert (set(held), held["route.asymmetric"].subject) == ({"route.asymmetric"}, "192.0.2.5")
    assert found(tree, Question(peers=("192.0.2.5",), address="127.0.1.1")) == {}


def rank_host(*, address: str, world_size: str = "16", is_hidden: bool = False) -> RecordedSystem:
    tree = ethernet()
    # 41000 = 0xA028, owned by inode 777
    tree.files["/proc/net/tcp"] = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        f"   0: {address}:A028 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1\n"
    )
    held = tree.held()
    held["folders"] = {"/proc": ["self", "10"]}
    held["process_environs"] = {
        "10": {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": "8",
               "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    }  # fmt: skip
    held["sockets"] = {} if is_hidden else {"10": [777, 778]}
    return RecordedSystem(held)


def test_ports_of_ranks_are_listed_with_their_addresses():
    examination = examine(rank_host(address="080200C0"), Question(only=("route.rank-ports",)))
    (check,) = examination.checks
    assert [(f.key, f.value) for f in check.facts] == [
        ("route.port.ranks.192.0.2.8", "1 ports of 192.0.2.1:29500: 41000")
    ]
    assert check.status == "passed"


def test_ranks_of_several_hosts_that_listen_on_loopback_only_are_found():
    (check,) = examine(rank_host(address="0100007F"), Question(only=("route.rank-ports",))).checks
    assert [f.id for f in check.findings] == ["route.ranks-on-loopback"]
    (check,) = examine(rank_host(address="0100007F", world_size="8"), Question(only=("route.rank-ports",))).checks
    assert check.status == "passed"


def test_ranks_of_another_user_are_not_known():
    (check,) = examine(rank_host(address="080200C0", is_hidden=True), Question(only=("route.rank-ports",))).checks
    assert check.status == "unknown"
