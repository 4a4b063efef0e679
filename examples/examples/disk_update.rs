//! `cargo run --release --example disk_update -- [FOLDER [MILLIONS [ROUNDS]]]`
//!
//! Measures the fused AdamW on parameters, gradients and moments that are stored on a disk (28 bytes per parameter: four arrays
//! read, three written). The reference is the time to read and then write the same number of bytes at the disk's sequential
//! rate. Both alternate in one run in the same folder. Two ranks, each with its own file, as in training.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use zero_burn::Zero;
use zero_burn::config::{Disk, Offload, Tier, ZeroConfig};
use zero_burn::launch::launch;
use zero_burn::module::{collect_grads, prepare};
use zero_burn::optim::{Fused, Rule};
use zero_burn::stats::all_gather;
use zero_core::Stage;
use zero_core::alloc::PageKeeper;
use zero_core::offload::{BufferPool, DiskError, PoolOptions, SwapDir, SwapFile, SwapFileOptions};
use zero_examples::median;

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(std::alloc::System);

type A = Autodiff<Zero<Flex>>;

const LIMIT: Duration = Duration::from_secs(600);
const RANKS: usize = 2;
/// Number of elements of one tensor.
const TENSOR: usize = 8_000_000;

#[derive(Module, Debug)]
struct Weights<B: Backend> {
    w: Vec<Param<Tensor<B, 1>>>,
}

/// Moves `bytes` sequentially through the file, with all buffers in flight.
fn move_all(file: &SwapFile, pool: &BufferPool, bytes: usize, write: bool) -> Result<(), DiskError> {
    let region = file.alloc(bytes)?;
    let mut flying = std::collections::VecDeque::new();
    for part in region.parts(pool.buffer_bytes()) {
        if flying.len() == pool.count() {
            let ticket: zero_core::offload::PendingTransfer = flying.pop_front().expect("it is full");
            ticket.wait(LIMIT)?;
        }
        let mut buffer = pool.take(LIMIT)?;
        buffer.set_len(part.bytes());
        flying.push_back(if write { file.write(part, buffer)? } else { file.read(part, buffer)? });
    }
    flying.into_iter().try_for_each(|ticket| ticket.wait(LIMIT).map(drop))?;
    file.free(region)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let folder = PathBuf::from(args.next().unwrap_or_else(|| ".".into()));
    let tensors = args.next().map_or(Ok(192), |millions| millions.parse::<usize>())? * 1_000_000 / TENSOR;
    let rounds: usize = args.next().map_or(Ok(5), |rounds| rounds.parse())?;
    let disk = Disk { path: folder.clone(), ..Disk::default() };
    let offload = Offload { optimizer: Tier::Disk, parameters: Tier::Disk, disk: disk.clone(), ..Offload::default() };
    let config = ZeroConfig { offload, ..ZeroConfig::new(Stage::Parameters) };
    let launched = launch::<Flex, _, String>(RANKS, &config, &Default::default(), |device| {
        let told = |error: DiskError| error.to_string();
        let param = |_| Param::from_data(TensorData::new(vec![0.5f32; TENSOR], [TENSOR]), &device);
        let mut model = prepare::<A, _>(Weights { w: (0..tensors).map(param).collect() }, &device);
        let mut fused = Fused::<A>::new(Rule::adamw());
        let dir = SwapDir::open(&folder).map_err(told)?;
        let file = dir.create_file(10 + device.rank(), &SwapFileOptions::default()).map_err(told)?;
        let pool = PoolOptions { count: disk.buffer_count, bytes: disk.buffer_bytes, ..PoolOptions::default() };
        let pool = BufferPool::new(&pool).map_err(told)?;
        // This rank's shards of all tensors.
        let elements = tensors * TENSOR / RANKS;
        let meet = || drop(all_gather::<Flex>(&[0.0]));
        let timed = |work: &mut dyn FnMut() -> Result<(), DiskError>| -> Result<f64, String> {
            meet();
            let begin = Instant::now();
            work().map_err(told)?;
            meet();
            Ok(begin.elapsed().as_secs_f64())
        };
        let (mut updates, mut writes, mut reads) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=rounds {
            // One tensor at a time, to limit the memory of dense gradients.
            let mut grads = GradientsParams::new();
            for param in &model.w {
                let one = (param.val() * 1e-3).sum();
                let mut own = GradientsParams::from_grads(one.backward(), &model);
                if let Some(gradient) = own.remove::<Zero<Flex>, 1>(param.id) {
                    grads.register::<Zero<Flex>, 1>(param.id, gradient);
                }
            }
            let grads = collect_grads::<A, _>(grads, &model);
            let write = timed(&mut || move_all(&file, &pool, 12 * elements, true))?;
            let read = timed(&mut || move_all(&file, &pool, 16 * elements, false))?;
            meet();
            let begin = Instant::now();
            model = fused.step_scaled(1e-3, 1.0, model, grads);
            fused.wait();
            meet();
            // The first round creates the moments.
            if round > 0 {
                updates.push(begin.elapsed().as_secs_f64());
                writes.push(write);
                reads.push(read);
            }
        }
        if device.rank() == 0 {
            let all = (elements * RANKS) as f64;
            let ratios = (0..rounds).map(|round| updates[round] / (writes[round] + reads[round])).collect();
            let (update, write, read, ratio) = (median(updates), median(writes), median(reads), median(ratios));
            println!("{all} parameters on {RANKS} ranks, medians of {rounds} alternating rounds");
            println!("disk, sequential write    {:6.2} GB/s", 12.0 * all / write / 1e9);
            println!("disk, sequential read     {:6.2} GB/s", 16.0 * all / read / 1e9);
            println!("update                    {:6.2} GB/s at 28 bytes per parameter", 28.0 * all / update / 1e9);
            println!("update time / time to write and then read its bytes: {ratio:.3}");
        }
        Ok(())
    });
    launched.map_err(|error| error.to_string())?;
    Ok(())
}
