"Evaluation: tau and its interval by hand, lossless flags that can fail, and the walk that equals the decoder (K8)."
import json
import math

import decoding
import numpy as np
import pytest
import torch
from decoding import LAYOUTS, Docs, answers, as_batch, fit, lookup_target, tiny_drafter, tiny_target

import dflash_nb.decode as decode
import dflash_nb.evaluate as ev
from dflash_nb.config import ConfigError, DataError
from dflash_nb.decode import generate, speculate
from dflash_nb.evaluate import (
    emitted_at,
    evaluate,
    first_divergence,
    load_report,
    pooled_tau,
    prompt_ids,
    sim_tau,
    supervised_left,
    tau_interval,
    walk_tau,
)

torch.set_num_threads(1)
PROMPTS = [[5, 200], [17, 200], [30, 31, 200], [100]]
REAL = decode.draft_tokens
target, trained = decoding.target, decoding.trained  # fixtures


# K8: the walk of the training forward takes the decoder's steps


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 6, 7, 24])
def test_walk_equals_decoder(target, trained, layout, n):
    drafter, docs = trained[layout], Docs(answers(target, PROMPTS, n, stop_ids=()))
    real = [speculate(target, drafter, p, n, stop_ids=()).lengths for p in PROMPTS]
    assert walk_tau(drafter, target, docs).lengths == real
    assert walk_tau(drafter, target, docs, chunk=4).lengths == real
    if n == 24:
        assert len({x for r in real for x in r}) >= 3, real


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "mistral", "qwen3_moe", "gpt_neox"])
def test_walk_equals_decoder_on_random_targets(family, layout):
    target = tiny_target(family)
    docs = Docs(answers(target, PROMPTS[:3], 20, stop_ids=()))
    drafter = fit(tiny_drafter(target, layout, block_size=5), target, docs, 12)
    real = [speculate(target, drafter, p, 20, stop_ids=()).lengths for p in PROMPTS[:3]]
    assert walk_tau(drafter, target, docs).lengths == real
    assert len({x for r in real for x in r}) >= 2, real


@pytest.mark.parametrize("layout", LAYOUTS)
def test_walk_equals_decoder_up_to_the_stop_token(layout):
    chain = generate(lookup_target(), [5, 200], 9, stop_ids=()).ids
    target = lookup_target(eos=chain[6])
    docs = Docs(answers(target, PROMPTS, 18))
    assert docs[0][0][-1] == 257
    drafter = fit(tiny_drafter(target, layout), target, docs, 40)
    real = [speculate(target, drafter, p, 18) for p in PROMPTS]
    assert walk_tau(drafter, target, docs).lengths == [r.lengths for r in real]
    assert real[0].stopped == "eos" and max(real[0].lengths) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_walk_follows_a_draft_budget(target, trained, layout):
    docs = Docs(answers(target, PROMPTS[:3], 14, stop_ids=()))
    for k in (1, 2):
        real = [speculate(target, trained[layout], p, 14, stop_ids=(), num_draft=k).lengths for p in PROMPTS[:3]]
        assert walk_tau(trained[layout], target, docs, num_draft=k).lengths == real


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex"])
def test_walk_on_every_backend(target, trained, backend, layout):
    drafter = trained[layout]
    docs = Docs(answers(target, PROMPTS[:2], 20, stop_ids=()))
    kept, drafter.attention = drafter.attention, backend
    try:
        real = [speculate(target, drafter, p, 20, stop_ids=()).lengths for p in PROMPTS[:2]]
        assert walk_tau(drafter, target, docs, chunk=32).lengths == real
        assert len({x for r in real for x in r}) >= 2, real
    finally:
        drafter.attention = kept


def test_walk_over_several_answers_and_gaps(target, trained):
    "Each supervised stretch is walked from its own first token; one supervised token alone makes no call."
    drafter = trained["anchor-first"]
    (ids, _), = answers(target, [[5, 200]], 24, stop_ids=())
    mask = np.zeros(26, bool)
    mask[[2, 3, 4, 5, 6, 7, 8]] = mask[[11]] = mask[[15, 16, 17, 18]] = True
    (lengths,) = walk_tau(drafter, target, Docs([(ids, mask)])).lengths
    cut = [0]
    for n in lengths:
        cut.append(cut[-1] + n)
    assert 6 in cut and cut[-1] == 6 + 3
    assert walk_tau(drafter, target, Docs([(ids, np.zeros(26, bool))])).lengths == [[]]
    assert math.isnan(walk_tau(drafter, target, Docs([(ids, np.zeros(26, bool))])).tau)


