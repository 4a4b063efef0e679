"""What a step of GPT-2 takes of an H100 at best, on paper: bytes and operations of each kind of kernel by formula, launches as the dry
driver has counted them. steps.py prints it for every case.

A time is the larger of operations and bytes at the device's peaks, and what lies between two kernels. It is a bound, not a forecast.
The second column takes the matrix units at 0.62 of their peak, which attention's instruction (`mma.sync`) reaches on an H100 with everything in
registers and the products' kernel on an H200 (0.24 to 0.75), and 0.9 of the memory's peak.
"""

import re

PEAK_FLOPS, PEAK_BYTES = 989.4e12, 3.35e12
MATRICES, MEMORY = 0.62, 0.9
# Between two kernels of one stream that are queued.
GAP_S = 1e-6
VOCABULARY = 50257


def kinds(layers, d, heads, t, rows):
    """Name, pattern of its kernels, operations of the matrix units, bytes of memory: of a step in bf16 with AdamW and fp32 masters."""
    n, v = rows * t, VOCABULARY
    x = 2 * n * d
    parameters = layers * (12 * d * d + 13 * d) + (v + t + 2) * d
    # Of each product the three matrices, which its two gradients have too.
    products = [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)]
    linear = sum(3 * 2 * (n * a + a * b + n * b) for a, b in products)
    # A causal product of scores or values; each has half of its operations.
    half = n * t * d
    # Chunks of at most 1 GiB of logits, as on a device of more than 40 GiB; each adds a gradient of the weight to that of those before.
    chunks = -(-2 * n * v // 2**30)
    # Logits are written, read twice and overwritten by the loss, and read by two products, whose fp32 results are put in their places.
    logits = 2 * n * v
    head = 3 * logits + 3 * (x + 2 * v * d) + 4 * (n * d + chunks * v * d)
    return [
        ("linear layers, 3 products each", r"matmul|hopper_product", layers * 72 * n * d * d + 6 * n * v * d, layers * (linear + 2 * x) + head),
        ("attention", r"forward_kernel", layers * 2 * half, layers * 4 * x),
        ("attention: keys and values", r"keys_kernel", layers * 4 * half, layers * 6 * x),
        ("attention: queries", r"queries_kernel", layers * 3 * half, layers * 5 * x),
        ("attention: out * gradient", r"along_kernel", 0, layers * 2 * x),
        ("layer norm", r"layer_norm_kernel", 0, (2 * layers + 1) * 2 * x),
        ("layer norm: gradient", r"layer_norm_gradients", 0, (2 * layers + 1) * 3 * x),
        ("gelu", r"gelu_kernel", 0, layers * 8 * x),
        ("gelu: gradient", r"gelu_gradients", 0, layers * 12 * x),
        ("embeddings' sum", r"elemwise_fuse", 0, 3 * x),
        ("sums of gradients (Burn's)", r"kernel_binop|copy_kernel", 0, (2 * layers + 1) * 3 * x),
        ("gradients of biases", r"column_sums", 0, layers * 5 * x),
        ("loss and gradient of logits", r"rows_kernel", 0, 3 * logits),
        ("gradients of the head in place", r"place_kernel", 0, 8 * n * d + (12 * chunks - 4) * v * d),
        ("embedding, both ways", r"embedding|select", 0, 4 * x + 4 * v * d),
        ("norm", r"squares_kernel|total_kernel", 0, 2 * parameters),
        ("update", r"update_kernel", 0, 28 * parameters),
        ("others", r"", 0, 0),
    ]


def table(shape, counts):
    """Lines of a case's table; `counts`: launches of a step and kernel's name."""
    layers, d, _, t, rows = shape
    left = list(counts)
    sums = [0.0, 0.0, 0.0]
    lines = [f"  {'on paper, of one H100':32} launches     TFLOP        GB   ms at peak   ms at shares"]
    for name, pattern, flops, moved in kinds(*shape):
        mine = [count for count, kernel in left if re.match(pattern, kernel)]
        left = [(count, kernel) for count, kernel in left if not re.match(pattern, kernel)]
        gaps = GAP_S * sum(mine)
        peak = max(flops / PEAK_FLOPS, moved / PEAK_BYTES) + gaps
        real = max(flops / PEAK_FLOPS / MATRICES, moved / PEAK_BYTES / MEMORY) + gaps
        sums = [sums[0] + sum(mine), sums[1] + peak, sums[2] + real]
        lines.append(f"  {name:32} {sum(mine):8,.0f} {flops / 1e12:9.2f} {moved / 1e9:9.2f} {peak * 1e3:12.2f} {real * 1e3:16.2f}")
    parameters = layers * (12 * d * d + 13 * d) + (VOCABULARY + t + 2) * d
    model = rows * t * (6 * parameters + 12 * layers * t * d)
    mfu = [model / seconds / PEAK_FLOPS for seconds in sums[1:]]
    lines.append(f"  {'sum':32} {sums[0]:8,.0f} {'':9} {'':9} {sums[1] * 1e3:12.2f} {sums[2] * 1e3:16.2f}")
    lines.append(f"  {'MFU of (6 N + 12 L T d) a token':32} {'':8} {'':9} {'':9} {mfu[0]:12.1%} {mfu[1]:16.1%}")
    return lines
