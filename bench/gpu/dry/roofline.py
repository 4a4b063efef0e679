"""Bounds the time of a step of GPT-2 or Qwen2 on an H100: bytes and operations of each kind of kernel by formula, launches as the dry
driver has counted them. steps.py prints it for every case.

A time is the larger of operations and bytes at the device's peaks, and what lies between two kernels. It is a bound, not a forecast.
The second column takes the matrix units at 0.62 of their peak, which attention's instruction (`mma.sync`) reaches on an H100 with everything in
registers and the products' kernel on an H200 (0.24 to 0.75), and 0.9 of the memory's peak.
"""

import re
from dataclasses import dataclass

PEAK_FLOPS, PEAK_BYTES = 989.4e12, 3.35e12
MATRICES, MEMORY = 0.62, 0.9
# Between two kernels of one stream that are queued.
GAP_S = 1e-6


@dataclass
class Model:
    layers: int
    d: int
    heads: int
    t: int
    rows: int
    # Only for Qwen2: the number of key heads, and the width of the feed-forward layer.
    kv_heads: int = 0
    between: int = 0
    vocabulary: int = 50257

    def __post_init__(self):
        self.is_gated = self.between > 0
        self.kv = self.d // self.heads * (self.kv_heads or self.heads)
        self.between = self.between or 4 * self.d
        self.products = [(self.d, self.d + 2 * self.kv), (self.d, self.d), (self.d, (1 + self.is_gated) * self.between), (self.between, self.d)]
        weights = sum(a * b for a, b in self.products)
        vectors = 2 * self.d + self.d + 2 * self.kv if self.is_gated else 13 * self.d
        ends = (self.vocabulary + 1) * self.d if self.is_gated else (self.vocabulary + self.t + 2) * self.d
        self.parameters = self.layers * (weights + vectors) + ends

    def config(self, dropout):
        """Hugging Face's config.json."""
        if self.is_gated:
            return {"model_type": "qwen2", "num_hidden_layers": self.layers, "hidden_size": self.d, "num_attention_heads": self.heads,
                    "num_key_value_heads": self.kv_heads, "intermediate_size": self.between, "max_position_embeddings": self.t,
                    "vocab_size": self.vocabulary, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
        config = {"model_type": "gpt2", "n_layer": self.layers, "n_embd": self.d, "n_head": self.heads, "n_positions": self.t,
                  "vocab_size": self.vocabulary}
        return config | dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], dropout)


def kinds(model):
    """Name, pattern of its kernels, operations of the matrix units, bytes of memory: of a step in bf16 with AdamW and fp32 masters."""
    layers, d, v, n, between = model.layers, model.d, model.vocabulary, model.rows * model.t, model.between
    x, y = 2 * n * d, 2 * n * model.kv
    weights = sum(a * b for a, b in model.products)
    # Of each product the three matrices, which its two gradients have too.
    linear = sum(3 * 2 * (n * a + a * b + n * b) for a, b in model.products)
    # A causal product of scores or values; each has half of its operations.
    half = n * model.t * d
    # Chunks of at most 1 GiB of logits, as on a device of more than 40 GiB; each adds a gradient of the weight to that of those before.
    chunks = -(-2 * n * v // 2**30)
    # Logits are written, read twice and overwritten by the loss, and read by two products, whose fp32 results are put in their places.
    logits = 2 * n * v
    head = 3 * logits + 3 * (x + 2 * v * d) + 4 * (n * d + chunks * v * d)
    if model.is_gated:
        apart = [
            ("swiglu, both ways", r"swiglu_kernel", 0, layers * 16 * n * between),
            ("rotary embedding, both ways", r"rotary_kernel", 0, layers * 4 * (x + y)),
            ("gradients of biases", r"column_sums", 0, layers * (x + 2 * y)),
        ]
    else:
        apart = [
            ("gelu", r"gelu_kernel", 0, layers * 4 * n * between),
            ("gelu: gradient", r"gelu_gradients", 0, layers * 6 * n * between),
            ("gradients of biases", r"column_sums", 0, layers * 5 * x),
        ]
    return [
        ("linear layers, 3 products each", r"matmul|hopper_product", layers * 6 * n * weights + 6 * n * v * d, layers * (linear + 2 * x) + head),
        ("attention", r"forward_kernel", layers * 2 * half, layers * 2 * (x + y)),
        ("attention: keys and values", r"keys_kernel", layers * 4 * half, layers * (2 * x + 4 * y)),
        ("attention: queries", r"queries_kernel", layers * 3 * half, layers * (3 * x + 2 * y)),
        ("attention: out * gradient", r"along_kernel", 0, layers * 2 * x),
        ("norms", r"layer_norm_kernel", 0, (2 * layers + 1) * 2 * x),
        ("norms: gradient", r"layer_norm_gradients", 0, (2 * layers + 1) * 3 * x),
        *apart,
        ("embeddings' sum", r"elemwise_fuse", 0, 0 if model.is_gated else 3 * x),
        ("sums of gradients (Burn's)", r"kernel_binop|copy_kernel", 0, (2 * layers + 1) * 3 * x),
        ("loss and gradient of logits", r"rows_kernel", 0, 3 * logits),
        ("gradients of the head in place", r"place_kernel", 0, 8 * n * d + (12 * chunks - 4) * v * d),
        ("embedding, both ways", r"embedding|select", 0, 4 * x + 4 * v * d),
        ("norm of gradients", r"squares_kernel|total_kernel", 0, 2 * model.parameters),
        ("update", r"update_kernel", 0, 28 * model.parameters),
        ("others", r"", 0, 0),
    ]


def table(model, counts):
    """Lines of a case's table; `counts`: launches of a step and kernel's name."""
    left = list(counts)
    sums = [0.0, 0.0, 0.0]
    lines = [f"  {'on paper, of one H100':32} launches     TFLOP        GB   ms at peak   ms at shares"]
    for name, pattern, flops, moved in kinds(model):
        mine = [count for count, kernel in left if re.match(pattern, kernel)]
        left = [(count, kernel) for count, kernel in left if not re.match(pattern, kernel)]
        gaps = GAP_S * sum(mine)
        peak = max(flops / PEAK_FLOPS, moved / PEAK_BYTES) + gaps
        real = max(flops / PEAK_FLOPS / MATRICES, moved / PEAK_BYTES / MEMORY) + gaps
        sums = [sums[0] + sum(mine), sums[1] + peak, sums[2] + real]
        lines.append(f"  {name:32} {sum(mine):8,.0f} {flops / 1e12:9.2f} {moved / 1e9:9.2f} {peak * 1e3:12.2f} {real * 1e3:16.2f}")
    tokens = model.rows * model.t
    flops = tokens * (6 * model.parameters + 12 * model.layers * model.t * model.d)
    mfu = [flops / seconds / PEAK_FLOPS for seconds in sums[1:]]
    lines.append(f"  {'sum':32} {sums[0]:8,.0f} {'':9} {'':9} {sums[1] * 1e3:12.2f} {sums[2] * 1e3:16.2f}")
    lines.append(f"  {'MFU of (6 N + 12 L T d) a token':32} {'':8} {'':9} {'':9} {mfu[0]:12.1%} {mfu[1]:16.1%}")
    lines.append(f"  {'tokens/s':32} {'':8} {'':9} {'':9} {tokens / sums[1]:12,.0f} {tokens / sums[2]:16,.0f}")
    return lines
