"""What to do: the legal strategies of a workload on a fabric, ranked, chosen and explained."""

from wirespeed.plan.search import MARGIN, Choice, Search, choose, predict, rank, search
from wirespeed.plan.space import BUCKET_SIZES_BYTES, TOPK_RATIOS, legal_strategies

__all__ = [
    "BUCKET_SIZES_BYTES",
    "MARGIN",
    "TOPK_RATIOS",
    "Choice",
    "Search",
    "choose",
    "legal_strategies",
    "predict",
    "rank",
    "search",
]
