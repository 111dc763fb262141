"""What is said of a server's defaults at its start."""

from __future__ import annotations

import dataclasses

from fake_engine import fake_facts

from outrider.gateway.info import sampling_defaults_sentence


def test_the_checkpoints_defaults_are_said_with_the_way_to_turn_them_off() -> None:
    facts = dataclasses.replace(fake_facts(), sampling_defaults={"temperature": 0.6, "top_k": 20})
    assert sampling_defaults_sentence(facts) == (
        "requests get the checkpoint's defaults unless they say otherwise: temperature 0.6, "
        "top_k 20 (server.generation_config none turns them off)"
    )


def test_without_any_nothing_is_said() -> None:
    assert sampling_defaults_sentence(fake_facts()) == ""
