"""The contract of a backend as tests, for the backend's author to subclass. Needs pytest and hypothesis.

    import torch
    from logitless.testing.conformance import BackendConformance

    class TestAcme(BackendConformance):
        backend = "acme"
        device = "cpu"
        dtypes = (torch.float32, torch.bfloat16)
        refuses = {"lora", "grad_buffer"}

Every check compares with `logitless.reference` in float64, within the tolerances of `logitless.testing.tolerance`, and
some on inputs that hypothesis draws; memory that the backend does not write reads as NaN. What a backend refuses is
checked as well: such a call must raise UnsupportedError. So must kept sets, several labels, statistics and
`top_k_log_probs` where its `features` do not name them. A check that does not apply is named in `skips` with the
reason; redefining one is an error, since a weaker check would look like a pass.
"""

from __future__ import annotations

from logitless.testing._conformance import FEATURES, OPTIONS
from logitless.testing._edge_checks import EdgeChecks
from logitless.testing._feature_checks import FeatureChecks
from logitless.testing._memory_checks import MemoryChecks
from logitless.testing._property_checks import PropertyChecks
from logitless.testing._value_checks import ValueChecks

__all__ = ["FEATURES", "OPTIONS", "BackendConformance"]


class BackendConformance(ValueChecks, MemoryChecks, EdgeChecks, FeatureChecks, PropertyChecks, kit=True):
    """Subclass it, name the backend, and pytest runs the checks."""