def test_walk_of_a_document_shorter_than_a_block(target, trained):
    docs = Docs([(np.array([5, 200, 3]), np.array([False, True, True]))])
    assert walk_tau(trained["anchor-first"], target, docs).lengths == [[1]]


# sim_tau


def test_emitted_at_by_hand(target, monkeypatch):
    "Predictions are forced: matched prefix 0, 2 and all, and the end of the answer cuts."
    drafter = tiny_drafter(target, block_size=4)
    ids = np.arange(10, 22)
    batch = as_batch([(ids, np.array([False] * 2 + [True] * 10))], [[2, 5, 9, 10]])
    assert supervised_left(batch).tolist() == [[9, 6, 2, 1]]

    class Forced:
        def __init__(self, tokens):
            self.tokens = iter(tokens)

        def embed(self, ids):
            return target.io().embed(ids)

        def head(self, h):
            tokens = [next(self.tokens) for _ in range(h[..., 0].numel())]
            return torch.nn.functional.one_hot(torch.tensor(tokens), 260).view(*h.shape[:-1], 260)

    forced = Forced([0, 14, 15] + [16, 17, 0] + [20, 21, 0] + [21, 0, 0])
    assert emitted_at(drafter, target, batch, io=forced).tolist() == [[1, 3, 2, 1]]
    forced = Forced([13, 14, 15] + [0, 0, 0] * 3)
    assert emitted_at(drafter, target, batch, io=forced).tolist() == [[4, 1, 1, 1]]


def test_sim_tau_counts_every_kept_anchor_once(target, trained):
    drafter = trained["anchor-first"]
    docs = answers(target, PROMPTS, 24, stop_ids=())
    a, b = as_batch(docs[:2], [[3, 8], [4, 9]]), as_batch(docs[2:4], [[5, 9, 11], [6]])
    values = [int(x) for batch in (a, b) for x in emitted_at(drafter, target, batch)[batch.keep_RN]]
    assert len(values) == 8
    assert sim_tau(drafter, target, [a, b]) == pytest.approx(sum(values) / 8)
    assert math.isnan(sim_tau(drafter, target, []))
    feats = [target.features(x.ids_RT, x.pos_RT, layer_ids=(1, 3))[0] for x in (a, b)]
    assert sim_tau(drafter, target, [a, b], features=feats) == sim_tau(drafter, target, [a, b])


def test_mean_over_anchors_is_not_the_walk(target, trained):
    docs = Docs(answers(target, PROMPTS, 24, stop_ids=()))
    walk = walk_tau(trained["anchor-first"], target, docs)
    every = sim_tau(trained["anchor-first"], target, [as_batch(docs)])
    assert walk.tau == pytest.approx(np.sum(sum(walk.lengths, [])) / walk.calls)
    assert every != pytest.approx(walk.tau, abs=1e-3)


# Numbers


def test_tau_and_interval_by_hand():
    assert pooled_tau([9, 1], [3, 1]) == 2.5
    assert math.isnan(pooled_tau([0], [0]))
    assert tau_interval([8] * 40, [4] * 40) == (2, 2)
    assert all(math.isnan(x) for x in tau_interval([8], [4]))
    e, c = np.random.default_rng(0).integers(10, 60, 200), np.full(200, 15)
    low, high = tau_interval(e, c)
    tau, spread = e.sum() / c.sum(), (e / 15).std() / np.sqrt(200)
    assert low == pytest.approx(tau - 1.96 * spread, abs=.25 * spread) and high == pytest.approx(tau + 1.96 * spread, abs=.25 * spread)
    assert tau_interval(e, c) == tau_interval(e, c) != tau_interval(e, c, seed=1)


