"""What readers of the data notebook need not see: templates of many kinds, malformed rows, invariants of packing and of anchors."""

import json
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_nb import data
from dflash_nb.config import ConfigError, DataError, TrainConfig
from dflash_nb.data import (
    Chats,
    Dataset,
    batch_at,
    batches,
    best_fit,
    draw_anchors,
    encode_chats,
    load_chats,
    marked_text,
    pack,
    valid_anchors,
    validation_blocks,
)

G, E = "{% generation %}", "{% endgeneration %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    + G
    + "{{ m.content }}<|im_end|>"
    + E
    + "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ '<|bos|>' }}{% for m in messages %}<|start_header|>{{ m.role }}<|end_header|>\n\n{% if m.role == 'assistant' %}"
    + G
    + "{{ m.content | trim }}<|eot|>"
    + E
    + "{% else %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}"
)
GEMMA = (
    "<|bos|>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m.role == 'assistant' %}<|start_of_turn|>model\n" + G + "{{ m.content | trim }}<|end_of_turn|>" + E + "{{ '\n' }}"
    "{% else %}<|start_of_turn|>{{ m.role }}\n{{ m.content | trim }}<|end_of_turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_turn|>model\n{% endif %}"
)
MISTRAL = (
    "<|bos|>{% for m in messages %}{% if m.role == 'assistant' %}"
    + G
    + " {{ m.content }}</s>"
    + E
    + "{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    + G
    + "{{ m.content }}<|end|>"
    + E
    + "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT: "
    + G
    + "{{ m.content }}\n"
    + E
    + "{% else %}{{ m.role | upper }}: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
# answers lose their thinking once a user speaks again; the last one always has a think block
THINK = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEMPLATES = dict(chatml=CHATML, llama=LLAMA, gemma=GEMMA, mistral=MISTRAL, phi=PHI, plain=PLAIN)
EOS = dict(chatml="<|im_end|>", llama="<|eot|>", gemma="<|end_of_turn|>", mistral="</s>", phi="<|end|>", plain="<|endoftext|>")


def untag(template):
    return re.sub(r"\{% (end)?generation %\}", "", template)


def make_tokenizer(template, eos="<|im_end|>"):
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token=eos, pad_token="<|pad|>", chat_template=template)
    names = sorted(set(re.findall(r"<\|\w+\|>|</s>", template or "")) - {eos} | {"<|system|>", "<|user|>", "<|assistant|>"})
    tok.add_special_tokens({"additional_special_tokens": names})
    return tok


def turns(*texts, roles=("user", "assistant")):
    return [dict(role=roles[i % 2], content=t) for i, t in enumerate(texts)]


def spans(ds, i, tok):
    "Decoded supervised spans of a document."
    return re.findall(r"\[\[(.*?)\]\]", marked_text(*ds.doc(i), tok), re.S)


CHATS = [
    turns("2+2?", "It is 4."),
    turns("Hi", "Hello there", "Name?", "None \n"),
    turns("a", "b", "c", "d", "e"),
    turns("x", "  two spaces", "y", "é ü 漢 \n\nend"),
]


# ---- ids and masks


@pytest.mark.parametrize("name", TEMPLATES)
def test_difference_equals_generation_tags(name):
    tagged, bare = make_tokenizer(TEMPLATES[name], EOS[name]), make_tokenizer(untag(TEMPLATES[name]), EOS[name])
    a, b = encode_chats([{"messages": c} for c in CHATS], tagged), encode_chats([{"messages": c} for c in CHATS], bare)
    assert a.report.method != b.report.method
    for i, chat in enumerate(CHATS):
        want = tagged.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert a.doc(i)[0].tolist() == want["input_ids"] == b.doc(i)[0].tolist()
        assert a.doc(i)[1].astype(int).tolist() == want["assistant_masks"] == b.doc(i)[1].astype(int).tolist()


def test_system_turns_and_refusing_templates_cost_their_row_alone():
    system = [dict(role="system", content="Be brief."), *CHATS[0]]
    tok = make_tokenizer(untag(GEMMA), EOS["gemma"])
    ds = encode_chats([{"messages": c} for c in (CHATS[0], system, CHATS[1], [*CHATS[0], *CHATS[0][1:]])], tok)
    assert ds.report.kept == 2 and ds.report.skipped["refused by the chat template"].rows == [2, 4]
    assert "System role" in ds.report.skipped["refused by the chat template"].example
    assert len(encode_chats([{"messages": system}], make_tokenizer(CHATML))) == 1


def test_thinking_template_supervises_history_and_last_turn():
    tok = make_tokenizer(THINK)
    chat = turns("2+2?", "4", "0 sure?", "yes")
    chat[3]["reasoning_content"] = "abc"
    ds = encode_chats([{"messages": chat}], tok)
    assert ds.doc(0)[0].tolist() == tok.apply_chat_template(chat)["input_ids"]
    assert spans(ds, 0, tok) == ["4<|im_end|>", "<think>\nabc\n</think>\n\nyes<|im_end|>"]
    assert not ds.report.cut


def test_thinking_off_as_at_serving_time():
    tok = make_tokenizer(THINK)
    ds = encode_chats([{"messages": turns("2+2?", "4", "sure?", "yes")}], tok, template_kwargs=dict(enable_thinking=False))
    assert spans(ds, 0, tok) == ["yes<|im_end|>"]  # the first answer followed another prompt than the one that is rendered
    assert [v.rows for k, v in ds.report.cut.items() if "unsupervised" in k] == [[1]]


def test_history_span_never_runs_into_another_turn():
    "Answers in the history end without any end-of-turn token, so only the last turn can be found."
    t = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' or loop.last %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tok = make_tokenizer(t)
    ds = encode_chats([{"messages": turns("one", "two", "three", "four")}], tok)
    assert spans(ds, 0, tok) == ["four<|im_end|>"]


