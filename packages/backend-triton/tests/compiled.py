"""Compiles kernels for a Hopper, without one: `python compiled.py` prints what each takes, as JSON by name.

In a process of its own, since Triton decides when it is imported whether it interprets. The interpreter runs what a
compiler refuses: a variable of another type after a branch, say.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from logitless_triton import (
    best,
    candidates,
    combine,
    dz,
    forward,
    kept,
    kl_combine,
    kl_kernels,
    kl_products,
    rounding,
    rounds,
    shortlist,
    threshold,
)
from logitless_triton.config import Device, Tile, config_for
from logitless_triton.layout import LOGITS, SAMPLE, STEP

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = dict.fromkeys(("ids", "count_ptr", "size_ptr"), "*i32")
TYPES |= dict.fromkeys(("id_ptr", "label_ptr", "bracket", "before", "after", "near", "least_ptr"), "*i64")
TYPES |= dict.fromkeys(("pre", "f_value", "ref_f_value", "slope", "top_entropy", "beta", "budget"), "fp32")
TYPES |= dict.fromkeys(("all_tokens", "kept_columns", "col0", "labels", "k"), "i32")
PLAIN = {"bias": None, "lora_u": None, "lora_b": None, "BR": 16, "SOFTCAP": False, "NEGATE": False}
LISTED = {"WIDTH": 128, "ROWS": 1, "BLOCK": STEP}
LOOK = {**LISTED, "BLOCK": threshold.LOOK}


def compiled(kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 3, **types: str) -> dict[str, Any]:
    """Bytes of shared memory of a kernel, by the types of its arguments."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {}
    for name in names:
        number = name.startswith("stride_") or name.isupper()
        default = "i32" if number else TYPES.get(name, "*fp32")
        signature[name] = "constexpr" if name in constants else types.get(name, default)
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name].startswith("*")},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return {"shared": triton.compile(source, target=HOPPER, options=options).metadata.shared}


