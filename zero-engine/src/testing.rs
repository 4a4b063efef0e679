//! A tensor library of vectors in host memory, for the tests of the engine alone.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use zero_core::collective::threads::{ThreadOptions, run};
use zero_core::config::ZeroConfig;
use zero_core::window::WindowHost;
use zero_core::{Buffer, CommError};
use zero_kernels::update::Elements;

use crate::backend::{Backend, DType, HostData, Shape};
use crate::cell::rank::Rank;
use crate::copier::Copier;

/// An fp32 tensor, or its values.
#[derive(Debug, Clone)]
pub(crate) struct Values {
    values: Arc<Vec<f32>>,
    shape: Shape,
}

/// The library.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host;

impl Values {
    fn of(values: Vec<f32>, shape: &[usize]) -> Self {
        Self { values: Arc::new(values), shape: shape.into() }
    }
}

impl HostData for Values {
    fn from_buffer(values: Buffer, shape: &[usize]) -> Self {
        Self::of(values.into_f32(), shape)
    }

    #[cfg(feature = "cuda")]
    fn from_pinned(pinned: zero_core::copies::Pinned, elements: usize, _: DType) -> Self {
        Self::of(bytemuck::pod_collect_to_vec(&pinned[..]), &[elements])
    }

    fn into_buffer(self) -> Buffer {
        Buffer::F32(Arc::unwrap_or_clone(self.values))
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn numel(&self) -> usize {
        self.values.len()
    }

    fn reshaped(mut self, shape: &[usize]) -> Self {
        self.shape = shape.into();
        self
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.values)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut Arc::make_mut(&mut self.values)[..])
    }

    fn cast(self, dtype: DType) -> Self {
        assert_eq!(dtype, DType::F32, "tests of the engine use fp32");
        self
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
    type Draw = ();
    type Stream = ();

    fn device(_: &Values) {}

    fn dtype(x: &Values) -> DType {
        HostData::dtype(x)
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

    fn zeros(shape: &[usize], (): &(), _: DType) -> Values {
        Values::of(vec![0.0; shape.iter().product()], shape)
    }

    fn reshape(x: Values, shape: &[usize]) -> Values {
        x.reshaped(shape)
    }

    fn slice(x: Values, range: Range<usize>) -> Values {
        Values::of(x.values[range.clone()].to_vec(), &[range.len()])
    }

    fn cat(parts: Vec<Values>) -> Values {
        let values: Vec<f32> = parts.iter().flat_map(|part| part.values.to_vec()).collect();
        let len = values.len();
        Values::of(values, &[len])
    }

    fn cast(x: Values, dtype: DType) -> Values {
        HostData::cast(x, dtype)
    }

    fn to_device(x: Values, (): &()) -> Values {
        x
    }

    fn add(_: Values, _: Values) -> Values {
        unimplemented!("no test computes with tensors")
    }

    fn sub(_: Values, _: Values) -> Values {
        unimplemented!("no test computes with tensors")
    }

    fn mul_scalar(_: Values, _: f64) -> Values {
        unimplemented!("no test computes with tensors")
    }

    fn sum_of_squares(_: Values) -> f64 {
        unimplemented!("no test computes with tensors")
    }

    fn elements(x: &Values) -> Option<Elements<'_>> {
        crate::values::elements_of(x)
    }

    fn is_host(_: &Self::Device) -> bool {
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
