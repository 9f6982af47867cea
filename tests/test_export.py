"K6: an export is served as it was trained; a single wrong key, tensor or target is found and named."

import copy
import json
from dataclasses import replace

import pytest
import torch
from decoding import answers, fit, lookup_target, tiny_drafter
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, tiny_target

from dflash_nb.blocks import make_blocks
from dflash_nb.checkpoint import CheckpointError, load_drafter, save_drafter, save_state
from dflash_nb.config import ConfigError, TrainConfig, default_layer_ids
from dflash_nb.drafter import Drafter, own_head
from dflash_nb.evaluate import evaluate
from dflash_nb.export import (
    ExportError,
    export_config,
    export_drafter,
    main_export,
    model_card,
    other_weights,
    probe_record,
    push_drafter,
    target_hash,
    training_facts,
    verify_export,
)
from dflash_nb.formats import leaves, read_drafter_config, speculators_config, zlab_config
from dflash_nb.optim import make_optimizer
from dflash_nb.reader import Reader, ReadError, reader_decode, rope_frequencies

torch.set_num_threads(1)
FORMATS = ["z-lab", "speculators"]


@pytest.fixture(scope="module")
def pair():
    "(tiny target, untrained drafter); never changed."
    target = tiny_target("qwen3")
    return target, tiny_drafter(target, layers=2)


def edit(folder, change):
    "Change config.json in place."
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def failures(folder, target, **kw):
    "What verify_export names, or an empty string."
    try:
        verify_export(folder, target, show=False, **dict(max_new_tokens=0) | kw)
    except ExportError as e:
        return str(e)
    return ""


# ---- K6


@pytest.mark.parametrize("family", [*FAMILIES, "gemma", "granite", "cohere", "phi"])
def test_an_export_is_the_drafter_for_every_family(tmp_path, family):
    target = tiny_target(family)
    prompts = [[5, 80, 7], [9, 33, 120, 4]]
    docs = answers(target, prompts, 14, stop_ids=())
    d = fit(tiny_drafter(target, layers=1), target, docs, 12, lr=6e-3)
    folder = export_drafter(d, tmp_path / "e", target=target, verify=False)
    checks = verify_export(folder, target, d, prompts=prompts, max_new_tokens=14, show=False)
    assert not checks.failed
    again = load_drafter(folder)
    assert probe_record(again, target) == probe_record(d, target)
    a, b = (evaluate(x, target, prompts, max_new_tokens=14) for x in (d, again))
    assert a.tau == b.tau and [r["lengths"] for r in a.rows] == [r["lengths"] for r in b.rows]


@pytest.mark.parametrize(
    "layout, format", [("anchor-first", "z-lab"), ("anchor-first", "speculators"), ("shifted", "speculators")]
)
def test_the_reader_decodes_a_trained_drafter_call_by_call(tmp_path, layout, format):
    target = lookup_target()
    prompts = [[i, 200] for i in (5, 34, 63, 92)]
    d = fit(tiny_drafter(target, layout), target, answers(target, prompts, 18, stop_ids=()), 40, lr=6e-3)
    folder = export_drafter(d, tmp_path / "e", format, target=target, verify=False)
    lengths = [n for p in prompts for n in reader_decode(Reader(folder), target, p, 18)[1]]
    assert max(lengths) >= 4 and len(set(lengths)) > 1
    assert not verify_export(folder, target, d, prompts=prompts, max_new_tokens=18, show=False).failed


ROPES = [
    dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
    dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=40.0,
        original_max_position_embeddings=64,
        mscale=0.7,
        mscale_all_dim=1.0,
        beta_fast=16,
        beta_slow=2,
    ),
    dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, attention_factor=1.3),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
@pytest.mark.parametrize("format", FORMATS)
def test_scaled_ropes_are_exported_in_both_styles_and_read_right(tmp_path, pair, rope, format):
    target, d = pair
    d = Drafter(replace(d.cfg, rope_parameters=rope), seed=3)
    folder = export_drafter(d, tmp_path / "e", format, target=target)
    config = json.loads((folder / "config.json").read_text())
    inner = config.get("transformer_layer_config", config)
    assert inner["rope_theta"] == rope["rope_theta"] and inner["rope_scaling"] == {
        k: v for k, v in rope.items() if k != "rope_theta"
    }
    assert load_drafter(folder).cfg == d.cfg
    edit(folder, lambda c: c.get("transformer_layer_config", c)["rope_parameters"].update(factor=2.0))
    assert "factor" in failures(folder, target)


