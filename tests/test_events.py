"The event log under kills, full disks, torn lines, threads and second attempts."

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from dflash_nb import events as ev
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.events import (
    EventLog,
    EventsLost,
    RunDirError,
    ask,
    holds_run,
    latest,
    new_run_dir,
    process_alive,
    process_identity,
    read_beat,
    read_events,
    read_state,
    tail_events,
    usual_times,
    write_json,
    write_text,
)

ROOT = Path(__file__).resolve().parents[1]


def child(code, *args, **kw):
    "A writer in a process of its own."
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE, text=True, **kw
    )


def kinds(events):
    return [e["kind"] for e in events]


@pytest.mark.parametrize("module", ["events", "status"])
def test_standard_library_only(module):
    heavy = ("torch", "numpy", "pandas", "yaml", "matplotlib", "IPython")
    code = f"import sys, dflash_nb.{module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stdout + out.stderr


def test_sigkill_loses_nothing_that_was_emitted(tmp_path):
    p = child(
        """
        import sys
        from dflash_nb.events import EventLog
        log, s = EventLog(sys.argv[1]), 0
        while True:
            s += 1; log.step(s, loss=1.)
            sys.stdout.write(f"{s}\\n"); sys.stdout.flush()
        """,
        tmp_path,
    )
    for _ in range(2000):
        last = int(p.stdout.readline())
    p.send_signal(signal.SIGKILL)
    told = [int(x) for x in p.stdout.read().split("\n")[:-1] if x]
    p.wait()
    got = [e["step"] for e in read_events(tmp_path) if e["kind"] == "step"]
    last = (told or [last])[-1]
    assert got == list(range(1, len(got) + 1)) and len(got) >= last
    assert len(got) <= last + 1 and read_events(tmp_path).bad == 0


def test_torn_last_line_is_skipped_and_never_swallows_the_next_attempt(tmp_path):
    with EventLog(tmp_path) as log:
        log.step(1, loss=1.0)
    whole = read_events(tmp_path)
    with open(tmp_path / "events.jsonl", "ab") as f:
        f.write(b'{"kind":"step","t":1.0,"att')
    torn = read_events(tmp_path)
    assert kinds(torn) == kinds(whole) and torn.torn and torn.bad == 0
    with EventLog(tmp_path) as log:
        log.step(2, loss=1.0)
    again = read_events(tmp_path)
    assert [e["step"] for e in again if e["kind"] == "step"] == [1, 2] and again.bad == 1 and not again.torn


def test_strange_lines_are_counted_not_raised(tmp_path):
    with EventLog(tmp_path) as log:
        log.step(1, loss=1.0)
    with open(tmp_path / "events.jsonl", "ab") as f:
        f.write(
            b'[1]\n\xff\xfe\n"text"\n{"no":"kind"}\n\n{"kind":"stage","attempt":1,"stage":[1],"t":1.0}\n{"kind":"step","attempt":1}\n{"kind":"future","t":1.0,"attempt":1}\n'
        )
    got = read_events(tmp_path)
    assert got.bad == 4 and kinds(got)[-1] == "future"
    (tmp_path / "heartbeat").unlink()
    state, _, _ = read_state(tmp_path)
    assert state["step"]["step"] == 1 and state["counts"]["strange"] == 2 and len(latest(got)) == 1


def test_second_attempt_replaces_the_steps_after_its_checkpoint(tmp_path):
    with EventLog(tmp_path, steps=9) as log:
        for s in range(1, 8):
            log.step(s, loss=10.0 + s)
        log.checkpoint(4, "checkpoints/4")
        log.eval(4, tau=2.0)
        log.checkpoint(6, "checkpoints/6")
    with EventLog(tmp_path, steps=9, step=4) as log:
        assert log.attempt == 2
        assert [e["step"] for e in latest(read_events(tmp_path))] == [1, 2, 3, 4]
        for s in (5, 6):
            log.step(s, loss=20.0 + s)
    assert [e["loss"] for e in latest(read_events(tmp_path))] == [11.0, 12.0, 13.0, 14.0, 25.0, 26.0]
    for fast in (True, False):
        state = read_state(tmp_path, fast)[0]
        assert (
            state["attempt"] == 2 and state["first"][0] == 5 and state["last"]["eval"]["tau"] == 2.0 and "checkpoint" not in state["last"]
        )


