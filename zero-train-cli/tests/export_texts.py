"""Texts of exports by transformers and by `zero generate`, which must be equal: `python zero-train-cli/tests/export_texts.py target/debug/zero`.

Trains each tiny model of tests/fixtures/texts for a few steps, exports it, and has both generate with what the export says: its tokenizer, its ends, its
generation_config.json. Needs torch and transformers.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

ZERO = Path(sys.argv[1]).resolve()
FIXTURES = Path(__file__).resolve().parents[2] / "tests/fixtures"
PROMPTS = ["a rose is", "Hi", "to be, or not", "b  c", "10 9 8", "rose"]

with tempfile.TemporaryDirectory() as folder:
    here = Path(folder)
    (here / "book.txt").write_text("a rose is a rose is a rose, to be or not to be! " * 40)
    (here / "rows.jsonl").write_text("".join(json.dumps({"text": text, "label": "a rose"}) + "\n" for text in ["a rose is", "to be", "or not"] * 8))

    def zero(*args):
        return subprocess.run([ZERO, *args], cwd=here, check=True, capture_output=True, text=True).stdout

    compared = 0
    for path in sorted((FIXTURES / "texts").iterdir()):
        name = path.name
        makes_others = name in ("bart_tiny", "t5_tiny", "flan_t5_tiny")
        (here / name).mkdir()
        for source in [*path.iterdir(), *(FIXTURES / name).iterdir()]:
            if source.is_file() and source.name not in ("made.json", "settings.json"):
                shutil.copy(source, here / name)
        data = "rows.jsonl" if makes_others else "book.txt"
        zero("train", "--weights", name, "--data", data, "--seq", "16", "--steps", "8", "--lr", "1e-2", "--ranks", "2", "--save", f"{name}-saves")
        zero("export", f"{name}-saves", f"{name}-out", "--dtype", "fp32")
        model = (AutoModelForSeq2SeqLM if makes_others else AutoModelForCausalLM).from_pretrained(here / f"{name}-out")
        # Without config.json, whose family has a class of tokenizers of its own.
        (here / "tokenizer").mkdir()
        for file in ["tokenizer.json", "tokenizer_config.json", "spiece.model"]:
            if (here / f"{name}-out" / file).exists():
                shutil.copy(here / f"{name}-out" / file, here / "tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(here / "tokenizer")
        shutil.rmtree(here / "tokenizer")
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        args = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        lines = zero("generate", f"{name}-out", "--json", "--max-new-tokens", "14", *args).splitlines()
        for prompt, line in zip(PROMPTS, map(json.loads, lines), strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            with torch.no_grad():
                made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14)[0].tolist()
            made = made[1 if makes_others else ids.shape[1]:]
            made = made[:-1] if made and made[-1] in ends else made
            assert line["tokens"] == made, (name, prompt, line["tokens"], made)
            before = [] if makes_others else ids[0].tolist()
            text = tokenizer.decode(before + made, skip_special_tokens=True)
            given = tokenizer.decode(before, skip_special_tokens=True)
            assert given + line["text"] == text, (name, prompt, line["text"], text)
            compared += 1
    print(f"{compared} texts of exports are those of transformers")
