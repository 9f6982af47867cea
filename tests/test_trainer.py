"Trainer: exact resume, interrupts, refused steps, failures with names, one meaning of the loss."
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_nb import callbacks, checkpoint, sides
from dflash_nb import trainer as module
from dflash_nb.callbacks import Callback, CheckpointCB, EvalCB, HistoryCB, ProgressCB, TrainError
from dflash_nb.config import ConfigError, DataError, DflashError, NoiseConfig, TrainConfig
from dflash_nb.data import Dataset, batches
from dflash_nb.events import ask, read_events
from dflash_nb.optim import clip_gradients
from dflash_nb.trainer import Trainer, toy_data, toy_target

ROOT = Path(__file__).resolve().parents[1]
CFG = TrainConfig(block_size=4, num_draft_layers=1, row_len=64, token_budget=128, micro_rows=1, num_anchors=6, steps=10, lr=3e-3,
                  mask_token_id=63, val_share=.1, val_anchors=32, eval_every=4, checkpoint_every=3, noise=NoiseConfig(.05))
TARGET = toy_target()


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(run_dir, cfg=CFG, callbacks=(), target=TARGET, ds=None, **more):
    return Trainer(target, ds or toy_data(30), cfg, run_dir=run_dir, callbacks=[ProgressCB(show="off"), *callbacks], **more)


def resume(run_dir, callbacks=(), target=TARGET, **more):
    return Trainer.from_run(run_dir, target=target, callbacks=[ProgressCB(show="off"), *callbacks], **more)


def final(run_dir, step=10):
    "Weights, moments and what was logged of a run."
    path = Path(run_dir) / f"checkpoints/step-{step:08d}"
    return load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")


def same_end(a, b, step=10):
    pairs = zip(final(a, step), final(b, step), strict=True)
    return all(x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in pairs)


