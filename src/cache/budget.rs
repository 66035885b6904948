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
    let needed = bytes_after(context, new_tokens, |sequence| sequence.sealed.bytes().fast());
    if needed <= budget {
        return Ok(());
    }
    let least = bytes_after(context, new_tokens, |sequence| sequence.sealed.minimum_bytes());
    if least > budget {
        fail!(
            Budget,
            "the fast tier needs at least {least} bytes for this pass, its budget is {budget}"
        );
    }
    let mut excess = needed - budget;
    let freed = context.with_team(|team, sequences| {
        let mut freed = 0;
        for sequence in sequences.iter_mut().flatten() {
            if excess == 0 {
                break;
            }
            let part = sequence.sealed.shrink(team, excess)?;
            excess = excess.saturating_sub(part);
            freed += part;
        }
        Ok::<u64, crate::error::Error>(freed)
    })?;
    if needed.saturating_sub(freed) > budget {
        fail!(
            Budget,
            "the fast tier needs {} bytes for this pass, its budget is {budget}",
            needed - freed
        );
    }
    Ok(())
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

/// Fast-tier bytes at the end of the pass, `sealed` telling those of what is sealed already.
fn bytes_after(
    context: &Context,
    new_tokens: &[(usize, usize)],
    sealed: impl Fn(&Sequence) -> u64,
) -> u64 {
    let geometry = &context.model.geometry;
    let mut bytes = 0;
    for (index, slot) in context.sequences.iter().enumerate() {
        let new = new_tokens.iter().find(|&&(i, _)| i == index).map_or(0, |&(_, n)| n);
        match slot {
            Some(sequence) => {
                bytes += sealed(sequence) + sequence.bytes_after(new);
            }
            None => bytes += new as u64 * Residents::bytes_a_token(geometry, RowCodec::F32),
        }
    }
    bytes
}
