"""One instance over several processes of a host, each with a part of every large layer: tensor parallel.

    backend = "python"
    tensor_parallel = 2

The split is torch's own: ``Model.__init__`` hands its module to ``torch.distributed.tensor.parallel``:

    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from wirespeed.serve.tensor_parallel import mesh

    class Model:
        def __init__(self, config):
            self.module = parallelize_module(make(), mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})

The worker is rank 0 and starts the others, on a device of its own each where there are as many (nccl), else on the CPU
(gloo). All get every batch, call ``infer`` with it, and rank 0 answers. A batch that fails must fail on all ranks
alike, which data does; a rank that ends takes the instance with it, and the server starts it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from wirespeed.errors import DataError, PeerFailure, UsageError
from wirespeed.serve.backends import Backend, Batch, Loaded, load_backend
from wirespeed.serve.config import ModelConfig
from wirespeed.serve.tensors import from_array

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed import Store  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import DeviceMesh

    from wirespeed.serve.backends.base import Arrays

_PR_SET_PDEATHSIG = 1
_HOST = "127.0.0.1"


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the bytes of a batch: name, type and shape of each input, and whose rows they are."""

    inputs: list[tuple[str, str, tuple[int, ...]]]
    batch: Batch


def mesh() -> DeviceMesh:
    """The ranks of this instance, as torch's tensor parallel wants them. Raises UsageError outside of one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        raise UsageError(
            "this model does not run in tensor parallel", expected="tensor_parallel = 2 or more in model.toml"
        )
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(dist.get_rank())
    return init_device_mesh(kind, (dist.get_world_size(),))


class ShardedBackend:
    """Rank 0's end of an instance: a backend like any other, that has the other ranks do the same."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._inner: Backend = load_backend(config.backend)
        self._others: list[subprocess.Popen[bytes]] = []

    def load(self, config: ModelConfig) -> Loaded:
        """Start the other ranks and load the model on all of them. Raises DataError with what failed where."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        size, timeout = config.tensor_parallel, timedelta(seconds=config.start_timeout_s)
        store = TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
        for rank in range(1, size):
            command = [sys.executable, "-m", "wirespeed.serve.tensor_parallel", str(store.port), str(rank)]
            # What models print goes to stderr, as the worker's own does.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno())
            self._others.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(msgspec.msgpack.encode(config))
        _join_group(store, 0, config, alive=self._check_alive)
        try:
            loaded = self._inner.load(config)
        except RuntimeError:
            # Where another rank failed first, rank 0 only saw its connections close.
            time.sleep(0.1)
            self._raise_failed_load(store)
            raise
        end_s = time.monotonic() + config.start_timeout_s
        for rank in range(1, size):
            while not store.check([f"loaded-{rank}"]):
                self._check_alive()
                if time.monotonic() > end_s:
                    raise PeerFailure(f"rank {rank} of model {config.name!r} did not load in time")
                time.sleep(0.01)
        self._raise_failed_load(store)
        return loaded

    def _raise_failed_load(self, store: Store) -> None:
        for rank in range(1, self._config.tensor_parallel):
            if store.check([f"loaded-{rank}"]) and (text := store.get(f"loaded-{rank}").decode()):
                raise DataError(f"rank {rank}: {text}")

    def infer(self, inputs: Arrays, batch: Batch) -> Arrays:
        """See Backend.infer. Ends the process where another rank has ended: nothing can be computed any more."""
        try:
            self._check_alive()
            _send(inputs, batch)
            return self._inner.infer(inputs, batch)
        except PeerFailure as fault:
            raise SystemExit(str(fault)) from fault
        except RuntimeError as fault:
            time.sleep(0.1)  # how a rank ended is known a moment after its connections have closed
            try:
                self._check_alive()
            except PeerFailure as ended:
                raise SystemExit(str(ended)) from fault
            raise

    def close(self) -> None:
        """See Backend.close. The other ranks end too."""
        with contextlib.suppress(RuntimeError):
            if all(process.poll() is None for process in self._others):
                _send_end()
        for process in self._others:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._inner.close()
        _leave_group()

    def _check_alive(self) -> None:
        for rank, process in enumerate(self._others, start=1):
            status = process.poll()
            if status is not None:
                how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
                raise PeerFailure(f"rank {rank} of model {self._config.name!r} ended: {how}")


def _join_group(store: Store, rank: int, config: ModelConfig, *, alive: Any = None) -> None:
    import torch
    import torch.distributed as dist

    size = config.tensor_parallel
    has_devices = torch.cuda.is_available() and torch.cuda.device_count() >= size
    if has_devices:
        torch.cuda.set_device(rank)
    if config.instances.threads:
        torch.set_num_threads(config.instances.threads)
    # Rank 0 waits for the others here, and one that could not even start would be waited for in vain.
    store.set(f"here-{rank}", "")
    end_s = time.monotonic() + config.start_timeout_s
    while alive is not None and not store.check([f"here-{other}" for other in range(size)]):
        alive()
        if time.monotonic() > end_s:
            raise PeerFailure(f"not all {size} ranks of model {config.name!r} came up in time")
        time.sleep(0.01)
    timeout = timedelta(seconds=config.run_timeout_s)
    dist.init_process_group("nccl" if has_devices else "gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _leave_group() -> None:
    """A process that still holds a gloo group can abort while the interpreter is taken down."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()


