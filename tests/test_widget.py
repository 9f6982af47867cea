"RunReport, live view, callback and watch without a browser: state machine, threads, limits, escaping, bounds."

import contextvars
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflash_nb import report as rp
from dflash_nb import widget as wd
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.events import EventLog, read_events
from dflash_nb.report import Curve, RunReport, RunTail, SlotCurve, demo_devices, demo_run, demo_step, run_panels
from dflash_nb.status import status
from dflash_nb.trainer import Trainer, toy_data, toy_target
from dflash_nb.widget import LiveView, WidgetCB, watch

ROOT = Path(__file__).resolve().parents[1]
NASTY = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture
def shown(monkeypatch):
    "What a notebook would have been sent: (kind, id, bundle)."
    import IPython.display as d
    sent = []
    monkeypatch.setattr(d, "display", lambda b, raw=False,
                        display_id=None: sent.append(("display", display_id, b, threading.current_thread())))
    monkeypatch.setattr(d, "update_display", lambda b, raw=False,
                        display_id=None: sent.append(("update", display_id, b, threading.current_thread())))
    return sent


@pytest.fixture
def run(tmp_path):
    "Make a demo run; open logs are closed at the end."
    logs = []

    def make(name="run", end=None, **more):
        log = demo_run(tmp_path / name, **{"steps": 60, **more})
        log.beat()
        logs.append(log)
        if end:
            log.end(end, step=more.get("done") or 60)
            log.close()
        return log

    yield make
    for log in logs:
        log.close()


def toy(run_dir, *callbacks, steps=6, **more):
    cfg = TrainConfig(steps=steps, block_size=4, num_draft_layers=1, row_len=64, token_budget=64, num_anchors=8, mask_token_id=63)
    return Trainer(toy_target(), toy_data(), cfg, run_dir, callbacks=callbacks, **more)


def until(what, seconds=10):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(.01)


# curves


@pytest.mark.parametrize("n", [1, 2, 299, 300, 301, 5000])
def test_curve_has_at_most_300_points_and_keeps_the_mean(n):
    c = Curve()
    for i in range(1, n + 1):
        c.add(i, float(i))
    assert len(c) <= 300 and c.xs == sorted(set(c.xs)) and c.xs[-1] == n
    assert sum(b[1] for b in c.bins) == n * (n + 1) / 2 and sum(b[2] for b in c.bins) == n


def test_curve_of_rare_points_is_bounded_too():
    c = Curve(points=10)
    for i in range(0, 100_000, 1000):
        c.add(i, 1.0)
    assert 3 <= len(c) <= 10


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), True, [1]])
def test_curve_and_slots_leave_out_what_is_no_number(value):
    c, s = Curve(), SlotCurve()
    c.add(1, value)
    c.add(value, 1.0)
    s.add(1, [value, 0.5])
    s.add(2, value if value != [1] else 1)
    assert len(c) == 0 and s.now[1] == 0.5 and (s.now[0] is None or s.now[0] is value)
    assert rp.chart_slots(RunTail("/nowhere")) and not rp._finite(value)


def test_a_new_attempt_cuts_the_curves_at_its_start(tmp_path):
    log = EventLog(tmp_path, config={}, steps=100)
    for i in range(1, 51):
        log.step(**demo_step(i, 100))
    log.close()
    tail = RunTail(tmp_path)
    tail.look()
    assert tail.curves["loss"].xs[-1] == 50
    log = EventLog(tmp_path, config={}, steps=100, step=20)
    log.step(**demo_step(21, 100))
    log.close()
    tail.look()
    assert tail.curves["loss"].xs[-2:] == [20, 21] and len(tail.curves["loss"]) == 21 and tail.status().attempt == 2


def test_a_file_that_became_shorter_is_read_again(run, tmp_path):
    run(end="finished")
    tail = RunTail(tmp_path / "run")
    while tail.look():
        pass
    path = tmp_path / "run" / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20]))
    while tail.look():
        pass
    fresh = RunTail(tmp_path / "run")
    while fresh.look():
        pass
    assert tail.curves["loss"].bins == fresh.curves["loss"].bins


# run_panels


