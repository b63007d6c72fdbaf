"""wirespeed: find, predict and remove the network bottleneck of distributed AI.

One loop: measure -> model -> predict -> apply -> measure again. The rooms, each importing only from lower rows:

    cli                                  the command `wirespeed`
    tune                                 the loop over a real script
    report                               tables and HTML from records
    doctor | train                       what is wrong | communication-efficient training (torch)
    plan | lab                           what to do | a virtual cluster
    sim | measure                        what would happen | what does happen
    fabric | launch                      what the network is | who and where the ranks are
    spec                                 the shared nouns: strategy, workload, prediction, comparison
    records                              versioned results and their JSON
    units | system                       text to numbers | the door to /proc, /sys, subprocesses
    errors                               the error tree

Importing this module does nothing else.
"""

from wirespeed.errors import (
    DataError,
    InternalError,
    MissingCapability,
    PeerFailure,
    UsageError,
    WirespeedError,
    WorkloadFailure,
)

__all__ = [
    "DataError",
    "InternalError",
    "MissingCapability",
    "PeerFailure",
    "UsageError",
    "WirespeedError",
    "WorkloadFailure",
    "__version__",
]

__version__ = "0.1.0"
