"""Drafter: one block at a time by Hugging Face's own modules, train/decode parity, no view of the future, composition."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from reference import one_block
from tiny import tiny_target
from transformers import DynamicCache

from dflash_nb.attention import interpreted
from dflash_nb.blocks import make_blocks
from dflash_nb.config import ConfigError, DrafterConfig, TrainConfig
from dflash_nb.drafter import Drafter, Rope, _norm_weight, copy_target_layers, flex_mask, pick_attention, rotate
from dflash_nb.losses import block_loss

torch.set_num_threads(1)
BACKENDS, LAYOUTS = ["eager", "sdpa", "dense", "flex"], ["anchor-first", "shifted"]
ROPES = {"default": {}, "linear": dict(factor=4.0),
         "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
         "yarn": dict(factor=4.0, original_max_position_embeddings=64)}


def config(**changes):
    base = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
                vocab_size=100,
                rope_parameters=dict(rope_type="default", rope_theta=10000.0), target_layer_ids=(1, 3), num_target_layers=6,
                mask_token_id=99, block_size=4)
    return DrafterConfig(**{**base, **changes})


def drafter(cfg=None, attention="eager", dtype=torch.float32, scale=5.0):
    "Weights larger than the init, so that attention is far from uniform."
    d = Drafter(cfg or config(), attention, seed=1)
    with torch.no_grad():
        for p in d.parameters():
            p.mul_(scale) if p.ndim > 1 else p.mul_(1 + 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return d.to(dtype)


def case(cfg=None, docs=(9, 11, 4), anchors=(2, 5, 10, 12, 14, 0), keep=(1, 1, 1, 1, 1, 0), layout="anchor-first", R=2, pad=3, seed=0):
    "Rows of documents and padding, random features and embeddings."
    cfg, g = cfg or config(), torch.Generator().manual_seed(seed)
    doc = torch.cat([torch.full((n,), i) for i, n in enumerate(docs)] + [torch.full((pad,), -1)])
    pos = torch.cat([torch.arange(n) for n in docs] + [torch.zeros(pad, dtype=torch.long)])
    T = len(doc)
    batch = SimpleNamespace(ids_RT=torch.randint(90, (R, T), generator=g), pos_RT=pos.expand(R, T), doc_RT=doc.expand(R, T),
                            loss_RT=(doc >= 0).expand(R, T),
                            anchors_RN=torch.tensor(anchors).expand(R, -1), keep_RN=torch.tensor(keep).bool().expand(R, -1))
    table = torch.randn(cfg.vocab_size, cfg.hidden_size, generator=g)
    feats = torch.randn(R, T, len(cfg.target_layer_ids) * cfg.target_hidden_size, generator=g)
    return batch, make_blocks(batch, cfg.block_size, cfg.mask_token_id, layout), feats, table


def run(d, batch, blocks, feats, table, attention):
    "The training forward; 'dense' is sdpa in the form that CUDA uses."
    if attention == "dense":
        import dflash_nb.drafter as module
        real = module._training_view
        module._training_view = lambda rope, b, name, device, groups: real(rope, b, name, SimpleNamespace(type="cuda"), groups)
        try:
            return run(d, batch, blocks, feats, table, "sdpa")
        finally:
            module._training_view = real
    return d(d.context(feats), batch.pos_RT, table[blocks.ids_RNB], blocks, attention)


def kept(blocks):
    return [(r, n) for r in range(blocks.keep_RN.shape[0]) for n in range(blocks.keep_RN.shape[1]) if blocks.keep_RN[r, n]]


@pytest.mark.parametrize("changes", [{}, dict(num_key_value_heads=4), dict(num_key_value_heads=1, head_dim=24), dict(block_size=2),
                                     dict(target_hidden_size=20, target_layer_ids=(1, 2, 3)),
                                     dict(rope_parameters=dict(rope_type="yarn", rope_theta=500.0, **ROPES["yarn"]))],
                         ids=["gqa", "mha", "mqa", "B2", "width", "yarn"])
def test_equals_one_block_at_a_time(changes):
    cfg = config(**changes)
    d = drafter(cfg)
    batch, blocks, feats, table = case(cfg)
    with torch.no_grad():
        outs = {a: run(d, batch, blocks, feats, table, a) for a in BACKENDS}
    w = {n: p.detach().double() for n, p in d.state_dict().items()}
    for r, n in kept(blocks):
        s, a = int(blocks.start_RN[r, n]), int(blocks.anchors_RN[r, n])
        h = table[blocks.ids_RNB[r, n]].double()
        want = one_block(w, cfg, feats[r, s:a].double(), batch.pos_RT[r, s:a], h, blocks.pos_RNB[r, n])
        for name, out in outs.items():
            assert (out[r, n] - want).abs().max() < 2e-5, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", BACKENDS)
def test_k1_a_served_block_equals_the_trained_one(attention, layout):
    d = drafter(attention="sdpa" if attention == "dense" else attention)
    batch, blocks, feats, table = case(layout=layout)
    with torch.no_grad():
        trained = run(d, batch, blocks, feats, table, attention)
    for r, n in kept(blocks):
        s, a = int(blocks.start_RN[r, n]), int(blocks.anchors_RN[r, n])
        cache = d.new_cache(2)
        for i in range(s, a, 3):
            d.extend(cache, feats[r:r + 1, i:min(i + 3, a)], batch.pos_RT[r, i:min(i + 3, a)])
        assert cache.length == a - s
        h = table[blocks.ids_RNB[r, n]]
        served = d.draft(h, blocks.pos_RNB[r, n], cache)
        assert served.shape == h.shape and (served - trained[r, n]).abs().max() < 1e-5
        again = d.draft(h[None], blocks.pos_RNB[r, n], cache)
        assert torch.equal(again[0], served) and cache.length == a - s


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", BACKENDS)
def test_k2_the_future_changes_nothing(attention, layout):
    "Overlapping anchors 10, 12, 14 in the second document: a block moves only when something before its own anchor does."
    d = drafter()
    batch, blocks, feats, table = case(layout=layout)
    for edge in (2, 10, 12, 14):
        other = SimpleNamespace(**vars(batch))
        at_anchor = torch.zeros(feats.shape[1], dtype=torch.bool)
        at_anchor[batch.anchors_RN[0]] = True
        other.ids_RT = torch.where((torch.arange(feats.shape[1]) >= edge) & ~at_anchor, (batch.ids_RT + 7) % 90, batch.ids_RT)
        moved = feats.clone()
        moved[:, edge:] += 3.0
        with torch.no_grad():
            a = run(d, batch, blocks, feats, table, attention)
            b = run(d, other, make_blocks(other, 4, 99, layout), moved, table, attention)
        for r, n in kept(blocks):
            s, anchor = int(blocks.start_RN[r, n]), int(blocks.anchors_RN[r, n])
            same = torch.equal(a[r, n], b[r, n])
            assert same == (anchor <= edge or anchor == s), (edge, anchor)


@pytest.mark.parametrize("attention", BACKENDS)
def test_other_blocks_and_documents_change_nothing(attention):
    d = drafter()
    batch, blocks, feats, table = case()
    h = table[blocks.ids_RNB]
    h2, feats2 = h.clone(), feats.clone()
    h2[:, 3] += 1.0
    feats2[:, :9] += 1.0
    with torch.no_grad():
        a = run(d, batch, blocks, feats, _Fixed(h), attention)
        b = run(d, batch, blocks, feats2, _Fixed(h2), attention)
    same = [torch.equal(a[0, n], b[0, n]) for n in range(5)]
    assert same == [False, False, True, False, True]


class _Fixed:
    "Stands for an embedding table: gives the same rows whatever is asked."
    def __init__(self, h): self.h = h
    def __getitem__(self, ids): return self.h


def gradient(d, batch, blocks, feats, table, attention, pick):
    "Gradients of a fixed linear loss over the picked blocks (row, block), and their outputs."
    d.zero_grad()
    out = run(d, batch, blocks, feats, table, attention)
    mine = torch.stack([out[r, n] for r, n in pick])
    w = torch.randn(mine.shape, generator=torch.Generator().manual_seed(3), dtype=mine.dtype)
    (mine * w.to(mine.device)).sum().backward()
    return mine.detach(), torch.cat([p.grad.flatten() for p in d.parameters()])


def only(blocks, pick):
    "The same blocks, all dropped but the picked ones, in the input as in the loss."
    keep = torch.zeros_like(blocks.keep_RN)
    for r, n in pick:
        keep[r, n] = True
    ids = torch.where(keep[..., None], blocks.ids_RNB, 99)
    return replace(blocks, keep_RN=keep, ids_RNB=ids, valid_RNB=blocks.valid_RNB & keep[..., None])


def trained_loss(d, batch, blocks, feats, table, attention, cfg):
    "(LossOut, gradients) of the loss that is trained, without its division."
    d.zero_grad()
    h = run(d, batch, blocks, feats, table, attention)
    out = block_loss(h, blocks, SimpleNamespace(head=lambda x: x @ table.T), cfg)
    out.total.backward()
    return out, torch.cat([p.grad.flatten() for p in d.parameters()])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "dense"])
def test_k3_alone_padded_batched_packed(attention, layout):
    "A document of 11 tokens in four settings, its last block past its end; all documents start with supervised text; float64."
    d = drafter(dtype=torch.float64)
    alone = case(docs=(11,), anchors=(1, 3, 9), keep=(1, 1, 1), R=1, pad=0, layout=layout)
    ids, feats, table = alone[0].ids_RT[0], alone[2][0].double(), alone[3].double()
    def place(docs, at, anchors, keep, pad, R, r):
        batch, _, f, _ = case(docs=docs, anchors=anchors, keep=keep, pad=pad, R=R, seed=9)
        f = f.double()
        batch.ids_RT[r, at:at + 11], f[r, at:at + 11] = ids, feats
        return batch, make_blocks(batch, 4, 99, layout), f, table
    settings = [((alone[0], alone[1], alone[2].double(), table), [(0, 0), (0, 1), (0, 2)]),
                (place((11,), 0, (0, 1, 3, 9), (0, 1, 1, 1), 6, 1, 0), [(0, 1), (0, 2), (0, 3)]),
                (place((11, 9), 0, (1, 3, 9, 14), (1, 1, 1, 1), 0, 3, 1), [(1, 0), (1, 1), (1, 2)]),
                (place((4, 11, 6), 4, (1, 5, 7, 13, 16), (1, 1, 1, 1, 1), 2, 2, 1), [(1, 1), (1, 2), (1, 3)])]
    outs, grads = zip(*[gradient(d, *setting, attention, pick) for setting, pick in settings], strict=True)
    labels = [torch.stack([s[1].labels_RNB[r, n] for r, n in pick]) for s, pick in settings]
    for out, grad, label in zip(outs[1:], grads[1:], labels[1:], strict=True):
        assert torch.allclose(out, outs[0], rtol=1e-10, atol=1e-12) and torch.equal(label, labels[0])
        assert torch.allclose(grad, grads[0], rtol=1e-10, atol=1e-10)
    for knobs in (dict(gamma=2.0), dict(weighting="dpace")):
        cfg = TrainConfig(block_size=4, layout=layout, **knobs)
        losses = [trained_loss(d, s[0], only(s[1], pick), s[2], s[3], attention, cfg) for s, pick in settings]
        for out, grad in losses[1:]:
            torch.testing.assert_close(out.total, losses[0][0].total, rtol=1e-10, atol=0)
            torch.testing.assert_close(out.denominator, losses[0][0].denominator, rtol=1e-12, atol=0)
            assert torch.allclose(grad, losses[0][1], rtol=1e-10, atol=1e-12) and torch.equal(out.count_B, losses[0][0].count_B)
        assert losses[0][0].total > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_k3_flex_forward_alone_and_packed(layout):
    d = drafter()
    alone = case(docs=(11,), anchors=(1, 3, 5), keep=(1, 1, 1), R=1, pad=0, layout=layout)
    batch, _, feats, table = case(docs=(4, 11, 6), anchors=(1, 5, 7, 9, 16), keep=(1, 1, 1, 1, 0), pad=2, R=2, layout=layout, seed=9)
    batch.ids_RT[1, 4:15], feats[1, 4:15] = alone[0].ids_RT[0], alone[2][0]
    with torch.no_grad():
        want = run(d, *alone, "flex")[0]
        got = run(d, batch, make_blocks(batch, 4, 99, layout), feats, alone[3], "flex")[1, 1:4]
    assert torch.allclose(got, want, atol=1e-5)


def test_gradients_agree_between_backends():
    d = drafter()
    args = case()
    want = gradient(d, *args, "eager", kept(args[1]))[1]
    for attention in ("sdpa", "dense"):
        got = gradient(d, *args, attention, kept(args[1]))[1]
        assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("attention", BACKENDS)
@pytest.mark.parametrize("every", [False, True])
def test_dropped_blocks_are_exact_zeros(attention, every):
    d = drafter()
    batch, blocks, feats, table = case(keep=(0,) * 6 if every else (1, 0, 1, 0, 1, 0))
    seen = []
    for layer in d.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda m, x: seen.append(x[0].detach()))
    with torch.set_grad_enabled(attention != "flex"):
        out = run(d, batch, blocks, feats, table, attention)
    assert out.isfinite().all() and len(seen) == 2
    drop = (~blocks.keep_RN).repeat_interleave(4, 1)
    for y in seen:
        assert (y[drop] == 0).all() and (y[~drop] != 0).all()
    if attention != "flex":
        out[~blocks.keep_RN].sum().backward(retain_graph=True)
        for layer in d.layers:
            assert (layer.self_attn.k_proj.weight.grad == 0).all() and (layer.self_attn.v_proj.weight.grad == 0).all()
        assert all(p.grad.isfinite().all() for p in d.parameters() if p.grad is not None)


def test_z_lab_tensor_names():
    d = Drafter(config(num_hidden_layers=5, head_dim=24))
    want = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for i in range(5):
        p = f"layers.{i}."
        want |= {p + "input_layernorm.weight": (32,), p + "post_attention_layernorm.weight": (32,),
                 p + "self_attn.q_proj.weight": (96, 32), p + "self_attn.k_proj.weight": (48, 32), p + "self_attn.v_proj.weight": (48, 32),
                 p + "self_attn.o_proj.weight": (32, 96), p + "self_attn.q_norm.weight": (24,), p + "self_attn.k_norm.weight": (24,),
                 p + "mlp.gate_proj.weight": (48, 32), p + "mlp.up_proj.weight": (48, 32), p + "mlp.down_proj.weight": (32, 48)}
    assert {n: tuple(p.shape) for n, p in d.state_dict().items()} == want and len(want) == 58


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_depths_are_finite(layers):
    d = Drafter(config(num_hidden_layers=layers), "sdpa")
    batch, blocks, feats, table = case()
    out = run(d, batch, blocks, feats, table, None)
    out.sum().backward()
    assert out.isfinite().all() and all(p.grad.isfinite().all() for p in d.parameters())


def test_init_is_seeded_and_reads_no_global_generator():
    before = torch.get_rng_state()
    a, b, c = Drafter(config(), seed=3), Drafter(config(), seed=3), Drafter(config(), seed=4)
    assert torch.equal(before, torch.get_rng_state())
    same = [torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    assert all(same) and not torch.equal(a.fc.weight, c.fc.weight)
    assert abs(a.fc.weight.std() - 0.02) < 2e-3 and (a.norm.weight == 1).all()


@pytest.mark.parametrize("kind", ROPES)
def test_rope_equals_transformers(kind):
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )
    params = dict(rope_type=kind, rope_theta=10000.0, **ROPES[kind])
    hf = Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, hidden_size=32, num_attention_heads=4, max_position_embeddings=256,
                                          rope_parameters=dict(params)))
    rope = Rope(config(rope_parameters=params, max_position_embeddings=256))
    pos, q = torch.tensor([[0, 1, 17, 200]]), torch.randn(1, 4, 2, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = hf(q, pos)
    want, _ = apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)
    assert torch.allclose(rotate(q, rope(pos)), want, atol=1e-6)


@pytest.mark.parametrize("move", [lambda d: d.bfloat16(), lambda d: d.to(torch.bfloat16), lambda d: d.half().float(), lambda d: d.double(),
                                  lambda d: d.to("meta").to_empty(device="cpu")])
def test_rope_frequencies_survive_casts(move):
    want = Drafter(config()).rope.inv_freq.clone()
    got = move(Drafter(config())).rope.inv_freq
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_unknown_rope_is_named():
    with pytest.raises(ConfigError, match="rope"):
        Drafter(config(rope_parameters=dict(rope_type="spiral", rope_theta=1e4)))


@pytest.mark.parametrize("attention", BACKENDS)
def test_bfloat16_weights_and_autocast(attention):
    batch, blocks, feats, table = case()
    with torch.no_grad():
        want = run(drafter(), batch, blocks, feats, table, "eager")
        cast = run(drafter(dtype=torch.bfloat16), batch, blocks, feats, table, attention)
        with torch.autocast("cpu", torch.bfloat16):
            auto = run(drafter(), batch, blocks, feats, table, attention)
    for got in (cast, auto):
        assert got.dtype == torch.bfloat16 and (got[blocks.keep_RN] - want[blocks.keep_RN]).norm() < 0.05 * want[blocks.keep_RN].norm()


def test_a_large_feature_does_not_break_a_bfloat16_norm():
    d = drafter(dtype=torch.bfloat16)
    feats = torch.full((1, 3, 64), 3e19)
    assert d.context(feats).isfinite().all()


def test_mask_and_context_are_built_once(monkeypatch):
    import dflash_nb.drafter as module
    calls = []
    monkeypatch.setattr(module, "flex_mask", lambda b: calls.append(1) or flex_mask(b))
    d = drafter(config(num_hidden_layers=3))
    fused = []
    d.fc.register_forward_hook(lambda *a: fused.append(1))
    with torch.no_grad():
        run(d, *case(), "flex")
    assert len(calls) == 1 and len(fused) == 1


def test_bad_input_is_named():
    d, (batch, blocks, feats, table) = drafter(), case()
    with pytest.raises(ConfigError, match="flex.*CPU"):
        run(d, batch, blocks, feats, table, "flex")
    with pytest.raises(ConfigError, match="63 wide"):
        d.context(feats[..., :-1])
    with pytest.raises(ConfigError, match="fast"):
        Drafter(config(), "fast")
    assert pick_attention("auto", "cpu", True) == "sdpa" and pick_attention("auto", "cuda:1", True) == "flex"
    assert pick_attention("auto", "cuda", True, head_dim=8) == "sdpa" and pick_attention("auto", "cuda", True, fits=True) == "block"
    with pytest.warns(UserWarning, match="flex runs instead"):
        assert pick_attention("block", "cuda", True) == "flex"
    if not interpreted():
        with pytest.raises(ConfigError, match="GPU alone"):
            pick_attention("block", "cpu", True, fits=True)


def test_cache_keeps_what_it_holds_when_it_grows():
    d = drafter()
    _, _, feats, table = case()
    small, large = d.new_cache(1), d.new_cache(64)
    for i in range(9):
        d.extend(small, feats[:1, i:i + 1], torch.tensor([i]))
    d.extend(large, feats[:1, :9], torch.arange(9))
    for i in range(2):
        for a, b in zip(small.view(i), large.view(i), strict=True):
            assert a.shape == (1, 9, 2, 16) and torch.allclose(a, b, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex has its backward on CUDA only")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_gradients_on_cuda(layout):
    cfg = config(block_size=8, head_dim=32)
    d = drafter(cfg).cuda()
    batch, blocks, feats, table = case(cfg, docs=(150, 120), anchors=(*range(3, 260, 13),), keep=(1,) * 19 + (0,), layout=layout, pad=10)
    args = [SimpleNamespace(**{k: v.cuda() for k, v in vars(batch).items()}), blocks.to("cuda"), feats.cuda(), table.cuda()]
    out, want = gradient(d, *args, "eager", kept(blocks))
    for attention in ("sdpa", "flex"):
        got_out, got = gradient(d, *args, attention, kept(blocks))
        assert (got_out - out).norm() < 1e-4 * out.norm() and (got - want).norm() < 1e-4 * want.norm()


# A start from the target's layers


def warm(target, layers=2, **knobs):
    "(drafter, layers copied) for a target; the mask token is free in all tiny ones."
    d = Drafter(target.drafter_config(TrainConfig(num_draft_layers=layers, block_size=4, mask_token_id=259, **knobs)), "eager", seed=2)
    return d, copy_target_layers(d, target)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_copied_layers_have_the_targets_keys_and_values(family, layers):
    "On the target's own residual stream; families without a norm on keys are compared before the drafter's."
    target = tiny_target(family)  # 4 heads, 2 of keys and values; gemma stores w - 1
    d, picked = warm(target, layers)
    assert picked == {1: [5], 2: [0, 5], 3: [0, 2, 5]}[layers]
    pos = torch.arange(9)[None]
    with torch.no_grad():
        hidden = target.model(torch.arange(40, 49)[None], output_hidden_states=True, use_cache=False).hidden_states
        for layer, i in zip(d.layers, picked, strict=True):
            source, cache = target.parts.layers[i], DynamicCache()
            stream = hidden[i]
            ctx = d.hidden_norm(stream)
            if family != "qwen3":
                assert (layer.self_attn.k_norm.weight == 1).all()
                layer.self_attn.k_norm = layer.self_attn.q_norm = torch.nn.Identity()
            cos_sin = target.parts.decoder.rotary_emb(stream, pos)
            source(stream, position_embeddings=cos_sin, position_ids=pos, past_key_values=cache, use_cache=True)
            want_k, want_v = next((x.keys, x.values) for x in cache.layers if x.get_seq_length())
            for h in (ctx, layer.input_layernorm(stream)):
                k, v = layer.self_attn.keys(h, d.rope(pos))
                torch.testing.assert_close(k.transpose(1, 2), want_k, rtol=1e-4, atol=2e-5)
                torch.testing.assert_close(v.transpose(1, 2), want_v, rtol=1e-4, atol=2e-5)
            q = source.self_attn.q_proj(source.input_layernorm(stream))
            torch.testing.assert_close(layer.self_attn.q_proj(layer.input_layernorm(stream)), q, rtol=1e-4, atol=2e-5)
            x = source.post_attention_layernorm(stream)
            torch.testing.assert_close(layer.post_attention_layernorm(stream), x, rtol=1e-4, atol=2e-5)
            if family != "gemma":  # whose MLP has another activation
                torch.testing.assert_close(layer.mlp(x), source.mlp(x), rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(d.norm(hidden[3]), target.parts.norm(hidden[3]), rtol=1e-4, atol=2e-5)


def test_a_warm_start_reads_the_mean_of_its_features():
    d, _ = warm(tiny_target("qwen3"))
    cold = Drafter(d.cfg, seed=2)
    feats = torch.randn(3, len(d.cfg.target_layer_ids), 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(d.fc(feats.flatten(1)) - .2 * cold.fc(feats.flatten(1)), feats.mean(1), rtol=1e-4, atol=1e-5)
    again, _ = warm(tiny_target("qwen3"))
    assert all(torch.equal(a, b) for a, b in zip(d.parameters(), again.parameters(), strict=True))


def test_a_half_precision_norm_is_copied_without_rounding():
    norm = tiny_target("gemma").model.model.norm.bfloat16()  # multiplies by 1 + w: more digits than bfloat16 has
    want = 1 + norm.weight.float()
    assert not torch.equal(want, want.bfloat16().float())
    torch.testing.assert_close(_norm_weight(norm, 64), want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("family, word", [("qwen2", "self_attn.q_proj.bias"), ("gemma2", "pre_feedforward_layernorm"),
                                          ("gemma3", "pre_feedforward_layernorm"),
                                          ("qwen3_moe", "mlp"), ("mixtral", "mlp"), ("gpt_neox", "bias"),
                                          ("cohere", "post_attention_layernorm"), ("phi", "bias"), ("gpt2", "ln_1")])
def test_targets_whose_layers_differ_are_refused(family, word):
    target = tiny_target(family)
    d = Drafter(target.drafter_config(TrainConfig(num_draft_layers=1, block_size=4, mask_token_id=250)))
    before = {n: p.clone() for n, p in d.state_dict().items()}
    with pytest.raises(ConfigError, match=f"init='target'.*{word}.*init='random'") as e:
        copy_target_layers(d, target)
    assert "\n" not in str(e.value) and all(torch.equal(before[n], p) for n, p in d.state_dict().items())


def test_nothing_is_copied_when_a_later_layer_is_refused():
    target = tiny_target("qwen3_moe", mlp_only_layers=[0])
    d = Drafter(target.drafter_config(TrainConfig(num_draft_layers=2, block_size=4, mask_token_id=259)))
    before = {n: p.clone() for n, p in d.state_dict().items()}
    with pytest.raises(ConfigError, match="layer 5"):
        copy_target_layers(d, target)
    assert all(torch.equal(before[n], p) for n, p in d.state_dict().items())


def test_other_shapes_are_refused():
    target = tiny_target("llama")
    d = Drafter(config(hidden_size=64, intermediate_size=96, vocab_size=260))
    with pytest.raises(ConfigError, match="gate_proj.weight is .128, 64. in the target and .96, 64. in the drafter"):
        copy_target_layers(d, target)


@pytest.mark.parametrize("kind, more", [*ROPES.items(), ("yarn", dict(factor=4.0)),
                                        ("yarn", dict(factor=4.0, original_max_position_embeddings=128, truncate=False)),
                                        ("yarn", dict(factor=40.0, original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=.8)),
                                        ("yarn", dict(factor=4.0, attention_factor=1.3, beta_fast=16, beta_slow=2))], ids=str)
def test_the_rope_of_the_target_is_trained_and_exported(kind, more):
    target = tiny_target("llama", rope_parameters=dict(rope_type=kind, rope_theta=5e5, **more))
    cfg = target.drafter_config(TrainConfig(num_draft_layers=1, mask_token_id=259))
    theirs = target.parts.decoder.rotary_emb
    for rope in (Rope(cfg), Rope(DrafterConfig.from_hf(cfg.to_hf()))):
        torch.testing.assert_close(rope.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
        assert rope.scale == theirs.attention_scaling


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_blocks_in_chunks_see_all_that_they_may(size, monkeypatch):
    "Scores are made for the part of the context that a chunk of blocks sees; whatever the chunk, outputs and gradients are the same."
    import dflash_nb.drafter as module
    spans, found = module._spans, []
    for make in (lambda blocks: None, lambda blocks: spans(blocks, size)):
        monkeypatch.setattr(module, "_spans", make)
        d, (batch, blocks, feats, table) = drafter(dtype=torch.float64), case()
        feats, table = feats.double(), table.double()
        h = run(d, batch, blocks, feats, table, "eager")
        h.square().sum().backward()
        found.append([h.detach(), *(p.grad for p in d.parameters())])
    for whole, part in zip(*found, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-10)
    chunks = spans(blocks, size)
    assert [c[1] for c in chunks][-1] == blocks.keep_RN.shape[1] and all(low < high <= blocks.row_len for _, _, low, high in chunks)


@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 4, 8)])
def test_the_norm_of_a_cpu_has_the_composed_norms_gradient(shape):
    from dflash_nb.drafter import RMSNorm
    norm = RMSNorm(8, 1e-6).to_empty(device="cpu").double()
    with torch.no_grad():
        norm.weight.copy_(1 + torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    assert torch.autograd.gradcheck(norm, (x,))
    g, want = torch.randn_like(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-6)
    mine = torch.autograd.grad(norm(x), (x, norm.weight), g)
    for a, b in zip(mine, torch.autograd.grad(want, (x, norm.weight), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), want.detach(), rtol=1e-12, atol=1e-12)
