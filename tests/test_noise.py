"Noise: a copy, a stream of its own, and nothing at strength 0."
import json
import math
import threading

import pytest
import torch

from dflash_nb.config import NOISE_PARTS, ConfigError, NoiseConfig, TrainConfig, load_config, save_config
from dflash_nb.noise import NoiseError, NoiseProbe, add_noise, add_schedule, schedules, step_generator, step_seed, strength_at

MILD = NoiseConfig(0.1)


def test_zero_is_the_same_tensor_and_draws_nothing():
    x, g = torch.randn(4, 3), step_generator(0, 0)
    state = g.get_state()
    assert add_noise(x, MILD, 0.0, g) is x
    assert add_noise(x, MILD, 0, None) is x
    assert torch.equal(g.get_state(), state)


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_input_and_its_storage_stay_as_they_were(kind):
    store = torch.randn(8, 6)
    before, view = store.clone(), store[2:5]
    out = add_noise(view, NoiseConfig(0.1, kind=kind), 0.1, step_generator(0, 1))
    assert torch.equal(store, before)
    assert out.untyped_storage().data_ptr() != store.untyped_storage().data_ptr()
    assert (out != view).all()


def test_size_and_shape_of_the_noise():
    x = torch.zeros(200_000, dtype=torch.float64)
    u = add_noise(x, MILD, 0.1, step_generator(0, 2))
    assert u.abs().max() <= 0.1 and abs(u.mean()) < 1e-3 and abs(u.std() - 0.1 / 3**0.5) < 5e-4
    n = add_noise(x, NoiseConfig(0.1, kind="gaussian"), 0.1, step_generator(0, 2))
    assert abs(n.std() - 0.1) < 1e-3 and n.abs().max() > 0.3
    assert u.dtype == n.dtype == torch.float64


def test_bfloat16_noise_is_rounded_once_and_unbiased():
    x = torch.zeros(200_000, dtype=torch.bfloat16)
    out = add_noise(x, MILD, 0.1, step_generator(0, 3))
    full = add_noise(x.float(), MILD, 0.1, step_generator(0, 3))
    assert out.dtype == torch.bfloat16 and torch.equal(out, full.bfloat16())
    assert abs(out.float().mean()) < 5e-4


def test_strength_may_be_a_device_tensor():
    x, s = torch.randn(50), torch.tensor(0.1)
    assert torch.equal(add_noise(x, MILD, s, step_generator(0, 4)), add_noise(x, MILD, 0.1, step_generator(0, 4)))
    assert torch.equal(add_noise(x, MILD, torch.tensor(0.0), step_generator(0, 4)), x)


def test_inference_tensors_become_ordinary_ones():
    with torch.inference_mode():
        x = torch.randn(5, 4)
    w = torch.randn(4, 2, requires_grad=True)
    (add_noise(x, MILD, 0.1, step_generator(0, 5)) @ w).sum().backward()
    assert w.grad is not None


def test_only_leaves_the_rest_bit_equal():
    x, only = torch.randn(3, 4, 5), torch.tensor([True, False, True, False])[:, None]
    out = add_noise(x, MILD, 0.1, step_generator(0, 6), only)
    assert torch.equal(out[:, 1::2], x[:, 1::2]) and (out[:, ::2] != x[:, ::2]).all()
    assert torch.equal(out[:, ::2], add_noise(x, MILD, 0.1, step_generator(0, 6))[:, ::2])


def test_stream_is_a_pure_function_of_its_key():
    want, got = torch.rand(9, generator=step_generator(3, 5, 1)), []
    t = threading.Thread(target=lambda: [torch.rand(4), got.append(torch.rand(9, generator=step_generator(3, 5, 1)))])
    t.start()
    t.join()
    assert torch.equal(got[0], want)
    keys = [(3, 5, 0), (3, 5, 2), (3, 6, 1), (4, 5, 1), (5, 3, 1), (1, 5, 3), (3, 1, 5)]
    assert all(not torch.equal(torch.rand(9, generator=step_generator(*k)), want) for k in keys)


