"""The contract of an adapter as tests, for the adapter's author to subclass. Needs pytest and hypothesis.

    from logitless.testing.adapter import AdapterConformance

    class TestAcme(AdapterConformance):
        adapter = "acme"
        layouts = ("thd", "bshd")

        def make_model(self, dtype):
            return AcmeModel(vocab_size=101, hidden_size=16).to(dtype)

        def logits(self, model, input_ids):  # one sequence [L] to [L, V], by the model's own forward
            return model(input_ids.unsqueeze(0)).squeeze(0)

Every check compares packed batches with each sequence alone and its logits in full: values, and the gradient of every
parameter. A layout that is not in `layouts` must be refused, as must a model that is not the adapter's. For a value
model define `make_value_model` and `values`, and `checkpoint` where the adapter reads any. A check that does not apply
is named in `skips` with the reason; redefining one is an error, since a weaker check would look like a pass.
"""

from __future__ import annotations

from logitless.testing._adapter_binding_checks import BindingChecks
from logitless.testing._adapter_score_checks import ScoreChecks

__all__ = ["AdapterConformance"]


class AdapterConformance(ScoreChecks, BindingChecks, kit=True):
    """Subclass it, name the adapter, give a tiny model and its logits, and pytest runs the checks."""
