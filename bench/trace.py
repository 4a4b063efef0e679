#!/usr/bin/env python3
"""Summarizes a trace of `gpt2_1_5b --trace FILE`: seconds per kind of operation, and how much communication overlapped with compute.

    ./target/release/examples/gpt2_1_5b --model gpt2 --seq 256 --ranks 2 --stage 3 --steps 6 --trace trace.json
    bench/trace.py trace.json [--skip 2] [--gflops 190 --gbytes 55 --model gpt2 --seq 256 --batch 1]

Times are per step and rank. They exclude nested spans and the first `--skip` steps. With the machine's measured rates
(of one rank's threads), each kind gets a lower bound: operations / GFLOP/s, or bytes / GB/s.
"""
import argparse, collections, json

PRESETS = {"mini": (6, 384), "gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
VOCABULARY = 50257


def spans(path):
    """(thread name, span name, begin, end, self time) in microseconds."""
    names, stacks, done = {}, collections.defaultdict(list), []
    for event in json.load(open(path)):
        thread = event.get("tid")
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[thread] = event["args"]["name"]
        elif event["ph"] == "B":
            stacks[thread].append([event["name"], event["ts"], 0.0])
        elif event["ph"] == "E" and stacks[thread]:
            name, begin, inside = stacks[thread].pop()
            length = event["ts"] - begin
            if stacks[thread]:
                stacks[thread][-1][2] += length
            done.append((thread, name, begin, event["ts"], length - inside))
    return [(names.get(thread, "?"), *rest) for thread, *rest in done]


def union(intervals):
    """Disjoint intervals that cover the same time."""
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def overlap(a, b):
    """Time that is in both of two lists of disjoint, sorted intervals."""
    i = j = total = 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def floors(args):
    """Seconds that each kind takes at the given rates, for one rank."""
    layers, d = PRESETS[args.model]
    n, t = args.seq * args.batch, args.seq
    matrix = 2.0 * n * 12 * d * d * layers / args.gflops / 1e9  # the products of one pass over all blocks
    head = 2.0 * n * d * VOCABULARY / args.gflops / 1e9
    pairs = 2.0 * n * t * d * layers / args.gflops / 1e9  # one product over the causal half of all pairs, both ways
    parameters = layers * 12 * d * d + (VOCABULARY + 1024) * d
    move = lambda elements: 4.0 * elements / args.gbytes / 1e9
    return {
        "linear": matrix, "linear: gradient of x": matrix, "linear: gradient of weight": matrix,
        "linear: gradient of bias": move(5 * n * d * layers),
        "cross-entropy with gradients": 3 * head,
        "attention": pairs, "attention: gradient": 2.5 * pairs,
        "layer norm": move(2 * n * d * (2 * layers + 1)), "layer norm: gradient": move(3 * n * d * (2 * layers + 1)),
        "gelu": move(2 * n * 4 * d * layers), "gelu: gradient": move(3 * n * 4 * d * layers),
        "embedding": move(2 * n * d), "embedding: gradient": move(VOCABULARY * d + 2 * n * d),
        "update": move(7 * parameters),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--skip", type=int, default=2, help="exclude this many first steps (default: 2)")
    parser.add_argument("--gflops", type=float, help="measured rate of matrix products of one rank's threads")
    parser.add_argument("--gbytes", type=float, help="measured memory bandwidth of one rank's threads")
    parser.add_argument("--model", choices=PRESETS, default="gpt2")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    if (args.gflops is None) != (args.gbytes is None):
        parser.error("--gflops and --gbytes go together")

    every = spans(args.trace)
    ranks = sorted({name.split("-")[1] for name, *_ in every if name.startswith("rank-")})
    starts = {r: sorted(b for name, span, b, *_ in every if span == "forward" and name.startswith(f"rank-{r}-compute")) for r in ranks}
    ends = {r: sorted(e for name, span, _, e, _ in every if span == "update" and name.startswith(f"rank-{r}-compute")) for r in ranks}
    if not ends or any(len(e) <= args.skip for e in ends.values()):
        parser.error(f"the trace has {min(map(len, ends.values()), default=0)} steps, and --skip excludes all of them")
    kinds, walls = collections.Counter(), []
    lines = []
    for r in ranks:
        # A step is an update and the forward passes (several, with accumulation) since the one before.
        begin = ends[r][args.skip - 1] if args.skip else 0
        first, last, steps = min(s for s in starts[r] if s >= begin), ends[r][-1], len(ends[r]) - args.skip
        mine = [s for s in every if s[0].startswith(f"rank-{r}-") and s[2] >= first and s[3] <= last]
        walls.append((last - first) / steps)
        compute = [s for s in mine if s[0].startswith(f"rank-{r}-compute")]
        for _, span, _, _, own in compute:
            kinds[span] += own / steps / len(ranks)
        beside = union([s[2:4] for s in mine if s[1] in ("gather", "collective") and not s[0].startswith(f"rank-{r}-compute")])
        at_once = union([s[2:4] for s in compute if s[1] in ("gather",)])
        waits = union([s[2:4] for s in compute if s[1].startswith("wait for") or s[1] == "gather"])
        hidden = length(beside) - overlap(beside, waits)
        total = length(beside) + length(at_once)
        lines.append(f"| {r} | {walls[-1] / 1e3:.0f} | {total / steps / 1e3:.0f} | {hidden / steps / 1e3:.0f} | "
                     f"{100 * hidden / max(total, 1e-9):.0f} % | {length(waits) / steps / 1e3:.0f} |")
    floor = floors(args) if args.gflops else {}
    wall = sum(walls) / len(walls)
    print(f"| kind | ms per step and rank | share |{' floor, ms | time / floor |' if floor else ''}")
    print(f"|---|---|---|{'---|---|' if floor else ''}")
    rest = wall - sum(kinds.values())
    for kind, own in [*kinds.most_common(), ("between forward, backward and update", rest)]:
        if own < 100 and kind not in floor:
            continue
        line = f"| {kind} | {own / 1e3:.1f} | {100 * own / wall:.1f} % |"
        if floor:
            least = floor.get(kind)
            line += f" {least * 1e3:.1f} | {own / 1e6 / least:.2f} |" if least else " | |"
        print(line)
    total = f"| **step** | **{wall / 1e3:.1f}** | |"
    if floor:
        total += f" {sum(floor.values()) * 1e3:.1f} | {wall / 1e6 / sum(floor.values()):.2f} |"
    print(total)
    print("\n| rank | step, ms | communication, ms | overlapped with compute, ms | hidden | compute waited, ms |\n|---|---|---|---|---|---|")
    print("\n".join(lines))


main()
