//! Choice of the checkpoint in a folder to resume from.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use super::error::CheckpointError;
use super::exchange::{DiskWork, Heartbeat, Ranks, Task};
use super::names::{LATEST, REPLACED, names_in, pointed_at};
use super::{Check, Checkpoint, Manifest, sound};
use crate::Collective;

/// Result of [`find_latest`].
#[derive(Debug, Default)]
pub struct Found {
    /// The checkpoint to resume from, if any.
    pub checkpoint: Option<PathBuf>,
    /// Newer ones that are damaged, each with the reason, in the order in which they were tried.
    pub skipped: Vec<(PathBuf, CheckpointError)>,
}

/// Finds the newest intact checkpoint in `dir`: the one that `dir/latest` names, or else the most recently saved of the other intact ones.
/// A folder that does not exist has none. Changes nothing.
///
/// # Errors
///
/// [`CheckpointError::Io`] if `dir` cannot be read.
pub fn find_latest(dir: &Path, check: Check) -> Result<Found, CheckpointError> {
    let look = |path: &Path| match check {
        Check::Sizes => Checkpoint::open(path).err(),
        Check::Contents => look_at(path, (0, 1), check, &Heartbeat::default()),
    };
    find(dir, |turn| candidates(dir, turn), |path| Ok(look(path)))
}

/// Same as [`find_latest`], by all ranks together: rank 0 lists the folder, and each rank checks its share of the files, so that each file
/// is read once. A collective; all ranks get the same result. Problems are reported as [`CheckpointError::Told`].
///
/// # Errors
///
/// Same as [`find_latest`], and [`CheckpointError::Comm`].
pub fn find_latest_together(comm: &dyn Collective, dir: &Path, check: Check) -> Result<Found, CheckpointError> {
    let ranks = RefCell::new(Ranks::new(comm, Task::Check { path: dir.to_path_buf() }));
    let shared = |turn| {
        let work = (comm.rank() == 0).then(|| {
            let path = dir.to_path_buf();
            DiskWork::start(comm.place().rank, path.clone(), move |_| {
                let (names, problem) = candidates(&path, turn)?;
                Ok((names, problem.map(|error| error.to_string())))
            })
        });
        let mut ranks = ranks.borrow_mut();
        let found: (Vec<String>, Option<String>) = ranks.share_work(work, Default::default)?;
        let (names, problem) = ranks.of_first(&found)?;
        Ok((names, problem.map(|reason| CheckpointError::Told { rank: comm.members()[0], reason })))
    };
    find(dir, shared, |path| problem_of(&mut ranks.borrow_mut(), comm, path, check))
}

/// Checks the checkpoint in `folder` by all ranks together, each its share of the files, and returns the first problem. A collective.
///
/// # Errors
///
/// [`CheckpointError::Comm`], and [`CheckpointError::Io`] if a rank's disk does nothing.
pub fn check_together(
    comm: &dyn Collective,
    folder: &Path,
    check: Check,
) -> Result<Option<CheckpointError>, CheckpointError> {
    let mut ranks = Ranks::new(comm, Task::Check { path: folder.to_path_buf() });
    problem_of(&mut ranks, comm, folder, check)
}

fn problem_of(
    ranks: &mut Ranks<'_>,
    comm: &dyn Collective,
    folder: &Path,
    check: Check,
) -> Result<Option<CheckpointError>, CheckpointError> {
    let (share, path) = ((comm.rank(), comm.world()), folder.to_path_buf());
    let work = DiskWork::start(ranks.rank(), path.clone(), move |progress| {
        Ok(look_at(&path, share, check, progress).map(|error| error.to_string()))
    });
    let problem = ranks.share_work(Some(work), || None)?;
    let told = ranks.first_told(problem)?;
    // Remembered for when rank 0 prunes: together the ranks have read everything. A manifest that cannot be read now is read again then.
    if told.is_none()
        && check == Check::Contents
        && comm.rank() == 0
        && let Ok(manifest) = Manifest::read(folder)
    {
        sound::remember(folder, &manifest, None);
    }
    Ok(told.map(|(rank, reason)| CheckpointError::Told { rank, reason }))
}

/// Returns the first problem in a share of a checkpoint's files.
fn look_at(path: &Path, share: (usize, usize), check: Check, progress: &Heartbeat) -> Option<CheckpointError> {
    match Manifest::read(path) {
        Ok(manifest) => sound::look(path, &manifest, share, check, progress),
        Err(error) => Some(error),
    }
}

/// The two rounds of candidates. The second round follows if the first finds no intact checkpoint.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Named,
    Others,
}

/// Names of possible checkpoints in a folder, and the error of `latest`.
type Candidates = (Vec<String>, Option<CheckpointError>);

/// Returns the checkpoint that `latest` names, or the others, most recently saved first.
fn candidates(dir: &Path, turn: Turn) -> Result<Candidates, CheckpointError> {
    let mut others = names_in(dir)?;
    let (named, problem) = match named_by_latest(dir, &others) {
        Ok(named) => (named, None),
        Err(error) => (None, Some(error)),
    };
    if turn == Turn::Named {
        return Ok((named.into_iter().collect(), problem));
    }
    others.retain(|name| Some(name) != named.as_ref());
    // Sorted in reverse, so that checkpoints without a manifest, and their errors, come last.
    others.sort_by_cached_key(|name| {
        let manifest = Manifest::read(&dir.join(name)).ok();
        manifest.map(|manifest| (manifest.saved_unix_ms, manifest.step))
    });
    others.reverse();
    Ok((others, None))
}

/// Returns the first candidate without a problem, and the problems of those before it.
fn find(
    dir: &Path,
    candidates: impl Fn(Turn) -> Result<Candidates, CheckpointError>,
    mut problem_of: impl FnMut(&Path) -> Result<Option<CheckpointError>, CheckpointError>,
) -> Result<Found, CheckpointError> {
    let mut found = Found::default();
    for turn in [Turn::Named, Turn::Others] {
        let (names, problem) = candidates(turn)?;
        found.skipped.extend(problem.map(|error| (dir.join(LATEST), error)));
        for path in names.into_iter().map(|name| dir.join(name)) {
            match problem_of(&path)? {
                None => {
                    found.checkpoint = Some(path);
                    return Ok(found);
                }
                Some(error) => found.skipped.push((path, error)),
            }
        }
    }
    Ok(found)
}

/// Returns the folder that `latest` points to, which need not be among `names`, the result of [`names_in`].
pub(super) fn named_by_latest(dir: &Path, names: &[String]) -> Result<Option<String>, CheckpointError> {
    Ok(pointed_at(dir)?.map(|named| {
        // Between two renames of a save, the checkpoint has the name that it was set aside under.
        let aside = format!("{REPLACED}{named}");
        if names.contains(&aside) { aside } else { named }
    }))
}
