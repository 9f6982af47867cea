"Arms on a cluster: the table of a local sweep, a worker that is killed, a stop; without the package one line says so."
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dflash_nb.ablate import ablate, executor_of, read_rows
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.data import encode_chats
from dflash_nb.events import ask, latest, read_events
from dflash_nb.ray_arms import RayArms, _workers, part_runs, take_item, train_part
from dflash_nb.status import status
from dflash_nb.target import load_target

CFG = TrainConfig(block_size=4, num_draft_layers=1, row_len=64, token_budget=128, micro_rows=1, num_anchors=4, steps=4, val_share=.2,
                  val_anchors=8, attention="eager", lr=1e-3, checkpoint_every=2)
HOW = dict(grid=dict(gamma=[6]), seeds=2, holdout=2, max_new_tokens=4, walk_docs=1, show="off")


@pytest.fixture(scope="module")
def nano():
    torch.set_num_threads(1)
    target = load_target("nano")
    words = "one two three four five six seven eight nine ten "
    chat = lambda i: dict(messages=[dict(role="user", content="count"), dict(role="assistant", content=words * (1 + i % 3))])  # noqa: E731
    return target, encode_chats([chat(i) for i in range(24)], target)


def measured(ab):
    "The table without what was timed."
    t, by = ab.table[~ab.table.metric.str.contains("_s$|share|tok_s|seconds")], ["arm", "seed", "metric", "step"]
    return t[[*by, "delta", "value", "config"]].sort_values(by).reset_index(drop=True)


def in_turn(arms):
    "Tasks one after another in this process."
    def serve(sweep):
        def send(items):
            for i in items:
                take_item(sweep, i)
            return sweep.stopping.is_set()
        for part in part_runs(sweep.groups(), arms, 2):
            train_part(str(sweep.path), [(r.arm.name, r.seed) for r in part], send, "cpu")
    return serve


@pytest.fixture(scope="module")
def local(nano, tmp_path_factory):
    return ablate(*nano, CFG, sweep_dir=tmp_path_factory.mktemp("local") / "sweep", **HOW)


def test_tasks_give_the_table_of_a_local_sweep(nano, local, tmp_path):
    ab = ablate(*nano, CFG, sweep_dir=tmp_path / "s", executor=in_turn(2), **HOW)
    assert ab.outcome == "finished" and not ab.failed and measured(ab).equals(measured(local)) and len(measured(ab)) > 50
    assert ab.prompts.equals(local.prompts)
    steps = latest(read_events(tmp_path / "s"))
    assert steps[-1]["step"] == 4 * 4 and status(tmp_path / "s", probe=False).state == "finished"
    assert len([e for e in read_events(tmp_path / "s") if e["kind"] == "eval"]) == 4


def test_groups_are_cut_as_far_as_there_are_workers():
    groups = [list("abcd"), list("ef")]
    for arms, workers, want in ((None, 1, [4, 2]), (None, 2, [3, 1, 2]), (None, 6, [1] * 6), (3, 6, [3, 1, 2])):
        assert [len(p) for p in part_runs(groups, arms, workers)] == want
        assert sum(part_runs(groups, arms, workers), []) == list("abcdef")


def test_a_task_must_fit_on_one_node():
    ask = SimpleNamespace(gpus=2, cpus=1)
    with pytest.raises(ConfigError, match="on one node"):
        _workers(ask, [dict(CPU=4, GPU=1), dict(CPU=4, GPU=1)])
    assert _workers(ask, [dict(CPU=4, GPU=5), dict(CPU=1, GPU=8), dict(CPU=9)]) == (2, 3)
    assert _workers(SimpleNamespace(gpus=None, cpus=2), [dict(CPU=4), dict(CPU=3)]) == (0.0, 3)


def test_an_unknown_executor_or_a_missing_package_is_one_line(monkeypatch):
    with pytest.raises(ConfigError, match="executor='dask': choose ray"):
        executor_of("dask")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="pip install"):
        executor_of("ray")


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install -c constraints.txt ray")
    for last in (False, False, True):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            break
        except Exception:  # its own limit of 30 s for a start, on a machine that is busy
            ray.shutdown()
            if last:
                raise
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_two_workers_give_the_table_of_a_local_sweep(cluster, nano, local, tmp_path):
    ab = ablate(*nano, CFG, sweep_dir=tmp_path / "s", executor="ray", **HOW)
    assert ab.outcome == "finished" and not ab.failed and measured(ab).equals(measured(local)) and ab.prompts.equals(local.prompts)
    assert latest(read_events(tmp_path / "s"))[-1]["step"] == 16


@pytest.mark.slow
def test_a_killed_worker_is_retried_and_the_table_is_the_same(cluster, nano, local, tmp_path):
    killed = []

    def kill_once():
        until = time.monotonic() + 100
        while time.monotonic() < until and not killed:
            if any(len(read_rows(p)) >= 2 for p in tmp_path.glob("s/arms/*/*/rows.jsonl")):
                for pid in workers():
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)
                    return
            time.sleep(.02)
    thread = threading.Thread(target=kill_once)
    thread.start()
    ab = ablate(*nano, CFG, sweep_dir=tmp_path / "s", executor=RayArms(arms=1), **HOW)
    thread.join()
    assert killed and ab.outcome == "finished" and not ab.failed and measured(ab).equals(measured(local))


def workers():
    "Ray workers that run a task, by their titles."
    found = []
    for p in os.listdir("/proc"):
        if p.isdigit():
            try:
                title = open(f"/proc/{p}/cmdline").read()
            except OSError:
                continue
            if title.startswith("ray::run_task"):
                found.append(int(p))
    return found


@pytest.mark.slow
def test_a_stop_reaches_the_tasks(cluster, nano, tmp_path):
    def stop_soon():
        until = time.monotonic() + 100
        while time.monotonic() < until and not any(len(read_rows(p)) >= 2 for p in tmp_path.glob("s/arms/*/*/rows.jsonl")):
            time.sleep(.02)
        ask(tmp_path / "s", "stop")
    thread = threading.Thread(target=stop_soon)
    thread.start()
    ab = ablate(*nano, CFG | dict(steps=5000, eval_every=1000), sweep_dir=tmp_path / "s", executor="ray", **HOW)
    thread.join()
    assert ab.outcome == "stopped" and 2 <= latest(read_events(tmp_path / "s"))[-1]["step"] < 20000
    assert list(tmp_path.glob("s/arms/*/*/checkpoints/latest"))


@pytest.mark.slow
def test_a_stopped_task_goes_on_exactly(nano, local, tmp_path):
    def until_five(sweep):
        def send(items):
            for i in items:
                take_item(sweep, i)
            if sweep.done >= 5:
                sweep.stop("enough")
            return sweep.stopping.is_set()
        for part in part_runs(sweep.groups(), 1, 2):
            if not sweep.stopping.is_set():
                train_part(str(sweep.path), [(r.arm.name, r.seed) for r in part], send, "cpu")
    ab = ablate(*nano, CFG, sweep_dir=tmp_path / "s", executor=until_five, **HOW)
    assert ab.outcome == "stopped"
    ab = ablate(*nano, CFG, sweep_dir=tmp_path / "s", executor=in_turn(1), resume=True, **HOW)
    assert ab.outcome == "finished" and measured(ab).equals(measured(local))
