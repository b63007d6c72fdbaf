"""Laws of the doors: a message means the same however it is read, and nonsense is one clear error, never another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wirespeed.errors import DataError
from wirespeed.serve import http_codec, infer_codec
from wirespeed.serve._generated import open_inference_pb2 as pb
from wirespeed.serve.client import decode_response, encode_request
from wirespeed.serve.infer_codec import Wanted
from wirespeed.serve.shared_memory import SharedMemory
from wirespeed.serve.status import RequestFailed
from wirespeed.serve.tensors import DATATYPES, ITEM_BYTES, Tensor, check, from_array, split_rows, to_array

NO_MEMORY = SharedMemory(is_allowed=False)
names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)


def to_request(message: bytes) -> tuple[infer_codec.InferRequest, Wanted]:
    return infer_codec.to_request(message, NO_MEMORY, now_s=0.0)


@settings(max_examples=60)
@given(names, names, st.lists(st.tuples(names, st.integers(0, 200_000)), max_size=4), st.lists(names, max_size=3))
def test_a_walked_message_is_what_the_library_reads(
    model: str, request_id: str, inputs: list[tuple[str, int]], outputs: list[str]
) -> None:
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    message.parameters["priority"].int64_param = 3
    for place, (name, size) in enumerate(inputs):
        message.inputs.add(name=name, datatype="UINT8", shape=[size])
        message.raw_input_contents.append(bytes([place]) * size)
    for name in outputs:
        message.outputs.add(name=name)
    raw = message.SerializeToString()
    rest, found = infer_codec._walk(raw)
    assert [bytes(view) for view in found] == list(message.raw_input_contents)
    whole = pb.ModelInferRequest.FromString(rest)
    whole.raw_input_contents.extend(bytes(view) for view in found)
    assert whole == message


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_garbage_is_refused_whichever_way_it_is_read(data: bytes, is_large: bool) -> None:
    if is_large:  # the way of large messages: walked here
        data = data + b"\x3a" + b"\x80\x80\x08" + bytes(2**17)
    refused = ""
    try:
        to_request(data)
    except RequestFailed as fault:
        refused = fault.reason.value
    assert refused in ("", "INVALID_ARGUMENT", "UNIMPLEMENTED")


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 299), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_request_is_refused_or_still_a_request(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(
        encode_request(
            "m", [from_array("x", np.arange(40, dtype=np.float32).reshape(2, 20))], ["y"], {"a": 1, "b": "c"}
        )
    )
    for place, value in changes:
        raw[place % len(raw)] = value
    try:
        request, _ = to_request(bytes(raw))
        for tensor in request.inputs:
            check(tensor)
    except (RequestFailed, DataError):
        pass


@settings(max_examples=300)
@given(
    st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)), st.one_of(st.none(), st.text(max_size=4))
)
def test_a_body_that_is_not_a_request_is_refused(body: bytes, json_length: str | None) -> None:
    with pytest.raises(RequestFailed):
        http_codec.to_request("m", "", body, json_length, NO_MEMORY, now_s=0.0, deadline_s=1.0)


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(json_values, st.sampled_from(DATATYPES), st.lists(st.integers(-2, 4), max_size=3))
def test_json_data_of_any_kind_is_a_tensor_of_its_shape_or_refused(
    data: object, datatype: str, shape: list[int]
) -> None:
    import msgspec

    body = msgspec.json.encode({"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}]})
    try:
        request, _ = http_codec.to_request("m", "", body, None, NO_MEMORY, now_s=0.0, deadline_s=1.0)
        check(request.inputs[0])
    except (RequestFailed, DataError):
        return
    assert to_array(request.inputs[0]).shape == tuple(shape)


@given(st.sampled_from(DATATYPES), st.lists(st.integers(-3, 6), max_size=4), st.integers(0, 100))
def test_a_shape_is_accepted_only_with_exactly_its_bytes(datatype: str, shape: list[int], size: int) -> None:
    tensor = Tensor("x", datatype, tuple(shape), bytes(size))
    count = int(np.prod(shape)) if all(n >= 0 for n in shape) else -1
    # A BYTES element of zeros is an empty one of four bytes.
    right = count >= 0 and size == count * (4 if datatype == "BYTES" else ITEM_BYTES[datatype])
    if right:
        check(tensor)
        assert to_array(tensor).shape == tuple(shape)
    else:
        with pytest.raises(DataError):
            check(tensor)


@given(st.lists(st.binary(max_size=9), max_size=30), st.integers(1, 3), st.randoms())
def test_rows_of_texts_and_numbers_split_to_their_owners(texts: list[bytes], width: int, rng: object) -> None:
    rows = len(texts) // width
    held = np.array(texts[: rows * width], dtype=object).reshape(rows, width)
    numbers = np.arange(rows * width, dtype=np.int16).reshape(rows, width)
    cuts, left = [], rows
    while left:
        cuts.append(rng.randint(1, left))  # type: ignore[attr-defined]
        left -= cuts[-1]
    place = 0
    parts = list(
        zip(cuts, split_rows(from_array("t", held), cuts), split_rows(from_array("n", numbers), cuts), strict=True)
    )
    for count, text_part, number_part in parts:
        assert to_array(text_part).tolist() == held[place : place + count].tolist()
        assert to_array(number_part).tolist() == numbers[place : place + count].tolist()
        place += count
    with pytest.raises(DataError, match="as many as the inputs had"):
        split_rows(from_array("n", numbers), [*cuts, 1])


@given(st.lists(st.tuples(names, st.integers(0, 300_000)), max_size=3))
def test_an_answer_reads_back_with_the_library(outputs: list[tuple[str, int]]) -> None:
    tensors = [
        Tensor(f"{place}{name}", "UINT8", (size,), bytes([place]) * size) for place, (name, size) in enumerate(outputs)
    ]
    message = infer_codec.to_response(Wanted("m", "", "id"), "1", tensors, NO_MEMORY, is_batching=False)
    assert [(t.name, t.shape, bytes(t.data)) for t in decode_response(message)] == [
        (t.name, t.shape, t.data) for t in tensors
    ]
