"""What manages and carries the InfiniBand fabric, as one host sees it: subnet manager, cables and optical modules.

The subnet manager's state needs the right to send management packets (root); without it only the port's own file
tells. Cables are asked through mlxlink or ethtool, where one is installed: limits and alarms are the module's own.
Errors since boot prove nothing; what grows under load is in counters.py.

Standard library only: this module travels to hosts that have nothing else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from wirespeed.doctor.check import Evidence, Fact, Finding, Outcome, Remedy, Unknown, check
from wirespeed.doctor.inventory import HostView, RdmaPort
from wirespeed.doctor.launch import settings

_SMINFO = re.compile(r"sm lid (\d+) sm guid (0x[0-9a-f]+), activity count (\d+) priority (\d+) state (\d+) (\w+)")
_SL_ROW = re.compile(r"^ports: in\s+\d+, out\s+\d+:\s*\|(.*)\|\s*$", re.MULTILINE)
_MAX_MODULES = 16


def _ib_ports(view: HostView) -> list[RdmaPort]:
    return [port for port in view.rdma_ports if port.is_active and not port.is_roce and not port.is_efa]


def _no_infiniband(view: HostView) -> str | None:
    return None if _ib_ports(view) else "no active InfiniBand port"


@check("rdma.subnet-manager", "the subnet manager of the InfiniBand fabric", applies=_no_infiniband, deadline_s=8.0)
def subnet_manager(view: HostView) -> Iterator[Outcome]:
    """Whether one answers, and whether ports of one fabric have the same one."""
    by_subnet: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    lost: list[RdmaPort] = []
    for port in _ib_ports(view):
        base = f"/sys/class/infiniband/{port.device}/ports/{port.port}"
        lid = view.system.read_text(f"{base}/sm_lid")
        if lid is None:
            yield view.file_unknown(f"{base}/sm_lid", f"subnet manager of {port.name}")
            continue
        yield Fact(key=f"rdma.{port.name}.sm-lid", value=lid)
        if _number(lid) == 0:
            lost.append(port)
        gid = view.system.read_text(f"{base}/gids/0") or ""
        if len(gid) >= 19:
            by_subnet[gid[:19]][lid].append(port.name)
    for port in lost:
        yield Finding(
            id="rdma.no-subnet-manager",
            subject=port.name,
            severity="critical",
            title=f"{port.name} is active but knows no subnet manager: after the next change nothing sets it up again.",
            evidence=(
                Evidence(
                    where=f"/sys/class/infiniband/{port.device}/ports/{port.port}/sm_lid", seen="0", expected="a lid"
                ),
            ),
            remedy=Remedy(
                text="start a subnet manager on the switch or one host", commands=("systemctl start opensm", "sminfo")
            ),
            source="opensm(8)",
            path="rdma",
        )
    yield from _two_managers(by_subnet)
    first = next((port for port in _ib_ports(view) if port not in lost), None)
    if first is not None:
        yield from _ask_manager(view, first)


def _two_managers(by_subnet: dict[str, dict[str, list[str]]]) -> Iterator[Outcome]:
    for prefix, managers in by_subnet.items():
        # The default prefix says nothing: rails that are apart all have it, each with a manager of its own.
        if len(managers) < 2 or prefix.startswith("fe80:0000:0000:0000"):
            continue
        seen = "; ".join(f"lid {lid}: {', '.join(names)}" for lid, names in managers.items())
        yield Finding(
            id="rdma.two-subnet-managers",
            subject=prefix,
            severity="warning",
            title="Ports of one subnet follow different subnet managers: their paths do not fit together.",
            evidence=(Evidence(where="/sys/class/infiniband/*/ports/*/sm_lid", seen=seen, expected="one"),),
            remedy=Remedy(text="keep one master; give the others a lower priority", commands=("sminfo", "saquery -s")),
            source="opensm(8): priority",
            path="rdma",
        )


def _ask_manager(view: HostView, port: RdmaPort) -> Iterator[Outcome]:
    said = view.command("sminfo", "-C", port.device, "-P", str(port.port))
    found = None if isinstance(said, Unknown) else _SMINFO.search(said.stdout)
    if found is None:
        why = said.why if isinstance(said, Unknown) else "sminfo printed nothing that is known"
        if view.is_root and re.search(r"madrpc failed|failed: query|timed? ?out", why) is not None:
            yield Finding(
                id="rdma.subnet-manager-silent",
                subject=port.name,
                severity="warning",
                title="The subnet manager does not answer: links that change will not come back.",
                evidence=(Evidence(where=f"`sminfo -C {port.device}`", seen=why, expected="SMINFO_MASTER"),),
                remedy=Remedy(
                    text="look at it on the switch or host that runs it", commands=("systemctl status opensm",)
                ),
                source="infiniband-diags sminfo(8)",
                path="rdma",
            )
        else:
            hint = said.hint if isinstance(said, Unknown) and said.hint else "install infiniband-diags, and run as root"
            yield Unknown(what="state of the subnet manager", why=why, hint=hint)
        return
    yield Fact(key="rdma.subnet-manager", value=f"{found[2]} priority {found[4]} {found[6]}")
    if found[6] != "SMINFO_MASTER":
        yield Finding(
            id="rdma.subnet-manager-not-master",
            subject=port.name,
            severity="warning",
            title=f"The subnet manager that {port.name} follows is not the master ({found[6]}).",
            evidence=(Evidence(where=f"`sminfo -C {port.device}`", seen=found[0], expected="SMINFO_MASTER"),),
            remedy=Remedy(text="look for two managers of equal priority", commands=("saquery -s", "sminfo")),
            source="infiniband-diags sminfo(8)",
            path="rdma",
        )


@check("rdma.service-level", "service level of training traffic against the fabric's lanes", applies=_no_infiniband)
def service_level(view: HostView) -> Iterator[Outcome]:
    """NCCL_IB_SL against the table of the port: lane 15 is management's, and what is sent there is thrown away."""
    given = settings(view).get("NCCL_IB_SL")
    if given is None or not given.value.isdigit():
        return
    level = int(given.value)
    port = _ib_ports(view)[0]
    yield Fact(key="rdma.service-level", value=given.value)
    base = f"/sys/class/infiniband/{port.device}/ports/{port.port}"
    lid = _number(view.system.read_text(f"{base}/lid") or "")
    if level > 15:
        lanes: list[int] = []
        where, seen = given.where, f"NCCL_IB_SL={level}"
    else:
        said = view.command("smpquery", "-C", port.device, "-P", str(port.port), "sl2vl", str(lid))
        row = None if isinstance(said, Unknown) else _SL_ROW.search(said.stdout)
        if row is None:
            why = said.why if isinstance(said, Unknown) else "smpquery has no table"
            yield Unknown(what=f"lane of service level {level}", why=why, hint="install infiniband-diags, run as root")
            return
        lanes = [int(part) for part in row[1].split("|") if part.strip().isdigit()]
        where, seen = "`smpquery sl2vl`", f"service level {level} -> lane {lanes[level] if level < len(lanes) else '?'}"
    if level > 15 or (level < len(lanes) and lanes[level] == 15):
        yield Finding(
            id="rdma.service-level-dropped",
            subject=port.name,
            severity="critical",
            title=f"NCCL sends in service level {level}, which this fabric throws away.",
            evidence=(
                Evidence(where=given.where, seen=f"NCCL_IB_SL={level}"),
                Evidence(where=where, seen=seen, expected="a lane from 0 to 14"),
            ),
            remedy=Remedy(
                text="unset NCCL_IB_SL, or take a level that the subnet manager maps", commands=("unset NCCL_IB_SL",)
            ),
            source="InfiniBand architecture specification: SL to VL mapping; NCCL environment documentation",
            path="rdma",
        )