HOSTILE = [
    dict(kind="step", step=1, loss=NASTY, accept=[NASTY, None, {}], train_tau=[], lr=NASTY, target_tok_s=NASTY, queue=NASTY),
    dict(kind="eval", step=NASTY, sim_tau=NASTY, tau=NASTY, tau_ci=[NASTY, None]),
    dict(kind="stage", stage=NASTY, phase="start", usual=NASTY),
    dict(kind="stage", stage=NASTY + "2", phase="failed", elapsed=NASTY, error=NASTY),
    dict(kind="exception", type=NASTY, text=NASTY, thread=NASTY, device=NASTY, step=NASTY, traceback=NASTY),
    dict(kind="checkpoint", step=NASTY, path=NASTY, bytes=NASTY),
    dict(kind="warning", text=NASTY), dict(kind="fallback", device=NASTY, was=NASTY, runs=NASTY, reason=NASTY),
    dict(kind="graph", device=NASTY, what=NASTY, elapsed=NASTY), dict(kind="stop", reason=NASTY), dict(kind=NASTY, x=NASTY),
]


def test_hostile_text_never_becomes_markup(tmp_path):
    log = EventLog(tmp_path, config={NASTY: NASTY}, steps=5, target=NASTY)
    log.step(1, loss=1.0, sim_tau=1.0)
    for e in HOSTILE[2:]:
        log.emit(e["kind"], **{k: v for k, v in e.items() if k != "kind"})
    log.gauge(devices=[dict(device=NASTY, role=NASTY, load=NASTY, memory_gb=NASTY, tok_s=NASTY)], compiled=NASTY)
    log.beat()
    tail = RunTail(tmp_path)
    while tail.look():
        pass
    s = tail.status()
    made = [x for x in run_panels(tail, s, NASTY).values() if x] + [RunReport(tmp_path).table(), rp.tag("p", title=NASTY)]
    log.close()
    for text in made:
        seen = []
        parser = HTMLParser()
        parser.handle_starttag = lambda name, attributes, seen=seen: seen.append((name, {k for k, _ in attributes}))
        parser.feed(text)
        assert seen and not {n for n, _ in seen} & {"script", "img"} and not any("onerror" in keys for _, keys in seen)


@pytest.mark.parametrize("e", HOSTILE[:2], ids=lambda e: e["kind"])
def test_strange_numbers_do_not_stop_a_view(tmp_path, e):
    log = EventLog(tmp_path, config={}, steps=5)
    log.emit(e["kind"], **{k: v for k, v in e.items() if k != "kind"})
    log.step(2, loss=1.5, accept=[.5, .25])
    log.step(3, loss=1.25, accept=[.5, .25])
    log.close()
    tail = RunTail(tmp_path)
    tail.look()
    assert tail.curves["loss"].ys == [1.5, 1.25] and tail.slots.now == [.5, .25]
    assert rp.panel_charts(tail).count("<svg") == 3


def test_charts_are_finite_for_flat_short_and_negative_curves(tmp_path):
    for ys in ([1.0] * 5, [0.0, 0.0], [-1.0, 1.0], [1e-30, 1e30], [5.0]):
        tail = RunTail(tmp_path)
        for i, y in enumerate(ys):
            for c in tail.curves.values():
                c.add(i, y)
            tail.slots.add(i, [y, y])
        drawn = rp.panel_charts(tail)
        assert "nan" not in drawn and "inf" not in drawn and rp.draw_report(tail)[:4] == b"\x89PNG"


def test_the_timeline_shows_what_runs_and_its_usual_time(tmp_path):
    with EventLog(tmp_path / "a", config={}, steps=1) as log:
        with log.stage("load target"):
            time.sleep(.02)
    log = EventLog(tmp_path / "b", config={}, steps=1)
    log.emit("stage", stage="load target", phase="start", usual=log.usual["load target"])
    tail = RunTail(tmp_path / "b")
    tail.look()
    text = rp.panel_stages(tail.status())
    log.close()
    assert 'aria-current="step"' in text and "(usually 0.0 s)" in text


# report