def test_tokens_after_the_end_of_turn_are_not_supervised():
    tok = make_tokenizer(untag(PHI), "<|endoftext|>")

    class Target:
        tokenizer, vocab_size, eos_ids = tok, 400, tuple(tok.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"]))

    assert spans(encode_chats([{"messages": CHATS[0]}], Target()), 0, tok) == ["It is 4.<|end|>"]


def test_tags_that_lose_offsets_are_not_trusted():
    "White space belongs to no token of this tokenizer, so the helper's mask of an answer runs on to the end of the chat."
    template = (
        "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}"
        + G
        + "{{ m.content }} <|im_end|> "
        + E
        + "{% else %}{{ m.content }} <|im_end|> {% endif %}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    )
    words = "user assistant one two three four QQQQ WWWW XXXX ZZZZ [UNK]".split()
    t = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    t.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", chat_template=template)
    chat = turns("one", "two", "three", "four")
    helper = tok.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert "three" in tok.decode([i for i, m in zip(helper["input_ids"], helper["assistant_masks"], strict=False) if m])
    ds = encode_chats([{"messages": chat}], tok)
    assert [x.replace(" ", "") for x in spans(ds, 0, tok)] == ["two<|im_end|>", "four<|im_end|>"] and "difference" in ds.report.method


def test_merges_across_the_prompt_are_refused_with_three_ways_out():
    "The answer's first letter merges with the prompt's last one: no prompt is a prefix at the token level."
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab[":a"] = len(vocab)
    t = Tokenizer(models.BPE(vocab=vocab, merges=[(":", "a")]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", chat_template=plain)
    with pytest.raises(DataError, match=r"template \w{8} .*\(1\).*\(2\).*\(3\)"):
        encode_chats([{"messages": turns("hi", "abc")}], tok)
    ds = encode_chats([{"messages": turns("hi", "abc")}, {"messages": turns("hi", "xyz")}], tok)
    assert len(ds) == 1 and [v.rows for k, v in ds.report.skipped.items() if "prefix" in k] == [[1]]


@pytest.mark.parametrize("template", [CHATML, untag(CHATML)])
def test_last_turn_only(template):
    tok = make_tokenizer(template)
    ds = encode_chats([{"messages": CHATS[1]}, {"messages": CHATS[2]}], tok, turns="last")
    assert [spans(ds, i, tok) for i in (0, 1)] == [["None \n<|im_end|>"], ["d<|im_end|>"]]


def test_tools_reach_the_template_and_are_batched_by_value():
    t = "{% if tools %}{{ tools[0].function.name }} {% endif %}" + CHATML
    tok = make_tokenizer(t)
    tool = dict(type="function", function=dict(name="clock", description="", parameters={}))
    rows = [{"messages": CHATS[0]}, {"messages": CHATS[0], "tools": [tool]}, {"messages": CHATS[0]}]
    ds = encode_chats(rows, tok)
    assert ["clock" in tok.decode(ds.doc(i)[0]) for i in range(3)] == [False, True, False]
    assert ds.doc(1)[0].tolist() == tok.apply_chat_template(CHATS[0], tools=[tool])["input_ids"]


def test_truncation_keeps_ids_and_mask_aligned():
    tok = make_tokenizer(CHATML)
    rows = [{"messages": turns("q" * n, "answer" * 3)} for n in (1, 5, 40)]
    full, short = encode_chats(rows, tok), encode_chats(rows, tok, max_length=38)
    for i in range(len(short)):
        assert all(np.array_equal(a, b[:38]) for a, b in zip(short.doc(i), full.doc(i), strict=False))
    assert len(short) == 2 and short.report.cut["longer than max_length=38"].rows == [1, 2]
    assert short.report.skipped["no anchor within max_length=38"].rows == [3]
    with pytest.raises(DataError, match="max_length=1"):
        encode_chats(rows, tok, max_length=1)


def test_text_and_token_rows_keep_their_own_masks():
    tok = make_tokenizer(CHATML)
    ds = encode_chats(["plain text", {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0], "kind": "own"}], tok)
    assert ds.doc(0)[0].tolist() == tok("plain text")["input_ids"] and ds.doc(0)[1].all()
    assert ds.doc(1)[1].tolist() == [False, True, True, False] and ds.meta[1] == dict(kind="own", source_row=2)
    assert len(encode_chats(["plain text"], make_tokenizer(None))) == 1  # needs no template


# ---- the account of rows

BAD = {
    "empty line": b"",
    "not UTF-8 text": b'{"text": "\xff\xfe"}',
    "not valid JSON": b'{"messages": [',
    "a row is no object": b"[1, 2]",
    "none of the keys messages, conversations, text, input_ids": b'{"prompt": "hi"}',
    "messages is no list": b'{"messages": "hi"}',
    "messages is empty": b'{"messages": []}',
    "a message is no object": b'{"messages": ["hi"]}',
    "a message without a role": b'{"messages": [{"content": "hi"}]}',
    "unknown role": b'{"messages": [{"role": "robot", "content": "hi"}]}',
    "a message without content": b'{"messages": [{"role": "user"}]}',
    "a message's content is not text": b'{"messages": [{"role": "user", "content": 7}]}',
    "text with half of a surrogate pair": b'{"text": "\\ud800"}',
    "empty text": b'{"text": " "}',
    "text is no string": b'{"text": 5}',
    "input_ids without loss_mask": b'{"input_ids": [1, 2]}',
    "loss_mask and input_ids differ in length": b'{"input_ids": [1, 2, 3], "loss_mask": [1, 1]}',
    "loss_mask holds more than 0 and 1": b'{"input_ids": [1, 2], "loss_mask": [1, 2]}',
    "input_ids is no list of whole numbers": b'{"input_ids": [1.5, 2], "loss_mask": [1, 1]}',
    "no assistant turn": b'{"messages": [{"role": "user", "content": "hi"}]}',
    "shorter than two tokens": b'{"input_ids": [1], "loss_mask": [1]}',
    "a token id outside the vocabulary": b'{"input_ids": [1, 99999], "loss_mask": [1, 1]}',
    "no supervised token": b'{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}',
    "no two adjacent supervised tokens, so no anchor": b'{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}',
    "input_ids is no list of whole numbers ": b'{"input_ids": [[1], 100000000000000000000000], "loss_mask": [1, 1]}',
    "a token id outside the vocabulary ": b'{"input_ids": [-1, 2], "loss_mask": [1, 1]}',
}


def test_every_malformed_row_is_named_and_the_good_ones_are_kept(tmp_path):
    kinds = list(BAD.items())
    lines, want = [], {}
    for n in range(1, 1001):
        if n % 10 == 0:
            reason, line = kinds[(n // 10) % len(kinds)]
            want.setdefault(reason.strip(), []).append(n)
        else:
            line = json.dumps({"messages": turns(f"question {n}", f"answer {n}"), "kind": "k"}).encode()
        lines.append(line)
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    ds = encode_chats(load_chats(path), make_tokenizer(untag(CHATML)))
    assert ds.ids.max() < 260
    rep = ds.report.as_dict()
    assert (rep["seen"], rep["kept"]) == (1000, 900) and {k: v["rows"] for k, v in rep["skipped"].items()} == want
    assert all(f"{len(v)}  {k}: row" in str(ds.report) and str(v[0]) in str(ds.report) for k, v in want.items())
    assert [m["source_row"] for m in ds.meta] == [n for n in range(1, 1001) if n % 10]
    json.dumps(rep)
    assert len(want) >= 20
    from tiny import tiny_target

    from dflash_nb.trainer import Trainer

    record = Trainer(tiny_target(), ds, TrainConfig(**TRAIN), run_dir=tmp_path / "run").fit()
    assert record.outcome == "finished" and record.step == 2, "the 900 good rows train"


TRAIN = dict(block_size=4, num_draft_layers=1, row_len=96, token_budget=96, num_anchors=8, steps=2, eval_every=2, checkpoint_every=2)


def test_encoding_twice_counts_once_and_lists_may_be_sliced():
    tok, rows = make_tokenizer(CHATML), load_chats([{"messages": c} for c in CHATS] + [{"prompt": "no"}])
    assert isinstance(rows, Chats) and rows.report.seen == 5 and rows.report.kept == 4
    a, b = encode_chats(rows, tok), encode_chats(rows, tok)
    assert a.report.as_dict() == b.report.as_dict() and rows.report.tokens == 0
    assert [m["source_row"] for m in encode_chats(rows[2:], tok).meta] == [3, 4]


@pytest.mark.parametrize("text, match", [("", "has no rows"), ("{}\n[]\n", r"none of the 2 rows.*row 1.*row 2")])
def test_a_file_without_usable_rows_is_one_line(tmp_path, text, match):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=match) as e:
        load_chats(tmp_path / "x.jsonl")
    assert "\n" not in str(e.value)


def test_sources_that_cannot_be_read(tmp_path):
    (tmp_path / "x.csv").write_text("a,b")
    (tmp_path / "x.json").write_text('{"messages": 1}\n{"messages": 2}')
    (tmp_path / "y.json").write_text('"hi"')
    for src, match in (
        (tmp_path / "none.jsonl", "no data file"),
        (tmp_path, "cannot read data"),
        (tmp_path / "x.csv", "cannot read data"),
        (tmp_path / "x.json", "name it .jsonl"),
        (tmp_path / "y.json", "holds a str"),
        ({"messages": []}, "data is a dict"),
        (None, "data is a NoneType"),
        ([], "has no rows"),
    ):
        with pytest.raises(DataError, match=match):
            load_chats(src)


def test_json_files_lists_and_frames_give_the_same_rows(tmp_path):
    pd = pytest.importorskip("pandas")
    rows = [{"messages": c, "kind": "k"} for c in CHATS]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "x.jsonl").write_text("\ufeff" + "\n".join(json.dumps(r) for r in rows))
    want = load_chats(rows)
    assert (
        load_chats(tmp_path / "x.json")
        == load_chats(tmp_path / "x.jsonl")
        == load_chats(pd.DataFrame(rows))
        == load_chats(iter(rows))
        == want
    )


def test_sharegpt_and_parts_become_messages():
    rows = load_chats(
        [
            {"system": "S", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 7},
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
                        "name": None,
                    },
                ]
            },
        ]
    )
    assert [(m["role"], m["content"]) for m in rows[0]["messages"]] == [("system", "S"), ("user", "a"), ("assistant", "b")] and rows[0][
        "id"
    ] == 7
    assert rows[1]["messages"] == [
        dict(role="user", content="ab"),
        dict(role="assistant", content="", tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}]),
    ]


