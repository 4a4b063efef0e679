//! Ranks that leave, and collectives that only one rank calls.

use super::*;

// ---- (d), (e), (f) ranks that leave ----

#[test]
fn a_rank_panics_in_the_middle_of_a_forward_pass() {
    for stage in Stage::ALL {
        let run = outcome(3, config(stage), FAR, |device| {
            let mut model = prepare::<Ad, _>(Net::new(&device), &device);
            let mut optimizer = AdamWConfig::new().init();
            for n in 0..4 {
                if device.rank() == 1 && n == 2 {
                    let half = model.first.forward(batch(&device, n));
                    // The others are in their backward pass by then, and wait for this rank's gradients.
                    std::thread::sleep(Duration::from_millis(300));
                    panic!("the tokenizer broke at {:?}", half.dims());
                }
                model = step(model, &mut optimizer, &device, n);
            }
            Ok(())
        });
        let what = format!("a panic in a forward pass, stage {stage}");
        let error = error(&what, run, SOON);
        assert_says(&what, &error, &["rank 1 of 3", "the tokenizer broke at [3, 6]"]);
        assert_a_right_run_works(stage);
    }
}

/// The backward pass holds autodiff's lock when a rank stops in a gather there.
#[test]
fn a_rank_panics_between_forward_and_backward() {
    for stage in Stage::ALL {
        let run = outcome(3, config(stage), FAR, |device| {
            let mut model = prepare::<Ad, _>(Net::new(&device), &device);
            let mut optimizer = AdamWConfig::new().init();
            for n in 0..4 {
                if device.rank() == 2 && n == 1 {
                    let loss = model.loss(batch(&device, n), true);
                    panic!("the loss is {}", if loss.into_scalar().is_finite() { "wrong" } else { "no number" });
                }
                model = step(model, &mut optimizer, &device, n);
            }
            Ok(())
        });
        let what = format!("a panic before a backward pass, stage {stage}");
        let error = error(&what, run, SOON);
        assert_says(&what, &error, &["rank 2 of 3", "the loss is wrong"]);
        assert_a_right_run_works(stage);
    }
}

#[test]
fn a_rank_returns_an_error_while_others_go_on() {
    for stage in Stage::ALL {
        let run = outcome(3, config(stage), FAR, |device| {
            let mut model = prepare::<Ad, _>(Net::new(&device), &device);
            let mut optimizer = AdamWConfig::new().init();
            for n in 0..50 {
                if device.rank() == 2 && n == 2 {
                    return Err("shard 7 of the data is missing".to_string());
                }
                model = step(model, &mut optimizer, &device, n);
            }
            Ok(())
        });
        let what = format!("an error after two steps, stage {stage}");
        let error = error(&what, run, SOON);
        assert_says(&what, &error, &["rank 2 of 3: shard 7 of the data is missing"]);
        assert_a_right_run_works(stage);
    }
}

#[test]
fn a_rank_runs_fewer_steps() {
    for stage in Stage::ALL {
        for short in 0..3 {
            let run = outcome(3, config(stage), FAR, move |device| {
                let mut model = prepare::<Ad, _>(Net::new(&device), &device);
                let mut optimizer = AdamWConfig::new().init();
                for n in 0..if device.rank() == short { 2 } else { 4 } {
                    model = step(model, &mut optimizer, &device, n);
                }
                Ok(())
            });
            let what = format!("fewer steps on rank {short}, stage {stage}");
            let error = error(&what, run, SOON);
            let ended = format!("rank {short} has already ended");
            assert_says(&what, &error, &[&ended, "every rank must run the same number of steps"]);
        }
    }
}

// ---- (i) a collective that one rank only calls ----

/// Trains three steps; `rank` reads a gradient in step `at`.
fn one_reader(stage: Stage, rank: usize, at: usize) -> (Result<Vec<f32>, String>, Duration) {
    outcome(2, config(stage), NEAR, move |device| {
        let mut model = prepare::<Ad, _>(Net::new(&device), &device);
        let mut optimizer = AdamWConfig::new().init();
        let mut read = 0.0;
        for n in 0..3 {
            let grads = collect_grads::<Ad, _>(gradients(&model, &device, n), &model);
            if device.rank() == rank && n == at {
                let gradient = grads.get::<Zero<Flex>, 2>(model.second.weight.id).unwrap();
                read = gradient.into_data().iter::<f32>().sum();
            }
            model = optimizer.step(0.05, model, grads);
        }
        Ok(read)
    })
}

