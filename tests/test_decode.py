"Decoding: speculation repeats the target token for token, at every limit and stop, and samples from its distribution."
import math

import decoding
import pytest
import torch
from decoding import LAYOUTS, answers, cheat, first_slot, fit, lookup_target, tiny_drafter, tiny_target

import dflash_nb.decode as decode
from dflash_nb.config import ConfigError, DataError, DrafterConfig
from dflash_nb.decode import (
    Decoded,
    drafts_a_call,
    draw_token,
    generate,
    position_counts,
    probabilities,
    speculate,
    verify_greedy,
    verify_sampled,
)
from dflash_nb.drafter import Drafter

torch.set_num_threads(1)
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111]
REAL = decode.draft_tokens
target, trained = decoding.target, decoding.trained  # fixtures


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "gemma2", "gemma3", "qwen3_moe", "mixtral", "mistral", "gpt_neox"])
def test_speculation_repeats_the_target(family, monkeypatch):
    target, n = tiny_target(family), 22
    plain = generate(target, PROMPT, n, stop_ids=())
    truth = PROMPT + plain.ids
    wrong = {len(PROMPT) + i for i in (3, 4, 9, 17, 18)}
    for layout in LAYOUTS:
        drafter = tiny_drafter(target, layout, block_size=5)
        assert speculate(target, drafter, PROMPT, n, stop_ids=()).ids == plain.ids
        with monkeypatch.context() as patch:
            cheat(patch, truth, wrong, REAL)
            fast = speculate(target, drafter, PROMPT, n, stop_ids=())
        assert fast.ids == plain.ids
        assert len(set(fast.lengths)) > 1 and sum(fast.lengths) == n - 1


def test_sliding_window_is_passed_by_many_blocks():
    target = tiny_target("mistral")
    assert target.config.sliding_window == 8
    plain = generate(target, PROMPT, 40, stop_ids=())
    assert len(set(plain.ids)) > 3
    assert speculate(target, tiny_drafter(target), PROMPT, 40, stop_ids=()).ids == plain.ids


def test_plain_decoding_equals_full_forwards():
    target = tiny_target("qwen3")
    ids = list(PROMPT)
    for _ in range(12):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert generate(target, PROMPT, 12, stop_ids=()).ids == ids[len(PROMPT):]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_trained_drafter_varies_and_is_lossless(target, trained, layout):
    seen = []
    for prompt in ([5, 200], [17, 200], [30, 31, 200]):
        plain = generate(target, prompt, 30, stop_ids=())
        fast = speculate(target, trained[layout], prompt, 30, stop_ids=())
        assert fast.ids == plain.ids
        assert sum(fast.lengths) == 29 and fast.calls < 29
        seen += fast.lengths
    assert len(set(seen)) >= 3, seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_perfect_drafter_fills_every_block(target, layout, monkeypatch):
    B = 6
    drafts = B - first_slot(layout)
    n = 1 + 4 * (drafts + 1)
    truth = PROMPT + generate(target, PROMPT, n, stop_ids=()).ids
    cheat(monkeypatch, truth, real=REAL)
    fast = speculate(target, tiny_drafter(target, layout, B), PROMPT, n, stop_ids=())
    assert fast.lengths == [drafts + 1] * 4 and fast.accepted == [drafts] * 4
    assert fast.tau == (B if layout == "anchor-first" else B + 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_overfitted_drafter_fills_blocks(target, layout):
    prompt = [5, 200]
    drafter = fit(tiny_drafter(target, layout), target, answers(target, [prompt], 26, stop_ids=()), 90, lr=1e-2)
    full = 6 - first_slot(layout) + 1
    lengths = speculate(target, drafter, prompt, 26, stop_ids=()).lengths
    assert lengths[:-1] == [full] * (len(lengths) - 1), lengths


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 8, 13])
def test_token_limit(target, layout, n, monkeypatch):
    plain = generate(target, PROMPT, n, stop_ids=())
    assert len(plain.ids) == n and plain.stopped == "length"
    drafter = tiny_drafter(target, layout)
    assert speculate(target, drafter, PROMPT, n, stop_ids=()).ids == plain.ids
    cheat(monkeypatch, PROMPT + generate(target, PROMPT, n + 9, stop_ids=()).ids, real=REAL)
    fast = speculate(target, drafter, PROMPT, n, stop_ids=())
    assert fast.ids == plain.ids and sum(fast.lengths) == n - 1 and fast.stopped == "length"
    assert fast.calls == math.ceil((n - 1) / (drafts_a_call(drafter.cfg) + 1))


