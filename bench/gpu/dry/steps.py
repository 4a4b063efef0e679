#!/usr/bin/env python3
"""Compares what a training step asks of a GPU (launches, copies, waits and memory, counted by driver.c) with bounds, and prints a lower
bound of its time (roofline.py).

    bench/gpu/dry/steps.py --run 'bench/gpu/dry.sh run' --program gpt2_1_5b --work FOLDER [CASE...]    (bench/gpu/dry.sh steps calls it)

A case is trained three times: once to tune, which counts for nothing but that the driver refuses no call, then for 3 and for 5
steps, whose difference is two steps. As nothing runs, the driver sleeps while a tuner measures (DRY_TUNING): least for a product with
tensor maps (TMA), most for one whose shapes are uploaded. So runs of one program take products that ask for the same.
"""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

import roofline
from roofline import Model

# All cases train in bf16 with AdamW on one rank at stage 0, without dropout unless the name says so. Each has the bounds of a step.
# Bounds are about a twentieth above what was seen.
# `uploads` are copies to the device, nearly all of them the shapes of a launch's tensors; `waits` are the host's for the device, and
# `drains` those of them after which the device has nothing to do. Of peaks 0.8 GiB are the head's logits in one chunk, which is kept.
XL_1 = Model(1, 1600, 25, 1024, 8)
CASES = {
    "tiny": (Model(4, 256, 4, 64, 1), {"launches": 190, "uploads": 16, "waits": 1, "drains": 0, "downloads": 3, "peak_mib": 780}),
    "xl-1": (XL_1, {"launches": 96, "uploads": 16, "waits": 1, "drains": 0, "downloads": 3, "peak_mib": 5_350}),
    "xl-1-dropout": (XL_1, {"launches": 106, "uploads": 21, "waits": 1, "drains": 0, "downloads": 3, "peak_mib": 5_350}),
    "124m": (Model(12, 768, 12, 1024, 8), {"launches": 520, "uploads": 16, "waits": 1, "drains": 0, "downloads": 3, "peak_mib": 6_500}),
    "350m": (Model(24, 1024, 16, 1024, 8), {"launches": 960, "uploads": 16, "waits": 1, "drains": 0, "downloads": 3, "peak_mib": 14_900}),
    "qwen2.5-0.5b": (Model(24, 896, 14, 1024, 8, 2, 4864, 151_936),
                     {"launches": 1_390, "uploads": 40, "waits": 1, "drains": 0, "downloads": 3, "peak_mib": 19_600}),
    "xl": (Model(48, 1600, 25, 1024, 8), {"launches": 1_900, "uploads": 16, "waits": 1, "drains": 0, "downloads": 3, "peak_mib": 48_800}),
}
KEYS = ("launches", "uploads", "upload_bytes", "downloads", "download_bytes", "copies", "waits", "drains", "allocations")


def train(args, work, model, steps, settings=(), options=("--no-kernel-cache",)):
    """What the driver has counted for a run of so many steps, and `first_step_s`: seconds from the start to the end of the first."""
    # As compare.py, but for one case.
    (work / "config.json").write_text(json.dumps(model.config(0.1 if work.name.endswith("-dropout") else 0.0)))
    # A Qwen2 has no tokenizer of its own here: ids below 256, one for each byte of a text.
    data = []
    if model.is_gated:
        rows = work / "rows.safetensors"
        make_rows = pathlib.Path(__file__).parent.parent / "make_rows.py"
        subprocess.run([sys.executable, make_rows, "--seq", str(model.t), rows], check=True, stdout=subprocess.DEVNULL)
        data = ["--data", str(rows)]
    (work / "cubecl.toml").write_text(f'[autotune]\ncache = {{ file = "{work}/autotune" }}\n')
    command = [*shlex.split(args.run), args.program, "--backend", "cuda", "--model", str(work), "--ranks", "1", "--stage", "0", "--dtype",
               "bf16", "--seq", str(model.t), "--batch", str(model.rows), "--steps", str(steps), "--offload", "none", "--out", str(work / "out"), *data, *options]
    (work / "driver.json").unlink(missing_ok=True)
    begin = time.time()
    done = subprocess.run(command, env={**os.environ, "DRY_OUT": str(work), **dict(settings)}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-4000:]}")
    told = json.loads((work / "driver.json").read_text())
    if told["faults"]:
        refused = sorted({line for line in done.stderr.splitlines() if line.startswith("dry driver:")})
        sys.exit("\n".join([f"{told['faults']} calls of the driver were refused, among them:", *refused[:10]]))
    with open(work / "out" / "events.jsonl") as events:
        end = json.loads(events.readlines()[-1])["unix_ms"] / 1e3
    with open(work / "out" / "metrics.jsonl") as metrics:
        after_first = sum(json.loads(line)["step_ms"] for line in metrics.readlines()[1:]) / 1e3
    return {**told, "first_step_s": end - after_first - begin}


