"""Plugins that are installed for a while."""

from __future__ import annotations

import pytest

import logitless
from logitless.testing import ReferenceBackend, installed


def test_installed_backends_go_again() -> None:
    before = logitless.backends()
    with installed(ReferenceBackend(), alone=True):
        assert [line.name for line in logitless.backends()] == ["reference"]
    with pytest.raises(KeyError), installed(ReferenceBackend()):
        raise KeyError
    assert logitless.backends() == before
    with installed(ReferenceBackend()):
        assert [line.name for line in logitless.backends()] == sorted(["reference", *(line.name for line in before)])
