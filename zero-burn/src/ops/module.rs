//! Neural-network operations. Where a backward operation reads only the shape of a weight, the weight is not gathered.

use burn_backend::ops::*;

use super::*;

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> ModuleOps<Self> for Zero<B> {
    recorded! {
        fn embedding(weights: float, indices: int) -> float;
        fn linear(x: float, weight: float, bias: opt_float) -> float;
        fn conv1d(x: float, weight: float, bias: opt_float, options: (ConvOptions<1>)) -> float;
        fn conv2d(x: float, weight: float, bias: opt_float, options: (ConvOptions<2>)) -> float;
        fn deform_conv2d(x: float, offset: float, weight: float, mask: opt_float, bias: opt_float, options: (DeformConvOptions<2>)) -> float;
        fn conv3d(x: float, weight: float, bias: opt_float, options: (ConvOptions<3>)) -> float;
        fn conv_transpose1d(x: float, weight: float, bias: opt_float, options: (ConvTransposeOptions<1>)) -> float;
        fn conv_transpose2d(x: float, weight: float, bias: opt_float, options: (ConvTransposeOptions<2>)) -> float;
        fn conv_transpose3d(x: float, weight: float, bias: opt_float, options: (ConvTransposeOptions<3>)) -> float;
        fn unfold4d(x: float, kernel_size: ([usize; 2]), options: (UnfoldOptions)) -> float;
        fn avg_pool1d(x: float, kernel_size: (usize), stride: (usize), padding: (usize), count_include_pad: (bool), ceil_mode: (bool)) -> float;
        fn avg_pool2d(x: float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]), count_include_pad: (bool), ceil_mode: (bool)) -> float;
        fn adaptive_avg_pool2d(x: float, output_size: ([usize; 2])) -> float;
        fn adaptive_avg_pool1d(x: float, output_size: (usize)) -> float;
        fn max_pool1d(x: float, kernel_size: (usize), stride: (usize), padding: (usize), dilation: (usize), ceil_mode: (bool)) -> float;
        fn max_pool2d(x: float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]), dilation: ([usize; 2]), ceil_mode: (bool)) -> float;
        fn interpolate(x: float, output_size: ([usize; 2]), options: (InterpolateOptions)) -> float;
        fn attention(query: float, key: float, value: float, mask: opt_bool, attn_bias: opt_float, options: (AttentionModuleOptions)) -> float;
        fn layer_norm(tensor: float, gamma: float, beta: opt_float, epsilon: (f64)) -> float = reductions::layer_norm::<B>;
        fn ctc_loss(log_probs: float, targets: int, input_lengths: int, target_lengths: int, blank: (usize)) -> float;
        fn rfft(signal: float, dim: (usize), n: (Option<usize>)) -> float_float;
        fn irfft(spectrum_re: float, spectrum_im: float, dim: (usize), n: (Option<usize>)) -> float;
    }

    forward! {
        fn max_pool1d_with_indices(x: float, kernel_size: (usize), stride: (usize), padding: (usize), dilation: (usize), ceil_mode: (bool)) -> max_pool1d_indices;
        fn max_pool2d_with_indices(x: float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]), dilation: ([usize; 2]), ceil_mode: (bool)) -> max_pool2d_indices;
        fn embedding_backward(weights: shape_of, output_grad: float, indices: int) -> float;
        fn linear_x_backward(weight: float, output_grad: float) -> float;
        fn linear_weight_backward(x: float, output_grad: float) -> float;
        fn linear_bias_backward(output_grad: float) -> float = reductions::linear_bias_backward::<B>;
        fn conv1d_x_backward(x: float, weight: float, output_grad: float, options: (ConvOptions<1>)) -> float;
        fn conv1d_weight_backward(x: float, weight: shape_of, output_grad: float, options: (ConvOptions<1>)) -> float;
        fn conv1d_bias_backward(x: float, bias: shape_of, output_grad: float) -> float;
        fn conv2d_x_backward(x: float, weight: float, output_grad: float, options: (ConvOptions<2>)) -> float;
        fn conv2d_weight_backward(x: float, weight: shape_of, output_grad: float, options: (ConvOptions<2>)) -> float;
        fn conv2d_bias_backward(x: float, bias: shape_of, output_grad: float) -> float;
        fn conv3d_x_backward(x: float, weight: float, output_grad: float, options: (ConvOptions<3>)) -> float;
        fn conv3d_weight_backward(x: float, weight: shape_of, output_grad: float, options: (ConvOptions<3>)) -> float;
        fn conv3d_bias_backward(x: float, bias: shape_of, output_grad: float) -> float;
        fn conv_transpose1d_x_backward(weight: float, output_grad: float, options: (ConvTransposeOptions<1>)) -> float;
        fn conv_transpose1d_weight_backward(x: float, weight: shape_of, output_grad: float, options: (ConvTransposeOptions<1>)) -> float;
        fn conv_transpose1d_bias_backward(x: float, bias: shape_of, output_grad: float) -> float;
        fn conv_transpose2d_x_backward(weight: float, output_grad: float, options: (ConvTransposeOptions<2>)) -> float;
        fn conv_transpose2d_weight_backward(x: float, weight: shape_of, output_grad: float, options: (ConvTransposeOptions<2>)) -> float;
        fn conv_transpose2d_bias_backward(x: float, bias: shape_of, output_grad: float) -> float;
        fn conv_transpose3d_x_backward(weight: float, output_grad: float, options: (ConvTransposeOptions<3>)) -> float;
        fn conv_transpose3d_weight_backward(x: float, weight: shape_of, output_grad: float, options: (ConvTransposeOptions<3>)) -> float;
        fn conv_transpose3d_bias_backward(x: float, bias: shape_of, output_grad: float) -> float;
        fn avg_pool1d_backward(x: float, grad: float, kernel_size: (usize), stride: (usize), padding: (usize), count_include_pad: (bool), ceil_mode: (bool)) -> float;
        fn avg_pool2d_backward(x: float, grad: float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]), count_include_pad: (bool), ceil_mode: (bool)) -> float;
        fn adaptive_avg_pool2d_backward(x: float, grad: float) -> float;
        fn adaptive_avg_pool1d_backward(x: float, grad: float) -> float;
        fn interpolate_backward(x: float, grad: float, output_size: ([usize; 2]), options: (InterpolateOptions)) -> float;
        fn has_ctc_loss_backward() -> (bool);
        fn ctc_loss_backward(log_probs: float, targets: int, input_lengths: int, target_lengths: int, grad_loss: float, blank: (usize)) -> float;
        fn deform_conv2d_backward(x: float, offset: float, weight: float, mask: opt_float, bias: opt_float, output_grad: float, options: (DeformConvOptions<2>)) -> deform_conv2d_gradients;
        fn max_pool1d_with_indices_backward(x: float, kernel_size: (usize), stride: (usize), padding: (usize), dilation: (usize), ceil_mode: (bool), output_grad: float, indices: int) -> max_pool1d_gradient;
        fn max_pool2d_with_indices_backward(x: float, kernel_size: ([usize; 2]), stride: ([usize; 2]), padding: ([usize; 2]), dilation: ([usize; 2]), ceil_mode: (bool), output_grad: float, indices: int) -> max_pool2d_gradient;
    }
}
