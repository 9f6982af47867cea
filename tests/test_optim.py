"Optimizer: torch's AdamW over the drafter, its schedule, clipping and refused steps."
import copy
import math
import time

import pytest
import torch
from torch import nn

from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.optim import (
    MuonAdamW,
    clip_gradients,
    group_table,
    guarded_step,
    lr_at,
    lr_range,
    make_optimizer,
    nonfinite_gradients,
    param_table,
    put_back,
    set_lr,
)

torch.set_num_threads(1)


def toy(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    net.register_parameter("frozen", nn.Parameter(torch.randn(4), requires_grad=False))
    return net


def backward(net, seed=0, size=1.0):
    g = torch.Generator().manual_seed(seed)
    net.zero_grad()
    (net(torch.randn(6, 5, generator=g)).pow(2).sum() * size).backward()


@pytest.mark.parametrize("knobs", [dict(), dict(betas=(0.8, 0.999), eps=1e-6, weight_decay=0.1, lr=1e-2)], ids=str)
def test_equals_the_formula_and_torchs_reference(knobs):
    cfg = TrainConfig(steps=10, warmup=0.2, **knobs)
    net, ref, own = toy(), toy(), {n: p.detach().clone().double() for n, p in toy().named_parameters() if p.requires_grad}
    opt = make_optimizer(net, cfg)
    plain = torch.optim.AdamW([p for p in ref.parameters() if p.requires_grad], lr=1, betas=cfg.betas, eps=cfg.eps,
                              weight_decay=cfg.weight_decay, foreach=False, fused=False)
    m = {n: torch.zeros_like(p) for n, p in own.items()}
    v = copy.deepcopy(m)
    for s in range(10):
        backward(net, s)
        backward(ref, s)
        grad = {n: p.grad.double() for n, p in ref.named_parameters() if p.requires_grad}
        set_lr(opt, lr_at(cfg, s))
        set_lr(plain, lr_at(cfg, s))
        opt.step()
        plain.step()
        (b1, b2), lr = cfg.betas, lr_at(cfg, s)
        for n, p in own.items():
            m[n] = b1 * m[n] + (1 - b1) * grad[n]
            v[n] = b2 * v[n] + (1 - b2) * grad[n] ** 2
            p.mul_(1 - lr * cfg.weight_decay)
            p.sub_(lr * (m[n] / (1 - b1 ** (s + 1))) / ((v[n] / (1 - b2 ** (s + 1))).sqrt() + cfg.eps))
    for n, p in net.named_parameters():
        torch.testing.assert_close(p, dict(ref.named_parameters())[n], rtol=1e-5, atol=1e-7)
        if n in own:
            torch.testing.assert_close(p.double(), own[n], rtol=1e-4, atol=1e-6)


def test_schedule_values():
    cfg = TrainConfig(steps=4, warmup=0.5, lr=1e-3)
    assert [lr_at(cfg, s) for s in range(5)] == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4, 0])
    recipe = TrainConfig(steps=1000)
    assert lr_at(recipe, 0) == pytest.approx(6e-4 / 40) and lr_at(recipe, 39) == 6e-4 and lr_at(recipe, 999) > 0
    assert lr_at(recipe, 520) == pytest.approx(3e-4) and lr_at(recipe, 1000) == lr_at(recipe, 5000) == 0
    rates = [lr_at(recipe, s) for s in range(40, 1001)]
    assert all(a >= b for a, b in zip(rates, rates[1:], strict=False))


@pytest.mark.parametrize("steps, warmup", [(300, 0.0), (10, 0.04), (1, 0.04), (1, 0.99)])
def test_no_warm_up_starts_at_the_peak(steps, warmup):
    cfg = TrainConfig(steps=steps, warmup=warmup)
    assert lr_at(cfg, 0) == cfg.lr and lr_at(cfg, steps) == pytest.approx(0, abs=1e-18)


def test_constant_schedule():
    cfg = TrainConfig(steps=10, warmup=0.2, schedule="constant")
    assert [lr_at(cfg, s) / cfg.lr for s in range(12)] == pytest.approx([0.5] + [1] * 11)


