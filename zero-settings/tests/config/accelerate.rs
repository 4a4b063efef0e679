//! Plans from Accelerate's YAML files and templates.

use super::*;

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
    assert_eq!(plan.zero.reduce_bucket_size, 500_000_000);
    assert_eq!(plan.warnings, []);
    let error = config.resolve(&Context { world: Some(2), ..context }).unwrap_err().to_string();
    assert!(error.ends_with(
        "num_processes: the file sets a world size of 1, but the program runs 2 rank(s): change one of them"
    ));
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
        assert_eq!(plan.zero.stage.number(), stage);
        assert_eq!(plan.batch, Batch { global: 32, micro: 8, accumulation: 1 });
        assert_eq!(plan.zero.reduce_bucket_size, 1 << 20);
        assert_eq!(plan.gradient_clipping, Some(1.0));
        assert_eq!(plan.precision, Precision::Fp16 { loss_scale: DYNAMIC });
        assert_eq!(
            plan.optimizer,
            Some(OptimizerPlan {
                lr: 2e-5,
                rule: Rule::AdamW {
                    beta_1: 0.9,
                    beta_2: 0.999,
                    epsilon: 1e-8,
                    weight_decay: 0.1,
                    bias_correction: true
                }
            })
        );
        assert_eq!(
            plan.schedule,
            Some(Schedule::WarmupDecayLr {
                min_lr: 0.0,
                max_lr: 2e-5,
                warmup_steps: 100,
                kind: Warmup::Log,
                total_steps: 1000,
            })
        );
        if stage == 3 {
            assert_eq!((plan.zero.prefetch_bucket_size, plan.zero.param_persistence_threshold), (943_718, 10_240));
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
    assert_eq!((plan.zero.stage, plan.world, plan.batch.global), (Stage::Gradients, 4, 32));

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
    DIR/acc.yaml: deepspeed_config.zero_stage: cannot be combined with deepspeed_config_file (Accelerate rejects it too): remove it here and write `zero_optimization.stage` in ds/zero2.json
    DIR/acc.yaml: deepspeed_config.gradient_clipping: cannot be combined with deepspeed_config_file (Accelerate rejects it too): remove it here and write `gradient_clipping` in ds/zero2.json
    DIR/acc.yaml: mixed_precision: cannot be combined with deepspeed_config_file (Accelerate rejects it too): remove it here and write `fp16.enabled` or `bf16.enabled` in ds/zero2.json
    DIR/ds/zero2.json: zero_optimization: missing: Accelerate requires this section in a deepspeed_config_file
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
        assert_eq!((plan.zero.stage, plan.world), (Stage::DataParallel, processes));
        assert_eq!(plan.precision, Precision::Bf16 { check_grad_overflow: true });
        assert_eq!((plan.gradient_clipping, plan.batch.global), (None, 2 * processes));
        assert_eq!(plan.warnings, []);
    }
    let one = Config::from_text("acc.yaml", Format::Yaml, "distributed_type: 'NO'\n").unwrap();
    assert_eq!(one.processes(), Some(1));
    let message = |kind: &str| yaml(&format!("distributed_type: {kind}\n"), &micro).unwrap_err().to_string();
    insta::assert_snapshot!(message("MEGATRON_LM"), @"acc.yaml: distributed_type: MEGATRON_LM is not supported: Zero has no Megatron-LM models and no pipeline parallelism; write DEEPSPEED");
    insta::assert_snapshot!(message("XLA"), @"acc.yaml: distributed_type: XLA is not supported: TPUs are not available; use GPUs or the CPU");
    insta::assert_snapshot!(message("MULTI_GPUS"), @r#"acc.yaml: distributed_type: expected DEEPSPEED, FSDP, NO, MULTI_GPU, MULTI_CPU or another MULTI_ type, got "MULTI_GPUS""#);
    insta::assert_snapshot!(message(""), @"acc.yaml: distributed_type: missing: give DEEPSPEED, FSDP, NO, MULTI_GPU, MULTI_CPU or another MULTI_ type");
    insta::assert_snapshot!(message("NO\nnum_processes: 2"), @"acc.yaml: num_processes: is 2, but distributed_type NO runs one process: change one of them");
}

