//! Reading the other ranks' pieces where they lie: they take no part.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn_backend::Backend;
use burn_std::Shape;
use zero_core::accounting::WireKind;
use zero_core::window::{Key, Whole};
use zero_core::{Called, CommError, Partition};

use crate::cell::Cell;
use crate::mover::For;
use crate::tier::filled;
use crate::trouble::or_stop;
use crate::values::{data, here, on_the_wire, read, tag};

/// How long a rank waits for another that is joining the same pieces, before it does so itself. Bounded, and short: this may
/// run under autodiff's locks (ADR 2).
const JOINING: Duration = Duration::from_secs(1);

/// Reads all pieces and joins them, or borrows what another rank has joined.
pub(crate) fn whole<B: Backend>(cell: &Cell<B>, who: For) -> Result<B::FloatTensorPrimitive, CommError> {
    let (rank, partition) = (&cell.rank, cell.partition);
    let all = 0..partition.world();
    if rank.window.is_remote() {
        return Ok(B::float_reshape(of_processes(cell, all)?, cell.shape.clone()));
    }
    let peers = of_threads(cell, all)?;
    let cells = || peers.iter().map(|peer| peer.as_deref().unwrap_or(cell));
    let join = || B::float_reshape(join(cell, &peers, who), cell.shape.clone());
    // At the other stages a whole is the parameter's home, of which each rank has its own.
    if !rank.config.stage.shards_parameters() || cells().any(|peer| peer.device != cell.device) {
        return Ok(join());
    }
    let _joining = cells().next().and_then(|first| first.joining.try_lock_for(JOINING));
    let borrowed = cells().find_map(|peer| peer.lent.lock().as_ref()?.borrow::<B>());
    let whole = borrowed.unwrap_or_else(join);
    *cell.lent.lock() = zero_ops::Lent::of::<B>(&whole);
    Ok(whole)
}

/// Reads what `cell`'s piece of its second cut consists of.
pub(super) fn secondary<B: Backend>(cell: &Cell<B>, second: &Cell<B>) -> Result<B::FloatTensorPrimitive, CommError> {
    let range = second.partition.range(second.place());
    if range.is_empty() {
        return Ok(B::float_zeros(Shape::new([1]), &cell.device, cell.dtype.into()));
    }
    let stride = cell.partition.stride();
    let owners = range.start / stride..range.end.div_ceil(stride);
    match cell.rank.window.is_remote() {
        true => of_processes(cell, owners),
        false => Ok(join(cell, &of_threads(cell, owners)?, For::Beside)),
    }
}

fn key<B: Backend>(cell: &Cell<B>) -> Key {
    cell.key.expect("only what has a name is read one-sidedly")
}

/// The elements of the pieces of `owners`.
fn range_of(partition: Partition, owners: &Range<usize>) -> Range<usize> {
    partition.range(owners.start).start..partition.range(owners.end - 1).end
}

/// Counts the pieces of `owners` as received from ranks that have them, as if each rank had read its own.
fn count<B: Backend>(cell: &Cell<B>, owners: Range<usize>) {
    let (rank, partition) = (&cell.rank, cell.partition);
    let mesh = rank.mesh_of(partition);
    for owner in owners.filter(|&owner| owner != cell.place()) {
        let bytes = partition.len(owner) * cell.dtype.size();
        rank.wire.add(WireKind::AllGather, bytes);
        rank.wire.add_from_other_machines(rank.place.from_other_machines(bytes, &[mesh.peer(rank.index, owner)]));
    }
}

/// The cells of `owners` that own anything; `None` for this rank's own.
fn of_threads<B: Backend>(cell: &Cell<B>, owners: Range<usize>) -> Result<Vec<Option<Arc<Cell<B>>>>, CommError> {
    let (rank, partition, key) = (&cell.rank, cell.partition, key(cell));
    let _span = tracing::trace_span!("gather", parameter = key.object, elements = partition.numel()).entered();
    let peer = |owner| {
        let index = rank.mesh_of(partition).peer(rank.index, owner);
        let peer = rank.window.read(index, key, cell)?.here().expect("ranks of one process show what they have");
        if peer.shape != cell.shape || peer.dtype != cell.dtype {
            let op = format!("a gather of {cell} of {:?}", cell.dtype);
            return Err(CommError::Mismatch {
                at: Called::new("window", key.object, rank.index, op),
                other_rank: index,
                other_op: format!("holds {:?} of {:?} there", peer.shape.as_slice(), peer.dtype),
            });
        }
        Ok(peer)
    };
    count(cell, owners.clone());
    let owning = owners.filter(|&owner| partition.len(owner) > 0);
    owning.map(|owner| (owner != cell.place()).then(|| peer(owner)).transpose()).collect()
}

/// Joins consecutive pieces, flat; `None` is this rank's own.
fn join<B: Backend>(cell: &Cell<B>, peers: &[Option<Arc<Cell<B>>>], who: For) -> B::FloatTensorPrimitive {
    let cells = || peers.iter().map(|peer| peer.as_deref().unwrap_or(cell));
    if cells().any(|piece| piece.stored().is_some()) {
        return join_stored(cell, cells(), who);
    }
    // Ranks of one process may have a device each.
    let mut pieces: Vec<_> = cells().map(|piece| here::<B>(piece.local(), &cell.device)).collect();
    match pieces.len() {
        1 => pieces.swap_remove(0),
        _ => B::float_cat(pieces, 0),
    }
}

/// Has the processes' pieces sent to where they belong in what they make, flat.
fn of_processes<B: Backend>(cell: &Cell<B>, owners: Range<usize>) -> Result<B::FloatTensorPrimitive, CommError> {
    let (rank, partition, size, key) = (&cell.rank, cell.partition, cell.dtype.size(), key(cell));
    let _span = tracing::trace_span!("gather", parameter = key.object, elements = partition.numel()).entered();
    let all = range_of(partition, &owners);
    let bytes = |owner: usize| {
        let range = partition.range(owner);
        (range.start - all.start) * size..(range.end - all.start) * size
    };
    let mesh = rank.mesh_of(partition);
    let (mine, others): (Vec<_>, Vec<_>) = owners.clone().partition(|&owner| owner == cell.place());
    let pieces: Vec<_> = others.into_iter().map(|owner| (mesh.peer(rank.index, owner), bytes(owner))).collect();
    let mine = mine.first().map(|&owner| bytes(owner)).filter(|mine| !mine.is_empty());
    let own = mine.map(|mine| (mine, cell.data()));
    let own = own.as_ref().map(|(mine, data)| (mine.start, &data.as_bytes()[..mine.len()]));
    let dtype = on_the_wire(cell.dtype);
    let joined = Whole { dtype, elements: all.len(), tag: &tag(&cell.shape, cell.dtype), own, pieces: &pieces };
    let joined = rank.window.gather(joined, key, cell)?;
    count(cell, owners);
    Ok(B::float_from_data(data(joined, Shape::new([all.len()])), &cell.device))
}

/// Joins pieces of which some are in the host's memory or on a disk, in one new array.
fn join_stored<'c, B: Backend>(
    cell: &Cell<B>,
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
            match piece.stored() {
                Some(stored) => or_stop(stored.read_into(part)),
                None => part.copy_from_slice(&read::<B>(piece.local()).as_bytes()[..part.len()]),
            }
        }
    });
    mover.to_backend::<B>(data, shape, &cell.device, who).into_tensor()
}
