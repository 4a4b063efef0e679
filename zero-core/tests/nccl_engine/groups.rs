//! Subgroups of a communicator.

use super::*;

pub(super) fn split(comm: &NcclComm, _: &Path) -> Result<(), CommError> {
    let rank = comm.rank();
    let sum = |comm: &NcclComm| -> Result<f64, CommError> {
        let memory = Memory::of(&[rank as f64], DType::F32);
        // SAFETY: memory of this device, kept until the operation has ended.
        unsafe { all_reduce(comm, memory.0, memory.0, ReduceOp::Sum, "") }?.wait()?;
        Ok(memory.read()[0])
    };
    let place = comm.control().place();
    let node = comm.split("node", place.of_node()[0] as u64)?;
    let across = comm.split("across", place.across_nodes()[0] as u64)?;
    let pair = &[rank / 2 * 2, rank / 2 * 2 + 1][..];
    assert_eq!((node.control().members(), node.rank(), node.world()), (pair, rank % 2, 2));
    assert_eq!(across.control().members(), [rank % 2, rank % 2 + 2]);
    assert_eq!((sum(&node)?, sum(&across)?), ([1.0, 5.0][rank / 2], [2.0, 4.0][rank % 2]));
    // All but rank 2, and a root that counts within.
    let some = comm.split("some", u64::from(rank == 2))?;
    if rank != 2 {
        assert_eq!(some.control().members(), [0, 1, 3]);
        assert_eq!(sum(&some)?, 4.0);
        let memory = Memory::of(&[rank as f64], DType::F64);
        // SAFETY: as above.
        unsafe { broadcast(&some, memory.0, 2, "") }?.wait()?;
        assert_eq!(memory.read(), [3.0]);
    }
    // A part of a part.
    let (both, own) = (node.split("both", 5)?, node.split("own", rank as u64)?);
    assert_eq!((both.control().members(), own.control().members()), (pair, &[rank][..]));
    assert_eq!((sum(&both)?, sum(&own)?), ([1.0, 5.0][rank / 2], rank as f64));
    assert_eq!(sum(comm)?, 6.0);
    assert!(comm.wire().read().all_reduce > 0 && Arc::ptr_eq(comm.wire(), node.wire()));
    Ok(())
}

/// Rank 1 fails in a nested subgroup; the others wait in subgroups with and without it.
pub(super) fn split_trouble(comm: &NcclComm, folder: &Path) -> Result<(), CommError> {
    let rank = comm.rank();
    let node = comm.split("node", (rank / 2) as u64)?;
    let both = node.split("both", 5)?;
    let split = |rank: usize| folder.join(format!("split-{rank}"));
    std::fs::write(split(rank), "").expect("the test's folder can be written");
    if rank == 1 {
        let end = Instant::now() + PATIENT;
        while !(0..4).all(|rank| split(rank).exists()) {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(5));
        }
        both.abort("its data is gone");
    }
    let memory = Memory::of(&[1.0], DType::F32);
    let on = [&both, &both, &node, comm][rank];
    // SAFETY: memory of this device; after an error the communicator has been aborted.
    let again = || unsafe { all_reduce(on, memory.0, memory.0, ReduceOp::Sum, "") }?.wait();
    let error = (0..1000).find_map(|_| again().err()).expect("a rank has failed").to_string();
    assert!(error.contains("its data is gone"), "{error}");
    // Their watchdogs find it though nobody waits in them.
    let end = Instant::now() + PATIENT;
    while [comm, &node, &both].iter().any(|part| part.health().is_ok()) {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn trouble_in_a_part_of_a_communicator_is_everyones() {
    launched("split trouble", 4).assert_ok();
}

#[test]
fn communicators_are_split() {
    launched("split", 4).assert_ok();
}