def _send(inputs: Arrays, batch: Batch) -> None:
    import numpy as np
    import torch

    described, parts = [], []
    for name, array in inputs.items():
        if array.dtype.hasobject:
            raise DataError(f"input {name!r} is of BYTES", expected="numbers, under tensor_parallel")
        tensor = from_array(name, array)
        described.append((name, array.dtype.str, array.shape))
        parts.append(np.frombuffer(tensor.data, np.uint8) if array.size else np.empty(0, np.uint8))
    head = msgspec.msgpack.encode(_Head(inputs=described, batch=batch))
    content = np.concatenate([np.frombuffer(head, np.uint8), *parts])
    _broadcast(torch.tensor([len(head), content.size]))
    _broadcast(torch.from_numpy(content))


def _send_end() -> None:
    import torch

    _broadcast(torch.tensor([0, 0]))


def _receive() -> tuple[dict[str, np.ndarray[Any, Any]], Batch] | None:
    import numpy as np
    import torch

    num_head, num_bytes = _broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
    if num_bytes == 0:
        return None
    content = _broadcast(torch.empty(num_bytes, dtype=torch.uint8)).numpy()
    head = msgspec.msgpack.decode(content[:num_head].tobytes(), type=_Head)
    inputs: dict[str, np.ndarray[Any, Any]] = {}
    at = num_head
    for name, dtype, shape in head.inputs:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        inputs[name] = np.frombuffer(content[at : at + size].tobytes(), np.dtype(dtype)).reshape(shape)
        at += size
    return inputs, head.batch


def _broadcast(values: Any) -> Any:
    """From rank 0, by way of the device where the group's collectives are the device's."""
    import torch
    import torch.distributed as dist

    if dist.get_backend() == "nccl":
        there = values.to(torch.device("cuda", torch.cuda.current_device()))
        dist.broadcast(there, src=0)
        return there.cpu()
    dist.broadcast(values, src=0)
    return values


def main(arguments: Sequence[str]) -> int:
    """Another rank: ``python -m wirespeed.serve.tensor_parallel PORT RANK``, its model's configuration on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        return 1  # the worker had ended before that
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ModelConfig)
    port, rank = map(int, arguments)
    timeout = timedelta(seconds=config.start_timeout_s)
    store = TCPStore(_HOST, port, config.tensor_parallel, is_master=False, timeout=timeout)
    _join_group(store, rank, config)
    backend = load_backend(config.backend)
    try:
        backend.load(config)
    except Exception as fault:
        store.set(f"loaded-{rank}", f"{type(fault).__name__}: {fault}"[:2000])
        return 1
    store.set(f"loaded-{rank}", "")
    while (received := _receive()) is not None:
        inputs, batch = received
        for array in inputs.values():
            array.flags.writeable = False
        with contextlib.suppress(Exception):  # rank 0 has the same one, and tells it
            backend.infer(inputs, batch)
    backend.close()
    _leave_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
