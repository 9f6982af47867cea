"Losses against a naive loop in float64, golden numbers, and the ways in which sums may be split."
import itertools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dflash_nb import losses
from dflash_nb.blocks import make_blocks
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.losses import block_loss, combine, count_documents, dpace_weights, loss_terms, needs_teacher, teacher_states

torch.set_num_threads(1)
LAYOUTS = ("anchor-first", "shifted")
MIX = {"ce": 0.1, "tv": 0.9}
IDENTITY = SimpleNamespace(head=lambda h: h)
IDS = [[1, 4, 2, 8, 3, 7, 5, 6, 9], [2, 5, 1, 4, 7, 3, 8, 10, 11]]


def golden_case():
    "The inputs of the golden numbers: batch and logits."
    loss = torch.ones(2, 9, dtype=torch.bool)
    loss[0, 7] = loss[1, 6] = False
    batch = SimpleNamespace(ids_RT=torch.tensor(IDS), loss_RT=loss, doc_RT=torch.zeros(2, 9, dtype=torch.long),
                            pos_RT=torch.arange(9).expand(2, 9), anchors_RN=torch.tensor([[0, 3], [1, 4]]),
                            keep_RN=torch.tensor([[True, True], [True, False]]))
    return batch, (2 * torch.sin(0.37 * torch.arange(260, dtype=torch.float64))).view(2, 2, 5, 13)


def random_case(layout, R=3, N=4, B=5, T=24, D=6, V=11, seed=0, dtype=torch.float64):
    "Packed rows of three documents with holes in the supervision, dropped blocks, a random head and teacher."
    g = torch.Generator().manual_seed(seed)
    lens = torch.tensor([9, 8, 7])
    doc = torch.repeat_interleave(torch.arange(3), lens).expand(R, T)
    pos = torch.cat([torch.arange(n) for n in lens]).expand(R, T)
    batch = SimpleNamespace(
        ids_RT=torch.randint(1, V, (R, T), generator=g), loss_RT=torch.rand(R, T, generator=g) < 0.8, doc_RT=doc, pos_RT=pos,
        anchors_RN=torch.rand(R, T - 1, generator=g).argsort(-1)[:, :N].sort(-1).values,
        keep_RN=torch.rand(R, N, generator=g) < 0.8)
    blocks = make_blocks(batch, B, 0, layout)
    W = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    h = torch.randn(R, N, B, D, generator=g, dtype=torch.float64).to(dtype)
    teacher = torch.randn(R, N, B, D, generator=g, dtype=torch.float64).to(dtype)
    return blocks, SimpleNamespace(head=lambda x: x @ W.T, W=W), h, teacher


def naive_term(name, q, p, y):
    "One slot's loss from probability lists of tensors."
    if name == "ce":
        return -q[y].log()
    if name == "fkl":
        return sum(b * (b / a).log() for a, b in zip(q, p, strict=True))
    if name == "rkl":
        return sum(a * (a / b).log() for a, b in zip(q, p, strict=True))
    if name == "tv":
        return sum((a - b).abs() for a, b in zip(q, p, strict=True)) / 2
    return -sum(torch.minimum(a, b) for a, b in zip(q, p, strict=True)).log()


def naive_weights(cfg, q_y, m):
    "Weights of one block's slots (those that draft), from q(y) and whether the label counts."
    S = len(m)
    if cfg.weighting == "flat":
        return [float(x) for x in m]
    if cfg.weighting == "decay":
        gamma = round(1 + 3 * cfg.block_size / 8) if cfg.gamma == "auto" else cfg.gamma
        return [x * (1 if gamma is None else math.exp(-j / gamma)) for j, x in enumerate(m)]
    a = 0.5 if cfg.alpha == "auto" else cfg.alpha
    P = [math.prod(((1 - a) * q_y[i] + a) if m[i] else 1 for i in range(k + 1)) for k in range(S)]
    return [m[k] * sum(m[j] * P[j] for j in range(k, S)) for k in range(S)]


