//! Operations on whole sequences between passes.

use super::budget;
use super::context::{Context, check_surprisal};
use crate::error::{Result, fail};
use crate::pool::Team;

impl Context {
    /// Removes tokens with positions in `first..end` (negative `first`: from the start; negative
    /// `end`: to the end) from a sequence, or from all where `id` is negative. An empty range
    /// removes nothing. On an error nothing changes.
    pub fn remove(&mut self, id: i32, first: i32, end: i32) -> Result<()> {
        self.require_no_pass("seq_rm")?;
        let indices = if id < 0 {
            0..self.sequences.len()
        } else {
            let index = self.sequence_index(id)?;
            index..index + 1
        };
        let mut cuts = Vec::new();
        for index in indices {
            let Some(sequence) = &self.sequences[index] else { continue };
            let tokens = sequence.tokens_at(first, end);
            if tokens.is_empty() {
                continue;
            }
            cuts.push((index, tokens));
        }
        self.with_team(|team: &Team, sequences| {
            let mut removals = Vec::with_capacity(cuts.len());
            for (index, tokens) in cuts {
                let Some(sequence) = &mut sequences[index] else { continue };
                let is_whole = tokens.len() == sequence.n_tokens();
                let removal = (!is_whole).then(|| sequence.prepare_removal(team, tokens));
                removals.push((index, removal.transpose()?));
            }
            for (index, removal) in removals {
                match (&mut sequences[index], removal) {
                    (Some(sequence), Some(removal)) => sequence.remove(team, removal),
                    (sequence, _) => *sequence = None,
                }
            }
            Result::Ok(())
        })?;
        // Rows of a block that was cut, which could not be read again.
        self.store.take_fault()
    }

    /// Copies the tokens with positions in `first..end` (negative: as in [`Self::remove`]) of one
    /// sequence to another, which is empty. What is sealed is shared, not copied.
    pub fn copy(&mut self, from: i32, to: i32, first: i32, end: i32) -> Result<()> {
        self.require_no_pass("seq_cp")?;
        let (from_index, to_index) = (self.sequence_index(from)?, self.sequence_index(to)?);
        if from_index == to_index {
            return Ok(());
        }
        let Some(source) = &self.sequences[from_index] else { return Ok(()) };
        let tokens = source.tokens_at(first, end);
        if tokens.is_empty() {
            return Ok(());
        }
        if let Some(last) = self.position_max(to).ok().filter(|&last| last >= 0) {
            fail!(
                Unsupported,
                "sequence {to} holds tokens up to position {last}, expected an empty one to copy \
                 sequence {from} to: remove them first"
            );
        }
        let copy = self.with_team(|team, sequences| match &mut sequences[from_index] {
            Some(source) => {
                let mut copy = source.copy(team)?;
                for gone in [tokens.end..copy.n_tokens(), 0..tokens.start] {
                    if !gone.is_empty() {
                        let removal = copy.prepare_removal(team, gone)?;
                        copy.remove(team, removal);
                    }
                }
                Ok(copy)
            }
            None => fail!(Internal, "sequence {from} vanished"),
        })?;
        self.sequences[to_index] = Some(copy);
        let fits = budget::fit(self, &[]);
        if fits.is_err() {
            self.sequences[to_index] = None;
        }
        fits
    }

