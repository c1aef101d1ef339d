"""The names of the reference design, as thin calls into `bind` and the scoring forward.

They may also be assigned to `model.__class__.forward`. The family's own forward is then no longer on the class, and is
compiled again from the class's source: without it, what the family does to its logits could not be known.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from logitless.errors import UnsupportedError
from logitless_hf.binding import bind_always, binding_of, is_bound_class
from logitless_hf.outputs import CausalLMOutputForPPO
from logitless_hf.scoring import HeadReport, examine, scored_forward

__all__ = [
    "forward_base_model",
    "forward_with_torch_backend",
    "forward_with_triton_backend",
    "patch_forward_with_backends",
]

_reports: WeakKeyDictionary[nn.Module, HeadReport] = WeakKeyDictionary()  # of models that are not bound


@functools.cache
def _forward_from_source(cls: type) -> Callable[..., Any] | None:
    """The forward that the class's source defines, or None if it defines none."""
    module = sys.modules[cls.__module__]
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError) as error:
        raise UnsupportedError(
            f"{cls.__qualname__}: its forward was overwritten, and its source cannot be read to find the original; "
            "use patch_forward_with_backends(model, True, backend) instead of assigning a forward to the class"
        ) from error
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__qualname__]
    forwards = [node for node in (found[-1].body if found else []) if getattr(node, "name", None) == "forward"]
    if not forwards:
        return None
    holder = ast.ClassDef(name=cls.__name__, bases=[], keywords=[], body=forwards[-1:], decorator_list=[])
    if sys.version_info >= (3, 12):
        holder.type_params = []
    code = ast.fix_missing_locations(ast.Module([*future, holder], type_ignores=[]))
    namespace: dict[str, Any] = {}
    exec(compile(code, inspect.getsourcefile(module) or "<source>", "exec", dont_inherit=True), vars(module), namespace)
    forward: Callable[..., Any] = namespace[cls.__name__].__dict__["forward"]
    if "__class__" in inspect.unwrap(forward).__code__.co_freevars:
        raise UnsupportedError(f"{cls.__qualname__}: its forward calls super(), so it cannot be restored from source")
    return forward


def _family_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward that the model's family wrote, even where one of ours was assigned in its place."""
    for cls in type(model).__mro__:
        forward: Callable[..., Any] | None = None if is_bound_class(cls) else cls.__dict__.get("forward")
        if forward in (forward_with_torch_backend, forward_with_triton_backend, forward_base_model):
            forward = _forward_from_source(cls)
        if forward is not None:
            return forward
    raise UnsupportedError(f"{type(model).__qualname__} has no forward")


def _scored(model: nn.Module, backend: str, kwargs: dict[str, Any]) -> CausalLMOutputForPPO:
    forward = _family_forward(model)
    binding = binding_of(model)
    report = binding.report if binding is not None else _reports.get(model)
    if report is None:

        def scored(report: HeadReport, **call: Any) -> CausalLMOutputForPPO:
            return scored_forward(model, forward, report, backend, (), call)

        report = examine(model, functools.partial(forward, model), scored)
        _reports[model] = report
    return scored_forward(model, forward, report, backend, (), kwargs)


def _given(**kwargs: Any) -> dict[str, Any]:
    """Only what was given: families differ in which of these they take."""
    return {name: value for name, value in kwargs.items() if value is not None}


def forward_base_model(
    self: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = None,
    cache_position: Tensor | None = None,
) -> Any:
    """What the model's trunk returns; `outputs[0]` are the last hidden states [batch, sequence, D]."""
    trunk: Any = self.base_model
    renamed = "cache" in inspect.signature(trunk.forward).parameters  # transformers 5.24
    return trunk(
        **_given(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            cache_position=cache_position,
            **{"cache" if renamed else "past_key_values": past_key_values},
        )
    )


def _reference_forward(backend: str, name: str) -> Callable[..., CausalLMOutputForPPO]:
    def forward(
        self: nn.Module,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache_position: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        temperature: float | Tensor = 1.0,
        **kwargs: Any,
    ) -> CausalLMOutputForPPO:
        renamed = "cache" in inspect.signature(_family_forward(self)).parameters  # transformers 5.24
        call = _given(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
            cache_position=cache_position,
            **{"cache" if renamed else "past_key_values": past_key_values},
        )
        return _scored(self, backend, {**call, "logits_to_keep": logits_to_keep, "temperature": temperature, **kwargs})

    forward.__name__ = forward.__qualname__ = name
    forward.__doc__ = f"""Scores in place of logits, by the {backend} backend; may be assigned to a class's `forward`.

    Labels are `shift_labels` as they are, else `labels` or `input_ids`, shifted inside.

    Returns:
        CausalLMOutputForPPO with `log_probs` and `entropy`, [batch, sequence] nats.

    Raises:
        InvalidInputError: neither labels nor input_ids were given, or `return_dict=False`.
        UnsupportedError: the head is not understood.
    """
    return forward


forward_with_torch_backend = _reference_forward("torch", "forward_with_torch_backend")
forward_with_triton_backend = _reference_forward("triton", "forward_with_triton_backend")


def patch_forward_with_backends(
    model: nn.Module, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
) -> None:
    """Bind this one model so that it returns scores without being asked; `generate` still sees its logits.

    Args:
        model: a transformers causal language model; `logitless_hf.unbind` makes it what it was.
        use_fused_kernels: False does nothing.
        fused_kernels_backend: name of a backend, as "torch" or "triton"; None chooses at each call.

    Raises:
        UnsupportedError: the head is not understood, or the backend cannot serve.
        NotFoundError: the backend is not installed.
    """
    if use_fused_kernels:
        bind_always(model, fused_kernels_backend)
