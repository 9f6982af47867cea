"Attention of blocks through kernels of its own gives the plain attention's numbers and gradients."
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dflash_nb import attention as module
from dflash_nb.attention import block_attention, block_bounds, block_ranges, can_block, key_ranges, query_ranges, tile_shape
from dflash_nb.blocks import dense_mask

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and module.triton is not None
if INTERPRETED: # its loops over tensors read sizes in a way that newer numpy refuses
    from triton.runtime import interpreter
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
    interpreter._patch_lang_tensor = patched
SHAPES = [(1, 4, 2, 16, 16), (9, 16, 3, 64, 9), (4, 4, 2, 64, 16),
          (3, 16, 4, 64, 8), (2, 32, 2, 32, 2), (5, 8, 1, 128, 8), (7, 4, 3, 16, 6)] # N, B, H/K, E, H


def blocks_of(N, B, T, seed, R=2, docs=3, sort=True):
    "Blocks at random anchors of rows with several documents; every fifth block and one whole row are dropped."
    g = torch.Generator().manual_seed(seed)
    anchors = torch.randint(0, T, (R, N), generator=g)
    anchors[0, 0] = 0
    if sort:
        anchors = anchors.sort(-1).values
    cuts = torch.cat([torch.zeros(R, 1, dtype=torch.long), torch.randint(1, T, (R, docs - 1), generator=g).sort(-1).values], 1)
    start = torch.where(cuts[:, None] <= anchors[..., None], cuts[:, None], 0).amax(-1)
    keep = torch.rand(R, N, generator=g) > 0.2
    keep[0] |= True
    keep[-1] &= R == 1
    return SimpleNamespace(ids_RNB=torch.zeros(R, N, B), anchors_RN=anchors, start_RN=start, keep_RN=keep, row_len=T)


def move(blocks, device):
    return SimpleNamespace(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(blocks).items()})


def plain(q, kc, vc, ko, vo, mask):
    "Softmax over all keys, in the type of its inputs."
    G, E = q.shape[2] // kc.shape[2], q.shape[3]
    k, v = (torch.cat(p, 1).repeat_interleave(G, 2) for p in ((kc, ko), (vc, vo)))
    s = torch.einsum("rqhe,rkhe->rhqk", q, k) * E**-0.5
    seen = mask.any(-1)[..., None]
    p = s.masked_fill(~(mask | ~seen), -torch.inf).softmax(-1) * seen
    return torch.einsum("rhqk,rkhe->rqhe", p, v)


def both(N, B, G, E, H, T, seed, device, dtype, **kw):
    "(values and gradients of the kernels, the same of `plain` in float64)."
    blocks, K = move(blocks_of(N, B, T, seed, **kw), device), H // G
    g, R = torch.Generator().manual_seed(seed + 1), len(blocks.keep_RN)
    shapes = [(N * B, H), (T, K), (T, K), (N * B, K), (N * B, K), (N * B, H)]
    *inputs, out_grad = [torch.randn(R, n, h, E, generator=g).to(device, dtype) for n, h in shapes]
    mine, theirs = [x.clone().requires_grad_() for x in inputs], [x.double().requires_grad_() for x in inputs]
    y = block_attention(*mine, SimpleNamespace(mask=block_ranges(blocks, G, dtype)))
    want = plain(*theirs, dense_mask(blocks))
    dropped = ~blocks.keep_RN.repeat_interleave(B, 1)
    out_grad[dropped] = torch.nan # whatever comes back for a dropped block must not spread
    y.backward(out_grad)
    want.backward(out_grad.nan_to_num().double())
    assert not y[dropped].any() and not mine[0].grad[dropped].any()
    return [y, *(x.grad for x in mine)], [want, *(x.grad for x in theirs)]


def error(a, b):
    return ((a.double() - b).norm() / b.norm().clamp_min(1e-9)).item()


