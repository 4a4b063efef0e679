//! Spreads work over the caller's thread pool.

use rayon::prelude::*;

/// Elements of work below which a second thread costs more than it saves.
const WORTH_SPREADING: usize = 1 << 15;

/// Elements per task of element-wise work: a handful of arrays of this length fit a core's second-level cache.
pub(super) const TASK: usize = 1 << 13;

/// Rows per partial sum over rows. Fixed, so that a sum's bits do not depend on the number of threads.
pub(super) const BLOCK: usize = 32;

/// Runs `work` on every task, on several threads if there are enough `elements` of work.
pub(super) fn spread<T: Send>(elements: usize, tasks: Vec<T>, work: impl Fn(T) + Sync + Send) {
    // Outside of a pool rayon would pass even one thread's work to another thread and wait for it.
    if tasks.len() < 2 || elements < WORTH_SPREADING || rayon::current_num_threads() < 2 {
        tasks.into_iter().for_each(work);
    } else {
        tasks.into_par_iter().for_each(work);
    }
}

/// Returns the number of rows of `width` elements per task of element-wise work, at least one.
pub(super) fn rows_of_task(width: usize) -> usize {
    (TASK / width.max(1)).max(1)
}

/// Returns the number of threads of this pool, as gemm's setting.
pub fn gemm_threads() -> gemm::Parallelism {
    match rayon::current_num_threads() {
        0 | 1 => gemm::Parallelism::None,
        threads => gemm::Parallelism::Rayon(threads),
    }
}
