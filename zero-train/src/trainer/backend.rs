//! The choice of a backend, and the check that this machine has it.

#[cfg(feature = "burn")]
use crate::error::{Result, wrong};

/// The backend that ranks compute on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum BackendChoice {
    /// The CPU.
    #[default]
    Cpu,
    /// NVIDIA GPUs; needs the Cargo feature `cuda`.
    Cuda,
    /// A device with a Vulkan driver; needs the Cargo feature `vulkan`.
    Vulkan,
}

/// Returns a choice as on the command line: its variant, which is one word, in lower case.
pub(super) fn name(choice: impl std::fmt::Debug) -> String {
    format!("{choice:?}").to_lowercase()
}

impl BackendChoice {
    /// Checks that the program has the backend and this machine the device.
    ///
    /// # Errors
    ///
    /// The error says what is missing, and what to do.
    #[cfg(feature = "burn")]
    pub fn check(self) -> Result<()> {
        let missing = match self {
            BackendChoice::Cpu => None,
            #[cfg(feature = "cuda")]
            BackendChoice::Cuda => zero_ops::devices::cuda().err(),
            #[cfg(feature = "vulkan")]
            BackendChoice::Vulkan => zero_ops::devices::vulkan().err(),
            #[allow(unreachable_patterns)] // Reached by what the features leave out.
            _ => Some(format!(
                "this program was built without this backend: build it with `--features {}`, or use --backend cpu",
                name(self)
            )),
        };
        missing.map_or(Ok(()), |missing| Err(wrong("backend", name(self), missing)))
    }

    /// Returns the bytes of device memory for the ranks of this machine, if the devices have their own memory and report it.
    pub(super) fn memory(self) -> Option<u64> {
        match self {
            #[cfg(feature = "cuda")]
            BackendChoice::Cuda => zero_ops::devices::cuda().ok().map(|devices| devices.iter().sum()),
            _ => None,
        }
    }
}
