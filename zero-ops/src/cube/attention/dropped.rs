//! Dropout of attention probabilities: a mask bit is drawn from its index wherever it is needed, and never stored.

use burn_cubecl::CubeRuntime;
use cubecl::prelude::*;

use crate::cube::random::upper_24_bits;
use crate::options::AttentionDropout;

/// An [`AttentionDropout`] in a kernel. A device without 64-bit integers may receive it, but not use it.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Dropped {
    key_low: u32,
    key_high: u32,
    threshold: u32,
    /// Factor of a probability that is kept.
    share: f32,
}

pub(super) fn dropped<R: CubeRuntime>(dropout: Option<AttentionDropout>) -> DroppedLaunch<R> {
    let AttentionDropout { probability, key } = dropout.unwrap_or(AttentionDropout { probability: 0.0, key: 0 });
    let keep = 1.0 - probability;
    DroppedLaunch::new(key as u32, (key >> 32) as u32, AttentionDropout::threshold(keep), (1.0 / keep) as f32)
}

/// Returns the factor of a pair's probability of a query and a key: 0, or `share` if it is kept. There are `t` keys.
#[cube]
pub(super) fn share(dropped: &Dropped, pair: usize, query: usize, key: usize, t: usize) -> f32 {
    let line = u64::cast_from(pair) * u64::cast_from(t) + u64::cast_from(query);
    let place = line * u64::cast_from(t) + u64::cast_from(key);
    let seed = (u64::cast_from(dropped.key_high) << 32u64) + u64::cast_from(dropped.key_low);
    select(upper_24_bits(seed, place) < u64::cast_from(dropped.threshold), dropped.share, 0.0f32)
}
