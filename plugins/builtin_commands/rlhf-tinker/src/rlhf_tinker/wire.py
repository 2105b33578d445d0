"""Messages in protobuf, as Tinker's client sends and reads them, and numbers in them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from rlhf_server import ApiError

PACKAGE = "tinker_public"
MEDIA_TYPE = "application/x-protobuf"

ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
MESSAGES = {
    "SparseCsr": "1 bytes values, 2 bytes crow_indices, 3 bytes col_indices",
    "Tensor": "1 bytes dense ?, 2 SparseCsr sparse_csr ?, 3 DType dtype, 4 int64 shape *",
    "LossConfigValue": "1 double number ?, 2 string text ?",
    "EncodedTextChunk": "1 bytes tokens",
    "ImageChunk": "1 bytes data, 2 string format",
    "DmelChunk": "1 bytes dmel",
    "Chunk": "1 EncodedTextChunk encoded_text ?, 2 ImageChunk image ?, 3 DmelChunk dmel ?",
    "Datum": "1 Chunk model_input *, 2 Tensor loss_fn_inputs {}",
    "ForwardBackwardRequest": (
        "1 string model_id, 2 int32 seq_id, 3 Datum data *, 4 string loss_fn, 5 double loss_fn_config {}, 6 bool forward_only,"
        " 7 LossConfigValue loss_fn_config_v2 {}"
    ),
    "BatchedTensor": "1 bytes data, 2 bytes offsets, 3 DType dtype, 4 int64 trailing_shape *",
    "ArrayRecord": "1 string type_tag, 2 BatchedTensor fields {}, 3 int64 num_datums",
    "ForwardBackwardOutput": "1 string loss_fn_output_type, 2 ArrayRecord loss_fn_outputs *, 3 double metrics {}",
    "SampledSequence": "1 StopReason stop_reason, 2 bytes tokens, 3 bytes logprobs ?",
    "SampleResponse": "1 SampledSequence sequences *, 2 bytes prompt_logprobs ?",
}
"""Fields of each message: number, type and name; ``?``: of a oneof or optional, ``*``: repeated, ``{}``: a mapping of texts.
Other fields are not read."""

TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
STOP, LENGTH = 0, 1
FLOAT32, INT64 = 1, 2
DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}


@functools.cache
def message(name: str) -> Any:
    """Returns the class of a message."""
    pool = _pool()
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    """Returns a pool with the messages; a pool of its own, because a process may have the client's, too."""
    file = descriptor_pb2.FileDescriptorProto(name="rlhf_tinker.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for place, value in enumerate(values):
            enum.value.add(name=value, number=place)
    for name, fields in MESSAGES.items():
        made = file.message_type.add(name=name)
        for text in fields.split(","):
            number, kind, field, *form = text.split()
            _add_field(made, int(number), kind, field, "".join(form))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(made: Any, number: int, kind: str, name: str, form: str) -> None:
    label = 3 if form in ("*", "{}") else 1
    field = made.field.add(name=name, number=number, label=label)
    if form == "{}":
        entry = made.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=TYPES["string"])
        _type_of(entry.field.add(name="value", number=2, label=1), kind)
        field.type, field.type_name = 11, f".{PACKAGE}.{made.name}.{entry.name}"
        return
    _type_of(field, kind)
    if form == "?" and kind in TYPES:
        field.proto3_optional = True
        field.oneof_index = len(made.oneof_decl)
        made.oneof_decl.add(name=f"_{name}")


def _type_of(field: Any, kind: str) -> None:
    if kind in TYPES:
        field.type = TYPES[kind]
    else:
        field.type, field.type_name = 14 if kind in ENUMS else 11, f".{PACKAGE}.{kind}"


def read(name: str, raw: bytes) -> Any:
    """Returns a message. Raises ``ApiError`` for bytes that are none."""
    made = message(name)()
    try:
        made.ParseFromString(raw)
    except DecodeError as error:
        raise ApiError(400, f"the body is no {name} in protobuf", "invalid_value", "body") from error
    return made


def tokens_of(raw: bytes, where: str) -> np.ndarray:
    """Returns token ids, ``[N]`` int64. Raises ``ValueError`` for bytes that are no whole numbers of 32 bits."""
    if len(raw) % 4:
        raise ValueError(f"{where} has {len(raw)} bytes, which are no numbers of 32 bits")
    return np.frombuffer(raw, "<i4").astype(np.int64)


def array_of(tensor: Any, where: str) -> np.ndarray:
    """Returns a tensor's numbers in their shape. Raises ``ValueError`` for those that do not fit, and for sparse ones."""
    if tensor.HasField("sparse_csr"):
        raise ValueError(f"{where} is a sparse tensor, which this server does not read: send it dense")
    if (kind := DTYPES.get(tensor.dtype)) is None:
        raise ValueError(f"{where} has numbers of type {tensor.dtype}; they are float32 or int64")
    if len(tensor.dense) % kind.itemsize:
        raise ValueError(f"{where} has {len(tensor.dense)} bytes, which are no numbers of {kind.itemsize} bytes")
    numbers = np.frombuffer(tensor.dense, kind)
    shape = tuple(tensor.shape) or numbers.shape
    if len(shape) > 2 or min(shape, default=0) < 0 or math.prod(shape) != numbers.size:
        raise ValueError(f"{where} has {numbers.size} numbers, and the shape {list(shape)[:8]}")
    return numbers.reshape(shape)


def forward_backward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Returns the answer to a pass: log-probabilities of each datum, ``[N]`` or ``[N, K]``."""
    output = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for values in logprobs:  # a record for each, whose shapes may differ
        data = np.ascontiguousarray(values, "<f4").tobytes()
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        field = record.fields["logprobs"]
        field.data, field.offsets, field.dtype = data, np.array([0, len(data)], "<i8").tobytes(), FLOAT32
        field.trailing_shape.extend(values.shape[1:])
    return bytes(output.SerializeToString())


def sample_response(answers: Sequence[Any], prompt_logprobs: Sequence[float] | None) -> bytes:
    """Returns the answer to a request for samples.

    Args:
        answers: each with ``token_ids``, ``logprobs`` and ``truncated``.
        prompt_logprobs: of each token of the prompt; NaN: not computed.
    """
    response = message("SampleResponse")()
    for answer in answers:
        response.sequences.add(
            stop_reason=LENGTH if answer.truncated else STOP,
            tokens=np.asarray(answer.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(answer.logprobs, "<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        response.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return bytes(response.SerializeToString())
