//! Running statistics in checkpoints and records.

use super::*;

/// A layer with running statistics, which every forward pass updates in place.
#[derive(Module, Debug)]
struct Normed<B: burn::tensor::backend::Backend> {
    first: burn::nn::Linear<B>,
    norm: burn::nn::BatchNorm<B>,
    second: burn::nn::Linear<B>,
}

impl<B: burn::tensor::backend::Backend> Normed<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: burn::nn::LinearConfig::new(4, 5).init(device),
            norm: burn::nn::BatchNormConfig::new(5).init(device),
            second: burn::nn::LinearConfig::new(5, 2).init(device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.second.forward(self.norm.forward(self.first.forward(x)))
    }
}

fn rows<D: burn::tensor::backend::Backend<Device = Device>>(step: usize, rank: usize, device: &Device) -> Tensor<D, 2> {
    let values: Vec<f32> = (0..24).map(|i| ((i * 5 + step * 7 + rank * 3) % 13) as f32 / 5.0 - 1.0).collect();
    Tensor::from_data(TensorData::new(values, [6, 4]), device)
}

/// Running statistics are per rank in training, as in Burn. A checkpoint holds rank 0's and restores them on all ranks.
#[test]
fn a_batch_norms_running_statistics_are_saved_and_loaded() {
    type NormedEngine = ZeroEngine<B, Normed<B>, Fused<B>>;
    let statistics = |engine: &NormedEngine| {
        let norm = &engine.model().valid().norm;
        let read = |tensor: Tensor<zero_burn::Zero<Flex>, 1>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        [read(norm.running_mean.value()), read(norm.running_var.value())]
    };
    let step = |engine: &mut NormedEngine, step: usize, device: &Device| {
        let x = rows::<B>(step, device.rank(), device);
        let loss = engine.forward(|model| model.forward(x).powf_scalar(2.0).mean());
        let value = loss.clone().into_data().iter::<f32>().next().unwrap();
        engine.backward(loss);
        assert!(matches!(engine.step().unwrap(), Step::Updated(_)));
        value
    };
    let evaluate = |engine: &NormedEngine, device: &Device| {
        let y = engine.evaluate(|model| model.forward(rows(9, 0, device)));
        y.into_data().iter::<f32>().map(f32::to_bits).collect::<Vec<_>>()
    };
    let config = || EngineConfig { clipping: None, ..EngineConfig::default() };
    let begin = |device: &Device| -> NormedEngine {
        ZeroEngine::initialize(Normed::new(device), Fused::new(Rule::adamw()), config(), device).unwrap()
    };
    // The same on Burn alone.
    let bare = {
        use burn::nn::BatchNorm;
        type Bare = burn::backend::Autodiff<Flex>;
        let device = Default::default();
        let norm: BatchNorm<Bare> = burn::nn::BatchNormConfig::new(4).init(&device);
        for step in 0..3 {
            let values = rows::<B>(step, 0, &Device::default()).into_data();
            norm.forward(Tensor::<Bare, 2>::from_data(values, &device));
        }
        norm.running_mean.value_sync().into_data().iter::<f32>().collect::<Vec<_>>()
    };
    let on_zero = on_ranks(2, &ZeroConfig::new(Stage::Parameters), |device| {
        let norm = burn::nn::BatchNormConfig::new(4).init::<B>(&device);
        let norm = zero_burn::module::prepare::<B, _>(norm, &device);
        for step in 0..3 {
            norm.forward(rows::<B>(step, 0, &device));
        }
        norm.valid().running_mean.value().into_data().iter::<f32>().collect::<Vec<_>>()
    });
    assert_eq!(on_zero, [bare.clone(), bare]);

    for ranks in 1..=3 {
        for stage in Stage::ALL {
            let what = format!("{ranks} ranks, stage {stage}");
            let dir = tempfile::tempdir().unwrap();
            let zero = ZeroConfig { seed: 5, param_persistence_threshold: 0, ..ZeroConfig::new(stage) };
            let seen = on_ranks(ranks, &zero, |device| {
                let mut engine = begin(&device);
                for n in 0..3 {
                    step(&mut engine, n, &device);
                }
                let saved = engine.save(dir.path(), 3, Map::new(), &SaveOptions::default()).unwrap();
                let own = statistics(&engine);
                let whole = ["norm.running_mean", "norm.running_var"].map(|p| engine.full_parameter(p).unwrap().values);
                assert_eq!(whole, own, "{what}: what is read is up to date");
                let evaluated = evaluate(&engine, &device);
                // On goes the training, and back to what was saved.
                let on = step(&mut engine, 3, &device);
                engine.load(&Checkpoint::open(&saved.path).unwrap(), Parts::All).unwrap();
                let back = (statistics(&engine), evaluate(&engine, &device), step(&mut engine, 3, &device));
                // A new engine, before any forward pass.
                let mut fresh = begin(&device);
                fresh.load(&Checkpoint::open(&saved.path).unwrap(), Parts::All).unwrap();
                let new = (statistics(&fresh), evaluate(&fresh, &device), step(&mut fresh, 3, &device));
                assert_eq!(back, new, "{what}");
                assert_eq!(on.to_bits(), new.2.to_bits(), "{what}: the loss after the save");
                // What one has learnt since is not lost with a save beside it.
                let after = statistics(&fresh);
                assert_ne!(after, new.0, "{what}");
                (own, evaluated, new.0, new.1)
            });
            for (own, _, loaded, evaluated) in &seen {
                assert_eq!((loaded, evaluated), (&seen[0].0, &seen[0].1), "{what}: rank 0's statistics on all");
                assert_eq!(ranks > 1 && own != &seen[0].0, own != loaded, "{what}");
            }
            assert!(ranks == 1 || seen[0].0 != seen[1].0, "{what}: each rank has statistics of its own rows");
        }
    }
}

