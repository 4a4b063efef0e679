//! Values of any length between ranks, and the rule that one rank's failure is everybody's.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::CheckpointError;
use crate::{Buffer, Collective, CommError};

#[derive(Serialize, Deserialize)]
enum Outcome<T> {
    Done(T),
    Failed(String),
}

/// Gives every rank what each rank brought, in rank order, or the error of the first rank that failed, on all of them.
pub(super) fn share<T: Serialize + DeserializeOwned>(
    comm: &dyn Collective,
    step: u64,
    mine: Result<T, CheckpointError>,
) -> Result<Vec<T>, CheckpointError> {
    let mine = match mine {
        Ok(value) => Outcome::Done(value),
        Err(error) => Outcome::Failed(error.to_string()),
    };
    let mine = serde_json::to_vec(&mine).expect("what ranks exchange has a JSON form");
    let failed = |source| CheckpointError::Comm { doing: format!("saving step {step}"), source: Box::new(source) };
    let all = gather(comm, mine).map_err(failed)?;
    let mut values = Vec::with_capacity(all.len());
    for (rank, bytes) in all.iter().enumerate() {
        let outcome = serde_json::from_slice(bytes).map_err(|error| error.to_string());
        match outcome {
            Ok(Outcome::Done(value)) => values.push(value),
            Ok(Outcome::Failed(reason)) | Err(reason) => {
                return Err(CheckpointError::SaveFailed { step, rank, world: comm.world(), reason });
            }
        }
    }
    Ok(values)
}

/// An all-gather of byte strings of different lengths: first the lengths, then the bytes, padded to the longest.
fn gather(comm: &dyn Collective, mut mine: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
    let lengths = comm.all_gather(Buffer::U8((mine.len() as u64).to_le_bytes().to_vec()))?.into_u8();
    let lengths: Vec<usize> = lengths
        .chunks_exact(8)
        .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("chunks of 8 bytes")) as usize)
        .collect();
    let longest = lengths.iter().copied().max().unwrap_or(0).max(1);
    mine.resize(longest, 0);
    let all = comm.all_gather(Buffer::U8(mine))?.into_u8();
    Ok(all.chunks_exact(longest).zip(lengths).map(|(bytes, length)| bytes[..length].to_vec()).collect())
}
