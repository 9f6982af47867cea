"Commands: every bad input is exit code 2 and one line, a stop is exit code 3 and resumable, --json is the last line."
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import byte_tokenizer, tiny_model

from dflash_nb import cli
from dflash_nb.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--block_size 4 --num_draft_layers 1 --row_len 96 --token_budget 96 --num_anchors 8 --val_share 0.1".split()
CHAT = {"messages": [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one two three four five six seven"}]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    "A tiny target's folder and files of chats, good and bad."
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("cli")
    tiny_model("qwen3").save_pretrained(path / "target")
    byte_tokenizer().save_pretrained(path / "target")

    def jsonl(name, rows):
        (path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))

    turns = [("user", "count {}"), ("assistant", "{0} one two three {0}")]
    chats = [{"messages": [{"role": r, "content": c.format(i)} for r, c in turns], "kind": "ab"[i % 2]} for i in range(20)]
    jsonl("chats.jsonl", chats)
    jsonl("prompts.jsonl", chats[:4])
    jsonl("empty.jsonl", [])
    jsonl("unsupervised.jsonl", [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 0]}])
    jsonl("short.jsonl", [{"input_ids": [1], "loss_mask": [1]}])
    (path / "broken.gguf").write_bytes(b"GGUF" + b"\x03\x00\x00\x00" + b"\xff" * 64)
    (path / "config.yaml").write_text("gama: 4\n")
    (path / "notcausal").mkdir()
    (path / "notcausal/config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    return path


def train(files, *argv, target=None, data="chats.jsonl"):
    return cli.dflash_train(["--target", str(files / (target or "target")), "--data", str(files / data), *SMALL, *map(str, argv)])


def refused(capsys, call, *said):
    "The call ends with exit code 2 and one line on stderr that holds every one of `said`."
    try:
        code = call()
    except SystemExit as e:
        code = e.code
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    assert all(s in err for s in said), err


@pytest.mark.parametrize("argv, said", [
    (["--gama", 4], ["unknown option '--gama'", "--gamma"]),
    (["--gamma", -1], ["gamma=-1"]),
    (["--steps", "many"], ["steps='many'"]),
    (["--loss", "mse"], ["loss='mse'", "ce, fkl"]),
    (["--loss", '{"ce": 1'], ["is no JSON"]),
    (["--alpha", .5], ["alpha=0.5 is not read", "decay"]),
    (["--allow_last_layer", "true"], ["allow_last_layer=True is not read", "target_layer_ids"]),
    (["--attention", "flash"], ["attention='flash'", "sdpa"]),
    (["--block_size", 100], ["block_size=100", "row_len=96"]),
    (["--max_length", "long"], ["max_length='long'"]),
    (["--max_length", 1], ["max_length=1"]),
    (["--mask_token_id", 4000], ["4000"]),
    (["--mask_token_id", 258], ["258", "pad"]),
    (["--mask_token_id", 257], ["257", "e"]),
    (["--target_layer_ids", "1,5"], ["5", "last layer", "allow_last_layer"]),
    (["--target_layer_ids", "1,9"], ["9", "0 to 5"]),
    (["--target_layer_ids", "1,1"], ["[1, 1]", "once"]),
    (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    (["--device", "tpu7"], ["tpu7"]),
    (["--attention", "flex"], ["flex", "sdpa"]),
])
def test_bad_values_are_named(files, capsys, argv, said, tmp_path):
    refused(capsys, lambda: train(files, *argv, "--run_dir", tmp_path / "r"), *said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(files, capsys):
    refused(capsys, lambda: train(files, "--device", "cuda"), "cuda", "0 GPUs", "cpu")


@pytest.mark.parametrize("data, said", [("missing.jsonl", "no such file"), ("empty.jsonl", "no rows"),
                                        ("unsupervised.jsonl", "supervised"), ("short.jsonl", "two tokens")])
def test_bad_data_is_named(files, capsys, data, said):
    refused(capsys, lambda: train(files, data=data), data.split(".")[0] if data[0] == "m" else said, said)


@pytest.mark.parametrize("target", ["broken.gguf", "notcausal", "nothing-here"])
def test_bad_targets_are_named(files, capsys, target):
    refused(capsys, lambda: train(files, target=target), target)


def test_config_file_and_contradictions(files, capsys, tmp_path):
    refused(capsys, lambda: train(files, "--config", files / "config.yaml"), "unknown knob 'gama'", "gamma")
    refused(capsys, lambda: cli.dflash_train(["--resume", str(tmp_path / "no")]), "no run there")
    refused(capsys, lambda: train(files, "--resume", tmp_path), "--target", "beside --resume")
    (tmp_path / "r").mkdir()
    (tmp_path / "r/events.jsonl").write_text("")
    refused(capsys, lambda: train(files, "--run_dir", tmp_path / "r"), "already holds a run", "--resume")


def test_help_names_every_field_with_its_default(capsys):
    text = cli.train_parser().format_help()
    for f in dataclasses.fields(TrainConfig):
        assert re.search(rf"--{f.name} ", text), f.name
    assert "0 done; 1 failed; 2 bad input" in text and "(default: 0.0006)" in text and "default: nano" in text
    for call in (cli.dflash_train, cli.dflash_eval):
        with pytest.raises(SystemExit) as e:
            call(["--help"])
        assert e.value.code == 0
    assert capsys.readouterr().err == ""


def test_options_reach_the_config_and_win_over_the_file(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"lr": 1e-3, "gamma": 4}))
    args = cli.train_parser().parse_args(["--config", str(tmp_path / "c.json"), "--gamma", "none", "--betas", "0.9,0.999",
                                          "--noise", "0.05", "--loss", '{"ce": 0.1, "tv": 0.9}', "--allow_last_layer", "true",
                                          "--target_layer_ids", "1,5"])
    cfg = cli._train_config(args)
    assert (cfg.lr, cfg.gamma, cfg.betas, cfg.noise.strength, cfg.allow_last_layer) == (1e-3, None, (.9, .999), .05, True)
    assert cfg.loss == {"ce": .1, "tv": .9}


def test_demo_is_a_config_that_options_change(capsys, tmp_path):
    args = cli.train_parser().parse_args(["--demo", "--steps", "7"])
    cfg = cli._train_config(args)
    assert cfg.steps == 7 and cfg.block_size == cli.DEMO["block_size"]
    refused(capsys, lambda: cli.dflash_train(["--demo", "--resume", str(tmp_path)]), "--demo beside --resume")
    refused(capsys, lambda: cli.dflash_train(["--demo", "--config", "x.yaml"]), "--demo beside --config")


def test_free_run_dir(tmp_path):
    (tmp_path / "train-1").mkdir()
    assert cli.free_run_dir(tmp_path).name == "train-2"


def test_train_then_eval_with_json_as_the_last_line(files, capsys, tmp_path):
    run = tmp_path / "run"
    assert train(files, "--steps", 4, "--run_dir", run, "--json") == 0
    out = capsys.readouterr().out.splitlines()
    record = json.loads(out[-1])
    assert record["outcome"] == "finished" and record["exit_code"] == 0 and record["run_dir"] == str(run) and record["loss"] > 0
    assert any(x.startswith("step=0/4 ") and "tok/s=" in x for x in out) and any(x.startswith("step=4/4 ") for x in out)
    assert any("differs from the recipe" in x for x in out) and any("mask token 259 '<|mask|>' (the tokenizer's" in x for x in out)

    assert cli.dflash_eval([str(run), "--prompts", str(files / "prompts.jsonl"), "--max_new_tokens", "12", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    value = json.loads(out[-1])
    assert value["tau"] >= 1 and value["lossless"] is True and value["prompts"] == 4 and {k["kind"] for k in value["by_kind"]} == {"a", "b"}
    text = "\n".join(out)
    assert re.search(r"tau \d\.\d\d .*95% interval", text) and "target calls" in text and "lossless: yes" in text and "next: " in text
    for argv in (["--checkpoint", "best"], ["--checkpoint", "4"], ["--temperature", "0.8"]):
        few = ["--prompts", str(files / "prompts.jsonl"), "--max_new_tokens", "6", "--num_prompts", "2"]
        assert cli.dflash_eval([str(run), *few, *argv]) == 0

    def bad(*argv):
        return lambda: cli.dflash_eval([str(run), "--prompts", str(files / "prompts.jsonl"), *argv])

    refused(capsys, bad("--checkpoint", "99"), "step 99", "complete: [")
    refused(capsys, bad("--checkpoint", "newest"), "newest", "latest, best")
    refused(capsys, bad("--max_new_tokens", "0"), "max_new_tokens=0")
    refused(capsys, bad("--temperature", "-1"), "temperature=-1")
    refused(capsys, bad("--num_prompts", "0"), "num_prompts=0")
    refused(capsys, bad("--dtype", "int8"), "int8")
    refused(capsys, bad("--prompts", str(files / "empty.jsonl")), "empty.jsonl", "no prompt")
    refused(capsys, bad("--prompts", "nowhere.jsonl"), "nowhere.jsonl")
    refused(capsys, lambda: cli.dflash_eval([str(tmp_path / "no")]), "no such folder")
    refused(capsys, lambda: cli.dflash_eval([str(tmp_path), "--prompts", str(files / "prompts.jsonl")]), "neither a drafter")


def test_resume_with_a_change(files, capsys, tmp_path):
    run = tmp_path / "run"
    assert train(files, "--steps", 3, "--run_dir", run) == 0
    assert cli.dflash_train(["--resume", str(run), "--steps", "5", "--json"]) == 0
    out = capsys.readouterr().out
    assert "steps 3 -> 5" in out and json.loads(out.splitlines()[-1])["step"] == 5
    refused(capsys, lambda: cli.dflash_train(["--resume", str(run), "--block_size", "8"]), "block_size 4 -> 8")


def test_an_unexpected_failure_is_exit_code_1(files, monkeypatch, capsys, tmp_path):
    import dflash_nb.sides as module

    def boom(*a, **k):
        raise RuntimeError("boom")

    monkeypatch.setattr(module, "block_loss", boom)
    assert train(files, "--steps", 3, "--run_dir", tmp_path / "r") == 1
    err = capsys.readouterr().err
    assert "step 1 on cpu" in err and "boom" in err and "--resume" in err


# -- a process of its own ------------------------------------------------------------------------------------------------

CALL = "import sys; from dflash_nb.cli import dflash_train; sys.exit(dflash_train())"


def start(*argv):
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    pipe = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", CALL, *map(str, argv)], cwd=ROOT, env=env, **pipe)


def wait_for(process, text):
    for line in process.stdout:
        if line.startswith(text):
            return line
    raise AssertionError(process.stderr.read())


def options(files, run, steps):
    return ["--target", files / "target", "--data", files / "chats.jsonl", *SMALL, "--run_dir", run, "--steps", steps]


def test_a_first_line_before_torch_then_interrupt_is_exit_code_3_and_resume_is_exact(files, tmp_path):
    begin = time.time()
    p = start(*options(files, tmp_path / "a", 60))
    assert wait_for(p, "dflash_train: starting") and time.time() - begin < 5
    wait_for(p, "step=0/60")
    time.sleep(.1)
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 3 and "stopped at step" in out and "--resume" in out and err == "", err
    p = start("--resume", tmp_path / "a")
    out, err = p.communicate(timeout=120)
    assert p.returncode == 0 and "continues from step" in out, err
    torch.set_num_threads(1)
    assert cli.dflash_train(list(map(str, options(files, tmp_path / "b", 60)))) == 0
    a, b = (load_file(tmp_path / x / "checkpoints/step-00000060/model.safetensors") for x in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_signal_at_any_moment(files, tmp_path, seed):
    import random
    rng, steps = random.Random(seed), 150
    run = tmp_path / "a"
    for _ in range(5):
        p = start("--resume", run) if (run / "run.json").exists() else start(*options(files, run, steps))
        kind = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        wait_for(p, "dflash_train:")  # from here on signals are the command's own business
        time.sleep(.05)
        if rng.random() < .8:
            wait_for(p, "step=")
            time.sleep(rng.uniform(0, 1.5))
        else:
            time.sleep(rng.uniform(.5, 6))
        p.send_signal(kind)
        out, _ = p.communicate(timeout=60)
        if "next: dflash_eval" in out:  # the command was done, the interpreter was leaving
            continue
        began = (run / "run.json").exists()
        assert p.returncode in ((0, -9) if kind == signal.SIGKILL else (0, 3) if began else (1,))
    p = start("--resume", run)
    out, err = p.communicate(timeout=300)
    assert p.returncode == 0, err
    torch.set_num_threads(1)
    assert cli.dflash_train(list(map(str, options(files, tmp_path / "b", steps)))) == 0
    a, b = (load_file(tmp_path / x / f"checkpoints/step-{steps:08d}/model.safetensors") for x in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_measuring_a_run_leaves_no_trace(tmp_path):
    from dflash_nb.callbacks import ProgressCB
    from dflash_nb.cli import expected_seconds
    from dflash_nb.trainer import Trainer, toy_data, toy_target

    def losses(name, measured):
        cfg = TrainConfig(block_size=4, num_draft_layers=1, row_len=64, num_anchors=6, steps=4, mask_token_id=63, val_share=0)
        t = Trainer(toy_target(), toy_data(30), cfg, run_dir=tmp_path / name, callbacks=[ProgressCB(show="off")])
        if measured:
            assert expected_seconds(t) > 0
        t.fit()
        return t.history.loss.tolist()

    assert losses("a", True) == losses("b", False)


def test_a_failed_preflight_refuses_the_run_unless_told_otherwise(tmp_path, monkeypatch, capsys):
    from dflash_nb import preflight as module
    monkeypatch.chdir(tmp_path)
    bad = module.Preflight(False, ["walk_tau 1.0, tau 3.0"], {})
    monkeypatch.setattr(module, "run_preflight", lambda *a, **k: bad)
    args = ["--steps", "1", "--num_draft_layers", "1"]
    assert cli.dflash_train([*args, "--preflight", "yes", "--run_dir", "a"]) == 2
    assert "walk_tau 1.0, tau 3.0" in capsys.readouterr().err and not (tmp_path / "a").exists()
    with pytest.warns(UserWarning, match="walk_tau"):
        assert cli.dflash_train([*args, "--preflight", "warn", "--run_dir", "b"]) == 0
    monkeypatch.setattr("dflash_nb.cli.expected_seconds", lambda t: 601.0)
    assert cli.dflash_train([*args, "--run_dir", "c"]) == 2
    monkeypatch.setattr("dflash_nb.cli.expected_seconds", lambda t: 599.0)
    assert cli.dflash_train([*args, "--run_dir", "c"]) == 0


PLACES = ["{", '{"target": ["cpu"]}', '{"target": [], "drafter": ["cpu", "cpu"]}', '{"target": ["cpuu"], "drafter": ["cpu"]}']


@pytest.mark.parametrize("given, said", list(zip(PLACES, ["give JSON", "give JSON", "at least one target thread", "cpuu"], strict=True)))
def test_bad_devices_are_refused_by_name(tmp_path, given, said, capsys):
    assert cli.dflash_train(["--devices", given, "--steps", "1", "--run_dir", str(tmp_path / "r"), "--preflight", "no"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_threads_are_an_option(tmp_path, files, capsys):
    places = '{"target": ["cpu", "cpu"], "drafter": ["cpu"]}'
    args = ["--target", str(files / "target"), "--data", str(files / "chats.jsonl"), *SMALL, "--steps", "2", "--preflight", "no"]
    assert cli.dflash_train([*args, "--run_dir", str(tmp_path / "r"), "--devices", places]) == 0
    assert "target threads on cpu, cpu; drafter on cpu" in capsys.readouterr().out
    assert cli.dflash_train(["--resume", str(tmp_path / "r"), "--steps", "3"]) == 0
    assert "target threads on cpu, cpu" in capsys.readouterr().out
