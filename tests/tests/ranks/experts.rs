//! Experts on their own axis, whose ranks train on different rows: `cargo test -p zero-tests --test ranks experts`.

use burn::module::{Module, Param};
use burn::prelude::Backend;
use burn::tensor::Tensor;
use burn::tensor::activation::gelu;
use burn_flex::Flex;
use zero_burn::config::{Disk, Offload, Tier, ZeroConfig};
use zero_burn::module::replicated_along;
use zero_burn::optim::{Fused, Rule};
use zero_burn::parallel::all_to_all;
use zero_burn::ranks;
use zero_core::random::Draws;
use zero_core::{Axes, Buffer, Stage};
use zero_train::engine::{EngineConfig, Step, ZeroEngine};

use crate::common::{B, Device, on_ranks};

const WIDTH: usize = 16;
const EXPERTS: usize = 4;
/// Rows of all ranks.
const ROWS: usize = 64;

/// A dense layer, experts with rows assigned by index, and a dense layer that only some ranks use.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    dense: Param<Tensor<B, 2>>,
    /// This rank's experts.
    experts: Vec<Param<Tensor<B, 2>>>,
    rare: Param<Tensor<B, 2>>,
}

fn matrix<B: Backend>(number: u64, device: &B::Device) -> Param<Tensor<B, 2>> {
    let mut draws = Draws::new(3).fork(number);
    let values: Vec<f32> = (0..WIDTH * WIDTH).map(|_| draws.unit() as f32 - 0.5).collect();
    Param::from_tensor(Tensor::<B, 1>::from_floats(&*values, device).reshape([WIDTH, WIDTH]))
}

impl Model<B> {
    fn new(device: &Device) -> Self {
        let places = ranks::group::<Flex>(Axes::EXPERT);
        let each = EXPERTS / places.world();
        let experts = places.rank() * each..(places.rank() + 1) * each;
        Self {
            dense: matrix(0, device),
            experts: experts.map(|expert| matrix(1 + expert as u64, device)).collect(),
            rare: matrix(99, device),
        }
    }

    /// `x` [R, WIDTH]; row `i` goes to expert `i mod EXPERTS`.
    fn forward(&self, x: Tensor<B, 2>, is_rare: bool) -> Tensor<B, 2> {
        let places = ranks::group::<Flex>(Axes::EXPERT);
        let (here, part) = (self.experts.len(), x.dims()[0] / EXPERTS);
        let h = x.matmul(self.dense.val());
        let sent = h.clone().reshape([part, EXPERTS, WIDTH]).swap_dims(0, 1).reshape([EXPERTS * part, WIDTH]);
        let come = all_to_all(sent, &places).reshape([places.world(), here, part, WIDTH]).swap_dims(0, 1);
        let of_experts = self.experts.iter().enumerate().map(|(at, expert)| {
            let rows = come.clone().narrow(0, at, 1).reshape([places.world() * part, WIDTH]);
            gelu(rows.matmul(expert.val())).reshape([1, places.world(), part, WIDTH])
        });
        let back = Tensor::cat(of_experts.collect(), 0).swap_dims(0, 1).reshape([EXPERTS * part, WIDTH]);
        let home = all_to_all(back, &places).reshape([EXPERTS, part, WIDTH]).swap_dims(0, 1);
        let out = h + home.reshape([EXPERTS * part, WIDTH]);
        if is_rare { out.clone() + out.matmul(self.rare.val()) } else { out }
    }
}

