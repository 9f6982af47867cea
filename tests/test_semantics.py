"A whole optimizer step of the trainer against a reference that loops over anchors and slots, written from the definitions alone."
import math

import numpy as np
import pytest
import torch
from reference import one_block
from tiny import tiny_model

from dflash_nb.callbacks import ProgressCB
from dflash_nb.config import NoiseConfig, TrainConfig
from dflash_nb.data import Dataset, batches
from dflash_nb.optim import make_optimizer
from dflash_nb.target import Target
from dflash_nb.trainer import Trainer

torch.set_num_threads(1)
B, T, N, MASK, SEED = 4, 48, 16, 259, 5


def documents():
    "Documents of 10 to 30 tokens, each with two supervised answers, so that a label may re-enter the supervision."
    rng = np.random.default_rng(1)
    for n in rng.integers(10, 31, 14):
        mask = np.zeros(n, bool)
        mask[3:n // 2], mask[n // 2 + 1:] = True, True
        yield rng.integers(0, 256, n).astype(np.int32), mask


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_model("gemma").double(), name="double")  # scales its embedding; tied head


def anchors_of(epoch, row, loss, doc):
    "The N smallest of the row's own random keys among the positions that may be anchors."
    keys = np.random.Generator(np.random.PCG64([SEED, 3, epoch, row])).random(T)
    ok = [a for a in range(T - 1) if loss[a] and loss[a + 1] and doc[a] == doc[a + 1] >= 0]
    return sorted(sorted(ok, key=lambda a: keys[a])[:N])


def slot_weights(cfg, q_y, counts):
    "Weights of the slots of one block that draft."
    if cfg.weighting == "decay":
        return [math.exp(-j / round(1 + 3 * B / 8)) if c else 0.0 for j, c in enumerate(counts)]
    s = [(1 - .5) * float(q) + .5 if c else 1.0 for q, c in zip(q_y, counts, strict=True)]
    reach = [math.prod(s[:k + 1]) for k in range(len(s))]
    return [sum(reach[j] for j in range(k, len(s)) if counts[j]) if counts[k] else 0.0 for k in range(len(s))]


def noise_of(cfg, step, micro, rows, width):
    "What the stream of (seed, step, micro-batch) adds to the features of a micro-batch."
    if not cfg.noise.strength:
        return torch.zeros(rows, T, width, dtype=torch.float64)
    from dflash_nb.noise import step_seed
    g = torch.Generator().manual_seed(step_seed(SEED, step, micro))
    return cfg.noise.strength * torch.empty(rows, T, width, dtype=torch.float64).uniform_(-1, 1, generator=g)


def reference(w, dcfg, cfg, target, batch, step, epochs):
    "Loss sums of one optimizer step: {term: numerator}, denominator, and how often a label re-entered."
    model, mix = target.model, cfg.loss if isinstance(cfg.loss, dict) else {cfg.loss: 1.0}
    nums, den, reentered, first = dict.fromkeys(mix, 0.0), 0.0, 0, 1 if cfg.layout == "anchor-first" else 0
    read, head, table = {}, model.get_output_embeddings().weight, model.get_input_embeddings().weight
    for r, row in enumerate(batch.row_ids.tolist()):
        ids, doc, loss = batch.ids_RT[r].tolist(), batch.doc_RT[r].tolist(), batch.loss_RT[r].tolist()
        anchors = anchors_of(epochs[r], row, loss, doc)
        assert batch.anchors_RN[r][batch.keep_RN[r]].tolist() == anchors
        noise = noise_of(cfg, step, r // cfg.micro_rows, cfg.micro_rows,
                         len(dcfg.target_layer_ids) * target.hidden_size)[r % cfg.micro_rows]
        for a in anchors:
            start = doc.index(doc[a])
            if (r, start) not in read:
                with torch.no_grad():
                    read[r, start] = model(torch.tensor([[i for i, d in zip(ids, doc, strict=True) if d == doc[a]]]),
                                           output_hidden_states=True)
            out = read[r, start]
            feats = torch.cat([out.hidden_states[i + 1][0, :a - start] for i in dcfg.target_layer_ids], -1) + noise[start:a]
            slots = table[[ids[a]] + [MASK] * (B - 1)] * target.hidden_size**.5  # as Gemma scales them
            h = one_block(w, dcfg, feats, range(a - start), slots, range(a - start, a - start + B))
            q_y, counts, terms, alive = [], [], [], True
            for k in range(first, B):
                t = a + k + (0 if first else 1)
                ok = t < T and doc[t] == doc[a] and loss[t]
                alive = alive and ok
                reentered += ok and not alive
                counts.append(alive if cfg.layout == "shifted" else ok)
                if not counts[-1]:
                    q_y.append(0.0)
                    terms.append(None)
                    continue
                logq, logp = (h[k] @ head.T).log_softmax(-1), out.logits[0, t - 1 - start].log_softmax(-1)
                y = int(logp.argmax()) if cfg.labels == "teacher" else ids[t]
                q_y.append(logq[y].exp().detach())
                terms.append(dict(ce=-logq[y], fkl=(logp.exp() * (logp - logq)).sum(), rkl=(logq.exp() * (logq - logp)).sum(),
                                  tv=(logp.exp() - logq.exp()).abs().sum() / 2, lk=-torch.minimum(logp.exp(), logq.exp()).sum().log()))
            weights = slot_weights(cfg, q_y, counts)
            for x, term in zip(weights, terms, strict=True):
                for name in mix if term else ():
                    nums[name] = nums[name] + x * term[name]
            den += 1 if cfg.weighting == "dpace" else sum(weights)
    return nums, den, reentered


