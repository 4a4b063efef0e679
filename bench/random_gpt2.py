"""Creates a GPT-2 with random weights and no dropout as a Hugging Face folder, for benchmarks without real weights."""
import os, subprocess

SIZES = {"mini": (6, 384, 6), "gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
MAKE = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
layers, width, heads = map(int, sys.argv[2:5])
torch.manual_seed(0)
off = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, **off)).save_pretrained(sys.argv[1])
"""


def weights(python, folder):
    """Makes the model of `folder`'s name there, once, with a Python that has transformers."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [python, "-c", MAKE, folder, *map(str, SIZES[folder.name])]
        subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return folder
