//! Reading the other ranks' shards in place, without those ranks taking part.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn_backend::Backend;
use burn_std::Shape;
use zero_core::accounting::WireKind;
use zero_core::window::{GatherRequest, Key};
use zero_core::{CommError, OperationCall, Partition};
use zero_ops::quantized::Format;

use crate::cell::Cell;
use crate::cell::codes::decode;
use crate::cell::slot::Names;
use crate::mover::For;
use crate::tier::filled;
use crate::trouble::or_stop;
use crate::values::{data, here, read, tag, wire_dtype};

/// Maximum time that a rank waits for another that is concatenating the same shards, before it does so itself. Short, because this may run
/// under autodiff's locks (ADR 2).
const JOINING: Duration = Duration::from_secs(1);

/// Reads a parameter for use: from the nearest partition, and quantized if so configured.
pub(crate) fn used<B: Backend>(cell: &Cell<B>, who: For) -> Result<B::FloatTensorPrimitive, CommError> {
    let cell = cell.nearest();
    whole(cell, cell.quantized(), who)
}

/// Reads a tensor exactly, to be read out or saved.
pub(crate) fn exact<B: Backend>(cell: &Cell<B>, who: For) -> Result<B::FloatTensorPrimitive, CommError> {
    whole(cell, None, who)
}

