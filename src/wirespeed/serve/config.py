"""What ``model.toml`` says about a model, checked as a whole when it is read. docs/guides/serve.md lists every field.

Shapes leave out the rows where the model batches (``max_rows`` above 0). A dimension is a number, or a name where it
varies; -1 is a name that is not shared. Dimensions of one name are padded together where ``pad`` names them.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from wirespeed.errors import DataError, UsageError, WirespeedError
from wirespeed.serve.batcher import BatchPolicy
from wirespeed.serve.tensors import DATATYPES
from wirespeed.units import MIB, parse_duration, parse_size

SCHEMA = 1
FILE_NAME = "model.toml"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")

Dimension = int | str


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input or output. ``is_optional``: a request may leave the input out."""

    name: str
    datatype: str
    shape: tuple[Dimension, ...]
    is_optional: bool = False

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPES:
            raise UsageError(f"got datatype {self.datatype!r} of {self.name!r}", expected=", ".join(DATATYPES))
        if any(isinstance(size, int) and size < -1 for size in self.shape):
            raise UsageError(f"got shape {list(self.shape)} of {self.name!r}", expected="sizes from 0, -1, or names")

    @property
    def protocol_shape(self) -> list[int]:
        """The shape as the protocol gives it: -1 where it varies."""
        return [size if isinstance(size, int) else -1 for size in self.shape]


class Batching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See batcher.BatchPolicy. ``pad``: names of dimensions that are filled up so that mixed shapes share a batch."""

    max_rows: int = 0
    max_delay: str = "2 ms"
    pad: tuple[str, ...] = ()
    pad_value: float = 0.0


class Queue(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what waits. ``timeout``: for requests that come without a deadline."""

    max_rows: int = 1024
    max_size: str = "512 MiB"
    timeout: str = "60 s"


class Instances(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model runs. ``threads``: of its numeric libraries, each instance; 0 leaves them alone.

    ``isolation``: "process" (a crash or a blocked interpreter does not touch the server) or "thread" (no copy to
    another process; for models that are quick and known to behave).
    """

    count: int = 1
    isolation: Literal["process", "thread"] = "process"
    threads: int = 0
    start_timeout: str = "120 s"
    run_timeout: str = "60 s"
    max_batch_size: str = "256 MiB"
    """Memory for the inputs of one batch, and as much for its outputs."""


class Stage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a model in stages: a model of this server, or of the node at ``node``."""

    model: str
    node: str = ""


class Reference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch on which an update is compared with what is live, before it is: see drift.py."""

    file: str = ""
    max_drift: float = math.inf


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model as configured. ``folder`` is where its files are; it is not written in the file."""

    backend: str
    schema: int = SCHEMA
    name: str = ""
    version: str = "1"
    file: str = ""
    input: tuple[TensorSpec, ...] = ()
    output: tuple[TensorSpec, ...] = ()
    batching: Batching = Batching()
    queue: Queue = Queue()
    instances: Instances = Instances()
    stages: tuple[Stage, ...] = ()
    """Of the backend "stages": see staged.py."""
    micro_rows: int = 0
    """How many rows go through the stages together; 0: all of a request."""
    tensor_parallel: int = 1
    """Processes that share each layer of an instance: see tensor_parallel.py."""
    reference: Reference = Reference()
    idempotent: bool = True
    """Whether a request may be run again when its worker died."""
    parameters: dict[str, str | int | float | bool] = {}
    """For the backend and the model's own code."""
    folder: str = ""

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise DataError(f"got schema {self.schema}", expected=f"{SCHEMA}", hint="a newer wirespeed wrote this file")
        if self.name and _NAME.fullmatch(self.name) is None:
            raise UsageError(f"got model name {self.name!r}", expected="letters, digits and _ . + -")
        for what, specs in (("input", self.input), ("output", self.output)):
            names = [spec.name for spec in specs]
            if len(set(names)) != len(names):
                raise UsageError(f"got two {what}s of one name: {', '.join(names)}")
        if self.instances.count < 1:
            raise UsageError(f"got {self.instances.count} instances", expected="1 or more")
        if self.stages and self.backend != "stages":
            raise UsageError(f"got stages and backend {self.backend!r}", expected='backend = "stages"')
        if not 1 <= self.tensor_parallel <= 64:
            raise UsageError(f"got tensor_parallel of {self.tensor_parallel}", expected="1 to 64")
        if self.tensor_parallel > 1 and (self.backend != "python" or self.instances.isolation != "process"):
            raise UsageError(
                f"got tensor_parallel with backend {self.backend!r} and isolation {self.instances.isolation!r}",
                expected='backend = "python", whose model splits its module, and processes',
            )
        if self.micro_rows < 0:
            raise UsageError(f"got micro_rows of {self.micro_rows}", expected="0 or more")
        if not self.reference.max_drift >= 0:
            raise UsageError(f"got max_drift of {self.reference.max_drift}", expected="0 or more")
        if self.batching.pad and not self.batching.max_rows:
            raise UsageError("got pad without max_rows", expected="batching.max_rows above 0")
        named = {size for spec in self.input for size in spec.shape if isinstance(size, str)}
        if not set(self.batching.pad) <= named:
            raise UsageError(
                f"got pad of {', '.join(self.batching.pad)}",
                expected=f"among the inputs' named dimensions: {', '.join(sorted(named)) or 'none'}",
            )
        _ = self.policy, self.queue_timeout_s, self.start_timeout_s, self.run_timeout_s, self.max_batch_bytes

    @property
    def policy(self) -> BatchPolicy:
        """The batcher's bounds."""
        return BatchPolicy(
            max_rows=self.batching.max_rows,
            max_delay_s=parse_duration(self.batching.max_delay),
            max_queue_rows=self.queue.max_rows,
            max_queue_bytes=parse_size(self.queue.max_size),
        )

    @property
    def queue_timeout_s(self) -> float:
        """The deadline of requests that bring none."""
        return parse_duration(self.queue.timeout)

    @property
    def start_timeout_s(self) -> float:
        """How long an instance may take to load."""
        return parse_duration(self.instances.start_timeout)

    @property
    def run_timeout_s(self) -> float:
        """How long one batch may take before its worker is taken for hung."""
        return parse_duration(self.instances.run_timeout)

    @property
    def max_batch_bytes(self) -> int:
        """See Instances.max_batch_size."""
        size = parse_size(self.instances.max_batch_size)
        if not MIB <= size <= 2**36:
            raise UsageError(f"got max_batch_size of {size} bytes", expected="1 MiB to 64 GiB")
        return size


def read_config(folder: Path, *, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """The configuration in a model's folder. Raises DataError naming the file and the field that is wrong."""
    path = folder / FILE_NAME
    try:
        content = path.read_bytes()
    except OSError as fault:
        raise DataError(
            f"cannot read {path}: {fault.strerror}", hint="a model is a folder with a model.toml"
        ) from fault
    try:
        held = msgspec.toml.decode(content)
        for key, value in (overrides or {}).items():
            held[key] = {**held.get(key, {}), **value} if isinstance(value, dict) else value
        held.setdefault("name", folder.name)
        held["folder"] = str(folder.resolve())
        return msgspec.convert(held, ModelConfig)
    except WirespeedError as fault:
        raise DataError(f"{path}: {fault.problem}", expected=fault.expected, hint=fault.hint) from fault
    except (msgspec.MsgspecError, AttributeError, TypeError) as fault:
        raise DataError(f"{path}: {fault}", hint="docs/guides/serve.md lists the fields") from fault
