//! Dropout of probabilities: whether one is kept is drawn where it is needed, by its place, and never stored.

use burn_cubecl::CubeRuntime;
use cubecl::prelude::*;

use crate::cube::random::upper_24_bits;
use crate::options::AttentionDropout;

/// An [`AttentionDropout`] in a kernel. A device that does not count in 64 bit may take it, but not use it.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Dropped {
    key_low: u32,
    key_high: u32,
    threshold: u32,
    /// What a probability that is kept is multiplied by.
    share: f32,
}

pub(super) fn dropped<R: CubeRuntime>(dropout: Option<AttentionDropout>) -> DroppedLaunch<R> {
    let AttentionDropout { probability, key } = dropout.unwrap_or(AttentionDropout { probability: 0.0, key: 0 });
    let keep = 1.0 - probability;
    DroppedLaunch::new(key as u32, (key >> 32) as u32, AttentionDropout::threshold(keep), (1.0 / keep) as f32)
}

/// What a pair's probability of a query and a key is multiplied by: 0, or the share of those that are kept. There are `t` keys.
#[cube]
pub(super) fn share(dropped: &Dropped, pair: usize, query: usize, key: usize, t: usize) -> f32 {
    let line = u64::cast_from(pair) * u64::cast_from(t) + u64::cast_from(query);
    let place = line * u64::cast_from(t) + u64::cast_from(key);
    let seed = (u64::cast_from(dropped.key_high) << 32u64) + u64::cast_from(dropped.key_low);
    select(upper_24_bits(seed, place) < u64::cast_from(dropped.threshold), dropped.share, 0.0f32)
}