def test_heartbeat_state_equals_a_scan(tmp_path):
    with EventLog(tmp_path, beat=0.01, steps=500) as log:
        with log.stage("train"):
            for s in range(500):
                log.step(s, loss=float("nan") if s % 97 == 0 else 1.0, skipped=s % 97 == 0)
            log.warning("x" * 9000)
            log.graph("cuda:0")
            log.graph("cuda:0", what="compile")
            log.pause()
            fast, slow = read_state(tmp_path)[0], read_state(tmp_path, fast=False)[0]
    for s in (fast, slow):
        s.pop("gauges")
    assert repr(fast) == repr(slow) and fast["skipped"] == 6 and fast["paused"] and fast["compiled"] == 1


def test_tail_follows_a_growing_file(tmp_path):
    log = EventLog(tmp_path)
    seen, offset = [], 0
    for s in range(5):
        log.step(s, loss=1.0)
        new = tail_events(tmp_path, offset)
        offset = new.offset
        seen += [e["step"] for e in new if e["kind"] == "step"]
    assert seen == [0, 1, 2, 3, 4] and not tail_events(tmp_path, offset)
    assert len(tail_events(tmp_path, 10**9)) == 6, "a shorter file is read from its start"
    log.close()


def test_threads_write_whole_lines(tmp_path):
    log = EventLog(tmp_path, beat=0.005)

    def work(i):
        for s in range(200):
            log.emit("warning", text="x" * 300, who=i, n=s)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    log.close()
    got = read_events(tmp_path)
    assert got.bad == 0
    for i in range(8):
        assert [e["n"] for e in got if e.get("who") == i] == list(range(200))


def test_a_reader_never_sees_a_half_heartbeat(tmp_path):
    log = EventLog(tmp_path, beat=0.0005)
    for i in range(300):
        log.gauge(devices=[dict(device="d" * (i % 50)) for _ in range(i % 40)], mark=i)
        beat = read_beat(tmp_path, tries=50)
        assert beat is not None and len(beat["state"]["gauges"].get("devices", [])) == beat["state"]["gauges"].get("mark", 0) % 40
    log.close()


def test_a_full_disk_is_counted_and_raised_at_the_step_edge(tmp_path):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path)
    log.step(1, loss=1.0)
    log.step(2, loss=1.0)
    assert log.lost == 3
    with pytest.raises(EventsLost, match="3 events.*No space left.*from_run"):
        log.check()
    log.close()


def test_a_disk_that_fills_up_inside_a_line(tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, resource.RLIM_INFINITY))

    p = child(
        """
        import sys, resource
        from dflash_nb.events import EventLog
        log, s = EventLog(sys.argv[1]), 0
        while not log.lost: s += 1; log.step(s, loss=1., pad="x"*100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.step(s + 1, loss=2.)
        log.close("failed"); print(s)
        """,
        tmp_path,
        preexec_fn=limit,
    )
    lost = int(p.communicate(timeout=20)[0])
    got = read_events(tmp_path)
    steps = [e["step"] for e in got if e["kind"] == "step"]
    assert steps == [*range(1, lost), lost + 1] and got.bad == 1 and got[-1]["lost"] == 1 and read_beat(tmp_path)["lost"] == 1


def test_emit_never_raises(tmp_path):
    class Bad:
        def __repr__(self):
            raise RuntimeError("no")

        __str__ = __repr__

    loop = []
    loop.append(loop)
    log = EventLog(tmp_path)
    for value in (Bad(), loop, {(1, 2): 3}, {1, 2}, b"x", float("inf"), "\ud800", 10**400, object):
        log.emit("warning", text="t", value=value)
    log.emit("step", step=1, kind="mine", t="mine", attempt=99)
    log.emit("stage", stage=["no", "name"], phase="end")
    log.close()
    log.close()
    log.step(2, loss=1.0)
    got = read_events(tmp_path)
    assert kinds(got).count("warning") == 9 and got.bad == 0 and log.lost == 1 and all("t" in e for e in got)
    step = next(e for e in got if e["kind"] == "step")
    assert step["attempt"] == 1 and step["kind_"] == "mine" and step["attempt_"] == 99
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_arrays_become_numbers(tmp_path):
    import numpy as np
    import torch

    with EventLog(tmp_path) as log:
        log.step(np.int64(3), loss=torch.tensor(2.5), accept=np.array([0.5, np.nan]), path=tmp_path)
    e = next(e for e in read_events(tmp_path) if e["kind"] == "step")
    assert e["step"] == 3 and e["loss"] == 2.5 and e["accept"][0] == 0.5 and e["accept"][1] != e["accept"][1] and e["path"] == str(tmp_path)


