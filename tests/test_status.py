"Status of live, killed, copied and long runs; every rule of diagnose in both directions; runs and compare."

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from dflash_nb import status as st
from dflash_nb.config import ConfigError
from dflash_nb.events import KINDS, EventLog, RunDirError, read_events
from dflash_nb.status import compare, diagnose, format_status, main_status, runs, status

ROOT = Path(__file__).resolve().parents[1]
WRITER = """
    import sys, time
    from dflash_nb.events import EventLog
    log = EventLog(sys.argv[1], steps=10**9, target="nano")
    with log.stage("load target"): pass
    with log.stage("train"):
        s = 0
        while True:
            s += 1; log.step(s, loss=1/s, lr=1e-3)
            if s == 20: print("ready", flush=True)
            time.sleep(.0005)
    """


OPEN = []  # logs that `made` leaves open for a test


@pytest.fixture(autouse=True)
def no_log_stays_open():
    "Close what a test left open, so that no heartbeat outlives it."
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def writer(tmp_path):
    "A live run in another process."
    p = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    p.stdout.readline()
    yield p, tmp_path / "run"
    p.kill()
    p.wait()


def wait_for(f, seconds=5.0):
    until = time.monotonic() + seconds
    while not (x := f()) and time.monotonic() < until:
        time.sleep(0.01)
    return x


def made(path, steps=(), config=None, end="finished", stages=(), evals=(), total=None, **extra):
    "A run written by this process; `steps` are dicts."
    log = EventLog(path, config=config, steps=total, **extra)
    OPEN.append(log)
    for name, ok in stages:
        try:
            with log.stage(name):
                if not ok:
                    raise RuntimeError("no")
        except RuntimeError as e:
            log.exception(e)
    for i, e in enumerate(steps):
        log.step(i + 1, **e)
    for e in evals:
        log.eval(len(steps), **e)
    if end:
        log.close(end)
    return log


def rules(run_dir, **kw):
    return {f["rule"] for f in diagnose(run_dir, **kw)}


# states


def test_sigkill_is_told_within_a_second(writer):
    p, run = writer
    assert status(run).state == "running" and status(run).process is True
    p.send_signal(signal.SIGKILL)  # nobody waits for it: a zombie
    t0 = time.monotonic()
    s = wait_for(lambda: (x := status(run)).state == "killed" and x)
    assert s and time.monotonic() - t0 < 1
    assert s.stage == "train" and s.step == [e["step"] for e in read_events(run) if e["kind"] == "step"][-1] and s.eta is None
    assert "killed" in format_status(s) and "killed" in rules(run)
    assert main_status([str(run)]) == 1


def test_stopped_process_is_alive_but_suspended(writer):
    p, run = writer
    p.send_signal(signal.SIGSTOP)
    assert wait_for(lambda: status(run).suspended) and status(run).state == "running"
    assert "heartbeat" in rules(run, now=time.time() + 11) and "heartbeat" not in rules(run)
    assert "suspended" in format_status(status(run))


def rewrite(run, change):
    "Change the recorded process of a run, as if another one had written it."
    events = [json.loads(x) for x in (run / "events.jsonl").read_text().splitlines()]
    for e in events:
        if e["kind"] == "run_start":
            change(e["environment"]["process"])
    (run / "events.jsonl").write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in events))
    (run / "heartbeat").unlink(missing_ok=True)


def test_a_reused_pid_is_not_believed(tmp_path):
    log = made(tmp_path / "run", [dict(loss=1.0)], end=None)
    assert status(tmp_path / "run").state == "running"
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    rewrite(tmp_path / "old", lambda p: p.update(start=p["start"] - 1))
    assert status(tmp_path / "old").state == "killed"
    log.close()


def test_another_boot_is_dead_unless_its_heartbeat_is_fresh(tmp_path):
    made(tmp_path / "run", [dict(loss=1.0)], end=None)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    rewrite(tmp_path / "old", lambda p: p.update(boot="0"))
    assert status(tmp_path / "old").state == "unknown-host"
    assert status(tmp_path / "old", now=time.time() + 60).state == "killed"


