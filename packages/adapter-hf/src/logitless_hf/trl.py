"""TRL's trainers, with log-probabilities and entropies computed here.

A trainer of TRL hands each of its models to `add_fused_lm_head`, and calls `model(..., labels=..., fused_lm_head=True)`
from then on. The subclass made here runs that same `__init__`, but the function that it finds under that name is ours.
Its globals are a copy, so nothing of TRL is replaced, not even for a moment: other trainers stay as they are.

TRL is not imported: who passes a trainer has it. Shapes: B rows, S positions; scores are [B, S-1], as TRL's are.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless_hf.binding import bind, binding_of, inspect_head, posing_as, unbind
from logitless_hf.labels import IGNORE_INDEX
from logitless_hf.scoring import HeadReport

__all__ = ["HeadStatus", "release", "status", "with_logitless"]

Trainer = TypeVar("Trainer")
SEAM = "add_fused_lm_head"
MADE_FOR = "TRL 1.16"
PARAMETERS = ("model", "temperature", "cast_lm_head_to_fp32", "outputs")  # of the function, as TRL 1.16 has it
OUTPUT = "FusedCausalLMOutput"
STATS = {"is_top1": "is_argmax", "mean_logits": "mean_logit", "log_sum_sq_probs": "sum_sq_probs"}  # TRL's: ours
SERVED = ("log_probs", "entropy", *STATS)
FIELDS = ("loss", *SERVED, "label_mask", "aux_loss")  # of the output, those that are filled here
STATE = "_logitless_trl"  # where a model keeps its Scoring
TREE_ATTENTION = "tree_fa3"  # what AsyncGRPOTrainer loads its model with
MARK = "_logitless_trl_forward"  # on a forward of ours
MADE = "_logitless_trl_made"  # in the namespace of a class that `with_logitless` made


@dataclass
class Scoring:
    """How one model scores. It holds no reference to the model, so that copies are independent."""

    output: Callable[..., Any]
    temperature: float
    outputs: tuple[str, ...]  # of `SERVED`, those that the trainer asked for
    entropy_grad: bool
    keep_bytes: int
    calls: int = 0


@dataclass(frozen=True, slots=True)
class HeadStatus:
    """What scores one model of a trainer.

    Attributes:
        report: the model's head, as it was understood.
        backend: the backend that was asked for; None: chosen at each call, as `logitless doctor` shows.
        temperature: what logits are divided by.
        calls: scoring calls so far; 0 means that none of the trainer's scores came from here yet.
    """

    report: HeadReport
    backend: str | None
    temperature: float
    calls: int


def _seam(trainer: Any) -> tuple[type, Callable[..., Any]]:
    """The class whose `__init__` adds the fused heads, and TRL's function for it.

    Raises:
        UnsupportedError: there is none, or it is not what this module was written for.
    """
    name = trainer.__qualname__
    for owner in trainer.__mro__:
        init = owner.__dict__.get("__init__")
        if isinstance(init, FunctionType) and SEAM in init.__code__.co_names and SEAM in init.__globals__:
            break
    else:
        raise UnsupportedError(
            f"{name}: its __init__ does not call {SEAM}(model, ...), as GRPOTrainer and SFTTrainer of {MADE_FOR} do; "
            f"pass one of those or a subclass, with {MADE_FOR} installed"
        )
    function: Callable[..., Any] = init.__globals__[SEAM]
    found = tuple(inspect.signature(function).parameters)
    if found != PARAMETERS:
        raise UnsupportedError(
            f"{name}: {SEAM} takes ({', '.join(found)}), expected ({', '.join(PARAMETERS)}): this TRL is not the one "
            f"that logitless-hf was written for; install {MADE_FOR}"
        )
    output = getattr(function, "__globals__", {}).get(OUTPUT)
    missing = [field for field in FIELDS if field not in getattr(output, "__dataclass_fields__", {})]
    if missing:
        raise UnsupportedError(
            f"{name}: {OUTPUT} has no {', '.join(missing)}: this TRL is not the one that logitless-hf was written for; "
            f"install {MADE_FOR}"
        )
    return owner, function


def _scored(self: Any, scoring: Scoring, labels: Tensor | None, shifted: Tensor | None, items: Any, call: Any) -> Any:
    """TRL's output of one scoring call; `call` holds the family's arguments."""
    if binding_of(self) is None:
        raise UnsupportedError(f"{type(self).__qualname__}: was unbound; build the trainer again to score")
    if shifted is not None:
        targets = shifted
    elif labels is not None:  # the last position predicts nothing; it is ignored, and cut off below
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    else:
        raise InvalidInputError("labels: got none, and no shift_labels; fused_lm_head=True needs one of them")
    scoring.calls += not torch.compiler.is_compiling()
    scores = type(self).forward(
        self,
        *call[0],
        **{**call[1], "use_cache": False},
        return_log_probs=True,
        shift_labels=targets,
        temperature=scoring.temperature,
        entropy="entropy" in scoring.outputs,
        entropy_grad=scoring.entropy_grad,
        keep_bytes=scoring.keep_bytes,
        stats=tuple(ours for name, ours in STATS.items() if name in scoring.outputs),
    )
    stats = scores.stats or {}
    log_probs, entropy, mask = scores.log_probs, scores.entropy, targets.to(scores.log_probs.device) != IGNORE_INDEX
    if shifted is None:
        log_probs, mask = log_probs[:, :-1], mask[:, :-1]
        entropy = None if entropy is None else entropy[:, :-1]
        stats = {name: value[:, :-1] for name, value in stats.items()}
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items)
    aux_loss = getattr(scores, "aux_loss", None)
    if aux_loss is not None:
        loss = loss + getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    return scoring.output(
        loss=loss, log_probs=log_probs, entropy=entropy, label_mask=mask, aux_loss=aux_loss, **_statistics(stats, mask)
    )


def _statistics(stats: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """TRL's, of ours; 0 where nothing is scored."""
    found = {name: stats[ours] for name, ours in STATS.items() if ours in stats}
    if "log_sum_sq_probs" in found:
        found["log_sum_sq_probs"] = found["log_sum_sq_probs"].log().masked_fill(~mask, 0.0)  # it was log 0 there
    return found


