"""Communication-efficient training: one line in a script that uses DistributedDataParallel.

    session = wirespeed.train.attach(ddp_model, optimizer)          # or strategy="int8", a Strategy, a strategy.toml

Importing this room imports torch.
"""

from wirespeed.spec.strategy import Strategy
from wirespeed.train.attach import attach
from wirespeed.train.report import SessionReport
from wirespeed.train.session import Session

__all__ = ["Session", "SessionReport", "Strategy", "attach"]
