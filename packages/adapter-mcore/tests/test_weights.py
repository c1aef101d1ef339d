"""Hugging Face weights in Megatron's shards: equal logits, the way back, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cpu import FAMILIES, alone, build_gpt, gpt_config, hf_config, hf_model, parallel, run_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore.head import vocab_size_of
from logitless_mcore.spec import layer_spec, prediction_spec
from logitless_mcore.weights import hf_weights, load_hf_weights, save_hf_weights

IDS = torch.randint(0, 128, (2, 13), generator=torch.Generator().manual_seed(3))


def logits_of(gpt: Any, ids: Tensor = IDS) -> Tensor | None:
    """[B, S, V] on the last stage, else None."""
    return run_model(gpt, input_ids=ids, position_ids=torch.arange(ids.shape[1]).expand_as(ids), attention_mask=None)


def loaded(source: Any, hf: Any, **changes: Any) -> Any:
    gpt = build_gpt(hf, **changes).eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.fill_(float("nan"))  # what stays so was not loaded
    load_hf_weights(gpt, source)
    return gpt


# --- in -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "pp", "sp"), [(1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)], ids=str
)
def test_logits_equal_those_of_the_hugging_face_model(tp: int, pp: int, sp: bool) -> None:
    ids = IDS[:, :12]  # sequence parallelism wants a multiple of the ranks

    def far(rank: int, size: int) -> dict[str, float]:
        with parallel(tp=tp, pp=pp), torch.no_grad():
            found = {}
            for family in FAMILIES:
                for tied in (False, True):
                    reference = hf_model(family, tied)
                    gpt = loaded(reference, reference.config, sequence_parallel=sp)
                    out = logits_of(gpt, ids)
                    if out is not None:
                        expected = reference(ids, use_cache=False).logits
                        assert expected.std() > 0.3
                        found[f"{family} tied={tied}"] = float((out - expected).abs().max())
            return found

    worst = {name: far for rank in run_ranks(tp * pp, far, seconds=120) for name, far in rank.items()}
    assert len(worst) == 8
    tolerance = 1e-6 if tp * pp == 1 else 1e-5
    assert max(worst.values()) <= tolerance, worst


@pytest.mark.parametrize("changes", [
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    {"attention_bias": True, "mlp_bias": True},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
], ids=["rope-llama3", "biases", "no-groups", "one-group"])  # fmt: skip
def test_variants_of_llama(changes: dict[str, Any]) -> None:
    if "rope_parameters" in changes and not hasattr(hf_config("llama"), "rope_parameters"):
        changes = {"rope_scaling": changes["rope_parameters"], "rope_theta": 500000.0}

    def far() -> float:
        reference = hf_model("llama", **changes)
        own: dict[str, Any] = {}
        if "attention_bias" in changes:
            own = {"add_qkv_bias": True, "add_bias_linear": True}
        stretched = {"rope_scaling": True, "rope_scaling_factor": 8.0} if "factor" in str(changes) else {}
        ids = torch.arange(200).remainder(128)[None]  # far enough for a rotary base to show
        with torch.no_grad():
            gpt = loaded(reference, reference.config, model=stretched, **own)
            return float((logits_of(gpt, ids) - reference(ids, use_cache=False).logits).abs().max())

    assert alone(far) <= 2e-6


def test_a_sliding_window_of_mistral() -> None:
    def far() -> tuple[float, float]:
        reference = hf_model("mistral", sliding_window=5)
        with torch.no_grad():
            out = logits_of(loaded(reference, reference.config, window_size=(4, 0)))
            whole = hf_model("mistral")(IDS, use_cache=False).logits
            expected = reference(IDS, use_cache=False).logits
        return float((out - expected).abs().max()), float((whole - expected).abs().max())

    off, seen = alone(far)
    assert off <= 1e-6
    assert seen > 1e-2


def test_a_padded_vocabulary_stays_out_and_is_cut_again() -> None:
    def run(rank: int, size: int) -> tuple[float, float, int | None, tuple[int, ...]]:
        with parallel(tp=2), torch.no_grad():
            reference = hf_model("qwen2", vocab_size=101)
            gpt = loaded(reference, reference.config, vocab_size=128)
            ids = IDS % 101
            out = logits_of(gpt, ids)
            off = (out[..., :101] - reference(ids, use_cache=False).logits).abs().max()
            back = dict(hf_weights(gpt))["lm_head.weight"]
            return float(off), float(out[..., 101:].abs().max()), vocab_size_of(gpt), tuple(back.shape)

    for off, padding, known, back in run_ranks(2, run):
        assert off <= 1e-5
        assert (padding, known, back) == (0.0, 101, (101, 64))


def test_transformer_engine_names() -> None:
    """Its linear layers hold the norm before them; the names are those that Megatron's own TE specs give."""

    def run() -> dict[str, Tensor]:
        reference = hf_model("qwen3")
        gpt = build_gpt(reference.config)
        for layer in gpt.decoder.layers:
            layer.self_attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
            layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
            layer.input_layernorm = layer.pre_mlp_layernorm = nn.Identity()
        load_hf_weights(gpt, reference)
        return dict(hf_weights(gpt))

    back, expected = alone(run), hf_model("qwen3").state_dict()
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), name


