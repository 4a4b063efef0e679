#!/usr/bin/env python3
"""Compares ours with PyTorch on the same work on one GPU, in pairs over several rounds: tokens/s, MFU, memory and ratios.

    bench/gpu/compare.py --ours target/release/examples/gpt2_1_5b --data rows-1024.safetensors --model gpt2-xl --batch 8

Both have the same model shape and number of parameters, no dropout, no activation checkpointing, the same token rows in
the same order, rows per micro-batch, micro-batches per step, AdamW's settings, learning rate. torch_gpt2.py
has PyTorch's variants: `autocast` (a) and `master` (b), each also with torch.compile (`+compile` the whole model, `+blocks` each
block). The main ratio is to the faster of (a) and (b); the ratio to compiled variants is printed too.
In every step, ours also computes the gradient norm, checks for overflow, and reads the loss back to the host.

Speed: measured after the warm-up. Ours is the mean time between lines of metrics.jsonl, by the kernel's timestamps, which
includes all work and waiting of a step; PyTorch's is the median between two events on the GPU (on a CPU, the host's clock).
Ratios compare two consecutive runs; the order alternates between rounds. After the first round, only the faster of (a) and
(b) and the fastest variant run again, unless --all-rounds is given.
Memory: `taken` is the GPU memory in use according to the driver, including contexts and libraries: the maximum of the run
(ours) or the value at its end (PyTorch, whose allocator returns nothing); `held` is the memory of tensors (ours: rank 0 at the
ends of steps; PyTorch: its peak); `nvidia-smi` is the maximum that it reported.
Exit codes: 0; 1 if a run failed, the two sides did different work, or the ratio is below --floor; 2 for bad arguments.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import common
from common import BACKENDS, PRESETS, Record, Smi, at_least, last_json, last_words, markdown, mib, or_dash

TORCH = Path(__file__).resolve().parent / "torch_gpt2.py"
VARIANTS = {
    "bf16": {"autocast": [], "master": ["--master"], "autocast+compile": ["--compile", "model"],
             "master+compile": ["--master", "--compile", "model"], "autocast+blocks": ["--compile", "blocks"],
             "master+blocks": ["--master", "--compile", "blocks"]},
    "fp32": {"fp32": [], "tf32": ["--tf32"], "fp32+compile": ["--compile", "model"],
             "tf32+compile": ["--tf32", "--compile", "model"]},
}
DEFAULTS = {"bf16": "autocast,master,autocast+compile", "fp32": "fp32,tf32"}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="FILE", help="the built example gpt2_1_5b")
    parser.add_argument("--data", required=True, metavar="FILE", help="token rows for both (make_rows.py)")
    parser.add_argument("--backend", choices=BACKENDS, default="cuda", help="backend of ours (default: cuda)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="device of PyTorch (default: cuda, or cpu with --backend cpu)")
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch (default: this one)")
    parser.add_argument("--model", choices=PRESETS, default="gpt2-xl")
    parser.add_argument("--batch", type=at_least(1), default=8, help="rows per micro-batch over all ranks (default: 8)")
    parser.add_argument("--accumulation", type=at_least(1), default=1)
    parser.add_argument("--dtype", choices=VARIANTS, default="bf16")
    parser.add_argument("--stage", type=int, choices=range(4), default=0, help="ZeRO stage of ours (default: 0)")
    parser.add_argument("--ranks", type=at_least(1), default=1, help="ranks of ours, which share the GPU (default: 1)")
    parser.add_argument("--threads", type=at_least(1), help="compute threads: per rank for ours, and of PyTorch on a CPU")
    parser.add_argument("--variants", metavar="LIST", help=f"PyTorch's variants, separated by commas; bf16: {', '.join(VARIANTS['bf16'])} (default: "
                        f"{DEFAULTS['bf16']}); fp32: {', '.join(VARIANTS['fp32'])} (default: {DEFAULTS['fp32']})")
    parser.add_argument("--impl", choices=["auto", "transformers", "plain"], default="auto", help="PyTorch's model")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="default: 3")
    parser.add_argument("--all-rounds", action="store_true", help="run every variant in every round")
    parser.add_argument("--steps", type=at_least(3), default=25, help="default: 25")
    parser.add_argument("--warmup", type=at_least(1), default=5, help="exclude this many first steps (default: 5)")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--peak-tflops", type=float, default=common.PEAK_TFLOPS,
                        help=f"peak of the GPU in this type, for MFU (default: {common.PEAK_TFLOPS}, dense bf16)")
    parser.add_argument("--floor", type=float, help="exit with code 1 if ours / PyTorch is below this ratio")
    parser.add_argument("--timeout", type=at_least(1), default=300, metavar="SECONDS", help="limit of one run (default: 300)")
    parser.add_argument("--budget", type=at_least(1), metavar="SECONDS", help="total limit: start no pair that would end later")
    parser.add_argument("--out", metavar="FILE", help="write every run as a JSON line")
    args = parser.parse_args()
    args.device = args.device or ("cpu" if args.backend == "cpu" else "cuda")
    if args.warmup + 2 > args.steps:
        raise common.BadInput(f"--warmup {args.warmup} leaves too few of {args.steps} steps: at least 2 must count")
    if args.batch % args.ranks:
        raise common.BadInput(f"--batch {args.batch} rows cannot be split over {args.ranks} ranks: use a multiple")
    try:
        args.variants = common.listed(VARIANTS[args.dtype])(args.variants or DEFAULTS[args.dtype])
    except argparse.ArgumentTypeError as error:
        raise common.BadInput(f"--variants with --dtype {args.dtype}: {error}") from None
    return args


# --- runs ------------------------------------------------------------------------------------------------------------

def run_ours(args, binary, begin):
    options = ["--backend", args.backend, "--model", args.model, "--data", args.data, "--stage", args.stage, "--ranks",
               args.ranks, "--batch", args.batch // args.ranks, "--accumulation", args.accumulation, "--steps", args.steps,
               "--dtype", args.dtype, "--lr", args.lr, "--decay-except", "nothing", "--offload", "none"]
    if args.threads:
        options += ["--threads", args.threads]
    result = common.ours(binary, options, common.time_left(args, begin))
    if "error" in result:
        return result
    steps, summary = result.pop("steps"), result.pop("summary")
    took, how = common.between({"steps": steps, "stamps": result.pop("stamps")}, args.warmup)
    own = statistics.median(step["step_ms"] for step in steps[args.warmup:])
    reserved = [common.device_bytes(step, "reserved") for step in steps]
    in_use = [common.device_bytes(step, "in_use") for step in steps]
    result.update(
        step_ms=took, tokens_per_second=steps[0]["tokens"] / took * 1e3, timed_by=how, own_step_ms=own,
        all_step_ms=[step["step_ms"] for step in steps], losses=[step["loss"] for step in steps],
        parameters=summary["parameters"], tokens=steps[0]["tokens"],
        taken_bytes=max((value for value in reserved if value is not None), default=None),
        held_bytes=max((value for value in in_use if value is not None), default=None))
    return result


def run_torch(args, variant, begin):
    command = [args.python, TORCH, "--model", args.model, "--data", args.data, "--device", args.device, "--batch",
               args.batch, "--accumulation", args.accumulation, "--steps", args.steps, "--warmup", args.warmup, "--dtype",
               args.dtype, "--impl", args.impl, "--lr", args.lr, "--peak-tflops", args.peak_tflops,
               *VARIANTS[args.dtype][variant]]
    env = dict(os.environ, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    if args.threads and args.device == "cpu":
        env.update(OMP_NUM_THREADS=str(args.threads), MKL_NUM_THREADS=str(args.threads))
    code, stdout, stderr, seconds = common.watched(command, common.time_left(args, begin), env=env)
    result = {"command": [str(part) for part in command], "wall_s": round(seconds, 2)}
    line = last_json(stdout)
    if code is None:
        return {**result, "error": f"ended after {seconds:.0f} s: {last_words(stderr)}"}
    if code != 0 or not isinstance(line, dict):
        return {**result, "error": f"{last_words(stderr or stdout)} (exit code {code})"}
    keep = ("losses", "parameters", "tokens", "impl", "precision", "versions", "built_s", "tokens_per_second")
    result.update({key: line[key] for key in keep}, step_ms=line["step_ms_median"], all_step_ms=line["step_ms"],
                  timed_by="GPU events" if args.device == "cuda" else "host clock", taken_bytes=line["device_bytes_taken"],
                  held_bytes=line["peak_allocated_bytes"], reserved_bytes=line["peak_reserved_bytes"])
    return result


def one(args, who, binary, begin):
    """A run with what nvidia-smi told while it was on."""
    with Smi() as smi:
        result = run_ours(args, binary, begin) if who == "ours" else run_torch(args, who, begin)
    busy = {at for at, percent in smi.values("busy_percent") if percent >= 50}

    def while_busy(name):
        values = [value for at, value in smi.values(name) if not busy or at in busy]
        return statistics.median(values) if values else None

    result["smi"] = {"used_mib": smi.most("used_mib"), "missing": smi.missing, "samples": len(smi.samples),
                     **{name: while_busy(name) for name in ("sm_mhz", "memory_mhz", "watts", "celsius")}}
    if "error" in result:
        print(f"  {who}: FAILED: {result['error']}", flush=True)
    else:
        print(f"  {who}: {result['tokens_per_second']:,.0f} tokens/s, {result['step_ms']:.1f} ms a step, loss "
              f"{result['losses'][0]:.4f} to {result['losses'][-1]:.4f}, {result['wall_s']:.0f} s in total", flush=True)
    return result


def eager(variant):
    return "+" not in variant


def speed_of(runs, who):
    values = [run["tokens_per_second"] for run in runs if run["who"] == who and "error" not in run]
    return statistics.median(values) if values else 0.0


def fastest(runs, variants):
    """The fastest of these variants, or None when all failed."""
    best = max(variants, key=lambda who: speed_of(runs, who), default=None)
    return best if best and speed_of(runs, best) else None


def all_runs(args, binary, record):
    runs, begin, longest, variants = [], time.monotonic(), 0.0, args.variants
    for number in range(1, args.rounds + 1):
        for variant in variants:
            spent = time.monotonic() - begin
            if args.budget and spent + longest > args.budget:
                print(f"stopped before {variant} of round {number}: {spent:.0f} s spent, the longest pair took "
                      f"{longest:.0f} s, --budget is {args.budget}", flush=True)
                return runs
            print(f"round {number}, {variant}", flush=True)
            pair = ["ours", variant] if number % 2 else [variant, "ours"]
            for who in pair:
                run = {"round": number, "pair": variant, "who": who, **one(args, who, binary, begin)}
                runs.append(run)
                record.write({"kind": "run", **run})
                if who == "ours" and "error" in run and not speed_of(runs, "ours"):
                    return runs  # Without ours there is nothing to compare with.
            longest = max(longest, time.monotonic() - begin - spent)
        if not args.all_rounds:
            best = {fastest(runs, [v for v in variants if eager(v)]), fastest(runs, variants)}
            variants = [variant for variant in variants if variant in best]
    return runs


# --- tables ----------------------------------------------------------------------------------------------------------

def ratios(runs, variant):
    """Ours over the variant, pair by pair."""
    found = {}
    for run in runs:
        if run["pair"] == variant and "error" not in run:
            found.setdefault(run["round"], {})[run["who"]] = run["tokens_per_second"]
    return [pair["ours"] / pair[variant] for pair in found.values() if len(pair) == 2]


def print_header(args, runs):
    machine = common.machine()
    seq = common.read_rows(args.data)[2]
    found = next((run["versions"] for run in runs if "versions" in run), {})
    ours = f"{common.commit()} (binary {common.digest(args.ours)})"
    print(f"\nGPU: {machine['gpu']}\nCPU: {machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    print("versions: " + ", ".join([f"ours {ours}", *(f"{name} {value}" for name, value in found.items())]))
    print(f"{args.model}, {common.parameters(args.model):,} parameters, dropout 0 on both sides, no recomputation; "
          f"{args.dtype}; {args.batch} rows of {seq} tokens x {args.accumulation}; AdamW, lr {args.lr}; ours: --backend "
          f"{args.backend} --stage {args.stage} --ranks {args.ranks}; {args.steps} steps a run, the first {args.warmup} do not "
          f"count")
    print(f"MFU: {common.flops_per_token(args.model, seq) / 1e9:.3f} GFLOP a token (6 N + 12 L T d) of {args.peak_tflops} "
          f"TFLOP/s\n")
    return seq


def print_tables(args, runs, seq):
    """Prints everything; (fastest eager, fastest of all, {variant: median ratio})."""
    rows = []
    good = [run for run in runs if "error" not in run]
    for who in ["ours", *args.variants]:
        mine = [run for run in good if run["who"] == who]
        if not mine:
            rows.append([who, "failed" if any(run["who"] == who for run in runs) else "not run", *["–"] * 8])
            continue
        speeds = [run["tokens_per_second"] for run in mine]
        most = lambda key: max((run[key] for run in mine if run.get(key) is not None), default=None)
        smi = lambda key: statistics.median(values) if (values := [run["smi"][key] for run in mine
                                                                   if run["smi"][key] is not None]) else None
        percent = [common.mfu(value, args.model, seq, args.peak_tflops) * 100
                   for value in (min(speeds), statistics.median(speeds), max(speeds))]
        rows.append([who, len(mine), f"{min(speeds):,.1f} / {statistics.median(speeds):,.1f} / {max(speeds):,.1f}",
                     " / ".join(f"{value:.2f}" for value in percent), mib(most("held_bytes")),
                     mib(most("taken_bytes")), or_dash(smi("used_mib"), "{:,.0f}"), or_dash(smi("sm_mhz"), "{:.0f}"),
                     or_dash(smi("watts"), "{:.0f}"), or_dash(smi("celsius"), "{:.0f}")])
    markdown(["who", "runs", "tokens/s", "MFU, %", "held, MiB", "taken, MiB", "nvidia-smi, MiB", "SM, MHz", "W", "°C"], rows)

    best, best_of_all = fastest(runs, [v for v in args.variants if eager(v)]), fastest(runs, args.variants)
    medians, rows = {}, []
    for variant in args.variants:
        values = ratios(runs, variant)
        if not values:
            rows.append([variant, "–", "–", "0", ""])
            continue
        medians[variant] = statistics.median(values)
        note = "; ".join(text for text, name in (("the fastest of (a), (b)", best), ("the fastest of all", best_of_all))
                         if name == variant)
        rows.append([variant, f"{medians[variant]:.3f}", f"{min(values):.3f} – {max(values):.3f}", len(values), note])
    markdown(["ours / PyTorch", "median", "range of pairs", "pairs", ""], rows)
    print("tokens/s and MFU: least / median / greatest of the runs. Clocks, power and heat: medians while the GPU was busy.")
    memory = [(who, max((run["taken_bytes"] for run in good if run["who"] == who and run["taken_bytes"]), default=None))
              for who in ("ours", best)]
    if all(value for _, value in memory):
        print(f"memory taken, ours / {best}: {memory[0][1] / memory[1][1]:.3f}")
    return best, best_of_all, medians


def troubles(args, runs, best, medians):
    """What makes the comparison void or too slow, in words."""
    found = [f"FAILED: {run['who']}, round {run['round']}: {run['error']}" for run in runs if "error" in run]
    good = [run for run in runs if "error" not in run]
    for key, what in (("parameters", "parameters"), ("tokens", "tokens a step")):
        values = sorted({run[key] for run in good})
        if len(values) > 1:
            found.append(f"UNEQUAL: {values} {what} in different runs")
    first = sorted(run["losses"][0] for run in good)
    if first and first[-1] - first[0] > 0.2:
        found.append(f"UNEQUAL: first losses from {first[0]:.3f} to {first[-1]:.3f}")
    # Of other initial weights: only alike, over the last quarter of the steps.
    last = sorted(statistics.fmean(run["losses"][-max(1, args.steps // 4):]) for run in good)
    if last and last[-1] - last[0] > 0.5:
        found.append(f"UNEQUAL: mean losses of the last quarter from {last[0]:.3f} to {last[-1]:.3f}")
    if best not in medians:
        found.append("FAILED: no pair of ours and (a) or (b) is complete")
    elif args.floor and medians[best] < args.floor:
        found.append(f"BELOW THE FLOOR: {medians[best]:.3f} of {best}, the floor is {args.floor}")
    return found


def main():
    args = parse_arguments()
    binary = common.program(args.ours)
    common.read_rows(args.data)
    args.data = str(Path(args.data).resolve())
    record = Record(args.out)
    record.write({"kind": "header", "time": time.time(), "arguments": vars(args), "machine": common.machine()})
    runs = all_runs(args, binary, record)
    seq = print_header(args, runs)
    best, best_of_all, medians = print_tables(args, runs, seq)
    found = troubles(args, runs, best, medians)
    print("\n".join(found) or f"ours / PyTorch ({best}): {medians[best]:.3f}")
    record.write({"kind": "summary", "denominator": best, "ratios": medians, "fastest": best_of_all, "troubles": found})
    return 1 if found else 0


if __name__ == "__main__":
    common.run(main)