def test_a_folder_copied_from_another_host_is_unknown(writer, tmp_path, monkeypatch):
    p, run = writer
    shutil.copytree(run, tmp_path / "copy")
    p.kill()
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    s = status(tmp_path / "copy", now=time.time() + 100)
    assert s.state == "unknown-host" and 99 < s.heartbeat_age < 110 and s.process is None and s.devices == []
    assert "this one is" in next(f for f in diagnose(tmp_path / "copy", now=time.time() + 100) if f["rule"] == "unknown")["try"]
    assert main_status([str(tmp_path / "copy")]) == 0


@pytest.mark.parametrize("end", ["finished", "failed", "stopped"])
def test_the_written_end_counts_also_in_a_copy(tmp_path, monkeypatch, end):
    made(tmp_path, [dict(loss=1.0)], end=end)
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    assert status(tmp_path).state == end and "ended" in format_status(status(tmp_path))


def test_starting_paused_and_running(tmp_path):
    log = EventLog(tmp_path, steps=100)
    assert status(tmp_path).state == "starting" and status(tmp_path).step == 0
    for s in range(1, 11):
        log.step(s, loss=1.0)
    assert status(tmp_path).state == "running" and status(tmp_path).eta is not None
    log.pause()
    assert status(tmp_path).state == "paused" and status(tmp_path).eta is None
    log.unpause()
    assert status(tmp_path).state == "running"
    log.close()


def test_a_torn_last_line_changes_nothing(tmp_path):
    made(tmp_path, [dict(loss=1.0)] * 3)
    before = status(tmp_path)
    with open(tmp_path / "events.jsonl", "ab") as f:
        f.write(b'{"kind":"step","step":99,"t":')
    after = status(tmp_path)
    assert after.step == before.step == 3 and after.state == "finished"
    (tmp_path / "heartbeat").write_bytes(b"garbage")
    assert status(tmp_path).step == 3 and status(tmp_path).state == "finished"


def test_the_second_attempt_is_the_one_shown(tmp_path):
    log = made(tmp_path, [dict(loss=5.0)] * 6, end=None, total=9)
    log.checkpoint(4, "checkpoints/4")
    log.exception(RuntimeError("CUDA error"))
    log.close("failed")
    log = EventLog(tmp_path, steps=9, step=4)
    s = status(tmp_path)
    assert (s.attempt, s.state, s.step, s.exceptions, s.cuda_errors, s.checkpoint["step"], s.loss) == (2, "starting", 4, 0, 0, 4, None)
    log.step(5, loss=1.0)
    assert status(tmp_path).step == 5 and "attempt 2" in format_status(status(tmp_path))
    log.close()


def test_a_full_disk_shows_in_the_status(tmp_path):
    log = EventLog(tmp_path, steps=3)
    log.step(1, loss=1.0)
    fd, full = log._file.fd, os.open("/dev/full", os.O_WRONLY)
    keep = os.dup(fd)
    os.dup2(full, fd)
    log.step(2, loss=1.0)
    os.dup2(keep, fd)
    log.beat()
    s = status(tmp_path)
    assert s.lost == 1 and "No space left" in s.lost_error and "1 EVENTS LOST" in format_status(s) and "lost" in rules(tmp_path)
    log.close()
    os.close(full)
    os.close(keep)


def test_no_run_is_bad_input(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="no run"):
            status(path)
    (tmp_path / "events.jsonl").write_text('{"kind":"run_st')
    with pytest.raises(RunDirError, match="no complete event"):
        status(tmp_path)
    assert main_status([str(tmp_path)]) == 2 and main_status([str(tmp_path), "--json"]) == 2
    out = capsys.readouterr()
    assert "no complete event" in json.loads(out.out.splitlines()[-1])["error"] and "Traceback" not in out.err
    with pytest.raises(RunDirError):
        runs(tmp_path / "absent")


# size


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("long")
    with EventLog(path, steps=50_000) as log:
        devices = [dict(device=f"cuda:{i}", role="drafter", memory_gb=40.0, load=0.9, tok_s=8e4) for i in range(8)]
        log.gauge(devices=devices, queues={f"q{i}": [3, 4] for i in range(8)})
        log.checkpoint(1, "checkpoints/1")
        log.warning("early")
        for s in range(1, 50_001):
            log.step(
                s,
                loss=2.31,
                lr=5.2e-4,
                grad_norm=0.8,
                noise=0.031,
                tokens=49152,
                target_tok_s=84e3,
                drafter_tok_s=79e3,
                queue=3,
                queue_size=4,
                accept=[0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1],
                skipped=s == 777,
            )
    return path


