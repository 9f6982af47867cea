"One of two processes dies while the other waits in an NCCL sum: the other must end within seconds, with a name. Needs two GPUs."
import os
import subprocess
import sys
import time

PLACE = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29731")


def both():
    start = time.time()
    env = [dict(os.environ, RANK=str(r), LOCAL_RANK=str(r), **PLACE) for r in range(2)]
    processes = [subprocess.Popen([sys.executable, __file__, str(r)], env=env[r]) for r in range(2)]
    print([p.wait(120) for p in processes], f"{time.time() - start:.1f} s")


def one(rank):
    from dflash_nb.dist import processes
    waits = None
    try:
        with processes(patience=4., beat=.5) as group:
            import torch
            import torch.distributed as dist
            x = torch.ones(1 << 20, device="cuda")
            group.run(dist.all_to_all_single, torch.empty_like(x), x)
            torch.cuda.synchronize()
            if rank:
                time.sleep(1)
                os._exit(9)
            waits = time.time()
            group.run(dist.all_to_all_single, torch.empty_like(x), x)
            torch.cuda.synchronize()
            group.check()
    except BaseException as e:
        print(rank, f"ended after {time.time() - (waits or time.time()):.1f} s: {type(e).__name__}: {e}", flush=True)
        os._exit(3)


if __name__ == "__main__":
    both() if len(sys.argv) == 1 else one(int(sys.argv[1]))