# --- out ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_checkpoint_is_the_one_that_was_loaded(
    tp: int, pp: int, family: str, tied: bool, tmp_path: Path
) -> None:
    reference = hf_model(family, tied)
    reference.save_pretrained(tmp_path / "in")

    def run(rank: int, size: int) -> None:
        with parallel(tp=tp, pp=pp):
            gpt = loaded(str(tmp_path / "in"), reference.config)
            save_hf_weights(gpt, tmp_path / "out", config=reference.config, file_bytes=40_000)

    run_ranks(tp * pp, run)
    expected = load_file(tmp_path / "in" / "model.safetensors")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    back = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert len(files) > pp
    assert back.keys() == expected.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in expected.values())
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), name
    again = type(reference).from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, reference(IDS).logits)


def test_chunks_of_a_virtual_pipeline() -> None:
    reference = hf_model("qwen3", num_hidden_layers=4)

    def run(rank: int, size: int) -> dict[str, Tensor]:
        with parallel(pp=2):
            settings: dict[str, Any] = {"virtual_pipeline_model_parallel_size": 2}
            config = gpt_config(reference.config, **settings)
            chunks = []
            for i in range(2):
                ends = {"pre_process": rank == i == 0, "post_process": rank == i == 1, "vp_stage": i}
                spec = layer_spec(config, vp_stage=i)
                chunks.append(build_gpt(reference.config, spec=spec, model=ends, **settings))
            assert [chunk.decoder.layers[0].layer_number for chunk in chunks] == [rank + 1, rank + 3]
            load_hf_weights(chunks, reference)
            return dict(hf_weights(chunks))

    first, second = run_ranks(2, run)
    assert not first.keys() & second.keys()
    expected = reference.state_dict()
    assert first.keys() | second.keys() == expected.keys()
    for name, tensor in {**first, **second}.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pp", [1, 2])
def test_layers_that_predict_further_tokens_stay_as_they_were_made(pp: int, tied: bool, tmp_path: Path) -> None:
    hf = hf_model("qwen2", tied)

    def run(rank: int, size: int) -> None:
        with parallel(pp=size), torch.no_grad():
            config = gpt_config(hf.config, mtp_num_layers=1)
            further = {"mtp_block_spec": prediction_spec(config, layer_spec(config))} if rank == size - 1 else {}
            gpt = build_gpt(hf.config, spec=layer_spec(config), model=further, mtp_num_layers=1)
            before = {name: p.clone() for name, p in gpt.named_parameters() if name.startswith("mtp.")}
            assert bool(before) == (rank == size - 1)
            for parameter in gpt.parameters():
                parameter.fill_(float("nan"))
            for name, parameter in before.items():
                gpt.get_parameter(name).copy_(parameter)
            load_hf_weights(gpt, hf)
            own = dict(gpt.named_parameters())
            assert not any(bool(parameter.isnan().any()) for parameter in own.values())
            assert all(torch.equal(own[name], x) for name, x in before.items())
            save_hf_weights(gpt, tmp_path, config=hf.config)

    run_ranks(pp, run)
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    assert sorted(name for file in files for name in file) == sorted(
        name for name in hf.state_dict() if not (tied and name == "lm_head.weight")
    )
    assert all(torch.equal(x, hf.state_dict()[name]) for file in files for name, x in file.items())


