#!/usr/bin/env python3
"""Compares generation with transformers, or measures it with weights on a disk under a hard memory limit.

  bench/generate.py --venv DIR --zero target/release/zero [--model gpt2] [--batches 1,8] [--new 64] [--rounds 3]
  bench/generate.py --venv DIR --zero ... --model gpt2-xl --limit-mib 2048 --swap DIR --new 6
  bench/generate.py --venv DIR --zero ... --model qwen2.5-32b --part 0.05 --limit-mib 8192 --swap DIR --new 6 --options='--quantize int4'

DIR is a virtual environment with torch and transformers, such as bench/peer.sh creates. Weights are random and are created once, in
--dir. Both sides use two threads, fp32, the same prompts of 16 tokens, greedy decoding and a KV cache. The time per token is the
difference between a run of many and a run of few tokens, divided by the difference in tokens, so it excludes startup, loading and the
prompts. With --limit-mib, the process runs in a memory cgroup (needs root) and keeps parameters in --swap. Its tokens must equal those
of a run without a limit, if the model fits in this machine's memory. The disk's bandwidth is measured by reading a 4 GiB file in --swap
with READERS threads, bypassing the page cache; a run's rate is the bytes that its process reads from disks per token, divided by the
time per token. Of each bfloat16 shard of a Qwen2.5, the fraction --part is random and the rest is a hole (bench/random_llama.py).
"""
import argparse, json, mmap, os, resource, shutil, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import random_llama
from random_gpt2 import SIZES, weights

READERS = 4
PEER = """
import sys, time, torch
from transformers import GPT2LMHeadModel
torch.set_num_threads(2)
model = GPT2LMHeadModel.from_pretrained(sys.argv[1]).eval()
rows, few, many = map(int, sys.argv[2:5])
ids = torch.tensor([[(7 * i + row) % 50000 for i in range(16)] for row in range(rows)])
def run(new):
    begin = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    return time.perf_counter() - begin
run(2)
print((run(many) - run(few)) / (many - few))
"""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--venv", type=Path, required=True)
parser.add_argument("--zero", type=Path, required=True)
parser.add_argument("--model", choices=[*SIZES, *random_llama.SIZES], default="gpt2")
parser.add_argument("--dir", type=Path, default=Path("target/generate"))
parser.add_argument("--batches", help="prompts per batch [default: 1,8; with --limit-mib 1,16]")
parser.add_argument("--new", type=int, default=64)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--limit-mib", type=int)
parser.add_argument("--swap", type=Path, default=Path("."))
parser.add_argument("--part", type=float, default=1.0)
parser.add_argument("--options", default="", help="more options of zero generate, such as '--quantize int4'")
args = parser.parse_args()
if not args.zero.is_file():
    sys.exit(f"error: {args.zero} does not exist: build it with cargo build --release --bin zero")
folder, python = args.dir / args.model, args.venv / "bin/python"
if args.model in SIZES:
    weights(folder)
else:
    random_llama.weights(folder, args.part)
    tokenizer = Path(__file__).parent.parent / "tests/fixtures/texts/qwen2_tiny"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
# One token a word, in GPT-2's own vocabulary.
words = " the of and to in is was he for it with as his on be at by had not are but from or".split()


def cgroup(mib):
    root = Path("/sys/fs/cgroup/memory")
    version1 = root.is_dir()
    group = (root if version1 else root.parent) / f"zero-generate-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / ("memory.limit_in_bytes" if version1 else "memory.max")).write_text(str(mib << 20))
    return group, group / ("memory.max_usage_in_bytes" if version1 else "memory.peak")


def zero(rows, new, limit=None, offload=()):
    prompts = [" ".join(words[(row + i) % len(words)] for i in range(16)) for row in range(rows)]
    command = [args.zero, "generate", folder, "--json", "--threads", "2", "--max-new-tokens", str(new), "--min-new-tokens", str(new),
               *args.options.split(), *offload]
    for prompt in prompts:
        command += ["--prompt", prompt]
    group = limit and cgroup(limit)
    inside = (lambda: (group[0] / "cgroup.procs").write_text(str(os.getpid()))) if group else None
    read = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock * 512
    begin, before = time.perf_counter(), read()
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=inside)
    seconds, bytes_read = time.perf_counter() - begin, read() - before
    if done.returncode:
        sys.exit(f"error: {done.stderr}")
    tokens = [json.loads(line)["tokens"] for line in done.stdout.splitlines()]
    assert all(len(row) == new for row in tokens), "a text has ended early: other times would be compared"
    peak = None
    if group:
        peak = int(group[1].read_text()) >> 20
        group[0].rmdir()
    return seconds, tokens, peak, bytes_read