def _forward_like(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that also takes `fused_lm_head=True`; in all else the model's own."""

    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if fused_lm_head:
            return _scored(self, self.__dict__[STATE], labels, shift_labels, num_items_in_batch, (args, kwargs))
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        return type(self).forward(self, *args, **kwargs)

    setattr(forward, MARK, True)
    return posing_as(forward, original)


def _slot(model: nn.Module) -> str:
    """Where an instance's own forward goes: accelerate's hook calls what is in `_old_forward`."""
    return "_old_forward" if "_hf_hook" in model.__dict__ else "forward"


@contextmanager
def _without_a_tree(model: Any) -> Iterator[None]:
    """For the trial at `bind`, which runs on text alone: AsyncGRPOTrainer's attention also needs a tree of rollouts."""
    own = model.config._attn_implementation
    if own != TREE_ATTENTION:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def _add(model: Any, scoring: Scoring, backend: str | None) -> None:
    _release(model)
    with _without_a_tree(model):
        bind(model, backend)
    model.__dict__[STATE] = scoring
    model.__dict__[_slot(model)] = MethodType(_forward_like(type(model).forward), model)


def _release(model: Any) -> None:
    """Make the model what it was before `_add`; nothing happens if it was not added."""
    if model.__dict__.pop(STATE, None) is None:
        return
    slot = _slot(model)
    function = getattr(model.__dict__.get(slot), "__func__", None)
    while function is not None and not hasattr(function, MARK):  # under accelerate's mixed precision
        function = getattr(function, "__wrapped__", None)
    if function is not None:
        model.__dict__.pop("_original_forward", None)
        if slot == "forward":
            del model.__dict__[slot]
        else:
            model.__dict__[slot] = MethodType(type(model).forward, model)
    unbind(model)


def _causal_lm(model: Any) -> Any:
    """The model inside of DDP, a compiled module or PEFT."""
    while True:
        inner = [getattr(model, name, None) for name in ("module", "_orig_mod")]
        wrapped = next((module for module in inner if isinstance(module, nn.Module)), None)
        if wrapped is None:
            return model.get_base_model() if hasattr(model, "get_base_model") else model
        model = wrapped


def _models(trainer: Any) -> dict[str, Any]:
    """The trainer's models that score here, by what they are to it."""
    named = {"policy": getattr(trainer, "model", None), "reference": getattr(trainer, "ref_model", None)}
    found = {name: _causal_lm(model) for name, model in named.items() if isinstance(model, nn.Module)}
    return {name: model for name, model in found.items() if STATE in model.__dict__}


def _check_call(name: str, cast_lm_head_to_fp32: bool, outputs: tuple[str, ...]) -> None:
    """Refuse what a trainer asks of its heads and is not computed here."""
    other = [output for output in outputs if output not in SERVED]
    if other:
        raise UnsupportedError(
            f"{name} asks for {', '.join(other)} for its metrics or loss; logitless computes {', '.join(SERVED)}"
        )
    if cast_lm_head_to_fp32:
        raise UnsupportedError(
            f"{name}: cast_lm_head_to_fp32=True replaces the head's forward; leave it False: logits are accumulated in "
            "fp32 here and never rounded"
        )


def _warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None) -> None:
    """`warnings.warn` for code of TRL that runs here: counts no frame of this file, so that the user's line is told."""
    frame, level = sys._getframe(1), 2
    while stacklevel > 1 and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
        stacklevel -= frame.f_code.co_filename != __file__
    warnings.warn(message, category, level, source)


