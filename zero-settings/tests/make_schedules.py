#!/usr/bin/env python3
"""Writes schedules.json and loss_scales.json: golden sequences for tests/config/schedules.rs and loss_scales.rs.

    python3 tests/make_schedules.py            # writes the two files beside this script
    python3 tests/make_schedules.py --check    # says whether they are up to date

An implementation of its own, in another form than the Rust one: it keeps DeepSpeed's counter (`it`, -1 before the first
update) instead of a number of applied updates, and whole rows instead of single values. Needs no packages.
"""

import itertools
import json
import math
import random
import sys
from fractions import Fraction
from pathlib import Path

STEPS = 60
HERE = Path(__file__).resolve().parent


def ramp(it, p):
    """Share of the warm-up done at iteration `it`, None after it."""
    n = max(2, p["warmup_num_steps"])
    if it >= n:
        return None
    return it / n if p["warmup_type"] == "linear" else math.log(it + 1) / math.log(n)


def warmup_lr(it, p, tail=lambda it: 1.0):
    low, high = p["warmup_min_lr"], p["warmup_max_lr"]
    if it < 0:
        return low
    share = ramp(it, p)
    share = tail(it) if share is None else share
    return (1 - share) * low + share * high


def warmup_decay_lr(it, p):
    n, total = max(2, p["warmup_num_steps"]), p["total_num_steps"]
    return warmup_lr(it, p, lambda it: max(0.0, (total - it) / max(1, total - n)))


def warmup_cosine_lr(it, p):
    n, total = max(2, p["warmup_num_steps"]), p["total_num_steps"]
    if it < 0:
        return 0.0
    share = ramp(it, p)
    if share is not None:
        ratio = (1 - share) * p["warmup_min_ratio"] + share
    else:
        angle = math.pi * min(1.0, (it - n + 1) / max(1, total - n))
        low = p["cos_min_ratio"]
        ratio = max(0.0, low + (1 - low) * math.cos(angle / 2) ** 2)
    return p["lr"] * ratio


def cycle_height(updates, p):
    """Exact height in the cycle, as a fraction: 0 at the ends, 1 at the top."""
    first, second = p["cycle_first_step_size"], p["cycle_second_step_size"]
    at = updates % (first + second)
    if at <= first:
        height, stairs = Fraction(at, first), p["cycle_first_stair_count"]
    else:
        height, stairs = Fraction(first + second - at, second), p["cycle_second_stair_count"]
    return Fraction(math.floor(height * stairs), stairs) if stairs else height


def one_cycle_lr(it, p):
    after = it + 1 - p["cycle_first_step_size"] - p["cycle_second_step_size"]
    if after <= 0:
        height = float(cycle_height(it + 1, p))
        return (1 - height) * p["cycle_min_lr"] + height * p["cycle_max_lr"]
    intervals = after / p["decay_step_size"] if p["decay_step_size"] else 0
    return p["cycle_min_lr"] / (1 + p["decay_lr_rate"] * intervals)


def one_cycle_mom(it, p):
    if not p["cycle_momentum"]:
        return None
    if it < 0:
        return p["cycle_min_mom"]
    after = it + 1 - p["cycle_first_step_size"] - p["cycle_second_step_size"]
    if after <= 0:
        height = float(cycle_height(it + 1, p))
        return (1 - height) * p["cycle_max_mom"] + height * p["cycle_min_mom"]
    intervals = after / p["decay_step_size"] if p["decay_step_size"] else 0
    return p["cycle_max_mom"] * (1 + p["decay_mom_rate"] * intervals)


def lr_range_test(it, p):
    intervals = Fraction(it + 1, p["lr_range_test_step_size"])
    intervals = math.floor(intervals) if p["lr_range_test_staircase"] else float(intervals)
    return p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * intervals)


RULES = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle_lr,
    "LRRangeTest": lr_range_test,
}