def test_only_trainable_drafter_parameters():
    net = toy()
    opt = make_optimizer(net, TrainConfig())
    held = [p for g in opt.param_groups for p in g["params"]]
    assert len(held) == 5 and sum(p.numel() for p in held) == sum(p.numel() for p in net.parameters()) - 4
    assert opt.param_groups[0]["lr"] == lr_at(TrainConfig(), 0) and opt.defaults["fused"]
    with pytest.raises(ConfigError, match="no trainable"):
        make_optimizer(net.requires_grad_(False), TrainConfig())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_masters_are_refused(dtype):
    net = toy()
    net[1].to(dtype)
    with pytest.raises(ConfigError, match="1.weight"):
        make_optimizer(net, TrainConfig())


def test_masters_and_moments_stay_float32_under_autocast():
    net, cfg = toy(), TrainConfig(steps=5)
    opt = make_optimizer(net, cfg)
    for s in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(6, 5)).float().pow(2).sum()
        opt.zero_grad()
        loss.backward()
        guarded_step(opt, clip_gradients(net, 1.0))
        set_lr(opt, lr_at(cfg, s + 1))
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert {s[k].dtype for s in opt.state.values() for k in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert (net[1].weight != 1).all()


def test_betas_reach_the_optimizer():
    ends = []
    for b2 in (0.95, 0.999):
        net = toy()
        opt = make_optimizer(net, TrainConfig(betas=(0.9, b2)))
        for s in range(5):
            backward(net, s)
            opt.step()
        ends.append(net[0].weight.detach().clone())
    assert not torch.allclose(*ends)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, None])
def test_clip_equals_torch(max_norm):
    net, ref = toy(), toy()
    backward(net)
    backward(ref)
    norm = clip_gradients(net, max_norm)
    want = torch.nn.utils.clip_grad_norm_(ref.parameters(), max_norm or 1e30)
    torch.testing.assert_close(norm, want)
    for p, q in zip(net.parameters(), ref.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_division_comes_before_clipping():
    net, ref = toy(), toy()
    backward(net, size=8.0)
    backward(ref)
    torch.testing.assert_close(clip_gradients(net, 0.5, torch.tensor(8.0)), clip_gradients(ref, 0.5))
    torch.testing.assert_close(net[0].weight.grad, ref[0].weight.grad)


def test_denominator_zero_gives_zero_gradients():
    net = toy()
    backward(net)
    for p in net.parameters():
        if p.grad is not None:
            p.grad.zero_()
    assert clip_gradients(net, 1.0, torch.tensor(0.0)) == 0 and not net[0].weight.grad.any()
    assert clip_gradients(toy(), 1.0) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("denominator", [None, 3.0])
def test_non_finite_is_reported_not_spread(bad, denominator):
    net = toy()
    opt = make_optimizer(net, TrainConfig())
    backward(net)
    assert guarded_step(opt, clip_gradients(net, 1.0)) == 0
    before = copy.deepcopy((list(net.parameters()), opt.state_dict()["state"]))
    backward(net, 1)
    net[2].weight.grad[0, 0] = bad
    norm = clip_gradients(net, 1.0, None if denominator is None else torch.tensor(denominator))
    assert not norm.isfinite() and nonfinite_gradients(net) == ["2.weight"]
    assert guarded_step(opt, norm) == 1
    assert all(torch.equal(a, b) for a, b in zip(before[0], net.parameters(), strict=True))
    after = opt.state_dict()["state"]
    assert all(torch.equal(before[1][i][k], after[i][k]) for i in after for k in after[i])
    backward(net, 2)
    assert guarded_step(opt, clip_gradients(net, 1.0)) == 0 and opt.state[net[0].weight]["step"] == 2


def test_refused_step_without_a_fused_kernel():
    net = toy()
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1, foreach=True)
    before = net[0].weight.detach().clone()
    backward(net)
    assert guarded_step(opt, torch.tensor(math.nan)) == 1 and torch.equal(net[0].weight, before)
    assert guarded_step(opt, torch.tensor(1.0)) == 0 and not torch.equal(net[0].weight, before)


def test_lr_tensor_is_filled_in_place():
    p = nn.Parameter(torch.ones(2))
    opt = torch.optim.AdamW([p], lr=torch.tensor(0.1), fused=True)
    lr = opt.param_groups[0]["lr"]
    set_lr(opt, 0.5)
    assert opt.param_groups[0]["lr"] is lr and lr == 0.5
    p.grad = torch.ones(2)
    opt.step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 0.5 - 0.5 * 0.01), rtol=1e-4, atol=1e-4)


