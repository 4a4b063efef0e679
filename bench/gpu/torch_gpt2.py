#!/usr/bin/env python3
"""Trains GPT-2 with PyTorch on one device, on the same rows as ours, and prints one JSON line.

    bench/gpu/torch_gpt2.py --model gpt2-xl --data rows.safetensors --batch 8 --steps 20 [--master] [--compile model]

The model is transformers' GPT2LMHeadModel with SDPA attention if transformers is installed, else the same architecture in
plain PyTorch (see --impl); in both cases its number of parameters must equal ours. No dropout, as in our presets; no activation
checkpointing; fused AdamW with our defaults; next-token loss over all positions but the last of each row.

"bf16" means one of:
(a) by default, `torch.autocast` in bf16 over fp32 weights (the master weights): PyTorch's usual way;
(b) with --master, a bf16 model: gradients are copied to fp32 master weights, AdamW updates these, and they are copied back.
With --dtype fp32 neither applies; --tf32 then lets tensor cores round products to tf32.

Speed is that of the median step after the warm-up. On a GPU a step ends at an event on its stream, and nothing waits for the
GPU between steps, not even to read losses: the fastest way to run PyTorch. MFU counts 6 N + 12 L T d operations per token.
"""

import argparse
import contextlib
import json
import math
import resource
import statistics
import sys
import time

from common import PEAK_TFLOPS, PRESETS, VOCABULARY, BadInput, at_least, flops_per_token, mfu, parameters, read_rows, run

IGNORED = -100


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="gpt2-xl")
    parser.add_argument("--data", required=True, metavar="FILE", help="safetensors with input_ids [rows, T] (make_rows.py)")
    parser.add_argument("--device", default="cuda", metavar="cuda|cpu", help="default: cuda")
    parser.add_argument("--batch", type=at_least(1), default=8, help="rows per micro-batch (default: 8)")
    parser.add_argument("--accumulation", type=at_least(1), default=1, help="micro-batches per step (default: 1)")
    parser.add_argument("--seq", type=at_least(2), help="tokens per row; must match the file")
    parser.add_argument("--steps", type=at_least(2), default=20, help="default: 20")
    parser.add_argument("--warmup", type=at_least(1), default=5, help="exclude this many first steps (default: 5)")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--master", action="store_true", help="(b): a bf16 model with fp32 master weights")
    parser.add_argument("--tf32", action="store_true", help="with --dtype fp32: products in tf32")
    parser.add_argument("--compile", choices=["none", "model", "blocks"], default="none",
                        help="torch.compile of the whole model, or of each block (compiles faster)")
    parser.add_argument("--impl", choices=["auto", "transformers", "plain"], default="auto")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-tflops", type=float, default=PEAK_TFLOPS, help=f"peak of the GPU, for MFU (default: {PEAK_TFLOPS})")
    args = parser.parse_args()
    if args.warmup >= args.steps:
        raise BadInput(f"--warmup {args.warmup} leaves none of {args.steps} steps: use fewer, or more --steps")
    if args.master and args.dtype != "bf16":
        raise BadInput("--master keeps fp32 master weights of a bf16 model: it requires --dtype bf16")
    if args.tf32 and args.dtype != "fp32":
        raise BadInput("--tf32 requires --dtype fp32")
    return args


# --- the model -------------------------------------------------------------------------------------------------------

