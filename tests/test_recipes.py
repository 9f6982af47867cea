"Recipes: prompts that must not be trained on, steps and seconds, held features, halving, and the whole path on the nano target."
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_nb import recipes
from dflash_nb.checkpoint import load_drafter
from dflash_nb.config import DataError, TrainConfig, resolve
from dflash_nb.data import batch_at, pack
from dflash_nb.evaluate import walk_tau
from dflash_nb.recipes import (
    PEER,
    SEARCH,
    STUDY,
    HeldFeatures,
    Workshop,
    check_overlap,
    comparison,
    first_turns,
    main_recipes,
    nano_prompts,
    nano_study,
    prepare_study,
    study_prompts,
    sum_arms,
    walk_rows,
)
from dflash_nb.target import load_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    "A prepared nano study."
    tmp, target = tmp_path_factory.mktemp("recipes"), load_target("nano")
    nano_prompts(tmp / "prompts", 16, 5)
    s = nano_study(prompts=16, answer_tokens=16, new_tokens=10)
    prepare_study(target, tmp / "prompts", tmp / "out", s)
    w = Workshop(target, tmp / "out", s)
    w.prompts = tmp / "prompts"
    return w


def chat(text, kind="a"):
    return dict(messages=[dict(role="user", content=text)], kind=kind)


def test_the_peers_recipe_in_our_words():
    cfg = TrainConfig(**PEER)
    assert cfg.betas == (0.9, 0.999) and (cfg.block_size, cfg.gamma, cfg.lr, cfg.clip, cfg.warmup) == (16, 7.0, 6e-4, 1.0, 0.04)
    assert STUDY.prompts == 6144 and STUDY.train == dict(gsm8k_train=5, code_prompts=3) and STUDY.epochs == 8 and STUDY.seconds == 204
    assert STUDY.report == {"gsm8k": 200, "humaneval": 100, "mt-bench": 60} and len(STUDY.seeds) == 3
    assert all(not {"row_len", "seed", "steps"} & set(d) for d in SEARCH.values())


def test_rows_end_at_newlines_alone(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(dict(turns=["a\u2028b", "c"]), ensure_ascii=False) + "\n\n")
    assert first_turns(tmp_path / "x.jsonl") == ["a\u2028b"]


def test_reported_prompts_are_the_first_and_tuning_ones_the_last(shop):
    texts = first_turns(shop.prompts / "gsm8k.jsonl")
    parts = study_prompts(shop.prompts, shop.s)
    pick = lambda part: [c["messages"][0]["content"] for c in parts[part] if c["kind"] == "gsm8k"]  # noqa: E731
    assert pick("report") == texts[:4] and pick("tune") == texts[-3:]
    few = study_prompts(shop.prompts, replace(shop.s, report={"gsm8k": len(texts) - 1}))
    assert [c["messages"][0]["content"] for c in few["tune"] if c["kind"] == "gsm8k"] == texts[-1:]


@pytest.mark.parametrize("part, name", [("gsm8k_train", "gsm8k"), ("code_prompts", "mbpp")])
def test_a_held_prompt_among_the_training_prompts_is_refused(tmp_path, part, name):
    nano_prompts(tmp_path, 16, 5)
    stolen = first_turns(tmp_path / f"{name}.jsonl")[-1 if name == "mbpp" else 0]
    file = tmp_path / f"{part}.jsonl"
    file.write_text(json.dumps(dict(messages=[dict(role="user", content=stolen.upper() + " !")])) + "\n" + file.read_text())
    with pytest.raises(DataError, match="stands among the training prompts"):
        prepare_study(None, tmp_path, tmp_path / "out", nano_study(prompts=16))
    assert not (tmp_path / "out").exists()


def test_near_copies_and_repeated_instructions():
    train = [chat("one two three four five six seven eight nine ten eleven twelve")]
    near = chat("One two three four five six seven eight nine ten eleven 13")
    with pytest.raises(DataError):
        check_overlap(train, [near])
    check_overlap(train, [near], most=1.0)
    with pytest.raises(DataError):
        check_overlap(train, [chat("ONE two three four five six seven eight nine ten eleven twelve?")], most=1.0)
    check_overlap(train, [chat("one two")])


