"""Sampling options of commands; omitted ones get the checkpoint's defaults, as over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from outrider.scheduler.params import SamplingParams

TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        help="0 takes the likeliest token; above, tokens are sampled. Default: the checkpoint's.",
        show_default=False,
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Sample from the likeliest tokens of this mass. Default: the checkpoint's.",
        show_default=False,
    ),
]


def given_params(**options: Any) -> dict[str, Any]:
    """The given options, checked before anything is loaded or sent."""
    given = {name: value for name, value in options.items() if value is not None}
    SamplingParams.from_mapping(given)
    return given
