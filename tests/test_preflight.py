"The check before a run: passes where training and serving agree, names what differs, keeps only what passed."

import time

import numpy as np
import pytest
import torch
from tiny import tiny_target

import dflash_nb.preflight as pf
from dflash_nb.config import ConfigError, DataError, TrainConfig
from dflash_nb.data import Dataset
from dflash_nb.preflight import PreflightError, first_prompts, overfit_config, own_answers, preflight, preflight_key

torch.set_num_threads(1)
CFG = TrainConfig(block_size=4, num_draft_layers=1, target_layer_ids=(1, 3))


@pytest.fixture(scope="module")
def pair():
    target = tiny_target("qwen3")
    rng = np.random.default_rng(0)
    docs = [(rng.integers(0, 250, 14).astype(np.int32), np.arange(14) >= 6) for _ in range(12)]
    return target, Dataset.from_docs(docs)


def check(pair, cfg=CFG, **kw):
    return preflight(*pair, cfg, **dict(seconds=2.0, cache=None, show=False) | kw)


@pytest.mark.parametrize(
    "change",
    [
        dict(layout="shifted"),
        dict(loss=dict(ce=0.1, tv=0.9), noise=0.05),
        *(pytest.param(change, marks=pytest.mark.slow) for change in (dict(loss="fkl"), dict(weighting="dpace"), dict(num_draft_layers=2))),
    ],
)
def test_every_kind_of_run_passes(pair, change):
    found = check(pair, CFG | change)
    assert found.ok and found.numbers["walk_tau"] == found.numbers["tau"] and found.numbers["steps"] >= 1


def test_the_budget_is_kept(pair):
    start = time.monotonic()
    found = check(pair, seconds=3.0)
    assert (
        time.monotonic() - start < 6
        and 1 <= found.numbers["answers"] <= 8
        and found.numbers["loss"] < found.numbers["first_loss"]
    )
    assert "sim_tau" in str(found) and "walk_tau" in str(found) and "preflight passed" in str(found)


def broken(monkeypatch, harm):
    real = pf.load_drafter

    def load(*args, **kw):
        return harm(real(*args, **kw))

    monkeypatch.setattr(pf, "load_drafter", load)


def no_norm(d):
    with torch.no_grad():
        d.hidden_norm.weight.mul_(-1)
    return d


def test_a_served_drafter_that_differs_is_refused_or_warned_of(pair, monkeypatch, tmp_path):
    broken(monkeypatch, no_norm)
    with pytest.raises(PreflightError, match="walk and decoding part"):
        check(pair, seconds=2.0, cache=tmp_path)
    with pytest.warns(UserWarning, match="disagree"):
        assert not check(pair, seconds=4.0, cache=tmp_path, on_fail="warn").ok
    assert not list(tmp_path.iterdir()), "a failed check was kept"


def test_an_export_that_is_not_what_was_trained_is_named(pair, monkeypatch):
    import dflash_nb.export as export

    real = export.zlab_config
    monkeypatch.setattr(export, "zlab_config", lambda cfg, **kw: real(cfg, **kw) | dict(rms_norm_eps=0.5))
    with pytest.raises(PreflightError, match="logits block"):
        check(pair)


def test_passed_checks_are_kept_by_config_target_and_version(pair, tmp_path, monkeypatch):
    assert not check(pair, cache=tmp_path).cached
    monkeypatch.setattr(pf, "run_preflight", lambda *a, **kw: pytest.fail("checked again"))
    assert check(pair, cache=tmp_path).cached
    target, _ = pair
    keys = {preflight_key(target, CFG), preflight_key(target, CFG | dict(block_size=6)), preflight_key(tiny_target("llama"), CFG)}
    monkeypatch.setattr(pf, "software_versions", lambda: dict(dflash_nb="9"))
    assert len(keys | {preflight_key(target, CFG)}) == 4
    (tmp_path / f"{preflight_key(target, CFG)}.json").write_text("{torn")
    with pytest.raises(pytest.fail.Exception):
        check(pair, cache=tmp_path)


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(pair, tmp_path):
    (tmp_path / "file").write_text("")
    assert check(pair, cache=tmp_path / "file" / "below").ok


def test_bad_input_is_named(pair):
    target, ds = pair
    with pytest.raises(ConfigError, match="on_fail"):
        check(pair, on_fail="ignore")
    with pytest.raises(ConfigError, match="seconds"):
        check(pair, seconds=0)
    bare = Dataset.from_docs([(np.arange(8, dtype=np.int32), np.ones(8, bool))])
    with pytest.raises(DataError, match="prompt"):
        first_prompts(bare)
    assert len(first_prompts(ds)) == 8 and all(len(p) == 6 for p in first_prompts(ds))
    with pytest.raises(DataError, match="two tokens"):
        own_answers(target, [[1, 2]], 2, time.monotonic())


def test_the_overfit_keeps_what_is_to_be_checked(pair):
    small = overfit_config(CFG | dict(loss="tv", noise=0.1, row_len=64, token_budget=128, micro_rows=2), pair[1])
    assert (small.loss, small.layout, small.block_size, small.noise.strength, small.row_len, small.token_budget) == (
        "tv",
        "anchor-first",
        4,
        0.0,
        16,
        16,
    )