def streamed(new, limit, offload):
    """Of one run of one prompt: seconds a token, bytes that the process read of disks a second, the peak in MiB, and the seconds of loading."""
    group, peak = cgroup(limit)
    command = [args.zero, "generate", folder, "--threads", "2", "--max-new-tokens", str(new), "--min-new-tokens", str(new), "--prompt", "the of and",
               *args.options.split(), *offload]
    begin, seen = time.perf_counter(), []
    run = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
    while os.read(run.stdout.fileno(), 4096):
        lines = Path(f"/proc/{run.pid}/io").read_text().split("\n")
        seen.append((time.perf_counter(), next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))))
    if run.wait():
        sys.exit(1)
    peak = int(peak.read_text()) >> 20
    group.rmdir()
    # The prompt is shown before it is read, and the line's end last. Tokens that the tokenizer does not know are not shown.
    (first, before), (last, after) = seen[0], seen[-1]
    return (last - first) / new, (after - before) / (last - first), peak, first - begin


def median(values):
    return sorted(values)[len(values) // 2]


few = max(1, args.new // 8)
if args.limit_mib is None:
    print(f"{args.model}, fp32, 2 threads, 16 tokens a prompt, {args.new - few} new ones, median of {args.rounds} rounds in turn")
    print("| prompts | zero, tokens/s | transformers, tokens/s | ratio |\n|---|---|---|---|")
    for rows in map(int, (args.batches or "1,8").split(",")):
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append((zero(rows, args.new)[0] - zero(rows, few)[0]) / (args.new - few))
            out = subprocess.run([python, "-c", PEER, folder, str(rows), str(few), str(args.new)], capture_output=True, text=True, check=True,
                                 env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"})
            theirs.append(float(out.stdout))
        a, b = rows / median(ours), rows / median(theirs)
        print(f"| {rows} | {a:.1f} | {b:.1f} | {a / b:.2f} |", flush=True)
else:
    offload = ["--offload", "disk", "--swap", str(args.swap)]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    part, parts = 8 << 20, 512
    file = args.swap / f"zero-bandwidth-{os.getpid()}"
    with open(file, "wb") as out:
        block = os.urandom(part)
        for _ in range(parts):
            out.write(block)
        os.fsync(out.fileno())
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)

    def reader(first):
        buffer = mmap.mmap(-1, part)
        return sum(os.preadv(fd, [buffer], at * part) for at in range(first, parts, READERS))

    begin = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        bandwidth = sum(pool.map(reader, range(READERS))) / (time.perf_counter() - begin)
    os.close(fd)
    file.unlink()
    fits = 2 * size < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = {}
    if not fits:
        seconds, rate, peak, first = streamed(args.new, args.limit_mib, offload)
        print(f"{seconds:.2f} s a token, {rate / 1e9:.2f} GB/s, {rate / bandwidth:.2f} of the disk's {bandwidth / 1e9:.2f} GB/s, peak {peak} MiB of "
              f"{args.limit_mib}; loaded in {first:.0f} s")
        sys.exit()
    for prompts in map(int, (args.batches or "1,16").split(",")):
        short, long = zero(prompts, 1, args.limit_mib, offload), zero(prompts, args.new, args.limit_mib, offload)
        rows[prompts] = (long[0] - short[0]) / (args.new - 1)
        if prompts == 1:
            assert long[1] == zero(1, args.new)[1], "the tokens of a run without a limit"
        rate = (long[3] - short[3]) / (long[0] - short[0])
        print(f"{prompts} prompt(s): {rows[prompts]:.2f} s a token, {rate / 1e9:.2f} GB/s, {rate / bandwidth:.2f} of the disk's {bandwidth / 1e9:.2f} GB/s, "
              f"peak {long[2]} MiB of {args.limit_mib}; first token after {short[0]:.0f} s", flush=True)
    if {1, 16} <= rows.keys():
        print(f"16 prompts cost {rows[16] / rows[1]:.2f} of one")
