"Arms: exactly their delta, equal configs collapsed, unread deltas refused, names that are folders."
import pytest

from dflash_nb.ablate import folder_name
from dflash_nb.arms import FOLLOWS, Arm, arm_name, check_exact, list_deltas, plan_arms, with_delta
from dflash_nb.config import ConfigError, TrainConfig

BASE = TrainConfig(block_size=8)


@pytest.mark.parametrize("grid, why", [
    ({"gama": [1]}, "did you mean 'gamma'"), ({"seed": [1, 2]}, "every arm runs with every seed"),
    ({"attention": ["eager"]}, "only moves work around"),
    ({"micro_rows": [1, 2]}, "only moves work around"), ({"weighting": ["flat"], "gamma": [4]}, "is not read"),
    ({"noise.kind": ["gaussian"]}, "not read while"),
    ({"loss.ce": [1]}, "only the noise has parts"), ({"alpha": [0.5]}, "not read"), ({"lr": [-1]}, "learning rate"),
    ({"gamma": 4}, "dict of lists"),
    ([1, 2], "dict of lists"), ("gamma", "dict of lists"), ({"a": {"lr": 1e-3}, "b": {"lr": 2e-3, "gamma": 0}}, "arm 'b'"),
    ({"noise.strenth": [0.1]}, "strength"),
], ids=str)
def test_refused(grid, why):
    with pytest.raises(ConfigError, match=why):
        plan_arms(BASE, grid)


def test_equal_configs_are_one_arm_and_listed():
    plan = plan_arms(BASE, [dict(gamma=4), dict(gamma=None), dict(weighting="flat"), dict(loss={"ce": 2, "tv": 0}),
    dict(loss={"ce": 1.0}), dict(gamma=2), dict(gamma=2.0)])
    assert [a.name for a in plan.arms] == ["base", "gamma=none", "loss=2 ce + 0 tv", "gamma=2"]
    assert plan.collapsed == [("gamma=4", "base"), ("weighting=flat", "gamma=none"), ("loss=1 ce", "base"), ("gamma=2", "gamma=2")]
    assert len({a.hash for a in plan.arms}) == len(plan.arms) and "gamma=4 is base" in repr(plan)


def test_auto_and_its_value_are_equal_once_resolved():
    plan = plan_arms(BASE, {"num_anchors": [32, 64]}, lambda c: c | dict(num_anchors=32) if c.num_anchors == "auto" else c)
    assert [a.name for a in plan.arms] == ["base", "num_anchors=64"]


def test_two_deltas_of_one_name_need_names():
    with pytest.raises(ConfigError, match="two arms are named"):
        plan_arms(BASE, [dict(lr=1.0000001e-3), dict(lr=1e-3)])


@pytest.mark.parametrize("delta", [
    dict(gamma=2), dict(block_size=4), dict(weighting="dpace"), dict(weighting="flat"), dict(gamma=None), dict(schedule="wsd"),
    dict(loss="fkl"),
    dict(betas=[0.9, 0.99]), dict(optimizer="muon"), {"noise.strength": 0.1}, dict(row_len=512, token_budget=512),
    dict(init="target"), dict(labels="teacher"),
], ids=str)
def test_an_arm_differs_by_its_delta_alone(delta):
    arm = plan_arms(BASE, [delta]).arms[1]
    assert arm.delta == delta and arm.at(7).seed == 7
    stray = Arm("stray", {}, arm.cfg, arm.hash)
    with pytest.raises(ConfigError, match="changes more than its delta"):
        check_exact(BASE, stray)
    assert all(hasattr(BASE, k) and all(hasattr(BASE, f) for f in fs) for k, fs in FOLLOWS.items())


def test_parts_of_the_noise():
    base = TrainConfig(noise=dict(strength=0.1, kind="gaussian", schedule="linear_warmup:0.2"))
    off = with_delta(base, {"noise.strength": 0})
    assert off.noise.strength == 0 and off.noise.kind == "uniform"
    more = with_delta(base, {"noise.strength": 0.3})
    assert (more.noise.kind, more.noise.schedule, more.noise.strength) == ("gaussian", "linear_warmup:0.2", 0.3)
    whole = with_delta(base, {"noise": 0.2, "noise.where": "embed"})
    assert (whole.noise.strength, whole.noise.where, whole.noise.kind) == (0.2, "embed", "uniform")


def test_a_twin_is_the_base_with_other_seeds():
    plan = plan_arms(BASE, {"gamma": [2]}, twin="again")
    twin = plan.arms[-1]
    assert twin.name == "again" and twin.hash == plan.arms[0].hash and twin.at(0).seed != 0 and twin.at(1).seed == twin.at(0).seed + 1


def test_names():
    assert [n for n, _ in list_deltas({"b": dict(lr=1e-3), "a": {}})] == ["b", "a"]
    assert arm_name({}) == "base" and arm_name(dict(lr=0.001, target_layer_ids=(1, 2))) == "lr=0.001, target_layer_ids=1-2"
    names = [folder_name(n) for n in ("loss=0.1 ce + 0.9 tv", "../../x", "a/b", "", "x" * 300)]
    assert all("/" not in n and n not in ("", ".", "..") and len(n) <= 80 for n in names)
    assert len({folder_name(n) for n in ("a b", "a_b", "a/b", "x" * 70, "x" * 71)}) == 5


def test_a_knob_that_only_one_of_two_configs_reads_is_compared(monkeypatch):
    from dflash_nb import arms
    inner = arms.effective
    monkeypatch.setattr(arms, "effective", lambda cfg: {k: v for k, v in inner(cfg).items() if k != "clip" or cfg.clip != 1.0})
    check_exact(BASE, Arm("named", dict(clip=2.0), BASE | dict(clip=2.0), ""))
    for a, b in ((1.0, 2.0), (2.0, 1.0)):
        with pytest.raises(ConfigError, match="clip"):
            check_exact(BASE | dict(clip=a), Arm("stray", dict(gamma=2), BASE | dict(gamma=2, clip=b), ""))
