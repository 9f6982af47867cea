"""Fixtures for decoding: a target whose next token is a lookup, drafters trained for a few steps, drafters that cheat."""
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import byte_tokenizer, tiny_model, tiny_target

import dflash_nb.decode as decode
from dflash_nb.blocks import first_slot, make_blocks
from dflash_nb.config import TrainConfig
from dflash_nb.data import Batch
from dflash_nb.drafter import Drafter

LAYOUTS = ("anchor-first", "shifted")


def successor(num=250, period=9, seed=3):
    "A permutation of tokens 0..num-1 made of cycles of `period`: token -> token that follows it."
    order = np.random.default_rng(seed).permutation(num)
    after = np.arange(num)
    for i in range(0, num, period):
        cycle = order[i:i + period]
        after[cycle] = np.roll(cycle, -1)
    return after


def lookup_target(family="llama", eos=None, **changes):
    "Tiny target that always continues t with successor()[t]; token `eos` is followed by the stop token 257."
    from dflash_nb.target import Target

    model = tiny_model(family, tie_word_embeddings=False, **changes)
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(torch.randn(table.shape, generator=torch.Generator().manual_seed(1)))
        head = torch.zeros_like(table)
        after = successor()
        for t, n in enumerate(after):
            head[257 if t == eos else n] = table[t]
        model.get_output_embeddings().weight.copy_(head)
    return Target.from_model(model, byte_tokenizer(), name=f"lookup-{family}")


def tiny_drafter(target, layout="anchor-first", block_size=6, layers=1, seed=0, **kw):
    cfg = TrainConfig(block_size=block_size, layout=layout, num_draft_layers=layers, target_layer_ids=(1, 3), **kw)
    return Drafter(target.drafter_config(cfg), seed=seed)


def answers(target, prompts, n, **kw):
    "The target's own greedy answers as documents: [(ids, mask)]."
    out = []
    for p in prompts:
        new = decode.generate(target, p, n, **kw).ids
        out.append((np.array([*p, *new], np.int32), np.array([False] * len(p) + [True] * len(new))))
    return out


@lru_cache(None)
def half_trained(layout):
    "(lookup target, drafter trained until its accept lengths vary); shared, never change it."
    target = lookup_target()
    docs = answers(target, [[i, 200] for i in range(5, 240, 29)], 18, stop_ids=())
    return target, fit(tiny_drafter(target, layout), target, docs, 40, lr=6e-3)


@pytest.fixture(scope="module")
def target():
    "The target of `half_trained`."
    return half_trained("anchor-first")[0]


@pytest.fixture(scope="module")
def trained():
    "Half-trained drafters by layout."
    return {layout: half_trained(layout)[1] for layout in LAYOUTS}


class Docs(list):
    "Documents with the two methods of a Dataset that a walk reads."
    def doc(self, i):
        return self[i]


def as_batch(docs, anchors=None):
    "One row a document; anchors: one list a row, default every position that can be one."
    T = max(len(ids) for ids, _ in docs)
    ids, loss, doc, pos = (torch.zeros(len(docs), T, dtype=torch.long) for _ in range(4))
    doc -= 1
    rows = []
    for r, (tokens, mask) in enumerate(docs):
        n = len(tokens)
        for row, x in ((ids, tokens), (loss, mask), (doc, np.zeros(n)), (pos, np.arange(n))):
            row[r, :n] = torch.as_tensor(np.asarray(x, np.int64))
        rows.append(np.flatnonzero(mask[:-1] & mask[1:]) if anchors is None else np.array(anchors[r], int))
    N = max(len(a) for a in rows)
    keep = torch.tensor([[i < len(a) for i in range(N)] for a in rows])
    at = torch.tensor([[*a, *[0] * (N - len(a))] for a in rows], dtype=torch.long)
    return Batch(ids, pos, doc, loss.bool(), anchors_RN=at, keep_RN=keep, row_ids=torch.arange(len(docs)), epoch=0, index=0)


def fit(drafter, target, docs, steps, lr=3e-3):
    "Train on every anchor of `docs`, plainly."
    batch, c, io = as_batch(docs), drafter.cfg, target.io()
    with torch.no_grad():
        feats = target.features(batch.ids_RT, batch.pos_RT, layer_ids=c.target_layer_ids)[0].clone()
    blocks = make_blocks(batch, c.block_size, c.mask_token_id, c.layout)
    embedded = io.embed(blocks.ids_RNB).clone()
    opt = torch.optim.AdamW(drafter.parameters(), lr)
    for _ in range(steps):
        h = drafter(drafter.context(feats), batch.pos_RT, embedded, blocks)[blocks.valid_RNB]
        loss = F.cross_entropy(io.head(h), blocks.labels_RNB[blocks.valid_RNB])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return drafter


def cheat(monkeypatch, truth, wrong=(), real=None):
    "Replace drafting by the tokens of `truth` (prompt and answer), except at the positions in `wrong`."
    def drafts(drafter, io, cache, anchor, position, num, *args, **kw):
        (real or decode.draft_tokens)(drafter, io, cache, anchor, position, num, *args, **kw)
        assert anchor == truth[position], "the anchor is not the token at its position"
        tokens = [truth[i] if i < len(truth) else 0 for i in range(position + 1, position + 1 + num)]
        tokens = [(t + 1) % 200 if position + 1 + k in wrong else t for k, t in enumerate(tokens)]
        return torch.tensor(tokens), None
    monkeypatch.setattr(decode, "draft_tokens", drafts)


__all__ = ["LAYOUTS", "Docs", "answers", "as_batch", "cheat", "fit", "first_slot",
           "half_trained", "lookup_target", "successor", "tiny_drafter", "tiny_target"]