def _interposed(owner: Any, function: Any, backend: str | None, entropy_grad: bool, keep: int) -> Any:
    """A subclass of `owner`, to stand right before it, whose `__init__` is `owner`'s with our heads."""
    init: Any = owner.__dict__["__init__"]
    output = function.__globals__[OUTPUT]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        name = type(self).__qualname__

        def add(
            model: Any,
            temperature: float = 1.0,
            cast_lm_head_to_fp32: bool = False,
            outputs: tuple[str, ...] = ("log_probs",),
        ) -> None:
            _check_call(name, cast_lm_head_to_fp32, outputs)
            _add(model, Scoring(output, float(temperature), tuple(outputs), entropy_grad, keep), backend)

        told = SimpleNamespace(**{**vars(warnings), "warn": _warn})
        names = {**init.__globals__, SEAM: add, "warnings": told}
        # An instance of nothing: TRL refuses LoRA on the head, which is served here. AsyncGRPOTrainer imports the name
        # within its __init__, so its refusal stays.
        if "BaseTunerLayer" in names:
            names["BaseTunerLayer"] = ()
        ours: Any = FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)
        ours.__kwdefaults__ = init.__kwdefaults__
        ours(self, *args, **kwargs)

    namespace: dict[str, Any] = {key: getattr(owner, key) for key in ("__module__", "__qualname__", "__doc__")}
    return type(owner)(owner.__name__, (owner,), {**namespace, "__init__": posing_as(__init__, init)})


def with_logitless(
    trainer: type[Trainer], *, backend: str | None = None, keep_bytes: int = 0, entropy_grad: bool = True
) -> type[Trainer]:
    """The same trainer class, but its log-probabilities, entropies and statistics come from `logitless`.

    `with_logitless(GRPOTrainer)(model=..., args=..., ...)` is a GRPOTrainer in all else. What the family does to its
    logits (scale, softcap, bias) is found by trying; a head that is not understood is refused when the trainer is
    built. LoRA on the head is served, except by AsyncGRPOTrainer, which refuses it itself. Prompts and padding cost
    nothing.

    Args:
        trainer: a class of TRL whose `__init__` calls `add_fused_lm_head` (GRPOTrainer, RLOOTrainer, SFTTrainer,
            DPOTrainer, KTOTrainer, AsyncGRPOTrainer), or a subclass of one.
        backend: name of a logitless backend; None chooses at each call.
        keep_bytes: memory that the forward may keep so that the backward recomputes less.
        entropy_grad: False detaches the entropy, for a loss without an entropy term.

    Raises:
        InputTypeError: `trainer` is not a class.
        InvalidInputError: `with_logitless` made it.
        UnsupportedError: it does not score as TRL 1.16's trainers do; the message says what differs.
    """
    if not isinstance(trainer, type):
        raise InputTypeError(
            f"trainer: got {trainer!r}, expected a trainer's class: with_logitless(GRPOTrainer)(model=..., ...)"
        )
    if any(MADE in parent.__dict__ for parent in trainer.__mro__):
        raise InvalidInputError(
            f"trainer: {trainer.__qualname__} is made by with_logitless already; pass what it is of"
        )
    owner, function = _seam(trainer)
    interposed = _interposed(owner, function, backend, entropy_grad, keep_bytes)
    bases = (interposed,) if owner is trainer else (trainer, interposed)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).__init__(*args, **kwargs)
        if not _models(self):  # never silently as stock TRL
            raise UnsupportedError(
                f"{trainer.__qualname__}: its __init__ did not come to that of {owner.__qualname__} by super(), so its "
                "models got no head of ours; call super().__init__ there"
            )

    init: Any = trainer.__dict__.get("__init__", owner.__dict__["__init__"])
    namespace: dict[str, Any] = {key: getattr(trainer, key) for key in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(trainer)
    made: Any = metaclass(trainer.__name__, bases, {**namespace, MADE: True, "__init__": posing_as(__init__, init)})
    result: type[Trainer] = made
    return result


def status(trainer: Any) -> dict[str, HeadStatus]:
    """What scores in a trainer: "policy" and, where it has a model of its own, "reference"; empty if nothing does."""
    found = {}
    for name, model in _models(trainer).items():
        scoring, binding = model.__dict__[STATE], binding_of(model)
        backend = None if binding is None else binding.backend
        found[name] = HeadStatus(inspect_head(model), backend, scoring.temperature, scoring.calls)
    return found


def release(trainer: Any) -> None:
    """Make a trainer's models what they were before it was built; the trainer itself can score no more."""
    for model in _models(trainer).values():
        _release(model)
