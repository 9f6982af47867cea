"""Real clients read our folders (slow): z-lab's package decodes as we do, speculators opens and converts as we do,
SGLang's and vLLM's own config readers and loaders understand the export. Packages come from the index without dependencies."""

import ast
import copy
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from decoding import Docs, answers, as_batch
from safetensors.torch import load_file
from tiny import tiny_target

from dflash_nb.blocks import make_blocks
from dflash_nb.checkpoint import load_drafter
from dflash_nb.config import TrainConfig
from dflash_nb.decode import generate, speculate
from dflash_nb.drafter import Drafter, copy_target_layers
from dflash_nb.evaluate import prompt_ids, walk_tau
from dflash_nb.export import body_names, export_drafter, verify_export
from dflash_nb.formats import leaves, read_drafter_config
from dflash_nb.target import asset, load_target

pytestmark = pytest.mark.slow
CACHE = Path(os.environ.get("DFLASH_CLIENTS", Path(tempfile.gettempdir()) / "dflash_nb_clients"))
ZLAB = ["dflash==0.1.0"]
SPECULATORS = [
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "loguru==0.7.2",
    "pydantic-settings==2.11.0",
    "python-dotenv==1.1.1",
    "typing-inspection",
    "openai==2.0.0",
    "jiter",
    "distro",
    "sniffio",
    "datasets==5.0.1",
    "pyarrow",
    "dill",
    "xxhash",
    "multiprocess",
]


def pip(*args):
    out = subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True, timeout=900)
    if out.returncode:
        pytest.skip(f"the package index gave nothing: {out.stderr.strip().splitlines()[-1][:200]}")


@lru_cache(None)
def installed(name, packages):
    "A folder for sys.path with packages from the index, without their dependencies."
    folder = CACHE / name
    if not (folder / "done").exists():
        pip("install", "-q", "--no-deps", "--upgrade", "--target", str(folder), *packages)
        (folder / "done").write_text("\n".join(packages))
    return folder


@lru_cache(None)
def wheel_source(package):
    "A wheel from the index, opened but not installed; only its Python files."
    folder = CACHE / package
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip("download", "-q", "--no-deps", "-d", str(folder), package)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as z:
            z.extractall(folder, [n for n in z.namelist() if n.endswith(".py")])
        (folder / "done").write_text("")
    return folder


# ---- targets and half-trained drafters


@dataclass
class Case:
    target: object
    drafter: object
    prompts: list
    new_tokens: int


def trained(target, docs, steps, lr, block_size, layers=1, ids=None, copied=False):
    "A drafter that knows some of `docs`, so that its accepted lengths vary."
    c = TrainConfig(block_size=block_size, num_draft_layers=layers, target_layer_ids=ids)
    d = Drafter(target.drafter_config(c), seed=2)
    if copied:
        copy_target_layers(d, target)
    batch = as_batch(docs)
    with torch.no_grad():
        feats = target.features(batch.ids_RT, batch.pos_RT, layer_ids=d.cfg.target_layer_ids)[0].clone()
    blocks, io = make_blocks(batch, block_size, d.cfg.mask_token_id), target.io()
    embedded, valid = io.embed(blocks.ids_RNB).clone(), blocks.valid_RNB
    opt = torch.optim.AdamW(d.parameters(), lr, betas=(0.9, 0.95))
    for _ in range(steps):
        h = d(d.context(feats), batch.pos_RT, embedded, blocks)[valid]
        loss = torch.nn.functional.cross_entropy(io.head(h), blocks.labels_RNB[valid])
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(d.parameters(), 1.0)
        opt.step()
    return d


@lru_cache(None)
def case(name):
    "20 prompts, their greedy answers, and a drafter trained for a moment on a few of them."
    target = load_target(name)
    rows = [json.loads(x) for x in asset("heldout.jsonl").read_text().splitlines()[:20]]
    prompts, n = [prompt_ids(r, target) for r in rows], 40 if name == "nano" else 16
    docs = Docs(answers(target, prompts[:10 if name == "nano" else 3], n))
    d = trained(target, docs, 60, 3e-3, 8) if name == "nano" else trained(target, docs, 30, 1e-3, 6, layers=2, ids=(10, 25), copied=True)
    return Case(target, d, prompts, n)


