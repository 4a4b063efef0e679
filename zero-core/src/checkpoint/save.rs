//! The collective that saves: agree, write, exchange, publish. [`super`] describes the order on the disk.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{SendTimeoutError, bounded};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::exchange::{DiskWork, Heartbeat, Ranks, Task};
use super::names::{OWNER, rank_file, step_folder};
use super::publish::{Published, SaveOptions, Staging};
use super::{
    CheckpointError, ElementType, FORMAT_VERSION, Manifest, Piece, SafetensorsWriter, SideFile, TensorEntry, TensorSpec,
};
use crate::{Collective, Partition};

/// Size of the chunks that are passed to the writing thread.
const CHUNK_BYTES: usize = 1 << 20;

/// Maximum number of chunks that wait for it.
const CHUNKS: usize = 4;

/// A checkpoint that has been saved.
#[derive(Debug, Clone, PartialEq)]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// The step.
    pub step: u64,
    /// Total size of all ranks' files.
    pub bytes: u64,
    /// Wall time of the call.
    pub seconds: f64,
    /// Checkpoints that were pruned after it.
    pub pruned: Vec<PathBuf>,
    /// Reasons why others could not be pruned; the new checkpoint is complete regardless.
    pub not_pruned: Vec<String>,
}

/// Arguments that the ranks must agree on.
#[derive(Debug, Serialize, Deserialize)]
struct Plan {
    dir: String,
    step: u64,
    options: String,
    tensors: BTreeMap<String, (ElementType, Vec<usize>)>,
}

/// Size and checksums of the file that a rank has written.
#[derive(Debug, Serialize, Deserialize)]
struct Written {
    bytes: u64,
    /// In the order of the sorted tensors.
    crc32c: Vec<Option<u32>>,
}

/// Saves `pieces` and rank 0's `state` as the checkpoint of `step` in `dir`, and points `dir/latest` to it.
///
/// A collective: every rank passes its shard of every tensor, empty if it has no elements. It returns on every rank when the checkpoint is
/// durable. A checkpoint of the same step is replaced. Floats of `state` are exact; JSON has no infinities or NaNs, so store those in a
/// tensor. A slow disk keeps all ranks waiting while it makes progress; a disk that does nothing for the communicator's deadline fails the
/// save.
///
/// # Errors
///
/// The same on every rank: [`CheckpointError::Disagree`], [`CheckpointError::SaveFailed`] with the error of the rank that failed, or
/// [`CheckpointError::Comm`]. Earlier checkpoints and `latest` are unchanged.
pub fn save(
    comm: &dyn Collective,
    dir: &Path,
    step: u64,
    pieces: &[Piece<'_>],
    state: &Value,
    options: &SaveOptions,
) -> Result<Saved, CheckpointError> {
    let place = (comm.rank(), comm.world());
    let checked = pieces.iter().try_for_each(|piece| piece.check(place.0, place.1));
    let tensors: Vec<TensorSpec> = pieces.iter().map(Piece::spec).collect();
    let mut bytes = |index: usize| Ok(Cow::Borrowed(&*pieces[index].bytes));
    save_checked(comm, dir, step, (checked, &tensors), &mut bytes, state, options)
}

/// Same as [`save`], but makes one shard at a time, when it is written. `bytes` returns the rank's elements, little-endian, of the tensor
/// with the given index. It is called once for each tensor of which the rank has elements, in the same order on every rank. It must not
/// wait for other ranks.
///
/// # Errors
///
/// Same as [`save`]; an error of `bytes` is a failure of that rank.
pub fn save_streamed<'p>(
    comm: &dyn Collective,
    dir: &Path,
    step: u64,
    tensors: &[TensorSpec],
    bytes: &mut dyn FnMut(usize) -> Result<Cow<'p, [u8]>, CheckpointError>,
    state: &Value,
    options: &SaveOptions,
) -> Result<Saved, CheckpointError> {
    save_checked(comm, dir, step, (Ok(()), tensors), bytes, state, options)
}

/// A function that returns the bytes of a shard by the index of its tensor.
type Read<'r, 'p> = &'r mut dyn FnMut(usize) -> Result<Cow<'p, [u8]>, CheckpointError>;