def tiled(tile: Tile) -> dict[str, Any]:
    return {"BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "GROUP": tile.group, "PROGRAMS": 132 * tile.per_sm}


def described(kind: str, rows: int, columns: int) -> str:
    return f"tensordesc<{kind}[{rows}, {columns}]>"


def multiplying(tile: Tile, out_columns: int, out: str) -> dict[str, str]:
    """Types of the operands and of what is stored, as descriptors."""
    return {
        "h": described("bf16", tile.rows, tile.depth),
        "w": described("bf16", tile.columns, tile.depth),
        out: described("fp32" if out == "kept" else "bf16", tile.rows, out_columns),
    }


def of_rows(tile: Tile, uniform: bool) -> dict[str, Any]:
    """The kernels that go by rows, with a temperature for all of them or for each."""
    constants = {**PLAIN, **tiled(tile), "ROWS": 1, "BLOCK": 1024, "live_count": None, "dz_scale_ptr": None}
    constants |= {"f_ptr": None} if uniform else {}
    bf16 = dict.fromkeys(("h", "w", "x", "kept"), "*bf16")
    converting = {**constants, "BM": 8, "BN": tile.columns, "TILES": 16}
    kinds = {"kept": "*fp16", "out": "*bf16"}
    return {
        "label": compiled(combine._label_kernel, constants, **bf16),
        "combine": compiled(combine._combine_kernel, {**constants, "BLOCK": 16, "PART": 128, "FINISH": True}),
        "mend": compiled(kept._mend_kernel, constants, tile.warps, tile.stages, **bf16),
        "seal": compiled(kept._seal_kernel, constants, 1, **bf16),
        "scale": compiled(rounding._scale_rows_kernel, constants, **bf16, out="*bf16"),
        "coefficients": compiled(dz._coefficients_kernel, {**constants, "BLOCK": 256}),
        "convert": compiled(dz._convert_kernel, converting, **kinds),
        "convert, no entropy": compiled(dz._convert_kernel, {**converting, "e_ptr": None}, **kinds),
    }


def divergences(tile: Tile) -> dict[str, Any]:
    """The kernels of `linear_kl`; the student's tiles go by eighths."""
    found = {"mixture": compiled(kl_kernels.mixture_kernel, {"ROWS": 1, "BLOCK": 2048}, warps=8)}
    uniform = {"f_ptr": None, "ref_f_ptr": None}

    def student(written: str, **constants: Any) -> dict[str, Any]:
        piece = tile.columns // 8
        types = {**multiplying(tile, piece, "out"), "ref": described("fp32", tile.rows, piece)}
        types["out"] = described(written, tile.rows, piece)
        constants |= {**PLAIN, **tiled(tile), "TMA": True, "FLATTEN": True}
        return compiled(kl_products._student_kernel, constants, tile.warps, tile.stages, **types)

    for kind in (kl_kernels.FORWARD, kl_kernels.REVERSE, kl_kernels.JSD):
        constants = {"ROWS": 4, "BLOCK": 1024, "OUT_TYPE": tl.bfloat16, "SOFTCAP": True, "KIND": kind}
        found[f"divergence's dz, kind={kind}"] = compiled(
            kl_kernels.divergence_dz_kernel, constants, warps=8, out="*bf16"
        )
        found[f"student's dz, kind={kind}"] = student(
            "bf16", KIND=kind, DZ=True, OUT_TYPE=tl.bfloat16, parts=None, **uniform
        )
    for kind in (kl_kernels.FORWARD, kl_kernels.REVERSE):
        sums = {"KIND": kind, "DZ": False, "OUT_TYPE": tl.float32, "stats": None, "up_ptr": None}
        found[f"student's sums, kind={kind}"] = student("fp32", out=None, **sums, **uniform)
        if kind == kl_kernels.FORWARD:
            found["student's sums, held"] = student("fp32", **sums)
        constants = {"BLOCK": combine.ROWS, "PART": combine.TILES, "KIND": kind}
        found[f"divergences combined, kind={kind}"] = compiled(kl_combine._combine_kernel, constants)
    return found


def main() -> None:
    config = config_for(Device((9, 0), 132), torch.bfloat16, 4096)
    found = {
        f"floor, count={count}": compiled(candidates._floor_kernel, {**LISTED, "COUNT": count, "ALONE": count})
        for count in (False, True)
    }
    found["list"] = compiled(candidates._list_kernel, LISTED)
    for ranks, count in ((0, True), (2, True), (2, False)):
        constants = {**LOOK, "RANKS": ranks, "COUNT": count}
        found[f"round, ranks={ranks}, count={count}"] = compiled(rounds._round_kernel, constants)
    found["sums"] = compiled(rounds._sums_kernel, LISTED)
    found["best"] = compiled(best._best_kernel, LISTED)
    for count, summed in ((False, 3), (False, 4), (True, 0), (True, 2), (True, 4)):
        constants = {"SAMPLE": SAMPLE, "LENGTH": 8 * STEP, "COUNT": count, "NESTED": not count}
        constants |= {"SUMMED": summed, "PART": threshold.LOOK}
        asked = f"count={count}, summed={summed}"
        found[f"sample, {asked}"] = compiled(shortlist._sample_kernel, {**LISTED, **constants})
        found[f"split, {asked}"] = compiled(shortlist._split_kernel, {**LISTED, **constants})
        found[f"find, {asked}"] = compiled(shortlist._find_kernel, {**LOOK, **constants})
    for name, tile in (("forward", config.held), ("forward, wide", config.forward)):
        constants = {**PLAIN, **tiled(tile), "live_count": None, "reference_ptr": None, "maxima": None, "KEEP": LOGITS}
        constants |= {"TMA": True, "TMA_KEPT": True, "FLATTEN": True, "KEPT_TYPE": tl.float32}
        constants |= {"f_ptr": None, "INFINITE": False}
        types = multiplying(tile, tile.columns // 4, "kept")
        found[name] = compiled(forward._forward_kernel, constants, tile.warps, tile.stages, **types)
    tile = config.dz
    for several in (False, True):
        constants = {**PLAIN, **tiled(tile), "TMA": True, "FLATTEN": not several, "OUT_TYPE": tl.bfloat16}
        constants |= {"ENTROPY": True, "INFINITE": False, "TRUNCATED": True, "SEVERAL": several}
        types = multiplying(tile, tile.columns // 2, "out")
        found[f"dz, several={several}"] = compiled(dz._recompute_kernel, constants, tile.warps, tile.stages, **types)
    for uniform in (False, True):
        found |= {f"{name}, uniform={uniform}": kernel for name, kernel in of_rows(config.forward, uniform).items()}
    found |= divergences(config.held)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
