"""What verl's entry-point group loads; the one module here that does something when it is imported.

verl imports its plugins and calls nothing in them, and an exception that comes out of one is logged at DEBUG, which
nobody sees. So a failure is logged here as an error first, and `use_fused_kernels=True` then raises.
"""

from __future__ import annotations

import logging

from logitless_hf import verl

__all__ = ["registered"]


def _register() -> bool:
    try:
        verl.register()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).error("logitless-hf does not score verl's models: %s", reason)
        verl.refuse(reason)
        raise
    return True


registered = _register()
