//! The engine and its module: full reads and writes of sharded state, engines that alternate, frozen parameters and
//! parameter groups, and error messages.

use super::*;

#[test]
fn what_is_sharded_can_be_read_and_written_whole() {
    for (stage, float) in Stage::ALL.into_iter().flat_map(|stage| [(stage, Float::F32), (stage, Float::Bf16)]) {
        let base = Run::tiny(stage);
        let run = Run { zero: ZeroConfig { param_dtype: float, ..base.zero.clone() }, ..base };
        on_ranks(run.ranks, &run.zero, |device| {
            let mut engine = engine(&run, config(1), &device);
            let path = "h.1.mlp.c_fc.weight";
            let train = |engine: &mut Engine, row: usize| {
                let batch = tokens(&run, row..row + 2, &device);
                let loss = engine.forward(|model| model.loss(batch));
                engine.backward(loss);
            };
            assert!(matches!(engine.full_gradient(path), Err(EngineError::NoState { .. })));
            // Before the first update there is no master yet: this makes it.
            let fine = vec![1.0 + f32::EPSILON; 32];
            engine.set_full_parameter("h.0.ln_1.gamma", &fine).unwrap();
            assert_eq!(engine.full_parameter("h.0.ln_1.gamma").unwrap().values, fine);
            train(&mut engine, device.rank() * 2);
            let gradient = engine.full_gradient(path).unwrap();
            assert_eq!(gradient.meta.shape, [32, 128]);
            assert!(gradient.values.iter().any(|&x| x != 0.0));
            assert!(matches!(engine.full_optimizer_state(path, "exp_avg"), Err(EngineError::NoState { .. })));
            let doubled: Vec<f32> = gradient.values.iter().map(|x| 2.0 * x).collect();
            engine.set_full_gradient(path, &doubled).unwrap();
            let gradient = engine.full_gradient(path).unwrap();
            assert_eq!(gradient.values, doubled);
            engine.step().unwrap();

            // The first moment after one step of Adam is a tenth of the gradient.
            let moment = engine.full_optimizer_state(path, "exp_avg").unwrap().values;
            let tenth = moment.iter().zip(&gradient.values).map(|(m, g)| (m - 0.1 * g).abs()).fold(0f32, f32::max);
            assert!(tenth < 1e-6, "{tenth}");
            engine.set_full_optimizer_state(path, "exp_avg", &vec![0.25; moment.len()]).unwrap();
            assert!(engine.full_optimizer_state(path, "exp_avg").unwrap().values.iter().all(|&x| x == 0.25));
            assert!(matches!(
                engine.set_full_optimizer_state(path, "exp_avg", &[0.0]),
                Err(EngineError::Size { expected: 4096, got: 1, .. })
            ));

            engine.set_full_optimizer_state(path, "exp_avg", &moment).unwrap();

            let new: Vec<f32> = (0..4096).map(|i| i as f32 / 4096.0 + 1e-4).collect();
            engine.set_full_parameter(path, &new).unwrap();
            assert_eq!(engine.full_parameter(path).unwrap().values, new, "an fp32 master keeps all digits");

            // Rank 1's change wins; rank 0's is lost.
            engine.gathered(
                |param| param.path.starts_with("ln_f"),
                Some(1),
                |found| {
                    assert_eq!(
                        found.iter().map(|p| p.meta.path.as_str()).collect::<Vec<_>>(),
                        ["ln_f.gamma", "ln_f.beta"]
                    );
                    for parameter in found {
                        parameter.values.fill(if device.rank() == 1 { 0.5 } else { 7.0 });
                    }
                },
            );
            assert!(engine.full_parameter("ln_f.gamma").unwrap().values.iter().all(|&x| x == 0.5));
            let seen = engine.gathered(|param| param.path == "ln_f.beta", None, |found| found[0].values.clone());
            assert!(seen.iter().all(|&x| x == 0.5));

            // What nobody changes keeps all its digits, and what is changed gets those it is given.
            let fine = 1.0 + f32::EPSILON;
            engine.gathered(
                |param| param.path == path || param.path == "ln_f.gamma",
                Some(0),
                |found| {
                    found.iter_mut().filter(|p| p.meta.path == "ln_f.gamma").for_each(|p| p.values[0] = fine);
                },
            );
            assert_eq!(engine.full_parameter(path).unwrap().values, new);
            assert_eq!(engine.full_parameter("ln_f.gamma").unwrap().values[0], fine);

            let error = engine.full_parameter("ln_f.gama").unwrap_err().to_string();
            assert!(error.contains("did you mean \"ln_f.gamma\""), "{error}");
            // Training goes on from what was written.
            train(&mut engine, 8 + device.rank() * 2);
            assert!(matches!(engine.step().unwrap(), Step::Updated(_)));
            let moved = engine.full_parameter(path).unwrap().values;
            assert!(moved != new && moved.iter().zip(&new).all(|(a, b)| (a - b).abs() < 0.01));
        });
    }
}

