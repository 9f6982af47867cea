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
    milliseconds,
    plan_step,
    products,
    random_drafter,
    random_inputs,
    step_flops,
    step_runner,
)
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.peer import bench_peer, main_bench, peer_difference, peer_root

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


def test_a_plan_grows_with_the_batch_and_shrinks_with_micro_batches():
    a, b, c = (plan_step(GEOMETRIES["qwen3_8b"] | {"anchors": n}, m) for n, m in ((256, 4), (512, 4), (512, 2)))
    assert a["ms"] < b["ms"] < c["ms"] and c["gib"] < b["gib"] and a["gib"] < b["gib"]
    assert sum(b["gib_parts"].values()) == pytest.approx(b["gib"])


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
    assert [r["runner"] for r in seen["rows"]] == ["eager", "eager"] and seen["command"][0] == "dflash_bench" and len(printed) == 5
    with pytest.raises(SystemExit):
        main_bench(["--geometry", "huge"])


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
def test_a_missing_peer_says_how_to_get_it():
    with pytest.raises(ConfigError, match="pip install --no-deps specforge"):
        main_bench(["--runners", "eager", "--steps", "1", "--rows", "1", "--device", "cpu", "--peer", "specforge"])
