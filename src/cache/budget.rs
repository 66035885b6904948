//! The fast tier's budget, checked before a pass begins.

use super::context::Context;
use super::residents::Residents;
use super::sequence::Sequence;
use crate::error::{Result, fail};
use crate::kernels::RowCodec;
use crate::params::FastBudget;

/// Makes room for a pass that brings `new_tokens` (sequence, number of tokens): gives up dense
/// layers, then sketches, oldest first, as far as it takes. Where what must stay doesn't fit,
/// nothing changes.
pub fn fit(context: &mut Context, new_tokens: &[(usize, usize)]) -> Result<()> {
    let Some(budget) = budget_bytes(context, new_tokens) else { return Ok(()) };
    let [needed, least] = bytes_after(context, new_tokens);
    if least > budget {
        fail!(
            Budget,
            "the fast tier needs at least {least} bytes for this pass, its budget is {budget}"
        );
    }
    // What the pass itself seals shrinks when it is there, in `keep`.
    shrink(context, needed.saturating_sub(budget))
}

/// Brings what a pass has sealed within the budget.
pub fn keep(context: &mut Context) -> Result<()> {
    let Some(budget) = budget_bytes(context, &[]) else { return Ok(()) };
    let [held, _] = bytes_after(context, &[]);
    shrink(context, held.saturating_sub(budget))
}

fn shrink(context: &mut Context, mut excess: u64) -> Result<()> {
    context.with_team(|team, sequences| {
        for sequence in sequences.iter_mut().flatten() {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(sequence.sealed.shrink(team, excess)?);
        }
        Ok(())
    })
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
        bytes[0] += full + sequence.sealed.bytes().fast();
        bytes[1] += least + sequence.sealed.minimum_bytes();
    }
    bytes
}
