"""K arms in one sweep against K runs: seconds a step, and the largest difference of a loss.

    python nbs/benchmarks/sweep_gpu.py cuda data/results/sweep_gpu.json      # one GPU, a minute and a half
"""
import json, platform, statistics, sys, tempfile, time
from pathlib import Path
import numpy as np, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from dflash_nb.ablate import ablate, arm_trainer
from dflash_nb.callbacks import ProgressCB
from dflash_nb.config import TrainConfig
from dflash_nb.data import Dataset
from dflash_nb.target import Target

device, out = sys.argv[1], sys.argv[2]
small = device == "cpu"
V = 256 if small else 8192
shape = dict(vocab_size=V, hidden_size=64 if small else 1024, intermediate_size=128 if small else 3072, num_hidden_layers=6 if small else 20,
             num_attention_heads=4 if small else 16, num_key_value_heads=2 if small else 8, head_dim=16 if small else 64, max_position_embeddings=1024)
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(**shape, eos_token_id=None, bos_token_id=None)).eval().to(device)
target = Target.from_model(model if small else model.to(torch.bfloat16), name="random")
rng = np.random.default_rng(0)
docs = Dataset.from_docs((rng.integers(1, V - 2, n := int(rng.integers(100, 400))), np.arange(n) >= 20) for _ in range(60 if small else 400))
steps = 6 if small else 40
base = TrainConfig(block_size=8 if small else 16, num_anchors=8 if small else 64, row_len=512, token_budget=512 if small else 4096, micro_rows=1 if small else 4, num_draft_layers=1 if small else 3,
                   mask_token_id=V - 1, steps=steps, lr=1e-4, feature_cache=0., val_anchors=0, eval_every=steps, checkpoint_every=steps)
grid = {"gamma 2": dict(gamma=2), "flat": dict(gamma=None), "betas": dict(betas=[.9, .99])}
done = {}

def measure(runner):
    with tempfile.TemporaryDirectory() as d:
        t0 = time.perf_counter()
        ab = ablate(target, docs, base | dict(runner=runner), grid, seeds=1, sweep_dir=f"{d}/s", prompts=[], holdout=0, walk_docs=0, show="off")
        whole = time.perf_counter() - t0
        rows = {a: [json.loads(x) for x in open(next(Path(d).glob(f"s/arms/{a.replace(' ', '_')}*/seed-0/rows.jsonl")))] for a in ab.arms}
        sweep = statistics.median(r["round_s"] for r in rows["base"][5 if not small else 1:])
        alone, differ, alone_whole = {}, {}, 0.
        for a in ab.arms:
            t0 = time.perf_counter()
            t = arm_trainer(target, ab.path, a, run_dir=f"{d}/alone/{a}", callbacks=[ProgressCB(show="off")], devices=device)
            t.fit()
            alone_whole += time.perf_counter() - t0
            h = t.history
            alone[a] = float(h.seconds.iloc[5 if not small else 1:].median())
            differ[a] = float(np.abs(np.array([r["loss"] for r in rows[a]]) - h.loss.to_numpy()).max())
        return dict(arms=len(ab.arms), failed=ab.failed, steps=steps, sweep_step_s=sweep, separate_step_s=sum(alone.values()), saved=1 - sweep / sum(alone.values()),
                    alone_step_s=alone, largest_loss_difference=differ, with_start_up=dict(sweep_s=whole, separate_s=alone_whole))

for runner in ("eager", "auto"):
    try: done[runner] = measure(runner)
    except Exception as e: done[runner] = dict(error=f"{type(e).__name__}: {e}"[:800])
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    json.dump(dict(date=time.strftime("%Y-%m-%d"), command=" ".join(["python", *sys.argv]), python=platform.python_version(), device=name, torch=torch.__version__, target=dict(shape, dtype=str(target.dtype)), config=base.to_dict(), results=done), open(out, "w"), indent=1)
    print(runner, done[runner], flush=True)