# ---- z-lab's package


def zlab(monkeypatch):
    "z-lab's model module; its statistics read a CUDA clock, replaced by the wall clock."
    monkeypatch.syspath_prepend(str(installed("zlab", tuple(ZLAB))))
    module = importlib.import_module("dflash.model")
    monkeypatch.setattr(module, "_cuda_time", time.perf_counter)
    return module


LONG = pytest.mark.skipif(not os.environ.get("DFLASH_LONG"), reason="many minutes on two cores: set DFLASH_LONG=1")


@pytest.mark.parametrize("name", ["nano", pytest.param("smollm2", marks=LONG)])
def test_zlab_decodes_token_for_token_and_call_for_call(tmp_path, monkeypatch, name):
    client, c = zlab(monkeypatch), case(name)
    folder = export_drafter(c.drafter, tmp_path / "e", target=c.target, verify=False)
    model = client.DFlashDraftModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    assert {k for k, _ in model.named_parameters()} == body_names(c.drafter.cfg.num_hidden_layers)
    lengths = []
    for p in c.prompts:
        theirs = client.dflash_generate(
            model, c.target.model, torch.tensor([p]), c.new_tokens, list(c.target.eos_ids), return_stats=True
        )
        ours = speculate(c.target, c.drafter, p, c.new_tokens, shrink_last=True)
        assert theirs.output_ids[0, len(p) :].tolist() == ours.ids
        assert theirs.acceptance_lengths == ours.lengths
        lengths += ours.lengths
    assert len(c.prompts) == 20 and len(set(lengths)) >= 4 and max(lengths) >= 4, sorted(set(lengths))
    short = c.prompts[:3]
    assert [generate(c.target, p, c.new_tokens).ids for p in short] == [
        speculate(c.target, c.drafter, p, c.new_tokens).ids for p in short
    ]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3", "granite", "cohere", "gpt_neox", "mistral"])
def test_zlab_drafts_the_same_for_every_kind_of_target(tmp_path, monkeypatch, family):
    client, target = zlab(monkeypatch), tiny_target(family)
    prompts = [[5, 80, 7, 9], [33, 120, 4]]
    d = trained(target, Docs(answers(target, prompts, 20, stop_ids=())), 25, 5e-3, 6)
    folder = export_drafter(d, tmp_path / "e", target=target)
    model = client.DFlashDraftModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    for p in prompts:
        theirs = client.dflash_generate(model, target.model, torch.tensor([p]), 20, list(target.eos_ids), return_stats=True)
        ours = speculate(target, d, p, 20, shrink_last=True)
        assert (theirs.output_ids[0, len(p) :].tolist(), theirs.acceptance_lengths) == (ours.ids, ours.lengths)


def test_zlab_logits_agree_for_scales_and_soft_cap(tmp_path, monkeypatch):
    client, target = zlab(monkeypatch), tiny_target("gemma2")
    d = Drafter(target.drafter_config(TrainConfig(block_size=6, num_draft_layers=1)), seed=1)
    model = client.DFlashDraftModel.from_pretrained(str(export_drafter(d, tmp_path / "e", target=target)), dtype=torch.float32)
    h = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model.compute_logits(h, target.model.lm_head), target.io().head(h), atol=1e-5)


# ---- speculators


def in_speculators(code, *args):
    "Run code with speculators importable; its last line of output is JSON."
    folder = installed("speculators", tuple(SPECULATORS))
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    out = subprocess.run([sys.executable, "-c", code, *map(str, args)], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-2000:]
    return json.loads(out.stdout.strip().splitlines()[-1])


