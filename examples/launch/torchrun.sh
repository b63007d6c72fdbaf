#!/usr/bin/env bash
# One line per host, on every host, with the same RDZV (host:port of the first one):
#
#   NNODES=4 RDZV=node01:29500 ./torchrun.sh train.py --batch-size 64
#
# torchrun starts a rank per GPU (or NPROC of them); `wirespeed launch` puts each next to its device: the cores of its
# NUMA node, the RDMA devices that carry training, SCHED_BATCH where gloo does the work. A rank that dies takes the
# others down, and torchrun starts all again, at most MAX_RESTARTS times: save checkpoints.
set -euo pipefail

NNODES=${NNODES:-1}
NPROC=${NPROC:-gpu}
RDZV=${RDZV:-localhost:0}
MAX_RESTARTS=${MAX_RESTARTS:-0}
PYTHON=${PYTHON:-python}

exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$NNODES" \
    --nproc-per-node "$NPROC" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$RDZV" \
    --rdzv-id "${RDZV_ID:-wirespeed}" \
    --max-restarts "$MAX_RESTARTS" \
    --no-python \
    "$PYTHON" -m wirespeed launch ${LAUNCH_OPTIONS:-} -- "$PYTHON" "$@"
