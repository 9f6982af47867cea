"A run goes on from a released drafter: its shape, its own embedding and head, exact resumes, what is refused, what is served."
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import byte_tokenizer, tiny_model, tiny_target

from dflash_nb import cli
from dflash_nb.blocks import make_blocks
from dflash_nb.callbacks import Callback, ProgressCB
from dflash_nb.checkpoint import CheckpointError, copy_drafter, drafter_hash, load_drafter, save_drafter
from dflash_nb.config import ConfigError, DataError, TrainConfig, resolve
from dflash_nb.data import Dataset, batch_at, pack
from dflash_nb.drafter import EMBEDDING, HEAD, Drafter, own_head
from dflash_nb.evaluate import evaluate, sim_tau
from dflash_nb.events import latest, read_events
from dflash_nb.export import export_drafter, verify_export
from dflash_nb.losses import block_loss, teacher_states
from dflash_nb.preflight import preflight, preflight_key
from dflash_nb.target import Target, load_target
from dflash_nb.trainer import Trainer

torch.set_num_threads(1)
TABLES = (EMBEDDING, HEAD)
KNOBS = dict(row_len=64, token_budget=128, num_anchors=8, steps=6, lr=1e-3, val_share=.2, val_anchors=32, eval_every=3, checkpoint_every=3)
CFG = TrainConfig(**KNOBS)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def ds():
    rng = np.random.default_rng(0)
    return Dataset.from_docs([(rng.integers(0, 250, n).astype(np.int32), np.arange(n) >= 6) for n in rng.integers(20, 40, 30)])


def drafter_of(target, seed=1, own=(), **change):
    "A drafter whose widths are not the target's, with tables of its own if asked."
    cfg = TrainConfig(block_size=6, num_draft_layers=2, target_layer_ids=(0, 3), mask_token_id=259, **change)
    d = Drafter(replace(target.drafter_config(cfg), intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
                        rope_parameters=dict(rope_type="default", rope_theta=777.0)), seed=seed)
    g = torch.Generator().manual_seed(seed)
    d.own = {k: torch.randn(target.vocab_size, 64, generator=g) * .1 for k in own}
    return d


def zlab_folder(d, path, dtype=torch.float32):
    "A folder as z-lab releases it: old keys only, no target's name."
    path.mkdir()
    c = d.cfg.to_hf()
    for k in ("rope_parameters", "is_causal", "torch_dtype"):
        c.pop(k)
    c["dflash_config"] = dict(mask_token_id=d.cfg.mask_token_id, target_layer_ids=list(d.cfg.target_layer_ids))
    save_file({k: v.to(dtype).contiguous() for k, v in (d.state_dict() | d.own).items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(c))
    return path


def trainer(target, ds, run_dir, d, cfg=CFG, callbacks=(), **kw):
    return Trainer(target, ds, cfg, run_dir=run_dir, callbacks=[ProgressCB(show="off"), *callbacks], drafter=d, **kw)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, b[k]) for k, x in a.items())


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def after_step(self, trainer):
        if trainer.step == self.step:
            trainer.stop("enough")


def zlab(target, path):
    return zlab_folder(drafter_of(target, own=TABLES), path, torch.bfloat16)


def zlab_plain(target, path):
    return zlab_folder(drafter_of(target), path)


def speculators(target, path):
    return export_drafter(drafter_of(target, own=TABLES, layout="shifted"), path, "speculators", target=target)


def ours(target, path):
    return save_drafter(drafter_of(target, own=(HEAD,)), path)


