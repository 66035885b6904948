//! The gates of one route, and which spans they zoom.

use std::any::Any;

use crate::attend::{RowScratch, SoftmaxState};
use crate::routing::Plan;

/// What the query heads of one unit chose, with buffers kept from step to step.
#[derive(Default)]
pub struct UnitPlan {
    /// Spans that each head zooms, ascending, by index into [`PaperPlan::spans`].
    pub zoomed: Vec<Vec<usize>>,
    /// Spans that any of them zooms: what is rebuilt.
    pub rebuilt: Vec<usize>,
    /// Tokens of the rebuilt spans.
    pub fetched: usize,
    pub scratch: UnitScratch,
}

#[derive(Default)]
pub struct UnitScratch {
    /// W^T W q of each head, `[n_group][key_dim]`.
    pub folded: Vec<f32>,
    /// Products of folded queries and mean keys, `[n_group][spans]`.
    pub products: Vec<f32>,
    /// Queries turned back for pieces that have moved.
    pub turned: Vec<f32>,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub key_bytes: Vec<u8>,
    pub value_bytes: Vec<u8>,
    pub bias: Vec<f32>,
    pub rows: RowScratch,
    pub state: SoftmaxState,
}

/// What the units of one pass and layer chose.
#[derive(Default)]
pub struct PaperPlan {
    /// The layer's pieces that have a span.
    pub spans: Vec<usize>,
    pub units: Vec<UnitPlan>,
    pub n_units: usize,
}

impl PaperPlan {
    /// Empties the plan for `n_units` units.
    pub fn prepare(&mut self, spans: impl Iterator<Item = usize>, n_units: usize) {
        self.spans.clear();
        self.spans.extend(spans);
        self.n_units = n_units;
        if self.units.len() < n_units {
            self.units.resize_with(n_units, UnitPlan::default);
        }
        for unit in &mut self.units {
            unit.zoomed.clear();
            unit.rebuilt.clear();
            unit.fetched = 0;
        }
    }

    pub fn active(&mut self) -> (&[usize], &mut [UnitPlan]) {
        let n = self.n_units.min(self.units.len());
        (&self.spans, &mut self.units[..n])
    }
}

impl Plan for PaperPlan {
    fn fetched(&self, unit: usize) -> usize {
        self.units.get(unit).map_or(0, |unit| unit.fetched)
    }

    fn middle(&self, _: usize) -> usize {
        0
    }

    fn bytes(&self) -> u64 {
        let unit = |unit: &UnitPlan| {
            let zoomed: usize = unit.zoomed.iter().map(Vec::capacity).sum();
            let numbers = unit.scratch.products.capacity() + unit.scratch.bias.capacity();
            8 * (zoomed + unit.rebuilt.capacity()) + 4 * numbers
        };
        let units: usize = self.units.iter().map(unit).sum();
        (units + 8 * self.spans.capacity()) as u64
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
}
