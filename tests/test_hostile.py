"""Damaged files, full disks, closed pipes and callers' contexts: one line or no effect, never a traceback."""
import io
import os
import re

import pytest
import torch

from dflash_nb import cli, status
from dflash_nb.callbacks import Callback, ProgressCB, progress_mode
from dflash_nb.checkpoint import CheckpointError
from dflash_nb.config import ConfigError, DataError, TargetError, TrainConfig, load_config
from dflash_nb.evaluate import prompt_ids
from dflash_nb.events import new_run_dir
from dflash_nb.target import load_target
from dflash_nb.trainer import Trainer, toy_data, toy_target

SHAPE = dict(block_size=4, num_anchors=4, num_draft_layers=1, mask_token_id=63, row_len=64, token_budget=64, val_share=0.0, steps=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def small(run_dir, *callbacks, target=None):
    cfg, quiet = TrainConfig(**SHAPE), ProgressCB(show="off")
    return Trainer(target or toy_target(), toy_data(), cfg, run_dir=run_dir, callbacks=[quiet, *callbacks])


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.drafter.parameters()])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_callers_context_changes_nothing(tmp_path, context):
    plain = small(tmp_path / "plain")
    plain.fit()
    target = toy_target()
    with context():
        inside = small(tmp_path / "inside", target=target)
        inside.fit()
    assert torch.equal(weights(plain), weights(inside))


@pytest.mark.parametrize("name, error", [("run.json", CheckpointError), ("data.safetensors", DataError), ("data.json", DataError)])
def test_a_damaged_run_is_refused_in_one_line(tmp_path, name, error):
    small(tmp_path / "r").fit()
    (tmp_path / "r" / name).write_text("{")
    with pytest.raises(error) as e:
        Trainer.from_run(tmp_path / "r", target=toy_target())
    assert "damaged" in str(e.value) and "\n" not in str(e.value)


def test_a_full_disk_at_the_start_is_one_line_and_exit_code_1(tmp_path, monkeypatch, capsys):
    import safetensors.numpy

    def full(*a, **k):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    trainer = small(tmp_path / "r")
    assert cli.run_command("x", lambda: trainer.fit()) == 1
    err = capsys.readouterr().err
    assert "No space left" in err and err.count("\n") == 1
    monkeypatch.undo()
    assert small(tmp_path / "r").fit().outcome == "finished"


def test_an_operating_system_error_is_one_line_with_the_file(capsys):
    def body():
        open("/nowhere/file")

    assert cli.run_command("x", body, lambda: "continue with: y") == 1
    assert capsys.readouterr().err == "x: failed: '/nowhere/file' No such file or directory; continue with: y\n"


def test_run_directories_that_cannot_be_made(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "sub" / "run"):
        assert cli.dflash_train(["--run_dir", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "is a file" in err and "give a" in err
    with pytest.raises(ConfigError, match="cannot be made .*give another directory"):
        new_run_dir(tmp_path / "file" / "run")
    monkeypatch.setattr(os, "access", lambda *a: False)
    assert cli.dflash_train(["--run_dir", str(tmp_path / "a" / "b")]) == 2
    assert f"{str(tmp_path)!r} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("argv, said", [(["--lr", "-1e-3"], "lr=-0.001"), (["--target_layer_ids", "-1,1"], "target_layer_ids=(-1, 1)"),
                                        (["--betas", "-.5,0"], "betas=(-0.5, 0)"), (["--seed", str(10**30)], f"seed={10**30}")])
def test_values_that_begin_with_a_minus_or_are_huge_are_named(capsys, argv, said):
    assert cli.dflash_train(argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_a_huge_seed_of_eval_is_named(capsys):
    assert cli.dflash_eval(["anything", "--seed", str(10**30)]) == 2
    assert "seed=1000" in capsys.readouterr().err


def test_a_folder_as_data(tmp_path, capsys):
    assert cli.dflash_train(["--data", str(tmp_path)]) == 2
    assert "a folder; give a .jsonl" in capsys.readouterr().err


def test_an_architecture_that_transformers_does_not_know(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "zorg"}')
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(TargetError, match="upgrade transformers"):
        load_target(str(tmp_path))


def test_a_config_file_that_holds_no_mapping(tmp_path):
    (tmp_path / "c.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="c.yaml' holds a list: give a mapping"):
        load_config(tmp_path / "c.yaml")


def test_prompts_of_another_kind_are_named():
    for bad in (3, None, 1.5):
        with pytest.raises(DataError, match=re.escape(repr(bad))):
            prompt_ids(bad, toy_target())


class Gone(io.StringIO):
    "A pipe whose reader left."
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_no_reader_and_no_stdout(tmp_path, monkeypatch):
    class Leave(Callback):
        def after_step(self, trainer):
            monkeypatch.setattr("sys.stdout", Gone())

    trainer = small(tmp_path / "r", Leave())
    trainer.callbacks = [ProgressCB(show="lines"), *[c for c in trainer.callbacks if not isinstance(c, ProgressCB)]]
    assert trainer.fit().outcome == "finished"
    assert status.main_status([str(tmp_path / "r"), "--watch"]) == 0
    monkeypatch.setattr("sys.stdout", None)
    assert progress_mode() == "lines"


def test_a_log_on_a_full_disk_is_one_line(monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    for command, argv in ((cli.dflash_train, []), (cli.dflash_eval, ["runs/a"])):
        with monkeypatch.context() as m:
            m.setattr("sys.stdout", Full())
            assert command(argv) == 1
        assert capsys.readouterr().err == f"{command.__name__}: failed: No space left on device\n"


def test_status_refuses_in_one_line(tmp_path, capsys):
    for argv in (["--every", "x"], ["--every", "-1"], ["--nothing"]):
        with pytest.raises(SystemExit) as e:
            status.main_status([str(tmp_path), *argv])
        assert e.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_path_with_a_space_can_be_pasted(tmp_path):
    class Stop(Callback):
        def after_step(self, trainer):
            trainer.stop()

    run = tmp_path / "a run"
    assert f"dflash_train --resume '{run}'" in str(small(run, Stop()).fit())
    with pytest.raises(ConfigError, match=re.escape(f"--resume '{run}'")):
        small(run)
