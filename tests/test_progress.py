"Progress of a sweep: bounded rows and lines, the same record in status, view, report and text, resumed, stopped, failed and killed."
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_nb import ablate as module
from dflash_nb import widget
from dflash_nb.ablate import SweepRun, ablate, open_sweep, run_sweep, where_runs_stand
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.events import EventLog, RunDirError, ask, read_events
from dflash_nb.progress import RunNow, SweepFace, steps_done, steps_made, sweep_line, sweep_table
from dflash_nb.report import RunReport, RunTail, demo_sweep, panel_charts, panel_sweep, run_panels
from dflash_nb.status import format_status, main_status, status, status_line
from dflash_nb.trainer import toy_data, toy_target
from dflash_nb.widget import LiveView, watch

ROOT = Path(__file__).resolve().parents[1]
CFG = TrainConfig(block_size=4, num_anchors=8, row_len=64, token_budget=64, num_draft_layers=1, mask_token_id=63, steps=4, lr=3e-3,
                  val_anchors=16, eval_every=2, checkpoint_every=2, attention="eager")
SHORT = dict(holdout=2, max_new_tokens=4, walk_docs=0)
NASTY = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def pair():
    return toy_target(), toy_data()


@pytest.fixture
def shown(monkeypatch):
    "What a notebook would have been sent: (kind, bundle, thread)."
    import IPython.display as d
    sent = []
    def keep(kind):
        return lambda b, raw=False, display_id=None: sent.append((kind, b, threading.current_thread()))
    monkeypatch.setattr(d, "display", keep("display"))
    monkeypatch.setattr(d, "update_display", keep("update"))
    return sent


def many(arms, seeds, **states):
    runs = [RunNow(f"arm {a}", s, 100) for s in range(seeds) for a in range(arms)]
    for i, r in enumerate(runs):
        r.state = states.get(f"r{i}", "waiting")
    return runs


def test_hundreds_of_arms_have_forty_rows_and_failures_are_among_them():
    runs = many(300, 3, r899="failed", r500="running", r10="done")
    table = sweep_table(runs, 50.0)
    assert len(table["rows"]) == 40 and table["runs"] == 900
    assert table["counts"] == dict(done=1, failed=1, running=1, stopped=0, waiting=897)
    assert [r["state"] for r in table["rows"]].count("waiting") == 37 and table["rows"][-1]["state"] == "failed"
    assert steps_done(runs) == 200 and table["eta"] == (90_000 - 200) / 50
    start = time.process_time()
    for _ in range(20):
        sweep_table(runs, 50.0)
    assert (time.process_time() - start) / 20 < 0.02


def test_a_line_is_short_however_many_runs_there_are():
    runs = many(300, 3, **{f"r{i}": "running" for i in range(300)})
    line = sweep_line(runs, 2.0)
    assert len(line) < 200 and "+297 running" in line and "left_s=45000" in line
    assert "left_s" not in sweep_line(runs, 0)


def test_failures_are_named_once_and_not_by_hundreds(capsys):
    runs = many(100, 1, **{f"r{i}": "running" for i in range(100)})
    with SweepFace("x", "lines", every=0.02) as face:
        face.begin(runs, "title", None)
        for r in runs[:50]:
            r.state, r.error = "failed", "RuntimeError: no memory"
        time.sleep(0.1)
    out = capsys.readouterr().out
    assert 1 <= len(re.findall("failed: arm", out)) <= 10 and "more" in out
    named = re.findall(r"failed: (arm \d+), seed", out)
    assert len(set(named)) == len(named)


def test_failures_are_named_in_the_order_they_come(capsys):
    runs = many(3, 1, r0="running", r1="running", r2="running")
    with SweepFace("x", "lines", every=0.02) as face:
        face.begin(runs, "title", None)
        for i in (2, 0):
            runs[i].state, runs[i].error = "failed", "RuntimeError: no memory"
            time.sleep(0.1)
    assert re.findall(r"failed: (arm \d+), seed", capsys.readouterr().out) == ["arm 2", "arm 0"]


def test_steps_that_were_never_made_are_no_speed():
    runs = many(2, 1, r0="failed", r1="running")
    runs[0].step, runs[1].step = 10, 20
    assert steps_made(runs) == 30 and steps_done(runs) == 120


