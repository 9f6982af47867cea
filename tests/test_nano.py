"Nano target: chats, split, checker, tokenizer, packing, greedy decoding, files."
import json
import math
import random
import re

import numpy as np
import pytest
import torch

from dflash_nb import nano
from dflash_nb.config import ConfigError
from dflash_nb.nano import KINDS, is_loop, nano_answers, nano_chats, nano_config, nano_correct, nano_score, nano_tokenizer

torch.set_num_threads(1)


def first_user(chat):
    text = next(m["content"] for m in chat["messages"] if m["role"] == "user")
    for hi, _ in nano._OPENERS:
        if hi and text.startswith(hi):
            text = text[len(hi):]
    return text


@pytest.fixture(scope="module")
def chats():
    return nano_chats(2500, 11)


@pytest.fixture(scope="module")
def tok(chats):
    return nano_tokenizer(chats)


class Small:
    "A tiny untrained model with the nano tokenizer"

    def __init__(self, tok):
        from transformers import Qwen3ForCausalLM
        torch.manual_seed(0)
        self.model = Qwen3ForCausalLM(nano_config(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32)).eval()
        self.tokenizer = tok


def test_same_seed_same_chats_and_splits_differ():
    assert nano_chats(20, 3) == nano_chats(20, 3) != nano_chats(20, 4)
    assert len(KINDS) >= 8
    assert {c["kind"] for c in nano_chats(600, 3)} == {*KINDS, "mixed"}


def test_no_heldout_problem_in_training():
    "Under any greeting: the split hashes what was drawn, not the wording"
    train = {first_user(c) for c in nano_chats(12_000, 1)}
    held = {first_user(c) for c in nano_chats(400, 2, "heldout")}
    assert len(held) > 300 and not train & held


@pytest.mark.parametrize("kind", KINDS)
def test_reference_answers_are_right_and_checked(kind):
    for c in nano_chats(60, 5, kinds=[kind]):
        said = [m["content"] for m in c["messages"] if m["role"] == "assistant"]
        assert len(said) == len(c["answers"]) and all(nano_correct(c, s, i) for i, s in enumerate(said))
        assert not is_loop(said[0])
        assert not nano_correct(c, said[0][:-6], 0)


def test_equations_hold(chats):
    "Every equation that an answer shows is true"
    seen = 0
    for c in chats:
        if c["kind"] in ("code", "format", "mixed"):
            continue
        text = " ".join(m["content"] for m in c["messages"] if m["role"] == "assistant")
        for left, right in re.findall(r"(?<![\d=] )\b(\d+(?: [-+x] \d+)+) = (\d+)\b(?! [-+x/])", text):
            assert eval(left.replace("x", "*")) == int(right), text
            seen += 1
    assert seen > 1000


def test_dates_against_the_calendar():
    from datetime import date, timedelta
    rng = random.Random(0)
    months = {m: i + 1 for i, m in enumerate(nano._MONTHS)}
    for _ in range(200):
        (m, d, n), turns = nano._later(rng)
        day = date(2023, m + 1, d) + timedelta(days=n)
        name, number = turns[0][2].split()
        assert (months[name], int(number)) == (day.month, day.day)
        (m, a, b, far), turns = nano._between(rng)
        end = date(2023 + (m == 11 and far), (m + far) % 12 + 1, b)
        assert turns[0][2] == f"{(end - date(2023, m + 1, a)).days} days"


def test_code_examples_run():
    for c in nano_chats(80, 2, kinds=["code"]):
        code, call, result = re.search(r"```python\n(.*)\n```\nFor example, (.*) returns (.*)", c["answers"][0], re.S).groups()
        space = {}
        exec(code, space)
        assert repr(eval(call, space)) == result


@pytest.mark.parametrize("want, answer, ok", [
    ("42", "The answer is 42.", True), ("42", "The answer is 42", True), ("42", "42", True), ("42", "The answer is 142.", False), ("42", "The answer is -42.", False),
    ("3, 4", "The sorted list is 2, 3, 4.", True), ("42", "The answer is 42. Or 43.", False), ("42", "", False), ("yes", "The answer is no.", False)])
def test_checker(want, answer, ok):
    assert nano_correct(dict(answers=[want]), answer) is ok


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="split='valid'"):
        nano_chats(1, 0, "valid")
    with pytest.raises(ConfigError, match="poems"):
        nano_chats(1, 0, kinds=["poems"])
    with pytest.raises(ConfigError, match="no model folder"):
        nano_answers("no/such/folder", [])
    if not torch.cuda.is_available():
        assert nano.main(["--out", "unused", "--device", "cuda"]) == 2


