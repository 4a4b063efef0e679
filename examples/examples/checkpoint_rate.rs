//! `cargo run --release --example checkpoint_rate -- [FOLDER [PRESET [RANKS [ROUNDS]]]]`
//!
//! Measures how fast checkpoints of a GPT-2 are saved and loaded, compared with the same threads writing (and syncing)
//! and reading plain files of the same sizes in the same folder. Both alternate within one run. Each file's pages are
//! dropped from the page cache before it is read. The folder's disk must hold two checkpoints.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::backend::Autodiff;
use burn::tensor::{Int, Tensor};
use burn_flex::Flex;
use serde_json::Map;
use zero_burn::{Zero, launch::launch, optim::Fused};
use zero_core::Stage;
use zero_core::alloc::PageKeeper;
use zero_core::checkpoint::{Checkpoint, SaveOptions};
use zero_examples::median;
use zero_models::Gpt2Config;
use zero_train::TrainError;
use zero_train::config::ZeroPlan;
use zero_train::engine::{Parts, ZeroEngine};

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(std::alloc::System);

type B = Autodiff<Zero<Flex>>;

/// Bytes per plain write or read.
const CHUNK: usize = 8 << 20;

/// Returns the seconds of `work` on all ranks, from when all are ready until the last one ends.
fn together(work: impl FnOnce()) -> f64 {
    let meet = || zero_burn::stats::all_gather::<Flex>(&[0.0]);
    meet();
    let begin = Instant::now();
    work();
    meet();
    begin.elapsed().as_secs_f64()
}

fn write_plain(path: &Path, bytes: u64, chunk: &[u8]) {
    let mut file = File::create(path).expect("the folder can be written to");
    let mut left = bytes as usize;
    while left > 0 {
        let now = left.min(chunk.len());
        file.write_all(&chunk[..now]).expect("the disk has room");
        left -= now;
    }
    file.sync_all().expect("the disk can be synced");
}

fn read_plain(path: &Path, chunk: &mut [u8]) {
    let mut file = File::open(path).expect("it was just written");
    while file.read(chunk).expect("the disk can be read") > 0 {}
}

/// Drops a file from the page cache, so that the next read comes from the disk.
fn forget(path: &Path) {
    let file = File::open(path).expect("it was just written");
    // SAFETY: the descriptor is open, and the call is only advice.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = PathBuf::from(args.next().unwrap_or_else(|| "target/checkpoint_rate".into()));
    let preset = args.next().unwrap_or_else(|| "gpt2".into());
    let ranks: usize = args.next().map_or(Ok(2), |ranks| ranks.parse())?;
    let rounds: usize = args.next().map_or(Ok(5), |rounds| rounds.parse())?;
    std::fs::create_dir_all(&dir)?;
    let plan = ZeroPlan::builder(Stage::Parameters).build(ranks)?;
    let model = Gpt2Config::preset(&preset)?;
    let launched = launch::<Flex, _, TrainError>(ranks, &plan.zero_config(0), &Default::default(), |device| {
        let rank = device.rank();
        let mut engine =
            ZeroEngine::initialize(model.init::<B>(&device), Fused::new(plan.rule()), plan.engine_config()?, &device)?;
        // One update, to create the optimizer state.
        let ids = Tensor::<B, 2, Int>::zeros([1, 8], &device);
        let loss = engine.forward(|model| model.loss(ids));
        engine.backward(loss);
        engine.step()?;
        let (plain, mut chunk) = (dir.join(format!("plain-{rank}")), vec![1u8; CHUNK]);
        let mut seconds: [Vec<f64>; 4] = Default::default();
        let mut bytes = 0;
        for round in 0..rounds {
            let mut saved = None;
            seconds[0].push(together(|| {
                saved = Some(engine.save(&dir, round as u64, Map::new(), &SaveOptions::default()));
            }));
            let saved = saved.expect("it was just set")?;
            bytes = saved.bytes;
            let file = saved.path.join(format!("rank-{rank:05}-of-{ranks:05}.safetensors"));
            let size = file.metadata().expect("it was just written").len();
            seconds[1].push(together(|| write_plain(&plain, size, &chunk)));
            for path in [&file, &plain] {
                forget(path);
            }
            let mut loaded = Ok(Map::new());
            seconds[2].push(together(|| {
                loaded = Checkpoint::open(&saved.path)
                    .map_err(Into::into)
                    .and_then(|checkpoint| engine.load(&checkpoint, Parts::All));
            }));
            loaded?;
            seconds[3].push(together(|| read_plain(&plain, &mut chunk)));
            together(|| {
                if rank == 0 {
                    std::fs::remove_dir_all(&saved.path).expect("it was just written");
                }
            });
        }
        std::fs::remove_file(&plain).expect("it was just written");
        if rank == 0 {
            let [save, write, load, read] = seconds.map(median);
            let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
            let mib = (bytes / ranks as u64) >> 20;
            println!("{preset}, {ranks} ranks with a file of {mib} MiB each, medians of {rounds} alternating rounds");
            println!(
                "save  {:6.2} GB/s, plain write and sync {:6.2} GB/s: {:.3}",
                rate(save),
                rate(write),
                write / save
            );
            println!("load  {:6.2} GB/s, plain read           {:6.2} GB/s: {:.3}", rate(load), rate(read), read / load);
        }
        Ok(())
    });
    std::fs::remove_dir_all(&dir)?;
    launched.map_err(|error| error.to_string())?;
    Ok(())
}
