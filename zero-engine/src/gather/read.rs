//! Reading the other ranks' shards in place, without those ranks taking part.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use zero_core::accounting::WireKind;
use zero_core::window::{GatherRequest, Key};
use zero_core::{CommError, OperationCall, Partition};
use zero_kernels::quantized::Format;

use crate::backend::{Backend, DType};
use crate::cell::Cell;
use crate::cell::codes::decode;
use crate::cell::shard::ShardData;
use crate::cell::slot::Names;
use crate::copier::Caller;
use crate::tier::filled;
use crate::values::{flat_tensor, here};

/// Maximum time that a rank waits for another that is concatenating the same shards, before it does so itself. Short, because this may run
/// under autodiff's locks (ADR 2).
const JOINING: Duration = Duration::from_secs(1);

/// Reads a parameter for use: from the nearest partition, and quantized if so configured.
pub fn used<B: Backend>(cell: &Cell<B>, who: Caller) -> Result<B::Tensor, CommError> {
    let cell = cell.nearest();
    full(cell, cell.quantized(), who)
}

/// Reads a tensor exactly, to be read out or saved.
pub fn exact<B: Backend>(cell: &Cell<B>, who: Caller) -> Result<B::Tensor, CommError> {
    full(cell, None, who)
}

/// Reads all shards and concatenates them, or borrows the result of another rank.
fn full<B: Backend>(cell: &Cell<B>, how: Option<Format>, who: Caller) -> Result<B::Tensor, CommError> {
    let (rank, partition) = (&cell.rank, cell.partition);
    let all = 0..partition.world();
    count(cell, how, all.clone());
    let _span = span(cell, partition.numel()).entered();
    if rank.window.is_remote() {
        return Ok(B::reshape(of_processes(cell, how, all)?, &cell.shape));
    }
    let peers = of_threads(cell, all)?;
    let cells = || peers.iter().map(|peer| peer.as_deref().unwrap_or(cell));
    let join = || B::reshape(join(cell, how, &peers, who), &cell.shape);
    // At the other stages each rank stores a full parameter of its own. Only tensors in the format for use are lent.
    let is_lent = rank.config.stage.shards_parameters() && how == cell.quantized();
    if !is_lent || cells().any(|peer| peer.device != cell.device) {
        return Ok(join());
    }
    let _joining = cells().next().and_then(|first| first.joining.try_lock_for(JOINING));
    let borrowed = cells().find_map(|peer| B::borrow(peer.lent.lock().as_ref()?));
    let full = borrowed.unwrap_or_else(join);
    *cell.lent.lock() = B::lend(&full);
    Ok(full)
}

/// Counts the bytes from which `cell`'s secondary shard is read. Called when the read begins, so that they count to the same step on every
/// run.
pub(super) fn count_secondary<B: Backend>(cell: &Cell<B>, second: &Cell<B>) {
    let range = second.partition.range(second.place());
    if !range.is_empty() {
        count(cell, cell.quantized(), owners(cell.partition, &range));
    }
}

/// Reads `cell`'s secondary shard from the primary shards that cover it.
pub(super) fn secondary<B: Backend>(cell: &Cell<B>, second: &Cell<B>) -> Result<B::Tensor, CommError> {
    let range = second.partition.range(second.place());
    if range.is_empty() {
        return Ok(B::zeros(&[1], &cell.device, cell.dtype));
    }
    let owners = owners(cell.partition, &range);
    let _span = span(cell, range.len()).entered();
    match cell.rank.window.is_remote() {
        true => of_processes(cell, cell.quantized(), owners),
        false => Ok(join(cell, cell.quantized(), &of_threads(cell, owners)?, Caller::OtherThread)),
    }
}

fn key<B: Backend>(cell: &Cell<B>) -> Key {
    cell.key.expect("one-sided reads need a key")
}

/// Returns the number of bytes in which a shard of `elements` elements is sent.
fn sent<B: Backend>(cell: &Cell<B>, how: Option<Format>, elements: usize) -> usize {
    how.map_or(elements * cell.dtype.size(), |how| how.bytes(elements))
}

/// Returns the ranks whose shards cover `range`.
fn owners(partition: Partition, range: &Range<usize>) -> Range<usize> {
    range.start / partition.stride()..range.end.div_ceil(partition.stride())
}

/// Counts the shards of `owners` as received from the ranks that hold them, as if each rank had read its own.
fn count<B: Backend>(cell: &Cell<B>, how: Option<Format>, owners: Range<usize>) {
    let (rank, partition) = (&cell.rank, cell.partition);
    let mesh = rank.mesh_of(partition);
    for owner in owners.filter(|&owner| owner != cell.place()) {
        let bytes = sent(cell, how, partition.len(owner));
        rank.wire.add(WireKind::AllGather, bytes);
        rank.wire.add_uncompressed(WireKind::AllGather, sent(cell, None, partition.len(owner)), bytes);
        let peer = rank.window.in_run(mesh.peer(rank.index, owner));
        rank.wire.add_from_other_machines(rank.place.from_other_machines(bytes, &[peer]));
    }
}

