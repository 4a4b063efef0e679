//! Ranks that say of themselves what must be the same on all, before they begin.

use super::{Buffer, Collective, Request};
use crate::CommError;

/// Two ranks that differ.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "ranks were started with different settings: rank 0 has {first}, rank {rank} has {other}; give every rank the same \
     program, options, files and environment"
)]
pub struct Difference {
    /// The rank that differs from rank 0.
    pub rank: usize,
    /// What rank 0 says.
    pub first: String,
    /// What that rank says in the same place.
    pub other: String,
}

/// Compares the ranks' lines, which may be of any number and length. A collective; every rank gets the same result: the first
/// difference of the first rank that differs from rank 0.
///
/// # Errors
///
/// As any collective's.
pub fn agree(comm: &dyn Collective, lines: &[String]) -> Result<Option<Difference>, CommError> {
    if comm.world() == 1 {
        return Ok(None);
    }
    let all = gather_bytes(comm, lines.join("\n").into_bytes(), "comparing settings")?;
    let said = |rank: usize| String::from_utf8_lossy(&all[rank]).into_owned();
    let first = said(0);
    for rank in 1..comm.world() {
        let other = said(rank);
        let nothing = || std::iter::repeat("nothing more");
        let places = first.lines().count().max(other.lines().count());
        let pairs = first.lines().chain(nothing()).zip(other.lines().chain(nothing())).take(places);
        if let Some((first, other)) = pairs.into_iter().find(|(first, other)| first != other) {
            let plain = |line: &str| line.trim().trim_end_matches(',').to_string();
            // The first rank to end breaks off the others' operations: none does before all have what they need to say the
            // same. A barrier that is broken off has been entered by all.
            let _ = comm.execute(Request::Barrier("a difference of settings"));
            return Ok(Some(Difference { rank, first: plain(first), other: plain(other) }));
        }
    }
    Ok(None)
}

/// An all-gather of byte strings of different lengths: first the lengths, then the bytes, padded to the longest.
pub(crate) fn gather_bytes(comm: &dyn Collective, mut mine: Vec<u8>, what: &str) -> Result<Vec<Vec<u8>>, CommError> {
    let gather = |bytes: Vec<u8>| comm.execute_for(Request::AllGather(Buffer::U8(bytes)), what).map(Buffer::into_u8);
    let lengths = gather((mine.len() as u64).to_le_bytes().to_vec())?;
    let lengths = lengths.as_chunks::<8>().0.iter().map(|&length| u64::from_le_bytes(length) as usize);
    let longest = lengths.clone().max().unwrap_or(0).max(1);
    mine.resize(longest, 0);
    let all = gather(mine)?;
    Ok(all.chunks_exact(longest).zip(lengths).map(|(bytes, length)| bytes[..length].to_vec()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::threads::{ThreadOptions, run};

    fn compared(lines: &[&[&str]]) -> Vec<Option<Difference>> {
        run(lines.len(), &ThreadOptions::default(), |comm| {
            let mine: Vec<String> = lines[comm.rank()].iter().map(|line| line.to_string()).collect();
            agree(&*comm, &mine)
        })
        .unwrap()
    }

    #[test]
    fn the_first_difference_is_told_to_all() {
        assert_eq!(compared(&[&["a", "b"], &["a", "b"]]), [None, None]);
        assert_eq!(compared(&[&["a"]]), [None]);
        assert_eq!(compared(&[&[], &[]]), [None, None]);
        let difference =
            |rank, first: &str, other: &str| Some(Difference { rank, first: first.into(), other: other.into() });
        let got = compared(&[&["a", "  b: 1,", "c"], &["a", "  b: 1,", "c"], &["a", "  b: 22,", "d"]]);
        assert_eq!(got, vec![difference(2, "b: 1", "b: 22"); 3]);
        assert_eq!(compared(&[&["a"], &["a", "b"]]), vec![difference(1, "nothing more", "b"); 2]);
        assert_eq!(compared(&[&["a "], &["a"]]).len(), 2);
    }
}
