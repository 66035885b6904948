//! Plans that a host asked for: a route's result, kept until an attend uses it.

use std::collections::HashMap;

use crate::attend::SoftmaxState;
use crate::error::{Result, fail};
use crate::routing::Plan;

/// Names a plan within its context; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanId(pub u64);

/// One sequence's part of a plan.
pub struct PlanPart {
    pub states: Vec<SoftmaxState>,
    pub plan: Box<dyn Plan>,
    pub n_units: usize,
}

/// A route's result, for one layer of one pass.
pub struct StoredPlan {
    pub layer: usize,
    /// The queries it was made from; attend scores anew for any other.
    pub q: Vec<f32>,
    /// Made after the layer's ingest: attend may use it as it is.
    pub complete: bool,
    /// One for each of the pass's sequences; None where many queries attend over tiles.
    pub parts: Vec<Option<PlanPart>>,
}

/// The plans of the running pass.
#[derive(Default)]
pub struct Plans {
    next: u64,
    plans: HashMap<u64, StoredPlan>,
}

/// Plans of one pass at the most, so that a host that never frees them is told.
const MAX_PLANS: usize = 65_536;

impl Plans {
    pub fn insert(&mut self, plan: StoredPlan) -> Result<PlanId> {
        if self.plans.len() >= MAX_PLANS {
            fail!(Memory, "{MAX_PLANS} plans are alive in this pass, free those that were used");
        }
        self.next += 1;
        self.plans.insert(self.next, plan);
        Ok(PlanId(self.next))
    }

    pub fn get(&self, id: PlanId) -> Result<&StoredPlan> {
        match self.plans.get(&id.0) {
            Some(plan) => Ok(plan),
            None => {
                fail!(Order, "the plan is gone: plans live until they are freed, or the pass ends")
            }
        }
    }

    pub fn get_mut(&mut self, id: PlanId) -> Option<&mut StoredPlan> {
        self.plans.get_mut(&id.0)
    }

    pub fn remove(&mut self, id: PlanId) {
        self.plans.remove(&id.0);
    }

    /// The pass has ended.
    pub fn clear(&mut self) {
        self.plans.clear();
    }
}