def _number(text: str) -> int:
    try:
        return int(text.strip() or "0", 0)
    except ValueError:
        return 0


def _no_cable(view: HostView) -> str | None:
    has_any = any(port.is_active for port in view.rdma_ports) or any(
        nic.is_up and nic.kind == "ethernet" and _is_fast(nic.speed_bit_per_s) for nic in view.physical_nics
    )
    return None if has_any else "no active RDMA port and no fast interface"


def _is_fast(speed: float | None) -> bool:
    return speed is not None and speed >= 25e9


@check("nic.cables", "cables and optical modules of fast ports: alarms, power, recommendations", applies=_no_cable,
       deadline_s=8.0)  # fmt: skip
def cables(view: HostView) -> Iterator[Outcome]:
    """Alarms of the modules themselves (ethtool -m), and what mlxlink makes of a link."""
    devices = {port.device: port for port in view.rdma_ports if port.is_active and not port.is_efa}
    is_known = False
    for device, port in list(devices.items())[:_MAX_MODULES]:
        said = view.command("mlxlink", "-d", device, "-p", str(port.port), "-m", "-c")
        if isinstance(said, Unknown):
            break
        is_known = True
        yield from _mlxlink(device, said.stdout)
    for nic in [n for n in view.physical_nics if n.is_up and n.kind == "ethernet" and _is_fast(n.speed_bit_per_s)]:
        said = view.command("ethtool", "-m", nic.name)
        if isinstance(said, Unknown) or not said.stdout.strip():
            continue
        is_known = True
        yield from _alarms(nic.name, said.stdout)
    if not is_known:
        yield Unknown(
            what="cables and optical modules",
            why="neither mlxlink nor `ethtool -m` answers",
            hint="install mstflint or MFT, or ethtool; run as root",
        )