def schedule_cases():
    def warm(n, kind, low=0.0, high=1e-3, **more):
        return dict(warmup_min_lr=low, warmup_max_lr=high, warmup_num_steps=n, warmup_type=kind, **more)

    def cosine(n, total, kind, min_ratio=0.0, cos_ratio=1e-4):
        return dict(lr=3e-4, total_num_steps=total, warmup_min_ratio=min_ratio, warmup_num_steps=n,
                    cos_min_ratio=cos_ratio, warmup_type=kind)

    def cycle(first, second, stairs=(0, 0), lr_rate=0.0, decay=0, momentum=True, mom_rate=0.0):
        return dict(cycle_min_lr=1e-4, cycle_max_lr=1e-3, decay_lr_rate=lr_rate, cycle_first_step_size=first,
                    cycle_second_step_size=second, cycle_first_stair_count=stairs[0],
                    cycle_second_stair_count=stairs[1], decay_step_size=decay, cycle_momentum=momentum,
                    cycle_min_mom=0.85, cycle_max_mom=0.95, decay_mom_rate=mom_rate)

    def test(low, size, rate, stairs):
        return dict(lr_range_test_min_lr=low, lr_range_test_step_size=size, lr_range_test_step_rate=rate,
                    lr_range_test_staircase=stairs)

    yield "WarmupLR", warm(10, "log")
    yield "WarmupLR", warm(10, "linear", 1e-5)
    yield "WarmupLR", warm(1, "log", 1e-5)
    yield "WarmupLR", warm(1, "linear", 1e-5)
    yield "WarmupLR", warm(1000, "log", 2e-5, 6e-4)
    yield "WarmupLR", warm(20, "linear", 1e-3, 1e-4)
    yield "WarmupDecayLR", warm(10, "log", 1e-5, total_num_steps=50)
    yield "WarmupDecayLR", warm(10, "linear", 0.0, total_num_steps=45)
    yield "WarmupDecayLR", warm(20, "linear", 1e-6, total_num_steps=10)
    yield "WarmupDecayLR", warm(20, "log", 1e-6, total_num_steps=20)
    yield "WarmupCosineLR", cosine(10, 50, "log")
    yield "WarmupCosineLR", cosine(7, 53, "linear", 0.1, 0.01)
    yield "WarmupCosineLR", cosine(20, 10, "log", 0.2, 0.05)
    yield "WarmupCosineLR", cosine(1, 60, "linear", 0.5, 0.0)
    yield "OneCycle", cycle(10, 10)
    yield "OneCycle", cycle(11, 17, lr_rate=0.5, decay=4, mom_rate=0.01)
    yield "OneCycle", cycle(7, 23, stairs=(3, 5), lr_rate=0.25, decay=3, mom_rate=-0.02)
    yield "OneCycle", cycle(20, 5, stairs=(4, 0), lr_rate=1.0, decay=10)
    yield "OneCycle", cycle(15, 0, lr_rate=0.1, decay=1, momentum=False)
    yield "OneCycle", cycle(30, 30, stairs=(7, 7), lr_rate=1.0, decay=0, mom_rate=1.0)
    yield "OneCycle", cycle(6, 0, stairs=(2, 2), mom_rate=0.1, decay=7)
    yield "LRRangeTest", test(1e-4, 10, 5.0, False)
    yield "LRRangeTest", test(1e-4, 7, 0.5, True)
    yield "LRRangeTest", test(1e-3, 2000, 1.0, False)


def schedules():
    out = []
    for kind, params in schedule_cases():
        rows = range(-1, STEPS - 1)
        lrs = [RULES[kind](it, params) for it in rows]
        moms = [one_cycle_mom(it, params) for it in rows] if kind == "OneCycle" else [None]
        out.append({"type": kind, "params": params, "lr": lrs, "momentum": None if moms[0] is None else moms})
    return out


def trace(params, overflows):
    """Scale after each update and the index of the update that fails, if one does."""
    scale, credit = 2.0 ** params["initial_scale_power"], params["hysteresis"]
    scales, streak = [], 0
    for index, overflow in enumerate(overflows):
        if overflow == "1":
            streak = 0
            if credit > 1:
                credit -= 1
            elif scale == params["min_loss_scale"]:
                return scales, index
            else:
                scale = max(scale / 2, params["min_loss_scale"])
        else:
            streak += 1
            grows = streak > 1 and (streak - 1) % params["loss_scale_window"] == 0
            if grows or params["consecutive_hysteresis"]:
                credit = params["hysteresis"]
            scale *= 2 if grows else 1
        scales.append(scale)
    return scales, None


def loss_scale_cases():
    rng = random.Random(20)
    patterns = ["0" * 40, "1" * 24, "10" * 20, "110" * 14, "0001" * 10, "1111" + "0" * 30 + "11", "011" * 6 + "0" * 22]
    patterns += ["".join("1" if rng.random() < share else "0" for _ in range(60)) for share in (0.1, 0.3, 0.5, 0.8)]
    for hysteresis in (1, 2, 3):
        for consecutive in (False, True):
            for window, power, low in ((1, 4, 1), (3, 16, 1), (5, 8, 2), (1000, 5, 3)):
                for pattern in patterns:
                    yield dict(initial_scale_power=power, loss_scale_window=window, hysteresis=hysteresis,
                               consecutive_hysteresis=consecutive, min_loss_scale=low), pattern


def loss_scales():
    out = []
    for params, pattern in loss_scale_cases():
        scales, failed_at = trace(params, pattern)
        runs = [[scale, len(list(run))] for scale, run in itertools.groupby(scales)]
        out.append({"params": params, "overflows": pattern, "runs": runs, "failed_at": failed_at})
    return out


def main():
    stale = []
    for name, cases in (("schedules.json", schedules()), ("loss_scales.json", loss_scales())):
        text = "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n"
        path = HERE / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
            print(f"{path}: {len(cases)} cases")
        elif path.read_text() != text:
            stale.append(name)
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}; run python3 tests/make_schedules.py")


if __name__ == "__main__":
    main()
