"Several processes: the gradients of one, no wait without an end, one run directory, exact resume."
import filecmp
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
import torch.distributed as dist
from dist_cases import Group, free_port
from safetensors.torch import load_file

from dflash_nb.checkpoint import load_state, scan_states
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.dist import Peers, claim_gpus, own_gpus, processes
from dflash_nb.events import EventLog, latest, read_events
from dflash_nb.pipeline import OneProcess, deal
from dflash_nb.shard import check_sharded, own_rows
from dflash_nb.status import diagnose, status

ROOT = Path(__file__).resolve().parents[1]


def weights(run_dir, step=None):
    saved = load_state(run_dir / "checkpoints", step)
    return saved.step, load_file(saved.path / "model.safetensors"), load_file(saved.path / "optimizer.safetensors")


def same_end(a, b):
    (m, *x), (n, *y) = weights(a), weights(b)
    return m == n and all(p.keys() == q.keys() and all(torch.equal(p[k], q[k]) for k in p) for p, q in zip(x, y, strict=True))


def check_whole(run_dir):
    "Every checkpoint that counts is complete, and the newest one is pointed to."
    good, bad = scan_states(run_dir / "checkpoints")
    assert good and not bad and (run_dir / "checkpoints/latest").read_text().split()[0] == good[max(good)].name


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    "The same global batch of four micro-batches in float64 by 1, 2 and 4 processes."
    root = tmp_path_factory.mktemp("k4")
    told = {n: Group(root / f"n{n}", n, root / f"run{n}", double=True, delta=dict(clip=None, steps=3),
                     callbacks=dict(keep_gradients=dict(to=str(root / f"g{n}")))).ends() for n in (1, 2, 4)}
    return root, told


def test_k4_gradients_do_not_depend_on_processes(ends):
    root, told = ends
    assert all(e["outcome"] == "finished" and e["step"] == 3 for n in told for e in told[n])
    for step in range(3):
        want = torch.load(root / f"g1-0-{step}.pt")
        for n in (2, 4):
            parts = [torch.load(root / f"g{n}-{r}-{step}.pt") for r in range(n)]
            assert all(torch.equal(p, parts[0]) for p in parts) and parts[0].dtype == torch.float64 and want.abs().max() > 0
            torch.testing.assert_close(parts[0], want, rtol=1e-10, atol=1e-13)


def test_every_process_tells_the_losses_and_scores_of_the_whole_batch(ends):
    _, told = ends
    for n in told:
        for e in told[n]:
            np.testing.assert_allclose(e["losses"], told[1][0]["losses"], rtol=1e-10)
            assert e["taus"] == told[1][0]["taus"] and e["best"] == told[1][0]["best"] and e["taus"][2] is not None


def test_one_run_directory_and_a_status_that_shows_all(ends):
    root, _ = ends
    run = root / "run4"
    check_whole(run)
    start = next(e for e in read_events(run) if e["kind"] == "run_start")
    assert start["processes"] == 4 and len(latest(read_events(run))) == 3 and status(run, probe=False).state == "finished"
    assert sorted(p.name for p in (run / "ranks").iterdir()) == ["rank-1", "rank-2", "rank-3"]
    assert status(run / "ranks/rank-3", probe=False).state == "finished" and not (run / "ranks/rank-3/checkpoints").exists()
    assert load_state(run / "checkpoints").state["processes"] == 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "Six steps of two processes that nobody touched: the run and its losses."
    root = tmp_path_factory.mktemp("whole")
    told = Group(root / "w", 2, root / "run").ends()
    assert {e["outcome"] for e in told} == {"finished"}
    return root / "run", told[0]["losses"]


def test_a_killed_process_ends_all_by_name_and_the_run_goes_on_exactly(tmp_path, whole):
    "One moment here, ten in the long tests."
    killed_somewhere(tmp_path, whole[0], 0, dict(seconds=.1))


