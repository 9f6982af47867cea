"Faults: failures in any thread at any moment, full disks, killed processes, interrupts, runs side by side; nothing lost, nothing left."
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from test_trainer import CFG, TARGET, At, final, make, one_thread, resume, same_end  # noqa: F401

from dflash_nb import callbacks, checkpoint, events, pipeline, sides, threads
from dflash_nb import trainer as module
from dflash_nb.callbacks import EVENTS, Callback, ProgressCB, TrainError
from dflash_nb.checkpoint import load_state, scan_states
from dflash_nb.config import ConfigError, DflashError
from dflash_nb.events import latest, read_events

ROOT, STEPS, LIMIT = Path(__file__).resolve().parents[1], 8, 10.
RUN = CFG | dict(steps=STEPS)
SHAPES = [(1, 1), (3, 2), (3, 1), (1, 2)]


def devices(shape):
    "Target threads and drafters on the CPU; None: one thread for both."
    return "auto" if shape is None else dict(target=["cpu"] * shape[0], drafter=["cpu"] * shape[1])


def spread(first, *others, slow=()):
    "All combinations: each of `first` but the `slow` ones with one combination of the others is quick, by turns; the rest is slow."
    rest = list(itertools.product(*others))
    quick = lambda i, j, x: j == i % len(rest) and x not in slow  # noqa: E731
    return [pytest.param(x, *r, marks=() if quick(i, j, x) else pytest.mark.slow, id="-".join(map(str, (x, *r))).replace(" ", ""))
            for i, x in enumerate(first) for j, r in enumerate(rest)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "The run that nobody touched."
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("whole") / "run"
    assert make(path, RUN).fit().outcome == "finished"
    return path


def left():
    "Threads of the library that live; an ending one gets a moment."
    until = time.monotonic() + 2
    while (names := [x.name for x in threading.enumerate() if x.name.startswith("dflash")]) and time.monotonic() < until:
        time.sleep(.01)
    return names


def run(t, background=False):
    "Fit to its end, in this thread or in the background."
    t.fit(block=not background)
    return t.wait(60)


def kinds(run_dir, kind):
    return [e for e in read_events(run_dir) if e["kind"] == kind]


def published(run_dir):
    "Step of the last complete checkpoint; one that is whole, but not yet pointed to, is not counted."
    root = run_dir / "checkpoints"
    return load_state(root).step if scan_states(root)[0] else 0


def goes_on(run_dir, whole, shape=None):
    "A resume from the directory alone ends with the bits of the run that nobody touched."
    done = published(run_dir)
    t = resume(run_dir, devices=devices(shape))
    assert t.step == done and t.fit().outcome == "finished" and not left()
    assert [e["step"] for e in latest(read_events(run_dir))] == list(range(1, STEPS + 1))
    assert same_end(whole, run_dir, STEPS)


def until(what, limit=LIMIT):
    "Wait until `what()`."
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(.005)


# -- an exception in each kind of thread, at each moment -------------------------------------------------------------------

class Planted(RuntimeError):
    pass


class Fault:
    "Raises once at a moment: `start`, a step (0-based), or a place of the lead in which another thread fails meanwhile."
    def __init__(self, monkeypatch):
        self.patch, self.armed, self.spent = monkeypatch.setattr, threading.Event(), False

    def go(self):
        if not self.spent:
            self.spent = True
            raise Planted("planted")

    def wrap(self, thing, name, when):
        "Before `thing.name(...)`: fail if `when(*args)`."
        real = getattr(thing, name)

        def call(*a, **k):
            if when(*a, **k):
                self.go()
            return real(*a, **k)
        self.patch(thing, name, call)

    def arm(self, thing, name, step):
        "While the lead is inside `thing.name` at `step`, let the armed thread fail first."
        real = getattr(thing, name)

        def call(*a, **k):
            if not self.armed.is_set():
                self.armed.set()
                until(lambda: self.spent)
            return real(*a, **k)
        self.patch(thing, name, call)


def step_of(batch):
    return batch.index


def plant_target(t, fault, moment):
    "In whichever target thread reads that step; returns the step in which it fails (1-based), None where several may be."
    step = dict(first=0, mid=4, checkpoint=3, eval=4, callback=4).get(moment)
    if moment == "start":
        fault.wrap(t.line.readers[-1], "read", lambda batch: True)
        return 1
    if moment == "checkpoint":
        fault.arm(module, "save_state", step)
    if moment == "eval":
        fault.arm(module, "sim_tau", step)
    if moment == "callback":
        t.callbacks.append(At(4, lambda t: (fault.armed.set(), until(lambda: fault.spent))))
    if moment in ("first", "mid"):
        fault.armed.set()
    warm = itertools.count()

    def when(batch):
        if batch.index != step or (step == 0 and next(warm) < len(t.line.readers)):
            return False
        return fault.armed.wait(LIMIT)
    for r in t.line.readers:
        fault.wrap(r, "read", when)
    return step + 1


def plant_drafter(t, fault, moment):
    "In the last drafter's thread."
    side = t.line.sides[-1]
    if moment == "start":
        fault.wrap(side, "warm_up", lambda *a: True)
        return 1
    step = dict(first=0, mid=4, update=4)[moment]
    if moment == "update":
        fault.wrap(side, "update", lambda out, s: s == step)
    else:
        fault.wrap(side, "micro", lambda inputs, s, micro: s == step)
    return step + 1


def plant_lead(t, fault, moment):
    "In the thread that runs the loop."
    if moment == "start":
        fault.wrap(t.line, "start", lambda *a: True)
        return 1
    if moment in ("first", "mid"):
        step = dict(first=0, mid=4)[moment]
        fault.wrap(t, "train_step", lambda: t.step == step)
        return step + 1
    if moment == "checkpoint":
        fault.wrap(checkpoint, "optimizer_tensors", lambda *a: t.step == 6)
        return 7
    if moment == "eval":
        fault.wrap(module, "sim_tau", lambda *a, **k: t.step == 4)
        return 5
    cb = Callback()
    setattr(cb, moment, lambda t: fault.go())
    t.callbacks.append(cb)
    return None


PLANT = dict(target=plant_target, drafter=plant_drafter, lead=plant_lead)
MOMENTS = dict(target=("start", "first", "mid", "checkpoint", "eval", "callback"), drafter=("start", "first", "mid", "update"),
               lead=("start", "first", "mid", "checkpoint", "eval", *EVENTS))
CASES = [(kind, moment) for kind, ms in MOMENTS.items() for moment in ms]


TESTED = ["lead-before_start", "lead-before_fit", "lead-after_eval", "lead-after_fit"]  # quick in test_trainer, with one thread


@pytest.mark.parametrize("case,shape,background", spread(["-".join(c) for c in CASES], SHAPES, [False, True], slow=TESTED))
def test_an_exception_in_a_thread(case, shape, background, whole, tmp_path, monkeypatch):
    "One planted exception: named, logged, nothing left, and the run goes on exactly."
    (kind, moment), path = case.split("-"), tmp_path / "r"
    t = make(path, RUN, devices=devices(shape))
    fault = Fault(monkeypatch)
    step = PLANT[kind](t, fault, moment)
    start = time.monotonic()
    with pytest.raises(TrainError, match="planted") as e:
        run(t, background)
    assert time.monotonic() - start < LIMIT and not left() and t.log is None
    thread = rf"dflash-{kind}\d:cpu" if kind != "lead" else "dflash-lead" if background and moment != "before_start" else "MainThread"
    where = rf"at step \d on cpu, thread {thread}: Planted"
    if moment in EVENTS:
        e.match(rf"callback Callback.{moment} {where}")
    elif (kind, moment) in (("lead", "checkpoint"), ("lead", "eval")):
        e.match(rf"callback {dict(checkpoint='CheckpointCB', eval='EvalCB')[moment]}.after_step {where}")
    else:
        e.match(rf"step {step} on cpu, thread {thread}, rows \[\d+, \d+\]: Planted")
    assert t.record.outcome == "failed" or moment == "after_fit"
    event = kinds(path, "exception")[0]
    assert "planted" in event["traceback"] and event["device"] in ("cpu", None) and (step is None or event["step"] == step)
    assert kind == "lead" or event["thread"].startswith(f"dflash-{kind}")
    assert kinds(path, "run_end")[-1]["outcome"] == t.record.outcome
    monkeypatch.undo()
    goes_on(path, whole, shape if background else None)


@pytest.mark.parametrize("name,background", spread(["target1", "lead", "drafter0", "watchdog", "progress"], [False, True]))
def test_a_thread_that_cannot_be_started(name, background, whole, tmp_path, monkeypatch):
    "The system refuses a thread: the run fails in words, or is none the worse, and can be begun again."
    real = threading.Thread.start

    def start(self):
        if self.name.startswith(f"dflash-{name}"):
            raise RuntimeError("can't start new thread")
        return real(self)
    if name == "lead" and not background:
        pytest.skip("a blocking fit has no lead")
    t = make(tmp_path / "r", RUN, [ProgressCB(show="lines")], devices=devices((2, 1)))
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises((TrainError, RuntimeError), match="can't start new thread"):
        run(t, background)
    monkeypatch.undo()
    assert not left() and t.log is None and kinds(tmp_path / "r", "run_end")[-1]["outcome"] == "failed"
    assert run(t, background).outcome == "finished" and same_end(whole, tmp_path / "r", STEPS)


def test_own_modes_that_fail_in_a_thread(whole, tmp_path, monkeypatch):
    "A device that cannot be entered: the thread's jobs fail, nobody waits for them."
    t, real = make(tmp_path / "r", RUN, devices=devices((1, 2))), pipeline.own_modes

    def modes(device, *a, **k):
        if threading.current_thread().name.startswith("dflash-drafter1"):
            raise Planted("planted")
        return real(device, *a, **k)
    monkeypatch.setattr(pipeline, "own_modes", modes)
    with pytest.raises(TrainError, match="step 1 on cpu, thread dflash-drafter1:cpu.*Planted"):
        t.fit()
    monkeypatch.undo()
    assert not left()
    goes_on(tmp_path / "r", whole, (1, 2))


def test_a_failure_while_paused_ends_the_pause(whole, tmp_path, monkeypatch):
    t = make(tmp_path / "r", RUN, [At(3, lambda t: t.pause())], devices=devices((1, 1)))
    fault = Fault(monkeypatch)
    fault.wrap(t.line.readers[0], "read", lambda batch: batch.index >= 3 and (until(lambda: t.stage == "paused") or True))
    with pytest.raises(TrainError, match="step 4 on cpu, thread dflash-target0:cpu.*planted"):
        t.fit()
    assert not left()
    goes_on(tmp_path / "r", whole)


def test_two_failures_at_once_are_one_error_and_no_hang(tmp_path, monkeypatch):
    t = make(tmp_path / "r", RUN, devices=devices((3, 2)))
    for thing in (*t.line.readers, *t.line.sides):
        name = "read" if hasattr(thing, "read") else "micro"
        Fault(monkeypatch).wrap(thing, name, lambda x, step=None, micro=None: (x.index if step is None else step) >= 3)
    with pytest.raises(TrainError, match="planted"):
        t.fit()
    assert not left() and len(kinds(tmp_path / "r", "exception")) == 1


@pytest.mark.parametrize("fails", ["draw", "report", "beat"])
def test_a_face_that_fails_is_said_once_and_stops_nothing(fails, whole, tmp_path, monkeypatch):
    "The progress thread, the watchdog's report, the heartbeat."
    slow = [At(step, lambda t: time.sleep(.5)) for step in (2, 5)]
    t = make(tmp_path / "r", RUN, [ProgressCB(every=.02, show="lines"), *slow], devices=devices((1, 1)), stall=.1)

    def boom(*a, **k):
        raise Planted("planted")
    if fails == "draw":
        monkeypatch.setattr(callbacks, "progress_line", boom)
    if fails == "report":
        monkeypatch.setattr(threads, "all_stacks", boom)
    if fails == "beat":
        monkeypatch.setattr(events._Beat, "write", boom)
    assert t.fit().outcome == "finished" and not left() and same_end(whole, tmp_path / "r", STEPS)
    said = [e["text"] for e in kinds(tmp_path / "r", "warning") if "planted" in e["text"]]
    assert len(said) == 1 and dict(draw="dflash-progress", report="watchdog", beat="dflash-heartbeat")[fails] in said[0]


# -- a full disk -----------------------------------------------------------------------------------------------------------

def full(*a, **k):
    raise OSError(28, "No space left on device")


def fill_log(t):
    "From here on the event log stands on a device that is full."
    os.dup2(os.open("/dev/full", os.O_WRONLY), t.log._file.fd)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_events_on_a_full_disk_stop_the_run(background, whole, tmp_path):
    t = make(tmp_path / "r", RUN, [At(4, fill_log)], devices=devices((1, 2)))
    with pytest.raises(DflashError, match="events of .* could not be written .*No space left.*from_run"):
        run(t, background)
    assert t.record.outcome == "failed" and t.step == 4 and not left()
    assert read_events(tmp_path / "r").bad == 0
    goes_on(tmp_path / "r", whole, (1, 2))


@pytest.mark.parametrize("name,background", spread(["save_file", "_json", "_sync", "write_text"], [False, True]))
def test_a_checkpoint_on_a_full_disk(name, background, whole, tmp_path, monkeypatch):
    "Weights, moments, state.json, the flush, the pointer: the checkpoint before is intact."
    t = make(tmp_path / "r", RUN, [At(5, lambda t: monkeypatch.setattr(checkpoint, name, full))], devices=devices((1, 1)))
    with pytest.raises(DflashError, match="No space left"):
        run(t, background)
    monkeypatch.undo()
    assert t.record.outcome == "failed" and not left() and "No space left" in kinds(tmp_path / "r", "exception")[0]["text"]
    goes_on(tmp_path / "r", whole, (3, 2))


@pytest.mark.parametrize("where", spread(["run.json", "events.jsonl", "environment.json", "data.safetensors", "config.json", "heartbeat"],
                                         slow=["data.safetensors", "config.json", "heartbeat"]))
def test_a_run_that_finds_no_room_to_begin(where, whole, tmp_path, monkeypatch):
    "Refused in words, nothing left open; with room again the same trainer begins."
    json_, open_, mine = events.write_json, events._open, {}

    def write(path, value):
        return full() if Path(path).name == where else json_(path, value)

    def opened(path, *a):
        return full() if Path(path).name == where else open_(path, *a)
    for thing, name, fn in ((module, "write_json", write), (events, "write_json", write), (events, "_open", opened)):
        monkeypatch.setattr(thing, name, fn)
    if where == "data.safetensors":
        monkeypatch.setattr(module, "store_data", full)
    t = make(tmp_path / "r", RUN, devices=devices((1, 1)), **mine)
    with pytest.raises(DflashError, match="No space left.*room"):
        t.fit()
    assert not left() and t.log is None
    monkeypatch.undo()
    assert t.fit().outcome == "finished" and same_end(whole, tmp_path / "r", STEPS)


# -- killed processes ------------------------------------------------------------------------------------------------------

LONG, LONG_STEPS = RUN | dict(steps=30, checkpoint_every=2, eval_every=10), 30

# Imports once, then a fork for each job: a JSON line {"run", "shape", "how"} in, "pid N" out; the child trains and ends as a script does.
SERVER = """
import json, os, sys, time
sys.path.insert(0, "tests")
import torch
from test_faults import LONG, TARGET, devices, make, resume
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid:
        print("pid", pid, flush=True)
        print("end", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    torch.set_num_threads(1)
    os.dup2(os.open(job["run"] + ".out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    sys.stdin = open(os.devnull)
    go_on = os.path.exists(job["run"] + "/run.json")
    shape = job["shape"] and tuple(job["shape"])
    t = resume(job["run"], devices=devices(shape)) if go_on else make(job["run"], LONG, devices=devices(shape))
    how = job["how"]
    t.fit(block=how == "fit")
    if how == "wait":
        t.wait()
    if how == "sleep":
        while t.record is None:
            time.sleep(.01)
    if how != "exit":
        os._exit(0)  # what follows a run that has ended is slow and not ours
    sys.exit()
"""


class Server:
    "Real training processes, one at a time, without an import each."
    def __init__(self):
        env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.proc = subprocess.Popen([sys.executable, "-c", SERVER], cwd=ROOT, env=env, **pipes)

    def start(self, **job):
        self.proc.stdin.write(json.dumps(job) + "\n")
        self.proc.stdin.flush()
        return int(self._read("pid"))

    def _read(self, word):
        line = self.proc.stdout.readline().split()
        assert line and line[0] == word, line
        return line[1]

    def end(self):
        "Exit code of the child: negative for a signal."
        start = time.monotonic()
        code = int(self._read("end"))
        assert time.monotonic() - start < LIMIT, "the killed process hung"
        return code


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.proc.stdin.close()
    s.proc.wait(10)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("long") / "run"
    make(path, LONG).fit()
    return path


def shoot(pid, what, rng):
    "One or two signals; a process that has ended by itself is none to shoot."
    try:
        os.kill(pid, getattr(signal, what.split("+")[0]))
        if "+" in what:
            time.sleep(rng.uniform(0, .05))
            os.kill(pid, getattr(signal, what.split("+")[1]))
    except ProcessLookupError:
        pass


def checked(run_dir, code, what):
    "What a killed run left: a log that parses, each step on disk in the log, a saved end where the end was asked for."
    log = read_events(run_dir)
    assert log.bad == 0 and (not log.torn or what == "SIGKILL")
    good, steps = scan_states(run_dir / "checkpoints")[0], {e["step"] for e in latest(log)}
    assert all(set(range(1, s + 1)) <= steps for s in good), (sorted(good), sorted(steps))
    asked = what in ("SIGINT", "SIGTERM") and any(e["kind"] == "stop" for e in log)
    if asked and [e for e in log if e["kind"] in ("run_start", "run_end")][-1]["kind"] == "run_end" and steps:
        assert max(good) == max(steps) and code in (0, 1, -signal.SIGTERM, -signal.SIGINT), (good, steps, code)
    assert code != -signal.SIGKILL or what == "SIGKILL"
    return published(run_dir)


def starts(run_dir):
    return [e["step"] for e in kinds(run_dir, "run_start")]


def kill_and_go_on(server, long, path, shots, seed):
    "Shots at random moments of one run after another; each attempt goes on from the last complete checkpoint."
    rng, number, hit = random.Random(seed), 0, 0
    for what, how in shots:
        path_now = path / f"r{number}"
        shape, before = rng.choice([*SHAPES, None]), checked(path_now, 0, "SIGKILL") if path_now.exists() else 0
        began = len(starts(path_now))
        pid = server.start(run=str(path_now), shape=shape, how=how)
        time.sleep(rng.uniform(0, .6))
        shoot(pid, what, rng)
        code = server.end()
        hit += code != 0
        if not (path_now / "run.json").exists():
            continue
        checked(path_now, code, what)
        assert starts(path_now)[began:] in ([], [before]), starts(path_now)
        if max(scan_states(path_now / "checkpoints")[0], default=0) == LONG_STEPS:
            number += 1
    for n in range(number + 1):
        run_dir = path / f"r{n}"
        if not (run_dir / "run.json").exists():
            continue
        t = resume(run_dir)
        assert t.fit().outcome == "finished" and same_end(long, run_dir, LONG_STEPS)
        assert [e["step"] for e in latest(read_events(run_dir))] == list(range(1, LONG_STEPS + 1)) and read_events(run_dir).bad == 0
    return hit


SHOTS = [("SIGINT", "fit"), ("SIGTERM", "wait"), ("SIGKILL", "fit"), ("SIGINT+SIGINT", "fit"), ("SIGTERM", "sleep")]


def test_five_kills_at_random_moments(server, long, tmp_path):
    kill_and_go_on(server, long, tmp_path, SHOTS, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments(server, long, tmp_path, seed):
    "45 in all."
    rng = random.Random(seed)
    kinds = ["SIGINT", "SIGTERM", "SIGKILL", "SIGINT+SIGINT", "SIGTERM+SIGINT"]
    shots = [(what, how) for what in kinds for how in ("fit", "wait", "sleep")]
    rng.shuffle(shots)
    kill_and_go_on(server, long, tmp_path, shots, seed)


@pytest.mark.parametrize("how,what", [("sleep", "SIGTERM"), pytest.param("wait", "SIGTERM", marks=pytest.mark.slow), ("exit", None)])
def test_a_background_run_saves_before_its_process_ends(how, what, server, long, tmp_path):
    "SIGTERM while the script does something else, while it waits; a script that comes to its end."
    run_dir = tmp_path / "r"
    pid = server.start(run=str(run_dir), shape=(1, 1), how=how)
    if what:
        until(lambda: len(kinds(run_dir, "step")) >= 3)
        shoot(pid, what, random)
    code = server.end()
    end = kinds(run_dir, "run_end")[-1]
    assert end["outcome"] == "stopped" and checked(run_dir, code, what or "SIGTERM") == end["step"] < LONG_STEPS
    assert code == (-signal.SIGTERM if how == "sleep" else 0) and end["lost"] == 0
    assert kinds(run_dir, "stop")[-1]["reason"] == ("the process ends" if how == "exit" else "SIGTERM")
    t = resume(run_dir)
    assert t.step == end["step"] and t.fit().outcome == "finished" and same_end(long, run_dir, LONG_STEPS)


# -- interrupts ------------------------------------------------------------------------------------------------------------

def ctrl_c(times=1, after=0., gap=.05, handled=True):
    "A real Ctrl-C to this process, from another thread; `handled`: once a run listens for it."
    def send():
        time.sleep(after)
        if handled:
            until(lambda: isinstance(signal.getsignal(signal.SIGINT), module.Signals))
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(gap)
    thread = threading.Thread(target=send)
    thread.start()
    return thread


class Hold(Callback):
    "Holds the run after a step until it is let go."
    def __init__(self, step):
        self.step, self.here, self.go = step, threading.Event(), threading.Event()

    def after_step(self, trainer):
        if trainer.step == self.step:
            self.here.set()
            until(self.go.is_set, 30)


def test_an_interrupted_wait_leaves_the_run_alone_and_a_second_fit_out(whole, tmp_path):
    "A second Ctrl-C leaves wait() at once; the run lives on to its step edge, and until then no other fit may begin."
    hold = Hold(4)
    t = make(tmp_path / "r", RUN, [hold], devices=devices((1, 1))).fit(block=False)
    hold.here.wait(LIMIT)
    sent = ctrl_c(2)
    with pytest.raises(KeyboardInterrupt):
        t.wait()
    sent.join()
    for _ in range(2):  # the trap: an interrupted join makes Python 3.12 and older take a live thread for a dead one
        with pytest.raises(ConfigError, match="running already"):
            t.fit()
        assert t.wait(.05) is None
    hold.go.set()
    assert t.wait(LIMIT).outcome == "stopped" and t.record.reason == "SIGINT" and not left()
    assert t.fit().outcome == "finished" and same_end(whole, tmp_path / "r", STEPS)


def test_threads_that_outlive_a_second_interrupt_keep_the_next_fit_out(whole, tmp_path, monkeypatch):
    "fit is left at once although a drafter is busy; its thread is named, and when it has ended the run goes on exactly."
    t, inside, go = make(tmp_path / "r", RUN, devices=devices((1, 2))), threading.Event(), threading.Event()
    real = t.line.sides[1].micro

    def micro(inputs, step, micro):
        if step == 5:
            inside.set()
            go.wait(30)
        return real(inputs, step, micro)
    monkeypatch.setattr(t.line.sides[1], "micro", micro)
    sender = threading.Thread(target=lambda: (inside.wait(LIMIT), ctrl_c(2).join()))
    sender.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        t.fit()
    sender.join()
    assert time.monotonic() - start < LIMIT and t.record.outcome == "stopped" and t.step == 5 and t.log is None
    assert any("dflash-drafter1:cpu did not end" in e["text"] for e in kinds(tmp_path / "r", "warning"))
    with pytest.raises(ConfigError, match="threads of the fit before have not ended: dflash-drafter1:cpu"):
        t.fit()
    with pytest.raises(ConfigError, match="middle of a step"):
        t.checkpoint()
    monkeypatch.undo()
    go.set()
    assert not left() and not t.line.alive() and all(p.grad is None for s in t.line.sides for p in s.drafter.parameters())
    assert t.fit().outcome == "finished" and any("goes on from the checkpoint of step 4" in n for n in t.notes)
    assert same_end(whole, tmp_path / "r", STEPS) and t.history.step.tolist() == list(range(1, STEPS + 1))


@pytest.mark.parametrize("seed", spread(range(6), slow=range(1, 6)))
def test_a_storm_of_interrupts_closes_everything(seed, whole, tmp_path):
    "Six Ctrl-C within moments, whatever they break into: no thread, no open log, and the directory goes on exactly."
    rng = random.Random(seed)
    shoot = At(3, lambda t: senders.append(ctrl_c(6, rng.uniform(0, .05), rng.uniform(0, .02))))
    t = make(tmp_path / "r", RUN, [shoot], devices=devices(SHAPES[seed % 4]))
    senders, old = [], signal.signal(signal.SIGINT, lambda *a: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            t.fit()
            raise KeyboardInterrupt  # stopped at an edge before the second one came
        senders[0].join()
    finally:
        signal.signal(signal.SIGINT, old)
    assert not left() and t.log is None and t._thread is None and t.record.outcome == "stopped"
    goes_on(tmp_path / "r", whole)


def test_ctrl_c_while_a_background_run_starts(whole, tmp_path, monkeypatch):
    t = make(tmp_path / "r", RUN, devices=devices((1, 1)))
    real = t.line.sides[0].warm_up
    monkeypatch.setattr(t.line.sides[0], "warm_up", lambda inputs: (sent.append(ctrl_c(handled=False)), time.sleep(.2), real(inputs)))
    sent = []
    with pytest.raises(KeyboardInterrupt):
        t.fit(block=False)
    sent[0].join()
    assert t.wait(LIMIT).outcome == "stopped" and t.record.step == 0 and not left()
    monkeypatch.undo()
    assert t.fit().outcome == "finished" and same_end(whole, tmp_path / "r", STEPS)


def test_wait_inside_the_run_is_refused(tmp_path):
    seen = []
    t = make(tmp_path / "r", RUN | dict(steps=2), [At(1, lambda t: seen.append(pytest.raises(ConfigError, t.wait)))]).fit(block=False)
    assert t.wait(LIMIT).outcome == "finished" and "wait for itself" in str(seen[0].value)


def test_wait_after_a_second_fit_gives_its_record(tmp_path):
    t = make(tmp_path / "r", RUN, [At(3, lambda t: t.stop())]).fit(block=False)
    assert t.wait(LIMIT).outcome == "stopped" and t.fit().outcome == "finished" and t.wait().outcome == "finished"


# -- a real kernel ---------------------------------------------------------------------------------------------------------

SETUP = """
import sys, threading, torch; sys.path.insert(0, "tests"); torch.set_num_threads(1)
from test_faults import LONG, devices, make, resume
cfg = LONG | dict(steps=100_000, checkpoint_every=100_000, eval_every=100_000)
dflash = lambda: [x.name for x in threading.enumerate() if x.name.startswith("dflash")]
"""


class Kernel:
    "An ipykernel of its own; `run` gives what the cell printed, or the error's name."
    def __init__(self):
        from jupyter_client.manager import KernelManager
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
        self.manager.start_kernel(cwd=str(ROOT), env=env, stderr=subprocess.DEVNULL)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(60)
        self.run(SETUP, 60)

    def run(self, code, limit=20, meanwhile=None):
        out, thread = [], threading.Thread(target=meanwhile or (lambda: None))
        def hook(m):
            out.append(m["content"].get("text", "") if m["msg_type"] == "stream" else m["content"].get("ename", ""))
        thread.start()
        try:
            self.client.execute_interactive(code, output_hook=hook, timeout=limit, stop_on_error=False)
        finally:
            thread.join()
        return "".join(out).split()

    def interrupt(self, run_dir, times=1):
        "Ctrl-C once the run has done three steps."
        def send():
            until(lambda: len(kinds(run_dir, "step")) >= 3, 20)
            for _ in range(times):
                self.manager.interrupt_kernel()
                time.sleep(.02)
        return send

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("ipykernel")
    made = []
    yield made
    for k in made:
        k.close()


@pytest.fixture
def kernel(kernels):
    "The kernel that lives, or a new one."
    if not kernels or not kernels[-1].manager.is_alive():
        kernels.append(Kernel())
    return kernels[-1]


def saved_end(run_dir):
    "The step at which a run ended by a stop, saved there."
    end = kinds(run_dir, "run_end")[-1]
    assert end["outcome"] == "stopped" and max(scan_states(run_dir / "checkpoints")[0]) == end["step"] >= 3
    return end["step"]


def test_interrupts_in_a_real_kernel(kernel, tmp_path):
    "In a blocking cell, twice in one, inside wait(), and while the cell awaits the trainer."
    show = "print(t.record.outcome, t.step, dflash())"
    a, b, c, d = (tmp_path / n for n in "abcd")
    said = kernel.run(f"t = make({str(a)!r}, cfg, devices=devices((1, 1))); r = t.fit(); {show}", meanwhile=kernel.interrupt(a))
    assert said == ["stopped", str(saved_end(a)), "[]"]
    said = kernel.run(f"t = make({str(b)!r}, cfg, devices=devices((1, 2)))\nt.fit()", meanwhile=kernel.interrupt(b, 2))
    assert said in (["KeyboardInterrupt"], [])  # the second may find the cell at its end
    assert kernel.run(show)[0] == "stopped"
    code = f"t = make({str(c)!r}, cfg, devices=devices((1, 1))).fit(block=False); r = t.wait(); {show}"
    said = kernel.run(code, meanwhile=kernel.interrupt(c))
    assert said == ["stopped", str(saved_end(c)), "[]"]
    said = kernel.run(f"t = make({str(d)!r}, cfg, devices=devices((1, 1)))\nt.fit(block=False)\nawait t", meanwhile=kernel.interrupt(d))
    assert said in (["CancelledError"], ["KeyboardInterrupt"])
    said = kernel.run(f"r = t.wait(10); {show}")
    assert said[:2] == ["stopped", str(saved_end(d))]
    assert kernel.run("import sys, gc; sys.last_value = None; print(dflash())") == ["[]"]


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("shutdown", marks=pytest.mark.slow)])
def test_a_kernel_that_ends_saves_its_background_run(how, kernel, tmp_path):
    kernel.run(f"t = make({str(tmp_path / 'r')!r}, cfg, devices=devices((1, 1))).fit(block=False)")
    until(lambda: len(kinds(tmp_path / "r", "step")) >= 3)
    if how == "SIGTERM":
        os.kill(kernel.manager.provisioner.pid, signal.SIGTERM)
        until(lambda: kinds(tmp_path / "r", "run_end"))
    else:
        kernel.manager.shutdown_kernel()
    step = saved_end(tmp_path / "r")
    assert resume(tmp_path / "r").step == step


# -- runs side by side -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [pytest.param((1, 1), marks=pytest.mark.slow), (3, 2), None])
def test_a_run_beside_one_that_fails_is_untouched(shape, whole, tmp_path, monkeypatch):
    "Both share the target; one fails in a thread, one starts, fails and goes on while the other trains."
    bad, good = (make(tmp_path / n, RUN, devices=devices(shape)) for n in ("bad", "good"))
    real = bad.line.lead.micro

    def micro(inputs, step, micro):
        if step == 3:
            until(lambda: good.step >= 2)
            raise Planted("planted")
        return real(inputs, step, micro)
    monkeypatch.setattr(bad.line.lead, "micro", micro)
    good.fit(block=False), bad.fit(block=False)
    with pytest.raises(TrainError, match="planted"):
        bad.wait(60)
    assert good.wait(60).outcome == "finished" and not left() and not kinds(tmp_path / "good", "exception")
    assert same_end(whole, tmp_path / "good", STEPS) and good.history.loss.tolist()[:3] == bad.history.loss.tolist()
    monkeypatch.undo()
    goes_on(tmp_path / "bad", whole, shape)


def test_the_number_of_cores_is_each_run_s_own(tmp_path):
    "Runs beside each other and after each other leave the caller's thread count alone, and take the one they were made with."
    seen, before = {}, torch.get_num_threads()
    try:
        for n in (2, 1):
            torch.set_num_threads(n)
            look = At(1, lambda t, n=n: seen.update({n: (torch.get_num_threads(), t.line.cores)}))
            runs = [make(tmp_path / f"{n}{d}", RUN | dict(steps=3), [look], devices=d) for d in ("cpu", "auto")]
            torch.set_num_threads(3 - n)
            for t in runs:
                t.fit(block=False)
            assert all(t.wait(60).outcome == "finished" for t in runs) and torch.get_num_threads() == 3 - n
        assert seen == {1: (1, 1), 2: (2, 2)}
    finally:
        torch.set_num_threads(before)


# -- memory ----------------------------------------------------------------------------------------------------------------

def tensors():
    gc.collect()
    return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]


