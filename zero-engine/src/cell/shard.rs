//! The data of a settled shard, wherever it is kept: with the backend, in host memory, on a disk, or as codes.

use std::sync::Arc;

use half::{bf16, f16};
use zero_kernels::cpu::half::narrow_into;
use zero_kernels::quantized::Format;
use zero_kernels::update::Elements;

use super::codes::{Codes, decode};
use super::{Cell, ShardState, slice_shard};
use zero_core::Buffer;

use crate::abort::or_stop;
use crate::backend::{Backend, DType, HostData};
use crate::tier::{Stored, fetch, filled};
use crate::values::{part, sum_of_squares_on_host};

/// A shard's data.
pub enum ShardData<B: Backend> {
    /// A flat tensor; one filler element if the rank owns none.
    Tensor(B::Tensor),
    /// An fp32 tensor whose elements are rounded to the shard's type.
    Master(B::Tensor),
    /// Kept outside the backend.
    Stored(Stored<B>),
    /// Quantized for use.
    Codes(Arc<Codes<B>>, Format),
}

impl<B: Backend> ShardData<B> {
    /// Writes the elements, converted to `dtype` if they are quantized or a master's, to `out`, which has room for the shard without filler.
    pub fn read_into(&self, dtype: DType, out: &mut [u8]) {
        match self {
            Self::Tensor(tensor) => out.copy_from_slice(&B::read(tensor.clone()).bytes()[..out.len()]),
            Self::Master(master) => round_into::<B>(master, dtype, out),
            Self::Stored(stored) => or_stop(stored.read_into(out)),
            Self::Codes(codes, how) => decode(*how, &codes.bytes, dtype, out),
        }
    }
}

/// The bytes of a shard as they are sent to another process, without filler.
pub enum ShardBytes<B: Backend> {
    /// This many bytes of the elements.
    Elements(B::Data, usize),
    /// Quantized elements.
    Codes(Arc<Codes<B>>),
}

impl<B: Backend> AsRef<[u8]> for ShardBytes<B> {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Elements(data, len) => &data.bytes()[..*len],
            Self::Codes(codes) => &codes.bytes,
        }
    }
}

/// Rounds the first elements of `master` to `dtype`, one of 16 bits, as many as `out` has.
fn round_into<B: Backend>(master: &B::Tensor, dtype: DType, out: &mut [u8]) {
    let Some(Elements::F32(values)) = B::elements(master) else { unreachable!("a master is in fp32, in host memory") };
    let values = &values[..out.len() / dtype.size()];
    match dtype {
        DType::F16 => narrow_into::<f16>(values, bytemuck::cast_slice_mut(out)),
        _ => narrow_into::<bf16>(values, bytemuck::cast_slice_mut(out)),
    }
}

impl<B: Backend> Cell<B> {
    /// Returns this rank's shard once it is settled, quantized in format `how` if there is one.
    pub fn shard_data(&self, how: Option<Format>) -> ShardData<B> {
        if let Some(how) = how {
            return ShardData::Codes(self.codes(how), how);
        }
        let state = self.settled();
        match &state.shard {
            ShardState::Tensor(local) => ShardData::Tensor(local.tensor()),
            ShardState::OfMaster(master) => ShardData::Master(master.tensor()),
            ShardState::Stored(stored) => ShardData::Stored(stored.clone()),
            _ => {
                let full = state.full.tensor().expect("a settled cell holds its shard or the full tensor");
                ShardData::Tensor(slice_shard::<B>(full, self.partition, self.place()))
            }
        }
    }

    /// Returns this rank's shard, flat; one filler element if the rank owns none.
    pub fn local(&self) -> B::Tensor {
        let shard = match self.shard_data(None) {
            ShardData::Tensor(tensor) => return tensor,
            shard => shard,
        };
        // A gathered tensor is nearer than the storage, and needs no conversion. But it may have been decoded from codes.
        let full = self.state.lock().full.tensor().filter(|_| self.quantized().is_none());
        match (full, shard) {
            (Some(full), _) => slice_shard::<B>(full, self.partition, self.place()),
            (None, ShardData::Master(master)) => B::cast(master, self.dtype),
            (None, ShardData::Stored(stored)) => {
                fetch::<B>(&stored, self.dtype, &self.device, &self.rank.copier).into_tensor()
            }
            (None, ShardData::Tensor(_) | ShardData::Codes(..)) => unreachable!("codes were not asked for"),
        }
    }

    /// Returns the shard's data, flat, in host memory; one filler element if the rank owns none.
    pub fn data(&self) -> B::Data {
        match self.shard_data(None) {
            ShardData::Stored(Stored::Host(data)) => B::Data::clone(&data),
            ShardData::Tensor(tensor) => B::read(tensor).flat(),
            stored => {
                let elements = self.partition.len(self.place());
                filled(&self.rank.copier, elements, self.dtype, |out| stored.read_into(self.dtype, out))
            }
        }
    }

    /// Returns the bytes of the elements that this rank counts and saves, in type `dtype`.
    pub fn own_bytes(&self, dtype: DType) -> Vec<u8> {
        let (own, size) = (self.own(), self.dtype.size());
        if self.dtype == DType::U8 {
            let own = if own.is_empty() { Vec::new() } else { self.decoded()[own].to_vec() };
            return B::Data::flat_of(Buffer::F32(own)).cast(dtype).bytes().to_vec();
        }
        let data: B::Data = match self.stored().as_ref().and_then(Stored::host) {
            _ if own.is_empty() => return Vec::new(),
            Some(data) => filled(&self.rank.copier, own.len(), self.dtype, |out| {
                out.copy_from_slice(&data.bytes()[own.start * size..own.end * size]);
            }),
            None => B::read(part::<B>(self.local(), own)),
        };
        data.cast(dtype).bytes().to_vec()
    }

    /// Returns the sum of squares of the elements that this rank counts, or, if a device would compute it, these elements; nothing if the
    /// rank counts none.
    pub fn own_squares(&self) -> Result<f64, B::Tensor> {
        let own = self.own();
        if own.is_empty() {
            return Ok(0.0);
        }
        let stored = self.stored();
        if let Some(data) = stored.as_ref().and_then(Stored::host) {
            return Ok(sum_of_squares_on_host(&**data, own));
        }
        if let Some(squares) = stored.as_ref().and_then(Stored::squares) {
            return Ok(squares);
        }
        let elements = part::<B>(self.local(), own);
        if B::is_host(&self.device) { Ok(B::sum_of_squares(elements)) } else { Err(elements) }
    }

    /// Returns the bytes in which this rank's shard is sent, quantized in format `how` if there is one.
    pub fn sent(&self, how: Option<Format>) -> ShardBytes<B> {
        match how {
            Some(how) => ShardBytes::Codes(self.codes(how)),
            None => ShardBytes::Elements(self.data(), self.partition.len(self.place()) * self.dtype.size()),
        }
    }

    /// Returns the tag of the shard in transfers between processes.
    pub fn tag(&self, how: Option<Format>) -> String {
        let exact = format!("{:?} of {:?}", self.dtype, self.shape);
        how.map_or_else(|| exact.clone(), |how| format!("{how} for {exact}"))
    }
}
