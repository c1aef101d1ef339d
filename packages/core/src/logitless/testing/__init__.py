"""What a plugin's author tests with: cases, tolerances, memory and product counters, and the conformance checks.

`BackendConformance` is in `logitless.testing.conformance`, `DivergenceConformance` in `logitless.testing.divergence`,
`AdapterConformance` in `logitless.testing.adapter`, hypothesis strategies in `logitless.testing.strategies`. Those need
pytest and hypothesis (`pip install "logitless[testing]"`).
"""

from logitless.testing.cases import Case, cases
from logitless.testing.example import Example, Results, random_example
from logitless.testing.memory import AllocationGuard, LogitsGuard, MemoryTracker, ProductCounter, poisoned
from logitless.testing.reference_backend import ReferenceBackend, installed
from logitless.testing.tolerance import check_gradients, check_results, check_scores, floor_gradients

__all__ = [
    "AllocationGuard",
    "Case",
    "Example",
    "LogitsGuard",
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
    "poisoned",
    "random_example",
]
