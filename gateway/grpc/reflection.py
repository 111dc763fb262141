"""gRPC reflection, in both of its versions.

Newer clients (grpc-js, grpcurl) call `grpc.reflection.v1`; grpcio-reflection has only v1alpha. Both
have the same messages on the wire, so one servicer serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

import grpc

_ALPHA = "grpc.reflection.v1alpha"
_STABLE = "grpc.reflection.v1"
_ALPHA_SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
SERVICES = (f"{_STABLE}.ServerReflection", _ALPHA_SERVICE.full_name)


def reflection_handlers(services: Sequence[ServiceDescriptor]) -> tuple[Any, ...]:
    """Handlers that describe these services and their messages."""
    names = [*(each.full_name for each in services), *SERVICES]
    pool = _pool_of([*(each.file for each in services), reflection_pb2.DESCRIPTOR])
    servicer = reflection.aio.ReflectionServicer(names, pool)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    return tuple(grpc.method_handlers_generic_handler(name, methods) for name in SERVICES)


def _pool_of(files: Sequence[FileDescriptor]) -> DescriptorPool:
    """A pool of these files, their imports, and the stable version of reflection's own file. Not
    the global pool: a later grpcio-reflection may add that file there."""
    pool, known = DescriptorPool(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name in known:
            return
        known.add(file.name)
        for each in file.dependencies:
            add(each)
        pool.AddSerializedFile(file.serialized_pb)

    for file in files:
        add(file)
    pool.AddSerializedFile(_stable_file().SerializeToString())
    return pool


def _stable_file() -> FileDescriptorProto:
    file = FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = _STABLE
    for message in file.message_type:
        for field in message.field:
            if field.HasField("type_name"):  # assigning "" would set the field
                field.type_name = _renamed(field.type_name)
    for service in file.service:
        for method in service.method:
            method.input_type = _renamed(method.input_type)
            method.output_type = _renamed(method.output_type)
    return file


def _renamed(type_name: str) -> str:
    return type_name.replace(f".{_ALPHA}.", f".{_STABLE}.")
