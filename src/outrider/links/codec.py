"""Messages as msgpack: `[tag, field, field, ...]`, decoded by the classes' type hints.

Type hints are read once, when a codec is built. Most values need no conversion: msgpack packs
tuples, NamedTuples and enums and returns tuples, so only fields that hold a class of ours are
converted. A plan of 64 rows takes some tens of microseconds.

During an upgrade processes of two releases talk to each other: add a field to a dataclass with
`outrider.compat_fields.added_field`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from operator import attrgetter
from typing import Any, TypeAlias

import msgpack

from outrider.compat_fields import added_field_defaults
from outrider.errors import OutriderError
from outrider.links import fleet_messages, gateway_messages, rank_messages, store_messages
from outrider.links.frames import LinkError
from outrider.links.tags import is_message, tag_of

Convert: TypeAlias = Callable[[Any], Any]

_PLAIN = (int, float, str, bool, bytes, types.NoneType, Any)
_MAPPINGS = (dict, collections.abc.Mapping)
_SEQUENCES = (tuple, collections.abc.Sequence)


class Codec:
    """Encodes and decodes a fixed set of message classes.

    Fields may be plain values, enums, dataclasses, NamedTuples, tuples or mappings of these, or
    None. A list is decoded as a tuple. Dataclass fields are checked for their type; the contents of
    tuples are trusted, since the peer is authenticated.
    """

    def __init__(self, *message_classes: type) -> None:
        self._readers: dict[str, Convert] = {}
        self._fields_of: dict[type, Convert] = {}
        self._converters: dict[type, Convert] = {}
        for cls in message_classes:
            if (tag := tag_of(cls)) in self._readers:
                raise TypeError(f"two message classes have the tag {tag}")
            self._readers[tag] = self._class_converter(cls)
        self._tags = {cls: tag_of(cls) for cls in message_classes}

    @classmethod
    def of_module(cls, module: types.ModuleType) -> Codec:
        """A codec of every message that the module defines."""
        return cls(
            *(
                found
                for found in vars(module).values()
                if isinstance(found, type)
                and is_message(found)
                and found.__module__ == module.__name__
            )
        )

    def encode(self, message: object) -> bytes:
        cls = type(message)
        if (tag := self._tags.get(cls)) is None:
            raise LinkError(
                f"{cls.__name__} is no message of this link; it carries {self._names()}."
            )
        try:
            fields = self._fields_of[cls](message)
            encoded: bytes = msgpack.packb((tag, *fields), default=self._default)
        except (TypeError, ValueError, OverflowError) as error:
            raise LinkError(f"a {cls.__name__} cannot be encoded: {error}.") from error
        return encoded

    def decode(self, payload: bytes) -> Any:
        try:
            values = msgpack.unpackb(payload, use_list=False, strict_map_key=False)
        except (ValueError, TypeError) as error:
            raise LinkError(f"a frame of {len(payload)} bytes is not msgpack: {error}.") from error
        if not isinstance(values, tuple) or not values or not isinstance(values[0], str):
            raise LinkError("a frame does not begin with the tag of a message; it is not one.")
        name = values[0]
        read = self._readers.get(name)
        if read is None:
            raise LinkError(
                f"the peer sent the unknown message {name!r}; this link carries {self._names()}. "
                "Run the same release on both sides."
            )
        try:
            return read(values[1:])
        except LinkError:
            raise
        except (OutriderError, TypeError, ValueError, KeyError) as error:
            raise LinkError(f"a {name} cannot be decoded: {error!r}.") from error

    def _names(self) -> str:
        return ", ".join(sorted(self._readers))

    def _default(self, value: Any) -> Any:
        """Encodes a dataclass, which msgpack does not know, as the tuple of its fields."""
        fields = self._fields_of.get(type(value))
        if fields is None:
            raise TypeError(f"{value!r} is a {type(value).__name__}, which no field declares")
        return fields(value)

    # -- from hints to converters -------------------------------------------------------------

    def _converter(self, hint: Any) -> Convert | None:
        """Converts msgpack's value into the declared type; None if no conversion is needed."""
        if hint in _PLAIN:
            return None
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            return self._union_converter(hint, arguments)
        if origin in _MAPPINGS:
            if any(self._converter(argument) for argument in arguments):
                raise TypeError(f"{hint} holds what needs converting; a link carries plain maps")
            return None
        if origin in _SEQUENCES:
            return self._sequence_converter(hint, arguments)
        if isinstance(hint, type):
            return self._class_converter(hint)
        raise TypeError(f"a link cannot carry {hint}")

    def _union_converter(self, hint: Any, arguments: tuple[Any, ...]) -> Convert | None:
        converters = [self._converter(argument) for argument in arguments]
        needed = [convert for convert in converters if convert is not None]
        if not needed:
            return None
        if len(arguments) != 2 or types.NoneType not in arguments:
            raise TypeError(f"{hint} is ambiguous on a link; only `X | None` can be told apart")
        convert = needed[0]
        return lambda value: None if value is None else convert(value)

    def _sequence_converter(self, hint: Any, arguments: tuple[Any, ...]) -> Convert | None:
        items = [argument for argument in arguments if argument is not Ellipsis]
        converters = [self._converter(item) for item in items]
        if not any(converters):
            return None
        if len(items) != 1 or converters[0] is None:
            raise TypeError(f"{hint} mixes classes; a link carries tuples of one class")
        convert = converters[0]
        return lambda values: tuple([convert(value) for value in values]) if values else ()

    def _class_converter(self, cls: type) -> Convert:
        known = self._converters.get(cls)
        if known is not None:
            return known
        if issubclass(cls, Enum):
            convert: Convert = {member.value: member for member in cls}.__getitem__
        elif dataclasses.is_dataclass(cls):
            convert = self._dataclass_converter(cls)
        elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
            convert = self._namedtuple_converter(cls)
        else:
            raise TypeError(f"a link cannot carry {cls.__name__}")
        self._converters[cls] = convert
        return convert

    def _dataclass_converter(self, cls: type) -> Convert:
        hints = typing.get_type_hints(cls)
        names = tuple(field.name for field in dataclasses.fields(cls))
        defaults = added_field_defaults(cls)
        num_required = len(names) - len(defaults)
        self._fields_of[cls] = _without_defaults(_fields_getter(names), defaults)
        checks = tuple((name, _kinds(hints[name])) for name in names)
        conversions = self._conversions(names, hints)

        def build(values: tuple[Any, ...]) -> Any:
            if len(values) != len(names):
                if not num_required <= len(values) < len(names):
                    raise _wrong_count(cls, len(values), len(names))
                values = (*values, *defaults[len(values) - num_required :])
            for (name, kinds), value in zip(checks, values, strict=True):
                if not isinstance(value, kinds):
                    raise LinkError(
                        f"{cls.__name__}.{name} came as {value!r:.80}, not as it is declared; "
                        "run the same release on both sides."
                    )
            if not conversions:
                return cls(*values)
            converted = list(values)
            for index, convert in conversions:
                converted[index] = convert(converted[index])
            return cls(*converted)

        return build

    def _namedtuple_converter(self, cls: Any) -> Convert:
        names: tuple[str, ...] = cls._fields
        conversions = self._conversions(names, typing.get_type_hints(cls))
        make: Convert = cls._make

        def build(values: tuple[Any, ...]) -> Any:
            if len(values) != len(names):
                raise _wrong_count(cls, len(values), len(names))
            if not conversions:
                return make(values)
            converted = list(values)
            for index, convert in conversions:
                converted[index] = convert(converted[index])
            return make(converted)

        return build

    def _conversions(
        self, names: tuple[str, ...], hints: dict[str, Any]
    ) -> tuple[tuple[int, Convert], ...]:
        converters = [self._converter(hints[name]) for name in names]
        return tuple((i, convert) for i, convert in enumerate(converters) if convert is not None)


