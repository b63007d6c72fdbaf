"""``wirespeed.v1.Inference/Predict``: one blob in, one blob out, success and error in the answer itself.

The model must have one input and one output. What the bytes are follows from the model: a BYTES input gets them as one
element; a numeric input gets them as they are, with ``shape`` from the parameters, or the model's own where only one
dimension is open.
"""

from __future__ import annotations

import math
import time
from typing import cast

from wirespeed.serve._generated import predict_pb2
from wirespeed.serve.doors import Desk, as_failure, only_model
from wirespeed.serve.model import Model
from wirespeed.serve.requests import InferRequest
from wirespeed.serve.status import Reason, RequestFailed
from wirespeed.serve.tensors import ITEM_BYTES, Tensor


async def predict(desk: Desk, message: bytes, *, deadline_s: float) -> bytes:
    """Answer a PredictRequest. A failed inference is an answer with ``success`` false, as the message has it."""
    begin_s = time.perf_counter()
    response = predict_pb2.PredictResponse()
    try:
        try:
            request = predict_pb2.PredictRequest.FromString(message)
        except Exception as fault:
            raise RequestFailed(
                f"got a message that is not a PredictRequest: {fault}", reason=Reason.INVALID
            ) from fault
        response.request_id = request.request_id
        given = dict(request.parameters)
        name = given.pop("model", "") or only_model(desk)
        model = desk.models.get(name, given.pop("version", ""))
        tensor = _input(model, request.input_data, given.pop("shape", ""))
        outputs = await desk.infer(
            name, "", InferRequest([tensor], id=request.request_id, parameters=dict(given), deadline_s=deadline_s)
        )
        response.output_data = _output(outputs, is_batching=model.config.batching.max_rows > 0)
        response.success = True
    except Exception as fault:
        response.error_message = str(as_failure(fault))
    response.latency_ms = (time.perf_counter() - begin_s) * 1e3
    return cast(bytes, response.SerializeToString())


def _input(model: Model, data: bytes, shape_text: str) -> Tensor:
    if len(model.inputs) != 1:
        names = ", ".join(spec.name for spec in model.inputs)
        raise RequestFailed(
            f"model {model.config.name!r} has the inputs {names}",
            reason=Reason.INVALID,
            expected="one input",
            hint="use ModelInfer",
        )
    spec = model.inputs[0]
    lead = (1,) if model.config.batching.max_rows else ()
    if spec.datatype == "BYTES":
        return Tensor(spec.name, "BYTES", (*lead, *([1] * len(spec.shape))), len(data).to_bytes(4, "little") + data)
    if shape_text:
        try:
            shape = tuple(int(size) for size in shape_text.split(","))
        except ValueError:
            raise RequestFailed(
                f"got shape {shape_text!r}", reason=Reason.INVALID, expected='numbers such as "1,16"'
            ) from None
        return Tensor(spec.name, spec.datatype, shape, data)
    sizes = [*lead, *spec.protocol_shape]
    if sizes.count(-1) == 1:
        known = math.prod(size for size in sizes if size != -1) * ITEM_BYTES[spec.datatype]
        sizes[sizes.index(-1)] = len(data) // known if known else 0
    if -1 in sizes:
        raise RequestFailed(
            f"the shape {sizes} of input {spec.name!r} is open", reason=Reason.INVALID, expected='the parameter "shape"'
        )
    return Tensor(spec.name, spec.datatype, tuple(sizes), data)


def _output(outputs: list[Tensor], *, is_batching: bool) -> bytes:
    if len(outputs) != 1:
        names = ", ".join(tensor.name for tensor in outputs)
        raise RequestFailed(
            f"the model has the outputs {names}", reason=Reason.INVALID, expected="one output", hint="use ModelInfer"
        )
    tensor = outputs[0]
    data = bytes(tensor.data)
    is_one = tensor.datatype == "BYTES" and math.prod(tensor.shape) == 1
    return data[4:] if is_one else data
