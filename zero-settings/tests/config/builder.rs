//! Plans built in code.

use super::*;

#[test]
fn the_builder_has_the_files_rules() {
    let plan = ZeroPlan::builder(Stage::DataParallel).build(3).unwrap();
    assert_eq!(plan.batch, Batch { global: 3, micro: 1, accumulation: 1 });
    assert_eq!(
        (plan.gradient_clipping, plan.zero.reduce_bucket_size, plan.zero.max_reuse_distance),
        (None, 1 << 23, 0)
    );
    assert_eq!(plan.warnings, []);

    let files = LogFiles { output_path: "out".into(), job_name: "job".into() };
    let nvme = Offload::to(OffloadDevice::Nvme { path: "/n".into() });
    let plan = ZeroPlan::builder(Stage::Parameters)
        .global_batch(16)
        .accumulation(2)
        .reduce_bucket_size(10)
        .prefetch_bucket_size(11)
        .max_live_parameters(12)
        .max_reuse_distance(13)
        .param_persistence_threshold(14)
        .overlap_comm(false)
        .save_16bit_model(true)
        .gradient_clipping(0.25)
        .prescale_gradients(true)
        .gradient_predivide_factor(4.0)
        .communication_data_type(Float::Bf16)
        .grad_accum_dtype(Float::F16)
        .precision(Precision::Fp16 { loss_scale: LossScale::Static(2.0) })
        .precision(Precision::Bf16 { check_grad_overflow: false })
        .offload_optimizer(&nvme)
        .offload_param(&nvme)
        .steps_per_print(5)
        .wall_clock_breakdown(true)
        .memory_breakdown(true)
        .tensorboard(&files)
        .csv_monitor(&files)
        .build(4)
        .unwrap();
    assert_eq!(plan.batch, Batch { global: 16, micro: 2, accumulation: 2 });
    let sizes = [
        plan.zero.reduce_bucket_size,
        plan.zero.prefetch_bucket_size,
        plan.zero.max_live_parameters,
        plan.zero.max_reuse_distance,
        plan.zero.param_persistence_threshold,
    ];
    assert_eq!(sizes, [10, 11, 12, 13, 14]);
    assert_eq!((plan.zero.overlap_comm, plan.gradient_clipping), (false, Some(0.25)));
    assert_eq!((plan.prescale_gradients, plan.gradient_predivide_factor), (true, 4.0));
    assert_eq!(plan.precision, Precision::Bf16 { check_grad_overflow: false });
    assert_eq!((plan.zero.communication_dtype, plan.grad_accum_dtype), (Some(Float::Bf16), Some(Float::F16)));
    assert_eq!((plan.offload_optimizer, plan.offload_param), (Some(nvme.clone()), Some(nvme)));
    let report = Report {
        steps_per_print: Some(5),
        wall_clock_breakdown: true,
        memory_breakdown: true,
        tensorboard: Some(files.clone()),
        csv_monitor: Some(files),
        ..Report::default()
    };
    assert_eq!(plan.report, report);

    let error = ZeroPlan::builder(Stage::Gradients).global_batch(5).gradient_clipping(f64::NAN).build(2).unwrap_err();
    insta::assert_snapshot!(error, @"plan: gradient_clipping: expected a number of at least 0, got NaN");
    let error = ZeroPlan::builder(Stage::Gradients).global_batch(5).build(2).unwrap_err();
    insta::assert_snapshot!(error, @"plan: train_batch_size: train_batch_size 5 cannot be split: 2 ranks = 2, and 5 / 2 leaves 1; set train_batch_size to 4 or 6");
    assert!(ZeroPlan::builder(Stage::Gradients).build(0).is_err());
}

