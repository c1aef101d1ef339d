"""The layer spec, its norms and rotary embedding, and what is said where something is missing or half installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cpu import alone, build_gpt, gpt_config, hf_config, parallel
from torch import nn

from logitless.errors import NotFoundError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore import spec as spec_module
from logitless_mcore.attention import PackedAttention
from logitless_mcore.spec import (
    LayerNorm,
    RMSNorm,
    keep_rotary_on_device,
    layer_spec,
    require_megatron,
    transformer_engine,
)


@pytest.fixture
def half_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`half_installed(error)`: a transformer_engine whose torch extension fails so when it is imported."""

    def make(error: str) -> None:
        package = tmp_path / "transformer_engine"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "pytorch.py").write_text(f"raise {error}('Could not find shared object file')\n")
        monkeypatch.syspath_prepend(tmp_path)
        for name in [x for x in sys.modules if x.split(".")[0] == "transformer_engine"]:
            monkeypatch.delitem(sys.modules, name)

    return make


def test_megatron_is_there() -> None:
    import megatron.core

    assert require_megatron() == megatron.core.__version__


@pytest.mark.parametrize("error", ["FileNotFoundError", "OSError", "ImportError"])
def test_half_installed_transformer_engine(error: str, half_installed: Callable[[str], None]) -> None:
    half_installed(error)
    said = transformer_engine()
    assert said is not None
    assert said.startswith(f"half installed ({error}: Could not find shared object file)")
    assert "pip uninstall transformer_engine" in said
    with pytest.raises(UnsupportedError, match="use_transformer_engine: Transformer Engine is half installed"):
        layer_spec(None, use_transformer_engine=True)


def test_megatron_that_half_a_transformer_engine_breaks(tmp_path: Path) -> None:
    """As transformer_engine's own package does without its library: a plain import fails, and Megatron's with it."""
    (tmp_path / "transformer_engine.py").write_text("raise FileNotFoundError('Could not find shared object file')\n")
    code = "from logitless_mcore.spec import require_megatron; require_megatron()"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
    said = done.stderr.decode()
    assert "logitless.errors.BrokenPluginError: megatron-core is installed but cannot be imported: Transformer" in said
    assert "Engine is half installed (FileNotFoundError: Could not find shared object file)" in said
    assert "pip uninstall transformer_engine" in said


@pytest.mark.parametrize("absent", ["megatron", "megatron.core"])
def test_megatron_that_is_not_installed(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith(absent) else own(name))
    with pytest.raises(NotFoundError, match=r"pip install 'logitless-mcore\[mcore\]'"):
        require_megatron()


def test_transformer_engine_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_module, "transformer_engine", lambda: "not installed")
    with pytest.raises(UnsupportedError, match="use_transformer_engine: Transformer Engine is not installed"):
        layer_spec(None, use_transformer_engine=True)


@pytest.mark.skipif(transformer_engine() is not None, reason="Transformer Engine is not whole here")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_transformer_engine_where_it_is_whole() -> None:
    def run() -> str:
        layer = layer_spec(gpt_config(hf_config())).layer_specs[0]
        return str(layer.submodules.self_attention.submodules.core_attention.__name__)

    assert alone(run) == "TEDotProductAttention"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Transformer Engine's attention needs a GPU")
