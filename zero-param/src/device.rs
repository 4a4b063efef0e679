//! Devices on which a model computes, and transfers between them and host memory.

use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchDevice, DispatchTensor, DispatchTensorKind, Flex,
};
use burn::tensor::{DType, Device, GradientCheckpointingStrategy, Tensor};
use zero_core::config::Float;
use zero_engine::abort::stop;

use crate::error::Error;
use crate::tensors::{Floats, Raw, as_host, host};

/// A backend that computes with full parameters.
pub(crate) trait Target: Backend {
    /// The backend's tensors are in host memory.
    const IS_HOST: bool = false;

    /// Returns the tensor as it is dispatched.
    fn kind(tensor: BackendTensor<Self>) -> DispatchTensorKind;

    /// Inverts [`Target::kind`]; `None` for a tensor of another backend.
    fn of_kind(kind: DispatchTensorKind) -> Option<BackendTensor<Self>>;

    /// Returns a tensor as one of any device.
    fn floats(tensor: FloatTensor<Self>) -> Floats {
        DispatchTensor { kind: Self::kind(BackendTensor::Float(tensor)), autodiff: DispatchAutodiffContext::Disabled }
    }

    /// Returns a tensor on the device, copied if it is elsewhere.
    fn put(tensor: Floats, device: &Self::Device) -> FloatTensor<Self> {
        match as_host(&tensor).is_some() == Self::IS_HOST {
            true => Self::of_kind(tensor.kind).expect("it is of this backend").float(),
            false => Self::float_from_data(host(tensor).into_data(), device),
        }
    }
}

impl Target for Flex {
    const IS_HOST: bool = true;

    fn kind(tensor: BackendTensor<Self>) -> DispatchTensorKind {
        DispatchTensorKind::Flex(tensor)
    }

    fn of_kind(kind: DispatchTensorKind) -> Option<BackendTensor<Self>> {
        match kind {
            DispatchTensorKind::Flex(tensor) => Some(tensor),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }
}

#[cfg(feature = "cube")]
impl Target for burn::backend::Cube {
    fn kind(tensor: BackendTensor<Self>) -> DispatchTensorKind {
        DispatchTensorKind::Cube(tensor)
    }

    fn of_kind(kind: DispatchTensorKind) -> Option<BackendTensor<Self>> {
        match kind {
            DispatchTensorKind::Cube(tensor) => Some(tensor),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }
}

/// Checks that a parameter may be on `device` and that the device supports `float`.
pub(crate) fn check(path: &str, device: &Device, float: Float) -> Result<(), Error> {
    let trouble = |reason, instead| {
        Err(Error::Device { path: path.into(), device: format!("{:?}", device.as_dispatch()), reason, instead })
    };
    match device.as_dispatch() {
        DispatchDevice::Flex(_) => {}
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => {}
        #[allow(unreachable_patterns)] // Which there are is the program's to say, by Burn's features.
        _ => {
            let instead =
                "create the model on Device::flex(), or enable the feature `cuda`, `vulkan` or `wgpu` of zero-param";
            return trouble("which this build of zero-param does not support", instead);
        }
    }
    let (dtype, reason) = match float {
        Float::Bf16 => (DType::BF16, "which does not support bf16"),
        Float::F16 => (DType::F16, "which does not support fp16"),
        Float::F32 => return Ok(()),
    };
    match device.supports_dtype(dtype) {
        true => Ok(()),
        false => trouble(reason, "pass Float::F32 as ZeroConfig::param_dtype"),
    }
}

/// Returns whether `tensor` is in host memory.
pub(crate) fn is_host(tensor: &FloatTensor<Dispatch>) -> bool {
    match &tensor.kind {
        DispatchTensorKind::Flex(_) => true,
        DispatchTensorKind::Autodiff(inner) => matches!(**inner, DispatchTensorKind::Flex(_)),
        #[allow(unreachable_patterns)]
        _ => false,
    }
}

/// Returns the tensor that a module holds of a parameter, without autodiff.
pub(crate) fn held<const D: usize>(base: Tensor<D>) -> Raw {
    match base.without_autodiff().into_dispatch().kind {
        DispatchTensorKind::Flex(base) => base.float(),
        _ => moved(),
    }
}

/// Inverts [`held`].
pub(crate) fn hold<const D: usize>(base: Raw) -> Tensor<D> {
    let kind = DispatchTensorKind::Flex(BackendTensor::Float(base));
    Tensor::from_dispatch(DispatchTensor { kind, autodiff: DispatchAutodiffContext::Disabled })
}

/// Same as [`hold`], with autodiff if a `strategy` of its checkpoints is given.
pub(crate) fn hold_as<const D: usize>(
    base: Raw,
    strategy: Option<GradientCheckpointingStrategy>,
    is_trained: bool,
) -> Tensor<D> {
    match strategy {
        Some(strategy) => {
            hold(base).autodiff().with_gradient_checkpointing_strategy(strategy).set_require_grad(is_trained)
        }
        None => hold(base),
    }
}

pub(crate) fn moved() -> ! {
    stop(
        "a sharded parameter was moved to a device, but the module must stay where it is: create the model on its device, then shard it"
            .into(),
    )
}