def test_every_face_has_the_same_record(tmp_path, capsys):
    log = demo_sweep(tmp_path / "s", arms=3, seeds=2, steps=20, done=30)
    log.beat()
    s = status(tmp_path / "s")
    assert s.sweep["counts"] == dict(done=2, failed=1, running=3, waiting=0) and s.eta == pytest.approx(0.1) and s.step == 90
    assert "runs=6 done=2 failed=1" in status_line(s) and "gamma=1, seed 0  failed, step 9 of 20" in format_status(s)
    assert main_status([str(tmp_path / "s")]) == 0 and "out of memory" in capsys.readouterr().out
    tail = RunTail(tmp_path / "s")
    while tail.look():
        pass
    panel = panel_sweep(tail.status())
    assert panel.count("<tr") == 8 and "↳ RuntimeError: CUDA out of memory" in panel and panel_charts(tail).count("<polyline") == 12
    log.end("finished")
    log.close()
    text = repr(RunReport(tmp_path / "s"))
    assert "6 runs: 2 done, 1 failed, 3 stopped" in text and "no checkpoint" not in text  # its writer left them running


def test_scores_of_an_arm_are_not_the_sweep_s(tmp_path):
    with EventLog(tmp_path, steps=8, arms=["base"], seeds=[0]) as log:
        log.step(1, arms={"base": 3.0}, arm_step=1, seed=0)
        log.eval(1, arm="base", seed=0, tau=2.0, sim_tau=1.5)
        s = status(tmp_path)
    assert s.tau is s.sim_tau is None and s.sweep is None
    tail = RunTail(tmp_path)
    tail.look()
    assert not len(tail.curves["tau"]) and tail.arms["loss"]["base", "0"].ys == [3.0]


@pytest.mark.parametrize("told", [
    dict(runs=NASTY, counts={NASTY: NASTY}, rows=[dict(arm=NASTY, seed=NASTY, state=NASTY, step=NASTY, steps=[], loss=NASTY, eta=NASTY,
                                                       error=NASTY), 7]),
    dict(runs=2, counts={}, rows=[]), dict(runs=2), NASTY, dict(counts=3, rows=[]), dict(rows=[{}], counts={"running": 1}),
], ids=str)
def test_a_strange_record_neither_breaks_a_face_nor_becomes_markup(tmp_path, told):
    log = EventLog(tmp_path, steps=2, arms=NASTY, seeds=NASTY)
    log.step(1, arms={NASTY: NASTY}, arm_step=NASTY, seed=[1])
    log.gauge(sweep=told)
    log.beat()
    for _ in range(2):
        tail = RunTail(tmp_path)
        while tail.look():
            pass
        s = tail.status()
        made = "".join(run_panels(tail, s).values()) + RunReport(tmp_path).table()
        assert "<script" not in made and status_line(s) and format_status(s)
        log.close()


def test_a_look_at_hundreds_of_arms_costs_little(tmp_path):
    log = demo_sweep(tmp_path, arms=300, seeds=1, steps=30, done=20)
    log.beat()
    view = LiveView(tmp_path, {}, follow=False)
    view._look()
    start = time.process_time()
    for _ in range(10):
        view._drawn = -9.0
        view._look()
    spent = (time.process_time() - start) / 10
    log.close()
    assert spent < 0.05 and len(view.panes.shown["sweep"]) < 25_000 and view.panes.shown["sweep"].count("<tr") == 42
    assert len(view.panes.shown["charts"]) < 10_000