/// Returns the span of a gather of so many elements.
fn span<B: Backend>(cell: &Cell<B>, elements: usize) -> tracing::Span {
    tracing::trace_span!("gather", parameter = key(cell).object, elements, bytes = elements * cell.dtype.size())
}

/// Returns the cells of those `owners` that own anything; `None` for this rank's own.
fn of_threads<B: Backend>(cell: &Cell<B>, owners: Range<usize>) -> Result<Vec<Option<Arc<Cell<B>>>>, CommError> {
    let (rank, partition, key) = (&cell.rank, cell.partition, key(cell));
    let peer = |owner| {
        let index = rank.mesh_of(partition).peer(rank.index, owner);
        let peer = rank.window.read(index, key, cell)?.here().expect("ranks of one process publish cells");
        if peer.shape != cell.shape || peer.dtype != cell.dtype {
            let op = format!("a gather of {cell} of {:?}", cell.dtype);
            return Err(CommError::Mismatch {
                at: OperationCall::new("window", key.object, rank.place.rank, op),
                other_rank: rank.window.in_run(index),
                other_op: format!(
                    "a publication of shape {:?} and type {:?} under the same key",
                    &peer.shape[..],
                    peer.dtype
                ),
            });
        }
        Ok(peer)
    };
    let owning = owners.filter(|&owner| partition.len(owner) > 0);
    owning.map(|owner| (owner != cell.place()).then(|| peer(owner)).transpose()).collect()
}

/// Concatenates consecutive shards, flat; `None` is this rank's own.
fn join<B: Backend>(cell: &Cell<B>, how: Option<Format>, peers: &[Option<Arc<Cell<B>>>], who: Caller) -> B::Tensor {
    let cells: Vec<&Cell<B>> = peers.iter().map(|peer| peer.as_deref().unwrap_or(cell)).collect();
    let mut tensors = Vec::with_capacity(cells.len());
    if how.is_none() {
        // Ranks of one process may have a device each.
        tensors.extend(cells.iter().map_while(|peer| match peer.shard_data(None) {
            ShardData::Tensor(tensor) => Some(here::<B>(tensor, &cell.device)),
            _ => None,
        }));
    }
    if tensors.len() < cells.len() {
        drop(tensors);
        let ranges = cells.iter().map(|peer| cell.partition.range(peer.place())).collect();
        return assembled(cell, ranges, who, |index, out| cells[index].shard_data(how).read_into(cell.dtype, out));
    }
    match tensors.len() {
        1 => tensors.swap_remove(0),
        _ => B::cat(tensors),
    }
}

/// Returns a new flat tensor of the elements in `ranges`, which are consecutive; `read` writes those of the range with this index.
fn assembled<B: Backend>(
    cell: &Cell<B>,
    ranges: Vec<Range<usize>>,
    who: Caller,
    read: impl Fn(usize, &mut [u8]),
) -> B::Tensor {
    let (size, copier) = (cell.dtype.size(), &cell.rank.copier);
    let numel = ranges.iter().map(Range::len).sum();
    let data: B::Data = filled(copier, numel, cell.dtype, |out| {
        let mut rest = out;
        for (index, range) in ranges.into_iter().enumerate() {
            let (now, later) = rest.split_at_mut(range.len() * size);
            read(index, now);
            rest = later;
        }
    });
    copier.to_backend::<B>(data, &[numel], &cell.device, who).into_tensor()
}

/// Receives shards from other processes directly into their place in the result, which is flat.
fn of_processes<B: Backend>(cell: &Cell<B>, how: Option<Format>, owners: Range<usize>) -> Result<B::Tensor, CommError> {
    let (rank, partition, key) = (&cell.rank, cell.partition, key(cell));
    // The bytes of consecutive shards; the codes of each shard begin with a block of their own.
    let mut end = 0;
    let places: Vec<Range<usize>> = owners
        .clone()
        .map(|owner| {
            let begin = end;
            end += sent(cell, how, partition.len(owner));
            begin..end
        })
        .collect();
    let bytes = |owner: usize| places[owner - owners.start].clone();
    let mesh = rank.mesh_of(partition);
    let (mine, others): (Vec<_>, Vec<_>) = owners.clone().partition(|&owner| owner == cell.place());
    let others: Vec<_> = others.into_iter().map(|owner| (mesh.peer(rank.index, owner), bytes(owner))).collect();
    let mine = mine.first().map(|&owner| bytes(owner)).filter(|mine| !mine.is_empty());
    let own = mine.map(|mine| (mine.start, cell.sent(how)));
    let own = own.as_ref().map(|(begin, shard)| (*begin, shard.as_ref()));
    let (dtype, elements, key) = match how {
        None => (cell.dtype, end / cell.dtype.size(), key),
        Some(_) => (DType::U8, end, Names::codes(key)),
    };
    let request = GatherRequest { dtype, elements, tag: &cell.tag(how), own, pieces: &others };
    let received = rank.window.gather(request, key, cell)?;
    let Some(how) = how else { return Ok(flat_tensor::<B>(received, &cell.device)) };
    let codes = received.into_u8();
    let ranges = owners.map(|owner| partition.range(owner)).collect();
    Ok(assembled(cell, ranges, Caller::OtherThread, |index, out| {
        decode(how, &codes[places[index].clone()], cell.dtype, out);
    }))
}
