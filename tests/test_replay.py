"Decoding by replay equals eager decoding: tokens, calls, stops and limits; what was not recorded is refused."
from types import SimpleNamespace

import decoding
import pytest
import torch
from decoding import LAYOUTS, tiny_drafter, tiny_target

from dflash_nb import graphs
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


def test_closing_gives_back_what_graphs_hold(monkeypatch):
    gone, device = [], torch.device("cuda", 7)
    pool = SimpleNamespace(release=lambda: gone.append("pool"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: gone.append(d))
    monkeypatch.setattr(graphs, "_IDLE", {})
    graphs._drop(device, (SimpleNamespace(close=lambda: gone.append("graph")), None), pool, "stream")
    assert gone == [device, "graph", "pool"] and graphs._IDLE == {device: ["stream"]}
    assert graphs.private_stream(device) == "stream" and not graphs._IDLE[device]


def test_a_closed_one_is_refused_and_a_failed_one_closes(target, trained, monkeypatch):
    drafter = trained[LAYOUTS[0]]
    with Replay(target, drafter, length=64) as engine:
        engine.generate(target, [5, 200], 4)
    engine.close()
    assert engine.side is engine.own is engine.plain is engine.fast is None
    with pytest.raises(ConfigError, match="closed"):
        engine.speculate(target, drafter, [5, 200], 4)
    seen = []
    monkeypatch.setattr(Replay, "close", lambda self: seen.append("closed"))
    monkeypatch.setattr(Replay, "_fast_step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Replay(target, drafter, length=64)
    assert seen == ["closed"]


@pytest.mark.cuda
def test_graphs_on_a_gpu():
    target = tiny_target("llama")
    target = type(target).from_model(target.model.to("cuda"), target.tokenizer, target.name)
    drafter = tiny_drafter(target, block_size=5).to("cuda")
    engine = Replay(target, drafter, length=64)
    for _ in range(2):
        assert engine.generate(target, PROMPT, 22).ids == generate(target, PROMPT, 22).ids
        assert all(same(engine.speculate(target, drafter, PROMPT, 22), speculate(target, drafter, PROMPT, 22)))


@pytest.mark.cuda
def test_a_stream_is_used_again_after_close():
    target = tiny_target("llama")
    target = type(target).from_model(target.model.to("cuda"), target.tokenizer, target.name)
    drafter, seen, held = tiny_drafter(target, block_size=5).to("cuda"), set(), []
    for _ in range(6):
        with Replay(target, drafter, length=64) as engine:
            assert engine.speculate(target, drafter, PROMPT, 22).ids == generate(target, PROMPT, 22).ids
            seen.add(engine.stream.cuda_stream)
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    assert len(seen) == 1 and len(set(held[1:])) == 1, (seen, held)