def test_state_survives_a_round_trip():
    net, cfg = toy(), TrainConfig(steps=6)
    opt = make_optimizer(net, cfg)
    for s in range(3):
        backward(net, s)
        guarded_step(opt, clip_gradients(net, 1.0))
    twin = toy()
    twin.load_state_dict(net.state_dict())
    other = make_optimizer(twin, cfg)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    for n, o in ((net, opt), (twin, other)):
        backward(n, 9)
        guarded_step(o, clip_gradients(n, 1.0))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_param_table():
    table = param_table(toy())
    assert table.loc["trainable", "numel"] == 5 * 7 + 7 + 7 + 7 + 21
    assert not table.loc["frozen", "trains"] and table.loc["2.weight", "shape"] == (3, 7) and len(table) == 7


def test_linear_and_wsd_schedules():
    linear = TrainConfig(steps=10, warmup=0.2, schedule="linear", lr=1.0)
    assert [lr_at(linear, s) for s in range(12)] == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0])
    wsd = TrainConfig(steps=10, warmup=0.2, schedule="wsd", decay_share=0.4, lr=1.0)
    assert [lr_at(wsd, s) for s in range(12)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0])
    assert lr_at(TrainConfig(steps=10, schedule="wsd", lr=1.0), 8) == 1 and lr_at(TrainConfig(steps=10, schedule="wsd", lr=1.0), 9) == 0.5
    assert lr_at(TrainConfig(steps=1, schedule="wsd", warmup=0.0), 0) == 6e-4


def test_decay_share_is_read_by_wsd_alone():
    with pytest.raises(ConfigError, match="decay_share.*schedule='cosine'"):
        TrainConfig(decay_share=0.1)
    with pytest.raises(ConfigError, match="1 - warmup"):
        TrainConfig(schedule="wsd", decay_share=0.9, warmup=0.2)
    wsd = TrainConfig(schedule="wsd")
    assert wsd.hash() == (wsd | dict(decay_share=0.2)).hash() != TrainConfig().hash()


MUON = TrainConfig(steps=10, warmup=0.2, optimizer="muon", weight_decay=0.1, lr=1e-2)


def train(net, opt, steps, start=0, cfg=MUON):
    for s in range(start, start + steps):
        backward(net, s)
        set_lr(opt, lr_at(cfg, s))
        guarded_step(opt, clip_gradients(net, cfg.clip))


