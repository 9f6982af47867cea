"""What readers of the regenerate notebook need not see: families, refills, graphs played by hand, resuming, servers that misbehave."""

import http.server
import json
import threading

import numpy as np
import pytest
import torch
from tiny import EXTRA, FAMILIES, byte_tokenizer, tiny_target

from dflash_nb import regenerate as rg
from dflash_nb.config import ConfigError, DataError, TargetError
from dflash_nb.data import encode_chats, load_chats
from dflash_nb.decode import generate
from dflash_nb.regenerate import Job, Sampling, Work, divergences, plain_generate, regenerate, serve


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


PROMPTS = [np.random.default_rng(n).integers(0, 250, n).tolist() for n in (3, 30, 7, 12, 1, 9, 40, 5, 21)]


def answer(target, prompts, new=20, **options):
    "Answers in the order of the prompts, by slots."
    work, got = Work([Job(len(p) + new, k, p, new) for k, p in enumerate(prompts)]), {}
    work.close()
    serve(
        rg._Speaker(target),
        work,
        lambda job, ids: got.update({job.number: ids}),
        threading.Event(),
        new,
        **{"sampling": Sampling(), **options},
    )
    return [got[k] for k in range(len(prompts))]


def chat(*texts, **more):
    return dict(messages=[dict(role=("user", "assistant")[i % 2], content=t) for i, t in enumerate(texts)], **more)


# ---- slots


@pytest.mark.parametrize("family", FAMILIES + EXTRA)
def test_slots_say_what_one_prompt_alone_says(family):
    target = tiny_target(family)
    assert answer(target, PROMPTS[2:], 12, num_slots=3) == [generate(target, p, 12).ids for p in PROMPTS[2:]]


@pytest.mark.parametrize("slots, poll", [(1, 1), (2, 5), (20, 3), (24, 8)])
def test_graphs_played_by_hand(target, monkeypatch, slots, poll):
    "The order of captures, replays and moves without a GPU: a graph is a function that runs the same step."
    made = []

    class Graph:
        def __init__(self, slots, n, reach):
            made.append((n, reach))
            self.replay = lambda: rg._step(slots, n, reach)

    monkeypatch.setattr(rg, "_captured", Graph)
    prompts = [np.random.default_rng(k).integers(0, 250, 1 + k * 11 % 150).tolist() for k in range(26)]
    assert answer(target, prompts, 12, num_slots=slots, graphs=True, poll=poll) == [generate(target, p, 12).ids for p in prompts]
    assert len(made) == len(set(made)) <= 6
    if slots == 24:
        assert {n for n, _ in made} == {16, 24}, "the last few answers need fewer slots"


def test_a_longer_chat_gets_a_larger_cache(target):
    short, long = PROMPTS[:4], [list(range(200))]
    work, got, stats = Work([Job(30, k, p, 20) for k, p in enumerate(short)]), {}, []

    def emit(job, ids):
        got[job.number] = ids
        if len(got) == 4:
            work.put(Job(220, 4, long[0], 20))
        if len(got) == 5:
            work.close()

    serve(rg._Speaker(target), work, emit, threading.Event(), 20, Sampling(), num_slots=2, stats=stats)
    assert [got[k] for k in range(5)] == [generate(target, p, 20).ids for p in short + long]
    assert [s["positions"] for s in stats] == [128, 256]


def test_limits_of_each_job(target):
    work, got = Work([Job(60, k, PROMPTS[1], n) for k, n in enumerate((1, 2, 20))]), {}
    work.close()
    serve(rg._Speaker(target), work, lambda job, ids: got.update({job.number: ids}), threading.Event(), 20, Sampling(), num_slots=3)
    want = generate(target, PROMPTS[1], 20).ids
    assert got == {0: want[:1], 1: want[:2], 2: want}