def test_report_has_text_a_bare_table_and_a_picture(run, tmp_path):
    run(end="finished")
    bundle = RunReport(tmp_path / "run")._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html",
                           "image/png"} and "finished" in bundle["text/plain"] and "step=" not in bundle["text/html"]
    tags = set(re.findall(r"<(\w+)", bundle["text/html"]))
    attributes = set(re.findall(r'\s(\w+)="', bundle["text/html"]))
    assert tags <= {"table", "caption", "tbody", "tr", "th", "td", "div", "font", "b", "pre"} and attributes <= {"scope", "align", "color"}
    assert len(json.dumps(bundle)) < 25_000


def test_report_of_a_failure_names_thread_device_and_step(run, tmp_path):
    log = run(done=30)
    try:
        raise RuntimeError("no <b>memory</b>")
    except RuntimeError as e:
        log.exception(e, step=31, device="cuda:1", thread="dflash-w1:cuda:1")
    log.end("failed", step=30)
    table = RunReport(tmp_path / "run").table()
    assert all(w in table for w in ("dflash-w1:cuda:1", "cuda:1", "step 31", "<font", "Traceback")) and "<b>memory" not in table


def test_report_without_matplotlib_has_no_picture(run, tmp_path, monkeypatch):
    run(end="finished")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert set(RunReport(tmp_path / "run")._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_report_of_nothing_says_so(tmp_path):
    assert "no run" in repr(RunReport(tmp_path)) and "no run" in RunReport(tmp_path).table()


# view


def test_view_follows_a_run_and_leaves_the_report(shown, tmp_path):
    view = LiveView(tmp_path / "r").show()
    assert [k for k, *_ in shown] == ["display", "display"] and "waiting" in view.panes.shown["head"]
    log = demo_run(tmp_path / "r", steps=100, pace=.005)
    until(lambda: "running" in view.panes.shown["head"])
    before = view.panes.shown["charts"]
    log.end("finished", step=100)
    log.close()
    assert view._done.wait(10) and not view.errors, view.error
    assert view.report.status.state == "finished" and view.panes.shown["charts"] and before is not None
    assert [k for k, *_ in shown[2:]] == ["update", "update"] and [i for _, i, *_ in shown[:2]] == [i for _, i, *_ in shown[2:]]
    assert "text/html" in shown[2][2] and "image/png" in shown[3][2] and "vnd.jupyter" not in str(shown[2][2])
    until(lambda: view._thread not in threading.enumerate(), 2)


def test_everything_is_displayed_from_the_callers_thread(shown, run, tmp_path):
    run()
    view = LiveView(tmp_path / "run").show()
    view.show()  # a second view
    assert len(shown) == 4 and {t for *_, t in shown} == {threading.current_thread()} and len({i for _, i, *_ in shown}) == 4
    view.close()
    assert [k for k, *_ in shown[4:]] == ["update"] * 4


def test_at_most_four_updates_a_second_also_under_clicks(shown, run, tmp_path):
    run()
    view, t0 = LiveView(tmp_path / "run", {"stop": lambda: None}), time.monotonic()
    view.show()
    while time.monotonic() - t0 < 1.3:
        view.panes.controls.press("stop")
        time.sleep(.01)
    looks, seconds = view.looks + 1, time.monotonic() - t0
    view.close()
    assert 3 <= looks <= 4 * seconds + 2, (looks, seconds)


def test_only_changes_are_sent(shown, run, tmp_path):
    run(end="finished")
    view = LiveView(tmp_path / "run", follow=False)
    view._look()
    sent = []
    for html in view.panes.html.values():
        html.observe(lambda change: sent.append(change.name), "value")
    view.panes.put("stages", view.panes.shown["stages"])
    view._drawn = time.monotonic()
    assert not sent
    view._look()
    assert len(sent) <= 1  # the age in the head


def test_a_dear_look_makes_the_next_one_wait():
    view = type("V", (wd._Looks,), dict(_closing=threading.Event(), _wake=threading.Event()))()
    view.rate = 100.
    t = time.monotonic()
    view._rest(.005)
    assert .4 < time.monotonic() - t < 1.5
    view._wake.set()
    t = time.monotonic()
    view._rest(1.)
    assert time.monotonic() - t < .3


def test_an_error_in_a_look_is_counted_and_never_raised(shown, run, tmp_path, monkeypatch):
    run()
    monkeypatch.setattr(wd, "panel_head", lambda *a: 1 / 0)
    monkeypatch.setattr(wd._Looks, "rate", 200.)
    monkeypatch.setattr(wd._Looks, "share", 1.)
    view = LiveView(tmp_path / "run").show()
    until(lambda: view._done.is_set())
    assert view.errors >= view.patience and "ZeroDivisionError" in view.error
    view.close()


def test_a_display_that_fails_does_not_raise_at_the_end(shown, run, tmp_path, monkeypatch):
    import IPython.display as d
    run()
    view = LiveView(tmp_path / "run").show()
    monkeypatch.setattr(d, "update_display", lambda *a, **k: 1 / 0)
    view.close()
    view.close()
    assert view.errors and "ZeroDivisionError" in view.error and view._done.is_set()


def test_close_is_idempotent_and_leaves_no_thread_and_few_widgets(shown, run, tmp_path, monkeypatch):
    monkeypatch.setattr(rp, "draw_report", lambda tail: b"")
    import ipywidgets
    run(end="finished")
    registry = ipywidgets.widgets.widget._instances
    for _ in range(12):
        view = LiveView(tmp_path / "run", follow=False).show()
        view.close("finished")
        view.close()
    left = len(registry)
    for _ in range(12):
        LiveView(tmp_path / "run", follow=False).show().close()
    assert len(registry) <= left and len(wd._KEPT) <= 8
    assert not [t for t in threading.enumerate() if t.name.startswith("dflash-view") and t.is_alive()]


def test_a_finished_run_is_a_report_at_once(shown, run, tmp_path):
    run(end="failed")
    view = LiveView(tmp_path / "run").show()
    assert view._thread is None and [k for k, *_ in shown] == ["display",
                                                               "display"] and "text/html" in shown[0][2] and "vnd" not in str(shown[0][2])


def test_a_killed_run_says_so(shown, tmp_path):
    code = "import sys,os;from dflash_nb.report import *;log=demo_run(sys.argv[1],steps=100,done=30);log.beat();os.kill(os.getpid(),9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "k")], cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT)))
    view = LiveView(tmp_path / "k").show()
    assert view.report.status.state == "killed" and "gone" in view.report.table() and "step 25" in view.report.table()


def test_the_thread_inherits_the_callers_context(shown, run, tmp_path):
    run()
    who = contextvars.ContextVar("who", default="nobody")
    who.set("the cell")
    seen = []
    view = LiveView(tmp_path / "run")
    look = view._look
    view._look = lambda: (seen.append(who.get()), look())
    view.show()
    until(lambda: len(seen) > 2)
    view.close()
    assert set(seen) == {"the cell"}


def test_import_of_ipywidgets_fails_clearly(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match="pip install ipywidgets.*show='lines'"):
        LiveView(tmp_path)


def test_modules_load_without_notebook_packages():
    names = ("ipywidgets", "IPython", "matplotlib", "rich", "fastcore", "PIL")
    block = (f"import sys\nclass No:\n    def find_spec(self, name, *_):\n"
             f"        if name.split('.')[0] in {names}: raise ImportError(name)\n"
             "sys.meta_path.insert(0, No())\nimport dflash_nb.report\nassert 'torch' not in sys.modules\n"
             "import dflash_nb.widget as w\nprint(w.can_show())")
    out = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0 and out.stdout.strip() == "False", out.stderr[-800:]


# buttons


def test_buttons_call_through_and_follow_the_run(run, tmp_path):
    log, asked = run(), []
    view = LiveView(tmp_path / "run", {k: (lambda k=k: asked.append(k)) for k in ("pause", "unpause", "checkpoint", "stop")}, follow=False)
    view._look()
    b = view.panes.controls.buttons
    assert not any(x.disabled for x in b.values()) and b["pause"].description == "Pause"
    for name in ("pause", "checkpoint", "stop"):
        b[name].click()
    view._look()
    assert asked == ["pause", "checkpoint", "stop"] and all(x.disabled for x in b.values()) and "stopping" in view.panes.shown["head"]
    log.pause()
    log.checkpoint(61, "checkpoints/61")
    view._look()
    assert b["pause"].description == "Resume" and not b["pause"].disabled and not b["checkpoint"].disabled and b["stop"].disabled
    b["pause"].click()
    log.unpause()
    view._look()
    assert asked[-1] == "unpause" and b["pause"].description == "Pause" and not b["pause"].disabled


def test_a_request_that_nobody_answers_can_be_repeated(run, tmp_path, monkeypatch):
    run()
    monkeypatch.setattr(wd.Controls, "wait", .01)
    view = LiveView(tmp_path / "run", {"stop": lambda: None}, follow=False)
    view._look()
    view.panes.controls.press("stop")
    time.sleep(.02)
    view._look()
    assert not view.panes.controls.buttons["stop"].disabled


def test_an_error_of_a_control_is_shown(run, tmp_path):
    run()
    view = LiveView(tmp_path / "run", {"stop": lambda: 1 / 0}, follow=False)
    view._look()
    view.panes.controls.buttons["stop"].click()
    view._drawn = -9.
    view._look()
    assert "ZeroDivisionError" in view.panes.shown["events"]


def test_watch_has_a_stop_that_the_run_finds(shown, run, tmp_path):
    log = run()
    view = LiveView(tmp_path / "run")
    assert list(view.panes.controls.buttons) == ["stop"]
    view.panes.controls.buttons["stop"].click()
    log.beat()
    assert log.take_asked() == ["stop"]


# callback


def test_widget_callback_shows_a_fit_and_ends_with_it(shown, tmp_path):
    cb = WidgetCB(show="widget")
    t = toy(tmp_path / "r", cb)
    t.fit()
    assert cb.error is None and cb.view.report.status.state == "finished" and cb.view._done.is_set() and not cb.view.errors, cb.view.error
    assert [k for k, *_ in shown] == ["display"] * 2 + ["update"] * 2
    t2 = Trainer.from_run(tmp_path / "r", steps=8, target=toy_target(), callbacks=[cb])
    t2.fit()
    assert cb.view.report.status.step == 8


def test_widget_callback_silences_the_plain_one_and_falls_back_to_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(wd.LiveView, "show", lambda self: 1 / 0)
    cb = WidgetCB(show="widget")
    toy(tmp_path / "r", cb).fit()
    out = capsys.readouterr().out
    assert isinstance(cb.error, ZeroDivisionError) and cb.view is None
    assert out.count("config ") == 1 and "step=6/6" in out  # said once, not twice


def test_widget_callback_is_text_where_no_kernel_is(tmp_path, capsys):
    cb = WidgetCB()
    toy(tmp_path / "r", cb).fit()
    assert cb.view is None and "step=6/6" in capsys.readouterr().out


def test_a_view_that_breaks_never_touches_the_training(shown, tmp_path, monkeypatch):
    monkeypatch.setattr(wd._Looks, "_look", lambda self: 1 / 0)
    monkeypatch.setattr(wd, "RunReport", lambda *a, **k: 1 / 0)
    record = toy(tmp_path / "r", WidgetCB(show="widget")).fit()
    assert record.outcome == "finished" and status(tmp_path / "r").exceptions == 0


def test_stop_button_of_a_fit_in_the_background(shown, tmp_path):
    cb = WidgetCB(show="widget")
    t = toy(tmp_path / "r", cb, steps=100_000)
    t.fit(block=False)
    until(lambda: t.step > 3)
    cb.view.panes.controls.buttons["stop"].click()
    record = t.wait(30)
    assert record.outcome == "stopped" and status(tmp_path / "r").checkpoint["step"] == record.step
    assert "the Stop button" in [e["reason"] for e in read_events(tmp_path / "r") if e["kind"] == "stop"]
    assert cb.view.report.status.state == "stopped"


def test_a_failure_is_in_the_report_of_the_fit(shown, tmp_path):
    cb = WidgetCB(show="widget")
    t = toy(tmp_path / "r", cb)
    t.line.gradients = lambda step: 1 / 0
    with pytest.raises(Exception, match="ZeroDivisionError"):
        t.fit()
    assert "ZeroDivisionError" in cb.view.report.table() and "step 1" in cb.view.report.table() and cb.view.report.status.state == "failed"


# watch in a terminal


def test_watch_prints_lines_in_a_pipe(run, tmp_path, capsys):
    run(end="finished")
    watch(tmp_path / "run")
    out = capsys.readouterr().out
    assert "step=60" in out and "tok/s" in out and "\033" not in out


def test_watch_with_rich_shows_state_curves_devices_and_events(run, tmp_path, capsys):
    pytest.importorskip("rich")
    run(end="finished")
    watch(tmp_path / "run", show="rich")
    out = capsys.readouterr().out
    assert all(w in out for w in ("finished", "loss", "sim_tau", "cuda:0", "tok/s", "checkpoint"))


def test_watch_refuses_a_face_it_does_not_have(tmp_path):
    with pytest.raises(ConfigError, match="show="):
        watch(tmp_path, show="hologram")


def test_interrupting_a_watch_leaves_the_run_alone(run, tmp_path, capsys, monkeypatch):
    log = run()
    monkeypatch.setattr(wd, "main_status", lambda argv: (_ for _ in ()).throw(KeyboardInterrupt()))
    watch(tmp_path / "run", show="lines")
    assert "goes on" in capsys.readouterr().out and log.take_asked() == []


# cost


@pytest.mark.slow
def test_fifty_thousand_steps_cost_less_than_a_hundredth_and_20_mb(shown, tmp_path):
    log = EventLog(tmp_path, config={}, steps=50_000)
    log.gauge(devices=demo_devices(8), queues={"batches": [3, 4]})
    log.beat()
    rows = [json.dumps(dict(kind="step", t=time.time(), attempt=1, v=1, **demo_step(i, 50_000))) for i in range(50, 50_001, 50)]
    view, spent = LiveView(tmp_path, follow=False), 0.
    lines = (rows[(i - 1) // 50].replace(f'"step": {50 * ((i - 1) // 50 + 1)}', f'"step": {i}', 1) + "\n" for i in range(1, 50_001))
    with open(tmp_path / "events.jsonl", "a") as f:
        for _ in range(50):
            f.write("".join(itertools.islice(lines, 100)))
            f.flush()
            view._drawn, start = -9., time.thread_time()
            view._look()
            spent += time.thread_time() - start
        f.write("".join(lines))
    tracemalloc.start()
    while view.tail.look():
        pass
    view._look()
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    log.close()
    assert view.status.step == 50_000 and all(len(c) <= 300 for c in view.tail.curves.values()) and len(view.tail.events) <= 60
    assert peak < 20, f"{peak:.1f} MB"
    assert spent / 50 < .02, f"{1e3 * spent / 50:.1f} ms for a look at 100 steps (1 s of training) with charts"


def test_a_view_asks_for_the_load_of_gpus_now_and_then(tmp_path, monkeypatch):
    asked = []
    gpu = dict(index=0, memory_gb=3.0, total_gb=80.0, load=0.5)
    monkeypatch.setattr("dflash_nb.status._smi", lambda: asked.append(1) or [gpu])
    log = EventLog(tmp_path, devices=dict(target=["cuda:0"], drafter=["cuda:0"]))
    log.gauge(devices=[dict(device="cuda:0", memory_gb=1.0)])
    log.beat()
    tail = RunTail(tmp_path)
    tail.look()
    for _ in range(5):
        row = tail.status().devices[0]
    log.close()
    assert row == dict(role="target + drafter", device="cuda:0", memory_gb=1.0, load=0.5) and len(asked) == 1
    assert "50%" in rp.panel_devices(tail.status()) or tail.status().process is None


def test_a_view_says_what_looks_wrong_while_the_run_goes_on(tmp_path):
    log = EventLog(tmp_path, config=dict(noise=dict(strength=.1)), steps=100)
    for i in range(1, 41):
        log.step(**{**demo_step(i, 100), "noise": 0.0})
    view = LiveView(tmp_path, {}, follow=False)
    view._advise_at = 0.
    view._look()
    view._look()
    view._look()
    log.close()
    assert "Noise strength 0.1 was asked for" in view.panes.shown["alert"] and view._advise_at > time.monotonic() + 10