/// Reads all shards and concatenates them, or borrows the result of another rank.
fn whole<B: Backend>(cell: &Cell<B>, how: Option<Format>, who: For) -> Result<B::FloatTensorPrimitive, CommError> {
    let (rank, partition) = (&cell.rank, cell.partition);
    let all = 0..partition.world();
    count(cell, how, all.clone());
    if rank.window.is_remote() {
        return Ok(B::float_reshape(of_processes(cell, how, all)?, cell.shape.clone()));
    }
    let peers = of_threads(cell, all)?;
    let cells = || peers.iter().map(|peer| peer.as_deref().unwrap_or(cell));
    let join = || B::float_reshape(join(cell, how, &peers, who), cell.shape.clone());
    // At the other stages each rank stores a full parameter of its own. Only tensors in the format for use are lent.
    let is_lent = rank.config.stage.shards_parameters() && how == cell.quantized();
    if !is_lent || cells().any(|peer| peer.device != cell.device) {
        return Ok(join());
    }
    let _joining = cells().next().and_then(|first| first.joining.try_lock_for(JOINING));
    let borrowed = cells().find_map(|peer| peer.lent.lock().as_ref()?.borrow::<B>());
    let whole = borrowed.unwrap_or_else(join);
    *cell.lent.lock() = zero_ops::Lent::of::<B>(&whole);
    Ok(whole)
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
pub(super) fn secondary<B: Backend>(cell: &Cell<B>, second: &Cell<B>) -> Result<B::FloatTensorPrimitive, CommError> {
    let range = second.partition.range(second.place());
    if range.is_empty() {
        return Ok(B::float_zeros(Shape::new([1]), &cell.device, cell.dtype.into()));
    }
    let owners = owners(cell.partition, &range);
    match cell.rank.window.is_remote() {
        true => of_processes(cell, cell.quantized(), owners),
        false => Ok(join(cell, cell.quantized(), &of_threads(cell, owners)?, For::Beside)),
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

/// Returns the elements in the shards of `owners`.
fn range_of(partition: Partition, owners: &Range<usize>) -> Range<usize> {
    partition.range(owners.start).start..partition.range(owners.end - 1).end
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

/// Returns the cells of those `owners` that own anything; `None` for this rank's own.
fn of_threads<B: Backend>(cell: &Cell<B>, owners: Range<usize>) -> Result<Vec<Option<Arc<Cell<B>>>>, CommError> {
    let (rank, partition, key) = (&cell.rank, cell.partition, key(cell));
    let _span = tracing::trace_span!("gather", parameter = key.object, elements = partition.numel()).entered();
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
                    peer.shape.as_slice(),
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
fn join<B: Backend>(
    cell: &Cell<B>,
    how: Option<Format>,
    peers: &[Option<Arc<Cell<B>>>],
    who: For,
) -> B::FloatTensorPrimitive {
    let cells = || peers.iter().map(|peer| peer.as_deref().unwrap_or(cell));
    if how.is_some() || cells().any(|piece| piece.stored().is_some()) {
        return join_stored(cell, how, cells(), who);
    }
    // Ranks of one process may have a device each.
    let mut pieces: Vec<_> = cells().map(|piece| here::<B>(piece.local(), &cell.device)).collect();
    match pieces.len() {
        1 => pieces.swap_remove(0),
        _ => B::float_cat(pieces, 0),
    }
}

/// Receives shards from other processes directly into their place in the result, which is flat.
fn of_processes<B: Backend>(
    cell: &Cell<B>,
    how: Option<Format>,
    owners: Range<usize>,
) -> Result<B::FloatTensorPrimitive, CommError> {
    let (rank, partition, key) = (&cell.rank, cell.partition, key(cell));
    let _span = tracing::trace_span!("gather", parameter = key.object, elements = partition.numel()).entered();
    let all = range_of(partition, &owners);
    // The bytes of consecutive shards; the codes of each shard begin with a block of their own.
    let mut end = 0;
    let ends: Vec<Range<usize>> = owners
        .clone()
        .map(|owner| {
            let begin = end;
            end += sent(cell, how, partition.len(owner));
            begin..end
        })
        .collect();
    let first = owners.start;
    let bytes = |owner: usize| ends[owner - first].clone();
    let mesh = rank.mesh_of(partition);
    let (mine, others): (Vec<_>, Vec<_>) = owners.clone().partition(|&owner| owner == cell.place());
    let pieces: Vec<_> = others.into_iter().map(|owner| (mesh.peer(rank.index, owner), bytes(owner))).collect();
    let mine = mine.first().map(|&owner| bytes(owner)).filter(|mine| !mine.is_empty());
    let shape = Shape::new([all.len()]);
    let Some(how) = how else {
        let own = mine.map(|mine| (mine, cell.data()));
        let own = own.as_ref().map(|(mine, data)| (mine.start, &data.as_bytes()[..mine.len()]));
        let (dtype, tag) = (wire_dtype(cell.dtype), tag(&cell.shape, cell.dtype));
        let joined = GatherRequest { dtype, elements: all.len(), tag: &tag, own, pieces: &pieces };
        let joined = rank.window.gather(joined, key, cell)?;
        return Ok(B::float_from_data(data(joined, shape), &cell.device));
    };
    let own = mine.map(|mine| (mine.start, cell.codes(how)));
    let own = own.as_ref().map(|(begin, codes)| (*begin, &codes.bytes[..]));
    let (dtype, tag) = (zero_core::collective::DType::U8, cell.codes_tag(how));
    let codes = GatherRequest { dtype, elements: end, tag: &tag, own, pieces: &pieces };
    let codes = rank.window.gather(codes, Names::codes(key), cell)?.into_u8();
    let size = cell.dtype.size();
    let data = filled(&rank.mover, all.len(), cell.dtype, shape.clone(), |joined| {
        for owner in owners {
            let range = partition.range(owner);
            let part = &mut joined[(range.start - all.start) * size..(range.end - all.start) * size];
            decode(how, &codes[bytes(owner)], cell.dtype, part);
        }
    });
    Ok(rank.mover.to_backend::<B>(data, shape, &cell.device, For::Beside).into_tensor())
}

/// Concatenates shards that are quantized, or of which some are in host memory or on a disk, in one new array.
fn join_stored<'c, B: Backend>(
    cell: &Cell<B>,
    how: Option<Format>,
    pieces: impl Iterator<Item = &'c Cell<B>> + Clone,
    who: For,
) -> B::FloatTensorPrimitive {
    let (size, mover) = (cell.dtype.size(), &cell.rank.mover);
    let ranges: Vec<_> = pieces.clone().map(|piece| cell.partition.range(piece.place())).collect();
    let (start, numel) = (ranges[0].start, ranges.iter().map(Range::len).sum());
    let shape = Shape::new([numel]);
    let data = filled(mover, numel, cell.dtype, shape.clone(), |joined| {
        for (piece, range) in pieces.zip(ranges) {
            let part = &mut joined[(range.start - start) * size..(range.end - start) * size];
            match (how, piece.stored()) {
                (Some(how), _) => decode(how, &piece.codes(how).bytes, cell.dtype, part),
                (None, Some(stored)) => or_stop(stored.read_into(part)),
                (None, None) => part.copy_from_slice(&read::<B>(piece.local()).as_bytes()[..part.len()]),
            }
        }
    });
    mover.to_backend::<B>(data, shape, &cell.device, who).into_tensor()
}
