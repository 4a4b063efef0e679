//! Real-world configurations, each with the plan it makes, and what is said of wrong ones.

use std::path::{Path, PathBuf};

use zero_core::Stage;
use zero_train::config::{
    Auto, Batch, Config, ConfigError, Context, DataType, Format, LogFiles, LossScale, MixedPrecision, Offload,
    OffloadDevice, OptimizerPlan, Precision, ProblemKind, Report, SchedulePlan, WarmupType, Watchdog, ZeroPlan,
};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(name)
}

fn on(world: usize) -> Context {
    Context { world: Some(world), ..Context::default() }
}

fn json(text: &str, context: &Context) -> Result<ZeroPlan, ConfigError> {
    Config::from_text("ds.json", Format::Json, text)?.resolve(context)
}

fn yaml(text: &str, context: &Context) -> Result<ZeroPlan, ConfigError> {
    Config::from_text("acc.yaml", Format::Yaml, text)?.resolve(context)
}

fn warnings(plan: &ZeroPlan) -> String {
    plan.warnings.iter().map(|warning| format!("{warning}\n")).collect()
}

/// What Accelerate's script side would know.
fn script() -> Context {
    Context {
        world: Some(4),
        auto: Auto {
            hidden_size: Some(1024),
            micro_batch: Some(8),
            learning_rate: Some(2e-5),
            weight_decay: Some(0.1),
            total_steps: Some(1000),
            warmup_steps: Some(100),
            ..Auto::default()
        },
    }
}

const DYNAMIC: LossScale = LossScale::Dynamic {
    initial_scale_power: 16,
    window: 1000,
    hysteresis: 2,
    consecutive_hysteresis: false,
    min_scale: 1.0,
};

// ---------------------------------------------------------------------------------------------- DeepSpeed