class At(Callback):
    "Calls `f(trainer)` once, at an event of a step."
    def __init__(self, step, f, event="after_step"):
        self.step, self.f = step, f
        setattr(self, event, self._once)

    def _once(self, trainer):
        if trainer.step == self.step and self.f:
            f, self.f = self.f, None
            f(trainer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "Ten steps that nobody touched."
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("whole") / "run"
    t = make(path)
    assert t.fit().outcome == "finished"
    return path, t


RESUME = """
import sys, torch; torch.set_num_threads(1)
from dflash_nb.callbacks import *
from dflash_nb.trainer import *
t = Trainer.from_run(sys.argv[1], target=toy_target(), callbacks=[ProgressCB(show="off")])
assert t.step == 5, t.step
print(t.fit().outcome)
"""


def test_k5_ten_steps_equal_five_and_five_in_a_new_process(whole, tmp_path):
    t = make(tmp_path / "half", callbacks=[At(5, lambda t: t.stop())])
    assert t.fit().outcome == "stopped"
    out = subprocess.run([sys.executable, "-c", RESUME, str(tmp_path / "half")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "finished", out.stderr[-800:]
    assert same_end(whole[0], tmp_path / "half")
    again, history = resume(tmp_path / "half").history, whole[1].history
    for name in ("loss", "lr", "noise", "grad_norm", "accuracy", "sim_tau"):
        assert np.array_equal(again[name].to_numpy(float), history[name].to_numpy(float), equal_nan=True), name
    assert final(whole[0])[1]["exp_avg.fc.weight"].dtype == torch.float32


@pytest.mark.parametrize("delta", [dict(weighting="dpace"), dict(loss={"ce": .1, "tv": .9}, labels="teacher"), dict(layout="shifted"),
                                   dict(noise=dict(strength=.05, where="embed", kind="gaussian")), dict(noise=0., micro_rows=2)])
def test_resume_is_exact_for_other_losses_and_layouts(tmp_path, delta):
    cfg = CFG | dict(steps=6) | delta
    make(tmp_path / "a", cfg).fit()
    make(tmp_path / "b", cfg, [At(3, lambda t: t.stop())]).fit()
    resume(tmp_path / "b").fit()
    assert same_end(tmp_path / "a", tmp_path / "b", 6)


def test_stopped_trainer_goes_on_in_the_same_process(whole, tmp_path):
    t = make(tmp_path / "r", callbacks=[At(4, lambda t: t.stop("enough"))])
    record = t.fit()
    assert (record.outcome, record.step, record.reason) == ("stopped", 4, "enough") and "--resume" in str(record)
    assert t.fit().outcome == "finished" and same_end(whole[0], tmp_path / "r")
    assert len(t.history) == 10 and t.fit().outcome == "finished" and t.step == 10


def test_existing_run_is_refused_with_the_ways_out(whole, tmp_path):
    for build in (lambda: make(whole[0]), lambda: make(whole[0]).fit()):
        with pytest.raises(ConfigError, match="from_run.*another run_dir.*delete"):
            build()
    first, second = make(tmp_path / "r"), make(tmp_path / "r")
    first.fit()
    with pytest.raises(ConfigError, match="already holds a run"):
        second.fit()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        make(tmp_path / "file")


# -- interrupts ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(3))
def test_signals_at_random_moments_lose_nothing(whole, tmp_path, seed):
    rng, timers = random.Random(seed), []

    class Shoot(Callback):
        "A real signal to this process at a random moment of the fit."
        def before_fit(self, trainer):
            timers.append(threading.Timer(rng.uniform(0, .25), os.kill, (os.getpid(), rng.choice([signal.SIGINT, signal.SIGTERM]))))
            timers[-1].start()

    old = {s: signal.signal(s, lambda *a: None) for s in (signal.SIGINT, signal.SIGTERM)}  # for a shot after the end
    try:
        t = make(tmp_path / "r", callbacks=[Shoot()])
        record = t.fit()
        for _ in range(20):
            if record.outcome == "finished":
                break
            assert record.outcome == "stopped" and record.reason in ("SIGINT", "SIGTERM")
            timers[-1].join()
            record = resume(tmp_path / "r", [Shoot()] if len(timers) < 3 else []).fit()
    finally:
        for timer in timers:
            timer.join()
        for s, h in old.items():
            signal.signal(s, h)
    assert record.outcome == "finished" and same_end(whole[0], tmp_path / "r")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_leaves_at_once_and_resumes_exactly(whole, tmp_path):
    def twice(t):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    t = make(tmp_path / "r", callbacks=[At(4, twice, "before_update")])
    with pytest.raises(KeyboardInterrupt):
        t.fit()
    assert t.record.outcome == "stopped" and t.step == 4
    again = resume(tmp_path / "r")
    assert again.step == 4  # the best score so far was there
    again.fit()
    assert same_end(whole[0], tmp_path / "r")


def test_interrupt_inside_a_save_keeps_the_one_before(whole, tmp_path, monkeypatch):
    real, calls = checkpoint._sync, []

    def sync(path):
        calls.append(path)
        if "step-00000006" in str(path):
            raise KeyboardInterrupt
        return real(path)

    monkeypatch.setattr(checkpoint, "_sync", sync)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "r").fit()
    monkeypatch.undo()
    t = resume(tmp_path / "r")
    assert t.step in (3, 4) and any("skipped checkpoint .tmp-step-00000006" in n for n in t.notes)
    t.fit()
    assert same_end(whole[0], tmp_path / "r")


def test_a_step_on_disk_is_a_step_in_the_log(whole, tmp_path, monkeypatch):
    real, dead = module.save_state, []

    def die(*a, **k):
        real(*a, **k)
        dead.append(1)
        raise KeyboardInterrupt  # as if killed right after the rename

    monkeypatch.setattr(module, "save_state", die)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "r").fit()
    monkeypatch.undo()
    t = resume(tmp_path / "r")
    assert dead and t.step == 3 and t.history.step.tolist() == [1, 2, 3]
    t.fit()
    assert t.history.step.tolist() == list(range(1, 11)) and same_end(whole[0], tmp_path / "r")


def test_killed_before_the_first_checkpoint_starts_again(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "r", callbacks=[At(1, lambda t: (signal.raise_signal(signal.SIGINT), signal.raise_signal(signal.SIGINT)))]).fit()
    t = resume(tmp_path / "r")
    assert t.step == 0 and any("no complete checkpoint" in n for n in t.notes)
    t.fit()
    assert same_end(whole[0], tmp_path / "r") and len(t.history) == 10


def test_fit_in_a_thread_touches_no_signal_handler_and_gives_the_same_bits(whole, tmp_path):
    before, out = signal.getsignal(signal.SIGINT), []
    t = make(tmp_path / "r")
    thread = threading.Thread(target=lambda: out.append(t.fit()))
    thread.start()
    thread.join()
    assert out[0].outcome == "finished" and signal.getsignal(signal.SIGINT) is before and same_end(whole[0], tmp_path / "r")


# -- control -----------------------------------------------------------------------------------------------------------

def test_pause_unpause_checkpoint_and_stop_from_outside(tmp_path):
    def control(t):
        t.pause()
        threading.Timer(.2, t.unpause).start()

    def save(t):
        thread = threading.Thread(target=lambda: got.append(t.checkpoint()))
        thread.start()
        thread.join()

    got = []
    t = make(tmp_path / "r", CFG | dict(steps=400, eval_every=400, checkpoint_every=400),
             [At(2, control), At(5, save), At(7, lambda t: ask(t.run_dir, "stop"))])
    record = t.fit()
    assert got == [None]  # saved by the training thread at the step edge
    assert record.outcome == "stopped" and record.reason == "asked by another process" and 7 < record.step < 400
    saved = [e["step"] for e in read_events(tmp_path / "r") if e["kind"] == "checkpoint"]
    assert saved == [5, record.step]


def test_no_thread_is_left_and_the_log_is_closed(tmp_path):
    t = Trainer(TARGET, toy_data(30), CFG | dict(steps=2), run_dir=tmp_path / "r", callbacks=[ProgressCB(show="lines")])
    t.fit()
    assert not [x for x in threading.enumerate() if x.name.startswith("dflash")] and t.log is None


def test_status_and_checkpoint_before_fit(tmp_path):
    t = make(tmp_path / "r")
    assert t.status()["state"] == "not started" and not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match="before fit"):
        t.checkpoint()
    assert t.wait() is None