CASES = [dict(), dict(noise=NoiseConfig(.3)), dict(weighting="dpace"), dict(loss={"ce": 2.0}, labels="teacher"),
         dict(loss={"ce": .3, "fkl": .5, "tv": .2}, noise=NoiseConfig(.3)),
         dict(loss={"rkl": 1.0, "lk": .5}, weighting="dpace", labels="teacher")]


@pytest.mark.parametrize("layout", ["anchor-first", "shifted"])
@pytest.mark.parametrize("delta", CASES, ids=str)
def test_two_steps_equal_the_definitions(target, tmp_path, delta, layout):
    cfg = TrainConfig(block_size=B, layout=layout, num_draft_layers=2, row_len=T, token_budget=4 * T, micro_rows=2, num_anchors=N,
                      steps=50, warmup=.08,
                      lr=1e-3, clip=.05, seed=SEED, mask_token_id=MASK, val_share=0., target_layer_ids=(0, 2, 4)) | delta
    t = Trainer(target, Dataset.from_docs(documents()), cfg, run_dir=tmp_path / "r", callbacks=[ProgressCB(show="off")])
    t.drafter.double()
    t.optimizer = make_optimizer(t.drafter, t.cfg)
    w = {n: p.detach().clone().requires_grad_() for n, p in t.drafter.named_parameters()}
    m, v = ({n: torch.zeros_like(p) for n, p in w.items()} for _ in range(2))
    mix, source, seen = cfg.loss if isinstance(cfg.loss, dict) else {cfg.loss: 1.0}, batches(t.packed, t.cfg), 0
    for step in range(2):
        batch = next(source)
        epochs = [p // len(t.packed) for p in range(4 * step, 4 * step + 4)]
        nums, den, reentered = reference(w, t.drafter.cfg, t.cfg, target, batch, step, epochs)
        total = sum(mix[k] * x for k, x in nums.items()) / den
        nums = {k: float(x.detach()) for k, x in nums.items()}
        grads = dict(zip(w, torch.autograd.grad(total, list(w.values())), strict=True))
        norm = torch.sqrt(sum(g.pow(2).sum() for g in grads.values()))
        lr = 1e-3 * (step + 1) / 4
        row = t.train_step()
        t.step += 1
        assert row["loss"] == pytest.approx(float(total.detach()), rel=1e-9) and row["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert row["lr"] == pytest.approx(lr) and norm > cfg.clip and row["denominator"] == pytest.approx(den)
        for k, x in nums.items() if len(nums) > 1 else ():
            assert row[f"loss_{k}"] == pytest.approx(x / den, rel=1e-9)
        with torch.no_grad():
            for name, p in w.items():
                g = grads[name] * min(1.0, cfg.clip / (float(norm) + 1e-6))
                m[name], v[name] = .9 * m[name] + .1 * g, .95 * v[name] + .05 * g * g
                p -= lr * (m[name] / (1 - .9**(step + 1))) / ((v[name] / (1 - .95**(step + 1))).sqrt() + 1e-8)
        for name, p in t.drafter.named_parameters():
            torch.testing.assert_close(p.detach(), w[name].detach(), rtol=1e-7, atol=1e-9)
        seen += reentered
    assert epochs == [0, 0, 0, 1] and seen > 3 and not bool(batch.keep_RN.all())