def test_the_target_is_left_alone_while_another_thread_reads_it(target):
    ids, before = torch.tensor([PROMPTS[6]]), target.model.config._attn_implementation
    want, seen = target.features(ids, layer_ids=(1, 3))[0], []
    stop = threading.Event()

    def read():
        while not stop.is_set():
            seen.append(torch.equal(target.features(ids, layer_ids=(1, 3))[0], want))

    reader = threading.Thread(target=read)
    reader.start()
    answer(target, PROMPTS, num_slots=4)
    stop.set()
    reader.join()
    assert seen and all(seen) and target.model.config._attn_implementation == before
    assert not any(hasattr(m, "slot_cache") for m in target.model.modules())


# ---- sampling


def test_sampling_depends_on_seed_row_and_turn_alone(target):
    rows = load_chats([chat(f"say {k}") for k in range(9)])
    kw = dict(temperature=0.9, max_new_tokens=12, progress=False)
    a, b, c = (regenerate(rows, target, num_slots=n, seed=s, **kw) for n, s in ((2, 0), (9, 0), (9, 1)))
    assert a.fingerprint() == b.fingerprint() != c.fingerprint()


@pytest.mark.parametrize(
    "kw, match",
    [
        (dict(temperature=-1), "temperature"),
        (dict(top_p=0.0, temperature=1), "top_p"),
        (dict(top_k=0, temperature=1), "top_k"),
        (dict(top_k=5), "not read"),
        (dict(max_new_tokens=1), "max_new_tokens"),
    ],
)
def test_bad_settings(target, kw, match):
    with pytest.raises(ConfigError, match=match):
        regenerate([chat("hi")], target, progress=False, **kw)


# ---- chats


def test_documents_are_prompt_and_generated_ids(target):
    ds = regenerate([chat("one", "old answer"), chat("two", kind="k")], target, max_new_tokens=8, progress=False)
    for i, text in enumerate(("one", "two")):
        prompt, (ids, mask) = target.encode_prompt([dict(role="user", content=text)]), ds.doc(i)
        assert ids.tolist() == prompt + generate(target, prompt, 8).ids and mask.tolist() == [False] * len(prompt) + [True] * (
            len(ids) - len(prompt)
        )
    assert [m["source_row"] for m in ds.meta] == [1, 2] and ds.meta[1]["kind"] == "k"


def scripted(target, monkeypatch, *answers):
    "A target that says given texts."
    said = iter(answers)

    def fake(speaker, work, emit, stop, max_new_tokens, sampling, *_, **__):
        while not stop.is_set() and work.wait():
            for job in work.take(1):
                emit(job, target.tokenizer(next(said), add_special_tokens=False)["input_ids"][: job.limit])

    monkeypatch.setattr(rg, "serve", fake)


END = "<|im_end|>"


def test_several_turns_make_one_document(target, monkeypatch):
    scripted(target, monkeypatch, "A" + END, "B" + END)
    ds = regenerate([chat("q1", "old", "q2")], target, max_new_tokens=50, progress=False)
    want = encode_chats([chat("q1", "A", "q2", "B")], target)
    n = len(ds.doc(0)[0])
    assert len(ds) == 1 and ds.doc(0)[0].tolist() == want.doc(0)[0].tolist()[:n] and ds.doc(0)[1].tolist() == want.doc(0)[1].tolist()[:n]


def test_turns_last_keeps_the_answers_before(target, monkeypatch):
    scripted(target, monkeypatch, "B" + END)
    ds = regenerate([chat("q1", "old", "q2", "older")], target, turns="last", max_new_tokens=50, progress=False)
    text = target.tokenizer.decode(ds.doc(0)[0])
    assert "old<" in text and text.endswith("B" + END) and ds.doc(0)[1].sum() == 2


def test_an_answer_cut_by_length_ends_its_chat(target, monkeypatch):
    scripted(target, monkeypatch, "long answer without end")
    ds = regenerate([chat("q1", "old", "q2")], target, max_new_tokens=6, progress=False)
    assert [m["finish"] for m in ds.meta] == ["length"] and ds.report.cut["answer ended by max_new_tokens=6"].rows == [1]


