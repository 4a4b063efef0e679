//! The engine of processes over MPI: `cargo test -p zero-core --features mpi --test mpi_engine`.
//! To test MPICH instead of Open MPI: build with `MPICC=mpicc.mpich`, run with `ZERO_TEST_MPIRUN=mpirun.mpich`.

mod process_cases;
mod process_common;

const LINK: process_common::LinkUnderTest = process_common::LinkUnderTest::Mpi;
