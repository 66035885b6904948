//! One sequence: its tokens' positions, the residents, and what is sealed.

mod operations;
mod state;

use std::sync::Arc;

use super::ahead::{Ahead, BlockRows, Sealer};
use super::pass::Staged;
use super::queries::QueryRing;
use super::residents::{OpenTokens, Residents, Stored};
use crate::error::{Error, Result};
use crate::kernels::RowCodec;
use crate::model::Model;
use crate::params::Params;
use crate::pool::Team;
use crate::routing::{self, OpenRows, SealedTokens};
use crate::store::SlowStore;

/// Resident rows are reserved in steps of this many.
const RESERVE_STEP: usize = 16;

/// Positions and surprisal are reserved in steps of this many tokens.
const METADATA_STEP: usize = 256;

pub struct Sequence {
    model: Arc<Model>,
    params: Arc<Params>,
    /// Ascending, gaps allowed.
    pub positions: Vec<i32>,
    /// In nats; NaN where the host has not said.
    pub surprisal: Vec<f32>,
    pub residents: Residents,
    /// Residents before the sealed tokens, where there are any.
    n_sinks: usize,
    pub sealed: Box<dyn SealedTokens>,
    /// Shared with copies until one side adds to it.
    pub queries: Arc<QueryRing>,
    /// The layout and the dense layers are settled: no more queries are kept.
    settled: bool,
    /// The last pass was part of a prompt.
    in_prompt: bool,
    /// The next block, where it is being made already.
    ahead: Option<Ahead>,
}

/// What a commit did besides appending.
#[derive(Default)]
pub struct Committed {
    pub sealed_tokens: usize,
    /// What was sealed had been made ahead of time.
    pub was_ahead: bool,
    /// Sealing failed; its tokens stay resident and are tried again.
    pub seal_error: Option<Error>,
}

impl Sequence {
    pub fn new(model: &Arc<Model>, params: &Arc<Params>, store: &SlowStore) -> Self {
        Self {
            model: Arc::clone(model),
            params: Arc::clone(params),
            positions: Vec::new(),
            surprisal: Vec::new(),
            residents: Residents::new(&model.geometry, RowCodec::F32),
            n_sinks: 0,
            sealed: routing::new_sequence(model, params, store),
            queries: Arc::default(),
            settled: false,
            in_prompt: false,
            ahead: None,
        }
    }

    pub fn n_tokens(&self) -> usize {
        self.positions.len()
    }

    pub fn last_position(&self) -> Option<i32> {
        self.positions.last().copied()
    }

    /// Sinks held: the first tokens, never sealed.
    fn n_sinks(&self) -> usize {
        self.n_sinks_of(self.n_tokens())
    }

    /// Sinks among `n_tokens`: where some are sealed, those before them, which are fewer when
    /// sinks were removed.
    fn n_sinks_of(&self, n_tokens: usize) -> usize {
        let wanted = if self.sealed.n_tokens() > 0 { self.n_sinks } else { self.params.n_sinks };
        wanted.min(n_tokens)
    }

    /// Whether the layout still wants queries.
    pub fn wants_queries(&self) -> bool {
        !self.settled
    }

    /// Tokens that have left the window, of `n_open` that are neither sinks nor sealed.
    fn beyond_window(&self, n_open: usize) -> usize {
        n_open.saturating_sub(self.params.window)
    }

    /// Reserves what `commit` will append, so that it cannot fail half way.
    pub fn reserve(&mut self, n_new: usize) -> Result<()> {
        let n_tokens = (self.n_tokens() + n_new).next_multiple_of(METADATA_STEP);
        self.positions.try_reserve_exact(n_tokens - self.positions.len())?;
        self.surprisal.try_reserve_exact(n_tokens - self.surprisal.len())?;
        let n_rows = if self.sealed.has_layout() {
            let n_open = self.residents.n_rows() + n_new - self.n_sinks();
            let sealed = self.beyond_window(n_open) / self.params.block_tokens;
            Self::rows_to_reserve(self.n_sinks() + n_open - sealed * self.params.block_tokens)
        } else {
            Self::rows_to_reserve(self.residents.n_rows() + n_new)
        };
        let n_rows = n_rows.max(self.residents.n_rows());
        self.residents.reserve_exactly(n_rows)
    }

    /// Resident rows that memory is held for, of `n_rows` in use.
    pub fn rows_to_reserve(n_rows: usize) -> usize {
        n_rows.next_multiple_of(RESERVE_STEP)
    }

    /// Takes over a pass's rows. `positions` and `surprisal` are theirs; room was reserved.
    pub fn commit(
        &mut self,
        team: &Team,
        staged: &Staged,
        positions: impl Iterator<Item = (i32, f32)>,
        is_prompt: bool,
    ) -> Committed {
        let first = self.n_tokens();
        for (position, surprisal) in positions {
            self.positions.push(position);
            self.surprisal.push(surprisal);
        }
        if self.wants_queries() {
            Arc::make_mut(&mut self.queries).settle(first, staged.n_rows(), true);
        }
        self.in_prompt = is_prompt;
        if self.sealed.has_layout() {
            self.seal_and_append(team, staged)
        } else {
            self.append_raw(team, staged, first);
            if self.n_tokens() >= self.params.layout_tokens {
                self.lay_out(team)
            } else {
                Committed::default()
            }
        }
    }