THINK = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_thinking_splits_turns_and_is_never_rendered_again(monkeypatch):
    target = tiny_target("qwen3")
    target.tokenizer.chat_template = THINK
    scripted(target, monkeypatch, "<think>\nhm\n</think>\n\nA" + END, "<think>\nso\n</think>\n\nB" + END)
    ds = regenerate([chat("q1", "old", "q2")], target, max_new_tokens=60, progress=False)
    texts = [target.tokenizer.decode(ds.doc(i)[0]) for i in range(2)]
    assert len(ds) == 2 and "hm" in texts[0] and "hm" not in texts[1] and "\nA<" in texts[1] and "so" in texts[1]
    said = [target.tokenizer.decode(ids[mask]) for ids, mask in map(ds.doc, range(2))]
    assert said == ["<think>\nhm\n</think>\n\nA" + END, "<think>\nso\n</think>\n\nB" + END]


def test_thinking_off_and_a_lone_closing_tag(monkeypatch):
    target = tiny_target("qwen3")
    target.tokenizer.chat_template = THINK
    scripted(target, monkeypatch, "2+2\n</think>\n\n4" + END, "5" + END)
    ds = regenerate([chat("q1", "old", "q2")], target, max_new_tokens=60, template_kwargs=dict(enable_thinking=False), progress=False)
    first = ds.doc(0)
    assert target.tokenizer.decode(first[0][first[1]]) == "2+2\n</think>\n\n4" + END
    assert "<think>\n\n</think>\n\n2+2" in target.tokenizer.decode(first[0]) and "assistant\n4<" in target.tokenizer.decode(ds.doc(1)[0])
    with pytest.raises(DataError, match="enable_think"):
        regenerate([chat("q")], target, template_kwargs=dict(enable_think=False), progress=False)


def test_calls_of_tools_with_given_results_are_kept(target, monkeypatch):
    asked = rg._asks(
        [dict(role="user"), dict(role="assistant", tool_calls=[1]), dict(role="tool"), dict(role="assistant"), dict(role="user")], "all"
    )
    assert asked == [3, 5]
    assert rg._asks([dict(role="user"), dict(role="assistant", tool_calls=[1])], "all") == [1]
    assert rg._asks([dict(role="assistant"), dict(role="user")], "all") == [2]


def test_texts_and_ids_are_continued(target):
    ds = regenerate(["once", {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}], target, max_new_tokens=5, progress=False)
    assert ds.doc(0)[0][:4].tolist() == [*b"once"] and ds.doc(1)[0][:2].tolist() == [5, 6] and ds.doc(1)[1].tolist()[:2] == [False, False]
    assert ds.doc(1)[0].tolist()[2:] == generate(target, [5, 6], 5).ids


def test_prompts_that_cannot_be_asked_are_counted(target):
    rows = [
        chat("hi"),
        chat("x" * 600),
        dict(messages=[dict(role="assistant", content="hello")]),
        {"input_ids": [1, 2], "loss_mask": [1, 1]},
    ]
    ds = regenerate(rows, target, max_new_tokens=4, progress=False)
    assert ds.report.kept == 1 and {k: v.rows for k, v in ds.report.skipped.items()} == {
        "prompt fills the target's 512 positions": [2],
        "no turn for the target to answer": [3],
        "no prompt before the first supervised token": [4],
    }
    with pytest.raises(DataError, match="positions"):
        regenerate(rows[1:2], target, max_new_tokens=4, progress=False)


def test_answers_end_at_the_last_position(target):
    ds = regenerate([chat("x" * 470)], target, max_new_tokens=200, progress=False)
    assert len(ds.doc(0)[0]) <= 512


# ---- resuming