def big_error(t):
    held = torch.ones(1000), [p.grad for p in t.drafter.parameters()]
    raise Planted(f"planted {len(held)}")


def ends(how, t, monkeypatch):
    "End a run in one of many ways; the error that a notebook would keep."
    at, lead, block_loss = Fault(monkeypatch), t.line.lead, sides.block_loss
    if how == "target":
        at.wrap(t.line.readers[-1], "read", lambda batch: batch.index >= 3)
    if how == "drafter":
        monkeypatch.setattr(sides, "block_loss", lambda *a, **k: big_error(t) if t.step >= 3 else block_loss(*a, **k))
    if how == "update":
        at.wrap(lead, "update", lambda out, step: step == 3)
    if how in ("before_update", "after_step", "after_eval"):
        t.callbacks.append(At(4 if how == "after_eval" else 3, big_error, how))
    if how == "interrupt":
        t.callbacks.append(At(3, lambda t: [signal.raise_signal(signal.SIGINT) for _ in "12"], "before_update"))
    if how == "stop":
        t.callbacks.append(At(3, lambda t: t.stop()))


HOWS = ["finish", "interrupt", "stop", "drafter", "before_update", "update", "target", "after_eval"]


@pytest.mark.parametrize("how,shape,background", spread(HOWS, [None, (1, 2), (1, 1)], [False, True], slow=["stop", "update"]))
def test_an_ended_run_keeps_weights_and_moments_alone(how, shape, background, whole, tmp_path, monkeypatch):
    "No features, gradients or ring buffers, not even in the frames of an error that somebody keeps."
    background = background and how != "interrupt"  # signals reach the main thread alone
    t = make(tmp_path / "r", RUN | dict(noise=dict(strength=.05, where="embed")), devices=devices(shape))
    before = tensors()
    known, kept = {id(x) for x in before}, None
    ends(how, t, monkeypatch)
    try:
        run(t, background)
    except (TrainError, KeyboardInterrupt) as e:
        kept = sys.last_value = e
    monkeypatch.undo()
    assert (kept is None) == (how in ("finish", "stop")) and not left()
    moments = {id(x) for state in t.optimizer.state.values() for x in state.values()}
    extra = [x for x in tensors() if id(x) not in known | moments]
    assert not [(tuple(x.shape), [type(r) for r in gc.get_referrers(x)]) for x in extra]
    assert all(p.grad is None for s in t.line.sides for p in s.drafter.parameters()) and not t.line.readers[0].features.rows
    sys.last_value = None


