//! Messages about invalid and outdated settings.

use zero_kernels::quantized::Format;

use super::*;

#[test]
fn all_problems_are_reported_together() {
    let error = json(
        r#"{
            "train_batch_size": -8, "train_micro_batch_size": 4, "gradient_clipping": "1.0",
            "optimizer": {"type": "AdamW", "params": {"learning_rate": 1, "betas": [0.9, 1.0], "amsgrad": true, "wd": 0}},
            "scheduler": {"type": "Cosine"},
            "bf16": {"enable": true}, "fp16": [],
            "zero_optimization": {"stage": 3, "stage3_max_live_params": 1e9, "overlap_comm": 1, "reduce_bucket_size": 0.5,
                "zenflow": {"topk_ratio": 0.1},
                "offload_param": {"device": "disk"}}
        }"#,
        &on(2),
    )
    .unwrap_err();
    insta::assert_snapshot!(error, @r#"
    ds.json: train_batch_size: expected a whole number of at least 1, got -8
    ds.json: train_micro_batch_size: unknown key; did you mean `train_micro_batch_size_per_gpu`?
    ds.json: gradient_clipping: expected a number of at least 0, got "1.0"
    ds.json: optimizer.params.learning_rate: unknown key; known keys: lr, betas, eps, weight_decay, adam_w_mode, torch_adam, bias_correction, capturable, set_grad_none, fused, foreach
    ds.json: optimizer.params.betas: expected two numbers of at least 0 and below 1, got [0.9, 1]
    ds.json: optimizer.params.amsgrad: true is not supported: this variant of the optimizer is not implemented; remove the key
    ds.json: optimizer.params.wd: unknown key; known keys: lr, betas, eps, weight_decay, adam_w_mode, torch_adam, bias_correction, capturable, set_grad_none, fused, foreach
    ds.json: scheduler.type: expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, got "Cosine"
    ds.json: bf16.enable: unknown key; did you mean `enabled`?
    ds.json: fp16: expected a map, got []
    ds.json: zero_optimization.stage3_max_live_params: unknown key; did you mean `stage3_max_live_parameters`?
    ds.json: zero_optimization.overlap_comm: expected true or false, got 1
    ds.json: zero_optimization.reduce_bucket_size: expected a whole number of at least 1, got 0.5
    ds.json: zero_optimization.zenflow: this section is not supported: ZenFlow applies most gradients late, which changes the training result; remove the section
    ds.json: zero_optimization.offload_param.device: expected one of none, cpu, nvme, got "disk"
    "#);
    let key = "train_micro_batch_size";
    let problem = error.problems().iter().find(|problem| problem.path == key).unwrap();
    assert!(matches!(&problem.kind, ProblemKind::UnknownKey { suggestion: Some(key), .. }
        if key == "train_micro_batch_size_per_gpu"));
}

