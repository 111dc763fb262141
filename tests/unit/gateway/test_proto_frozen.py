"""The protocol as clients out there know it: it may grow, but nothing they use may change.

`tests/data/outrider_v1.binpb` is the protocol frozen. `make freeze-proto` freezes it anew, for
additions that have been released, or for a break that is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

from outrider.proto import control_pb2, generation_pb2

FROZEN = Path(__file__).resolve().parents[2] / "data" / "outrider_v1.binpb"


def _frozen() -> FileDescriptorSet:
    return FileDescriptorSet.FromString(FROZEN.read_bytes())


def _today() -> FileDescriptorSet:
    modules = (generation_pb2, control_pb2)
    files = [FileDescriptorProto.FromString(each.DESCRIPTOR.serialized_pb) for each in modules]
    return FileDescriptorSet(file=files)


def breaks(before: FileDescriptorSet, after: FileDescriptorSet) -> list[str]:
    """What a client of `before` would trip over, a line each; additions are none of it."""
    now = {file.package + "." + part.name: part for file in after.file for part in _parts(file)}
    found: list[str] = []
    for file in before.file:
        for part in _parts(file):
            name = f"{file.package}.{part.name}"
            if type(now.get(name)) is type(part):
                found += _changes(name, part, now[name])
            else:
                found.append(f"{name} was removed")
    return found


def _parts(file: FileDescriptorProto) -> Iterator[Any]:
    yield from (*file.message_type, *file.enum_type, *file.service)


def _changes(name: str, before: Any, after: Any) -> Iterator[str]:
    match before:
        case DescriptorProto():
            yield from _field_changes(name, before, after)
            nested = {each.name: each for each in after.nested_type}
            for each in before.nested_type:
                if each.name in nested:
                    yield from _changes(f"{name}.{each.name}", each, nested[each.name])
                else:
                    yield f"{name}.{each.name} was removed"
        case EnumDescriptorProto():
            values = {each.name: each.number for each in after.value}
            for value in before.value:
                if values.get(value.name) != value.number:
                    yield f"{name}.{value.name} is no longer {value.number}"
        case ServiceDescriptorProto():
            methods = {each.name: each for each in after.method}
            for method in before.method:
                if method.name not in methods:
                    yield f"{name}.{method.name} was removed"
                elif methods[method.name] != method:
                    yield f"{name}.{method.name} takes or returns something else"


def _field_changes(name: str, before: DescriptorProto, after: DescriptorProto) -> Iterator[str]:
    by_name = {field.name: field for field in after.field}
    for field in before.field:
        now = by_name.get(field.name)
        if now is None:
            yield f"{name}.{field.name} was removed"
        elif now.number != field.number:
            yield f"{name}.{field.name} has number {now.number}, not {field.number}"
        elif _kind(before, field) != _kind(after, now):
            yield f"{name}.{field.name} is of another type"


def _kind(message: DescriptorProto, field: FieldDescriptorProto) -> tuple[object, ...]:
    """All that decides what is on the wire and how it is read."""
    choice = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return field.type, field.type_name, field.label, field.proto3_optional, choice


def test_nothing_that_clients_use_has_changed() -> None:
    assert breaks(_frozen(), _today()) == []


def _message(files: FileDescriptorSet, name: str) -> Any:
    return next(each for each in files.file[0].message_type if each.name == name)


def _drop_field(files: FileDescriptorSet) -> None:
    del _message(files, "GenerateRequest").field[0]


def _renumber(files: FileDescriptorSet) -> None:
    _message(files, "Usage").field[1].number = 9


def _retype(files: FileDescriptorSet) -> None:
    _message(files, "Usage").field[0].type = FieldDescriptorProto.TYPE_STRING


def _repeat(files: FileDescriptorSet) -> None:
    _message(files, "Usage").field[0].label = FieldDescriptorProto.LABEL_REPEATED


def _drop_message(files: FileDescriptorSet) -> None:
    del files.file[0].message_type[0]


def _retype_map(files: FileDescriptorSet) -> None:
    entry = _message(files, "SamplingParameters").nested_type[0]
    entry.field[1].type = FieldDescriptorProto.TYPE_FLOAT


def _move_value(files: FileDescriptorSet) -> None:
    files.file[0].enum_type[0].value[1].number = 7


def _drop_method(files: FileDescriptorSet) -> None:
    del files.file[0].service[0].method[0]


def _stop_streaming(files: FileDescriptorSet) -> None:
    files.file[0].service[0].method[0].server_streaming = False


@pytest.mark.parametrize(
    ("change", "breaks_found"),
    [
        (_drop_field, "outrider.v1.GenerateRequest.model was removed"),
        (_renumber, "outrider.v1.Usage.cached_tokens has number 9, not 2"),
        (_retype, "outrider.v1.Usage.prompt_tokens is of another type"),
        (_repeat, "outrider.v1.Usage.prompt_tokens is of another type"),
        (_drop_message, "outrider.v1.GenerateRequest was removed"),
        (_retype_map, "outrider.v1.SamplingParameters.LogitBiasEntry.value is of another type"),
        (_move_value, "outrider.v1.TokenOrigin.TOKEN_ORIGIN_TARGET is no longer 1"),
        (_drop_method, "outrider.v1.Generation.Generate was removed"),
        (_stop_streaming, "outrider.v1.Generation.Generate takes or returns something else"),
    ],
)
def test_a_change_that_breaks_clients_is_named(
    change: Callable[[FileDescriptorSet], None], breaks_found: str
) -> None:
    after = _frozen()
    change(after)
    assert breaks(_frozen(), after) == [breaks_found]


def test_what_is_added_breaks_nobody() -> None:
    after = _frozen()
    after.file[0].message_type.add(name="New")
    _message(after, "Usage").field.add(name="new", number=99, type=FieldDescriptorProto.TYPE_STRING)
    after.file[0].service[0].method.add(name="New")
    assert breaks(_frozen(), after) == []
