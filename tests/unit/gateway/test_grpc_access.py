"""Which scope a gRPC method needs."""

from __future__ import annotations

import pytest

from outrider.gateway.auth.caller import Scope
from outrider.gateway.grpc.access import scope_of
from outrider.proto import control_pb2, generation_pb2

ADMIN = {"SetSpeculation", "Drain", "Abort", "Scale", "RollOut"}
METHODS = [
    (service.full_name, method)
    for file in (control_pb2, generation_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods_by_name
]


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_what_changes_the_server_needs_an_administrator(service: str, method: str) -> None:
    wanted = Scope.ADMIN if method in ADMIN else Scope.INFER
    assert scope_of(f"/{service}/{method}") is wanted


def test_probes_need_no_key_and_methods_nobody_thought_of_the_most() -> None:
    assert scope_of("/grpc.health.v1.Health/Check") is None
    assert scope_of("/outrider.v1.Control/New") is Scope.ADMIN
    assert scope_of("/another.Service/Method") is Scope.ADMIN
    for version in ("v1", "v1alpha"):
        method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        assert scope_of(method) is Scope.INFER
