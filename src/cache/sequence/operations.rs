//! One sequence's part in copying, removing and shifting.

use std::ops::Range;
use std::sync::Arc;

use super::{METADATA_STEP, Sequence};
use crate::error::Result;
use crate::model::RopeKind;
use crate::pool::Team;
use crate::routing::{OpenRows, SealedTokens};

/// A removal that nothing can prevent any more.
pub struct Removal {
    tokens: Range<usize>,
    /// The sealed tokens without those, where some of them go and later ones stay.
    sealed: Option<Box<dyn SealedTokens>>,
}

/// Some of a sequence's tokens, by where they are kept: numbers of sealed tokens, and of residents
/// before and behind them.
struct Places {
    sealed: Range<usize>,
    sinks: Range<usize>,
    window: Range<usize>,
}

impl Sequence {
    /// Tokens with positions in `first..end`; negative: from the start, to the end.
    pub fn tokens_at(&self, first: i32, end: i32) -> Range<usize> {
        let start = self.positions.partition_point(|&p| p < first);
        let end = match end {
            ..0 => self.n_tokens(),
            end => self.positions.partition_point(|&p| p < end),
        };
        start..end.max(start)
    }

    fn places(&self, tokens: &Range<usize>) -> Places {
        let (n_sinks, n_sealed) = (self.n_sinks(), self.sealed.n_tokens());
        let inside = |from: usize, to: usize, less: usize| {
            tokens.start.clamp(from, to) - less..tokens.end.clamp(from, to) - less
        };
        Places {
            sealed: inside(n_sinks, n_sinks + n_sealed, n_sinks),
            sinks: inside(0, n_sinks, 0),
            window: inside(n_sinks + n_sealed, self.n_tokens(), n_sealed),
        }
    }

    /// A copy, which shares what is sealed. A prompt that is copied has ended: what its end settles
    /// is settled once, before, and serves all copies.
    pub fn copy(&mut self, team: &Team) -> Result<Self> {
        self.end_prompt(team)?;
        let n_metadata = self.n_tokens().next_multiple_of(METADATA_STEP);
        let (mut positions, mut surprisal) = (Vec::new(), Vec::new());
        positions.try_reserve_exact(n_metadata)?;
        positions.extend_from_slice(&self.positions);
        surprisal.try_reserve_exact(n_metadata)?;
        surprisal.extend_from_slice(&self.surprisal);
        Ok(Self {
            model: Arc::clone(&self.model),
            params: Arc::clone(&self.params),
            positions,
            surprisal,
            residents: self.residents.copy(Self::rows_to_reserve(self.residents.n_rows()))?,
            n_sinks: self.n_sinks,
            sealed: self.sealed.share(),
            queries: Arc::clone(&self.queries),
            settled: self.settled,
            in_prompt: self.in_prompt,
            ahead: None,
        })
    }

    /// Does all of a removal that can fail, beside the sequence.
    pub fn prepare_removal(&mut self, team: &Team, tokens: Range<usize>) -> Result<Removal> {
        let places = self.places(&tokens);
        let mut sealed = None;
        if tokens.end == self.n_tokens() {
            let n_reopened = self.sealed_tail(tokens.start).len();
            let n_rows = Self::rows_to_reserve(self.n_sinks() + n_reopened);
            if n_reopened > 0 && n_rows > self.residents.n_rows() {
                self.residents.reserve_exactly(n_rows)?;
            }
        } else if !places.sealed.is_empty() {
            let gone = places.sealed;
            sealed = Some(self.sealed.without(team, gone.start, gone.len())?);
        }
        Ok(Removal { tokens, sealed })
    }

    pub fn remove(&mut self, team: &Team, removal: Removal) {
        let Removal { tokens, sealed } = removal;
        if self.ahead.as_ref().is_some_and(|ahead| tokens.start < ahead.first + ahead.n) {
            self.ahead = None;
        }
        if tokens.end == self.n_tokens() {
            return self.truncate(team, tokens.start);
        }
        let Places { sinks, window, .. } = self.places(&tokens);
        let n_sinks = self.n_sinks() - sinks.len();
        self.residents.remove(window.start, window.len());
        self.residents.remove(sinks.start, sinks.len());
        if let Some(sealed) = sealed {
            self.sealed = sealed;
        }
        self.n_sinks = n_sinks;
        self.positions.drain(tokens.clone());
        self.surprisal.drain(tokens);
        // Those that are held go by their tokens' numbers.
        self.queries = Arc::default();
    }

    /// Keeps the first `n_keep` tokens. Sealed tokens of a block that is cut become residents
    /// again, so that blocks stay as long as they are.
    fn truncate(&mut self, team: &Team, n_keep: usize) {
        let model = Arc::clone(&self.model);
        let (n_sinks, n_sealed) = (self.n_sinks(), self.sealed.n_tokens());
        if n_keep >= n_sinks + n_sealed {
            let rows = n_keep - n_sealed;
            self.residents.remove(rows, self.residents.n_rows() - rows);
        } else if n_keep < n_sinks {
            self.residents.remove(n_keep, self.residents.n_rows() - n_keep);
            self.sealed.truncate(0);
        } else {
            let reopened = self.sealed_tail(n_keep);
            self.residents.remove(n_sinks, self.residents.n_rows() - n_sinks);
            let (first, n) = (n_sinks + reopened.start, reopened.len());
            let source = SealedRows { sealed: &*self.sealed, n_sinks };
            self.residents.append(team, &model.geometry, &source, first, n);
            self.sealed.truncate(reopened.start);
        }
        self.positions.truncate(n_keep);
        self.surprisal.truncate(n_keep);
        if self.queries.reach_beyond(n_keep) {
            Arc::make_mut(&mut self.queries).truncate(n_keep);
        }
    }

    /// Sealed tokens below token `n_keep` whose block or span reaches beyond it.
    fn sealed_tail(&self, n_keep: usize) -> Range<usize> {
        let n_kept = n_keep.saturating_sub(self.n_sinks()).min(self.sealed.n_tokens());
        self.sealed.cut_below(n_kept)..n_kept
    }

    /// Moves tokens by `delta` positions, which are free. On an error nothing changes.
    pub fn shift(&mut self, team: &Team, tokens: Range<usize>, delta: i32) -> Result<()> {
        let model = Arc::clone(&self.model);
        self.ahead = None;
        // Keys without RoPE are the same at every position.
        if model.geometry.rope != RopeKind::None {
            let Places { sealed, sinks, window } = self.places(&tokens);
            if !sealed.is_empty() {
                self.sealed = self.sealed.shifted(team, sealed.start, sealed.len(), delta)?;
            }
            for rows in [sinks, window].into_iter().filter(|rows| !rows.is_empty()) {
                self.residents.shift(&model.geometry, rows, delta);
            }
            // They were asked at the old positions.
            self.queries = Arc::default();
        }
        self.positions[tokens].iter_mut().for_each(|position| *position += delta);
        Ok(())
    }
}

/// Sealed tokens, read back.
struct SealedRows<'a> {
    sealed: &'a dyn SealedTokens,
    n_sinks: usize,
}

impl OpenRows for SealedRows<'_> {
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        self.sealed.read(layer, head, token - self.n_sinks, 1, key, value);
    }
}
