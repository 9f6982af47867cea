"Noise: a copy, a stream of its own, and nothing at strength 0."
import threading

import pytest
import torch

from dflash_nb.config import ConfigError, NoiseConfig
from dflash_nb.noise import add_noise, schedules, step_generator, step_seed, strength_at

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


def test_a_schedule_is_one_more_entry(monkeypatch):
    monkeypatch.setitem(schedules, "constant", lambda share: share)
    assert [strength_at(MILD, s, 10) for s in (0, 5, 20)] == pytest.approx([0, 0.05, 0.1])
    monkeypatch.delitem(schedules, "constant")
    with pytest.raises(ConfigError, match="constant"):
        strength_at(MILD, 0, 10)


def test_bad_input():
    with pytest.raises(ConfigError, match="generator"):
        add_noise(torch.zeros(2), MILD, 0.1)
    odd = NoiseConfig(0.1)
    object.__setattr__(odd, "kind", "pink")
    with pytest.raises(ConfigError, match="pink"):
        add_noise(torch.zeros(2), odd, 0.1, step_generator(0, 0))