/// Losses and norms of five steps.
fn trained(config: &ZeroConfig) -> Vec<(f64, f64)> {
    let world = (1..100).find(|&world| config.axes.data(world).is_some()).unwrap();
    let mut of_ranks = on_ranks(world, config, |device| {
        let places = ranks::group::<Flex>(Axes::EXPERT);
        let (place, of) = (device.rank() * places.world() + places.rank(), world);
        let (sync_each_batch, clipping) = (Some(true), Some(0.02));
        let settings = EngineConfig { accumulation: 2, sync_each_batch, clipping, ..EngineConfig::default() };
        let mut engine =
            ZeroEngine::initialize(Model::new(&device), Fused::new(Rule::adamw()), settings, &device).unwrap();
        replicated_along::<B, _>(&engine.model().dense, Axes::EXPERT);
        replicated_along::<B, _>(&engine.model().rare, Axes::EXPERT);
        let (mut steps, mut sum) = (Vec::new(), 0.0);
        for micro in 0..10 {
            let mut draws = Draws::new(2).fork(micro);
            let values: Vec<f32> = (0..ROWS * WIDTH).map(|_| draws.unit() as f32 - 0.5).collect();
            let here = ROWS / of;
            let all = Tensor::<B, 1>::from_floats(&*values, &device).reshape([ROWS, WIDTH]);
            let x = all.narrow(0, place * here, here);
            // The last rows' places alone use what others do not.
            let is_rare = place + 1 == of;
            let loss =
                engine.forward(|model| (model.forward(x.clone(), is_rare) - x.clone() * 0.5).powf_scalar(2.0).mean());
            let own = f64::from(loss.clone().into_scalar());
            let everyone = zero_burn::stats::all_gather::<Flex>(&[own]).iter().map(|rank| rank[0]).sum::<f64>();
            let along = places.all_gather(Buffer::F64(vec![everyone])).unwrap().into_f64();
            sum += along.iter().sum::<f64>() / of as f64;
            engine.backward(loss);
            if let Step::Updated(update) = engine.step().unwrap() {
                steps.push((std::mem::take(&mut sum), update.grad_norm));
            }
        }
        steps
    });
    assert!(of_ranks.iter().all(|rank| *rank == of_ranks[0]), "ranks have seen different losses or norms");
    of_ranks.swap_remove(0)
}

fn mesh(axes: &[(&str, usize)], stage: Stage) -> ZeroConfig {
    // More than one bucket of what is averaged over the axis.
    let (reduce_bucket_size, param_persistence_threshold) = (100, 10);
    ZeroConfig { axes: Axes::new(axes), reduce_bucket_size, param_persistence_threshold, ..ZeroConfig::new(stage) }
}

#[test]
fn experts_on_an_axis_of_their_own_train_as_on_every_rank() {
    let swap = tempfile::tempdir().unwrap();
    let whole = trained(&mesh(&[("data", 4), (Axes::EXPERT, 1)], Stage::DataParallel));
    assert!(whole[4].0 < whole[0].0, "the loss does not fall: {whole:?}");
    for (axes, shards) in [
        (&[("data", 2), (Axes::EXPERT, 2)][..], None),
        (&[(Axes::EXPERT, 2), ("data", 2)], Some(1)),
        (&[("data", 1), (Axes::EXPERT, 4)], None),
    ] {
        let mut first = None;
        for stage in Stage::ALL {
            let mut config = ZeroConfig { shard_size: shards, ..mesh(axes, stage) };
            if stage == Stage::Parameters {
                let disk = Disk { path: swap.path().into(), ..Disk::default() };
                config.offload =
                    Offload { optimizer: Tier::Disk, parameters: Tier::Disk, min_bytes: 1, disk, ..Offload::default() };
            }
            let cut = trained(&config);
            let apart = whole.iter().zip(&cut).map(|(a, b)| ((a.0 - b.0) / a.0).abs().max(((a.1 - b.1) / a.1).abs()));
            let worst = apart.fold(0.0, f64::max);
            println!("{}, stage {stage}: losses and norms within {worst:.1e} of every rank's own experts", config.axes);
            assert!(worst < 1e-5, "{}, stage {stage}: {worst:e}", config.axes);
            assert_eq!(*first.get_or_insert_with(|| cut.clone()), cut, "{}, stage {stage}", config.axes);
        }
    }
}