@pytest.mark.parametrize("release", [zlab, *(pytest.param(f, marks=pytest.mark.slow) for f in (zlab_plain, speculators)), ours])
def test_a_released_drafter_goes_on_stops_resumes_and_is_served(target, ds, tmp_path, release):
    folder = release(target, tmp_path / "released")
    first = load_drafter(folder)
    before = {k: v.clone() for k, v in first.state_dict().items()}
    whole = trainer(target, ds, tmp_path / "whole", first)
    assert (whole.cfg.block_size, whole.cfg.num_draft_layers, whole.cfg.target_layer_ids, whole.cfg.mask_token_id, whole.cfg.init) == (
        6, 2, (0, 3), 259, "drafter")
    assert whole.cfg.layout == first.cfg.layout and all(p.dtype == torch.float32 for p in whole.drafter.parameters())
    whole.fit()
    assert same(first.state_dict(), before) and not same(whole.drafter.state_dict(), before)
    scores = {e["step"]: e["sim_tau"] for e in latest(read_events(tmp_path / "whole"), "eval")}
    assert scores[0] == sim_tau(first, target, whole.val) and sorted(scores) == [0, 3, 6]

    part = trainer(target, ds, tmp_path / "part", load_drafter(folder), callbacks=[StopAt(2)])
    part.fit()
    shutil.rmtree(folder)
    again = Trainer.from_run(tmp_path / "part", target=target, callbacks=[ProgressCB(show="off")])
    assert again.started_from == whole.started_from | dict(source=again.started_from["source"])
    again.fit()
    assert same(again.drafter.state_dict(), whole.drafter.state_dict()) and again.history.loss.tolist() == whole.history.loss.tolist()
    saved = load_drafter(tmp_path / "part")
    assert same(saved.own, first.own) and same(saved.state_dict(), whole.drafter.state_dict())

    formats = ["speculators"] if first.cfg.layout == "shifted" else ["z-lab", "speculators"]
    for format in formats:
        out = export_drafter(saved, tmp_path / format, format, target=target, training=tmp_path / "part")
        assert not verify_export(out, target, drafter=saved, max_new_tokens=8, show=False).failed
        assert set(first.own) <= set(load_file(out / "model.safetensors"))
        assert f'went on from: {{"source": "{folder}", "hash": "{drafter_hash(first)}"' in (out / "README.md").read_text()
    report = evaluate(whole.drafter, target, [[5, 6, 7], [80, 81, 82]], max_new_tokens=12)
    assert report.lossless and report.tau >= 1


def test_the_first_checkpoint_is_what_was_given(target, ds, tmp_path):
    d = drafter_of(target, own=TABLES)
    t = trainer(target, ds, tmp_path / "r", d, callbacks=[StopAt(0)])
    t.stop("before the first step")
    t._begin()
    step = tmp_path / "r/checkpoints/step-00000000"
    assert same(load_drafter(step).state_dict(), d.state_dict()) and same(load_drafter(step).own, d.own)
    t._close("stopped")
    shutil.rmtree(tmp_path / "r/checkpoints")
    with pytest.raises(CheckpointError, match="went on from a drafter.*new run_dir"):
        Trainer.from_run(tmp_path / "r", target=target)


def test_its_own_head_is_the_head_that_is_trained(ds, tmp_path):
    "A head of the drafter's own equals a target with that head, bit for bit, where the loss reads the data alone."
    model = tiny_model("llama")
    plain = Target.from_model(model, tiny_target("llama").tokenizer, "plain")
    d = drafter_of(plain, own=(HEAD,))
    twin = tiny_model("llama")
    with torch.no_grad():
        twin.get_output_embeddings().weight.copy_(d.own[HEAD])
    other = Target.from_model(twin, plain.tokenizer, "twin")
    bare = copy_drafter(d, other, "sdpa")
    bare.own = {}
    three = dict(own=(plain, d), twin=(other, bare), none=(plain, bare))
    ends = [trainer(who, ds, tmp_path / name, start) for name, (who, start) in three.items()]
    for t in ends:
        t.fit()
    assert same(ends[0].drafter.state_dict(), ends[1].drafter.state_dict())
    assert ends[0].history.loss[0] == ends[1].history.loss[0] != ends[2].history.loss[0]
    assert ends[0].history.sim_tau.dropna().tolist() == ends[1].history.sim_tau.dropna().tolist()


def test_its_own_embedding_is_what_the_slots_hold(target, ds, tmp_path):
    d = drafter_of(target, own=TABLES)
    t = trainer(target, ds, tmp_path / "r", d)
    io = target.io()
    io.table.data, io.rows = d.own[EMBEDDING], torch.nn.Parameter(d.own[HEAD], requires_grad=False)
    batch = t.line.batch_of(0)
    feats = target.features(batch.ids_RT, batch.pos_RT, (0, 3))[0]
    blocks = make_blocks(batch, 6, 259, "anchor-first")
    h = d(d.context(feats), batch.pos_RT, io.embed(blocks.ids_RNB), blocks)
    assert t.train_step()["loss"] == pytest.approx(float(block_loss(h, blocks, io, t.cfg).loss), rel=1e-5)