@pytest.mark.skipif(transformer_engine() is not None, reason=f"Transformer Engine is {transformer_engine()}")
def test_packed_sequences_of_transformer_engine_equal_ours() -> None:
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "te_thd.py"
    if not script.is_file():
        pytest.skip("needs the repository's benchmarks")
    run = subprocess.run([sys.executable, str(script), "--sequences", "6"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "holds: true" in run.stdout


def test_every_layer_of_this_stage() -> None:
    def run(rank: int, size: int) -> tuple[int, list[int], bool]:
        with parallel(pp=2):
            gpt = build_gpt(hf_config(num_hidden_layers=3), num_layers_in_first_pipeline_stage=1)
            attention = all(isinstance(x.self_attention.core_attention, PackedAttention) for x in gpt.decoder.layers)
            return len(gpt.decoder.layers), [layer.layer_number for layer in gpt.decoder.layers], attention

    assert run_ranks(2, run) == [(1, [1], True), (2, [2, 3], True)]


def test_mixed_dense_and_expert_layers() -> None:
    def run() -> list[tuple[str, type]]:
        config = gpt_config(hf_config(), num_moe_experts=2, moe_layer_freq=[1, 0], add_qkv_bias=False)
        parts = [layer.submodules for layer in layer_spec(config).layer_specs]
        return [(str(part.mlp), part.self_attention.submodules.core_attention) for part in parts]

    (experts, first), (dense, second) = alone(run)
    assert "MoE" in experts
    assert "MoE" not in dense
    assert first is second is PackedAttention


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("normalization", "norm"), [("RMSNorm", RMSNorm), ("LayerNorm", LayerNorm)])
def test_norms_are_marked(sequence_parallel: bool, normalization: str, norm: type) -> None:
    def run(rank: int, size: int) -> tuple[int, set[bool], set[float], set[torch.dtype]]:
        with parallel(tp=2):
            hf = hf_config("qwen3")
            gpt = build_gpt(
                hf,
                sequence_parallel=sequence_parallel,
                normalization=normalization,
                params_dtype=torch.bfloat16,
                bf16=True,
            )
            norms: list[Any] = [module for module in gpt.modules() if isinstance(module, norm)]
            parameters = [p for module in norms for p in module.parameters()]
            marks = {p.sequence_parallel for p in parameters}
            return len(norms), marks, {module.eps for module in norms}, {p.dtype for p in parameters}

    # Two layers of four (one each for queries and keys), and the last.
    assert run_ranks(2, run) == [(9, {sequence_parallel}, {1e-5}, {torch.bfloat16})] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma"),
        ({"normalization": "L2Norm"}, "normalization: got 'L2Norm', expected 'RMSNorm' or 'LayerNorm'"),
    ],
)
def test_norms_that_torch_has_not(changes: dict[str, Any], said: str) -> None:
    def run() -> str:
        config = gpt_config(hf_config())
        for name, value in changes.items():
            setattr(config, name, value)
        with pytest.raises(UnsupportedError) as caught:
            layer_spec(config)
        return str(caught.value)

    assert said in alone(run)


def test_sharded_checkpoints_are_those_of_megatrons_own_spec() -> None:
    def run(rank: int, size: int) -> tuple[bool, bool]:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        def places(model: Any) -> dict[str, Any]:
            named = {n: x for n, x in model.sharded_state_dict().items() if "extra_state" not in n}
            read = ("key", "global_shape", "global_offset")  # a gated projection has only a key before it is cut
            return {n: [getattr(x, name, None) for name in read] for n, x in named.items()}

        with parallel(tp=2):
            hf = hf_config("qwen3")
            plain = get_gpt_decoder_block_spec(gpt_config(hf), use_transformer_engine=False, normalization="RMSNorm")
            found = places(build_gpt(hf))
            return found == places(build_gpt(hf, spec=plain)), "decoder.layers.1.mlp.linear_fc2.weight" in found

    assert run_ranks(2, run) == [(True, True)] * 2


# --- rotary embedding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_rotary_equals_megatrons(interleaved: bool, cp: int) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    def run(rank: int, size: int) -> bool:
        with parallel(cp=cp):
            own = RotaryEmbedding(16, 1.0, rotary_interleaved=interleaved, use_cpu_initialization=True)
            model = nn.Module()
            model.weight = nn.Parameter(torch.zeros(1))
            model.rotary_pos_emb = own
            wanted = [own(24), own(24, packed_seq=True), own(8, 3, packed_seq=True)]
            kept = keep_rotary_on_device(model).rotary_pos_emb
            assert type(kept) is not RotaryEmbedding
            assert kept.rotary_interleaved is interleaved  # what else is read of it is Megatron's
            found = [kept(24), kept(24, packed_seq=True), kept(8, 3, packed_seq=True)]
            return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))

    assert all(run_ranks(cp, run))


def test_rotary_follows_the_device_and_keeps_its_precision() -> None:
    def run() -> tuple[Any, ...]:
        gpt = build_gpt(hf_config())
        before = gpt.rotary_pos_emb.inv_freq.clone()
        keys = set(gpt.state_dict())
        gpt = gpt.bfloat16()
        kept = gpt.rotary_pos_emb.inv_freq
        same = kept.dtype == torch.float32 and torch.equal(kept, before)
        gpt.to(device="meta")
        return same, gpt.rotary_pos_emb.inv_freq.device.type, {key for key in keys if "rotary" in key}

    assert alone(run) == (True, "meta", set())


def test_other_positions_are_left_alone() -> None:
    def run() -> bool:
        gpt = build_gpt(hf_config(), model={"position_embedding_type": "learned_absolute"})
        return keep_rotary_on_device(gpt) is gpt and not hasattr(gpt, "rotary_pos_emb")

    assert alone(run)
