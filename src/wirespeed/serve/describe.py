"""What clients ask about the server and its models, as protobuf messages; the REST door gives the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import wirespeed
from wirespeed.serve._generated import open_inference_pb2 as pb
from wirespeed.serve.config import TensorSpec
from wirespeed.serve.model import Model
from wirespeed.serve.statistics import ModelStatistics

EXTENSIONS = (
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)


def server_metadata(name: str, *, has_shared_memory: bool) -> pb.ServerMetadataResponse:
    """Name, version, and the extensions that this server really has."""
    extensions = (*EXTENSIONS, "system_shared_memory") if has_shared_memory else EXTENSIONS
    return pb.ServerMetadataResponse(name=name, version=wirespeed.__version__, extensions=extensions)


def model_metadata(model: Model) -> pb.ModelMetadataResponse:
    """Inputs and outputs. Shapes begin with -1 where the model batches."""
    lead = [-1] if model.config.batching.max_rows else []

    def described(specs: Sequence[TensorSpec]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
        return [
            pb.ModelMetadataResponse.TensorMetadata(name=s.name, datatype=s.datatype, shape=[*lead, *s.protocol_shape])
            for s in specs
        ]

    return pb.ModelMetadataResponse(
        name=model.config.name,
        versions=[model.config.version],
        platform=model.platform,
        inputs=described(model.inputs),
        outputs=described(model.outputs),
    )


def model_config(model: Model) -> pb.ModelConfig:
    """The configuration in the protocol's terms. Dimensions leave out the rows."""
    config = model.config
    described = pb.ModelConfig(
        name=config.name,
        platform=model.platform,
        backend=config.backend,
        max_batch_size=config.batching.max_rows,
        input=[pb.ModelInput(name=s.name, data_type=_type(s.datatype), dims=s.protocol_shape) for s in model.inputs],
        output=[pb.ModelOutput(name=s.name, data_type=_type(s.datatype), dims=s.protocol_shape) for s in model.outputs],
        instance_group=[
            pb.ModelInstanceGroup(name=config.name, count=config.instances.count, kind=pb.ModelInstanceGroup.KIND_CPU)
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=False),
    )
    if config.batching.max_rows:
        described.dynamic_batching.max_queue_delay_microseconds = round(config.policy.max_delay_s * 1e6)
    for name, value in config.parameters.items():
        described.parameters[name].string_value = str(value)
    return described


def _type(datatype: str) -> Any:
    return pb.DataType.Value("TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}")


def model_statistics(model: Model) -> pb.ModelStatistics:
    """Counters since the model was loaded."""
    s: ModelStatistics = model.statistics
    held = pb.ModelStatistics(
        name=model.config.name,
        version=model.config.version,
        last_inference=s.last_unix_ms,
        inference_count=s.num_rows,
        execution_count=s.num_executions,
    )
    for field, count, ns in (
        ("success", s.num_success, s.success_ns),
        ("fail", s.num_failed, s.failed_ns),
        ("queue", s.num_success, s.queue_ns),
        ("compute_input", s.num_success, 0),
        ("compute_infer", s.num_success, s.compute_ns),
        ("compute_output", s.num_success, s.output_ns),
    ):
        duration = getattr(held.inference_stats, field)
        duration.count, duration.ns = count, ns
    for rows, (count, ns) in sorted(s.batches.items()):
        batch = held.batch_stats.add(batch_size=rows)
        batch.compute_infer.count, batch.compute_infer.ns = count, ns
        batch.compute_input.count = batch.compute_output.count = count
    return held
