"""Ids and masks of encode_chats against each tokenizer's own apply_chat_template, family by family."""

import json

import numpy as np
import pytest
from templates import FAMILIES, family_tokenizer, untag

from dflash_nb.config import DataError
from dflash_nb.data import encode_chats, load_chats, marked_text


def turns(*texts):
    return [dict(role=("user", "assistant")[i % 2], content=t) for i, t in enumerate(texts)]


CLOCK = dict(type="function", function=dict(name="clock", description="The time.", parameters=dict(type="object", properties={})))
CALL = [dict(type="function", function=dict(name="clock", arguments={"zone": "UTC"}))]


def chats(name):
    "(label, chat, tools) of everything that the family knows."
    knows = FAMILIES[name]["knows"]
    out = [
        ("one turn", turns("2+2?", "It is 4."), None),
        ("three turns", turns("Hi", "Hello there", "Name?", "None", "Sure?", "Yes."), None),
        ("unfinished", turns("a", "bb", "c", "dd", "e"), None),
        ("unicode", turns("x", "two  spaces", "é", "ü 漢 \n\nend"), None),
    ]
    if "system" in knows:
        out.append(("system", [dict(role="system", content="Be brief."), *turns("a", "bb", "c", "dd")], None))
    if "tools" in knows:
        called = [
            turns("time?")[0],
            dict(role="assistant", content="", tool_calls=CALL),
            dict(role="tool", content="12:00"),
            turns("", "Noon.")[1],
        ]
        out += [("tools", called, [CLOCK]), ("tools unused", turns("a", "b"), [CLOCK])]
    if "thinking" in knows:
        thought = turns("2+2?", "4", "sure?", "yes")
        thought[3]["reasoning_content"] = "hm, abc"
        out += [("thinking", thought, None), ("thinking once", [turns("q")[0], dict(thought[3])], None)]
    return out


CASES = [pytest.param(name, *case, id=f"{name}-{case[0]}") for name in FAMILIES for case in chats(name)]


def stops(name, tok):
    class Target:
        tokenizer, vocab_size = tok, len(tok)
        eos_ids = tuple(tok.convert_tokens_to_ids([FAMILIES[name]["eos"]]))

    return Target()


def test_there_are_ten_families_and_each_kind_of_chat():
    assert len(FAMILIES) >= 10
    for kind, least in (("tools", 4), ("thinking", 3)):
        assert sum(kind in f["knows"] for f in FAMILIES.values()) >= least
    assert all("generation" in f["template"] and "generation %" not in untag(f["template"]) for f in FAMILIES.values())


@pytest.mark.parametrize("name, label, chat, tools", CASES)
def test_with_generation_tags(name, label, chat, tools):
    tok = family_tokenizer(name)
    want = tok.apply_chat_template(chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    ds = encode_chats([dict(messages=chat, tools=tools)], stops(name, tok))
    assert ds.doc(0)[0].tolist() == want["input_ids"] and ds.doc(0)[1].astype(int).tolist() == want["assistant_masks"]
    assert "tags" in ds.report.method and not ds.report.cut


@pytest.mark.parametrize("name, label, chat, tools", CASES)
def test_without_generation_tags(name, label, chat, tools):
    tok, tagged = family_tokenizer(name, tags=False), family_tokenizer(name)
    want = tagged.apply_chat_template(chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    off = dict(thinking=False) if name == "deepseek" and "thinking" not in label else None  # its prompt opens a think block
    if (name, label) == ("gpt-oss", "unfinished"):  # the last answer alone ends as it was said, and here there is none
        with pytest.raises(DataError, match=r"does not tell .*\(1\).*\(2\).*\(3\)"):
            encode_chats([dict(messages=chat)], stops(name, tok))
        return
    ds = encode_chats([dict(messages=chat, tools=tools)], stops(name, tok), template_kwargs=off)
    assert ds.doc(0)[0].tolist() == want["input_ids"] == tok.apply_chat_template(chat, tools=tools, return_dict=True)["input_ids"]
    assert "difference" in ds.report.method
    mask, wanted = ds.doc(0)[1], np.array(want["assistant_masks"], bool)
    if ds.report.cut:  # a turn that is rendered differently from its prompt is left out, and counted
        assert name == "gpt-oss" or (name, label) == ("deepseek", "thinking"), marked_text(*ds.doc(0), tok)
        last = wanted & (np.arange(len(wanted)) > np.flatnonzero(~wanted)[-1])
        assert (mask == last).all() and last.any()
    else:
        assert marked_text(*ds.doc(0), tok) == marked_text(ds.doc(0)[0], wanted, tok)


def test_calls_as_json_text_and_as_objects_are_the_same_ids():
    tok = family_tokenizer("qwen3")
    text = [dict(type="function", function=dict(name="clock", arguments='{"zone": "UTC"}'))]
    described = json.dumps([{**CLOCK, "function": {**CLOCK["function"], "strict": None}}])
    rows = [
        dict(messages=[turns("time?")[0], dict(role="assistant", content=None, tool_calls=c)], tools=t)
        for c, t in ((CALL, [CLOCK]), (text, described))
    ]
    a, b = (encode_chats([r], tok).doc(0) for r in rows)
    assert a[0].tolist() == b[0].tolist() and "null" not in tok.decode(b[0]) and "UTC" in tok.decode(a[0][a[1]])


def test_sharegpt_calls_equal_openai_calls():
    share = {
        "conversations": [
            {"from": "human", "value": "time?"},
            {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": "UTC"}}'},
            {"from": "observation", "value": "12:00"},
            {"from": "gpt", "value": "Noon."},
        ],
        "tools": [CLOCK],
    }
    openai = dict(
        messages=[
            turns("time?")[0],
            dict(role="assistant", content="", tool_calls=CALL),
            dict(role="tool", content="12:00"),
            turns("", "Noon.")[1],
        ],
        tools=[CLOCK],
    )
    a, b = load_chats([share, openai])
    assert {k: v for k, v in a.items() if k != "source_row"} == {k: v for k, v in b.items() if k != "source_row"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_goes_by_three_names(key):
    tok = family_tokenizer("qwen3", tags=False)
    ds = encode_chats([dict(messages=[turns("q")[0], {"role": "assistant", "content": "4", key: "abc"}])], tok)
    assert "<think>\nabc\n</think>\n\n4" in tok.decode(ds.doc(0)[0][ds.doc(0)[1]])


def test_thinking_off_leaves_the_prompts_own_tags_out():
    tok = family_tokenizer("qwen3", tags=False)
    ds = encode_chats([dict(messages=turns("q", "4"))], tok, template_kwargs=dict(enable_thinking=False))
    assert marked_text(*ds.doc(0), tok).count("[[4<|im_end|>]]") == 1
