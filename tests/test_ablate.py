"Sweeps: an arm equals the same run alone, kills and stops change nothing, failures stay where they are."
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch

from dflash_nb import ablate as module
from dflash_nb.ablate import ablate, arm_trainer, open_sweep, plan_sweep, read_sweep, run_sweep
from dflash_nb.callbacks import ProgressCB
from dflash_nb.config import ConfigError, DataError, TrainConfig
from dflash_nb.data import Dataset
from dflash_nb.events import RunDirError, ask, read_events
from dflash_nb.results import COST
from dflash_nb.status import diagnose, status
from dflash_nb.store import disk_features
from dflash_nb.trainer import toy_data, toy_target

torch.set_num_threads(1)
CFG = TrainConfig(block_size=4, num_anchors=8, row_len=64, token_budget=128, micro_rows=1, num_draft_layers=1, mask_token_id=63,
    steps=6, lr=3e-3,
                  val_anchors=32, eval_every=3, checkpoint_every=2, attention="eager")
SHORT = dict(holdout=4, max_new_tokens=8, walk_docs=2, show="off")


@pytest.fixture(scope="module")
def pair():
    return toy_target(), toy_data()


def same_table(a, b):
    pd.testing.assert_frame_equal(a.table.drop(columns=list(COST)), b.table.drop(columns=list(COST)))
    pd.testing.assert_frame_equal(a.prompts, b.prompts)


GRID = {
    "kl": dict(loss={"fkl": 0.5, "ce": 0.5}), "dpace": dict(weighting="dpace"), "noise": dict(noise=dict(strength=0.2,
        schedule="linear_warmup:0.5")),
    "slots": dict(noise=dict(strength=0.1, kind="gaussian", where="embed")), "layers": dict(target_layer_ids=[1, 2]),
    "last": dict(target_layer_ids=[2, 5], allow_last_layer=True), "anchors": dict(num_anchors=5), "quota": dict(anchor_policy="document"),
    "block": dict(block_size=6), "shifted": dict(layout="shifted"), "deep": dict(num_draft_layers=2), "init": dict(init="target"),
    "rows": dict(row_len=96, token_budget=96), "budget": dict(token_budget=256), "wsd": dict(schedule="wsd"),
        "muon": dict(optimizer="muon"),
}


@pytest.fixture(scope="module")
def everything(pair, tmp_path_factory):
    return ablate(*pair, CFG | dict(steps=3, eval_every=3), GRID, seeds=1, sweep_dir=tmp_path_factory.mktemp("all") / "s", **SHORT)


@pytest.mark.parametrize("arm", ["base", *GRID])
def test_an_arm_alone_gives_bit_equal_losses(pair, everything, arm, tmp_path):
    assert not everything.failed and everything.outcome == "finished"
    t = arm_trainer(pair[0], everything.path, arm, run_dir=tmp_path / "r", callbacks=[ProgressCB(show="off")])
    t.fit()
    rows = everything.table[everything.table.arm == arm]
    for metric in ("loss", "accuracy", "train_tau"):
        assert rows[rows.metric == metric].value.tolist() == t.history[metric].tolist(), metric
    if arm != "rows":  # validated on the base's rows
        assert rows[rows.metric == "sim_tau"].value.tolist() == t.history.sim_tau.dropna().tolist()