def killed_somewhere(tmp_path, whole, seed, pace):
    rng = random.Random(seed)
    run, who = tmp_path / "run", rng.randrange(2)
    group = Group(tmp_path / "k", 2, run, callbacks=dict(slow=pace))
    until = time.monotonic() + 40
    while not (run / "checkpoints/latest").exists() and time.monotonic() < until:
        time.sleep(.01)
    time.sleep(rng.random() * 6 * pace["seconds"])
    group.all[who].kill()
    start = time.monotonic()
    told = group.ends(30)
    assert time.monotonic() - start < 20, "the others must end within a bounded time"
    other = told[1 - who]
    if told[who] is None and other["outcome"] != "finished":
        assert other["outcome"] == "raised" and f"rank {who} on " in other["error"], other
        words = [e["text"] for e in read_events(run if who else run / "ranks/rank-1") if e["kind"] == "exception"]
        assert words and f"rank {who} on " in words[-1]
        if not who:
            assert status(run, probe=False).state == "killed" and any("rank-1" in f["text"] for f in diagnose(run))
    if weights(run)[0] < 6:
        again = Group(tmp_path / "a", 2, run, resume={}).ends()
        assert {e["outcome"] for e in again} == {"finished"}, again
    check_whole(run)
    assert same_end(whole, run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_process_killed_at_random_moments(tmp_path, whole, seed):
    killed_somewhere(tmp_path, whole[0], seed, dict(seconds=.1))


@pytest.mark.slow
def test_two_processes_give_the_bits_of_two_drafters(tmp_path):
    two = dict(target=["cpu"], drafter=["cpu", "cpu"])
    Group(tmp_path / "a", 1, tmp_path / "threads", devices=two).ends()
    told = Group(tmp_path / "b", 2, tmp_path / "processes", devices=dict(target=["cpu"], drafter=["cpu"])).ends()
    assert told[0]["outcome"] == "finished" and same_end(tmp_path / "threads", tmp_path / "processes")


@pytest.mark.slow
def test_short_and_empty_shares_never_hang(tmp_path):
    "Three micro-batches for one, two and four processes, and for two with two drafter threads each."
    losses, two = {}, dict(target=["cpu"], drafter=["cpu", "cpu"])
    for name, n, more in (("one", 1, {}), ("two", 2, {}), ("four", 4, {}), ("threads", 2, dict(devices=two))):
        told = Group(tmp_path / name, n, tmp_path / f"run-{name}", double=True, delta=dict(token_budget=192, clip=None), **more).ends()
        assert {e["outcome"] for e in told} == {"finished"}, told
        losses[name] = told[-1]["losses"]
    for x in losses.values():
        np.testing.assert_allclose(x, losses["one"], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("what, rank", [("SIGTERM", 0), ("SIGINT", 1), ("stop", 1)])
def test_a_stop_of_any_rank_stops_all_with_one_checkpoint(tmp_path, whole, what, rank):
    told = Group(tmp_path / "s", 2, tmp_path / "run", callbacks=dict(act_at=dict(step=5, rank=rank, what=what))).ends()
    assert [(e["outcome"], e["step"]) for e in told] == [("stopped", 5)] * 2
    word = dict(stop="enough").get(what, what)
    assert told[rank]["reason"] == word and told[1 - rank]["reason"].startswith(f"{word} (rank {rank} on ")
    check_whole(tmp_path / "run")
    assert weights(tmp_path / "run")[0] == 5
    assert {e["outcome"] for e in Group(tmp_path / "r", 2, tmp_path / "run", resume={}).ends()} == {"finished"}
    assert same_end(tmp_path / "run", whole[0])


@pytest.mark.slow
def test_an_error_of_one_rank_is_told_to_all(tmp_path):
    told = Group(tmp_path / "e", 2, tmp_path / "run", callbacks=dict(act_at=dict(step=3, rank=1, what="raise"))).ends()
    assert "planted" in told[0]["error"] and told[0]["error"].startswith("PeerLost: rank 1 on ") and "planted" in told[1]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("rank, words", [(1, "no sign of life"), (0, "the meeting point")])
def test_a_frozen_process_counts_as_lost_after_the_patience(tmp_path, rank, words):
    "Also the one that holds the meeting point, whose silence leaves every call to it without an answer."
    group, other = Group(tmp_path / "f", 2, tmp_path / "run", callbacks=dict(act_at=dict(step=3, rank=rank, what="SIGSTOP"))), 1 - rank
    until = time.monotonic() + 60
    while group.all[other].is_alive() and time.monotonic() < until:
        time.sleep(.05)
    os.kill(group.all[rank].pid, signal.SIGCONT)
    told = group.ends(30)
    assert f"rank {rank} on" in told[other]["error"] and words in told[other]["error"] and told[other]["seconds"] < 30
    assert told[rank]["outcome"] == "raised"


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(2, 1), (1, 3)])
def test_another_number_of_processes_goes_on_and_says_so(tmp_path, whole, first, then):
    run = tmp_path / "run"
    Group(tmp_path / "a", first, run, callbacks=dict(act_at=dict(step=3, rank=0, what="stop"))).ends()
    told = Group(tmp_path / "b", then, run, resume={}).ends()
    assert {e["outcome"] for e in told} == {"finished"}, told
    text = " ".join(e["text"] for e in read_events(run) if e["kind"] == "warning")
    assert f"processes {first} -> {then}" in text and status(run, probe=False).state == "finished"
    np.testing.assert_allclose(told[0]["losses"], whole[1], rtol=1e-3)