def test_a_trainer_that_nobody_holds_is_gone(tmp_path):
    t = make(tmp_path / "r", RUN | dict(steps=3), devices=devices((1, 2))).fit(block=False)
    t.wait()
    gone = weakref.ref(t), weakref.ref(t.drafter)
    del t
    gc.collect()
    assert not any(ref() for ref in gone) and not left()


# -- the caller's modes ----------------------------------------------------------------------------------------------------

class default_dtype:
    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *e):
        torch.set_default_dtype(self.before)


MODES = dict(no_grad=torch.no_grad, inference=torch.inference_mode, autocast=lambda: torch.autocast("cpu", torch.bfloat16),
             meta=lambda: torch.device("meta"), float64=lambda: default_dtype(torch.float64), float16=lambda: default_dtype(torch.float16))


@pytest.mark.parametrize("mode,shape,background", spread(MODES, [None, (1, 2)], [False, True], slow=["no_grad", "float16"]))
def test_the_caller_s_modes_change_no_bit(mode, shape, background, whole, tmp_path):
    "Built, fitted, stopped, resumed and finished inside a mode."
    with MODES[mode]():
        t = make(tmp_path / "r", RUN, [At(5, lambda t: t.stop())], devices=devices(shape))
        assert run(t, background).outcome == "stopped"
        assert run(resume(tmp_path / "r", devices=devices(shape)), background).outcome == "finished"
    assert same_end(whole, tmp_path / "r", STEPS)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")


