#!/usr/bin/env python3
"""Runs the shell commands of README.md and of the book as they are printed, page by page, each page in a folder of its own with small
files under the names that the page uses. `docs/book/commands.py [PAGE...]`; build first: cargo test --workspace --no-run.
Commands that need a GPU, a second machine, a download or an answer are listed as skipped, with the reason. Step counts of three digits and
more become 20. Exit codes: 0; 1 when a command failed."""
import json, os, pathlib, re, shutil, struct, subprocess, sys, tempfile, time

repo = pathlib.Path(__file__).resolve().parents[2]
fixtures = repo / "tests/fixtures"
skipped = [  # pattern, reason
    (r"^(export|#|END)|^RANK=0", "sets variables for another machine"),
    (r"^cargo |^torchrun .*gpt2_1_5b", "built and run by .ci/run, or needs torchrun"),
    (r"cuda|nccl|apt-get|software_device|bench/gpu", "needs a GPU or its software device"),
    (r"^mpirun|--hosts|--machine-rank|--num-machines|node-0", "needs MPI or other machines"),
    (r"^zero config( +#|$)|^zero chat Qwen", "asks on a terminal"),
    (r"^zero report (run digits|digits run)|^zero (check zero.yaml|inspect run/checkpoints) +# (explain|list)", "reads files of other pages"),
    (r"gaps.jsonl|lines.jsonl|export (base hf|adapter peft)|generate peft", "needs the files and the base model of peft_seq2seq"),
    (r"relay\.py|^tensorboard", "needs a package of Python"),
    (r"bench/limited\.sh|examples/peft_seq2seq", "takes minutes: see docs/performance.md and .ci/full"),
    (r"docs\.parquet", "no Parquet file without a package of Python: tests/train has one"),
    (r"^(git|curl|hf) |wikitext|shakespeare-gpt2( |/)", "needs a download, or an account of the hub"),
    (r"^zero flight", "needs the records of a run that failed: tests of the command have them"),
]
smaller = [  # A fixture has 64 positions and few rows.
    (r"--steps (\d{3,})", "--steps 20"), (r"--seq 2048", "--seq 40"), (r"--eval (\d{3})", "--eval 4"),
    (r"--swap /nvme", "--swap ."),
]

DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}

def model(folder, name):
    """Copies a model of the fixtures, with its tokenizer, to `folder`."""
    shutil.copytree(fixtures / name, folder, ignore=shutil.ignore_patterns("lora", "masked", "batches*", "*reference*", "generated*"))
    for text in (fixtures / "texts" / name).glob("*"):
        if text.name not in ("made.json", "settings.json"): shutil.copy(text, folder)