@pytest.mark.slow
def test_processes_that_differ_are_refused_by_name(tmp_path):
    told = Group(tmp_path / "d", 2, tmp_path / "run", callbacks=dict(), differ=1).ends()
    assert all("processes differ in config" in e["error"] or "has left: ConfigError" in e["error"] for e in told), told
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
def test_a_process_that_never_comes_is_named(tmp_path):
    group = Group(tmp_path / "m", 2, tmp_path / "run", knobs=dict(join=3.), absent=1)
    told = group.ends(60)
    assert "rank 1 of 2 has not come within 3 s" in told[0]["error"]


TRAIN = ["-m", "dflash_nb.cli", "--demo", "--json", "--token_budget", "512", "--checkpoint_every", "2", "--val_anchors", "8"]


@pytest.mark.slow
def test_torchrun_trains_stops_restarts_and_goes_on(tmp_path):
    env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    run = tmp_path / "run"

    def torchrun(steps, *extra):
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), *extra]
        command = [*start, *TRAIN, "--run_dir", str(run), "--steps", str(steps)]
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    p = torchrun(400)
    until = time.monotonic() + 120
    while not (run / "checkpoints/latest").exists() and time.monotonic() < until:
        time.sleep(.1)
    p.send_signal(signal.SIGINT)
    out = p.communicate(timeout=60)[0]
    at = weights(run)[0]
    check_whole(run)
    assert status(run, probe=False).state == "stopped" and 2 <= at < 400, out[-2000:]
    p = torchrun(at + 2, "--max-restarts", "1")
    out = p.communicate(timeout=180)[0]
    assert p.returncode == 0 and f"continuing {run}" in out, out[-2000:]
    last = json.loads([x for x in out.splitlines() if x.startswith("{")][-1])
    assert last["outcome"] == "finished" and last["step"] == at + 2 and out.count("dflash_train: continuing") == 1


SHARD = dict(knobs=dict(shard=True))


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    "The same six steps with a part of the drafter in each process: run, what each told, bytes that each held."
    root = tmp_path_factory.mktemp("parts")
    calls = dict(note_bytes=dict(to=str(root / "b")), use_parts=dict(to=str(root / "u")))
    told = Group(root / "s", 2, root / "run", callbacks=calls, **SHARD).ends()
    assert {e["outcome"] for e in told} == {"finished"}, told
    return root / "run", told, [json.loads((root / f"b-{r}.json").read_text()) for r in range(2)], (root / "u-0.txt").read_text()


