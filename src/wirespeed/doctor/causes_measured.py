"""What other tools measured, beside the log: the link is fine and NCCL is not, or the link itself is slow.

Compared are only figures of one kind: a bus bandwidth against the links of the same NICs, streams against streams. The
80 % rule (stas00/ml-engineering): nccl-tests reaches about 80 % of the link, and a job about 80 % of nccl-tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from wirespeed.doctor.causes import Cause, make_cause, names
from wirespeed.doctor.check import Evidence
from wirespeed.doctor.log_scan import JobFacts
from wirespeed.doctor.measurements import GOOD_SHARE, Measurement
from wirespeed.doctor.nccl_facts import NcclFacts
from wirespeed.doctor.nccl_tests import UNSTEADY
from wirespeed.units import format_rate, format_size

ROCE_FLOOR_BIT_PER_S = 8e9
"""RoCE below 1 GB/s of bus bandwidth (nccl#378, nccl#306): loss, not load."""
MANY_RETRANSMITS = 0.001
"""Segments sent again over all: above 0.1 % hurts."""
SEGMENT_BYTES = 1448


def measured_causes(job: JobFacts) -> Iterator[Cause]:
    """All causes of this kind."""
    tests = [m for m in job.measurements if m.tool == "nccl-tests"]
    verbs = [m for m in job.measurements if m.tool == "perftest" and m.bit_per_s]
    tcp = [m for m in job.measurements if m.tool == "iperf3" and m.bit_per_s]
    yield from _wrong_results(tests)
    yield from _unsteady(tests)
    yield from _single_stream(job, tests, tcp)
    yield from _link_fine_nccl_not(job, tests, verbs)
    yield from _lossy_roce(job, tests)
    yield from _odd_device(verbs)
    yield from _slow_port(job.nccl)
    yield from _gpu_path(verbs)
    yield from _retransmits(tcp)
    yield from _more_hosts_much_less(tests)


def seen(measurement: Measurement) -> Evidence:
    """A measurement as evidence."""
    best = measurement.best
    rate = "nothing" if best is None or best.bit_per_s is None else format_rate(best.bit_per_s)
    size = f" at {format_size(best.size_bytes)}" if best is not None and best.size_bytes else ""
    streams = f", {measurement.streams} streams" if measurement.streams and measurement.streams > 1 else ""
    ranks = f", {measurement.num_ranks} ranks" if measurement.num_ranks else ""
    device = f" on {measurement.device}" if measurement.device else ""
    return Evidence(
        where=measurement.where, seen=f"{measurement.tool} {measurement.test}{device}: {rate}{size}{streams}{ranks}"
    )


def _between_hosts(tests: Sequence[Measurement], nccl: NcclFacts) -> list[Measurement]:
    """Runs over more than one host (by the table, or by the log around it) whose sizes were large enough."""
    has_net = nccl.num_via("NET") > 0 or len(nccl.hosts) > 1
    return [
        m for m in tests if (len(m.hosts) > 1 or (len(m.hosts) == 0 and has_net)) and m.bit_per_s and not m.still_rises
    ]


def _wrong_results(tests: Sequence[Measurement]) -> Iterator[Cause]:
    wrong = [m for m in tests if m.is_correct is False]
    if wrong:
        yield make_cause(
            "measure.wrong-results",
            "nccl-tests found wrong results: data was corrupted on the way",
            [seen(m) for m in wrong],
            kind="failure",
            weight=0.96,
            severity="critical",
            subject="results",
            path="any",
            fix="do not train on this; unset unusual NCCL settings (chunk and buffer sizes), then test hosts in pairs",
            commands=("all_reduce_perf -b 8 -e 4G -f 2 -c 1",),
        )


def _unsteady(tests: Sequence[Measurement]) -> Iterator[Cause]:
    bad = [(m, note) for m in tests for note in m.notes if note.startswith(UNSTEADY)]
    # One size may have met a neighbour; half of the sizes have not.
    if len(bad) * 2 > sum(len(m.points) for m in tests if any(m is one for one, _ in bad)) / 2:
        measurement, note = bad[0]
        yield make_cause(
            "measure.unsteady",
            f"{measurement.test} of nccl-tests is unsteady: {note}",
            [Evidence(where=m.where, seen=text) for m, text in bad[:4]],
            kind="capability",
            weight=0.5,
            subject="iterations",
            path="any",
            fix="a straggler where one process has the spikes (per_process_max_times_us), the fabric or a neighbour's "
            "job where all have them",
            commands=("all_reduce_perf -b 1M -e 1G -f 2 -I 1 -J run.json", "wirespeed doctor fabric"),
            source="nccl-tests tools/analyze_perf_json.py",
        )


def _single_stream(job: JobFacts, tests: Sequence[Measurement], tcp: Sequence[Measurement]) -> Iterator[Cause]:
    nccl = job.nccl
    one = [m.bit_per_s for m in tcp if m.streams == 1 and m.bit_per_s]
    many = [m.bit_per_s for m in tcp if m.streams and m.streams > 1 and m.bit_per_s]
    reached = [m.bit_per_s for m in _between_hosts(tests, nccl) if m.bit_per_s]
    if not many or nccl.uses_rdma or not (reached or nccl.uses_sockets):
        return
    has_more = any(name in nccl.settings for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"))
    best = max(many)
    now = max(reached) if reached else (max(one) if one else None)
    if now is None or now > 0.6 * best or (one and max(one) > 0.7 * best):
        return
    yield make_cause(
        "tcp.one-stream",
        f"one TCP stream carries {format_rate(now)} where several carry {format_rate(best)}"
        + ("" if has_more else "; NCCL uses one per channel here"),
        [*(seen(m) for m in tcp), *(seen(m) for m in tests), *nccl.lines("network Socket", "via NET")][:6],
        kind="capability",
        weight=0.9 if not has_more else 0.6,
        severity="warning",
        subject="streams",
        path="tcp",
        fix="let NCCL open several sockets per channel",
        commands=("export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4",),
        undo=("unset NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD",),
        source="nccl#450; nccl-tests#83",
        limit_bit_per_s=now,
        full_bit_per_s=best,
    )


def _num_nics(nccl: NcclFacts) -> int:
    used = {(v.host, v.via.device) for v in nccl.vias if v.via.kind == "NET"}
    per_host: dict[str, int] = {}
    for host, _ in used:
        per_host[host] = per_host.get(host, 0) + 1
    return max(per_host.values(), default=1)


def _link_fine_nccl_not(job: JobFacts, tests: Sequence[Measurement], verbs: Sequence[Measurement]) -> Iterator[Cause]:
    runs = _between_hosts(tests, job.nccl)
    rates = [m for m in verbs if m.test.endswith("bw") and m.bit_per_s]
    if not runs or not rates or job.nccl.uses_sockets:
        return
    link = max(m.bit_per_s or 0.0 for m in rates)
    # All NICs of a host carry the ring; without a log one is assumed, which can only hide a loss, never invent one.
    full = link * _num_nics(job.nccl)
    best = max(runs, key=lambda m: m.bit_per_s or 0.0)
    reached = best.bit_per_s or 0.0
    if reached >= GOOD_SHARE * full:
        return
    has_gpu = any(m.uses_gpu for m in rates)
    yield make_cause(
        "nccl.link-fine-nccl-not",
        f"the link carries {format_rate(link)} with perftest, NCCL reaches {format_rate(reached)}"
        + ("" if full == link else f" over {_num_nics(job.nccl)} NICs"),
        [*(seen(m) for m in rates[:2]), seen(best)],
        kind="capability",
        weight=0.7,
        severity="critical",
        subject="nccl",
        fix="cable and switch are fine: look between GPU and NIC (PCIe, ACS, IOMMU, NUMA) and at NCCL_* settings"
        + ("" if has_gpu else "; perftest from GPU memory tells which"),
        commands=("ib_write_bw --use_cuda=0 -d <hca> <peer>", "nvidia-smi topo -m", "env | grep NCCL_"),
        source="nccl#2409; 80 % rule of stas00/ml-engineering",
        limit_bit_per_s=reached,
        full_bit_per_s=GOOD_SHARE * full,
    )


def _lossy_roce(job: JobFacts, tests: Sequence[Measurement]) -> Iterator[Cause]:
    if not (job.nccl.is_roce and job.nccl.uses_rdma):
        return
    slow = [m for m in _between_hosts(tests, job.nccl) if (m.bit_per_s or 0.0) < ROCE_FLOOR_BIT_PER_S]
    if slow:
        yield make_cause(
            "rdma.lossy-roce",
            f"RoCE reaches only {format_rate(max(m.bit_per_s or 0.0 for m in slow))}: packets are lost, or it has "
            "no priority",
            [*(seen(m) for m in slow[:2]), *job.nccl.lines("hcas", "setting NCCL_IB_TC")],
            kind="capability",
            weight=0.82,
            severity="critical",
            subject="roce",
            fix="PFC or ECN on the traffic class that NCCL uses, on hosts and all switches; NCCL_IB_TC is DSCP x 4",
            commands=(
                "mlnx_qos -i <interface>",
                "ethtool -S <interface> | grep -E 'discard|pause|out_of_buffer'",
                "rdma statistic show | grep -E 'seq_err|slow_restart|retry'",
                "export NCCL_IB_TC=106",
            ),
            undo=("unset NCCL_IB_TC",),
            source="nccl#378, #306 (the fix is not always confirmed)",
            alternatives="a NIC on a narrow PCIe link is slow too, without packet_seq_err rising",
        )


def _odd_device(verbs: Sequence[Measurement]) -> Iterator[Cause]:
    by_test: dict[str, list[Measurement]] = {}
    for measurement in verbs:
        if measurement.device and measurement.test.endswith("bw"):
            by_test.setdefault(measurement.test, []).append(measurement)
    for held in by_test.values():
        if len(held) < 3:
            continue
        usual = median(m.bit_per_s or 0.0 for m in held)
        slow = [m for m in held if (m.bit_per_s or 0.0) < GOOD_SHARE * usual]
        if slow:
            yield make_cause(
                "nic.slow-device",
                f"{names(m.device for m in slow)} reaches {format_rate(min(m.bit_per_s or 0.0 for m in slow))}, "
                "the others "
                f"{format_rate(usual)}",
                [seen(m) for m in (*slow[:3], *[m for m in held if m not in slow][:1])],
                kind="capability",
                weight=0.85,
                subject=slow[0].device,
                severity="warning",
                fix="compare PCIe width and speed, NUMA node, port rate and cable with its neighbours",
                commands=(f"cat /sys/class/infiniband/{slow[0].device}/ports/1/rate", "lspci -vvv | grep -E 'LnkSta:'"),
                limit_bit_per_s=min(m.bit_per_s or 0.0 for m in slow),
                full_bit_per_s=usual,
            )


def _slow_port(nccl: NcclFacts) -> Iterator[Cause]:
    """A port that came up at a lower rate than the others, as NCCL found it."""
    rates = [rate for ports in nccl.port_rates.values() for rate in ports.values()]
    if len(rates) < 2:
        return
    usual = max(set(rates), key=lambda rate: (rates.count(rate), rate))
    slow = {
        (host, name): rate for host, ports in nccl.port_rates.items() for name, rate in ports.items() if rate < usual
    }
    # Cards of two kinds (a storage NIC among them) are a choice, not a fault: then a whole class of them is slower.
    if not slow or len(slow) > len(rates) / 4:
        return
    host, name = min(slow, key=lambda key: slow[key])
    yield make_cause(
        "rdma.slower-than-twin",
        f"the RDMA port {name} of {host or 'a host'} runs at {format_rate(slow[host, name])}, the others at "
        f"{format_rate(usual)}",
        [line for one, port in slow for line in nccl.lines(f"port speed {one} {port}")],
        kind="capability",
        weight=0.86,
        severity="critical" if slow[host, name] <= usual / 2 else "warning",
        subject=name,
        host=host,
        fix="cable, optic or switch port: swap with a good one, the fault follows the part that causes it",
        commands=(f"mlxlink -d {name} -m -c", f"cat /sys/class/infiniband/{name}/ports/1/rate"),
        source="leptonai/gpud, azurehpc-health-checks: one rate for all ports",
        limit_bit_per_s=slow[host, name],
        full_bit_per_s=usual,
    )


def _gpu_path(verbs: Sequence[Measurement]) -> Iterator[Cause]:
    gpu = [m for m in verbs if m.uses_gpu and m.test.endswith("bw")]
    host = [m for m in verbs if not m.uses_gpu and m.test.endswith("bw")]
    if gpu and host:
        slow, fast = min(m.bit_per_s or 0.0 for m in gpu), max(m.bit_per_s or 0.0 for m in host)
        if slow < GOOD_SHARE * fast:
            yield make_cause(
                "gpu.slow-gpudirect",
                f"from GPU memory the NIC carries {format_rate(slow)}, from the host's {format_rate(fast)}",
                [seen(min(gpu, key=lambda m: m.bit_per_s or 0.0)), seen(host[0])],
                kind="capability",
                weight=0.88,
                subject="gpu-nic",
                path="gpu",
                fix="the PCIe path between GPU and NIC: ACS off (bare metal), IOMMU in pass-through, same switch",
                commands=("nvidia-smi topo -m", "lspci -vvv | grep -i ACSCtl"),
                source="NCCL troubleshooting guide",
                limit_bit_per_s=slow,
                full_bit_per_s=fast,
            )


def _retransmits(tcp: Sequence[Measurement]) -> Iterator[Cause]:
    for measurement in tcp:
        if measurement.retransmits is None or not measurement.num_bytes:
            continue
        share = measurement.retransmits / max(1.0, measurement.num_bytes / SEGMENT_BYTES)
        if share > MANY_RETRANSMITS:
            yield make_cause(
                "tcp.retransmits",
                f"{share:.2%} of the TCP segments were sent again",
                [seen(measurement)],
                kind="capability",
                weight=0.6,
                subject="loss",
                path="tcp",
                fix="find where packets drop: NIC counters on both ends, then the switch",
                commands=("nstat -az | grep -i retrans", "ethtool -S <interface> | grep -iE 'drop|discard|crc'"),
            )


def _more_hosts_much_less(tests: Sequence[Measurement]) -> Iterator[Cause]:
    by_test: dict[str, dict[int, Measurement]] = {}
    for m in tests:
        if len(m.hosts) > 1 and m.bit_per_s:
            by_test.setdefault(m.test, {})[len(m.hosts)] = m
    for held in by_test.values():
        sizes = sorted(held)
        for few, many in pairwise(sizes):
            # On two hosts tree and NVLS read up to twice the line: only a fall beyond that is one.
            drop = (held[many].bit_per_s or 0.0) / (held[few].bit_per_s or 1.0)
            if drop < 0.4:
                added = sorted(set(held[many].hosts) - set(held[few].hosts))
                yield make_cause(
                    "fabric.added-hosts-slow",
                    f"bus bandwidth falls to {drop:.0%} with {many} hosts instead of {few}: {names(added)} or the "
                    "way there",
                    [seen(held[few]), seen(held[many])],
                    kind="capability",
                    weight=0.75,
                    severity="critical",
                    subject=names(added),
                    path="any",
                    fix="measure all pairs: a slow host, or a slow or oversubscribed link between racks, shows there",
                    commands=("wirespeed bench links --out links.json", "wirespeed doctor fabric links.json"),
                    source="nccl#1453",
                    alternatives="host and path cannot be told apart from these runs alone",
                )
                break