def start(args, work, model):
    """Prints how long it takes to the end of the first step, on this machine's processor: when nothing is kept, when kernels are
    kept for the first time, and when they are there. Without what dry/nvrtc.c keeps."""
    counts = []
    for name, options in (("nothing kept", ["--no-kernel-cache"]), ("first start", []), ("next start", [])):
        compiled = work / f"compiled-{len(counts)}"
        compiled.mkdir()
        settings = {"DRY_PTX": str(compiled), "XDG_CACHE_HOME": str(work / "cache")}
        told = train(args, work, model, 2, settings, options)
        counts.append(len(list(compiled.iterdir())))
        print(f"  {name:14} {told['first_step_s']:8.1f} s to the end of the first step, {counts[-1]} kernels compiled", flush=True)
    if counts[0] == 0 or counts[2] != 0:
        sys.exit("kernels that are kept were compiled again, or none were compiled at all")


def by_kernel(one, two):
    """Launches and uploads of a step by kernel, those of one name together, the most first."""
    counts = {}
    for told, sign in ((two, 1), (one, -1)):
        for function in told["functions"]:
            name = "matmul" if function["name"].startswith("matmul") else function["name"]
            launches, uploads = counts.get(name, (0, 0))
            counts[name] = (launches + sign * function["launches"] / 2, uploads + sign * function["uploads"] / 2)
    return sorted(((*count, name) for name, count in counts.items() if any(count)), reverse=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="what a command is run by")
    parser.add_argument("--program", required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--start", action="store_true", help="time the first step too, with and without kept kernels")
    parser.add_argument("cases", nargs="*", default=["tiny"], metavar="CASE", help=", ".join(CASES))
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    failed = False
    for case in args.cases:
        model, bounds = CASES[case]
        work = args.work / case
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        tuned = train(args, work, model, 2, {"DRY_TUNING": "1"})
        one, two = (train(args, work, model, steps) for steps in (3, 5))
        step = {key: (two[key] - one[key]) / 2 for key in KEYS}
        step["peak_mib"] = two["peak"] / 2**20
        print(f"{case}: {tuned['modules']} kernels were compiled, {tuned['refused']} tensor maps of tuning refused; "
              f"{two['modules']} kernels are used; a step has")
        for key, value in step.items():
            over = value > bounds.get(key, value)
            failed |= over
            bound = f"   at most {bounds[key]:,}" + (": TOO MANY" if over else "") if key in bounds else ""
            print(f"  {key:14} {value:15,.1f}{bound}")
        counts = by_kernel(one, two)
        print("    launches    uploads")
        for place, (launches, uploads, name) in enumerate(counts):
            if place < 12 or uploads > 0:
                print(f"  {launches:10,.1f} {uploads:10,.1f}  {name}")
        if args.start:
            start(args, work, model)
        print("\n".join(roofline.table(model, [(launches, name) for launches, _, name in counts])), flush=True)
    if failed:
        sys.exit("a step does more than it may: find what grew, or raise the bound in CASES of bench/gpu/dry/steps.py with a reason")


if __name__ == "__main__":
    main()
