//! Comparison, before a run begins, of settings that must be the same on all ranks.

use sha2::{Digest, Sha256};

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
    /// Line of rank 0.
    pub first: String,
    /// Line of `rank` in the same place.
    pub other: String,
}

/// Compares the ranks' lines, which may be of any number and length. A collective operation. Every rank gets the same result: the
/// first difference of the first rank that differs from rank 0.
///
/// # Errors
///
/// [`CommError`], as for any collective.
pub fn agree(comm: &dyn Collective, lines: &[String]) -> Result<Option<Difference>, CommError> {
    if comm.world() == 1 {
        return Ok(None);
    }
    // Trailing empty lines are not compared.
    let mine = lines.join("\n").trim_end_matches('\n').to_string();
    let Some((rank, texts)) = first_unlike(comm, mine.into_bytes(), "comparing settings")? else { return Ok(None) };
    let [first, other] = texts.map(|text| String::from_utf8_lossy(&text).into_owned());
    let nothing = || std::iter::repeat("no further settings");
    let places = first.lines().count().max(other.lines().count());
    let mut pairs = first.lines().chain(nothing()).zip(other.lines().chain(nothing())).take(places);
    let Some((first, other)) = pairs.find(|(first, other)| first != other) else { return Ok(None) };
    let plain = |line: &str| line.trim().trim_end_matches(',').to_string();
    // The first rank to end interrupts the others' operations: none may end before all have the data to report the same
    // difference. A barrier that is interrupted has been entered by all ranks, so its error is ignored.
    let _ = comm.execute(Request::Barrier("reporting different settings"));
    Ok(Some(Difference { rank, first: plain(first), other: plain(other) }))
}

/// A rank whose bytes differ from rank 0's, with the bytes of both (rank 0 first).
type Unlike = (usize, [Vec<u8>; 2]);

/// Returns, on every rank, the first rank whose bytes differ from rank 0's. If all are equal, only their digests are sent.
pub(crate) fn first_unlike(comm: &dyn Collective, mine: Vec<u8>, what: &str) -> Result<Option<Unlike>, CommError> {
    let digest = Buffer::U8(Sha256::digest(&mine).to_vec());
    let all = comm.execute_for(Request::AllGather(digest), what)?.into_u8();
    let (digests, _) = all.as_chunks::<32>();
    let Some(rank) = digests.iter().position(|digest| *digest != digests[0]) else { return Ok(None) };
    let first = broadcast_bytes(comm, 0, mine.clone(), what)?;
    Ok(Some((rank, [first, broadcast_bytes(comm, rank, mine, what)?])))
}

/// Returns, on every rank, the first rank that has a message, with that message.
pub(crate) fn first_told(
    comm: &dyn Collective,
    mine: Option<String>,
    what: &str,
) -> Result<Option<(usize, String)>, CommError> {
    let has = Buffer::U8(vec![mine.is_some().into()]);
    let all = comm.execute_for(Request::AllGather(has), what)?.into_u8();
    let Some(rank) = all.iter().position(|&has| has != 0) else { return Ok(None) };
    let told = broadcast_bytes(comm, rank, mine.unwrap_or_default().into_bytes(), what)?;
    Ok(Some((rank, String::from_utf8_lossy(&told).into_owned())))
}

/// Broadcasts the bytes of `root`; those of the others are ignored and may be of any length.
pub(crate) fn broadcast_bytes(
    comm: &dyn Collective,
    root: usize,
    mut mine: Vec<u8>,
    what: &str,
) -> Result<Vec<u8>, CommError> {
    let broadcast = |bytes| comm.execute_for(Request::Broadcast(Buffer::U8(bytes), root), what).map(Buffer::into_u8);
    let length = broadcast((mine.len() as u64).to_le_bytes().to_vec())?;
    mine.resize(u64::from_le_bytes(length.try_into().expect("eight bytes were sent")) as usize, 0);
    broadcast(mine)
}

/// Gathers the bytes of every rank, of any length, in rank order on rank 0; the others get nothing.
pub(crate) fn gather_bytes(comm: &dyn Collective, mut mine: Vec<u8>, what: &str) -> Result<Vec<Vec<u8>>, CommError> {
    let lengths = Buffer::U8((mine.len() as u64).to_le_bytes().to_vec());
    let lengths = comm.execute_for(Request::AllGather(lengths), what)?.into_u8();
    let lengths = lengths.as_chunks::<8>().0.iter().map(|&length| u64::from_le_bytes(length) as usize);
    let longest = lengths.clone().max().unwrap_or(0).max(1);
    mine.resize(longest, 0);
    let all = comm.execute_for(Request::Gather(Buffer::U8(mine), 0), what)?.into_u8();
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
        assert_eq!(compared(&[&["a"], &["a", "b"]]), vec![difference(1, "no further settings", "b"); 2]);
        assert_eq!(compared(&[&["a "], &["a"]]).len(), 2);
    }
}