def test_frequencies_agree_with_transformers(pair):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    _, d = pair
    for rope in ROPES:
        have = Drafter(replace(d.cfg, rope_parameters=rope)).rope
        freq, scale = rope_frequencies(dict(partial_rotary_factor=1.0, **rope), d.cfg.head_dim, d.cfg.max_position_embeddings)
        assert torch.allclose(freq.float(), have.inv_freq, rtol=1e-5) and abs(scale - have.scale) < 1e-6, rope
    assert {r["rope_type"] for r in ROPES} <= set(ROPE_INIT_FUNCTIONS)


# ---- every key


def corrupted(value):
    "Another value of the same kind where there is one."
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return type(value)(value * 2 + 1)
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return value[:-1] if len(value) > 1 else [*value, *value] or ["x"]
    return 3


GONE = object()


def put(config, key, value, gone=GONE):
    "Set (or, without a value, delete) a dotted key."
    *path, last = key.split(".")
    at = config
    for k in path:
        at = at[int(k) if isinstance(at, list) else k]
    if value is gone:
        del at[last]
    else:
        at[last] = value


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("record", [True, False], ids=["by the record", "by the live drafter"])
def test_any_single_wrong_key_is_named(tmp_path, pair, format, record):
    target, d = pair
    folder = export_drafter(d, tmp_path / "e", format, target=target)
    if not record:
        (folder / "dflash_export.json").unlink()
    known = dict(drafter=None if record else d, run=False)
    assert failures(folder, target, **known) == ""
    text = (folder / "config.json").read_text()
    keys = leaves(json.loads(text))
    assert len(keys) > 35
    missed = []
    for key, value in keys.items():
        for change in ("other", "gone"):
            config = json.loads(text)
            put(config, key, corrupted(value)) if change == "other" else put(config, key, put.__defaults__[0])
            (folder / "config.json").write_text(json.dumps(config))
            if f"{key}:" not in failures(folder, target, **known):
                missed.append((key, change))
    assert not missed
    (folder / "config.json").write_text(json.dumps(json.loads(text) | dict(sliding_windows=5)))
    assert "sliding_windows" in failures(folder, target, **known)


FUNCTIONAL = [  # (what to change, a word of what must be said) with nothing to compare with but tensors, target and rules
    (lambda c: c.update(rms_norm_eps=0.3), None),
    (lambda c: (c.update(rope_theta=7.0), c["rope_parameters"].update(rope_theta=7.0)), None),
    (lambda c: c.update(is_causal=True), "is_causal"),
    (lambda c: c["dflash_config"].update(causal=True), "causal"),
    (lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window=8), "layer_types"),
    (lambda c: c.update(hidden_act="gelu"), "hidden_act"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[2, 3]), None),
    (lambda c: c["dflash_config"].update(mask_token_id=11), None),
    (lambda c: (c.update(block_size=5), c["dflash_config"].update(block_size=5)), None),
    (lambda c: c.update(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (lambda c: c["dflash_config"].update(input_embedding_scale=2.0), "input_embedding_scale"),
    (lambda c: c["dflash_config"].update(final_logit_softcapping=1.0), "final_logit_softcapping"),
    (lambda c: c["dflash_config"].update(output_multiplier=3.0), "output_multiplier"),
    (lambda c: c.update(num_attention_heads=2), "num_attention_heads"),
    (lambda c: c["dflash_config"].update(use_swa=True, swa_window_size=4), "use_swa"),
    (lambda c: c.update(attention_bias=True), "attention_bias"),
    (lambda c: c.update(vocab_size=99), "vocab_size"),
    (lambda c: c.update(num_target_layers=9), "num_target_layers"),
]


@pytest.mark.parametrize("i", range(len(FUNCTIONAL)))
def test_keys_that_matter_are_found_by_what_they_do(tmp_path, pair, i):
    target, d = pair
    folder = export_drafter(d, tmp_path / "e", target=target, verify=False)
    change, word = FUNCTIONAL[i]
    edit(folder, change)
    record = json.loads((folder / "dflash_export.json").read_text())
    (folder / "dflash_export.json").write_text(json.dumps({"probe": record["probe"]}))
    said = failures(folder, target)
    assert said and (word or "logits") in said


# ---- tensors, target, files


def rewrite(folder, change):
    t = load_file(folder / "model.safetensors")
    change(t)
    save_file({k: v.contiguous() for k, v in t.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.update({"context_proj.weight": t.pop("fc.weight")}), "context_proj"),
        (lambda t: t.pop("norm.weight"), "norm.weight"),
        (lambda t: t.update({"layers.0.mlp.up_proj.weight": t["layers.0.mlp.gate_proj.weight"].clone()}), "logits block"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "fc.weight"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].half()}), "torch_dtype"),
        (lambda t: t.update({"mask_hidden": t["norm.weight"].clone()}), "mask_hidden"),
    ],
)
def test_wrong_tensors_fail_and_are_named(tmp_path, pair, change, said):
    target, d = pair
    folder = export_drafter(d, tmp_path / "e", target=target, verify=False)
    rewrite(folder, change)
    assert said in failures(folder, target, drafter=d) and "recorded at export" in failures(folder, target)


