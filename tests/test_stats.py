"Statistics of sweeps: known values, coverage, corrections, degenerate input."
import math

import numpy as np
import pytest

from dflash_nb.config import ConfigError
from dflash_nb.stats import (
    Range,
    compare_arms,
    difference_table,
    holm,
    mean_band,
    paired_difference,
    pooled_residual,
    ratio_values,
    sample_space,
    t_cdf,
    t_quantile,
)


@pytest.mark.parametrize("df, p, t", [
    (1, 0.975, 12.7062), (2, 0.95, 2.92), (2, 0.995, 9.9248), (5, 0.9, 1.4759), (10, 0.975, 2.2281),
    (30, 0.9995, 3.646), (1000, 0.975, 1.9623),
])
def test_t_against_printed_tables(df, p, t):
    assert t_quantile(p, df) == pytest.approx(t, abs=6e-5) and t_quantile(1 - p, df) == -t_quantile(p, df)
    assert t_cdf(t, df) == pytest.approx(p, abs=1e-5) and t_cdf(-t, df) == pytest.approx(1 - p, abs=1e-5)


def test_t_between_whole_degrees_and_at_the_ends():
    assert t_quantile(0.975, 2) > t_quantile(0.975, 2.5) > t_quantile(0.975, 3)
    assert t_cdf(0, 3) == 0.5 and t_cdf(math.inf, 3) == 1 and t_cdf(-math.inf, 3) == 0
    assert t_cdf(-40, 2) == pytest.approx(0.5 * (1 - 40 / (2 + 1600) ** 0.5), rel=1e-9)
    x = np.linspace(-5, 5, 41)
    mass = np.diff([t_cdf(v, 4) for v in x]) / 0.25
    mid = (x[1:] + x[:-1]) / 2
    np.testing.assert_allclose(mass, 0.375 * (1 + mid**2 / 4) ** -2.5, atol=2e-3)


def test_paired_t_of_two_arms_is_the_textbook_one():
    rng = np.random.default_rng(0)
    a, b = rng.normal(5, 1, 6), rng.normal(4, 1, 6)
    found = compare_arms(dict(base=b, arm=a), "base")["arm"]
    d = a - b
    t = d.mean() / (d.std(ddof=1) / 6**0.5)
    assert found.df == 5 and found.p == pytest.approx(2 * t_cdf(-abs(t), 5)) == found.p_holm
    assert found.quantile == pytest.approx(2.5706, abs=1e-4)
    assert found.high - found.mean == pytest.approx(found.quantile * d.std(ddof=1) / 6**0.5)
    assert found.seeds == 6 and found.prompts == 0 and found.level == 0.95


def test_pooled_residual_is_the_two_way_anova_s():
    y = np.array([[1.0, 2, 4], [2, 2, 6], [0, 3, 3]])
    rest = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    v, df = pooled_residual(y)
    assert df == 4 and v == pytest.approx(2 * (rest**2).sum() / 4)
    assert pooled_residual(y[:2])[0] == pytest.approx((y[0] - y[1]).var(ddof=1))
    assert pooled_residual(y[:1]) is None and pooled_residual(y[:, :1]) is None


def test_prompts_add_variance_and_never_remove_it():
    rng = np.random.default_rng(1)
    d_S = np.array([0.1, 0.2, 0.3])
    alone = paired_difference(d_S)
    noisy = paired_difference(d_S[:, None] + rng.normal(0, 2, 40) * np.ones((3, 1)))
    assert noisy.se > alone.se and noisy.df > 2 and noisy.prompts == 40
    same = paired_difference(np.repeat(d_S[:, None], 5, 1))
    assert same.se == pytest.approx(alone.se) and same.df == pytest.approx(2)


def test_one_seed_is_about_prompts_alone_and_one_number_about_nothing():
    d = np.random.default_rng(2).normal(1, 1, (1, 30))
    found = compare_arms(dict(base=0 * d, arm=d), "base")["arm"]
    assert found.seeds == 1 and found.prompts == 30 and found.df == pytest.approx(29) and found.se == pytest.approx(d.std(ddof=1) / 30**0.5)
    lone = compare_arms(dict(base=[1.0], arm=[2.0]), "base")["arm"]
    assert lone.mean == 1 and not lone.differs and lone.p == 1 and lone.low == -math.inf and lone.detectable() == math.inf
    assert "one run" in difference_table(dict(arm=lone)).verdict["arm"]


def test_no_spread():
    same = compare_arms(dict(base=[1, 1, 1], arm=[1, 1, 1]), "base")["arm"]
    assert same.p == 1 and not same.differs and same.low == same.high == 0
    moved = compare_arms(dict(base=[1, 1, 1], arm=[2, 2, 2]), "base")["arm"]
    assert moved.differs and moved.low == moved.high == 1