def test_all_rows_skipped_is_an_error_with_reasons():
    with pytest.raises(DataError, match="2 x no assistant turn .rows 1, 2.*; 1 x no supervised token .row 3"):
        encode_chats([{"messages": turns("hi")}] * 2 + [{"input_ids": [1, 2], "loss_mask": [0, 0]}], make_tokenizer(CHATML))
    with pytest.raises(DataError, match="no tokenizer"):
        encode_chats(["text"], object())
    with pytest.raises(DataError, match="turns='first'"):
        encode_chats(["text"], make_tokenizer(CHATML), turns="first")


def test_pieces_and_whole_renderings_agree_or_are_not_trusted(monkeypatch):
    tok, rows = make_tokenizer(untag(CHATML)), [{"messages": turns(*(f"text {i} {j}" for j in range(6)))} for i in range(40)]
    right, calls = encode_chats(rows, tok), []
    assert right.report.method == "the difference of renderings"
    size = data._Whole.size
    monkeypatch.setattr(data._Whole, "size", lambda self, j, part: calls.append(j) or size(self, j, part))
    encode_chats(rows, tok)
    assert len(calls) == 16 * 5, "only the first chats are tokenised again from their start"
    monkeypatch.setattr(data._Pieces, "size", lambda self, j, part: 3)
    assert encode_chats(rows, tok).fingerprint() == right.fingerprint()


