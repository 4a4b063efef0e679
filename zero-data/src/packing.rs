//! Packing: several conversations in one row.

use std::collections::BTreeMap;
use std::ops::Range;

/// Distributes the conversations in `part` to rows of at most `seq` tokens: the longest first, each into the fullest row that has room
/// (best-fit decreasing). Rows are in the order of their first conversations, and so are the conversations in a row.
pub(super) fn packed(lengths: &[usize], part: Range<usize>, seq: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = part.collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(lengths[at]), at));
    let (mut rows, mut by_room) = (Vec::<Vec<usize>>::new(), BTreeMap::<usize, Vec<usize>>::new());
    for at in order {
        let length = lengths[at];
        let found = by_room.range(length..).next().map(|(&room, _)| room);
        let (row, room) = match found {
            Some(room) => {
                let with_room = by_room.get_mut(&room).expect("it was found");
                let row = with_room.pop().expect("a list is not empty");
                if with_room.is_empty() {
                    by_room.remove(&room);
                }
                (row, room)
            }
            None => {
                rows.push(Vec::new());
                (rows.len() - 1, seq.max(length))
            }
        };
        rows[row].push(at);
        by_room.entry(room - length).or_default().push(row);
    }
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_unstable();
    rows
}