def near(a, b, step=None):
    "Weights and moments of two runs agree as far as rounding lets them."
    for x, y in zip(weights(a, step)[1:], weights(b, step)[1:], strict=True):
        assert x.keys() == y.keys()
        for k in x:
            torch.testing.assert_close(x[k], y[k], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_drafter_in_parts_is_that_of_whole_ones(parts, whole):
    "Half the bytes in each of two processes; losses, weights and files of a run that holds all in both."
    run, told, held, _ = parts
    assert told[0]["losses"] == told[1]["losses"]
    np.testing.assert_allclose(told[0]["losses"], whole[1], rtol=1e-6)
    for kind, each in (("weights", 4), ("gradients", 4), ("moments", 8)):
        assert [h[kind] for h in held] == [each * held[0]["parameters"] // 2] * 2
    check_whole(run)
    near(run, whole[0])
    a, b = (load_state(x / "checkpoints").path for x in (run, whole[0]))
    assert {p.name: p.stat().st_size for p in a.iterdir()} == {p.name: p.stat().st_size for p in b.iterdir()}
    assert all(filecmp.cmp(a / f, b / f, shallow=False) for f in ("config.json", "state.json"))


@pytest.mark.slow
def test_a_drafter_in_parts_says_where_the_whole_one_is(parts):
    first, second = parts[3].splitlines()
    assert "in parts" in first and "in parts" in second and "load_drafter(run_dir)" in first and "load_drafter(run_dir)" in second


@pytest.mark.slow
def test_sums_of_parts_have_the_bits_of_whole_ones(tmp_path):
    "One layer, one micro-batch a process and no clipping: no sum has another order."
    case = dict(delta=dict(token_budget=128, clip=None, steps=3))
    Group(tmp_path / "w", 2, tmp_path / "whole", **case).ends()
    Group(tmp_path / "s", 2, tmp_path / "parts", **case, **SHARD).ends()
    a, b = (load_state(tmp_path / x / "checkpoints").path for x in ("whole", "parts"))
    assert filecmp.cmp(a / "model.safetensors", b / "model.safetensors", shallow=False)


@pytest.mark.slow
def test_parts_with_threads_noise_and_an_uneven_step(tmp_path):
    "Three micro-batches for two processes: one gets an empty one, so that all meet as often."
    case = dict(devices=dict(target=["cpu"], drafter=["cpu"]), delta=dict(token_budget=192, noise=.1, loss={"ce": .5, "fkl": .5}))
    Group(tmp_path / "w", 2, tmp_path / "whole", **case).ends()
    told = Group(tmp_path / "s", 2, tmp_path / "parts", **case, **SHARD).ends()
    assert {e["outcome"] for e in told} == {"finished"}, told
    near(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [((2, True), (1, False)), ((1, False), (3, True)), ((2, True), (2, True))])
def test_parts_and_whole_ones_go_on_from_each_other(tmp_path, whole, parts, first, then):
    stop = dict(act_at=dict(step=3, rank=0, what="stop"))
    for i, ((n, shard), more) in enumerate(((first, dict(callbacks=stop)), (then, dict(resume={})))):
        told = Group(tmp_path / str(i), n, tmp_path / "run", knobs=dict(shard=shard) if n > 1 else {}, **more).ends()
        assert {e["outcome"] for e in told} == {("stopped", "finished")[i]}, told
    check_whole(tmp_path / "run")
    near(tmp_path / "run", whole[0])
    assert first != then or same_end(tmp_path / "run", parts[0])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
def test_parts_do_not_wait_for_a_lost_process(tmp_path, what):
    group = Group(tmp_path / "k", 2, tmp_path / "run", callbacks=dict(act_at=dict(step=3, rank=1, what=what)), **SHARD)
    until = time.monotonic() + 30
    while group.all[0].is_alive() and time.monotonic() < until:
        time.sleep(.05)
    if what == "SIGSTOP":
        os.kill(group.all[1].pid, signal.SIGCONT)
    told = group.ends(30)
    assert told[0]["error"].startswith("PeerLost: rank 1 on ") and told[0]["seconds"] < 20
    check_whole(tmp_path / "run")


@pytest.mark.slow
def test_what_needs_a_whole_drafter_is_refused_beside_parts(tmp_path):
    told = Group(tmp_path / "c", 2, tmp_path / "run", callbacks=dict(keep_gradients=dict(to="x")), **SHARD).ends()
    assert all(e["error"].startswith("ConfigError: shard=True beside callback Keep: ") for e in told), told


def test_what_parts_cannot_do_is_refused_with_the_way_out(monkeypatch):
    for cfg, index, words in ((dict(optimizer="muon"), 0, "optimizer='muon' with shard=True.*adamw"),
                              (dict(runner="graph"), 0, "runner='graph' with shard=True.*auto"),
                              (dict(runner="compiled"), 0, "runner='compiled' with shard=True.*auto"),
                              ({}, 1, "several drafters.*torchrun")):
        with pytest.raises(ConfigError, match=words):
            check_sharded(TrainConfig(**cfg), index)
    check_sharded(TrainConfig())
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="shard=True with one process.*torchrun"), processes(shard=True):
        pass


def test_rows_of_all_processes_are_the_tensor():
    for rows in (1, 5, 32):
        x = torch.arange(rows * 2.).view(rows, 2)
        for size in range(1, 7):
            parts = [own_rows(x, r, size) for r in range(size)]
            chunks = [len(c) for c in x.chunk(size)]
            assert torch.equal(torch.cat(parts), x) and [len(p) for p in parts] == chunks + [0] * (size - len(chunks))
    assert own_rows(torch.tensor(3.), 1, 2) == 3.


def test_shares_cover_the_step_once():
    for micros in range(1, 9):
        for size in range(1, 6):
            for drafters in range(1, 4):
                shares = [deal(micros, drafters, r, size) for r in range(size)]
                assert sorted(m for s in shares for m in s if m is not None) == list(range(micros))
                assert all(len(s) >= drafters for s in shares)
                even = [deal(micros, 1, r, size, even=True) for r in range(size)]
                assert {len(s) for s in even} == {-(-micros // size)}
                assert sorted(m for s in even for m in s if m is not None) == list(range(micros))
                owners = {m: r * drafters + i % drafters for r, s in enumerate(shares) for i, m in enumerate(s) if m is not None}
                assert owners == {m: m % (size * drafters) for m in range(micros)}


def test_gpus_of_a_node_are_divided(monkeypatch):
    assert [own_gpus(8, i, 3) for i in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]] and own_gpus(0, 1, 2) == []
    with pytest.raises(ConfigError, match="2 processes on a node with 1 GPUs"):
        own_gpus(1, 0, 2)
    env = dict(LOCAL_WORLD_SIZE="2", LOCAL_RANK="1", CUDA_VISIBLE_DEVICES="4,5,6,7")
    claim_gpus(env)
    assert env["CUDA_VISIBLE_DEVICES"] == "6,7"
    env = dict(CUDA_VISIBLE_DEVICES="4,5")
    claim_gpus(env)
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_signs_of_life_name_the_silent_and_the_failed():
    store = dist.TCPStore("127.0.0.1", free_port(), 1, True)
    a, b = (Peers(dist.PrefixStore("p", store), r, 2, patience=.5, beat=.05) for r in range(2))
    threads = [threading.Thread(target=p.join, args=(5.,)) for p in (a, b)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    time.sleep(.2)
    assert not a.lost and not b.lost
    b._stop.set()
    until = time.monotonic() + 10
    while not a.lost and time.monotonic() < until:
        time.sleep(.02)
    assert a.lost.startswith("rank 1 on ") and "no sign of life" in a.lost
    a._stop.set()


def test_one_process_needs_no_other():
    g = OneProcess()
    assert g.share(3) == 3 and g.agree("", True) == ("", True) and g.gather([1], "cpu") == [1] and g.table() == [] and g.mean(.5, 4) == .5


def test_status_shows_every_process(tmp_path):
    log = EventLog(tmp_path / "r", steps=9, target="toy", devices=dict(target=["cpu"], drafter=["cpu"]), processes=3)
    rows = [dict(rank=r, host=f"node{r // 2}", pid=r, step=4 + r, stage="train", tok_s=100., age=.1 * r) for r in range(3)]
    rows[2]["devices"] = [dict(device="cuda:0", memory_gb=12., total_gb=140.)]
    log.gauge(processes=rows)
    log.beat()
    s = status(tmp_path / "r", probe=False)
    assert [(p["rank"], p["step"]) for p in s.processes] == [(0, 4), (1, 5), (2, 6)]
    text = str(s)
    assert "3 processes on 2 nodes, step 4 to 6" in text and "oldest sign of life: rank 2 on node1" in text
    assert "rank 1 node0 cpu" in text and "rank 2 node1 cuda:0 12.0 GB" in text
    log.close()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_wait_of_the_device_ends_with_a_lost_process():
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    out = subprocess.run([sys.executable, ROOT / "tests/dist_lost.py"], env=env, capture_output=True, text=True, timeout=200)
    assert "PeerLost: rank 1 on " in out.stdout and "[3, 9]" in out.stdout, out.stdout + out.stderr[-1000:]
    assert float(out.stdout.split("ended after ")[1].split()[0]) < 20