def test_validation_anchors_are_the_base_s_for_every_arm(pair, tmp_path, monkeypatch):
    inner, seen = module.validation_blocks, []
    monkeypatch.setattr(module, "validation_blocks", lambda *a: (seen.append(inner(*a)), seen[-1])[1])
    grid = {"rows": dict(row_len=96, token_budget=96), "long": dict(block_size=60)}
    ab = ablate(*pair, CFG | dict(steps=1, eval_every=1), grid, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    assert not ab.failed and len(seen) == 2
    assert all(torch.equal(a.anchors_RN, b.anchors_RN) and torch.equal(a.ids_RT, b.ids_RT) for a, b in zip(*seen, strict=True))


def test_kept_features_and_shared_ones_change_no_bit(pair, tmp_path):
    grid, how = {"kl": dict(loss="fkl"), "layers": dict(target_layer_ids=[1, 3])}, dict(seeds=[3], holdout=0, walk_docs=0, show="off")
    a, b = (ablate(*pair, CFG | dict(feature_cache=c), grid, sweep_dir=tmp_path / str(c), **how) for c in (0.0, 1.0))
    d = ablate(*pair, CFG, grid, sweep_dir=tmp_path / "disk", features=disk_features(tmp_path / "store"), **how)
    for other in (b, d):
        same_table(a, other)


def test_rounds_and_devices_change_nothing(pair, tmp_path):
    grid, how, cfg = {"gamma": [1]}, dict(seeds=2, **SHORT), CFG | dict(steps=3)
    whole = ablate(*pair, cfg, grid, sweep_dir=tmp_path / "a", **how)
    same_table(whole, ablate(*pair, cfg, grid, sweep_dir=tmp_path / "b", max_drafters=1, **how))
    same_table(whole, ablate(*pair, cfg, grid, sweep_dir=tmp_path / "c", devices=["cpu", "cpu"], **how))
    assert len(whole.table.versions.unique()) == 1


def test_memory_decides_the_rounds(pair, tmp_path, monkeypatch):
    sizes = []
    inner = module.train_round
    monkeypatch.setattr(module, "train_round", lambda s, r, runs, *a: (sizes.append(len(runs)), inner(s, r, runs, *a)))
    one = sum(p.numel() for p in module.Drafter(pair[0].drafter_config(CFG)).parameters()) * 16
    monkeypatch.setattr(module, "free_bytes", lambda device: 2 * one * 2.5)
    ab = ablate(*pair, CFG | dict(steps=2, val_share=0.0, eval_every="auto"), {"gamma": [1, 3, None, 0.5]}, seeds=1,
                sweep_dir=tmp_path / "s", **SHORT)
    assert sizes == [2, 2, 1] and ab.outcome == "finished" and not ab.failed


def test_a_failed_arm_is_recorded_and_the_rest_go_on(pair, tmp_path, monkeypatch):
    clean = ablate(*pair, CFG, {"gamma": [1, 3]}, seeds=2, sweep_dir=tmp_path / "clean", **SHORT)
    inner = module._finish_step

    def breaks(run, step):
        if run.arm.name == "gamma=1" and run.seed == 1 and step == 3:
            raise RuntimeError("out of memory")
        return inner(run, step)

    monkeypatch.setattr(module, "_finish_step", breaks)
    ab = ablate(*pair, CFG, {"gamma": [1, 3]}, seeds=2, sweep_dir=tmp_path / "s", **SHORT)
    assert ab.outcome == "finished" and ab.failed == [dict(arm="gamma=1", seed=1, step=4, error="RuntimeError: out of memory")]
    rest = clean.table[~((clean.table.arm == "gamma=1") & (clean.table.seed == 1))].reset_index(drop=True)
    mine = ab.table[~((ab.table.arm == "gamma=1") & (ab.table.seed == 1))].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine.drop(columns=list(COST)), rest.drop(columns=list(COST)))
    assert "failed at step 4" in ab.summary().verdict["gamma=1"] and "out of memory" in repr(ab)
    assert "out of memory" in [e["text"] for e in read_events(tmp_path / "s") if e["kind"] == "exception"][0]
    monkeypatch.setattr(module, "_finish_step", inner)
    again = run_sweep(open_sweep(tmp_path / "s", pair[0], retry=True), show="off")
    assert not again.failed
    same_table(clean, again)


@pytest.mark.parametrize("where", ["fan_out", "ArmRun.open", "Looks.finish"])
def test_a_failure_anywhere_is_a_failed_run(pair, tmp_path, monkeypatch, where):
    if where == "fan_out":
        inner = module.SharedReader.states

        def broken(self, batch):
            if self.cfg.seed == 0:
                raise RuntimeError("target fell over")
            return inner(self, batch)

        monkeypatch.setattr(module.SharedReader, "states", broken)
    else:
        cls, name = where.split(".")
        old = getattr(getattr(module, cls), name)

        def broken(self, *a):
            if (self if cls == "ArmRun" else a[0]).seed == 0:
                raise RuntimeError("fell over")
            return old(self, *a)

        monkeypatch.setattr(getattr(module, cls), name, broken)
    ab = ablate(*pair, CFG | dict(steps=2, eval_every=1), {"gamma": [1]}, seeds=2, sweep_dir=tmp_path / "s", **SHORT)
    assert ab.outcome == "finished" and {(f["arm"], f["seed"]) for f in ab.failed} == {("base", 0), ("gamma=1", 0)}
    assert set(ab.table[ab.table.metric == "tau"].seed) == {1}


