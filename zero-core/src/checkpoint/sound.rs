//! Which checkpoints are sound, to the last byte: read once, and again only when a file has changed.
//!
//! Pruning must know, at every save, that what it counts can be resumed from; reading it all at every save would take longer
//! than the save. So what this process has written or read is remembered by the save's name and by how its files looked.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::exchange::Heartbeat;
use super::names::rank_file;
use super::shard::Shard;
use super::{Check, CheckpointError, Manifest};

/// Size of each file and when it was changed; `None` for one that is not there.
type Looks = Vec<Option<(u64, SystemTime)>>;

/// What was found in the save of this name when its files looked so: nothing wrong, or what.
static SEEN: Mutex<BTreeMap<String, (Looks, Option<String>)>> = Mutex::new(BTreeMap::new());

fn looks(folder: &Path, manifest: &Manifest) -> Looks {
    let file = |rank| {
        let found = std::fs::metadata(folder.join(rank_file(rank, manifest.world))).ok()?;
        Some((found.len(), found.modified().ok()?))
    };
    (0..manifest.world).map(file).collect()
}

/// Remembers what was found in a checkpoint.
pub(super) fn remember(folder: &Path, manifest: &Manifest, problem: Option<String>) {
    // Before the lock: nobody waits for a disk with it.
    let looks = looks(folder, manifest);
    SEEN.lock().insert(manifest.id.clone(), (looks, problem));
}

/// The checkpoint is gone.
pub(super) fn forget(manifest: &Manifest) {
    SEEN.lock().remove(&manifest.id);
}

/// The first thing that is wrong with a checkpoint, as far as `check` looks, and in the share of the files that the first of
/// so many ranks has, or another.
pub(super) fn look(
    folder: &Path,
    manifest: &Manifest,
    (rank, ranks): (usize, usize),
    check: Check,
    progress: &Heartbeat,
) -> Option<CheckpointError> {
    let state = if rank == 0 { manifest.state(folder).err() } else { None };
    let problem = state.or_else(|| {
        (rank..manifest.world).step_by(ranks).find_map(|file| {
            progress.made();
            Shard::problems((folder, manifest), file, check, 1, progress).pop()
        })
    });
    // A disk that could not be read says nothing about what is on it.
    if ranks == 1 && check == Check::Contents && !matches!(problem, Some(CheckpointError::Io { .. })) {
        remember(folder, manifest, problem.as_ref().map(ToString::to_string));
    }
    problem
}

/// The first thing that is wrong with a checkpoint, whose files are read if they have not been since they changed.
pub(super) fn problem(folder: &Path, manifest: &Manifest, progress: &Heartbeat) -> Option<String> {
    let seen = SEEN.lock().get(&manifest.id).cloned();
    match seen {
        Some((then, problem)) if then == looks(folder, manifest) => problem,
        _ => look(folder, manifest, (0, 1), Check::Contents, progress).map(|problem| problem.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Collective;
    use crate::checkpoint::{ElementType, Piece, SaveOptions, save};
    use crate::collective::threads::{ThreadOptions, run};

    #[test]
    fn a_rank_reads_its_share_of_the_files_alone_and_nothing_is_read_twice() {
        let dir = tempfile::tempdir().unwrap();
        let options = ThreadOptions { deadline: std::time::Duration::from_secs(60) };
        let saved = run(3, &options, |comm| {
            let piece = Piece::new("w", ElementType::F32, vec![3], vec![comm.rank() as u8; 4]);
            save(&*comm, dir.path(), 1, &[piece], &serde_json::Value::Null, &SaveOptions::default())
        });
        let folder = &saved.unwrap()[0].path;
        let manifest = Manifest::read(folder).unwrap();
        let file = folder.join(rank_file(1, 3));
        let bytes = std::fs::read(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let look_at = |share| {
            let progress = Heartbeat::default();
            (look(folder, &manifest, share, Check::Contents, &progress).is_some(), progress.count())
        };
        // Files 0 and 2, with one chunk each; and file 1, which is not there.
        assert_eq!(look_at((0, 2)), (false, 4));
        assert_eq!(look_at((1, 2)), (true, 1));
        std::fs::write(&file, bytes).unwrap();
        let problem = || {
            let progress = Heartbeat::default();
            (problem(folder, &manifest, &progress), progress.count())
        };
        assert_eq!(problem(), (None, 6));
        assert_eq!(problem(), (None, 0));
    }
}
