"Step runners on a CPU: same numbers in every runner, fixed addresses, a warm-up that moves nothing, falls that are told."
import ctypes
import shutil
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from dflash_nb import graphs
from dflash_nb.config import ConfigError, TrainConfig
from dflash_nb.graphs import (
    RUNNERS,
    CompiledRunner,
    EagerRunner,
    GraphRunner,
    Rehearsal,
    Static,
    compiled_graphs,
    device_counts,
    frame,
    make_runner,
    step_modes,
    tensors,
    tree_map,
)
from dflash_nb.noise import step_seed
from dflash_nb.optim import clip_gradients, guarded_step, make_optimizer


@dataclass
class Inputs:
    x: torch.Tensor
    inner: dict
    row_len: int = 8


@dataclass
class Sums:
    total: torch.Tensor
    denominator: torch.Tensor
    hits: list


def inputs(seed, rows=8, row_len=8):
    g = torch.Generator().manual_seed(seed)
    return Inputs(torch.randn(rows, 4, generator=g), dict(y=torch.randn(rows, generator=g), w=torch.rand(rows, generator=g)), row_len)


def make_side(capturable=False, seed=0, dtype=None, optimizer="adamw"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    opt = make_optimizer(model, TrainConfig(lr=1e-2, optimizer=optimizer), capturable=capturable)

    def micro(i):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            error = model(i.x)[:, 0].float() - i.inner["y"]
        total = (i.inner["w"] * error**2).sum()
        total.backward()
        return Sums(total.detach(), i.inner["w"].sum(), [(error.detach() > 0).sum()])

    def update(out):
        norm = clip_gradients(model, 1.0, out.denominator)
        return norm, guarded_step(opt, torch.where(out.total.isfinite(), norm, torch.nan))

    def prepare(i, strength, generator):
        return replace(i, x=i.x + strength * torch.randn(i.x.shape, generator=generator))
    return SimpleNamespace(model=model, opt=opt, args=(micro, update, list(model.parameters())), kw=dict(prepare=prepare, optimizer=opt))


def run(runner, steps, strength=0.1, start=0):
    rows = []
    for step in range(start, start + steps):
        outs = [runner.micro(inputs(10 * step + m), strength, step_seed(0, step, m)) for m in range(3)]
        total = Sums(sum(o.total for o in outs), sum(o.denominator for o in outs), [sum(o.hits[0] for o in outs)])
        rows.append((total, *runner.update(total, 1e-2 / (1 + step))))
        runner.zero()
    return [[t.item() for t in tensors(list(row))] for row in rows]


def everything(side):
    "All that a warm-up must leave: weights, gradients, moments, counters, global generator."
    grads = (p.grad for p in side.model.parameters())
    return [t.clone() for t in (*side.model.state_dict().values(), *grads, *tensors(side.opt.state_dict()), torch.get_rng_state())]


def same(a, b):
    return all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in zip(a, b, strict=True))


def test_trees_keep_their_kinds():
    tree = dict(a=[torch.ones(2), (torch.zeros(1), None, "x")], b=Inputs(torch.ones(1), dict(y=torch.ones(3)), 5))
    doubled = tree_map(lambda t: 2 * t, tree)
    assert isinstance(doubled["a"][1], tuple) and doubled["a"][1][1:] == (None, "x") and doubled["b"].row_len == 5
    assert [t.sum().item() for t in tensors(doubled)] == [4, 0, 2, 6] and tree["a"][0].sum() == 2


@pytest.mark.parametrize("change", [{"row_len": 9}, {"x": torch.zeros(9, 4)}, {"x": torch.zeros(8, 4).half()}, {"x": None}, {"inner": {}}])
def test_static_buffers_refuse_another_frame(change):
    static = Static(inputs(0))
    with pytest.raises(ConfigError, match="must stay"):
        static.fill(replace(inputs(1), **change))
    assert static.tree.x.equal(inputs(0).x)


def test_static_buffers_take_views_and_their_own_memory():
    wide = torch.randn(4, 8).t()
    static = Static(dict(x=torch.zeros(8, 4).expand(8, 4)))
    static.fill(dict(x=wide))
    assert static.tree["x"].equal(wide) and static.tree["x"].is_contiguous()
    static.tree["x"][0, 0] = 5
    static.fill(static.tree)
    assert static.tree["x"][0, 0] == 5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("strength", [0.0, 0.3])
