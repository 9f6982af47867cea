"The eight-bit head: rows keep their size, products their direction, both losses run through it."
from types import SimpleNamespace

import pytest
import torch

from dflash_nb.bench import GEOMETRIES, RandomIO, random_inputs
from dflash_nb.config import TrainConfig
from dflash_nb.float8 import E4M3, E5M2, Float8Head, quantize_rows, quantize_rows_plain
from dflash_nb.losses import block_loss

G = GEOMETRIES["tiny"]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_rows_of_any_size(dtype, size):
    x = size * torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    q, scale = quantize_rows_plain(x, dtype)
    back = q.float() * scale[:, None]
    assert back.isfinite().all() and not back[2].any() and ((back - x).norm() / x.norm()) < 0.06


@pytest.mark.parametrize("fast", [False, True])
def test_the_loss_runs_through_it(fast):
    inputs, io, found = random_inputs(G, 2, "cpu", torch.float32), RandomIO(G, "cpu", torch.float32), []
    io.rows.mul_(10)
    for head in (io, Float8Head(io)):
        h = torch.randn(2, G.anchors, G.block, G.hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = block_loss(h, inputs.blocks, head, TrainConfig(block_size=G.block), fast=fast)
        out.total.backward()
        found.append((out.loss, h.grad))
    (a, ga), (b, gb) = found
    assert 0 < (a - b).abs() < 0.02 * a and torch.cosine_similarity(ga.flatten(), gb.flatten(), 0) > 0.99
    assert not gb[~inputs.blocks.valid_RNB].any()


def test_scale_bias_and_cap_of_the_head_are_kept():
    io = RandomIO(G, "cpu", torch.float32)
    full = SimpleNamespace(rows=io.rows, bias=torch.full((G.vocab,), 2.0), logit_scale=0.5, softcap=3.0, norm="its norm")
    h = torch.randn(4, G.hidden, generator=torch.Generator().manual_seed(1))
    want = 3 * torch.tanh((h @ io.rows.T + 2) * 0.5 / 3)
    head = Float8Head(full)
    assert torch.allclose(head.head(h), want, atol=0.05) and head.norm == "its norm"


def test_nan_stays_nan():
    io = Float8Head(RandomIO(G, "cpu", torch.float32))
    h = torch.ones(2, G.hidden)
    h[1, 3] = torch.nan
    assert io.head(h)[1].isnan().any() and io.head(h)[0].isfinite().all()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_kernel_on_a_gpu(dtype):
    x = (torch.randn(40, 20_000, generator=torch.Generator("cuda").manual_seed(0), device="cuda") * 5).bfloat16()
    (a, sa), (b, sb) = quantize_rows(x, dtype), quantize_rows_plain(x, dtype)
    assert torch.allclose(sa, sb) and (a.float() != b.float()).float().mean() < 1e-3


@pytest.mark.cuda
def test_the_product_on_a_gpu():
    io = RandomIO(GEOMETRIES["smollm2"], "cuda", torch.bfloat16)
    h = torch.randn(300, 576, device="cuda", dtype=torch.bfloat16)
    grads = []
    for head in (io, Float8Head(io)):
        z = h.clone().requires_grad_()
        logits = head.head(z)
        torch.nn.functional.cross_entropy(logits.float(), torch.arange(300, device="cuda")).backward()
        grads.append((logits.detach().float(), z.grad.float()))
    (a, ga), (b, gb) = grads
    assert (a - b).norm() < 0.06 * a.norm() and torch.cosine_similarity(ga.flatten(), gb.flatten(), 0) > 0.99