OPEN = """
import json, sys
from speculators import SpeculatorModel
m = SpeculatorModel.from_pretrained(sys.argv[1])
c = m.config
trained = [p for n, p in m.named_parameters() if n.split(".")[0] in ("fc", "layers", "norm", "hidden_norm")]
print(json.dumps(dict(
    kind=type(m).__name__, layers=m.target_layer_ids, block=m.block_size, mask=m.mask_token_id, anchor=c.sample_from_anchor,
    drafts=c.speculators_config.proposal_methods[0].speculative_tokens, sum=float(sum(p.double().abs().sum() for p in trained)),
    nan=[n for n, p in m.named_parameters() if bool(p.isnan().any())], theta=m.rotary_emb.inv_freq.double().sum().item(),
    causal=not c.sliding_window_non_causal, swa=m.sliding_window_indices)))
"""


@pytest.mark.parametrize("layout", ["anchor-first", "shifted"])
def test_speculators_own_loader_opens_the_folder(tmp_path, layout):
    target = load_target("nano")
    d = Drafter(target.drafter_config(TrainConfig(block_size=8, num_draft_layers=2, layout=layout)), seed=3)
    folder = export_drafter(d, tmp_path / "e", "speculators", target=target, verifier=str(asset("nano")))
    got = in_speculators(OPEN, folder)
    assert got["layers"] == [i + 1 for i in d.cfg.target_layer_ids] and (got["block"], got["mask"]) == (8, d.cfg.mask_token_id)
    assert got["anchor"] is (layout == "shifted") and got["drafts"] == 8 - (layout == "anchor-first")
    assert got["nan"] == [] and got["swa"] == [] and got["causal"] is False
    assert got["sum"] == pytest.approx(float(sum(p.detach().double().abs().sum() for p in d.parameters())))
    assert got["theta"] == pytest.approx(d.rope.inv_freq.double().sum().item())


CONVERT = """
import json, sys
from speculators.convert.entrypoints import convert_model
convert_model(sys.argv[1], sys.argv[2], 'dflash', output_path=sys.argv[3])
print(json.dumps(True))
"""