def test_held_features_are_the_targets(shop):
    packed = pack(shop.train, 128)
    cfg = resolve(shop.config(dict(target_layer_ids=[1, 3])), shop.target)
    held = HeldFeatures(shop.target, packed, (1, 2, 3), final=True, batch_rows=2)
    b = batch_at(packed, cfg, 3)
    bad, feats, final = held.part((1, 3), True).read(b)
    want = shop.target.features(b.ids_RT, b.pos_RT, (1, 3), final=True)
    assert not bad.any() and torch.allclose(feats, want[0], atol=1e-4) and torch.allclose(final, want[1], atol=1e-4)
    assert len(held.part((1, 2, 3)).read(b)) == 2
    assert held.has((2,), True) and not held.has((4,), False) and not HeldFeatures(shop.target, packed, (1,)).has((1,), True)


def test_sweep_scores_and_goes_on(shop):
    arms = {"the base": {}, "block 4": dict(block_size=4, gamma=2.0), "fkl": dict(loss="fkl")}
    steps = {k: 4 if k == "block 4" else 3 for k in arms}
    rows = shop.sweep("three", arms, steps)
    assert [(r["arm"], r["steps"]) for r in rows] == list(steps.items())
    assert all(set(r["walk_tau"]) == {"gsm8k", "mbpp"} and np.isfinite([r["loss"], r["score"], r["train_s"]]).all() for r in rows)
    assert rows == shop.sweep("three", arms, steps)
    drafter, packed = load_drafter(rows[1]["drafter"]), pack(shop.tune, 192)
    found = walk_rows(drafter, shop.target, packed, recipes.hold(shop, [], drafter.cfg.target_layer_ids, packed), rows=3)
    slow = walk_tau(drafter, shop.target, shop.tune)
    assert sorted(map(tuple, (d for v in found.values() for d in v))) == sorted(map(tuple, slow.lengths))


def test_a_limit_stops_a_sweep_and_the_same_call_goes_on(shop):
    shop.end = recipes.time.monotonic() + .5
    with pytest.raises(recipes.StudyStopped, match="goes on"):
        shop.sweep("long", {"the base": {}}, 3000)
    shop.end = None
    told = json.loads((shop.out / "sweeps/long/sweep.json").read_text())
    assert not list(shop.out.glob("sweeps/long/arms/*/*/result.json")) and told["steps"] == {"base": 3000}
    assert recipes.planned_steps(shop, "long", {"the base": {}}, 1.0) == {"the base": 3000}


def test_arms_that_differ_from_a_first_one_that_is_not_the_base(shop):
    first, other = dict(block_size=4, gamma=2.0, lr=1e-3), dict(lr=2e-3, betas=[0.9, 0.9])
    rows = shop.sweep("two", {"a": first, "b": other}, 2)
    told = json.loads((shop.out / "sweeps/two/sweep.json").read_text())["plan"]
    got = TrainConfig.from_dict({**told["base"], **told["arms"][1]["delta"]})
    assert (got.block_size, got.gamma, got.lr, got.betas) == (6, 3.0, 2e-3, (0.9, 0.9)) and rows[1]["arm"] == "b"


def test_the_decoder_has_room_for_the_longest_prompt(shop):
    drafter = load_drafter(shop.sweep("room", {"the base": {}}, 2)[0]["drafter"])
    before, long = shop.report_prompts, chat("How many days are in a week? " * 12, "gsm8k")
    shop.report_prompts = [before[0], long]
    found = shop.report(drafter)["sets"]["gsm8k"]
    shop.report_prompts = before
    assert len(found["prompt_calls"]) == 2 and min(found["emitted"]) > 0


def test_a_difference_of_single_seeds_is_an_interval_over_prompts():
    one = lambda calls: dict(sets=dict(a=dict(tau=60 / sum(calls), emitted=[20] * 3, prompt_calls=calls)))  # noqa: E731
    row = recipes.comparison([one([10, 11, 12])], [one([8, 9, 11])])[0]
    assert row["difference"] > 0 and row["baseline"] < row["ours"] and row["low"] <= row["difference"] <= row["high"]