# ---- sources of other kinds


def rows_of(n=30):
    return [{"messages": turns(f"q{i}", f"answer {i}"), "kind": "k"} for i in range(n)]


def test_streams_read_again_and_count_once(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows_of()) + "\n{\n")
    stream, tok = load_chats(path, stream=True), make_tokenizer(CHATML)
    want = encode_chats(load_chats(path), tok, chunk=7)
    for _ in range(2):
        got = encode_chats(stream, tok, chunk=7)
        assert got.fingerprint() == want.fingerprint() and got.report.as_dict() == want.report.as_dict()
    assert want.report.skipped["not valid JSON"].rows == [31]
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match="has no rows"):
        encode_chats(load_chats(tmp_path / "none.jsonl", stream=True), tok)


def test_a_stream_into_a_folder_keeps_memory_flat(tmp_path):
    import tracemalloc

    row, tok = rows_of(1)[0], make_tokenizer(CHATML)
    row["messages"][1]["content"] = "x" * 2000

    def peak(n):
        tracemalloc.start()
        ds = encode_chats(data.Stream([row] * n), tok, chunk=20, folder=tmp_path / str(n))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(ds) == n and isinstance(ds._ids.base, np.memmap)
        return top

    peak(40)
    assert peak(400) < peak(100) + 200_000  # a token costs nothing, a document some bytes


def test_folders_open_again_and_torn_ones_are_refused(tmp_path):
    tok = make_tokenizer(CHATML)
    ds = encode_chats(rows_of(), tok, folder=tmp_path / "d")
    again = data.open_dataset(tmp_path / "d")
    assert again.fingerprint() == ds.fingerprint() == encode_chats(rows_of(), tok).fingerprint() and again.meta == ds.meta
    rest, held = again.split(0.2, seed=3)
    memory = encode_chats(rows_of(), tok).split(0.2, seed=3)
    assert (rest.fingerprint(), held.fingerprint()) == (memory[0].fingerprint(), memory[1].fingerprint())
    assert rest.save(tmp_path / "r").fingerprint() == rest.fingerprint()
    assert same(batch_at(pack(rest, 128), CFG, 3), batch_at(pack(memory[0], 128), CFG, 3))
    with pytest.raises(DataError, match="no finished dataset"):
        data.open_dataset(tmp_path)
    (tmp_path / "d" / "mask.bin").write_bytes(b"1")
    with pytest.raises(DataError, match="damaged"):
        data.open_dataset(tmp_path / "d")


