"""What an engine knows of the server it belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLife:
    """The server may have had other engines before: what they found out and left in the cache
    folder is not done again."""

    secret: str
    is_checked: bool  # whoever starts the engine has compared the models' tokenizers