#[test]
fn strategies_of_fsdp_are_stages_and_groups() {
    let micro = Context { auto: Auto { micro_batch: Some(2), ..Auto::default() }, ..Context::default() };
    let read = |ranks: &str, keys: &str| {
        let text = format!(
            "distributed_type: FSDP\n{ranks}mixed_precision: bf16\nfsdp_config:\n  fsdp_version: 1\n  \
             fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: GPT2Block\n  \
             fsdp_backward_prefetch: BACKWARD_PRE\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  \
             fsdp_sync_module_states: true\n{keys}"
        );
        yaml(&text, &micro)
    };
    const MACHINES: &str = "num_machines: has no effect: set by the launcher (`zero launch`, torchrun, mpirun), not by the plan; \
        only FSDP's HYBRID strategies read it\n";
    let two = "num_processes: 4\nnum_machines: 2\n";
    for (strategy, number, stage, size) in [
        ("FULL_SHARD", 1, 3, None),
        ("SHARD_GRAD_OP", 2, 2, None),
        ("NO_SHARD", 3, 0, None),
        ("HYBRID_SHARD", 4, 3, Some(2)),
        ("HYBRID_SHARD_ZERO2", 5, 2, Some(2)),
    ] {
        for word in [strategy.into(), strategy.to_lowercase(), number.to_string(), format!("'{number}'")] {
            let plan = read(two, &format!("  fsdp_sharding_strategy: {word}\n")).unwrap();
            assert_eq!((plan.zero.stage.number(), plan.zero.shard_size), (stage, size), "{word}");
            // Nothing but a strategy within machines asks how many there are.
            let told = if size.is_some() { "" } else { MACHINES };
            assert_eq!((&*warnings(&plan), plan.gradient_clipping), (told, None), "{word}");
        }
    }
    for kind in ["DEEPSPEED", "MULTI_GPU"] {
        let plan = yaml(&format!("distributed_type: {kind}\n{two}"), &micro).unwrap();
        assert_eq!(warnings(&plan), MACHINES, "{kind}");
    }
    // Version 2; no word at all; one machine, whose ranks are one group.
    assert_eq!(read(two, "  fsdp_reshard_after_forward: false\n").unwrap().zero.stage, Stage::Gradients);
    assert_eq!(read(two, "").unwrap().zero.stage, Stage::Parameters);
    let one = read("num_processes: 4\n", "  fsdp_sharding_strategy: HYBRID_SHARD\n").unwrap();
    assert_eq!((one.zero.stage, one.zero.shard_size), (Stage::Parameters, None));

    let more = read(two, "  fsdp_offload_params: true\n  fsdp_activation_checkpointing: true\n").unwrap();
    let cpu = |offload: &Option<Offload>| offload.as_ref().map(|offload| offload.device.clone());
    assert_eq!(
        (cpu(&more.offload_optimizer), cpu(&more.offload_param), more.zero.checkpointed_blocks),
        (Some(OffloadDevice::Cpu), Some(OffloadDevice::Cpu), usize::MAX)
    );

    let hybrid = "  fsdp_sharding_strategy: HYBRID_SHARD\n";
    let told = |ranks, keys| read(ranks, keys).unwrap_err().to_string();
    insta::assert_snapshot!(told(two, "  fsdp_sharding_strategy: HYBRID\n"), @r#"acc.yaml: fsdp_config.fsdp_sharding_strategy: expected one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or its number (1 to 5), got "HYBRID""#);
    insta::assert_snapshot!(told("num_processes: 5\nnum_machines: 2\n", hybrid), @"acc.yaml: num_processes: 5 ranks on 2 machines: HYBRID_SHARD shards within a machine, which requires the same number of ranks on each");
    insta::assert_snapshot!(told("", hybrid), @"acc.yaml: num_processes: missing: HYBRID_SHARD shards within a machine; give the total number of ranks, and num_machines");
    // Keys that the file has, not those that they are turned into.
    let text = format!("distributed_type: FSDP\n{two}fsdp_config:\n  fsdp_reshard_after_forward: HYBRID_SHARD\n");
    let five = yaml(&text, &Context { world: Some(5), ..micro.clone() }).unwrap_err().to_string();
    insta::assert_snapshot!(five, @"
    acc.yaml: num_processes: the file sets a world size of 4, but the program runs 5 rank(s): change one of them
    acc.yaml: fsdp_config.fsdp_reshard_after_forward: 2 does not divide 5 ranks: expected a divisor of the number of ranks, or -1 for all
    ");
    let none = "  fsdp_sharding_strategy: NO_SHARD\n  fsdp_offload_params: true\n";
    insta::assert_snapshot!(warnings(&read("num_processes: 4\n", none).unwrap()), @"fsdp_config.fsdp_offload_params: has no effect at stage 0, only from stage 1");
    let other = format!("distributed_type: DEEPSPEED\nfsdp_config:\n{hybrid}");
    insta::assert_snapshot!(warnings(&yaml(&other, &micro).unwrap()), @"fsdp_config: has no effect: distributed_type is DEEPSPEED");
}

#[test]
fn words_for_no_in_yaml() {
    let micro = Context { auto: Auto { micro_batch: Some(2), ..Auto::default() }, ..Context::default() };
    for no in ["'no'", "no", "NO", "false", "'NO'"] {
        let text = format!("distributed_type: DEEPSPEED\nmixed_precision: {no}\ndowncast_bf16: {no}\nuse_cpu: {no}\n");
        let plan = yaml(&text, &micro).unwrap();
        assert_eq!((plan.precision, plan.warnings.len()), (Precision::Fp32, 0), "{no}");
        assert_eq!((plan.zero.stage, plan.gradient_clipping), (Stage::Gradients, Some(1.0)));
    }
    let text = "distributed_type: DEEPSPEED\nfp16: true\n";
    let plan = yaml(text, &micro).unwrap();
    assert_eq!(plan.precision, Precision::Fp16 { loss_scale: DYNAMIC });
    insta::assert_snapshot!(warnings(&plan), @"fp16: deprecated; write `mixed_precision`");
}