def test_parquet(tmp_path):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = rows_of() + [
        {
            "messages": [*turns("time?"), dict(role="assistant", content="", tool_calls=[dict(function=dict(name="f", arguments="{}"))])],
            "kind": None,
        }
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert load_chats(tmp_path / "x.parquet") == list(load_chats(tmp_path / "x.parquet", stream=True)) == load_chats(rows)
    import pandas as pd

    assert load_chats(pd.read_parquet(tmp_path / "x.parquet")) == load_chats(rows)
    (tmp_path / "y.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="no Parquet file"):
        load_chats(tmp_path / "y.parquet")


def test_parquet_through_a_stand_in(tmp_path, monkeypatch):
    "What is asked of the reader: batches of rows, as Python objects."
    import sys
    import types

    asked = []

    class ParquetFile:
        def __init__(self, path):
            asked.append(path)

        def iter_batches(self, batch_size):
            asked.append(batch_size)
            for part in (rows_of()[:10], rows_of()[10:]):
                yield types.SimpleNamespace(to_pylist=lambda part=part: part)

    module = types.ModuleType("pyarrow.parquet")
    module.ParquetFile = ParquetFile
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    assert load_chats(tmp_path / "x.parquet") == load_chats(rows_of()) and asked == [str(tmp_path / "x.parquet"), 1000]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        load_chats(tmp_path / "x.parquet")


def test_names_on_the_hub_through_a_stand_in(monkeypatch):
    import sys
    import types

    asked, lib = [], types.ModuleType("datasets")

    class Splits(dict):
        column_names = {}

    def load_dataset(name, split=None, streaming=False):
        asked.append((name, split, streaming))
        if name == "gone":
            raise ValueError("no such set\nat all")
        sets = Splits(train=rows_of(), test=rows_of(3))
        return sets[split] if split else sets

    lib.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", lib)
    assert len(load_chats("org/set")) == 30 and len(load_chats("org/set", split="test")) == 3
    assert len(list(load_chats("org/set", split="test", stream=True))) == 3 and asked[-1] == ("org/set", "test", True)
    assert len(load_chats(Splits(test=rows_of(3)))) == 3 and len(load_chats(Splits(train=rows_of(2), x=[]))) == 2
    with pytest.raises(DataError, match="splits a, b: choose one with split="):
        load_chats(Splits(a=[], b=[]))
    with pytest.raises(DataError, match="no Hugging Face dataset.*no such set at all"):
        load_chats("gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        load_chats("org/set")


def test_a_table_of_the_datasets_library():
    lib, pa = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    rows = rows_of(5)
    table = lib.Dataset(lib.table.InMemoryTable(pa.Table.from_pylist(rows)), fingerprint="f")
    assert load_chats(table) == load_chats(lib.DatasetDict(train=table)) == list(load_chats(table, stream=True)) == load_chats(rows)


def test_calls_tools_and_system_turns_that_are_broken():
    def call(c):
        return {"messages": [*turns("q"), dict(role="assistant", content="", tool_calls=c)]}

    bad = [
        call([{"x": 1}]),
        call("text"),
        dict(messages=turns("q", "a"), tools="none"),
        dict(messages=turns("q", "a"), tools=[1]),
        dict(messages=[*turns("q"), dict(role="assistant", content="a", reasoning=5)]),
    ]
    rows = load_chats([*bad, dict(messages=turns("q", "a"), system="S", tools=None)])
    assert rows[0]["messages"][0] == dict(role="system", content="S") and "tools" not in rows[0] and len(rows) == 1
    assert {k: v.rows for k, v in rows.report.skipped.items()} == {
        "a tool call without a function's name": [1, 2],
        "tools is no list of objects": [3, 4],
        "a message's thinking is not text": [5],
    }


def test_too_little_supervision_is_counted():
    rows = [{"input_ids": list(range(40)), "loss_mask": [0] * (40 - n) + [1] * n} for n in (7, 8, 9, 16)]
    ds = encode_chats(rows, make_tokenizer(CHATML), min_supervised=9)
    assert len(ds) == 2 and ds.report.skipped["fewer than 9 supervised tokens"].rows == [1, 2]
    with pytest.raises(DataError, match="min_supervised=1"):
        encode_chats(rows, make_tokenizer(CHATML), min_supervised=1)
    with pytest.raises(DataError, match="fewer than 99"):
        encode_chats(rows, make_tokenizer(CHATML), min_supervised=99)


@pytest.mark.slow
def test_a_hundred_thousand_chats(tmp_path):
    "At least 20,000 rows a minute on two cores, with memory that does not grow with the text."
    import os
    import resource

    path, rng = tmp_path / "x.jsonl", np.random.default_rng(0)
    words = "the answer number three of seven and plus because result sum total is".split()
    pool = [" ".join(rng.choice(words, 800)) for _ in range(999)]
    with open(path, "w") as f:
        for _n in range(100_000):
            said = [pool[i % 999][: int(k)] for i, k in zip(rng.integers(0, 999, 4), rng.lognormal(4.5, 0.9, 4).clip(8, 4000), strict=True)]
            f.write(json.dumps(dict(messages=turns(*said))) + "\n")
    tok = load_nano_tokenizer()
    tok.chat_template = untag(tok.chat_template)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.time()
    ds = encode_chats(load_chats(path, stream=True), tok, folder=tmp_path / "ds")
    packed = pack(ds, 3072)
    seconds, grown = time.time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rec = dict(
        rows=len(ds),
        tokens=len(ds._ids),
        seconds=round(seconds, 1),
        rows_per_minute=round(60 * len(ds) / seconds),
        memory_growth_mib=round(grown),
        file_mb=round(path.stat().st_size / 1e6),
        method=ds.report.method,
        utilisation=round(packed.utilisation, 4),
        row_len=3072,
    )
    print(json.dumps(rec))
    if os.environ.get("DFLASH_RESULTS"):
        import platform

        import tokenizers
        import transformers

        rec |= dict(
            date=time.strftime("%Y-%m-%d"),
            hardware=f"{os.cpu_count()} CPU cores ({platform.machine()})",
            python=platform.python_version(),
            transformers=transformers.__version__,
            tokenizers=tokenizers.__version__,
            command="DFLASH_RESULTS=data/results/data_100k.json python -m pytest --slow -s tests/test_data.py -k hundred_thousand",
        )
        with open(os.environ["DFLASH_RESULTS"], "w") as f:
            f.write(json.dumps(rec, indent=1) + "\n")
    assert rec["rows_per_minute"] > 20_000 and grown < 400 and packed.utilisation > 0.97


def load_nano_tokenizer():
    from transformers import AutoTokenizer

    from dflash_nb.target import asset

    return AutoTokenizer.from_pretrained(asset("nano"))


# ---- show, quotas, coverage, hidden states


def test_show_marks_what_is_trained(monkeypatch):
    tok = make_tokenizer(CHATML)
    ds = encode_chats([{"messages": turns("a <b> question", "an & answer " * 5)}] * 4, tok)
    shown = ds.show(2, CFG)
    assert len(shown.parts) == 2 and repr(ds.show(2)) == repr(ds.show(2)) and repr(ds.show(1, seed=1))
    page = shown._repr_html_()
    assert "&lt;b&gt;" in page and "&amp;" in page and "<b> question" not in page and "outline" in page
    for _, tokens in shown.parts:
        at = [i for i, t in enumerate(tokens) if t[2]]
        assert all(tokens[i][1] for i in at)
        want = {k for i in at for k in range(i + 1, i + CFG.block_size) if k < len(tokens) and tokens[k][1]}
        assert {i for i, t in enumerate(tokens) if t[3]} == want
    with pytest.raises(DataError, match="no tokenizer"):
        make_docs().show()


@pytest.mark.parametrize("sizes, slots", [([50, 9, 4], 12), ([50, 9, 4], 60), ([3, 3, 3, 3], 6), ([20], 7), ([2, 30], 1)])
def test_quotas_are_equal_up_to_what_a_document_has(sizes, slots):
    doc = np.repeat(np.arange(len(sizes)), sizes)
    doc = np.r_[doc, [-1] * 5]
    valid = valid_anchors(doc >= 0, doc)
    keys = np.random.default_rng(1).random((1, len(doc)))
    at, keep = data._smallest(data.quota_keys(keys, valid[None], doc[None]), valid[None], slots)
    got = np.bincount(doc[at[keep]], minlength=len(sizes))
    room = np.array(sizes) - 1
    assert keep.sum() == min(slots, room.sum()) and valid[at[keep]].all()
    full = got == room
    assert np.ptp(got[~full]) <= 1 if (~full).any() else True
    assert not full.any() or full.all() or got[full].max() <= got[~full].max() + 1


def test_the_policy_is_read_from_the_config():
    packed = pack(make_docs(low=4, high=100), 128)
    uniform, quota = (batch_at(packed, with_policy(p), 0) for p in ("row", "document"))
    assert same(uniform, batch_at(packed, CFG, 0)) and not torch.equal(uniform.anchors_RN, quota.anchors_RN)
    with pytest.raises(ConfigError, match="anchor_policy='best'"):
        batch_at(packed, with_policy("best"), 0)


def with_policy(policy):
    class Config:
        block_size, row_len, token_budget, num_anchors, seed, layout, anchor_policy = 8, 128, 512, 6, 5, "anchor-first", policy

    return Config


def test_coverage_counts_what_blocks_predict():
    packed = pack(make_docs(40), 128)
    cover = data.coverage(packed, CFG)
    batch = batch_at(packed, CFG | dict(token_budget=128 * len(packed)), 0)
    reached = 0
    for r in range(len(packed)):
        hit = set()
        for a in batch.anchors_RN[r][batch.keep_RN[r]].tolist():
            for p in range(a + 1, min(a + CFG.block_size, 128)):
                if batch.doc_RT[r, p] == batch.doc_RT[r, a] and batch.loss_RT[r, p]:
                    hit.add(p)
        reached += len(hit)
    assert (cover.reached, cover.anchors, cover.supervised) == (reached, int(batch.keep_RN.sum()), int(batch.loss_RT.sum()))
    assert cover.rows == len(packed) and cover.documents == 40 and 0 < cover.share < 1 and "supervised tokens" in repr(cover)
    assert data.coverage(packed, CFG | dict(num_anchors=200)).share > 0.9 and data.coverage(packed, CFG, rows=3).rows == 3
    json.dumps(cover.as_dict())


def test_the_guard_drops_bad_rows_and_stops_when_none_is_left():
    batch, guard = batch_at(pack(make_docs(), 128), CFG, 0), data.StateGuard()
    feats, final = torch.randn(4, 128, 6), torch.randn(4, 128, 3)
    kept, f, h = guard(batch, feats, final)
    assert torch.equal(kept.keep_RN, batch.keep_RN) and torch.equal(f, feats) and torch.equal(h, final) and guard.read() == 0
    feats[2, 3, 1], final[0, 5, 0] = float("nan"), float("inf")
    pad = (batch.doc_RT[1] < 0).nonzero()
    if len(pad):
        feats[1, pad[0, 0]] = float("nan")
    kept, f, h = guard(batch, feats, final)
    assert kept.keep_RN.any(1).tolist() == [False, True, False, True] and torch.isfinite(f).all() and torch.isfinite(h).all()
    assert guard.read() == 2 and guard.rows == [int(batch.row_ids[0]), int(batch.row_ids[2])] and "2 of 8 rows" in repr(guard)
    guard(batch, feats * float("nan"), final)
    with pytest.raises(DataError, match="not finite in all 4 rows of batch 0.*bfloat16"):
        guard.read()


def test_states_checked_once_need_no_second_look():
    batch, guard = batch_at(pack(make_docs(), 128), CFG, 0), data.StateGuard()
    feats, final = torch.randn(4, 128, 6), torch.randn(4, 128, 3)
    feats[2, 3, 1], final[0, 5, 0] = float("nan"), float("inf")
    whole, f, h = guard(batch, feats, final)
    rows = [data.clean_states(batch.doc_RT[r:r + 1], feats[r:r + 1], final[r:r + 1]) for r in range(4)]  # as a cache keeps them
    bad, *kept = (torch.cat(x) for x in zip(*rows, strict=True))
    assert torch.equal(guard.drop(batch, bad).keep_RN, whole.keep_RN) and torch.equal(kept[0], f) and torch.equal(kept[1], h)
    assert guard.read() == 4 and guard.seen == 8


# ---- splits


def make_docs(n=200, seed=0, low=6, high=60):
    rng = np.random.default_rng(seed)
    return Dataset.from_docs([(rng.integers(1, 250, k), np.arange(k) >= k // 3) for k in rng.integers(low, high, n)])


def test_a_pack_without_anchors_names_the_ways_out():
    late, single = ([1] * 9, [0] * 6 + [1] * 3), ([1, 2, 3], [0, 1, 0])
    with pytest.raises(DataError, match=r"within row_len=4: use longer rows or give other data$"):
        pack(Dataset.from_docs([late, single]), 4)
    with pytest.raises(DataError, match=r"none of the 2 documents has two adjacent supervised tokens: give other data$"):
        pack(Dataset.from_docs([single, single]), 64)
    for seed in range(9):  # until the split holds out the one document that has anchors
        ds = Dataset.from_docs([single] * 3 + [late])
        if len(ds.split(0.25, seed)[1].doc(0)[0]) == 9:
            break
    with pytest.raises(DataError, match=r"training: 3 of 4 documents.*hold out fewer \(val_share\)"):
        pack(ds.split(0.25, seed)[0], 64)


def test_a_pipe_is_read_once(tmp_path):
    row = json.dumps(dict(messages=[dict(role="user", content="q"), dict(role="assistant", content="a")])) + "\n"
    fifo = tmp_path / "chats"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_text(row * 3), daemon=True)
    writer.start()
    assert len(load_chats(fifo)) == 3
    writer.join(5)
    with pytest.raises(DataError, match="pipe.*stream=True.*save it to a file"):
        list(load_chats(fifo, stream=True))
    out = subprocess.run([sys.executable, "-c", "from dflash_nb.data import load_chats; print(len(load_chats('/dev/stdin')))"],
                         input=row * 2, capture_output=True, text=True)
    assert out.stdout == "2\n", out.stderr[-500:]


def test_split_is_a_partition_that_the_seed_decides():
    ds = make_docs()
    rest, held = ds.split(0.1, seed=1)
    assert (len(rest), len(held)) == (180, 20) and held.report.kept == 20

    def docs(d):
        return sorted(d.doc(i)[0].tobytes() for i in range(len(d)))

    assert sorted(docs(rest) + docs(held)) == docs(ds)
    assert ds.split(0.1, seed=1)[1].fingerprint() == held.fingerprint() != ds.split(0.1, seed=2)[1].fingerprint()
    assert [len(d) for d in ds.split(0)] == [200, 0] and [len(d) for d in make_docs(2).split(0.001)] == [1, 1]
    for share, n in ((1.0, 5), (-0.1, 5), (0.5, 1)):
        with pytest.raises(DataError, match="val_share"):
            make_docs(n).split(share)


# ---- packing


def test_best_fit_fills_rows_and_is_fast():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 0.9, 100_000).astype(int), 4, 3072)
    start = time.process_time()
    row_of = best_fit(lengths, 3072)
    assert time.process_time() - start < 5
    used = np.bincount(row_of, weights=lengths)
    assert used.max() <= 3072 and (used > 0).all() and lengths.sum() / (len(used) * 3072) > 0.97


def test_best_fit_chooses_the_tightest_row():
    assert best_fit([7, 6, 2, 1, 1], 9).tolist() == [0, 1, 0, 1, 1]
    assert best_fit([1, 1, 6, 7, 2], 9).tolist() == [1, 1, 1, 0, 0]  # longest first, whatever the order given
    assert best_fit([4, 4, 4], 4).tolist() == [0, 1, 2]


def test_pack_holds_every_document_once_and_unbroken():
    ds = make_docs()
    packed = pack(ds, 128)
    assert sorted(packed.docs.tolist()) == list(range(len(ds)))
    for r in range(len(packed)):
        for k, d in enumerate(packed.docs[packed.row_starts[r] : packed.row_starts[r + 1]]):
            on = packed.doc_RT[r] == k
            assert np.array_equal(packed.ids_RT[r][on], ds.doc(d)[0]) and np.array_equal(packed.loss_RT[r][on], ds.doc(d)[1])
            assert np.ptp(np.flatnonzero(on)) == on.sum() - 1
    assert not packed.loss_RT[packed.doc_RT < 0].any()
    assert packed.utilisation == pytest.approx(len(ds.ids) / packed.ids_RT.size)


def test_pack_cuts_and_drops_what_does_not_fit():
    ds = Dataset.from_docs([([1] * 20, [0] * 15 + [1] * 5), ([2] * 20, [0] * 5 + [1] * 15), ([3] * 8, [1] * 8)])
    packed = pack(ds, 10)
    assert packed.cut == [1] and packed.dropped == [0] and sorted(packed.docs.tolist()) == [1, 2]
    assert "1 cut to 10 tokens" in repr(packed) and "1 dropped" in repr(packed)
    with pytest.raises(DataError, match="within row_len=5"):
        pack(ds.select([0, 1]), 5)
    with pytest.raises(DataError, match="row_len=1"):
        pack(ds, 1)


# ---- anchors


def test_anchor_rule():
    valid = valid_anchors([1, 1, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, -1])
    assert np.flatnonzero(valid).tolist() == [0, 2, 5]
    assert not valid_anchors([1, 1], [-1, -1]).any()
    for loss, want in (([1, 1, 0, 1, 0, 1, 1], {0, 5}), ([0, 0, 0, 0, 1, 1, 0], {4})):
        anchors, keep = draw_anchors(torch.tensor(loss), torch.zeros(7, dtype=torch.long), 5, torch.Generator().manual_seed(0))
        assert set(anchors[keep].tolist()) == want and not anchors[~keep].any()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 30])
def test_number_of_anchors_is_exact(count):
    loss = np.zeros(64, bool)
    loss[3 : 3 + count + (count > 0)] = True
    anchors, keep = draw_anchors(loss, np.zeros(64, int), 8, np.random.default_rng(0))
    assert anchors.shape == keep.shape == (8,) and keep.sum() == min(count, 8) and keep[: keep.sum()].all()
    assert len(set(anchors[keep].tolist())) == keep.sum() and (anchors[keep].diff() > 0).all()
    assert draw_anchors(loss, np.zeros(64, int), 100, np.random.default_rng(0))[1].sum() == count


def test_anchors_are_uniform():
    loss = np.ones(41, bool)
    rng = np.random.default_rng(0)
    counts = np.zeros(40)
    for _ in range(4000):
        anchors, keep = draw_anchors(loss, np.zeros(41, int), 4, rng)
        counts[anchors.numpy()] += 1
    expected = 4000 * 4 / 40
    assert ((counts - expected) ** 2 / expected).sum() < 73  # chi-square, 39 degrees of freedom, p = 0.001


# ---- batches

CFG = TrainConfig(block_size=8, num_anchors=6, row_len=128, token_budget=512, seed=5)


def same(a, b):
    return all(
        torch.equal(getattr(a, k), getattr(b, k)) for k in ("ids_RT", "pos_RT", "doc_RT", "loss_RT", "anchors_RN", "keep_RN", "row_ids")
    ) and (a.epoch, a.index) == (b.epoch, b.index)


def test_batch_is_a_function_of_rows_seed_and_index_alone():
    packed = pack(make_docs(), 128)
    stream = batches(packed, CFG)
    run = [next(stream) for _ in range(30)]
    np.random.seed(1), torch.manual_seed(1)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    fresh = pack(make_docs(), 128)
    data._epoch_order.cache_clear()
    for i in (29, 7, 7, 0):
        assert same(batch_at(fresh, CFG, i), run[i])
    assert same(next(batches(fresh, CFG, start=11)), run[11])
    assert (np.random.get_state()[1] == before[0]).all() and torch.equal(torch.get_rng_state(), before[1])
    assert not torch.equal(batch_at(packed, CFG | dict(seed=6), 0).row_ids, run[0].row_ids)


def test_epochs_are_permutations_and_anchors_follow_the_row():
    packed = pack(make_docs(), 128)
    n = len(packed)
    assert n % 4, "the example must straddle epochs"
    stream = batches(packed, CFG)
    rows = torch.cat([b.row_ids for b in (next(stream) for _ in range(n))]).tolist()
    epochs = [rows[e * n : (e + 1) * n] for e in range(4)]
    assert all(sorted(e) == list(range(n)) for e in epochs) and epochs[0] != epochs[1] != epochs[2]
    one, wide = CFG | dict(token_budget=128), CFG | dict(token_budget=128 * n)
    whole = batch_at(packed, wide, 1)
    for k in range(n):  # anchors of (seed, epoch, row) do not depend on the batch around them
        b = batch_at(packed, one, n + k)
        assert b.epoch == 1 and b.row_ids[0] == whole.row_ids[k] and torch.equal(b.anchors_RN[0], whole.anchors_RN[k])
    first = batch_at(packed, wide, 0)
    at = {int(r): k for k, r in enumerate(first.row_ids)}
    assert any(not torch.equal(first.anchors_RN[at[int(r)]], a) for r, a in zip(whole.row_ids, whole.anchors_RN, strict=False))
    assert not torch.equal(first.anchors_RN[0], first.anchors_RN[1])


def test_batch_wider_than_the_data_repeats_rows_with_other_anchors():
    packed = pack(make_docs(3, low=100, high=128), 128)
    b = batch_at(packed, CFG | dict(token_budget=128 * 6), 0)
    assert sorted(b.row_ids.tolist()) == [0, 0, 1, 1, 2, 2]
    twins = [b.anchors_RN[b.row_ids == r] for r in range(3)]
    assert any(not torch.equal(t[0], t[1]) for t in twins)


def test_positions_restart_and_anchors_are_valid():
    packed = pack(make_docs(), 128)
    b = batch_at(packed, CFG, 0)
    for r in range(4):
        for k in b.doc_RT[r].unique():
            assert b.pos_RT[r][b.doc_RT[r] == k].tolist() == list(range(int((b.doc_RT[r] == k).sum())))
    assert b.keep_RN.all() and b.anchors_RN.shape == (4, 6) and b.ids_RT.dtype == b.pos_RT.dtype == b.anchors_RN.dtype == torch.int64
    assert torch.tensor(valid_anchors(b.loss_RT, b.doc_RT)).gather(1, b.anchors_RN).all()
    parts = [b.micro(i, 2) for i in range(2)]
    assert all(torch.equal(torch.cat([getattr(p, k) for p in parts]), getattr(b, k)) for k in ("ids_RT", "anchors_RN", "row_ids"))
    assert b.to("meta").ids_RT.device.type == "meta" and b.ids_RT.device.type == "cpu"


def test_config_that_does_not_fit_the_rows():
    packed = pack(make_docs(), 128)
    with pytest.raises(ConfigError, match="resolve"):
        batches(packed, TrainConfig())
    with pytest.raises(DataError, match="packed with 128"):
        batches(packed, CFG | dict(row_len=256))

    class Loose:  # any object with these fields
        block_size, row_len, token_budget, num_anchors, seed = 129, 128, 128, 4, 0

    with pytest.raises(DataError, match="block_size=129"):
        batches(packed, Loose)
    Loose.block_size, Loose.token_budget = 8, 100
    with pytest.raises(DataError, match="token_budget=100"):
        batches(packed, Loose)


# ---- validation


def test_validation_anchors_are_fixed_and_counted_in_all():
    ds = make_docs(300)
    val = validation_blocks(ds, 128, 64, seed=0)
    assert sum(int(b.keep_RN.sum()) for b in val) == 64 and 2 <= len(val) <= 4
    assert len({b.anchors_RN.shape for b in val}) == 1
    assert all(same(a, b) for a, b in zip(val, validation_blocks(ds, 128, 64, seed=0), strict=False))
    assert [b.row_ids.item() for b in val] != [b.row_ids.item() for b in validation_blocks(ds, 128, 64, seed=1)]
    assert all(torch.tensor(valid_anchors(b.loss_RT, b.doc_RT)).gather(1, b.anchors_RN)[b.keep_RN].all() for b in val)
    assert len(validation_blocks(ds, 128, 64, seed=0, per_row=2)) > 20


def test_validation_with_few_positions_takes_all_and_none_gives_none():
    ds = Dataset.from_docs([([1] * 8, [0] * 5 + [1] * 3)] * 3)
    assert sum(int(b.keep_RN.sum()) for b in validation_blocks(ds, 16, 100, 0)) == 6
    assert validation_blocks(ds.split(0)[1], 16, 100, 0) == []
