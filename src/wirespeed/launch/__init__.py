"""Who am I in this distributed program: rank, world size and master, from the launcher's environment.

Works under torchrun, srun, mpirun (Open MPI, MPICH, Intel MPI) and ``wirespeed lab run``. Nothing here opens
a socket. ``devices``, ``binding``, ``traffic`` and ``start`` are `wirespeed launch`: which cores, NICs and marks a rank
should have, from sysfs, and becoming the user's program there.
"""

from wirespeed.launch.hostlist import expand_hostlist
from wirespeed.launch.launchers import Ranks, is_launched, ranks, torch_environment

__all__ = ["Ranks", "expand_hostlist", "is_launched", "ranks", "torch_environment"]
