"""The work that is compared: runs, and the rows of the table that set two of them side by side."""

from dataclasses import asdict, dataclass, replace

SEQ = 256
SCALE_ROWS = 8  # the global batch of the cost of scale
PEERS = ("torch", "ddp", "deepspeed", "fsdp2")
NAMES = {"ours": "ours", "torch": "torch", "ddp": "torch DDP", "deepspeed": "DeepSpeed", "fsdp2": "FSDP2"}


@dataclass(frozen=True)
class Model:
    """One model, as ours and the peers name it."""

    preset: str
    layers: int
    hidden: int
    heads: int
    positions: int


MODELS = {"A": Model("mini", 6, 384, 6, 256), "B": Model("gpt2", 12, 768, 12, 1024)}

# How much of the optimizer's state is offloaded: by ours, always to a disk (its ranks compute in the host's memory), and DeepSpeed's word.
OFFLOAD = {
    "all on a disk": ("1", dict(device="nvme")),
    "half offloaded": ("0.5", dict(device="cpu", ratio=0.5)),
}


@dataclass(frozen=True)
class Run:
    """One process (ours) or group of processes (a peer) that trains a few steps."""

    who: str
    model: str
    stage: int
    ranks: int
    threads: int
    batch: int
    dtype: str = "fp32"
    seq: int = SEQ
    offload: str = ""  # what of the optimizer's state, a key of OFFLOAD

    @property
    def name(self):
        more = [f"{self.seq} tokens"] * (self.seq != SEQ) + [self.dtype] * (self.dtype != "fp32") + [self.offload] * bool(self.offload)
        return " ".join([f"{self.model} {self.ranks}x{self.threads} {self.who} stage {self.stage} batch {self.batch}", *more])


@dataclass(frozen=True)
class Row:
    """Two runs and the bounds of their ratio. The ratio is of tokens/s (speed), of memory, or of step times (scale)."""

    name: str
    kind: str
    left: Run
    right: Run
    floor: float
    goal: float

    def to_json(self):
        return dict(asdict(self), left=self.left.name, right=self.right.name)


def rows_of(model, batch_one, batch_two, dtype):
    """All rows of one model in groups whose runs take turns, with `batch_one` rows on the rank of a one-rank run and
    `batch_two` on each rank of two. In bf16 peers are torch's autocast, FSDP2's mixed precision and DeepSpeed's bf16 engine."""
    def single(who, batch=batch_one, **more):
        return Run(who, model, 0, 1, 2, batch, dtype, **more)

    def pair(who, stage, batch=batch_two, **more):
        return Run(who, model, stage, 2, 1, batch, dtype, **more)

    def alone(what="", **more):
        return Row(f"{model}: 1 rank x 2 threads, {what}torch", "speed", single("ours", **more), single("torch", **more), 1.1, 1.3)

    def against(peer, stage, floor, goal, what="", **more):
        name = f"{model}: 2 ranks x 1 thread, stage {stage}, {what}{NAMES[peer]}"
        return Row(name, "speed", pair("ours", stage, **more), pair(peer, stage, **more), floor, goal)

    groups = [
        [alone()],
        [
            against("deepspeed", 0, 1.1, 1.4),
            against("ddp", 0, 1.1, 1.4),
            Row(f"{model}: 2 ranks x 1 thread, stage 3 to stage 0 of ours", "speed", pair("ours", 3), pair("ours", 0),
                0.95, 0.98),
            against("deepspeed", 3, 1.8, 2.5),
            against("fsdp2", 3, 1.8, 2.5),
        ],
        [against("deepspeed", 1, 1.5, 2.0)],
        [against("deepspeed", 2, 1.5, 2.0), against("fsdp2", 2, 1.5, 2.0)],
        [alone("8 rows, ", batch=8)],
        [against(peer, 3, 1.8, 2.5, "4 rows a rank, ", batch=4) for peer in ("deepspeed", "fsdp2")],
    ]
    if model == "B":
        memory = Row("B: memory, 2 ranks, stage 3, DeepSpeed", "memory", pair("ours", 3), pair("deepspeed", 3), 0.5, 0.35)
        groups[1].append(memory)
        groups.append([alone("1,024 tokens, ", batch=1, seq=1024)])
        groups.append([against(peer, 3, 1.8, 2.5, "1,024 tokens, ", batch=1, seq=1024) for peer in ("deepspeed", "fsdp2")])
        groups += [[against("deepspeed", 3, 1.5, 2.0, f"{what}, ", offload=what)] for what in OFFLOAD]
        on_disk = pair("ours", 3, offload="all on a disk")
        groups.append([Row("B: 2 ranks x 1 thread, stage 3, disk to memory of ours", "speed", on_disk, pair("ours", 3), 0.9, 0.95)])
    if model == "A":
        for stage in (0, 3):
            one = Run("ours", model, stage, 1, 2, SCALE_ROWS, dtype)
            groups.append([
                Row(f"A: cost of scale, stage {stage}, {ranks} ranks", "scale",
                    Run("ours", model, stage, ranks, 1, SCALE_ROWS // ranks, dtype), one, 1.1, 1.1)
                for ranks in (2, 4, 8)
            ])
    return groups


# Within a group runs go in this order, so that the runs of a pair are next to each other or have one between them.
ORDER = ["ddp 0", "deepspeed 0", "ours 0", "torch 0", "ours 3", "deepspeed 3", "fsdp2 3", "ours 1", "deepspeed 1",
         "ours 2", "deepspeed 2", "fsdp2 2"]


def select(models, batches, peers, only, dtype):
    """Groups of (rows, runs in order) for the models, batches {model: (one rank, two ranks)}, peers, compiled pattern and type."""
    selected = []
    for model in models:
        for group in rows_of(model, *batches[model], dtype):
            rows = [row for row in group if all(run.who in ("ours", *peers) for run in (row.left, row.right))
                    and (only is None or only.search(row.name))]
            runs = dict.fromkeys(run for row in rows for run in (row.left, row.right))
            if rows:
                order = lambda run: (ORDER.index(f"{run.who} {run.stage}"), run.ranks)
                selected.append((rows, sorted(runs, key=order)))
    return selected


def against_before(groups):
    """Groups of one row for each of our runs in `groups`: beside the same run of an earlier build."""
    ours = dict.fromkeys(run for _, runs in groups for run in runs if run.who == "ours")
    before = [(run, replace(run, who="before")) for run in ours]
    return [([Row(f"{run.name} / before", "speed", run, other, 0.98, 1.0)], [run, other]) for run, other in before]