def test_dtypes_are_the_parameters() -> None:
    def run() -> tuple[set[torch.dtype], Tensor]:
        reference = hf_model("qwen2")
        gpt = build_gpt(reference.config, params_dtype=torch.bfloat16, bf16=True)
        load_hf_weights(gpt, reference)
        back = dict(hf_weights(gpt))
        return {tensor.dtype for tensor in back.values()}, back["model.norm.weight"]

    dtypes, norm = alone(run)
    assert dtypes == {torch.bfloat16}
    assert torch.equal(norm, hf_model("qwen2").state_dict()["model.norm.weight"].bfloat16())


# --- what does not fit --------------------------------------------------------------------------------------------


def refusal(source: Callable[[Any], Any], family: str = "qwen2", tied: bool = False, **changes: Any) -> str:
    """What loading what `source` makes of the family's model says, and that it left the parameters alone."""

    def run() -> str:
        reference = hf_model(family, tied)
        gpt = build_gpt(reference.config, **changes)
        before = {name: parameter.clone() for name, parameter in gpt.named_parameters()}
        try:
            load_hf_weights(gpt, source(reference))
        except (InputTypeError, InvalidInputError, UnsupportedError) as error:
            same = all(torch.equal(before[name], parameter) for name, parameter in gpt.named_parameters())
            return f"{type(error).__name__}: {error}" if same else "it wrote before it looked"
        return "nothing"

    return str(alone(run))


def without(*names: str) -> Callable[[Any], dict[str, Tensor]]:
    return lambda model: {name: tensor for name, tensor in model.state_dict().items() if name not in names}


def having(**tensors: Tensor) -> Callable[[Any], dict[str, Tensor]]:
    return lambda model: {**model.state_dict(), **{name.replace("__", "."): x for name, x in tensors.items()}}


def test_a_missing_tensor() -> None:
    said = refusal(without("model.layers.1.mlp.up_proj.weight", "lm_head.weight"))
    assert said.startswith("InvalidInputError: source: the state dict lacks lm_head.weight, model.layers.1.mlp.up_proj")


@pytest.mark.parametrize("name", ["model__layers__1__mlp__router__weight", "model__layers__2__mlp__up_proj__weight"])
def test_an_unexpected_tensor(name: str) -> None:
    said = refusal(having(**{name: torch.zeros(3)}))
    assert said.startswith(
        f"InvalidInputError: source: the state dict holds {name.replace('__', '.')}, which the model"
    )
    assert "it has 2 layers" in said


def test_biases_that_the_model_has_no_place_for() -> None:
    said = refusal(lambda model: model.state_dict(), add_qkv_bias=False)
    assert "k_proj.bias" in said
    assert "add_qkv_bias=False" in said


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model__norm__weight", (63,), "(63,) of the state dict gives (63,) for decoder.final_layernorm"),
        ("model__layers__0__self_attn__k_proj__weight", (16, 64), "does not make decoder.layers.0.self_attention.li"),
        ("model__layers__0__mlp__up_proj__weight", (90, 64), "gives (186, 64) for decoder.layers.0.mlp.linear_fc1"),
        ("model__embed_tokens__weight", (129, 64), "vocab_size=128, expected at least the source's 129 rows"),
    ],
)  # fmt: skip
def test_a_wrong_shape(name: str, shape: tuple[int, ...], said: str) -> None:
    assert said in refusal(having(**{name: torch.zeros(shape)}))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (torch.zeros(63), "(63,) of {folder} gives (63,) for decoder.final_layernorm"),
        (torch.zeros(64, dtype=torch.int8), "(64,) of {folder} is torch.int8, expected float32"),
        (torch.zeros(64).to(torch.float8_e4m3fn), "(64,) of {folder} is torch.float8_e4m3fn, expected float32"),
    ],
    ids=["shape", "int8", "float8"],
)
def test_nothing_is_written_of_a_folder_that_does_not_fit(wrong: Tensor, said: str, tmp_path: Path) -> None:
    """The last parameter's tensor is at fault."""

    def folder(model: Any) -> Path:
        tensors = {name: x.contiguous() for name, x in having(model__norm__weight=wrong)(model).items()}
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    assert said.format(folder=tmp_path) in refusal(folder)