#[test]
fn the_shared_deepspeed_file() {
    let plan = Config::from_file(file("deepspeed_zero3.json")).unwrap().resolve(&on(2)).unwrap();
    let expected = ZeroPlan {
        stage: Stage::Parameters,
        world: 2,
        batch: Batch { global: 8, micro: 2, accumulation: 2 },
        reduce_bucket_size: 500_000,
        prefetch_bucket_size: 50_000,
        max_live_parameters: 1_000_000,
        max_reuse_distance: 1_000_000_000,
        param_persistence_threshold: 1000,
        overlap_comm: Some(true),
        sync_each_batch: None,
        error_if_nonfinite: false,
        gradient_clipping: Some(1.0),
        prescale_gradients: false,
        gradient_predivide_factor: 1.0,
        precision: Precision::Fp32,
        communication_data_type: None,
        grad_accum_dtype: None,
        optimizer: Some(OptimizerPlan::AdamW {
            lr: 1e-3,
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
        }),
        schedule: Some(SchedulePlan::WarmupDecayLr {
            min_lr: 0.0,
            max_lr: 1e-3,
            warmup_steps: 5,
            warmup_type: WarmupType::Linear,
            total_steps: 50,
        }),
        offload_optimizer: None,
        offload_param: None,
        sub_group_size: 1_000_000_000,
        aio: zero_core::offload::AioOptions::default(),
        report: Report { steps_per_print: Some(10), wall_clock_breakdown: true, ..Report::default() },
        watchdog: Watchdog::default(),
        save_16bit_model: true,
        warnings: plan.warnings.clone(),
    };
    assert_eq!(plan, expected);
    insta::assert_snapshot!(warnings(&plan), @"zero_optimization.stage3_gather_16bit_weights_on_model_save: not acted on yet: 16-bit weights come from `zero export`, or from ZeroEngine::export");
    insta::assert_snapshot!(plan.explain(), @r#"
    ZeRO stage 3 over 2 ranks: each rank keeps its part of the optimizer state, of the gradients and of the parameters.
    Batch: 2 rows per rank × 2 micro-batches × 2 ranks = 8 rows per optimizer step.
    Precision: fp32.
    Optimizer: AdamW, lr 0.001, betas 0.9 and 0.999, epsilon 0.00000001, weight decay 0.01.
    Learning rate: 0 to 0.001 in 5 steps (linear), then linearly to 0 at step 50.
    Gradients: clipped to a global norm of 1, averaged over the ranks in buckets of 500,000 elements during the backward pass, with each micro-batch.
    Parameters: gathered 50,000 elements ahead of their use; one stays gathered if it has up to 1,000 elements, or is used again within 1,000,000,000 and no more than 1,000,000 are held.
    Warning: zero_optimization.stage3_gather_16bit_weights_on_model_save: not acted on yet: 16-bit weights come from `zero export`, or from ZeroEngine::export.
    "#);
    // Written for two ranks; at others its three batch sizes contradict each other.
    let error = Config::from_file(file("deepspeed_zero3.json")).unwrap().resolve(&on(4)).unwrap_err();
    assert!(error.to_string().contains("2 × gradient_accumulation_steps 2 × 4 ranks = 16, but train_batch_size is 8"));
}

#[test]
fn stage_0_with_the_least_there_is() {
    let plan = json(r#"{"train_batch_size": 32, "gradient_clipping": 0}"#, &on(4)).unwrap();
    assert_eq!(plan.stage, Stage::DataParallel);
    assert_eq!(plan.batch, Batch { global: 32, micro: 8, accumulation: 1 });
    assert_eq!((plan.reduce_bucket_size, plan.gradient_clipping), (500_000_000, None));
    assert!(plan.warnings.is_empty() && plan.optimizer.is_none() && plan.schedule.is_none());
    // No world anywhere is one rank.
    assert_eq!(json(r#"{"train_batch_size": 32}"#, &Context::default()).unwrap().world, 1);
}

#[test]
fn the_cifar_tutorial_with_fp16_and_a_prescaled_sum() {
    let plan = json(
        r#"{
            "train_batch_size": 16, "steps_per_print": 2000,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
            "gradient_clipping": 1.0, "prescale_gradients": true, "gradient_predivide_factor": 2,
            "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
                     "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
            "wall_clock_breakdown": false,
            "zero_optimization": {"stage": 0, "allgather_partitions": true, "reduce_scatter": true,
                "allgather_bucket_size": 50000000, "reduce_bucket_size": 5e7, "overlap_comm": true,
                "contiguous_gradients": true, "cpu_offload": false}
        }"#,
        &on(2),
    )
    .unwrap();
    assert_eq!(
        plan.optimizer,
        Some(OptimizerPlan::AdamW { lr: 1e-3, beta_1: 0.8, beta_2: 0.999, epsilon: 1e-8, weight_decay: 3e-7 })
    );
    assert_eq!(
        plan.schedule,
        Some(SchedulePlan::WarmupLr { min_lr: 0.0, max_lr: 1e-3, warmup_steps: 1000, warmup_type: WarmupType::Log })
    );
    assert_eq!((plan.prescale_gradients, plan.gradient_predivide_factor), (true, 2.0));
    let LossScale::Dynamic { initial_scale_power: 15, window: 500, .. } = (match plan.precision {
        Precision::Fp16 { loss_scale } => loss_scale,
        other => panic!("{other:?}"),
    }) else {
        panic!("{:?}", plan.precision)
    };
    insta::assert_snapshot!(warnings(&plan), @r#"
    zero_optimization.allgather_bucket_size: has no effect: the gather of parameters has no such setting
    zero_optimization.cpu_offload: deprecated; write `offload_optimizer`
    "#);
}

#[test]
fn stage_2_with_cpu_offload_and_bf16() {
    let plan = json(
        r#"{
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "gradient_clipping": 0.5,
            "bf16": {"enabled": true}, "communication_data_type": "FP32", "data_types": {"grad_accum_dtype": "float32"},
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "adam_w_mode": false}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
                "contiguous_gradients": true, "overlap_comm": true, "reduce_bucket_size": 2e8, "round_robin_gradients": true}
        }"#,
        &on(8),
    )
    .unwrap();
    assert_eq!(plan.batch, Batch { global: 256, micro: 4, accumulation: 8 });
    assert_eq!(plan.precision, Precision::Bf16 { check_grad_overflow: true });
    assert_eq!(plan.offload_optimizer, Some(Offload { pin_memory: true, ..Offload::to(OffloadDevice::Cpu) }));
    assert_eq!((plan.communication_data_type, plan.grad_accum_dtype), (Some(DataType::Fp32), Some(DataType::Fp32)));
    assert!(matches!(plan.optimizer, Some(OptimizerPlan::Adam { weight_decay: 0.0, .. })));
    insta::assert_snapshot!(warnings(&plan), @r#"
    zero_optimization.round_robin_gradients: has no effect: on the CPU the device's memory and the host's are one
    "#);
}

#[test]
fn stage_3_with_everything_on_nvme() {
    let plan = json(
        r#"{
            "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 1,
            "fp16": {"enabled": true, "loss_scale": 128},
            "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                "stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 1e5, "sub_group_size": 1e9,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": false, "buffer_count": 4},
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_size": 1e9, "max_in_cpu": 1e9}},
            "aio": {"block_size": 1048576, "queue_depth": 16, "single_submit": false, "overlap_events": true},
            "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true},
            "tensorboard": {"enabled": true, "output_path": "logs", "job_name": "run"},
            "csv_monitor": {"enabled": false, "job_name": "never"}
        }"#,
        &on(2),
    )
    .unwrap();
    let nvme = OffloadDevice::Nvme { path: "/local_nvme".into() };
    assert_eq!(plan.offload_optimizer, Some(Offload::to(nvme.clone())));
    assert_eq!(
        plan.offload_param,
        Some(Offload {
            pin_memory: true,
            buffer_count: 5,
            buffer_size: 1_000_000_000,
            max_in_cpu: 1_000_000_000,
            ..Offload::to(nvme)
        })
    );
    assert_eq!(plan.prefetch_bucket_size, 10_000_000);
    assert_eq!(plan.precision, Precision::Fp16 { loss_scale: LossScale::Static(128.0) });
    assert_eq!(plan.report.tensorboard, Some(LogFiles { output_path: "logs".into(), job_name: "run".into() }));
    assert_eq!(plan.report.csv_monitor, None);
    insta::assert_snapshot!(warnings(&plan), @r#"
    activation_checkpointing.partition_activations: not acted on yet: activations are not checkpointed by the configuration yet
    activation_checkpointing.cpu_checkpointing: not acted on yet: activations are not checkpointed by the configuration yet
    "#);
}

#[test]
fn the_bloom_configuration_of_megatron_deepspeed() {
    let text = r#"{
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 2048, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "steps_per_print": 2000,
        "wall_clock_breakdown": false
    }"#;
    let plan = json(text, &on(8)).unwrap();
    assert_eq!((plan.stage, plan.batch.accumulation), (Stage::OptimizerState, 128));
    assert!(plan.warnings.is_empty());
    // Its fp16 sister.
    let text = r#"{
        "train_micro_batch_size_per_gpu": 1, "train_batch_size": 16, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
            "initial_scale_power": 12},
        "steps_per_print": 2000, "wall_clock_breakdown": false, "zero_allow_untested_optimizer": true,
        "curriculum_learning": {"enabled": false, "curriculum_type": "seqlen"}
    }"#;
    let plan = json(text, &on(8)).unwrap();
    assert!(plan.warnings.is_empty() && plan.batch.accumulation == 2);
}