    fn append_raw(&mut self, team: &Team, staged: &Staged, first: usize) {
        let model = Arc::clone(&self.model);
        let source = StagedRows { staged, first };
        self.residents.append(team, &model.geometry, &source, first, staged.n_rows());
    }

    /// The layout point: everything so far is raw and resident. Chooses the layout, seals what has
    /// left the window from the raw rows, and rewrites the others, centred, in their codec.
    fn lay_out(&mut self, team: &Team) -> Committed {
        let model = Arc::clone(&self.model);
        let geometry = &model.geometry;
        let raw = std::mem::replace(
            &mut self.residents,
            Residents::new(geometry, self.params.resident_codec),
        );
        let (n_tokens, n_sinks) = (self.n_tokens(), self.n_sinks());
        let mut source = OpenTokens {
            residents: &raw,
            n_sinks,
            n_sealed: 0,
            stored: Stored::Whole,
            staged: None,
        };
        let mut committed = Committed::default();
        if let Err(e) = self.sealed.lay_out(team, &source, n_tokens, &*self.queries) {
            self.residents = raw;
            committed.seal_error = Some(e);
            return committed;
        }
        source.stored = Stored::BeforeCentres(OpenTokens::centres(geometry, &*self.sealed));
        let beyond = self.beyond_window(n_tokens - n_sinks);
        self.n_sinks = n_sinks;
        let surprisal = &self.surprisal[n_sinks..n_sinks + beyond];
        let n = self.sealed.sealable(beyond, surprisal, false);
        if n > 0 {
            match self.sealed.seal(team, &source, n_sinks, n, &self.surprisal[..n_sinks + n]) {
                Ok(()) => committed.sealed_tokens = n,
                Err(e) => committed.seal_error = Some(e),
            }
        }
        let n_sealed = self.sealed.n_tokens();
        let n_rows = Self::rows_to_reserve(n_tokens - n_sealed);
        if let Err(e) = self.residents.reserve_exactly(n_rows) {
            committed.seal_error = Some(e);
        }
        self.residents.append(team, geometry, &source, 0, n_sinks);
        let open = n_sinks + n_sealed;
        self.residents.append(team, geometry, &source, open, n_tokens - open);
        if !self.in_prompt {
            self.settle();
        }
        committed
    }

    /// Seals what has left the window, from residents and staged rows, and keeps the others.
    fn seal_and_append(&mut self, team: &Team, staged: &Staged) -> Committed {
        let mut committed = self.seal(team, Some(staged), false);
        let model = Arc::clone(&self.model);
        // Rows of the pass that were sealed at once never become resident.
        let n_before = self.n_tokens() - staged.n_rows();
        let sinks = n_before.min(self.n_sinks())..self.n_sinks();
        let window = n_before.max(self.n_sinks() + self.sealed.n_tokens())..self.n_tokens();
        let n_rows = self.residents.n_rows() + sinks.len() + window.len();
        if let Err(e) = self.residents.reserve_exactly(Self::rows_to_reserve(n_rows)) {
            committed.seal_error = Some(e);
        }
        let source = StagedRows { staged, first: n_before };
        for run in [sinks, window] {
            self.residents.append(team, &model.geometry, &source, run.start, run.len());
        }
        committed
    }

    /// Seals what has left the window. `force`: unknown surprisal is no reason to wait.
    pub fn seal(&mut self, team: &Team, staged: Option<&Staged>, force: bool) -> Committed {
        let mut committed = Committed::default();
        if !self.sealed.has_layout() {
            return committed;
        }
        let first = self.n_sinks() + self.sealed.n_tokens();
        let beyond = self.beyond_window(self.n_tokens() - first);
        let n = self.sealed.sealable(beyond, &self.surprisal[first..first + beyond], force);
        if n == 0 {
            return committed;
        }
        self.n_sinks = self.n_sinks();
        let source = OpenTokens {
            residents: &self.residents,
            n_sinks: self.n_sinks.min(self.residents.n_rows()),
            n_sealed: self.sealed.n_tokens(),
            stored: OpenTokens::stored_with(&self.residents, &self.model.geometry, &*self.sealed),
            staged,
        };
        let made = self.ahead.take().filter(|ahead| (ahead.first, ahead.n) == (first, n));
        let taken = match made.and_then(Ahead::take) {
            Some(made) => self.sealed.take_sealed(made),
            None => Ok(false),
        };
        committed.was_ahead = matches!(taken, Ok(true));
        let sealed = match taken {
            Ok(false) => self.sealed.seal(team, &source, first, n, &self.surprisal[..first + n]),
            taken => taken.map(drop),
        };
        if let Err(e) = sealed {
            committed.seal_error = Some(e);
            return committed;
        }
        committed.sealed_tokens = n;
        let row = self.n_sinks().min(self.residents.n_rows());
        self.residents.remove(row, n.min(self.residents.n_rows() - row));
        committed
    }

