#!/usr/bin/env python3
"""Summarizes the kernels of a profile: time per kernel, and how close the slowest ones come to the GPU's speed of light.

    bench/gpu/kernels.py --ncu ncu.csv --steps 3          output of `ncu --csv --page raw|details`
    bench/gpu/kernels.py --nsys kernels.csv --steps 3     output of `nsys stats --report cuda_gpu_kern_sum --format csv`
    bench/gpu/kernels.py --cubecl cubecl.log --steps 3    CubeCL's own log (profiling level medium): times only

If ncu's launches repeat from step to step, only the last complete step counts; otherwise all launches are divided by --steps.
Figures for several launches of a kernel are means weighted by time.
Exit codes: 0; 1 when the file has no kernels; 2 for bad arguments.
"""

import argparse
import collections
import csv
import re
import sys
from pathlib import Path

from common import BadInput, at_least, markdown, or_dash, run

# A figure's names in ncu's pages "raw" and "details".
FIGURES = {
    "time": ("gpu__time_duration.sum", "Duration"),
    "compute": ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "Compute (SM) Throughput"),
    "memory": ("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed", "Memory Throughput"),
    "dram": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", "DRAM Throughput"),
    "occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"),
}
NANOSECONDS = {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9, "µs": 1e3}


def figure(text):
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def scaled(name, value, unit):
    """A figure in nanoseconds or percent; a memory figure in bytes per second is none."""
    if value is None or (name != "time" and unit not in ("%", "")):
        return None
    return value * NANOSECONDS.get(unit, 1) if name == "time" else value


def read_ncu(path):
    """Launches in order: {name, shape, and the figures that are there}."""
    lines = Path(path).read_text(errors="replace").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    head, rows = rows[0], [row for row in rows[1:] if len(row) == len(rows[0])]
    column = {name: i for i, name in enumerate(head)}
    launches = {}

    def launch(row):
        key = (row[column["ID"]], row[column["Process ID"]] if "Process ID" in column else "")
        shape = tuple(row[column[name]] for name in ("Grid Size", "Block Size") if name in column)
        return launches.setdefault(key, {"name": row[column["Kernel Name"]], "shape": shape})

    if "Metric Name" in column:  # Page "details": a row for each figure.
        for row in rows:
            for name, known in FIGURES.items():
                if row[column["Metric Name"]] in known:
                    value = scaled(name, figure(row[column["Metric Value"]]), row[column["Metric Unit"]])
                    if value is not None:
                        launch(row).setdefault(name, value)
        return list(launches.values())
    units = {}
    if rows and not rows[0][column["ID"]]:
        units, rows = dict(zip(head, rows[0])), rows[1:]
    for row in rows:
        for name, known in FIGURES.items():
            for metric in known:
                if metric in column and (value := scaled(name, figure(row[column[metric]]), units.get(metric, ""))) is not None:
                    launch(row)[name] = value
    return list(launches.values())


