//! A tensor library of vectors in host memory, for the tests of the engine alone.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use zero_core::collective::threads::{ThreadOptions, run};
use zero_core::config::ZeroConfig;
use zero_core::window::WindowHost;
use zero_core::{Buffer, CommError};
use zero_kernels::quantized::{Format, Quantized};
use zero_kernels::update::Elements;

use crate::backend::{Backend, DType, HostData, Shape};
use crate::cell::rank::Rank;
use crate::copier::Copier;

/// A tensor, or its values.
#[derive(Debug, Clone)]
pub(crate) struct Values {
    values: Arc<Buffer>,
    shape: Shape,
}

/// The library.
#[derive(Debug)]
pub(crate) struct Host;

impl Values {
    fn of(values: Buffer, shape: &[usize]) -> Self {
        Self { values: Arc::new(values), shape: shape.into() }
    }

    fn f32s(&self) -> Vec<f32> {
        Buffer::clone(&self.values).into_f32()
    }

    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        let dtype = self.values.dtype();
        Self::of(Buffer::from_f32(self.f32s().into_iter().map(f).collect(), dtype), &self.shape)
    }

    fn zip(self, other: &Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let dtype = self.values.dtype();
        let values = self.f32s().into_iter().zip(other.f32s()).map(|(a, b)| f(a, b)).collect();
        Self::of(Buffer::from_f32(values, dtype), &self.shape)
    }
}

impl HostData for Values {
    fn from_buffer(values: Buffer, shape: &[usize]) -> Self {
        Self::of(values, shape)
    }

    fn from_bytes(bytes: Vec<u8>, shape: &[usize], dtype: DType) -> Self {
        let mut data = Self::of(Buffer::from_f32(vec![0.0; bytes.len() / dtype.size()], dtype), shape);
        data.bytes_mut().copy_from_slice(&bytes);
        data
    }

    #[cfg(feature = "cuda")]
    fn from_pinned(pinned: zero_core::copies::Pinned, elements: usize, dtype: DType) -> Self {
        Self::from_bytes(pinned.to_vec(), &[elements], dtype)
    }

    fn into_buffer(self) -> Buffer {
        Arc::unwrap_or_clone(self.values)
    }

    fn dtype(&self) -> DType {
        self.values.dtype()
    }

    fn numel(&self) -> usize {
        self.values.len()
    }

    fn shape(&self) -> Shape {
        self.shape.clone()
    }

    fn reshaped(mut self, shape: &[usize]) -> Self {
        self.shape = shape.into();
        self
    }

    fn bytes(&self) -> &[u8] {
        match &*self.values {
            Buffer::F32(values) => bytemuck::cast_slice(values),
            Buffer::F64(values) => bytemuck::cast_slice(values),
            Buffer::F16(values) => bytemuck::cast_slice(values),
            Buffer::Bf16(values) => bytemuck::cast_slice(values),
            Buffer::U8(values) => values,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match Arc::make_mut(&mut self.values) {
            Buffer::F32(values) => bytemuck::cast_slice_mut(values),
            Buffer::F64(values) => bytemuck::cast_slice_mut(values),
            Buffer::F16(values) => bytemuck::cast_slice_mut(values),
            Buffer::Bf16(values) => bytemuck::cast_slice_mut(values),
            Buffer::U8(values) => values,
        }
    }

    fn cast(self, dtype: DType) -> Self {
        let shape = self.shape.clone();
        if self.values.dtype() == dtype { self } else { Self::of(Buffer::from_f32(self.f32s(), dtype), &shape) }
    }
}

impl Backend for Host {
    type Tensor = Values;
    type Device = ();
    type Data = Values;
    type Held = Values;
    type Loan = ();
    type Operation = ();
    type ParamId = u64;
    type Stream = ();

    fn device(_: &Values) {}

    fn dtype(x: &Values) -> DType {
        x.values.dtype()
    }

    fn numel(x: &Values) -> usize {
        x.values.len()
    }

    fn from_data(data: Values, (): &()) -> Values {
        data
    }

    fn read(x: Values) -> Values {
        x
    }

    fn zeros(shape: &[usize], (): &(), dtype: DType) -> Values {
        Values::of(Buffer::from_f32(vec![0.0; shape.iter().product()], dtype), shape)
    }

    fn reshape(x: Values, shape: &[usize]) -> Values {
        x.reshaped(shape)
    }

    fn slice(x: Values, range: Range<usize>) -> Values {
        let len = range.len();
        Values::of(Buffer::from_f32(x.f32s()[range].to_vec(), x.values.dtype()), &[len])
    }

    fn cat(parts: Vec<Values>) -> Values {
        let values: Vec<f32> = parts.iter().flat_map(Values::f32s).collect();
        let len = values.len();
        Values::of(Buffer::from_f32(values, parts[0].values.dtype()), &[len])
    }

    fn cast(x: Values, dtype: DType) -> Values {
        HostData::cast(x, dtype)
    }

    fn to_device(x: Values, (): &()) -> Values {
        x
    }

    fn add(a: Values, b: Values) -> Values {
        a.zip(&b, |a, b| a + b)
    }

    fn sub(a: Values, b: Values) -> Values {
        a.zip(&b, |a, b| a - b)
    }

    fn mul_scalar(x: Values, factor: f64) -> Values {
        x.map(|x| x * factor as f32)
    }

    fn sum_of_squares(x: Values) -> f64 {
        x.f32s().into_iter().map(|x| f64::from(x).powi(2)).sum()
    }

    fn elements(x: &Values) -> Option<Elements<'_>> {
        crate::values::elements_of(x)
    }

    fn is_host() -> bool {
        true
    }

    fn lend(_: &Values) -> Option<()> {
        None
    }

    fn borrow((): &()) -> Option<Values> {
        None
    }

    fn stream() {}

    fn in_stream<R>((): (), f: impl FnOnce() -> R) -> R {
        f()
    }

    fn share(tensors: Vec<Values>) -> Vec<Values> {
        tensors
    }

    fn unshared(x: Values) -> Values {
        x
    }

    fn held(held: &Values) -> Values {
        held.clone()
    }

    fn into_held(held: Values) -> Values {
        held
    }

    fn held_dtype(held: &Values) -> DType {
        held.values.dtype()
    }

    fn held_numel(held: &Values) -> usize {
        held.values.len()
    }

    fn held_device(_: &Values) -> &() {
        &()
    }

    fn to_codes(_: Values, _: Format) -> Values {
        unimplemented!("no test gathers codes together")
    }

    fn from_codes(_: Values, _: Quantized, _: DType) -> Values {
        unimplemented!("no test gathers codes together")
    }
}

/// Runs `body` on each of `world` ranks that are threads.
pub(crate) fn with_ranks<T: Send>(
    world: usize,
    config: &ZeroConfig,
    deadline: Duration,
    body: impl Fn(&Arc<Rank<Host>>) -> Result<T, CommError> + Sync,
) -> Result<Vec<T>, String> {
    let windows = WindowHost::default();
    let results = run(world, &ThreadOptions { deadline }, |comm| {
        let window = windows.join(&comm);
        let rank = Rank::new(&*comm, config.clone(), (), false, window, (None, Copier::default()));
        let result = body(&rank);
        comm.wait_for_others()?;
        rank.end();
        result
    });
    results.map_err(|error| error.to_string())
}
