//! The fast tier's budget, checked before a pass begins.

use super::context::Context;
use super::residents::Residents;
use super::sequence::Sequence;
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::params::FastBudget;
use crate::routing::{Counted, Remade};

/// Makes room for a pass that brings `new_tokens` (sequence, number of tokens): gives up dense
/// layers, then sketches, oldest first, as far as it takes. Where what must stay doesn't fit,
/// nothing changes.
pub fn fit(context: &mut Context, new_tokens: &[(usize, usize)]) -> Result<()> {
    let Some(budget) = budget_bytes(context, new_tokens) else { return Ok(()) };
    let [_, least] = bytes_after(context, new_tokens);
    if least > budget {
        fail!(Budget, "the fast tier needs at least {least} bytes, its budget is {budget}");
    }
    // What the pass itself seals shrinks when it is there, in `keep`.
    shrink(context, new_tokens, budget)
}

/// Brings what a pass has sealed within the budget.
pub fn keep(context: &mut Context) -> Result<()> {
    match budget_bytes(context, &[]) {
        Some(budget) => shrink(context, &[], budget),
        None => Ok(()),
    }
}

/// Shrinks one sequence after the other, until they fit or nothing is left to give up. What
/// several share is free when the last of them has given it up, so each gives up what the first
/// was asked for, and one round may not be enough.
fn shrink(context: &mut Context, new_tokens: &[(usize, usize)], budget: u64) -> Result<()> {
    let held = |context: &Context| bytes_after(context, new_tokens)[0];
    let mut remade = Remade::default();
    let mut at_first = held(context);
    loop {
        for index in 0..context.sequences.len() {
            let wanted = at_first.saturating_sub(budget);
            let excess = held(context).saturating_sub(budget).min(wanted);
            if excess == 0 {
                return Ok(());
            }
            context.with_team(|team, sequences| match &mut sequences[index] {
                Some(sequence) => sequence.sealed.shrink(team, excess, &mut remade).map(drop),
                None => Ok(()),
            })?;
        }
        let now = held(context);
        if now >= at_first {
            return Ok(());
        }
        at_first = now;
    }
}

fn budget_bytes(context: &Context, new_tokens: &[(usize, usize)]) -> Option<u64> {
    match context.fast_budget {
        FastBudget::Unlimited => None,
        FastBudget::Bytes(bytes) => Some(bytes),
        FastBudget::FractionOfF16(fraction) => {
            let held: usize = context.sequences.iter().flatten().map(Sequence::n_tokens).sum();
            let new: usize = new_tokens.iter().map(|&(_, n)| n).sum();
            let token = Residents::bytes_a_token(&context.model.geometry, RowCodec::F16);
            Some(((held + new) as f64 * token as f64 * f64::from(fraction.max(0.0))) as u64)
        }
    }
}

/// Fast-tier bytes at the end of the pass: as things are, and at the least.
fn bytes_after(context: &Context, new_tokens: &[(usize, usize)]) -> [u64; 2] {
    let mut bytes = [0, 0];
    let mut counted = [Counted::default(), Counted::default()];
    for (index, slot) in context.sequences.iter().enumerate() {
        let new = new_tokens.iter().find(|&&(i, _)| i == index).map_or(0, |&(_, n)| n);
        let fresh;
        let sequence = match slot {
            Some(sequence) => sequence,
            None if new == 0 => continue,
            None => {
                fresh = Sequence::new(&context.model, &context.params, &context.store);
                &fresh
            }
        };
        let [full, least] = sequence.bytes_after(new);
        bytes[0] += full + sequence.sealed.bytes(&mut counted[0]).fast();
        bytes[1] += least + sequence.sealed.minimum_bytes(&mut counted[1]);
    }
    bytes
}