def test_a_fine_tuned_target_of_the_same_name_is_told_apart(tmp_path, pair):
    target, d = pair
    folder = export_drafter(d, tmp_path / "e", target=target)
    other = tiny_target("qwen3", seed=0)
    assert target_hash(other) == target_hash(target)
    other._weights_hash = None
    with torch.no_grad():
        next(other.model.parameters())[0, 0] += 1e-3
    assert target_hash(other) != target_hash(target) and "target_sha256" in failures(folder, other)
    assert "other weights" in other_weights(folder, other) and other_weights(folder, target) == other_weights(tmp_path, other) == ""
    sampled = tiny_target("qwen3")
    assert target_hash(sampled, limit=10).startswith("sha256-sampled:")


def test_stored_in_bfloat16_is_compared_as_stored(tmp_path, pair):
    target, d = pair
    folder = export_drafter(d, tmp_path / "e", target=target, dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert failures(folder, target, drafter=d) == "" and load_drafter(folder).fc.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "dflash_export.json"])
def test_damaged_files_are_a_failed_check(tmp_path, pair, name):
    target, d = pair
    folder = export_drafter(d, tmp_path / "e", target=target, verify=False)
    (folder / name).write_bytes(b"\x00" * 40)
    assert "checks failed" in failures(folder, target)
    if name != "dflash_export.json":
        (folder / name).unlink()
        assert "missing" in failures(folder, target) or "No such file" in failures(folder, target)


def test_a_failed_verification_leaves_nothing_behind(tmp_path, pair, monkeypatch):
    import dflash_nb.export as export

    target, d = pair
    monkeypatch.setattr(export, "zlab_config", lambda cfg, **kw: zlab_config(cfg, **kw) | dict(rms_norm_eps=0.3))
    with pytest.raises(ExportError, match="logits block at 13"):
        export_drafter(d, tmp_path / "e", target=target)
    assert not list(tmp_path.iterdir())


# ---- refusals


