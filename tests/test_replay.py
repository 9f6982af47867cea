"Decoding by replay equals eager decoding: tokens, calls, stops and limits; what was not recorded is refused."
import decoding
import pytest
import torch
from decoding import LAYOUTS, tiny_drafter, tiny_target

from dflash_nb.config import ConfigError
from dflash_nb.decode import generate, speculate
from dflash_nb.evaluate import evaluate
from dflash_nb.replay import Replay

torch.set_num_threads(1)
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111]
target, trained = decoding.target, decoding.trained  # fixtures


def same(a, b):
    return [getattr(a, k) == getattr(b, k) for k in ("ids", "lengths", "offered", "accepted", "stopped", "prompt_len")]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_and_calls_are_those_of_eager_decoding(family):
    target = tiny_target(family, sliding_window=512) if family == "gemma2" else tiny_target(family)
    drafter = tiny_drafter(target, block_size=5)
    engine = Replay(target, drafter, length=64, graphs=True)
    for n in (1, 14):
        assert all(same(engine.generate(target, PROMPT, n), generate(target, PROMPT, n)))
        assert all(same(engine.speculate(target, drafter, PROMPT, n), speculate(target, drafter, PROMPT, n)))


@pytest.mark.parametrize("layout, num_draft", [(LAYOUTS[0], None), (LAYOUTS[1], 2)])
def test_half_trained_drafter(target, trained, layout, num_draft):
    drafter, seen = trained[layout], []
    engine = Replay(target, drafter, length=64, num_draft=num_draft)
    for prompt in ([5, 200], [17, 200], [5, 200]):
        slow = speculate(target, drafter, prompt, 30, stop_ids=(), num_draft=num_draft)
        fast = engine.speculate(target, drafter, prompt, 30, stop_ids=())
        assert all(same(fast, slow))
        seen += fast.lengths
    assert len(set(seen)) >= 2, seen


def test_stop_inside_a_block(target, trained):
    drafter = trained[LAYOUTS[0]]
    engine = Replay(target, drafter, length=64)
    plain = generate(target, [5, 200], 30, stop_ids=())
    for stop in plain.ids[4:7]:
        fast = engine.speculate(target, drafter, [5, 200], 30, stop_ids=(stop,))
        assert fast.stopped == "eos" and all(same(fast, speculate(target, drafter, [5, 200], 30, stop_ids=(stop,))))


def test_evaluate_takes_it(target, trained):
    drafter = trained[LAYOUTS[0]]
    prompts = [[5, 200], [17, 200], [5, 201]]
    slow = evaluate(drafter, target, prompts, 20)
    fast = evaluate(drafter, target, prompts, 20, engine=Replay(target, drafter, length=64))
    assert fast.tau == slow.tau and fast.lossless and fast.tokens_per_second and fast.plain_tokens_per_second


def test_what_was_not_recorded_is_refused(target, trained):
    drafter = trained[LAYOUTS[0]]
    engine = Replay(target, drafter, length=32)
    for wrong in (dict(temperature=.5), dict(num_draft=1)):
        with pytest.raises(ConfigError):
            engine.speculate(target, drafter, [5, 200], 8, **wrong)
    with pytest.raises(ConfigError, match="too short"):
        engine.speculate(target, drafter, [5, 200], 30)
    with pytest.raises(ConfigError, match="another"):
        engine.speculate(target, tiny_drafter(target), [5, 200], 8)
    with pytest.raises(ConfigError, match="sliding window"):
        Replay(tiny_target("mistral"), length=64)


@pytest.mark.cuda
def test_graphs_on_a_gpu():
    target = tiny_target("llama")
    target = type(target).from_model(target.model.to("cuda"), target.tokenizer, target.name)
    drafter = tiny_drafter(target, block_size=5).to("cuda")
    engine = Replay(target, drafter, length=64)
    for _ in range(2):
        assert engine.generate(target, PROMPT, 22).ids == generate(target, PROMPT, 22).ids
        assert all(same(engine.speculate(target, drafter, PROMPT, 22), speculate(target, drafter, PROMPT, 22)))
