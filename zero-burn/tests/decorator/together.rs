//! Ranks that gather parameters collectively: `cargo test -p zero-burn --test decorator together`. Ranks are threads here, each with its
//! own sockets to the others, like processes. There is no backward pass, because it takes locks of the process; zero-train's `torchrun`
//! covers training.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::port::free_port;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{TensorData, backend::Backend};
use burn_autodiff::Autodiff;
use burn_flex::{Flex, FlexDevice};
use zero_burn::config::{Disk, Gathers, ZeroConfig};
use zero_burn::gathered::ParamMeta;
use zero_burn::launch::{LaunchOptions, launch_on};
use zero_burn::module::prepare;
use zero_burn::shards::{OffloadedStates, load_shards};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;
use zero_core::checkpoint::ElementType;
use zero_core::collective::launcher::{Rendezvous, Start};
use zero_core::collective::process::{ProcessOptions, run};

type Ad = Autodiff<Zero<Flex>>;
type Device = ZeroDevice<FlexDevice>;

/// A deadline that nothing here needs.
const FAR: Duration = Duration::from_secs(40);
/// Maximum time for anything here.
const SOON: Duration = Duration::from_secs(20);

/// Parameters of 3, 1, 5 and 5 elements: ranks have uneven shards, and some are empty.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self { first: LinearConfig::new(3, 1).init(device), second: LinearConfig::new(1, 5).init(device) }
    }

    fn values(&self) -> Vec<TensorData> {
        let bias = |linear: &Linear<B>| linear.bias.as_ref().expect("a linear has one by default").val().into_data();
        let weight = |linear: &Linear<B>| linear.weight.val().into_data();
        vec![weight(&self.first), bias(&self.first), weight(&self.second), bias(&self.second)]
    }
}

/// Runs `body` on `world` ranks, and returns each rank's result.
fn on_ranks<T: Send>(
    world: usize,
    stage: Stage,
    body: impl Fn(usize, &Device) -> Result<T, String> + Sync,
) -> Vec<Result<T, String>> {
    let port = free_port();
    let config = ZeroConfig { gathers: Gathers::Collective, param_persistence_threshold: 0, ..ZeroConfig::new(stage) };
    let options = ProcessOptions { deadline: FAR, ..ProcessOptions::default() };
    let begin = Instant::now();
    let ended = std::thread::scope(|scope| {
        let rank = |rank| {
            let (config, options, body) = (&config, &options, &body);
            let (host, local_rank) = ("127.0.0.1".to_string(), Some(rank));
            let job = Rendezvous { rank, world, local_rank, host, port, ..Rendezvous::default() };
            scope.spawn(move || {
                let launch = LaunchOptions { threads_per_rank: 1, deadline: FAR, ..LaunchOptions::default() };
                let rank_body = |device: Device| body(rank, &device);
                run(options, &Start::Job(job), |run| launch_on::<Flex, T, String>(run, config, &launch, rank_body))
                    .map_err(|failed| failed.to_string())
            })
        };
        let ranks: Vec<_> = (0..world).map(rank).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    ended
}

/// Returns elements `range` of any parameter: their indices, plus `more`.
fn numbered(more: f32, range: std::ops::Range<usize>) -> (ElementType, Vec<u8>) {
    (ElementType::F32, range.flat_map(|i| (i as f32 + more).to_le_bytes()).collect())
}

#[test]
fn what_ranks_hold_of_a_parameter_does_not_change_what_they_gather() {
    for (world, stage) in [2, 3]
        .into_iter()
        .flat_map(|world| [Stage::OptimizerState, Stage::Gradients, Stage::Parameters].map(|stage| (world, stage)))
    {
        let ended = on_ranks(world, stage, |_, device| {
            let net = prepare::<Ad, _>(Net::<Ad>::new(device), device);
            let (net, loaded) = load_shards::<Ad, _, String>(net, |_, range| Ok(Some(numbered(0.5, range))));
            loaded?;
            let before = net.values();
            // To a disk and back: ranks have pieces of other sizes, or none.
            let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
            let disk = Disk { path: folder.path().into(), buffer_bytes: 1 << 16, buffer_count: 6, ..Disk::default() };
            let mut parked = OffloadedStates::begin(&disk).map_err(|error| error.to_string())?;
            parked.add_module::<Ad, _>(&net).map_err(|error| error.to_string())?;
            let meanwhile = net.values();
            parked.reload();
            let after = net.values();
            // Its fences compare what the ranks have called.
            let (net, loaded) = load_shards::<Ad, _, String>(net, |_, range| Ok(Some(numbered(1.5, range))));
            loaded?;
            Ok((before, meanwhile, after, net.values()))
        });
        for rank in ended {
            let (before, meanwhile, after, last) =
                rank.unwrap_or_else(|error| panic!("{world} ranks, {stage}: {error}"));
            let expected = |more: f32| -> Vec<TensorData> {
                let data = |shape: &[usize]| {
                    let elements = shape.iter().product::<usize>();
                    TensorData::new((0..elements).map(|i| i as f32 + more).collect(), shape.to_vec())
                };
                [&[3, 1][..], &[1], &[1, 5], &[5]].map(data).to_vec()
            };
            assert_eq!((&before, &meanwhile, &after), (&expected(0.5), &expected(0.5), &expected(0.5)));
            assert_eq!(last, expected(1.5));
        }
    }
}

#[test]
fn ranks_that_use_other_parameters_are_told_before_an_update() {
    let ended = on_ranks(2, Stage::Parameters, |rank, device| {
        let net = prepare::<Ad, _>(Net::<Ad>::new(device), device);
        // Of one size and type, so that nothing but the ranks' own records shows that they are mixed up.
        let own = if rank == 0 { net.second.weight.val().into_data() } else { net.values().swap_remove(3) };
        drop(own);
        load_shards::<Ad, _, String>(net, |_, range| Ok(Some(numbered(0.0, range)))).1
    });
    for rank in ended {
        let told = rank.unwrap_err();
        assert!(told.contains("ZeroConfig::gathers = OneSided") || told.contains("all_gather"), "{told}");
    }
}

#[test]
fn parameters_that_one_rank_cannot_load_are_that_ranks_error() {
    let seen = Mutex::new(Vec::new());
    let ended = on_ranks(2, Stage::Gradients, |rank, device| {
        let net = prepare::<Ad, _>(Net::<Ad>::new(device), device);
        let read = |meta: &ParamMeta, range| match (rank, &*meta.path) {
            (1, "second.weight") => Err("a file is damaged".to_string()),
            _ => Ok(Some(numbered(0.0, range))),
        };
        let (_, loaded) = load_shards::<Ad, _, String>(net, read);
        seen.lock().unwrap().push((rank, loaded.clone()));
        loaded
    });
    let mut seen = seen.into_inner().unwrap();
    seen.sort_by_key(|(rank, _)| *rank);
    assert_eq!(seen, [(0, Ok(())), (1, Err("a file is damaged".to_string()))]);
    for rank in ended {
        let told = rank.unwrap_err();
        assert!(told.contains("rank 1") && told.contains("a file is damaged"), "{told}");
    }
}
