"""Backends that load, or nearly."""

from __future__ import annotations


class Twin:
    """Fine by itself, but another distribution provides one of the same name."""

    name = "twin"
    priority = 1000
    protocol = 1

    def supports(self, request: object) -> str | None:
        return None


class Future(Twin):
    """Written for a later core."""

    name = "shoddy-future"
    protocol = 2


class Past(Twin):
    """Written for an earlier core."""

    name = "shoddy-past"
    protocol = 0


class StatesProtocolAsText(Twin):
    """States its protocol in a type that cannot be compared."""

    name = "shoddy-text"
    protocol = "one"


class StatesNoProtocol:
    """States no protocol."""

    name = "shoddy-mute"
    priority = 1000


class RaisesInInit(Twin):
    """Cannot be made."""

    name = "shoddy-init"

    def __init__(self) -> None:
        raise RuntimeError("shoddy lost its licence key")


class RaisesInSupports(Twin):
    """Loads, and raises when asked whether it can serve."""

    name = "shoddy-supports"

    def supports(self, request: object) -> str | None:
        raise ZeroDivisionError("shoddy divides by zero")