fn save_checked<'p>(
    comm: &dyn Collective,
    dir: &Path,
    step: u64,
    (checked, tensors): (Result<(), CheckpointError>, &[TensorSpec]),
    bytes: Read<'_, 'p>,
    state: &Value,
    options: &SaveOptions,
) -> Result<Saved, CheckpointError> {
    let begin = Instant::now();
    let (rank, world) = (comm.rank(), comm.world());
    let files = options.files.iter().filter(|file| !file.bytes.is_empty());
    let files: Vec<SideFile> = files.cloned().collect();
    let own = tensors.len();
    let tensors: Vec<TensorSpec> = tensors.iter().cloned().chain(files.iter().map(SideFile::spec)).collect();
    let mut bytes = |index: usize| match index.checked_sub(own) {
        None => bytes(index),
        Some(file) => {
            let whole = &files[file].bytes;
            let range = Partition::new(whole.len(), world).range(rank);
            Ok(Cow::Owned(whole[range].to_vec()))
        }
    };
    // Decreasing element sizes keep each tensor aligned to its elements; names make the order the same on every rank.
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&tensors[a], &tensors[b]);
        b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name))
    });
    let sorted: Vec<&TensorSpec> = order.iter().map(|&index| &tensors[index]).collect();
    let plan = checked.and_then(|()| plan(dir, step, &sorted, options));
    let mut ranks = Ranks::new(comm, Task::Save { step });
    let plan = ranks.together(plan)?;
    if let Some((other, first, got)) = ranks.first_unlike(&plan)? {
        return Err(disagree(&first, (comm.members()[0], other), &got));
    }

    // Rank 0's staging, shared by the threads that work on it.
    let staging = Arc::new(Mutex::new(None));
    let begun = (rank == 0).then(|| {
        let (staging, dir) = (staging.clone(), dir.to_path_buf());
        DiskWork::start(ranks.rank(), dir.clone(), move |progress| {
            let begun = Staging::begin(&dir, step, progress)?;
            Ok(staging.lock().insert(begun).id().to_string())
        })
    });
    let id = ranks.share_work(begun, String::new)?;
    let id = ranks.of_first(&id)?;

    let folder = dir.join(Staging::folder_name(step, &id));
    let mut in_order = |place: usize| bytes(order[place]);
    let written = match write(&mut ranks, &folder, step, &id, &sorted, &mut in_order, (rank, world)) {
        Ok(written) => written,
        Err(error) => {
            // Removing what was written may take as long as writing it.
            let remove = move |_: &Heartbeat| {
                drop(staging.lock().take());
                Ok(())
            };
            if rank == 0
                && let Ok(work) = DiskWork::start(ranks.rank(), folder, remove)
            {
                work.end(comm.deadline() / 2);
            }
            return Err(error);
        }
    };
    let bytes: u64 = written.iter().map(|file| file.bytes).sum();

    let published = (rank == 0).then(|| {
        let (manifest, options) = (manifest(step, id, &sorted, &written, state), options.clone());
        DiskWork::start(ranks.rank(), folder, move |progress| {
            let staging = staging.lock().take().expect("it was begun above, by this rank");
            Ok((bytes, staging.publish(manifest, &options, progress)?))
        })
    });
    let published = ranks.share_work(published, Default::default)?;
    let (bytes, Published { pruned, not_pruned }) = ranks.of_first(&published)?;
    if rank == 0 {
        for reason in &not_pruned {
            tracing::warn!("an old checkpoint was not removed: {reason}");
        }
    }
    Ok(Saved {
        path: dir.join(step_folder(step)),
        step,
        bytes,
        seconds: begin.elapsed().as_secs_f64(),
        pruned: pruned.into_iter().map(|name| dir.join(name)).collect(),
        not_pruned,
    })
}

fn plan(dir: &Path, step: u64, tensors: &[&TensorSpec], options: &SaveOptions) -> Result<Plan, CheckpointError> {
    let mut by_name = BTreeMap::new();
    for tensor in tensors {
        tensor.check()?;
        if by_name.insert(tensor.name.clone(), (tensor.dtype, tensor.shape.clone())).is_some() {
            let (expected, got) = ("one tensor of this name".to_string(), "two".to_string());
            return Err(CheckpointError::Unfit { tensor: tensor.name.clone(), expected, got });
        }
    }
    let (dir, options) = (dir.to_string_lossy().into_owned(), format!("{options:?}"));
    Ok(Plan { dir, step, options, tensors: by_name })
}

/// Returns the first difference between a rank's plan and rank 0's as an error.
fn disagree(first: &Plan, (first_rank, rank): (usize, usize), plan: &Plan) -> CheckpointError {
    let whole = |plan: &Plan| {
        let (step, dir) = (format!("step {}", plan.step), format!("into {}", plan.dir));
        [("the step", step), ("the folder", dir), ("the options", plan.options.clone())]
    };
    let told = |tensor: Option<&(ElementType, Vec<usize>)>| {
        tensor.map_or("no such tensor".to_string(), |(dtype, shape)| format!("{dtype} {shape:?}"))
    };
    for ((what, expected), (_, got)) in whole(first).into_iter().zip(whole(plan)) {
        if expected != got {
            return CheckpointError::Disagree { what: what.to_string(), first_rank, rank, expected, got };
        }
    }
    let mut names = plan.tensors.keys().chain(first.tensors.keys());
    let name = names.find(|name| first.tensors.get(*name) != plan.tensors.get(*name));
    let name = name.expect("plans that are not alike differ in something");
    let (what, expected, got) =
        (format!("tensor '{name}'"), told(first.tensors.get(name)), told(plan.tensors.get(name)));
    CheckpointError::Disagree { what, first_rank, rank, expected, got }
}