def last_step(launches, steps):
    """(launches of one step, how they were found)."""
    total = len(launches)
    keys = [(launch["name"], launch["shape"]) for launch in launches]
    # The period that the longest end of the list has: a step's, since what repeats within a step ends with it.
    step, covered = None, 0
    for period in range(1, total // 2 + 1):
        end = total
        while end > period and keys[end - 1] == keys[end - 1 - period]:
            end -= 1
        if total - end >= period and total - end + period > covered:
            step, covered = period, total - end + period
    if step and 8 * steps * step >= total:
        return launches[-step:], f"the last step of {step} launches, of {total} in all"
    # Some launches may differ in shape from step to step: the best of what nearly repeats.
    best, repeated = None, 0.97
    for period in range(max(1, total // (2 * steps)), total // 2 + 1):
        same = sum(a == b for a, b in zip(keys[-period:], keys[-2 * period : -period])) / period
        if same > repeated:
            best, repeated = period, same
    if best:
        return launches[-best:], f"the last step of {best} launches, of {total} in all ({repeated:.1%} as in the step before)"
    return None, f"all {total} launches, divided by {steps} steps: they do not repeat"


def by_kernel(launches, divisor):
    """[(name, launches a step, ns a step, {figure: mean})], slowest first."""
    groups = collections.defaultdict(list)
    for launch in launches:
        if "time" in launch:
            groups[launch["name"]].append(launch)
    found = []
    for name, group in groups.items():
        time = sum(launch["time"] for launch in group)
        means = {}
        for key in FIGURES:
            have = [launch for launch in group if key in launch]
            weight = sum(launch["time"] for launch in have)
            if key != "time" and weight:
                means[key] = sum(launch[key] * launch["time"] for launch in have) / weight
        found.append((name, len(group) / divisor, time / divisor, means))
    return sorted(found, key=lambda kernel: -kernel[2])


def read_nsys(path, steps):
    lines = Path(path).read_text(errors="replace").splitlines()
    start = next((i for i, line in enumerate(lines) if "Total Time" in line and "Name" in line), None)
    if start is None:
        return []
    found = []
    for row in csv.DictReader(lines[start:]):
        time, count = figure(row.get("Total Time (ns)") or ""), figure(row.get("Instances") or "")
        if time is not None and count is not None:
            found.append((row["Name"], count / steps, time / steps, {}))
    return sorted(found, key=lambda kernel: -kernel[2])


CUBECL = re.compile(r"\|\s*([0-9.]+)(ns|µs|us|ms|s)\s*\|\s*(.*?)\s*$")


def read_cubecl(path, steps):
    groups = collections.defaultdict(lambda: [0, 0.0])
    for line in Path(path).read_text(errors="replace").splitlines():
        if (found := CUBECL.search(line)) and "|" not in found[3]:
            groups[found[3]][0] += 1
            groups[found[3]][1] += float(found[1]) * NANOSECONDS[found[2]]
    kernels = [(name, count / steps, time / steps, {}) for name, (count, time) in groups.items()]
    return sorted(kernels, key=lambda kernel: -kernel[2])


def short(name, most=90):
    name = re.sub(r"\s+", " ", name).replace("|", "/")
    return name if len(name) <= most else f"{name[: most - 1]}…"


def print_tables(kernels, how, top, step_ms):
    total = sum(time for _, _, time, _ in kernels)
    print(f"{how}; {sum(count for _, count, _, _ in kernels):.0f} launches and {total / 1e6:.2f} ms of kernels a step")
    if step_ms:
        idle = step_ms - total / 1e6
        print(f"a step without a profiler takes {step_ms:.2f} ms: {idle:.2f} ms ({idle / step_ms:.1%}) more than its kernels")
    print()
    percent = lambda means, key: or_dash(means.get(key), "{:.0f}")
    markdown(["kernel", "launches", "ms a step", "share", "µs each", "compute, %", "memory, %", "DRAM, %", "occupancy, %"], [
        [short(name), f"{count:.0f}", f"{time / 1e6:.3f}", f"{100 * time / total:.1f} %", f"{time / count / 1e3:.1f}",
         *(percent(means, key) for key in ("compute", "memory", "dram", "occupancy"))]
        for name, count, time, means in kernels[:top]])
    if len(kernels) > top:
        rest = sum(time for _, _, time, _ in kernels[top:])
        print(f"{len(kernels) - top} other kernels: {rest / 1e6:.3f} ms, {100 * rest / total:.1f} %\n")
    print("The three slowest:")
    for name, count, time, means in kernels[:3]:
        if not means:
            print(f"- {short(name, 300)}: {time / 1e6:.3f} ms a step; no speed-of-light figures in this kind of profile")
            continue
        compute, memory = means.get("compute", 0.0), means.get("memory", 0.0)
        bound = "neither near its limit (launches, latency or too little parallel work)" if max(compute, memory) < 60 \
            else "compute" if compute >= memory else "memory"
        print(f"- {short(name, 300)}: {time / 1e6:.3f} ms a step, {100 * time / total:.1f} % of all; compute {compute:.0f} % and "
              f"memory {memory:.0f} % of the speed of light; bound by: {bound}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ncu", metavar="FILE")
    source.add_argument("--nsys", metavar="FILE")
    source.add_argument("--cubecl", metavar="FILE")
    parser.add_argument("--steps", type=at_least(1), required=True, help="number of profiled steps")
    parser.add_argument("--top", type=at_least(1), default=25, help="rows of the table (default: 25)")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="time of a step without a profiler, to compute the GPU's idle time")
    args = parser.parse_args()
    path = args.ncu or args.nsys or args.cubecl
    try:
        if args.ncu:
            launches = read_ncu(path)
            step, how = last_step(launches, args.steps)
            kernels = by_kernel(step or launches, 1 if step else args.steps)
        else:
            kernels = (read_nsys if args.nsys else read_cubecl)(path, args.steps)
            how = f"all launches, divided by {args.steps} steps"
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    if not kernels:
        print(f"error: {path} has no kernel times", file=sys.stderr)
        return 1
    print_tables(kernels, how, args.top, args.step_ms)
    return 0


if __name__ == "__main__":
    run(main)