@pytest.mark.parametrize("seed", range(40))
def test_ranges_are_those_of_the_dense_mask(seed):
    N, B, T, n, keys = 7, 2, 19, 1 + seed % 3, 4 + seed % 5
    blocks = blocks_of(N, B, T, seed, sort=seed % 4 != 0)
    bounds, sees = block_bounds(blocks), dense_mask(blocks)[:, 0, ::B, :T]
    for r, tiles in enumerate(query_ranges(bounds, n).tolist()):
        for i, (low, high, begin, end) in enumerate(tiles):
            seen = sees[r, i * n:(i + 1) * n]
            assert not seen[:, :low].any() and not seen[:, high:].any() and seen[:, begin:max(begin, end)].all()
    for r, tiles in enumerate(key_ranges(bounds, T, keys).tolist()):
        for i, (first, last, begin, end) in enumerate(tiles):
            seen = sees[r, :, i * keys:(i + 1) * keys]
            assert not seen[:first].any() and not seen[last:].any() and seen[begin:end].all() and first <= begin <= end <= last


def test_one_document_leaves_only_the_end_of_a_run_masked():
    anchors = torch.arange(8)[None] * 4 + 3
    bounds = block_bounds(SimpleNamespace(anchors_RN=anchors, start_RN=anchors * 0, keep_RN=anchors > 0))
    assert all(begin == low == 0 and high - end == 4 for low, high, begin, end in query_ranges(bounds, 2)[0].tolist())
    assert [end for *_, end in key_ranges(bounds, 32, 4)[0].tolist()] == [8] * 8


def test_tiles_fit_every_shape():
    for B in (2, 4, 8, 16, 32):
        for G in (1, 2, 3, 4, 5, 6, 7, 8):
            blocks, heads = tile_shape(B, G)
            assert blocks * heads * B > 64 and G % heads == 0
    assert tile_shape(256, 1) == (0, 0) and not any(can_block(16, 4, *x, "cpu") for x in ((64, torch.float64), (80, torch.bfloat16)))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sort", [True, False])
def test_interpreted_kernels(shape, sort):
    N, B, G, E, H = shape
    got, want = both(N, B, G, E, H, 70, N, "cpu", torch.float32, sort=sort)
    assert all(error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(INTERPRETED or module.triton is None, reason="needs Triton, and is the run above")
def test_interpreted_in_a_process_of_its_own():
    env = dict(os.environ, TRITON_INTERPRET="1")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "interpreted_kernels", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stdout[-3000:]


GPU_SHAPES = [(6, 16, 4, 128, 32), (9, 4, 2, 64, 8), (5, 32, 8, 128, 8), (3, 16, 5, 64, 5), (4, 8, 1, 32, 2),
              (9, 16, 3, 64, 9), (20, 16, 3, 128, 9), (9, 16, 1, 16, 2)] # the last three: rows that see no key of their first tiles


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("docs", [1, 4])
def test_kernels_on_a_gpu(dtype, shape, docs):
    N, B, G, E, H = shape
    got, want = both(N, B, G, E, H, 700, N, "cuda", dtype, docs=docs)
    again, _ = both(N, B, G, E, H, 700, N, "cuda", dtype, docs=docs)
    most = {torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert all(error(a, b) < most for a, b in zip(got, want, strict=True))
    assert all(a.equal(b) for a, b in zip(got, again, strict=True))


@pytest.mark.cuda
def test_a_hundred_steps_of_the_fast_path_follow_plain_float32():
    from dflash_nb.bench import Geometry, RandomIO, random_drafter, random_inputs, run_step, step_runner
    from dflash_nb.config import TrainConfig
    g, losses = Geometry(256, 4, 2, 64, 768, 4096, layers=3, features=3, block=8, anchors=64, row_len=512, rows=2), []
    for name, dtype, attention in (("eager", torch.float32, "eager"), ("graph", torch.bfloat16, "block")):
        run = step_runner(random_drafter(g, "cuda", attention), RandomIO(g, "cuda", dtype), TrainConfig(block_size=g.block), name, dtype)
        batches = [random_inputs(g, g.rows, "cuda", torch.float32, seed) for seed in range(3)]
        for b in batches:
            b.feats_RTF = b.feats_RTF.to(dtype)
        run.warm_up(batches[0])
        losses.append(torch.stack([run_step(run, [batches[i % 3]], lr=3e-4)[0].loss for i in range(100)]).cpu())
        assert run.name == name
        run.close()
    assert losses[0][-1] < losses[0][0] - 1 and (losses[0] - losses[1]).abs().max() < 0.1
