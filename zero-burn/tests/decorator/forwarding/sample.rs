//! A sample of the operations that Flex overrides has the same bits as bare Flex.

use std::time::Duration;

use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, InterpolateMode, InterpolateOptions,
    TransactionPrimitive, UnfoldOptions,
};
use burn_backend::quantization::{QuantScheme, QuantStore, QuantValue};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{Backend, TensorData, try_read_sync};
use burn_flex::Flex;
use burn_std::{BoolDType, FloatDType, IntDType, Shape, Slice};
use zero_burn::config::ZeroConfig;
use zero_burn::launch::{LaunchOptions, launch};
use zero_burn::{Zero, ZeroDevice};
use zero_core::Stage;

/// Numbers that are the same everywhere, of both signs, without ties.
fn numbers(len: usize, salt: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + salt * 104_729 + 13) % 10_007) as f32 / 2_503.0 - 1.9).collect()
}

fn floats<B: Backend>(shape: impl Into<Shape>, salt: usize, device: &B::Device) -> FloatTensor<B> {
    let shape = shape.into();
    B::float_from_data(TensorData::new(numbers(shape.num_elements(), salt), shape), device)
}

/// Same as [`floats`], as a module's parameter: on [`Zero`] a shard, which must be gathered at stage 3.
fn weights<B: Backend>(shape: impl Into<Shape>, salt: usize, device: &B::Device) -> FloatTensor<B> {
    let shape = shape.into();
    B::memory_persistent_allocations(device, shape, |shape| floats::<B>(shape, salt, device))
}

fn ints<B: Backend>(values: &[i64], shape: impl Into<Shape>, device: &B::Device) -> IntTensor<B> {
    B::int_from_data(TensorData::new(values.to_vec(), shape.into()).convert::<B::IntElem>(), device)
}

