#!/usr/bin/env python3
"""Measures device memory at every stage, with 1 rank and with 2 ranks that share the device, and checks that it stops growing after step 3.

    bench/gpu/memory.py --ours target/release/examples/gpt2_1_5b --backend cuda --model gpt2 --dtype fp32

For each run: the memory of rank 0's tensors at the ends of steps (`device_bytes_in_use`) next to ZeRO's formula for its model
state, the used device memory (`device_bytes_reserved`: on an NVIDIA GPU of all processes, on others of rank 0), and the maximum
that nvidia-smi reported while polled. Then the curves.
A run fails if `device_bytes_reserved` of any step after the third exceeds that of the third, or if nvidia-smi's value exceeds its
first one after the third step (--settled, --tolerance-mib). Another process on the GPU can make a run fail too.
Exit codes: 0; 1 when memory grew, a run failed or was skipped; 2 for bad arguments.
"""

import argparse
import time

import common
from common import MIB, PRESETS, BadInput, Record, Smi, at_least, listed, markdown, mib, or_dash

SHOWN = (1, 2, 3, 4, 5, 10, 20, 30, 40, 50)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True, metavar="FILE", help="the built example gpt2_1_5b")
    parser.add_argument("--backend", choices=["cuda", "vulkan"], default="cuda", help="default: cuda")
    parser.add_argument("--model", choices=PRESETS, default="gpt2", help="default: gpt2")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="default: fp32")
    parser.add_argument("--stages", type=listed(range(4), int), default=[0, 1, 2, 3], metavar="0,1,2,3")
    parser.add_argument("--ranks", type=listed(range(1, 9), int), default=[1, 2], metavar="1,2")
    parser.add_argument("--steps", type=at_least(5), default=50, help="default: 50")
    parser.add_argument("--settled", type=at_least(1), default=3, help="step after which nothing may grow (default: 3)")
    parser.add_argument("--batch", type=at_least(1), default=2, help="rows per rank (default: 2)")
    parser.add_argument("--seq", type=at_least(2), default=128, help="default: 128")
    parser.add_argument("--data", metavar="FILE", help="default: the program's own text")
    parser.add_argument("--tolerance-mib", type=float, default=0.0, help="allowed growth (default: 0)")
    parser.add_argument("--poll-ms", type=at_least(20), default=100, help="polling interval of nvidia-smi (default: 100)")
    parser.add_argument("--timeout", type=at_least(1), default=240, metavar="SECONDS", help="limit of one run (default: 240)")
    parser.add_argument("--budget", type=at_least(1), metavar="SECONDS", help="total limit; runs that do not start in time fail")
    parser.add_argument("--out", metavar="FILE", help="write every run's curve as a JSON line")
    args = parser.parse_args()
    if args.settled >= args.steps:
        raise BadInput(f"--settled {args.settled} leaves no step of {args.steps} to check")
    if args.seq > PRESETS[args.model][3]:
        raise BadInput(f"--seq {args.seq} is more than {args.model}'s {PRESETS[args.model][3]} positions")
    return args


def measure(args, binary, stage, ranks, begin):
    """One run: `error`, or curves by step (`in_use`, `reserved`, `smi_mib`) and what grew."""
    options = ["--backend", args.backend, "--model", args.model, "--stage", stage, "--ranks", ranks, "--batch", args.batch,
               "--seq", args.seq, "--steps", args.steps, "--dtype", args.dtype, "--lr", "1e-4", "--offload", "none"]
    if args.data:
        options += ["--data", args.data]
    with Smi(args.poll_ms) as smi:
        result = common.ours(binary, options, common.time_left(args, begin))
    if "error" in result:
        return {"error": result["error"]}
    steps, stamps = result["steps"], result["stamps"]
    in_use = [common.device_bytes(step, "in_use") for step in steps]
    reserved = [common.device_bytes(step, "reserved") for step in steps]
    if None in reserved:
        return {"error": f"metrics.jsonl has no device_bytes_reserved in step {reserved.index(None) + 1}: the backend does not "
                         "tell its memory"}
    # What nvidia-smi told between the end of a step and that of the next one.
    ends = sorted(stamps.items())
    smi_mib = {}
    for (step, since), (_, until) in zip(ends, [*ends[1:], (None, ends[-1][1] if ends else 0.0)]):
        most = smi.most("used_mib", since, until)
        if most is not None:
            smi_mib[step] = most
    end = ends[-1][1] if ends else float("inf")
    settled_at = next((at for step, at in ends if step >= args.settled), float("inf"))
    later = [value for _, value in smi.values("used_mib", settled_at, end)]
    formula = result["summary"].get("model_state_bytes_formula") or {}
    measured = {"in_use": in_use, "reserved": reserved, "smi_mib": smi_mib, "wall_s": result["wall_s"],
                "smi_peak_mib": smi.most("used_mib"), "smi_missing": smi.missing, "smi_after_settled": len(later),
                "formula": sum(formula.values()) or None, "grew": []}
    grown = max(reserved[args.settled :]) - reserved[args.settled - 1]
    if grown > args.tolerance_mib * MIB:
        step = args.settled + 1 + reserved[args.settled :].index(max(reserved[args.settled :]))
        measured["grew"].append(f"reserved by {grown / MIB:.1f} MiB to step {step}")
    if later and max(later) - later[0] > args.tolerance_mib:
        measured["grew"].append(f"nvidia-smi's by {max(later) - later[0]:.0f} MiB")
    return measured


