"""Who am I in this distributed program: rank, world size and master, from the launcher's environment.

Works under torchrun, srun, mpirun (Open MPI, MPICH, Intel MPI) and ``wirespeed lab run``. Nothing here opens
a socket.
"""

from wirespeed.launch.hostlist import expand_hostlist
from wirespeed.launch.launchers import Ranks, is_launched, ranks

__all__ = ["Ranks", "expand_hostlist", "is_launched", "ranks"]