def test_holm_and_the_intervals_agree():
    assert holm([]) == [] and holm([0.2]) == [0.2] and holm([0.5, 0.9]) == [1, 1]
    assert holm([0.01, 0.02, 0.03, 0.005]) == pytest.approx([0.03, 0.04, 0.04, 0.02])
    rng = np.random.default_rng(3)
    for _ in range(100):
        shift = rng.choice([0, 0, 1], 5)
        values = {str(a): 3 + shift[a] * rng.uniform(0.2, 2) * (a > 0) + rng.normal(0, 0.3, 4) for a in range(5)}
        for d in compare_arms(values, "0").values():
            assert d.differs == (d.p_holm < 0.05) == (not d.low <= 0 <= d.high)


def synthetic(rng, shape, arms=4, run=0.05, effect=0.0, wild=1.0):
    shared = rng.normal(0, 1, (shape[0], *[1] * (len(shape) - 1)))
    spread = [run * (wild if a == 2 else 1) for a in range(arms)]
    return {str(a): shared + rng.normal(0, spread[a], shared.shape) + rng.normal(0, 0.1, shape) + effect * (a == 1) for a in range(arms)}


@pytest.mark.parametrize("shape", [(3,), (5,), (3, 10)], ids=str)
@pytest.mark.parametrize("wild", [1.0, 4.0])
def test_equal_arms_are_seldom_called_different(shape, wild):
    rng = np.random.default_rng(4)
    wrong = np.mean([any(d.differs for d in compare_arms(synthetic(rng, shape, wild=wild), "0").values()) for _ in range(400)])
    assert wrong < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5 + 0.02 * (wild > 1)


def test_intervals_cover_the_true_difference_and_the_detectable_one_is_found():
    rng, hits, found = np.random.default_rng(5), 0, 0
    for _ in range(400):
        d = compare_arms(synthetic(rng, (3, 10), arms=2, effect=0.2), "0")["1"]
        hits += d.low <= 0.2 <= d.high
    assert 0.92 < hits / 400 <= 1
    least = np.median([compare_arms(synthetic(rng, (4,)), "0")["1"].detectable() for _ in range(200)])
    found = np.mean([compare_arms(synthetic(rng, (4,), effect=least), "0")["1"].differs for _ in range(400)])
    assert 0.65 < found < 0.95


def test_planted_null_in_at_most_four_of_twenty():
    "Two names of one thing, 20 repeats, 3 seeds, 24 prompts."
    rng = np.random.default_rng(6)
    called = sum(compare_arms(synthetic(rng, (3, 24), arms=2), "0")["1"].differs for _ in range(20))
    assert called <= 4


def test_ratio_values_pool_and_refuse_nothing():
    rng = np.random.default_rng(7)
    e, c = rng.integers(5, 60, (3, 8)), rng.integers(3, 20, (3, 8))
    v = ratio_values(e, c)
    np.testing.assert_allclose(v.mean(1), e.sum(1) / c.sum(1))
    c[0, 0] = e[0, 0] = 0
    assert np.isfinite(ratio_values(e, c)).all()


def test_arms_that_do_not_match_are_named():
    with pytest.raises(ConfigError, match="different seeds"):
        compare_arms(dict(a=[1, 2], b=[1, 2, 3]), "a")
    with pytest.raises(ConfigError, match="base='c'"):
        compare_arms(dict(a=[1, 2], b=[1, 2]), "c")


def test_bands():
    mean, low, high = mean_band([[1, 2], [3, 2]])
    assert list(mean) == [2, 2] and low[1] == high[1] == 2 and high[0] - 2 == pytest.approx(12.7062 * 2**0.5 / 2**0.5, abs=1e-3)
    assert all(list(x) == [1, 2] for x in mean_band([[1, 2]]))


@pytest.mark.parametrize("how", ["latin", "random"])
def test_samples(how):
    space = dict(lr=Range(1e-4, 1e-2, log=True), layers=Range(1, 3, whole=True), loss=["ce", "tv"])
    points = sample_space(space, 12, seed=3, how=how)
    assert points == sample_space(space, 12, seed=3, how=how) != sample_space(space, 12, seed=4, how=how)
    assert all(1e-4 <= p["lr"] < 1e-2 and p["layers"] in (1, 2, 3) and p["loss"] in ("ce", "tv") for p in points)
    if how == "latin":
        assert sorted(p["layers"] for p in points) == [1] * 4 + [2] * 4 + [3] * 4 and sum(p["loss"] == "tv" for p in points) == 6
    with pytest.raises(ConfigError, match="latin or random"):
        sample_space(space, 3, how="sobol")