def test_the_view_is_there_before_the_plan_and_leaves_a_report(pair, tmp_path, shown, monkeypatch):
    inner, seen = module.plan_sweep, []
    monkeypatch.setattr(module, "plan_sweep", lambda *a: (seen.append([k for k, *_ in shown]), inner(*a))[1])
    ab = ablate(*pair, CFG, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", show="widget", **SHORT)
    assert seen == [["display"] * 2] and [k for k, *_ in shown[2:]] == ["update"] * 2 and ab.outcome == "finished"
    assert "2 runs: 2 done" in shown[2][1]["text/html"] and {t for _, _, t in shown} == {threading.current_thread()}


def test_a_plan_that_is_refused_closes_the_view(pair, tmp_path, shown):
    with pytest.raises(ConfigError, match="gama"):
        ablate(*pair, CFG, {"gama": [1]}, sweep_dir=tmp_path / "s", show="widget", **SHORT)
    assert [k for k, *_ in shown] == ["display"] * 2 + ["update"] * 2 and "no run in" in shown[2][1]["text/html"]
    ablate(*pair, CFG | dict(steps=1), {}, seeds=1, sweep_dir=tmp_path / "t", show="off", **SHORT)
    with pytest.raises(RunDirError, match="resume=True"):
        ablate(*pair, CFG, {}, sweep_dir=tmp_path / "t", show="widget", **SHORT)
    assert len(shown) == 4  # nothing was shown of the other sweep
    with pytest.raises(ConfigError, match="show='hologram'"):
        ablate(*pair, CFG, {}, sweep_dir=tmp_path / "u", show="hologram")
    assert not [t for t in threading.enumerate() if t.name.startswith("dflash-view")]


def test_a_view_that_cannot_be_shown_becomes_text(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(widget.LiveView, "show", lambda self: 1 / 0)
    ablate(*pair, CFG | dict(steps=1), {}, seeds=1, sweep_dir=tmp_path / "s", show="widget", **SHORT)
    assert "run_steps=1/1 ended=1/1" in capsys.readouterr().out


def test_a_sweep_in_the_background_stops_and_goes_on(pair, tmp_path, shown, monkeypatch):
    inner = module.fan_out
    monkeypatch.setattr(module, "fan_out", lambda *a: (inner(*a), time.sleep(0.05)))
    run = ablate(*pair, CFG | dict(steps=200), {"gamma": [1]}, seeds=2, sweep_dir=tmp_path / "s", show="widget", block=False, **SHORT)
    assert isinstance(run, SweepRun) and run.wait(0) is None and "4 runs" in repr(run)
    while not [r for r in run.sweep.runs if r.now.step > 2]:
        time.sleep(0.01)
    assert run.result().outcome == "stopped" and len(run.result().table)  # so far
    run.stop("enough")
    ab = run.wait(20)
    assert ab.outcome == "stopped" and status(tmp_path / "s").sweep["counts"] == dict(done=0, failed=0, running=0, stopped=2, waiting=2)
    assert "enough" in [e["reason"] for e in read_events(tmp_path / "s") if e["kind"] == "stop"]
    monkeypatch.setattr(module, "fan_out", inner)
    sweep = open_sweep(tmp_path / "s", pair[0])
    where_runs_stand(sweep)
    assert [r.now.state for r in sweep.runs] == ["waiting"] * 4 and sweep.runs[0].now.step == sweep.runs[1].now.step > 2
    assert sweep.done == 2 * sweep.runs[0].now.step and sweep.runs[0].now.scores["loss"] > 0


def test_the_stop_button_reaches_a_sweep_in_the_background(pair, tmp_path, shown):
    faces = []

    class Face(SweepFace):
        def begin(self, *a):
            faces.append(self)
            super().begin(*a)
    old, module.SweepFace = module.SweepFace, Face
    try:
        run = ablate(*pair, CFG | dict(steps=5000), {}, seeds=1, sweep_dir=tmp_path / "s", show="widget", block=False, **SHORT)
    finally:
        module.SweepFace = old
    faces[0].view.panes.controls.press("stop")
    assert run.wait(20).outcome == "stopped" and faces[0].view.report.status.state == "stopped"
    assert "the Stop button" in faces[0].view.report.table()


def test_what_breaks_a_sweep_in_the_background_is_raised_by_wait(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_serve", lambda sweep: 1 / 0)
    run = ablate(*pair, CFG, {}, seeds=1, sweep_dir=tmp_path / "s", show="off", block=False, **SHORT)
    with pytest.raises(ZeroDivisionError):
        run.wait(20)
    assert status(tmp_path / "s").state == "failed"


def test_await_gives_the_result(pair, tmp_path):
    import asyncio

    async def cell():
        return await ablate(*pair, CFG | dict(steps=1), {}, seeds=1, sweep_dir=tmp_path / "s", show="off", block=False, **SHORT)
    assert asyncio.run(cell()).outcome == "finished"


def test_a_resumed_sweep_counts_every_step_once(pair, tmp_path, monkeypatch):
    "Checkpoints of the runs are not of one step: the round starts at the newest that all have."
    inner, n = module.save_run, []

    def tears(run, step):
        inner(run, step)
        n.append(step)
        if len(n) == 3:  # base has steps 2 and 4, gamma=1 step 2
            raise KeyboardInterrupt
    monkeypatch.setattr(module, "save_run", tears)
    with pytest.raises(KeyboardInterrupt):
        ablate(*pair, CFG | dict(steps=6), {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", show="off", **SHORT)
    monkeypatch.setattr(module, "save_run", inner)
    sweep = open_sweep(tmp_path / "s", pair[0])
    assert run_sweep(sweep, show="off").outcome == "finished"
    starts = [e["step"] for e in read_events(tmp_path / "s") if e["kind"] == "run_start"]
    steps = [e["step"] for e in read_events(tmp_path / "s") if e["kind"] == "step" and e["attempt"] == 2]
    assert starts == [0, 4] and steps == [6, 8, 10, 12] and status(tmp_path / "s").step == 12


def test_a_failed_run_counts_as_a_whole(pair, tmp_path, monkeypatch):
    inner = module._finish_step

    def breaks(run, step):
        if run.arm.name == "gamma=1":
            raise RuntimeError("out of <b>memory")
        return inner(run, step)
    monkeypatch.setattr(module, "_finish_step", breaks)
    ablate(*pair, CFG, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "s", show="off", **SHORT)
    s = status(tmp_path / "s")
    assert s.step == s.steps == 8 and s.sweep["counts"]["failed"] == 1 and s.last_exception["arm"] == "gamma=1"
    panel = panel_sweep(s)
    assert "out of &lt;b&gt;memory" in panel and "seed 0" in repr(RunReport(tmp_path / "s"))


def test_a_run_without_room_waits_for_the_next_round(pair, tmp_path, monkeypatch):
    import torch
    inner, tries, sizes = module._micro, [], []
    rounds = module.train_round
    monkeypatch.setattr(module, "train_round", lambda s, r, runs, *a: (sizes.append(len(runs)), rounds(s, r, runs, *a)))

    def crowded(run, *a):
        if run.arm.name == "gamma=3" and not tries:
            tries.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(run, *a)
    whole = ablate(*pair, CFG, {"gamma": [1, 3]}, seeds=1, sweep_dir=tmp_path / "whole", show="off", **SHORT)
    sizes.clear()
    monkeypatch.setattr(module, "_micro", crowded)
    ab = ablate(*pair, CFG, {"gamma": [1, 3]}, seeds=1, sweep_dir=tmp_path / "s", show="off", **SHORT)
    assert sizes == [3, 1] and not ab.failed and ab.outcome == "finished"
    def value(x):
        return x.table[x.table.metric == "loss"].value.tolist()
    assert value(ab) == value(whole)
    monkeypatch.setattr(module, "_micro", lambda run, *a: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")))
    ab = ablate(*pair, CFG, {"gamma": [1]}, seeds=1, sweep_dir=tmp_path / "none", show="off", **SHORT)
    assert len(ab.failed) == 2  # alone, and still no room


@pytest.mark.slow
def test_another_process_watches_and_stops_a_sweep(pair, tmp_path, capsys, shown):
    code = ("import sys, time, torch; torch.set_num_threads(1)\nfrom dflash_nb import ablate as m\n"
            "from dflash_nb.config import TrainConfig\n"
            "from dflash_nb.trainer import toy_data, toy_target\ninner = m.fan_out\n"
            "m.fan_out = lambda *a: (inner(*a), time.sleep(.05))\n"
            f"m.ablate(toy_target(), toy_data(), TrainConfig.from_dict({(CFG | dict(steps=2000)).to_dict()!r}), {{'gamma': [1]}}, seeds=1, "
            f"sweep_dir={str(tmp_path / 's')!r}, show='off', holdout=2, max_new_tokens=4, walk_docs=0)")
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        view = LiveView(tmp_path / "s").show()
        while "running" not in view.panes.shown.get("sweep", ""):
            assert child.poll() is None and not view.errors, view.error
            time.sleep(0.05)
        ask(tmp_path / "s", "stop")
        assert view._done.wait(20) and view.report.status.sweep["counts"]["stopped"] == 2 and child.wait(20) == 0
    finally:
        child.kill()
        child.wait()
    watch(tmp_path / "s", show="lines")
    out = capsys.readouterr().out
    assert "2 runs: 2 stopped" in out and "run steps" in out
