"Checkpoints: crashes at every write, broken folders, wrong files, rotation."
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_nb import checkpoint
from dflash_nb.checkpoint import (
    CheckpointError,
    SaveError,
    best_step,
    drafter_folder,
    load_drafter,
    load_state,
    mark_best,
    optimizer_tensors,
    save_drafter,
    save_state,
    scan_states,
)
from dflash_nb.config import ConfigError, DrafterConfig, TrainConfig
from dflash_nb.drafter import Drafter
from dflash_nb.optim import lr_at, make_optimizer, set_lr

CFG = DrafterConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                    intermediate_size=24, vocab_size=40, rope_parameters=dict(rope_type="default", rope_theta=1e6),
                    max_position_embeddings=64, block_size=4, layout="shifted", target_layer_ids=(1, 2),
                    num_target_layers=6, mask_token_id=39, target_name="tiny")


def trained(steps=1, seed=0):
    "A drafter and an AdamW that has made some steps."
    torch.set_num_threads(1)
    d = Drafter(CFG, seed=seed)
    opt = torch.optim.AdamW(d.parameters(), lr=1e-3)
    for i in range(steps):
        for p in d.parameters():
            p.grad = torch.full_like(p, .1 * (i + 1))
        opt.step()
    return d, opt


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


class Killed(BaseException):
    "Stands for a kill: nothing catches it, so no cleaning runs."


def test_drafter_round_trip_and_keys(tmp_path):
    d, _ = trained()
    save_drafter(d, tmp_path / "d")
    again = load_drafter(tmp_path / "d")
    assert again.cfg == CFG and equal(again.state_dict(), d.state_dict())
    hf = json.loads((tmp_path / "d/config.json").read_text())
    assert hf["dflash_config"]["target_layer_ids"] == [1, 2] and hf["dflash_config"]["layout"] == "shifted"
    assert hf["torch_dtype"] == "float32" and hf["num_target_layers"] == 6
    assert {p.name for p in (tmp_path / "d").iterdir()} == {"model.safetensors", "config.json"}


