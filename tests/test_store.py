"Features on disk: the same numbers, sizes that are true, kills, damage, types that do not fit."
import shutil
from collections import namedtuple

import pytest
import torch

from dflash_nb import store as module
from dflash_nb.callbacks import ProgressCB
from dflash_nb.config import ConfigError, DataError, TrainConfig, resolve
from dflash_nb.data import batch_at, pack
from dflash_nb.sides import FeatureCache
from dflash_nb.store import FeatureStore, check_space, disk_features, store_bytes, use_store, write_features
from dflash_nb.trainer import Trainer, toy_data, toy_target

torch.set_num_threads(1)
CFG = TrainConfig(block_size=4, num_anchors=8, row_len=64, token_budget=128, num_draft_layers=1, mask_token_id=63, steps=4, val_share=0.0,
                  target_layer_ids=(1, 3), feature_cache=0.0, attention="eager")
Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def parts():
    target, ds = toy_target(), toy_data()
    return target, ds, pack(ds, 64), resolve(CFG, target)


def test_sizes_are_true(parts, tmp_path):
    target, _, packed, _ = parts
    for dtype, final in (("same", False), ("bfloat16", True)):
        s = write_features(target, packed, (1, 3), tmp_path / dtype, dtype, final)
        on_disk = sum(p.stat().st_size for p in s.folder.glob("rows-*"))
        want = store_bytes(packed, target, (1, 3), dtype, final)
        assert want <= on_disk < want * 1.01 + 2000


@pytest.mark.parametrize("loss", ["ce", "fkl"])
@pytest.mark.parametrize("shard_rows", [1, 5, 1000])
def test_reads_what_the_target_says(parts, tmp_path, loss, shard_rows):
    target, _, packed, cfg = parts
    cfg = cfg | dict(loss=loss)
    s = write_features(target, packed, (1, 3), tmp_path / "s", final=loss == "fkl", shard_rows=shard_rows, batch_rows=1)
    cache = FeatureCache(target, cfg)
    for i in (0, 3, 11):
        batch = batch_at(packed, cfg, i)
        assert all(torch.equal(a, b) for a, b in zip(s.read(batch), cache.read(batch), strict=True))


@pytest.mark.parametrize("knobs", [dict(), dict(loss="fkl"), dict(noise=0.2)], ids=str)
def test_a_run_from_disk_has_the_losses_of_the_online_run(parts, tmp_path, knobs):
    target, ds, _, _ = parts

    def losses(name, **how):
        t = Trainer(target, ds, CFG | knobs, tmp_path / name, callbacks=[ProgressCB(show="off")])
        if how:
            use_store(t, tmp_path / f"features of {name}", **how)
        t.fit()
        return t.history.loss.tolist()

    online = losses("online")
    assert losses("disk", dtype="same") == online
    rough = losses("rough", dtype="bfloat16")
    assert rough != online and rough == pytest.approx(online, rel=0.02)


def test_a_killed_writer_goes_on(parts, tmp_path, monkeypatch):
    target, _, packed, _ = parts
    whole = write_features(target, packed, (1, 3), tmp_path / "whole", shard_rows=4)
    inner, n = module.save_file, []

    def dies(named, path):
        inner(named, path)
        n.append(path)
        if len(n) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        write_features(target, packed, (1, 3), tmp_path / "s", shard_rows=4)
    monkeypatch.setattr(module, "save_file", inner)
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["index.json", "rows-00000.safetensors", "rows-00001.safetensors"]
    with pytest.raises(DataError, match="lacks"):
        FeatureStore(tmp_path / "s")
    kept = (tmp_path / "s/rows-00000.safetensors").stat().st_mtime_ns
    write_features(target, packed, (1, 3), tmp_path / "s", shard_rows=4)
    assert (tmp_path / "s/rows-00000.safetensors").stat().st_mtime_ns == kept
    for p in whole.folder.glob("rows-*"):
        assert p.read_bytes() == (tmp_path / "s" / p.name).read_bytes()


def test_a_full_disk_is_said_before_anything_is_written(parts, tmp_path, monkeypatch):
    target, _, packed, _ = parts
    monkeypatch.setattr(shutil, "disk_usage", lambda at: Disk(10**9, 0, 10**5))
    with pytest.raises(DataError, match="GiB.*bfloat16"):
        write_features(target, packed, (1, 3), tmp_path / "deep/er/s")
    assert not list(tmp_path.iterdir())
    check_space(tmp_path, 0, spare=0)


def test_what_does_not_fit_is_refused(parts, tmp_path):
    target, _, packed, cfg = parts
    with pytest.raises(ConfigError, match="dtype='int8'"):
        write_features(target, packed, (1,), tmp_path / "a", "int8")
    big = toy_target()
    with torch.no_grad():
        big.model.model.layers[1].mlp.down_proj.weight.mul_(1e7)
    with pytest.raises(DataError, match="do not fit into float16"):
        write_features(big, packed, (1, 2), tmp_path / "b", "float16")
    s = write_features(target, packed, (1, 3), tmp_path / "c")
    s.final = True
    with pytest.raises(ConfigError, match="no final states"):
        s.read(batch_at(packed, cfg, 0))
    with pytest.raises(DataError, match="no index.json"):
        FeatureStore(tmp_path)
    other = pack(toy_data(seed=5), 64)
    with pytest.raises(ConfigError, match="holds other features.*fingerprint"):
        write_features(target, other, (1, 3), tmp_path / "c")


def test_sweeps_name_their_stores_apart(parts, tmp_path):
    target, _, packed, cfg = parts
    make = disk_features(tmp_path)
    a, b, c = make(target, [cfg], (1, 3), packed), make(target, [cfg | dict(loss="fkl")], (1, 3), packed), make(target, [cfg], (1,), packed)
    assert len({a.folder, b.folder, c.folder}) == 3 and b.index["final"] and make(target, [cfg], (1, 3), packed).folder == a.folder


@pytest.mark.parametrize("bad, words", [
    (dict(layers=()), "layers="), (dict(layers=(6,)), "0 to 5"), (dict(shard_rows=0), "shard_rows=0"), (dict(batch_rows=0), "batch_rows=0")
], ids=str)
def test_what_cannot_be_written_leaves_no_folder(parts, tmp_path, bad, words):
    with pytest.raises(ConfigError, match=words):
        write_features(parts[0], parts[2], folder=tmp_path / "s", **(dict(layers=(1, 2)) | bad))
    assert not (tmp_path / "s").exists()
