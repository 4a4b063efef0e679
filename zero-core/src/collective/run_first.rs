//! Work that some ranks do first, so that the others find the result.

use std::fmt;

use super::Collective;
use super::agree::first_told;
use crate::CommError;

/// The failure of this rank or of another one.
#[derive(Debug)]
pub enum RankError<E> {
    /// This rank's own error.
    Here(E),
    /// Another rank's error.
    There {
        /// The rank.
        rank: usize,
        /// The text of its error.
        told: String,
    },
}

impl<E: fmt::Display> fmt::Display for RankError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here(error) => error.fmt(f),
            Self::There { rank, told } => write!(f, "rank {rank}: {told}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for RankError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        if let Self::Here(error) = self { error.source() } else { None }
    }
}

/// Runs `f` on the ranks with `is_first` and, if it succeeds on all of these, on the others. An error on one rank is returned on
/// every rank, so that no rank continues with a result that another could not make or find. A collective operation.
///
/// # Errors
///
/// [`CommError`], as for any collective, also in the wait for the first ranks; the inner result holds the errors of `f`.
pub fn run_first<T, E: fmt::Display>(
    comm: &dyn Collective,
    is_first: bool,
    f: impl FnOnce() -> Result<T, E>,
) -> Result<Result<T, RankError<E>>, CommError> {
    let (mine, later) = if is_first { (Some(f()), None) } else { (None, Some(f)) };
    let failed = failed(comm, mine.as_ref())?;
    if failed.is_some() {
        return Ok(together(mine, failed));
    }
    let mine = mine.or_else(|| later.map(|f| f()));
    let failed = self::failed(comm, mine.as_ref())?;
    Ok(together(mine, failed))
}

/// Returns the first rank whose outcome is an error, with its text.
fn failed<T, E: fmt::Display>(
    comm: &dyn Collective,
    mine: Option<&Result<T, E>>,
) -> Result<Option<(usize, String)>, CommError> {
    if comm.world() == 1 {
        return Ok(None);
    }
    let told = mine.and_then(|outcome| outcome.as_ref().err()).map(ToString::to_string);
    first_told(comm, told, "work that some ranks do first")
}

fn together<T, E>(mine: Option<Result<T, E>>, failed: Option<(usize, String)>) -> Result<T, RankError<E>> {
    match (mine, failed) {
        (Some(Err(error)), _) => Err(RankError::Here(error)),
        (_, Some((rank, told))) => Err(RankError::There { rank, told }),
        (Some(Ok(value)), None) => Ok(value),
        (None, None) => unreachable!("a rank that is not first runs `f` when the first have succeeded"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::collective::threads::{ThreadOptions, run};

    /// Returns each rank's outcome and the number of runs of `f`; the ranks in `wrong` fail.
    fn told(world: usize, wrong: &[usize]) -> (Vec<Result<usize, String>>, usize) {
        let (runs, made) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let all = run(world, &ThreadOptions::default(), |comm| {
            let rank = comm.rank();
            let f = || {
                runs.fetch_add(1, Ordering::SeqCst);
                if wrong.contains(&rank) {
                    return Err(format!("no {rank}"));
                }
                if rank == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(30));
                    made.store(7, Ordering::SeqCst);
                }
                Ok(made.load(Ordering::SeqCst))
            };
            run_first(&*comm, rank == 0, f).map(|outcome| outcome.map_err(|failed| failed.to_string()))
        });
        (all.unwrap(), runs.into_inner())
    }

    #[test]
    fn the_others_find_what_the_first_has_made() {
        for world in 1..=4 {
            assert_eq!(told(world, &[]), (vec![Ok(7); world], world));
        }
    }

    #[test]
    fn an_error_of_one_rank_is_all_ranks() {
        let of = |told: &str| Err::<usize, _>(told.to_string());
        assert_eq!(told(1, &[0]), (vec![of("no 0")], 1));
        // The others do not look for what is not there.
        assert_eq!(told(3, &[0]), (vec![of("no 0"), of("rank 0: no 0"), of("rank 0: no 0")], 1));
        assert_eq!(told(3, &[2]), (vec![of("rank 2: no 2"), of("rank 2: no 2"), of("no 2")], 3));
    }
}