def test_rehearsed_graphs_equal_the_plain_runner_to_the_bit(strength, optimizer):
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    plain, graph = (make_side(capturable=True, optimizer=optimizer) for _ in range(2))
    a, b = EagerRunner(*plain.args, **plain.kw), GraphRunner(*graph.args, **graph.kw)
    b.warm_up(inputs(99))
    assert run(a, 6, strength) == run(b, 6, strength)
    assert same(plain.model.state_dict().values(), graph.model.state_dict().values())


def test_noise_off_never_calls_the_noise_code():
    side = make_side()
    side.kw["prepare"] = lambda *x: pytest.fail("noise code ran")
    run(EagerRunner(*side.args, **side.kw), 2, strength=0.0)


def test_learning_rate_is_read_at_each_update():
    weights = []
    for lr in (1e-2, 1e-3):
        side = make_side(capturable=True)
        graph = GraphRunner(*side.args, **side.kw)
        graph.warm_up(inputs(0))
        before = [p.detach().clone() for p in side.model.parameters()]
        graph.update(graph.micro(inputs(0)), lr)
        weights.append(max((p - b).abs().max().item() for p, b in zip(side.model.parameters(), before, strict=True)))
    assert weights[0] == pytest.approx(10 * weights[1], rel=1e-3) and weights[0] == pytest.approx(1e-2, rel=1e-2)


def test_outputs_survive_later_replays():
    side = make_side(capturable=True)
    graph = GraphRunner(*side.args, **side.kw)
    graph.warm_up(inputs(0))
    outs = [graph.micro(inputs(i)) for i in range(3)]
    values = [o.total.item() for o in outs]
    run(graph, 3)
    assert len(set(values)) == 3 and [o.total.item() for o in outs] == values


@pytest.mark.parametrize("kind", [CompiledRunner, GraphRunner])
@pytest.mark.parametrize("gradient", [0.0, 3.0, float("nan")])
def test_warm_up_moves_nothing(kind, gradient):
    side = make_side(capturable=True)
    run(EagerRunner(*side.args, **side.kw), 2)
    for p in side.model.parameters():
        p.grad.fill_(gradient)
    before, places = everything(side), [p.grad.data_ptr() for p in side.model.parameters()]
    runner = kind(*side.args, **side.kw)
    runner.warm_up(inputs(5))
    assert same(before, everything(side)) and places == [p.grad.data_ptr() for p in side.model.parameters()]


def test_a_failed_warm_up_moves_nothing_either():
    side = make_side(capturable=True)
    run(EagerRunner(*side.args, **side.kw), 2)
    before = everything(side)

    def update(out):
        raise RuntimeError("no update")
    with pytest.raises(RuntimeError, match="no update"):
        GraphRunner(side.args[0], update, side.args[2], **side.kw).warm_up(inputs(5))
    assert same(before, everything(side))


def test_bf16_weights_are_cast_anew_inside_a_callers_autocast():
    a, b, c = (make_side(dtype="bf16") for _ in range(3))
    rows = run(EagerRunner(*a.args, **a.kw), 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(EagerRunner(*b.args, **b.kw), 5) == rows
    with torch.autocast("cpu", enabled=False):
        assert run(EagerRunner(*c.args, **c.kw), 5) == rows


@pytest.mark.parametrize("kind", [CompiledRunner, GraphRunner])
def test_no_cast_of_a_weight_outlives_the_run_that_made_it(kind):
    "A graph that read such a copy would train with the weights of its warm-up."
    side, seen = make_side(capturable=True), []
    weight = torch.nn.Parameter(torch.ones(4, 1))

    def micro(i):
        with torch.autocast("cpu", torch.bfloat16):
            seen.append((torch.ones(1, 4) @ weight).item())
        with torch.no_grad():
            weight.mul_(2)
        return side.args[0](i)
    kind(micro, *side.args[1:], **side.kw).warm_up(inputs(0))
    assert seen == [4.0 * 2**i for i in range(len(seen))] and len(seen) == (1 if kind is CompiledRunner else 2)


def test_a_worker_thread_and_a_strict_caller_change_nothing():
    plain = make_side()
    rows, found = run(EagerRunner(*plain.args, **plain.kw), 3), []
    for modes in (torch.inference_mode, torch.no_grad):
        side, other = make_side(), make_side()
        with modes(), torch.autocast("cpu", torch.bfloat16):
            thread = threading.Thread(target=lambda r: found.append(run(r, 3)), args=(EagerRunner(*side.args, **side.kw),))
            thread.start()
            thread.join()
        runner = EagerRunner(*other.args, **other.kw)
        if modes is torch.no_grad:
            with modes():
                found.append(run(runner, 3))
    assert found == [rows] * 3


def test_backward_runs_in_the_calling_thread():
    seen, x = [], torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append((threading.get_ident(), torch.autograd.is_multithreading_enabled())))
    with step_modes(torch.device("cpu")):
        y.backward()
    assert seen == [(threading.get_ident(), False)] and torch.autograd.is_multithreading_enabled()


