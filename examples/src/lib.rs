//! The programs are in `examples/examples`.

/// Compiles and runs the README's program as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// Compiles, and runs where it can, the code of the book. Lines that begin with `# ` are hidden in it.
#[cfg(doctest)]
mod book {
    macro_rules! pages {
        ($($page:ident $file:literal;)*) => {$(
            #[doc = include_str!(concat!("../../docs/book/src/", $file))]
            struct $page;
        )*};
    }
    pages! {
        ActivationCheckpointing "activation-checkpointing.md";
        CheckpointsAndExport "checkpoints-and-export.md";
        ComingFromAccelerate "coming-from-accelerate.md";
        ComingFromDeepSpeed "coming-from-deepspeed.md";
        Generation "generation.md";
        Meshes "meshes.md";
        Models "models.md";
        PlainBurn "plain-burn.md";
        YourOwnModel "your-own-model.md";
    }
}

/// Returns the median of a benchmark's measurements.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