def test_an_interrupted_run_goes_on_where_it_ended(target, tmp_path):
    rows, path = load_chats([chat(f"q{k}", "a", "more") for k in range(8)]), tmp_path / "a" / "x.jsonl"
    kw = dict(max_new_tokens=6, num_slots=2, out=path)
    want = regenerate(rows, target, max_new_tokens=6, progress=False)

    def enough(state):
        if state["done"] == 3:
            raise KeyboardInterrupt

    old = rg._Progress.add
    try:
        rg._Progress.add = lambda self, *a: (old(self, *a), enough(self.state()))
        with pytest.raises(KeyboardInterrupt):
            regenerate(rows, target, progress=False, **kw)
    finally:
        rg._Progress.add = old
    kept = len(path.read_text().splitlines())
    assert 0 < kept < 8 * 2
    path.write_bytes(path.read_bytes() + b'{"input_ids": [1, 2')
    seen = []
    ds = regenerate(rows, target, progress=lambda s: seen.append(s["done"]), **kw)
    assert ds.fingerprint() == want.fingerprint() and ds.report.kept == want.report.kept and seen[-1] == 8
    assert regenerate(rows, target, progress=False, **kw).speed["tokens"] == 0
    again = encode_chats(load_chats(path), target)
    assert sorted(again.doc(i)[0].tobytes() for i in range(len(again))) == sorted(want.doc(i)[0].tobytes() for i in range(len(want)))
    for more, match in ((dict(temperature=0.5), "other settings"), (dict(rows=load_chats([chat("new")])), "other rows")):
        with pytest.raises(DataError, match=match):
            regenerate(**{**dict(rows=rows, target=target, progress=False), **kw, **more})


def test_a_failing_worker_fails_the_call(target, monkeypatch):
    monkeypatch.setattr(rg, "_advance", lambda slots: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        regenerate([chat("hi")], target, max_new_tokens=4, progress=False)


def test_several_devices_share_one_queue(target):
    rows = load_chats([chat(f"q{k}") for k in range(12)])
    one, two = (regenerate(rows, target, max_new_tokens=8, num_slots=2, devices=d, progress=False) for d in (None, ["cpu", "cpu"]))
    assert one.fingerprint() == two.fingerprint() and len(two.speed["caches"]) == 2


# ---- server


class StandIn(http.server.BaseHTTPRequestHandler):
    "Answers /v1/models and /v1/completions with a target of its own; `mood` makes it misbehave."

    mood, seen, busy = "ids", [], 0

    def log_message(self, *_):
        pass

    def reply(self, value, code=200):
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply(dict(data=[dict(id="tiny")]))

    def do_POST(self):
        cls, body = type(self), json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls.seen.append(body)
        if cls.mood == "refuses":
            return self.reply(dict(error="no such model"), 404)
        if cls.mood == "busy" and cls.busy < 2:
            cls.busy += 1
            return self.reply(dict(error="later"), 503)
        ids = generate(cls.target, body["prompt"], body["max_tokens"]).ids
        stop = ids[-1] in cls.target.eos_ids
        choice = dict(text=cls.target.tokenizer.decode(ids[:-1] if stop else ids), finish_reason="stop" if stop else "length")
        if cls.mood != "text":
            choice |= dict(token_ids=ids, prompt_token_ids=body["prompt"] + [1] * (cls.mood == "adds"))
        self.reply(dict(choices=[choice]))


@pytest.fixture
def server(target):
    cls = type("StandIn", (StandIn,), dict(target=target, seen=[], busy=0, mood="ids"))
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), cls)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    cls.url = f"http://127.0.0.1:{httpd.server_port}/v1"
    yield cls
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize("mood", ["ids", "busy"])
def test_a_server_gives_the_same_documents(target, server, mood):
    server.mood = mood
    rows = load_chats([chat("one", "x", "two"), chat("three")])
    here = regenerate(rows, target, max_new_tokens=6, progress=False)
    there = regenerate(rows, target, max_new_tokens=6, progress=False, server=server.url, connections=2)
    assert here.fingerprint() == there.fingerprint() and "127.0.0.1" in there.report.method
    assert (
        server.seen[0]["model"] == "tiny"
        and server.seen[0]["return_token_ids"] is True
        and all(isinstance(i, int) for i in server.seen[0]["prompt"])
    )