def _mlxlink(device: str, text: str) -> Iterator[Outcome]:
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    advice = re.search(r"^Recommendation\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    downs = re.search(r"^Link Down Counter\s*:\s*(\d+)", text, re.MULTILINE)
    serial = re.search(r"^Vendor Serial Number\s*:\s*(\S+)", text, re.MULTILINE)
    if downs is not None:
        yield Fact(key=f"counters.{device}.link-downs", value=downs[1])
    if advice is not None and "No issue was observed" not in advice[1] and advice[1] not in ("N/A", "-"):
        number = "" if serial is None else f", serial number {serial[1]}"
        yield Finding(
            id="nic.cable-advice",
            subject=device,
            severity="warning",
            title=f"The link of {device} has trouble by its own account: {advice[1]}.",
            evidence=(Evidence(where=f"`mlxlink -d {device} -m -c`", seen=advice[1] + number, expected="No issue"),),
            remedy=Remedy(text="clean, reseat or exchange cable and optic, then look at the switch port"),
            source="mlxlink (MFT user manual): recommendation",
        )


def _alarms(name: str, text: str) -> Iterator[Outcome]:
    raised = re.findall(r"^\s*([\w .,()/-]+?) (alarm|warning)\s*:\s*On\s*$", text, re.MULTILINE)
    temperature = re.search(r"^\s*Module temperature\s*:\s*([\d.]+) degrees C", text, re.MULTILINE)
    if temperature is not None:
        yield Fact(key=f"counters.{name}.module-temperature", value=temperature[1])
    if not raised:
        return
    is_alarm = any(kind == "alarm" for _, kind in raised)
    said = ", ".join(dict.fromkeys(f"{what.strip()} ({kind})" for what, kind in raised))
    yield Finding(
        id="nic.module-alarm",
        subject=name,
        severity="critical" if is_alarm else "warning",
        title=f"The optical module of {name} raises {'an alarm' if is_alarm else 'a warning'}: {said}.",
        evidence=(Evidence(where=f"`ethtool -m {name}`", seen=said, expected="all Off"),),
        remedy=Remedy(
            text="low light: clean the connectors, try another fibre; heat: airflow; else exchange the module"
        ),
        source="SFF-8636 and CMIS: flags of the module itself",
    )


CHECKS = (subnet_manager, service_level, cables)