fn metadata(rank: usize, world: usize, step: u64, id: &str) -> BTreeMap<String, String> {
    let values = [rank.to_string(), world.to_string(), step.to_string(), id.to_string()];
    OWNER.map(String::from).into_iter().zip(values).collect()
}

/// Writes this rank's file while the others write theirs, and returns the results of all ranks on rank 0. This thread makes the shards,
/// another one writes them.
fn write(
    ranks: &mut Ranks<'_>,
    folder: &Path,
    step: u64,
    id: &str,
    tensors: &[&TensorSpec],
    bytes: Read<'_, '_>,
    (rank, world): (usize, usize),
) -> Result<Vec<Written>, CheckpointError> {
    let elements = |tensor: &TensorSpec| Partition::new(tensor.numel(), world).len(rank);
    let own: Vec<usize> = (0..tensors.len()).filter(|&place| elements(tensors[place]) > 0).collect();
    let header = own.iter().map(|&place| tensors[place]);
    let header: Vec<_> = header.map(|tensor| (tensor.name.clone(), tensor.dtype, vec![elements(tensor)])).collect();
    let (path, metadata) = (folder.join(rank_file(rank, world)), metadata(rank, world, step, id));
    let (chunks, inbox) = bounded::<(usize, Vec<u8>)>(CHUNKS);
    let (count, places) = (tensors.len(), own.clone());
    let work = DiskWork::start(ranks.rank(), path.clone(), move |progress| {
        let names: Vec<String> = header.iter().map(|(name, ..)| name.clone()).collect();
        let mut writer = SafetensorsWriter::create(&path, &metadata, header)?;
        let mut crc32c = vec![None; count];
        for (index, chunk) in inbox {
            let sum = &mut crc32c[places[index]];
            *sum = Some(writer.append_to_sum(&names[index], &chunk, sum.unwrap_or(0))?);
            progress.made();
        }
        Ok(Written { bytes: writer.finish()?, crc32c })
    });
    let mut work = match work {
        Ok(work) => work,
        Err(error) => return Err(broken_off(ranks, None, Some(Err(error)))),
    };
    for (index, &place) in own.iter().enumerate() {
        let piece = match bytes(place).and_then(|piece| check_piece(tensors[place], elements(tensors[place]), piece)) {
            Ok(piece) => piece,
            Err(error) => {
                drop(chunks);
                return Err(broken_off(ranks, Some(work), Some(Err(error))));
            }
        };
        for chunk in piece.chunks(CHUNK_BYTES) {
            let mut chunk = (index, chunk.to_vec());
            loop {
                let full = match chunks.send_timeout(chunk, ranks.every()) {
                    Ok(()) => None,
                    Err(SendTimeoutError::Timeout(back)) => Some(back),
                    // The thread has failed.
                    Err(SendTimeoutError::Disconnected(_)) => {
                        return Err(broken_off(ranks, Some(work), None));
                    }
                };
                let ended = full.as_ref().and_then(|_| work.wait(Duration::ZERO, ranks.patience()));
                if ended.is_some() || !ranks.go_on()? {
                    drop(chunks);
                    return Err(broken_off(ranks, Some(work), ended));
                }
                match full {
                    Some(back) => chunk = back,
                    None => break,
                }
            }
        }
    }
    drop(chunks);
    let written = ranks.finish(Some(work), None)?;
    ranks.to_first(&written)
}

/// Ends a save in which this rank or another has failed, and returns the error.
fn broken_off(
    ranks: &mut Ranks<'_>,
    work: Option<DiskWork<Written>>,
    ended: Option<Result<Written, CheckpointError>>,
) -> CheckpointError {
    ranks.finish(work, ended).expect_err("a rank has failed")
}

fn check_piece<'p>(
    tensor: &TensorSpec,
    elements: usize,
    piece: Cow<'p, [u8]>,
) -> Result<Cow<'p, [u8]>, CheckpointError> {
    let bytes = elements * tensor.dtype.size();
    if piece.len() == bytes {
        return Ok(piece);
    }
    let (expected, got) = (format!("{bytes} bytes for this rank's elements"), format!("{} bytes", piece.len()));
    Err(CheckpointError::Unfit { tensor: tensor.name.clone(), expected, got })
}

fn manifest(step: u64, id: String, tensors: &[&TensorSpec], written: &[Written], state: &Value) -> Manifest {
    let world = written.len();
    let tensors = tensors.iter().enumerate().map(|(index, tensor)| {
        let crc32c = written.iter().map(|file| file.crc32c[index]).collect();
        (tensor.name.clone(), TensorEntry { dtype: tensor.dtype, shape: tensor.shape.clone(), crc32c })
    });
    Manifest {
        format_version: FORMAT_VERSION,
        crate_version: env!("CARGO_PKG_VERSION").to_string(),
        id,
        step,
        world,
        saved_unix_ms: 0,
        file_bytes: written.iter().map(|file| file.bytes).collect(),
        tensors: tensors.collect(),
        state: state.to_string().into(),
    }
}