#[test]
fn two_forwards_before_two_backwards_and_two_engines() {
    for stage in Stage::ALL {
        let run = Run::tiny(stage);
        // Two engines take turns within each other's updates.
        let losses = on_ranks(run.ranks, &run.zero, |device| {
            let mut engines = [engine(&run, config(2), &device), engine(&run, config(2), &device)];
            let mut losses = Vec::new();
            for update in 0..4 {
                let passes: Vec<_> = (0..2)
                    .flat_map(|micro| [0, 1].map(|which| (micro, which)))
                    .map(|(micro, which)| {
                        let first = (update * 2 + micro) * 4 + device.rank() * 2;
                        let batch = tokens(&run, first..first + 2, &device);
                        let loss = engines[which].forward(|model| model.loss(batch));
                        losses.push(value(&loss));
                        (which, loss)
                    })
                    .collect();
                for (which, loss) in passes {
                    engines[which].backward(loss);
                    engines[which].step().unwrap();
                }
            }
            assert_eq!(engines[0].steps(), 4);
            losses
        });
        // Parameters born in one run differ between engines: each is compared with itself alone.
        let alone = on_ranks(run.ranks, &run.zero, |device| {
            let mut first = engine(&run, config(2), &device);
            let mut losses = Vec::new();
            for micro in 0..8 {
                let row = micro * 4 + device.rank() * 2;
                let loss = first.forward(|model| model.loss(tokens(&run, row..row + 2, &device)));
                losses.push(value(&loss));
                first.backward(loss);
                first.step().unwrap();
            }
            losses
        });
        for (both, alone) in losses.iter().zip(&alone) {
            let mine: Vec<f64> = both.iter().step_by(2).copied().collect();
            assert!(worst(alone, &mine) < 1e-6, "stage {stage}: {alone:?} against {mine:?}");
        }
    }
}

#[test]
fn frozen_parameters_and_groups() {
    use burn::module::Module;
    for stage in Stage::ALL {
        let run = Run::tiny(stage);
        on_ranks(run.ranks, &run.zero, |device| {
            let mut model = run.model.init::<B>(&device);
            model.wpe = model.wpe.no_grad();
            let optimizer = Fused::new(Rule::sgd())
                .with_group(Rule::sgd(), 0.0, |param| param.shape.len() < 2)
                .with_group(Rule::lion(), 1.0, |param| param.path == "wte");
            let mut engine = ZeroEngine::initialize(model, optimizer, config(1), &device).unwrap();
            let read = |engine: &Engine, path: &str| engine.full_parameter(path).unwrap().values;
            let paths = ["wte", "wpe", "h.0.ln_1.gamma", "h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias"];
            let before = paths.map(|path| read(&engine, path));
            let batch = tokens(&run, device.rank() * 2..device.rank() * 2 + 2, &device);
            let loss = engine.forward(|model| model.loss(batch));
            engine.backward(loss);
            engine.step().unwrap();
            let moved: Vec<bool> = paths.iter().zip(&before).map(|(path, old)| read(&engine, path) != *old).collect();
            assert_eq!(moved, [true, false, false, true, false], "frozen, or in the group whose rate is 0");
            let step = read(&engine, "wte").iter().zip(&before[0]).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            assert!((step - 1e-3).abs() < 1e-6, "a step of Lion is the learning rate: {step}");
            let _ = engine.model().num_params();
        });
    }
}

#[test]
fn mistakes_are_told() {
    let run = Run::tiny(Stage::Parameters);
    let fails = |zero: &ZeroConfig, body: fn(&Run, &Device) -> Result<(), EngineError>| {
        let launched = launch::<Flex, (), EngineError>(2, zero, &launch_options(), |device| body(&run, &device));
        launched.unwrap_err().to_string()
    };
    let error = fails(&run.zero, |run, device| engine(run, config(1), device).step().map(|_| ()));
    assert!(error.contains("step was called before backward"), "{error}");
    let error = fails(&run.zero, |run, device| {
        let model = run.model.init::<B>(device);
        ZeroEngine::initialize(model, Fused::new(Rule::sgd()), config(0), device).map(|_| ())
    });
    assert!(error.contains("accumulation is 0"), "{error}");
    let error = fails(&ZeroConfig { param_dtype: Float::Bf16, ..run.zero.clone() }, |run, device| {
        let optimizer = AdamWConfig::new().init();
        ZeroEngine::initialize(run.model.init::<B>(device), optimizer, config(1), device).map(|_| ())
    });
    assert!(error.contains("keeps no fp32 master weights"), "{error}");
    let error = fails(&ZeroConfig { param_dtype: Float::F16, ..run.zero.clone() }, |run, device| {
        ZeroEngine::initialize(run.model.init::<B>(device), Fused::new(Rule::sgd()), config(1), device).map(|_| ())
    });
    assert!(error.contains("loss_scale is absent"), "{error}");
    let error = fails(&run.zero, |run, device| {
        let mut engine = engine(run, config(1), device);
        for _ in 0..2 {
            let loss = engine.forward(|model| model.loss(tokens(run, 0..2, device)));
            engine.backward(loss);
        }
        engine.step().map(|_| ())
    });
    assert!(error.contains("call step after every backward"), "{error}");
    let error = fails(&run.zero, |run, device| {
        let mut engine = engine(run, config(1), device);
        engine.no_sync(|engine| {
            let batch = tokens(run, 0..2, device);
            let loss = engine.forward(|model| model.loss(batch));
            engine.backward(loss);
            engine.step().map(|_| ())
        })
    });
    assert!(error.contains("leave no_sync before the last micro-batch"), "{error}");
}
