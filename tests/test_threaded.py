"Threads: the numbers of one thread, whatever the topology; runs in the background; nothing left behind."
import asyncio
import threading
import time

import pytest
import torch
from test_trainer import CFG, TARGET, At, final, make, one_thread, resume, same_end  # noqa: F401

from dflash_nb.callbacks import Callback, GradCosCB
from dflash_nb.config import ConfigError
from dflash_nb.events import read_events
from dflash_nb.sides import SideClock
from dflash_nb.trainer import TrainError, toy_target

LONG = CFG | dict(steps=20, token_budget=256, num_anchors=8)
TOPOLOGIES = [(0, 1), (1, 1), (3, 1), (1, 2), (3, 2)]


def devices(targets, drafters):
    return dict(target=["cpu"] * targets, drafter=["cpu"] * drafters)


def trace(t):
    "What a run computed, step by step."
    return t.history[["loss", "grad_norm", "accuracy", "lr", "noise", "denominator"]].to_numpy().tolist()


def no_threads():
    return not [x.name for x in threading.enumerate() if x.name.startswith("dflash")]


DELTAS = dict(ce=dict(micro_rows=2), teacher=dict(micro_rows=2, loss={"ce": .3, "tv": .7}, labels="teacher", weighting="dpace"),
              shifted=dict(micro_rows=2, layout="shifted", noise=dict(strength=.05, where="embed")))


@pytest.mark.parametrize("delta", [pytest.param(v, id=k, marks=[pytest.mark.slow]*(k == "shifted")) for k, v in DELTAS.items()])
def test_k7_twenty_steps_bit_equal_for_every_topology(tmp_path, delta):
    "Two micro-batches a step: two drafters add the same two numbers as one does."
    ends = {}
    for targets, drafters in TOPOLOGIES:
        t = make(tmp_path / f"r{targets}{drafters}", LONG | delta, devices=devices(targets, drafters))
        assert t.fit().outcome == "finished" and no_threads()
        ends[targets, drafters] = trace(t)
        assert same_end(tmp_path / "r01", tmp_path / f"r{targets}{drafters}", 20)
    assert len(ends[0, 1]) == 20 and all(e == ends[0, 1] for e in ends.values())


