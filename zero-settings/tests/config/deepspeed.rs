//! Plans from DeepSpeed's JSON files.

use super::*;

#[test]
fn the_shared_deepspeed_file() {
    let plan = Config::from_file(file("deepspeed_zero3.json")).unwrap().resolve(&on(2)).unwrap();
    let expected = ZeroPlan {
        zero: ZeroConfig {
            reduce_bucket_size: 500_000,
            prefetch_bucket_size: 50_000,
            max_live_parameters: 1_000_000,
            max_reuse_distance: 1_000_000_000,
            param_persistence_threshold: 1000,
            ..ZeroConfig::new(Stage::Parameters)
        },
        world: 2,
        batch: Batch { global: 8, micro: 2, accumulation: 2 },
        sync_each_batch: None,
        error_if_nonfinite: false,
        gradient_clipping: Some(1.0),
        prescale_gradients: false,
        gradient_predivide_factor: 1.0,
        sums_gradients: false,
        precision: Precision::Fp32,
        grad_accum_dtype: None,
        optimizer: Some(OptimizerPlan {
            lr: 1e-3,
            rule: Rule::AdamW { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, weight_decay: 0.01, bias_correction: true },
        }),
        schedule: Some(Schedule::WarmupDecayLr {
            min_lr: 0.0,
            max_lr: 1e-3,
            warmup_steps: 5,
            kind: Warmup::Linear,
            total_steps: 50,
        }),
        offload_optimizer: None,
        offload_activations: None,
        offload_param: None,
        sub_group_size: 1_000_000_000,
        aio: zero_core::offload::AioOptions::default(),
        report: Report { steps_per_print: Some(10), wall_clock_breakdown: true, ..Report::default() },
        watchdog: Watchdog::default(),
        save_16bit_model: true,
        warnings: plan.warnings.clone(),
    };
    assert_eq!(plan, expected);
    let checked = ZeroPlan { zero: ZeroConfig { check_replicas: 100, ..plan.zero.clone() }, ..plan.clone() };
    assert_eq!((plan.zero_config(1).check_replicas, checked.zero_config(1).check_replicas), (0, 100));
    assert_eq!(
        ZeroPlan::builder(Stage::Gradients).micro_batch(1).check_replicas(7).build(2).unwrap().zero.check_replicas,
        7
    );
    assert!(checked.explain().contains("Replicas: compared every 100 updates"));
    assert_eq!(plan.warnings, []);
    insta::assert_snapshot!(plan.explain(), @r#"
    ZeRO stage 3 over 2 ranks: optimizer state, gradients and parameters are sharded.
    Batch: 2 rows per rank × 2 micro-batches × 2 ranks = 8 rows per optimizer step.
    Precision: fp32.
    Optimizer: AdamW, lr 0.001, betas 0.9 and 0.999, epsilon 1e-8, weight decay 0.01.
    Learning rate: 0 to 0.001 in 5 steps (linear), then linearly to 0 at step 50.
    Gradients: clipped to a global norm of 1, averaged over the ranks in buckets of 500,000 elements, overlapped with the backward pass, with each micro-batch.
    Parameters: 50,000 elements are prefetched (all-gather ahead of use); a parameter stays gathered if it has at most 1,000 elements, or if it is used again within 1,000,000,000 elements, as long as no more than 1,000,000 elements are gathered.
    "#);
    // Written for two ranks; at others its three batch sizes contradict each other.
    let error = Config::from_file(file("deepspeed_zero3.json")).unwrap().resolve(&on(4)).unwrap_err();
    assert!(error.to_string().contains("2 × gradient_accumulation_steps 2 × 4 ranks = 16, but train_batch_size is 8"));
}

#[test]
fn stage_0_with_the_least_there_is() {
    let plan = json(r#"{"train_batch_size": 32, "gradient_clipping": 0}"#, &on(4)).unwrap();
    assert_eq!(plan.zero.stage, Stage::DataParallel);
    assert_eq!(plan.batch, Batch { global: 32, micro: 8, accumulation: 1 });
    assert_eq!((plan.zero.reduce_bucket_size, plan.gradient_clipping), (500_000_000, None));
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
        Some(OptimizerPlan {
            lr: 1e-3,
            rule: Rule::AdamW { beta_1: 0.8, beta_2: 0.999, epsilon: 1e-8, weight_decay: 3e-7, bias_correction: true }
        })
    );
    assert_eq!(
        plan.schedule,
        Some(Schedule::WarmupLr { min_lr: 0.0, max_lr: 1e-3, warmup_steps: 1000, kind: Warmup::Log })
    );
    assert_eq!((plan.prescale_gradients, plan.gradient_predivide_factor), (true, 2.0));
    let LossScale::Dynamic(DynamicLossScale { initial_scale_power: 15, window: 500, .. }) = (match plan.precision {
        Precision::Fp16 { loss_scale } => loss_scale,
        other => panic!("{other:?}"),
    }) else {
        panic!("{:?}", plan.precision)
    };
    insta::assert_snapshot!(warnings(&plan), @r#"
    zero_optimization.allgather_bucket_size: has no effect: it does not apply to the all-gather used here
    zero_optimization.cpu_offload: deprecated; write `offload_optimizer`
    "#);
}

/// `training/bing_bert/deepspeed_bsz64k_lamb_config_seq128.json` and
/// `training/bing_bert/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json` of DeepSpeedExamples, the second without the
/// layer drop.
#[test]
fn bing_bert_with_lamb_and_with_adam_without_bias_correction() {
    let lamb = r#"{
        "train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "steps_per_print": 1000, "prescale_gradients": false,
        "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": false,
            "max_coeff": 0.3, "min_coeff": 0.01}},
        "gradient_clipping": 1.0, "wall_clock_breakdown": false, "fp16": {"enabled": true, "loss_scale": 0},
        "sparse_attention": {"mode": "fixed", "block": 16, "different_layout_per_head": true, "num_local_blocks": 4,
            "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": false,
            "num_different_global_patterns": 4}
    }"#;
    let plan = json(lamb, &on(64)).unwrap();
    assert_eq!(plan.batch, Batch { global: 65536, micro: 64, accumulation: 16 });
    let rule = Rule::Lamb {
        beta_1: 0.9,
        beta_2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.01,
        bias_correction: false,
        max_coeff: 0.3,
        min_coeff: 0.01,
    };
    assert_eq!(plan.optimizer, Some(OptimizerPlan { lr: 11e-3, rule }));
    assert_eq!(plan.rule(), rule);
    let explained = plan.explain();
    let line = explained.lines().find(|line| line.contains("LAMB")).unwrap_or(&explained);
    insta::assert_snapshot!(line, @"Optimizer: LAMB, lr 0.011, betas 0.9 and 0.999, epsilon 1e-8, weight decay 0.01, no bias correction, trust ratio from 0.01 to 0.3.");
    insta::assert_snapshot!(warnings(&plan), @"sparse_attention: has no effect: DeepSpeed passes it to models that ask for it; the models here use dense attention");

    let defaults = json(r#"{"train_batch_size": 2, "optimizer": {"type": "lamb"}}"#, &on(2)).unwrap();
    assert_eq!(defaults.rule(), Rule::lamb());

    let adam = r#"{
        "train_batch_size": 4096, "train_micro_batch_size_per_gpu": 16, "steps_per_print": 1000, "prescale_gradients": true,
        "gradient_predivide_factor": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.01,
            "bias_correction": false}},
        "gradient_clipping": 1.0, "wall_clock_breakdown": false, "fp16": {"enabled": true, "loss_scale": 0}
    }"#;
    let rule = |text: &str| json(text, &on(64)).unwrap().rule();
    let (beta_1, beta_2, epsilon, weight_decay, bias_correction) = (0.9, 0.999, 1e-8, 0.01, false);
    assert_eq!(rule(adam), Rule::AdamW { beta_1, beta_2, epsilon, weight_decay, bias_correction });
    let l2 = adam.replace("\"bias_correction\": false", "\"bias_correction\": false, \"adam_w_mode\": false");
    assert_eq!(rule(&l2), Rule::Adam { beta_1, beta_2, epsilon, weight_decay, bias_correction });
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
    assert_eq!((plan.zero.communication_dtype, plan.grad_accum_dtype), (Some(Float::F32), Some(Float::F32)));
    assert!(matches!(plan.optimizer, Some(OptimizerPlan { rule: Rule::Adam { weight_decay: 0.0, .. }, .. })));
    insta::assert_snapshot!(warnings(&plan), @r#"
    zero_optimization.round_robin_gradients: has no effect: each rank already moves only its own shard of a gradient
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
            "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true,
                "contiguous_memory_optimization": true, "number_checkpoints": 4, "synchronize_checkpoint_boundary": true,
                "profile": true},
            "tensorboard": {"enabled": true, "output_path": "logs", "job_name": "run"},
            "csv_monitor": {"enabled": false, "job_name": "never"}
        }"#,
        &on(2),
    )
    .unwrap();
    assert_eq!(
        (plan.zero.checkpointed_blocks, plan.offload_activations.clone()),
        (usize::MAX, Some(OffloadDevice::Cpu))
    );
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
    assert_eq!(plan.zero.prefetch_bucket_size, 10_000_000);
    assert_eq!(plan.precision, Precision::Fp16 { loss_scale: LossScale::Static(128.0) });
    assert_eq!(plan.report.tensorboard, Some(LogFiles { output_path: "logs".into(), job_name: "run".into() }));
    assert_eq!(plan.report.csv_monitor, None);
    insta::assert_snapshot!(warnings(&plan), @r#"
    activation_checkpointing.partition_activations: has no effect: it is for ranks that hold the same activations (model parallelism); here each rank has its own rows
    activation_checkpointing.contiguous_memory_optimization: has no effect: all block inputs have the same size and reuse each other's freed memory
    activation_checkpointing.number_checkpoints: has no effect: all block inputs have the same size and reuse each other's freed memory
    activation_checkpointing.synchronize_checkpoint_boundary: has no effect: there is no synchronization at the end of a block
    activation_checkpointing.profile: has no effect: --trace FILE records the time of each recomputed block
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
    assert_eq!((plan.zero.stage, plan.batch.accumulation), (Stage::OptimizerState, 128));
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
        Some(OptimizerPlan {
            lr: 2e-5,
            rule: Rule::AdamW { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-6, weight_decay: 0.1, bias_correction: true }
        })
    );
    assert_eq!(
        plan.schedule,
        Some(Schedule::WarmupLr { min_lr: 0.0, max_lr: 2e-5, warmup_steps: 100, kind: Warmup::Log })
    );
    assert_eq!(plan.warnings, []);
    // Without the program's values each is named, with what to supply.
    insta::assert_snapshot!(json(text, &Context::default()).unwrap_err(), @r#"
    ds.json: optimizer.params.lr: "auto" cannot be filled: supply the learning rate (Auto::learning_rate), or give a number
    ds.json: optimizer.params.betas: "auto" cannot be filled: supply both betas (Auto::beta_1 and Auto::beta_2), or give two numbers
    ds.json: optimizer.params.eps: "auto" cannot be filled: supply epsilon (Auto::epsilon), or give a number
    ds.json: optimizer.params.weight_decay: "auto" cannot be filled: supply the weight decay (Auto::weight_decay), or give a number
    ds.json: train_micro_batch_size_per_gpu: no batch size: give train_batch_size or train_micro_batch_size_per_gpu, or let the program supply Auto::micro_batch
    ds.json: zero_optimization.reduce_bucket_size: "auto" cannot be filled: supply the model's hidden size (Task::hidden_size, Auto::hidden_size), or give a number of elements
    ds.json: zero_optimization.stage3_prefetch_bucket_size: "auto" cannot be filled: supply the model's hidden size (Task::hidden_size, Auto::hidden_size), or give a number of elements
    ds.json: zero_optimization.stage3_param_persistence_threshold: "auto" cannot be filled: supply the model's hidden size (Task::hidden_size, Auto::hidden_size), or give a number of elements
    ds.json: fp16.enabled: "auto" cannot be filled: supply the precision (Auto::mixed_precision), or write true or false
    ds.json: bf16.enabled: "auto" cannot be filled: supply the precision (Auto::mixed_precision), or write true or false
    ds.json: scheduler.params.warmup_num_steps: "auto" cannot be filled: supply the number of warm-up steps (Auto::warmup_steps), or give a number
    "#);
}

