"""Records: what their annotations accept, and what survives being read and written again."""

from dataclasses import field
from enum import StrEnum
from typing import Any

import pytest

from cluster.contract.schema import SPARSE, Count, Measured, Record, Seconds


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(Record):
    size: Count = 0


class Whole(Record):
    name: str
    at: Seconds
    colour: Colour = Colour.RED
    value: Measured = None
    parts: tuple[Part, ...] = ()
    times: dict[str, Seconds] | None = None
    note: str | None = field(default=None, metadata=SPARSE)


SMALLEST = {"name": "x", "at": 1}


def test_unknown_keys_survive_a_round_trip() -> None:
    value = {"name": "x", "at": 1.0, "colour": "blue", "value": 2, "times": {"a": 1.0}, "later": [1, {"b": None}]}
    value |= {"parts": [{"size": 3, "shape": "round"}], "note": "n"}
    assert value == Whole.from_json(value).to_json()


def test_fields_that_are_missing_have_their_defaults_and_sparse_ones_are_not_written() -> None:
    read = Whole.from_json(SMALLEST)
    assert Whole(name="x", at=1.0) == read
    assert {"name", "at", "colour", "value", "parts", "times"} == set(read.to_json())


@pytest.mark.parametrize(
    "wrong",
    [
        *({"name": None}, {"at": -1}, {"at": float("nan")}, {"at": True}, {"colour": "green"}, {"colour": []}),
        *({"value": "1"}, {"parts": {}}, {"parts": [{"size": -1}]}, {"times": {"a": "b"}}, {"note": 1}),
    ],
)
def test_a_value_of_another_type_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Whole.from_json(SMALLEST | wrong)


@pytest.mark.parametrize("value", [None, [], "x", {}, {"name": "x"}])
def test_what_lacks_a_field_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"missing|expected"):
        Whole.from_json(value)


def test_a_measurement_that_is_not_finite_is_unknown() -> None:
    assert Whole.from_json(SMALLEST | {"value": float("inf")}).value is None