def test_what_cannot_be_served_is_refused(tmp_path, pair):
    target, d = pair
    make = lambda **kw: Drafter(replace(d.cfg, **kw))  # noqa: E731
    for drafter, said in (
        (make(layout="shifted"), "shifted"),
        (make(target_layer_ids=(1, 5)), "last layer"),
        (make(vocab_size=300), "vocab_size"),
        (make(num_target_layers=7), "num_target_layers"),
    ):
        with pytest.raises((ExportError, ConfigError), match=said):
            export_drafter(drafter, tmp_path / "e", target=target)
    with pytest.raises(ConfigError, match="format"):
        export_drafter(d, tmp_path / "e", "gguf", target=target)
    with pytest.raises(ConfigError, match="target="):
        export_drafter(make(target_name=""), tmp_path / "e")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="training run"):
        export_drafter(d, tmp_path / "run", target=target)
    with pytest.raises(ConfigError, match="not an export.*dflash_export"):
        verify_export(tmp_path / "run", target)
    (tmp_path / "file").touch()
    for write in (export_drafter, save_drafter):
        with pytest.raises(ConfigError, match="is a file: give a folder"):
            write(d, tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "run"]


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(rope_theta=5.0), "rope_theta"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "rope_scaling"),
        (dict(block_size=9), "block_size"),
        (dict(is_causal=True), "is_causal"),
        (dict(layer_types=["full_attention"]), "layer_types"),
        (dict(layer_types=["sliding_attention"] * 2), "layer_types"),
        (dict(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
        (dict(architectures=["DFlashShiftedDraftModel"]), "layout"),
        (dict(hidden_act="gelu"), "hidden_act"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(is_neox_style=False), "is_neox_style"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 3]), "eagle_aux"),
        (dict(num_target_layers=3), "num_target_layers"),
        (dict(markov_rank=4), "markov_rank"),
        (dict(use_sliding_window=True), "sliding_window"),
        (dict(layer_types=7), "wrong kind"),
        (dict(dflash_config=dict(sample_from_anchor=True)), "lacks|layout"),
        (dict(head_dim=None), "head_dim"),
        (dict(rope_theta=None, rope_parameters=None), "rope_theta"),
    ],
)
def test_configs_that_cannot_be_read_are_refused_by_name(pair, change, said):
    with pytest.raises(ConfigError, match=said) as e:
        read_drafter_config(zlab_config(pair[1].cfg) | change)
    assert "\n" not in str(e.value)


def test_all_problems_of_a_config_are_listed_at_once(pair):
    with pytest.raises(ConfigError) as e:
        read_drafter_config(zlab_config(pair[1].cfg) | dict(block_size=9, hidden_act="gelu", rope_theta=1.0))
    assert all(k in str(e.value) for k in ("block_size", "hidden_act", "rope_theta"))


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(sample_from_anchor=True), "sample_from_anchor|speculative_tokens"),
        (dict(draft_vocab_size=40), "draft_vocab_size"),
        (dict(speculators_model_type="eagle3"), "eagle3"),
        (dict(aux_hidden_state_layer_ids=[0, 2]), "aux_hidden"),
        (dict(aux_hidden_state_layer_ids=None), "target_layer_ids"),
        (dict(block_size=9), "speculative_tokens"),
    ],
)
def test_speculators_configs_that_contradict_themselves_are_refused(pair, change, said):
    with pytest.raises(ConfigError, match=said):
        read_drafter_config(speculators_config(pair[1].cfg) | change)


# ---- released drafters


