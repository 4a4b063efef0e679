#!/usr/bin/env python3
"""Checks README.md and the book: links and anchors, includes, line counts, and that every --option is one of a program's --help
(built before: cargo test --workspace)."""
import pathlib, re, subprocess, sys

here = pathlib.Path(__file__).resolve().parent
src, repo = here / "src", here.parent.parent
zero, faults = repo / "target/debug/zero", []
commands = "config check estimate tokenizer train tune generate chat launch inspect flight export report completions".split()
helps = [[zero, "--help"], *([zero, command, "--help"] for command in commands), [repo / "target/debug/examples/own_model", "--help"], [repo / "target/debug/examples/gpt2_1_5b", "--help"], [repo / "target/debug/examples/peft_seq2seq", "--help"], [repo / "target/debug/examples/tensor_parallel", "--help"]]
known = {option for line in helps for option in re.findall(r"--[a-z0-9][\w-]*", subprocess.run(line, capture_output=True, text=True).stdout)}
# Of other programs, with the place that has them.
others = {
    "cargo": "--release --example --workspace --bin --features --test --nocapture --ignored --manifest-path".split(),
    "torchrun": "--nproc-per-node --no-python".split(),
    "srun": "--mpi --output".split(),
    "tensorboard": ["--logdir"],
    "transformers (a row that says what takes its place)": "--num_train_epochs --lr_scheduler_type --resume_from_checkpoint --save_total_limit --load_best_model_at_end --logging_steps --report_to".split(),
}
for script in ["bench/peer.sh", "bench/peer/run.py", "bench/gpu/parity.py", "bench/gpu/compare.py", "bench/gpu/compare.sh", "bench/gpu/README.md", "bench/generate.py", "bench/across.py", "bench/partial_offload.py"]:
    text = (repo / script).read_text()
    others[script] = [option for option in "--rounds --zero --steps --only --ours --backend --model --dtypes --batch --variants --limit-mib --new --delay --rates".split() if option in text]
foreign = {option: where for where, options in others.items() for option in options}

def anchors(path):
    slug = lambda title: re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).strip().lower()).replace(" ", "-")
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    return {slug(title) for title in re.findall(r"^#+ (.*)$", text, flags=re.M)}

pages = [repo / "README.md", *sorted(page for page in src.glob("*.md") if not page.name.startswith("keys-"))]
for page in pages:
    text, name = page.read_text(), page.name
    for number, line in enumerate(text.splitlines(), 1):
        for option in re.findall(r"(?<![\w-])--[a-z0-9][\w-]*", line):
            if option not in known and option not in foreign:
                faults.append(f"{name}:{number}: {option} is in no --help")
            elif option not in known:
                print(f"  {name}:{number}: {option} of {foreign[option]}")
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if target.startswith("http"): continue
        file, _, anchor = target.partition("#")
        if name == "README.md":
            path = src / file.removeprefix("docs/book/src/") if file.startswith("docs/book/src/") else repo / file
        else:
            path = src / file if file else page
        if not path.exists(): faults.append(f"{name}: {target} does not exist")
        elif anchor and anchor not in anchors(path): faults.append(f"{name}: {target}: no such heading")
    for target in re.findall(r"\{\{#include ([^}]+)\}\}", text):
        if target in ("keys-deepspeed.md", "keys-accelerate.md"): continue
        if not (page.parent / target).exists(): faults.append(f"{name}: include {target} does not exist")
    fences = re.findall(r"^```(.*)$", text, flags=re.M)
    if len(fences) % 2 or any(not language for language in fences[::2]): faults.append(f"{name}: a fence without a language, or not closed")
    # Lines of Rust code that begin with `# ` are hidden in the book.
    shown = re.sub(r"^```rust.*?^```$", lambda code: re.sub(r"^# .*\n", "", code.group(), flags=re.M), text, flags=re.M | re.S)
    lines = len(shown.splitlines())
    least, most = (0, 150) if name in ("README.md", "SUMMARY.md") else (60, 160)
    if not least <= lines <= most: faults.append(f"{name}: {lines} lines")
    print(f"{lines:4} {name}")
listed = set(re.findall(r"\]\((.*?)\)", (src / "SUMMARY.md").read_text()))
faults += [f"{page.name} is not in SUMMARY.md" for page in src.glob("*.md") if page.name not in listed | {"SUMMARY.md"} and not page.name.startswith("keys-")]
# Options of a command line are those of its own command; rows of a table have its columns.
by_command = {command: set(re.findall(r"--[a-z0-9][\w-]*|(?<= )-[a-z](?=,)", subprocess.run([zero, command, "--help"], capture_output=True, text=True).stdout)) for command in commands}
for page in pages:
    text = page.read_text()
    for line in re.findall(r"(?:^|`)(?:[A-Z_]+=\S+ )*(?:cargo run --release --bin )?(?:zero|own_model|target/release/examples/\w+) .*?(?:`|$)", text, flags=re.M):
        line = line.strip("`").split("  #")[0]
        for part in line.split(" -- "):
            words = part.split()
            command = next((word for word in words if word in commands), "train" if "examples/" in part else None)
            options = [re.split("=", word)[0] for word in words if re.match(r"--[a-z]", word)]
            for option in options:
                if command and option not in by_command[command]: faults.append(f"{page.name}: {option} is none of zero {command}: {line}")
    columns = None
    for number, line in enumerate(re.sub(r"```.*?```", lambda code: "\n" * code.group().count("\n"), text, flags=re.S).splitlines(), 1):
        count = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else None
        if count and columns and count != columns: faults.append(f"{page.name}:{number}: {count - 1} columns, the table has {columns - 1}")
        columns = count and (columns or count)
# Files of the repository that are named must be there.
for page in pages:
    for name in re.findall(r"(?<![\w/.-])((?:bench|deploy|docs|examples|tests|zero-\w+)/[\w./-]+\.(?:rs|sh|py|md|yaml|sbatch|txt|bin|toml))", page.read_text()):
        if not name.startswith("docs/book") and not (repo / name).exists(): faults.append(f"{page.name}: {name} is not in the repository")
print(*faults, f"{len(faults)} fault(s)", sep="\n")
sys.exit(bool(faults))
