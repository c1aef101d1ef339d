"""`logitless score`: a file of records in, each completion token's log-prob and entropy out.

`command` is the command line, `records` and `encode` turn lines into token sequences, `batches` pads them, `runner`
drives the model, and `writer` keeps what is done safe from interruption and, with `claim`, from
other runs.
"""

from __future__ import annotations

__all__: list[str] = []