    /// Moves tokens with positions in `first..end` (negative: as in [`Self::remove`]) by `delta`
    /// positions. They must land between the sequence's other tokens, where they were, at 0 or
    /// above. On an error nothing changes.
    pub fn shift(&mut self, id: i32, first: i32, end: i32, delta: i32) -> Result<()> {
        self.require_no_pass("seq_add")?;
        let index = self.sequence_index(id)?;
        let Some(sequence) = &self.sequences[index] else { return Ok(()) };
        let tokens = sequence.tokens_at(first, end);
        if tokens.is_empty() || delta == 0 {
            return Ok(());
        }
        let positions = &sequence.positions;
        let (lowest, highest) = (positions[tokens.start], positions[tokens.end - 1]);
        let [new_lowest, new_highest] = [lowest, highest].map(|p| i64::from(p) + i64::from(delta));
        if new_lowest < 0 || new_highest > i64::from(i32::MAX) {
            fail!(
                Position,
                "a shift by {delta} would bring positions {lowest} to {highest} of sequence {id} \
                 to {new_lowest} to {new_highest}, expected 0 to {}",
                i32::MAX
            );
        }
        let before = tokens.start.checked_sub(1).map(|token| positions[token]);
        let after = positions.get(tokens.end).copied();
        let is_above = before.is_none_or(|before| i64::from(before) < new_lowest);
        let is_below = after.is_none_or(|after| new_highest < i64::from(after));
        if let Some(other) = before.filter(|_| !is_above).or(after.filter(|_| !is_below)) {
            fail!(
                Position,
                "a shift by {delta} would bring positions {lowest} to {highest} of sequence {id} \
                 to {new_lowest} to {new_highest}, onto or past its token at {other}"
            );
        }
        self.with_team(|team, sequences| match &mut sequences[index] {
            Some(sequence) => sequence.shift(team, tokens, delta),
            None => fail!(Internal, "sequence {id} vanished"),
        })
    }

    /// Whether [`Self::shift`] moves any token: every model that is served has RoPE whose angles
    /// are linear in the position, or none.
    pub fn can_shift(&self) -> bool {
        true
    }

    /// Dividing positions is not served: every token would move by another distance, and several
    /// would share a position. Where nothing would change it succeeds.
    pub fn divide(&mut self, id: i32, first: i32, end: i32, divisor: i32) -> Result<()> {
        self.require_no_pass("seq_div")?;
        let index = self.sequence_index(id)?;
        if divisor < 1 {
            fail!(Argument, "the divisor is {divisor}, expected 1 or more");
        }
        let Some(sequence) = &self.sequences[index] else { return Ok(()) };
        if divisor == 1 || sequence.tokens_at(first, end).is_empty() {
            return Ok(());
        }
        fail!(
            Unsupported,
            "positions cannot be divided, by {divisor} or any other number: several tokens of \
             sequence {id} would share a position"
        )
    }

    /// Removes every token of every other sequence.
    pub fn keep(&mut self, id: i32) -> Result<()> {
        self.require_no_pass("seq_keep")?;
        let kept = self.sequence_index(id)?;
        for (index, sequence) in self.sequences.iter_mut().enumerate() {
            if index != kept {
                *sequence = None;
            }
        }
        Ok(())
    }

    /// Removes every token of every sequence.
    pub fn clear(&mut self) -> Result<()> {
        self.require_no_pass("clear")?;
        self.sequences.iter_mut().for_each(|sequence| *sequence = None);
        Ok(())
    }

    /// Smallest position of a sequence; -1 where it is empty.
    pub fn position_min(&self, id: i32) -> Result<i32> {
        let sequence = &self.sequences[self.sequence_index(id)?];
        Ok(sequence.as_ref().and_then(|s| s.positions.first().copied()).unwrap_or(-1))
    }

    /// Largest position of a sequence; -1 where it is empty.
    pub fn position_max(&self, id: i32) -> Result<i32> {
        let sequence = &self.sequences[self.sequence_index(id)?];
        Ok(sequence.as_ref().and_then(|s| s.last_position()).unwrap_or(-1))
    }

    /// Surprisal that comes after its tokens' commit: `values[i]` belongs to the i-th token from
    /// position `first` on.
    pub fn set_surprisal(&mut self, id: i32, first: i32, values: &[f32]) -> Result<()> {
        self.require_no_pass("surprisal")?;
        check_surprisal(values)?;
        let index = self.sequence_index(id)?;
        let Some(sequence) = &mut self.sequences[index] else {
            fail!(Sequence, "sequence {id} is empty, there is no token to give surprisal to");
        };
        let start = sequence.positions.partition_point(|&p| p < first);
        let room = sequence.n_tokens() - start;
        if values.len() > room {
            fail!(
                Argument,
                "{} surprisals were given from position {first} on, sequence {id} has {room} tokens \
                 there",
                values.len()
            );
        }
        sequence.surprisal[start..start + values.len()].copy_from_slice(values);
        Ok(())
    }
}