    /// Begins to make the next block while its tokens are in the window; a prompt seals many at
    /// once, on all threads. Only where all of it is resident as it came, and nothing that a block
    /// depends on is open.
    pub fn seal_ahead(&mut self, sealer: &Sealer) {
        let n = self.params.block_tokens;
        if self.in_prompt || !self.settled || self.residents.is_turned() {
            return;
        }
        let first = self.n_sinks() + self.sealed.n_tokens();
        if self.ahead.as_ref().is_some_and(|ahead| ahead.first == first) {
            return;
        }
        if first + n > self.n_tokens() || self.params.window < n {
            return;
        }
        let Some(work) = self.sealed.seal_work(first, n) else { return };
        let geometry = &self.model.geometry;
        let row = self.n_sinks();
        // Without memory for a copy the commit makes the block.
        let Ok(rows) = BlockRows::copy(geometry, &self.residents, first, row, n) else { return };
        self.ahead = sealer.start(first, rows, work);
    }

    /// The start of a pass: seals what waited for its surprisal, and, where a prompt has ended,
    /// settles the layers that its first tokens could not settle.
    pub fn before_pass(&mut self, team: &Team, is_prompt: bool) -> Committed {
        let mut committed = self.seal(team, None, true);
        if is_prompt {
            return committed;
        }
        if let Err(e) = self.end_prompt(team) {
            committed.seal_error = Some(e);
        }
        committed
    }

    /// Settles what the first tokens of a prompt could not, where one has ended.
    fn end_prompt(&mut self, team: &Team) -> Result<()> {
        if self.settled || !self.in_prompt || !self.sealed.has_layout() {
            return Ok(());
        }
        let (n_sinks, n_tokens) = (self.n_sinks(), self.n_tokens());
        let source = OpenTokens {
            residents: &self.residents,
            n_sinks,
            n_sealed: self.sealed.n_tokens(),
            stored: OpenTokens::stored_with(&self.residents, &self.model.geometry, &*self.sealed),
            staged: None,
        };
        let result = self.sealed.review(team, &source, n_sinks, n_tokens, &*self.queries);
        self.settle();
        result
    }

    fn settle(&mut self) {
        self.settled = true;
        self.queries = Arc::default();
    }

    /// Bytes of positions and surprisal, and of how far residents have moved.
    pub fn metadata_bytes(&self) -> u64 {
        let lists = self.positions.capacity() * 4 + self.surprisal.capacity() * 4;
        lists as u64 + self.residents.turn_bytes()
    }

    pub fn metadata_bytes_of(n_tokens: usize) -> u64 {
        n_tokens.next_multiple_of(METADATA_STEP) as u64 * 8
    }

    /// Fast-tier bytes, besides what is sealed already, after a pass of `n_new` tokens: all in
    /// full resolution, and at the least.
    pub fn bytes_after(&self, n_new: usize) -> [u64; 2] {
        let n_tokens = self.n_tokens() + n_new;
        let metadata = Self::metadata_bytes_of(n_tokens);
        let geometry = &self.model.geometry;
        let has_layout = self.sealed.has_layout();
        if !has_layout && n_tokens < self.params.layout_tokens {
            let rows = Self::rows_to_reserve(n_tokens) as u64;
            let bytes = metadata + rows * Residents::bytes_a_token(geometry, RowCodec::F32);
            return [bytes, bytes];
        }
        let n_sinks = self.n_sinks_of(n_tokens);
        let n_open = n_tokens - n_sinks - self.sealed.n_tokens();
        let blocks = self.beyond_window(n_open) / self.params.block_tokens;
        let n_seal = blocks * self.params.block_tokens;
        let rows = Self::rows_to_reserve(n_tokens - self.sealed.n_tokens() - n_seal) as u64;
        let layout = if has_layout { 0 } else { self.sealed.estimate(0).layout };
        let fixed = metadata
            + layout
            + rows * Residents::bytes_a_token(geometry, self.params.resident_codec);
        let [full, least] = self.sealed.bytes_to_seal(n_seal);
        [fixed + full, fixed + least]
    }
}

/// Staged rows as tokens of the sequence, from index `first` on.
struct StagedRows<'a> {
    staged: &'a Staged,
    first: usize,
}

impl OpenRows for StagedRows<'_> {
    fn read(&self, layer: usize, head: usize, token: usize, key: &mut [f32], value: &mut [f32]) {
        key.copy_from_slice(self.staged.key(layer, head, token - self.first));
        value.copy_from_slice(self.staged.value(layer, head, token - self.first));
    }
}