def test_global_generator_is_not_touched():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    add_noise(torch.zeros(1000), NoiseConfig(0.1, kind="gaussian"), 0.1, step_generator(0, 0))
    assert torch.equal(torch.rand(3), want)


def test_seeds_do_not_collide_and_are_pinned():
    low = {step_seed(s, t, m) & 0xFFFFFFFF for s in range(3) for t in range(2000) for m in range(4)}
    assert len(low) > 24_000 - 3
    assert step_seed(0, 0, 0) == step_seed(0, 0) and 0 <= step_seed(2**63, 10**12, 7) < 2**63
    assert step_seed(1, 2, 3) == 3851293329796251419


def test_constant_schedule_and_its_ends():
    assert strength_at(NoiseConfig(), 5, 10) == 0.0
    assert [strength_at(MILD, s, 10) for s in (0, 9, 10, 99)] == [0.1] * 4
    assert strength_at(MILD, 0, 0) == 0.1


def at(schedule, shares, strength=1.0):
    noise = NoiseConfig(strength, schedule=schedule)
    return [strength_at(noise, round(s * 1000), 1000) for s in shares]


@pytest.mark.parametrize("schedule, want", [
    ("linear_warmup:0.5", [0, 0.5, 1, 1, 1]), ("linear_warmup:0.25:0.75", [0, 0, 0.5, 1, 1]), ("linear_decay:0.5", [1, 1, 1, 0.5, 0]),
    ("cosine_warmup", [0, (1 - 2**-0.5) / 2, 0.5, (1 + 2**-0.5) / 2, 1]),
    ("cosine_decay:0:1", [1, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0]),
    ("step:0.5:0.1", [1, 1, 0.1, 0.1, 0.1]), ("step", [1, 1, 0, 0, 0]), ("constant:0.3", [0.3] * 5),
    ("linear_warmup:0.25 * step:0.75:0.5", [0, 1, 1, 0.5, 0.5]),
    (((0.5, "linear_warmup"),
    (1, "linear_decay * constant:0.5")), [0, 0.5, 0.5, 0.25, 0]),
    (((0, 0), (0.5, 1), (1, 0.5)), [0, 0.5, 1, 0.75, 0.5]),
    (((0.25, 1), (0.25, 0.2), (0.5, 0.6)), [1, 0.2, 0.6, 0.6, 0.6]),
    (((0.5, 0.7),), [0.7] * 5),
], ids=str)
def test_schedules_against_values_by_hand(schedule, want):
    assert at(schedule, [0, 0.25, 0.5, 0.75, 1]) == pytest.approx(want, abs=1e-12)
    assert at(schedule, [0, 0.25, 0.5, 0.75, 1], 0.3) == pytest.approx([0.3 * w for w in want], abs=1e-12)


@pytest.mark.parametrize("schedule", [
    "linear_warmup:0.1 * cosine_decay:0.5:0.9", [[0.3, "linear_warmup"], [1, "step"]], [[0, 0], [1, 1]],
], ids=str)
def test_a_schedule_is_plain_values(schedule, tmp_path):
    cfg = TrainConfig(noise=dict(strength=0.1, schedule=schedule))
    hash(cfg.noise)
    assert TrainConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    assert load_config(save_config(cfg, tmp_path / "c.yaml")) == cfg
    assert cfg.hash() != TrainConfig(noise=0.1).hash()


@pytest.mark.parametrize("schedule, why", [
    ("warmup", "'warmup'"),
    ("", "''"),
    ("linear_warmup:x", "numbers"),
    ("linear_warmup:2", r"\[0, 1\]"),
    ("linear_warmup:0:1:1", "at most 2"),
    ("step:nan", r"\[0, 1\]"),
    ("linear_decay:0.8:0.2", "ends before"),
    (((0, 2), (1, 1)), "in \\[0, 1\\]"),
    (((0.5, 1), (0.2, 1)), "increasing"),
    (((0.5, "step"),), "last one at 1"),
    (((0.5, "step"),
    (1, 0.5)), "only"),
    ((), "points"),
    (((0, 1, 2),), "points"),
    (5, "points"),
    (((1, "stp"),), "stp"),
    ((("a", 1),), "points"),
], ids=str)
def test_bad_schedules_are_refused_at_construction(schedule, why):
    with pytest.raises(ConfigError, match=why):
        NoiseConfig(0.1, schedule=schedule)
    with pytest.raises(ConfigError):
        NoiseConfig(schedule=schedule)


