"Trains with several gloo processes: a clean server process imports the library once and forks them."
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # what broken connections print; read when torch is imported
KNOBS = dict(patience=4., beat=.2, join=60., bucket=2000)
CTX = multiprocessing.get_context("forkserver")
CTX.set_forkserver_preload(["dflash_nb.dist", "dflash_nb.trainer"])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def config(**delta):
    from dflash_nb.config import TrainConfig
    base = dict(block_size=4, num_draft_layers=1, row_len=64, token_budget=256, micro_rows=1, num_anchors=8, val_share=.1, steps=6, lr=.01,
                warmup=0., mask_token_id=63, attention="eager", eval_every=3, checkpoint_every=2, val_anchors=8)
    return TrainConfig(**base | delta)


def build(run_dir, case, group=None):
    "A trainer over the toy target; `case`: delta, double, devices, resume, callbacks (names of functions below)."
    from dflash_nb.callbacks import ProgressCB
    from dflash_nb.trainer import Trainer, toy_data, toy_target
    target = toy_target()
    if case.get("double"):
        target = type(target).from_model(target.model.double(), name="double")
    calls = [ProgressCB(show="off"), *(globals()[name](run_dir, **kw) for name, kw in case.get("callbacks", {}).items())]
    devices = case.get("devices", "auto")
    if case.get("resume") is not None:
        t = Trainer.from_run(run_dir, target=target, devices=devices, callbacks=calls, group=group, **case["resume"])
    else:
        t = Trainer(target, toy_data(), config(**case.get("delta", {})), run_dir, devices, calls, group=group)
    for s in t.line.sides if case.get("double") else ():
        s.drafter.double()
    return t


def keep_gradients(run_dir, to):
    "Saves the gradient sums of every step."
    import torch

    from dflash_nb.callbacks import Callback

    class Keep(Callback):
        def before_update(self, t):
            torch.save(torch.cat([p.grad.flatten() for p in t.drafter.parameters()]), f"{to}-{t.group.rank}-{t.step}.pt")
    return Keep()


def act_at(run_dir, step, rank, what):
    "One rank acts after a step: a name of a signal, 'raise', 'stop' or 'freeze'."
    from dflash_nb.callbacks import Callback

    class Act(Callback):
        order = 100

        def after_step(self, t):
            if t.step != step or t.group.rank != rank:
                return
            if what == "raise":
                raise ValueError("planted")
            elif what == "stop":
                t.stop("enough")
            else:
                os.kill(os.getpid(), getattr(signal, what))
    return Act()


def note_bytes(run_dir, to):
    "Writes the bytes of training state that this process holds after each step."
    from dflash_nb.callbacks import Callback
    from dflash_nb.shard import held_bytes

    class Note(Callback):
        def after_step(self, t):
            Path(f"{to}-{t.group.rank}.json").write_text(json.dumps(held_bytes(t.line.lead) | dict(parameters=t.num_params)))
    return Note()


def use_parts(run_dir, to):
    "After the run, what saving and running the drafter of one process say."
    import torch

    from dflash_nb.callbacks import Callback
    from dflash_nb.checkpoint import save_drafter
    from dflash_nb.config import ConfigError

    class Use(Callback):
        def after_fit(self, t):
            words, features = [], torch.zeros(1, 2, t.drafter.fc.in_features)
            for use in (lambda: save_drafter(t.drafter, f"{to}-{t.group.rank}"), lambda: t.drafter.context(features)):
                try:
                    use()
                except ConfigError as e:
                    words.append(str(e))
            Path(f"{to}-{t.group.rank}.txt").write_text("\n".join(words))
    return Use()


def slow(run_dir, seconds):
    from dflash_nb.callbacks import Callback

    class Slow(Callback):
        def after_step(self, t):
            time.sleep(seconds)
    return Slow()


def child(rank, size, port, run_dir, case, to):
    "One process; what became of it is written to a file."
    if case.get("absent") == rank:
        os._exit(0)
    if case.get("differ") == rank:
        case = case | dict(delta=dict(lr=.02))
    import torch
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from dflash_nb.dist import processes
    sys.stderr = open(f"{to}-err-{rank}.txt", "w", buffering=1)
    start, out = time.time(), {}
    try:
        with processes(**KNOBS | case.get("knobs", {})) as group:
            t = build(run_dir, case, group)
            record = t.fit()
            out = dict(outcome=record.outcome, step=record.step, reason=record.reason, losses=[r["loss"] for r in t.rows], best=record.best,
                       taus=[r.get("sim_tau") for r in t.rows], norms=[r["grad_norm"] for r in t.rows])
    except BaseException as e:
        out = dict(outcome="raised", error=f"{type(e).__name__}: {e}")
    Path(f"{to}-out-{rank}.json").write_text(json.dumps(out | dict(seconds=time.time() - start)))
    os._exit(0)


class Group:
    "The processes of one run."
    def __init__(self, folder, size, run_dir, **case):
        folder.mkdir(parents=True, exist_ok=True)
        self.to, self.size, port = str(folder / "p"), size, free_port()
        self.all = [CTX.Process(target=child, args=(r, size, port, str(run_dir), case, self.to)) for r in range(size)]
        for p in self.all:
            p.start()

    def ends(self, timeout=60.):
        "What became of each; a process that was killed has no word, one that does not end in time is an error."
        until = time.monotonic() + timeout
        for p in self.all:
            p.join(max(0., until - time.monotonic()))
        late = [r for r, p in enumerate(self.all) if p.is_alive()]
        for p in self.all:
            if p.is_alive():
                p.kill()
                p.join()
        assert not late, f"ranks {late} did not end: " + " | ".join(Path(f"{self.to}-err-{r}.txt").read_text()[-500:] for r in late)
        files = [Path(f"{self.to}-out-{r}.json") for r in range(self.size)]
        return [json.loads(f.read_text()) if f.exists() else None for f in files]