def quiet(command, folder):
    """Runs a command, and shows its errors when it fails."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode: sys.exit(f"{command}: {result.stderr}")

def fresh(folder, name, tokenizer):
    """Makes a model with the layers of a fixture, the tokenizer of `tokenizer` and 256 positions, trained for one step."""
    shutil.copytree(tokenizer, folder)
    config = json.loads((fixtures / name / "config.json").read_text())
    for labels in ("id2label", "label2id"): config.pop(labels, None)
    config |= {"vocab_size": 512, "max_position_embeddings": 256}
    task = {"bert": "text-classification", "distilbert": "text-classification", "bart": "seq2seq"}.get(config["model_type"], "causal-lm")
    with tempfile.TemporaryDirectory() as made:
        (folder / "config.json").write_text(json.dumps(config))
        (pathlib.Path(made) / "rows.jsonl").write_text('{"text": "a b c d e f g h", "label": "good"}\n{"text": "b c d e f", "label": "bad"}\n' * 32)
        for command in (["train", "--task", task, "--model", folder, "--tokenizer", folder, "--data", "rows.jsonl", "--seq", "4", "--steps", "1", "--save", "run"], ["export", "run", "hf"]):
            quiet([repo / "target/debug/zero", *command], made)
        for file in ("config.json", "model.safetensors"): shutil.copy(pathlib.Path(made) / "hf" / file, folder)

def tensor(path, dtype, shape, values):
    header = json.dumps({"input_ids": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(values)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + values)

def files(folder, page):
    """Writes what the page's commands read."""
    text = (repo / "examples/data/tinyshakespeare.txt").read_text()[:200_000]
    (folder / "book.txt").write_text(text)
    lines = [line for line in text.split("\n") if len(line) > 20][:200]
    rows = lambda make: "".join(json.dumps(make(i, line)) + "\n" for i, line in enumerate(lines))
    (folder / "docs.jsonl").write_text(rows(lambda i, line: {"text": line, "content": line}))
    (folder / "reviews.jsonl").write_text(rows(lambda i, line: {"text": line[:20], "label": ["bad", "good"][i % 2]}))
    (folder / "reviews.csv").write_text("text,label\n" + "".join(f'"{re.sub(chr(34), "", line)[:20]}",{i % 2}\n' for i, line in enumerate(lines)))
    (folder / "rows.jsonl").write_text(rows(lambda i, line: {"text": line[:20], "label": line[:20]}))
    (folder / "prompts.txt").write_text("ROMEO:\nJULIET:\n")
    (folder / "folder").mkdir()
    if "folder has config.json" in page: model(folder / "config", "gpt2_tiny"); [shutil.move(file, folder / "folder") for file in list((folder / "config").glob("*"))]
    (folder / "texts").mkdir()
    (folder / "texts/docs.txt").write_text(text)
    shutil.copy(fixtures / "texts/gpt2_tiny/tokenizer.json", folder)
    (folder / "swap").mkdir()
    ids = range(64 * 32)
    tensor(folder / "rows.safetensors", "I32", [64, 32], struct.pack("<2048i", *ids))
    tensor(folder / "long.safetensors", "U16", [2048], struct.pack("<2048H", *ids))
    for name, fixture in {"Qwen2.5-0.5B": "qwen2_tiny", "flan-t5-small": "flan_t5_tiny"}.items():
        if name in page: model(folder / name, fixture)
    chat, tokenizers = repo / "examples/data/chat", fixtures / "tokenizers"
    for name, fixture, tokenizer in [
        ("Qwen2.5-0.5B-Instruct", "qwen2_tiny", chat), ("Qwen3-0.6B", "qwen3_tiny", chat), ("bart", "bart_tiny", tokenizers / "bart"),
        ("bert", "bert_tiny_classes", tokenizers / "bert"), ("distilbert-base-uncased", "distilbert_tiny_classes", tokenizers / "bert"),
    ]:
        if re.search(rf"(--weights|generate) {name}\s", page): fresh(folder / name, fixture, tokenizer)
    if "zero chat chat-model" in page:
        quiet([repo / "target/debug/examples/chat", "--steps", "1", "--batch", "4", "--save", folder / "chat-model"], repo)
    if "--weights hf" in page and "zero export run/checkpoints hf" not in page: model(folder / "hf", "gpt2_tiny")
    # A configuration is the page's last block of its kind before the command that names it.
    for name in set(re.findall(r"[\w.-]+\.(?:json|yaml)(?=\s)", " ".join(re.findall(r"```sh\n(.*?)```", page, flags=re.S)))):
        kind = "json" if name.endswith("json") else "yaml"
        blocks = [block for block in re.findall(rf"```{kind}\n(.*?)```", page, flags=re.S) if "zero_" in block]
        if f"--output {name}" in page or (folder / name).exists(): continue
        if blocks: (folder / name).write_text(blocks[0])
        elif name == "ds_config.json": (folder / name).write_text(json.dumps(DS_CONFIG))

def commands(page):
    for block in re.findall(r"```sh\n(.*?)```", page, flags=re.S):
        lines, i = block.splitlines(), 0
        while i < len(lines):
            command = lines[i]
            if "<<'END'" in command:
                while lines[i] != "END": i += 1; command += "\n" + lines[i]
            while command.endswith("\\"): i += 1; command += "\n" + lines[i]
            i += 1
            if command.strip(): yield command

failed = 0
names = sys.argv[1:] or ["README.md", *sorted(path.name for path in (repo / "docs/book/src").glob("*.md"))]
for name in names:
    page = (repo / name if name == "README.md" else repo / "docs/book/src" / name).read_text()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        files(folder, page)
        for path in ("bench", "tests", "examples", "docs", "zero-settings"): (folder / path).exists() or (folder / path).symlink_to(repo / path)
        (folder / "target/release").mkdir(parents=True)
        (folder / "target/release/examples").symlink_to(repo / "target/debug/examples")
        for command in commands(page):
            reason = next((reason for pattern, reason in skipped if re.search(pattern, command)), None)
            if reason:
                print(f"{name}: skipped, {reason}: {command.splitlines()[0]}")
                continue
            run = command
            for pattern, small in smaller: run = re.sub(pattern, small, run)
            begin = time.time()
            path = f"{repo}/target/debug:{os.environ['PATH']}"
            result = subprocess.run(["bash", "-c", run], cwd=folder, env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")}, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
            print(f"{name}: {'ok' if result.returncode == 0 else 'FAILED'} {time.time() - begin:.1f} s: {run.splitlines()[0]}", flush=True)
            if result.returncode:
                failed += 1
                print("\n".join(result.stderr.splitlines()[-6:]))
print(f"{failed} failed" if failed else "all ran")
sys.exit(1 if failed else 0)