def naive(h, teacher, blocks, W, cfg):
    "(total, {term: numerator}, denominator, prefix) by loops over rows, blocks and slots."
    R, N, B, _ = h.shape
    first = 1 if cfg.layout == "anchor-first" else 0
    mix = cfg.loss if isinstance(cfg.loss, dict) else {cfg.loss: 1.0}
    nums, weights, prefix, docs = {t: 0.0 for t in mix}, 0.0, 0, set()
    for r, n in itertools.product(range(R), range(N)):
        m = [int(blocks.valid_RNB[r, n, k]) for k in range(first, B)]
        qs = [(h[r, n, k] @ W.T).softmax(-1) for k in range(first, B)]
        ps = [(teacher[r, n, k] @ W.T).softmax(-1) for k in range(first, B)]
        ys = [int(p.argmax()) if cfg.labels == "teacher" else int(blocks.labels_RNB[r, n, k]) for k,
              p in zip(range(first, B), ps, strict=True)]
        w = naive_weights(cfg, [q[y].item() for q, y in zip(qs, ys, strict=True)], m)
        for q, p, y, wk, mk in zip(qs, ps, ys, w, m, strict=True):
            for t in mix:
                nums[t] = nums[t] + (wk * naive_term(t, q, p, y) if mk else 0.0)
        weights += sum(w)
        prefix += sum(1 for _ in itertools.takewhile(bool, (mk and int(q.argmax()) == y for q, y, mk in zip(qs, ys, m, strict=True))))
        if blocks.keep_RN[r, n]:
            docs.add((r, int(blocks.start_RN[r, n])))
    kind = cfg.denominator if cfg.denominator != "auto" else "blocks" if cfg.weighting == "dpace" else "weights"
    den = {"weights": weights, "blocks": int(blocks.keep_RN.sum()), "documents": len(docs)}[kind]
    return sum(mix[t] * v for t, v in nums.items()), nums, den, prefix


def grads(h, blocks, io, cfg, teacher=None, **kw):
    "(LossOut, gradient of its total)."
    x = h.detach().clone().requires_grad_()
    out = block_loss(x, blocks, io, cfg, teacher, **kw)
    out.total.backward()
    return out, x.grad


WEIGHTINGS = [dict(weighting="flat"), dict(weighting="decay"), dict(gamma=2.0), dict(gamma=None), dict(weighting="dpace"),
              dict(weighting="dpace", alpha=0.1, denominator="documents"), dict(weighting="dpace", alpha=1.0, denominator="weights")]


@pytest.mark.filterwarnings("ignore:denominator")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("labels", ["data", "teacher"])
@pytest.mark.parametrize("loss", ["ce", "fkl", "rkl", "tv", "lk", MIX], ids=str)
@pytest.mark.parametrize("knobs", WEIGHTINGS, ids=str)
def test_every_loss_and_weighting_equals_a_naive_loop(loss, knobs, labels, layout):
    if labels == "teacher" and "ce" not in loss and knobs.get("weighting") != "dpace":
        with pytest.raises(ConfigError):
            TrainConfig(block_size=5, layout=layout, loss=loss, labels=labels, **knobs)
        return
    cfg = TrainConfig(block_size=5, layout=layout, loss=loss, labels=labels, loss_chunk=5, **knobs)
    blocks, io, h, teacher = random_case(layout, R=2, N=3, V=7)
    out, grad = grads(h, blocks, io, cfg, teacher)
    x = h.clone().requires_grad_()
    total, nums, den, prefix = naive(x, teacher, blocks, io.W, cfg)
    close = dict(rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.total, total, **close)
    torch.testing.assert_close(out.denominator, torch.tensor(den, dtype=torch.float64), **close)
    for t, v in nums.items():
        torch.testing.assert_close(out.numerators[t], v.detach(), **close)
    torch.testing.assert_close(out.loss, (total / den).detach(), **close)
    torch.testing.assert_close(grad, torch.autograd.grad(total, x)[0], **close)
    assert out.prefix == prefix and blocks.valid_RNB.any() and not blocks.keep_RN.all()


