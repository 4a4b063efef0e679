//! Reading the other ranks' pieces where they lie: they take no part.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn_backend::Backend;
use zero_core::accounting::WireKind;
use zero_core::window::{Key, Whole};
use zero_core::{Called, CommError};

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
    let (rank, partition, place) = (&cell.rank, cell.partition, cell.place());
    let peer_of = |owner| rank.mesh.peer(rank.index, owner);
    let key = cell.key.expect("only what has a name is read one-sidedly");
    let _span = tracing::trace_span!("gather", parameter = key.object, elements = partition.numel()).entered();
    if rank.window.is_remote() {
        return of_processes(cell, key);
    }
    let mut cells: Vec<Option<Arc<Cell<B>>>> = Vec::with_capacity(partition.world());
    for owner in (0..partition.world()).filter(|&owner| partition.len(owner) > 0) {
        if owner == place {
            cells.push(None);
        } else {
            let peer =
                rank.window.read(peer_of(owner), key, cell)?.here().expect("ranks of one process show what they have");
            if peer.shape != cell.shape || peer.dtype != cell.dtype {
                return Err(CommError::Mismatch {
                    at: Called::new(
                        "window",
                        key.object,
                        rank.index,
                        format!("a gather of {cell} of {:?}", cell.dtype),
                    ),
                    other_rank: peer_of(owner),
                    other_op: format!("holds {:?} of {:?} there", peer.shape.as_slice(), peer.dtype),
                });
            }
            cells.push(Some(peer));
        }
    }
    let received = partition.numel() - partition.len(place);
    rank.wire.add(WireKind::AllGather, received * cell.dtype.size());
    let cells = || cells.iter().map(|peer| peer.as_deref().unwrap_or(cell));
    let join = || {
        if cells().any(|piece| piece.stored().is_some()) {
            return join_stored(cell, cells(), who);
        }
        // Ranks of one process may have a device each.
        let mut pieces: Vec<_> = cells().map(|piece| here::<B>(piece.local(), &cell.device)).collect();
        let flat = match pieces.len() {
            1 => pieces.swap_remove(0),
            _ => B::float_cat(pieces, 0),
        };
        B::float_reshape(flat, cell.shape.clone())
    };
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

/// Has the other processes' pieces sent to where they belong in the whole.
fn of_processes<B: Backend>(cell: &Cell<B>, key: Key) -> Result<B::FloatTensorPrimitive, CommError> {
    let (rank, partition, size, place) = (&cell.rank, cell.partition, cell.dtype.size(), cell.place());
    let bytes = |owner: usize| {
        let range = partition.range(owner);
        range.start * size..range.end * size
    };
    let others = (0..partition.world()).filter(|&owner| owner != place);
    let pieces: Vec<_> = others.map(|owner| (rank.mesh.peer(rank.index, owner), bytes(owner))).collect();
    let mine = bytes(place);
    let own = (!mine.is_empty()).then(|| cell.data());
    let own = own.as_ref().map(|data| (mine.start, &data.as_bytes()[..mine.len()]));
    let dtype = on_the_wire(cell.dtype);
    let whole = Whole { dtype, elements: partition.numel(), tag: &tag(&cell.shape, cell.dtype), own, pieces: &pieces };
    let whole = rank.window.gather(whole, key, cell)?;
    rank.wire.add(WireKind::AllGather, (partition.numel() - partition.len(place)) * size);
    let from = |&(owner, ref bytes): &(usize, Range<usize>)| rank.place.from_other_machines(bytes.len(), &[owner]);
    rank.wire.add_from_other_machines(pieces.iter().map(from).sum());
    Ok(B::float_from_data(data(whole, cell.shape.clone()), &cell.device))
}

/// Joins pieces of which some are in the host's memory or on a disk, in one new array.
fn join_stored<'c, B: Backend>(
    cell: &Cell<B>,
    pieces: impl Iterator<Item = &'c Cell<B>>,
    who: For,
) -> B::FloatTensorPrimitive {
    let (size, mover) = (cell.dtype.size(), &cell.rank.mover);
    let data = filled(mover, cell.partition.numel(), cell.dtype, cell.shape.clone(), |whole| {
        for piece in pieces {
            let range = cell.partition.range(piece.place());
            let part = &mut whole[range.start * size..range.end * size];
            match piece.stored() {
                Some(stored) => or_stop(stored.read_into(part)),
                None => part.copy_from_slice(&read::<B>(piece.local()).as_bytes()[..part.len()]),
            }
        }
    });
    mover.to_backend::<B>(data, cell.shape.clone(), &cell.device, who).into_tensor()
}