#[test]
fn optimizers_and_schedules_survive_the_builder() {
    let optimizers = [
        OptimizerPlan {
            lr: 0.1,
            rule: Rule::AdamW { beta_1: 0.2, beta_2: 0.3, epsilon: 0.4, weight_decay: 0.5, bias_correction: true },
        },
        OptimizerPlan {
            lr: 0.1,
            rule: Rule::Adam { beta_1: 0.2, beta_2: 0.3, epsilon: 0.4, weight_decay: 0.5, bias_correction: false },
        },
        OptimizerPlan {
            lr: 0.1,
            rule: Rule::Lamb {
                beta_1: 0.2,
                beta_2: 0.3,
                epsilon: 0.4,
                weight_decay: 0.5,
                bias_correction: false,
                max_coeff: 0.7,
                min_coeff: 0.6,
            },
        },
        OptimizerPlan { lr: 0.1, rule: Rule::Sgd { momentum: 0.2, weight_decay: 0.3, nesterov: true } },
        OptimizerPlan { lr: 0.1, rule: Rule::Lion { beta_1: 0.2, beta_2: 0.3, weight_decay: 0.4 } },
        OptimizerPlan { lr: 0.1, rule: Rule::Adagrad { epsilon: 0.2, weight_decay: 0.3 } },
    ];
    for optimizer in optimizers {
        let plan = ZeroPlan::builder(Stage::DataParallel).optimizer(optimizer).build(1).unwrap();
        assert_eq!(plan.optimizer, Some(optimizer));
    }
    let kind = Warmup::Linear;
    let schedules = [
        Schedule::WarmupLr { min_lr: 0.1, max_lr: 0.2, warmup_steps: 3, kind },
        Schedule::WarmupDecayLr { min_lr: 0.1, max_lr: 0.2, warmup_steps: 3, kind, total_steps: 4 },
        Schedule::WarmupCosineLr {
            base_lr: 1e-3,
            total_steps: 4,
            warmup_min_ratio: 0.1,
            warmup_steps: 3,
            cos_min_ratio: 0.2,
            kind,
        },
        Schedule::OneCycle(OneCycle {
            cycle_min_lr: 0.1,
            cycle_max_lr: 0.2,
            decay_lr_rate: 0.3,
            first_step_size: 4,
            second_step_size: 4,
            first_stair_count: 6,
            second_stair_count: 7,
            decay_step_size: 8,
            momentum: None,
        }),
        Schedule::OneCycle(OneCycle {
            cycle_min_lr: 0.1,
            cycle_max_lr: 0.2,
            decay_lr_rate: 0.0,
            first_step_size: 4,
            second_step_size: 5,
            first_stair_count: 0,
            second_stair_count: 0,
            decay_step_size: 0,
            momentum: Some(CycleMomentum { min_mom: 0.4, max_mom: 0.5, decay_mom_rate: 0.6 }),
        }),
        Schedule::LrRangeTest { min_lr: 0.1, step_size: 2, step_rate: 0.3, staircase: true },
    ];
    for schedule in schedules {
        let plan = ZeroPlan::builder(Stage::DataParallel).schedule(schedule.clone()).build(1).unwrap();
        assert_eq!(plan.schedule, Some(schedule));
        assert!(plan.explain().lines().all(|line| line.ends_with('.')));
    }
    for (rate, told) in [(f64::NAN, "got NaN"), (f64::INFINITY, "got NaN"), (-1.0, "got -1")] {
        let schedule = Schedule::LrRangeTest { min_lr: rate, step_size: 2, step_rate: 0.3, staircase: true };
        let error = ZeroPlan::builder(Stage::DataParallel).schedule(schedule).build(1).unwrap_err().to_string();
        assert!(
            error.contains("scheduler.params.lr_range_test_min_lr: expected a number") && error.contains(told),
            "{error}"
        );
    }
    let error = ZeroPlan::builder(Stage::DataParallel).schedule(Schedule::Constant(0.1)).build(1).unwrap_err();
    assert!(error.to_string().contains("scheduler.type: expected one of WarmupLR"), "{error}");
    let bad = OptimizerPlan { lr: -0.1, rule: Rule::Sgd { momentum: 0.0, weight_decay: 0.0, nesterov: true } };
    insta::assert_snapshot!(ZeroPlan::builder(Stage::DataParallel).optimizer(bad).build(1).unwrap_err(), @"plan: optimizer.params.lr: expected a number of at least 0, got -0.1");
}