def released(tmp_path, d, own=(), change=None, prefix=""):
    "A folder as others write it: old keys only, no record, perhaps with tables of its own."
    c = d.cfg.to_hf()
    for k in ("rope_parameters", "is_causal", "target_name", "torch_dtype"):
        c.pop(k, None)
    c["dflash_config"] = dict(mask_token_id=d.cfg.mask_token_id, target_layer_ids=list(d.cfg.target_layer_ids))
    c |= change or {}
    save_file({prefix + k: v.contiguous() for k, v in (d.state_dict() | dict(own)).items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(c))
    return tmp_path


def test_a_released_folder_with_old_keys_loads(tmp_path, pair):
    target, d = pair
    again = load_drafter(released(tmp_path, d, prefix="model."))
    assert replace(again.cfg, target_name=d.cfg.target_name) == d.cfg and torch.equal(again.fc.weight, d.fc.weight)


def test_sharded_weights_load(tmp_path, pair):
    _, d = pair
    released(tmp_path, d)
    t = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(t)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({k: t[k] for k in part}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps(dict(weight_map={k: f for f, part in parts.items() for k in part}))
    )
    assert torch.equal(load_drafter(tmp_path).norm.weight, d.norm.weight)


def block_loss_of(d, io, target, docs):
    "Cross-entropy over all anchors, with a given embedding and head."
    from decoding import as_batch

    batch = as_batch(docs)
    feats = target.features(batch.ids_RT, batch.pos_RT, layer_ids=d.cfg.target_layer_ids)[0].clone()
    blocks = make_blocks(batch, d.cfg.block_size, d.cfg.mask_token_id, d.cfg.layout)
    h = d(d.context(feats), batch.pos_RT, io.embed(blocks.ids_RNB).clone(), blocks)[blocks.valid_RNB]
    return torch.nn.functional.cross_entropy(io.head(h), blocks.labels_RNB[blocks.valid_RNB])


@pytest.mark.parametrize(
    "names, tied",
    [(("embed_tokens.weight", "lm_head.weight"), False), (("lm_head.weight",), False), (("embed_tokens.weight",), True)],
)
def test_a_drafter_with_a_head_of_its_own_starts_with_it(tmp_path, pair, names, tied):
    target, d = pair
    g = torch.Generator().manual_seed(5)
    own = {n: torch.randn(target.vocab_size, 64, generator=g) * 0.1 for n in names}
    again = load_drafter(released(tmp_path, d, own, dict(tie_word_embeddings=tied)))
    full = dict(own) | ({"lm_head.weight": own["embed_tokens.weight"]} if tied else {})
    assert set(again.own) == set(full) and not set(full) & set(again.state_dict())
    docs = answers(target, [[5, 80, 7]], 10, stop_ids=())
    io = target.io()
    if "embed_tokens.weight" in full:
        io.table.data = full["embed_tokens.weight"]
    io.rows = torch.nn.Parameter(full["lm_head.weight"], requires_grad=False)
    want = block_loss_of(again, io, target, docs)
    assert torch.equal(block_loss_of(again, own_head(target, again).io(), target, docs), want)
    assert not torch.allclose(block_loss_of(again, target.io(), target, docs), want)
    save_drafter(again, tmp_path / "kept")
    assert all(torch.equal(load_drafter(tmp_path / "kept").own[k], v) for k, v in full.items())
    folder = export_drafter(again, tmp_path / "e", "speculators", target=target)
    assert set(names) <= set(load_file(folder / "model.safetensors")) and failures(folder, target, drafter=again) == ""


def test_a_head_of_another_size_and_a_pruned_vocabulary_are_refused(tmp_path, pair):
    _, d = pair
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        load_drafter(released(tmp_path, d, {"lm_head.weight": torch.zeros(40, 64)}))
    with pytest.raises(CheckpointError, match="prune"):
        load_drafter(released(tmp_path, d, {"d2t": torch.arange(40)}))


def test_a_deepspec_folder_without_heads_is_a_shifted_drafter(tmp_path, pair):
    target, d = pair
    flat = dict(
        architectures=["Qwen3DSparkModel"],
        markov_rank=0,
        enable_confidence_head=False,
        mask_token_id=d.cfg.mask_token_id,
        target_layer_ids=list(d.cfg.target_layer_ids),
        dflash_config={},
    )
    assert load_drafter(released(tmp_path, d, change=flat)).cfg.layout == "shifted"


# ---- runs, card, command


def test_a_run_directory_exports_its_newest_checkpoint(tmp_path, pair, capsys):
    target, d = pair
    nano = None
    opt = make_optimizer(d := copy.deepcopy(d), TrainConfig())
    root = tmp_path / "run" / "checkpoints"
    cfg = TrainConfig(block_size=6, gamma=2.0)
    save_state(root, 3, d, opt, dict(config=cfg.to_dict(), versions=dict(torch="x")))
    (tmp_path / "run" / "run.json").write_text(json.dumps(dict(data="abc", target=dict(name="tiny"))))
    folder = export_drafter(load_drafter(tmp_path / "run"), tmp_path / "e", target=target, training=tmp_path / "run")
    card = (folder / "README.md").read_text()
    assert "steps done: 3" in card and "gamma 2.0 (recipe: 7.0)" in card and target_hash(target) in card and nano is None
    assert 'num_speculative_tokens": 5' in card
    save_state(root, 5, d, opt, dict(config=cfg.to_dict(), versions=dict(torch="x")))
    assert [training_facts(p)["steps_done"] for p in (tmp_path / "run", root / "step-00000003")] == [5, 3]
    usual = TrainConfig(target_layer_ids=default_layer_ids(6))
    assert training_facts(usual, 6)["deviations"] == [] != training_facts(usual, 7)["deviations"]


def test_the_card_gives_tau_with_its_definition(tmp_path, pair):
    target, d = pair
    report = evaluate(d, target, [[5, 6, 7], [8, 9]], max_new_tokens=8)
    folder = export_drafter(d, tmp_path / "e", target=target, report=report, training=TrainConfig(), verify=False)
    card = (folder / "README.md").read_text()
    assert (
        f"tau {report.tau:.3f}" in card
        and "tokens emitted / target calls" in card
        and "deviations from the DFlash recipe: none" in card
    )
    record = json.loads((folder / "dflash_export.json").read_text())
    assert model_card(record) == card and record["evaluation"]["prompts"] == 2


def drafter_of_nano():
    from dflash_nb.target import load_target
    return Drafter(load_target("nano").drafter_config(TrainConfig(block_size=4, num_draft_layers=1)), seed=None)


def test_command_refuses_bad_input_in_one_line(tmp_path, capsys):
    save_drafter(drafter_of_nano(), tmp_path / "d")
    save_drafter(drafter_of_nano(), tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir()
    d, run = str(tmp_path / "d"), str(tmp_path / "run")
    for argv in (["nowhere"], [str(tmp_path)], [str(tmp_path), "--dtype", "int4"], [d, "--format", "gguf"], [d, "--out", run],
                 [d, "--checkpoint", "best"], [run, "--checkpoint", "newest"], [run, "--checkpoint", "best"], [run, "--checkpoint", "7"]):
        assert main_export(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("dflash_export: error: ") and err.count("\n") == 1


def test_push_without_login_says_how(tmp_path, pair, monkeypatch):
    import huggingface_hub

    target, d = pair
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    folder = export_drafter(d, tmp_path / "e", target=target, verify=False)
    with pytest.raises(ExportError, match="login"):
        push_drafter(folder, "me/drafter")
    with pytest.raises(ExportError, match="missing"):
        push_drafter(tmp_path, "me/drafter")


def test_push_uploads_the_folder(tmp_path, pair, monkeypatch):
    import huggingface_hub

    target, d = pair
    calls = []

    class Api:
        def create_repo(self, repo, **kw):
            calls.append((repo, kw))

        def upload_folder(self, **kw):
            calls.append(kw)
            return "commit"

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "x")
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder = export_drafter(d, tmp_path / "e", target=target, verify=False)
    assert push_drafter(folder, "me/drafter") == "commit" and calls[0] == ("me/drafter", dict(private=True, exist_ok=True))


def test_reader_refuses_what_it_does_not_know(tmp_path, pair):
    target, d = pair
    folder = export_drafter(d, tmp_path / "e", target=target, verify=False)
    edit(folder, lambda c: c["rope_parameters"].update(rope_type="dynamic"))
    with pytest.raises(ReadError, match="factor|dynamic"):
        Reader(folder)


def test_export_states_all_that_an_engine_could_guess(pair):
    target, d = pair
    c = export_config(d, target, "z-lab", torch.float32)
    assert c["dflash_config"].keys() >= {
        "mask_token_id",
        "target_layer_ids",
        "block_size",
        "layout",
        "causal",
        "use_swa",
        "target_name",
        "target_sha256",
        "input_embedding_scale",
    }
    assert (c["is_causal"], c["sliding_window"], c["tie_word_embeddings"], c["partial_rotary_factor"]) == (
        False,
        None,
        False,
        1.0,
    )
    scaled = tiny_target("gemma2")
    inner = export_config(tiny_drafter(scaled), scaled, "z-lab", torch.float32)["dflash_config"]
    assert inner["input_embedding_scale"] == 8.0 and inner["final_logit_softcapping"] == 3.0
