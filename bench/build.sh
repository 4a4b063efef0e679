#!/usr/bin/env bash
# Compares two revisions: seconds of a clean build of the main job (release) and of a 20-line program on `ZeroEngine` (dev), and the time
# per step. `bench/build.sh OLD NEW`; CRATES=1 prints the slowest crates. Run nothing else at the same time.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_INCREMENTAL=0
work=$(mktemp -d)
trap 'rm -rf "$work"; git worktree prune' EXIT
seconds() { # COMMAND...
  local begin=$SECONDS
  "$@" >&2 || return
  echo $((SECONDS - begin))
}

program() { # TREE FOLDER
  mkdir -p "$2/src"
  cp "$1/Cargo.lock" "$2"
  cat >"$2/Cargo.toml" <<TOML
[package]
name = "program"
version = "0.1.0"
edition = "2024"

[workspace]

[dependencies]
burn = { version = "=0.21.0", default-features = false, features = ["std", "autodiff", "distributed"] }
burn-flex = "=0.21.0"
zero-burn = { path = "$1/zero-burn" }
zero-core = { path = "$1/zero-core" }
zero-train = { path = "$1/zero-train" }
TOML
  cat >"$2/src/main.rs" <<'RUST'
use burn::{backend::Autodiff, nn::LinearConfig, optim::AdamWConfig, tensor::Tensor};
use burn_flex::Flex;
use zero_burn::{Zero, config::ZeroConfig, launch::launch_auto};
use zero_core::Stage;
use zero_train::engine::{EngineConfig, ZeroEngine};

type B = Autodiff<Zero<Flex>>;

fn main() {
    launch_auto::<Flex, _, String>(2, &ZeroConfig::new(Stage::Parameters), &Default::default(), |device| {
        let (model, optimizer) = (LinearConfig::new(64, 64).init::<B>(&device), AdamWConfig::new().init());
        let engine = ZeroEngine::initialize(model, optimizer, EngineConfig::default(), &device);
        let mut engine = engine.map_err(|error| error.to_string())?;
        for _ in 0..10 {
            let rows = Tensor::<B, 2>::ones([8, 64], &device);
            let loss = engine.forward(|model| model.forward(rows).powf_scalar(2.0).mean());
            engine.backward(loss);
            engine.step().map_err(|error| error.to_string())?;
        }
        Ok(())
    })
    .unwrap();
}
RUST
}

for revision in "$1" "$2"; do
  tree=$work/tree-$revision
  git worktree add --quiet --detach "$tree" "$revision"
  timings=()
  [ -z "${CRATES:-}" ] || timings=(--timings)
  # Downloads do not count.
  cargo fetch --quiet --manifest-path "$tree/Cargo.toml"
  main=$(cd "$tree" && CARGO_TARGET_DIR=$work/main-$revision seconds cargo build --quiet --release --example gpt2_1_5b "${timings[@]}")
  program "$tree" "$work/program"
  small=$(cd "$work/program" && CARGO_TARGET_DIR=$work/small-$revision seconds cargo build --quiet)
  crates=$(cd "$work/program" && cargo tree --edges normal --prefix none | sed 's/ (\*)$//' | sort -u | wc -l)
  (cd "$work/program" && CARGO_TARGET_DIR=$work/small-$revision cargo run --quiet)
  rm -rf "$work/small-$revision" "$work/program"
  echo "$revision: main job $main s, 20-line program $small s, $crates crates"
  [ -z "${CRATES:-}" ] || python3 - "$work/main-$revision/cargo-timings/cargo-timing.html" <<'PYTHON'
import json, re, sys

units = json.loads(re.search(r"const UNIT_DATA = (\[.*?\]);", open(sys.argv[1]).read(), re.S)[1])
for unit in sorted(units, key=lambda unit: -unit["duration"])[:40]:
    print(f"  {unit['duration']:6.1f} s {unit['name']}{unit.get('target', '')}")
PYTHON
done

# The fastest of three runs each, in turn.
python3 - "$work" "$1" "$2" <<'PYTHON'
import json, pathlib, subprocess, sys

work, *revisions = sys.argv[1:]
best = {}
for turn in range(3):
    for revision in revisions:
        out = pathlib.Path(work, "out")
        program = f"{work}/main-{revision}/release/examples/gpt2_1_5b"
        options = ["--model", "gpt2", "--seq", "128", "--batch", "2", "--steps", "6", "--offload", "none", "--out", out, "--json"]
        subprocess.run([program, *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        steps = [json.loads(line)["step_ms"] for line in open(out / "metrics.jsonl")][1:]
        best[revision] = min(best.get(revision, steps[0]), *steps)
        subprocess.run(["rm", "-rf", out])
print(", ".join(f"{revision}: a step of {best[revision]:.1f} ms" for revision in revisions), f"ratio {best[revisions[1]] / best[revisions[0]]:.3f}")
PYTHON
