from __future__ import annotations

from collections.abc import Iterator

import pytest

from logitless.testing import ReferenceBackend, installed


@pytest.fixture
def reference_backend() -> Iterator[None]:
    """The reference as the only backend, so that core is tested without a plugin."""
    with installed(ReferenceBackend(), alone=True):
        yield