@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_long_log_answers_quickly_in_little_memory(long_run, heartbeat):
    assert (long_run / "events.jsonl").stat().st_size < 50e6
    kept = (long_run / "heartbeat").read_bytes()
    if not heartbeat:
        (long_run / "heartbeat").unlink()
    t0 = time.perf_counter()
    s = status(long_run)
    took = time.perf_counter() - t0
    tracemalloc.start()
    status(long_run)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (long_run / "heartbeat").write_bytes(kept)
    assert took < (0.1 if heartbeat else 1.0) and peak < 20e6, (took, peak)
    assert (s.step, s.state, s.skipped, s.warnings, s.checkpoint["step"]) == (50_000, "finished", 1, 1, 1)
    assert len(_json(s)) < 20_000


def _json(s):
    return st._encode(st._strict(s))


def test_the_command_in_a_fresh_interpreter(long_run):
    code = (
        "import sys; from dflash_nb.status import main_status; c = main_status(); "
        "print([m for m in ('torch', 'numpy') if m in sys.modules], file=sys.stderr); sys.exit(c)"
    )
    t0 = time.perf_counter()
    r = subprocess.run([sys.executable, "-c", code, str(long_run), "--json"], cwd=ROOT, capture_output=True, text=True)
    took = time.perf_counter() - t0
    assert r.returncode == 0 and json.loads(r.stdout.splitlines()[-1])["step"] == 50_000 and r.stderr.strip() == "[]"
    assert took < 3, took  # about .1 s on an idle machine, most of it the interpreter


# devices


def test_a_hung_nvidia_smi_is_not_waited_for(tmp_path, monkeypatch):
    fake = tmp_path / "bin/nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec sleep 30\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    log = EventLog(tmp_path / "run")
    t0 = time.perf_counter()
    assert status(tmp_path / "run").devices == [] and time.perf_counter() - t0 < 1
    fake.write_text("#!/bin/sh\necho '0, 1024, 81920, 91'\necho '1, 2048, 81920, [N/A]'\n")
    log.gauge(devices=[dict(device="cuda:0", role="target", load=None)])
    log.beat()
    assert status(tmp_path / "run").devices == [dict(device="cuda:0", role="target", load=0.91, memory_gb=1.0, total_gb=80.0)]
    log.close()


def test_visible_devices_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(st, "_smi", lambda: [dict(index=i, memory_gb=float(i), load=None) for i in (0, 1)])
    log = EventLog(tmp_path)
    assert status(tmp_path).devices == [dict(device="cuda:0", memory_gb=1.0, load=None)]
    log.close()


# watch


def test_watch_ends_with_the_run_and_prints_plain_lines_in_a_pipe(tmp_path, capsys):
    made(tmp_path, [dict(loss=2.0, target_tok_s=84e3, drafter_tok_s=7e4, queue=1, queue_size=4)], end="failed")
    assert main_status([str(tmp_path), "--watch", "--every", ".01"]) == 1
    out = capsys.readouterr().out
    assert "\033" not in out and "step=1" in out and "tok/s" in out
    assert main_status([str(tmp_path), "--diagnose"]) == 1 and "Try:" in capsys.readouterr().out


# diagnose: each rule, sick and healthy