@pytest.mark.parametrize("layout, knobs, loss, numerator, denominator", [
    ("anchor-first", dict(weighting="flat"), 3.5731042463, 39.3041467094, 11),
    ("anchor-first", dict(gamma=7), 3.6125322217, None, 9.1579436935),
    ("anchor-first", dict(weighting="dpace", alpha=0.5, denominator="documents"), 9.3750551957, 18.7501103914, 2),
    ("anchor-first", dict(weighting="dpace"), 18.7501103914 / 3, 18.7501103914, 3),
    ("shifted", dict(weighting="flat"), 3.6129583247, None, 12),
    ("shifted", dict(gamma=4), 3.6887421471, None, 8.4686068751)])
def test_golden(layout, knobs, loss, numerator, denominator):
    batch, logits = golden_case()
    cfg = TrainConfig(block_size=5, layout=layout, **knobs)
    out = block_loss(logits, make_blocks(batch, 5, 0, layout), IDENTITY, cfg)
    assert out.loss.item() == pytest.approx(loss, abs=2e-10)
    assert out.denominator.item() == pytest.approx(denominator, abs=2e-10)
    if numerator:
        assert out.total.item() == out.numerators["ce"].item() == pytest.approx(numerator, abs=2e-10)


def test_golden_slots_that_count():
    batch, logits = golden_case()
    blocks = make_blocks(batch, 5, 0, "shifted")
    assert blocks.valid_RNB.int().flatten(0, 1).tolist() == [[1] * 5, [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0] * 5]
    out = block_loss(logits, blocks, IDENTITY, TrainConfig(block_size=5, layout="shifted"))
    assert out.count_B.tolist() == [3, 3, 3, 2, 1] and out.blocks == 3


def test_dpace_weights():
    def w(conf, m, a):
        return dpace_weights(torch.tensor([conf], dtype=torch.float64), torch.tensor([m], dtype=torch.bool), a)[0].tolist()

    assert w([0.8, 0.5], [1, 1], 0.5) == pytest.approx([1.575, 0.675])
    assert w([1.0] * 3, [1] * 3, 0.3) == pytest.approx([3, 2, 1])
    assert w([0.8, 0.1, 0.5], [1, 0, 1], 0.5) == pytest.approx([1.575, 0, 0.675])
    assert w([0.8, 0.5], [0, 0], 0.5) == [0, 0] and w([0.2, 0.3], [1, 1], 1.0) == [2, 1]
    for a in (0, 1.5, -0.1):
        with pytest.raises(ConfigError, match="alpha"):
            w([0.5], [1], a)
    conf = torch.rand(1, 3, requires_grad=True)
    assert not dpace_weights(conf, torch.ones(1, 3, dtype=torch.bool), 0.5).requires_grad


