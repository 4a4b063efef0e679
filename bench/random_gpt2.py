"""Creates a GPT-2 with random weights and no dropout as a Hugging Face folder, for benchmarks without real weights."""
import json, struct

SIZES = {"mini": (6, 384, 6), "gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
POSITIONS, VOCABULARY = 1024, 50257


def tensors(layers, width):
    """Names and shapes, in the order of the file."""
    yield from [("wte.weight", (VOCABULARY, width)), ("wpe.weight", (POSITIONS, width))]
    for layer in [f"h.{n}." for n in range(layers)] + [""]:
        for norm in ("ln_1", "ln_2") if layer else ("ln_f",):
            yield from [(f"{layer}{norm}.weight", (width,)), (f"{layer}{norm}.bias", (width,))]
        sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)} if layer else {}
        for name, (rows, columns) in sizes.items():
            yield from [(f"{layer}{name}.weight", (rows * width, columns * width)), (f"{layer}{name}.bias", (columns * width,))]


def weights(folder):
    """Makes the model of `folder`'s name there, once: matrices from N(0, 0.02), norms 1, biases 0."""
    import numpy
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    layers, width, heads = SIZES[folder.name]
    header, at, random = {"__metadata__": {"format": "pt"}}, 0, numpy.random.default_rng(0)
    for name, shape in tensors(layers, width):
        end = at + 4 * int(numpy.prod(shape))
        header[f"transformer.{name}"], at = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors(layers, width):
            flat = numpy.full(shape, 0.0 if name.endswith("bias") else 1.0, "<f4")
            out.write((flat if len(shape) == 1 else random.standard_normal(shape, dtype="f4") * numpy.float32(0.02)).tobytes())
    config = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], n_layer=layers, n_embd=width, n_head=heads, n_positions=POSITIONS,
                  n_ctx=POSITIONS, vocab_size=VOCABULARY, activation_function="gelu_new", layer_norm_epsilon=1e-5, initializer_range=0.02,
                  resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=50256, eos_token_id=50256, tie_word_embeddings=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
