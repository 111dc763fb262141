"""The protocol's files: generated code as the .proto says, everything documented, and messages
that mirror our own types by name."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from outrider.api_types.results import ServedSettings, SpeculationStats
from outrider.api_types.speculation import SpeculationAccount
from outrider.links.gateway_messages import (
    EngineCounters,
    EngineStatus,
    ModelStatus,
    ProposerCounters,
    RankStatus,
)
from outrider.links.speculation import (
    CandidateAccount,
    SpeculationSettings,
    SpeculationStatus,
    StepAccount,
)
from outrider.proto import control_pb2, generation_pb2
from outrider.scheduler.params import SamplingParams

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("generation", "control")


def _protoc(*options: str) -> None:
    files = [str(ROOT / f"src/outrider/proto/{name}.proto") for name in NAMES]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "src")]
    subprocess.run([*command, *options, *files], check=True, timeout=60)


def test_the_generated_code_is_that_of_the_protocol(tmp_path: Path) -> None:
    _protoc(*(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")))
    made = sorted((tmp_path / "outrider/proto").iterdir())
    assert len(made) == 3 * len(NAMES)
    for path in made:
        committed = ROOT / "proto" / path.name
        assert committed.read_text() == path.read_text(), f"run protoc again: {path.name}"


def _least(package: str) -> tuple[int, ...]:
    """The lower bound of a dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [re.match(rf"{package}>=([0-9.]+)", each) for each in project["dependencies"]]
    (found,) = (bound.group(1) for bound in bounds if bound is not None)
    return tuple(int(part) for part in found.split("."))


@pytest.mark.parametrize("name", NAMES)
def test_stubs_demand_no_more_than_the_oldest_packages_we_take(name: str) -> None:
    messages = (ROOT / f"proto/{name}_pb2.py").read_text()
    services = (ROOT / f"proto/{name}_pb2_grpc.py").read_text()
    protobuf = re.search(r"# Protobuf Python Version: (\d+)\.(\d+)\.(\d+)", messages)
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '(\d+)\.(\d+)\.(\d+)'", services)
    assert protobuf is not None and grpcio is not None
    assert tuple(map(int, protobuf.groups())) <= _least("protobuf")
    assert tuple(map(int, grpcio.groups())) <= _least("grpcio")


def test_every_message_field_and_value_is_documented(tmp_path: Path) -> None:
    described = tmp_path / "all.pb"
    _protoc(f"--descriptor_set_out={described}", "--include_source_info")
    files = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes()).file
    silent = [name for file in files for name in _undocumented(file)]
    assert len(files) == len(NAMES)
    assert silent == []


def _undocumented(file: Any) -> Iterator[str]:
    commented = {
        tuple(each.path) for each in file.source_code_info.location if each.leading_comments
    }
    # Numbers are those of descriptor.proto: 4 messages, 5 enums, 6 services; 2 fields or values.
    for kind, parts, inner in (
        (4, file.message_type, "field"),
        (5, file.enum_type, "value"),
        (6, file.service, "method"),
    ):
        for at, part in enumerate(parts):
            if (kind, at) not in commented:
                yield part.name
            for inner_at, item in enumerate(getattr(part, inner)):
                if (kind, at, 2, inner_at) not in commented:
                    yield f"{part.name}.{item.name}"


def _names(message: Any) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name)


def _fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("message", "kind", "only_ours"),
    [
        (control_pb2.RankState, RankStatus, set()),
        (control_pb2.ModelState, ModelStatus, set()),
        (control_pb2.EngineState, EngineStatus, {"query"}),
        (control_pb2.EngineCounters, EngineCounters, set()),
        (control_pb2.ProposerCounters, ProposerCounters, set()),
        (control_pb2.EngineSettings, ServedSettings, set()),
        (control_pb2.SpeculationSettings, SpeculationSettings, set()),
        (control_pb2.SpeculationState, SpeculationStatus, set()),
        (control_pb2.SpeculationCandidate, CandidateAccount, set()),
        (control_pb2.StepAccount, StepAccount, set()),
        (control_pb2.ExplainSpeculationResponse, SpeculationAccount, set()),
        (generation_pb2.SpeculationStats, SpeculationStats, set()),
        (
            generation_pb2.SamplingParameters,
            SamplingParams,
            {"speculation", "num_speculative_tokens", "fix_depth"},
        ),
    ],
)
def test_a_message_has_the_fields_of_the_type_it_mirrors(
    message: Any, kind: Any, only_ours: set[str]
) -> None:
    assert _names(message) == _fields(kind) - only_ours