def test_falls_are_told_once_with_their_reason():
    side, told, switched = make_side(), [], []

    def parts(on):
        switched.append(on)
        if on:
            raise OSError("no compiler\n\nlong story")
    runner = make_runner("graph", *side.args, **side.kw, compile_parts=parts, on_fallback=lambda *x: told.append(x))
    runner.warm_up(inputs(0))
    assert told == [("graph", "compiled", "RuntimeError: CUDA graphs need a CUDA device, this is cpu"),
                    ("compiled", "eager", "OSError: no compiler")]
    assert switched == [True, False] and runner.name == "eager" and runner.counts == dict(captures=0, compiles=0, recompiles=0, fallbacks=2)
    twin = make_side()
    assert run(runner, 3) == run(EagerRunner(*twin.args, **twin.kw), 3)


def test_the_simplest_runner_hides_no_error():
    side = make_side()

    def micro(i):
        raise RuntimeError("broken step")
    runner = make_runner("compiled", micro, *side.args[1:], on_fallback=lambda *x: None)
    runner.warm_up(inputs(0))
    with pytest.raises(RuntimeError, match="broken step"):
        runner.micro(inputs(0))


def test_a_fall_keeps_no_traceback():
    side, big = make_side(), []

    def parts(on):
        held = torch.zeros(10)
        import weakref
        big.append(weakref.ref(held))
        if on:
            raise OSError("no compiler")
    runner = make_runner("compiled", *side.args, **side.kw, compile_parts=parts)
    runner.warm_up(inputs(0))
    assert big and all(ref() is None for ref in big)


def test_names():
    side = make_side()
    assert RUNNERS == ("auto", "eager", "compiled", "graph")
    assert make_runner("auto", *side.args).name == "eager"
    with pytest.raises(ConfigError, match="auto, eager, compiled, graph"):
        make_runner("cuda", *side.args)


def test_a_host_learning_rate_is_refused_by_graphs():
    side = make_side(capturable=False)
    with pytest.raises(RuntimeError, match="capturable"):
        GraphRunner(*side.args, **side.kw).warm_up(inputs(0))


def test_a_step_that_replaces_gradients_is_refused_by_graphs():
    side = make_side(capturable=True)

    def micro(i):
        for p in side.args[2]:
            p.grad = None
        return side.args[0](i)
    with pytest.raises(RuntimeError, match="in place"):
        GraphRunner(micro, *side.args[1:], **side.kw).warm_up(inputs(0))


def test_warm_ups_run_one_at_a_time():
    active, most = [], []

    def parts(on):
        active.append(1)
        most.append(len(active))
        threading.Event().wait(0.02)
        active.pop()
    sides = [make_side() for _ in range(4)]
    threads = [threading.Thread(target=CompiledRunner(*s.args, **s.kw, compile_parts=parts).warm_up, args=(inputs(0),)) for s in sides]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert most == [1] * 4


def compiled_side(backend="eager", **kw):
    torch._dynamo.reset()  # what another test compiled would not be compiled again
    side = make_side(**kw)
    plain = side.model.forward
    fast = torch.compile(plain, backend=backend, fullgraph=True, dynamic=False)
    side.parts = lambda on: setattr(side.model, "forward", fast if on else plain)
    return side


def test_no_step_compiles_after_the_warm_up_and_a_new_shape_is_counted():
    side, twin = compiled_side(), make_side()
    runner = CompiledRunner(*side.args, **side.kw, compile_parts=side.parts)
    runner.warm_up(inputs(0))
    before = device_counts("cpu")
    assert run(runner, 70) == run(EagerRunner(*twin.args, **twin.kw), 70)
    assert device_counts("cpu") == before and runner.counts == dict(captures=0, compiles=1, recompiles=0)
    runner.micro(inputs(0, rows=5))
    assert runner.counts["recompiles"] == 1 and compiled_graphs() == before["compiled"] + 1


