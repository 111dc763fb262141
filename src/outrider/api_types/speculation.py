"""Speculation control: converts between protobuf messages and our own types."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from outrider.errors import RequestError
from outrider.links.gateway_messages import ExplainSpeculationResult
from outrider.links.speculation import (
    CandidateAccount,
    SpeculationChange,
    SpeculationSettings,
    SpeculationStatus,
    StepAccount,
)
from outrider.proto import control_pb2


@dataclass(frozen=True, slots=True)
class SpeculationAccount:
    """The requested steps, the oldest first, and the calibration over all remembered steps."""

    steps: tuple[StepAccount, ...]
    num_remembered: int
    calibration: tuple[float, ...]  # mean errors over parts of these, as shares, oldest first

    @property
    def calibration_error(self) -> float | None:
        """The mean over all remembered steps; None without predictions."""
        return sum(self.calibration) / len(self.calibration) if self.calibration else None


# -- changes ----------------------------------------------------------------------------------


def set_request(
    policy: str | None, max_depth: int | None, lifts_max_depth: bool
) -> control_pb2.SetSpeculationRequest:
    if lifts_max_depth and max_depth is not None:
        raise RequestError(f"max_depth is {max_depth} and to be lifted; give one of the two.")
    sets_max_depth = lifts_max_depth or max_depth is not None
    return change_to_proto(SpeculationChange(policy, sets_max_depth, max_depth))


def change_to_proto(change: SpeculationChange) -> control_pb2.SetSpeculationRequest:
    request = control_pb2.SetSpeculationRequest(policy=change.policy)
    if change.sets_max_depth and change.max_depth is None:
        request.lift_max_depth = True
    elif change.max_depth is not None:
        try:
            request.max_depth = change.max_depth
        except (TypeError, ValueError):
            raise RequestError(
                f"max_depth is {change.max_depth!r}; it must be a whole number from 0 to 32."
            ) from None
    return request


def change_from_proto(request: control_pb2.SetSpeculationRequest) -> SpeculationChange:
    policy = request.policy if request.HasField("policy") else None
    match request.WhichOneof("bound"):
        case "max_depth":
            return SpeculationChange(policy, True, request.max_depth)
        case "lift_max_depth" if request.lift_max_depth:
            return SpeculationChange(policy, True, None)
    return SpeculationChange(policy)


def settings_to_proto(settings: SpeculationSettings) -> control_pb2.SpeculationSettings:
    return control_pb2.SpeculationSettings(**dataclasses.asdict(settings))


def settings_from_proto(settings: control_pb2.SpeculationSettings) -> SpeculationSettings:
    return SpeculationSettings(**_values(settings))


# -- state ------------------------------------------------------------------------------------


def state_to_proto(status: SpeculationStatus) -> control_pb2.SpeculationState:
    return control_pb2.SpeculationState(**dataclasses.asdict(status))


def state_from_proto(state: control_pb2.SpeculationState) -> SpeculationStatus:
    return SpeculationStatus(**_values(state) | {"settings": settings_from_proto(state.settings)})


# -- steps ------------------------------------------------------------------------------------


def explain_request(step: int | None, last: int) -> control_pb2.ExplainSpeculationRequest:
    if last < 1:
        raise RequestError(f"last is {last}; ask for at least one step.")
    try:
        return control_pb2.ExplainSpeculationRequest(step=step, last=last)
    except ValueError:
        raise RequestError(f"step is {step} and last {last}; give numbers of steps.") from None


def account_to_proto(found: ExplainSpeculationResult) -> control_pb2.ExplainSpeculationResponse:
    return control_pb2.ExplainSpeculationResponse(
        steps=[control_pb2.StepAccount(**dataclasses.asdict(each)) for each in found.steps],
        num_remembered=found.num_remembered,
        calibration=found.calibration,
    )


def account_from_proto(response: control_pb2.ExplainSpeculationResponse) -> SpeculationAccount:
    return SpeculationAccount(
        tuple(_step_from_proto(each) for each in response.steps),
        response.num_remembered,
        tuple(response.calibration),
    )


def _step_from_proto(step: control_pb2.StepAccount) -> StepAccount:
    return StepAccount(
        **_values(step)
        | {
            "candidates": tuple(CandidateAccount(**_values(each)) for each in step.candidates),
            "chosen": (
                CandidateAccount(**_values(step.chosen)) if step.HasField("chosen") else None
            ),
        }
    )


def _values(message: Any) -> dict[str, Any]:
    """Fields by name; None for optional fields that are unset."""
    return {
        field.name: (
            None
            if field.has_presence and not message.HasField(field.name)
            else getattr(message, field.name)
        )
        for field in message.DESCRIPTOR.fields
    }
