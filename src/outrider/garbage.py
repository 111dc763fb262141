"""Python's search for garbage, in processes that serve."""

from __future__ import annotations

import gc


def leave_out_what_is_loaded() -> None:
    """Modules, settings and models stay until the process ends. No search looks at them any more,
    which would take a tenth of a second, and nothing else would go on meanwhile."""
    gc.freeze()
