"The fast paths of a step give the plain paths' numbers: kernels for logits, compiled layers."
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dflash_nb import drafter as drafters
from dflash_nb.bench import GEOMETRIES, RandomIO, random_drafter, random_inputs, step_runner
from dflash_nb.config import TrainConfig, config_hash, effective
from dflash_nb.float8 import Float8Head
from dflash_nb.graphs import compiled_graphs
from dflash_nb.kernels import row_gradient_, row_gradient_plain_, row_stats, row_stats_plain
from dflash_nb.losses import block_loss
from dflash_nb.sides import DrafterSide

G = GEOMETRIES["tiny"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_those_of_cross_entropy(dtype):
    g = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(5, 37, generator=g, dtype=torch.float64)).to(dtype).requires_grad_()
    y, w = torch.randint(0, 37, (5,), generator=g), torch.rand(5, generator=g, dtype=torch.float64)
    (w * F.cross_entropy(x.double(), y, reduction="none")).sum().backward()
    lse, top = row_stats_plain(x.detach())
    grad = row_gradient_plain_(x.detach().clone(), y, lse, w.to(lse.dtype))
    assert top.equal(x.argmax(-1)) and torch.allclose(lse.double(), x.detach().double().logsumexp(-1), rtol=1e-6)
    assert torch.allclose(grad.double(), x.grad.double(), rtol=0, atol={8: 1e-14, 4: 1e-6, 2: 1e-2}[dtype.itemsize])


def case(**knobs):
    inputs, io = random_inputs(G, 2, "cpu", torch.float64), RandomIO(G, "cpu", torch.float64)
    inputs.blocks.valid_RNB[0, 1, 2:] = False
    h = torch.randn(2, G.anchors, G.block, G.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    return h, inputs.blocks, io, TrainConfig(block_size=G.block, **knobs)


KNOBS = [{}, {"weighting": "dpace"}, {"weighting": "flat", "loss_chunk": 3}, {"loss": {"ce": 2.0}, "labels": "teacher"}]


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("softcap", [False, True])
def test_the_fast_loss_is_the_plain_one(knobs, softcap):
    h, blocks, io, cfg = case(**knobs)
    head = SimpleNamespace(head=(lambda x: 5 * torch.tanh(io.head(x) / 5)) if softcap else io.head)
    teacher = torch.randn_like(h) if cfg.labels == "teacher" else None
    found = []
    for fast in (False, True):
        h.grad = None
        out = block_loss(h, blocks, head, cfg, teacher, fast=fast)
        out.total.backward()
        found.append((out, h.grad))
    (a, ga), (b, gb) = found
    assert torch.allclose(a.total, b.total, rtol=1e-12) and torch.allclose(ga, gb, rtol=1e-10, atol=1e-14)
    assert a.correct_B.equal(b.correct_B) and a.prefix.equal(b.prefix) and torch.allclose(a.denominator, b.denominator, rtol=1e-12)


def test_a_head_whose_backward_reads_its_logits_is_refused():
    h, blocks, io, cfg = case()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        block_loss(h, blocks, SimpleNamespace(head=lambda x: io.head(x).exp()), cfg, fast=True)


def test_other_losses_have_no_fast_path_and_stay_as_they_are():
    h, blocks, io, cfg = case(loss={"ce": 0.5, "fkl": 0.5})
    teacher = torch.randn_like(h)
    outs = [block_loss(h, blocks, io, cfg, teacher, fast=fast) for fast in (False, True)]
    assert outs[0].total.equal(outs[1].total)


def test_compiled_parts_are_shared_by_layers_and_give_the_plain_gradients(monkeypatch):
    monkeypatch.setattr(drafters, "_BACKEND", "aot_eager")
    g = G | {"layers": 4, "anchors": 7}
    d, io, cfg = random_drafter(g, "cpu"), RandomIO(g, "cpu", torch.float32), TrainConfig(block_size=g.block)
    before, found = compiled_graphs(), []
    for name in ("eager", "compiled"):
        runner = step_runner(d, io, cfg, name, torch.float32)
        runner.warm_up(random_inputs(g, 2, "cpu", torch.float32, 1))
        for p in d.parameters():
            p.grad.zero_()
        out = runner.micro(random_inputs(g, 2, "cpu", torch.float32, 2))
        found.append([out.total, *(p.grad.clone() for p in d.parameters())])
    assert compiled_graphs() - before == 12
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))


def gradients(d, compiled, masked):
    "Output and gradients of a random projection; one block is dropped."
    inputs, io = random_inputs(G, 2, "cpu", torch.float32, 3), RandomIO(G, "cpu", torch.float32)
    inputs.blocks.keep_RN[1, 2], inputs.blocks.ids_RNB[1, 2, 0] = False, inputs.blocks.ids_RNB[1, 2, 1]
    d.compile_parts(compiled)
    d.zero_grad()
    y = d(d.context(inputs.feats_RTF), inputs.pos_RT, io.embed(inputs.blocks.ids_RNB), inputs.blocks, masked=masked)
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(4))).sum().backward()
    return [y.detach(), *(p.grad for p in d.parameters())]


@pytest.mark.parametrize("masked", [False, True])
def test_equal_inputs_are_projected_once(monkeypatch, masked):
    monkeypatch.setattr(drafters, "_BACKEND", "aot_eager")
    d = random_drafter(G, "cpu")
    want, got = gradients(d, False, False), gradients(d, True, masked)
    assert all((a - b).norm() < 1e-5 * b.norm() for a, b in zip(got, want, strict=True))


def test_the_eight_bit_head_is_opt_in_and_changes_no_stored_name():
    cfg, io = TrainConfig(block_size=G.block), RandomIO(G, "cpu", torch.float32)
    sides = [DrafterSide(random_drafter(G, "cpu"), io, cfg | dict(head8=h, dtype="float32", attention="sdpa")) for h in (False, True)]
    assert sides[0].io is io and isinstance(sides[1].io, Float8Head)
    assert "head8" not in effective(cfg) and config_hash(cfg) != config_hash(cfg | dict(head8=True))


def test_a_drafter_without_weights_costs_no_draw():
    cfg = random_drafter(G, "cpu").cfg
    assert drafters.Drafter(cfg, seed=None).state_dict().keys() == drafters.Drafter(cfg, seed=0).state_dict().keys()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("V", [33, 1000, 151_936])
def test_kernels_on_a_gpu(dtype, V):
    g = torch.Generator("cuda").manual_seed(0)
    x = (4 * torch.randn(40, V, generator=g, device="cuda")).to(dtype)
    x[3, 5] = x[3, 30] = 60
    y, w = torch.randint(0, V, (40,), generator=g, device="cuda"), torch.rand(40, generator=g, device="cuda")
    (lse, top), (slow, first) = row_stats(x), row_stats_plain(x)
    a, b = row_gradient_(x.clone(), y, lse, w), row_gradient_plain_(x.clone(), y, slow, w)
    assert top.equal(first) and top[3] == 5 and torch.allclose(lse, slow, rtol=1e-6)
    assert torch.allclose(a.double(), b.double(), rtol=2e-2, atol=1e-7 if dtype != torch.float16 else 1e-6)