def test_text_of_a_server_counts_only_if_it_gives_its_ids(target, server):
    server.mood = "text"  # random tokens of this target are often no valid text
    rows = load_chats([chat(f"q{k}") for k in range(6)])
    try:
        ds = regenerate(rows, target, max_new_tokens=4, progress=False, server=server.url)
        assert "tokenised again" in ds.report.method
        lost = ds.report.skipped.get("the server's text does not give its token ids back")
        assert len(ds) + (len(lost.rows) if lost else 0) == 6
    except DataError as e:
        assert "does not give its token ids back" in str(e)


@pytest.mark.parametrize("mood, match", [("refuses", "404"), ("adds", "changed the prompt")])
def test_servers_that_cannot_be_used(target, server, mood, match):
    server.mood = mood
    with pytest.raises(TargetError, match=match):
        regenerate([chat("one")], target, max_new_tokens=4, progress=False, server=server.url)


def test_no_server_there(target, monkeypatch):
    monkeypatch.setattr(rg.time, "sleep", lambda s: None)
    with pytest.raises(TargetError, match="does not answer models"):
        regenerate([chat("one")], target, server="http://127.0.0.1:9/v1", progress=False)


# ---- measured


def test_plain_generate_agrees_and_divergences_are_judged(target):
    want = [generate(target, p, 10).ids for p in PROMPTS]
    assert plain_generate(target, PROMPTS, 10, 4) == want
    other = [list(a) for a in want]
    other[2][1] = (want[2][1] + 1) % 250
    found = divergences(target, PROMPTS, want, other)
    assert [(x["prompt"], x["at"]) for x in found] == [(2, 1)] and found[0]["gap"] > 0
    assert divergences(target, PROMPTS, want, want) == []


def test_benchmark_runs_on_a_cpu(tmp_path, target, monkeypatch):
    monkeypatch.setattr(rg, "load_target", lambda name, device, dtype: target)
    data = tmp_path / "x.jsonl"
    data.write_text("".join(json.dumps(chat(f"q{k}", "a")) + "\n" for k in range(8)))
    rg.main_regenerate(
        [
            "--bench",
            "--data",
            str(data),
            str(data),
            "--shares",
            "5",
            "3",
            "--prompts",
            "8",
            "--max_new_tokens",
            "6",
            "--batch",
            "4",
            "--slots",
            "3",
            "--exact",
            "3",
            "--device",
            "cpu",
            "--dtype",
            "bfloat16",
            "--arms",
            "2",
            "--out",
            str(tmp_path / "r.json"),
        ]
    )
    rec = json.loads((tmp_path / "r.json").read_text())
    assert rec["float32"]["identical"] == 3 and rec["ratio"] > 0 and rec["prompts"] == 8 and rec["caches"][0]["slots"] == 3


@pytest.mark.cuda
def test_graphs_on_a_gpu_say_what_a_cpu_says():
    target = tiny_target("qwen3")
    want = [generate(target, p, 20).ids for p in PROMPTS * 5]
    target.model.to("cuda")
    from dflash_nb.target import Target

    gpu = Target.from_model(target.model, byte_tokenizer(), "tiny")
    rows = [{"input_ids": p + [0], "loss_mask": [0] * len(p) + [1]} for p in PROMPTS * 5]
    ds = regenerate(rows, gpu, max_new_tokens=20, num_slots=20, progress=False)
    assert [ids[mask].tolist() for ids, mask in map(ds.doc, range(len(ds)))] == [w for w in want if len(w) > 1]
    assert ds.speed["caches"][0]["graphs"] >= 1
