"""What to do: the legal strategies of a workload on a fabric, ranked, chosen and explained."""

from wirespeed.plan.costs import FabricCosts
from wirespeed.plan.explain import Explanation, WhatIf, best_of_each_codec, explain
from wirespeed.plan.search import MARGIN, Choice, Search, choose, costs_of, predict, rank, search
from wirespeed.plan.space import BUCKET_SIZES_BYTES, TOPK_RATIOS, legal_strategies
from wirespeed.plan.workloads import from_parameters, read_workload, workload_from_json, write_workload

__all__ = [
    "BUCKET_SIZES_BYTES",
    "MARGIN",
    "TOPK_RATIOS",
    "Choice",
    "Explanation",
    "FabricCosts",
    "Search",
    "WhatIf",
    "best_of_each_codec",
    "choose",
    "costs_of",
    "explain",
    "from_parameters",
    "legal_strategies",
    "predict",
    "rank",
    "read_workload",
    "search",
    "workload_from_json",
    "write_workload",
]
