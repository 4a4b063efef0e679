//! The hub's part in a collective: it collects what the ranks bring, and answers when all have come.
//!
//! States of an operation: *filling* (some ranks have come) -> removed, when the last has come and all are answered, or
//! when a rank that it needs has left. A message of a rank is handled by the thread that reads from it; the hub's own rank
//! hands its part over on the calling thread.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::super::Buffer;
use super::shared::{Answer, Shared};
use super::wire::{Head, Slot, Trouble, Work, code_of};
use crate::CommError;

/// What a rank brings.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) slot: Slot,
    pub(super) label: String,
    /// The group's ranks in the run, ascending.
    pub(super) members: Vec<usize>,
    pub(super) op: String,
    pub(super) work: Work,
    pub(super) buffer: Buffer,
}

#[derive(Debug)]
struct Filling {
    label: String,
    op: String,
    work: Work,
    first: usize,
    since: Instant,
    members: Vec<usize>,
    parts: Vec<Option<Arc<Buffer>>>,
}

impl Filling {
    fn missing(&self) -> Vec<usize> {
        self.members.iter().zip(&self.parts).filter(|(_, part)| part.is_none()).map(|(&rank, _)| rank).collect()
    }

    fn present(&self) -> Vec<usize> {
        self.members.iter().zip(&self.parts).filter(|(_, part)| part.is_some()).map(|(&rank, _)| rank).collect()
    }
}

/// The operations that not all ranks have come to.
#[derive(Debug, Default)]
pub(super) struct Hub {
    filling: Mutex<HashMap<Slot, Filling>>,
}

impl Hub {
    /// `rank` has come with its part.
    pub(super) fn arrive(&self, shared: &Shared, rank: usize, part: Part) {
        let Part { slot, label, members, op, work, buffer } = part;
        let complete = {
            let mut all = self.filling.lock();
            let filling = all.entry(slot).or_insert_with(|| Filling {
                label,
                op: op.clone(),
                work,
                first: rank,
                since: Instant::now(),
                parts: vec![None; members.len()],
                members: members.clone(),
            });
            let place = filling.members.iter().position(|&member| member == rank);
            let Some(place) = place.filter(|_| filling.op == op && filling.work == work && filling.members == members)
            else {
                let error = CommError::Mismatch {
                    group: filling.label.clone(),
                    seq: slot.1,
                    rank,
                    op,
                    other_rank: filling.first,
                    other_op: filling.op.clone(),
                };
                drop(all);
                shared.note(Trouble { peer: rank, reason: error.to_string(), cause: Some(error) }, None);
                return;
            };
            filling.parts[place] = Some(Arc::new(buffer));
            match filling.missing() {
                missing if missing.is_empty() => all.remove(&slot),
                missing => {
                    let gone = shared.first_to_leave(&missing);
                    if let Some(peer) = gone {
                        give_up(shared, slot, &all[&slot], peer);
                        all.remove(&slot);
                    }
                    None
                }
            }
        };
        let Some(Filling { work, members, parts, .. }) = complete else { return };
        let parts: Vec<Arc<Buffer>> = parts.into_iter().flatten().collect();
        let mut common = None;
        for (place, &member) in members.iter().enumerate() {
            match own_result(work, &parts, place) {
                Some(result) => answer(shared, member, slot, result),
                None => {
                    let common = common.get_or_insert_with(|| common_result(work, &parts));
                    answer(shared, member, slot, common.clone());
                }
            }
        }
    }

    /// `peer` has left: what still needs it cannot end.
    pub(super) fn leave(&self, shared: &Shared, peer: usize) {
        self.filling.lock().retain(|&slot, filling| {
            let needed = filling.missing().contains(&peer);
            if needed {
                give_up(shared, slot, filling, peer);
            }
            !needed
        });
    }

    /// Fails the run when an operation has waited for longer than `deadline`.
    pub(super) fn watch(&self, shared: &Shared, deadline: Duration) {
        let late = {
            let all = self.filling.lock();
            let oldest = all.iter().filter(|(_, filling)| filling.since.elapsed() >= deadline);
            oldest.min_by_key(|(_, filling)| filling.since).map(|(slot, filling)| {
                let missing = filling.missing();
                let peer = missing.first().copied().unwrap_or(filling.first);
                let cause = CommError::Timeout {
                    group: filling.label.clone(),
                    seq: slot.1,
                    rank: filling.first,
                    op: filling.op.clone(),
                    waited_ms: filling.since.elapsed().as_millis() as u64,
                    missing,
                };
                Trouble { peer, reason: cause.to_string(), cause: Some(cause) }
            })
        };
        if let Some(trouble) = late {
            shared.note(trouble, None);
        }
    }
}

fn give_up(shared: &Shared, slot: Slot, filling: &Filling, peer: usize) {
    if shared.failed() {
        // That is what everybody hears of; ranks leave because of it.
        return;
    }
    for member in filling.present() {
        if member == shared.rank {
            shared.deliver(slot, Answer::Without(peer));
        } else {
            link(shared, member).send(&Head::Without { slot, peer }, &[]);
        }
    }
}

fn answer(shared: &Shared, member: usize, slot: Slot, result: Buffer) {
    if member == shared.rank {
        shared.deliver(slot, Answer::Result(result));
    } else {
        let head = Head::Result { slot, dtype: code_of(result.dtype()) };
        link(shared, member).send(&head, result.as_bytes());
    }
}

fn link(shared: &Shared, member: usize) -> &super::shared::Link {
    &shared.links[member - 1]
}

/// What only the rank at `place` gets, in operations where ranks get different things.
fn own_result(work: Work, parts: &[Arc<Buffer>], place: usize) -> Option<Buffer> {
    let len = parts[0].len() / parts.len();
    let stretch = place * len..(place + 1) * len;
    match work {
        Work::ReduceScatter(op) => Some(Buffer::reduce_range(parts, stretch, op.into())),
        Work::AllToAll => Some(Buffer::concat(parts, stretch)),
        _ => None,
    }
}

/// What every rank gets.
fn common_result(work: Work, parts: &[Arc<Buffer>]) -> Buffer {
    let len = parts[0].len();
    match work {
        Work::AllReduce(op) => Buffer::reduce_range(parts, 0..len, op.into()),
        Work::Broadcast(root) => (*parts[root]).clone(),
        Work::Barrier => Buffer::U8(Vec::new()),
        Work::AllGather | Work::ReduceScatter(_) | Work::AllToAll => Buffer::concat(parts, 0..len),
    }
}
