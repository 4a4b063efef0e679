//! Parameters gathered in 8 or 4 bits, like qwZ in ZeRO++ (Wang et al. 2023, <https://arxiv.org/abs/2306.10209>). Every rank computes with
//! the decoded values, including the owner of a shard. The shards themselves stay exact: they are updated, saved and read out.

use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use zero_core::window::Key;
use zero_kernels::quantized::{BLOCK, Format};

use super::Cell;
use super::rank::Rank;
use super::slot::Names;
use crate::backend::{Backend, DType, HostData};
use crate::tier::Home;

/// The quantized codes of a shard, counted as part of the parameter.
pub struct Codes<B: Backend> {
    rank: Arc<Rank<B>>,
    /// The codes, as [`Format`] lays them out.
    pub bytes: Vec<u8>,
}

impl<B: Backend> Codes<B> {
    fn count(&self, sign: i64) {
        self.rank.gauges.parameters.add(sign * self.bytes.len() as i64);
    }
}

impl<B: Backend> Drop for Codes<B> {
    fn drop(&mut self) {
        self.count(-1);
    }
}

impl<B: Backend> Cell<B> {
    /// Returns the format in which this is gathered for use, or `None` if it is not quantized.
    pub fn quantized(&self) -> Option<Format> {
        self.slot.as_ref().filter(|_| self.is_version)?.quantized()
    }

    /// Returns the key of the codes. A parameter that is quantized only while frozen has one from its creation on.
    pub(super) fn codes_key(&self) -> Option<Key> {
        let slot = self.slot.as_ref().filter(|_| self.is_version)?;
        slot.quantization.formats.iter().flatten().next().and(self.key).map(Names::codes)
    }

    /// Returns the codes of this rank's shard, once it is settled. They are cached if the shard is kept with the backend.
    pub fn codes(&self, how: Format) -> Arc<Codes<B>> {
        let encode = || {
            let data = self.data().cast(DType::F32);
            let values = data.as_slice::<f32>();
            let values = &values[..self.partition.len(self.place())];
            let mut bytes = Vec::with_capacity(how.bytes(values.len()));
            how.encode_row(values, &mut bytes);
            let codes = Codes { rank: self.rank.clone(), bytes };
            codes.count(1);
            Arc::new(codes)
        };
        match self.home() {
            Home::Backend => self.codes.get_or_init(encode).clone(),
            Home::Host | Home::Disk(_) => encode(),
        }
    }
}

/// Decodes `codes` to numbers of type `dtype`.
pub fn decode(how: Format, codes: &[u8], dtype: DType, out: &mut [u8]) {
    /// Number of elements whose fp32 values fit in a core's cache.
    const AT_ONCE: usize = 64 * BLOCK;
    let mut values = [0f32; AT_ONCE];
    let size = dtype.size();
    for (codes, out) in codes.chunks(how.bytes(AT_ONCE)).zip(out.chunks_mut(AT_ONCE * size)) {
        let values = &mut values[..out.len() / size];
        how.decode_row(codes, values);
        match dtype {
            DType::F16 => bytemuck::cast_slice_mut::<u8, f16>(out).convert_from_f32_slice(values),
            DType::Bf16 => bytemuck::cast_slice_mut::<u8, bf16>(out).convert_from_f32_slice(values),
            _ => out.copy_from_slice(bytemuck::cast_slice(values)),
        }
    }
}
