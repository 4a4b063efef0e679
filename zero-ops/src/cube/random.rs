//! Random numbers addressed by index, computed where they are used: SplitMix64's finalizer over a keyed Weyl sequence, with the same bits
//! that zero-burn draws on the host.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use burn_cubecl::CubeRuntime;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_std::{DType, Shape};
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;

use super::any::{Born, Question, asked, born};
use super::many::array;
use crate::options::AttentionDropout;

/// `out`: 1 if the upper 24 bits of the element's random number are below `threshold`, otherwise 0.
#[cube(launch_unchecked, address_type = "dynamic")]
fn bernoulli_kernel<E: Float>(
    out: &mut Array<E>,
    elements: usize,
    key: u64,
    threshold: u64,
    #[define(E)] _dtype: StorageType,
) {
    let i = ABSOLUTE_POS;
    if i >= elements {
        terminate!();
    }
    out[i] = E::cast_from(upper_24_bits(key, u64::cast_from(i)) < threshold);
}

/// Returns the upper 24 bits of random number `i`.
#[cube]
pub(super) fn upper_24_bits(key: u64, i: u64) -> u64 {
    let z = key + (i + 1u64) * 0x9e37_79b9_7f4a_7c15u64;
    let z = (z ^ (z >> 30u64)) * 0xbf58_476d_1ce4_e5b9u64;
    let z = (z ^ (z >> 27u64)) * 0x94d0_49bb_1331_11ebu64;
    let z = z ^ (z >> 31u64);
    z >> 40u64
}

fn has_64_bit<R: CubeRuntime>(client: &ComputeClient<R>) -> bool {
    client.properties().supports_type(ElemType::UInt(UIntKind::U64))
}

struct Bernoulli {
    key: u64,
    probability: f64,
    shape: Shape,
    dtype: DType,
}

impl Born for Bernoulli {
    fn make<R: CubeRuntime>(&self, device: &R::Device) -> Option<CubeTensor<R>> {
        let client = R::client(device);
        if !has_64_bit(&client) || !super::tensor::is_float(self.dtype) {
            return None;
        }
        let out = empty_device_contiguous_dtype(client, device.clone(), self.shape.clone(), self.dtype);
        let elements = self.shape.num_elements();
        if elements > 0 {
            let dim = CubeDim::new(&out.client, elements);
            let count = cubecl::calculate_cube_count_elemwise(&out.client, elements, dim);
            let threshold = u64::from(AttentionDropout::threshold(self.probability));
            let address = out.required_address_type();
            // SAFETY: units beyond `elements` stop.
            unsafe {
                bernoulli_kernel::launch_unchecked(
                    &out.client,
                    count,
                    dim,
                    address,
                    array(&out),
                    elements,
                    self.key,
                    threshold,
                    self.dtype.into(),
                );
            }
        }
        Some(out)
    }
}

/// Returns whether kernels on a device of `B` can draw these numbers.
pub fn draws_on<B: Backend>(device: &B::Device) -> bool {
    struct Asked;

    impl Question for Asked {
        fn answer<R: CubeRuntime>(&self, client: &ComputeClient<R>) -> bool {
            has_64_bit(client)
        }
    }

    asked::<B>(device, &Asked)
}

/// Returns a tensor of 1 with the given probability and of 0 otherwise, drawn by SplitMix64's finalizer from `key` and an element's index.
/// `None` if the backend's tensors are not CubeCL's, or its device has no 64-bit integers.
pub fn bernoulli<B: Backend>(
    key: u64,
    probability: f64,
    shape: Shape,
    dtype: DType,
    device: &B::Device,
) -> Option<FloatTensor<B>> {
    born::<B>(device, &Bernoulli { key, probability, shape, dtype })
}

compiled! {
    for dtype in TYPES {
        let drawn = Bernoulli { key: 7, probability: 0.9, shape: Shape::from([1024, 1600]), dtype };
        assert!(drawn.make::<cubecl::cuda::CudaRuntime>(&Default::default()).is_some());
    }
}

#[cfg(all(test, any(feature = "vulkan", feature = "cuda")))]
mod tests {
    use burn::tensor::{Tensor, TensorPrimitive};

    use super::*;
    use crate::cube::tested::Plain;

    /// Includes a probability that is exact in 24 bits, and both extremes.
    #[test]
    fn a_device_draws_what_the_host_draws() {
        for (key, probability) in [(7, 0.9), (u64::MAX - 3, 0.5), (1 << 63, 0.1), (5, 0.0), (6, 1.0)] {
            let shape = Shape::from([37, 130]);
            let made = bernoulli::<Plain>(key, probability, shape, DType::F32, &Default::default());
            let Some(made) = made else { return println!("skipped: the device does not count in 64 bit") };
            let made = Tensor::<Plain, 2>::from_primitive(TensorPrimitive::Float(made));
            let made: Vec<f32> = made.into_data().to_vec().unwrap();
            for (i, made) in made.into_iter().enumerate() {
                let unit = AttentionDropout::upper_24_bits(key, i as u64) as f64 / (1u64 << 24) as f64;
                assert_eq!(made, f32::from(u8::from(unit < probability)), "element {i} of {key}, {probability}");
            }
        }
    }
}
