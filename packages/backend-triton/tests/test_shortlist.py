"""The search in one pass: whether the sample is right, misled or not needed, and the short list has room or not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from full_logits import DEVICE, example_of
from torch import Tensor

from logitless.testing import AllocationGuard
from logitless_triton import shortlist
from logitless_triton.candidates import listed
from logitless_triton.layout import held_rows
from logitless_triton.threshold import SUMS

WIDTH, V = 128, 4300  # 34 tiles, the last one not whole: more than a sample
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Ways:
    """What became of each row of the last search, before its rounds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel, self.named = shortlist._find_kernel, dict[str, Any]()
        monkeypatch.setattr(shortlist, "_find_kernel", self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.named = dict(zip(self.kernel.arg_names, args, strict=False))
            self.kernel[grid](*args, **options)

        return launch

    @property
    def short(self) -> list[bool]:
        """Whether the short list was searched, be it in vain."""
        return (self.named["size_ptr"] >= 0).tolist()

    @property
    def raised(self) -> list[bool]:
        """Whether what is below some key was left out."""
        return (self.named["near"][0] > self.named["bracket"][0]).tolist()


def found(z: Tensor, monkeypatch: pytest.MonkeyPatch, *, short: bool = True, **kept: Any) -> tuple[Tensor, Tensor]:
    """Thresholds [m] and `SUMS` [5, m] of logits [m, V]."""
    n, tiles, f = len(z), -(-z.shape[1] // WIDTH), torch.full((len(z),), math.log2(math.e), device=DEVICE)
    body = torch.full((n, tiles * WIDTH), -math.inf)
    body[:, : z.shape[1]] = z
    parts = torch.stack([statistics(tile, f) for tile in body.to(DEVICE).split(WIDTH, 1)], 1)
    own = statistics(z.to(DEVICE), f)
    work: Any = SimpleNamespace(
        interpreted=DEVICE == "cpu",
        config=SimpleNamespace(forward=SimpleNamespace(columns=WIDTH)),
        head=SimpleNamespace(valid=z.shape[1]),
        empty=lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=DEVICE),
    )
    k, p = kept.get("top_k"), kept.get("top_p")
    if not short:
        monkeypatch.setattr(shortlist, "shortlist_length", lambda columns: 0)
    logits, _, bracket = listed(work, body.to(DEVICE), f, parts, None, k=k, p=p)
    threshold, out = torch.empty(n, device=DEVICE), torch.empty(len(SUMS), n, device=DEVICE)
    wanted, total = torch.full_like(f, k or 0.0), None
    if k is not None:
        least = shortlist.find(logits, bracket, wanted, threshold, out, summed=4, count=True)
        total, bracket = out[:2].sum(0), torch.stack((least, bracket[1]))
    if p is not None:
        wanted = p * (own[1] if total is None else total)
        shortlist.find(logits, bracket, wanted, threshold, out, summed=4, count=False, total=total)
    return threshold.cpu(), out.cpu()


def statistics(x: Tensor, f: Tensor) -> Tensor:
    """[3, m], M, S and T of x [m, any]."""
    m = x.nan_to_num(-math.inf, math.inf, -math.inf).amax(1).clamp(min=-1e30)  # as a kernel's
    d = ((x - m.unsqueeze(1)) * f.unsqueeze(1)).clamp(min=-16384.0)
    return torch.stack((m, d.exp2().sum(1), (d.exp2() * d).sum(1)))


def check(z: Tensor, monkeypatch: pytest.MonkeyPatch, **kept: Any) -> None:
    """The thresholds are those of the sorted logits in fp64, and the rounds' through all tiles; so are the sums."""
    threshold, sums = found(z, monkeypatch, **kept)
    exact = z.double().sort(descending=True).values
    last = exact.shape[1]
    if "top_k" in kept:
        line = exact[:, kept["top_k"] - 1 : kept["top_k"]]
        last = (exact >= line).sum(1, keepdim=True)
    if "top_p" in kept:
        mass = exact.where(torch.arange(exact.shape[1]) < last, -math.inf).softmax(1)
        before = (mass.cumsum(1) - mass < kept["top_p"]).sum(1, keepdim=True) - 1
        line = exact.gather(1, before)
    assert torch.equal(threshold, line.squeeze(1).float())
    top = exact[:, :1]
    d = ((z.double() - top) * math.log2(math.e)).where(z >= line, -math.inf)
    e = d.exp2()
    largest = (z == top).sum(1).double()
    below = z.where(z < line, -math.inf).amax(1).double()
    right = torch.stack((e.sum(1) - largest, largest, (e * d.clamp(min=-1e4)).sum(1), e.square().sum(1), below))
    torch.testing.assert_close(sums.double(), right, rtol=2e-5, atol=1e-6)
    with monkeypatch.context() as patch:
        rounds, sums_of_rounds = found(z, patch, short=False, **kept)
    assert torch.equal(threshold, rounds)
    torch.testing.assert_close(sums, sums_of_rounds, rtol=2e-6, atol=1e-6)


def rows() -> Tensor:
    """Flat and peaked ones, with and without ties, of one sign and of both, near zero and far from it."""
    noise = torch.Generator().manual_seed(3)
    z = torch.randn(16, V, generator=noise) * torch.tensor([0.01, 0.5, 2.0, 9.0]).repeat(4).unsqueeze(1)
    z[4:8] += torch.tensor([[-40.0], [40.0], [1e4], [-1e4]])
    z[8:12] = (z[8:12] * 4).round() / 4  # ties in every tile
    z[12] = z[12].clamp(max=0.0) * 0.0  # some of them −0.0
    z[13, ::2] = -math.inf
    z[14, 2000:] = -1e20
    z[15] = -z[15].abs().sort().values
    return z


def sampled(size: int) -> Tensor:
    """[V] which logits a sample of that size has."""
    each, tiles = shortlist.EACH.value, -(-V // WIDTH)
    group = torch.arange(size) // each
    columns = group * tiles // (size // each) * WIDTH + group * 5 % (WIDTH // each) * each + torch.arange(size) % each
    return torch.zeros(tiles * WIDTH, dtype=torch.bool).index_fill(0, columns, True)[:V]


SETS = ({"top_k": 3}, {"top_k": 2000}, {"top_p": 0.5}, {"top_p": 0.95}, {"top_k": 2100, "top_p": 0.9})


@pytest.mark.parametrize("kept", SETS, ids=str)
def test_any_row(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(rows(), monkeypatch, **kept)


def test_what_is_left_out_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows are split by a sample, rows of few candidates without; very few are searched as they are."""
    ways, z = Ways(monkeypatch), rows()[:4]
    found(z[:3], monkeypatch, top_p=0.95)
    assert (ways.short, ways.raised) == ([True] * 3, [True] * 3)
    lists = zip(ways.named["short"], ways.named["size_ptr"].tolist(), strict=True)
    listed_logits = [int((row[: 128 * places] > -math.inf).sum()) for row, places in lists]
    inside = (z[:3] >= z[:3].sort(descending=True).values[:, [-1]]).sum(1).tolist()
    assert all(0 < few < most / 4 for few, most in zip(listed_logits, inside, strict=True))
    found(z[:3], monkeypatch, top_k=2100, top_p=0.9)
    assert (ways.short, ways.raised) == ([True] * 3, [True] * 3)
    found(z, monkeypatch, top_k=5)
    assert ways.short == [False] * 4
    monkeypatch.setattr(shortlist, "SAMPLE", 256)
    found(z, monkeypatch, top_k=5)
    assert (ways.short, ways.raised) == ([True] * 4, [False] * 4)
    check(z, monkeypatch, top_k=5)


def test_all_tiles_but_one_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all tiles the numbers are not read, but of these they are."""
    z = rows()[:3]
    z[:, 5 * WIDTH : 6 * WIDTH] -= 1e4
    ways = Ways(monkeypatch)
    found(z, monkeypatch, top_p=0.95)
    assert ways.named["count_ptr"].tolist() == [33] * 3
    check(z, monkeypatch, top_p=0.95)


@pytest.mark.parametrize("larger", [True, False], ids=["too low", "too high"])
@pytest.mark.parametrize("kept", [{"top_k": 1000}, {"top_p": 0.3}], ids=str)
def test_a_sample_that_misleads(larger: bool, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it has is larger than all that it has not, or smaller."""
    monkeypatch.setattr(shortlist, "SAMPLE", 512)
    noise = torch.randn(2, V, generator=torch.Generator().manual_seed(5)) * 0.1
    z = torch.where(sampled(512) == larger, 1.0, -1.0) + noise
    ways = Ways(monkeypatch)
    threshold, _ = found(z, monkeypatch, **kept)
    if "top_k" in kept:
        assert (ways.short, ways.raised) == ([larger] * 2, [True] * 2)
        assert torch.all((threshold < 0.0) == larger)
    check(z, monkeypatch, **kept)


@pytest.mark.parametrize("kept", [{"top_k": 1500}, {"top_p": 0.7}], ids=str)
def test_neighbours_that_are_alike(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight equal logits tell no more than one: a sample of them is in more doubt than one of as many others."""
    monkeypatch.setattr(shortlist, "SAMPLE", 1024)
    monkeypatch.setattr(shortlist, "shortlist_length", lambda columns: 4096)
    z = torch.randn(32, V // 4, generator=torch.Generator().manual_seed(9)).repeat_interleave(8, 1)[:, :V]
    ways = Ways(monkeypatch)
    found(z, monkeypatch, **kept)
    assert ways.short == [True] * 32
    check(z, monkeypatch, **kept)


def test_a_short_list_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, z = Ways(monkeypatch), rows()[:3]
    monkeypatch.setattr(shortlist, "shortlist_length", lambda columns: 512)
    found(z, monkeypatch, top_k=2000)
    assert (ways.short, ways.raised) == ([False] * 3, [False] * 3)
    check(z, monkeypatch, top_k=2000)


def test_the_next_logit_is_not_in_the_short_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tiles as k have one large logit each: nothing but these is at or above the floor."""
    monkeypatch.setattr(shortlist, "SAMPLE", 256)
    z = torch.randn(4, V, generator=torch.Generator().manual_seed(7)) * 0.1
    z[:, torch.arange(5) * 3 * WIDTH + 9] = torch.arange(5.0) + 2.0
    ways = Ways(monkeypatch)
    found(z, monkeypatch, top_k=5)
    assert ways.short == [True] * 4
    check(z, monkeypatch, top_k=5)


@pytest.mark.skipif(DEVICE == "cuda", reason="what a kernel's functions are called with is seen in the interpreter")
@pytest.mark.parametrize("kept", [{"top_k": 2000}, {"top_p": 0.9}], ids=str)
def test_a_long_list_is_searched_once(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    places, original = list[Any](), shortlist.look

    def look(source: Any, rows: Any, count: Any, *arguments: Any) -> Any:
        places.append(count.handle.data[0])
        return original(source, rows, count, *arguments)

    monkeypatch.setattr(shortlist, "look", look)
    found(rows()[1:2], monkeypatch, **kept)
    assert places[0] > places[1] >= places[-1] > 0


@pytest.mark.parametrize("kept", [{"top_k": 2000}, {"top_p": 0.9}], ids=str)
def test_a_row_alone_and_beside_what_is_not_finite(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; NaN stays in its row; of infinite logits the number is known."""
    z = rows()[:4]
    want = [x.unbind(-1) for x in found(z, monkeypatch, **kept)]
    alone = [x.unbind(-1) for x in found(z[1:2], monkeypatch, **kept)]
    assert all(torch.equal(mine[0], right[1]) for mine, right in zip(alone, want, strict=True))
    z[0, 4290], z[2, 77], z[2, 4200] = math.nan, math.inf, math.inf
    got, sums = found(z, monkeypatch, **kept)
    for row in (1, 3):
        assert torch.equal(got[row], want[0][row])
        assert torch.equal(sums[:, row], want[1][row])
    assert sums[0, 0].isnan() | sums[2, 0].isnan()
    if "top_k" in kept:
        assert got[2] == z[2].sort().values[-2000]
        assert sums[:2, 2].tolist() == [0.0, 2.0]


@pytest.mark.skipif(DEVICE == "cuda", reason="what the kernels' launchers allocate is seen on the CPU")
def test_lists_are_counted_in_the_workspace() -> None:
    example, workspace = example_of(6, vocab=5000, hidden_size=16), 75_000
    assert [held_rows(6, 5000, WIDTH, workspace, short=short) for short in (True, False)] == [2, 3]
    with AllocationGuard(workspace), torch.no_grad():
        example.score(backend="triton", workspace_bytes=workspace, top_k=2000, top_p=0.9)
