#!/usr/bin/env python3
"""GPT-2 training steps on the CPU under torch (one rank, or DDP), DeepSpeed ZeRO or FSDP2; prints one JSON line.

This process starts one process per rank (itself again, with PEER_OUT set) and never imports torch, so that the peak
memory of a rank is its own. A step is forward, backward, update and zero_grad; its time is the slowest rank's, and the
line has the median after the warm-up. Memory is each rank's peak RSS over its RSS with everything imported.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--engine", choices=["torch", "deepspeed", "fsdp2"], default="torch",
                        help="torch is DDP with several ranks, and with --stage 1 ZeroRedundancyOptimizer")
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=0,
                        help="ZeRO stage; FSDP2 keeps whole parameters after the forward pass unless it is 3")
    parser.add_argument("--world", type=int, default=1, help="ranks, one process each")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per rank")
    parser.add_argument("--layers", type=int, default=6, help="blocks of the model")
    parser.add_argument("--hidden", type=int, default=384, help="width of the model")
    parser.add_argument("--heads", type=int, default=6, help="attention heads")
    parser.add_argument("--seq", type=int, default=256, help="tokens per row")
    parser.add_argument("--positions", type=int, help="rows of the position table (default: 1024, or --seq if more)")
    parser.add_argument("--batch", type=int, default=4, help="rows per rank")
    parser.add_argument("--vocab", type=int, default=50257, help="tokens of the vocabulary")
    parser.add_argument("--steps", type=int, default=7, help="steps, with the warm-up")
    parser.add_argument("--warmup", type=int, default=2, help="first steps that do not count")
    parser.add_argument("--opt", choices=["auto", "fused", "loop", "foreach", "dscpu"], default="auto",
                        help="auto: DeepSpeedCPUAdam (dscpu) for deepspeed, fused torch.optim.AdamW otherwise")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="what the model computes in")
    parser.add_argument("--attn", choices=["sdpa", "eager"], default="sdpa", help="transformers' attention")
    parser.add_argument("--ds", default="{}", help="JSON merged into DeepSpeed's zero_optimization (bucket sizes)")
    parser.add_argument("--weights", help="a folder with the model's weights, in place of fresh ones")
    parser.add_argument("--lora", type=int, help="train an adapter of this rank on c_attn (PEFT), and not the model")
    parser.add_argument("--log", default="", help="file for the ranks' output (default: a temporary one)")
    return parser.parse_args()


def status_mib(key, pid="self"):
    """A memory field of /proc/PID/status in MiB; 0 if the process has gone."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) / 1024
    return 0.0


def peak_rss_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_model(args):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=args.vocab, n_positions=args.positions or max(1024, args.seq), n_embd=args.hidden,
                        n_layer=args.layers, n_head=args.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                        use_cache=False, attn_implementation=args.attn)
    if args.weights:
        # With ZeRO-3, what is loaded is sharded at once; the configuration has to live as long.
        from transformers.integrations import HfDeepSpeedConfig

        args.sharded_load = HfDeepSpeedConfig(deepspeed_config(args)) if args.engine == "deepspeed" else None
        model = GPT2LMHeadModel.from_pretrained(args.weights, config=config, dtype=torch.float32)
    else:
        model = GPT2LMHeadModel(config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=args.lora, target_modules=["c_attn"], fan_in_fan_out=True))
    return model.train()


def make_optimizer(args, parameters):
    """AdamW, and the name of its implementation."""
    import torch

    kind = args.opt
    if kind == "auto":
        kind = "dscpu" if args.engine == "deepspeed" else "fused"
    settings = dict(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    if kind == "dscpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(parameters, adamw_mode=True, **settings), kind
    fused = True if kind == "fused" else None
    foreach = {"foreach": True, "loop": False}.get(kind)
    return torch.optim.AdamW(parameters, fused=fused, foreach=foreach, **settings), kind


def deepspeed_step(args, model):
    """A function that trains one batch, and the optimizer's name."""
    import deepspeed

    optimizer, kind = make_optimizer(args, [param for param in model.parameters() if param.requires_grad])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(args))

    def step(ids):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step, kind


def deepspeed_config(args):
    return dict(train_micro_batch_size_per_gpu=args.batch, gradient_accumulation_steps=1,
                  zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False, steps_per_print=10**9,
                  bf16=dict(enabled=args.dtype == "bf16"),
                  zero_optimization=dict(stage=args.stage, **json.loads(args.ds)))


def torch_step(args, model):
    """As deepspeed_step, for bare torch, DDP and FSDP2."""
    import torch
    import torch.distributed as dist

    bf16 = args.dtype == "bf16"
    wrapped = model
    if args.engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        settings = dict(mesh=dist.init_device_mesh("cpu", (args.world,)), reshard_after_forward=args.stage == 3)
        if bf16:
            settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.transformer.h:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
    elif args.world > 1:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.engine == "torch" and args.stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=0.01,
                                            fused=True)
        kind = "fused"
    else:
        optimizer, kind = make_optimizer(args, model.parameters())
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16 and args.engine == "torch")

    def step(ids):
        with autocast:
            loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step, kind