/// A batch norm loaded from a record has running statistics too, not parameters.
#[test]
fn a_batch_norm_from_a_record_goes_on() {
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    for stage in Stage::ALL {
        on_ranks(2, &ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(stage) }, |device| {
            let model = zero_burn::module::prepare::<B, _>(Normed::<B>::new(&device), &device);
            model.forward(rows(0, 1, &device));
            let before = model.valid().norm.running_var.value().into_data().to_vec::<f32>().unwrap();
            let bytes = recorder.record(model.into_record(), ()).unwrap();
            let model = Normed::<B>::new(&device).load_record(recorder.load(bytes, &device).unwrap());
            let mut engine: ZeroEngine<B, Normed<B>, Fused<B>> =
                ZeroEngine::initialize(model, Fused::new(Rule::adamw()), EngineConfig::default(), &device).unwrap();
            let loaded = engine.model().valid().norm.running_var.value().into_data().to_vec::<f32>().unwrap();
            assert!(device.rank() > 0 || loaded == before, "rank 0's");
            let trained = |engine: &ZeroEngine<B, Normed<B>, Fused<B>>| {
                engine.parameters().into_iter().filter(|meta| meta.trained).map(|meta| meta.path).collect::<Vec<_>>()
            };
            assert!(trained(&engine).iter().all(|path| !path.contains("running")), "{:?}", trained(&engine));
            // An idle rank has had no forward pass; all save and load alike.
            if device.rank() == 0 {
                let loss = engine.forward(|model| model.forward(rows(3, 0, &device)).powf_scalar(2.0).mean());
                engine.backward(loss);
            } else {
                engine.skip_batch();
            }
            engine.step().unwrap();
            let zeros = vec![0.25; 5];
            engine.set_full_parameter("norm.running_var", &zeros).unwrap();
            assert_eq!(engine.full_parameter("norm.running_var").unwrap().values, zeros);
            let y = engine.evaluate(|model| model.forward(rows(9, 0, &device)));
            assert!(y.into_data().iter::<f32>().all(f32::is_finite));
        });
    }
}