def test_three_seeds_of_one_prompt_are_one_unit():
    rng = np.random.default_rng(0)
    calls = rng.integers(10, 20, 60)
    report = dict(sets=dict(x=dict(emitted=(calls * rng.uniform(1, 3, 60)).tolist(), prompt_calls=calls.tolist(), tau=2.0)))
    one, three = (comparison([report] * n, [report] * n)[0] for n in (1, 3))
    assert one["baseline"] == three["baseline"]
    assert np.allclose(one["baseline_interval"], three["baseline_interval"])


def test_bad_input_is_one_line(shop, tmp_path, capsys):
    base = ["--target", "nano", "--out", str(tmp_path / "o"), "--device", "cpu"]
    assert main_recipes(["prepare", *base, "--prompts", str(tmp_path / "none")]) == 2
    assert main_recipes(["prepare", *base, "--prompts", str(shop.prompts), "--settings", str(tmp_path / "none.json")]) == 2
    assert len([x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]) == 2
    with pytest.raises(DataError, match="run the part search first"):
        recipes.needed(SimpleNamespace(out=tmp_path, load=lambda n: json.loads((tmp_path / f"{n}.json").read_text())), "search")


def test_sums_leave_out_a_knob_that_is_set_twice():
    assert list(sum_arms({"a": dict(lr=1.0), "b": dict(lr=2.0), "c": dict(gamma=4.0)})) == ["a", "a + c"]


@pytest.mark.slow
def test_all_parts_by_command_then_again(shop, capsys, monkeypatch):
    arms = dict(arms={"lr 4e-3": dict(lr=4e-3)}, refine={"block 4": dict(block_size=4)}, refine_seconds=0.01)
    short = replace(shop.s, seconds=0.01, rungs=((0.01, 1), (0.01, 1)), frontier=(0.01,), **arms)
    monkeypatch.setattr(recipes, "nano_study", lambda: short)
    parts = ["baseline", "search", "refine", "more", "winner", "frontier", "ceiling", "decode", "compare"]
    line = [*parts, "--target", "nano", "--prompts", "nowhere", "--out", str(shop.out), "--settings", "nano", "--device", "cpu"]
    more, read = line[len(parts):], lambda name: json.loads((shop.out / f"{name}.json").read_text())
    assert main_recipes(["winner", *more, "--reports", "only", "--delta", "{}"]) == 2  # nothing is trained yet
    assert main_recipes(["baseline", "search", "refine", *more]) == 0 == main_recipes(["winner", *more, "--reports", "later"])
    assert read("winner")["runs"] == [] and main_recipes(["winner", *more, "--reports", "only", "--seeds", "1"]) == 0
    assert read("winner")["runs"] == [] and len(list(shop.out.glob("sweeps/winner-*/arms/*/*/reported.json"))) == 1
    assert main_recipes(line) == 0 and read("refine")["winner"] in {r["arm"] for r in recipes.chosen(shop)["rows"]}
    assert read("winner")["delta"] == read("refine")["delta"]
    assert ["--reports later" in c["command"] for c in read("winner")["calls"]] == [True, False]
    found = {p: json.loads((shop.out / f"{p}.json").read_text()) for p in parts}
    base, ours = found["baseline"], found["winner"]
    assert base["steps"] == shop.epoch_steps(shop.config()) and [r["steps"] for r in base["runs"]] == [base["steps"]] * 2
    assert found["ceiling"]["steps"] == 2 * base["steps"] and ours["steps"] >= 2 and {r["seed"] for r in ours["runs"]} == {0, 1}
    row = found["compare"]["table"][0]
    assert row["low"] <= row["difference"] <= row["high"] and row["prompts"] == 4 and row["seeds"] == 2
    assert found["decode"]["replayed"]["lossless"] and found["decode"]["eager"]["lossless"]
    capsys.readouterr()
    monkeypatch.setattr(recipes, "ablate", None)  # nothing is trained again
    del base["config"]["noise"]  # of a version that did not have the knob
    (shop.out / "baseline.json").write_text(json.dumps(base))
    assert main_recipes(["baseline", "winner", *more]) == 0
    assert json.loads((shop.out / "winner.json").read_text())["runs"] == ours["runs"]
