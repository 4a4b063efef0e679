//! Real-world configurations with their plans, errors of invalid ones, and schedules: `cargo test -p zero-settings`.

mod accelerate;
mod builder;
mod deepspeed;
mod loss_scales;
mod malformed;
mod schedules;
mod wrong;

use std::path::{Path, PathBuf};

use zero_core::Stage;
use zero_core::config::ZeroConfig;
use zero_kernels::Rule;
use zero_settings::loss_scale::DynamicLossScale;
use zero_settings::schedule::{CycleMomentum, OneCycle, Schedule, Warmup};
use zero_settings::{
    Auto, Batch, Config, ConfigError, Context, Filled, Float, Format, LogFiles, LossScale, MixedPrecision, Node,
    Offload, OffloadDevice, OptimizerPlan, Precision, ProblemKind, Report, Watchdog, ZeroPlan, ZeroPlanBuilder,
};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs").join(name)
}

fn on(world: usize) -> Context {
    Context { world: Some(world), ..Context::default() }
}

fn json(text: &str, context: &Context) -> Result<ZeroPlan, ConfigError> {
    Config::from_text("ds.json", Format::Json, text)?.resolve(context)
}

fn yaml(text: &str, context: &Context) -> Result<ZeroPlan, ConfigError> {
    Config::from_text("acc.yaml", Format::Yaml, text)?.resolve(context)
}

fn warnings(plan: &ZeroPlan) -> String {
    plan.warnings.iter().map(|warning| format!("{warning}\n")).collect()
}

/// Values that Accelerate's script would know.
fn script() -> Context {
    Context {
        world: Some(4),
        batch_world: None,
        auto: Auto {
            hidden_size: Some(1024),
            micro_batch: Some(8),
            learning_rate: Some(2e-5),
            weight_decay: Some(0.1),
            total_steps: Some(1000),
            warmup_steps: Some(100),
            ..Auto::default()
        },
    }
}

const DYNAMIC: LossScale = LossScale::Dynamic(DynamicLossScale {
    initial_scale_power: 16,
    window: 1000,
    hysteresis: 2,
    consecutive_hysteresis: false,
    min_scale: 1.0,
});