def test_drafter_in_bfloat16_says_so_and_loads_as_float32(tmp_path):
    d, _ = trained()
    save_drafter(d, tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert load_drafter(tmp_path).fc.weight.dtype == torch.float32


def test_tensors_missing_unknown_and_misshapen_are_all_listed(tmp_path):
    d, _ = trained()
    save_drafter(d, tmp_path)
    t = load_file(tmp_path / "model.safetensors")
    t["extra.weight"] = t.pop("norm.weight")
    t["fc.weight"] = t["fc.weight"][:, :-1].contiguous()
    save_file(t, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as e:
        load_drafter(tmp_path)
    said = ("missing tensors: norm.weight", "unknown tensors: extra.weight", "fc.weight [16, 31]", "[16, 32]")
    assert all(x in str(e.value) for x in said)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("change, said", [
    (lambda hf: hf.update(block_size=8), "block_size"), (lambda hf: hf.pop("num_target_layers"), "num_target_layers"),
    (lambda hf: hf.update(rope_theta=1e4), "rope_theta")])
def test_contradictory_or_missing_keys_are_named(tmp_path, change, said):
    save_drafter(trained()[0], tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    change(hf)
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match=said):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_files_are_one_line(tmp_path, name):
    save_drafter(trained()[0], tmp_path)
    (tmp_path / name).write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match=name) as e:
        load_drafter(tmp_path)
    assert "\n" not in str(e.value)


def test_no_folder_no_drafter(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load_drafter(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="neither a drafter"):
        load_drafter(tmp_path)


def test_state_round_trip_in_another_parameter_order(tmp_path):
    d, opt = trained(3)
    save_state(tmp_path, 3, d, opt, {"config": {}})
    e = Drafter(CFG, seed=9)
    other = torch.optim.AdamW(list(e.parameters())[::-1], lr=5e-4)
    load_state(tmp_path).restore(e, other)
    assert equal(e.state_dict(), d.state_dict()) and equal(optimizer_tensors(e, other), optimizer_tensors(d, opt))
    assert other.param_groups[0]["lr"] == 5e-4


def test_state_before_the_first_step(tmp_path):
    d, opt = trained(0)
    save_state(tmp_path, 0, d, opt, {"config": {}})
    e, other = trained(0, seed=3)
    load_state(tmp_path).restore(e, other)
    assert equal(e.state_dict(), d.state_dict()) and not other.state


def test_moments_of_another_type_or_a_missing_one_are_refused(tmp_path):
    d, opt = trained(2)
    path = save_state(tmp_path, 2, d, opt, {"config": {}})
    good = load_file(path / "optimizer.safetensors")

    def refusal(tensors):
        save_file(tensors, path / "optimizer.safetensors")
        state = json.loads((path / "state.json").read_text())
        state["files"]["optimizer.safetensors"] = (path / "optimizer.safetensors").stat().st_size
        (path / "state.json").write_text(json.dumps(state))
        with pytest.raises(CheckpointError) as e:
            load_state(tmp_path).restore(*trained(0))
        return str(e.value)

    assert "exp_avg.fc.weight torch.bfloat16" in refusal({k: v.bfloat16() if k == "exp_avg.fc.weight" else v for k, v in good.items()})
    assert "of 14 parameters" in refusal({k: v for k, v in good.items() if "fc.weight" not in k})
    assert "ghost.weight" in refusal(good | {"exp_avg.ghost.weight": torch.zeros(2)})


def test_masters_in_bfloat16_are_refused(tmp_path):
    d, opt = trained(1)
    path = save_state(tmp_path, 1, d, opt, {"config": {}})
    save_file({k: v.bfloat16() for k, v in load_file(path / "model.safetensors").items()}, path / "model.safetensors")
    state = json.loads((path / "state.json").read_text())
    state["files"]["model.safetensors"] = (path / "model.safetensors").stat().st_size
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="wrong types"):
        load_state(tmp_path).restore(*trained(0))


def crash_points(monkeypatch, root):
    "Number of flushes and renames of one save."
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(checkpoint.os, name, lambda *a, real=real: (calls.append(1), real(*a))[1])
    d, opt = trained(1)
    save_state(root, 1, d, opt, {"config": {}})
    monkeypatch.undo()
    return len(calls)


def test_a_kill_at_every_flush_and_rename_leaves_a_complete_state(tmp_path, monkeypatch):
    d1, o1 = trained(1)
    d2, o2 = trained(2)
    n = crash_points(monkeypatch, tmp_path / "count")
    assert n > 8
    for k in range(n):
        root = tmp_path / f"r{k}"
        save_state(root, 1, d1, o1, {"config": {}})
        left = [k]

        def step(*a, real, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*a)

        for name in ("fsync", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(checkpoint.os, name, lambda *a, real=real: step(*a, real=real))
        with pytest.raises(Killed):
            save_state(root, 2, d2, o2, {"config": {}})
        monkeypatch.undo()
        saved, (e, opt) = load_state(root), trained(0, seed=5)
        saved.restore(e, opt)
        want = {1: (d1, o1), 2: (d2, o2)}[saved.step]
        assert equal(e.state_dict(), want[0].state_dict()) and equal(optimizer_tensors(e, opt), optimizer_tensors(*want))
        save_state(root, 3, d2, o2, {"config": {}})
        assert load_state(root).step == 3 and not list(root.glob(".tmp-*"))


@pytest.mark.parametrize("what", ["no state", "short", "no file", "bad json", "unfinished"])
def test_half_written_states_are_skipped_and_named(tmp_path, what):
    d, opt = trained(1)
    for step in (1, 2):
        save_state(tmp_path, step, d, opt, {"config": {}})
    path = tmp_path / "step-00000002"
    if what == "no state":
        (path / "state.json").unlink()
    elif what == "short":
        os.truncate(path / "model.safetensors", 100)
    elif what == "no file":
        (path / "optimizer.safetensors").unlink()
    elif what == "bad json":
        (path / "state.json").write_text('{"files": ')
    else:
        path.rename(tmp_path / ".tmp-step-00000002-7")
    saved = load_state(tmp_path)
    assert saved.step == 1 and len(saved.skipped) == 1 and "00000002" in next(iter(saved.skipped))
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 2"):
        load_state(tmp_path, 2)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="skipped"):
        load_state(tmp_path)


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    d, opt = trained(1)
    for step in range(1, 7):
        save_state(tmp_path, step, d, opt, {"config": {}}, keep=2, best=2. if step == 2 else None)
    assert list(scan_states(tmp_path)[0]) == [2, 5, 6] and best_step(tmp_path) == 2
    mark_best(tmp_path, 6, 3.)
    save_state(tmp_path, 7, d, opt, {"config": {}}, keep=2)
    assert list(scan_states(tmp_path)[0]) == [6, 7]


def test_a_full_disk_keeps_the_earlier_state(tmp_path, monkeypatch):
    d, opt = trained(1)
    save_state(tmp_path, 1, d, opt, {"config": {}})

    def full(*a, **k):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(SaveError, match="No space left.*intact"):
        save_state(tmp_path, 2, d, opt, {"config": {}})
    assert load_state(tmp_path).step == 1 and not list(tmp_path.glob(".tmp-*"))


def test_the_pointer_wins_over_a_higher_step(tmp_path):
    d, opt = trained(1)
    for step in (2, 1):  # back to the start, and one step anew
        save_state(tmp_path, step, d, opt, {"config": {}})
    assert load_state(tmp_path).step == 1 and drafter_folder(tmp_path).name == "step-00000001"
    (tmp_path / "latest").write_text("garbage")
    assert load_state(tmp_path).step == 2


def test_a_complete_state_is_used_before_the_pointer_names_it(tmp_path, monkeypatch):
    d, opt = trained(1)
    for step in (7, 3):  # 7 is of an earlier attempt
        save_state(tmp_path, step, d, opt, {"config": {}}, keep=5)

    def killed(*a):
        raise KeyboardInterrupt

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(checkpoint, "write_text", killed)
        save_state(tmp_path, 4, d, opt, {"config": {}}, keep=5)
    assert (tmp_path / "latest").read_text() == "step-00000003\n" and load_state(tmp_path).step == 4
    (tmp_path / "step-00000004" / "model.safetensors").write_bytes(b"half")
    assert load_state(tmp_path).step == 3
    for path in tmp_path.glob("step-*/state.json"):  # written by an earlier version
        path.write_text(path.read_text().replace('"serial"', '"other"'))
    assert load_state(tmp_path).step == 3


def test_optimizer_state_that_is_no_tensor_is_refused():
    d, opt = trained(1)
    opt.state[d.fc.weight]["count"] = 3
    with pytest.raises(CheckpointError, match="count of fc.weight is a int"):
        optimizer_tensors(d, opt)


def test_muon_resumes_exactly_and_is_not_mixed_with_adamw(tmp_path):
    cfg = TrainConfig(optimizer="muon", lr=1e-2, steps=9)

    def steps(d, opt, first, n):
        for i in range(first, first + n):
            for j, p in enumerate(d.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * i + j))
            set_lr(opt, lr_at(cfg, i))
            opt.step()

    d, e = Drafter(CFG, seed=0), Drafter(CFG, seed=1)
    opt, other = make_optimizer(d, cfg), make_optimizer(e, cfg)
    steps(d, opt, 0, 3)
    save_state(tmp_path, 3, d, opt, {})
    saved = load_state(tmp_path)
    saved.restore(e, other)
    steps(d, opt, 3, 3)
    steps(e, other, 3, 3)
    assert equal(d.state_dict(), e.state_dict()) and equal(optimizer_tensors(d, opt), optimizer_tensors(e, other))
    f = Drafter(CFG, seed=2)
    with pytest.raises(CheckpointError, match="of another optimizer"):
        saved.restore(f, make_optimizer(f, cfg | dict(optimizer="adamw")))
    save_state(tmp_path / "adamw", 1, *trained(), {})
    with pytest.raises(CheckpointError, match="of another optimizer"):
        load_state(tmp_path / "adamw").restore(f, make_optimizer(f, cfg))
