"""The wire keeps exact types, and what a hostile worker writes can only raise WireError."""

from __future__ import annotations

import json
import math
import socket
import struct

import pytest

from exercises.grader import wire
from exercises.grader.wire import Bad, Closed, WireError, decode, encode

numpy = pytest.importorskip("numpy")


def there_and_back(value):
    return decode(json.loads(json.dumps(encode(value, {}))), {})


@pytest.mark.parametrize("value", [
    None, True, 0, -7, 10**50, 1.5, "ä\n", b"\x00\xff", [], [1, [2.0, (3,)]], (1, "a"),
    {1: (2,), "k": []}, {"$tuple": [1]},
])
def test_a_value_comes_back_with_the_same_types(value):
    back = there_and_back(value)
    assert repr(back) == repr(value)


def test_infinities_and_nan_come_back():
    back = there_and_back([math.inf, -math.inf, math.nan])
    assert back[:2] == [math.inf, -math.inf] and math.isnan(back[2])


def test_an_array_comes_back_with_dtype_and_shape():
    array = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
    back = there_and_back(array)
    assert back.dtype == array.dtype and back.shape == (2, 3) and (back == array).all()


@pytest.mark.parametrize("value, what", [
    (object(), "an object of type object"),
    (type("I", (int,), {})(3), "an object of type I"),
    (1 << 5000, "an int of 5001 bits"),
    ({1, 2}, "an object of type set"),
])
def test_what_may_not_travel_becomes_bad_and_equals_nothing(value, what):
    back = there_and_back([value])[0]
    assert isinstance(back, Bad) and back.what == what and back != back


def test_a_list_inside_itself_is_cut_at_the_depth_limit():
    loop: list = []
    loop.append(loop)
    assert "nested deeper" in json.dumps(encode(loop, {}))


@pytest.mark.parametrize("data", [
    {"$tuple": 3}, {"$object": ["os.system", {}]}, {"$object": 1},
    {"$array": ["object", [1], "00"]},
    {"$array": ["int64", [5], "00"]}, {"$bytes": "xy"}, {"a": 1, "b": 2}, {"$float": "1e999"},
    {"$dict": [[[1], 2]]}, {"$unknown": 1}, {"$remote": "x"}, {},
])
def test_a_malformed_value_is_a_wire_error(data):
    with pytest.raises(WireError):
        decode(data, {})


@pytest.mark.parametrize("payload", [
    b"{", b"NaN", b"[" * 100_000, b"\xff\xfe", b"1" * 5000,
])
def test_a_frame_that_is_no_json_is_a_wire_error(payload):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">I", len(payload)) + payload)
        with pytest.raises(WireError):
            wire.receive_frame(ours)


def test_a_frame_that_claims_4_gib_is_refused_before_it_is_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(WireError, match="4294967295 bytes is over the limit"):
            wire.receive_frame(ours)


def test_the_end_of_the_other_side_is_closed():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"\x00\x00")
    theirs.close()
    with ours, pytest.raises(Closed):
        wire.receive_frame(ours)