/// A value that the library's caller must supply is an error of `resolve`; `outline` lists the key without a value.
#[test]
fn an_outline_needs_no_model() {
    let config = Config::from_file(file("templates/hugging_face_stage3.json")).unwrap();
    let auto = Auto { micro_batch: Some(2), learning_rate: Some(3e-5), ..Auto::default() };
    let context = Context { world: Some(2), auto, ..Context::default() };
    assert!(config.resolve(&context).unwrap_err().to_string().contains("Auto::hidden_size"));
    let (plan, filled) = config.outline(&context).unwrap();
    assert_eq!((plan.zero.stage, plan.batch.global), (Stage::Parameters, 4));
    let lines: Vec<String> = filled
        .iter()
        .map(|Filled { path, by, value }| {
            format!("{path} = {} ({by})\n", value.as_ref().map_or("?".into(), |value| value.to_string()))
        })
        .collect();
    insta::assert_snapshot!(lines.concat(), @r"
    optimizer.params.lr = 0.00003 (--lr)
    optimizer.params.betas = ? (--beta1, --beta2)
    optimizer.params.eps = ? (--eps)
    optimizer.params.weight_decay = ? (--weight-decay)
    train_batch_size = 4 (--batch x --accumulation x ranks)
    train_micro_batch_size_per_gpu = 2 (--batch)
    gradient_accumulation_steps = 1 (--accumulation)
    zero_optimization.reduce_bucket_size = ? (the hidden size of --model)
    zero_optimization.stage3_prefetch_bucket_size = ? (the hidden size of --model)
    zero_optimization.stage3_param_persistence_threshold = ? (the hidden size of --model)
    gradient_clipping = 1 (--clip)
    fp16.enabled = ? (--dtype)
    bf16.enabled = ? (--dtype)
    scheduler.params.warmup_max_lr = 0.00003 (the optimizer's lr)
    scheduler.params.warmup_min_lr = 0 (its default)
    scheduler.params.warmup_num_steps = ? (--warmup)
    ");
    let explained = plan.explain_filled(&filled);
    assert!(explained.contains("in buckets of \"auto\" elements"), "{explained}");
    assert!(explained.contains("Parameters: \"auto\" elements are prefetched"), "{explained}");
    // Every other problem is one here too.
    let wrong =
        Config::from_text("x", Format::Json, r#"{"train_batch_size": 3, "bf16": {"enabled": "auto"}}"#).unwrap();
    assert_eq!(wrong.outline(&context).unwrap_err().problems().len(), 1);
}

#[test]
fn the_ranks_of_a_file_with_all_three_batch_sizes() {
    let text = |global: usize| {
        format!(
            r#"{{"train_batch_size": {global}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}}"#
        )
    };
    assert_eq!(json(&text(16), &Context::default()).unwrap().world, 4);
    assert!(json(&text(6), &Context::default()).is_err());
    // "auto" for the whole and nothing else is filled too.
    let auto = Auto { micro_batch: Some(3), ..Auto::default() };
    let plan =
        json(r#"{"train_batch_size": "auto"}"#, &Context { world: Some(2), auto, ..Context::default() }).unwrap();
    assert_eq!(plan.batch.global, 6);
}

#[test]
fn no_warmup_is_one_of_two_steps() {
    for (name, more) in [
        ("WarmupLR", ""),
        ("WarmupDecayLR", r#", "total_num_steps": 9"#),
        ("WarmupCosineLR", r#", "total_num_steps": 9"#),
    ] {
        let plan = |steps: &str| {
            let text = format!(
                r#"{{"train_batch_size": 1, "gradient_clipping": 1, "optimizer": {{"type": "AdamW", "params": {{"lr": 0.1}}}},
                    "scheduler": {{"type": "{name}", "params": {{"warmup_num_steps": {steps}{more}}}}}}}"#
            );
            let auto = Auto { warmup_steps: Some(0), ..Auto::default() };
            json(&text, &Context { auto, ..Context::default() }).unwrap()
        };
        for none in ["0", "\"auto\"", "1"] {
            let rates = plan(none).learning_rates();
            rates.validate().unwrap();
            assert_eq!(rates, plan("2").learning_rates(), "{name} {none}");
            assert!(plan(none).explain().contains(" in 2 steps"), "{}", plan(none).explain());
        }
    }
}

#[test]
fn one_folder_holds_what_is_on_a_disk() {
    let text = r#"{"train_batch_size": 1, "gradient_clipping": 1, "zero_optimization": {"stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}, "offload_param": {"device": "nvme", "nvme_path": "/b"}}}"#;
    let config = Config::from_text("ds.json", Format::Json, text).unwrap();
    assert_eq!(config.nvme_path(), Some("/a".into()));
    insta::assert_snapshot!(warnings(&config.resolve(&on(1)).unwrap()), @"zero_optimization.offload_param.nvme_path: has no effect: parameters are stored in the optimizer state's folder, /a");
    let activations = |path: &str| {
        let more = format!(r#"}}, "activation_checkpointing": {{"nvme_path": "{path}"}}}}"#);
        Config::from_text("ds.json", Format::Json, &text.replace("}}}", &format!("}}{more}")))
    };
    let plan = activations("/a").unwrap().resolve(&on(1)).unwrap();
    assert_eq!(plan.offload_activations, Some(OffloadDevice::Nvme { path: "/a".into() }));
    let error = activations("/c").unwrap_err().to_string();
    assert!(error.contains("/c differs from the folder of model state, /a"), "{error}");
    let cpu = text.replace("\"nvme\"", "\"cpu\"");
    assert_eq!(Config::from_text("ds.json", Format::Json, &cpu).unwrap().nvme_path(), None);
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

/// As `hjson.load`, with which DeepSpeed reads them.
#[test]
fn comments_trailing_commas_and_single_quotes_are_read() {
    let parse = |text: &str| Node::parse(Format::Json, text);
    let plain = parse(r#"{"a": {"stage": 2, "path": "/a//b#c"}, "b": [5e8, true, null, "it's"]}"#).unwrap();
    for text in [
        "\u{feff}{\"a\": {\"stage\": 2, \"path\": \"/a//b#c\"}, \"b\": [5e8, true, null, \"it's\"]}",
        "{ // c\n\"a\": {\"stage\": 2, /* \"x\": 1, */ \"path\": \"/a//b#c\",}, # d\n\t\"b\": [5e8, true, null, \"it's\",],}",
        "# first\n{'a': {'stage': 2, 'path': '/a//b#c'}, 'b': [5e8, true, null, \"it's\"]}",
    ] {
        assert_eq!(parse(text).as_ref(), Ok(&plain), "{text}");
    }
    for text in ["{\"a\": 1", "{\"a\" 1}", "{\"a\": 1,,}", "{\"a\": 1} 2", "// only\n", "a: 1", "{\"a\": 1, \"a\": 2,}"]
    {
        assert!(parse(text).is_err(), "{text}");
    }
}
