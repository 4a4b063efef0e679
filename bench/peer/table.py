#!/usr/bin/env python3
"""Prints the tables of a results file of bench/peer.sh: table.py FILE"""

import json
import statistics
import sys

MIB_FORMAT = "{:,.0f}"


class Results:
    """A results file: the first line says what was run where, each other one is a run."""

    def __init__(self, path):
        try:
            with open(path) as file:
                lines = [json.loads(line) for line in file if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path} is no results file of bench/peer.sh: {error}") from None
        if not lines or lines[0].get("kind") != "header":
            raise ValueError(f"{path} is no results file of bench/peer.sh: its first line is not the header")
        self.header = lines[0]
        self.rounds = {}
        for line in lines[1:]:
            self.rounds.setdefault(line["run"], {})[line["round"]] = line

    def runs(self, name):
        return list(self.rounds.get(name, {}).values())

    def values(self, name, field):
        return [run[field] for run in self.runs(name) if "error" not in run]

    def ratio(self, left, right, field):
        """The ratio of medians, and the least and the greatest of the ratios of one round; None without values."""
        ours, theirs = self.values(left, field), self.values(right, field)
        if not ours or not theirs:
            return None
        pairs = []
        for number, run in self.rounds[left].items():
            other = self.rounds[right].get(number)
            if other and "error" not in run and "error" not in other:
                pairs.append(run[field] / other[field])
        return statistics.median(ours) / statistics.median(theirs), min(pairs, default=None), max(pairs, default=None)


def spread(results, name, field, form):
    """`least / median / greatest`, with the number of failed runs."""
    runs, values = results.runs(name), results.values(name, field)
    if not runs:
        return "not run"
    if not values:
        return "failed"
    text = " / ".join(form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return text if len(values) == len(runs) else f"{text} ({len(runs) - len(values)} of {len(runs)} failed)"


def verdict(ratio, floor, goal, at_most):
    reached = (lambda bound: ratio <= bound) if at_most else (lambda bound: ratio >= bound)
    return "✓ goal" if reached(goal) else "✓ floor" if reached(floor) else "✗"


def judged(results, row, field, at_most):
    """The cells ratio, pairs, floor, goal, holds."""
    sign = "≤" if at_most else "≥"
    bounds = [f"{sign} {row['floor']:.2f}", f"{sign} {row['goal']:.2f}"]
    found = results.ratio(row["left"], row["right"], field)
    if found is None:
        return ["–", "–", *bounds, "–"]
    ratio, least, greatest = found
    pairs = "–" if least is None else f"{least:.2f} – {greatest:.2f}"
    return [f"{ratio:.3f}", pairs, *bounds, verdict(ratio, row["floor"], row["goal"], at_most)]


def memory(results, row):
    """The cells ours, other, ratio."""
    cells = []
    for name in (row["left"], row["right"]):
        values = results.values(name, "memory_mib")
        cells.append(MIB_FORMAT.format(statistics.median(values)) if values else "–")
    found = results.ratio(row["left"], row["right"], "memory_mib")
    return [*cells, "–" if found is None else f"{found[0]:.2f}"]


def markdown(head, rows):
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


BOUNDS = ["ratio of medians", "least – greatest pair", "floor", "goal", "holds"]


def print_header(header):
    machine = header["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    print(f"{header['date']}, {machine['cpu']}, {machine['cpus']} CPUs, runs held to CPUs {machine['used']}, "
          f"load average at the start {machine['load']}\n{versions}")
    print(f"{header.get('dtype', 'fp32')}, AdamW, dropout 0, {header['seq']} random tokens a row if not said, {header['steps']} steps a run, the first "
          f"{header['warmup']} do not count, {header['rounds']} rounds\n")


def print_tables(results):
    of_kind = lambda kind: [row for row in results.header["rows"] if row["kind"] == kind]
    if rows := of_kind("speed"):
        head = ["work and peer", "ours, tokens/s", "peer, tokens/s", *BOUNDS, "memory ours, MiB", "peer, MiB", "ratio"]
        markdown(head, [
            [row["name"], spread(results, row["left"], "tokens_per_second", "{:.1f}"),
             spread(results, row["right"], "tokens_per_second", "{:.1f}"),
             *judged(results, row, "tokens_per_second", False), *memory(results, row)]
            for row in rows
        ])
    if rows := of_kind("memory"):
        markdown(["peak memory over idle", "ours, MiB", "peer, MiB", *BOUNDS], [
            [row["name"], spread(results, row["left"], "memory_mib", MIB_FORMAT),
             spread(results, row["right"], "memory_mib", MIB_FORMAT), *judged(results, row, "memory_mib", True)]
            for row in rows
        ])
    if rows := of_kind("scale"):
        markdown(["step time at one global batch", "ms", "1 rank x 2 threads, ms", *BOUNDS], [
            [row["name"], spread(results, row["left"], "step_ms", "{:.0f}"),
             spread(results, row["right"], "step_ms", "{:.0f}"), *judged(results, row, "step_ms", True)]
            for row in rows
        ])
    print("Tokens/s, memory and ms: least / median / greatest of the runs. ✓ goal, ✓ floor, ✗: by the ratio of medians.")


def print_notes(results):
    """What may have disturbed the runs, and what would make them unequal."""
    runs = [run for name in results.rounds for run in results.runs(name)]
    good = [run for run in runs if "error" not in run]
    if good:
        foreign = [run["foreign_cpu"] for run in good]
        print(f"Foreign CPU time while a run was on: median {statistics.median(foreign):.1%}, greatest {max(foreign):.1%} "
              f"({max(good, key=lambda run: run['foreign_cpu'])['run']}).")
        if statistics.median(foreign) > 0.05:
            print("NOISY: more than 5 % of the CPUs went elsewhere in most runs; run again on a quiet machine.")
    for model in sorted({run["run"].split()[0] for run in good}):
        sizes = sorted({run["parameters"] for run in good if run["run"].startswith(f"{model} ")})
        if len(sizes) > 1:
            print(f"UNEQUAL: model {model} has {sizes} parameters in different runs.")
        losses = sorted(run["loss_first"] for run in good if run["run"].startswith(f"{model} "))
        if losses[-1] - losses[0] > 0.2:
            print(f"UNEQUAL: the first losses of model {model} are from {losses[0]:.3f} to {losses[-1]:.3f}.")
    failed = [run for run in runs if "error" in run]
    for run in failed:
        print(f"FAILED: {run['run']}, round {run['round']}: {run['error'].strip().splitlines()[-1][:200]}")
    return bool(failed)


def main(path):
    """Prints everything; whether a run has failed."""
    results = Results(path)
    print_header(results.header)
    print_tables(results)
    return print_notes(results)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        sys.exit(1 if main(sys.argv[1]) else 0)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