def test_term_identities():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(50, 9, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    y = torch.randint(9, (50,), generator=g)
    t = {n: f(a, b, y) for n, f in loss_terms.items()}
    torch.testing.assert_close(t["rkl"], loss_terms["fkl"](b, a, y))
    torch.testing.assert_close(t["fkl"], F.kl_div(a, b, log_target=True, reduction="none").sum(-1))
    torch.testing.assert_close(t["ce"], F.nll_loss(a, y, reduction="none"))
    torch.testing.assert_close(t["lk"], -(1 - t["tv"]).log())
    assert (t["tv"] <= 1).all() and all((v >= 0).all() for v in t.values())


def test_vocabulary_rows_switched_off_on_both_sides_are_harmless():
    blocks, io, h, teacher = random_case("anchor-first")
    off = torch.zeros(11, dtype=torch.float64)
    off[0] = -torch.inf
    masked = SimpleNamespace(head=lambda x: x @ io.W.T + off)
    small = SimpleNamespace(head=lambda x: (x @ io.W.T)[..., 1:])
    blocks.labels_RNB = blocks.labels_RNB.clamp_min(1)
    for loss in loss_terms:
        cfg = TrainConfig(block_size=5, loss=loss)
        out, grad = grads(h, blocks, masked, cfg, teacher)
        blocks.labels_RNB -= 1
        want, want_grad = grads(h, blocks, small, cfg, teacher)
        blocks.labels_RNB += 1
        torch.testing.assert_close(out.loss, want.loss)
        torch.testing.assert_close(grad, want_grad)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("knobs", [dict(), dict(loss=MIX, weighting="dpace", labels="teacher"), dict(loss="lk")], ids=str)
def test_chunks_change_nothing(knobs, layout):
    blocks, io, h, teacher = random_case(layout, dtype=torch.float32)
    full, full_grad = grads(h, blocks, io, TrainConfig(block_size=5, layout=layout, **knobs), teacher)
    for chunk in (1, 5, 12, 1000):
        out, grad = grads(h, blocks, io, TrainConfig(block_size=5, layout=layout, loss_chunk=chunk, **knobs), teacher)
        torch.testing.assert_close(out.loss, full.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grad, full_grad, rtol=1e-6, atol=1e-6)
        assert torch.equal(out.correct_B, full.correct_B) and torch.equal(out.count_B, full.count_B) and out.prefix == full.prefix


def test_logits_of_one_chunk_at_a_time(monkeypatch):
    blocks, io, h, _ = random_case("anchor-first")
    sizes = []
    spy = SimpleNamespace(head=lambda x: (sizes.append(x.numel() // 6), io.head(x))[1])
    grads(h, blocks, spy, TrainConfig(block_size=5, loss_chunk=5))
    assert sizes == [20, 20, 8]
    sizes.clear()
    monkeypatch.setattr(losses, "_CHUNK_LOGITS", 5 * 4 * 11 + 1)
    grads(h, blocks, spy, TrainConfig(block_size=5))
    assert sizes == [0, 16, 16, 16]


def rows(blocks, part):
    "The blocks of some rows."
    keys = ("ids_RNB", "pos_RNB", "labels_RNB", "valid_RNB", "anchors_RN", "start_RN", "keep_RN")
    return SimpleNamespace(**{k: getattr(blocks, k)[part] for k in keys})


@pytest.mark.filterwarnings("ignore:denominator")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("knobs", [dict(loss=MIX), *(dict(weighting="dpace", denominator=d) for d in ("weights", "blocks", "documents"))],
                         ids=str)
def test_micro_batches_add_up(knobs, layout):
    blocks, io, h, teacher = random_case(layout, R=4)
    cfg = TrainConfig(block_size=5, layout=layout, **knobs)
    want, want_grad = grads(h, blocks, io, cfg, teacher)
    for split in ([1, 1, 1, 1], [2, 2], [1, 3]):
        parts = torch.arange(4).split(split)
        outs, gs = zip(*(grads(h[p], rows(blocks, p), io, cfg, teacher[p]) for p in parts), strict=True)
        out = combine(outs)
        torch.testing.assert_close(out.loss, want.loss, rtol=1e-10, atol=0)
        torch.testing.assert_close(out.denominator, want.denominator, rtol=1e-10, atol=0)
        torch.testing.assert_close(torch.cat(gs) / out.denominator, want_grad / want.denominator, rtol=1e-10, atol=1e-15)
        assert torch.equal(out.correct_B, want.correct_B) and out.prefix == want.prefix and out.blocks == want.blocks
        torch.testing.assert_close(out.terms, want.terms, rtol=1e-10, atol=0)


@pytest.mark.parametrize("knobs", [dict(), dict(weighting="dpace"), dict(loss=MIX), dict(loss="lk", weighting="dpace")], ids=str)
def test_nothing_to_learn_from_is_zero_and_finite(knobs):
    blocks, io, h, teacher = random_case("anchor-first")
    blocks.keep_RN, blocks.valid_RNB = torch.zeros_like(blocks.keep_RN), torch.zeros_like(blocks.valid_RNB)
    out, grad = grads(h, blocks, io, TrainConfig(block_size=5, **knobs), teacher)
    assert out.loss == out.denominator == out.matched == out.total == 0 and not grad.any() and not out.accuracy_B.any()


@pytest.mark.parametrize("poison", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["ce", "fkl", "rkl", "tv", "lk"])
def test_slots_that_do_not_count_may_hold_anything(loss, layout, poison):
    blocks, io, h, teacher = random_case(layout)
    cfg = TrainConfig(block_size=5, layout=layout, loss=loss, weighting="dpace")
    out, grad = grads(h, blocks, io, cfg, teacher)
    gone = ~blocks.valid_RNB[..., None]
    bad_out, bad_grad = grads(h.masked_fill(gone, poison), blocks, io, cfg, teacher.masked_fill(gone, poison))
    assert torch.equal(bad_out.total, out.total) and torch.equal(bad_grad, grad)
    assert not bad_grad[~blocks.valid_RNB].any() and bad_grad[blocks.valid_RNB].abs().sum(-1).all()


def test_a_bad_value_that_counts_is_not_hidden():
    blocks, io, h, _ = random_case("anchor-first")
    h[tuple(blocks.valid_RNB.nonzero()[0])] = float("nan")
    out, grad = grads(h, blocks, io, TrainConfig(block_size=5))
    assert out.loss.isnan() and grad.isnan().any()


def test_weight_zero_is_absent():
    blocks, io, h, teacher = random_case("anchor-first")
    out, grad = grads(h, blocks, io, TrainConfig(block_size=5))
    zero, zero_grad = grads(h, blocks, io, TrainConfig(block_size=5, loss={"ce": 1, "tv": 0}))
    assert torch.equal(out.total, zero.total) and torch.equal(grad, zero_grad) and list(zero.numerators) == ["ce"]


@pytest.mark.parametrize("knobs, want", [
    (dict(), False), (dict(loss="fkl"), True), (dict(loss="rkl"), True), (dict(loss="tv"), True), (dict(loss="lk"), True),
    (dict(loss=MIX), True), (dict(loss={"ce": 1, "lk": 0}), False), (dict(labels="teacher"), True), (dict(weighting="dpace"), False),
    (dict(weighting="dpace", labels="teacher"), True)], ids=str)
def test_needs_teacher(knobs, want):
    cfg = TrainConfig(block_size=5, **knobs)
    blocks, io, h, teacher = random_case("anchor-first")
    assert needs_teacher(cfg) is want
    if want:
        with pytest.raises(ConfigError, match="teacher_states"):
            block_loss(h, blocks, io, cfg)
    else:
        assert torch.equal(block_loss(h, blocks, io, cfg).total, block_loss(h, blocks, io, cfg, teacher * torch.nan).total)


def test_teacher_gets_no_gradient():
    blocks, io, h, teacher = random_case("anchor-first")
    final = torch.randn(3, 24, 6, dtype=torch.float64, requires_grad=True)
    states = teacher_states(final, blocks, "anchor-first")
    assert states.shape == teacher.shape and not states.requires_grad
    teacher.requires_grad_()
    out, grad = grads(h, blocks, io, TrainConfig(block_size=5, loss=MIX, labels="teacher"), teacher)
    assert teacher.grad is None and final.grad is None and grad.any()


@pytest.mark.parametrize("layout, want", [("anchor-first", [[2, 3, 4], [10, 11, 12]]), ("shifted", [[2, 3, 4, 5], [10, 11, 12, 13]])])
def test_teacher_position(layout, want):
    blocks = SimpleNamespace(anchors_RN=torch.tensor([[2, 10]]), labels_RNB=torch.zeros(1, 2, 4))
    got = teacher_states(torch.arange(20.0)[None, :, None], blocks, layout)[0, :, :, 0]
    assert got[:, -len(want[0]):].tolist() == want


def test_teacher_position_is_clamped_and_rows_are_their_own():
    blocks = SimpleNamespace(anchors_RN=torch.tensor([[0, 6], [0, 6]]), labels_RNB=torch.zeros(2, 2, 4))
    final = torch.arange(16.0).view(2, 8, 1)
    assert teacher_states(final, blocks, "anchor-first")[..., 0].tolist() == [[[0, 0, 1, 2], [5, 6, 7, 7]],
                                                                              [[8, 8, 9, 10], [13, 14, 15, 15]]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", ["ce", "fkl", "rkl", "tv", "lk"])
def test_perfect_draft(loss, layout):
    batch, _ = golden_case()
    batch.loss_RT = torch.ones_like(batch.loss_RT)
    batch.anchors_RN, batch.keep_RN = torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2, dtype=torch.bool)
    blocks = make_blocks(batch, 5, 0, layout)
    sharp = F.one_hot(blocks.labels_RNB, 13).double() * 60
    drafts = 4 if layout == "anchor-first" else 5
    out = block_loss(sharp, blocks, IDENTITY, TrainConfig(block_size=5, layout=layout, loss=loss), teacher_RNBD=sharp)
    assert out.matched == drafts and out.prefix == 4 * drafts and out.loss.abs() < 1e-9
    assert out.accuracy_B.tolist() == [0.0] * (5 - drafts) + [1.0] * drafts
    wrong = sharp.clone()
    wrong[0, 0, 6 - drafts] = 0
    assert block_loss(wrong, blocks, IDENTITY, TrainConfig(block_size=5, layout=layout, loss=loss), sharp).prefix == 3 * drafts + 1


def test_a_hole_in_the_supervision_ends_the_prefix():
    batch, _ = golden_case()
    blocks = make_blocks(batch, 5, 0)
    out = block_loss(F.one_hot(blocks.labels_RNB, 13) * 50.0, blocks, IDENTITY, TrainConfig(block_size=5))
    assert out.count_B.sum() == 11 and out.correct_B.sum() == 11 and out.prefix == 4 + 3 + 4
    assert out.matched == pytest.approx(11 / 3)


def test_labels_of_the_teacher_are_its_argmax():
    blocks, io, h, teacher = random_case("anchor-first")
    out, grad = grads(h, blocks, io, TrainConfig(block_size=5, labels="teacher"), teacher)
    blocks.labels_RNB = io.head(teacher).argmax(-1)
    want, want_grad = grads(h, blocks, io, TrainConfig(block_size=5))
    assert torch.equal(out.total, want.total) and torch.equal(grad, want_grad) and torch.equal(out.correct_B, want.correct_B)


@pytest.mark.parametrize("loss", ["ce", "fkl", "rkl", "tv", "lk"])
def test_bfloat16_gradients(loss):
    blocks, _, h, teacher = random_case("anchor-first", D=300, V=300)
    h, teacher = h.bfloat16(), teacher.bfloat16()
    cfg = TrainConfig(block_size=5, loss=loss)
    out, grad = grads(h, blocks, IDENTITY, cfg, teacher)
    want, want_grad = grads(h.double(), blocks, IDENTITY, cfg, teacher.double())
    assert grad.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    assert (grad.double() - want_grad).norm() < 0.02 * want_grad.norm()
    assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-4)


def test_upstream_factor_and_no_grad():
    blocks, io, h, _ = random_case("anchor-first")
    cfg = TrainConfig(block_size=5)
    _, grad = grads(h, blocks, io, cfg)
    x = h.clone().requires_grad_()
    (block_loss(x * 2, blocks, io, cfg).total / 8).backward()
    _, at_2 = grads(h * 2, blocks, io, cfg)
    torch.testing.assert_close(x.grad, at_2 * 2 / 8)
    with torch.no_grad():
        assert not block_loss(x, blocks, io, cfg).total.requires_grad
    with torch.inference_mode():
        out = block_loss(h, blocks, io, TrainConfig(block_size=5, gamma=3.0))
    assert not out.total.requires_grad
    assert torch.autograd.gradcheck(lambda z: block_loss(z, blocks, io, TrainConfig(block_size=5, gamma=3.0)).total, x)
    assert not torch.equal(grad, at_2)


def test_documents_are_counted_once():
    blocks, *_ = random_case("anchor-first", R=5, N=12, seed=3)
    want = {(r, int(blocks.start_RN[r, n])) for r in range(5) for n in range(12) if blocks.keep_RN[r, n]}
    assert count_documents(blocks) == len(want) > 5


def test_dpace_by_its_own_weights_warns():
    blocks, io, h, _ = random_case("anchor-first")
    with pytest.warns(UserWarning, match="cancels"):
        block_loss(h, blocks, io, TrainConfig(block_size=5, weighting="dpace", denominator="weights"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block_loss(h, blocks, io, TrainConfig(block_size=5, weighting="dpace"))


def test_layout_of_blocks_and_config_must_agree():
    blocks, io, h, _ = random_case("shifted")
    with pytest.raises(ConfigError, match="layout"):
        block_loss(h, blocks, io, TrainConfig(block_size=5))


def test_logged_loss_is_sum_over_sum():
    blocks, io, h, _ = random_case("anchor-first", R=2)
    few = rows(blocks, slice(0, 1))
    few.valid_RNB = few.valid_RNB & (few.valid_RNB.flatten().cumsum(0) == 1).view(few.valid_RNB.shape)
    cfg = TrainConfig(block_size=5, weighting="flat")
    a, b = block_loss(h[:1], few, io, cfg), block_loss(h[1:], rows(blocks, slice(1, 2)), io, cfg)
    assert a.denominator == 1 and b.denominator > 1
    torch.testing.assert_close(combine([a, b]).loss, (a.total + b.total) / (1 + b.denominator))
    assert abs(combine([a, b]).loss - (a.loss + b.loss) / 2) > 1e-3


# Cross-entropy's gradient in closed form


@pytest.mark.filterwarnings("ignore:denominator")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("knobs", [dict(), dict(loss={"ce": 2.0}), dict(labels="teacher"), dict(weighting="dpace"),
                                   dict(loss={"ce": 2.0}, weighting="dpace", labels="teacher"),
                                   dict(gamma=None, loss={"ce": .5, "tv": 0})], ids=str)
def test_closed_form_of_cross_entropy_equals_autograd_through_a_capped_head(knobs, layout, monkeypatch):
    "A head with scale, bias and soft-cap, in float64; autograd is the path that mixes take."
    blocks, io, h, teacher = random_case(layout, V=9)
    bias = torch.linspace(-1, 1, 9, dtype=torch.float64)
    capped = SimpleNamespace(head=lambda x: 3 * torch.tanh((x @ io.W.T + bias) * 1.7 / 3))
    cfg = TrainConfig(block_size=5, layout=layout, loss_chunk=5, **knobs)
    calls, real = [], losses._ce_chunk
    monkeypatch.setattr(losses, "_ce_chunk", lambda *a: calls.append(1) or real(*a))
    out, grad = grads(h, blocks, capped, cfg, teacher)
    assert len(calls) == 3

    def slow(spec, head, h_MSD, *rest):
        found = losses._slots_loss(spec, head, h_MSD, *rest)
        return found.detach(), torch.autograd.grad(found.total, h_MSD)[0]

    monkeypatch.setattr(losses, "_ce_chunk", slow)
    want, want_grad = grads(h, blocks, capped, cfg, teacher)
    close = dict(rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(grad, want_grad, **close)
    for name in ("total", "denominator", "correct_B", "count_B", "prefix", "blocks", "loss"):
        torch.testing.assert_close(getattr(out, name), getattr(want, name), **close)
    assert out.numerators.keys() == want.numerators.keys() == {"ce"}
    torch.testing.assert_close(out.numerators["ce"], want.numerators["ce"], **close)
    assert want_grad[blocks.valid_RNB].abs().sum() > 0.1
