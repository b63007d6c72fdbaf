"""A cluster on one machine: network namespaces as hosts, joined by links of a chosen rate.

Layers, each using only those above: layout (data), namespaces and shaping (the kernel), wiring and delay
(hosts and links), keeper (the process that is the lab), control and journal (how others find and ask it),
cluster and run (what programs use). It assumes Linux, and root or unprivileged user namespaces.
"""

from wirespeed.lab.cluster import Lab, remove_stale, stale_labs
from wirespeed.lab.layout import LabHost, LabSpec
from wirespeed.lab.run import RunResult
from wirespeed.lab.start import why_unavailable

__all__ = ["Lab", "LabHost", "LabSpec", "RunResult", "remove_stale", "stale_labs", "why_unavailable"]