def test_a_part_of_ones_own(monkeypatch):
    monkeypatch.setattr("dflash_nb.noise.schedules", dict(schedules))
    monkeypatch.setattr("dflash_nb.noise.NOISE_PARTS", NOISE_PARTS)
    try:
        add_schedule("saw", lambda share, teeth: share * 10 * teeth % 1, 0.4)
        assert at("saw", [0, 0.125, 0.25]) == pytest.approx([0, 0.5, 0]) and at("saw:0.2", [0.25]) == pytest.approx([0.5])
        with pytest.raises(ConfigError, match="exists"):
            add_schedule("saw", None)
    finally:
        NOISE_PARTS.pop("saw")


def step_of(probe, strength, where=None, kind="uniform", step=0, dtype=torch.float32, size=1.0, micros=2):
    for micro in range(micros):
        x = (torch.randn(2, 60, 50, 4, generator=step_generator(9, step, micro)) * size).to(dtype)
        only = None if where is None else where.expand(2, 60, 50, 1)
        probe.measure(x, add_noise(x, NoiseConfig(0.1, kind=kind), strength, step_generator(0, step, micro), only), only)
    return probe.take(step)


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_probe_measures_what_was_applied(kind):
    noise = NoiseConfig(0.1, kind=kind, schedule="linear_warmup:0.5")
    probe = NoiseProbe(noise, steps=20)
    for s in range(20):
        want = strength_at(noise, s, 20)
        assert step_of(probe, want, kind=kind, step=s) == pytest.approx(want, rel=0.03)
    only = torch.tensor([True, False]).repeat(25)[:, None]
    assert step_of(probe, 0.1, only, kind, step=15) == pytest.approx(0.1, rel=0.03)
    assert step_of(probe, 0.1, kind=kind, step=15, dtype=torch.bfloat16) == pytest.approx(0.1, rel=0.03)
    step_of(probe, 0.1, kind=kind, step=15, dtype=torch.bfloat16, size=50)


@pytest.mark.parametrize("applied", [0.0, 0.08, 0.1 / 3**0.5, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_refuses_another_strength(applied, dtype):
    with pytest.raises(NoiseError, match="step 4: noise of strength .* says 0.1"):
        step_of(NoiseProbe(NoiseConfig(0.1), 5), applied, step=3, dtype=dtype)


def test_probe_refuses_dropped_noise_the_wrong_slots_and_noise_at_zero():
    probe, x = NoiseProbe(NoiseConfig(0.1, schedule="step:0.5"), 10), torch.randn(2, 60, 50, 4)
    probe.measure(x, x)
    with pytest.raises(NoiseError, match="0 was applied"):
        probe.take(0)
    probe.measure(x, add_noise(x, NoiseConfig(0.1), 0.1, step_generator(0, 0), torch.tensor([True, False] * 25)[:, None]))
    with pytest.raises(NoiseError):
        probe.take(0)
    probe.measure(x, add_noise(x, NoiseConfig(0.1), 0.1, step_generator(0, 0)))
    with pytest.raises(NoiseError, match="says 0"):
        probe.take(5)
    probe.measure(x, x)
    assert probe.take(5) == 0
    assert math.isnan(probe.take(5))


def test_probe_works_inside_a_thread_and_under_inference():
    probe, got = NoiseProbe(NoiseConfig(0.1), 5), []
    t = threading.Thread(target=lambda: got.append(step_of(probe, 0.1)))
    t.start()
    t.join()
    assert got[0] == pytest.approx(0.1, rel=0.03)


def test_bad_input():
    with pytest.raises(ConfigError, match="generator"):
        add_noise(torch.zeros(2), MILD, 0.1)
    odd = NoiseConfig(0.1)
    object.__setattr__(odd, "kind", "pink")
    with pytest.raises(ConfigError, match="pink"):
        add_noise(torch.zeros(2), odd, 0.1, step_generator(0, 0))