def test_a_step_that_compiles_each_time_is_refused():
    side = compiled_side()
    rows = iter(range(30, 99))
    runner = CompiledRunner(lambda i: side.args[0](inputs(0, rows=next(rows))), *side.args[1:], compile_parts=side.parts)
    with pytest.raises(RuntimeError, match="compiles anew"):
        runner.warm_up(inputs(0))


def test_a_worker_thread_compiles_and_warms_up_for_itself():
    side, twin, rows = compiled_side(), make_side(), []

    def work():
        runner = CompiledRunner(*side.args, **side.kw, compile_parts=side.parts)
        runner.warm_up(inputs(0))
        rows.append(run(runner, 20))
        rows.append(runner.counts["recompiles"])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert rows == [run(EagerRunner(*twin.args, **twin.kw), 20), 0]


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_inductor_on_a_cpu():
    side, twin = compiled_side("inductor"), make_side()
    runner = make_runner("compiled", *side.args, **side.kw, compile_parts=side.parts, on_fallback=lambda *x: pytest.fail(str(x)))
    runner.warm_up(inputs(0))
    a, b = (torch.tensor(run(r, 20)) for r in (runner, EagerRunner(*twin.args, **twin.kw)))
    assert torch.allclose(a, b, rtol=1e-5, atol=1e-6) and runner.counts["recompiles"] == 0


class Driver:
    "A CUDA driver that writes down what it is asked."
    def __init__(self, fail=None):
        self.calls, self.fail = [], fail

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            if name == "cuStreamEndCapture":
                args[1]._obj.value = 17
            if name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
            return 900 if name == self.fail else 0
        return call


def test_a_failed_function_ends_its_capture(monkeypatch):
    driver, stream = Driver(), SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(graphs, "_driver", lambda: driver)
    with pytest.raises(KeyError):
        graphs._capture(lambda: {}["missing"], stream)
    assert driver.calls == ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"]
    out, graph = graphs._capture(lambda: 3, stream)
    assert out == 3 and graph.value == 17 and isinstance(graph, ctypes.c_void_p)


def test_a_capture_that_another_thread_ends_is_tried_again(monkeypatch):
    driver, calls = Driver(), []
    monkeypatch.setattr(graphs, "_driver", lambda: driver)

    def fails(times):
        def fn():
            calls.append(1)
            if len(calls) <= times:
                raise RuntimeError("operation failed due to a previous error during capture")
            return 3
        return fn
    assert graphs._try_capture(fails(2), SimpleNamespace(cuda_stream=5))[0] == 3 and len(calls) == 3
    calls.clear()
    with pytest.raises(RuntimeError, match="previous error"):
        graphs._try_capture(fails(9), SimpleNamespace(cuda_stream=5))
    assert len(calls) == graphs._TRIES


def test_driver_errors_have_names(monkeypatch):
    driver = Driver(fail="cuStreamBeginCapture_v2")
    monkeypatch.setattr(graphs, "_driver", lambda: driver)
    with pytest.raises(RuntimeError, match="cuStreamBeginCapture_v2: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        graphs._capture(lambda: 3, SimpleNamespace(cuda_stream=5))


def test_closed_graphs_hold_nothing():
    side = make_side(capturable=True)
    graph = GraphRunner(*side.args, **side.kw)
    graph.warm_up(inputs(0))
    graph.close()
    assert (graph.step, graph.change, graph.inputs, graph.sums, graph.pool) == (None,) * 5
    graph.close()


def test_a_device_that_does_not_recover_is_named_with_the_first_reason(monkeypatch):
    side = make_side()

    def close(self):
        raise RuntimeError("an illegal memory access was encountered")
    monkeypatch.setattr(GraphRunner, "close", close)
    with pytest.raises(RuntimeError, match="need a CUDA device.*did not recover: an illegal memory access"):
        make_runner("graph", *side.args).warm_up(inputs(0))


def test_destructors_raise_nothing():
    def fails():
        raise RuntimeError("gone")
    assert graphs._quietly(fails) is None
    pool = graphs.GraphMemory.__new__(graphs.GraphMemory)  # never finished: no attribute is there
    del pool


def test_rehearsal_overwrites_like_a_graph():
    x = torch.zeros(2)
    graph = Rehearsal(lambda: [x + 1, x.sum()])
    kept = graph.out[0]
    x.fill_(2)
    graph.replay()
    assert kept.tolist() == [3, 3] and frame(graph.out) == [((2,), torch.float32), ((), torch.float32)]