def test_built_in_one_thread_and_fitted_in_another(whole, tmp_path):
    def in_thread(fn):
        out = []
        thread = threading.Thread(target=lambda: out.append(fn()))
        thread.start()
        thread.join(60)
        return out[0]
    built = in_thread(lambda: make(tmp_path / "a", RUN, devices=devices((1, 2))))
    assert built.fit().outcome == "finished" and same_end(whole, tmp_path / "a", STEPS)
    t = make(tmp_path / "b", RUN, devices=devices((1, 1)))
    assert in_thread(lambda: t.fit(block=False)) is t and t.wait().outcome == "finished" and same_end(whole, tmp_path / "b", STEPS)
    t = make(tmp_path / "c", RUN, [At(4, lambda t: t.stop())])
    assert in_thread(t.fit).outcome == "stopped" and t.fit().outcome == "finished" and same_end(whole, tmp_path / "c", STEPS)
    assert not left()


# -- the watchdog ----------------------------------------------------------------------------------------------------------

def stalls(run_dir):
    return [e for e in kinds(run_dir, "warning") if "no progress" in e["text"]]


def test_a_deadlock_of_all_threads_is_reported_and_can_be_left(tmp_path, monkeypatch):
    "No slot is given back: drafter, target and lead wait for each other; two Ctrl-C leave."
    monkeypatch.setattr(threads.Exchange, "release", lambda self, drafter: None)
    t = make(tmp_path / "r", RUN, devices=devices((1, 1)), stall=.3)
    sender = threading.Thread(target=lambda: (until(lambda: stalls(tmp_path / "r")), ctrl_c(2).join()))
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        t.fit()
    sender.join()
    said, = stalls(tmp_path / "r")
    assert "all threads wait for each other" in said["text"]
    assert all(name in said["text"] and name in said["stacks"] for name in ("MainThread", "dflash-target0:cpu", "dflash-drafter0:cpu"))
    assert not left() and t.record.outcome == "stopped"


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_paused_run_is_no_stall(background, tmp_path):
    pause = At(3, lambda t: (t.pause(), threading.Timer(1., t.unpause).start()))
    t = make(tmp_path / "r", RUN, [pause], devices=devices((1, 2)), stall=.25)
    assert run(t, background).outcome == "finished" and not stalls(tmp_path / "r")


