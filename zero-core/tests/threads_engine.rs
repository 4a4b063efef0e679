//! The threads engine through its public API: results, byte counts, and that failures never hang.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use zero_core::collective::Joined;
use zero_core::collective::flight::merge;
use zero_core::collective::threads::{ThreadComm, ThreadOptions, run, run_recorded};
use zero_core::{Buffer, Collective, CommError, LaunchError, ReduceOp, Request};

fn options() -> ThreadOptions {
    ThreadOptions { deadline: Duration::from_secs(20) }
}

fn ranks<T: Send>(
    world: usize,
    body: impl Fn(&ThreadComm) -> Result<T, CommError> + Sync,
) -> Result<Vec<T>, LaunchError<CommError>> {
    run(world, &options(), |comm| body(&comm))
}

fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729) % 1000) as f32 / 7.0 - 50.0
}

#[test]
fn ranks_share_one_result_of_an_all_reduce() {
    for world in 1..5 {
        let numel = 10;
        let input = |rank: usize| Buffer::F32((0..numel).map(|i| value(rank, i)).collect());
        let got = ranks(world, |comm| {
            // Twice, so that a result is not taken for another's.
            let mut shared = Vec::new();
            for shift in 0..2 {
                let join = |pieces: &[Arc<Buffer>]| -> Joined { Arc::new(Buffer::join(pieces)) };
                let pending =
                    comm.start_shared(input(comm.rank() + shift), ReduceOp::Mean, "a gradient", Box::new(join));
                shared.push(pending.wait()?.downcast::<Buffer>().unwrap());
            }
            let own = [0, 1].map(|shift| comm.all_reduce(input(comm.rank() + shift), ReduceOp::Mean));
            Ok((shared, own.into_iter().collect::<Result<Vec<_>, _>>()?, comm.wire().read().all_reduce))
        })
        .unwrap();
        for (shared, own, received) in &got {
            for i in 0..2 {
                assert_eq!(*shared[i], own[i]);
                assert!(Arc::ptr_eq(&shared[i], &got[0].0[i]), "one result, of {world} ranks");
            }
            // Four all-reduces: each rank is sent the others' part of its stride, and the others' strides.
            assert!((world == 1) == (*received == 0));
        }
        let total: u64 = got.iter().map(|(.., received)| *received).sum();
        assert_eq!(total, 4 * 2 * 4 * (numel * (world - 1)) as u64);
    }
}

#[test]
fn handles_are_exchanged_as_they_are() {
    for world in 1..4 {
        let got = ranks(world, |comm| {
            let mut rounds = Vec::new();
            for round in 0..3 {
                let own: Joined = Arc::new((comm.rank(), round));
                let all = comm.in_process().unwrap().exchange(own.clone(), 8, "a handle")?;
                assert!(Arc::ptr_eq(&all[comm.rank()], &own), "not a copy");
                rounds.push(all.iter().map(|item| *item.downcast_ref::<(usize, i32)>().unwrap()).collect::<Vec<_>>());
            }
            // In one order with started operations.
            let started = comm.start(Request::AllReduce(Buffer::F32(vec![1.0]), ReduceOp::Sum));
            let last = comm.in_process().unwrap().exchange(Arc::new(comm.rank()), 8, "another")?.len();
            assert_eq!(started.wait()?.into_f32(), [world as f32]);
            Ok((rounds, last, comm.wire().read().all_gather))
        });
        for (rounds, last, received) in got.unwrap() {
            for (round, items) in rounds.into_iter().enumerate() {
                assert_eq!(items, (0..world).map(|rank| (rank, round as i32)).collect::<Vec<_>>());
            }
            assert_eq!((last, received), (world, 0));
        }
    }
}

