from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from workflows.complaints import Complaint, complaints, existing_path, nearest, shown_path


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    value: str | list[int]


class Whole(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    parts: list[Part]
    number: int


def found(document: Any) -> dict[str, Complaint]:
    try:
        Whole.model_validate(document)
    except ValidationError as error:
        every = complaints(error.errors(), document, Whole)
        return {shown_path(one.path): one for one in every}
    raise AssertionError("it is valid")


def test_a_place_is_named_once_however_many_types_it_could_have() -> None:
    complaint = found({"parts": [{"value": 1.5}], "number": 1})["parts.0.value"]
    assert complaint.message == "Input should be a valid string or Input should be a valid list"


def test_missing_and_unknown_fields_are_named_where_they_are() -> None:
    complaint = found({"parts": [{}], "numbr": 1})
    assert complaint["parts.0.value"].code == complaint["number"].code == "missing"
    assert complaint["numbr"].message == "unknown field; did you mean 'number'?"


def test_what_is_no_object_is_said_so() -> None:
    assert found(3)[""].message == "must be an object"


def test_tags_of_unions_are_no_part_of_a_path() -> None:
    document = {"a": [{"b": 1}]}
    assert existing_path(("a", 0, "Tag", "b", "int"), document, is_missing=False) == ("a", 0, "b")
    assert existing_path(("a", 0, "Tag", "c"), document, is_missing=True) == ("a", 0, "c")


def test_only_a_near_name_is_a_hint() -> None:
    assert nearest("temprature", ["temperature", "top_p"]) == "; did you mean 'temperature'?"
    assert nearest("zzz", ["temperature"]) == ""
