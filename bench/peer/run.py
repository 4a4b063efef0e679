#!/usr/bin/env python3
"""Runs ours and the peers in turn, writes every run to a results file, and prints its tables.

bench/peer.sh starts it, with a virtual environment that has the peers. Exit code 0, 1 if a run failed (the others are
still made), 2 for bad arguments or missing tools. Whether floors hold is in the table, not in the exit code.
"""

import argparse
import array
import datetime
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gpu")]
import table
from common import at_least, listed
from rows import MODELS, OFFLOAD, PEERS, SCALE_ROWS, SEQ, against_before, select

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "target/release/examples/gpt2_1_5b"
PEER = Path(__file__).parent / "peer_bench.py"
VOCABULARY = 50257
WARMUP = 2
CPUS = 2
TICKS = os.sysconf("SC_CLK_TCK")


def pattern(text):
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def parse_arguments():
    parser = argparse.ArgumentParser(prog="bench/peer.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=listed(MODELS), default=list(MODELS), metavar="A|B|A,B",
                        help="A: 6 layers, 384 wide; B: GPT-2 124M (default: both)")
    parser.add_argument("--rounds", type=at_least(1), default=3, metavar="N", help="times that each run is made (default: 3)")
    parser.add_argument("--steps", type=at_least(2), default=7, metavar="N",
                        help=f"steps a run, the first {WARMUP} do not count (default: 7)")
    parser.add_argument("--only", type=pattern, metavar="PATTERN",
                        help="only rows whose name matches this regular expression; --list shows the names")
    parser.add_argument("--peers", type=listed(PEERS), default=list(PEERS), metavar=",".join(PEERS),
                        help="only rows with these peers (or none)")
    parser.add_argument("--before", type=Path, metavar="BINARY",
                        help="compare with an earlier build of the example gpt2_1_5b instead of the peers: each run of ours beside the "
                             "same run of BINARY")
    parser.add_argument("--batch-a", type=at_least(1), default=2, metavar="N",
                        help="model A: rows per rank of two; one rank takes twice as many (default: 2)")
    parser.add_argument("--batch-b", type=at_least(1), default=1, metavar="N",
                        help="model B: rows per rank, of one as of two (default: 1)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="what models compute in (default: fp32)")
    parser.add_argument("--out", type=Path, default=ROOT / "target/peer/results.jsonl", metavar="FILE",
                        help="results (default: target/peer/results.jsonl); an earlier file is kept as FILE.old")
    parser.add_argument("--timeout", type=at_least(1), default=1800, metavar="SECONDS",
                        help="a run that takes longer has failed (default: 1800)")
    parser.add_argument("--list", action="store_true", help="print the rows and the number of runs, and run nothing")
    return parser.parse_args()


# --- the machine -----------------------------------------------------------------------------------------------------

def hold_to_two_cpus():
    """This process, and so every run, keeps to two CPUs, not siblings of one core if that can be had."""
    allowed = sorted(os.sched_getaffinity(0))
    first_of_core = []
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        own = re.split("[,-]", siblings.read_text().strip())[0] if siblings.exists() else str(cpu)
        if own == str(cpu):
            first_of_core.append(cpu)
    chosen = (first_of_core if len(first_of_core) >= CPUS else allowed)[:CPUS]
    if len(chosen) < CPUS:
        fail(f"the comparison needs {CPUS} CPUs, this process may use {len(chosen)}")
    os.sched_setaffinity(0, chosen)
    return chosen


def cpu_seconds(cpus):
    """Busy and stolen seconds of these CPUs since the machine started."""
    busy = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *fields = line.split()
        if name in {f"cpu{cpu}" for cpu in cpus}:
            ticks = [int(field) for field in fields[:8]]
            busy += sum(ticks) - ticks[3] - ticks[4]
            stolen += ticks[7]
    return busy / TICKS, stolen / TICKS


def cpu_model():
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown CPU"


def first_line(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def versions():
    found = {"ours": first_line("git", "describe", "--always", "--dirty"), "rustc": first_line("rustc", "-V").split()[1]
             if shutil.which("rustc") else "unknown", "python": sys.version.split()[0]}
    for package in ("torch", "transformers", "deepspeed"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def status_mib(pid, key):
    """A memory field of a process in MiB, or None once it has gone."""
    try:
        found = re.search(rf"^{key}:\s*(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) / 1024 if found else None


# --- one run ---------------------------------------------------------------------------------------------------------

def random_rows(path, rows, seq):
    """A safetensors file with `input_ids` of `rows` x `seq` random tokens, the same ones each time."""
    source = random.Random(0)
    data = array.array("H", (source.randrange(VOCABULARY) for _ in range(rows * seq))).tobytes()
    tensor = {"dtype": "U16", "shape": [rows, seq], "data_offsets": [0, len(data)]}
    header = json.dumps({"input_ids": tensor}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def command_of(run, steps, warmup, folder, before):
    share, deepspeed = OFFLOAD.get(run.offload, ("", {}))
    if run.who in ("ours", "before"):
        offload = ["--offload", "optimizer", "--offload-ratio", share, "--swap", folder] if share else []
        return [before if run.who == "before" else OURS, "--model", MODELS[run.model].preset, "--data", folder / "tokens.safetensors", "--seq", run.seq,
                "--batch", run.batch, "--steps", steps, "--ranks", run.ranks, "--threads", run.threads, "--stage",
                run.stage, "--lr", "1e-4", "--decay-except", "nothing", "--dtype", run.dtype, "--out", folder / "out", "--json", *offload]
    model = MODELS[run.model]
    engine = {"ddp": "torch"}.get(run.who, run.who)
    if deepspeed.get("device") == "nvme":
        deepspeed = dict(deepspeed, nvme_path=str(folder))
    return [sys.executable, PEER, "--engine", engine, "--stage", run.stage, "--world", run.ranks, "--threads",
            run.threads, "--layers", model.layers, "--hidden", model.hidden, "--heads", model.heads, "--positions",
            model.positions, "--seq", run.seq, "--batch", run.batch, "--steps", steps, "--warmup", warmup,
            "--dtype", run.dtype, "--ds", json.dumps(dict(offload_optimizer=deepspeed) if deepspeed else {})]


def watch(process, deadline, metrics):
    """Waits for a process. Returns its resource usage, whether it was ended for being late, its first and greatest RSS,
    and the times at which it wrote {step: seconds} to `metrics`."""
    idle, peak, written, late = status_mib(process.pid, "VmRSS") or 0.0, 0.0, {}, False
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if metrics.exists():
            # The kernel's stamp of the last write, taken with the number of lines it made.
            stamp = metrics.stat().st_mtime_ns
            lines = metrics.read_bytes().count(b"\n")
            if metrics.stat().st_mtime_ns == stamp:
                written.setdefault(lines, stamp / 1e9)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage, late, idle, peak, written
        peak = max(peak, status_mib(process.pid, "VmHWM") or 0.0)
        if time.monotonic() > deadline and not late:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)


def measured_ours(summary, lines, written, warmup, idle, peak):
    """Figures of our run in the peer's terms."""
    own = statistics.median(step["step_ms"] for step in lines[warmup:])
    stamps = [written.get(step) for step in range(warmup, len(lines) + 1)]
    between = [(after - before) * 1e3 for before, after in zip(stamps, stamps[1:]) if before and after]
    step_ms = statistics.median(between) if between else own
    tokens = lines[0]["tokens"]
    return dict(step_ms=step_ms, tokens_per_second=tokens / step_ms * 1e3, own_step_ms=own, steps_seen=len(between),
                memory_mib=max(peak, summary["peak_rss_bytes"] / 2**20) - idle, idle_mib=idle,
                parameters=summary["parameters"], loss_first=summary["loss_first"], loss_last=summary["loss_last"])


def measured_peer(line):
    return dict(step_ms=line["step_ms"], tokens_per_second=line["tok_s"], memory_mib=sum(line["rss_delta_mib"]),
                parameters=line["params"], loss_first=line["loss0"], loss_last=line["loss"])


def shared_buffers():
    """What DeepSpeed has in shared memory: it leaves 66 MiB a rank there, which later runs and other programs lack."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


def make(run, steps, timeout, cpus, before):
    """Makes a run; returns its line of the results file without its name and round."""
    buffers = shared_buffers()
    warmup = min(WARMUP, steps - 1)
    with tempfile.TemporaryDirectory(prefix="zero_peer_") as name:
        folder = Path(name)
        random_rows(folder / "tokens.safetensors", max(SCALE_ROWS, run.ranks * run.batch) * steps, run.seq)
        command = [str(part) for part in command_of(run, steps, warmup, folder, before)]
        metrics = folder / "out/metrics.jsonl"
        with open(folder / "stdout", "w") as stdout, open(folder / "stderr", "w") as stderr:
            busy, stolen = cpu_seconds(cpus)
            times, begin = os.times(), time.monotonic()
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
            try:
                usage, late, idle, peak, written = watch(process, begin + timeout, metrics)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            finally:
                for buffer in shared_buffers() - buffers:
                    buffer.unlink(missing_ok=True)
        wall, now = time.monotonic() - begin, os.times()
        busy_after, stolen_after = cpu_seconds(cpus)
        spent = usage.ru_utime + usage.ru_stime + now.user - times.user + now.system - times.system
        result = dict(command=command, wall_s=round(wall, 2), steal_s=round(stolen_after - stolen, 2),
                      foreign_cpu=round(max(0.0, busy_after - busy - spent) / (wall * len(cpus)), 4))
        printed = (folder / "stdout").read_text().strip()
        log = (folder / "stderr").read_text()
        if late:
            return dict(result, error=f"{log}\nended after {timeout} s".strip())
        try:
            raw = json.loads(printed.splitlines()[-1]) if printed else {}
        except ValueError:
            raw = {}
        if process.returncode or not raw:
            why = raw.get("error") or log or printed
            return dict(result, error=f"{why}\nexit code {process.returncode}".strip())
        result["raw"] = raw
        if run.who not in ("ours", "before"):
            return dict(result, **measured_peer(raw))
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        result["raw_steps"] = [{key: line[key] for key in ("step", "loss", "step_ms")} for line in lines]
        return dict(result, **measured_ours(raw, lines, written, warmup, idle, peak))


# --- all runs --------------------------------------------------------------------------------------------------------

def fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_tools(runs, before):
    if not OURS.exists():
        fail(f"{OURS} is missing: build it (leave --no-build out)")
    if before and not before.is_file():
        fail(f"--before {before}: no such file, expected an earlier build of the example gpt2_1_5b")
    if any(run.who == "deepspeed" for run in runs):
        missing = [tool for tool in ("g++", "ninja") if not shutil.which(tool)]
        if missing:
            fail(f"DeepSpeedCPUAdam is compiled when it is first used, and {' and '.join(missing)} cannot be found: "
                 "install g++ (Debian: apt install g++; ninja is in requirements.lock), or use --peers torch,ddp,fsdp2")
        # Compiled here, so that no run is a compiler's.
        print("compiling DeepSpeed's operators, if need be", file=sys.stderr)
        build = ("from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder\n"
                 "CPUAdamBuilder().load(); ShareMemCommBuilder().load()")
        done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True,
                              env=dict(os.environ, DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES=""))
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            print(f"warning: DeepSpeed's operators did not compile, its runs will fail:\n{tail}", file=sys.stderr)


def main():
    args = parse_arguments()
    args.before = args.before and args.before.resolve()
    batches = {"A": (2 * args.batch_a, args.batch_a), "B": (args.batch_b, args.batch_b)}
    groups = select(args.model, batches, args.peers, args.only, args.dtype)
    if args.before:
        groups = against_before(groups)
    rows = [row for group, _ in groups for row in group]
    runs = [run for _, group in groups for run in group]
    if not rows:
        fail("no row is left by --model, --peers and --only; --list shows their names")
    if args.list:
        print(*(row.name for row in rows), sep="\n")
        print(f"{len(runs)} runs a round")
        return 0
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    cpus = hold_to_two_cpus()
    check_tools(runs, args.before)
    header = dict(
        dtype=args.dtype,
        kind="header", date=datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        machine=dict(cpu=cpu_model(), cpus=os.cpu_count(), used=",".join(map(str, cpus)), load=load),
        versions=versions(), seq=SEQ, steps=args.steps, warmup=min(WARMUP, args.steps - 1), rounds=args.rounds,
        rows=[row.to_json() for row in rows])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.out.exists():
        args.out.replace(f"{args.out}.old")
    total, made = len(runs) * args.rounds, 0
    with open(args.out, "w") as out:
        def write(line):
            out.write(json.dumps(line) + "\n")
            out.flush()

        write(header)
        for _, group in groups:
            for number in range(1, args.rounds + 1):
                for run in group:
                    made += 1
                    result = make(run, args.steps, args.timeout, cpus, args.before)
                    write(dict(kind="run", run=run.name, round=number, who=run.who, **result))
                    if "error" in result:
                        tail = "\n  ".join(result["error"].splitlines()[-15:])
                        print(f"[{made}/{total}] {run.name}: FAILED\n  {tail}", file=sys.stderr)
                    else:
                        print(f"[{made}/{total}] {run.name}: {result['tokens_per_second']:.1f} tokens/s, "
                              f"{result['memory_mib']:,.0f} MiB, foreign CPU {result['foreign_cpu']:.1%}", file=sys.stderr)
    failed = table.main(args.out)
    print(f"results: {args.out}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