#[test]
fn the_hugging_face_trainer_configuration_is_all_auto() {
    let text = r#"{
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
            "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": true, "allgather_bucket_size": "auto"},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }"#;
    let mut context = script();
    let auto = &mut context.auto;
    (auto.beta_1, auto.beta_2, auto.epsilon) = (Some(0.9), Some(0.95), Some(1e-6));
    (auto.accumulation, auto.mixed_precision, auto.gradient_clipping) =
        (Some(2), Some(MixedPrecision::Bf16), Some(0.3));
    let plan = json(text, &context).unwrap();
    assert_eq!(plan.batch, Batch { global: 64, micro: 8, accumulation: 2 });
    assert_eq!(plan.precision, Precision::Bf16 { check_grad_overflow: true });
    assert_eq!(plan.gradient_clipping, Some(0.3));
    assert_eq!(
        plan.optimizer,
        Some(OptimizerPlan::AdamW { lr: 2e-5, beta_1: 0.9, beta_2: 0.95, epsilon: 1e-6, weight_decay: 0.1 })
    );
    assert_eq!(
        plan.schedule,
        Some(SchedulePlan::WarmupLr { min_lr: 0.0, max_lr: 2e-5, warmup_steps: 100, warmup_type: WarmupType::Log })
    );
    insta::assert_snapshot!(warnings(&plan), @"zero_optimization.stage3_gather_16bit_weights_on_model_save: not acted on yet: 16-bit weights come from `zero export`, or from ZeroEngine::export");
    // Without the program's values each is named, with what to supply.
    insta::assert_snapshot!(json(text, &Context::default()).unwrap_err(), @r#"
    ds.json: optimizer.params.lr: "auto" cannot be filled: supply the learning rate (Auto::learning_rate), or give a number
    ds.json: optimizer.params.betas: "auto" cannot be filled: supply both decays (Auto::beta_1 and Auto::beta_2), or give two numbers
    ds.json: optimizer.params.eps: "auto" cannot be filled: supply epsilon (Auto::epsilon), or give a number
    ds.json: optimizer.params.weight_decay: "auto" cannot be filled: supply the weight decay (Auto::weight_decay), or give a number
    ds.json: train_micro_batch_size_per_gpu: no batch size: give train_batch_size or train_micro_batch_size_per_gpu, or let the program supply Auto::micro_batch
    ds.json: zero_optimization.reduce_bucket_size: "auto" cannot be filled: supply the model's hidden size (Auto::hidden_size), or give a number of elements
    ds.json: zero_optimization.stage3_prefetch_bucket_size: "auto" cannot be filled: supply the model's hidden size (Auto::hidden_size), or give a number of elements
    ds.json: zero_optimization.stage3_param_persistence_threshold: "auto" cannot be filled: supply the model's hidden size (Auto::hidden_size), or give a number of elements
    ds.json: fp16.enabled: "auto" cannot be filled: supply the precision (Auto::mixed_precision), or write true or false
    ds.json: bf16.enabled: "auto" cannot be filled: supply the precision (Auto::mixed_precision), or write true or false
    ds.json: scheduler.params.warmup_num_steps: "auto" cannot be filled: supply the steps of the warm-up (Auto::warmup_steps), or give a number
    "#);
}

// ---------------------------------------------------------------------------------------------- Accelerate