@pytest.mark.parametrize("micro_rows", [1, 2])
def test_k4_drafters_do_not_change_the_gradient(tmp_path, micro_rows):
    "Four or two micro-batches, one to four drafters, float64: the same gradient to 1e-10."
    grads, model = {}, toy_target().model.double()
    target = type(TARGET).from_model(model, name="double")
    for n in sorted({1, 2, 4 // micro_rows}):
        seen = []
        look = At(0, lambda t, seen=seen: seen.append(torch.cat([p.grad.flatten() for p in t.drafter.parameters()])), "before_update")
        t = make(tmp_path / f"r{n}", LONG | dict(steps=1, micro_rows=micro_rows, clip=None), [look], target=target, devices=devices(1, n))
        for s in t.line.sides:
            s.drafter.double()
        t.fit()
        grads[n] = seen[0]
    assert grads[1].dtype == torch.float64 and grads[1].abs().max() > 0
    for g in grads.values():
        torch.testing.assert_close(g, grads[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)])
def test_k5_resume_drops_what_was_prefetched(tmp_path, shape):
    cfg = LONG | dict(micro_rows=2)
    make(tmp_path / "whole", cfg).fit()
    assert make(tmp_path / "half", cfg, [At(7, lambda t: t.stop())], devices=devices(*shape)).fit().outcome == "stopped"
    t = resume(tmp_path / "half", devices=devices(*shape))
    assert t.step == 7 and t.fit().outcome == "finished"
    assert same_end(tmp_path / "whole", tmp_path / "half", 20)


def test_a_run_remembers_its_threads(tmp_path):
    make(tmp_path / "r", LONG | dict(steps=2), devices=devices(2, 2)).fit()
    t = resume(tmp_path / "r", steps=3, devices=devices(2, 2))
    assert len(t.line.readers) == 2 and len(t.line.sides) == 2
    start = next(e for e in read_events(tmp_path / "r") if e["kind"] == "run_start")
    assert start["devices"] == dict(target=["cpu"] * 2, drafter=["cpu"] * 2)


def test_replicas_stay_equal_and_feel_what_a_callback_changes(tmp_path):
    class Halve(Callback):
        def before_update(self, trainer):
            for p in trainer.drafter.parameters():
                p.grad.mul_(.5)
    cfg = LONG | dict(micro_rows=2, steps=4)
    t, alone = (make(tmp_path / n, cfg, [Halve(), GradCosCB()], devices=d) for n, d in (("two", devices(1, 2)), ("one", "cpu")))
    t.fit(), alone.fit()
    a, b = (list(s.drafter.parameters()) for s in t.line.sides)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and same_end(tmp_path / "two", tmp_path / "one", 4)
    assert t.history.grad_cos[1:].between(-1, 1).all() and t.history.grad_cos.isna()[0]


def test_the_target_runs_ahead_and_no_further(tmp_path):
    "With the drafter held up, the ring fills and the target waits."
    seen = []
    def hold(t):
        until = time.monotonic() + 10
        while (ready := sum(t.line.exchange.ready())) < t.line.depth and time.monotonic() < until:
            time.sleep(.01)
        time.sleep(.05)
        seen.append((ready, sum(t.line.exchange.ready())))
    t = make(tmp_path / "r", LONG, [At(2, hold)], devices=devices(2, 1))
    t.fit()
    assert seen == [(t.line.depth, t.line.depth)]
    row = t.history.iloc[-1]
    assert row.queue_size == t.line.depth and 0 <= row.target_wait <= 1 and 0 <= row.drafter_wait <= 1


# -- in the background ---------------------------------------------------------------------------------------------------

def test_fit_returns_while_the_run_goes_on_and_wait_gives_the_record(tmp_path):
    t = make(tmp_path / "r", LONG, devices=devices(1, 1))
    assert t.fit(block=False) is t and t.record is None
    with pytest.raises(ConfigError, match="running already"):
        t.fit()
    assert t.wait(0) is None or t.record
    assert t.wait().outcome == "finished" and t.wait() is t.record and no_threads()
    make(tmp_path / "b", LONG).fit()
    assert same_end(tmp_path / "r", tmp_path / "b", 20)


def test_await_serves_others_meanwhile_and_a_cancelled_wait_stops_the_run(tmp_path):
    async def main():
        t, ticks = make(tmp_path / "r", LONG, [At(3, lambda t: time.sleep(.3))]), 0
        t.fit(block=False)
        waiting = asyncio.ensure_future(t)
        while not waiting.done():
            ticks += 1
            await asyncio.sleep(.02)
        assert (await waiting).outcome == "finished" and ticks > 5
        t = make(tmp_path / "s", LONG | dict(steps=10_000)).fit(block=False)
        waiting = asyncio.ensure_future(t)
        await asyncio.sleep(.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert t.wait(10).outcome == "stopped"
    asyncio.run(main())
    assert no_threads()


def test_buttons_work_from_another_thread(tmp_path):
    t = make(tmp_path / "r", LONG | dict(steps=10_000, checkpoint_every=10_000, eval_every=10_000), devices=devices(1, 1)).fit(block=False)
    t.pause()
    until = time.monotonic() + 10
    while t.stage != "paused" and time.monotonic() < until:
        time.sleep(.01)
    at = t.step
    assert t.checkpoint() is None
    time.sleep(.2)
    assert t.step == at and (t.saved is not None or at == 0)
    t.unpause()
    t.stop("button")
    record = t.wait(10)
    assert record.outcome == "stopped" and record.reason == "button" and resume(tmp_path / "r").step == record.step


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("where", ["read", "micro", "update", "warm_up"])
def test_an_exception_in_any_thread_is_raised_with_thread_step_and_rows(tmp_path, monkeypatch, where, background):
    t = make(tmp_path / "r", LONG, devices=devices(2, 2) if where != "read" else devices(1, 1))
    side = t.line.readers[0] if where == "read" else t.line.sides[-1]
    real, calls = getattr(side, where), []

    def fail(*a):
        calls.append(1)
        if len(calls) > (0 if where == "warm_up" else 5):
            raise RuntimeError("planted")
        return real(*a)
    monkeypatch.setattr(side, where, fail)
    thread = "dflash-target0:cpu" if where == "read" else "dflash-drafter1:cpu"
    start = time.monotonic()
    with pytest.raises(TrainError, match=rf"step \d+ on cpu, thread {thread}, rows \[.*\]: RuntimeError: planted"):
        t.fit(block=not background)
        t.wait(20)
    assert time.monotonic() - start < 15 and t.record.outcome == "failed" and no_threads()
    event = next(e for e in read_events(tmp_path / "r") if e["kind"] == "exception")
    assert event["thread"] == thread and event["device"] == "cpu" and event["step"] >= 1 and "planted" in event["traceback"]
    monkeypatch.undo()
    if where != "warm_up":
        again = resume(tmp_path / "r", devices=devices(1, 2))
        assert again.fit().outcome == "finished"


def test_a_stall_is_reported_with_all_stacks_once(tmp_path):
    t = make(tmp_path / "r", LONG | dict(steps=4), [At(2, lambda t: time.sleep(1.2))], devices=devices(1, 1), stall=.3)
    t.fit()
    said = [e for e in read_events(tmp_path / "r") if e["kind"] == "warning" and "no progress" in e["text"]]
    assert len(said) == 1 and "MainThread in callbacks after_step" in said[0]["text"] and "time.sleep(1.2)" in said[0]["stacks"]
    assert "dflash-drafter0:cpu" in said[0]["stacks"]


# -- on a GPU ------------------------------------------------------------------------------------------------------------

CUDA = LONG | dict(dtype="float32", attention="sdpa")  # flex attention wants heads of at least 16


def cuda_target():
    target = toy_target()
    return type(target).from_model(target.model.cuda(), name="toy")


@pytest.mark.cuda
@pytest.mark.parametrize("runner", ["eager", "compiled", "graph"])
def test_one_gpu_with_two_streams_gives_the_losses_of_one_thread(tmp_path, runner):
    cfg = CUDA | dict(runner=runner, micro_rows=2, noise=dict(strength=.05))
    traces = {}
    for name, n, d in (("alone", 0, 1), ("threads", 2, 1), ("two", 1, 2)):
        places = dict(target=["cuda:0"] * n, drafter=["cuda:0"] * d)
        t = make(tmp_path / name, cfg | (dict(runner="eager") if name == "alone" else {}), target=cuda_target(), devices=places)
        assert t.fit().outcome == "finished" and no_threads()
        assert t.ran["name"] == (runner if name != "alone" else "eager"), t.notes
        traces[name] = t.history.loss.to_numpy()
    assert abs(traces["alone"] - traces["threads"]).max() < 1e-3 and abs(traces["alone"] - traces["two"]).max() < 1e-3


@pytest.mark.cuda
def test_two_hundred_steps_of_mixed_lengths_allocate_nothing_new(tmp_path):
    from dflash_nb.scale import random_target, run_scale, scale_config
    cfg = scale_config(200, 8, row_len=256, token_budget=1024, micro_rows=2, num_draft_layers=2)
    target = random_target("tiny", device="cuda", dtype=torch.bfloat16)
    seen = run_scale(target, cfg, dict(target=["cuda:0"], drafter=["cuda:0"]), rows=64)
    assert seen["runner"] == "graph" and seen["outcome"] == "finished", seen["notes"]
    assert all(n == 0 for d in seen["grown"].values() for n in d.values()), seen["grown"]


def stopped_resumed_and_failed(path, target):
    "Three runs; returns the last one's error, and what the device still holds."
    import gc
    t = make(path / "r", CUDA, [At(7, lambda t: t.stop())], target=target)
    assert t.fit().outcome == "stopped"
    t = resume(path / "r", target=target)
    assert t.step == 7 and t.fit().outcome == "finished"

    def boom(*a):
        raise RuntimeError("planted")
    t = make(path / "f", CUDA, target=target)
    t.line.lead.update = boom
    with pytest.raises(TrainError, match="planted") as kept:
        t.fit()
    del t
    gc.collect(), torch.cuda.empty_cache()
    return kept.value, torch.cuda.memory_allocated()


class LateEvent:
    "A CUDA event of work that the device has not reached yet."
    def __init__(self, at): self.at, self.passed = at, False
    def synchronize(self): self.passed = True
    def elapsed_time(self, end):
        if not end.passed:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at - self.at


def test_a_clock_read_early_waits_for_the_device():
    clock = SideClock("cpu")
    clock.spans = [(LateEvent(1.0), LateEvent(4.0)), (LateEvent(4.0), LateEvent(6.0))]
    assert clock.take() == pytest.approx(0.005) and clock.take() == 0


@pytest.mark.cuda
def test_a_clock_read_early_waits_for_the_gpu():
    clock, x = SideClock("cuda:0"), torch.randn(8192, 8192, device="cuda:0")
    with clock():
        for _ in range(20):
            x @ x
    assert 0.01 < clock.take() < 60


@pytest.mark.cuda
def test_gpu_runs_give_their_memory_back(tmp_path):
    "Libraries keep a workspace for each stream they have seen, so the second round is compared with the first."
    target = cuda_target()
    rounds = [stopped_resumed_and_failed(tmp_path / str(i), target) for i in range(2)]
    assert rounds[1][1] - rounds[0][1] < 2**20 and all(isinstance(error, TrainError) for error, _ in rounds)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_losses_of_one(tmp_path):
    cfg, traces = CUDA | dict(micro_rows=2), {}
    for name, places in (("one", dict(target=["cuda:0"], drafter=["cuda:0"])), ("split", dict(target=["cuda:0"], drafter=["cuda:1"])),
                         ("both", dict(target=["cuda:0", "cuda:1"], drafter=["cuda:0", "cuda:1"]))):
        t = make(tmp_path / name, cfg, target=cuda_target(), devices=places)
        assert t.fit().outcome == "finished", t.notes
        traces[name] = t.history.loss.to_numpy()
    assert abs(traces["one"] - traces["split"]).max() < 1e-3 and abs(traces["one"] - traces["both"]).max() < 1e-3
