"""A worker process: one instance of one model, fed through shared memory.

``python -m wirespeed.serve.worker SOCKET MEMORY``.

It ends when the server does: the kernel closes the socket, and is asked to kill it besides.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys

from wirespeed.errors import WirespeedError
from wirespeed.serve.backends import Backend, load_backend
from wirespeed.serve.channel import (
    MAX_WORD_BYTES,
    TO_WORKER,
    Failed,
    FromWorker,
    Half,
    Load,
    Placed,
    Ran,
    Ready,
    Run,
    encode,
    map_memory,
)
from wirespeed.serve.config import ModelConfig
from wirespeed.serve.executor import Executor, Outcome
from wirespeed.serve.tensors import Tensor

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Serve batches until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle: it drains
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = socket.socket(fileno=int(arguments[0]))
    channel.setblocking(True)
    memory_fd = int(arguments[1])
    first = TO_WORKER.decode(channel.recv(MAX_WORD_BYTES))
    assert isinstance(first, Load)
    config = first.config
    if config.instances.threads:
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(config.instances.threads)
    memory = map_memory(memory_fd, first.half_bytes)
    os.close(memory_fd)
    inputs, outputs = Half(memory, 0, first.half_bytes), Half(memory, first.half_bytes, first.half_bytes)
    try:
        executor = Executor(config, _backend_of(config))
        loaded = executor.load()
    except Exception as fault:
        text = str(fault) if isinstance(fault, WirespeedError) else f"{type(fault).__name__}: {fault}"
        channel.send(encode(Failed(text=text[:4096])))
        return 1
    channel.send(encode(Ready(loaded=loaded)))
    with contextlib.suppress(ConnectionError):
        _serve(channel, executor, inputs, outputs)
    executor.close()
    return 0


def _backend_of(config: ModelConfig) -> Backend:
    if config.tensor_parallel == 1:
        return load_backend(config.backend)
    from wirespeed.serve.tensor_parallel import ShardedBackend

    return ShardedBackend(config)


def _serve(channel: socket.socket, executor: Executor, inputs: Half, outputs: Half) -> None:
    while packet := channel.recv(MAX_WORD_BYTES):
        word = TO_WORKER.decode(packet)
        assert isinstance(word, Run)
        outcome = executor.run([inputs.get(placed) for placed in word.tensors], word.batch)
        channel.send(encode(_answer(word.number, outcome, outputs)))


def _answer(number: int, outcome: Outcome, outputs: Half) -> FromWorker:
    outputs.begin()

    def put(tensor: Tensor) -> Placed:
        return outputs.put(tensor.name, tensor.datatype, tensor.shape, (tensor.data,))

    try:
        tensors = None if outcome.tensors is None else [put(tensor) for tensor in outcome.tensors]
        apart = [one if isinstance(one, str) else [put(tensor) for tensor in one] for one in outcome.apart]
    except WirespeedError as fault:
        return Ran(
            number=number, tensors=None, apart=[str(fault)], compute_ns=outcome.compute_ns, num_runs=outcome.num_runs
        )
    return Ran(number=number, tensors=tensors, apart=apart, compute_ns=outcome.compute_ns, num_runs=outcome.num_runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