def test_tokenizer_contract(tok, chats):
    assert len(tok) == nano.VOCAB and (tok.pad_token_id, tok.eos_token_id, tok.mask_token_id) == (0, 2, 3)
    for c in chats[:60]:
        enc = tok.apply_chat_template(c["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = enc["input_ids"], np.array(enc["assistant_masks"], bool)
        said = "".join(m["content"] + "<|im_end|>" for m in c["messages"] if m["role"] == "assistant")
        assert tok.decode(np.array(ids)[mask].tolist()) == said and tok.mask_token_id not in ids
        flags = nano._flags(ids, 1, 2, tok.convert_tokens_to_ids("assistant"))
        assert ((flags & nano._ANSWER > 0) == mask).all()
        assert tok.decode(ids) == nano._render(c["messages"])
    assert len(tok.encode("12345")) == 5


def test_generation_prompt_starts_like_the_training_text(tok, chats):
    messages = chats[0]["messages"]
    full, head = tok.apply_chat_template(messages)["input_ids"], tok.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert full[:len(head)] == head


def test_packing_keeps_every_document_once():
    rng = random.Random(0)
    docs = [[i] * rng.randint(20, 300) for i in range(700)]
    rows = nano._pack(docs, 512)
    assert sorted(i for r in rows for i in r) == list(range(700))
    used = [sum(len(docs[i]) for i in r) for r in rows]
    assert max(used) <= 512 and sum(used) / (512 * len(used)) > .9


def test_positions_masks_and_weights_stop_at_documents(tok):
    ids, flags = nano._shard((40, 0, tok.backend_tokenizer.to_str(), 256))
    ids_RT, pos_RT, mask, weight = nano._unpack(torch.tensor(ids.astype("int32")), torch.tensor(flags))
    starts = (flags & nano._START) > 0
    for r in range(len(ids)):
        doc = np.cumsum(starts[r])
        want = (doc[:, None] == doc[None]) & np.tri(256, dtype=bool)
        assert (mask[r, 0].numpy() == want).all() and (pos_RT[r].numpy()[starts[r]] == 0).all()
        assert (pos_RT[r].numpy() < 256).all() and (np.diff(pos_RT[r].numpy())[~starts[r][1:]] == 1).all()
    assert (weight.numpy()[starts[:, 1:]] == 0).all() and (weight.numpy()[(flags[:, 1:] & nano._REAL) == 0] == 0).all()


def test_learning_rate_ends_at_zero():
    rates = [nano._lr(s, 1.) for s in np.linspace(0, 1, 101)]
    assert rates[0] == 0 and max(rates) <= 1 and math.isclose(rates[-1], 0, abs_tol=1e-12) and max(rates) > .99


def test_left_padding_does_not_change_greedy_answers(tok, chats):
    small = Small(tok)
    some = chats[:6]
    together = nano_answers(small, some, max_new_tokens=8)
    alone = [nano_answers(small, [c], max_new_tokens=8)[0] for c in some]
    assert together == alone and some[0]["messages"][-1]["content"] != together[0]["messages"][-1]["content"]


def test_answers_follow_the_models_own_earlier_turns(tok):
    small = Small(tok)
    chat = dict(messages=[dict(role="user", content="Hi"), dict(role="assistant", content="x"), dict(role="user", content="And?"), dict(role="assistant", content="y")])
    out = nano_answers(small, [chat], max_new_tokens=5)[0]
    again = nano_answers(small, [dict(messages=out["messages"])], max_new_tokens=5)[0]
    assert again["messages"] == out["messages"] and chat["messages"][1]["content"] == "x"


def test_score_counts_wrong_and_loops():
    good = dict(kind="a", answers=["7"], finished=True, messages=[dict(role="user", content=""), dict(role="assistant", content="The answer is 7.")])
    bad = dict(good, finished=False, messages=[dict(role="user", content=""), dict(role="assistant", content="The answer is. " * 9)])
    s = nano_score([good, bad])
    assert s["correct"] == {"a": .5, "all": .5} and (s["loops"], s["unfinished"]) == (1, 1) and s["wrong"][0]["want"] == "7"


def test_rows_stop_at_the_byte_limit(tmp_path):
    rows = [dict(a="x" * 50)] * 10
    kept = nano._write_rows(tmp_path / "r.jsonl", rows, 200)
    text = (tmp_path / "r.jsonl").read_text()
    assert len(kept) == 3 == len(text.splitlines()) and len(text) <= 200 and json.loads(text.splitlines()[0]) == rows[0]