def test_groups_that_do_not_divide() -> None:
    def run(rank: int, size: int) -> str:
        with parallel(tp=2):
            reference = hf_model("qwen3")
            gpt = build_gpt(reference.config)
            gpt.config.num_query_groups = 1
            with pytest.raises(InvalidInputError) as caught:
                load_hf_weights(gpt, reference.state_dict())
            return str(caught.value)

    assert all("num_query_groups=1 is not a multiple of 2" in said for said in run_ranks(2, run))


def test_a_head_that_a_tied_model_has_no_place_for() -> None:
    said = refusal(having(lm_head__weight=torch.zeros(128, 64)), tied=True)
    assert "share_embeddings_and_output_weights=True, but lm_head.weight and model.embed_tokens.weight" in said


def test_an_untied_model_takes_a_tied_checkpoints_head_from_its_embedding(tmp_path: Path) -> None:
    reference = hf_model(tied=True)
    reference.save_pretrained(tmp_path)

    def run() -> float:
        with torch.no_grad():
            gpt = loaded(tmp_path, reference.config, model={"share_embeddings_and_output_weights": False})
            return float((logits_of(gpt) - reference(IDS, use_cache=False).logits).abs().max())

    assert alone(run) <= 1e-6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon: 1e-06, expected 1e-05"),
        ({"activation_func": nn.functional.gelu}, "activation_func: False, expected True"),
        ({"window_size": (4, 0)}, "window_size by layer: [(4, 0), (4, 0)], expected [None, None]"),
        ({"softmax_scale": 1.0}, "softmax_scale: 1.0, expected 0.25"),
        ({"model": {"rotary_base": 10000}}, "rotary frequencies: 8 from 1 down to 0.0003162, expected 8 down to"),
        ({"model": {"rotary_percent": 0.5}}, "rotary frequencies: 4 from 1"),
        ({"model": {"position_embedding_type": "learned_absolute"}}, "position_embedding_type: 'learned_absolute'"),
    ],
)  # fmt: skip
def test_settings_that_names_and_shapes_do_not_show(changes: dict[str, Any], said: str) -> None:
    found = refusal(lambda model: model, **changes)
    assert found.startswith("InvalidInputError: model: not what the Qwen2ForCausalLM was trained as (")
    assert said in found


def test_settings_are_not_checked_on_request() -> None:
    def run() -> float:
        reference = hf_model()
        gpt = build_gpt(reference.config, layernorm_epsilon=1e-6)
        load_hf_weights(gpt, reference, check_config=False)
        return float((gpt.output_layer.weight - reference.lm_head.weight).abs().max())

    assert alone(run) == 0.0


def test_a_family_that_is_not_understood() -> None:
    class Told:
        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "gemma"}

    def gemma(model: Any) -> Any:
        model.config = Told()
        return model

    assert "is of the family 'gemma', expected one of llama, mistral, qwen2, qwen3" in refusal(gemma)


def test_what_is_no_source(tmp_path: Path) -> None:
    assert refusal(lambda model: 3).startswith("InputTypeError: source: got a int, expected a path")
    assert "there is no folder" in refusal(lambda model: tmp_path / "absent")
    assert "holds no *.safetensors" in refusal(lambda model: tmp_path)


def test_a_module_that_is_no_gpt_model() -> None:
    with pytest.raises(UnsupportedError, match="got a Linear, expected Megatron's GPTModel"):
        load_hf_weights(nn.Linear(2, 2), {})


def test_parameters_that_have_no_counterpart() -> None:
    def run() -> str:
        reference = hf_model()
        gpt = build_gpt(reference.config)
        gpt.decoder.layers[0].mlp.adapter = nn.Linear(2, 2)
        with pytest.raises(UnsupportedError) as caught:
            load_hf_weights(gpt, reference)
        return str(caught.value)

    assert "nothing is known of decoder.layers.0.mlp.adapter.bias, decoder.layers.0.mlp.adapter.weight" in alone(run)