#[test]
fn the_watchdog_has_a_section() {
    let text = r#"{ "train_batch_size": 2, "watchdog": { "deadline_seconds": 7.5, "flight_dir": "records" } }"#;
    let expected = Watchdog { deadline: Some(7.5), flight_dir: Some("records".into()) };
    assert_eq!(Config::from_text("ds.json", Format::Json, text).unwrap().watchdog(), expected);
    assert_eq!(json(text, &on(2)).unwrap().watchdog, expected);
    assert_eq!(json(r#"{ "train_batch_size": 2 }"#, &on(2)).unwrap().watchdog, Watchdog::default());
    let error = json(r#"{ "train_batch_size": 2, "watchdog": { "deadline": 7 } }"#, &on(2)).unwrap_err().to_string();
    assert!(error.contains("watchdog.deadline") && error.contains("deadline_seconds"), "{error}");
}

/// The keys that a file lacks have the builder's values; the file's own values stay.
#[test]
fn a_builder_fills_what_a_file_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let others = ZeroPlanBuilder::default()
        .stage(Stage::Parameters)
        .micro_batch(2)
        .accumulation(3)
        .learning_rate(0.5)
        .betas([0.8, 0.7])
        .weight_decay(0.25)
        .gradient_clipping(4.0)
        .mixed_precision(MixedPrecision::Bf16)
        .offload_optimizer(&Offload { ratio: 0.5, ..Offload::to(OffloadDevice::Cpu) });
    let auto = Auto { micro_batch: Some(1), ..Auto::default() };
    let plan = |name: &str, text: &str, world: usize| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        others.fill_file(&path).unwrap().resolve(&Context { auto: auto.clone(), ..on(world) }).unwrap()
    };
    let of = |plan: &ZeroPlan| (plan.zero.stage.number(), plan.batch, plan.gradient_clipping);
    let batch = |global, micro, accumulation| Batch { global, micro, accumulation };
    let bf16 = Precision::Bf16 { check_grad_overflow: true };

    let empty = plan("empty.json", "{}", 2);
    assert_eq!(of(&empty), (3, batch(12, 2, 3), Some(4.0)));
    assert_eq!((empty.precision, empty.optimizer), (bf16, None));
    assert_eq!(empty.offload_optimizer.map(|offload| offload.ratio), Some(0.5));

    let text = r#"{"train_batch_size": 24, "train_micro_batch_size_per_gpu": null, "gradient_clipping": 0, "fp16": {"enabled": true},
        "zero_optimization": {"stage": 1, "cpu_offload": false},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-6}}}"#;
    let own = plan("own.json", text, 4);
    assert_eq!(of(&own), (1, batch(24, 2, 3), None));
    let optimizer = own.optimizer.unwrap();
    let rule = Rule::AdamW { beta_1: 0.8, beta_2: 0.7, epsilon: 1e-6, weight_decay: 0.25, bias_correction: true };
    assert_eq!((optimizer.lr, optimizer.rule), (0.1, rule));
    assert!(matches!(own.precision, Precision::Fp16 { .. }) && own.offload_optimizer.is_none(), "{own:?}");

    let text = r#"{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": false}, "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": "auto", "cpu_offload": true}, "optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}"#;
    let sgd = plan("sgd.json", text, 1);
    let optimizer = sgd.optimizer.unwrap();
    let rule = Rule::Sgd { momentum: 0.9, weight_decay: 0.25, nesterov: false };
    assert_eq!((optimizer.lr, optimizer.rule, sgd.precision), (0.5, rule, Precision::Fp32));
    assert_eq!(
        (of(&sgd), sgd.offload_optimizer.map(|offload| offload.ratio)),
        ((3, batch(3, 1, 3), Some(4.0)), Some(1.0))
    );

    let text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n";
    let fsdp = plan("fsdp.yaml", text, 2);
    assert_eq!((fsdp.zero.stage.number(), fsdp.gradient_clipping, fsdp.precision), (2, Some(4.0), bf16));

    let text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  gradient_clipping: 0.5\n";
    assert_eq!(of(&plan("plugin.yaml", text, 2)), (3, batch(2, 1, 1), Some(0.5)));
}