def transformers_model(name):
    """(model, its blocks, function of ids that gives the loss)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, positions = PRESETS[name]
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=positions, n_embd=width, n_layer=layers, n_head=heads,
                        activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                        tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
    model = GPT2LMHeadModel(config)
    return model, model.transformer.h, lambda call, ids: call(input_ids=ids, labels=ids, use_cache=False).loss


def plain_model(name):
    """As `transformers_model`, of PyTorch alone: norms before, tied head, tanh GELU, causal SDPA."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    layers, width, heads, positions = PRESETS[name]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.c_attn, self.attn_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x_btd):
            b, t, d = x_btd.shape
            packed = self.c_attn(self.ln_1(x_btd)).view(b, t, 3, heads, d // heads)
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
            x_btd = x_btd + self.attn_proj(mixed)
            return x_btd + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x_btd)), approximate="tanh"))

    class Gpt2(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
            self.h = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(width)
            for part, weight in self.named_parameters():
                if part.endswith("bias"):
                    nn.init.zeros_(weight)
                elif weight.dim() == 2:
                    nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * layers) if "_proj" in part else 1))

        def forward(self, ids_bt):
            x_btd = self.wte(ids_bt) + self.wpe(torch.arange(ids_bt.shape[1], device=ids_bt.device))
            for block in self.h:
                x_btd = block(x_btd)
            logits_btv = F.linear(self.ln_f(x_btd), self.wte.weight)
            next_bt = F.pad(ids_bt[:, 1:], (0, 1), value=IGNORED)
            return F.cross_entropy(logits_btv.float().flatten(0, 1), next_bt.flatten(), ignore_index=IGNORED)

    model = Gpt2()
    return model, model.h, lambda call, ids: call(ids)


def build(args, device):
    """(model, blocks, loss function, name of the implementation), in fp32 on `device`."""
    import torch

    impl = args.impl
    if impl == "auto":
        try:
            from transformers import GPT2LMHeadModel  # noqa: F401
            impl = "transformers"
        except ImportError as error:
            print(f"warning: transformers cannot be used ({error}): using the plain model", file=sys.stderr)
            impl = "plain"
    torch.manual_seed(args.seed)
    try:
        with torch.device(device):
            model, blocks, loss_of = (transformers_model if impl == "transformers" else plain_model)(args.model)
    except ImportError as error:
        raise BadInput(f"transformers cannot be used ({error}): use --impl plain") from None
    model = model.to(device=device, dtype=torch.float32).train()
    count, expected = sum(weight.numel() for weight in model.parameters()), parameters(args.model)
    assert count == expected, f"{impl} has {count} parameters, ours has {expected}: not the same model"
    dropped = [part for part, module in model.named_modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
    assert not dropped, f"dropout is on in {dropped[:3]}, ours has none"
    return model, blocks, loss_of, impl


class Update:
    """Fused AdamW, of the model's weights or of fp32 masters beside them."""

    def __init__(self, model, args):
        import torch

        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.masters = None
        if args.master:
            self.masters = [weight.detach().clone() for weight in self.weights]
            model.to(torch.bfloat16)
            self.weights = [weight for weight in model.parameters() if weight.requires_grad]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        self.optimizer = torch.optim.AdamW(self.masters or self.weights, lr=args.lr, betas=(0.9, 0.999), eps=1e-8,
                                           weight_decay=0.01, fused=True)

    def step(self):
        import torch

        if self.masters is None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            return
        with torch.no_grad():
            torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
            self.optimizer.step()
            torch._foreach_copy_(self.weights, self.masters)
        for weight in self.weights:
            weight.grad = None


# --- training --------------------------------------------------------------------------------------------------------

class Clock:
    """Ends of steps: events on the GPU's stream, or the host's clock."""

    def __init__(self, device):
        import torch

        self.cuda, self.ends = (torch.cuda if device.type == "cuda" else None), []

    def mark(self):
        if self.cuda:
            event = self.cuda.Event(enable_timing=True)
            event.record()
            self.ends.append(event)
        else:
            self.ends.append(time.perf_counter())

    def step_ms(self):
        if self.cuda:
            self.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.ends, self.ends[1:])]
        return [(b - a) * 1e3 for a, b in zip(self.ends, self.ends[1:])]


