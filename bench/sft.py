#!/usr/bin/env python3
"""Measures fine-tuning: speed of packed conversations, speed and memory next to PEFT, TRL and transformers, and memory under a hard limit.

  bench/sft.py packing [--rounds 3]           gpt2, rows of 512 tokens: tokens/s of packed conversations over that of full rows, in pairs
  bench/sft.py peer --venv DIR [--rounds 2]   a Qwen2.5-0.5B, LoRA of rank 16, 2 rows of 512 tokens: tokens/s over that of TRL's SFTTrainer
  bench/sft.py caps --venv DIR [--rounds 2]   a Gemma 2 (soft caps) of 6 layers of width 512, one row of 1,024 tokens: tokens/s and peak memory
                                              over those of transformers with eager attention and PyTorch's fused AdamW
  bench/sft.py qlora [--limit-mib 7168]       a Llama-3-8B, nf4 on a disk, LoRA of rank 16, one row of 2,048 tokens: one step in a memory cgroup
  bench/sft.py full [--limit-mib 8192]        a Llama-3.2-1B in full, one row of 2,048 tokens, all state on a disk: one step in a memory cgroup

Weights are random; of the 8B model's file most is a hole, which reads as zeros. Two compute threads, one rank. A cgroup needs root.
Speed is tokens that are no padding, over the time of the steps after the first.
"""
import argparse, array, json, os, random, statistics, subprocess, sys, tempfile, time
from pathlib import Path

