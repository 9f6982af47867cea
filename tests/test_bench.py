"The benchmark counts the work that a step does, and its command stores what it prints."
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dflash_nb.bench import (
    GEOMETRIES,
    RandomIO,
    attention_flops,
    bench_step,
    finite_row,
    milliseconds,
    products,
    random_drafter,
    random_inputs,
    step_flops,
    step_runner,
)
from dflash_nb.config import ConfigError, DflashError, TrainConfig
from dflash_nb.passes import bench_decode, bench_pipeline, bench_target, layer_weights, target_flops
from dflash_nb.peer import bench_peer, peer_difference, peer_root
from dflash_nb.speed import BENCH_PARTS, BenchSession, as_geometry, bench_text, main_bench, read_sweep_option, run_bench

TINY = GEOMETRIES["tiny"] | {"anchors": 4, "row_len": 32}


def test_products_are_the_matrix_products_of_a_step():
    "Counted against PyTorch's own counter, but for attention."
    g = TINY
    drafter, io = random_drafter(g, "cpu", "eager"), RandomIO(g, "cpu", torch.float32)
    runner = step_runner(drafter, io, TrainConfig(block_size=g.block), "eager", torch.float32)
    with FlopCounterMode(display=False) as counter:
        runner.micro(random_inputs(g, g.rows, "cpu", torch.float32))
    counted = sum(v for op, v in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op))
    assert counted == sum(2 * m * n * k * times for _, m, n, k, times in products(g, g.rows))


def test_work_grows_as_it_should():
    g = GEOMETRIES["qwen3_8b"]
    assert step_flops(g | {"rows": 8}) == pytest.approx(2 * step_flops(g))
    assert attention_flops(g | {"heads": 64}, 1) == 2 * attention_flops(g, 1)


def test_a_step_learns_in_micro_batches_and_with_eight_bits():
    for kw in ({}, {"micro_rows": 1}, {"head8": True}):
        row = bench_step(TINY, "eager", steps=3, **kw)
        assert row["losses"][-1] < row["losses"][0] and row["constant"] and row["micro_rows"] == kw.get("micro_rows", 2)
    with pytest.raises(ConfigError, match="does not divide"):
        bench_step(TINY, micro_rows=3)


def test_times_are_of_each_call():
    calls = []
    assert len(milliseconds(lambda: calls.append(1), "cpu", 4)) == 4 and len(calls) == 5