def train(args, device, rows):
    """The line to print."""
    import torch

    ids, count, seq = rows
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    begin = time.perf_counter()
    model, blocks, loss_of, impl = build(args, device)
    update = Update(model, args)
    call = model
    if args.compile == "model":
        call = torch.compile(model)
    elif args.compile == "blocks":
        for block in blocks:
            block.compile()
    cast = (lambda: torch.autocast(device.type, torch.bfloat16)) if args.dtype == "bf16" and not args.master \
        else contextlib.nullcontext
    # All rows are on the device before the first step, so that no step waits for a copy.
    table = torch.tensor(ids, dtype=torch.int64).view(count, seq).to(device)
    built_s = time.perf_counter() - begin

    clock, losses = Clock(device), []
    clock.mark()
    for step in range(args.steps):
        sums = []
        for micro in range(args.accumulation):
            first = (step * args.accumulation + micro) * args.batch
            batch = table[torch.arange(first, first + args.batch, device=device) % count]
            with cast():
                loss = loss_of(call, batch)
            (loss / args.accumulation if args.accumulation > 1 else loss).backward()
            sums.append(loss.detach().float())
        update.step()
        losses.append(torch.stack(sums).mean())
        clock.mark()
    step_ms = clock.step_ms()

    timed = step_ms[args.warmup :]
    median = statistics.median(timed)
    tokens = args.batch * args.accumulation * seq
    speed = tokens / median * 1e3
    cuda = device.type == "cuda"
    taken = None
    if cuda:
        free, total = torch.cuda.mem_get_info()
        taken = total - free  # The allocator gives nothing back, so the end is the peak.
    return {
        "who": "torch", "model": args.model, "impl": impl, "parameters": parameters(args.model), "device": device.type,
        "device_name": torch.cuda.get_device_name() if cuda else "cpu", "dtype": args.dtype,
        "precision": "bf16 model, fp32 masters" if args.master else "autocast bf16, fp32 weights" if args.dtype == "bf16"
        else "tf32" if args.tf32 else "fp32",
        "compile": args.compile, "dropout": 0.0, "checkpointing": False, "optimizer": "AdamW, fused", "lr": args.lr,
        "batch": args.batch, "accumulation": args.accumulation, "seq": seq, "tokens": tokens, "steps": args.steps,
        "warmup": args.warmup, "tokens_per_second": speed, "step_ms_median": median, "step_ms": step_ms,
        "losses": [float(loss) for loss in losses],
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "device_bytes_taken": taken,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "flops_per_token": flops_per_token(args.model, seq), "peak_tflops": args.peak_tflops,
        "mfu": mfu(speed, args.model, seq, args.peak_tflops), "built_s": built_s, "versions": versions(impl),
    }


def versions(impl):
    import torch

    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    if impl == "transformers":
        import transformers

        found["transformers"] = transformers.__version__
    return found


def main():
    args = parse_arguments()
    rows = read_rows(args.data)
    _, _, seq = rows
    if args.seq not in (None, seq):
        raise BadInput(f"--seq {args.seq}, but {args.data} has rows of {seq} tokens: remove --seq, or write other rows")
    positions = PRESETS[args.model][3]
    if seq > positions:
        raise BadInput(f"rows of {seq} tokens are longer than {args.model}'s {positions} positions: write shorter rows")
    if max(rows[0]) >= VOCABULARY or min(rows[0]) < 0:
        raise BadInput(f"{args.data} has ids outside of 0 to {VOCABULARY - 1}: it comes from another tokenizer")
    try:
        import torch
    except ImportError as error:
        raise BadInput(f"PyTorch is missing ({error}): run this with a Python that has it") from None
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise BadInput(f"--device {args.device}: expected cuda or cpu ({error})") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput("PyTorch sees no CUDA device: use --device cpu, or a machine with a GPU")
    try:
        line = train(args, device, rows)
    except torch.cuda.OutOfMemoryError as error:
        print(f"error: out of GPU memory: use a smaller --batch ({str(error).splitlines()[0]})", file=sys.stderr)
        return 1
    print(json.dumps(line))
    bad = [step + 1 for step, loss in enumerate(line["losses"]) if not math.isfinite(loss)]
    if bad:
        print(f"error: the loss is not finite in step {bad[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
