//! Results of full checks of checkpoints. Files are read once, and again only if one has changed.
//!
//! At every save, pruning must know that the checkpoints that it counts are intact. Reading them all would take longer than the save. So
//! this process remembers the checkpoints that it has written or read, by the save's id and by the sizes and times of its files.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::SystemTime;

use parking_lot::Mutex;

use super::exchange::Heartbeat;
use super::names::rank_file;
use super::shard::Shard;
use super::{Check, CheckpointError, Manifest};

/// Size and modification time of each file; `None` for a missing one.
type Looks = Vec<Option<(u64, SystemTime)>>;

/// Results by the save's id: the files' sizes and times when they were checked, and the problem found, if any.
static SEEN: Mutex<BTreeMap<String, (Looks, Option<String>)>> = Mutex::new(BTreeMap::new());

fn looks(folder: &Path, manifest: &Manifest) -> Looks {
    let file = |rank| {
        let found = std::fs::metadata(folder.join(rank_file(rank, manifest.world))).ok()?;
        Some((found.len(), found.modified().ok()?))
    };
    (0..manifest.world).map(file).collect()
}

/// Remembers the result of checking a checkpoint.
pub(super) fn remember(folder: &Path, manifest: &Manifest, problem: Option<String>) {
    // Done before taking the lock, so that no thread waits for a disk while it holds the lock.
    let looks = looks(folder, manifest);
    SEEN.lock().insert(manifest.id.clone(), (looks, problem));
}

/// Forgets a checkpoint that was removed.
pub(super) fn forget(manifest: &Manifest) {
    SEEN.lock().remove(&manifest.id);
}

/// Returns the first problem of a checkpoint that `check` can find in files `rank`, `rank + ranks` and so on. Rank 0 also checks the state.
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
    // An I/O error says nothing about the contents of the disk.
    if ranks == 1 && check == Check::Contents && !matches!(problem, Some(CheckpointError::Io { .. })) {
        remember(folder, manifest, problem.as_ref().map(ToString::to_string));
    }
    problem
}

/// Returns the first problem of a checkpoint. Its files are read unless they are unchanged since the last check.
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
