"""What a backend's author tests with: cases, tolerances, memory and product counters, and the conformance checks.

`BackendConformance` is in `logitless.testing.conformance` and `DivergenceConformance` in
`logitless.testing.divergence`, the modules here that need pytest (`pip install "logitless[testing]"`).
"""

from logitless.testing.cases import Case, cases
from logitless.testing.example import Example, Results, random_example
from logitless.testing.memory import AllocationGuard, MemoryTracker, ProductCounter
from logitless.testing.reference_backend import ReferenceBackend, installed
from logitless.testing.tolerance import check_gradients, check_results, check_scores, floor_gradients

__all__ = [
    "AllocationGuard",
    "Case",
    "Example",
    "MemoryTracker",
    "ProductCounter",
    "ReferenceBackend",
    "Results",
    "cases",
    "check_gradients",
    "check_results",
    "check_scores",
    "floor_gradients",
    "installed",
    "random_example",
]