def print_curves(args, runs):
    shown = [step for step in SHOWN if step <= args.steps]
    for key, title in (("reserved", "Taken of the device at the end of a step, MiB"),
                       ("in_use", "Held by rank 0's tensors at the end of a step, MiB")):
        print(title)
        markdown(["run", *map(str, shown)],
                 [[case, *(mib(run[key][step - 1]) for step in shown)] for case, run in runs.items()])
    if any(run["smi_mib"] for run in runs.values()):
        print("nvidia-smi, most between the end of that step and the next, MiB (– where it was not asked)")
        markdown(["run", *map(str, shown)],
                 [[case, *(or_dash(run["smi_mib"].get(step), "{:,.0f}") for step in shown)] for case, run in runs.items()])


def main():
    args = parse_arguments()
    binary, record = common.program(args.ours), Record(args.out)
    print(f"{args.model}, {args.dtype}, {args.batch} rows of {args.seq} per rank, {args.steps} steps, --backend {args.backend}\n"
          f"GPU: {common.machine()['gpu']}\nours {common.commit()} (binary {common.digest(args.ours)})\n")
    begin, rows, runs, failed, missing = time.monotonic(), [], {}, 0, None
    for ranks in args.ranks:
        for stage in args.stages:
            case = f"stage {stage}, {ranks} rank{'s' if ranks > 1 else ''}"
            if args.budget and time.monotonic() - begin > args.budget:
                run = {"error": f"not run: --budget {args.budget} s is spent"}
            else:
                run = measure(args, binary, stage, ranks, begin)
            record.write({"stage": stage, "ranks": ranks, "model": args.model, "dtype": args.dtype, **run})
            if "error" in run:
                failed += 1
                rows.append([case, *["–"] * 6, f"✗ {run['error']}"])
                print(f"{case}: ✗ {run['error']}", flush=True)
                continue
            runs[case], missing = run, missing or run["smi_missing"]
            failed += bool(run["grew"])
            held, formula = run["in_use"][-1], run["formula"]
            ratio = held / formula if held and formula else None
            holds = f"✗ {', '.join(run['grew'])}" if run["grew"] else "✓"
            rows.append([case, mib(held), mib(formula), or_dash(ratio, "{:.3f}"), mib(run["reserved"][args.settled - 1]),
                         mib(max(run["reserved"])), or_dash(run["smi_peak_mib"], "{:,.0f}"), holds])
            print(f"{case}: {mib(max(run['reserved']))} MiB taken {holds} ({run['wall_s']:.0f} s)", flush=True)
    print()
    markdown(["run", "rank 0 holds, MiB", "formula, MiB", "ratio", f"taken, step {args.settled}", "taken, most",
              "nvidia-smi, most", f"no growth after step {args.settled}"], rows)
    print_curves(args, runs)
    if missing:
        print(f"nvidia-smi gave no values: {missing}")
    elif runs:
        print(f"nvidia-smi gave values {min(run['smi_after_settled'] for run in runs.values())} times or more after step "
              f"{args.settled} of each run")
    print(f"{len(rows) - failed} of {len(rows)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    common.run(main)
