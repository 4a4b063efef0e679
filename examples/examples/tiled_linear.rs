//! `cargo run --release --example tiled_linear -- [WIDTH [TILES [STEPS [FOLDER]]]]`
//!
//! Trains one square linear layer of `WIDTH * WIDTH` parameters in tiles on two ranks at stage 3, with parameters, gradients and
//! AdamW's state stored in FOLDER. Only one tile is gathered at a time. Defaults: 2048, 16, 4, the current folder. A width of 32768
//! takes 4 GiB of parameters and 16 GiB on the disk; `bench/limited.sh 2048 tiled_linear 3 FOLDER` trains it in 2 GiB of memory.

use std::time::Instant;

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_flex::Flex;
use zero_burn::Zero;
use zero_burn::config::{Disk, Offload, Tier, ZeroConfig};
use zero_burn::launch::launch;
use zero_burn::optim::{Fused, Rule};
use zero_core::Stage;
use zero_core::alloc::PageKeeper;
use zero_models::TiledLinear;
use zero_train::engine::{EngineConfig, ZeroEngine};
use zero_train::memory::peak_rss_bytes;
use zero_train::schedule::Schedule;

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(std::alloc::System);

type A = Autodiff<Zero<Flex>>;

const ROWS: usize = 8;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut number = |default: usize| args.next().map_or(Ok(default), |given| given.parse());
    let (width, tiles, steps) = (number(2048)?, number(16)?, number(4)?);
    let path = args.next().unwrap_or_else(|| ".".into()).into();
    let disk = Disk { path, ..Disk::default() };
    let offload = Offload { optimizer: Tier::Disk, parameters: Tier::Disk, disk, ..Offload::default() };
    // One tile is gathered at a time and reduced immediately.
    let elements = width * width.div_ceil(tiles);
    let config = ZeroConfig {
        offload,
        prefetch_bucket_size: 0,
        max_live_parameters: elements,
        ..ZeroConfig::new(Stage::Parameters)
    };
    let losses = launch::<Flex, _, String>(2, &config, &Default::default(), |device| {
        let told = |error: &dyn std::error::Error| error.to_string();
        let layer = TiledLinear::<A>::new([width, width], tiles, false, &device);
        let optimizer = Fused::new(Rule::adamw());
        // AdamW's first updates move each weight by this rate, and a result, of `width` weights, by about 0.1.
        let schedule = Schedule::Constant(0.1 / width as f64);
        let settings = EngineConfig { schedule, ..EngineConfig::default() };
        let mut engine = ZeroEngine::initialize(layer, optimizer, settings, &device).map_err(|error| told(&error))?;
        A::seed(&device, 1);
        let [x, y] = [(); 2].map(|()| Tensor::<A, 2>::random([ROWS, width], Distribution::Normal(0.0, 1.0), &device));
        let mut losses = Vec::new();
        for step in 0..steps {
            let begin = Instant::now();
            let loss = engine.forward(|layer| (layer.forward(x.clone()) - y.clone()).powi_scalar(2).mean());
            losses.push(loss.clone().into_scalar());
            engine.backward(loss);
            engine.step().map_err(|error| told(&error))?;
            if device.rank() == 0 {
                println!("step {step}: loss {:.6}, {:.1} s", losses[step], begin.elapsed().as_secs_f64());
            }
        }
        Ok(losses)
    })?;
    let bytes = 4 * width * width;
    println!(
        "{:.2} GiB of parameters in {tiles} tiles, peak memory of this process {:.2} GiB",
        bytes as f64 / (1u64 << 30) as f64,
        peak_rss_bytes().map_or(f64::NAN, |bytes| bytes as f64 / (1u64 << 30) as f64)
    );
    let fell = losses.iter().all(|losses| losses.last() < losses.first());
    if fell { Ok(()) } else { Err("the loss did not fall".into()) }
}