def test_the_heartbeat_thread_stops_and_beats(tmp_path):
    log = EventLog(tmp_path, beat=0.01)
    assert [t for t in threading.enumerate() if t.name == "dflash-heartbeat" and t.daemon]
    first, until = read_beat(tmp_path), time.monotonic() + 5
    while time.monotonic() < until and (first is None or read_beat(tmp_path)["t"] == first["t"]):
        first = first or read_beat(tmp_path)
    log.close()
    log._thread.join(5)
    assert not log._thread.is_alive() and read_beat(tmp_path)["state"]["outcome"] == "stopped"
    assert read_beat(tmp_path)["t"] > first["t"]


def test_a_busy_or_used_directory_is_refused(tmp_path):
    log = EventLog(tmp_path / "a")
    with pytest.raises(RunDirError, match=f"being written by process {os.getpid()}"):
        EventLog(tmp_path / "a")
    log.close()
    with pytest.raises(ConfigError, match="from_run.*another run_dir.*delete"):
        new_run_dir(tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        new_run_dir(tmp_path / "file")
    assert new_run_dir(tmp_path / "x/y").is_dir() and new_run_dir(tmp_path / "x/y").is_dir()
    assert [holds_run(tmp_path / p) for p in ("a", "x/y", "file", "none")] == [True, False, False, False]
    (tmp_path / "x/y/checkpoints").mkdir()
    assert holds_run(tmp_path / "x/y")
    EventLog(tmp_path / "a").close()


def test_a_small_file_is_replaced_whole_and_its_folder_synced(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    write_json(tmp_path / "a.json", dict(x=float("inf")))
    assert [Path(p).name.startswith(".tmp-a.json") for p in synced] == [True, False] and synced[1] == str(tmp_path.resolve())

    def full(fd):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_text(tmp_path / "a.json", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and "Infinity" in (tmp_path / "a.json").read_text()


def test_a_killed_writer_does_not_block_its_successor(tmp_path):
    p = child(
        "import sys, time; from dflash_nb.events import EventLog; log = EventLog(sys.argv[1]); print(1, flush=True); time.sleep(60)",
        tmp_path,
    )
    p.stdout.readline()
    with pytest.raises(RunDirError):
        EventLog(tmp_path)
    p.kill()  # not waited for: a zombie is dead
    until = time.monotonic() + 5
    while process_alive({**process_identity(p.pid)}) and time.monotonic() < until:
        time.sleep(0.01)
    log = EventLog(tmp_path)
    assert log.attempt == 2
    log.close()
    p.wait()


def test_process_identity_parts():
    me = process_identity()
    assert process_alive(me) is True
    assert process_alive({**me, "start": me["start"] + 1}) is False
    assert process_alive({**me, "pid": 2**22 + 1}) is False
    assert process_alive({**me, "boot": "other"}) is False
    assert process_alive({**me, "pid_ns": "pid:[1]"}) is None
    assert process_alive({**me, "host": "elsewhere"}) is None
    assert process_alive({}) is None


def test_without_proc_the_pid_decides(monkeypatch):
    monkeypatch.setattr(ev, "_proc_stat", lambda pid: None)
    p = subprocess.Popen([sys.executable, "-c", ""])
    p.wait()
    assert process_alive(process_identity()) is True and process_alive({**process_identity(), "pid": p.pid}) is False
    with monkeypatch.context() as m:
        m.setattr(os, "name", "nt")
        answer = ev._pid_exists(os.getpid())
    assert answer is None


def test_a_process_name_with_brackets_is_read(tmp_path):
    exe = tmp_path / "a) R 1 (b"
    exe.symlink_to("/bin/sleep")
    p = subprocess.Popen([exe, "30"])
    try:
        until = time.monotonic() + 5
        while "R 1 (b" not in Path(f"/proc/{p.pid}/stat").read_text() and time.monotonic() < until:
            pass
        state, start = ev._proc_stat(p.pid)
        assert state in "SRD" and abs(start - process_identity()["start"]) < 10**7 and start >= process_identity()["start"]
    finally:
        p.kill()
        p.wait()


def test_stage_times_of_earlier_runs_become_usual(tmp_path):
    for i, seconds in enumerate((1.0, 5.0, 2.0)):
        (tmp_path / f"r{i}").mkdir()
        lines = [
            dict(kind="stage", t=0.0, stage="load", phase="end", elapsed=seconds),
            dict(kind="stage", t=0.0, stage="load", phase="failed", elapsed=99.0),
        ]
        (tmp_path / f"r{i}/events.jsonl").write_text(
            "".join(json.dumps(x, separators=(",", ":")) + "\n" for x in lines) + '{"kind":"stage","sta'
        )
    assert usual_times(tmp_path) == {"load": 2.0} and usual_times(tmp_path / "absent") == {}
    with EventLog(tmp_path / "now") as log:
        with log.stage("load"):
            pass
    assert [e["usual"] for e in read_events(tmp_path / "now") if e.get("phase") == "start"] == [2.0]


def test_requests_from_outside_arrive_once(tmp_path):
    with pytest.raises(ConfigError, match="no run"):
        ask(tmp_path, "stop")
    EventLog(tmp_path).close()
    ask(tmp_path, "stop")
    log = EventLog(tmp_path, beat=60)
    log.beat()
    assert log.take_asked() == [], "a request to the attempt before is void"
    ask(tmp_path, "checkpoint")
    ask(tmp_path, "stop")
    log.beat()
    assert log.take_asked() == ["stop", "checkpoint"] and log.take_asked() == []
    with pytest.raises(ConfigError, match="stop, pause"):
        ask(tmp_path, "dance")
    log.close()


def test_exceptions_keep_text_only(tmp_path):
    import gc
    import weakref

    class Big:
        pass

    with EventLog(tmp_path) as log:

        def fail():
            held = Big()
            fail.ref = weakref.ref(held)
            raise RuntimeError("NCCL error " + "x" * 5000)

        try:
            fail()
        except RuntimeError as e:
            log.exception(e, step=3, device="cuda:1")
        gc.collect()
        assert fail.ref() is None
    e = next(e for e in read_events(tmp_path) if e["kind"] == "exception")
    assert e["cuda"] and e["step"] == 3 and "in fail" in e["traceback"] and e["thread"] == "MainThread" and len(e["text"]) == 2000


@pytest.mark.parametrize(
    "exc, outcome", [(None, "finished"), (KeyboardInterrupt(), "stopped"), (SystemExit(1), "stopped"), (ValueError("x"), "failed")]
)
def test_the_context_manager_writes_the_end(tmp_path, exc, outcome):
    try:
        with EventLog(tmp_path) as log:
            with log.stage("s"):
                if exc is not None:
                    raise exc
    except BaseException as e:
        assert e is exc
    got = read_events(tmp_path)
    assert got[-1]["outcome"] == outcome and kinds(got).count("exception") == (outcome == "failed")
    assert [e["phase"] for e in got if e["kind"] == "stage"] == ["start", "end" if exc is None else "failed"]


def test_config_and_environment_are_recorded_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with EventLog(tmp_path, config=TrainConfig(), command=["train", "--x"]):
        pass
    text = (tmp_path / "environment.json").read_text()
    env = json.loads(text)
    assert (
        "hf_secret" not in text and env["command"] == ["train", "--x"] and env["process"]["pid"] == os.getpid() and env["versions"]["torch"]
    )
    assert json.loads((tmp_path / "config.json").read_text())["block_size"] == TrainConfig().block_size
    assert not list(tmp_path.glob(".*tmp"))


def test_fields_are_documented():
    assert set(ev.SCHEMA) == set(ev.KINDS) and all(isinstance(v, str) for v in ev.SCHEMA.values())


def test_a_line_of_an_older_attempt_changes_nothing():
    state = ev.new_state()
    ev.fold(state, dict(kind="run_start", t=1.0, attempt=2))
    before = repr(state)
    ev.fold(state, dict(kind="step", t=2.0, attempt=1, step=99, loss=0.0))
    assert repr(state) == before
    ev.fold(state, dict(kind="step", t=2.0, attempt=2, step=1, loss=0.0))
    assert state["step"]["step"] == 1


def test_a_heartbeat_mixed_of_two_writes_is_not_believed(tmp_path):
    with EventLog(tmp_path) as log:
        log.step(7, loss=1.0)
    whole = (tmp_path / "heartbeat").read_bytes()
    (tmp_path / "heartbeat").write_bytes(whole.replace(b'"step":7', b'"step":8'))
    assert read_beat(tmp_path) is None and read_state(tmp_path)[0]["step"]["step"] == 7
    (tmp_path / "heartbeat").write_bytes(whole)
    assert read_beat(tmp_path)["state"]["step"]["step"] == 7


def test_limited_reading_goes_on_at_the_same_pace_far_into_the_file(tmp_path):
    log = EventLog(tmp_path)
    for i in range(1, 201):
        log.step(i, loss=1.0)
    log.close()
    offset, sizes = 0, []
    while got := tail_events(tmp_path, offset, 2000):
        offset = got.offset
        sizes.append(len(got))
    assert offset == (tmp_path / "events.jsonl").stat().st_size and sum(sizes) >= 201 and len(sizes) < 20