# -- failures ------------------------------------------------------------------------------------------------------------

def boom(*a, **k):
    raise RuntimeError("boom")


def test_exception_inside_a_step_names_step_rows_and_device(tmp_path, monkeypatch):
    t = make(tmp_path / "r", callbacks=[At(3, lambda t: monkeypatch.setattr(sides, "block_loss", boom))])
    with pytest.raises(TrainError, match=r"step 4 on cpu, thread MainThread, rows \[\d+, \d+\]: RuntimeError: boom") as e:
        t.fit()
    assert isinstance(e.value.__cause__, RuntimeError) and t.record.outcome == "failed"
    kinds = {e["kind"]: e for e in read_events(tmp_path / "r")}
    assert kinds["exception"]["step"] == 4 and "boom" in kinds["exception"]["text"] and kinds["run_end"]["outcome"] == "failed"
    monkeypatch.undo()
    assert resume(tmp_path / "r").step == 3


@pytest.mark.parametrize("event", ["before_start", "before_fit", "before_update", "after_step", "after_eval", "after_fit"])
def test_a_failing_callback_is_named_and_the_run_can_go_on(whole, tmp_path, event):
    bad = Callback()
    setattr(bad, event, boom)
    with pytest.raises(TrainError, match=f"callback Callback.{event} at step"):
        make(tmp_path / "r", callbacks=[bad]).fit()
    assert not [x for x in threading.enumerate() if x.name.startswith("dflash")]
    t = resume(tmp_path / "r")
    t.fit()
    assert same_end(whole[0], tmp_path / "r")


def test_an_error_in_after_fit_does_not_hide_the_first(tmp_path):
    bad = Callback()
    bad.after_fit = boom
    with pytest.raises(TrainError, match="after_step"):
        make(tmp_path / "r", callbacks=[bad, At(2, boom)]).fit()


def test_a_full_disk_fails_with_the_checkpoint_before_intact(whole, tmp_path, monkeypatch):
    def full(*a, **k):
        raise OSError(28, "No space left on device")

    t = make(tmp_path / "r", callbacks=[At(5, lambda t: monkeypatch.setattr(checkpoint, "save_file", full))])
    with pytest.raises(DflashError, match="No space left"):
        t.fit()
    monkeypatch.undo()
    t = resume(tmp_path / "r")
    assert t.step == 4
    t.fit()
    assert same_end(whole[0], tmp_path / "r")


# -- non-finite steps ------------------------------------------------------------------------------------------------------

class Spoil(Callback):
    "Named hook: a NaN in one gradient from a step on."
    def __init__(self, steps):
        self.steps = steps

    def before_update(self, trainer):
        if trainer.step in self.steps:
            trainer.drafter.layers[0].mlp.up_proj.weight.grad[0, 0] = float("nan")


