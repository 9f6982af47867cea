"Captured steps on a GPU: numbers of the plain runner, constant allocations, and captures beside whatever other threads do."
import contextlib
import gc
import itertools
import threading
from dataclasses import replace

import pytest
import torch

from dflash_nb.bench import GEOMETRIES, RandomIO, random_drafter, random_inputs, run_step, step_runner
from dflash_nb.config import TrainConfig
from dflash_nb.graphs import GraphRunner, device_counts, make_runner

pytestmark = pytest.mark.cuda
G = GEOMETRIES["tiny"] | {"anchors": 32, "block": 8, "row_len": 256, "layers": 2, "hidden": 128}


def warm(name, seed=0, attention="auto", **kw):
    drafter = random_drafter(G, "cuda", attention, seed)
    io = RandomIO(G, "cuda", torch.bfloat16)
    runner = step_runner(drafter, io, TrainConfig(block_size=G.block), name, on_fallback=lambda *x: pytest.fail(str(x)))
    runner.warm_up(random_inputs(G, 1, "cuda", torch.bfloat16, 99))
    return runner


def losses(runner, steps, start=0):
    found = []
    for step in range(start, start + steps):
        out, norm, refused = run_step(runner, [random_inputs(G, 1, "cuda", torch.bfloat16, 2 * step + m) for m in range(2)], 1e-3)
        found.append((out.loss, norm, refused))
    return torch.tensor([[x.item() for x in row] for row in found])


@contextlib.contextmanager
def beside(work):
    "A thread that repeats `work` on a stream of its own; its first error is raised here."
    done, errors, rounds = threading.Event(), [], []

    def body():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set() and not errors:
                try:
                    work()
                    rounds.append(1)
                except BaseException as e:
                    errors.append(e)
    thread = threading.Thread(target=body)
    thread.start()
    try:
        while not rounds and not errors:
            done.wait(0.01)
        yield rounds
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]


def test_three_runners_give_the_same_losses():
    eager, compiled, graph = (losses(warm(n), 30) for n in ("eager", "compiled", "graph"))
    assert torch.allclose(graph, compiled, rtol=2e-3) and torch.allclose(graph[:, 0], eager[:, 0], rtol=1e-2)
    assert eager[-1, 0] < eager[0, 0] and not eager[:, 2].any()


def test_counts_stay_constant_over_200_replayed_steps():
    runner = warm("graph")
    inputs = [[random_inputs(G, 1, "cuda", torch.bfloat16, 2 * s + m) for m in range(2)] for s in range(4)]
    kept = [run_step(runner, inputs[0])[0].loss]
    before = device_counts("cuda")
    kept += [run_step(runner, inputs[s % 4])[0].loss for s in range(200)]
    assert device_counts("cuda") == before and runner.counts["recompiles"] == 0 and runner.counts["captures"] == 2
    assert len({x.item() for x in kept[:5]}) == 5


def test_warm_up_moves_nothing_on_the_device():
    runner = warm("eager")
    losses(runner, 2)
    args, kw = runner.args, runner.kw
    graph = GraphRunner(*args, **kw)

    def state():
        moments = [t.clone() for p in graph.params for t in kw["optimizer"].state[p].values()]
        weights = [t.detach().clone() for p in graph.params for t in (p, p.grad)]
        return [torch.cuda.get_rng_state(), torch.get_rng_state(), *weights, *moments]
    graph.params[0].grad.fill_(2)
    before = state()
    graph.warm_up(random_inputs(G, 1, "cuda", torch.bfloat16, 5))
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def test_noise_is_the_plain_runners_noise():
    def noise(i, strength, generator):
        draw = torch.randn(i.feats_RTF.shape, generator=generator, device="cuda")
        return replace(i, feats_RTF=i.feats_RTF + (strength * draw).to(i.feats_RTF.dtype))
    compiled, graph = (warm(n) for n in ("compiled", "graph"))
    for r in (compiled, graph):
        r.impl._prepare = noise
    inputs = random_inputs(G, 1, "cuda", torch.bfloat16, 3)
    rows = [[r.micro(inputs, s, seed).total.item() for s, seed in ((0.5, 1), (0.5, 2), (0.0, 1), (0.5, 1))] for r in (compiled, graph)]
    assert rows[0] == rows[1] and len(set(rows[1])) == 3