#[test]
fn one_rank_reads_a_gradient() {
    // At stage 0 every rank holds the whole gradient: nothing is wrong.
    one_reader(Stage::DataParallel, 0, 1).0.unwrap();
    for stage in &Stage::ALL[1..] {
        for rank in 0..2 {
            for at in [0, 2] {
                let what = format!("rank {rank} alone reads a gradient in step {at}, stage {stage}");
                let error = error(&what, one_reader(*stage, rank, at), NEAR + SOON);
                assert_says(&what, &error, &["every rank"]);
            }
        }
    }
}

/// After the read, there is no call at which the ranks could meet.
#[test]
fn one_rank_reads_a_gradient_at_the_very_end() {
    for stage in &Stage::ALL[1..] {
        for rank in 0..2 {
            let run = outcome(2, config(*stage), NEAR, move |device| {
                let model = prepare::<Ad, _>(Net::new(&device), &device);
                let grads = collect_grads::<Ad, _>(gradients(&model, &device, 0), &model);
                let gradient = grads.get::<Zero<Flex>, 2>(model.second.weight.id).unwrap();
                Ok(if device.rank() == rank { gradient.into_data().iter::<f32>().sum() } else { 0.0 })
            });
            let what = format!("rank {rank} alone reads a gradient at the end, stage {stage}");
            let error = error(&what, run, NEAR + SOON);
            assert_says(&what, &error, &["rank"]);
        }
    }
}

/// Not a misuse: parameters are read without the other ranks, so one rank may evaluate or inspect a weight.
#[test]
fn one_rank_may_evaluate_alone() {
    for stage in Stage::ALL {
        for rank in 0..3 {
            let losses = |evaluates: bool| {
                let run = outcome(3, config(stage), FAR, move |device| {
                    let mut model = prepare::<Ad, _>(Net::new(&device), &device);
                    let mut optimizer = AdamWConfig::new().init();
                    let mut losses = Vec::new();
                    for n in 0..4 {
                        let loss = model.loss(batch(&device, n), true);
                        losses.push(loss.clone().into_scalar().to_bits());
                        let grads = GradientsParams::from_grads(loss.backward(), &model);
                        let grads = collect_grads::<Ad, _>(grads, &model);
                        model = optimizer.step(0.05, model, grads);
                        if evaluates && device.rank() == rank {
                            let x = Tensor::<Zero<Flex>, 2>::ones([2, 4], &device);
                            assert!(model.valid().loss(x, true).into_scalar().is_finite());
                            assert_eq!(model.first.weight.val().into_data().num_elements(), 24);
                        }
                    }
                    Ok(losses)
                });
                run.0.unwrap_or_else(|error| panic!("stage {stage}, rank {rank} evaluates alone: {error}"))
            };
            assert_eq!(losses(false), losses(true), "stage {stage}, rank {rank}");
        }
    }
}

/// The correct version of the program: every rank reads.
#[test]
fn every_rank_reads_a_gradient() {
    for stage in Stage::ALL {
        let (result, _) = outcome(2, config(stage), FAR, |device| {
            let mut model = prepare::<Ad, _>(Net::new(&device), &device);
            let mut optimizer = AdamWConfig::new().init();
            let mut read = Vec::new();
            for n in 0..3 {
                mark::<Ad, _>(&model);
                let grads = collect_grads::<Ad, _>(gradients(&model, &device, n), &model);
                let gradient = grads.get::<Zero<Flex>, 2>(model.second.weight.id).unwrap();
                read.push(gradient.into_data().iter::<f32>().sum::<f32>().to_bits());
                model = optimizer.step(0.05, model, grads);
            }
            Ok(read)
        });
        let read = result.unwrap();
        assert_eq!(read[0], read[1], "stage {stage}");
    }
}