def test_a_refused_step_changes_nothing_and_is_named(tmp_path):
    seen = []

    class Watch(Callback):
        def after_step(self, trainer):
            seen.append({k: v.clone() for k, v in trainer.drafter.state_dict().items()})

    t = make(tmp_path / "r", callbacks=[Spoil([4]), Watch()])
    record = t.fit()
    assert record.outcome == "finished" and record.skipped == 1
    assert all(torch.equal(seen[3][k], seen[4][k]) for k in seen[3]) and not all(torch.equal(seen[4][k], seen[5][k]) for k in seen[4])
    rows = next(iter(batches(t.packed, t.cfg, start=4))).row_ids.tolist()
    note = next(n for n in t.notes if "refused" in n)
    assert "step 5 refused" in note and str(rows) in note and "layers.0.mlp.up_proj.weight" in note and "lr " in note
    warning = next(e for e in read_events(tmp_path / "r") if e["kind"] == "warning")
    assert warning["rows"] == rows and warning["parameters"] == ["layers.0.mlp.up_proj.weight"]


def test_too_many_refused_steps_stop_with_a_checkpoint(tmp_path):
    t = make(tmp_path / "r", callbacks=[Spoil(range(2, 99))], max_skips=2)
    record = t.fit()
    assert record.outcome == "stopped" and record.step == 5 and record.skipped == 3 and "3 steps in a row refused" in record.reason
    good = make(tmp_path / "g", CFG | dict(), callbacks=[At(2, lambda t: t.stop())])
    good.fit()
    saved = load_file(tmp_path / "r/checkpoints/step-00000005/model.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in good.drafter.state_dict().items())


def spoil(trainer, monkeypatch, when, rows):
    "Make the target's features infinite in `rows` of each micro-batch of the steps in `when`."
    real = trainer.target.features

    def features(*a, **k):
        feats, final = real(*a, **k)
        if trainer.step in when:
            feats[rows, :, 0] = float("inf")
        return feats, final

    monkeypatch.setattr(trainer.target, "features", features)


def test_a_row_with_non_finite_features_leaves_the_loss(tmp_path, monkeypatch):
    t = make(tmp_path / "r", CFG | dict(steps=3, feature_cache=0, token_budget=128, micro_rows=2, row_len=64))
    spoil(t, monkeypatch, {1}, 0)
    assert t.fit().skipped == 0 and t.history.bad_rows.tolist() == [0, 1, 0]
    assert all(p.isfinite().all() for p in t.drafter.parameters()) and t.history.loss.notna().all()
    said = [e for e in read_events(tmp_path / "r") if e["kind"] == "warning" and "not finite" in e["text"]]
    assert len(said) == 1 and len(said[0]["rows"]) == 1


def test_a_step_without_a_good_row_is_refused_and_many_stop_the_run(tmp_path, monkeypatch):
    t = make(tmp_path / "r", CFG | dict(steps=9, feature_cache=0), max_skips=2)
    spoil(t, monkeypatch, {1, 3, 4, 5}, slice(None))
    record = t.fit()
    assert record.outcome == "stopped" and record.step == 6 and "not finite in all" in record.reason
    assert t.history.skipped.tolist() == [False, True, False, True, True, True]
    assert all(p.isfinite().all() for p in t.drafter.parameters())


# -- config and data on resume -----------------------------------------------------------------------------------------

def test_a_changed_config_is_said_or_refused(tmp_path):
    make(tmp_path / "r", callbacks=[At(5, lambda t: t.stop())]).fit()
    t = resume(tmp_path / "r", changes=dict(lr=1e-3, weighting="flat"), steps=12)
    said = " ".join(t.notes)
    assert all(x in said for x in ("lr 0.003 -> 0.001", "steps 10 -> 12", "weighting 'decay' -> 'flat'", "gamma 2.0 -> 'auto'"))
    assert t.cfg.lr == 1e-3 and t.optimizer.state
    for delta, old_new in ((dict(block_size=8), "block_size 4 -> 8"), (dict(seed=1), "seed 0 -> 1"), (dict(row_len=32), "row_len 64 -> 32"),
                           (dict(num_draft_layers=2), "num_draft_layers 1 -> 2"),
                           (dict(target_layer_ids=[1]), r"target_layer_ids \[1, 2, 3\] -> \[1\]")):
        with pytest.raises(ConfigError, match=old_new):
            resume(tmp_path / "r", changes=delta)
    with pytest.raises(ConfigError, match="steps=3, but the run has done 5"):
        resume(tmp_path / "r", steps=3)
    with pytest.raises(ConfigError, match="unknown knob 'gama'"):
        resume(tmp_path / "r", changes=dict(gama=1))


def test_an_edited_config_file_is_noticed(tmp_path):
    make(tmp_path / "r", callbacks=[At(5, lambda t: t.stop())]).fit()
    path = tmp_path / "r/config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"clip": .5}))
    assert any("clip 1.0 -> 0.5" in n for n in resume(tmp_path / "r").notes)
    path.write_text(json.dumps(values | {"num_anchors": 7}))
    assert any("num_anchors 6 -> 7" in n for n in resume(tmp_path / "r").notes)
    path.write_text(json.dumps(values | {"layout": "shifted"}))
    with pytest.raises(ConfigError, match="layout"):
        resume(tmp_path / "r")


def test_other_data_or_no_run_is_refused(whole, tmp_path):
    with pytest.raises(DataError, match="fingerprint"):
        resume(whole[0], ds=toy_data(31))
    with pytest.raises(DflashError, match="no run.json"):
        resume(tmp_path)


# -- what is trained -------------------------------------------------------------------------------------------------------

def test_the_optimizer_holds_the_drafter_and_nothing_else(whole):
    t = whole[1]
    held = [p for g in t.optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in t.drafter.parameters()} and len(t.optimizer.param_groups) == 1
    assert not any(p.requires_grad for p in t.target.model.parameters())
    lrs = [r["lr"] for r in t.callbacks[0].rows]
    assert len(set(lrs)) == 10 and lrs[0] == 3e-3 and lrs[-1] < lrs[0]  # one schedule step an optimizer step; 4 % of 10 steps is no warm-up


def test_a_tiny_set_is_learned(tmp_path):
    cfg = CFG | dict(steps=90, num_draft_layers=2, val_share=0., noise=0., lr=1e-2, eval_every=90,
                     checkpoint_every=90, num_anchors=12, token_budget=64)
    t = make(tmp_path / "r", cfg, ds=toy_data(2))
    t.fit()
    assert t.history.accuracy[0] < .2 and t.history.accuracy[-5:].mean() > .7 and t.history.loss[-5:].mean() < .3 * t.history.loss[0]


def lopsided():
    "Rows of 64: one with 3 supervised tokens, one with 60, and so on."
    rng = np.random.default_rng(0)
    return Dataset.from_docs((rng.integers(1, 62, 64), np.arange(64) >= 64 - n) for n in (3, 60, 4, 50))


def micro_sums(t, rows):
    "Sums of the first step's micro-batches of `rows` rows, without an update."
    side, batch = t.line.lead, next(batches(t.packed, t.cfg))
    side.zero()
    return [side.micro(t.line.readers[0].read(batch.micro(i, rows)), 0, i) for i in range(4 // rows)]


def test_the_logged_loss_is_the_global_mean_that_was_trained(tmp_path):
    cfg = CFG | dict(val_share=0., noise=0., token_budget=256, num_anchors=64, gamma=None, clip=None)
    logged, grads = {}, {}
    for rows in (1, 4):
        t = make(tmp_path / f"r{rows}", cfg | dict(micro_rows=rows), ds=lopsided(),
                 callbacks=[At(0, lambda t, rows=rows: grads.update({rows: t.drafter.fc.weight.grad.clone()}), "before_update")])
        parts = micro_sums(t, 1)
        logged[rows] = t.train_step()
    want = sum(float(p.total) for p in parts) / sum(float(p.denominator) for p in parts)
    mean_of_means = np.mean([float(p.loss) for p in parts])
    assert logged[1]["loss"] == pytest.approx(want, rel=1e-6) and logged[4]["loss"] == pytest.approx(want, rel=1e-6)
    assert abs(mean_of_means - want) > 1e-3  # the mistake would show
    assert torch.allclose(grads[1], grads[4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delta", [dict(), dict(weighting="dpace"), dict(loss={"ce": .3, "fkl": .7}), dict(layout="shifted")])
def test_k4_gradients_do_not_depend_on_the_split(tmp_path, delta):
    cfg = CFG | dict(token_budget=256, num_anchors=32, val_share=0., noise=0., clip=None) | delta
    target, grads = module.toy_target(), {}
    target = type(target).from_model(target.model.double(), name="double")
    for rows in (1, 2, 4):
        t = make(tmp_path / f"r{rows}", cfg | dict(micro_rows=rows), target=target, ds=lopsided())
        t.drafter.double()
        outs = micro_sums(t, rows)
        clip_gradients(t.drafter, None, sum(outs[1:], outs[0]).denominator)
        grads[rows] = torch.cat([p.grad.flatten() for p in t.drafter.parameters()])
    assert grads[1].dtype == torch.float64
    for rows in (2, 4):
        torch.testing.assert_close(grads[rows], grads[1], rtol=1e-10, atol=1e-16)


def test_evaluating_and_saving_often_changes_nothing(whole, tmp_path):
    make(tmp_path / "r", CFG | dict(eval_every=1, checkpoint_every=1)).fit()
    assert same_end(whole[0], tmp_path / "r")


def test_no_global_generator_is_read_or_moved(tmp_path):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    make(tmp_path / "r", CFG | dict(steps=2)).fit()
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


# -- features kept between epochs ------------------------------------------------------------------------------------------

def counted(monkeypatch):
    "How many rows the target reads from here on, in a list of one number."
    seen, real = [0], type(TARGET).features

    def features(self, ids_RT, *a, **k):
        seen[0] += len(ids_RT)
        return real(self, ids_RT, *a, **k)

    monkeypatch.setattr(type(TARGET), "features", features)
    return seen


KINDS = [dict(), dict(loss={"ce": .3, "fkl": .7}, labels="teacher"), dict(layout="shifted", weighting="dpace")]


@pytest.mark.parametrize("delta", KINDS, ids=str)
def test_kept_features_change_no_bit_and_are_read_once(tmp_path, monkeypatch, delta):
    "Two and a half epochs; features and, where the loss asks, teacher states come from memory."
    cfg, ends, reads, seen, kept = CFG | dict(val_share=0., steps=12) | delta, [], [], counted(monkeypatch), []
    for gib in (0., 1.):
        before = seen[0]
        look = At(12, lambda t: kept.append(dict(t.line.readers[0].features.rows)))
        t = make(tmp_path / f"r{gib}", cfg | dict(feature_cache=gib), [look], ds=toy_data(16))
        t.fit()
        ends.append((t.history.loss.tolist(), t.history.grad_norm.tolist()))
        reads.append(seen[0] - before)
    assert ends[0] == ends[1] and same_end(tmp_path / "r0.0", tmp_path / "r1.0", 12)
    rows = len(t.packed)
    assert reads == [24, rows] and 2 * rows < 24 and set(kept[1]) == set(range(rows))
    assert not kept[0] and not t.line.readers[0].features.rows
    finals = [len(row) == 3 for row in kept[1].values()]
    assert all(finals) if "loss" in delta else not any(finals)


@pytest.mark.parametrize("teacher", [False, True])
def test_kept_features_stay_within_the_limit(tmp_path, monkeypatch, teacher):
    cfg = CFG | dict(val_share=0., steps=12, noise=0.) | (dict(loss="fkl") if teacher else {})
    row = 64 * 4 * (3 * 32 + 32 * teacher) + 1  # three layers of 32 in float32, the final states, and a flag
    make(tmp_path / "none", cfg | dict(feature_cache=0), ds=toy_data(16)).fit()
    seen, room, kept = counted(monkeypatch), [], {}
    look = At(12, lambda t: (kept.update(t.line.readers[0].features.rows), room.append(t.line.readers[0].features.room)))
    t = make(tmp_path / "some", cfg | dict(feature_cache=(3 * row + row - 1) / 2**30), [look], ds=toy_data(16))
    t.fit()
    assert len(kept) == 3 < len(t.packed) and sum(x.nbytes for found in kept.values() for x in found) == 3 * row
    assert room == [row - 1] and seen[0] < 24 and same_end(tmp_path / "none", tmp_path / "some", 12)


def test_resume_is_exact_with_and_without_kept_features(tmp_path):
    cfg = CFG | dict(val_share=0., steps=12, loss={"ce": .3, "tv": .7})
    make(tmp_path / "whole", cfg | dict(feature_cache=0), ds=toy_data(16)).fit()
    for name, changes in (("same", {}), ("off", dict(feature_cache=0)), ("small", dict(feature_cache=1e-4))):
        make(tmp_path / name, cfg, [At(5, lambda t: t.stop())], ds=toy_data(16)).fit()
        assert resume(tmp_path / name, changes=changes).fit().outcome == "finished"
        assert same_end(tmp_path / "whole", tmp_path / name, 12), name


def test_kept_features_of_micro_batches_of_several_rows(tmp_path):
    "Rows are read alone: the same numbers up to rounding, and shapes as asked."
    cfg, losses = CFG | dict(val_share=0., steps=9, token_budget=256, micro_rows=4, noise=0.), []
    for gib in (0., 1e-4, 1.):
        t = make(tmp_path / f"r{gib}", cfg | dict(feature_cache=gib), ds=toy_data(16))
        t.fit()
        losses.append(t.history.loss.to_numpy())
    assert np.allclose(losses[0], losses[1], rtol=1e-4) and np.array_equal(losses[1], losses[2])


def test_a_warm_start_copies_layers_says_so_and_resumes(tmp_path):
    cfg = CFG | dict(init="target", steps=4, num_draft_layers=2)
    make(tmp_path / "a", cfg).fit()
    t = make(tmp_path / "b", cfg, [At(2, lambda t: t.stop())])
    layers = TARGET.parts.layers
    assert t.copied == [0, 5] and torch.equal(t.drafter.layers[1].mlp.up_proj.weight, layers[5].mlp.up_proj.weight)
    assert "copies of the target's layers [0, 5]" in t.describe() and "init target (recipe: random)" in t.describe()
    assert make(tmp_path / "c").copied is None
    t.fit()
    assert resume(tmp_path / "b").fit().outcome == "finished" and same_end(tmp_path / "a", tmp_path / "b", 4)
    with pytest.raises(ConfigError, match="init"):
        resume(tmp_path / "b", changes=dict(init="random"))


# -- callbacks and progress --------------------------------------------------------------------------------------------------

def test_callbacks_run_in_order_and_replace_defaults(tmp_path):
    t = make(tmp_path / "r", callbacks=[Callback()])
    orders = [cb.order for cb in t.callbacks]
    assert orders == sorted(orders) and [type(cb) for cb in t.callbacks].count(ProgressCB) == 1
    assert HistoryCB.order < EvalCB.order < CheckpointCB.order < ProgressCB.order
    with pytest.raises(ConfigError, match="is no Callback"):
        make(tmp_path / "r", callbacks=["tensorboard"])
    with pytest.raises(ConfigError, match="show='fancy'"):
        ProgressCB(show="fancy")


def test_piped_progress_prints_at_once_and_while_a_step_hangs(tmp_path, capsys):
    t = Trainer(TARGET, toy_data(30), CFG | dict(steps=2), run_dir=tmp_path / "r",
                callbacks=[ProgressCB(every=.1), At(0, lambda t: time.sleep(.5), "before_update")])
    t.fit()
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step=")]
    assert lines[0].startswith("step=0/2 stage=") and "tok/s=" in lines[0]
    assert sum(x.startswith("step=0/2 stage=first_step") for x in lines) >= 2
    assert lines[-1].startswith("step=2/2 stage=finished") and "loss=" in lines[-1]


def test_a_face_that_cannot_draw_stops_nothing(tmp_path, monkeypatch):
    cb = ProgressCB(every=.05, show="lines")
    monkeypatch.setattr(callbacks, "progress_line", boom)
    t = Trainer(TARGET, toy_data(30), CFG | dict(steps=2), run_dir=tmp_path / "r", callbacks=[cb])
    assert t.fit().outcome == "finished"


def test_devices_that_this_trainer_cannot_use_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one target thread"):
        make(tmp_path / "r", devices={"target": [], "drafter": ["cpu", "cpu"]})
    with pytest.raises(ConfigError, match="share 2 micro-batches"):
        make(tmp_path / "r", devices={"target": ["cpu"], "drafter": ["cpu"] * 3})
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA GPU"):
            make(tmp_path / "r", devices="cuda:0")
    assert make(tmp_path / "r", devices={"target": ["cpu"], "drafter": ["cpu"]}).device.type == "cpu"


@pytest.mark.cuda
def test_one_gpu_trains_and_resumes(tmp_path):
    target = toy_target()
    target = type(target).from_model(target.model.cuda(), name="toy")
    cfg = CFG | dict(attention="sdpa", dtype="bfloat16", steps=6)
    make(tmp_path / "r", cfg, [At(3, lambda t: t.stop())], target=target).fit()
    t = Trainer.from_run(tmp_path / "r", target=target, callbacks=[ProgressCB(show="off")])
    assert t.fit().outcome == "finished" and t.history.target_tok_s.gt(0).all()
