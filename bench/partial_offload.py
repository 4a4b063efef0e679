#!/usr/bin/env python3
"""Measures seconds per step of the main job (GPT-2 1.5B, fp32, 2 ranks at stage 3) with all optimizer state on a disk, and with as much
of it in memory as fits, with moments in fp32 and in bf16, in alternating runs.

  bench/partial_offload.py --swap DIR [--rates 0,500] [--rounds 1] [--steps 4] [--model gpt2-xl] [--example BINARY] [options of the run]

A rate above 0 limits the disk to that many MB/s in each direction, with a control group (version 1 or 2; needs root); 0 sets no limit.
The median excludes the first step, which touches fresh memory. With a rate, two shares of the steps' time are printed:
- how busy the disk was: for each quarter of a second, the bytes of the busier direction, relative to the limit
- the total bytes of the direction with more traffic, relative to the limit
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--swap", type=Path, required=True)
parser.add_argument("--rates", default="0")
parser.add_argument("--rounds", type=int, default=1)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--model", default="gpt2-xl")
parser.add_argument("--example", type=Path, default=Path("target/release/examples/gpt2_1_5b"))
args, more = parser.parse_known_args()
WAYS = {
    "all on the disk": ["--offload", "optimizer"],
    "as little as memory allows": [],
    "the same, with moments in bf16": ["--bf16-optimizer-states"],
}


class Throttle:
    """A control group whose processes read and write so many bytes a second."""

    def __init__(self, rate):
        device = os.stat(args.swap).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        # The limit is of a whole disk.
        whole = Path(f"/sys/dev/block/{number}/..").resolve() / "dev"
        number = whole.read_text().strip() if whole.exists() else number
        first = Path("/sys/fs/cgroup/blkio")
        self.group = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"zero-partial-{os.getpid()}"
        try:
            self.group.mkdir()
            if first.is_dir():
                for way in ("read", "write"):
                    (self.group / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {rate}")
            else:
                (self.group / "io.max").write_text(f"{number} rbps={rate} wbps={rate}")
        except OSError as error:
            sys.exit(f"error: cannot limit the disk's rate: {error}: run as root, or with --rates 0")

    def moved(self):
        """Bytes read and written so far."""
        version_1 = self.group / "blkio.throttle.io_service_bytes"
        text = (version_1 if version_1.exists() else self.group / "io.stat").read_text()
        of = lambda words: sum(int(line.split()[-1]) for line in text.splitlines() if words in line)
        if version_1.exists():
            return [of(" Read "), of(" Write ")]
        field = lambda name: sum(int(word.split("=")[1]) for word in text.split() if word.startswith(name + "="))
        return [field("rbytes"), field("wbytes")]

    def join(self):
        (self.group / "cgroup.procs").write_text(str(os.getpid()))

    def end(self):
        self.group.rmdir()


def run(options, rate):
    throttle = Throttle(rate) if rate else None
    with tempfile.TemporaryDirectory() as out:
        command = [args.example, "--model", args.model, "--steps", args.steps, "--swap", args.swap, "--out", out, "--json", *options, *more]
        metrics, said = Path(out) / "metrics.jsonl", open(Path(out) / "stderr", "w+")
        done = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=said,
                                preexec_fn=throttle.join if throttle else None)
        # When each step has ended, and what had gone over the disk by then; the same of each quarter of a second.
        seen, looks = [], []
        while done.poll() is None:
            if throttle:
                looks.append((time.monotonic(), throttle.moved()))
                while metrics.exists() and metrics.read_text().count("\n") > len(seen):
                    seen.append(looks[-1])
            time.sleep(0.25)
        if throttle:
            throttle.end()
        if done.returncode:
            sys.exit(f"error: the run ended with {done.returncode}: {(Path(out) / 'stderr').read_text()[-600:]}")
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    later, share, busy = steps[1:] or steps, 0.0, 0.0
    if len(seen) > 1:
        (begin, first), (end, last) = seen[0], seen[-1]
        most = lambda before, after: max(b - a for a, b in zip(before, after))
        share = most(first, last) / (rate * (end - begin))
        within = [look for look in looks if begin <= look[0] <= end]
        # A little more may go in one look and less in the next.
        at_rate = (min(most(a, b), rate * (to - since)) for (since, a), (to, b) in zip(within, within[1:]))
        busy = sum(at_rate) / (rate * (end - begin))
    rss = max(rank["peak_rss_bytes"] for rank in steps[-1]["ranks"])
    return statistics.median(step["step_ms"] / 1e3 for step in later), statistics.median(step["forward_ms"] / 1e3 for step in later), rss, busy, share, steps[-1]["loss"]


for rate in map(int, args.rates.split(",")):
    seen = {way: [] for way in WAYS}
    for _ in range(args.rounds):
        for way, options in WAYS.items():
            seen[way].append(run(options, rate * 1_000_000))
    print(f"{args.model}, disk " + (f"held to {rate} MB/s" if rate else "as it is") + f", medians of {args.rounds} round(s)")
    print("| | a step | of the first | forward | peak RSS | the disk is busy | its direction that has more | last loss |")
    print("|---|---|---|---|---|---|---|---|")
    first = None
    for way, runs in seen.items():
        step, forward, rss, *shares = (statistics.median(run[place] for run in runs) for place in range(5))
        first, shown = first or step, " | ".join(f"{share:.2f}" if rate else "-" for share in shares)
        print(f"| {way} | {step:.1f} s | {step / first:.2f} | {forward:.1f} s | {rss / 2**30:.1f} GiB | {shown} | {runs[-1][5]:.6f} |")