def run_rank(args):
    """One rank: trains, and writes what it measured to the file that PEER_OUT names."""
    rank = int(os.environ["RANK"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(args.threads)
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401, part of the idle process

    if args.engine == "deepspeed":
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: F401, as above
    idle = status_mib("VmRSS")
    if args.engine == "deepspeed":
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    elif args.world > 1 or args.engine == "fsdp2":
        dist.init_process_group("gloo")
    model = make_model(args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step, optimizer = (deepspeed_step if args.engine == "deepspeed" else torch_step)(args, model)

    seconds, losses, peak_of_warmup = [], [], 0
    for index in range(args.steps):
        generator = torch.Generator().manual_seed(1000 * index + rank)
        ids = torch.randint(0, args.vocab, (args.batch, args.seq), generator=generator)
        if index == args.warmup:  # from here VmHWM is the peak of steps alone
            peak_of_warmup = peak_rss_mib()
            with open("/proc/self/clear_refs", "w") as clear:
                clear.write("5")
        begin = time.perf_counter()
        loss = step(ids)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.detach().float().item())
    result = dict(parameters=parameters, optimizer=optimizer, seconds=seconds, losses=losses, idle=idle,
                  steady=status_mib("VmHWM"), peak=max(peak_of_warmup, peak_rss_mib()))
    with open(os.environ["PEER_OUT"], "w") as out:
        json.dump(result, out)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def machine_cpu_seconds():
    """Busy and stolen seconds of all CPUs since the machine started."""
    with open("/proc/stat") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, ticks[7] / per_second


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(args, folder, log):
    world, threads, port = str(args.world), str(args.threads), str(free_port())
    ranks = []
    for rank in range(args.world):
        env = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_SIZE=world,
                   LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS=threads,
                   MKL_NUM_THREADS=threads, GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="",
                   HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PEER_OUT=f"{folder}/rank{rank}.json")
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=log, stderr=log))
    return ranks


def wait_for(ranks):
    """Waits for all; ends the others if one fails. Returns each rank's peak of anonymous memory in MiB."""
    anonymous = [0.0] * len(ranks)
    while any(process.poll() is None for process in ranks):
        if any(process.poll() not in (None, 0) for process in ranks):
            for process in ranks:
                if process.poll() is None:
                    process.terminate()
        for rank, process in enumerate(ranks):
            try:
                anonymous[rank] = max(anonymous[rank], status_mib("RssAnon", process.pid))
            except (OSError, ProcessLookupError):
                pass
        time.sleep(0.05)
    return anonymous


def main():
    args = parse_arguments()
    if "PEER_OUT" in os.environ:
        return run_rank(args)
    if args.world * args.threads > os.cpu_count():
        sys.exit(f"{args.world} ranks of {args.threads} threads do not fit the {os.cpu_count()} CPUs")
    if not 0 <= args.warmup < args.steps:
        sys.exit(f"--warmup {args.warmup}: expected less than the {args.steps} steps")
    what = dict(engine=args.engine, stage=args.stage, world=args.world, threads=args.threads, layers=args.layers,
                hidden=args.hidden, seq=args.seq, batch=args.batch, dtype=args.dtype, ds=args.ds)
    with tempfile.TemporaryDirectory(prefix="peer_") as folder, open(args.log or f"{folder}/log", "w") as log:
        (busy_before, steal_before), wall_before = machine_cpu_seconds(), time.time()
        ranks = start_ranks(args, folder, log)
        anonymous = wait_for(ranks)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        (busy_after, steal_after), wall = machine_cpu_seconds(), time.time() - wall_before
        if any(process.returncode for process in ranks):
            with open(log.name) as written:
                print(json.dumps(dict(what, error=written.read()[-1500:])))
            return 1
        results = []
        for rank in range(args.world):
            with open(f"{folder}/rank{rank}.json") as result:
                results.append(json.load(result))
    slowest = [max(times) for times in zip(*(result["seconds"] for result in results))][args.warmup:]
    median = statistics.median(slowest)
    own = usage.ru_utime + usage.ru_stime
    foreign = max(0.0, busy_after - busy_before - own) / (wall * os.cpu_count())
    mean_loss = lambda index: round(sum(result["losses"][index] for result in results) / args.world, 5)
    print(json.dumps(dict(
        what, opt=results[0]["optimizer"], params=results[0]["parameters"],
        tok_s=round(args.world * args.batch * args.seq / median, 1), step_ms=round(median * 1e3, 1),
        step_ms_min=round(min(slowest) * 1e3, 1), step_ms_max=round(max(slowest) * 1e3, 1), n=len(slowest),
        peak_rss_mib=[round(result["peak"]) for result in results],
        rss_delta_mib=[round(result["peak"] - result["idle"]) for result in results],
        steady_delta_mib=[round(result["steady"] - result["idle"]) for result in results],
        peak_anon_mib=[round(peak) for peak in anonymous], loss0=mean_loss(0), loss=mean_loss(-1),
        foreign_cpu=round(foreign, 3), steal_s=round(steal_after - steal_before, 2), wall_s=round(wall, 1))))


if __name__ == "__main__":
    sys.exit(main())