#[test]
fn groups_divide_the_ranks() {
    let plan = |stage: u8, size: i64| {
        let zero = format!(r#"{{"stage": {stage}, "mics_shard_size": {size}}}"#);
        json(&format!(r#"{{"train_batch_size": 4, "gradient_clipping": 0, "zero_optimization": {zero}}}"#), &on(4))
    };
    for stage in 1..4 {
        let meshed = plan(stage, 2).unwrap();
        assert_eq!((meshed.zero.shard_size, meshed.zero_config(0).shard_size), (Some(2), Some(2)));
        assert_eq!(warnings(&meshed), "");
    }
    // One group of all.
    assert_eq!((plan(3, 4).unwrap().zero.shard_size, plan(3, -1).unwrap().zero.shard_size), (None, None));
    assert!(plan(3, 2).unwrap().explain().contains("parameters are sharded, within 2 groups of 2 ranks."));
    insta::assert_snapshot!(plan(3, 3).unwrap_err(), @"ds.json: zero_optimization.mics_shard_size: 3 does not divide 4 ranks: expected a divisor of the number of ranks, or -1 for all");
    insta::assert_snapshot!(warnings(&plan(0, 2).unwrap()), @"zero_optimization.mics_shard_size: has no effect at stage 0, only from stage 1");
    assert_eq!(plan(0, 2).unwrap().zero.shard_size, None);
}

#[test]
fn a_second_cut_divides_the_ranks_of_stage_3() {
    let plan = |stage: u8, keys: &str| {
        let zero = format!(r#"{{"stage": {stage}, "zero_hpz_partition_size": {keys}}}"#);
        json(&format!(r#"{{"train_batch_size": 4, "gradient_clipping": 0, "zero_optimization": {zero}}}"#), &on(4))
    };
    let size = |stage, keys| plan(stage, keys).unwrap().zero_config(0).secondary_shard_size;
    assert_eq!((size(3, "2"), size(3, "1"), size(3, "4"), size(2, "2")), (Some(2), None, None, None));
    let explained = plan(3, "2").unwrap().explain();
    assert!(
        explained.contains("; parameters are gathered from a secondary partition within 2 groups of 2 ranks"),
        "{explained}"
    );
    insta::assert_snapshot!(warnings(&plan(2, "2").unwrap()), @"zero_optimization.zero_hpz_partition_size: has no effect at stage 2, only from stage 3");
    insta::assert_snapshot!(plan(3, "3").unwrap_err(), @"ds.json: zero_optimization.zero_hpz_partition_size: 3 does not divide 4 ranks: expected a divisor of the number of ranks, or 1 for no secondary partition");
    insta::assert_snapshot!(plan(3, r#"2, "mics_shard_size": 2"#).unwrap_err(), @"ds.json: zero_optimization.zero_hpz_partition_size: gathers already stay within the groups of mics_shard_size: remove one of the two keys");
}

#[test]
fn gradients_are_quantized_to_what_the_key_says() {
    let plan = |keys: &str| {
        let zero = format!(r#"{{"stage": 2, {keys}}}"#);
        json(&format!(r#"{{"train_batch_size": 4, "gradient_clipping": 0, "zero_optimization": {zero}}}"#), &on(4))
    };
    let format = |keys| plan(keys).unwrap().zero_config(0).quantized_gradients;
    assert_eq!(format(r#""zero_quantized_gradients": true"#), Some(Format::Int8));
    let int4 = r#""zero_quantized_gradients": true, "zero_quantized_gradients_format": "int4""#;
    assert_eq!(format(int4), Some(Format::Int4));
    assert_eq!(format(r#""zero_quantized_gradients": false"#), None);
    let explained = plan(r#""zero_quantized_gradients": true, "mics_shard_size": 2"#).unwrap().explain();
    assert!(explained.contains("averaged over the ranks, in int8 across groups in buckets"), "{explained}");
    insta::assert_snapshot!(plan(r#""zero_quantized_gradients_format": 5"#).unwrap_err(), @"ds.json: zero_optimization.zero_quantized_gradients_format: expected one of int8, int4, nf4, got 5");
}

#[test]
fn moments_are_in_bf16_if_the_file_says_so() {
    let plan =
        |bf16: &str| json(&format!(r#"{{"train_batch_size": 2, "gradient_clipping": 0, "bf16": {bf16}}}"#), &on(2));
    let states = |bf16: &str| plan(bf16).unwrap().zero_config(0).bf16_optimizer_states;
    assert_eq!((states("{}"), states(r#"{"enabled": true}"#)), (false, false));
    // Whatever the parameters' type is.
    for enabled in [true, false] {
        let bf16 = format!(r#"{{"enabled": {enabled}, "bf16_optimizer_states": true}}"#);
        assert!(states(&bf16));
        assert!(plan(&bf16).unwrap().explain().contains(", moments in bf16."));
    }
    let built =
        ZeroPlan::builder(Stage::Parameters).precision(Precision::Fp32).bf16_optimizer_states(true).build(2).unwrap();
    assert!(built.zero.bf16_optimizer_states);
    insta::assert_snapshot!(plan(r#"{"bf16_master_weights_and_grads": true}"#).unwrap_err(), @"ds.json: bf16.bf16_master_weights_and_grads: true is not supported: master weights are always fp32; remove the key, or set `bf16.bf16_optimizer_states` to store the moments in bf16");
}

#[test]
fn weights_are_quantized_to_what_the_key_says_at_stage_3() {
    let plan = |stage: usize, keys: &str| {
        let zero = format!(r#"{{"stage": {stage}, {keys}}}"#);
        json(&format!(r#"{{"train_batch_size": 4, "gradient_clipping": 0, "zero_optimization": {zero}}}"#), &on(4))
    };
    let int4 = r#""zero_quantized_weights": true, "zero_quantized_weights_format": "int4""#;
    let format = |stage, keys| plan(stage, keys).unwrap().zero_config(0).quantized_weights;
    assert_eq!(format(3, int4), Some(Format::Int4));
    assert_eq!(format(3, r#""zero_quantized_weights": true"#), Some(Format::Int8));
    assert_eq!(format(3, r#""zero_quantized_weights": false"#), None);
    let explained = plan(3, int4).unwrap().explain();
    assert!(explained.contains("sharded; large weights are gathered in int4."), "{explained}");
    // Frozen ones, whatever is done with the others.
    let frozen =
        plan(3, r#""zero_quantized_nontrainable_weights": true, "zero_quantized_weights_format": "nf4""#).unwrap();
    assert_eq!(frozen.zero_config(0).weights(), [None, Some(Format::Nf4)]);
    assert!(frozen.explain().contains("; large frozen weights are gathered in nf4."), "{}", frozen.explain());
    let built = ZeroPlan::builder(Stage::Parameters).quantized_nontrainable_weights(true).build(2).unwrap();
    assert_eq!(built.zero_config(0).weights(), [None, Some(Format::Int8)]);
    // Where nothing is gathered for its use it is told to have no effect.
    let early = plan(2, int4).unwrap();
    assert_eq!(early.zero_config(0).quantized_weights, None);
    assert!(early.explain().contains("zero_optimization.zero_quantized_weights"), "{}", early.explain());
}

#[test]
fn features_that_would_change_training_are_refused() {
    let message = |text: &str| json(text, &on(2)).unwrap_err().to_string();
    for name in ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"] {
        let text =
            format!(r#"{{"train_batch_size": 2, "optimizer": {{"type": "{name}", "params": {{"freeze_step": 1}}}}}}"#);
        let expected = "is not supported: use one of AdamW, Adam, Lamb, SGD, Lion, Adagrad, Muon";
        assert_eq!(message(&text), format!("ds.json: optimizer.type: \"{name}\" {expected}"));
    }
    let lamb = r#"{"train_batch_size": 2, "optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0, "amsgrad": true,
        "eps_inside_sqrt": true, "max_coeff": 0.1, "min_coeff": -1, "bias_correction": 1, "max_coef": 3}}}"#;
    insta::assert_snapshot!(message(lamb), @r#"
    ds.json: optimizer.params.max_grad_norm: 1 is not supported: clipping is set by the top-level key `gradient_clipping`; move the value there
    ds.json: optimizer.params.amsgrad: true is not supported: this variant of the optimizer is not implemented; remove the key
    ds.json: optimizer.params.eps_inside_sqrt: true is not supported: this variant of the optimizer is not implemented; remove the key
    ds.json: optimizer.params.min_coeff: expected a number of at least 0, got -1
    ds.json: optimizer.params.bias_correction: expected true or false, got 1
    ds.json: optimizer.params.max_coef: unknown key; did you mean `max_coeff`?
    "#);
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "optimizer": {"type": "Lamb", "params": {"max_coeff": 0.001}}}"#), @"ds.json: optimizer.params.min_coeff: 0.01 is above `max_coeff`, 0.001: give a smaller one, or a larger `max_coeff`");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}"#), @"ds.json: optimizer.params.max_grad_norm: 1 is not supported: clipping is set by the top-level key `gradient_clipping`; move the value there");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "elasticity": {"enabled": true}, "amp": {"enabled": true}}"#), @r#"
    ds.json: elasticity: this section is not supported: it would choose other batch sizes; set the batch size keys instead
    ds.json: amp: this section is not supported: NVIDIA's amp is not available; use bf16 or fp16
    "#);
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "sequence_parallel_size": 2}"#), @r#"ds.json: sequence_parallel_size: 2 is not supported: sequences are not split over ranks; set it to 1, or remove it"#);
    assert!(
        json(r#"{"train_batch_size": 2, "gradient_allreduce_op": "mean", "sequence_parallel_size": 1, "amp": {"enabled": false}}"#, &on(2)).is_ok()
    );
}

#[test]
fn settings_that_exclude_each_other() {
    let message = |text: &str| json(text, &on(2)).unwrap_err().to_string();
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "bf16": {"enabled": true}, "fp16": {"enabled": true}}"#), @"ds.json: bf16.enabled: bf16 and fp16 are both enabled: set one of them to false");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}"#), @"ds.json: zero_optimization.offload_param.device: parameters can only be offloaded at stage 3, and this is stage 2: raise the stage, or set the device to none");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}"#), @"ds.json: zero_optimization.offload_optimizer.nvme_path: missing: the device is nvme; give the folder to write to");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {}}}"#), @"ds.json: zero_optimization.cpu_offload: is another name for `offload_optimizer`, which is also given: remove one");
    insta::assert_snapshot!(message(r#"{"gradient_accumulation_steps": 2}"#), @"ds.json: train_micro_batch_size_per_gpu: no batch size: give train_batch_size or train_micro_batch_size_per_gpu, or let the program supply Auto::micro_batch");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "fp16": {"enabled": true, "loss_scale_window": 0}}"#), @"ds.json: fp16.loss_scale_window: expected more than 0 when loss_scale is 0 (dynamic), got 0");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "scheduler": {"type": "WarmupLR", "params": {}}}"#), @"ds.json: scheduler.params.warmup_max_lr: missing: the file has no optimizer whose learning rate could be used");
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "scheduler": {"type": "WarmupCosineLR", "params": {}}}"#), @r#"ds.json: scheduler.params.total_num_steps: missing: the schedule needs the total number of optimizer steps, or "auto""#);
    insta::assert_snapshot!(message(r#"{"train_batch_size": 2, "zero_optimization": {"stage": "auto"}, "steps_per_print": "auto"}"#), @r#"
    ds.json: zero_optimization.stage: "auto" cannot be filled: the meaning of other keys depends on the stage; give a number from 0 to 3
    ds.json: steps_per_print: "auto" cannot be filled: this key has no automatic value; give a value
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
    assert_eq!(plan.zero.communication_dtype, Some(Float::F32));
    assert_eq!((plan.save_16bit_model, plan.zero.max_live_parameters), (true, 7));
    assert!(plan.offload_optimizer.is_some() && plan.offload_param.is_some());
    insta::assert_snapshot!(warnings(&plan), @r#"
    bfloat16: deprecated; write `bf16`
    fp32_allreduce: deprecated; write `communication_data_type`
    zero_optimization.cpu_offload: deprecated; write `offload_optimizer`
    zero_optimization.cpu_offload_params: deprecated; write `offload_param`
    zero_optimization.cpu_offload_use_pin_memory: has no effect: deprecated; write `pin_memory` in `offload_param` or `offload_optimizer`
    zero_optimization.stage3_gather_fp16_weights_on_model_save: deprecated; write `stage3_gather_16bit_weights_on_model_save`
    "#);
    let plan = json(r#"{"train_batch_size": 2, "gradient_clipping": 1, "zero_optimization": true}"#, &on(2)).unwrap();
    assert_eq!(plan.zero.stage, Stage::OptimizerState);
    insta::assert_snapshot!(warnings(&plan), @r#"zero_optimization: deprecated; write {"stage": 1}"#);
}

#[test]
fn keys_without_effect_are_named() {
    let plan = json(
        r#"{"train_batch_size": 2, "sparse_gradients": true, "timers": {"throughput": {"enabled": false}},
            "flops_profiler": {"enabled": true, "top_modules": 3}, "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5,
            "stage3_prefetch_bucket_size": "auto", "stage3_max_reuse_distance": 1e9, "allgather_bucket_size": 2e8,
            "zeropp_loco_param": {"err_beta": 0.5}, "offload_optimizer": {"device": "none", "pin_memory": false}}}"#,
        &on(2),
    )
    .unwrap();
    assert_eq!(plan.gradient_clipping, Some(1.0));
    insta::assert_snapshot!(warnings(&plan), @r#"
    sparse_gradients: has no effect: gradients of embeddings are dense
    timers.throughput.enabled: has no effect: throughput is always measured, at the end of a step
    flops_profiler.top_modules: has no effect: operations are counted for the whole model, not for each module
    zero_optimization.stage3_max_live_parameters: has no effect at stage 2, only from stage 3
    zero_optimization.allgather_bucket_size: has no effect: it does not apply to the all-gather used here
    zero_optimization.zeropp_loco_param: has no effect: error feedback for quantized gradients is not implemented; with AdamW it did not improve the loss
    gradient_clipping: not given: gradients are clipped to norm 1, as in DeepSpeed since 0.19.6 (earlier versions did not clip); write 1.0, or 0 to turn clipping off
    "#);
    insta::assert_snapshot!(plan.explain(), @r#"
    ZeRO stage 2 over 2 ranks: optimizer state and gradients are sharded, every rank holds all parameters.
    Batch: 1 row per rank × 1 micro-batch × 2 ranks = 2 rows per optimizer step.
    Precision: fp32.
    Optimizer: the program's own.
    Learning rate: no schedule.
    Gradients: clipped to a global norm of 1, averaged over the ranks in buckets of 500,000,000 elements, overlapped with the backward pass.
    Warning: sparse_gradients: has no effect: gradients of embeddings are dense.
    Warning: timers.throughput.enabled: has no effect: throughput is always measured, at the end of a step.
    Warning: flops_profiler.top_modules: has no effect: operations are counted for the whole model, not for each module.
    Warning: zero_optimization.stage3_max_live_parameters: has no effect at stage 2, only from stage 3.
    Warning: zero_optimization.allgather_bucket_size: has no effect: it does not apply to the all-gather used here.
    Warning: zero_optimization.zeropp_loco_param: has no effect: error feedback for quantized gradients is not implemented; with AdamW it did not improve the loss.
    Warning: gradient_clipping: not given: gradients are clipped to norm 1, as in DeepSpeed since 0.19.6 (earlier versions did not clip); write 1.0, or 0 to turn clipping off.
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
    insta::assert_snapshot!(message(b"{\"a\": 1,,}"), @"DIR/x.json: not valid JSON: key must be a string at line 1 column 9");
    insta::assert_snapshot!(message(b"{\"train_batch_size\": 1, \"train_batch_size\": 2}"), @"DIR/x.json: not valid JSON: the key `train_batch_size` is given twice at line 1 column 42");
    std::fs::write(folder.path().join("x"), "num_processes: 0\n").unwrap();
    let error = Config::from_file(folder.path().join("x")).unwrap_err().to_string();
    assert!(error.contains("num_processes: expected at least 1, got 0"), "{error}");
}
