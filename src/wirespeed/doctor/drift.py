"""What differs between hosts that should be alike: facts side by side, the majority first.

A fact that belongs to one host (traffic, open connections) is left out. Where two values are equally common nobody can
say which is right, and nothing is called usual.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from wirespeed.doctor.check import SEVERITIES, Severity
from wirespeed.doctor.reports import Drift, HostReport

NOT_SEEN = "(not seen)"
_OWN = re.compile(r"counters\..*|tcp\.connections|launch\.(?:MASTER_|.*RANK).*|route\.port\..*|gpu\..*\.nearest")
# A difference here breaks or slows a job; elsewhere it is worth knowing.
_GRAVE = re.compile(
    r"nic\..*\.(?:mtu|speed)|rdma\..*\.(?:roce-mtu|rate|gid-index|pfc)|rdma\.devices|host\.gpus|gpu\.direct|"
    r"launch\.(?:NCCL|GLOO).*|net\.ipv4\.tcp_congestion_control|pci\..*\.link|rdma\.memlock"
)


def drift(reports: Sequence[HostReport]) -> tuple[Drift, ...]:
    """Facts on which at least one host differs, the gravest and then the rarest difference first."""
    if len(reports) < 2:
        return ()
    by_key: dict[str, dict[str, str]] = defaultdict(dict)
    for report in reports:
        for fact in report.facts:
            if _OWN.fullmatch(fact.key) is None:
                by_key[fact.key][report.host] = fact.value
    found = []
    for key, values in by_key.items():
        hosts_of: dict[str, list[str]] = defaultdict(list)
        for report in reports:
            hosts_of[values.get(report.host, NOT_SEEN)].append(report.host)
        if len(hosts_of) < 2:
            continue
        ordered = sorted(hosts_of.items(), key=lambda item: (-len(item[1]), item[0]))
        has_majority = len(ordered[0][1]) > len(ordered[1][1])
        found.append(
            Drift(
                key=key,
                severity=_severity(key, set(hosts_of)),
                usual=ordered[0][0] if has_majority else None,
                hosts_of={value: tuple(hosts) for value, hosts in ordered},
            )
        )
    return tuple(sorted(found, key=lambda d: (SEVERITIES.index(d.severity), d.num_differing, d.key)))


def _severity(key: str, values: set[str]) -> Severity:
    # A fact that some hosts could not read may well be equal there.
    return "warning" if _GRAVE.fullmatch(key) is not None and len(values - {NOT_SEEN}) > 1 else "notice"


def fold_hosts(hosts: Sequence[str]) -> str:
    """``node[01-03,07]`` from names; the opposite of ``launch.expand_hostlist`` for names that end in a number."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for host in hosts:
        match = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", host)
        if match is None:
            groups.setdefault((host, "", 0), [])
        else:
            groups.setdefault((match[1], match[3], len(match[2])), []).append(int(match[2]))
    return ",".join(_fold(prefix, suffix, width, numbers) for (prefix, suffix, width), numbers in groups.items())


def _fold(prefix: str, suffix: str, width: int, numbers: list[int]) -> str:
    if not numbers:
        return prefix
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in runs]
    inner = parts[0] if len(parts) == 1 and "-" not in parts[0] else f"[{','.join(parts)}]"
    return f"{prefix}{inner}{suffix}"
