"""One driver directs a controller at a time, and the next one takes over when it is silent."""

from __future__ import annotations

import pytest

from outrider.cluster.ray.adoption import changes_between
from outrider.cluster.ray.lease import LEASE_S, DriverIdentity, Lease, LeaseLostError
from outrider.config import EngineConfig
from outrider.errors import ConfigError

OLD, NEW = DriverIdentity("old, pid 1", "a"), DriverIdentity("new, pid 2", "b")
GIVEN = EngineConfig.from_settings({"target.model": "t", "draft.model": "d"})


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_driver_that_renews_its_lease_keeps_it() -> None:
    clock = Clock()
    lease = Lease(clock)
    assert lease.claim(OLD)
    for _ in range(10):
        clock.now_s += LEASE_S - 0.1
        assert not lease.claim(NEW) and lease.holder == OLD
        lease.renew(OLD)
    assert lease.age_s == 0.0


def test_a_silent_driver_loses_its_lease_and_hears_of_it() -> None:
    clock = Clock()
    lease = Lease(clock)
    assert lease.claim(OLD)
    clock.now_s += LEASE_S
    lease.renew(OLD)  # nobody else wanted it
    clock.now_s += LEASE_S
    assert lease.claim(NEW) and lease.holder == NEW
    with pytest.raises(LeaseLostError, match=r"by another server \(new, pid 2\).*this one ends"):
        lease.renew(OLD)
    clock.now_s += 10 * LEASE_S
    with pytest.raises(LeaseLostError):
        lease.renew(OLD)  # it ends rather than take the replicas back
    assert lease.holder == NEW


def test_the_same_driver_may_claim_again_and_a_restarted_controller_takes_the_first_that_asks() -> (
    None
):
    lease = Lease(Clock())
    lease.renew(OLD)
    assert lease.holder == OLD and lease.claim(OLD) and not lease.claim(NEW)


def _with(**settings: object) -> EngineConfig:
    named = {path.replace("__", "."): value for path, value in settings.items()}
    return EngineConfig.from_settings(GIVEN.to_settings() | named)


def test_settings_of_gateways_and_of_ray_s_address_change_nothing_about_replicas() -> None:
    wanted = _with(
        server__port=1234, log_level="error", cluster__address="auto", cluster__listen="a:1"
    )
    assert changes_between(GIVEN, wanted).what == ""


def test_what_can_be_rolled_out_is_and_what_can_be_scaled_is() -> None:
    found = changes_between(GIVEN, _with(draft__model="other", cluster__replicas=3))
    assert (found.settings, found.num_replicas) == ({"draft.model": "other"}, 3)
    assert found.is_draft_only and found.what == "scale to 3, roll out draft.model=other"


@pytest.mark.parametrize("path", ["target__model", "cluster__colocate", "num_threads"])
def test_replicas_that_cannot_become_the_wanted_ones_are_refused(path: str) -> None:
    value = {"target__model": "another", "cluster__colocate": True, "num_threads": 3}[path]
    with pytest.raises(ConfigError, match=path.replace("__", ".")):
        changes_between(GIVEN, _with(**{path: value}))