def test_a_step_that_waits_for_the_device_falls_back_and_the_device_works_on():
    drafter, told = random_drafter(G, "cuda"), []
    plain = step_runner(drafter, RandomIO(G, "cuda", torch.bfloat16), TrainConfig(block_size=G.block))
    micro, update, params = plain.args

    def waits(i):
        out = micro(i)
        out.total.item()
        return out
    runner = make_runner("graph", waits, update, params, **plain.kw, on_fallback=lambda *x: told.append(x))
    runner.warm_up(random_inputs(G, 1, "cuda", torch.bfloat16, 0))
    assert [t[:2] for t in told] == [("graph", "compiled")] and "captur" in told[0][2]
    assert losses(runner, 3)[-1, 0] > 0 and torch.randn(3, device="cuda").sum().isfinite()


def draws():
    return torch.randn(1000, device="cuda").sum()


SIZES = itertools.count(1)


def pins():
    return torch.empty(1000 * (next(SIZES) % 400 + 1)).pin_memory().to("cuda", non_blocking=True)


def empties():
    torch.empty(2**20, device="cuda").record_stream(torch.cuda.Stream())
    torch.cuda.empty_cache()


def looks():
    torch.cuda.memory_stats(), torch.cuda.current_stream().synchronize(), torch.cuda.mem_get_info()


def leaves():
    "Garbage in cycles with events and tensors."
    cycle = [torch.cuda.Event(), torch.empty(100, device="cuda")]
    cycle[0].record()
    cycle.append(cycle)


@pytest.mark.parametrize("work", [draws, pins, empties, looks, leaves], ids=lambda f: f.__name__)
def test_captures_beside_a_busy_thread(work):
    expected = losses(warm("graph"), 3)
    with beside(work) as rounds:
        for _ in range(4):
            runner = warm("graph")
            assert torch.allclose(losses(runner, 3), expected, rtol=1e-3)
            runner.close()
    assert rounds


def test_a_capture_leaves_the_default_generators_numbers_alone():
    torch.cuda.manual_seed(5)
    alone = torch.stack([torch.randn(8, device="cuda") for _ in range(3000)])
    torch.cuda.manual_seed(5)
    drawn = []
    with beside(lambda: drawn.append(torch.randn(8, device="cuda")) if len(drawn) < 3000 else None):
        warm("graph")
    torch.cuda.synchronize()
    assert len(drawn) > 10 and torch.equal(torch.stack(drawn), alone[:len(drawn)])


def test_captures_beside_another_drafters_replays():
    first, other = warm("graph"), [random_inputs(G, 1, "cuda", torch.bfloat16, m) for m in range(2)]
    expected = losses(warm("graph", seed=1), 3)
    with beside(lambda: run_step(first, other)) as rounds:
        for _ in range(4):
            assert torch.allclose(losses(warm("graph", seed=1), 3), expected, rtol=1e-3)
    assert len(rounds) > 4


def test_two_trainers_start_and_run_in_one_process():
    expected, found = losses(warm("graph"), 20), []

    def trainer():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(losses(warm("graph"), 20))
    threads = [threading.Thread(target=trainer) for _ in range(3)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        draws()
    assert len(found) == 3 and all(torch.allclose(x, expected, rtol=1e-3) for x in found)


def test_a_thread_whose_allocations_are_retried():
    "The limit lies under what the sizes need together. While a pool is in use nothing is retried: the thread runs out of memory."
    gc.collect(), torch.cuda.empty_cache()
    total, missed = torch.cuda.get_device_properties(0).total_memory, []

    def work():
        try:
            torch.empty((600 + 100 * (next(SIZES) % 3)) * 2**20, dtype=torch.uint8, device="cuda").fill_(1)
        except torch.cuda.OutOfMemoryError:
            missed.append(1)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1900 * 2**20) / total)
    try:
        with beside(work) as rounds:
            for _ in range(4):
                warm("graph").close()
        assert len(rounds) > 10 * len(missed)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_device_wide_wait_in_another_thread_costs_a_capture_no_more_than_a_try():
    def work():
        with contextlib.suppress(RuntimeError):  # the device refuses such a wait while anything captures
            torch.cuda.synchronize()
            threading.Event().wait(0.5)
    expected = losses(warm("graph"), 3)
    with beside(work):
        for _ in range(4):
            assert torch.allclose(losses(warm("graph"), 3), expected, rtol=1e-3)


def test_a_closed_runner_frees_its_memory():
    warm("graph").close()
    gc.collect(), torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        warm("graph").close()
    gc.collect(), torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 3 * 48 * 2**20  # a library workspace a capture stream stays
