"""The wire between the grader and a student's worker: length-prefixed JSON, data only.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON. Values keep their exact
Python type: what JSON cannot tell apart travels as a one-key object with a `$` tag. No pickle, no
eval: the worst a hostile worker can send is a wrong value, or something that raises WireError here.

    None, bool, str, int, finite float, list   as they are
    {"$tuple": [...]}  {"$dict": [[k, v], ...]}  {"$float": "nan"|"inf"|"-inf"}  {"$bytes": hex}
    {"$array": [dtype, shape, hex]}            a numpy array, contiguous
    {"$object": [name, {field: value}]}        a dataclass registered with labkit's @wire
    {"$remote": name}                          grader -> worker: an object that lives in the grader
    {"$bad": what}                             worker -> grader: a value that may not travel
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable
from typing import Any

MAX_FRAME = 4 << 20  # bytes of one frame, either way
MAX_DEPTH = 32  # containers inside containers
MAX_INT_BITS = 4096
_ARRAY_DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8",
                 "bool")


class WireError(Exception):
    """A frame or value that breaks the protocol. str(error) says how."""


class Closed(Exception):
    """The other side has gone: end of file or a reset connection."""


class Bad:
    """Stands, on the grader's side, for a value that could not travel. Equal to nothing."""

    def __init__(self, what: str):
        self.what = what

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{''.join(c if c.isprintable() else '?' for c in self.what)}>"


class RemoteRef:
    """An argument that stands for a grader-side object: the worker sees a proxy of that name."""

    def __init__(self, name: str):
        self.name = name


# ------------------------------------------------------------------------------------ frames

def send_frame(sock: socket.socket, message: Any) -> None:
    """Write one frame. Closed if nobody reads any more; WireError if it is too large."""
    data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MAX_FRAME:
        raise WireError(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME}")
    try:
        sock.sendall(struct.pack(">I", len(data)) + data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive_frame(sock: socket.socket, wait: Callable[[], None] | None = None) -> Any:
    """Read one frame. `wait` is called before each read, to hold a deadline (it may raise).

    Closed at end of file or reset; WireError for an oversized frame or what is no JSON.
    """
    (length,) = struct.unpack(">I", _receive_exactly(sock, 4, wait))
    if length > MAX_FRAME:
        raise WireError(f"a reply of {length} bytes is over the limit of {MAX_FRAME}")
    data = _receive_exactly(sock, length, wait)
    try:
        return json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError("a reply that is no valid JSON") from error


def _receive_exactly(sock: socket.socket, count: int, wait: Callable[[], None] | None) -> bytes:
    parts = []
    while count:
        if wait is not None:
            wait()
        try:
            part = sock.recv(min(count, 1 << 16))
        except ConnectionResetError as error:
            raise Closed from error
        if not part:
            raise Closed
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# ------------------------------------------------------------------------------------ values

def encode(value: Any, objects: dict[str, type], unwrap: Callable[[Any], Any] = lambda v: v,
           depth: int = 0) -> Any:
    """`value` as JSON-able data. What may not travel becomes {"$bad": why}; nothing raises.

    `objects` are the dataclasses that may travel, by name; `unwrap` maps instrumented values back
    to plain ones before anything else looks at them.
    """
    value = unwrap(value)
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        bits = value.bit_length()
        return value if bits <= MAX_INT_BITS else {"$bad": f"an int of {bits} bits"}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": value.hex()}
    if depth >= MAX_DEPTH:
        return {"$bad": f"containers nested deeper than {MAX_DEPTH}"}

    def inner(part: Any) -> Any:
        return encode(part, objects, unwrap, depth + 1)

    if kind is list:
        return [inner(part) for part in value]
    if kind is tuple:
        return {"$tuple": [inner(part) for part in value]}
    if kind is dict:
        return {"$dict": [[inner(key), inner(part)] for key, part in value.items()]}
    if kind is RemoteRef:
        return {"$remote": value.name}
    if objects.get(kind.__name__) is kind:
        return {"$object": [kind.__name__, {key: inner(part) for key, part in vars(value).items()}]}
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return _encode_array(value)
    return {"$bad": f"an object of type {kind.__name__[:60]}"}


def _encode_array(array: Any) -> Any:
    dtype = str(array.dtype)
    if dtype not in _ARRAY_DTYPES:
        return {"$bad": f"an array of dtype {dtype[:60]}"}
    if array.nbytes * 2 > MAX_FRAME // 2:
        return {"$bad": f"an array of {array.nbytes} bytes"}
    return {"$array": [dtype, list(array.shape), array.tobytes().hex()]}


def decode(data: Any, objects: dict[str, type], remote: Callable[[str], Any] | None = None) -> Any:
    """The value that `encode` was given. WireError for anything encode cannot have written."""
    if isinstance(data, list):
        return [decode(part, objects, remote) for part in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise WireError("an object that is no tagged value")
    (tag, body), = data.items()
    try:
        return _decode_tagged(tag, body, objects, remote)
    except (TypeError, ValueError, KeyError, OverflowError, MemoryError) as error:
        raise WireError(f"a malformed {tag[:20]} value") from error


def _decode_tagged(tag: str, body: Any, objects: dict[str, type],
                   remote: Callable[[str], Any] | None) -> Any:
    if tag == "$tuple" and isinstance(body, list):
        return tuple(decode(part, objects, remote) for part in body)
    if tag == "$dict":
        return {decode(key, objects, remote): decode(part, objects, remote) for key, part in body}
    if tag == "$float" and body in ("nan", "inf", "-inf"):
        return float(body)
    if tag == "$bytes":
        return bytes.fromhex(body)
    if tag == "$array":
        return _decode_array(*body)
    if tag == "$object":
        name, fields = body
        return objects[name](**{key: decode(part, objects, remote) for key, part in fields.items()})
    if tag == "$remote" and remote is not None:
        return remote(body)
    if tag == "$bad" and isinstance(body, str):
        return Bad(body[:200])
    raise WireError(f"an unknown tag {tag[:20]!r}")


def _decode_array(dtype: str, shape: list[int], body: str) -> Any:
    import numpy  # only where an exercise's values hold arrays

    if dtype not in _ARRAY_DTYPES:
        raise ValueError(dtype)
    return numpy.frombuffer(bytes.fromhex(body), dtype=dtype).reshape(shape).copy()