@pytest.mark.parametrize("offset", range(1, 13))
def test_stop_token_anywhere_in_the_block(target, offset, monkeypatch):
    "The stop token is the prefill's own, a bonus, or in the middle of a draft: it is kept and nothing follows it."
    long = generate(target, PROMPT, 16, stop_ids=()).ids
    first = [long.index(t) for t in long]
    if first[offset - 1] != offset - 1:
        pytest.skip("this token came earlier")
    stop = long[offset - 1]
    plain = generate(target, PROMPT, 30, stop_ids=(stop,))
    assert plain.ids == long[:offset] and plain.stopped == "eos"
    cheat(monkeypatch, PROMPT + long, real=REAL)
    fast = speculate(target, tiny_drafter(target), PROMPT, 30, stop_ids=(stop,))
    assert fast.ids == plain.ids and fast.stopped == "eos"
    assert sum(fast.lengths) == offset - 1
    assert all(a <= o for a, o in zip(fast.accepted, fast.offered, strict=True))
    if fast.calls:
        last = fast.lengths[-1]
        assert (fast.offered[-1], fast.accepted[-1]) == ((5, 5) if last == 6 else (last, last))


def test_stop_token_as_rejected_draft_does_not_stop(target, monkeypatch):
    long = generate(target, PROMPT, 20, stop_ids=()).ids
    cheat(monkeypatch, PROMPT + long, wrong={len(PROMPT) + 3}, real=REAL)
    stop = (long[3] + 1) % 200  # what the wrong draft proposes
    if stop in long:
        pytest.skip("the target says it, too")
    fast = speculate(target, tiny_drafter(target), PROMPT, 20, stop_ids=(stop,))
    assert fast.ids == long and fast.stopped == "length"


def test_default_stop_ids_are_the_targets():
    target = lookup_target(eos=int(generate(lookup_target(), PROMPT, 8, stop_ids=()).ids[4]))
    plain = generate(target, PROMPT, 30)
    assert plain.ids[-1] == 257 and len(plain.ids) == 6 and plain.stopped == "eos"
    assert speculate(target, tiny_drafter(target), PROMPT, 30).ids == plain.ids


def test_model_length_ends_the_text():
    target = lookup_target(max_position_embeddings=24)
    plain = generate(target, PROMPT, 100, stop_ids=())
    assert len(plain.ids) == 24 - len(PROMPT) and plain.stopped == "length"
    assert speculate(target, tiny_drafter(target), PROMPT, 100, stop_ids=()).ids == plain.ids
    with pytest.raises(DataError, match="24 positions"):
        generate(target, list(range(24)), 4)


def test_small_draft_budget(target, trained):
    plain = generate(target, PROMPT, 16, stop_ids=())
    for k in (1, 3):
        fast = speculate(target, trained["anchor-first"], PROMPT, 16, stop_ids=(), num_draft=k)
        assert fast.ids == plain.ids and max(fast.lengths) <= k + 1 and max(fast.offered) <= k


def test_budget_keeps_the_trained_block(target, trained):
    "The first drafts do not depend on how many are read: the whole block is run."
    full = speculate(target, trained["anchor-first"], [5, 200], 30, stop_ids=())
    few = speculate(target, trained["anchor-first"], [5, 200], 30, stop_ids=(), num_draft=2)
    assert few.lengths[0] == min(full.lengths[0], 3)


