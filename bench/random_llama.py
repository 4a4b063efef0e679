"""Creates a Qwen2.5 or a Llama 3 with random bfloat16 weights as a Hugging Face folder with one shard per layer, without holding the model in memory.

With `part` below 1, that fraction of each matrix is random, and the rest is a hole in the file, which reads as zeros and takes no disk space.
"""
import json, struct
from pathlib import Path

import numpy

# Vocabulary, width, feed-forward width, layers, heads, heads of keys.
SIZES = {"qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2), "qwen2.5-7b": (152064, 3584, 18944, 28, 28, 4),
         "qwen2.5-32b": (152064, 5120, 27648, 64, 40, 8), "llama-3-8b": (128256, 4096, 14336, 32, 32, 8)}


def tensors(name):
    """Shards, each a list of names and shapes."""
    v, d, f, layers, heads, kv = SIZES[name]
    k = d // heads * kv
    yield [("model.embed_tokens.weight", (v, d)), ("model.norm.weight", (d,)), ("lm_head.weight", (v, d))]
    for n in range(layers):
        own = [("input_layernorm.weight", (d,)), ("post_attention_layernorm.weight", (d,)), ("self_attn.o_proj.weight", (d, d)),
               ("mlp.gate_proj.weight", (f, d)), ("mlp.up_proj.weight", (f, d)), ("mlp.down_proj.weight", (d, f))]
        for part, width in (("q", d), ("k", k), ("v", k)):
            own += [(f"self_attn.{part}_proj.weight", (width, d))]
            own += [] if name.startswith("llama") else [(f"self_attn.{part}_proj.bias", (width,))]
        yield [(f"model.layers.{n}.{tensor}", shape) for tensor, shape in own]


def weights(folder, part=1.0):
    """Makes the model of `folder`'s name there, once."""
    v, d, f, layers, heads, kv = SIZES[folder.name]
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    bf16 = lambda values: (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    random = bf16(numpy.random.default_rng(0).standard_normal(8 << 20, dtype="f4") * 0.02)
    shards, where, total = list(tensors(folder.name)), {}, 0
    for number, shard in enumerate(shards):
        file, at, header = f"model-{number + 1:05}-of-{len(shards):05}.safetensors", 0, {}
        for name, shape in shard:
            size = 2 * int(numpy.prod(shape))
            header[name], where[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}, file
            at += size
        total += at
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            begin = out.tell()
            for turn, (name, shape) in enumerate(shard):
                out.seek(begin + header[name]["data_offsets"][0])
                count = int(numpy.prod(shape))
                if len(shape) == 1:
                    out.write(bf16((numpy.zeros if name.endswith("bias") else numpy.ones)(count, "f4")).tobytes())
                    continue
                left, shift = int(count * part), (number * 977 + turn * 7919) % len(random)
                while left > 0:
                    piece = random[shift:shift + left]
                    out.write(piece.tobytes())
                    left, shift = left - len(piece), 0
            out.truncate(begin + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    is_llama = folder.name.startswith("llama")
    config = dict(architectures=["LlamaForCausalLM" if is_llama else "Qwen2ForCausalLM"], model_type="llama" if is_llama else "qwen2", vocab_size=v, hidden_size=d, intermediate_size=f, num_hidden_layers=layers,
                  num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=5e5 if is_llama else 1e6,
                  tie_word_embeddings=False, torch_dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
