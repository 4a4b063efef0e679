//! Which checkpoint of a folder to resume from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::error::CheckpointError;
use super::exchange::{Progress, Ranks, Task, Work};
use super::names::{LATEST, REPLACED, names_in, pointed_at};
use super::{Check, Checkpoint, Manifest, sound};
use crate::Collective;

/// What [`find_latest`] found.
#[derive(Debug, Default)]
pub struct Found {
    /// The checkpoint to resume from, if there is any.
    pub checkpoint: Option<PathBuf>,
    /// Newer ones that are not sound, each with the reason, in the order in which they were tried.
    pub skipped: Vec<(PathBuf, CheckpointError)>,
}

/// The newest sound checkpoint in `dir`: the one that `dir/latest` names, else, of the others that are sound, the one
/// saved last. A folder that does not exist has none. Changes nothing.
///
/// # Errors
///
/// When the system does not let `dir` be read.
pub fn find_latest(dir: &Path, check: Check) -> Result<Found, CheckpointError> {
    let mut found = Found::default();
    let (candidates, problem) = Candidates::of(dir)?;
    found.skipped.extend(problem.map(|error| (dir.join(LATEST), error)));
    for name in candidates {
        let path = dir.join(name);
        let problem = match check {
            Check::Sizes => Checkpoint::open(&path).err(),
            Check::Contents => match Manifest::read(&path) {
                Ok(manifest) => sound::look(&path, &manifest, (0, 1), check, &Progress::default()),
                Err(error) => Some(error),
            },
        };
        if found.takes(path, problem) {
            break;
        }
    }
    Ok(found)
}

/// As [`find_latest`], by all ranks together: rank 0 looks at the folder, and each rank at its share of the files, so that
/// they are read once and not by every rank. A collective, which gives all ranks the same. What another rank has found is
/// [`CheckpointError::Told`].
///
/// # Errors
///
/// As [`find_latest`], and [`CheckpointError::Comm`].
pub fn find_latest_together(comm: &dyn Collective, dir: &Path, check: Check) -> Result<Found, CheckpointError> {
    let mut ranks = Ranks::new(comm, Task::Check { path: dir.to_path_buf() });
    let mut found = Found::default();
    // Rank 0's, on its way between the threads that look for the next.
    let candidates = Arc::new(Mutex::new(None));
    loop {
        let next = (comm.rank() == 0).then(|| {
            let (candidates, dir) = (candidates.clone(), dir.to_path_buf());
            Work::start(0, dir.clone(), move |_| {
                let mut candidates = candidates.lock();
                if let Some(candidates) = &mut *candidates {
                    return Ok((Candidates::next(candidates), None));
                }
                let (begun, problem) = Candidates::of(&dir)?;
                let next = candidates.insert(begun).next();
                Ok((next, problem.map(|error| error.to_string())))
            })
        });
        let (name, problem) = ranks.share_work(next, || (None, None))?.swap_remove(0);
        found.skipped.extend(problem.map(|reason| (dir.join(LATEST), CheckpointError::Told { rank: 0, reason })));
        let Some(name) = name else { break };
        let path = dir.join(name);
        let problem = problem_of(&mut ranks, comm, &path, check)?;
        if found.takes(path, problem) {
            break;
        }
    }
    Ok(found)
}

/// Looks at the checkpoint in `folder` by all ranks together, each at its share of the files; the first thing that is wrong.
/// A collective.
///
/// # Errors
///
/// [`CheckpointError::Comm`], and [`CheckpointError::Io`] when a rank's disk does nothing.
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
    let work = Work::start(share.0, path.clone(), move |progress| {
        let problem = match Manifest::read(&path) {
            Ok(manifest) => sound::look(&path, &manifest, share, check, progress),
            Err(error) => Some(error),
        };
        Ok(problem.map(|error| error.to_string()))
    });
    let all = ranks.share_work(Some(work), || None)?;
    let told = all.iter().enumerate().find_map(|(rank, problem)| Some((rank, problem.clone()?)));
    // For when rank 0 prunes: together the ranks have read it all. A manifest that cannot be read now is read again then.
    if told.is_none()
        && check == Check::Contents
        && comm.rank() == 0
        && let Ok(manifest) = Manifest::read(folder)
    {
        sound::remember(folder, &manifest, None);
    }
    Ok(told.map(|(rank, reason)| CheckpointError::Told { rank, reason }))
}

/// The names of what may be checkpoints in a folder, in the order in which they are tried: the one that `latest` names, then
/// the others, the one saved last first.
struct Candidates {
    dir: PathBuf,
    named: Option<String>,
    others: Vec<String>,
    sorted: bool,
}

impl Candidates {
    /// Also what is wrong with `latest`.
    fn of(dir: &Path) -> Result<(Self, Option<CheckpointError>), CheckpointError> {
        let mut others = names_in(dir)?;
        let (named, problem) = match named_by_latest(dir, &others) {
            Ok(named) => (named, None),
            Err(error) => (None, Some(error)),
        };
        others.retain(|name| Some(name) != named.as_ref());
        Ok((Self { dir: dir.to_path_buf(), named, others, sorted: false }, problem))
    }
}

impl Iterator for Candidates {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        if self.named.is_some() {
            return self.named.take();
        }
        if !self.sorted {
            // From the end. Those without a manifest last, and so their reasons.
            let dir = &self.dir;
            self.others.sort_by_cached_key(|name| {
                let manifest = Manifest::read(&dir.join(name)).ok();
                manifest.map(|manifest| (manifest.saved_unix_ms, manifest.step))
            });
            self.sorted = true;
        }
        self.others.pop()
    }
}

/// The folder that `latest` means, of those of [`names_in`] or none of them.
pub(super) fn named_by_latest(dir: &Path, names: &[String]) -> Result<Option<String>, CheckpointError> {
    Ok(pointed_at(dir)?.map(|named| {
        // Between two renames of a save the checkpoint is where it was set aside.
        let aside = format!("{REPLACED}{named}");
        if names.contains(&aside) { aside } else { named }
    }))
}

impl Found {
    /// Takes the checkpoint at `path` if nothing is wrong with it, else notes what is.
    fn takes(&mut self, path: PathBuf, problem: Option<CheckpointError>) -> bool {
        match problem {
            None => self.checkpoint = Some(path),
            Some(error) => self.skipped.push((path, error)),
        }
        self.checkpoint.is_some()
    }
}