ok = dict(loss=1.0, lr=1e-3)
SICK = dict(
    nonfinite=(dict(steps=[ok] * 30 + [dict(loss=float("nan"))] + [ok] * 3), dict(steps=[ok] * 34)),
    loss=(dict(steps=[dict(loss=3.0 + (i % 3) / 100) for i in range(120)]), dict(steps=[dict(loss=3.0 - i / 100) for i in range(120)])),
    noise=(
        dict(steps=[dict(ok, noise=0.0)] * 20, config=dict(noise=dict(strength=0.1))),
        dict(steps=[dict(ok, noise=0.0)] * 20, config=dict(noise=dict(strength=0.0))),
    ),
    leak=(
        dict(steps=[dict(ok, train_tau=4.0)] * 20, evals=[dict(sim_tau=1.3)]),
        dict(steps=[dict(ok, train_tau=2.0)] * 20, evals=[dict(sim_tau=1.6)]),
    ),
    whiplash=(dict(steps=[dict(ok, grad_cos=-0.3)] * 20), dict(steps=[dict(ok, grad_cos=0.1)] * 20)),
    warmup=(
        dict(steps=[dict(ok, lr=i * 1e-6) for i in range(60)], total=100),
        dict(steps=[dict(ok, lr=min(i, 5) * 1e-6) for i in range(60)], total=100),
    ),
    tau_gap=(dict(steps=[ok], evals=[dict(tau=1.2, sim_tau=3.0)]), dict(steps=[ok], evals=[dict(tau=2.8, sim_tau=3.0)])),
    starving=(
        dict(steps=[dict(ok, drafter_wait=0.5, target_wait=0.0)] * 10),
        dict(steps=[dict(ok, drafter_wait=0.05, target_wait=0.1)] * 10),
    ),
    growth=(
        dict(steps=[dict(ok, shapes=1 + i // 5, recompiled=0) for i in range(20)]),
        dict(steps=[dict(ok, shapes=1, recompiled=0, reserved_gb=2.0)] * 60),
    ),
    failed=(dict(steps=[ok], end="failed"), dict(steps=[ok], end="stopped")),
)


@pytest.mark.parametrize("rule", SICK)
def test_rules_speak_of_the_sick_and_are_silent_of_the_healthy(tmp_path, rule):
    sick, healthy = SICK[rule]
    made(tmp_path / "sick/run", **sick)
    made(tmp_path / "healthy/run", **healthy)
    assert rules(tmp_path / "sick/run") == {rule} and rules(tmp_path / "healthy/run") == set()
    text = repr(diagnose(tmp_path / "sick/run"))
    assert "Try: " in text and repr(diagnose(tmp_path / "healthy/run")) == "Nothing looks wrong."


def test_more_healthy_cases(tmp_path):
    made(tmp_path / "noise ramp", [dict(ok, noise=i * 1e-3) for i in range(30)], config=dict(noise=dict(strength=0.1)))
    made(tmp_path / "noise applied", [dict(ok, noise=0.0, noise_applied=0.1)] * 30, config=dict(noise=dict(strength=0.1)))
    made(tmp_path / "constant lr", [ok] * 90, total=100)
    made(tmp_path / "short warmup", [dict(ok, lr=i * 1e-6) for i in range(40)], total=100)
    made(tmp_path / "short loss", [dict(loss=3.0)] * 99)
    made(tmp_path / "weak drafter", [ok], evals=[dict(tau=1.05, sim_tau=1.2)])
    made(tmp_path / "few cosines", [dict(ok, grad_cos=-0.9)] * 19)
    made(tmp_path / "old nan", [dict(loss=float("inf"))] + [dict(loss=3.0 - i / 100) for i in range(201)])
    for p in tmp_path.iterdir():
        assert rules(p) == set(), p.name


def test_applied_noise_counts_not_the_scheduled_one(tmp_path):
    made(tmp_path / "run", [dict(ok, noise=0.1, noise_applied=0.0)] * 30, config=dict(noise=dict(strength=0.1)))
    assert rules(tmp_path / "run") == {"noise"}


def test_a_swinging_cosine_is_whiplash_although_its_mean_is_not(tmp_path):
    made(tmp_path / "turns", [dict(ok, grad_cos=c) for c in (0.6, -0.4, 0.5, 0.3) * 10])
    made(tmp_path / "noisy", [dict(ok, grad_cos=c) for c in (0.3, -0.12, 0.2, 0.1) * 10])
    assert rules(tmp_path / "turns") == {"whiplash"} and rules(tmp_path / "noisy") == set()


def test_growth_of_graphs_and_of_memory(tmp_path):
    def held(f):
        return [dict(ok, shapes=1, recompiled=0, reserved_gb=f(i)) for i in range(80)]

    made(tmp_path / "graphs", [dict(ok, shapes=1, recompiled=i) for i in range(8)])
    made(tmp_path / "memory", held(lambda i: 2 + 0.1 * (i // 8)))
    made(tmp_path / "first evaluation", held(lambda i: 2 + (i > 60)))
    made(tmp_path / "start-up", held(lambda i: 2 + 0.1 * min(i, 30)))
    assert rules(tmp_path / "graphs") == rules(tmp_path / "memory") == {"growth"}
    assert "7 graphs compiled" in repr(diagnose(tmp_path / "graphs")) and "from 2.5 to 2.9 GiB" in repr(diagnose(tmp_path / "memory"))
    assert rules(tmp_path / "first evaluation") == rules(tmp_path / "start-up") == set()


def test_growth_counts_the_last_attempt_alone(tmp_path):
    made(tmp_path, [dict(ok, shapes=3)] * 9, end="stopped")
    log = made(tmp_path, end=None)
    for s in range(10, 20):
        log.step(s, **ok, shapes=1)
    log.close("finished")
    assert rules(tmp_path) == set()


def test_starving_names_the_side(tmp_path):
    made(tmp_path, [dict(ok, drafter_wait=0.01, target_wait=0.6)] * 10)
    (found,) = diagnose(tmp_path)
    assert found["text"].startswith("The target side starves") and "60%" in found["text"] and status(tmp_path).bottleneck == "drafter-bound"


def test_stalled_needs_a_fresh_heartbeat_and_an_old_step(tmp_path):
    log = EventLog(tmp_path, steps=9, beat=60)
    with log.stage("train"):
        for s in range(1, 5):
            log.step(s, loss=1.0)
        now = time.time()
        assert rules(tmp_path, now=now) == set()
        assert rules(tmp_path, now=now + 40) == {"heartbeat"}, "nothing beats: another fault"
        log.emit("warning", text="alive")  # any event proves life
        state_t = log.state["t"]
        log.state["step"]["t"] -= 40
        log.beat()
        assert rules(tmp_path, now=state_t) == {"stalled"}
        log.pause()
        assert rules(tmp_path, now=state_t) == set()
    log.close()


def test_a_slow_stage_is_told_against_its_usual_time(tmp_path):
    log = EventLog(tmp_path, beat=60)
    log.usual = {"load target": 2.0}
    with log.stage("load target"):
        t = log.state["t"]
        assert rules(tmp_path, now=t + 9) == set()
        log.state["open"]["load target"]["t"] -= 60
        log.beat()
        assert rules(tmp_path, now=t + 1) == {"stalled"} and "usually 2.0 s" in format_status(status(tmp_path, now=t + 1))
    log.close()


def test_fallbacks_are_told(tmp_path):
    log = made(tmp_path, [ok], end=None)
    assert rules(tmp_path) == set()
    log.fallback("cuda:1", "cudagraph", "compiled", RuntimeError("capture"))
    assert rules(tmp_path) == {"fallback"} and "cudagraph -> compiled" in format_status(status(tmp_path))
    log.close()


def test_the_same_stage_three_times_names_a_simpler_runner(tmp_path):
    bad = dict(stages=[("load target", True), ("capture drafter 0", False)], end="failed")
    made(tmp_path / "a", **bad)
    made(tmp_path / "b", **bad)
    assert "same_stage" not in rules(tmp_path / "b")
    made(tmp_path / "b", **bad)  # a second attempt of b is the third failure
    found = next(f for f in diagnose(tmp_path / "b") if f["rule"] == "same_stage")
    assert "'capture drafter 0'" in found["text"] and "without CUDA graphs" in found["try"]
    assert "same_stage" not in rules(tmp_path / "a"), "a was the first failure when it ended"
    made(tmp_path / "c", steps=[ok])
    made(tmp_path / "d", **bad)
    assert "same_stage" not in rules(tmp_path / "d"), "a good run between breaks the row"
    made(tmp_path / "e", stages=[("warm drafter 0", False)], end="failed")
    made(tmp_path / "f", **bad)
    assert "same_stage" not in rules(tmp_path / "f"), "another stage breaks it too"


# runs and compare


def test_runs_tell_what_changed_and_how_they_ended(tmp_path):
    made(tmp_path / "b first", [ok] * 2, config=dict(gamma=7, loss={"ce": 1.0}))
    made(
        tmp_path / "a second", [ok] * 2, config=dict(gamma=None, loss={"ce": 0.5, "tv": 0.5}), stages=[("load target", False)], end="failed"
    )
    (tmp_path / "no run").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/events.jsonl").write_text("{")
    table = runs(tmp_path)
    assert [r["run"] for r in table] == ["b first", "a second"] and table[0]["changed"] == []
    assert table[1]["changed"] == ["gamma: 7 -> None", "loss.ce: 1.0 -> 0.5", "loss.tv: unset -> 0.5"]
    assert (
        table[1]["outcome"] == "failed"
        and table[1]["stage"] == "load target"
        and table[1]["to_failure"]
        and table[1]["error"] == "RuntimeError"
    )
    assert table[0]["to_failure"] is None and len(repr(table).splitlines()) == 3
    (tmp_path / "empty").mkdir()
    assert repr(runs(tmp_path / "empty")) == "(none)"


def test_a_changed_version_is_a_change(tmp_path):
    made(tmp_path / "a", [ok])
    made(tmp_path / "b", [ok])
    events = (tmp_path / "a/events.jsonl").read_text()
    torch = json.loads(events.splitlines()[0])["environment"]["versions"]["torch"]
    (tmp_path / "a/events.jsonl").write_text(events.replace(f'"torch":"{torch}"', '"torch":"2.11.0"'))
    (tmp_path / "a/heartbeat").unlink()
    assert runs(tmp_path)[1]["changed"] == [f"torch: 2.11.0 -> {torch}"]


def test_compare_uses_common_steps(tmp_path):
    made(tmp_path / "a", [dict(loss=1.0)] * 30, evals=[dict(tau=2.0)])
    made(tmp_path / "b", [dict(loss=2.0)] * 10, config=dict(lr=1.0))
    pair = compare(tmp_path / "a", tmp_path / "b")
    assert pair["rows"]["loss @10"] == [1.0, 2.0] and pair["rows"]["tau"] == [2.0, None] and pair["changed"] == ["lr: unset -> 1.0"]
    assert "differs: lr" in repr(pair)
    made(tmp_path / "c", [])
    assert compare(tmp_path / "a", tmp_path / "c")["rows"]["loss"] == [None, None]


def test_eta_ignores_a_long_pause():
    recent = [[s, s * 1.0, 1.0] for s in range(20)] + [[20, 5000.0, 1.0], [21, 5001.0, 1.0]]
    assert st._per_step(recent) == 1.0 and st._per_step(recent[:1]) is None and st._per_step([]) is None


# lines for grep, asks


def test_watch_in_a_pipe_says_each_event_once_and_each_step_in_a_line(tmp_path, capsys):
    log = EventLog(tmp_path, config=dict(), steps=3)
    def live():
        for i in range(1, 4):
            log.step(i, loss=1.0, drafter_tok_s=7e4)
            time.sleep(.05)
        log.warning("look here")
        log.end("finished", step=3)
        log.close()
    worker = threading.Thread(target=live)
    worker.start()
    assert main_status([str(tmp_path), "--watch", "--every", ".02"]) == 0
    worker.join()
    out = capsys.readouterr().out
    assert out.count(" warning: look here") == 2 and "last warning: look here" in out  # its own line and the last block
    assert "step=3/3" in out and "tok/s=70000" in out and "run_end: finished" in out


def test_ask_leaves_a_request_for_the_run(tmp_path, capsys):
    log = EventLog(tmp_path, config=dict(), steps=3)
    assert main_status([str(tmp_path), "--ask", "checkpoint"]) == 0
    log.beat()
    assert log.take_asked() == ["checkpoint"]
    log.close()
    with pytest.raises(SystemExit):
        main_status([str(tmp_path), "--ask", "explode"])


def test_watch_of_no_run_is_bad_input(tmp_path, monkeypatch, capsys):
    assert main_status([str(tmp_path), "--watch"]) == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main_status([str(tmp_path), "--watch"]) == 2


@pytest.mark.parametrize("kind", [*KINDS, "unheard"])
def test_any_event_is_one_line_of_text(kind):
    for e in (dict(kind=kind), dict(kind=kind, t="x", step=[1], elapsed="long", text="a\nb" * 500, error=3, bytes=None, reason={})):
        assert "\n" not in st.event_line(e) and len(st.event_line(e)) < 400 and st.event_level(e) in ("info", "warning", "error")


def test_roles_come_from_the_runs_first_line(tmp_path):
    log = EventLog(tmp_path, devices=dict(target=["cuda:0"], drafter=["cuda:0", "cuda:1"]))
    log.gauge(devices=[dict(device="cuda:0", memory_gb=1.0), dict(device="cuda:1", memory_gb=2.0, role="own")])
    log.beat()
    assert [d["role"] for d in status(tmp_path, probe=False).devices] == ["target + drafter", "own"]
    log.close()


def test_an_answer_of_nvidia_smi_that_is_no_table_is_no_answer(tmp_path, monkeypatch):
    from dflash_nb.gpus import _ask_smi

    assert _ask_smi is st._ask_smi
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'Failed to initialize NVML: caf\\351\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert st._smi() == []