#[test]
fn the_shared_accelerate_file() {
    let context = Context { auto: Auto { micro_batch: Some(4), ..Auto::default() }, ..Context::default() };
    let config = Config::from_file(file("accelerate_zero3_cpu.yaml")).unwrap();
    assert_eq!((config.stage(), config.processes()), (Stage::Parameters, Some(1)));
    let plan = config.resolve(&context).unwrap();
    assert_eq!(plan.batch, Batch { global: 4, micro: 4, accumulation: 1 });
    assert_eq!((plan.world, plan.gradient_clipping), (1, Some(1.0)));
    assert_eq!(plan.precision, Precision::Fp32);
    assert!(plan.save_16bit_model);
    assert_eq!(
        plan.offload_param,
        Some(Offload {
            pin_memory: true,
            buffer_count: 5,
            max_in_cpu: 1_000_000_000,
            ..Offload::to(OffloadDevice::Cpu)
        })
    );
    assert_eq!(plan.reduce_bucket_size, 500_000_000);
    insta::assert_snapshot!(warnings(&plan), @r#"
    deepspeed_config.zero3_save_16bit_model: not acted on yet: 16-bit weights come from `zero export`, or from ZeroEngine::export
    "#);
    let error = config.resolve(&Context { world: Some(2), ..context }).unwrap_err().to_string();
    assert!(
        error.ends_with("num_processes: the file asks for a world of 1, but the program has 2: change one of them")
    );
}

/// Accelerate's template for a stage.
fn template(stage: u8, offload: &str) -> String {
    let (adam, specific) = match stage {
        3 => (
            "",
            r#""stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "sub_group_size": 1e9,
               "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
               "stage3_gather_16bit_weights_on_model_save": "auto", "#,
        ),
        _ => (
            r#", "torch_adam": true, "adam_w_mode": true"#,
            r#""allgather_partitions": true, "allgather_bucket_size": 2e8, "reduce_scatter": true, "#,
        ),
    };
    format!(
        r#"{{
        "fp16": {{"enabled": true, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
            "min_loss_scale": 1}},
        "optimizer": {{"type": "AdamW", "params": {{"lr": "auto", "weight_decay": "auto"{adam}}}}},
        "scheduler": {{"type": "WarmupDecayLR", "params": {{"warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto", "total_num_steps": "auto"}}}},
        "zero_optimization": {{"stage": {stage}, {offload}{specific}"overlap_comm": true, "contiguous_gradients": true,
            "reduce_bucket_size": "auto"}},
        "gradient_accumulation_steps": 1, "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }}"#
    )
}

#[test]
fn the_templates_of_accelerate() {
    let cpu = r#""offload_optimizer": {"device": "cpu", "pin_memory": true}, "#;
    let both = format!(r#"{cpu}"offload_param": {{"device": "cpu", "pin_memory": true}}, "#);
    for (stage, offload, offloads) in [(1, "", 0), (2, "", 0), (2, cpu, 1), (3, "", 0), (3, both.as_str(), 2)] {
        let plan = json(&template(stage, offload), &script()).unwrap();
        assert_eq!(plan.stage.number(), stage);
        assert_eq!(plan.batch, Batch { global: 32, micro: 8, accumulation: 1 });
        assert_eq!(plan.reduce_bucket_size, 1 << 20);
        assert_eq!(plan.gradient_clipping, Some(1.0));
        assert_eq!(plan.precision, Precision::Fp16 { loss_scale: DYNAMIC });
        assert_eq!(
            plan.optimizer,
            Some(OptimizerPlan::AdamW { lr: 2e-5, beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.1 })
        );
        assert_eq!(
            plan.schedule,
            Some(SchedulePlan::WarmupDecayLr {
                min_lr: 0.0,
                max_lr: 2e-5,
                warmup_steps: 100,
                warmup_type: WarmupType::Log,
                total_steps: 1000,
            })
        );
        if stage == 3 {
            assert_eq!((plan.prefetch_bucket_size, plan.param_persistence_threshold), (943_718, 10_240));
            assert!(!plan.save_16bit_model);
        }
        let count = |part: &str| plan.warnings.iter().filter(|warning| warning.path.contains(part)).count();
        let offloaded = [&plan.offload_optimizer, &plan.offload_param].into_iter().flatten().count();
        assert_eq!((count("offload_"), offloaded), (0, offloads));
        assert_eq!(count("allgather_bucket_size"), usize::from(stage < 3));
        assert_eq!(plan.warnings.len(), usize::from(stage < 3), "{}", warnings(&plan));
    }
}

#[test]
fn a_deepspeed_config_file_is_found_beside_the_yaml() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("ds")).unwrap();
    std::fs::write(folder.path().join("ds/zero2.json"), template(2, "")).unwrap();
    let path = folder.path().join("acc.yaml");
    let text = "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: null\ndeepspeed_config:\n  \
        deepspeed_config_file: ds/zero2.json\n  zero3_init_flag: false\n";
    std::fs::write(&path, text).unwrap();
    let context = Context { world: None, ..script() };
    let plan = Config::from_file(&path).unwrap().resolve(&context).unwrap();
    assert_eq!((plan.stage, plan.world, plan.batch.global), (Stage::Gradients, 4, 32));

    // Problems of the JSON carry its name, those of the YAML the YAML's.
    std::fs::write(folder.path().join("ds/zero2.json"), r#"{"zero_optimization": {"stage": 4}, "typo": 1}"#).unwrap();
    let error = Config::from_file(&path).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(&folder.path().display().to_string(), "DIR"), @r#"
    DIR/ds/zero2.json: zero_optimization.stage: expected a whole number from 0 to 3, got 4
    DIR/ds/zero2.json: typo: unknown key
    "#);

    std::fs::write(&path, text.replace("null", "bf16") + "  gradient_clipping: 1.0\n  zero_stage: 2\n").unwrap();
    std::fs::write(folder.path().join("ds/zero2.json"), r#"{"train_batch_size": 4, "gradient_clipping": 1}"#).unwrap();
    let error = Config::from_file(&path).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(&folder.path().display().to_string(), "DIR"), @r#"
    DIR/acc.yaml: deepspeed_config.zero_stage: stands beside deepspeed_config_file, and Accelerate refuses two truths: remove it here and write `zero_optimization.stage` in ds/zero2.json
    DIR/acc.yaml: deepspeed_config.gradient_clipping: stands beside deepspeed_config_file, and Accelerate refuses two truths: remove it here and write `gradient_clipping` in ds/zero2.json
    DIR/acc.yaml: mixed_precision: stands beside deepspeed_config_file, and Accelerate refuses two truths: remove it here and write `fp16.enabled` or `bf16.enabled` in ds/zero2.json
    DIR/ds/zero2.json: zero_optimization: missing: Accelerate asks for this section in a deepspeed_config_file
    "#);

    std::fs::remove_file(folder.path().join("ds/zero2.json")).unwrap();
    assert!(matches!(Config::from_file(&path), Err(ConfigError::Io { path, .. }) if path.ends_with("ds/zero2.json")));
}

#[test]
fn other_distributed_types() {
    let micro = Context { auto: Auto { micro_batch: Some(2), ..Auto::default() }, ..Context::default() };
    for (kind, processes) in [("NO", 1), ("MULTI_GPU", 4), ("MULTI_CPU", 4)] {
        let text = format!(
            "compute_environment: LOCAL_MACHINE\ndistributed_type: '{kind}'\nnum_processes: {processes}\n\
            mixed_precision: bf16\ndowncast_bf16: no\nuse_cpu: false\ndebug: false\ngpu_ids: all\nsame_network: true\n\
            rdzv_backend: static\nnum_machines: 1\nmachine_rank: 0\nmain_training_function: main\n"
        );
        let plan = yaml(&text, &micro).unwrap();
        assert_eq!((plan.stage, plan.world), (Stage::DataParallel, processes));
        assert_eq!(plan.precision, Precision::Bf16 { check_grad_overflow: true });
        assert_eq!((plan.gradient_clipping, plan.batch.global), (None, 2 * processes));
        assert_eq!(plan.warnings, []);
    }
    let message = |kind: &str| yaml(&format!("distributed_type: {kind}\n"), &micro).unwrap_err().to_string();
    insta::assert_snapshot!(message("FSDP"), @"acc.yaml: distributed_type: FSDP is not supported: write DEEPSPEED with zero_stage 3, which shards the same");
    insta::assert_snapshot!(message("MEGATRON_LM"), @"acc.yaml: distributed_type: MEGATRON_LM is not supported: there is no tensor or pipeline parallelism; write DEEPSPEED");
    insta::assert_snapshot!(message("XLA"), @"acc.yaml: distributed_type: XLA is not supported: there are no TPUs here");
    insta::assert_snapshot!(message("MULTI_GPUS"), @r#"acc.yaml: distributed_type: expected DEEPSPEED, NO, MULTI_GPU, MULTI_CPU or another MULTI_ type, got "MULTI_GPUS""#);
    insta::assert_snapshot!(message(""), @"acc.yaml: distributed_type: missing: give DEEPSPEED, NO, MULTI_GPU, MULTI_CPU or another MULTI_ type");
    insta::assert_snapshot!(message("NO\nnum_processes: 2"), @"acc.yaml: num_processes: is 2, but distributed_type NO runs one process: change one of them");
}

#[test]
fn words_for_no_in_yaml() {
    let micro = Context { auto: Auto { micro_batch: Some(2), ..Auto::default() }, ..Context::default() };
    for no in ["'no'", "no", "NO", "false", "'NO'"] {
        let text = format!("distributed_type: DEEPSPEED\nmixed_precision: {no}\ndowncast_bf16: {no}\nuse_cpu: {no}\n");
        let plan = yaml(&text, &micro).unwrap();
        assert_eq!((plan.precision, plan.warnings.len()), (Precision::Fp32, 0), "{no}");
        assert_eq!((plan.stage, plan.gradient_clipping), (Stage::Gradients, Some(1.0)));
    }
    let text = "distributed_type: DEEPSPEED\nfp16: true\n";
    let plan = yaml(text, &micro).unwrap();
    assert_eq!(plan.precision, Precision::Fp16 { loss_scale: DYNAMIC });
    insta::assert_snapshot!(warnings(&plan), @"fp16: deprecated; write `mixed_precision`");
}

// ---------------------------------------------------------------------------------------------- what is wrong

#[test]
fn all_problems_are_reported_together() {
    let error = json(
        r#"{
            "train_batch_size": -8, "train_micro_batch_size": 4, "gradient_clipping": "1.0",
            "optimizer": {"type": "AdamW", "params": {"learning_rate": 1, "betas": [0.9, 1.0], "amsgrad": true, "wd": 0}},
            "scheduler": {"type": "Cosine"},
            "bf16": {"enable": true}, "fp16": [],
            "zero_optimization": {"stage": 3, "stage3_max_live_params": 1e9, "overlap_comm": 1, "reduce_bucket_size": 0.5,
                "zero_quantized_gradients": true, "mics_shard_size": 8, "zenflow": {"topk_ratio": 0.1},
                "offload_param": {"device": "disk"}}
        }"#,
        &on(2),
    )
    .unwrap_err();
    insta::assert_snapshot!(error, @r#"
    ds.json: train_batch_size: expected a whole number of at least 1, got -8
    ds.json: train_micro_batch_size: unknown key; did you mean `train_micro_batch_size_per_gpu`?
    ds.json: gradient_clipping: expected a number of at least 0, got "1.0"
    ds.json: optimizer.params.learning_rate: unknown key; known here: lr, betas, eps, weight_decay, adam_w_mode, torch_adam, capturable, set_grad_none, fused, foreach
    ds.json: optimizer.params.betas: expected two numbers of at least 0 and below 1, got [0.9, 1]
    ds.json: optimizer.params.amsgrad: true is not supported: the optimizer has no such variant; remove the key
    ds.json: optimizer.params.wd: unknown key; known here: lr, betas, eps, weight_decay, adam_w_mode, torch_adam, capturable, set_grad_none, fused, foreach
    ds.json: scheduler.type: expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, got "Cosine"
    ds.json: bf16.enable: unknown key; did you mean `enabled`?
    ds.json: fp16: expected a map, got []
    ds.json: zero_optimization.stage3_max_live_params: unknown key; did you mean `stage3_max_live_parameters`?
    ds.json: zero_optimization.overlap_comm: expected true or false, got 1
    ds.json: zero_optimization.reduce_bucket_size: expected a whole number of at least 1, got 0.5
    ds.json: zero_optimization.zero_quantized_gradients: true is not supported: quantised communication would change the numbers trained with; remove the key
    ds.json: zero_optimization.mics_shard_size: 8 is not supported: MiCS is not available: states would be sharded over all ranks; remove the key
    ds.json: zero_optimization.zenflow: this section is not supported: ZenFlow applies most gradients late, which is another training; remove the section
    ds.json: zero_optimization.offload_param.device: expected one of none, cpu, nvme, got "disk"
    "#);
    let key = "train_micro_batch_size";
    let problem = error.problems().iter().find(|problem| problem.path == key).unwrap();
    assert!(matches!(&problem.kind, ProblemKind::UnknownKey { suggestion: Some(key), .. }
        if key == "train_micro_batch_size_per_gpu"));
}

#[test]
fn features_that_would_change_training_are_refused() {
    let message = |text: &str| json(text, &on(2)).unwrap_err().to_string();
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "optimizer": {"type": "Lamb", "params": {"lr": 1}}}"#), @r#"ds.json: optimizer.type: "Lamb" is not supported: use one of AdamW, Adam, SGD, Lion, Adagrad"#);
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}"#), @"ds.json: optimizer.params.max_grad_norm: 1 is not supported: clipping is the top-level key `gradient_clipping`; move the value there");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "elasticity": {"enabled": true}, "amp": {"enabled": true}}"#), @r#"
    ds.json: elasticity: this section is not supported: it would choose other batch sizes; give them in the batch keys
    ds.json: amp: this section is not supported: NVIDIA's amp does not exist here; use bf16 or fp16
    "#);
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "gradient_allreduce_op": "sum"}"#), @r#"ds.json: gradient_allreduce_op: "sum" is not supported: gradients are averaged over the ranks; scale the loss instead"#);
    assert!(
        json(r#"{"train_batch_size": 2, "gradient_allreduce_op": "mean", "amp": {"enabled": false}}"#, &on(2)).is_ok()
    );
}

#[test]
fn settings_that_exclude_each_other() {
    let message = |text: &str| json(text, &on(2)).unwrap_err().to_string();
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "bf16": {"enabled": true}, "fp16": {"enabled": true}}"#), @"ds.json: bf16.enabled: bf16 and fp16 are both enabled: set one of them to false");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#), @"ds.json: zero_optimization.offload_param.device: parameters can only be offloaded at stage 3, and this is stage 2: raise the stage, or set the device to none");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}"#), @"ds.json: zero_optimization.offload_optimizer.nvme_path: missing: the device is nvme; give the folder to write to");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {}}}"#), @"ds.json: zero_optimization.cpu_offload: is another name for `offload_optimizer`, which is given too: remove one");
    insta::assert_snapshot!(message(r#"{"gradient_accumulation_steps": 2}"#), @"ds.json: train_micro_batch_size_per_gpu: no batch size: give train_batch_size or train_micro_batch_size_per_gpu, or let the program supply Auto::micro_batch");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "fp16": {"enabled": true, "loss_scale_window": 0}}"#), @"ds.json: fp16.loss_scale_window: expected more than 0 when loss_scale is 0 (dynamic), got 0");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "scheduler": {"type": "WarmupLR", "params": {}}}"#), @"ds.json: scheduler.params.warmup_max_lr: missing: without an optimizer in the file there is no learning rate to take");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "scheduler": {"type": "WarmupCosineLR", "params": {}}}"#), @r#"ds.json: scheduler.params.total_num_steps: missing: the schedule needs the optimizer steps of the training, or "auto""#);
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": "auto"}, "steps_per_print": "auto"}"#), @r#"
    ds.json: zero_optimization.stage: "auto" cannot be filled: the stage decides what the other keys mean; give a number from 0 to 3
    ds.json: steps_per_print: "auto" cannot be filled: nothing stands for it at this key; give a value
    "#);
}

#[test]
fn old_spellings_are_read_with_a_warning() {
    let plan = json(
        r#"{"train_batch_size": 2, "gradient_clipping": 1, "bfloat16": {"enabled": true}, "fp32_allreduce": true,
            "zero_optimization": {"stage": 3, "cpu_offload": true, "cpu_offload_params": true, "cpu_offload_use_pin_memory": true,
                "stage3_gather_fp16_weights_on_model_save": true, "max_live_parameters": 7}}"#,
        &on(2),
    )
    .unwrap();
    assert_eq!(plan.precision, Precision::Bf16 { check_grad_overflow: true });
    assert_eq!(plan.communication_data_type, Some(DataType::Fp32));
    assert_eq!((plan.save_16bit_model, plan.max_live_parameters), (true, 7));
    assert!(plan.offload_optimizer.is_some() && plan.offload_param.is_some());
    insta::assert_snapshot!(warnings(&plan), @r#"
    bfloat16: deprecated; write `bf16`
    fp32_allreduce: deprecated; write `communication_data_type`
    zero_optimization.cpu_offload: deprecated; write `offload_optimizer`
    zero_optimization.cpu_offload_params: deprecated; write `offload_param`
    zero_optimization.cpu_offload_use_pin_memory: has no effect: deprecated; write `pin_memory` in `offload_param` or `offload_optimizer`
    zero_optimization.stage3_gather_fp16_weights_on_model_save: deprecated; write `stage3_gather_16bit_weights_on_model_save`
    zero_optimization.stage3_gather_fp16_weights_on_model_save: not acted on yet: 16-bit weights come from `zero export`, or from ZeroEngine::export
    "#);
    let plan = json(r#"{"train_batch_size": 2, "gradient_clipping": 1, "zero_optimization": true}"#, &on(2)).unwrap();
    assert_eq!(plan.stage, Stage::OptimizerState);
    insta::assert_snapshot!(warnings(&plan), @r#"zero_optimization: deprecated; write {"stage": 1}"#);
}

#[test]
fn keys_without_effect_are_named() {
    let plan = json(
        r#"{"train_batch_size": 2, "sparse_gradients": true, "timers": {"throughput": {"enabled": false}},
            "flops_profiler": {"enabled": true}, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5,
            "stage3_prefetch_bucket_size": "auto", "stage3_max_reuse_distance": 1e9, "allgather_bucket_size": 2e8,
            "offload_optimizer": {"device": "none", "pin_memory": false}}}"#,
        &on(2),
    )
    .unwrap();
    assert_eq!(plan.gradient_clipping, Some(1.0));
    insta::assert_snapshot!(warnings(&plan), @r#"
    sparse_gradients: has no effect: gradients of embeddings are dense
    timers.throughput.enabled: has no effect: throughput is always measured, at the end of a step
    flops_profiler: not acted on yet: operations are not counted yet
    zero_optimization.stage3_max_live_parameters: has no effect at stage 2, only from stage 3
    zero_optimization.allgather_bucket_size: has no effect: the gather of parameters has no such setting
    gradient_clipping: not given: gradients are clipped at norm 1, as in DeepSpeed since 0.19.6 (before, they were not clipped); write 1.0, or 0 for none
    "#);
    insta::assert_snapshot!(plan.explain(), @r#"
    ZeRO stage 2 over 2 ranks: each rank keeps its part of the optimizer state and of the gradients, and whole parameters.
    Batch: 1 row per rank × 1 micro-batch × 2 ranks = 2 rows per optimizer step.
    Precision: fp32.
    Optimizer: the program's own.
    Learning rate: no schedule.
    Gradients: clipped to a global norm of 1, averaged over the ranks in buckets of 500,000,000 elements.
    Warning: sparse_gradients: has no effect: gradients of embeddings are dense.
    Warning: timers.throughput.enabled: has no effect: throughput is always measured, at the end of a step.
    Warning: flops_profiler: not acted on yet: operations are not counted yet.
    Warning: zero_optimization.stage3_max_live_parameters: has no effect at stage 2, only from stage 3.
    Warning: zero_optimization.allgather_bucket_size: has no effect: the gather of parameters has no such setting.
    Warning: gradient_clipping: not given: gradients are clipped at norm 1, as in DeepSpeed since 0.19.6 (before, they were not clipped); write 1.0, or 0 for none.
    "#);
}

#[test]
fn files_that_are_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    assert!(matches!(Config::from_file(&path), Err(ConfigError::Io { .. })));
    assert!(matches!(Config::from_file(folder.path()), Err(ConfigError::Io { .. })));
    let message = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Config::from_file(&path).unwrap_err().to_string().replace(&folder.path().display().to_string(), "DIR")
    };
    insta::assert_snapshot!(message(b"\xff\xfe{}"), @"DIR/x.json: cannot be read: stream did not contain valid UTF-8");
    insta::assert_snapshot!(message(b" \n"), @"DIR/x.json: not valid JSON: the file is empty");
    insta::assert_snapshot!(message(b"[1]"), @"DIR/x.json: expected a map of settings, got [1]");
    insta::assert_snapshot!(message(b"{\"a\": 1,}"), @"DIR/x.json: not valid JSON: trailing comma at line 1 column 9");
    insta::assert_snapshot!(message(b"{\"train_batch_size\": 1, \"train_batch_size\": 2}"), @"DIR/x.json: not valid JSON: the key `train_batch_size` is given twice at line 1 column 42");
    std::fs::write(folder.path().join("x"), "num_processes: 0\n").unwrap();
    let error = Config::from_file(folder.path().join("x")).unwrap_err().to_string();
    assert!(error.contains("num_processes: expected at least 1, got 0"), "{error}");
}

// ---------------------------------------------------------------------------------------------- the builder

#[test]
fn the_builder_has_the_files_rules() {
    let plan = ZeroPlan::builder(Stage::DataParallel).build(3).unwrap();
    assert_eq!(plan.batch, Batch { global: 3, micro: 1, accumulation: 1 });
    assert_eq!((plan.gradient_clipping, plan.reduce_bucket_size, plan.max_reuse_distance), (None, 1 << 23, 0));
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
        .communication_data_type(DataType::Bf16)
        .grad_accum_dtype(DataType::Fp16)
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
        plan.reduce_bucket_size,
        plan.prefetch_bucket_size,
        plan.max_live_parameters,
        plan.max_reuse_distance,
        plan.param_persistence_threshold,
    ];
    assert_eq!(sizes, [10, 11, 12, 13, 14]);
    assert_eq!((plan.overlap_comm, plan.gradient_clipping), (Some(false), Some(0.25)));
    assert_eq!((plan.prescale_gradients, plan.gradient_predivide_factor), (true, 4.0));
    assert_eq!(plan.precision, Precision::Bf16 { check_grad_overflow: false });
    assert_eq!((plan.communication_data_type, plan.grad_accum_dtype), (Some(DataType::Bf16), Some(DataType::Fp16)));
    assert_eq!((plan.offload_optimizer, plan.offload_param), (Some(nvme.clone()), Some(nvme)));
    let report = Report {
        steps_per_print: Some(5),
        wall_clock_breakdown: true,
        memory_breakdown: true,
        tensorboard: Some(files.clone()),
        csv_monitor: Some(files),
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
        OptimizerPlan::AdamW { lr: 0.1, beta_1: 0.2, beta_2: 0.3, epsilon: 0.4, weight_decay: 0.5 },
        OptimizerPlan::Adam { lr: 0.1, beta_1: 0.2, beta_2: 0.3, epsilon: 0.4, weight_decay: 0.5 },
        OptimizerPlan::Sgd { lr: 0.1, momentum: 0.2, weight_decay: 0.3, nesterov: true },
        OptimizerPlan::Lion { lr: 0.1, beta_1: 0.2, beta_2: 0.3, weight_decay: 0.4 },
        OptimizerPlan::Adagrad { lr: 0.1, epsilon: 0.2, weight_decay: 0.3 },
    ];
    for optimizer in optimizers {
        let plan = ZeroPlan::builder(Stage::DataParallel).optimizer(optimizer).build(1).unwrap();
        assert_eq!(plan.optimizer, Some(optimizer));
    }
    let warmup_type = WarmupType::Linear;
    let schedules = [
        SchedulePlan::WarmupLr { min_lr: 0.1, max_lr: 0.2, warmup_steps: 3, warmup_type },
        SchedulePlan::WarmupDecayLr { min_lr: 0.1, max_lr: 0.2, warmup_steps: 3, warmup_type, total_steps: 4 },
        SchedulePlan::WarmupCosineLr {
            total_steps: 4,
            warmup_min_ratio: 0.1,
            warmup_steps: 3,
            cos_min_ratio: 0.2,
            warmup_type,
        },
        SchedulePlan::OneCycle {
            min_lr: 0.1,
            max_lr: 0.2,
            decay_lr_rate: 0.3,
            first_step_size: 4,
            second_step_size: None,
            first_stair_count: 6,
            second_stair_count: Some(7),
            decay_step_size: 8,
            cycle_momentum: false,
            min_momentum: 0.4,
            max_momentum: 0.5,
            decay_momentum_rate: 0.6,
        },
        SchedulePlan::LrRangeTest { min_lr: 0.1, step_size: 2, step_rate: 0.3, staircase: true },
    ];
    for schedule in schedules {
        let plan = ZeroPlan::builder(Stage::DataParallel).schedule(schedule).build(1).unwrap();
        assert_eq!(plan.schedule, Some(schedule));
        assert!(plan.explain().lines().all(|line| line.ends_with('.')));
    }
    let bad = OptimizerPlan::Sgd { lr: -0.1, momentum: 0.0, weight_decay: 0.0, nesterov: true };
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

#[test]
fn how_often_gradients_are_reduced() {
    let plan = |stage: u8, more: &str| {
        let text = format!(
            r#"{{ "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 0,
                "zero_optimization": {{"stage": {stage}}}{more} }}"#
        );
        json(&text, &on(2)).unwrap()
    };
    let [each, once] = [", with each micro-batch.", ", once per optimizer step."];
    let given = |value: bool| format!(r#", "gradient_accumulation_kwargs": {{"sync_each_batch": {value}}}"#);
    for (stage, more, set, said) in [
        (1, String::new(), None, once),
        (2, String::new(), None, each),
        (1, given(true), Some(true), each),
        (3, given(false), Some(false), once),
    ] {
        let plan = plan(stage, &more);
        assert!(plan.explain().contains(said), "stage {stage}{more}: {}", plan.explain());
        assert_eq!((plan.sync_each_batch, plan.engine_config().unwrap().sync_each_batch), (set, set));
    }
    let built = ZeroPlan::builder(Stage::Gradients).micro_batch(1).sync_each_batch(false).error_if_nonfinite(true);
    let built = built.build(2).unwrap();
    assert_eq!((built.sync_each_batch, built.error_if_nonfinite), (Some(false), true));
    assert!(built.engine_config().unwrap().error_if_nonfinite && !plan(1, "").error_if_nonfinite);
    assert!(plan(1, r#", "watchdog": {"error_if_nonfinite": true}"#).error_if_nonfinite);
}