def test_interval_survives_prompts_without_calls():
    low, high = tau_interval([0, 0, 12], [0, 0, 4])
    assert low == high == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_report_pools_its_rows(target, trained, layout):
    prompts = [dict(input_ids=p, kind=k) for p, k in zip(PROMPTS, "aabc", strict=True)]
    seen = []
    r = evaluate(trained[layout], target, prompts, max_new_tokens=19, stop_ids=(), progress=lambda *a: seen.append(a[:2]))
    assert seen == [(i + 1, 4) for i in range(4)]
    runs = [speculate(target, trained[layout], p, 19, stop_ids=()) for p in PROMPTS]
    calls = sum(x.calls for x in runs)
    assert r.tau == pytest.approx(4 * 18 / calls) and r.tau_ci[0] <= r.tau <= r.tau_ci[1]
    assert r.lossless is True and r.identical == 1.0 and r.divergences == []
    K = 5 if layout == "anchor-first" else 6
    accepts = [a for x in runs for a in x.accepted]
    assert r.per_position == [sum(a > k for a in accepts) / calls for k in range(K)]
    assert r.tau == pytest.approx(1 + sum(r.per_position), abs=4 / calls + 1e-9)  # only cut last blocks lack a bonus
    assert list(r.table.columns) == ["kind", "prompt_tokens", "new_tokens", "calls", "tau", "identical", "stopped"] and len(r.table) == 4
    assert r.by_kind.kind.tolist() == ["a", "b", "c"] and r.by_kind.prompts.tolist() == [2, 1, 1] and r.by_kind.calls.sum() == calls
    assert r.tokens_per_second > 0 and r.plain_tokens_per_second > 0


def test_report_text_and_file(target, trained, tmp_path):
    r = evaluate(trained["anchor-first"], target, [dict(input_ids=p, kind="a") for p in PROMPTS], max_new_tokens=12, stop_ids=())
    text = repr(r)
    for part in (f"tau {r.tau:.2f}", "95% interval", "target calls", "prefill", "lossless: yes", "tokens/s", "drafts a call", "float32"):
        assert part in text, part
    r.save(tmp_path / "r.json")
    d = json.loads((tmp_path / "r.json").read_text())
    assert d["tau"] == r.tau and d["lossless"] is True and "prefill" in d["definitions"]["tau"]
    again = load_report(tmp_path / "r.json")
    assert again.tau_ci == r.tau_ci and repr(again) == text
    assert [len(ax.lines) for ax in r.plot().axes] == [3, 2]


def test_one_prompt_and_no_calls(target, trained):
    r = evaluate(trained["anchor-first"], target, [PROMPTS[0]], max_new_tokens=1)
    assert math.isnan(r.tau) and r.lossless is True and r.to_dict()["tau"] is None
    assert "no interval" in repr(r) and "nothing was decoded" in repr(r)
    r.plot()


# Lossless


def test_corrupted_decoder_is_not_lossless(target, trained, monkeypatch):
    def careless(logits_KV, drafts_K):
        accepted, bonus = REAL_VERIFY(logits_KV, drafts_K)
        if len(drafts_K) > accepted:
            return accepted + 1, int(logits_KV[accepted + 1].argmax())  # keeps one draft too many
        return accepted, bonus

    REAL_VERIFY = decode.verify_greedy
    monkeypatch.setattr(decode, "verify_greedy", careless)
    r = evaluate(trained["anchor-first"], target, PROMPTS, max_new_tokens=25, stop_ids=())
    assert r.lossless is False and r.identical < 1 and "lossless: NO" in repr(r)
    assert all(d["gap"] > 0 and not d["tolerated"] for d in r.divergences)
    assert [d["prompt"] for d in r.divergences] == [x["prompt"] for x in r.rows if not x["identical"]]


def test_near_ties_are_tolerated_only_within_the_tolerance(target):
    plain = generate(target, [5, 200], 12, stop_ids=()).ids
    other = plain[:4] + [plain[4] + 1] + plain[5:]
    with torch.inference_mode():
        logits = target.model(torch.tensor([[5, 200, *plain[:4]]])).logits[0, -1]
    gap = float(logits.max() - logits[plain[4] + 1])
    assert first_divergence(target, [5, 200], plain, plain) is None
    assert first_divergence(target, [5, 200], plain, other) == dict(position=4, gap=pytest.approx(gap, rel=1e-4))
    assert first_divergence(target, [5, 200], plain, plain[:6]) == dict(position=6, gap=math.inf)


