//! What is printed and written of one thing that was measured.

use serde_json::{Value, json};

use crate::rounds::{Samples, quantile};

/// One line of the table and of the file.
pub struct Row {
    pub name: String,
    pub n_ctx: usize,
    pub samples: Samples,
    /// How many times faster than llama.cpp's attention with an f16 cache, and than the dense one.
    pub vs_ggml: Option<f64>,
    pub vs_dense: Option<f64>,
    /// The least possible time over the time taken.
    pub of_floor: Option<f64>,
}

impl Row {
    pub fn json(&self) -> Value {
        json!({
            "name": self.name,
            "n_ctx": self.n_ctx,
            "median_s": self.samples.median(),
            "spread": self.samples.spread(),
            "ratio_vs_ggml": self.vs_ggml,
            "ratio_vs_dense": self.vs_dense,
            "fraction_of_floor": self.of_floor,
        })
    }

    pub fn print(&self) {
        let number = |x: Option<f64>| x.map_or("-".to_string(), |x| format!("{x:.2}"));
        let times = &self.samples.processor;
        let processor = (!times.is_empty()).then(|| quantile(times, 0.5) * 1e3);
        println!(
            "| {} | {} | {:.3} | {} | {:.0} % | {} | {} | {} |",
            self.name,
            self.n_ctx,
            self.samples.median() * 1e3,
            number(processor),
            self.samples.spread() * 100.0,
            number(self.vs_ggml),
            number(self.vs_dense),
            number(self.of_floor),
        );
    }
}