import random_llama

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["packing", "peer", "caps", "qlora", "full", "trl", "eager"])
parser.add_argument("--zero", type=Path, default=Path("target/release/zero"))
parser.add_argument("--venv", type=Path)
parser.add_argument("--dir", type=Path, default=Path("target/sft"))
parser.add_argument("--rounds", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--limit-mib", type=int)
args = parser.parse_args()
args.dir.mkdir(parents=True, exist_ok=True)


def rows(path, count, seq, vocabulary):
    source = random.Random(0)
    data = array.array("I", (source.randrange(vocabulary) for _ in range(count * seq))).tobytes()
    header = json.dumps({"input_ids": {"dtype": "U32", "shape": [count, seq], "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def limited(mib):
    """Runs a function in a memory cgroup of version 1 or 2; returns it and the file of the peak."""
    root, most, peak = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    if not root.is_dir():
        root, most, peak = Path("/sys/fs/cgroup"), "memory.max", "memory.peak"
    group = root / f"zero-sft-{os.getpid()}"
    group.mkdir()
    (group / most).write_text(str(mib << 20))
    return group, lambda: (group / "cgroup.procs").write_text(str(os.getpid())), group / peak


def train(options, enter=None):
    with tempfile.TemporaryDirectory(dir=args.dir) as out:
        command = [args.zero, "train", "--ranks", 1, "--threads", 2, "--json", "--out", out, *options]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, preexec_fn=enter)
        if done.returncode:
            sys.exit(f"error: exit code {done.returncode}: {done.stderr[-2000:]}")
        steps = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        later = steps[1:] or steps
        speed = 1e3 * sum(step["tokens"] for step in later) / sum(step["step_ms"] for step in later)
        return json.loads(done.stdout), steps, speed


def packing():
    source, words = random.Random(1), "cat dog sat ran on under mat tree was glad not here".split()
    text = lambda most: " ".join(source.choices(words, k=source.randint(1, most)))
    pairs = args.dir / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": text(40), "completion": " " + text(160)}) + "\n" for _ in range(4000)))
    full = rows(args.dir / "rows.safetensors", 64, 512, 50257)
    how = ["--model", "gpt2", "--seq", 512, "--batch", 4, "--steps", args.steps, "--lr", "1e-4"]
    ratios = []
    for _ in range(args.rounds):
        dense, packed = (train([*how, *more])[2] for more in (["--data", full], ["--data", pairs, "--packing", "--loss-on", "all"]))
        ratios.append(packed / dense)
        print(f"full rows {dense:.1f} tokens/s, packed {packed:.1f}: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}")


def trl():
    """TRL's part of `peer`, in its environment."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from trl import SFTConfig, SFTTrainer

    class Times(TrainerCallback):
        ends = []

        def on_step_begin(self, *_, **__):
            self.ends.append(time.perf_counter())

        on_train_end = on_step_begin

    torch.set_num_threads(2)
    source = random.Random(0)
    data = Dataset.from_list([{"input_ids": [source.randrange(151936) for _ in range(512)]} for _ in range(2 * args.steps)])
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False, disable_tqdm=True, max_length=512,
        per_device_train_batch_size=2, max_steps=args.steps, save_strategy="no", learning_rate=1e-4, weight_decay=0.01, max_grad_norm=0.0,
        lr_scheduler_type="constant",
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), eos_token="</s>", pad_token="</s>")
    model = AutoModelForCausalLM.from_pretrained(args.dir / "qwen2.5-0.5b", dtype=torch.float32)
    lora = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=lora, callbacks=[Times]).train()
    seconds = Times.ends[-1] - Times.ends[1]
    print(json.dumps({"speed": 1024 * (len(Times.ends) - 2) / seconds}))


def eager():
    """transformers' part of `caps`, in its environment."""
    import resource

    import torch
    from transformers import AutoModelForCausalLM, Gemma2Config

    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    torch.set_num_threads(2)
    imported = peak()
    config = Gemma2Config.from_pretrained(args.dir / "gemma2", attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ends = [time.perf_counter()]
    for _ in range(args.steps):
        ids = torch.randint(0, config.vocab_size, (1, 1024))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    print(json.dumps({"speed": 1024 * (args.steps - 1) / (ends[-1] - ends[1]), "mib": peak() - imported}))


def theirs(what):
    command = [args.venv / "bin/python", __file__, what, "--dir", args.dir, "--steps", args.steps]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"error: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def caps():
    folder = args.dir / "gemma2"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 65536, "hidden_size": 512, "intermediate_size": 2048,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 512,
        "max_position_embeddings": 2048, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention_dropout": 0.0, "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    data = rows(args.dir / "rows-gemma2.safetensors", args.steps, 1024, config["vocab_size"])
    how = ["--model", folder, "--data", data, "--stage", 0, "--batch", 1, "--steps", args.steps, "--lr", "1e-4"]
    ratios = []
    for _ in range(args.rounds):
        (summary, _, ours), peer = train(how), theirs("eager")
        mib = summary["peak_rss_bytes"] >> 20
        ratios.append((ours / peer["speed"], mib / peer["mib"]))
        print(f"ours {ours:.1f} tokens/s, {mib} MiB; transformers {peer['speed']:.1f}, {peer['mib']} MiB: {ratios[-1][0]:.2f}, {ratios[-1][1]:.2f}", flush=True)
    print("medians {:.2f}, {:.2f}".format(*map(statistics.median, zip(*ratios))))


def peer():
    folder = random_llama.weights(args.dir / "qwen2.5-0.5b")
    data = rows(args.dir / "rows-qwen.safetensors", 2 * args.steps, 512, 151936)
    ratios = []
    for _ in range(args.rounds):
        ours = train(["--weights", folder, "--data", data, "--batch", 2, "--steps", args.steps, "--lr", "1e-4", "--lora-r", 16, "--lora-alpha", 16,
                      "--lora-targets", "all-linear", "--lora-dropout", 0, "--checkpoint-activations", 0])[2]
        peer = theirs("trl")["speed"]
        ratios.append(ours / peer)
        print(f"ours {ours:.1f} tokens/s, PEFT + TRL {peer:.1f}: {ratios[-1]:.2f}", flush=True)
    print(f"median {statistics.median(ratios):.2f}")


def within(default, options):
    limit = args.limit_mib or default
    group, enter, peak = limited(limit)
    try:
        summary, steps, _ = train(options, enter)
        most = int(peak.read_text()) >> 20
    finally:
        group.rmdir()
    print(f"{summary['parameters']} parameters in a limit of {limit} MiB: loss {steps[-1]['loss']:.4f}, {steps[-1]['step_ms'] / 1e3:.0f} s per step; "
          f"peak {most} MiB with page cache, {summary['peak_rss_bytes'] >> 20} MiB resident")


def qlora():
    folder = random_llama.weights(args.dir / "llama-3-8b", 0.02)
    data = rows(args.dir / "rows-llama.safetensors", 2, 2048, 128256)
    within(7168, ["--weights", folder, "--data", data, "--batch", 1, "--steps", 1, "--lr", "1e-4", "--lora-r", 16, "--lora-targets", "all-linear",
                  "--quantize", "nf4", "--dtype", "bf16", "--checkpoint-activations", "all", "--stage", 3, "--offload", "all", "--offload-to", "disk",
                  "--swap", swap()])


def swap():
    (args.dir / "swap").mkdir(exist_ok=True)
    return args.dir / "swap"


def full():
    data = rows(args.dir / "rows-llama.safetensors", 2, 2048, 128256)
    within(8192, ["--model", "llama-3.2-1b", "--data", data, "--seq", 2048, "--batch", 1, "--steps", 1, "--lr", "1e-5", "--checkpoint-activations", "all",
                  "--stage", 3, "--offload", "all", "--offload-to", "disk", "--swap", swap()])


globals()[args.what]()