def test_bfloat16_reports_its_divergences(target, trained, monkeypatch):
    "A flip at a small gap is counted and tolerated; the same flip is refused under a tolerance of 0."
    flips = iter([True] + [False] * 3)

    def sometimes(target_, **kw):
        run = speculate(target_, **kw)
        if kw["max_new_tokens"] > 8 and next(flips, False):
            run.ids[3] = (run.ids[3] + 1) % 200
        return run

    for tolerance, fine in ((1e9, True), (0., False)):
        flips = iter([True] + [False] * 3)
        monkeypatch.setattr(ev, "speculate", sometimes)
        r = evaluate(trained["anchor-first"], target, PROMPTS, max_new_tokens=12, stop_ids=(), gap_tolerance=tolerance)
        assert r.lossless is fine and r.identical == pytest.approx(3 / 4)
        assert r.divergences[0]["position"] == 3 and r.divergences[0]["tolerated"] is fine


def test_real_bfloat16_target():
    target = tiny_target("llama")
    target = type(target).from_model(target.model.to(torch.bfloat16), target.tokenizer, name="bf16")
    r = evaluate(tiny_drafter(target), target, PROMPTS, max_new_tokens=20, stop_ids=())
    assert r.settings["gap_tolerance"] == .5 and r.lossless is True, r


def test_sampling_is_not_called_lossless(target, trained):
    r = evaluate(trained["anchor-first"], target, PROMPTS, max_new_tokens=12, temperature=1., stop_ids=())
    again = evaluate(trained["anchor-first"], target, PROMPTS[::-1], max_new_tokens=12, temperature=1., stop_ids=())
    assert r.lossless is None and r.identical is None and "not checked" in repr(r)
    assert r.plain_tokens_per_second > 0 and again.tau > 0
    alone = evaluate(trained["anchor-first"], target, PROMPTS, max_new_tokens=12, temperature=1., stop_ids=(), check_lossless=False)
    assert alone.plain_tokens_per_second is None and [x["lengths"] for x in alone.rows] == [x["lengths"] for x in r.rows]


# Prompts


def test_prompt_forms_agree(target):
    chat = [dict(role="user", content="hello")]
    ids = target.encode_prompt(chat)
    answered = chat + [dict(role="assistant", content="hi"), dict(role="user", content="more")]
    dicts = [dict(messages=answered), dict(turns=["hello", "more"]), dict(prompt="hello"), dict(prompt=chat), dict(input_ids=ids),
             dict(input_ids=[*ids, 4, 5], loss_mask=[0] * len(ids) + [1, 1])]
    for form in ("hello", chat, answered, ids, np.array(ids), torch.tensor(ids), *dicts):
        assert prompt_ids(form, target) == ids, form
    assert prompt_ids(dict(text="hello"), target) == [104, 101, 108, 108, 111]


@pytest.mark.parametrize("prompts, message", [
    ([], "no prompts"), ([[5], dict(messages=[])], "prompt 1: .*messages"),
    ([dict(messages=[dict(role="assistant", content="x")])], "prompt 0"), ([dict(turns=[])], "turns"),
    ([dict(question="x")], "question"), ([[5], []], "prompt 1: no tokens"), ([["a", "b"]], "token ids"),
    ([dict(input_ids=[4, 5], loss_mask=[1, 1])], "no tokens before the answer"), ("hello", "single one"), (dict(text="x"), "single one"),
    ([[5], [5, 999]], "prompt 1: token id 999"), ([[-2]], "prompt 0: token id -2")])
def test_bad_prompts(target, prompts, message):
    with pytest.raises(DataError, match=message):
        evaluate(tiny_drafter(target), target, prompts)


def test_a_target_where_a_drafter_belongs_is_named(target):
    with pytest.raises(ConfigError, match="got a Target and a Drafter"):
        evaluate(target, tiny_drafter(target), [[5]])
