"A plan counts what the benchmark's step really moves, agrees with recorded runs, and names values that fit."
import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from dflash_nb.bench import GEOMETRIES, Geometry
from dflash_nb.cli import BAD_INPUT, DONE, dflash_train
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.drafter import Drafter
from dflash_nb.plan import (
    Rates,
    divisions,
    drafter_gib,
    drafter_micro_seconds,
    drafter_weights,
    exchange_seconds,
    geometry_of,
    known_rates,
    plan,
    product_seconds,
    read_where,
    target_gib,
    target_micro_seconds,
    update_seconds,
)
from dflash_nb.scale import random_target

ROOT = Path(__file__).resolve().parents[1]
H200 = {"card": "NVIDIA H200"}
SMALL = {"block_size": 4, "num_anchors": 4, "row_len": 32, "token_budget": 64, "micro_rows": 1, "num_draft_layers": 1}


def test_recorded_runs_are_predicted_within_fifteen_percent():
    files = sorted((ROOT / "data/results").glob("scale_*.json"))
    assert files
    for path in files:
        seen = json.loads(path.read_text())
        g = GEOMETRIES["qwen3_8b"] | {"depth": int(seen["target"].split("-")[-1])}
        p = plan(g, TrainConfig.from_dict(seen["config"]), seen["devices"], **H200)
        for mine, theirs in (("target", "target_alone_s"), ("drafter", "drafter_alone_s"), ("step", "step_s")):
            assert p.seconds[mine] == pytest.approx(seen[theirs], rel=0.15), (path.name, mine)


def test_three_widths_are_predicted_within_fifteen_percent_in_time_and_memory():
    seen, r = json.loads((ROOT / "data/results/plan_h200.json").read_text()), known_rates()["NVIDIA H200"]
    widths = {run["geometry"]: (Geometry(**run["shape"]), {x["part"]: x for x in run["rows"]}) for run in seen["runs"]}
    assert set(widths) == {"qwen3_4b", "qwen3_8b", "qwen3_14b"}
    for name, (g, rows) in widths.items():
        drafter, target = rows["drafter"], rows["target"]
        ms = 1e3 * (sum(drafter_micro_seconds(g, g.rows, r).values()) + update_seconds(g, r))
        assert ms == pytest.approx(drafter["ms"], rel=0.15), name
        assert sum(drafter_gib(g, g.rows, 2).values()) == pytest.approx(drafter["reserved_gib"], rel=0.15), name
        ms = 1e3 * sum(target_micro_seconds(g, g.rows, target["layers_read"], r).values())
        assert ms == pytest.approx(target["ms"], rel=0.15), name
        assert sum(target_gib(g, g.rows).values()) == pytest.approx(target["reserved_gib"], rel=0.15), name