def test_an_arm_that_diverges_fails_alone(pair, tmp_path, monkeypatch):
    inner = module._micro

    def explode(run, *a):
        out = inner(run, *a)
        if run.arm.name == "gamma=1":
            run.side.flat.fill_(float("nan"))
        return out

    monkeypatch.setattr(module, "_micro", explode)
    ab = ablate(*pair, CFG, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    assert [f["arm"] for f in ab.failed] == ["gamma=1"] and "refused as non-finite" in ab.failed[0]["error"]
    assert "sim_tau" in set(ab.table.metric)


def test_noise_that_is_not_the_schedule_s_fails_the_arm(pair, tmp_path, monkeypatch):
    import dflash_nb.sides as sides
    monkeypatch.setattr(sides, "strength_at", lambda noise, step, steps: 0.0 if noise.schedule != "constant" else noise.strength)
    grid = {"ramp": dict(noise=dict(strength=0.2, schedule="linear_warmup:0.5")), "flat": dict(noise=0.2)}
    ab = ablate(*pair, CFG, grid, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    assert [f["arm"] for f in ab.failed] == ["ramp"] and "NoiseError" in ab.failed[0]["error"]


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from dflash_nb.ablate import ablate
from dflash_nb.config import TrainConfig
from dflash_nb.trainer import toy_data, toy_target
cfg = TrainConfig.from_dict({cfg!r})
grid, more = {{"gamma": [1, None], "betas": [[0.9, 0.99]]}}, dict(holdout=4, max_new_tokens=8, walk_docs=2, show="off")
ablate(toy_target(), toy_data(), cfg, grid, seeds=2, sweep_dir=sys.argv[1], resume=len(sys.argv) > 2, **more)
"""


def killed_and_resumed(pair, tmp_path, moment, steps):
    cfg = CFG | dict(steps=steps)
    run = [sys.executable, "-c", SCRIPT.format(cfg=cfg.to_dict()), str(tmp_path / "s")]
    env = dict(os.environ, PYTHONPATH=os.getcwd())
    child = subprocess.Popen(run, env=env)
    lines, want = [0], 1 + moment * (steps * 3 * 2 - 4)
    while child.poll() is None and sum(lines) < want:
        time.sleep(0.01)
        lines = [p.read_text().count("\n") for p in tmp_path.glob("s/arms/*/*/rows.jsonl")]
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert sum(lines) >= want and child.returncode == -9
    half = read_sweep(tmp_path / "s")
    assert half.outcome == "stopped"
    run_sweep(open_sweep(tmp_path / "s", pair[0]), show="off")
    return half, read_sweep(tmp_path / "s"), cfg


def the_whole(pair, tmp_path, cfg):
    grid = {"gamma": [1, None], "betas": [[0.9, 0.99]]}
    return ablate(*pair, cfg, grid, seeds=2, sweep_dir=tmp_path / "whole", **SHORT)


def test_a_sweep_killed_at_a_random_moment_and_resumed_gives_the_same_table(pair, tmp_path):
    half, done, cfg = killed_and_resumed(pair, tmp_path, random.random(), 4)
    whole = the_whole(pair, tmp_path, cfg)
    assert len(half.table) < len(whole.table)
    same_table(whole, done)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_a_sweep_killed_anywhere_gives_the_same_table(pair, tmp_path, moment):
    _, done, cfg = killed_and_resumed(pair, tmp_path, moment, 12)
    same_table(the_whole(pair, tmp_path, cfg), done)


def test_a_stop_ends_at_a_step_edge_and_goes_on_from_the_folder(pair, tmp_path, monkeypatch):
    whole = ablate(*pair, CFG, {"gamma": [1]}, seeds=2, sweep_dir=tmp_path / "whole", **SHORT)
    inner, seen = module.sweep_step, []

    def asks(sweep, runs):
        inner(sweep, runs)
        seen.append(1)
        if len(seen) == 9:
            sweep.stopping.set()

    monkeypatch.setattr(module, "sweep_step", asks)
    half = ablate(*pair, CFG, {"gamma": [1]}, seeds=2, sweep_dir=tmp_path / "s", **SHORT)
    assert half.outcome == "stopped" and len(half.table) < len(whole.table)
    with pytest.raises(RunDirError, match="resume=True"):
        ablate(*pair, CFG, {"gamma": [1]}, seeds=2, sweep_dir=tmp_path / "s", **SHORT)
    done = run_sweep(open_sweep(tmp_path / "s", pair[0]), show="off")
    assert done.outcome == "finished"
    same_table(whole, done)
    assert not list(tmp_path.glob("s/arms/*/*/checkpoints"))


def test_another_process_may_ask_for_the_stop(pair, tmp_path, monkeypatch):
    inner = module.fan_out

    def slow(*a):
        inner(*a)
        if not (tmp_path / "s/.asked").exists():
            ask(tmp_path / "s", "stop")
            (tmp_path / "s/.asked").touch()
        time.sleep(0.3)

    monkeypatch.setattr(module, "fan_out", slow)
    ab = ablate(*pair, CFG | dict(steps=30), {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    assert ab.outcome == "stopped" and status(tmp_path / "s").state == "stopped"


def test_another_plan_in_the_same_folder_is_refused(pair, tmp_path):
    ablate(*pair, CFG | dict(steps=2, eval_every=2), {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    for change in (dict(seeds=2), dict(grid={"gamma": [2]}), dict(cfg=CFG | dict(steps=3))):
        how = dict(cfg=CFG | dict(steps=2, eval_every=2), grid={"gamma": [1]}, seeds=1) | change
        with pytest.raises(ConfigError, match="holds another sweep"):
            ablate(*pair, how["cfg"], how["grid"], how["seeds"], sweep_dir=tmp_path / "s", resume=True, **SHORT)
    with pytest.raises(ConfigError, match="holds no sweep"):
        read_sweep(tmp_path)
    with pytest.raises(ConfigError, match="arm='x'"):
        arm_trainer(pair[0], tmp_path / "s", "x")


def test_a_knob_that_is_younger_than_the_sweep_does_not_end_it(pair, tmp_path):
    cfg = CFG | dict(steps=1, eval_every=1)
    ablate(*pair, cfg, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    old = json.loads((tmp_path / "s/sweep.json").read_text())
    del old["plan"]["base"]["weight_decay"]
    (tmp_path / "s/sweep.json").write_text(json.dumps(old))
    assert ablate(*pair, cfg, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", resume=True, **SHORT).outcome == "finished"
    with pytest.raises(ConfigError, match="base, arms differ"):
        ablate(*pair, cfg | dict(weight_decay=0.1), {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", resume=True, **SHORT)


@pytest.mark.slow
def test_budgets(pair, tmp_path):
    plan = dict(grid={"token_budget": [256, 64]}, seeds=1, holdout=4)
    tokens = plan_sweep(*pair, CFG, budget="tokens", sweep_dir=tmp_path / "t", **plan)
    assert tokens.steps == {"base": 6, "token_budget=256": 3, "token_budget=64": 12}
    given = plan_sweep(*pair, CFG, budget=("tokens", 2560), sweep_dir=tmp_path / "g", **plan)
    assert given.steps == {"base": 20, "token_budget=256": 10, "token_budget=64": 40}
    seconds = plan_sweep(*pair, CFG, budget=("seconds", 0.3), sweep_dir=tmp_path / "s", **plan)
    assert seconds.steps["token_budget=256"] < seconds.steps["base"] < seconds.steps["token_budget=64"]
    again = plan_sweep(*pair, CFG, budget=("seconds", 0.3), sweep_dir=tmp_path / "s", resume=True, **plan)
    assert again.steps == seconds.steps == json.loads((tmp_path / "s/sweep.json").read_text())["steps"]
    ab = run_sweep(plan_sweep(*pair, CFG, budget=("tokens", 512), sweep_dir=tmp_path / "u", **plan), show="off")
    assert ab.table.groupby("arm").tokens.max().tolist() == [512] * 3
    with pytest.raises(ConfigError, match="budget='hours'"):
        plan_sweep(*pair, CFG, budget="hours", sweep_dir=tmp_path / "h", **plan)
    with pytest.raises(ConfigError, match="seeds=0"):
        plan_sweep(*pair, CFG, {}, 0, sweep_dir=tmp_path / "h")


def test_held_out_documents_are_never_trained_on(pair, tmp_path):
    sweep = plan_sweep(*pair, CFG, {}, 2, sweep_dir=tmp_path / "s", holdout=5)
    assert len(sweep.held) == 5 == len(sweep.prompts) and len(sweep.ds) == len(pair[1]) - 5
    docs = [pair[1].doc(i)[0].tolist() for i in range(len(pair[1]))]
    assert sorted(docs) == sorted(d.doc(i)[0].tolist() for d in (sweep.ds, sweep.held) for i in range(len(d)))
    assert plan_sweep(*pair, CFG | dict(seed=9), {}, 2, sweep_dir=tmp_path / "t", holdout=5).held.fingerprint() == sweep.held.fingerprint()


def test_the_sweep_s_folder_is_a_run_to_every_reader(pair, tmp_path, capsys):
    ab = ablate(*pair, CFG, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", holdout=4, max_new_tokens=8, walk_docs=2, show="lines")
    told = status(tmp_path / "s")
    assert told.state == "finished" and told.step == told.steps == 12
    assert not [x for x in diagnose(tmp_path / "s") if x["rule"] in ("loss", "noise", "warmup")]
    lines = capsys.readouterr().out
    assert "2 arms x 1 seeds" in lines and "run_steps=12/12 ended=2/2 failed=0" in lines
    events = read_events(tmp_path / "s")
    assert [e["arm"] for e in events if e["kind"] == "eval"] == ["base", "gamma=1"]
    assert {p.name for p in ab.save().iterdir()} >= {"table.csv", "summary.md", "summary.tex", "plot.png", "plot.svg"}
    assert ab.drafter("gamma=1", 0).cfg.block_size == 4


@pytest.mark.slow
def test_a_planted_effect_is_found(pair, tmp_path, monkeypatch):
    "A loss that ignores half of the positions, every other one from the first draft on."
    inner = module.make_inputs

    def half_blind(batch, feats, final, cfg):
        inputs = inner(batch, feats, final, cfg)
        if cfg.gamma == 1000:
            inputs.blocks.valid_RNB[..., 1::2] = False
        return inputs

    monkeypatch.setattr(module, "make_inputs", half_blind)
    cfg = CFG | dict(steps=80, eval_every=80, checkpoint_every=80, lr=1e-2, block_size=5, gamma=None)
    ab = ablate(*pair, cfg, {"half": dict(gamma=1000)}, seeds=3, sweep_dir=tmp_path / "s", holdout=0, walk_docs=0, show="off")
    d = ab.differences("sim_tau")["half"]
    assert d.differs and d.high < 0, repr(ab)
    assert d.seeds == 3 and d.quantile == pytest.approx(4.3027, abs=1e-3)


def nano_sweep(tmp_path, steps, **how):
    from dflash_nb.data import encode_chats, load_chats
    from dflash_nb.target import asset, load_target
    target = load_target("nano")
    rows = load_chats(asset("prompts.jsonl"))[:200]
    cfg = TrainConfig(block_size=8, num_anchors=32, num_draft_layers=2, init="target", steps=steps, lr=3e-3, attention="eager",
        feature_cache=0.0,
                      val_anchors=64, eval_every=steps, checkpoint_every=steps)
    return ablate(target, encode_chats(rows, target), cfg, sweep_dir=tmp_path / "nano", **how)


def test_four_arms_cost_one_target_pass_and_their_drafters(tmp_path):
    for _ in range(3):  # another process may take the core meanwhile
        ab = nano_sweep(tmp_path, 12, grid={"gamma": [1, 2, None]}, seeds=1, holdout=2, max_new_tokens=4, walk_docs=0, show="off")
        parts = ab.cost["target"] + ab.cost["drafters"]
        if len(ab.arms) == 4 and ab.cost["wall"] <= 1.1 * parts:
            break
        shutil.rmtree(tmp_path / "nano")
    assert ab.cost["wall"] <= 1.1 * parts and ab.cost["separate"] > parts
    assert "saved" in repr(ab)
    print(repr(ab).splitlines()[-1])


@pytest.mark.slow
def test_a_planted_null_on_real_runs(tmp_path):
    ab = nano_sweep(tmp_path, 150, grid={}, seeds=4, twin="again", holdout=16, max_new_tokens=32, walk_docs=0, show="lines")
    assert ab.arms == ["base", "again"] and not ab.differences("tau")["again"].differs, repr(ab)


@pytest.mark.slow
def test_the_command_stops_resumes_and_reports(tmp_path):
    from dflash_nb.cli_ablate import main_ablate
    grid = tmp_path / "grid.yaml"
    grid.write_text("soft: {loss: {ce: 0.1, tv: 0.9}}\nflat: {gamma: null}\n")
    knobs = dict(steps=30, block_size=6, num_anchors=8, num_draft_layers=1, eval_every=30, checkpoint_every=5, val_anchors=16, holdout=2,
                 max_new_tokens=4, walk_docs=0, seeds=1, sweep_dir=tmp_path / "s", grid=grid)
    options = [x for k, v in knobs.items() for x in (f"--{k}", str(v))]
    run = [sys.executable, "-c", f"import sys; from dflash_nb.cli_ablate import main_ablate; sys.exit(main_ablate({options!r}))"]
    child = subprocess.Popen(run, env=dict(os.environ, PYTHONPATH=os.getcwd()), stdout=subprocess.PIPE, text=True)
    while child.poll() is None and not list(tmp_path.glob("s/arms/base/seed-0/rows.jsonl")):
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    out = child.communicate()[0]
    assert child.returncode == 3 and f"dflash_ablate --resume {tmp_path / 's'}" in out
    assert main_ablate(options) == 2
    assert main_ablate(["--resume", str(tmp_path / "s"), "--json"]) == 0
    assert (tmp_path / "s/report/plot.svg").exists() and len(read_sweep(tmp_path / "s").arms) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("dtype, runner", [("float32", "eager"), ("bfloat16", "auto")])
def test_a_sweep_on_a_gpu(tmp_path, dtype, runner):
    from dflash_nb.pipeline import replicate_target
    target = replicate_target(toy_target(), "cuda:0")
    cfg = CFG | dict(dtype=dtype, runner=runner, attention="sdpa")
    ab = ablate(target, toy_data(), cfg, {"kl": dict(loss="fkl"), "muon": dict(optimizer="muon"), "noise": dict(noise=0.1)}, seeds=2,
                sweep_dir=tmp_path / "s", **SHORT)
    assert ab.outcome == "finished" and not ab.failed, repr(ab)
    assert ab.cost["wall"] > 0 and ab.cost["target"] > 0


@pytest.mark.parametrize("change, words", [
    (dict(grid={"gamma": []}), "gamma has no values"), (dict(grid={1: dict(gamma=1)}), "an arm is named 1"),
    (dict(grid={"a": dict(gamma=1), "A": dict(gamma=3)}), "two arms are named 'A'"), (dict(twin="base"), "twin='base'"),
    (dict(seeds=0), "seeds=0"), (dict(seeds=[0, 0]), "each once"), (dict(seeds="3"), "seeds='3'"), (dict(seeds=True), "seeds=True"),
    (dict(budget=("steps", "x")), "budget="), (dict(budget=("steps", 1, 2)), "budget="), (dict(budget=None), "budget=None"),
    (dict(budget=("steps", 0.5)), "whole number of steps"), (dict(budget=("seconds", float("inf"))), "budget="),
    (dict(holdout=-1), "holdout=-1"), (dict(walk_docs=-1), "walk_docs=-1"), (dict(max_new_tokens=0), "max_new_tokens=0"),
    (dict(max_drafters=0), "max_drafters=0"), (dict(max_drafters="x"), "max_drafters='x'"), (dict(devices=[]), "devices is empty"),
    (dict(devices="gpu"), "no device"), (dict(prompts="abc"), "give a list"), (dict(prompts=[[1], {}]), "prompt 1"),
    (dict(cfg=dict(steps=2)), "cfg is a dict"), (dict(ds=[1]), "ds is a list"), (dict(target="nano"), "target is a str"),
], ids=str)
def test_what_cannot_be_meant_is_refused_before_anything_is_made(pair, tmp_path, change, words):
    how = dict(target=pair[0], ds=pair[1], cfg=CFG, grid={"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", **SHORT) | change
    with pytest.raises((ConfigError, DataError), match=words):
        ablate(**how)
    assert not (tmp_path / "s").exists()


def test_held_out_documents_without_a_prompt_are_refused_with_the_way_out(tmp_path):
    plain = Dataset.from_docs(([5 + i % 3] * 40, [True] * 40) for i in range(16))
    with pytest.raises(DataError, match="give prompts of your own, or holdout=0"):
        ablate(toy_target(), plain, CFG, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    assert not (tmp_path / "s").exists()


def test_a_folder_that_cannot_be_made_or_read_is_named(pair, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunDirError, match="cannot be made"):
        ablate(*pair, CFG, {}, sweep_dir=tmp_path / "file", **SHORT)
    ab = ablate(*pair, CFG | dict(steps=1), {}, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    assert "no arm to compare base with" in repr(ab) and ab.summary().verdict.tolist() == ["the base"] and ab.save().exists()
    rows = tmp_path / "s/arms/base/seed-0/rows.jsonl"
    rows.write_text(rows.read_text() + '[1]\n5\n{"x": 1}\n{"step": 3, "lo')
    (rows.parent / "result.json").write_text("{")
    assert len(read_sweep(tmp_path / "s").table) and run_sweep(open_sweep(tmp_path / "s", pair[0]), show="off").outcome == "finished"
    (tmp_path / "s/sweep.json").write_text('{"plan": {')
    for read in (read_sweep, lambda p: open_sweep(p, pair[0])):
        with pytest.raises(ConfigError, match="can be read"):
            read(tmp_path / "s")


@pytest.mark.parametrize("bad", [dict(low=0.0), dict(low=1.0, high=0.1), dict(high=float("inf")), dict(steps=1)], ids=str)
def test_a_range_of_rates_must_rise(pair, bad):
    with pytest.raises(ConfigError, match="0 < low < high"):
        module.find_lr(*pair, CFG, **bad)


def test_start_up_is_a_cost_of_its_own(pair, tmp_path, monkeypatch):
    inner = module.DrafterSide.warm_up
    monkeypatch.setattr(module.DrafterSide, "warm_up", lambda self, inputs: (inner(self, inputs), time.sleep(0.1)))
    ab = ablate(*pair, CFG | dict(steps=2), {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", **SHORT)
    assert 0.2 <= ab.cost["start_up"] < 0.4 and "compiling and capturing took 0.2 s more" in repr(ab)
    wall = [r["round_s"] for r in module.read_rows(tmp_path / "s/arms/base/seed-0/rows.jsonl")]
    assert ab.cost["wall"] == pytest.approx(sum(wall)) and wall[0] < 0.1 + ab.cost["start_up"]


def test_a_loss_of_another_scale_shows_in_the_table(pair, tmp_path):
    "dpace over the sum of its own weights is another loss than over the blocks: the gradient says so, whatever AdamW makes of it."
    ab = ablate(*pair, CFG | dict(steps=2, weighting="dpace"), {"own": dict(denominator="weights")},
                seeds=2, sweep_dir=tmp_path / "s", **SHORT)
    norms = ab.values("grad_norm")
    assert all(abs(norms["own"][s] / norms["base"][s] - 1) > 0.1 for s in (0, 1))


def test_a_device_of_the_command_line_is_checked_by_name():
    from dflash_nb.cli_ablate import _device

    assert _device("cpu") == "cpu" and _device(" cpu, cpu ") == ["cpu", "cpu"]
    for text, want in dict(gpux="gpux", **{"": "give auto", " , ": "give auto", "cuda:99": "cuda:99"}).items():
        with pytest.raises(ConfigError, match=want):
            _device(text)