def _fields_getter(names: tuple[str, ...]) -> Convert:
    if not names:
        return lambda value: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


def _without_defaults(get: Convert, defaults: tuple[Any, ...]) -> Convert:
    """Omit trailing fields that have their defaults."""
    if not defaults:
        return get

    def get_set(value: Any) -> Any:
        fields = get(value)
        count = len(fields)
        for default in reversed(defaults):
            if fields[count - 1] != default:
                break
            count -= 1
        return fields[:count]

    return get_set


def _kinds(hint: Any) -> tuple[type, ...]:
    """The types msgpack may decode for a field of this type."""
    return tuple(dict.fromkeys(_each_kind(hint)))


def _each_kind(hint: Any) -> Iterator[type]:
    origin = typing.get_origin(hint) or hint
    if origin in (types.UnionType, typing.Union):
        for argument in typing.get_args(hint):
            yield from _each_kind(argument)
    elif hint is Any:
        yield object
    elif hint is float:
        yield from (float, int)  # an int given for a float arrives as an int
    elif origin in _MAPPINGS:
        yield dict
    elif hint in _PLAIN:
        yield hint
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from {type(member.value) for member in hint}
    else:
        yield tuple


def _wrong_count(cls: type, got: int, expected: int) -> LinkError:
    return LinkError(
        f"a {cls.__name__} came with {got} fields, this process knows {expected}; "
        "run the same release on both sides."
    )


RANK_CODEC = Codec.of_module(rank_messages)
GATEWAY_CODEC = Codec.of_module(gateway_messages)
STORE_CODEC = Codec.of_module(store_messages)
FLEET_CODEC = Codec.of_module(fleet_messages)
