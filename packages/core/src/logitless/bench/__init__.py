"""`logitless bench`: the op against the logits in full and other libraries' functions, on the user's own device.

Every candidate is held to `logitless.reference` in float64 before it is timed, on the very tensors that are timed.
"""

__all__: list[str] = []
