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

# torchrun keeps its store over a restart, with the addresses of the ranks that died, and gloo then dials those (seen with
# torch 2.13: "Gloo connectFullMesh failed ... Connection refused"). With this every life has a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}

exec "$PYTHON" -m torch.distributed.run \
    --nnodes "$NNODES" \
    --nproc-per-node "$NPROC" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$RDZV" \
    --rdzv-id "${RDZV_ID:-wirespeed}" \
    --max-restarts "$MAX_RESTARTS" \
    --no-python \
    "$PYTHON" -m wirespeed launch ${LAUNCH_OPTIONS:-} -- "$PYTHON" "$@"
