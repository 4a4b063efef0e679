"""All-gather and reduce-scatter of BYTES bytes of f32 between two processes by gloo over loopback, as torch calls it.

    python bench/peer/gloo.py [BYTES [ROUNDS]]

Prints one JSON object: GB/s of the whole tensor, medians over rounds of a barrier and the collective."""
import json
import os
import statistics
import subprocess
import sys
import time

WARM = 3


def rank(total: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole, half = torch.ones(total // 4), torch.ones(total // 8)
    rates = {}
    for name, call in [
        ("all_gather", lambda: dist.all_gather_into_tensor(whole, half)),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(half, whole)),
    ]:
        times = []
        for _ in range(WARM + rounds):
            begin = time.perf_counter()
            dist.barrier()
            call()
            times.append(time.perf_counter() - begin)
        rates[name] = total / statistics.median(times[WARM:]) / 1e9
    if dist.get_rank() == 0:
        print(json.dumps(rates))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000_000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    if "RANK" in os.environ:
        rank(total, rounds)
        return 0
    shared = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29631", GLOO_SOCKET_IFNAME="lo")
    shared["OMP_NUM_THREADS"] = "1"
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(total), str(rounds)], env=dict(shared, RANK=str(place)))
        for place in range(2)
    ]
    return max(process.wait(timeout=300) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