#[test]
fn an_exchange_meets_only_its_like() {
    let error = ranks(2, |comm| match comm.rank() {
        0 => comm.in_process().unwrap().exchange(Arc::new(0), 8, "gradients of 2 parameters").map(|_| ()),
        _ => comm.in_process().unwrap().exchange(Arc::new(0), 16, "gradients of 3 parameters").map(|_| ()),
    })
    .unwrap_err()
    .to_string();
    for word in ["exchange of 8 bytes for gradients of 2", "exchange of 16 bytes for gradients of 3"] {
        assert!(error.contains(word), "{word} in {error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn results_are_those_of_one_rank_adding_in_order(world in 1usize..6, per_rank in 0usize..40) {
        let numel = world * per_rank;
        let input = |rank: usize| (0..numel).map(|i| value(rank, i)).collect::<Vec<f32>>();
        let mut sum = input(0);
        for rank in 1..world {
            sum.iter_mut().zip(input(rank)).for_each(|(a, b)| *a += b);
        }
        let got = ranks(world, |comm| {
            let rank = comm.rank();
            let full = || Buffer::F32(input(rank));
            let scattered = comm.reduce_scatter(full(), ReduceOp::Sum)?.into_f32();
            let gathered = comm.all_gather(Buffer::F32(scattered.clone()))?.into_f32();
            let reduced = comm.all_reduce(full(), ReduceOp::Sum)?.into_f32();
            let swapped = comm.all_to_all(full())?.into_f32();
            let sent = comm.broadcast(full(), world - 1)?.into_f32();
            Ok((scattered, gathered, reduced, swapped, sent))
        }).unwrap();
        for (rank, (scattered, gathered, reduced, swapped, sent)) in got.into_iter().enumerate() {
            prop_assert_eq!(&scattered[..], &sum[rank * per_rank..(rank + 1) * per_rank]);
            prop_assert_eq!(&gathered, &sum);
            prop_assert_eq!(&reduced, &sum);
            let expected: Vec<f32> =
                (0..world).flat_map(|from| input(from)[rank * per_rank..(rank + 1) * per_rank].to_vec()).collect();
            prop_assert_eq!(swapped, expected);
            prop_assert_eq!(sent, input(world - 1));
        }
    }
}

#[test]
fn bytes_are_counted_as_in_the_paper() {
    let wires = ranks(4, |comm| {
        comm.all_gather(Buffer::F32(vec![0.0; 25]))?;
        comm.reduce_scatter(Buffer::F32(vec![0.0; 100]), ReduceOp::Sum)?;
        comm.all_reduce(Buffer::F32(vec![0.0; 100]), ReduceOp::Sum)?;
        comm.broadcast(Buffer::U8(vec![0; 10]), 0)?;
        Ok(comm.wire().read())
    })
    .unwrap();
    for (rank, wire) in wires.iter().enumerate() {
        assert_eq!(wire.all_gather, 300);
        assert_eq!(wire.reduce_scatter, 300);
        assert_eq!(wire.all_reduce, 600);
        assert_eq!(wire.broadcast, if rank == 0 { 0 } else { 10 });
    }
}

#[test]
fn started_operations_run_in_order_beside_the_caller_and_mix_with_blocking_ones() {
    let sums = ranks(3, |comm| {
        let pending: Vec<_> =
            (0..5).map(|i| comm.start(Request::AllReduce(Buffer::F64(vec![i as f64; 3]), ReduceOp::Sum))).collect();
        let max = comm.all_reduce(Buffer::U8(vec![comm.rank() as u8]), ReduceOp::Max)?.into_u8();
        let sums: Result<Vec<f64>, CommError> = pending.into_iter().map(|p| Ok(p.wait()?.into_f64()[0])).collect();
        Ok((sums?, max[0]))
    })
    .unwrap();
    assert_eq!(sums, vec![(vec![0.0, 3.0, 6.0, 9.0, 12.0], 2); 3]);
}

#[test]
fn duplicated_groups_have_their_own_order() {
    ranks(2, |comm| {
        let other = comm.duplicate("other")?;
        // Opposite orders over two groups: legal, because each group counts for itself.
        if comm.rank() == 0 {
            let pending = other.start(Request::Barrier(""));
            comm.barrier()?;
            pending.wait()?;
        } else {
            let pending = comm.start(Request::Barrier(""));
            other.barrier()?;
            pending.wait()?;
        }
        assert_eq!(other.label(), "other");
        Ok(())
    })
    .unwrap();
}

#[test]
fn groups_are_split_and_split_again() {
    let sums = ranks(4, |comm| {
        let rank = comm.rank();
        let sum = |group: &dyn Collective| -> Result<f32, CommError> {
            Ok(group.all_reduce(Buffer::F32(vec![rank as f32]), ReduceOp::Sum)?.into_f32()[0])
        };
        let (half, odd) = (comm.split("half", (rank / 2) as u64)?, comm.split("odd", (rank % 2) as u64)?);
        assert_eq!((half.members(), half.rank()), (&[rank / 2 * 2, rank / 2 * 2 + 1][..], rank % 2));
        assert_eq!((odd.members(), odd.label(), odd.place().rank), (&[rank % 2, rank % 2 + 2][..], "odd", rank));
        let (own, both) = (half.split("own", rank as u64)?, half.split("both", 7)?);
        assert_eq!((own.world(), both.members()), (1, half.members()));
        // Of several groups at a time, and in no common order.
        let started = half.start(Request::AllReduce(Buffer::F32(vec![1.0]), ReduceOp::Sum));
        let sums = match rank {
            0 | 1 => [sum(&*half)?, sum(&*odd)?, sum(&*own)?, sum(&*both)?, sum(comm)?],
            _ => {
                let others = [sum(&*odd)?, sum(&*own)?, sum(&*both)?];
                [sum(&*half)?, others[0], others[1], others[2], sum(comm)?]
            }
        };
        assert_eq!(started.wait()?.into_f32(), [2.0]);
        Ok(sums)
    });
    let expected = |rank: usize| {
        let (half, odd) = ([1.0, 5.0][rank / 2], [2.0, 4.0][rank % 2]);
        [half, odd, rank as f32, half, 6.0]
    };
    assert_eq!(sums.unwrap(), [0, 1, 2, 3].map(expected));
}

/// A rank that fails in a nested group ends the waits of all ranks, whichever group they wait in.
#[test]
fn trouble_in_a_part_of_a_group_is_everyones() {
    let begin = Instant::now();
    let error = ranks(4, |comm| {
        let half = comm.split("half", (comm.rank() / 2) as u64)?;
        let pair = half.split("pair", 0)?;
        let waited = match comm.rank() {
            1 => panic!("its data is gone"),
            0 => pair.barrier(),
            2 => half.all_gather(Buffer::U8(vec![1])).map(|_| ()),
            _ => comm.barrier(),
        };
        let failed = waited.unwrap_err();
        assert!(matches!(&failed, CommError::PeerFailed { peer: 1, at, .. } if at.rank == comm.rank()), "{failed}");
        Err::<(), _>(failed)
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "rank 1 of 4: panicked: its data is gone");
    assert!(begin.elapsed() < Duration::from_secs(10));
}

fn fails_fast(world: usize, body: impl Fn(&ThreadComm) -> Result<(), CommError> + Sync) -> String {
    let begin = Instant::now();
    let error = ranks(world, body).expect_err("the run must fail").to_string();
    assert!(begin.elapsed() < Duration::from_secs(10), "took {:?}", begin.elapsed());
    error
}

#[test]
fn different_operations_are_an_error_that_names_both() {
    let error = fails_fast(3, |comm| {
        comm.barrier()?;
        if comm.rank() == 1 {
            comm.all_gather(Buffer::F32(vec![1.0]))?;
        } else {
            comm.barrier()?;
        }
        Ok(())
    });
    assert!(error.contains("all_gather") && error.contains("barrier") && error.contains("operation 1"), "{error}");
}

#[test]
fn different_lengths_are_an_error() {
    let error =
        fails_fast(2, |comm| comm.all_reduce(Buffer::F32(vec![0.0; 3 + comm.rank()]), ReduceOp::Sum).map(|_| ()));
    assert!(error.contains("of 3 f32") && error.contains("of 4 f32"), "{error}");
}

#[test]
fn a_panicking_rank_stops_the_others() {
    let error = fails_fast(4, |comm| {
        if comm.rank() == 2 {
            panic!("disk on fire");
        }
        comm.barrier()
    });
    assert_eq!(error, "rank 2 of 4: panicked: disk on fire");
}

#[test]
fn a_rank_that_leaves_early_stops_the_others() {
    let error = fails_fast(3, |comm| if comm.rank() == 0 { Ok(()) } else { comm.barrier() });
    assert!(error.contains("rank 0 has already ended"), "{error}");
}

#[test]
fn a_late_rank_is_named_at_the_deadline() {
    let options = ThreadOptions { deadline: Duration::from_millis(100) };
    let error = run(2, &options, |comm| -> Result<(), CommError> {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
        comm.barrier()
    })
    .unwrap_err()
    .to_string();
    assert!(error.contains("rank 0 waited") && error.contains("[1]") && error.contains("barrier"), "{error}");
}

#[test]
fn an_error_of_one_rank_is_the_error_of_the_run() {
    let error = run(3, &options(), |comm| -> Result<(), String> {
        if comm.rank() == 1 {
            return Err("no data".into());
        }
        comm.barrier().map_err(|e| e.to_string())
    })
    .unwrap_err();
    assert!(error.to_string().contains("no data"), "{error}");
}

#[test]
fn lengths_that_ranks_do_not_divide_are_refused() {
    let error = fails_fast(2, |comm| comm.reduce_scatter(Buffer::F32(vec![0.0; 3]), ReduceOp::Sum).map(|_| ()));
    assert!(error.contains("divisible by the number of ranks (2)"), "{error}");
}

#[test]
fn no_ranks_are_refused() {
    assert!(ranks(0, |_| Ok(())).unwrap_err().to_string().contains("at least 1"));
}

#[test]
fn a_mean_is_the_sum_times_one_over_the_ranks() {
    // More than a block of the reduction, and not a multiple of one.
    let len = 3 * 5001;
    let means = ranks(3, |comm| {
        let values: Vec<f32> = (0..len).map(|i| (i * (comm.rank() + 1)) as f32 * 0.1).collect();
        let sum = comm.all_reduce(Buffer::F32(values.clone()), ReduceOp::Sum)?.into_f32();
        let all = comm.all_reduce(Buffer::F32(values.clone()), ReduceOp::Mean)?.into_f32();
        let part = comm.reduce_scatter(Buffer::F32(values), ReduceOp::Mean)?.into_f32();
        let half =
            comm.all_reduce(Buffer::from_f32(vec![3.0; 4], zero_core::collective::DType::Bf16), ReduceOp::Mean)?;
        Ok((sum, all, part, half.into_f32()))
    })
    .unwrap();
    for (rank, (sum, all, part, half)) in means.into_iter().enumerate() {
        let expected: Vec<f32> = sum.iter().map(|x| x * (1.0 / 3.0)).collect();
        assert_eq!(all, expected);
        assert_eq!(part, expected[rank * 5001..(rank + 1) * 5001]);
        assert_eq!(half, [3.0; 4]);
    }
}

#[test]
fn a_deadline_leaves_records_that_name_the_late_rank() {
    let folder = tempfile::tempdir().unwrap();
    let options = ThreadOptions { deadline: Duration::from_millis(200) };
    let error = run_recorded(3, &options, Some(folder.path()), |comm| -> Result<(), CommError> {
        comm.barrier()?;
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500));
        }
        comm.execute_for(Request::AllGather(Buffer::U8(vec![1])), "what is new").map(|_| ())
    })
    .unwrap_err();
    assert!(error.to_string().contains("all_gather of 1 u8 for what is new"), "{error}");
    let files: Vec<_> = (0..3).map(|rank| folder.path().join(format!("flight-rank-{rank}.json"))).collect();
    let report = merge(&files).unwrap();
    let late = &report.late[0];
    assert_eq!((late.rank, late.seq, late.last_completed), (1, 1, Some(0)), "{report}");
    assert_eq!(late.waited_for_by, [0, 2]);
}

#[test]
fn what_an_operation_is_for_must_agree() {
    let error = run(2, &ThreadOptions::default(), |comm| {
        let what = if comm.rank() == 0 { "layer 1" } else { "layer 2" };
        comm.execute_for(Request::AllReduce(Buffer::F32(vec![1.0]), ReduceOp::Sum), what)
    })
    .unwrap_err()
    .to_string();
    assert!(error.contains("(sum) for layer 1") && error.contains("(sum) for layer 2"), "{error}");
}

/// A rank that has ended waits for the others, but not forever.
#[test]
fn the_wait_for_the_others_ends() {
    let options = ThreadOptions { deadline: Duration::from_millis(50) };
    let slow = |comm: Arc<ThreadComm>| -> Result<Duration, CommError> {
        let begin = Instant::now();
        if comm.rank() == 0 {
            std::thread::sleep(Duration::from_millis(2500));
        } else {
            comm.wait_for_others()?;
        }
        Ok(begin.elapsed())
    };
    let error = run(2, &options, slow).unwrap_err();
    assert!(error.to_string().contains("the final wait for all ranks"), "{error}");
}