def test_its_conversion_of_our_zlab_folder_equals_our_export(tmp_path):
    target = load_target("nano")
    d = Drafter(target.drafter_config(TrainConfig(block_size=8, num_draft_layers=2)), seed=3)
    zlab_folder = export_drafter(d, tmp_path / "z", target=target)
    ours = export_drafter(d, tmp_path / "s", "speculators", target=target, verifier=str(asset("nano")))
    assert in_speculators(CONVERT, zlab_folder, asset("nano"), tmp_path / "theirs")
    a, b = (load_file(f / "model.safetensors") for f in (ours, tmp_path / "theirs"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    x, y = (leaves(json.loads((f / "config.json").read_text())) for f in (ours, tmp_path / "theirs"))
    differ = {k for k in x.keys() & y.keys() if x[k] != y[k]}
    # vLLM reads a false sliding_window_non_causal as causal in every layer, full ones too: ours says what was trained
    assert differ == {"sliding_window_non_causal"} and x["sliding_window_non_causal"] is True
    assert (
        y["transformer_layer_config.rope_parameters.partial_rotary_factor"]
        == x["transformer_layer_config.partial_rotary_factor"]
        == 1.0
    )
    assert not {k for k in y.keys() - x.keys() if y[k] is not None} - {
        "auto_map.",
        "transformers_version",
        "transformer_layer_config.rope_parameters.partial_rotary_factor",
        "transformer_layer_config.initializer_range",
        "transformer_layer_config.max_window_layers",
        "transformer_layer_config.use_cache",
    }
    again = load_drafter(tmp_path / "theirs")
    assert replace(again.cfg, num_target_layers=8, target_name="nano") == d.cfg
    verify_export(ours, target, d, show=False)


# ---- SGLang and vLLM: their own functions, taken out of the wheels and run on the CPU


def functions(path, names, **needs):
    "Definitions cut out of a source file and executed alone, with stand-ins for what they import."
    tree, space = ast.parse(Path(path).read_text()), dict(needs)
    picked = [
        n
        for n in tree.body
        if getattr(n, "name", None) in names or isinstance(n, ast.Assign) and getattr(n.targets[0], "id", None) in names
    ]
    assert {getattr(n, "name", None) or n.targets[0].id for n in picked} == set(names)
    code = ast.Module([ast.parse("from __future__ import annotations").body[0], *picked], [])
    module = types.ModuleType(f"cut_{Path(path).stem}")
    sys.modules[module.__name__] = module
    module.__dict__.update(space)
    exec(compile(ast.fix_missing_locations(code), str(path), "exec"), module.__dict__)
    return module


def hf_config(folder):
    from transformers import Qwen3Config

    return Qwen3Config(**json.loads((Path(folder) / "config.json").read_text()))


@pytest.fixture
def exported(tmp_path):
    target = tiny_target("qwen3")
    d = Drafter(target.drafter_config(TrainConfig(block_size=6, num_draft_layers=2)), seed=1)
    return (
        target,
        d,
        export_drafter(d, tmp_path / "z", target=target),
        export_drafter(d, tmp_path / "s", "speculators", target=target),
    )


def test_sglang_reads_the_config_and_loads_every_tensor(exported):
    target, d, folder, _ = exported
    src, typing = wheel_source("sglang==0.5.23"), importlib.import_module("typing")
    from collections.abc import Iterable, Sequence
    from dataclasses import dataclass
    from numbers import Integral

    kit = dict(
        Any=typing.Any,
        List=list,
        Optional=typing.Optional,
        Tuple=tuple,
        Sequence=Sequence,
        Iterable=Iterable,
        Integral=Integral,
        dataclass=dataclass,
        torch=torch,
    )
    u = functions(
        src / "sglang/srt/speculative/dflash_utils.py",
        [
            "build_target_layer_ids",
            "get_dflash_layer_types",
            "get_dflash_attention_sliding_window_size",
            "_cfg_get",
            "_get_text_config",
            "_get_dflash_config",
            "is_nemotron_35_draft_config",
            "_parse_optional_int",
            "DFlashDraftConfig",
            "parse_dflash_draft_config",
            "DEFAULT_DFLASH_MASK_TOKEN",
        ],
        **kit,
    )
    got = u.parse_dflash_draft_config(draft_hf_config=hf_config(folder))
    assert (got.block_size, got.mask_token_id, got.num_target_layers) == (6, d.cfg.mask_token_id, target.num_layers)
    assert tuple(got.resolve_target_layer_ids(target_num_layers=target.num_layers)) == d.cfg.target_layer_ids
    assert (
        not (got.conv_kernel_size or got.selector_rank or got.projector_type or got.attention_sink_bias)
        and got.output_multiplier == 1.0
    )
    kinds = types.SimpleNamespace(ENCODER_ONLY="both ways", DECODER="causal")
    m = functions(
        src / "sglang/srt/models/dflash.py",
        ["_get_dflash_attention_type", "_get_dflash_layer_attention_params", "DFlashDraftModel"],
        **kit,
        nn=torch.nn,
        AttentionType=kinds,
        get_dflash_layer_types=u.get_dflash_layer_types,
        get_dflash_attention_sliding_window_size=u.get_dflash_attention_sliding_window_size,
        DraftParallelSpec=lambda **kw: None,
        DraftTPExecution=types.SimpleNamespace(SINGLE_GROUP=0),
        DFlashDecoderLayer=None,
        default_weight_loader=None,
    )
    assert [m._get_dflash_layer_attention_params(hf_config(folder), i) for i in range(2)] == [(-1, "both ways")] * 2
    loaded = sglang_load(m, d, load_file(folder / "model.safetensors"))
    assert loaded == {(k, True) for k in d.state_dict()}


def sglang_load(module, d, tensors):
    "Run DFlashDraftModel.load_weights over a stand-in whose fused parameters note what arrives where."
    seen = set()
    have = {t.data_ptr(): k for k, t in tensors.items()}

    class Fused:
        def __init__(self, shape):
            self.shape = shape

        def weight_loader(self, param, t, *shard):
            seen.add(
                (
                    have[t.data_ptr()],
                    bool(shard) == any(x in have[t.data_ptr()] for x in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")),
                )
            )

    names = {k: t.shape for k, t in tensors.items()}
    for k in list(names):
        for part, whole in (
            ("q_proj", "qkv_proj"),
            ("k_proj", "qkv_proj"),
            ("v_proj", "qkv_proj"),
            ("gate_proj", "gate_up_proj"),
            ("up_proj", "gate_up_proj"),
        ):
            if f".{part}." in k:
                names[k.replace(part, whole)] = None
                names.pop(k, None)
    fake = types.SimpleNamespace(
        named_parameters=lambda: {k: Fused(s) for k, s in names.items()}.items(),
        projector_type=None,
        is_nemotron_35_draft=False,
        config=types.SimpleNamespace(hidden_size=d.cfg.hidden_size),
        num_context_features=len(d.cfg.target_layer_ids),
    )
    module.DFlashDraftModel.load_weights(fake, tensors.items())
    return seen


@pytest.mark.skipif(not os.environ.get("DFLASH_VLLM"), reason="a wheel of 340 MB: set DFLASH_VLLM=1")
def test_vllm_reads_both_formats_as_non_causal_full_attention(exported):
    target, d, folder, spec = exported
    src = wheel_source("vllm==0.33.0")
    m = functions(
        src / "vllm/model_executor/models/qwen3_dflash.py",
        ["_SLIDING_ATTENTION", "_dflash_layer_causal", "_resolve_layer_attention", "dflash_has_any_non_causal"],
        get_current_vllm_config=lambda: types.SimpleNamespace(use_v2_model_runner=False),
        Qwen3Config=object,
    )
    a = functions(
        src / "vllm/transformers_utils/configs/speculators/algos.py",
        ["SUPPORTED_SPECULATORS_TYPES", "register_speculator", "update_dflash"],
    )
    config = json.loads((spec / "config.json").read_text())
    plain = copy.deepcopy(config["transformer_layer_config"])
    a.SUPPORTED_SPECULATORS_TYPES["dflash"](config_dict=config, pre_trained_config=plain)
    from transformers import Qwen3Config

    for c in (hf_config(folder), Qwen3Config(**plain)):
        assert [m._resolve_layer_attention(c, i) for i in range(2)] == [(None, False)] * 2 and m.dflash_has_any_non_causal(c)
        assert (
            c.dflash_config["target_layer_ids"] == list(d.cfg.target_layer_ids)
            and c.rope_parameters["rope_theta"] == d.cfg.rope_parameters["rope_theta"]
        )
    assert plain["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in d.cfg.target_layer_ids] and plain["architectures"] == [
        "DFlashDraftModel"
    ]
    # what the trained causality would become if the flag said false and nothing else did
    quiet = copy.deepcopy(config) | dict(sliding_window_non_causal=False)
    plain = {k: v for k, v in quiet["transformer_layer_config"].items() if k != "is_causal"}
    a.SUPPORTED_SPECULATORS_TYPES["dflash"](config_dict=quiet, pre_trained_config=plain)
    assert m._resolve_layer_attention(Qwen3Config(**plain), 0) == (None, True)


def test_configs_of_the_clients_read_back_as_ours(exported):
    _, d, folder, spec = exported
    for f in (folder, spec):
        assert read_drafter_config(json.loads((f / "config.json").read_text())) == d.cfg


def test_half_trained_lengths_are_those_of_the_walk():
    c = case("nano")
    docs = Docs(answers(c.target, c.prompts[:4], c.new_tokens))
    assert walk_tau(c.drafter, c.target, docs).lengths == [
        speculate(c.target, c.drafter, p, c.new_tokens).lengths for p in c.prompts[:4]
    ]