def test_shrunken_last_block_is_lossless(target, trained):
    for n in (3, 5, 9):
        plain = generate(target, [5, 200], n, stop_ids=())
        for drafter in trained.values():
            assert speculate(target, drafter, [5, 200], n, stop_ids=(), shrink_last=True).ids == plain.ids


def test_mask_token_survives_in_the_text(monkeypatch):
    "A target that says the mask token is decoded like any other."
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    mask = drafter.cfg.mask_token_id
    with torch.no_grad():
        target.model.lm_head.weight[mask] = 3 * target.model.lm_head.weight[generate(target, PROMPT, 5, stop_ids=()).ids[2]]
    plain = generate(target, PROMPT, 12, stop_ids=())
    assert mask in plain.ids
    assert speculate(target, drafter, PROMPT, 12, stop_ids=()).ids == plain.ids


@pytest.mark.parametrize("wrong", [dict(max_new_tokens=0), dict(temperature=-1.), dict(temperature=math.nan), dict(temperature=math.inf)])
def test_bad_knobs(target, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        generate(target, PROMPT, **{"max_new_tokens": 4, **wrong})


@pytest.mark.parametrize("num", [0, -1, 6])
def test_bad_budget(target, num):
    with pytest.raises(ConfigError, match="1 to 5"):
        speculate(target, tiny_drafter(target), PROMPT, 4, num_draft=num)


@pytest.mark.parametrize("ids", [[], [-1], [4, 99_999]])
def test_bad_prompt(target, ids):
    with pytest.raises(DataError):
        generate(target, ids, 4)


def test_counts_by_position():
    a = Decoded([0] * 8, [4, 2, 1], [3, 3, 1], [3, 1, 1])
    b = Decoded([0] * 3, [1, 1], [3, 2], [0, 0])
    assert position_counts([a, b]) == dict(calls=5, offered=[5, 4, 3], reached=[5, 2, 1], accepted=[3, 1, 1])
    assert position_counts([Decoded([1])], 2) == dict(calls=0, offered=[0, 0], reached=[0, 0], accepted=[0, 0])
    assert math.isnan(Decoded([1]).tau)


# Sampling


def chi_square(seen, p):
    "p-value of Pearson's test that counts follow p."
    expected = p * seen.sum()
    keep = expected > 0
    assert seen[~keep].sum() == 0, "a token of probability 0 was emitted"
    stat = float(((seen - expected)[keep] ** 2 / expected[keep]).sum())
    return float(torch.special.gammaincc(torch.tensor((int(keep.sum()) - 1) / 2), torch.tensor(stat / 2)))


def pair_counts(verify, p_KV, q_KV, n, seed):
    "Counts of the first two emitted tokens over n verifications of two drafts from q."
    g, V = torch.Generator().manual_seed(seed), p_KV.shape[-1]
    drafts = draw_token(q_KV.expand(n, *q_KV.shape), torch.rand(n, len(q_KV), generator=g, dtype=torch.float64))
    seen = torch.zeros(V, V)
    for d in drafts:
        accepted, bonus = verify(p_KV, q_KV, d, g)
        out = [*d[:accepted].tolist(), bonus]
        if len(out) < 2:  # the second token comes from the next call, straight from the target
            out.append(int(draw_token(p_KV[1], torch.rand(1, generator=g, dtype=torch.float64))))
        seen[out[0], out[1]] += 1
    return seen


def always_from_target(p, q, drafts, g):
    "Wrong rule: a rejected slot is drawn from p instead of the residual."
    accepted, bonus = verify_sampled(p, q, drafts, g)
    return accepted, bonus if accepted == len(drafts) else int(draw_token(p[accepted], torch.rand(1, generator=g, dtype=torch.float64)))


def accept_on_p(p, q, drafts, g):
    "Wrong rule: accept with probability p(d), as if the drafts were certain."
    return verify_sampled(p, torch.where(q > 0, 1., 0.).double(), drafts, g)


@pytest.mark.parametrize("rule, right", [(verify_sampled, True), (always_from_target, False), (accept_on_p, False)])
def test_emitted_tokens_follow_the_target(rule, right):
    g = torch.Generator().manual_seed(5)
    p, q = (probabilities(torch.randn(n, 4, generator=g), .5) for n in (3, 2))
    seen = pair_counts(rule, p, q, 2500, seed=1)
    value = chi_square(seen.flatten(), torch.outer(p[0], p[1]).flatten())
    assert (value > .01) if right else (value < 1e-6), value


def test_impossible_drafts_and_certain_targets():
    g = torch.Generator().manual_seed(0)
    p = torch.tensor([[0., 1., 0.], [0., 0., 1.]], dtype=torch.float64)
    assert verify_sampled(p, p[:1], torch.tensor([1]), g) == (1, 2)
    for _ in range(50):
        q = torch.tensor([[.5, 0., .5]], dtype=torch.float64)
        assert verify_sampled(p, q, torch.tensor([2]), g) == (0, 1)
    assert verify_greedy(p, torch.tensor([1])) == (1, 2)


class TableTarget:
    "A target of five tokens whose next token depends on the last two; its cache is the list of tokens."
    device, vocab_size, eos_ids, config, layers = torch.device("cpu"), 5, (), None, (0,)

    def __init__(self, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.table, self.vectors = torch.randn(5, 5, 5, generator=g), torch.randn(5, 16, generator=g)

    def new_cache(self):
        return []

    def crop(self, cache, length):
        del cache[length:]

    def step(self, ids_1T, cache, layer_ids=(), logits_from=0):
        cache += (new := ids_1T[0].tolist())
        before = [0, *cache][-len(new) - 1:-1]
        return self.table[before, new][None, logits_from:], self.vectors[new][None]

    def embed(self, ids):
        return self.vectors[ids]

    def head(self, h):
        return h @ self.vectors.T


def test_sampled_text_has_the_targets_distribution():
    "Three tokens end to end at temperature 1.3, against the exact distribution, with a drafter of its own mind."
    target, t, n, first, second = TableTarget(), 1.3, 1500, 1, 3
    shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=16,
                 vocab_size=5, num_target_layers=6)
    drafter = Drafter(DrafterConfig(**shape, rope_parameters=dict(rope_type="default", rope_theta=10_000.), target_layer_ids=(0,),
                                    mask_token_id=4, block_size=3))
    p = probabilities(target.table, t)
    exact = torch.einsum("a,ab,abc->abc", p[first, second], p[second], p)
    g, seen, calls = torch.Generator().manual_seed(3), torch.zeros(5, 5, 5), 0
    for _ in range(n):
        run = speculate(target, drafter, [first, second], 3, temperature=t, generator=g, io=target)
        seen[tuple(run.ids)] += 1
        calls += run.calls
    assert 1.1 * n < calls < 1.9 * n, "drafts are sometimes accepted, sometimes not"
    assert chi_square(seen.flatten(), exact.flatten()) > .01
    assert chi_square(seen.sum((0, 1)), exact.sum((0, 1))) > .01
    assert chi_square(seen.sum((0, 1)), p[first].mean(0)) < 1e-6, "the test can fail"


def test_sampling_draws_from_its_own_generator(target):
    drafter = tiny_drafter(target)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    how = dict(max_new_tokens=12, temperature=5., stop_ids=())
    runs = [speculate(target, drafter, PROMPT, **how, generator=torch.Generator().manual_seed(s)).ids for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert speculate(target, drafter, PROMPT, **how).ids == speculate(target, drafter, PROMPT, **how).ids
    assert torch.equal(state, torch.get_rng_state())


def test_low_temperature_is_greedy(target):
    drafter = tiny_drafter(target)
    greedy = generate(target, PROMPT, 12, stop_ids=()).ids
    assert generate(target, PROMPT, 12, temperature=1e-4, stop_ids=()).ids == greedy
    assert speculate(target, drafter, PROMPT, 12, temperature=1e-4, stop_ids=()).ids == greedy