@pytest.mark.parametrize("capturable", [False, True])
def test_muon_equals_torchs_two_optimizers(capturable, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.float().clone())  # torch's iteration in the precision of ours
    net, ref = toy(), toy()
    opt = make_optimizer(net, MUON, capturable)
    assert isinstance(opt, MuonAdamW)
    mats = [p for p in ref.parameters() if p.ndim == 2]
    rest = [p for p in ref.parameters() if p.ndim == 1 and p.requires_grad]
    muon = torch.optim.Muon(mats, lr=1, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1, betas=MUON.betas, eps=MUON.eps, weight_decay=0.1)
    for s in range(6):
        train(net, opt, 1, s)
        backward(ref, s)
        clip_gradients(ref, MUON.clip)
        for o in (muon, adamw):
            set_lr(o, lr_at(MUON, s))
            o.step()
    for p, q in zip(net.parameters(), ref.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("first", [True, False], ids=["first step", "later"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_muon_refuses_a_non_finite_step(first, bad):
    net, clean = toy(), toy()
    opt, twin = make_optimizer(net, MUON), make_optimizer(clean, MUON)
    if not first:
        train(net, opt, 2)
        train(clean, twin, 2)
    before = copy.deepcopy([p.detach() for p in net.parameters()])
    backward(net, 7)
    net[0].weight.grad[0, 0] = bad
    assert guarded_step(opt, clip_gradients(net, 1.0)) == 1 and opt.found_inf is None
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    train(net, opt, 2, 4)
    train(clean, twin, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), clean.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_either_optimizer_resumes_exactly(name):
    cfg = MUON | dict(optimizer=name)
    net, other = toy(), toy(1)
    opt, late = make_optimizer(net, cfg), make_optimizer(other, cfg)
    train(net, opt, 3, cfg=cfg)
    other.load_state_dict(net.state_dict())
    late.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert sorted(opt.state_dict()["state"]) == list(range(5))
    train(net, opt, 3, 3, cfg)
    train(other, late, 3, 3, cfg)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_matrices_of_one_shape_go_together_and_alone_alike():
    rng = torch.Generator().manual_seed(1)
    shapes = [(4, 9), (9, 4), (5, 5), (4, 9)]
    both = [[nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(i))) for i, s in enumerate(shapes)] for _ in range(2)]
    grads = [torch.randn(s, generator=rng) for s in shapes]
    for many, params in zip((True, False), both, strict=True):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        for group in [params] if many else [[p] for p in params]:
            MuonAdamW(group, MUON, 1e-2).step()
    for p, q in zip(*both, strict=True):
        torch.testing.assert_close(p, q)


def test_muon_steps_in_milliseconds_on_a_cpu():
    params = [nn.Parameter(torch.randn(192, 640)) for _ in range(4)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt, start = MuonAdamW(params, MUON, 1e-3), time.perf_counter()
    opt.step()
    assert time.perf_counter() - start < 2 and opt.momenta[params[0]].dtype == torch.float32  # half precision took 85 ms a matrix and more


def test_muon_without_vectors_and_without_matrices():
    net = nn.Linear(4, 3, bias=False)
    opt = make_optimizer(net, MUON)
    net(torch.ones(2, 4)).sum().backward()
    assert guarded_step(opt, clip_gradients(net, 1.0)) == 0 and len(opt.param_groups) == 1
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    with pytest.raises(ConfigError, match="no parameter is a matrix"):
        make_optimizer(nn.LayerNorm(3), MUON)


def test_group_table():
    net = toy()
    table = group_table(make_optimizer(net, MUON), net)
    assert list(table.numel) == [35 + 21, 21] and list(table.tensors) == [2, 3] and list(table.lr) == [lr_at(MUON, 0)] * 2
    assert list(group_table(make_optimizer(net, TrainConfig()), net).rule) == ["adamw"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("before", [0, 3])
def test_lr_range_restores_everything(name, before):
    cfg = MUON | dict(optimizer=name)
    net = toy()
    opt = make_optimizer(net, cfg)
    train(net, opt, before, cfg=cfg)
    weights, state = copy.deepcopy(net.state_dict()), copy.deepcopy(opt.state_dict())

    def step(i):
        loss = net(torch.ones(3, 5)).square().sum()
        loss.backward()
        return loss.detach(), torch.tensor(3.0)

    found = lr_range(net, opt, step, low=1e-4, high=10.0, steps=30)
    assert 5 < len(found.lr) <= 30 and 1e-4 <= found.lowest <= 10 and found.suggestion == found.lowest / 10
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())
    after = opt.state_dict()
    assert after["state"].keys() == state["state"].keys()
    assert all(torch.equal(v, state["state"][i][k]) for i, s in after["state"].items() for k, v in s.items())
    assert [g["lr"] for g in after["param_groups"]] == [g["lr"] for g in state["param_groups"]]
    assert list(found.table.columns) == ["lr", "loss", "smooth"]


def test_lr_range_stops_where_the_loss_explodes_and_restores_after_an_error():
    net = toy()
    opt = make_optimizer(net, TrainConfig())
    weights = copy.deepcopy(net.state_dict())

    def step(i):
        if i == 4:
            raise RuntimeError("no data")
        backward(net, 0)
        return torch.tensor(1.0), None

    with pytest.raises(RuntimeError, match="no data"):
        lr_range(net, opt, step)
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items()) and not opt.state_dict()["state"]
    losses = iter([3.0, 2.0, 1.0, math.nan])

    def falling(i):
        backward(net, 0)
        return torch.tensor(next(losses)), None

    found = lr_range(net, opt, falling, smooth=0.0)
    assert len(found.lr) == 3 and found.lowest == found.lr[2]
    with put_back(net, opt):
        net[0].weight.data.zero_()
    assert torch.equal(net[0].weight, weights["0.weight"])