def test_a_float8_head_is_predicted_beside_the_plain_one():
    seen, r, g = json.loads((ROOT / "data/results/step_speed_peer.json").read_text()), known_rates()["NVIDIA H200"], GEOMETRIES["qwen3_8b"]
    plain, eight = ([x for x in seen["rows"] if x["runner"] == "graph"][i] for i in (0, 1))
    for row, head8 in ((plain, False), (eight, True)):
        m = row["micro_rows"]
        ms = 1e3 * (sum(drafter_micro_seconds(g, m, r, head8=head8).values()) * g.rows / m + update_seconds(g, r))
        assert ms == pytest.approx(row["ms"], rel=0.15)
        assert sum(drafter_gib(g, m, g.rows // m + 1, head8=head8).values()) == pytest.approx(row["reserved_gib"], rel=0.15)
    a, b = (plan("qwen3_8b", TrainConfig(head8=h), "cuda:0", **H200) for h in (False, True))
    assert b.seconds["drafter"] < 0.95 * a.seconds["drafter"] and b.memory[0]["gib"] > a.memory[0]["gib"]


def test_weights_are_those_of_the_drafter_and_the_target():
    g = GEOMETRIES["tiny"]
    target = random_target(g)
    cfg = TrainConfig(**SMALL, mask_token_id=299)
    p = plan(target, cfg, "cpu")
    made = Drafter(target.drafter_config(p.cfg))
    matrices = sum(w.numel() for w in made.parameters() if w.ndim > 1)
    assert drafter_weights(p.geometry) == matrices
    here, = p.memory
    assert here["parts"]["target weights"] == sum(w.nbytes for w in target.model.parameters()) / 2**30
    assert here["parts"]["drafter weights"] == 16 * matrices / 2**30


def test_a_config_of_transformers_is_a_target():
    g = geometry_of(Qwen3Config(hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=9728,
                                num_hidden_layers=36, vocab_size=151936, tie_word_embeddings=True))
    want = GEOMETRIES["qwen3_4b"]
    for name in ("hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab", "depth", "tied"):
        assert getattr(g, name) == getattr(want, name), name
    named = plan("nano", TrainConfig(**SMALL), "cpu")
    assert named.geometry == GEOMETRIES["nano"] | {"block": 4, "anchors": 4, "row_len": 32, "rows": 2, "layers": 1}
    with pytest.raises(ConfigError, match="no hidden_size|no num_attention_heads"):
        geometry_of(object())


def test_a_drafter_that_fits_no_card_may_be_divided():
    cfg = TrainConfig(num_draft_layers=20, micro_rows=1, num_anchors=64)
    two = dict(target=["cuda:0"], drafter=["cuda:1"])
    said = [a for a in plan("qwen3_32b", cfg, two, **H200).advice if "does not fit" in a]
    assert len(said) == 1 and said[0].startswith("cuda:1 does not fit")
    assert said[0].endswith("; or divide the drafter: --shard in 2 processes")
    assert "--shard" not in str(plan("qwen3_32b", cfg | dict(optimizer="muon"), two, **H200).advice)


def test_advice_is_tried_and_fits():
    cfg = TrainConfig(num_anchors=1024, micro_rows=4)
    p = plan("qwen3_32b", cfg, "cuda:0", **H200)
    assert not p.fits
    with pytest.raises(ConfigError, match="cuda:0 does not fit.*micro_rows"):
        p.check()
    words = p.advice[0].split("lower one: ")[1].split(", or ")
    assert len(words) >= 2
    for word in words:
        change = {k: int(v) for k, v in (w.split("=") for w in word.split(" with "))}
        assert plan("qwen3_32b", cfg | change, "cuda:0", **H200).fits, word


def test_no_batch_helps_a_target_that_is_too_large():
    tiny_card = replace(known_rates()["NVIDIA H200"], gib=4.0)
    p = plan("qwen3_8b", TrainConfig(), "cuda:0", rates=tiny_card)
    assert not p.fits and "no smaller batch helps" in p.advice[0]


def test_the_best_split_is_the_fastest_that_fits():
    p = plan("qwen3_8b", TrainConfig(num_anchors=128, micro_rows=2), 8, **H200)
    assert p.devices == p.best["devices"] and p.best["step_s"] == min(s["step_s"] for s in p.splits if s["fits"])
    assert all(len(d["drafter"]) >= 1 and set(d["target"]) | set(d["drafter"]) == {"a", "b", "c"} for d in divisions(["a", "b", "c"]))
    lopsided = {"target": ["cuda:0", "cuda:1", "cuda:2"], "drafter": ["cuda:3"]}
    worse = plan("qwen3_8b", TrainConfig(num_anchors=512, micro_rows=2), lopsided, **H200)
    assert any("instead of" in a for a in worse.advice)


def test_more_drafters_than_micro_batches_are_named():
    p = plan("qwen3_8b", TrainConfig(token_budget=3072 * 4, micro_rows=4), {"target": ["cuda:0"], "drafter": ["cuda:1", "cuda:2"]}, **H200)
    assert any("lower micro_rows" in a for a in p.advice)


def test_costs_grow_as_they_should():
    r, g = known_rates()["NVIDIA H200"], GEOMETRIES["qwen3_8b"]

    def seconds(g, m): return sum(drafter_micro_seconds(g, m, r).values())

    assert seconds(g | {"anchors": 256}, 4) < seconds(g, 4) < seconds(g | {"layers": 6}, 4)
    assert seconds(g, 2) < seconds(g, 4) < 2.1 * seconds(g, 2)
    assert sum(drafter_gib(g, 2).values()) < sum(drafter_gib(g, 4).values())
    assert sum(drafter_micro_seconds(g, 4, r, teacher=True).values()) > seconds(g, 4)
    assert sum(drafter_gib(g, 4, teacher=True, fast=False).values()) > sum(drafter_gib(g, 4).values())
    assert sum(target_micro_seconds(g, 4, 34, r).values()) > 1.5 * sum(target_micro_seconds(g, 4, 17, r).values())
    assert sum(target_gib(g, 4).values()) > sum(target_gib(g, 1).values())
    assert exchange_seconds(g, 1, r) == 0 < exchange_seconds(g, 2, r) < exchange_seconds(g, 4, r) and update_seconds(g, r) > 0
    assert product_seconds(1, 1, 1, r) == r.kernel_us / 1e6


def test_a_loss_over_the_targets_distribution_runs_the_whole_target():
    a, b = (plan("qwen3_8b", TrainConfig(loss=loss), "cuda:0", **H200) for loss in ("ce", "fkl"))
    assert b.seconds["target"] > a.seconds["target"] and b.seconds["drafter"] > a.seconds["drafter"]
    assert any("less certain" in x for x in b.advice)


def test_faces_say_the_same():
    p = plan("qwen3_8b", TrainConfig(), 2, **H200)
    html = p._repr_html_()
    for word in ("cuda:0", "slower side", "best split", "NVIDIA H200"):
        assert word in str(p) and word in html
    assert json.loads(json.dumps(p.to_dict()))["fits"] is True and len(p.table) == len(p.splits) == 2


def test_a_part_of_a_card_s_name_will_do():
    assert str(plan("qwen3_8b", TrainConfig(), 2, card="h200")) == str(plan("qwen3_8b", TrainConfig(), 2, **H200))


def test_bad_questions_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="never measured"):
        plan("qwen3_8b", TrainConfig(), 2, card="Abacus")
    with pytest.raises(ConfigError, match="number of GPUs"):
        plan("qwen3_8b", TrainConfig(), 0, **H200)
    with pytest.raises(ValueError, match="no target"):
        plan("no such / target", TrainConfig(), "cpu")
    for text, want in (("", {}), ("8", {"devices": 8, "card": None}), ("8xNVIDIA H200", {"devices": 8, "card": "NVIDIA H200"})):
        assert read_where(text) == want
    with pytest.raises(ConfigError, match="--plan"):
        read_where("many")


def test_calibration_scales_each_side():
    p = plan("tiny", TrainConfig(**SMALL), "cpu", calibrate=True)
    base = plan("tiny", TrainConfig(**SMALL), "cpu")
    assert p.seconds["target"] == pytest.approx(base.seconds["target"] * p.rates.target)
    assert p.seconds["drafter"] == pytest.approx(base.seconds["drafter"] * p.rates.drafter) and "scaled by" in str(p)


def test_stored_rates_say_where_they_come_from():
    for r in known_rates().values():
        assert isinstance(r, Rates) and r.date and r.versions and r.source
        assert min(r.products, r.attention, r.target_attention, r.bandwidth, r.gib) > 0
    assert isinstance(GEOMETRIES["tiny"], Geometry)


def test_the_command_plans_and_exits(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dflash_train(["--target", "qwen3_8b", "--plan", "8xNVIDIA H200", "--json"]) == DONE
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["command"] == "dflash_train" and last["exit_code"] == 0 and last["fits"] and len(last["splits"]) > 1
    assert dflash_train(["--target", "qwen3_32b", "--num_anchors", "1024", "--plan", "1xNVIDIA H200"]) == BAD_INPUT
    seen = capsys.readouterr()
    assert "DOES NOT FIT" in seen.out and "micro_rows=" in seen.err and len(seen.err.splitlines()) == 1
    assert dflash_train(["--plan", "--demo", "--device", "cpu"]) == DONE and "plan for nano" in capsys.readouterr().out
    assert dflash_train(["--plan", "some"]) == BAD_INPUT and dflash_train(["--plan", "--resume", "runs/x"]) == BAD_INPUT
    assert not list(tmp_path.iterdir())
