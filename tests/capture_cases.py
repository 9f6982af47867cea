"""One way of capturing a CUDA graph beside one kind of busy thread, on a GPU; one line of JSON. It may crash: one process each.

python tests/capture_cases.py driver|torch|swap none|draw|replay|pin|retry|empty|look|trainer|sync
driver: the package's capture; torch: torch.cuda.CUDAGraph, thread_local;
swap: the same with another state of the default generator while it begins.
"""
import json
import os
import sys
import threading
import time

import torch

from dflash_nb.graphs import _ALONE, Captured, GraphMemory, private_stream, step_modes

DEVICE = torch.device("cuda:0")


def side(seed, n=256):
    "Input, weights with gradients, and a forward and backward over them."
    g = torch.Generator("cuda").manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(n, n, generator=g, device=DEVICE) / n**.5) for _ in range(4)]
    for w in weights:
        w.grad = torch.zeros_like(w)
    x = torch.randn(64, n, generator=g, device=DEVICE)

    def fn():
        h = x
        for w in weights:
            h = (h @ w).tanh() + torch.zeros(64, n, device=DEVICE)
        y = h.square().sum()
        y.backward()
        return y.detach()
    return x, weights, fn


def capture_by_driver(fn):
    with step_modes(DEVICE):
        stream, pool = private_stream(DEVICE), GraphMemory(DEVICE)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph = Captured(fn, stream, pool)
        torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, graph.out, graph


def capture_by_torch(fn, swap):
    graph, stream, generator = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.default_generators[0]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
        stream.synchronize()
        own = generator.graphsafe_get_state()
        if swap:
            generator.graphsafe_set_state(generator.clone_state())
        graph.capture_begin(capture_error_mode="thread_local")
        if swap:
            generator.graphsafe_set_state(own)
        try:
            out = fn()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, out, (graph, stream)


def capture(way, fn):
    with _ALONE:
        replay, out, graph = capture_by_driver(fn) if way == "driver" else capture_by_torch(fn, way == "swap")
    return replay, out, (graph, fn)  # a replay reads what `fn` holds


def make_busy(way, case):
    "What the other thread repeats, and a count of its misses for lack of memory."
    counts = {"n": 0, "ooms": 0}
    replay = capture(way, side(7)[2]) if case == "replay" else None

    def empty():
        torch.empty(2**22, device=DEVICE).fill_(1)
        torch.cuda.empty_cache()

    def retry():
        try:
            torch.empty((600 + 100 * (counts["n"] % 3)) * 2**20, dtype=torch.uint8, device=DEVICE).fill_(1)
        except torch.cuda.OutOfMemoryError:
            counts["ooms"] += 1

    def trainer():
        run, out, _keep = capture(way, side(counts["n"])[2])
        run()
        out.item()
        torch.randn(10, device=DEVICE)
    cases = {
        "none": lambda: time.sleep(.001),
        "draw": lambda: torch.randn(1000, device=DEVICE).sum(),
        "replay": lambda: (replay[0](), torch.cuda.current_stream().synchronize()),
        "pin": lambda: torch.empty(1000 * (counts["n"] % 400 + 1)).pin_memory().to(DEVICE, non_blocking=True),
        "retry": retry, "empty": empty, "trainer": trainer,
        "look": lambda: (torch.cuda.memory_stats(), torch.cuda.current_stream().query(), torch.cuda.mem_get_info()),
        "sync": lambda: (torch.cuda.synchronize(), time.sleep(.005)),
    }

    def busy():
        counts["n"] += 1
        cases[case]()
    return busy, counts


def check(way, seed):
    "Capture, replay on other inputs, compare with the plain call."
    x, weights, fn = side(seed)
    replay, out, _keep = capture(way, fn)
    x.mul_(.5)
    torch._foreach_zero_([w.grad for w in weights])
    replay()
    value, grad = out.clone(), weights[0].grad.clone()
    torch._foreach_zero_([w.grad for w in weights])
    with step_modes(DEVICE):
        plain = fn()
    torch.cuda.current_stream().synchronize()
    return torch.allclose(value, plain, rtol=1e-5) and torch.allclose(grad, weights[0].grad, rtol=1e-4, atol=1e-6)


def main(way, case, captures=30, limit=12.):
    busy, counts = make_busy(way, case)
    done, seen = threading.Event(), {"way": way, "case": case, "captures": 0, "wrong": 0, "rounds": 0}
    seen |= {"capture_errors": [], "busy_errors": []}
    if case == "retry":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2000 * 2**20) / total)

    def guarded(key, work):
        try:
            work()
        except BaseException as e:
            seen[key].append(f"{type(e).__name__}: {e}".split("\n")[0][:200])

    def body():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set() and (case == "sync" or len(seen["busy_errors"]) <= 20):
                guarded("busy_errors", busy)
                seen["rounds"] += 1

    def one(seed):
        seen["wrong"] += not check(way, seed)
        seen["captures"] += 1

    def work():
        start = time.time()
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(captures):
                if time.time() - start < limit and len(seen["capture_errors"]) <= 5:
                    guarded("capture_errors", lambda i=i: one(100 + i))
    threads = [threading.Thread(target=body, daemon=True), threading.Thread(target=work, daemon=True)]
    for t in threads:
        t.start()
    threads[1].join(25)
    done.set()
    threads[0].join(5)
    for key in ("capture_errors", "busy_errors"):
        seen[key] = {"count": len(seen[key]), "first": seen[key][:1]}
    seen |= {"out_of_memory": counts["ooms"], "retries": torch.cuda.memory_stats()["num_alloc_retries"]}
    seen["hung"] = any(t.is_alive() for t in threads)
    print(json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:3])
