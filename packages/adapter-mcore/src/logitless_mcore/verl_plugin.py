"""What verl's entry-point group loads; the one module here that does something when it is imported.

verl imports its plugins and calls nothing in them.
"""

from __future__ import annotations

import logging

from logitless_mcore import verl

__all__ = ["registered"]


def _register() -> bool:
    try:
        verl.register()
    except Exception:  # verl would log it at DEBUG, which nobody sees
        logging.getLogger(__name__).exception("logitless-mcore does not score verl's Megatron models")
        raise
    return True


registered = _register()
