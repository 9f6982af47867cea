"""Blocks, labels and masks against naive loops, published cases and PyTorch's own block masks."""
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from dflash_nb.blocks import (
    dense_mask,
    first_slot,
    flex_mask,
    label_offset,
    make_blocks,
    mask_rule,
    plot_blocks,
    slot_weights,
)
from dflash_nb.config import ConfigError

LAYOUTS = ["anchor-first", "shifted"]
torch.set_num_threads(1)


def random_batch(seed, R=3, T=50, N=12, docs=4):
    "Rows of a few documents and a padded tail, random supervision, anchors anywhere (sorted), some dropped."
    g = torch.Generator().manual_seed(seed)
    doc = torch.full((R, T), -1)
    pos = torch.zeros(R, T, dtype=torch.long)
    for r in range(R):
        at = 0
        for d in range(docs):
            n = min(int(torch.randint(3, 2 * T // docs, (1,), generator=g)), T - at)
            doc[r, at:at + n], pos[r, at:at + n] = d, torch.arange(n)
            at += n
    loss = (torch.rand(R, T, generator=g) < 0.8) & (doc >= 0)
    anchors = torch.randint(T, (R, N), generator=g).sort()[0]
    keep = (torch.rand(R, N, generator=g) < 0.8) & (doc.gather(1, anchors) >= 0)
    return SimpleNamespace(ids_RT=torch.randint(5, 90, (R, T), generator=g), pos_RT=pos, doc_RT=doc, loss_RT=loss,
                           anchors_RN=anchors, keep_RN=keep)


def row(T, anchors, loss=None, doc=None):
    doc = torch.zeros(1, T, dtype=torch.long) if doc is None else torch.tensor([doc])
    pos = torch.cat([torch.arange(n) for n in doc[0].unique_consecutive(return_counts=True)[1].tolist()])[None]
    return SimpleNamespace(ids_RT=torch.arange(10, 10 + T)[None], pos_RT=pos, doc_RT=doc,
                           loss_RT=torch.ones(1, T, dtype=torch.bool) if loss is None else torch.tensor([loss]).bool(),
                           anchors_RN=torch.tensor([anchors]), keep_RN=torch.ones(1, len(anchors), dtype=torch.bool))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_labels_equal_a_naive_loop(layout, seed):
    b = random_batch(seed)
    size, off = 6, label_offset(layout)
    out = make_blocks(b, size, 99, layout)
    R, T = b.ids_RT.shape
    for r in range(R):
        for n in range(b.anchors_RN.shape[1]):
            a, alive = int(b.anchors_RN[r, n]), bool(b.keep_RN[r, n])
            assert out.ids_RNB[r, n].tolist() == [int(b.ids_RT[r, a]) if alive else 99] + [99] * (size - 1)
            prefix = True
            for k in range(size):
                t = a + k + off
                ok = alive and t < T and b.doc_RT[r, t] == b.doc_RT[r, a] and bool(b.loss_RT[r, t])
                prefix = prefix and ok
                want = prefix if layout == "shifted" else ok and k > 0
                assert bool(out.valid_RNB[r, n, k]) == want
                assert int(out.labels_RNB[r, n, k]) == (int(b.ids_RT[r, t]) if want else 0)
                assert int(out.pos_RNB[r, n, k]) == int(b.pos_RT[r, a]) + k


@pytest.mark.parametrize("seed", range(3))
def test_dense_mask_equals_a_naive_loop(seed):
    b = random_batch(seed, R=2, T=20, N=5)
    out = make_blocks(b, 3, 99)
    mask = dense_mask(out)
    for r in range(2):
        for q in range(15):
            n, a = q // 3, int(b.anchors_RN[r, q // 3])
            for s in range(20 + 15):
                ctx = s < a and b.doc_RT[r, s] == b.doc_RT[r, a]
                own = s >= 20 and (s - 20) // 3 == n
                assert bool(mask[r, 0, q, s]) == bool(b.keep_RN[r, n] and (ctx or own))


def test_published_cases():
    sees = [m.nonzero().flatten().tolist() for m in dense_mask(make_blocks(row(6, [2, 4]), 2, 0))[0, 0]]
    assert sees == [[0, 1, 6, 7]] * 2 + [[0, 1, 2, 3, 8, 9]] * 2
    b = make_blocks(row(17, [2, 10]), 4, 0)
    assert b.pos_RNB.flatten().tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    shifted = make_blocks(row(7, [2]), 4, 0, "shifted")
    assert shifted.labels_RNB[0, 0].tolist() == [13, 14, 15, 16]
    first_off = make_blocks(row(7, [2], loss=[1, 1, 1, 0, 1, 1, 1]), 4, 0, "shifted")
    assert not first_off.valid_RNB.any()
    plain = make_blocks(row(7, [2], loss=[1, 1, 1, 0, 1, 1, 1]), 4, 0)
    assert plain.valid_RNB[0, 0].tolist() == [False, False, True, True]


def test_identical_anchors_have_their_own_slots():
    m = dense_mask(make_blocks(row(8, [3, 3]), 2, 0))[0, 0]
    assert torch.equal(m[0, :8], m[2, :8]) and not (m[0, 8:] & m[2, 8:]).any()


def test_labels_stop_at_the_next_document_that_starts_supervised():
    b = make_blocks(row(8, [2], doc=[0] * 4 + [1] * 4), 5, 0)
    assert b.valid_RNB[0, 0].tolist() == [False, True, False, False, False]


def test_shifted_last_slot_past_the_row():
    b = make_blocks(row(5, [3]), 2, 0, "shifted")
    assert b.valid_RNB[0, 0].tolist() == [True, False] and b.labels_RNB[0, 0].tolist() == [14, 0]


@pytest.mark.parametrize("size,N,T,tile", [(16, 32, 256, 128), (10, 13, 100, 32), (7, 9, 130, 64), (128, 3, 300, 128), (256, 2, 300, 128),
                                           (33, 5, 64, 32), (2, 50, 128, 16)])
def test_flex_mask_has_the_tiles_of_create_block_mask(size, N, T, tile):
    blocks = make_blocks(random_batch(size, R=2, T=T, N=N, docs=3), size, 99)
    Q = N * size
    ours = flex_mask(blocks, tile)
    theirs = create_block_mask(mask_rule(blocks), 2, 1, Q, T + Q, device="cpu", BLOCK_SIZE=tile)
    assert ours.shape == theirs.shape and ours.seq_lengths == theirs.seq_lengths
    for kind in ("kv", "full_kv", "q", "full_q"):
        count, index = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        assert torch.equal(count, getattr(theirs, f"{kind}_num_blocks")), kind
        other = getattr(theirs, f"{kind}_indices")
        used = torch.arange(index.shape[-1]) < count[..., None]
        assert torch.equal(index[used], other[used]), kind
    r, q, kv = torch.meshgrid(torch.arange(2), torch.arange(Q), torch.arange(T + Q), indexing="ij")
    assert torch.equal(mask_rule(blocks)(r, 0, q, kv)[:, None], dense_mask(blocks))


def test_full_tiles_are_found():
    "A mask of partial tiles only would be right too, but would evaluate the rule everywhere."
    b = flex_mask(make_blocks(row(512, [400] * 16), 16, 0))
    assert b.full_kv_num_blocks.tolist() == [[[3, 3]]] and b.kv_num_blocks.tolist() == [[[2, 2]]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_step_depends_on_values(layout):
    "On the meta device any .item(), nonzero or boolean index raises."
    b = random_batch(0)
    blocks = make_blocks(SimpleNamespace(**{k: v.to("meta") for k, v in vars(b).items()}), 4, 99, layout)
    assert dense_mask(blocks).shape == (3, 1, 48, 98)
    assert flex_mask(blocks, 16).kv_indices.shape == (3, 1, 3, 7)


def test_all_dropped():
    b = random_batch(1)
    b.keep_RN[:] = False
    blocks = make_blocks(b, 4, 99)
    assert not blocks.valid_RNB.any() and (blocks.ids_RNB == 99).all() and not dense_mask(blocks).any()
    m = flex_mask(blocks, 16)
    assert not m.kv_num_blocks.any() and not m.full_kv_num_blocks.any()


@pytest.mark.parametrize("size,layout,word", [(1, "shifted", "block_size=1"), (51, "anchor-first", "block_size=51"),
                                              (4, "sideways", "layout='sideways'")])
def test_bad_input_is_named(size, layout, word):
    with pytest.raises(ConfigError, match=word) as e:
        make_blocks(random_batch(0), size, 99, layout)
    assert "\n" not in str(e.value)


def test_block_as_long_as_the_row_is_taken():
    assert make_blocks(row(4, [0]), 4, 99).valid_RNB[0, 0].tolist() == [False, True, True, True]


def test_slot_weights():
    w = slot_weights(16, "anchor-first", 7.0, torch.float64)
    assert w.dtype == torch.float64 and abs(w.sum() - 6.6306) < 1e-4
    assert abs(w[2] - 0.8669) < 1e-4 and abs(w[15] - 0.1353) < 1e-4
    assert abs(slot_weights(7, "shifted", 4.0).sum() - 3.7352) < 1e-4
    assert slot_weights(4, "anchor-first", None).tolist() == [0, 1, 1, 1] and slot_weights(3, "shifted", None).tolist() == [1, 1, 1]
    assert (first_slot("anchor-first"), first_slot("shifted")) == (1, 0)


def test_blocks_move_and_plot():
    blocks = make_blocks(random_batch(2), 4, 99)
    moved = blocks.to("meta")
    assert moved.ids_RNB.is_meta and moved.keep_RN.is_meta and moved.row_len == 50
    fig = plot_blocks(blocks, row=1)
    assert len(fig.axes) == 2