def test_a_long_validation_is_no_stall_and_a_stuck_one_is_named(tmp_path, monkeypatch):
    def tau(drafter, target, batches):
        for i, _ in enumerate(batches):
            time.sleep(.12)
            if t.step == 8 and i == 1:
                time.sleep(.8)
        return 1.
    monkeypatch.setattr(module, "sim_tau", tau)
    t = make(tmp_path / "r", RUN | dict(val_share=.4, val_anchors=200), devices=devices((1, 1)), stall=.3)
    assert len(t.val) * .12 > .5
    t.fit()
    said, = stalls(tmp_path / "r")
    assert f"MainThread in eval, batch 2 of {len(t.val)}" in said["text"]


@pytest.mark.parametrize("thing,name,what", [("module", "save_state", "MainThread in checkpoint"),
                                             ("lead", "warm_up", "dflash-drafter0:cpu in warm drafter"),
                                             ("lead", "update", "dflash-drafter0:cpu in update and read")])
def test_a_stall_is_named_by_what_is_going_on(thing, name, what, tmp_path, monkeypatch):
    t = make(tmp_path / "r", RUN | dict(steps=3, checkpoint_every=3), devices=devices((1, 1)), stall=.25)
    thing = module if thing == "module" else t.line.lead
    real, first = getattr(thing, name), []

    def slow(*a, **k):
        if not first:
            first.append(time.sleep(.8))
        return real(*a, **k)
    monkeypatch.setattr(thing, name, slow)
    t.fit()
    said, = stalls(tmp_path / "r")
    assert what in said["text"] and "time.sleep(.8)" in said["stacks"]


def test_a_stop_asked_for_during_start_up_skips_the_rest_of_it(tmp_path, monkeypatch):
    t = make(tmp_path / "r", RUN, devices=devices((2, 2)))
    monkeypatch.setattr(t.line.sides[0], "warm_up", lambda inputs: t.stop("enough"))
    monkeypatch.setattr(t.line.sides[1], "warm_up", lambda inputs: pytest.fail("warmed all the same"))
    record = t.fit()
    assert (record.outcome, record.step, record.reason) == ("stopped", 0, "enough") and not left()