struct Sample<B: Backend>(Vec<(&'static str, TensorData)>, std::marker::PhantomData<B>);

impl<B: Backend> Sample<B> {
    fn float(&mut self, name: &'static str, tensor: FloatTensor<B>) {
        let data = try_read_sync(B::float_into_data(tensor)).expect("CPU backends read synchronously").unwrap();
        self.0.push((name, data));
    }

    fn int(&mut self, name: &'static str, tensor: IntTensor<B>) {
        let data = try_read_sync(B::int_into_data(tensor)).expect("CPU backends read synchronously").unwrap();
        self.0.push((name, data));
    }

    fn bool(&mut self, name: &'static str, tensor: BoolTensor<B>) {
        let data = try_read_sync(B::bool_into_data(tensor)).expect("CPU backends read synchronously").unwrap();
        self.0.push((name, data));
    }
}

/// Returns the results of operations for which Flex has its own kernels, on fixed data.
fn sample<B: Backend>(device: &B::Device) -> Vec<(&'static str, TensorData)> {
    let mut out = Sample::<B>(Vec::new(), std::marker::PhantomData);
    let f = |shape: &[usize], salt| floats::<B>(Shape::from(shape.to_vec()), salt, device);
    let w = |shape: &[usize], salt| weights::<B>(Shape::from(shape.to_vec()), salt, device);
    let (native, i64_) = (BoolDType::Native, IntDType::I64);
    let mask = || B::float_greater_elem(f(&[5, 37], 3), 0f32.into(), native);

    // Activations.
    out.float("softmax", B::softmax(f(&[5, 37], 1), 1));
    out.float("softmax of another dimension", B::softmax(f(&[5, 37], 1), 0));
    out.float("log_softmax", B::log_softmax(f(&[5, 37], 1), 1));
    out.float("softmin", B::softmin(f(&[5, 37], 1), 1));
    out.float("relu", B::relu(f(&[5, 37], 1)));
    out.float("relu_backward", B::relu_backward(f(&[5, 37], 1), f(&[5, 37], 2)));
    out.float("gelu", B::gelu(f(&[5, 37], 1)));
    out.float("gelu_backward", B::gelu_backward(f(&[5, 37], 1), f(&[5, 37], 2)));
    out.float("sigmoid", B::sigmoid(f(&[5, 37], 1)));
    out.float("sigmoid_backward", B::sigmoid_backward(f(&[5, 37], 1), f(&[5, 37], 2)));
    out.float("log_sigmoid", B::log_sigmoid(f(&[5, 37], 1)));
    out.float("leaky_relu", B::leaky_relu(f(&[5, 37], 1), 0.1f32.into()));
    out.float("hard_sigmoid", B::hard_sigmoid(f(&[5, 37], 1), 0.2f32.into(), 0.5f32.into()));
    out.float("prelu", B::prelu(f(&[5, 37], 1), f(&[5, 37], 2)));

    // Modules, on parameters.
    out.float("linear", B::linear(f(&[2, 6, 10], 1), w(&[10, 7], 2), Some(w(&[7], 3))));
    out.float("linear_x_backward", B::linear_x_backward(w(&[10, 7], 2), f(&[2, 6, 7], 1)));
    out.float("linear_weight_backward", B::linear_weight_backward(f(&[2, 6, 10], 1), f(&[2, 6, 7], 2)));
    out.float("linear_bias_backward", B::linear_bias_backward(f(&[2, 6, 7], 2)));
    let indices = || ints::<B>(&[0, 3, 10, 3, 5, 0], [2, 3], device);
    out.float("embedding", B::embedding(w(&[11, 6], 1), indices()));
    out.float("embedding_backward", B::embedding_backward(w(&[11, 6], 1), f(&[2, 3, 6], 2), indices()));
    out.float("layer_norm", B::layer_norm(f(&[5, 37], 1), w(&[37], 2), Some(w(&[37], 3)), 1e-5));
    out.float("layer_norm without beta", B::layer_norm(f(&[5, 37], 1), w(&[37], 2), None, 1e-5));
    for (name, is_causal) in [("attention", false), ("causal attention", true)] {
        let qkv = |salt| f(&[2, 3, 9, 8], salt);
        let options = AttentionModuleOptions { is_causal, ..Default::default() };
        out.float(name, B::attention(qkv(1), qkv(2), qkv(3), None, None, options));
    }
    let bias = Some(f(&[2, 3, 9, 9], 4));
    let options = AttentionModuleOptions { scale: Some(0.3), ..Default::default() };
    let attention = B::attention(f(&[2, 3, 9, 8], 1), f(&[2, 3, 9, 8], 2), f(&[2, 3, 9, 8], 3), None, bias, options);
    out.float("attention with a bias", attention);
    let one = || ConvOptions::new([2], [1], [1], 1);
    out.float("conv1d", B::conv1d(f(&[2, 3, 12], 1), w(&[4, 3, 3], 2), Some(w(&[4], 3)), one()));
    out.float("conv1d_x_backward", B::conv1d_x_backward(f(&[2, 3, 12], 1), w(&[4, 3, 3], 2), f(&[2, 4, 6], 3), one()));
    let backward = B::conv1d_weight_backward(f(&[2, 3, 12], 1), w(&[4, 3, 3], 2), f(&[2, 4, 6], 3), one());
    out.float("conv1d_weight_backward", backward);
    out.float("conv1d_bias_backward", B::conv1d_bias_backward(f(&[2, 3, 12], 1), w(&[4], 2), f(&[2, 4, 6], 3)));
    for (name, groups) in [("one group", 1), ("two groups", 2)] {
        let two = || ConvOptions::new([1, 2], [1, 0], [1, 1], groups);
        let kernel = || w(&[6, 4 / groups, 3, 3], 2);
        let forward = B::conv2d(f(&[2, 4, 8, 9], 1), kernel(), Some(w(&[6], 3)), two());
        out.float(name, forward);
        out.float(name, B::conv2d_x_backward(f(&[2, 4, 8, 9], 1), kernel(), f(&[2, 6, 8, 4], 3), two()));
        out.float(name, B::conv2d_weight_backward(f(&[2, 4, 8, 9], 1), kernel(), f(&[2, 6, 8, 4], 3), two()));
        out.float(name, B::conv2d_bias_backward(f(&[2, 4, 8, 9], 1), w(&[6], 2), f(&[2, 6, 8, 4], 3)));
    }
    let three = || ConvOptions::new([1; 3], [0; 3], [1; 3], 1);
    out.float("conv3d", B::conv3d(f(&[1, 2, 4, 5, 4], 1), w(&[3, 2, 2, 2, 2], 2), Some(w(&[3], 3)), three()));
    let grad = || f(&[1, 3, 3, 4, 3], 3);
    let backward = B::conv3d_weight_backward(f(&[1, 2, 4, 5, 4], 1), w(&[3, 2, 2, 2, 2], 2), grad(), three());
    out.float("conv3d_weight_backward", backward);
    let up = || ConvTransposeOptions::new([2, 2], [1, 1], [1, 1], [1, 1], 1);
    out.float(
        "conv_transpose2d",
        B::conv_transpose2d(f(&[1, 3, 4, 4], 1), w(&[3, 2, 3, 3], 2), Some(w(&[2], 3)), up()),
    );
    let grad = || f(&[1, 2, 8, 8], 3);
    let backward = B::conv_transpose2d_weight_backward(f(&[1, 3, 4, 4], 1), w(&[3, 2, 3, 3], 2), grad(), up());
    out.float("conv_transpose2d_weight_backward", backward);
    out.float("conv_transpose2d_x_backward", B::conv_transpose2d_x_backward(w(&[3, 2, 3, 3], 2), grad(), up()));
    out.float(
        "conv_transpose2d_bias_backward",
        B::conv_transpose2d_bias_backward(f(&[1, 3, 4, 4], 1), w(&[2], 2), grad()),
    );
    let deform = || DeformConvOptions::new([1, 1], [1, 1], [1, 1], 1, 1);
    let (x, offset, kernel) = (|| f(&[1, 2, 5, 5], 1), || f(&[1, 18, 5, 5], 2), || w(&[3, 2, 3, 3], 3));
    out.float("deform_conv2d", B::deform_conv2d(x(), offset(), kernel(), None, Some(w(&[3], 4)), deform()));
    let grads =
        B::deform_conv2d_backward(x(), offset(), kernel(), None, Some(w(&[3], 4)), f(&[1, 3, 5, 5], 5), deform());
    out.float("deform_conv2d_backward, x", grads.x_grad);
    out.float("deform_conv2d_backward, offset", grads.offset_grad);
    out.float("deform_conv2d_backward, weight", grads.weight_grad);
    out.float("deform_conv2d_backward, bias", grads.bias_grad.expect("a bias was given"));
    let image = || f(&[2, 3, 7, 8], 1);
    out.float("max_pool1d", B::max_pool1d(f(&[2, 3, 11], 1), 3, 2, 1, 1, false));
    out.float("max_pool2d", B::max_pool2d(image(), [2, 3], [2, 2], [1, 1], [1, 1], true));
    let pooled = B::max_pool2d_with_indices(image(), [2, 3], [2, 2], [1, 1], [1, 1], false);
    let grad = B::float_mul_scalar(pooled.output.clone(), 0.5f32.into());
    out.float("max_pool2d_with_indices", pooled.output);
    out.int("max_pool2d_with_indices, indices", pooled.indices.clone());
    let backward =
        B::max_pool2d_with_indices_backward(image(), [2, 3], [2, 2], [1, 1], [1, 1], false, grad, pooled.indices);
    out.float("max_pool2d_with_indices_backward", backward.x_grad);
    out.float("avg_pool2d", B::avg_pool2d(image(), [3, 2], [2, 1], [1, 1], false, false));
    out.float("adaptive_avg_pool2d", B::adaptive_avg_pool2d(image(), [3, 5]));
    out.float("adaptive_avg_pool2d_backward", B::adaptive_avg_pool2d_backward(image(), f(&[2, 3, 3, 5], 2)));
    for mode in [InterpolateMode::Nearest, InterpolateMode::Bilinear, InterpolateMode::Bicubic] {
        out.float("interpolate", B::interpolate(image(), [10, 5], InterpolateOptions::new(mode)));
    }
    out.float("unfold4d", B::unfold4d(image(), [2, 2], UnfoldOptions::new([1, 2], [1, 0], [1, 1])));
    let (re, im) = B::rfft(f(&[3, 16], 1), 1, None);
    out.float("rfft, real", re.clone());
    out.float("rfft, imaginary", im.clone());
    out.float("irfft", B::irfft(re, im, 1, None));

    // Float tensors.
    let m = || f(&[5, 37], 1);
    out.float("float_cat", B::float_cat(vec![m(), w(&[2, 37], 2), f(&[1, 37], 3)], 0));
    out.float("float_matmul", B::float_matmul(f(&[3, 9, 17], 1), f(&[3, 17, 5], 2)));
    out.float("float_sort", B::float_sort(m(), 1, false));
    let (sorted, indices) = B::float_sort_with_indices(m(), 1, true, i64_);
    out.float("float_sort_with_indices", sorted);
    out.int("float_sort_with_indices, indices", indices);
    out.int("float_argsort", B::float_argsort(m(), 0, false, i64_));
    out.int("float_argmax", B::float_argmax(m(), 1, i64_));
    out.int("float_argmin", B::float_argmin(m(), 0, i64_));
    out.float("float_topk", B::float_topk(m(), 1, 3));
    let (largest, indices) = B::float_max_dim_with_indices(m(), 1, i64_);
    out.float("float_max_dim_with_indices", largest);
    out.int("float_max_dim_with_indices, indices", indices);
    out.float("float_max_abs_dim", B::float_max_abs_dim(m(), 1));
    out.float("float_sum", B::float_sum(m()));
    out.float("float_sum of a parameter", B::float_sum(w(&[5, 37], 1)));
    out.float("float_sum_dim", B::float_sum_dim(m(), 1));
    out.float("float_mean", B::float_mean(m()));
    out.float("float_mean_dim", B::float_mean_dim(m(), 0));
    out.float("float_prod", B::float_prod(f(&[9], 1)));
    out.float("float_max", B::float_max(m()));
    out.float("float_min of a parameter", B::float_min(w(&[5, 37], 1)));
    out.float("float_max_abs", B::float_max_abs(m()));
    out.float("float_cumsum", B::float_cumsum(m(), 1));
    out.float("float_cummax", B::float_cummax(m(), 1));
    out.float("float_repeat_dim", B::float_repeat_dim(m(), 0, 3));
    out.float("float_flip", B::float_flip(m(), &[1]));
    out.float("float_unfold", B::float_unfold(m(), 1, 5, 3));
    out.float("float_erf", B::float_erf(m()));
    out.float("float_clamp", B::float_clamp(m(), (-0.5f32).into(), 1.25f32.into()));
    out.float("float_powi", B::float_powi_scalar(m(), 3i64.into()));
    out.float("float_mask_fill", B::float_mask_fill(m(), mask(), 7f32.into()));
    out.float("float_mask_fill of a parameter", B::float_mask_fill(w(&[5, 37], 1), mask(), 7f32.into()));
    out.float("float_mask_where", B::float_mask_where(m(), mask(), f(&[5, 37], 2)));
    out.float("float_mask_where of parameters", B::float_mask_where(w(&[5, 37], 1), mask(), w(&[5, 37], 2)));
    out.float("float_cast", B::float_cast(m(), FloatDType::F16));
    out.float("float_cast of a parameter", B::float_cast(w(&[5, 37], 1), FloatDType::F64));
    let slices = [Slice::from(1..4), Slice::from(5..30)];
    let viewed =
        |x| B::float_expand(B::float_reshape(B::float_slice(x, &slices), Shape::new([75, 1])), Shape::new([75, 4]));
    out.float("views", viewed(B::float_swap_dims(B::float_transpose(m()), 0, 1)));
    out.float("views of a parameter", viewed(B::float_swap_dims(B::float_transpose(w(&[5, 37], 1)), 0, 1)));
    out.bool("float_is_nan", B::float_is_nan(B::float_sqrt(m()), native));
    out.bool("float_any_dim", B::float_any_dim(m(), 1, native));
    let chosen = || ints::<B>(&[4, 0, 4], [3], device);
    out.float("float_select", B::float_select(m(), 0, chosen()));
    out.float("float_select of a parameter", B::float_select(w(&[5, 37], 1), 0, chosen()));
    out.float("float_select_add", B::float_select_add(m(), 0, chosen(), f(&[3, 37], 2)));

    // Other tensors.
    let whole = || ints::<B>(&[5, -3, 9, 0, 2, 2, -8, 1], [2, 4], device);
    out.int("int_sort", B::int_sort(whole(), 1, true));
    out.int("int_argsort", B::int_argsort(whole(), 1, false));
    out.int("int_cat", B::int_cat(vec![whole(), whole()], 1));
    out.int("int_cumsum", B::int_cumsum(whole(), 0));
    out.int("int_arange_step", B::int_arange_step(3..40, 7, device, i64_));
    out.float("int_into_float", B::int_into_float(whole(), FloatDType::F32));
    out.bool("bool_any_dim", B::bool_any_dim(mask(), 1));
    out.bool("bool_xor", B::bool_xor(mask(), B::bool_not(mask())));
    let places = try_read_sync(B::bool_argwhere(mask(), i64_)).expect("CPU backends read synchronously");
    out.int("bool_argwhere", places);
    let scheme = QuantScheme::default().with_value(QuantValue::Q8S).with_store(QuantStore::Native);
    let quantized = || B::quantize_dynamic(w(&[4, 32], 1), &scheme);
    out.float("dequantize", B::dequantize(quantized(), FloatDType::F32));
    let transposed = B::q_transpose(quantized());
    out.float("q_transpose", B::dequantize(transposed, FloatDType::F32));
    let transaction = TransactionPrimitive::<B>::new(vec![m(), w(&[5, 37], 4)], vec![], vec![whole()], vec![mask()]);
    let read = try_read_sync(B::tr_execute(transaction)).expect("CPU backends read synchronously").unwrap();
    for data in read.read_floats.into_iter().chain(read.read_ints).chain(read.read_bools) {
        out.0.push(("tr_execute", data));
    }
    out.0
}

fn assert_same_bits(expected: &[(&'static str, TensorData)], got: &[(&'static str, TensorData)], on: &str) {
    assert_eq!(expected.len(), got.len());
    for ((name, expected), (_, got)) in expected.iter().zip(got) {
        assert_eq!((expected.dtype, &expected.shape), (got.dtype, &got.shape), "{name}, {on}");
        assert!(expected.as_bytes() == got.as_bytes(), "{name}, {on}: {expected} became {got}");
    }
}

#[test]
fn results_are_the_inner_backends_bit_for_bit() {
    let bare = sample::<Flex>(&Default::default());
    // Outside of a launch, a lone rank; then ranks that hold the parameters in pieces.
    let alone = sample::<Zero<Flex>>(&ZeroDevice::default());
    assert_same_bits(&bare, &alone, "a lone rank");
    let options = LaunchOptions { threads_per_rank: 1, deadline: Duration::from_secs(60), ..LaunchOptions::default() };
    for (world, stage) in
        [(1, Stage::Parameters), (3, Stage::DataParallel), (3, Stage::Gradients), (3, Stage::Parameters)]
    {
        let config = ZeroConfig { param_persistence_threshold: 0, ..ZeroConfig::new(stage) };
        let ranks = launch::<Flex, _, String>(world, &config, &options, |device| Ok(sample::<Zero<Flex>>(&device)));
        for got in ranks.unwrap_or_else(|error| panic!("{error}")) {
            assert_same_bits(&bare, &got, &format!("{world} ranks at stage {stage}"));
        }
    }
}

/// The comparison above can tell a native kernel from a composition of other operations.
#[test]
fn a_composed_softmax_has_other_bits_than_the_native_one() {
    let x = || floats::<Flex>([64, 67], 1, &Default::default());
    let shifted = Flex::float_sub(x(), Flex::float_max_dim(x(), 1));
    let exp = Flex::float_exp(shifted);
    let composed = Flex::float_div(exp.clone(), Flex::float_sum_dim(exp, 1));
    let bytes = |tensor| try_read_sync(Flex::float_into_data(tensor)).unwrap().unwrap().as_bytes().to_vec();
    use burn_backend::ops::{ActivationOps, FloatTensorOps};
    assert_ne!(bytes(composed), bytes(Flex::softmax(x(), 1)));
}
