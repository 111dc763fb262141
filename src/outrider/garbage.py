"""Python's search for garbage, in processes that serve."""

from __future__ import annotations

import gc


def leave_out_what_is_loaded() -> None:
    """Modules, settings and models stay until the process ends. From now on no search looks at them,
    which would take a tenth of a second, and nothing else would go on meanwhile."""
    gc.freeze()