def test_the_command_stores_what_it_prints(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert main_bench(["--runners", "eager,auto", "--steps", "1", "--rows", "1", "--device", "cpu", "--out", str(out)]) == 0
    seen = json.loads(out.read_text())
    printed = capsys.readouterr().out.splitlines()
    assert [r["runner"] for r in seen["runs"][0]["rows"]] == ["eager", "eager"]
    assert seen["command"][0] == "dflash_bench" and len(printed) == 5
    row = seen["runs"][0]["rows"][0]
    assert {"ms", "ms_row", "tflops", "share", "over_products", "allocations", "recompiles"} <= set(row) and 0 < row["share"]
    assert bench_text(seen).splitlines() == printed


BAD = ["--geometry huge", "--parts all,of", "--runners fast", "--sweep width=3", "--sweep layers=two", "--micro-rows 3",
       "--steps 0", "--rows -1",
       "--rows 0", "--device bogus", "--device cuda:99", "--out /nowhere/x.json", "--geometry ,"]


@pytest.mark.parametrize("words", BAD)
def test_the_command_refuses_in_one_line(words, capsys):
    assert main_bench(["--device", "cpu", *words.split()]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_part_of_a_preset_runs_small():
    small = {"row_len": 32, "rows": 1, "anchors": 2, "layers": 1, "depth": 6, "features": 1}
    for name in ("nano", "qwen3_8b"):
        narrow = {} if name == "nano" else {"hidden": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 500}
        g = as_geometry(name, small | narrow)
        rows = [bench_step(g, "eager", steps=1), bench_target(g, steps=1), bench_decode(g, prompt=4, calls=2)]
        assert [r["part"] for r in rows] == ["drafter", "target", "decode"]
        assert all(r["ms"] > 0 and r["tflops"] > 0 and r["recompiles"] == 0 for r in rows)


def test_a_pipeline_is_held_against_its_sides():
    row = bench_pipeline(TINY | {"layers": 1}, steps=2)
    assert row["part"] == "pipeline" and not row["apart"] and row["over_slower"] >= row["over_sum"] > 0
    assert row["ms"] == pytest.approx(row["over_sum"] * (row["target_ms"] + row["drafter_ms"]))


def test_a_part_that_fails_is_a_row_and_the_rest_runs(monkeypatch, capsys):
    def fail(*args, **kw): raise torch.OutOfMemoryError("planted")
    monkeypatch.setattr("dflash_nb.speed.bench_step", fail)
    assert main_bench(["--parts", "drafter,target", "--steps", "1", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "planted" in out and "target" in out


def test_what_the_limit_leaves_out_is_named(tmp_path):
    seen = run_bench(("tiny",), BENCH_PARTS, ("eager",), sweeps={"layers": [1]}, limit=1e-9, out=tmp_path / "b.json")
    assert not seen["runs"][0]["rows"] and "tiny decode" in seen["left_out"] and "layers 1 drafter" in seen["left_out"]
    assert "left out" in bench_text(seen) and json.loads((tmp_path / "b.json").read_text())["left_out"] == seen["left_out"]


def test_a_sweep_changes_one_number():
    assert read_sweep_option("anchors=2,4") == ("anchors", [2, 4])
    seen = run_bench(("tiny",), ("target",), ("eager",), steps=1, sweeps={"row_len": [32, 64]})
    assert [(r["value"], r["part"]) for r in seen["sweeps"]] == [(32, "drafter"), (32, "target"), (64, "drafter"), (64, "target")]
    assert seen["sweeps"][0]["shape"] | {"row_len": 64} == seen["sweeps"][2]["shape"]


def test_a_row_is_stored_when_it_exists(tmp_path):
    session = BenchSession("cpu", tmp_path / "s.json", say=lambda text: None)
    session.row(session.seen["sweeps"], "one", lambda: {"part": "drafter"})
    assert len(json.loads((tmp_path / "s.json").read_text())["sweeps"]) == 1


def test_a_targets_work_grows_with_rows_and_layers_read():
    g = GEOMETRIES["qwen3_8b"]
    assert target_flops(g, 4) == 2 * target_flops(g, 2) and target_flops(g | {"depth": 20}, 2) < target_flops(g, 2)
    assert layer_weights(g) == 192_937_984


PEER = pytest.mark.skipif(peer_root() is None, reason="the peer is not installed: pip install --no-deps specforge==0.2.0")


@PEER
@pytest.mark.parametrize("change", [{}, {"heads": 8, "anchors": 20, "row_len": 90}, {"block": 6, "layers": 3}], ids=str)
def test_the_peer_computes_the_same_loss(change):
    ours, theirs = peer_difference(GEOMETRIES["tiny"] | change)
    assert ours == pytest.approx(theirs, rel=1e-5)


@PEER
def test_the_peer_learns_on_our_tensors(capsys):
    row = bench_peer(TINY, steps=3)
    assert row["losses"][-1] < row["losses"][0] and row["runner"] == "specforge"
    assert main_bench(["--runners", "eager", "--steps", "1", "--rows", "1", "--device", "cpu", "--peer", "specforge"]) == 0
    assert "specforge" in capsys.readouterr().out


@pytest.mark.skipif(peer_root() is not None, reason="the peer is there")
def test_a_missing_peer_says_how_to_get_it(capsys):
    assert main_bench(["--runners", "eager", "--steps", "1", "--rows", "1", "--device", "cpu", "--peer", "specforge"]) == 2
    assert "pip install --no-deps specforge" in capsys.readouterr().err


def test_a_step_whose_loss_is_not_finite_has_no_time():
    row = dict(part="drafter", runner="graph", ms=5.4, losses=[10.9, float("nan")], norms=[3.0, 3.0])
    with pytest.raises(DflashError, match=r"losses\[1\] of the timed step is nan \(drafter, runner graph, attention block\)"):
        finite_row(row, "attention block")
    good = dict(row, losses=[10.9, 10.5])
    assert finite_row(good) is good and finite_row(dict(part="target", ms=1.0)) == dict(part="target", ms=1.0)