@pytest.mark.parametrize("drafters", [1, 2])
def test_threads_train_it_as_one_thread_does(target, ds, tmp_path, drafters):
    devices = dict(target=["cpu"], drafter=["cpu"] * drafters)
    d, cfg = drafter_of(target, own=TABLES), CFG | dict(micro_rows=1, steps=3)
    ends = [trainer(target, ds, tmp_path / n, d, cfg, devices=x) for n, x in (("alone", "auto"), ("threads", devices))]
    for t in ends:
        t.fit()
    assert same(ends[0].drafter.state_dict(), ends[1].drafter.state_dict())


@pytest.mark.parametrize("change, said", [
    (dict(block_size=8), r"block_size=8 against the drafter's 6"),
    (dict(layout="shifted", num_draft_layers=1), r"num_draft_layers=1 against .* 2; layout='shifted' against .*'anchor-first'"),
    (dict(target_layer_ids=(1, 2)), r"target_layer_ids=\(1, 2\) against the drafter's \(0, 3\)"),
    (dict(mask_token_id=17), r"mask_token_id=17 against the drafter's 259"),
    (dict(init="target"), r"init='target'"),
], ids=str)
def test_contradictions_are_refused_with_both_values(target, ds, tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        trainer(target, ds, tmp_path / "r", drafter_of(target), CFG | change)
    assert not (tmp_path / "r").exists()


def test_another_target_and_a_missing_drafter_are_refused(target, ds, tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size 272 against the drafter's 260"):
        trainer(tiny_target("qwen2"), ds, tmp_path / "r", drafter_of(target))
    with pytest.raises(ConfigError, match=r"drafter=load_drafter\(path\).*--drafter"):
        trainer(target, ds, tmp_path / "r", None, CFG | dict(init="drafter"))
    with pytest.raises(ConfigError, match="init='drafter'"):  # whoever makes new weights refuses it: a sweep, a benchmark
        target.drafter_config(CFG | dict(init="drafter"))


def test_a_teacher_is_read_through_the_targets_head(target, ds):
    d = drafter_of(target, own=TABLES)
    cfg = resolve(CFG | dict(loss="fkl", weighting="flat", block_size=6, target_layer_ids=(0, 3), mask_token_id=259), target)
    batch, io, plain = batch_at(pack(ds, 64), cfg, 0), own_head(target, d).io(), target.io()
    feats, final = (x.clone() for x in target.features(batch.ids_RT, batch.pos_RT, (0, 3), final=True))
    blocks = make_blocks(batch, 6, 259, cfg.layout)
    teacher = teacher_states(final, blocks)
    h = d(d.context(feats), batch.pos_RT, io.embed(blocks.ids_RNB), blocks)
    logp, logq = (torch.nn.functional.linear(x, w).log_softmax(-1) for x, w in ((teacher, plain.rows), (h, d.own[HEAD])))
    want = (logp.exp() * (logp - logq)).sum(-1)[blocks.valid_RNB].mean()
    assert float(block_loss(h, blocks, io, cfg, teacher).loss) == pytest.approx(float(want), rel=1e-5)
    argmax = block_loss(h, blocks, io, cfg | dict(loss="ce", labels="teacher"), teacher)
    nll = -logq.gather(-1, logp.argmax(-1, keepdim=True))[..., 0][blocks.valid_RNB].mean()
    assert float(argmax.loss) == pytest.approx(float(nll), rel=1e-5)


@pytest.mark.parametrize("change", [dict(loss="fkl"), dict(labels="teacher")], ids=str)
def test_a_teacher_trains_a_head_of_the_drafters_own(target, ds, tmp_path, change):
    own, none = (trainer(target, ds, tmp_path / n, drafter_of(target, own=k), CFG | change) for n, k in (("own", (HEAD,)), ("none", ())))
    assert own.fit().outcome == "finished" and own.history.loss[5] != none.train_step()["loss"]


def test_parts_of_another_kind_are_named(target, ds, tmp_path):
    for args, said in ((("nano", ds, CFG), r"target is a str: give load_target"), ((target, [], CFG), "ds is a list: give encode_chats"),
                       ((target, ds, {}), r"cfg is a dict: give TrainConfig")):
        with pytest.raises(ConfigError, match=said):
            Trainer(*args, run_dir=tmp_path / "r")
    with pytest.raises(ConfigError, match="drafter is a str: give load_drafter"):
        trainer(target, ds, tmp_path / "r", "folder")
    bad = Dataset.from_docs([(np.array([1, 2, 300] * 9, np.int32), np.ones(27, bool))] * 9)
    for d in (None, drafter_of(target)):
        with pytest.raises(DataError, match="token id 300"):
            trainer(target, bad, tmp_path / "r", d)


def test_a_mask_token_that_the_data_uses_is_said(target, tmp_path):
    d = drafter_of(target)
    used = Dataset.from_docs([(np.full(30, 259, np.int32), np.arange(30) >= 6)] * 9)
    t = trainer(target, used, tmp_path / "r", d)
    assert "THE DATA USES IT, TOO" in t.describe() and f"goes on from drafter {drafter_hash(d)} of memory" in t.describe()


def test_preflight_checks_the_drafter_that_goes_on(target, ds, tmp_path):
    d = drafter_of(target, own=TABLES)
    found = preflight(target, ds, TrainConfig(), seconds=3., cache=tmp_path, show=False, drafter=d)
    assert found.ok and found.numbers["walk_tau"] == found.numbers["tau"]
    assert len({preflight_key(target, CFG, x) for x in (None, d, drafter_of(target, seed=2), drafter_of(target))}) == 4


# ---- the command


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "A tiny target's folder, twenty chats, and a drafter released for it as z-lab does."
    path = tmp_path_factory.mktemp("files")
    tiny_model("llama").save_pretrained(path / "target")
    byte_tokenizer().save_pretrained(path / "target")
    turns = [dict(role="user", content="count"), dict(role="assistant", content="one two three four five six seven")]
    (path / "chats.jsonl").write_text(f"{json.dumps(dict(messages=turns))}\n" * 20)
    zlab_folder(drafter_of(tiny_target("llama"), own=TABLES), path / "released")
    save_drafter(drafter_of(load_target(str(path / "target"))), path / "named")
    return path


def command(files, *argv, drafter="released", target=True, data=None):
    where = ["--target", str(files / "target")] if target else []
    small = "--row_len 96 --token_budget 96 --num_anchors 8 --steps 2".split()
    return cli.dflash_train(["--drafter", str(files / drafter), "--data", data or str(files / "chats.jsonl"), *where, *small, *argv])


def test_the_command_goes_on_from_a_drafter_and_resumes(files, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert command(files, "--run_dir", run, "--preflight", "no") == 0
    out = capsys.readouterr().out
    assert f"of {files / 'released'}, with its own embed_tokens and lm_head" in out and "block 6 anchor-first" in out
    assert cli.dflash_train(["--resume", run, "--steps", "3"]) == 0
    assert set(load_drafter(run).own) == set(TABLES)
    assert cli.dflash_eval([run, "--prompts", str(files / "chats.jsonl"), "--num_prompts", "2", "--max_new_tokens", "8"]) == 0
    assert command(files, "--run_dir", str(tmp_path / "named"), "--preflight", "yes", drafter="named", target=False) == 0
    assert "preflight passed" in capsys.readouterr().out


@pytest.mark.parametrize("argv, kw, said", [
    (["--block_size", "8"], {}, "block_size=8 against the drafter's 6"),
    ([], dict(target=False), "does not say which target"),
    ([], dict(drafter="nowhere"), "no such folder"),
    ([], dict(drafter="target"), "not a DFlash drafter"),
    (["--init", "target"], {}, "init='target'"),
    (["--resume", "nowhere"], dict(target=False), "beside --resume"),
], ids=str)
def test_what_the_command_refuses(files, tmp_path, capsys, argv, kw, said):
    run = [] if "--resume" in argv else ["--run_dir", str(tmp_path / "run")]
    assert command(files, *run, *argv, **kw) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_chats_may_come_through_a_pipe(files, tmp_path):
    code = "import sys; from dflash_nb.cli import dflash_train; sys.exit(dflash_train())"
    argv = [sys.executable, "-c", code, "--data", "-", "--target", str(files / "target"), "--drafter", str(files / "released"),
            "--run_dir", str(tmp_path / "run"), "--steps", "1", "--row_len", "96"]
    with open(files / "chats.jsonl") as chats:
        cat = subprocess.Popen(["cat"], stdin=chats, stdout=subprocess.PIPE)
        out = subprocess.run(argv, stdin=cat.stdout, capture_output=True, text=True)
    assert out.returncode == 0 and "20 chats" in out.stdout, out.stderr[-500:]
