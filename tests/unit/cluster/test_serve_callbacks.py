"""What is said of a server's sampling defaults at its start."""

from __future__ import annotations

import dataclasses

from fake_engine import fake_facts

from outrider.cluster.serve_callbacks import defaults_sentence

FACTS = dataclasses.replace(fake_facts(), sampling_defaults={"temperature": 0.6, "top_k": 20})


def test_the_checkpoints_defaults_are_said_with_the_way_to_turn_them_off() -> None:
    assert defaults_sentence(FACTS, "auto") == (
        "requests that leave them out get the checkpoint's defaults: temperature 0.6, top_k 20 "
        "(--generation-config none turns them off)"
    )


def test_without_any_nothing_is_said() -> None:
    assert defaults_sentence(FACTS, "none") == ""
    assert defaults_sentence(fake_facts(), "auto") == ""
